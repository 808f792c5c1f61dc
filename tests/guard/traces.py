"""What the governor is shown in tests, and its moves as short tuples."""

from __future__ import annotations

from collections.abc import Iterable

from appliance.guard.governor import Decision, GovernorState, observe
from appliance.guard.policy import Action, Policy
from appliance.guard.signals import Signals
from appliance.quant.scheme import Scheme

K3_BAD, K3_BETWEEN, K3_FINE = 0.03, 0.01, 0.001
BEYOND = 0.6  # nats; a correction mends up to 0.5
EVERYTHING = frozenset(Action)
# Short counts, so that a trace shows every move: 2 bad of 3, 4 fine, 2 steps between.
QUICK = Policy(Scheme.INT8, climb_bad=2, climb_window=3, descend_fine=4, cooling_steps=2, cap=2.0)


def run(
    k3: Iterable[float | None], *, policy: Policy, state: GovernorState | None = None, start: int = 1
) -> tuple[GovernorState, list[Decision]]:
    state, made = state or GovernorState(), []
    for step, value in enumerate(k3, start):
        state, decisions = observe(state, Signals(step, k3_kl=value, ess=0.9), policy=policy)
        made += decisions
    return state, made


def moves(decisions: list[Decision]) -> list[tuple[int, str, str]]:
    return [(each.step, each.before.text, each.after.text) for each in decisions]
