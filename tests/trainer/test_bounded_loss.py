"""Calibrated clipping as verl calls it: its own loss, in the ratio to the rollout policy, by the batch's bounds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from plans import make_plan
from tensordict import TensorDict
from test_policy_loss import DUAL, HIGH, LOW, MODES, Batch, make_batch, make_config
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.utils import tensordict_utils as tu
from verl.workers.utils.losses import ppo_loss

from appliance.errors import NumericsError, TrainingError
from appliance.plan.model import CorrectionPlan, ShadowPlan
from appliance.quant.correction import ClipRange, CorrectionMethod
from appliance.run.events import append_line
from appliance.trainer import clipping
from appliance.trainer.bounded_loss import CLIP_RANGE, bounded_loss
from appliance.trainer.calibrated import USED_HIGH, USED_LOW
from appliance.trainer.clipping import Clipping, check_used, read_fits, shadow_batch

NOMINAL = ClipRange(LOW, HIGH)
WIDE = ClipRange(0.5, 0.9)


def jagged(rows_BT: Tensor, lengths: list[int]) -> Tensor:
    rows = [row[:length].clone() for row, length in zip(rows_BT, lengths, strict=True)]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def as_verl_has_it(batch: Batch, *, bounds: ClipRange | None) -> tuple[dict[str, Tensor], TensorDict, Tensor]:
    """(model output, micro-batch, the leaf for the gradient). A prompt of one token before each response; the rollout's
    log-probs are the trainer's less log of the weights."""
    lengths = batch.mask.sum(dim=-1).tolist()
    leaf = batch.new.clone().requires_grad_()
    # verl's model output covers prompt and response and is read one to the left
    whole = [torch.cat([row[:length], row.new_zeros(1)]) for row, length in zip(leaf, lengths, strict=True)]
    rollout = batch.old - torch.where(batch.mask, batch.raw, torch.ones_like(batch.raw)).log()
    fields = {
        "prompts": jagged(torch.zeros(len(lengths), 1), [1] * len(lengths)),
        "responses": jagged(batch.old, lengths),
        "response_mask": jagged(batch.mask.long(), lengths),
        "old_log_probs": jagged(batch.old, lengths),
        "rollout_log_probs": jagged(rollout, lengths),
        "advantages": jagged(batch.advantages, lengths),
    }
    data = TensorDict(fields, batch_size=len(lengths))
    if bounds is not None:
        rows = torch.tensor([[bounds.low, bounds.high]], dtype=torch.float64).repeat(len(lengths), 1)
        data[CLIP_RANGE] = jagged(rows, [2] * len(lengths))  # as verl's queue gives it back
    tu.assign_non_tensor(data, dp_size=1, global_batch_size=len(lengths), batch_num_tokens=sum(lengths))
    return {"log_probs": torch.nested.as_nested_tensor(whole, layout=torch.jagged)}, data, leaf


def reference(batch: Batch, *, bounds: ClipRange) -> tuple[float, float]:
    """(token mean, mean of absolute terms) in float64, token by token."""
    total, size = 0.0, 0.0
    for index in zip(*np.nonzero(batch.mask.numpy()), strict=True):
        moved = float(batch.new[index]) - float(batch.old[index])
        ratio = np.exp(moved) * float(batch.raw[index])  # p_theta / p_rollout
        advantage = float(batch.advantages[index])
        clipped = min(max(ratio, 1 - bounds.low), 1 + bounds.high)
        objective = min(ratio * advantage, clipped * advantage)
        if advantage < 0:
            objective = max(objective, DUAL * advantage)
        total, size = total - objective, size + abs(objective)
    return total / int(batch.mask.sum()), size / int(batch.mask.sum())


@pytest.mark.parametrize("mode", MODES)
def test_without_mismatch_and_fit_it_is_verls_loss_to_the_last_bit(mode: str) -> None:
    batch = make_batch(0, highest=9.0)
    batch = Batch(batch.old, batch.new, batch.advantages, batch.mask, batch.mask.float())
    output, data, leaf = as_verl_has_it(batch, bounds=NOMINAL)
    loss, metrics = bounded_loss(replace(make_config(), loss_agg_mode=mode), output, data)
    loss.backward()
    output, data, their_leaf = as_verl_has_it(batch, bounds=None)
    theirs, their_metrics = ppo_loss(replace(make_config(), loss_agg_mode=mode), output, data)
    theirs.backward()
    assert torch.equal(loss, theirs) and torch.equal(leaf.grad, their_leaf.grad)
    own = {USED_LOW, USED_HIGH}
    assert metrics.keys() - own == their_metrics.keys() and (metrics[USED_LOW].values, metrics[USED_HIGH].values) == (
        [LOW],
        [HIGH],
    )


@pytest.mark.parametrize("seed", range(3))
def test_it_is_the_clipped_ratio_to_the_rollout_policy(seed: int) -> None:
    batch = make_batch(seed, highest=9.0)
    output, data, leaf = as_verl_has_it(batch, bounds=WIDE)
    loss, _ = bounded_loss(make_config(), output, data)
    wanted, size = reference(batch, bounds=WIDE)
    # as in test_policy_loss.py, and log and exp of a weight besides: two more roundings of numbers below 8
    assert abs(float(loss.detach()) - wanted) < 2.0**-17 * size
    loss.backward()
    assert torch.isfinite(leaf.grad).all() and not bool(leaf.grad[~batch.mask].any())


def test_the_bounds_of_the_batch_decide_and_not_the_configuration() -> None:
    """One token, B = 1.5 with a positive advantage: beyond 1.28, inside 1.9."""
    one = torch.ones(1, 1)
    batch = Batch(-4 * one, -4 * one, one, one.bool(), 1.5 * one)
    for bounds, flows in ((NOMINAL, False), (WIDE, True)):
        output, data, leaf = as_verl_has_it(batch, bounds=bounds)
        bounded_loss(make_config(), output, data)[0].backward()
        assert bool(leaf.grad.any()) == flows


def test_the_batch_keeps_the_trainers_log_probs() -> None:
    output, data, _ = as_verl_has_it(make_batch(2, highest=9.0), bounds=WIDE)
    before = data["old_log_probs"].values().clone()
    bounded_loss(make_config(), output, data)
    assert torch.equal(data["old_log_probs"].values(), before)


def test_micro_batches_add_up_to_the_batch() -> None:
    batch = make_batch(4, highest=9.0)
    output, data, leaf = as_verl_has_it(batch, bounds=WIDE)
    whole, _ = bounded_loss(make_config(), output, data)
    whole.backward()
    gradient, total = torch.zeros_like(leaf), 0.0
    for rows in (slice(0, 5), slice(5, None)):
        part = Batch(*(each[rows] for each in (batch.old, batch.new, batch.advantages, batch.mask, batch.raw)))
        output, data, part_leaf = as_verl_has_it(part, bounds=WIDE)
        tu.assign_non_tensor(data, global_batch_size=len(batch.mask), batch_num_tokens=int(batch.mask.sum()))
        loss, _ = bounded_loss(make_config(), output, data)
        loss.backward()
        gradient[rows], total = part_leaf.grad, total + float(loss.detach())
    assert total == pytest.approx(float(whole.detach()), rel=1e-5)  # a sum of 320 float32 terms in another order
    assert torch.allclose(gradient, leaf.grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize("missing", [CLIP_RANGE, "rollout_log_probs"])
def test_a_batch_that_lacks_something_raises(missing: str) -> None:
    output, data, _ = as_verl_has_it(make_batch(0, highest=2.0), bounds=WIDE)
    del data[missing]
    with pytest.raises(TrainingError) as raised:
        bounded_loss(make_config(), output, data)
    assert raised.value.message == f"`calibrated-clipping` got a batch without {missing}"


def test_bounds_that_differ_in_a_batch_raise() -> None:
    output, data, _ = as_verl_has_it(make_batch(0, highest=2.0), bounds=WIDE)
    data[CLIP_RANGE].values()[7] = 0.7
    with pytest.raises(TrainingError, match="the clip range of a micro-batch is not the same in every row"):
        bounded_loss(make_config(), output, data)


def test_a_log_prob_that_is_not_finite_raises() -> None:
    output, data, _ = as_verl_has_it(make_batch(0, highest=2.0), bounds=WIDE)
    data["rollout_log_probs"].values()[2] = float("nan")
    with pytest.raises(NumericsError, match="a log-probability of this step's rollouts is not finite"):
        bounded_loss(make_config(), output, data)


def test_the_loss_must_say_that_it_used_the_bounds() -> None:
    check_used({USED_LOW: 0.5, USED_HIGH: 0.9 + 1e-9}, bounds=WIDE)
    for reported in ({}, {USED_LOW: 0.5, USED_HIGH: 0.2}):
        with pytest.raises(TrainingError, match=r"the loss clipped within .*, and \(0.5, 0.9\) was meant"):
            check_used(reported, bounds=WIDE)


def test_a_shadow_batch_is_spread_over_the_batch_without_its_padding() -> None:
    keys = [f"k{index}" for index in range(12)]
    tags = [{"is_padding": index >= 10} for index in range(12)]
    batch = KVBatchMeta(keys=keys, tags=tags, partition_id="train", fields=["a"])
    assert shadow_batch(batch, sequences=4).keys == ["k0", "k2", "k5", "k7"]
    assert shadow_batch(batch, sequences=10).keys == keys[:10]


PLAN = CorrectionPlan(
    method=CorrectionMethod.CALIBRATED_CLIPPING,
    cap=1.6,
    clip_low=LOW,
    clip_high=HIGH,
    shadow=ShadowPlan(every=2, sequences=2, micro_batch_sequences=1),
)


def test_a_step_has_the_last_fit_before_it_also_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[TensorDict] = []
    queue = SimpleNamespace(kv_batch_put=lambda keys, partition_id, fields: written.append(fields))
    monkeypatch.setattr(clipping, "transfer_queue", queue)
    batch = KVBatchMeta(keys=["a", "b", "c"], tags=[{}] * 3, partition_id="train", fields=[])
    clip = Clipping(make_plan(tmp_path, correction=PLAN))
    assert clip.metrics() == {}
    clip.write(batch, step=1, correction=PLAN)
    assert (clip.bounds, clip.metrics()["clip_fitted_step"]) == (NOMINAL, None)
    for step, high in ((1, 0.4), (3, 0.5), (5, 9.0), (3, 0.55)):  # the last one again, by another attempt
        append_line(tmp_path / clipping.FITS_FILE, {"step": step, "low": 0.3, "high": high, "tokens": 9})
    for step, high in ((2, 0.4), (3, 0.4), (4, 0.55), (5, 0.55)):
        fresh = Clipping(make_plan(tmp_path, correction=PLAN))
        fresh.write(batch, step=step, correction=PLAN)
        assert fresh.bounds == ClipRange(0.3, high)
        assert written[-1][CLIP_RANGE].tolist() == [[0.3, high]] * 3
    assert len(read_fits(tmp_path / clipping.FITS_FILE)) == 4


def test_no_bound_is_beyond_a_cap_that_was_tightened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clipping, "transfer_queue", SimpleNamespace(kv_batch_put=lambda **_: None))
    append_line(tmp_path / clipping.FITS_FILE, {"step": 1, "low": 0.9, "high": 9.0, "tokens": 9})
    batch = KVBatchMeta(keys=["a"], tags=[{}], partition_id="train", fields=[])
    clip = Clipping(make_plan(tmp_path, correction=PLAN))
    clip.write(batch, step=2, correction=PLAN)
    assert (clip.metrics()["clip_bound_low"], clip.metrics()["clip_bound_high"]) == (
        pytest.approx(1 / 1.6),
        pytest.approx(1.6),
    )


def test_another_method_has_no_bounds(tmp_path: Path) -> None:
    clip = Clipping(make_plan(tmp_path))
    batch = KVBatchMeta(keys=["a"], tags=[{}], partition_id="train", fields=[])
    assert clip.write(batch, step=1, correction=CorrectionPlan(method=CorrectionMethod.TIS, cap=2.0)) is batch
    clip.after_update(batch, step=1, reported={}, temperature=1.0, log_probs=lambda _: pytest.fail("no shadow pass"))
    assert clip.metrics() == {}
