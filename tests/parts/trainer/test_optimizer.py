"""After a checkpoint was loaded the optimizer is the plan's, not the one that saved it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from plans import make_plan
from test_verl_engine import tiny
from torch.optim.lr_scheduler import LambdaLR

from appliance.record.plan import RunPlan
from appliance.settings.sections import Optimizer
from appliance.trainer.attest import set_as_planned
from appliance.trainer.verl_engine import split_rates

WARMUP = 7  # steps: a third of the rate is no power of two


def planned(tmp_path: Path, *, scale: float = 1.0, **settings: object) -> RunPlan:
    plan = make_plan(tmp_path, optimizer=Optimizer(norm_fed_lr_scale=scale))
    return plan.replace(optimizer=plan.optimizer.replace(warmup_steps=WARMUP, **settings))


def optimizer_of(plan: RunPlan) -> tuple[torch.optim.AdamW, LambdaLR]:
    """As an engine has them before anything is loaded."""
    model, settings = tiny(), plan.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        betas=settings.betas,
        eps=settings.epsilon,
    )
    if plan.optimizer.norm_fed_lr_scale != 1:
        split_rates(optimizer, parameters_by_name=model.named_parameters(), scale=plan.optimizer.norm_fed_lr_scale)
    return optimizer, LambdaLR(optimizer, lambda step: min(1.0, step / WARMUP))


def resumed(saved: RunPlan, *, plan: RunPlan, after: int) -> tuple[torch.optim.AdamW, LambdaLR]:
    """With what an attempt of `saved` left after so many steps, loaded as verl does."""
    (before, its_schedule), (optimizer, schedule) = optimizer_of(saved), optimizer_of(plan)
    for _ in range(after):
        before.step()
        its_schedule.step()
    optimizer.load_state_dict(before.state_dict())
    schedule.load_state_dict(its_schedule.state_dict())
    return optimizer, schedule


def groups(optimizer: torch.optim.Optimizer) -> list[dict[str, object]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


@pytest.mark.parametrize("scale", [1.0, 1.5])
@pytest.mark.parametrize("after", [0, 3, WARMUP + 1])
def test_what_the_plan_changed_is_not_the_checkpoints(tmp_path: Path, after: int, scale: float) -> None:
    changed = {"learning_rate": 3e-5, "weight_decay": 0.1, "betas": (0.8, 0.99), "epsilon": 1e-6}
    plan = planned(tmp_path, scale=scale, **changed)
    optimizer, schedule = resumed(planned(tmp_path, scale=scale), plan=plan, after=after)
    rate = set_as_planned(optimizer, schedule=schedule, plan=plan)
    anew, its_schedule = optimizer_of(plan)
    for _ in range(after):
        anew.step()
        its_schedule.step()
    assert groups(optimizer) == groups(anew)
    assert rate == schedule.get_last_lr()[0] == its_schedule.get_last_lr()[0]
    for each in (optimizer, schedule, anew, its_schedule):
        each.step()
    assert groups(optimizer) == groups(anew)


@pytest.mark.parametrize("scale", [1.0, 1.5])
def test_without_a_change_no_bit_is_another(tmp_path: Path, scale: float) -> None:
    plan = planned(tmp_path, scale=scale)
    optimizer, schedule = resumed(plan, plan=plan, after=3)
    before = groups(optimizer), schedule.state_dict()
    set_as_planned(optimizer, schedule=schedule, plan=plan)
    assert (groups(optimizer), schedule.state_dict()) == before
