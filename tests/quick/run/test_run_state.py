from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from appliance.guard.policy import Bounds, MismatchBounds
from appliance.guard.signals import MismatchHealth
from appliance.record.events import Event, StepMetrics, parse_metrics
from appliance.record.state import RunState, fold, judge_step, median_tokens_per_s, remaining_s, step_seconds
from appliance.report.display import PHASES, mismatch_reasons
from appliance.report.folder import DOING
from appliance.terms.phases import Phase


def folded(*news: Event | StepMetrics, steps: int = 10) -> RunState:
    return functools.reduce(fold, news, RunState(steps, MismatchBounds()))


def event(kind: str, what: str, *, time: float = 100.0, **rest: object) -> Event:
    return Event(time, kind, what, **rest)


def test_phase_ends_the_work_of_the_phase_before() -> None:
    working = folded(event("phase", "prepare"), event("progress", "warm start", time=101, done=1.0, total=4.0))
    assert working.work is not None
    after = fold(working, event("phase", "start", time=120))
    assert (after.phase, after.phase_since, after.work) == ("start", 120, None)


def test_remaining_time_of_work_is_extrapolated_from_its_first_report() -> None:
    state = folded(
        event("progress", "warm start", time=100, done=0.0, total=100.0),
        event("progress", "warm start", time=110, done=25.0, total=100.0),
    )
    assert remaining_s(state, now=112) == 28.0  # 10 s for a quarter, 40 s for all, 12 s gone


def test_work_without_a_total_is_left_out() -> None:
    assert folded(event("progress", "data", done=1.0)).work is None


def test_validation_before_training_is_not_a_step() -> None:
    first = parse_metrics('{"step": 0, "time_s": 50, "val_reward_mean": 0.21, "val_samples": 512, "scheme": "int8"}')
    assert first is not None
    state = folded(first)
    assert (state.step, state.rewards.some, state.val_first, state.val_last, state.val_last_step) == (
        0,
        (),
        0.21,
        0.21,
        0,
    )


def test_validation_after_steps_keeps_the_first(step_line: Callable) -> None:
    first = parse_metrics('{"step": 0, "time_s": 50, "val_reward_mean": 0.21, "val_samples": 512}')
    assert first is not None
    state = folded(first, step_line(1), step_line(2, val_reward_mean=0.5))
    assert (state.val_first, state.val_last, state.val_last_step, state.val_samples) == (0.21, 0.5, 2, 512)


def test_a_validation_after_a_change_of_scheme_is_of_the_new_one(step_line: Callable) -> None:
    """The guard's change comes with the weight update, and the validation after it."""
    means = {"val_reward_mean": 0.5, "val_reward_bf16_mean": 0.75}
    up = folded(step_line(1, scheme="int8", val_scheme="bf16", **means))
    down = folded(step_line(1, scheme="bf16", val_scheme="int8", **means))
    assert (up.val_bf16, down.val_bf16) == (None, 0.75)
    before = [folded(step_line(1, scheme=scheme, **means)).val_bf16 for scheme in ("int8", "bf16")]  # no val_scheme
    assert before == [0.75, None]


def test_remaining_time_is_the_median_step_times_the_steps_left(step_line: Callable) -> None:
    state = folded(step_line(1), step_line(2), step_line(3, time_s=90.0), step_line(4, time_s=94.0))
    assert step_seconds(state) == 4.0  # one slow step among three does not count
    assert remaining_s(state, now=0.0) == 24.0


@pytest.mark.parametrize("is_live", [True, False])
def test_the_pause_before_a_resume_is_no_step(step_line: Callable, is_live: bool) -> None:
    """Folded as it comes, and from a folder, whose events are all read first."""
    day = 86_400.0
    begun, resumed = event("phase", "prepare", time=1000.0), event("resume", "attempt 2", time=1000.0 + day)
    before = [step_line(1, time_s=70.0), step_line(2, time_s=74.0)]
    first, second = (step_line(step, time_s=day + after, step_s=5.0) for step, after in ((3, 60.0), (4, 64.0)))
    news = [begun, *before, resumed, first] if is_live else [begun, resumed, *before, first]
    assert step_seconds(folded(*news)) == 4.0
    assert step_seconds(folded(*news, second)) == 4.0
    alone = [begun, before[0], resumed, first] if is_live else [begun, resumed, before[0], first]
    assert step_seconds(folded(*alone)) == 5.0  # its own duration


def test_first_step_alone_is_estimated_by_its_own_duration(step_line: Callable) -> None:
    assert step_seconds(folded(step_line(1, step_s=3.5))) == 3.5
    assert remaining_s(RunState(5, MismatchBounds()), now=0.0) is None


def test_speed_is_a_median(step_line: Callable) -> None:
    speeds = (100.0, 400.0, 300.0)
    state = folded(*(step_line(n + 1, rollout_tokens_per_s=speed) for n, speed in enumerate(speeds)))
    assert median_tokens_per_s(state) == 300.0


def test_bad_steps_are_counted(step_line: Callable) -> None:
    unknown = step_line(4, mismatch_k3_kl=None, is_ess=None, is_weight_mean=None, is_weight_std=None)
    state = folded(step_line(1), step_line(2, mismatch_k3_kl=0.02), step_line(3, is_ess=0.1), unknown)
    assert (state.judged_steps, state.bad_steps) == (3, 2)


def test_of_several_failures_of_an_attempt_the_first_counts() -> None:
    """As it does for another attempt: a rank that fails, then the standstill of those that wait for it."""
    first, then, later = event("failure", "a layer"), event("failure", "no progress"), event("failure", "of attempt 2")
    assert folded(first, then).failure == first
    assert folded(first, then, event("resume", "attempt 2"), later).failure == later


def test_unknown_events_change_nothing_but_the_start() -> None:
    assert folded(event("sweep", "ended x")) == RunState(10, MismatchBounds(), phase_since=100.0, started=100.0)


def judged(line: StepMetrics, *, bounds: MismatchBounds = MismatchBounds()) -> tuple[str, tuple[str, ...]]:
    """The word that people are shown for a step, and the reasons where it is bad."""
    judgement = judge_step(line, bounds=bounds)
    is_bad = judgement.health is MismatchHealth.BAD
    return judgement.health.word, mismatch_reasons(line, judgement, bounds=bounds) if is_bad else ()


def test_a_bad_step_names_every_bound_that_is_left(step_line: Callable) -> None:
    ratios = {"is_weight_mean": 2.01, "is_weight_std": 1.2, "is_ess": 0.29, "is_above_cap_fraction": 0.06}
    assert judged(step_line(1, mismatch_k3_kl=0.016, **ratios)) == (
        "bad",
        (
            "k3 0.016 is above 0.015",
            "mean weight 2.01 is not within 0.5 to 2",
            "spread of the weights 1.2 is above 1",
            "ESS 0.29 is below 0.3",
            "share of cut weights 0.06 is above 0.05",
        ),
    )
    assert judged(step_line(1)) == ("fine", ())


def test_a_step_is_judged_by_the_bounds_that_are_given(step_line: Callable) -> None:
    step = step_line(1, mismatch_k3_kl=0.02)
    wide, narrow = (MismatchBounds(k3_kl=Bounds.below(bound)) for bound in (0.05, 1e-9))
    assert judged(step, bounds=wide) == ("fine", ())
    assert judged(step, bounds=narrow) == ("bad", ("k3 0.02 is above 1e-09",))


def test_a_step_on_the_bounds_is_fine(step_line: Callable) -> None:
    assert judged(step_line(1, mismatch_k3_kl=0.015, is_ess=0.3, is_weight_mean=2.0)) == ("fine", ())


def test_one_log_prob_that_was_to_be_the_rollouts_is_bad(step_line: Callable) -> None:
    """Whatever the mismatch: with one flow there is none."""
    one = step_line(1, differing_tokens=1, mismatch_equal_fraction=0.999, mismatch_k3_kl=1e-9)
    assert judged(one) == ("bad", ("1 log-prob is not the rollouts'",))
    none = step_line(1, differing_tokens=0, mismatch_equal_fraction=1.0, mismatch_k3_kl=0.0)
    assert judged(none) == ("fine", ())


def test_a_step_without_signals_is_unknown(step_line: Callable) -> None:
    unmeasured = {"mismatch_k3_kl": None, "is_ess": None, "is_weight_mean": None, "is_weight_std": None}
    assert judged(step_line(1, **unmeasured)) == ("unknown", ())


def test_every_phase_has_words_and_a_place_in_the_report() -> None:
    assert {*PHASES} == {*Phase}
    assert {phase for phases in DOING.values() for phase in phases} == {*Phase} - {Phase.DONE}
