"""The governor's ladder, step by step: when it climbs, when it descends, what it never does."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.guard.governor import Decision, GovernorState, Move, Rung, ladder, observe, resume
from appliance.guard.policy import Action, Bounds, Policy
from appliance.guard.signals import Signals
from appliance.record.lines import as_json, parse
from appliance.terms.schemes import Scheme

K3_BAD, K3_BETWEEN, K3_FINE = 0.03, 0.01, 0.001
EVERYTHING = frozenset(Action)
# Short counts, so that a trace shows every move: 2 bad of 3, 4 fine, 2 steps between.
QUICK = Policy(Scheme.INT8, climb_bad=2, climb_window=3, descend_fine=4, cooling_steps=2)


def run(
    k3: Iterable[float | None], *, policy: Policy, state: GovernorState | None = None, start: int = 1
) -> tuple[GovernorState, list[Decision]]:
    state, all_decisions = state or GovernorState(), []
    for step, value in enumerate(k3, start):
        state, decisions = observe(state, Signals(step, k3_kl=value, ess=0.9), policy=policy)
        all_decisions += decisions
    return state, all_decisions


def moves(decisions: list[Decision]) -> list[tuple[int, str, str]]:
    return [(each.step, each.before.text, each.after.text) for each in decisions]


def test_a_healthy_run_is_left_alone() -> None:
    state, made = run([K3_FINE] * 200, policy=QUICK)
    assert made == []
    assert state.level is None and not state.stopped


def test_what_stays_bad_climbs_every_rung_in_order() -> None:
    """Two bad steps, then two of cooling that are not judged: a move every fourth step."""
    _, decisions = run([K3_BAD] * 30, policy=replace(QUICK, actions=EVERYTHING))
    assert moves(decisions) == [
        (2, "observe", "warn"),
        (6, "warn", "tighten"),
        (10, "tighten", "raise-precision (int8, 25% of layers in bf16)"),
        (14, "raise-precision (int8, 25% of layers in bf16)", "raise-precision (int8, 50% of layers in bf16)"),
        (18, "raise-precision (int8, 50% of layers in bf16)", "bf16"),
        (22, "bf16", "stop"),
    ]
    assert [each.action for each in decisions] == [
        Action.WARN,
        Action.TIGHTEN,
        Action.RAISE_PRECISION,
        Action.RAISE_PRECISION,
        Action.BF16,
        Action.STOP,
    ]


def test_a_stopped_governor_decides_nothing_more() -> None:
    state, _ = run([K3_BAD] * 30, policy=QUICK)
    assert state.stopped
    for k3 in (K3_BAD, K3_FINE, math.nan):
        assert observe(state, Signals(31, k3_kl=k3, grad_norm=math.nan), policy=QUICK) == (state, ())


def test_the_top_without_stop_is_held() -> None:
    state, made = run([K3_BAD] * 100, policy=replace(QUICK, actions=frozenset({Action.WARN, Action.BF16})))
    assert moves(made) == [(2, "observe", "warn"), (6, "warn", "bf16")]
    assert not state.stopped


def test_what_stays_fine_descends_one_level_at_a_time() -> None:
    state, decisions = run([K3_BAD] * 6 + [K3_FINE] * 20, policy=QUICK)
    assert moves(decisions) == [
        (2, "observe", "warn"),
        (6, "warn", "tighten"),
        (12, "tighten", "warn"),  # 7 and 8 cool, then four fine ones
        (17, "warn", "observe"),  # 13 was made before the change
    ]
    assert [each.move for each in decisions] == [Move.UP, Move.UP, Move.DOWN, Move.DOWN]
    assert [each.action for each in decisions[2:]] == [None, None]
    assert state.level is not None and state.level.rung is Rung.OBSERVE


def test_one_bad_step_is_not_enough() -> None:
    _, made = run(([K3_BAD] + [K3_FINE] * 3) * 30, policy=QUICK)
    assert made == []


def test_between_the_bounds_nothing_moves_either_way() -> None:
    state, _ = run([K3_BAD] * 2, policy=QUICK)
    after, made = run([K3_BETWEEN] * 100, policy=QUICK, state=state, start=3)
    assert made == []
    assert after.level == state.level


def test_a_signal_that_swings_across_the_bound_does_not_flap() -> None:
    """0.014 and 0.016 around the bound of 0.015: it climbs as far as it must and never comes down between."""
    _, made = run([0.014, 0.016] * 50, policy=replace(QUICK, actions=frozenset({Action.WARN, Action.TIGHTEN})))
    assert [each.move for each in made] == [Move.UP, Move.UP]


def test_a_relapse_doubles_the_steps_that_lead_down() -> None:
    """Fine on each level, bad as soon as it is left: each stay above is longer than the one before."""
    policy = replace(QUICK, actions=frozenset({Action.BF16}))
    state, all_decisions = GovernorState(), []
    for step in range(1, 200):
        quantised = state.level is None or state.level.rung is Rung.OBSERVE
        state, decisions = observe(state, Signals(step, k3_kl=K3_BAD if quantised else K3_FINE), policy=policy)
        all_decisions += decisions
    assert [each.move for each in all_decisions[:7]] == [Move.UP, Move.DOWN] * 3 + [Move.UP]
    stays = [down.step - up.step for up, down in itertools.pairwise(all_decisions) if down.move is Move.DOWN]
    assert stays == [2 + 4, 2 + 8, 2 + 16, 2 + 32, 2 + 64]


def test_a_descent_is_a_trial() -> None:
    """The step after it was made before the change. Of the next three the first bad one leads back, not a later one."""
    policy = replace(QUICK, actions=frozenset({Action.BF16}), descend_fine=9)
    state, decisions = run([K3_BAD] * 2 + [K3_FINE] * 11, policy=policy)
    assert moves(decisions) == [(2, "observe", "bf16"), (13, "bf16", "observe")]
    for fine in (0, 1, 2):
        _, decisions = run([K3_BAD] + [K3_FINE] * fine + [K3_BAD], policy=policy, state=state, start=14)
        assert moves(decisions) == [(15 + fine, "observe", "bf16")]
        assert (decisions[0].steps, decisions[0].judged_steps) == (1, 1 + fine)
    _, decisions = run([K3_BAD] + [K3_FINE] * 3 + [K3_BAD] + [K3_FINE] * 2, policy=policy, state=state, start=14)
    assert decisions == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_bad(value: float) -> None:
    _, made = run([value, value], policy=QUICK)
    assert moves(made) == [(2, "observe", "warn")]
    assert made[0].causes[0].text == f"k3_kl {value} not finite"


@pytest.mark.parametrize(
    ("signal", "bad", "text"),
    [
        ("k3_kl", 0.0151, "k3_kl 0.0151 above 0.015"),
        ("weight_mean", 2.1, "weight_mean 2.1 above 2"),
        ("weight_mean", 0.4, "weight_mean 0.4 below 0.5"),
        ("weight_std", 1.5, "weight_std 1.5 above 1"),
        ("ess", 0.29, "ess 0.29 below 0.3"),
        ("truncated_fraction", 0.06, "truncated_fraction 0.06 above 0.05"),
    ],
)
def test_each_signal_of_the_mismatch_climbs_with_its_numbers(signal: str, bad: float, text: str) -> None:
    state = GovernorState()
    for step in (1, 2):
        state, made = observe(state, Signals(step, **{signal: bad}), policy=QUICK)
    assert [cause.text for cause in made[0].causes] == [text]
    assert made[0].text == f"step 2: observe -> warn: {text} (2 steps in a row)"


@pytest.mark.parametrize(
    ("signal", "value"),
    [
        ("k3_kl", 0.015),
        ("weight_mean", 0.5),
        ("weight_mean", 2.0),
        ("weight_std", 1.0),
        ("ess", 0.3),
        ("truncated_fraction", 0.05),
    ],
)
def test_a_value_on_its_bound_is_not_bad(signal: str, value: float) -> None:
    state = GovernorState()
    for step in range(1, 20):
        state, made = observe(state, Signals(step, **{signal: value}), policy=QUICK)
        assert made == ()


def test_a_descent_carries_the_numbers_that_allow_it() -> None:
    _, made = run([K3_BAD] * 2 + [K3_FINE] * 10, policy=QUICK)
    assert made[1].text == ("step 8: warn -> observe: k3_kl 0.001 below 0.0075, ess 0.9 above 0.6 (4 steps in a row)")


def test_a_step_without_a_measurement_moves_nothing() -> None:
    """And takes nothing back: two bad steps stay two, however many blind ones lie between."""
    state, _ = observe(GovernorState(), Signals(1, k3_kl=K3_BAD), policy=QUICK)
    for step in range(2, 50):
        state, decisions = observe(state, Signals(step), policy=QUICK)
        assert decisions == ()
    _, decisions = observe(state, Signals(50, k3_kl=K3_BAD), policy=QUICK)
    assert [each.action for each in decisions] == [Action.WARN]


def test_the_failure_of_the_science_notes_is_met_in_time() -> None:
    """KL from 0.002 to 0.025 over 1000 steps of INT8 under TIS alone: bound 0.015 at step 565, stop 28 steps on at
    the latest if BF16 rollouts did not help; here they do, and the run goes on."""
    policy = Policy(Scheme.INT8)
    state, all_decisions = GovernorState(), []
    for step in range(1, 1001):
        in_bf16 = state.level is not None and state.level.rung is Rung.BF16
        k3 = 0.0005 if in_bf16 else 0.002 + 0.023 * step / 1000
        state, decisions = observe(state, Signals(step, k3_kl=k3, ess=0.9), policy=policy)
        all_decisions += decisions
    climb = [(each.step, each.action) for each in all_decisions if each.move is Move.UP][:3]
    assert climb == [(568, Action.WARN), (576, Action.TIGHTEN), (584, Action.BF16)]
    assert not state.stopped
    _, unhelped = run([0.002 + 0.023 * step / 1000 for step in range(1, 1001)], policy=policy)
    assert [(each.step, each.action) for each in unhelped][-1] == (592, Action.STOP)


@pytest.mark.parametrize(("share", "fine"), [(0.3, 0.6), (0.5, 0.75), (0.9, 0.95)])
def test_a_share_can_be_fine_again_whatever_is_bad(share: float, fine: float) -> None:
    assert Bounds.above(share).fine == (pytest.approx(fine), math.inf)


def test_a_resumed_governor_goes_on_as_if_nothing_had_happened() -> None:
    trace = ([K3_BAD] * 5 + [K3_FINE] * 9 + [K3_BETWEEN] * 2) * 6
    whole, decisions = run(trace, policy=QUICK)
    for cut in range(len(trace)):
        first, before = run(trace[:cut], policy=QUICK)
        again = parse(as_json(first), GovernorState, place="here")
        assert again == first
        second, after = run(trace[cut:], policy=QUICK, state=again, start=cut + 1)
        assert (second, before + after) == (whole, decisions)


def test_a_run_that_was_stopped_is_resumed_below_the_stop_and_guarded() -> None:
    stopped, _ = run([K3_BAD] * 30, policy=QUICK)
    again = resume(stopped, policy=QUICK)
    assert again.level is not None and again.level.rung is Rung.BF16
    _, decisions = run([K3_BAD] * 4, policy=QUICK, state=again, start=31)
    assert moves(decisions) == [(34, "bf16", "stop")]  # two steps of cooling, two bad ones
    fatal, _ = observe(GovernorState(), Signals(1, grad_norm=math.nan), policy=QUICK)
    for step in (2, 3):
        fatal, _ = observe(fatal, Signals(step, grad_norm=math.nan), policy=QUICK)
    assert fatal.stopped
    after, decisions = observe(resume(fatal, policy=QUICK), Signals(4, grad_norm=math.nan), policy=QUICK)
    assert [each.action for each in decisions] == [Action.WARN] and not after.stopped
    without_stop = replace(QUICK, actions=frozenset({Action.WARN}))
    assert resume(stopped, policy=without_stop).level == ladder(without_stop)[-1]


@given(policy=st.deferred(lambda: POLICIES), length=st.integers(0, 150))
@settings(deadline=None, max_examples=50, derandomize=True)
def test_resuming_changes_nothing_but_a_stop(policy: Policy, length: int) -> None:
    state, _ = run([K3_BAD] * length, policy=policy)
    again = resume(state, policy=policy)
    assert not again.stopped or Action.STOP not in policy.actions
    if not state.stopped:
        assert again == state


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("[]", "here: not of schema_version 2"),
        ('{"schema_version": 1}', "here: not of schema_version 2"),
        ('{"schema_version": 2, "cooling": "x"}', "here: cooling is not one that this program writes: "),
    ],
)
def test_a_state_that_cannot_be_read_is_refused(text: str, refusal: str) -> None:
    with pytest.raises(ValueError) as raised:
        parse(text, GovernorState, place="here")
    assert str(raised.value).startswith(refusal)


# Anything a step can bring, and any policy.
VALUES = st.one_of(st.none(), st.sampled_from([math.nan, math.inf, 0.0, 0.5, 1.0]), st.floats(0, 0.05), st.floats())
STEPS = st.lists(
    st.builds(
        Signals,
        step=st.just(0),
        k3_kl=VALUES,
        weight_mean=VALUES,
        weight_std=VALUES,
        ess=VALUES,
        truncated_fraction=VALUES,
        grad_norm=VALUES,
        reward_mean=VALUES,
        entropy=VALUES,
        equal_group_fraction=VALUES,
        unfinished_fraction=VALUES,
    ),
    max_size=80,
)
# Long stretches of one kind reach the upper levels; values drawn one by one hardly do.
STRETCHES = st.lists(
    st.tuples(st.sampled_from([K3_BAD, K3_BETWEEN, K3_FINE, math.nan, None]), st.integers(1, 25)), max_size=12
).map(lambda parts: [Signals(0, k3_kl=value) for value, count in parts for _ in range(count)])
TRACES = st.one_of(STEPS, STRETCHES)
POLICIES = st.builds(
    Policy,
    scheme=st.sampled_from(Scheme),
    actions=st.frozensets(st.sampled_from(Action)),
    climb_bad=st.integers(1, 3),
    climb_window=st.integers(3, 6),
    descend_fine=st.integers(1, 10),
    cooling_steps=st.integers(0, 8),
)


def replay(trace: list[Signals], policy: Policy) -> tuple[list[GovernorState], list[Decision]]:
    states, all_decisions = [GovernorState()], []
    for step, signals in enumerate(trace, 1):
        state, decisions = observe(states[-1], replace(signals, step=step), policy=policy)
        states.append(state)
        all_decisions += decisions
    return states, all_decisions


@pytest.mark.slow
@given(trace=TRACES, policy=POLICIES)
@settings(deadline=None, max_examples=400, derandomize=True)
def test_properties_of_every_sequence(trace: list[Signals], policy: Policy) -> None:
    states, decisions = replay(trace, policy)
    ladder_moves = [each for each in decisions if each.guard is None]
    # A move comes more than cooling_steps after a climb, and more than the delay of a change after a descent.
    for earlier, later in itertools.pairwise(ladder_moves):
        least = policy.cooling_steps if earlier.move is Move.UP else 1
        assert later.step - earlier.step > least
    # Down only after all those fine steps in a row, and after twice as many for each climb that undid a descent.
    relapses = 0
    for before, decision in itertools.pairwise([None, *ladder_moves]):
        relapses += before is not None and before.move is Move.DOWN and decision.move is Move.UP
        assert decision.move is Move.UP or decision.steps == policy.descend_fine * 2 ** min(relapses, 6)
    # Nothing forbidden, in what is done and in where it stands.
    assert {each.action for each in decisions if each.action} <= policy.actions
    assert {each.after.rung.action for each in decisions} - {None} <= policy.actions
    # Each says why: its numbers, and steps that were counted. A guard that is calm again has none to show.
    assert all(each.causes or each.move is Move.CLEAR for each in decisions)
    assert all(1 <= each.steps <= each.judged_steps for each in decisions)
    for decision in decisions:
        json.dumps([cause.json_values() for cause in decision.causes], allow_nan=False)
    # A transition starts where the one before ended.
    assert all(later.before == earlier.after for earlier, later in itertools.pairwise(ladder_moves))
    # Written and read back, every state is the same; the same input gives the same answer.
    assert all(parse(as_json(state), GovernorState, place="here") == state for state in states)
    assert replay(trace, policy) == (states, decisions)


@pytest.mark.slow
@given(policy=POLICIES, values=st.lists(st.sampled_from([K3_BAD, math.nan, math.inf, 1e9]), min_size=150, max_size=150))
@settings(deadline=None, max_examples=100, derandomize=True)
def test_what_stays_bad_only_climbs(policy: Policy, values: list[float]) -> None:
    states, made = replay([Signals(0, k3_kl=value) for value in values], policy)
    assert all(each.move is Move.UP for each in made)
    climbed = [each.after.rung for each in made]
    assert climbed == sorted(climbed, key=list(Rung).index)
    levels = ladder(policy)  # 9 at most, 3 bad steps and 8 of cooling for each
    assert states[-1].level == (levels[-1] if len(levels) > 1 else None)
    assert states[-1].stopped == (Action.STOP in policy.actions)


@pytest.mark.slow
@given(policy=POLICIES)
@settings(deadline=None, max_examples=100, derandomize=True)
def test_what_stays_fine_comes_all_the_way_down(policy: Policy) -> None:
    policy = replace(policy, actions=policy.actions - {Action.STOP})
    states, decisions = replay([Signals(0, k3_kl=K3_BAD)] * 150 + [Signals(0, k3_kl=K3_FINE)] * 200, policy)
    assert states[-1].level is None or states[-1].level.rung is Rung.OBSERVE
    ups = [each for each in decisions if each.move is Move.UP]
    assert len(decisions) == 2 * len(ups)


@pytest.mark.slow
@given(policy=POLICIES, spread=st.integers(1, 4))
@settings(deadline=None, max_examples=100, derandomize=True)
def test_an_alternating_signal_never_comes_down(policy: Policy, spread: int) -> None:
    """A fine step never leads down while one in five is bad and more than five in a row are needed."""
    policy = replace(policy, descend_fine=5)
    _, made = replay([Signals(0, k3_kl=k3) for k3 in ([K3_BAD] + [K3_FINE] * spread) * 40], policy)
    assert [each for each in made if each.move is Move.DOWN] == []
