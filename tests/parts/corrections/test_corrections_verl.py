"""Each method that verl has, against verl's own numbers for the same batch: formula, side and value of each limit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from corrections_reference import CORRECTIONS, make_case
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

from appliance.corrections.base import LossCorrection
from appliance.corrections.registry import METHODS

# float32: x is a difference of numbers below 32 (2^-19), a sum of 24 of them 24 times that, and exp makes it relative.
RTOL = 24 * 2.0**-19
UNTRUNCATED = 1e9  # above exp(20), where verl clamps a weight


def as_verl_says_it(correction: LossCorrection) -> dict[str, object]:
    """verl's k1 is log(p_rollout / p_trainer): bounds of a weight, turned over."""
    turned = correction.bounds and f"{1 / correction.bounds[1]!r}_{1 / correction.bounds[0]!r}"
    drops = {}
    if correction.reject_k3_above is not None:
        drops = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": correction.reject_k3_above}
    match correction.name:
        case "none":
            return drops
        case "tis" | "acr":
            return {"rollout_is": "token", "rollout_is_threshold": correction.cap, **drops}
        case "tis-sequence":
            return {"rollout_is": "sequence", "rollout_is_threshold": correction.cap, **drops}
        case "icepop":
            low, high = correction.bounds
            return {"rollout_is": "token", "rollout_is_threshold": f"{low!r}_{high!r}", **drops}
        case "sequence-mask":
            return {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": turned}
        case "geometric-mask":
            return {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": turned}
        case "k3-reject":
            return {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": correction.cap}
    raise KeyError(correction.name)


NAMES = ("none", "tis", "tis-sequence", "icepop", "sequence-mask", "geometric-mask", "k3-reject", "acr")
NOT_IN_VERL = ("tis-geometric", "adaptive", "calibrated-clipping", "score-centering", "score-centering-tis")
VERLS = {name: CORRECTIONS[name] for name in NAMES}
TIGHT = {
    f"{name}, tightened": replace(each.tightened(), reject_k3_above=0.03)
    for name, each in VERLS.items()
    if not name.endswith(("mask", "reject"))
}


def test_every_method_is_compared_with_verls_or_is_not_in_verl() -> None:
    assert sorted((*NAMES, *NOT_IN_VERL)) == sorted(METHODS)


@pytest.mark.parametrize("name", [*VERLS, *TIGHT])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("spread", [1e-3, 0.1, 0.3, 3.0])
def test_verl_makes_the_same_of_a_batch(name: str, seed: int, spread: float) -> None:
    case, correction = make_case(seed, sequences=200, spread=spread), (VERLS | TIGHT)[name]
    corrected = correction.apply(case.part.x_BT, real_BT=case.mask_BT)
    weights, mask_BT, _ = compute_rollout_correction_and_rejection_mask(
        case.trainer_BT, case.rollout_BT, case.mask_BT.float(), **as_verl_says_it(correction)
    )
    assert torch.equal(mask_BT.bool(), corrected.kept_BT)  # no decision of these batches lies within float32's rounding
    assert corrected.kept_BT.any() or spread == 3.0
    if weights is None:
        assert torch.equal(corrected.weights_BT, case.mask_BT.double())
    else:
        wanted_BT = weights.batch["rollout_is_weights"].double() * case.mask_BT
        torch.testing.assert_close(corrected.weights_BT, wanted_BT, rtol=RTOL, atol=0)


@pytest.mark.parametrize("name", VERLS)
def test_a_method_told_apart_from_every_other(name: str) -> None:
    """By the same batches: what verl makes of one method passes for no other's."""
    case = make_case(3)
    corrected = VERLS[name].apply(case.part.x_BT, real_BT=case.mask_BT)
    for other, correction in VERLS.items():
        made = correction.apply(case.part.x_BT, real_BT=case.mask_BT)
        same = torch.equal(made.kept_BT, corrected.kept_BT) and torch.equal(made.weights_BT, corrected.weights_BT)
        assert same == ({name, other} <= {"tis", "acr"} or name == other)
