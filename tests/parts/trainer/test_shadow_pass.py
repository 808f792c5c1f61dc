"""The shadow pass of calibrated clipping in a step of a run: when it is made, what it asks, what is fitted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from plans import make_algorithm, make_plan
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta

from appliance.corrections.objective import ClipRange
from appliance.corrections.registry import CorrectionMethod
from appliance.record.checkpoints import FITS_FILE
from appliance.record.events import append_line
from appliance.record.plan import RunPlan, ShadowPlan
from appliance.settings.sections import Correction
from appliance.trainer import correction as module
from appliance.trainer.correction import (
    CLIP_UPPER,
    USED,
    BatchCorrection,
    ShadowPass,
    read_fits,
    shadow_batch,
    sums_of,
)

EVERY = 3
NOMINAL = ClipRange(0.2, 0.25)
PLAN = make_plan(
    Path("/runs/a-1"),
    correction=Correction(method=CorrectionMethod("calibrated-clipping"), cap=2.0, shadow_every=EVERY),
    algorithm=make_algorithm(clip_low=NOMINAL.low, clip_high=NOMINAL.high),
    shadow=ShadowPlan(sequences=2, forward_sequences=1),
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
    monkeypatch.setattr(module, "transfer_queue", SimpleNamespace(kv_batch_get=made.kv_batch_get))
    return made


def a_plan(run_dir: Path) -> RunPlan:
    made = PLAN.replace(run_dir=str(run_dir))
    return made.replace(rollout=made.rollout.replace(temperature=0.7))


def fitted(run_dir: Path, *lines: tuple[int, float, float]) -> None:
    for step, low, high in lines:
        append_line(run_dir / FITS_FILE, {"step": step, "low": low, "high": high, "tokens": 9})


def test_it_is_made_after_the_first_step_and_then_every_so_many(tmp_path: Path, run: Run) -> None:
    shadow, passed_at = ShadowPass(a_plan(tmp_path)), []
    for step in range(1, 9):
        before = len(run.passes)
        shadow.run(run.batch(), step=step, log_probs=run.log_probs)
        passed_at += [step] * (len(run.passes) - before)
    assert passed_at == [1, 4, 7]
    assert [step for step, _ in read_fits(tmp_path / FITS_FILE)] == passed_at


def test_it_asks_the_updated_policy_about_a_part_of_the_batch(tmp_path: Path, run: Run) -> None:
    """For log-probs alone, at the run's temperature."""
    ShadowPass(a_plan(tmp_path)).run(run.batch(), step=1, log_probs=run.log_probs)
    (part,) = run.passes
    assert part.keys == [f"k{index}" for index in SHADOW]
    assert part.extra_info == {
        "calculate_entropy": False,
        "compute_loss": False,
        "temperature": 0.7,
        "micro_batch_size_per_gpu": 1,
    }


def test_the_bounds_clip_as_many_ratios_to_the_rollouts_as_the_update_moved(tmp_path: Path, run: Run) -> None:
    """By hand, without the token that does not count. The update moved one token beyond 1.25 (1.3) and one below 0.8
    (0.7); to the rollouts 1.56 and 1.76 lie beyond, 0.63 and 0.5 below: each bound goes to the nearer of its two."""
    shadow = ShadowPass(a_plan(tmp_path))
    shadow.run(run.batch(), step=1, log_probs=run.log_probs)
    line = json.loads((tmp_path / FITS_FILE).read_text())
    counts = {"tokens": 6, "above": 1, "below": 1, "unfitted_above": 2, "unfitted_below": 2}
    assert {key: line[key] for key in counts} == counts
    assert (1 + line["high"], 1 - line["low"]) == (pytest.approx(1.3 * 1.2), pytest.approx(0.7 * 0.9))
    assert shadow.last_fit(before=1) == (None, None)
    assert shadow.last_fit(before=2) == (1, ClipRange(line["low"], line["high"]))


def test_a_step_has_the_last_fit_before_it_also_after_a_resume(tmp_path: Path) -> None:
    shadow = ShadowPass(a_plan(tmp_path))
    assert shadow.last_fit(before=1) == (None, None)
    fitted(tmp_path, (1, 0.3, 0.4), (3, 0.3, 0.5), (5, 0.3, 9.0), (3, 0.3, 0.55))  # the last by another attempt
    for step, (made, high) in {2: (1, 0.4), 3: (1, 0.4), 4: (3, 0.55), 5: (3, 0.55)}.items():
        assert shadow.last_fit(before=step) == (made, ClipRange(0.3, high))
    assert len(read_fits(tmp_path / FITS_FILE)) == 4


def test_a_shadow_batch_is_spread_over_the_batch_without_its_padding() -> None:
    keys = [f"k{index}" for index in range(12)]
    tags = [{"is_padding": index >= 10} for index in range(12)]
    batch = KVBatchMeta(keys=keys, tags=tags, partition_id="train", fields=["a"])
    assert shadow_batch(batch, sequences=4).keys == ["k0", "k2", "k5", "k7"]
    assert shadow_batch(batch, sequences=10).keys == keys[:10]


class Columns:
    """The queue of one batch of three tokens."""

    def __init__(self) -> None:
        row = torch.tensor([-1.0, -2.0, -3.0])
        ones = torch.ones(3).long()
        fields = {"old_log_probs": row, "rollout_log_probs": row, "loss_mask": ones, "response_mask": ones}
        self.rows = {name: jagged([each]) for name, each in (fields | {"advantages": row}).items()}

    def kv_batch_get(self, *, select_fields: list[str], **_: object) -> TensorDict:
        return TensorDict({name: self.rows[name] for name in select_fields}, batch_size=1)

    def kv_batch_put(self, *, keys: list[str], partition_id: str, fields: TensorDict) -> KVBatchMeta:
        self.rows |= dict(fields.items())
        return KVBatchMeta(keys=keys, tags=[{}], partition_id=partition_id, fields=list(self.rows))


def test_a_step_is_clipped_and_corrected_as_the_guard_has_it(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tightened to a cap of 1.5; a fit of before reaches further."""
    queue = Columns()
    monkeypatch.setattr(module, "transfer_queue", queue)
    fitted(tmp_path, (1, 0.9, 9.0))
    correction = BatchCorrection(a_plan(tmp_path))
    tight = replace(PLAN.loss_correction, cap=1.5, reject_k3_above=0.01)
    first = KVBatchMeta(keys=["a"], tags=[{}], partition_id="train", fields=[])
    batch = correction.prepare(first, step=2, correction=tight)
    assert queue.rows[CLIP_UPPER].values().tolist() == [1.5] * 3
    metrics = correction.metrics()
    assert (metrics["clip_bound_low"], metrics["clip_bound_high"]) == (pytest.approx(1 / 1.5), 1.5)
    assert metrics["clip_fitted_step"] == 1
    used = sums_of({name: rows.values() for name, rows in queue.rows.items()})
    reported = {f"{USED}{name}": value for name, value in used.items()}
    correction.after_update(batch, step=2, reported=reported, log_probs=run.log_probs)
    assert run.passes == []  # the next one is after step 4
