"""The shadow pass of calibrated clipping in a step of a run: when it is made, what it asks, what is fitted."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plans import make_plan
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta

from appliance.errors import TrainingError
from appliance.plan.model import CorrectionPlan, ShadowPlan
from appliance.quant.correction import ClipRange, CorrectionMethod
from appliance.run.events import append_line
from appliance.trainer import clipping
from appliance.trainer.calibrated import USED_HIGH, USED_LOW, Fit
from appliance.trainer.clipping import Clipping, read_fits

EVERY = 3
NOMINAL = ClipRange(0.2, 0.25)
PLAN = CorrectionPlan(
    method=CorrectionMethod.CALIBRATED_CLIPPING,
    cap=2.0,
    clip_low=NOMINAL.low,
    clip_high=NOMINAL.high,
    shadow=ShadowPlan(every=EVERY, sequences=2, micro_batch_sequences=1),
)
LENGTHS = (3, 2, 4, 2)
KEPT = ((1, 1, 1), (1, 1), (1, 1, 1, 0), (1, 1))  # of the third sequence the last token does not count
SHADOW = (0, 2)  # every other of four sequences
# Ratios of the tokens of those two: to the trainer's policy of before the update, and of that one to the rollouts'.
MOVED = {0: (1.0, 1.3, 0.7), 2: (1.1, 1.0, 1.0, 9.0)}
APART = {0: (1.0, 1.2, 0.9), 2: (1.6, 0.5, 1.0, 9.0)}


def jagged(rows: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


class Run:
    """The queue, with four sequences that lie after a prompt of two tokens each, and the worker that has updated."""

    def __init__(self) -> None:
        self.old = [-torch.arange(1.0, length + 1).double() for length in LENGTHS]
        self.passes: list[KVBatchMeta] = []
        self._new: dict[str, Tensor] = {}

    def batch(self) -> KVBatchMeta:
        keys = [f"k{index}" for index in range(len(LENGTHS))]
        return KVBatchMeta(keys=keys, tags=[{}] * len(keys), partition_id="train", fields=[])

    def log_probs(self, part: KVBatchMeta) -> None:
        """As a worker writes them: for prompt and response, each token's read one to the left of it."""
        self.passes.append(part)
        for key in part.keys:
            index = int(key[1:])
            row = self.old[index] + torch.tensor(MOVED[index]).double().log()
            self._new[key] = torch.cat([torch.tensor([5.0]).double(), row, torch.tensor([7.0]).double()])

    def kv_batch_get(self, *, keys: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        chosen = [int(key[1:]) for key in keys]
        columns = {
            "log_probs": [self._new[key] for key in keys],
            "old_log_probs": [self.old[index] for index in chosen],
            "rollout_log_probs": [self.old[index] - torch.tensor(APART[index]).double().log() for index in chosen],
            "response_mask": [torch.tensor(KEPT[index]) for index in chosen],
        }
        assert partition_id == "train" and set(select_fields) == set(columns)
        return TensorDict({name: jagged(rows) for name, rows in columns.items()}, batch_size=len(keys))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    made = Run()
    queue = SimpleNamespace(kv_batch_get=made.kv_batch_get, kv_batch_put=lambda **_: None)
    monkeypatch.setattr(clipping, "transfer_queue", queue)
    return made


def used(bounds: ClipRange | None) -> dict[str, Any]:
    """What the loss reports among verl's metrics."""
    assert bounds is not None
    return {USED_LOW: bounds.low, USED_HIGH: bounds.high}


def a_step(clip: Clipping, run: Run, *, step: int) -> None:
    clip.write(run.batch(), step=step, correction=PLAN)
    clip.after_update(run.batch(), step=step, reported=used(clip.bounds), temperature=0.7, log_probs=run.log_probs)


def test_it_is_made_after_the_first_step_and_then_every_so_many(tmp_path: Path, run: Run) -> None:
    clip, made = Clipping(make_plan(tmp_path, correction=PLAN)), []
    for step in range(1, 9):
        before = len(run.passes)
        a_step(clip, run, step=step)
        made += [step] * (len(run.passes) - before)
    assert made == [1, 4, 7]
    assert [step for step, _ in read_fits(tmp_path / clipping.FITS_FILE)] == made


def test_it_asks_the_updated_policy_about_a_part_of_the_batch(tmp_path: Path, run: Run) -> None:
    """For log-probs alone, at the run's temperature."""
    a_step(Clipping(make_plan(tmp_path, correction=PLAN)), run, step=1)
    (part,) = run.passes
    assert part.keys == [f"k{index}" for index in SHADOW]
    assert part.extra_info == {
        "calculate_entropy": False,
        "compute_loss": False,
        "temperature": 0.7,
        "micro_batch_size_per_gpu": 1,
    }


def test_the_bounds_clip_as_many_ratios_to_the_rollouts_as_the_update_moved(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand, without the token that does not count. The update moved one token beyond 1.25 (1.3) and one below 0.8
    (0.7); to the rollouts 1.56 and 1.76 lie beyond, 0.63 and 0.5 below: each bound goes to the nearer of its two."""
    found: list[Fit] = []
    fit_bounds = clipping.fit_bounds
    monkeypatch.setattr(clipping, "fit_bounds", lambda *a, **k: found.append(fit_bounds(*a, **k)) or found[-1])
    clip = Clipping(make_plan(tmp_path, correction=PLAN))
    a_step(clip, run, step=1)
    (fit,) = found
    assert (fit.tokens, fit.above, fit.below, fit.unfitted_above, fit.unfitted_below) == (6, 1, 1, 2, 2)
    assert (1 + fit.bounds.high, 1 - fit.bounds.low) == (pytest.approx(1.3 * 1.2), pytest.approx(0.7 * 0.9))
    assert read_fits(tmp_path / clipping.FITS_FILE) == [(1, fit.bounds)]
    assert clip.bounds == NOMINAL  # of the step that ended; the next one has the fit
    clip.write(run.batch(), step=2, correction=PLAN)
    assert clip.bounds == fit.bounds and clip.metrics()["clip_fitted_step"] == 1


@pytest.mark.parametrize("reported", [{}, {USED_LOW: 0.2, USED_HIGH: 0.25}, {USED_LOW: 0.3, USED_HIGH: math.nan}])
def test_a_loss_that_did_not_clip_by_the_bounds_ends_the_step(
    tmp_path: Path, run: Run, reported: dict[str, float]
) -> None:
    """Also in a step without a shadow pass."""
    append_line(tmp_path / clipping.FITS_FILE, {"step": 1, "low": 0.3, "high": 0.4})
    clip = Clipping(make_plan(tmp_path, correction=PLAN))
    clip.write(run.batch(), step=2, correction=PLAN)
    with pytest.raises(TrainingError, match="the loss clipped within"):
        clip.after_update(run.batch(), step=2, reported=reported, temperature=1.0, log_probs=run.log_probs)
    assert run.passes == []


def test_the_bounds_reach_no_further_than_the_guards_cap(tmp_path: Path, run: Run) -> None:
    """Tightened to a cap of 1.5; a fit of before reaches further."""
    append_line(tmp_path / clipping.FITS_FILE, {"step": 1, "low": 0.9, "high": 9.0})
    clip = Clipping(make_plan(tmp_path, correction=PLAN))
    clip.write(run.batch(), step=2, correction=PLAN.replace(cap=1.5, reject_k3_above=0.01))
    assert (clip.bounds.low, clip.bounds.high) == (pytest.approx(1 - 1 / 1.5), 0.5)
