"""Codes that updates change, sorted by their learning rates, out of a comparison's stored results."""

from __future__ import annotations

import pytest

from appliance.compare.results import RunResult, Step
from appliance.compare.stored import StoredRun
from appliance.corrections.registry import CorrectionMethod
from benchmarks.codes import PLAIN, UAQ, shares_by_rate, table


def stored(uaq: float | None, *updates: tuple[float | None, float | None]) -> StoredRun:
    """updates: (learning rate, share of codes that changed) of each step."""
    steps = tuple(
        Step(number, learning_rate=rate, codes_changed_fraction=share)
        for number, (rate, share) in enumerate(updates, start=1)
    )
    result = RunResult("a", 0, "a-seed0", CorrectionMethod.TIS, "done", "", steps, (), 1.0, 0.0)
    return StoredRun({"correction": {"uaq_scale": uaq}}, "problems", {}, "", "", result)


def test_an_update_is_in_the_bin_of_its_rate() -> None:
    """Each bin has its upper end: 8 is in (4, 8], 4 in (2, 4]."""
    plain = stored(None, (8e-5, 0.08), (4.1e-5, 0.05), (4e-5, 0.04), (1e-5, 0.01))
    scaled = stored(1.5, (8e-5, 0.16))
    assert shares_by_rate([plain, scaled]) == {
        0: {PLAIN: [0.08, 0.05], UAQ: [0.16]},
        1: {PLAIN: [0.04], UAQ: []},
        3: {PLAIN: [0.01], UAQ: []},
    }
    first, last = table([plain, scaled]).splitlines()[2::2]
    assert first == "| 4.0e-05 to 8.0e-05 | 2 | 6.5 % (5 to 8) | 1 | 16 % (16 to 16) |"
    assert last == "| 5.0e-06 to 1.0e-05 | 1 | 1 % (1 to 1) | 0 | - |"


@pytest.mark.parametrize("update", [(0.0, 0.1), (None, 0.1), (1e-5, None)])
def test_steps_without_a_rate_or_in_bf16_have_none(update: tuple[float | None, float | None]) -> None:
    assert shares_by_rate([stored(None, update)]) == {}
