"""Tokens of tools and templates count nowhere: whatever stands under mask 0, no number of a step changes."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from test_corrected_loss import CLIP_LOWER, CLIP_UPPER, KEPT, REAL, WEIGHTS, make_config
from torch import Tensor
from verl.utils import tensordict_utils as tu

from appliance.corrections.base import LossCorrection
from appliance.corrections.objective import ClipRange
from appliance.corrections.registry import METHODS, correction_of
from appliance.trainer.correction import CorrectionInputs, _parts, corrected_loss, fields_of, sums_of
from appliance.trainer.metrics import measure_batch

LENGTHS = (12, 7, 20, 5)
FITTED = ClipRange(0.3, 0.4)


def masks() -> list[Tensor]:
    """Turns of the model, and between them what a tool said; each ends with a turn of the model."""
    rng = np.random.default_rng(3)
    drawn = []
    for length in LENGTHS:
        mask = torch.ones(length, dtype=torch.int64)
        start = int(rng.integers(1, length - 2))
        mask[start : start + int(rng.integers(1, length - start))] = 0
        mask[-1] = 1
        drawn.append(mask)
    return drawn


def sequences(garbage: float) -> CorrectionInputs:
    """The same numbers each time but under mask 0, where they are of the size of `garbage`."""
    rng, real = np.random.default_rng(7), masks()
    trainer, rollout, advantages = [], [], []
    for mask in real:
        old = torch.from_numpy(-rng.exponential(1.0, len(mask)).astype(np.float32)) - 0.5
        drawn = old + torch.from_numpy(rng.normal(0, 0.7, len(mask)).astype(np.float32))
        advantage = torch.full((len(mask),), float(rng.normal(0, 1)))
        junk = torch.linspace(-garbage, garbage, len(mask))
        trainer.append(old.where(mask.bool(), junk))
        rollout.append(drawn.where(mask.bool(), -3 * junk))
        advantages.append(advantage.where(mask.bool(), torch.tensor(0.0)))  # verl's are 0 there
    return CorrectionInputs(tuple(trainer), tuple(rollout), tuple(real), tuple(advantages))


def corrections() -> list[LossCorrection]:
    made = [correction_of(name, clip=ClipRange(0.2, 0.28)) for name in METHODS]
    return [*made, *(each.tightened() for each in made), *(replace(each, reject_k3_above=0.2) for each in made)]


def step(correction: LossCorrection, inputs: CorrectionInputs) -> dict[str, object]:
    """Everything that a step makes of its log-probs: what is written into the batch, metrics, loss and gradient."""
    correction = correction.for_step(_parts(inputs), fitted=FITTED)
    fields, sums = fields_of(inputs, correction=correction)
    columns = {REAL: inputs.real, "old_log_probs": inputs.trainer, "rollout_log_probs": inputs.rollout, **fields}
    columns |= {"advantages": inputs.advantages, "responses": inputs.real}
    nested = {name: jagged(rows) for name, rows in columns.items()}
    rng = np.random.default_rng(11)
    leaves = [
        (row + torch.from_numpy(rng.normal(0, 0.3, len(row)).astype(np.float32))).requires_grad_()
        for row in inputs.trainer
    ]
    data = TensorDict({**nested, "prompts": jagged([row[:1] for row in inputs.trainer])}, batch_size=len(LENGTHS))
    tokens = int(sum(mask.sum() for mask in inputs.real))
    tu.assign_non_tensor(data, dp_size=1, global_batch_size=len(LENGTHS), batch_num_tokens=tokens)
    whole = torch.nested.as_nested_tensor([torch.cat([row, row.new_zeros(1)]) for row in leaves], layout=torch.jagged)
    how = {"ratio_to": correction.ratio_to, "clips": correction.clips}
    loss, metrics = corrected_loss(make_config(), {"log_probs": whole}, data, **how)
    loss.backward()
    real = [mask.bool() for mask in inputs.real]
    real_rows = {
        name: [row[mask].tolist() for row, mask in zip(rows, real, strict=True)] for name, rows in fields.items()
    }
    under = {
        name: sum(float(row[~mask].abs().sum()) for row, mask in zip(fields[name], real, strict=True))
        for name in (KEPT, WEIGHTS)
    }
    return {
        "fields": real_rows,
        "under mask 0": under,
        "metrics": correction.metrics(sums),
        "sums": sums_of({name: torch.cat(list(rows)) for name, rows in ({REAL: inputs.real} | fields).items()}),
        "loss": float(loss),
        "reported": {name: metric.values for name, metric in metrics.items()},
        "gradient": [row.grad[mask].tolist() for row, mask in zip(leaves, real, strict=True)],
        "gradient under mask 0": sum(
            float(row.grad[~mask].abs().sum()) for row, mask in zip(leaves, real, strict=True)
        ),
    }


def jagged(rows: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    return torch.nested.as_nested_tensor([row.clone() for row in rows], layout=torch.jagged)


@pytest.mark.parametrize("correction", corrections(), ids=lambda each: each.text)
def test_no_correction_sees_what_stands_under_mask_0(correction: LossCorrection) -> None:
    calm = step(correction, sequences(0.0))
    assert calm["under mask 0"] == {KEPT: 0.0, WEIGHTS: 0.0} and calm["gradient under mask 0"] == 0
    assert step(correction, sequences(9.0)) == calm


def test_no_method_has_a_bound_in_its_sums_that_is_of_a_tool() -> None:
    for correction in corrections():
        if correction.clips:
            made = [fields_of(sequences(size), correction=correction)[0] for size in (0.0, 9.0)]
            for name in (CLIP_LOWER, CLIP_UPPER):
                assert all(torch.isfinite(row).all() for row in made[1][name])


def test_no_measure_of_a_step_sees_what_stands_under_mask_0() -> None:
    def measured(garbage: float) -> dict[str, object]:
        inputs = sequences(garbage)
        junk = int(garbage)
        responses = [torch.where(mask.bool(), 5, junk + torch.arange(len(mask))) for mask in inputs.real]
        telemetry = measure_batch(
            torch.cat(inputs.trainer),
            rollout_N=torch.cat(inputs.rollout),
            real_N=torch.cat(inputs.real),
            responses_N=torch.cat(responses),
            row_S=torch.tensor(LENGTHS),
            prompts=["one", "two", "three", "four"],
            cap=2.0,
        )
        return {**telemetry.metrics(), **asdict(telemetry.mismatch), "tokens_mean": telemetry.tokens_mean}

    calm = measured(0.0)
    assert calm["tokens_mean"] == sum(int(mask.sum()) for mask in masks()) / len(LENGTHS)
    assert measured(9.0) == calm


def test_samples_that_differ_in_what_a_tool_said_are_equal() -> None:
    """The model said the same: there is nothing to learn from their difference."""
    mask = torch.tensor([1, 0, 1, 1, 0, 1])
    telemetry = measure_batch(
        torch.zeros(6),
        rollout_N=torch.zeros(6),
        real_N=mask,
        responses_N=torch.tensor([1, 2, 3, 1, 9, 3]),
        row_S=torch.tensor([3, 3]),
        prompts=["same", "same"],
        cap=None,
    )
    assert telemetry.equal_group_fraction == 1.0
