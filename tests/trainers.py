"""Our trainer by its real constructor, over verl's real configuration: what needs ranks and engines a test gives it."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from appliance.record.plan import RunPlan
from appliance.trainer.fit import compose_config
from appliance.trainer.trainer import ApplianceTrainer

GOLDEN = Path(__file__).parent / "quick" / "plan" / "golden" / "gsm8k-0.5b-int8.json"


@functools.cache
def verls_config() -> DictConfig:
    """Of a shipped recipe: no test of the trainer is about what stands in it."""
    return compose_config(json.loads(GOLDEN.read_text())["argv"][4:])


def make_trainer(plan: RunPlan, *, stopping: Any, **others: Any) -> ApplianceTrainer:
    """others: attributes that verl or a later hook would set."""
    trainer = ApplianceTrainer(config=verls_config(), plan=plan, stopping=stopping, on_engine_death=lambda error: None)
    for name, value in others.items():
        setattr(trainer, name, value)
    return trainer
