"""Whether two plans have the same problems: what they are made of, wherever they lie."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from appliance.record.plan import ModelPlan, RunPlan
from appliance.tasks.library import data_key


@dataclass(frozen=True)
class Problems:
    """What a plan says of its problems. parquet: one of their files.  model: identity of its ModelPlan.

    builtin, commit: as in its ModelPlan.
    """

    parquet: str
    model: str
    builtin: str
    commit: str = ""

    @property
    def folder(self) -> str:
        """Named by the task and by a hash of all that makes the problems."""
        return Path(self.parquet).parent.name


def has_problems(plan: RunPlan, made: Problems) -> bool:
    """Whether the plan asks for the very problems that were made. May read the data files that it names.

    The hash knows a built-in model by its path, so that a cache elsewhere has other names for the same; and a commit of
    the hub by whether the recipe named it.
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
        model=made.model if _is_same(plan.model, made) else plan.model.identity,
    )
    return made.folder == f"{task.kind}-{key}"


def _is_same(model: ModelPlan, made: Problems) -> bool:
    if model.builtin:
        return model.builtin == made.builtin
    name = made.model.partition("@")[0]
    return bool(model.hub_name) and model.hub_name == name and bool(made.commit) and model.commit == made.commit
