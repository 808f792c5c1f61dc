from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from appliance.record.events import Event, StepMetrics, parse_metrics
from appliance.record.state import Judgement, RunState, fold, judge, median_tokens_per_s, remaining_s, step_seconds
from appliance.report.display import PHASES
from appliance.report.folder import DOING
from appliance.terms.phases import Phase


def folded(*news: Event | StepMetrics, steps: int = 10) -> RunState:
    return functools.reduce(fold, news, RunState(steps=steps))


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
    assert remaining_s(RunState(steps=5), now=0.0) is None


def test_speed_is_a_median(step_line: Callable) -> None:
    speeds = (100.0, 400.0, 300.0)
    state = folded(*(step_line(n + 1, rollout_tokens_per_s=speed) for n, speed in enumerate(speeds)))
    assert median_tokens_per_s(state) == 300.0


def test_unhealthy_steps_are_counted(step_line: Callable) -> None:
    assert folded(step_line(1), step_line(2, mismatch_k3_kl=0.02), step_line(3, is_ess=0.1)).unhealthy_steps == 2


def test_of_several_failures_of_an_attempt_the_first_counts() -> None:
    """As it does for another attempt: a rank that fails, then the standstill of those that wait for it."""
    first, then, later = event("failure", "a layer"), event("failure", "no progress"), event("failure", "of attempt 2")
    assert folded(first, then).failure == first
    assert folded(first, then, event("resume", "attempt 2"), later).failure == later


def test_unknown_events_change_nothing_but_the_start() -> None:
    assert folded(event("sweep", "ended x")) == RunState(steps=10, phase_since=100.0, started=100.0)


def test_verdict_names_every_bound_that_is_left(step_line: Callable) -> None:
    bad = judge(step_line(1, mismatch_k3_kl=0.016, is_ess=0.29, is_weight_mean=2.01))
    assert bad == Judgement(
        "bad",
        ("k3 0.016 is above 0.015", "ESS 0.29 is below 0.3", "mean weight 2.01 is not within 0.5 to 2"),
    )
    assert judge(step_line(1)) == Judgement("fine")


def test_a_step_on_the_bounds_is_fine_as_it_is_for_the_guard(step_line: Callable) -> None:
    assert judge(step_line(1, mismatch_k3_kl=0.015, is_ess=0.3, is_weight_mean=2.0)) == Judgement("fine")


def test_one_log_prob_that_was_to_be_the_rollouts_is_bad(step_line: Callable) -> None:
    """Whatever the mismatch: with one flow there is none."""
    told = judge(step_line(1, differing_tokens=1, mismatch_k3_kl=1e-9))
    assert told == Judgement("bad", ("1 log-probs are not the rollouts'",))
    assert judge(step_line(1, differing_tokens=0, mismatch_k3_kl=0.0)) == Judgement("fine")


def test_verdict_without_signals_is_unknown(step_line: Callable) -> None:
    assert judge(step_line(1, mismatch_k3_kl=None, is_ess=None, is_weight_mean=None)) == Judgement("unknown")


def test_every_phase_has_words_and_a_place_in_the_report() -> None:
    assert {*PHASES} == {*Phase}
    assert {phase for phases in DOING.values() for phase in phases} == {*Phase} - {Phase.DONE}
