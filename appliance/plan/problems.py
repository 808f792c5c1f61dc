"""Whether two plans have the same problems: what they are made of, wherever they lie."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from appliance.plan.model import RunPlan
from appliance.tasks.library import data_key


@dataclass(frozen=True)
class Problems:
    """What a plan says of its problems. parquet: one of their files.  model, builtin: as in its ModelPlan."""

    parquet: str
    model: str
    builtin: str

    @property
    def folder(self) -> str:
        """Named by the task and by a hash of all that makes the problems."""
        return Path(self.parquet).parent.name


def has_problems(plan: RunPlan, made: Problems) -> bool:
    """Whether the plan asks for the very problems that were made. May read the data files that it names.

    The hash knows a built-in model by its path, so that a cache elsewhere has other names for the same.
    """
    task = plan.task
    if task.train_parquet == made.parquet:
        return True
    key = data_key(
        task.kind,
        difficulty=task.difficulty,
        seed=task.seed,
        train_file=task.train_file,
        val_file=task.val_file,
        train_size=task.train_size,
        val_size=task.val_size,
        max_prompt_tokens=task.max_prompt_tokens,
        truncate_prompts=task.truncate_prompts,
        model=made.model if plan.model.builtin and plan.model.builtin == made.builtin else plan.model.path,
    )
    return made.folder == f"{task.kind}-{key}"
