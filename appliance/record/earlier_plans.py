"""The plans of runs that an earlier version began, with their settings where they are today. Such a run is shown,
compared, and resumed by a recipe, whatever its `plan.json` calls things."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from appliance.terms.environment import KV_CACHE_VARIABLE
from appliance.terms.settings import ATTENTION_NAME

_MOVED = {
    "logging_backends": "logging.backends",
    "norm_fed_lr_scale": "optimizer.norm_fed_lr_scale",
    "guard.switching": "guard.scheme_change",
    "steps": "trainer.steps",
    "validate_before": "trainer.validate_before",
    "validate_every": "trainer.validate_every",
    "validate_bf16_every": "trainer.validate_bf16_every",
    "trainer.gradient_checkpointing": "trainer_memory.gradient_checkpointing",
    "trainer.keeps_copies": "trainer_memory.keeps_copies",
    "trainer.gpu_memory_utilization": "rollout.gpu_memory_utilization",
}
"""Dotted keys of earlier plans, and the keys that they are now."""


def with_keys_of_today(text: bytes) -> bytes:
    """Return the text of a plan with the keys of this version: what an earlier version wrote elsewhere is moved."""
    try:
        plan: dict[str, Any] = json.loads(text)
        for convert in _CONVERSIONS:
            with contextlib.suppress(KeyError, TypeError, AttributeError):  # where the part is no plan's
                convert(plan)
        for old, new in _MOVED.items():
            *sections, key = old.split(".")
            holder = plan.get(sections[0]) if sections else plan
            if isinstance(holder, dict) and key in holder:
                section, name = new.split(".")
                plan.setdefault(section, {})[name] = holder.pop(key)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return text  # no plan at all: the reader of plans reports it
    return json.dumps(plan).encode()


def _cluster(plan: dict[str, Any]) -> None:
    """Add the cluster: a plan of one node had none, and had its device beside the sections."""
    if "device" not in plan:
        return
    root = Path(plan["run_dir"]).parent
    cluster = {key: value or None for key, value in (plan.get("cluster") or {}).items()}
    places = {"run_dir": str(root), "token_file": str(root / ".cluster-token")}
    plan["cluster"] = places | cluster | {key: plan.pop(key) for key in ("device", "nodes", "gpus_per_node")}


def _algorithm(plan: dict[str, Any]) -> None:
    """Move the loss and its clip range, which were with the correction, and read `kl`, which was a mapping or null."""
    algorithm, correction = plan["algorithm"], plan["correction"]
    if "wrong_reward" not in algorithm:
        return
    kl = algorithm.pop("kl", None) or {"coefficient": 0.0, "estimator": "k3", "place": "loss"}
    algorithm |= {"kl": kl["coefficient"], "kl_estimator": kl["estimator"], "kl_in": kl["place"]}
    algorithm |= {
        "advantage": algorithm.get("advantage", "grpo"),
        "aggregate": algorithm.get("aggregate", "token-mean"),
    }
    algorithm |= {key: correction.pop(key, 0.2) for key in ("clip_low", "clip_high")}
    algorithm["loss"] = correction.pop("loss", "ppo")
    del algorithm["wrong_reward"]
    if not algorithm["overlong_tokens"]:
        del algorithm["overlong_penalty"]
    if uaq := plan.get("uaq"):
        correction["uaq_scale"] = uaq["scale"]
    if shadow := correction.pop("shadow", None):
        correction["shadow_every"] = shadow.pop("every")
        shadow["forward_sequences"] = shadow.pop("micro_batch_sequences")
    plan["shadow"] = shadow


def _sizes(plan: dict[str, Any]) -> None:
    """Move the sizes of mini-batches and micro-batches, which were with the trainer."""
    trainer, sizes = plan["trainer"], ("mini_batch_prompts", "micro_batch_sequences", "max_tokens_per_gpu")
    if moved := {key: trainer.pop(key) for key in sizes if key in trainer}:
        plan["batch"] = plan.get("batch", {}) | moved


def _prompts(plan: dict[str, Any]) -> None:
    """Move the prompts of a step, which were beside the sections. The first plans had no generation settings."""
    if "prompts_per_step" not in plan:
        return
    prompts, algorithm = plan.pop("prompts_per_step"), plan.get("algorithm", {})
    generated = prompts * algorithm.pop("generation_batches", 1)
    most = algorithm.pop("max_generated_prompts", 0)
    if algorithm.get("kind") == "dapo" and most:
        algorithm["max_generation_batches"] = most // generated
    plan["batch"] = {"prompts_per_step": prompts, "generation_prompts": generated} | plan.get("batch", {})


def _trainer(plan: dict[str, Any]) -> None:
    """Name the forward and the backward, which were two flags and one. The first plans knew of a pass for old log-probs
    alone."""
    trainer = plan["trainer"]
    if "one_flow" not in trainer:
        return
    linears, one_flow = trainer.pop("linears", False), trainer.pop("one_flow")
    trainer["forward"] = "rollout" if one_flow else "linears" if linears else "bf16"
    trainer["backward"] = "fp8-block" if trainer.pop("fp8_backward", False) else "bf16"
    trainer.setdefault("old_log_probs", "recompute")
    if trainer.get("attention") == ATTENTION_NAME:
        trainer["attention"] = "auto"


def _quantization(plan: dict[str, Any]) -> None:
    """Move the settings of a profile from the profile, and those of the proof from the rollouts, to `quantization`."""
    if "quantization" in plan:
        return
    profile, rollout = plan.get("profile") or {}, plan.get("rollout") or {}
    quantised = [engine for engine in rollout.get("replicas", ()) if engine["scheme"] != "bf16"]
    section = {"ignore": quantised[0]["ignore"]} if quantised else {}
    section |= {key: profile.pop(key) for key in ("smoothing", "mismatch_budget", "ignore") if key in profile}
    section["profile"] = (profile["source"] or "auto") if profile else "none"
    if "prove_every" in rollout:
        section["prove_every"] = rollout.pop("prove_every")
    plan["quantization"] = section | {"emulate": any(engine.get("emulated") for engine in quantised)}


def _rollout(plan: dict[str, Any]) -> None:
    """Split what was one class for all of the rollouts: each engine had its quantisation written out, and `eager` was
    beside it. Chunked prefill was with the engine, and the room for the KV cache in the environment alone."""
    rollout, engine = plan["rollout"], plan.get("engine") or {}
    if "eager" not in rollout:
        return
    rollout.setdefault("top_log_probs", 0)
    engine["eager"] = rollout.pop("eager")
    if "chunked_prefill" in engine:
        rollout["chunked_prefill"] = engine.pop("chunked_prefill")
    quantisations = rollout["replicas"]
    rollout["replicas"] = [quantisation["scheme"] for quantisation in quantisations]
    rollout["lm_head_fp32"] = any(quantisation.get("lm_head_fp32", False) for quantisation in quantisations)
    if gib := dict(plan.get("env", ())).get(KV_CACHE_VARIABLE):
        rollout["kv_cache_gb"] = int(gib)


def _model(plan: dict[str, Any]) -> None:
    """Move what is derived of the section `model` to `weights`, and the adapter into the section."""
    if "weights" in plan:
        return
    model = plan["model"]
    path, source, builtin = model["path"], model.get("source", ""), model.get("builtin", "")
    revision, gguf = model.get("revision", ""), model.get("gguf", "")
    weights = {key: model[key] for key in ("commit", "gguf", "provenance") if key in model}
    weights |= {"name_or_path": path, "is_cached": bool(builtin or gguf)}
    weights["hub_name"] = source if revision or not path.startswith("/") else ""
    section = {"path": source or None, "builtin": builtin or None, "revision": revision or None}
    section |= {"trust_remote_code": model["trust_remote_code"], "lora": plan.pop("lora", None)}
    plan["weights"], plan["model"] = weights, section


def _task(plan: dict[str, Any]) -> None:
    """Move the files of the task to `task_files`, and into the section what was with a task of the user's own."""
    if "task_files" in plan:
        return
    task = plan["task"]
    own_task = task.pop("own", None) or {}
    tools = own_task.get("tools") or None
    files = {key: task.pop(key) for key in ("train_parquet", "val_parquet", "date") if key in task}
    files |= {key: own_task[key] for key in ("code", "commit") if key in own_task}
    if tools:
        files["schemas_file"] = str(Path(files["train_parquet"]).with_name("tools.json"))
    plan["task_files"] = files
    task["long_prompts"] = "truncate" if task.pop("truncate_prompts", False) else "drop"
    task |= {key: task[key] or None for key in ("train_file", "val_file") if key in task}
    task |= {key: own_task[key] or None for key in ("data", "config", "template", "system", "truth") if key in own_task}
    task |= {key: own_task[key] for key in ("split", "prompt") if key in own_task}
    task |= {"tools": tools, "max_turns": own_task.get("max_turns") if tools else None}
    task["rewards"] = [_reward(reward) for reward in own_task.get("rewards", ())]
    val_sets = {val_set.pop("name"): val_set for val_set in task.get("val_sets") or ()}
    task["val_sets"] = {name: val_set | {"file": val_set["file"] or None} for name, val_set in val_sets.items()}


def _reward(reward: dict[str, Any]) -> dict[str, Any]:
    """Return the reward by its file and function, which were fields beside the name of its metric."""
    name = f"{reward['file']}:{reward['function']}" if reward["file"] else reward["function"]
    return {"name": name, "weight": reward["weight"]} | reward["options"]


_CONVERSIONS: tuple[Callable[[dict[str, Any]], None], ...] = (
    _cluster,
    _algorithm,
    _sizes,
    _prompts,
    _trainer,
    _quantization,
    _rollout,  # after that of its engines' settings
    _model,
    _task,
)
