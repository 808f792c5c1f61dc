"""verl's configuration for a run, as Hydra overrides. The only file that knows verl's key names (verl 0.9.1).

A test composes verl's own configuration with these and compares every value and its type.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from appliance.plan.derive import Derived
from appliance.recipe.schema import AlgorithmKind, LongPrompts, Recipe

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
VLLM = f"{ROLLOUT}.engine_kwargs.vllm"
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


def overrides(recipe: Recipe, derived: Derived, *, resume_from: Path | None = None) -> list[Override]:
    """Everything verl is told, in the order of its configuration. resume_from: the checkpoint that it loads."""
    parts = (_algorithm, _data, _model, _actor, _rollout, _engine, _reward, _trainer)
    return [*(each for part in parts for each in part(recipe, derived)), *_resume(recipe, resume_from)]


def _algorithm(recipe: Recipe, derived: Derived) -> list[Override]:
    """verl's own correction is off, key by key: trainer/correction.py corrects, and no default of verl's may."""
    correction = "algorithm.rollout_correction"
    return [
        Override("algorithm.adv_estimator", "grpo"),
        Override("algorithm.use_kl_in_reward", False),
        Override("algorithm.filter_groups.enable", recipe.algorithm.kind is AlgorithmKind.DAPO),
        Override("algorithm.filter_groups.metric", FILTER_METRIC),
        Override("algorithm.filter_groups.max_inflight_gen_batches", derived.generation_batches),
        Override(f"{correction}.rollout_is", None),
        Override(f"{correction}.rollout_is_threshold", None),
        Override(f"{correction}.rollout_is_batch_normalize", False),
        Override(f"{correction}.rollout_rs", None),
        Override(f"{correction}.rollout_rs_threshold", None),
        Override(f"{correction}.bypass_mode", False),
    ]


def _data(recipe: Recipe, derived: Derived) -> list[Override]:
    return [
        Override("data.train_files", derived.train_parquet),
        Override("data.val_files", derived.val_parquet),
        Override("data.train_batch_size", recipe.batch.prompts_per_step),
        Override("data.max_prompt_length", recipe.task.max_prompt_tokens),
        Override("data.max_response_length", recipe.task.max_response_tokens),
        Override("data.truncation", "left" if recipe.task.long_prompts is LongPrompts.TRUNCATE else "error"),
        Override("data.seed", recipe.seed),
        Override("data.shuffle", True),
        Override("data.validation_shuffle", False),
        Override("data.dataloader_num_workers", 0),  # a process each, for a file of kilobytes
        Override("data.trust_remote_code", recipe.model.trust_remote_code),
    ]


def _model(recipe: Recipe, derived: Derived) -> list[Override]:
    return [
        Override(f"{MODEL}.path", derived.model_path),
        Override(f"{MODEL}.trust_remote_code", recipe.model.trust_remote_code),
        Override(f"{MODEL}.use_remove_padding", derived.packed),
        Override(f"{MODEL}.enable_gradient_checkpointing", derived.gradient_checkpointing),
        Override(f"{MODEL}.override_config.attn_implementation", derived.attention, added=True),
    ]


def _actor(recipe: Recipe, derived: Derived) -> list[Override]:
    batch, optimizer = recipe.batch, recipe.optimizer
    return [
        Override(f"{ACTOR}.strategy", "fsdp2"),
        Override("actor_rollout_ref.ref.strategy", "fsdp2"),
        Override(f"{ACTOR}.use_kl_loss", False),
        Override(f"{ACTOR}.use_torch_compile", not derived.is_cpu),
        Override(f"{ACTOR}.fsdp_config.use_torch_compile", not derived.is_cpu),
        Override(f"{ACTOR}.fsdp_config.seed", recipe.seed),
        Override(f"{ACTOR}.data_loader_seed", recipe.seed),
        Override(f"{ACTOR}.policy_loss.loss_mode", "vanilla"),
        Override(f"{ACTOR}.clip_ratio_low", recipe.algorithm.clip_low),
        Override(f"{ACTOR}.clip_ratio_high", recipe.algorithm.clip_high),
        Override(f"{ACTOR}.clip_ratio_c", recipe.algorithm.dual_clip),
        Override(f"{ACTOR}.loss_agg_mode", "token-mean"),  # verl's default, and DAPO's
        Override(f"{ACTOR}.entropy_coeff", 0.0),
        Override(f"{ACTOR}.fsdp_config.param_offload", recipe.trainer.offload_parameters),
        Override(f"{ACTOR}.fsdp_config.optimizer_offload", recipe.trainer.offload_optimizer),
        Override(f"{ACTOR}.ppo_mini_batch_size", derived.mini_batch_prompts),
        Override(f"{ACTOR}.ppo_micro_batch_size_per_gpu", derived.micro_batch_sequences),
        Override(f"{ACTOR}.use_dynamic_bsz", batch.max_tokens_per_gpu is not None),
        Override(f"{ACTOR}.ppo_max_token_len_per_gpu", batch.max_tokens_per_gpu or derived.max_batched_tokens),
        Override(f"{ACTOR}.ulysses_sequence_parallel_size", recipe.trainer.sequence_parallel),
        Override(f"{ACTOR}.optim.lr", optimizer.learning_rate),
        Override(f"{ACTOR}.optim.weight_decay", optimizer.weight_decay),
        Override(f"{ACTOR}.optim.lr_warmup_steps", optimizer.warmup_steps),
        Override(f"{ACTOR}.optim.lr_warmup_steps_ratio", 0.0),
        Override(f"{ACTOR}.optim.clip_grad", optimizer.max_grad_norm),
        Override(f"{ACTOR}.checkpoint.save_contents", ["model", "optimizer", "extra", "hf_model"]),
    ]


def _rollout(recipe: Recipe, derived: Derived) -> list[Override]:
    rollout = recipe.rollout
    return [
        Override(f"{ROLLOUT}.name", "vllm"),
        Override(f"{ROLLOUT}.n", rollout.samples_per_prompt),
        Override(f"{ROLLOUT}.temperature", rollout.temperature),
        Override(f"{ROLLOUT}.top_p", rollout.top_p),
        Override(f"{ROLLOUT}.seed", recipe.seed),
        Override(f"{ROLLOUT}.calculate_log_probs", True),
        Override(f"{ROLLOUT}.logprobs_mode", "processed_logprobs"),  # after temperature, as the trainer's
        Override(f"{ROLLOUT}.enable_chunked_prefill", derived.chunked_prefill),
        Override(f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", derived.micro_batch_sequences),
        Override(f"{ROLLOUT}.agent.num_workers", derived.num_agent_workers),
        Override(f"{ROLLOUT}.val_kwargs.do_sample", False),
        Override(f"{ROLLOUT}.val_kwargs.temperature", 0.0),
        Override(f"{ROLLOUT}.val_kwargs.top_p", 1.0),
        Override(f"{ROLLOUT}.val_kwargs.n", 1),
    ]


def _engine(recipe: Recipe, derived: Derived) -> list[Override]:
    sleeps = not derived.is_cpu  # vLLM's sleep mode frees GPU memory
    # What each engine quantises is not here: verl has one place for all replicas, see engine/replica.py.
    one_process = derived.is_cpu and recipe.rollout.tensor_parallel == 1  # a worker of its own costs 6 s and 0.6 GB
    return [
        Override(f"{ROLLOUT}.tensor_model_parallel_size", recipe.rollout.tensor_parallel),
        Override(f"{ROLLOUT}.gpu_memory_utilization", recipe.rollout.gpu_memory_utilization),
        Override(f"{ROLLOUT}.enforce_eager", derived.eager),
        Override(f"{ROLLOUT}.free_cache_engine", sleeps),
        Override(f"{ROLLOUT}.enable_sleep_mode", sleeps, added=True),
        Override(f"{ROLLOUT}.load_format", "auto"),
        Override(f"{ROLLOUT}.max_model_len", derived.max_model_tokens),
        Override(f"{ROLLOUT}.max_num_seqs", derived.max_concurrent_sequences),
        Override(f"{ROLLOUT}.max_num_batched_tokens", derived.max_batched_tokens),
        Override(f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes", derived.bucket_mib),
        Override(f"{VLLM}.worker_extension_cls", WORKER_EXTENSION, added=True),
        Override(f"{VLLM}.distributed_executor_backend", "uni" if one_process else "mp", added=True),
    ]


def _reward(recipe: Recipe, derived: Derived) -> list[Override]:
    return [
        Override("reward.num_workers", 0),  # trainer/rollouts.py scores where the samples arrive
        Override("reward.custom_reward_function.path", str(REWARDS_FILE)),
        Override("reward.custom_reward_function.name", "compute_score"),
    ]


def _trainer(recipe: Recipe, derived: Derived) -> list[Override]:
    backends: list[str] = [str(backend) for backend in recipe.logging.backends]
    return [
        Override("trainer.device", "cpu" if derived.is_cpu else "cuda"),
        Override("trainer.nnodes", recipe.cluster.nodes),
        Override("trainer.n_gpus_per_node", recipe.cluster.gpus_per_node),
        Override("trainer.logger", backends),
        Override("trainer.project_name", "appliance"),
        Override("trainer.experiment_name", derived.run_dir.name),
        Override("trainer.total_training_steps", derived.steps),
        Override("trainer.total_epochs", derived.steps),  # an epoch is a step at least: `steps` decides
        Override("trainer.test_freq", derived.validate_every),
        Override("trainer.save_freq", -1),  # trainer/checkpoints.py saves, when a step's metrics are written
        Override("trainer.default_local_dir", str(derived.run_dir / "checkpoints")),
        Override("transfer_queue.backend.SimpleStorage.num_data_storage_units", 1 if derived.is_cpu else 8),
    ]


def _resume(recipe: Recipe, resume_from: Path | None) -> list[Override]:
    """Never verl's own search: it crashes on an empty tracker file and starts anew on one that names no folder.

    A step that is resumed from was validated, where it was due, before it was saved.
    """
    if resume_from is None:
        return [
            Override("trainer.val_before_train", recipe.trainer.validate_before),
            Override("trainer.resume_mode", "disable"),
        ]
    return [
        Override("trainer.val_before_train", False),
        Override("trainer.resume_mode", "resume_path"),
        Override("trainer.resume_from_path", str(resume_from)),
    ]
