"""Guards beside the mismatch: gradients, reward, entropy, degenerate output."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import replace

import pytest

from appliance.guard.governor import Decision, GovernorState, Move, observe
from appliance.guard.policy import Action, Collapse, Patience, Policy
from appliance.guard.signals import CollapseGuard, Signals, Watch, Watches
from appliance.record.lines import as_json, parse
from appliance.terms.schemes import Scheme

POLICY = Policy(Scheme.INT8, cooling_steps=3)
HEALTHY = Signals(
    0,
    k3_kl=0.001,
    grad_norm=1.0,
    reward_mean=0.4,
    entropy=0.5,
    equal_group_fraction=0.2,
    unfinished_fraction=0.1,
    nonfinite_fraction=0.0,
)


def run(changes: Iterable[dict[str, float | None]], *, policy: Policy = POLICY) -> tuple[GovernorState, list[Decision]]:
    """HEALTHY with the changes of each step."""
    state, all_decisions = GovernorState(), []
    for step, change in enumerate(changes, 1):
        state, decisions = observe(state, replace(HEALTHY, step=step, **change), policy=policy)
        all_decisions += decisions
    return state, all_decisions


def summary_of(made: list[Decision]) -> list[tuple[int, str, str]]:
    return [(each.step, str(each.guard), str(each.action or each.move)) for each in made]


def collapse(**changes: object) -> Policy:
    return replace(POLICY, collapse=Collapse(**changes))


def test_a_healthy_run_is_left_alone() -> None:
    state, made = run([{}] * 300)
    assert made == []
    assert not state.stopped


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_three_gradients_in_a_row_that_are_not_finite_stop_the_run(norm: float) -> None:
    state, made = run([{}] * 4 + [{"grad_norm": norm}] * 3)
    assert summary_of(made) == [(5, "gradient", "warn"), (7, "gradient", "stop")]
    assert made[1].text == f"step 7: gradient: stop: grad_norm {norm} not finite (3 steps in a row)"
    assert state.stopped


def test_three_steps_in_a_row_that_were_not_learned_from_stop_the_run() -> None:
    """Log-probs that are not finite: the mismatch of such a step is bad, too, but the ladder is slower."""
    broken = {"nonfinite_fraction": 0.25, "k3_kl": math.nan, "grad_norm": None}
    state, decisions = run([{"nonfinite_fraction": 0.0}] * 4 + [broken] * 3)
    assert summary_of(decisions) == [(5, "log_probs", "warn"), (7, "log_probs", "stop")]
    assert decisions[1].text == "step 7: log probs: stop: nonfinite_fraction 0.25 above 0 (3 steps in a row)"
    assert state.stopped
    state, decisions = run(([{}] + [broken] * 2) * 2 + [{}])
    assert [str(each.action) for each in decisions if each.guard is None] == ["warn"]  # bad as any
    assert not state.stopped


def test_single_gradients_that_are_not_finite_warn_and_pass() -> None:
    """The warning is taken back only after three calm steps, so a gradient every third step warns once."""
    state, made = run([{"grad_norm": math.nan}, {}, {}] * 5 + [{}] * 5)
    assert summary_of(made) == [(1, "gradient", "warn"), (16, "gradient", "clear")]
    assert made[1].text == "step 16: gradient: clear (3 steps in a row)"
    assert not state.stopped


def test_a_gradient_that_was_not_measured_does_not_count() -> None:
    state, _ = run([{"grad_norm": math.nan}, {"grad_norm": None}] * 2 + [{"grad_norm": math.nan}])
    assert state.stopped
    state, _ = run([{"grad_norm": math.nan}, {}] * 20)
    assert not state.stopped


def test_a_reward_that_lost_half_of_its_best_stops_the_run() -> None:
    """0.4, then 0: the mean of ten falls below 0.2 with the sixth 0, and stays there for twenty steps."""
    state, made = run([{}] * 30 + [{"reward_mean": 0.0}] * 40)
    assert summary_of(made) == [(36, "reward", "warn"), (55, "reward", "stop")]
    assert made[0].causes[0].text == "reward_mean of 10 steps 0.16 below 0.2"
    assert state.stopped


def test_a_reward_that_comes_back_is_taken_as_well_again() -> None:
    state, made = run([{}] * 30 + [{"reward_mean": 0.0}] * 10 + [{}] * 30)
    assert [action for _, _, action in summary_of(made)] == ["warn", "clear"]
    assert not state.stopped


def test_noise_is_no_collapse() -> None:
    """After the best, every other step nearly nothing: the mean of ten is 0.225 of 0.4, still more than half."""
    _, made = run([{}] * 20 + [{"reward_mean": 0.4 if step % 2 else 0.05} for step in range(200)])
    assert made == []


def test_a_reward_that_never_rose_cannot_collapse() -> None:
    _, made = run([{"reward_mean": 0.05}] * 20 + [{"reward_mean": 0.0}] * 100)
    assert made == []


def test_a_reward_range_below_zero() -> None:
    """Rewards of -1 and 1: from 0.2 down to -0.9 is a loss of 1.1 of the 1.2 above the floor."""
    policy = collapse(reward_floor=-1.0)
    _, decisions = run([{"reward_mean": 0.2}] * 20 + [{"reward_mean": -0.9}] * 40, policy=policy)
    assert summary_of(decisions)[-1][1:] == ("reward", "stop")
    _, decisions = run([{"reward_mean": 0.2}] * 20 + [{"reward_mean": -0.3}] * 40, policy=policy)
    assert decisions == []


def test_a_reward_that_is_not_finite_is_bad_and_not_kept() -> None:
    state, made = run([{"reward_mean": math.nan}] * 20)
    assert summary_of(made) == [(1, "reward", "warn"), (20, "reward", "stop")]
    assert state.watches.rewards == ()


def test_entropy_that_collapses_early_stops_the_run() -> None:
    state, made = run([{}] * 10 + [{"entropy": 0.009}] * 50)
    assert summary_of(made) == [(15, "entropy", "warn"), (50, "entropy", "stop")]
    assert made[0].causes[0].text == "entropy 0.009 below 0.01"
    assert state.stopped


@pytest.mark.parametrize("change", [{"entropy": 0.001}, {"equal_group_fraction": 1.0}])
def test_a_solved_task_may_be_certain(change: dict[str, float]) -> None:
    """Small entropy and equal samples at a reward of 0.95 are success."""
    _, made = run([{}] * 10 + [{"reward_mean": 0.95}] * 10 + [{"reward_mean": 0.95, **change}] * 100)
    assert made == []


def test_entropy_that_is_not_finite_counts_in_a_solved_task_too() -> None:
    state, decisions = run([{}] * 10 + [{"reward_mean": 0.95}] * 10 + [{"reward_mean": 0.95, "entropy": math.nan}] * 60)
    assert summary_of(decisions)[0] == (25, "entropy", "warn") and state.stopped


def test_equal_samples_stop_a_run_that_is_not_solved() -> None:
    state, made = run([{}] * 10 + [{"equal_group_fraction": 0.96}] * 20)
    assert summary_of(made) == [(15, "equal_samples", "warn"), (30, "equal_samples", "stop")]
    assert made[0].causes[0].text == "equal_group_fraction 0.96 above 0.95"
    assert state.stopped


def test_runaway_length_stops_a_run() -> None:
    state, made = run([{}] * 10 + [{"unfinished_fraction": 0.96}] * 20)
    assert summary_of(made) == [(15, "runaway_length", "warn"), (30, "runaway_length", "stop")]
    assert made[0].causes[0].text == "unfinished_fraction 0.96 above 0.95"
    assert state.stopped


def test_guards_that_may_not_stop_only_warn() -> None:
    state, made = run([{"grad_norm": math.nan}] * 50, policy=replace(POLICY, actions=frozenset({Action.WARN})))
    assert summary_of(made) == [(1, "gradient", "warn")]
    assert not state.stopped


def test_guards_that_may_do_nothing_say_nothing() -> None:
    state, made = run([{"grad_norm": math.nan}] * 50, policy=replace(POLICY, actions=frozenset()))
    assert made == []
    assert not state.stopped


def test_a_guard_that_warns_and_stops_at_once_says_both() -> None:
    policy = collapse(gradient=Patience(warn_after=1, stop_after=1))
    _, made = run([{"grad_norm": math.nan}], policy=policy)
    assert summary_of(made) == [(1, "gradient", "warn"), (1, "gradient", "stop")]
    assert [each.move for each in made] == [Move.ALARM, Move.UP]


def test_every_guard_has_a_patience_of_its_name() -> None:
    assert [type(getattr(Collapse(), guard.value)) for guard in CollapseGuard] == [Patience] * len(CollapseGuard)


# Rewards of the user's own: no range is known

OWN = {"reward_ceiling": None}


def test_an_own_reward_of_any_scale_that_lost_half_of_its_best_stops_the_run() -> None:
    """40, then 0: as with 0.4 and a known range. It never climbed, but 0 is a floor for what begins above it."""
    _, made = run([{"reward_mean": 40.0}] * 30 + [{"reward_mean": 0.0}] * 40, policy=collapse(**OWN))
    assert summary_of(made) == [(36, "reward", "warn"), (55, "reward", "stop")]
    assert made[0].causes[0].text == "reward_mean of 10 steps 16 below 20"


def test_an_own_reward_below_zero_loses_what_it_gained_since_the_first_steps() -> None:
    """From -5 to -1: -2 is still better than the middle, -4 is not."""
    climb = [{"reward_mean": -5.0}] * 10 + [{"reward_mean": -1.0}] * 20
    _, decisions = run([*climb, *[{"reward_mean": -2.0}] * 60], policy=collapse(**OWN))
    assert decisions == []
    _, decisions = run([*climb, *[{"reward_mean": -4.0}] * 60], policy=collapse(**OWN))
    assert summary_of(decisions)[-1][1:] == ("reward", "stop")


def test_the_noise_of_an_own_reward_is_no_collapse() -> None:
    """Between -1 and -0.9 from the beginning: what its best mean gained is less than its first steps differ."""
    noisy = [{"reward_mean": -1.0 + 0.1 * (step % 7) / 6} for step in range(200)]
    _, made = run(noisy, policy=collapse(**OWN))
    assert made == []


def test_what_an_own_reward_learned_in_its_first_steps_is_no_noise() -> None:
    """0 to 1 within four steps, then 0: all was lost."""
    learned = [{"reward_mean": value} for value in (0.0, 0.3, 0.6, *[1.0] * 27)]
    state, made = run([*learned, *[{"reward_mean": 0.0}] * 60], policy=collapse(**OWN))
    assert summary_of(made) == [(36, "reward", "warn"), (55, "reward", "stop")] and state.stopped


@pytest.mark.parametrize("best", [0.01, 40.0, -0.5])
def test_equal_samples_at_the_best_of_an_own_reward_are_a_solved_task(best: float) -> None:
    climb = [{"reward_mean": best - abs(best)}] * 10 + [{"reward_mean": best}] * 20
    equal = {"equal_group_fraction": 1.0, "entropy": 0.0, "unfinished_fraction": 1.0}
    _, made = run([*climb, *[{"reward_mean": best, **equal}] * 60], policy=collapse(**OWN))
    assert made == []


def test_a_warning_is_taken_back_only_when_its_condition_is_gone() -> None:
    """A reward near its best counts as solved: the guard does not stop the run then, and does not call it clear."""
    cut = {"unfinished_fraction": 1.0}
    climb = [{"reward_mean": value, **cut} for value in (0.0, 0.0, 0.1, 0.1, 0.2, 0.2, 0.3, 0.4, *[0.5] * 40)]
    _, decisions = run([*climb, *[{"reward_mean": 0.5, "unfinished_fraction": 0.2}] * 10], policy=collapse(**OWN))
    assert summary_of(decisions)[0] == (5, "runaway_length", "warn")
    assert decisions[0].text.endswith("(5 steps in a row); raise task.max_response_tokens, or reward shorter answers")
    assert [(decision.step > len(climb), decision.move) for decision in decisions[1:]] == [(True, Move.CLEAR)]


@pytest.mark.parametrize("stuck", [0.0, 0.05, -3.0])
def test_equal_samples_of_an_own_reward_that_never_rose_stop_the_run(stuck: float) -> None:
    state, made = run([{"reward_mean": stuck, "equal_group_fraction": 1.0}] * 40, policy=collapse(**OWN))
    assert summary_of(made)[0] == (5, "equal_samples", "warn") and state.stopped


def test_a_state_of_before_own_rewards_can_be_read() -> None:
    state, _ = run([{}] * 12)
    kept = json.loads(as_json(state))
    assert len(kept["watches"].pop("first_rewards")) == 10
    assert parse(json.dumps(kept), GovernorState, place="here").watches == replace(state.watches, first_rewards=())


def test_the_memory_of_an_earlier_version_is_read() -> None:
    """It called `steps_met` by the name `held`."""
    watches = replace(Watches(), watches=(Watch(steps_met=3, alarmed=True), *Watches().watches[1:]))
    text = as_json(GovernorState(watches=watches))
    assert '"steps_met": 3' in text
    assert parse(text.replace("steps_met", "held"), GovernorState, place="guard.json").watches == watches
