"""The correction while the governor has it tightened: what is stricter, and that the batch carries it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from corrections_reference import PLANS, SHARE, Case, make_case, reference
from test_policy_loss import make_batch, make_config

from appliance.errors import TrainingError
from appliance.guard.ladder import Measures
from appliance.plan.model import CorrectionPlan
from appliance.quant.correction import CorrectionMethod as Method
from appliance.terms.schemes import Scheme
from appliance.trainer.corrected import LossBatch, check_correction
from appliance.trainer.policy_loss import acr_loss
from appliance.trainer.tightened import tightened, tightened_fields

LOOSE = Measures(Scheme.INT8, bf16_layer_fraction=0.0, cap=2.0, reject_k3_above=None, stop=False)
TIGHT = replace(LOOSE, cap=1.25, reject_k3_above=0.03)
ALL = {Method.NONE: CorrectionPlan(method=Method.NONE), **PLANS}
# float32 weights: exp of a float64 difference of float32 numbers, rounded once.
RTOL = 2.0**-23


@pytest.mark.parametrize(
    ("method", "wanted"),
    [
        (Method.NONE, CorrectionPlan(method=Method.TIS, cap=1.25, reject_k3_above=0.03)),
        (Method.TIS, CorrectionPlan(method=Method.TIS, cap=1.25, reject_k3_above=0.03)),
        (Method.ADAPTIVE, CorrectionPlan(method=Method.ADAPTIVE, cap=1.25, reject_k3_above=0.03)),
        (Method.ACR, CorrectionPlan(method=Method.ACR, cap=1.25, reject_k3_above=0.03, loss_cap=1.5)),
        (Method.TIS_SEQUENCE, CorrectionPlan(method=Method.TIS_SEQUENCE, cap=1.25, reject_k3_above=0.03)),
        (
            Method.CALIBRATED_CLIPPING,
            CorrectionPlan(
                method=Method.CALIBRATED_CLIPPING, cap=1.5, clip_low=0.25, clip_high=0.5, reject_k3_above=0.03
            ),
        ),
        (Method.ICEPOP, CorrectionPlan(method=Method.ICEPOP, bounds=(0.75, 2.0), reject_k3_above=0.03)),
        (Method.SEQUENCE_MASK, CorrectionPlan(method=Method.SEQUENCE_MASK, bounds=(0.75, 3.0), reject_k3_above=0.03)),
        (
            Method.GEOMETRIC_MASK,
            CorrectionPlan(method=Method.GEOMETRIC_MASK, bounds=(0.97, 1.15), reject_k3_above=0.03),
        ),
        (Method.K3_REJECT, CorrectionPlan(method=Method.K3_REJECT, cap=0.02)),
    ],
)
def test_every_method_has_something_to_tighten(method: Method, wanted: CorrectionPlan) -> None:
    assert tightened(ALL[method], measures=TIGHT) == wanted
    assert tightened(ALL[method], measures=LOOSE) == ALL[method]


def loss_batch(case: Case, *, kept: tuple, weights: tuple | None) -> LossBatch:
    real = case.rows(case.mask_BT.long())
    advantages = tuple(row * 0.0 + index - 3.5 for index, row in enumerate(case.rows(case.mask_BT.float())))
    return LossBatch(case.rows(case.trainer_BT), case.rows(case.rollout_BT), real, kept, advantages, weights)


def written(case: Case, *, plan: CorrectionPlan) -> LossBatch:
    """The batch after the driver wrote over what verl left: here verl changed nothing."""
    before = loss_batch(case, kept=case.rows(case.mask_BT.long()), weights=None)
    fields = tightened_fields(before, plan=plan, share=SHARE if plan.method is Method.ADAPTIVE else None)
    return replace(
        before,
        kept=fields["response_mask"],
        weights=fields.get("rollout_is_weights"),
        advantages=fields.get("advantages", before.advantages),
    )


@pytest.mark.parametrize("method", ALL)
@pytest.mark.parametrize("seed", range(3))
def test_the_batch_carries_the_tightened_correction(method: Method, seed: int) -> None:
    """Weights of the tightened method, and only sequences that it and the rejection keep; both by the definitions."""
    case, plan = make_case(seed), tightened(ALL[method], measures=TIGHT)
    batch = written(case, plan=plan)
    weights, stay = reference(case, plan=plan)
    rejected = CorrectionPlan(method=Method.K3_REJECT, cap=plan.reject_k3_above or 1.0)
    _, stay_too = reference(case, plan=rejected)
    both = [[one and other for one, other in zip(*rows, strict=True)] for rows in zip(stay, stay_too, strict=True)]
    assert [[bool(each) for each in row] for row in batch.kept] == both
    assert all(row.dtype is torch.int64 for row in batch.kept)
    assert (batch.weights is None) == (weights is None)
    factor = 1.5 / 1.25 if method is Method.ACR else 1.0
    for found, wanted in zip(batch.weights or (), weights or (), strict=True):
        assert found.tolist() == pytest.approx([factor * each for each in wanted], rel=RTOL)
    share = SHARE if method is Method.ADAPTIVE else None
    step = check_correction(batch, plan=plan, share=share)
    dropped = 1 - sum(map(sum, both)) / sum(map(len, both))
    assert step.acted_fraction >= dropped > 0.1


@pytest.mark.parametrize("method", [each for each in ALL if each is not Method.ADAPTIVE])
def test_a_batch_that_was_not_tightened_does_not_pass(method: Method) -> None:
    case, plan = make_case(2), ALL[method]
    loose = written(case, plan=plan)
    check_correction(loose, plan=plan)
    with pytest.raises(TrainingError):
        check_correction(loose, plan=tightened(plan, measures=TIGHT))


@pytest.mark.parametrize("seed", range(3))
def test_acr_with_scaled_weights_and_advantages_is_acr_with_the_smaller_cap(seed: int) -> None:
    """Loss and gradient. Each term is a product of three rounded factors more: 6 * 2^-24, summed over 320 tokens."""
    batch = make_batch(seed, highest=6.0)
    config = make_config()
    found = []
    for raw, advantages, cap in (
        (batch.raw, batch.advantages, 1.25),
        (batch.raw * (1.5 / 1.25), batch.advantages * (1.25 / 1.5), 1.5),
    ):
        new = batch.new.clone().requires_grad_()
        loss, metrics = acr_loss(
            batch.old,
            log_prob_BT=new,
            advantages_BT=advantages,
            mask_BT=batch.mask,
            raw_BT=raw,
            cap=cap,
            config=config,
            loss_agg_mode="token-mean",
        )
        loss.backward()
        found.append((loss.detach(), new.grad, metrics["actor/acr_widened_fraction"]))
    (one, grad_one, widened_one), (other, grad_other, widened_other) = found
    assert widened_one == widened_other > 0.1
    torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad_other, grad_one, rtol=1e-5, atol=1e-8)
