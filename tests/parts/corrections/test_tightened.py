"""The correction while the governor has it tightened: what is stricter, and that it holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from corrections_reference import CORRECTIONS, OF_A_STEP, make_case, reference

from appliance.corrections.base import tighten_limit
from appliance.corrections.objective import Loss
from appliance.corrections.registry import METHODS, correction_of
from appliance.corrections.weights import Tis, TisGeometric

CAPPED = {"cap": 1.25, "reject_k3_above": 0.01}


TIGHTER: dict[str, dict[str, object]] = {
    "tis": CAPPED,
    "adaptive": CAPPED,
    "acr": CAPPED,
    "score-centering-tis": CAPPED,
    "tis-sequence": CAPPED,
    "tis-geometric": {"cap": 1.025, "reject_k3_above": 0.01},
    "calibrated-clipping": {"cap": 1.5, "reject_k3_above": 0.01},
    "icepop": {"bounds": (0.75, 2.0), "reject_k3_above": 0.01},
    "sequence-mask": {"reject_k3_above": 0.01},
    "geometric-mask": {"reject_k3_above": 0.01},
    "k3-reject": {"cap": 0.02},
}


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("none", "score-centering")])
def test_every_method_has_something_to_tighten(name: str) -> None:
    assert CORRECTIONS[name].tightened() == replace(CORRECTIONS[name], **TIGHTER[name])


def test_no_correction_weighs_as_tis_does() -> None:
    assert CORRECTIONS["none"].tightened() == Tis(cap=2.0, reject_k3_above=0.01)


def test_no_correction_of_a_loss_of_sequences_weighs_sequences() -> None:
    tight = correction_of("none", loss=Loss.TBPO).tightened()
    assert tight == TisGeometric(cap=2.0, reject_k3_above=0.01, loss=Loss.TBPO)


@pytest.mark.parametrize(("limit", "tight"), [(2.0, 1.5), (1.0, 1.0), (0.5, 0.5), (1.2, 1.1)])
def test_a_tight_cap_is_never_looser(limit: float, tight: float) -> None:
    assert tighten_limit(limit) == pytest.approx(tight)


@pytest.mark.parametrize("name", OF_A_STEP)
@pytest.mark.parametrize("seed", range(3))
def test_a_tightened_correction_is_stricter_by_the_definitions(name: str, seed: int) -> None:
    """A limit of 0.03 in place of 0.01, so that sequences stay."""
    case, tight = make_case(seed), OF_A_STEP[name].tightened()
    tight = tight if name == "k3-reject" else replace(tight, reject_k3_above=0.03)
    corrected = tight.apply(case.part.x_BT, real_BT=case.mask_BT)
    weights, stay = reference(case, correction=tight)
    assert [row.tolist() for row in case.rows(corrected.kept_BT)] == stay
    for row, wanted in zip(case.rows(corrected.weights_BT), weights, strict=True):
        assert row.tolist() == pytest.approx(wanted, rel=1e-12)
    sums = tight.count(corrected, real_BT=case.mask_BT)
    dropped = 1 - sum(map(sum, stay)) / sum(map(len, stay))
    assert tight.metrics(sums)["is_truncated_fraction"] >= dropped > 0.1
