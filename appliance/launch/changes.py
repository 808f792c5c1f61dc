"""What may change between two attempts of one run: a table of the recipe's keys, and the findings for what must not.

The recipe that the run has kept is compared with the one that is typed now. Whether a checkpoint itself fits the plan
(its ranks, its weights, its profile) is checked in launch/resume.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import Enum

from appliance.finding import Finding, fault
from appliance.recipe.load import to_plain
from appliance.recipe.schema import Recipe
from appliance.terms.settings import Schedule


class Change(Enum):
    """Kinds of difference in one key between a run and the recipe that it is resumed with."""

    FREE = "free"
    """Nothing that is computed: how long, what is watched, kept and shown, and where."""
    FORCED = "forced"
    """Other numbers from there on: taken with `--force`."""
    NEVER = "never"
    """Another state than a checkpoint has, which no attempt could load. A run without one takes it with `--force`."""


CHANGES = {
    "name": Change.FREE,
    "checkpoint": Change.FREE,
    "cluster.run_dir": Change.FREE,
    "correction.uaq_scale": Change.NEVER,
    "guard": Change.FREE,
    "logging": Change.FREE,
    "model.lora": Change.NEVER,
    "optimizer.norm_fed_lr_scale": Change.NEVER,
    "rollout.gpu_memory_utilization": Change.FREE,
    "rollout.kv_cache_gb": Change.FREE,
    "trainer.dtype": Change.NEVER,
    "trainer.epochs": Change.FREE,
    "trainer.max_restarts": Change.FREE,
    "trainer.steps": Change.FREE,
    "trainer.validate_before": Change.FREE,
    "trainer.validate_every": Change.FREE,
}
"""Changes by key, or by section for all of its keys; what is not here needs `--force`."""

REMEDIES = {
    Change.FORCED: "put it back as the run has it, start a new run with another --name, or take the change "
    "with --force",
    Change.NEVER: "put it back as the run has it, or start a new run with another --name: "
    "this run's checkpoints cannot be loaded with another value",
}
_LENGTH = ("trainer.steps", "trainer.epochs")  # by which a learning rate sinks that is not constant


def change_of(key: str, *, schedule: Schedule = Schedule.CONSTANT, has_checkpoint: bool = True) -> Change:
    """Judge another value of a dotted key.

    schedule: of the learning rate.  has_checkpoint: whether the run has a checkpoint.
    """
    change = CHANGES.get(key) or CHANGES.get(key.partition(".")[0]) or Change.FORCED
    if change is Change.FREE and key in _LENGTH and schedule is not Schedule.CONSTANT:
        return Change.FORCED  # the rate would jump: verl's schedule takes the new number of steps with the old place
    return change if has_checkpoint or change is not Change.NEVER else Change.FORCED


def refused_changes(recipe: Recipe, *, before: Recipe, has_checkpoint: bool, force: bool = False) -> Iterator[Finding]:
    """Yield a fault for each key that differs and may not.

    before: the recipe that the run has kept.  force: whether what `--force` takes may differ.
    """
    passing = {Change.FREE, Change.FORCED} if force else {Change.FREE}
    values_before, values = _by_key(before), _by_key(recipe)
    for key in sorted(values_before.keys() | values.keys()):
        change = change_of(key, schedule=recipe.optimizer.schedule, has_checkpoint=has_checkpoint)
        value_before, value = values_before.get(key), values.get(key)
        if value_before != value and change not in passing:
            message = f"the run has {json.dumps(value_before)}, the recipe {json.dumps(value)}"
            yield fault((key,), message, REMEDIES[change])


def _by_key(recipe: Recipe) -> dict[str, object]:
    """Return JSON values by dotted keys of one or two parts."""
    plain = to_plain(recipe)
    sections = {name: keys for name, keys in plain.items() if isinstance(keys, dict)}
    inner = {f"{name}.{key}": value for name, keys in sections.items() for key, value in keys.items()}
    return {name: value for name, value in plain.items() if name not in sections} | inner
