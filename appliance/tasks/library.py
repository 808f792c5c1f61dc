"""Every task by its name, and what its data is told apart by. Imports no torch."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import pkgutil
from enum import StrEnum
from pathlib import Path

from appliance.record.plan import TaskPlan
from appliance.tasks import built_in
from appliance.tasks.task import Task
from appliance.tasks.tiny_spec import TINY_MODELS

_FIRST = ("arithmetic", "gsm8k")  # where tasks are listed; the others follow by name


def _tasks() -> dict[str, Task]:
    """The `TASK` of each module of tasks/built_in, by its kind."""
    modules = (f"{built_in.__name__}.{each.name}" for each in pkgutil.iter_modules(built_in.__path__))
    tasks = {task.kind: task for task in (importlib.import_module(module).TASK for module in modules)}
    return {kind: tasks[kind] for kind in (*_FIRST, *sorted(tasks.keys() - set(_FIRST)))}


TASKS = _tasks()
TaskKind = StrEnum("TaskKind", {kind.upper().replace("-", "_"): kind for kind in TASKS}, module=__name__)
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
    if TASKS[kind].source is None:
        fields["difficulty"] = difficulty
    else:
        fields |= {"train": _fingerprint(train_file), "val": _fingerprint(val_file)}
    return _short_hash(fields)


def builtin_model_key(builtin: str, *, difficulty: int) -> str:
    """Hash of everything that determines a built-in model: 12 hex digits. Raises KeyError for an unknown name.

    The run's seed is not part of it: the pools of the task do not depend on a seed, so one model serves every run.
    """
    return _short_hash({"difficulty": difficulty, **dataclasses.asdict(TINY_MODELS[builtin])})


def is_from_hub(task: TaskPlan) -> bool:
    """Whether its problems come from the hub."""
    return TASKS[task.kind].source is not None and not task.train_file


def score(kind: str, *, response: str, truth: str) -> float:
    """The reward in [0, 1] of a response. Raises ValueError for an unknown task."""
    if kind not in TASKS:
        raise ValueError(f"no task is called {kind!r}, the tasks are {', '.join(TASKS)}")
    return TASKS[kind].score(response=response, truth=truth)


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
