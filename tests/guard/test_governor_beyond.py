"""Steps that no correction mends: the governor goes to other rollouts at once, and only then."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from traces import BEYOND, EVERYTHING, K3_BAD, K3_FINE, QUICK, moves, run

from appliance.guard.governor import GovernorState, observe
from appliance.guard.policy import Action, Bounds, Policy
from appliance.guard.signals import Signals


@pytest.mark.parametrize(
    ("actions", "climb"),
    [
        (frozenset(Action) - {Action.RAISE_PRECISION}, [(2, "observe", "bf16"), (6, "bf16", "stop")]),
        (
            EVERYTHING,
            [
                (2, "observe", "raise-precision (int8, 25% of layers in bf16)"),
                (6, "raise-precision (int8, 25% of layers in bf16)", "raise-precision (int8, 50% of layers in bf16)"),
                (10, "raise-precision (int8, 50% of layers in bf16)", "bf16"),
                (14, "bf16", "stop"),
            ],
        ),
        (
            frozenset({Action.WARN, Action.TIGHTEN, Action.STOP}),
            [(2, "observe", "warn"), (6, "warn", "tighten"), (10, "tighten", "stop")],
        ),
    ],
)
def test_what_no_correction_mends_leads_to_other_rollouts_at_once(
    actions: frozenset[Action], climb: list[tuple[int, str, str]]
) -> None:
    """Never past them: whether they help is seen before the run is stopped. Without such a level one by one."""
    _, made = run([BEYOND] * 20, policy=replace(QUICK, actions=actions))
    assert moves(made) == climb
    assert all(each.after.rung.action is each.action for each in made)


def test_a_climb_past_levels_says_which_bound_allows_it() -> None:
    state = GovernorState()
    for step in (1, 2):
        state, made = observe(state, Signals(step, k3_kl=BEYOND, ess=0.1), policy=QUICK)
    assert made[0].text == "step 2: observe -> bf16: k3_kl 0.6 above 0.5, ess 0.1 below 0.3 (2 steps in a row)"
    assert made[0].action is Action.BF16


@pytest.mark.parametrize(
    ("trace", "policy"),
    [
        ([BEYOND, K3_BAD], QUICK),
        ([K3_BAD, BEYOND], QUICK),
        ([BEYOND, K3_FINE, BEYOND], QUICK),  # in a row
        ([0.5, 0.5], QUICK),  # on the bound
        ([math.inf, math.inf], QUICK),  # of an unknown size
        (
            [BEYOND, BEYOND],  # bad by another signal, and above what the recipe lets k3 be
            replace(QUICK, mismatch=replace(QUICK.mismatch, k3_kl=Bounds((-math.inf, 0.7), (-math.inf, 0.4)))),
        ),
    ],
)
def test_all_steps_that_lead_past_a_level_are_beyond_correction(trace: list[float], policy: Policy) -> None:
    state, made = GovernorState(), []
    for step, k3 in enumerate(trace, 1):
        fine = k3 == K3_FINE
        state, decisions = observe(state, Signals(step, k3_kl=k3, ess=0.9 if fine else 0.1), policy=policy)
        made += decisions
    assert [each.after.text for each in made] == ["warn"]
