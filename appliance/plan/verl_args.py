"""verl's configuration for a run, as Hydra overrides of its plan. No other file knows verl's key names (verl 0.9.1).

A test composes verl's own configuration with these and compares every value and its type.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from appliance.record.plan import RunPlan

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
VLLM = f"{ROLLOUT}.engine_kwargs.vllm"
ENTRY_MODULE = "appliance.trainer.entry"
REWARDS_FILE = Path(__file__).resolve().parents[1] / "trainer" / "rewards.py"
FILTER_METRIC = "acc"  # of reward_extra_info, by trainer/rollouts.py: the grade, not the reward with its penalty
WORKER_EXTENSION = "appliance.engine.sync.SyncWorkerExtension"

_BARE = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_NOT_BARE = frozenset({"null", "true", "false", "nan", "inf"})

Value = None | bool | int | float | str | list[str]


@dataclass(frozen=True)
class Override:
    """One Hydra override. added: the key is not in verl's configuration and is appended with `+`."""

    key: str
    value: Value
    added: bool = False

    @property
    def text(self) -> str:
        return f"{'+' if self.added else ''}{self.key}={hydra_value(self.value)}"


def hydra_value(value: Value) -> str:
    """In Hydra's override grammar. Text is quoted unless it can only read as text."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return json.dumps(value)
    if isinstance(value, list):
        return "[" + ",".join(hydra_value(each) for each in value) + "]"
    return value if _BARE.fullmatch(value) and value.lower() not in _NOT_BARE else _quoted(value)


def _quoted(text: str) -> str:
    """Backslashes count only before `${` (OmegaConf) and before a quote or the end (Hydra): double them there."""
    text = re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + "\\${", text)
    text = re.sub(r"(\\+)(?='|\Z)", lambda match: match[1] * 2, text)
    return "'" + text.replace("'", "\\'") + "'"


def argv(plan: RunPlan) -> tuple[str, ...]:
    """The command line of the child that trains."""
    return (sys.executable, "-m", ENTRY_MODULE, *(each.text for each in overrides(plan)))


def overrides(plan: RunPlan) -> list[Override]:
    """Everything verl is told, in the order of its configuration."""
    parts = (_algorithm, _data, _model, _actor, _rollout, _engine, _reward, _trainer, _resume)
    return [each for part in parts for each in part(plan)]


def _algorithm(plan: RunPlan) -> list[Override]:
    """verl's own correction is off, key by key: trainer/correction.py corrects, and no default of verl's may."""
    correction = "algorithm.rollout_correction"
    return [
        Override("algorithm.adv_estimator", "grpo"),
        Override("algorithm.use_kl_in_reward", False),
        Override("algorithm.filter_groups.enable", plan.algorithm.filters),
        Override("algorithm.filter_groups.metric", FILTER_METRIC),
        Override("algorithm.filter_groups.max_inflight_gen_batches", plan.algorithm.generation_batches),
        Override(f"{correction}.rollout_is", None),
        Override(f"{correction}.rollout_is_threshold", None),
        Override(f"{correction}.rollout_is_batch_normalize", False),
        Override(f"{correction}.rollout_rs", None),
        Override(f"{correction}.rollout_rs_threshold", None),
        Override(f"{correction}.bypass_mode", False),
    ]


def _data(plan: RunPlan) -> list[Override]:
    return [
        Override("data.train_files", plan.task.train_parquet),
        Override("data.val_files", plan.task.val_parquet),
        Override("data.train_batch_size", plan.prompts_per_step),
        Override("data.max_prompt_length", plan.task.max_prompt_tokens),
        Override("data.max_response_length", plan.task.max_response_tokens),
        Override("data.truncation", "left" if plan.task.truncate_prompts else "error"),
        Override("data.seed", plan.seed),
        Override("data.shuffle", True),
        Override("data.validation_shuffle", False),
        Override("data.dataloader_num_workers", 0),  # a process each, for a file of kilobytes
        Override("data.trust_remote_code", plan.model.trust_remote_code),
    ]


def _model(plan: RunPlan) -> list[Override]:
    return [
        Override(f"{MODEL}.path", plan.trained_model),
        Override(f"{MODEL}.trust_remote_code", plan.model.trust_remote_code),
        Override(f"{MODEL}.use_remove_padding", plan.trainer.packed),
        Override(f"{MODEL}.enable_gradient_checkpointing", plan.trainer.gradient_checkpointing),
        Override(f"{MODEL}.override_config.attn_implementation", plan.trainer.attention, added=True),
    ]


def _actor(plan: RunPlan) -> list[Override]:
    trainer, optimizer = plan.trainer, plan.optimizer
    return [
        Override(f"{ACTOR}.strategy", "fsdp2"),
        Override("actor_rollout_ref.ref.strategy", "fsdp2"),
        Override(f"{ACTOR}.use_kl_loss", False),
        Override(f"{ACTOR}.use_torch_compile", not plan.is_cpu),
        Override(f"{ACTOR}.fsdp_config.use_torch_compile", not plan.is_cpu),
        Override(f"{ACTOR}.fsdp_config.seed", plan.seed),
        Override(f"{ACTOR}.data_loader_seed", plan.seed),
        Override(f"{ACTOR}.policy_loss.loss_mode", "vanilla"),
        Override(f"{ACTOR}.clip_ratio_low", plan.correction.clip_low),
        Override(f"{ACTOR}.clip_ratio_high", plan.correction.clip_high),
        Override(f"{ACTOR}.clip_ratio_c", plan.algorithm.dual_clip),
        Override(f"{ACTOR}.loss_agg_mode", "token-mean"),  # verl's default, and DAPO's
        Override(f"{ACTOR}.entropy_coeff", 0.0),
        Override(f"{ACTOR}.fsdp_config.param_offload", trainer.offload_parameters),
        Override(f"{ACTOR}.fsdp_config.optimizer_offload", trainer.offload_optimizer),
        Override(f"{ACTOR}.ppo_mini_batch_size", trainer.mini_batch_prompts),
        Override(f"{ACTOR}.ppo_micro_batch_size_per_gpu", trainer.micro_batch_sequences),
        Override(f"{ACTOR}.use_dynamic_bsz", trainer.max_tokens_per_gpu is not None),
        Override(f"{ACTOR}.ppo_max_token_len_per_gpu", trainer.max_tokens_per_gpu or plan.engine.max_batched_tokens),
        Override(f"{ACTOR}.ulysses_sequence_parallel_size", trainer.sequence_parallel),
        Override(f"{ACTOR}.optim.lr", optimizer.learning_rate),
        Override(f"{ACTOR}.optim.weight_decay", optimizer.weight_decay),
        Override(f"{ACTOR}.optim.lr_warmup_steps", optimizer.warmup_steps),
        Override(f"{ACTOR}.optim.lr_warmup_steps_ratio", 0.0),
        Override(f"{ACTOR}.optim.clip_grad", optimizer.max_grad_norm),
        Override(f"{ACTOR}.checkpoint.save_contents", ["model", "optimizer", "extra", "hf_model"]),
    ]


def _rollout(plan: RunPlan) -> list[Override]:
    rollout = plan.rollout
    return [
        Override(f"{ROLLOUT}.name", "vllm"),
        Override(f"{ROLLOUT}.n", rollout.samples_per_prompt),
        Override(f"{ROLLOUT}.temperature", rollout.temperature),
        Override(f"{ROLLOUT}.top_p", rollout.top_p),
        Override(f"{ROLLOUT}.seed", plan.seed),
        Override(f"{ROLLOUT}.calculate_log_probs", True),
        Override(f"{ROLLOUT}.logprobs_mode", "processed_logprobs"),  # after temperature, as the trainer's
        Override(f"{ROLLOUT}.enable_chunked_prefill", plan.engine.chunked_prefill),
        Override(f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", plan.trainer.micro_batch_sequences),
        Override(f"{ROLLOUT}.agent.num_workers", plan.engine.num_agent_workers),
        Override(f"{ROLLOUT}.val_kwargs.do_sample", False),
        Override(f"{ROLLOUT}.val_kwargs.temperature", 0.0),
        Override(f"{ROLLOUT}.val_kwargs.top_p", 1.0),
        Override(f"{ROLLOUT}.val_kwargs.n", 1),
    ]


def _engine(plan: RunPlan) -> list[Override]:
    sleeps = not plan.is_cpu  # vLLM's sleep mode frees GPU memory
    # What each engine quantises is not here: verl has one place for all replicas, see engine/replica.py.
    one_process = plan.is_cpu and plan.rollout.tensor_parallel == 1  # a worker of its own costs 6 s and 0.6 GB
    return [
        Override(f"{ROLLOUT}.tensor_model_parallel_size", plan.rollout.tensor_parallel),
        Override(f"{ROLLOUT}.gpu_memory_utilization", plan.trainer.gpu_memory_utilization),
        Override(f"{ROLLOUT}.enforce_eager", plan.rollout.eager),
        Override(f"{ROLLOUT}.free_cache_engine", sleeps),
        Override(f"{ROLLOUT}.enable_sleep_mode", sleeps, added=True),
        Override(f"{ROLLOUT}.load_format", "auto"),
        Override(f"{ROLLOUT}.max_model_len", plan.engine.max_model_tokens),
        Override(f"{ROLLOUT}.max_num_seqs", plan.engine.max_concurrent_sequences),
        Override(f"{ROLLOUT}.max_num_batched_tokens", plan.engine.max_batched_tokens),
        Override(f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes", plan.engine.bucket_mib),
        Override(f"{VLLM}.worker_extension_cls", WORKER_EXTENSION, added=True),
        Override(f"{VLLM}.distributed_executor_backend", "uni" if one_process else "mp", added=True),
    ]


def _reward(plan: RunPlan) -> list[Override]:
    return [
        Override("reward.num_workers", 0),  # trainer/rollouts.py scores where the samples arrive
        Override("reward.custom_reward_function.path", str(REWARDS_FILE)),
        Override("reward.custom_reward_function.name", "compute_score"),
    ]


def _trainer(plan: RunPlan) -> list[Override]:
    return [
        Override("trainer.device", "cpu" if plan.is_cpu else "cuda"),
        Override("trainer.nnodes", plan.nodes),
        Override("trainer.n_gpus_per_node", plan.gpus_per_node),
        Override("trainer.logger", list(plan.logging_backends)),
        Override("trainer.project_name", "appliance"),
        Override("trainer.experiment_name", plan.name),
        Override("trainer.total_training_steps", plan.steps),
        Override("trainer.total_epochs", plan.steps),  # an epoch is a step at least: `steps` decides
        Override("trainer.test_freq", plan.validate_every),
        Override("trainer.save_freq", -1),  # trainer/checkpoints.py saves, when a step's metrics are written
        Override("trainer.default_local_dir", str(Path(plan.run_dir) / "checkpoints")),
        Override("transfer_queue.backend.SimpleStorage.num_data_storage_units", 1 if plan.is_cpu else 8),
    ]


def _resume(plan: RunPlan) -> list[Override]:
    """Never verl's own search: it crashes on an empty tracker file and starts anew on one that names no folder.

    A step that is resumed from was validated, where it was due, before it was saved.
    """
    if not plan.resume_from:
        return [
            Override("trainer.val_before_train", plan.validate_before),
            Override("trainer.resume_mode", "disable"),
        ]
    return [
        Override("trainer.val_before_train", False),
        Override("trainer.resume_mode", "resume_path"),
        Override("trainer.resume_from_path", plan.resume_from),
    ]
