"""The tasks by name: their data keys, their problems and their rewards. Imports no torch."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

from appliance.tasks import arithmetic, dapo_math, gsm8k
from appliance.tasks.tiny_spec import TINY_MODELS

DAPO_MATH = "dapo-math"
TASK_KINDS: tuple[str, ...] = ("arithmetic", "gsm8k", DAPO_MATH)
BUILTIN_MODELS: tuple[str, ...] = tuple(TINY_MODELS)
_DATA_VERSION = 2  # raise it when the same fields give other rows


def data_key(
    kind: str,
    *,
    difficulty: int,
    seed: int,
    train_file: str,
    val_file: str,
    train_size: int,
    val_size: int,
    max_prompt_tokens: int,
    truncate_prompts: bool,
    model: str,
) -> str:
    """Hash of everything that determines the parquet files: 12 hex digits. Reads the files it names, never fails.

    model: path or name of the model, whose tokenizer decides which prompts are too long.
    """
    fields: dict[str, str | int] = {"version": _DATA_VERSION, "kind": kind, "seed": seed}
    fields |= {"train_size": train_size, "val_size": val_size}
    fields |= {"max_prompt_tokens": max_prompt_tokens, "truncate_prompts": truncate_prompts, "model": model}
    if kind == "arithmetic":
        fields["difficulty"] = difficulty
    else:
        fields |= {"train": _fingerprint(train_file), "val": _fingerprint(val_file)}
    return _short_hash(fields)


def builtin_model_key(builtin: str, *, difficulty: int) -> str:
    """Hash of everything that determines a built-in model: 12 hex digits. Raises KeyError for an unknown name.

    The run's seed is not part of it: the pools of the task do not depend on a seed, so one model serves every run.
    """
    return _short_hash({"difficulty": difficulty, **dataclasses.asdict(TINY_MODELS[builtin])})


def score(kind: str, *, response: str, truth: str) -> float:
    """The reward in [0, 1] of a response. Raises ValueError for an unknown task."""
    if kind == "arithmetic":
        return arithmetic.score(response=response, truth=truth)
    if kind == "gsm8k":
        return gsm8k.score(response=response, truth=truth)
    if kind == DAPO_MATH:
        return dapo_math.score(response=response, truth=truth)
    raise ValueError(f"no task is called {kind!r}, the tasks are {', '.join(TASK_KINDS)}")


def import_reward(kind: str) -> None:
    """Import now what `score` will need for a task: math-verify takes a second."""
    if kind == DAPO_MATH:
        dapo_math.import_verifier()


def _fingerprint(path: str) -> str:
    if not path:
        return "none"
    try:
        if not Path(path).is_file():  # a pipe or a device would be read for ever
            return "unreadable"
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return "unreadable"  # preflight and the making of the data say why


def _short_hash(fields: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:12]
