"""verl's configuration for a run, as Hydra overrides of its plan. No other file knows verl's key names (verl 0.9.1). A
test composes verl's own configuration with these and compares every value and its type."""

from __future__ import annotations

import glob
import json
import re
from pathlib import Path

from appliance.corrections.objective import Advantage, Aggregate, KlPlace, Loss
from appliance.processes import module_argv
from appliance.record.plan import RunPlan
from appliance.settings.sections import Lora, LoraSync
from appliance.terms.settings import CPU_KV_BLOCK, LOAD_FORMAT, Dtype, KvCache, OldLogProbs, Schedule

ACTOR = "actor_rollout_ref.actor"
REFERENCE = "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
VLLM = f"{ROLLOUT}.engine_kwargs.vllm"
ENTRY_MODULE = "appliance.trainer.entry"
STORAGE_UNITS = {True: 1, False: 8}  # of the TransferQueue, a process each, by "is a CPU"
FILTER_METRIC = "acc"  # of reward_extra_info, by trainer/rollouts.py: the grade, not the reward with its penalty
WORKER_EXTENSION = "appliance.engine.sync.SyncWorkerExtension"

LOSS_MODES = {
    Loss.PPO: "vanilla",
    Loss.GSPO: "gspo",
    Loss.CISPO: "cispo",
    Loss.SAPO: "sapo",
    Loss.GEO_MEAN: "geo-mean",
    Loss.TBPO: "tbpo",
}  # in verl's registry; the last two are ours, trainer/correction.py
AGGREGATES = {
    Aggregate.TOKEN_MEAN: "token-mean",
    Aggregate.SEQUENCE_MEAN: "seq-mean-token-mean",
    Aggregate.CONSTANT: "seq-mean-token-sum-norm",
}
ESTIMATORS = {
    Advantage.GRPO: "grpo",
    Advantage.DR_GRPO: "grpo",
    Advantage.RLOO: "rloo",
    Advantage.REINFORCE_PLUS_PLUS: "reinforce_plus_plus",
    Advantage.OPO: "opo",
    Advantage.GDPO: "grpo",  # and then ours, trainer/correction.py: verl's has not the rewards one by one
}

USUAL_BETAS, USUAL_EPSILON = (0.9, 0.999), 1e-8  # of torch's AdamW, and verl's

_BARE = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_ENTROPY_AT_ONCE = 128  # tokens: so few that those in FP32 count for little beside the logits
_NOT_BARE = frozenset({"null", "true", "false", "nan", "inf"})

Value = None | bool | int | float | str | list[str] | list[float] | dict[str, float] | dict[str, str]
Settings = list[tuple[str, Value]]


def hydra_value(value: Value) -> str:
    """Write a value in Hydra's override grammar. Text is quoted unless it can only be read as text."""
    if isinstance(value, list):
        return "[" + ",".join(hydra_value(each) for each in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{hydra_value(each)}" for key, each in value.items()) + "}"
    if not isinstance(value, str):
        return json.dumps(value)
    return value if _BARE.fullmatch(value) and value.lower() not in _NOT_BARE else _quoted(value)


def _quoted(text: str) -> str:
    """Quote a text. Backslashes count only before `${` (OmegaConf) and before a quote or the end (Hydra): they are
    doubled there."""
    text = re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + "\\${", text)
    text = re.sub(r"(\\+)(?='|\Z)", lambda match: match[1] * 2, text)
    return "'" + text.replace("'", "\\'") + "'"


def argv(plan: RunPlan) -> tuple[str, ...]:
    """Return the command line of the child that trains."""
    return module_argv(ENTRY_MODULE, *(f"{key}={hydra_value(value)}" for key, value in overrides(plan)))


def overrides(plan: RunPlan) -> Settings:
    """Return all of verl's settings, (key, value) in the order of its configuration. A `+` before a key: verl's
    configuration does not have it.

    verl's own correction is off, key by key: trainer/correction.py corrects, and no default of verl's may. Its
    `bypass_mode` is that no pass gives old log-probs: verl then takes the rollouts', unless trainer/trainer.py leaves
    that out, and does nothing else without its own loss. What each engine quantises is not here: verl has one place for
    all replicas, see engine/replica.py.

    Never verl's own search for a checkpoint: it crashes on an empty tracker file and starts anew on one that names no
    folder. A step that is resumed from was validated, where it was due, before it was saved.
    """
    return [
        *_algorithm(plan),
        *_data(plan),
        *_model(plan),
        *_actor(plan),
        *_rollout(plan),
        *_trainer(plan),
    ]


def _algorithm(plan: RunPlan) -> Settings:
    correction = "algorithm.rollout_correction"
    return [
        ("algorithm.adv_estimator", ESTIMATORS[plan.algorithm.advantage]),
        ("algorithm.use_kl_in_reward", plan.algorithm.kl_place is KlPlace.REWARD),
        ("algorithm.filter_groups.enable", plan.algorithm.filters),
        ("algorithm.filter_groups.metric", FILTER_METRIC),
        ("algorithm.filter_groups.max_inflight_gen_batches", plan.generation_batches),
        (f"{correction}.rollout_is", None),
        (f"{correction}.rollout_is_threshold", None),
        (f"{correction}.rollout_is_batch_normalize", False),
        (f"{correction}.rollout_rs", None),
        (f"{correction}.rollout_rs_threshold", None),
        (f"{correction}.bypass_mode", plan.trainer.old_log_probs is not OldLogProbs.RECOMPUTE),
    ]


def _data(plan: RunPlan) -> Settings:
    return [
        ("data.train_files", glob.escape(plan.task_files.train_parquet)),  # `datasets` takes a path for a pattern
        ("data.val_files", glob.escape(plan.task_files.val_parquet)),
        ("data.train_batch_size", plan.batch.prompts_per_step),
        ("data.max_prompt_length", plan.task.max_prompt_tokens),
        ("data.max_response_length", plan.task.max_response_tokens),
        ("data.truncation", "left" if plan.task.truncates_prompts else "error"),
        ("data.seed", plan.seed),
        ("data.shuffle", True),
        ("data.validation_shuffle", False),
        ("data.dataloader_num_workers", 0),  # a process each, for a file of kilobytes
        ("data.trust_remote_code", plan.model.trust_remote_code),
    ]


def _model(plan: RunPlan) -> Settings:
    return [
        (f"{MODEL}.path", plan.trained_model),
        (f"{MODEL}.trust_remote_code", plan.model.trust_remote_code),
        (f"{MODEL}.use_remove_padding", True),
        (f"{MODEL}.use_fused_kernels", plan.trainer.one_flow),  # log-probs come from the model, not from logits
        (f"{MODEL}.enable_gradient_checkpointing", plan.trainer_memory.gradient_checkpointing),
        (f"+{MODEL}.override_config.attn_implementation", plan.trainer.attention.in_transformers),
        (f"+{MODEL}.override_config.model_config", {}),  # else that name goes into the trained model's config.json
        *(_adapter(plan.model.lora) if plan.model.lora else []),
    ]


def _adapter(lora: Lora) -> Settings:
    return [
        (f"{MODEL}.lora_rank", lora.rank),
        (f"{MODEL}.lora_alpha", lora.alpha),
        (f"{MODEL}.target_modules", list(lora.targets)),
        (f"{MODEL}.lora.merge", lora.sync is LoraSync.MERGE),
        (f"{ACTOR}.fsdp_config.model_dtype", "bf16"),  # of what is not trained
        (f"+{ACTOR}.checkpoint.save_lora_only", True),
    ]


def _actor(plan: RunPlan) -> Settings:
    """Make verl's settings of the trainer, and the reference's strategy."""
    trainer, batch, optimizer = plan.trainer, plan.batch, plan.optimizer
    saved = ["model", "optimizer", "extra", "hf_model"]
    if plan.model.lora:  # `hf_model` would be the model without the adapter: trainer/lora.py saves that beside it
        saved.remove("hf_model")
    return [
        (f"{ACTOR}.strategy", "fsdp2"),
        (f"{REFERENCE}.strategy", "fsdp2"),
        (f"{ACTOR}.use_kl_loss", plan.algorithm.kl_place is KlPlace.LOSS),
        (f"{ACTOR}.use_torch_compile", not plan.is_cpu),
        (f"{ACTOR}.fsdp_config.use_torch_compile", not plan.is_cpu),
        # In FP32: what is not compiled rounds each step to BF16, which is percents of an entropy.
        (f"{ACTOR}.fsdp_config.entropy_from_logits_with_chunking", plan.is_cpu),
        (f"{ACTOR}.fsdp_config.entropy_from_logits_chunk_size", _ENTROPY_AT_ONCE),
        (f"{ACTOR}.fsdp_config.seed", plan.seed),
        (f"{ACTOR}.data_loader_seed", plan.seed),
        (f"{ACTOR}.policy_loss.loss_mode", LOSS_MODES[plan.algorithm.loss]),
        (f"{ACTOR}.clip_ratio_low", plan.algorithm.clip_low),
        (f"{ACTOR}.clip_ratio_high", plan.algorithm.clip_high),
        (f"{ACTOR}.clip_ratio_c", plan.algorithm.dual_clip),
        (f"{ACTOR}.loss_agg_mode", AGGREGATES[plan.algorithm.aggregate]),
        (f"{ACTOR}.entropy_coeff", plan.algorithm.entropy_bonus),
        *_where_asked(plan),
        (f"{ACTOR}.fsdp_config.param_offload", trainer.offload_parameters),
        (f"{ACTOR}.fsdp_config.optimizer_offload", trainer.offload_optimizer),
        (f"{ACTOR}.ppo_mini_batch_size", batch.mini_batch_prompts),
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu", batch.micro_batch_sequences),
        (f"{ACTOR}.use_dynamic_bsz", batch.max_tokens_per_gpu is not None),
        (f"{ACTOR}.ppo_max_token_len_per_gpu", batch.max_tokens_per_gpu or plan.engine.max_batched_tokens),
        (f"{ACTOR}.ulysses_sequence_parallel_size", trainer.sequence_parallel),
        (f"{ACTOR}.optim.lr", optimizer.learning_rate),
        (f"{ACTOR}.optim.weight_decay", optimizer.weight_decay),
        (f"{ACTOR}.optim.lr_warmup_steps", optimizer.warmup_steps),
        (f"{ACTOR}.optim.lr_warmup_steps_ratio", 0.0),
        (f"{ACTOR}.optim.clip_grad", optimizer.max_grad_norm),
        (f"{ACTOR}.checkpoint.save_contents", saved),
    ]


def _rollout(plan: RunPlan) -> Settings:
    rollout, batch = plan.rollout, plan.batch
    sleeps = not plan.is_cpu  # vLLM's sleep mode frees GPU memory
    one_process = plan.is_cpu and rollout.tensor_parallel == 1  # a worker of its own costs 6 s and 0.6 GB
    return [
        (f"{ROLLOUT}.name", "vllm"),
        (f"{ROLLOUT}.n", rollout.samples_per_prompt),
        (f"{ROLLOUT}.temperature", rollout.temperature),
        (f"{ROLLOUT}.top_p", rollout.top_p),
        (f"{ROLLOUT}.seed", plan.seed),
        (f"{ROLLOUT}.calculate_log_probs", True),
        (f"{ROLLOUT}.logprobs_mode", "processed_logprobs"),  # after temperature, as the trainer's
        (f"{ROLLOUT}.enable_chunked_prefill", rollout.chunked_prefill),
        (f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", batch.micro_batch_sequences),
        (f"{ROLLOUT}.tensor_model_parallel_size", rollout.tensor_parallel),
        (f"{ROLLOUT}.gpu_memory_utilization", rollout.gpu_memory_utilization),
        (f"{ROLLOUT}.enforce_eager", plan.engine.eager),
        (f"{ROLLOUT}.free_cache_engine", sleeps),
        (f"+{ROLLOUT}.enable_sleep_mode", sleeps),
        (f"{ROLLOUT}.load_format", LOAD_FORMAT),
        (f"{ROLLOUT}.max_model_len", plan.engine.max_model_tokens),
        (f"{ROLLOUT}.max_num_seqs", plan.engine.max_concurrent_sequences),
        (f"{ROLLOUT}.max_num_batched_tokens", plan.engine.max_batched_tokens),
        *_blocks(plan),
        (f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes", plan.engine.bucket_mib),
        (f"+{VLLM}.worker_extension_cls", WORKER_EXTENSION),
        (f"+{VLLM}.config_format", "hf"),  # what the trainer reads; vLLM would prefer Mistral's own
        (f"+{VLLM}.distributed_executor_backend", "uni" if one_process else "mp"),
    ]


def _trainer(plan: RunPlan) -> Settings:
    """Make verl's settings of the run as a whole, with the checkpoint that it resumes from."""
    trainer = plan.trainer
    resume: Settings = [("trainer.resume_mode", "disable")]
    if plan.resume_from:
        resume = [("trainer.resume_mode", "resume_path"), ("trainer.resume_from_path", plan.resume_from)]
    return [
        ("reward.num_workers", 0),  # trainer/rollouts.py scores where the samples arrive
        ("trainer.device", "cpu" if plan.is_cpu else "cuda"),
        ("trainer.nnodes", plan.cluster.nodes),
        ("trainer.n_gpus_per_node", plan.cluster.gpus_per_node),
        ("trainer.logger", list(plan.logging.backends)),
        ("trainer.project_name", "appliance"),
        ("trainer.experiment_name", plan.name),
        ("trainer.total_training_steps", trainer.steps),
        ("trainer.total_epochs", trainer.steps),  # an epoch is a step at least: `steps` decides
        ("trainer.test_freq", trainer.validate_every),
        ("trainer.save_freq", -1),  # trainer/checkpoints.py saves, when a step's metrics are written
        ("trainer.default_local_dir", str(Path(plan.run_dir) / "checkpoints")),
        ("transfer_queue.backend.SimpleStorage.num_data_storage_units", STORAGE_UNITS[plan.is_cpu]),
        ("trainer.val_before_train", trainer.validate_before and not plan.resume_from),
        *([(f"+{VLLM}.block_size", CPU_KV_BLOCK)] if plan.is_cpu else []),
        *resume,
    ]


def _blocks(plan: RunPlan) -> Settings:
    """Give the number of blocks of the KV cache, where fewer are needed than `rollout.kv_cache_gb` has room for. vLLM's
    key has this name on a CPU, too."""
    blocks = plan.engine.kv_cache_blocks
    return [] if blocks is None else [(f"+{VLLM}.num_gpu_blocks_override", blocks)]


def _where_asked(plan: RunPlan) -> Settings:
    """Return the keys of which verl's default holds where the recipe asks for nothing else. One that stays is the
    reference's FP32: with weights in BF16 its log-probs at the start are not the policy's to the last bit."""
    algorithm, optimizer, kl = plan.algorithm, plan.optimizer, plan.algorithm.kl
    settings: Settings = []
    if plan.rollout.leaves_words_out:
        settings.append((f"{ROLLOUT}.top_k", plan.rollout.top_k or -1))
        settings.append((f"+{VLLM}.return_sampling_mask", True))
    if plan.rollout.top_log_probs:
        settings.append((f"+{VLLM}.max_logprobs", plan.rollout.top_log_probs))
    if plan.rollout.kv_cache is not KvCache.AUTO:
        settings.append((f"+{VLLM}.kv_cache_dtype", plan.rollout.kv_cache.in_vllm))
    if plan.trainer.dtype is Dtype.FP16:  # gradients are reduced in FP32, as verl has it for BF16
        roles = [ACTOR, *([REFERENCE] if kl else [])]
        settings += [(f"+{role}.fsdp_config.mixed_precision", {"param_dtype": "fp16"}) for role in roles]
        settings.append((f"{ROLLOUT}.dtype", plan.trainer.dtype.in_torch))
    if algorithm.advantage is Advantage.DR_GRPO:
        settings.append(("algorithm.norm_adv_by_std_in_grpo", False))
    if algorithm.aggregate is Aggregate.CONSTANT:  # without it verl divides by the longest of a micro-batch
        settings.append((f"{ACTOR}.loss_scale_factor", plan.task.max_response_tokens))
    if algorithm.kl_place is KlPlace.LOSS:
        settings += [(f"{ACTOR}.kl_loss_coef", kl), (f"{ACTOR}.kl_loss_type", str(algorithm.kl_estimator))]
    elif kl:
        settings += [("algorithm.kl_ctrl.kl_coef", kl), ("algorithm.kl_penalty", str(algorithm.kl_estimator))]
    if kl:
        settings += [
            (f"{REFERENCE}.log_prob_micro_batch_size_per_gpu", plan.batch.micro_batch_sequences),
            (f"{REFERENCE}.fsdp_config.use_torch_compile", not plan.is_cpu),
        ]
    if optimizer.schedule is Schedule.COSINE:  # `linear` is trainer/verl_engine.py's
        settings += [
            (f"{ACTOR}.optim.lr_scheduler_type", "cosine"),
            (f"{ACTOR}.optim.min_lr_ratio", optimizer.min_lr_ratio),
        ]
    if optimizer.betas != USUAL_BETAS:
        settings.append((f"{ACTOR}.optim.betas", list(optimizer.betas)))
    if optimizer.epsilon != USUAL_EPSILON:
        settings.append((f"{ACTOR}.optim.override_optimizer_config", {"eps": optimizer.epsilon}))
    return settings
