"""What is shown of a task of the user's own: each reward by its name, several validations, rewards of any size."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from plans import with_own_task

from appliance.guard.policy import MismatchBounds
from appliance.record.events import StepMetrics, parse_metrics
from appliance.record.plan import RunPlan, read_plan
from appliance.record.samples import Sample
from appliance.record.state import RunState, fold
from appliance.report import display, summary
from appliance.report.folder import read_view
from appliance.report.page import ShownAnswer, page
from appliance.report.verdicts import Word, verdicts
from appliance.settings.sections import ValSet

VALIDATED = {"val/hard/avg@4": 0.25, "val/hard/pass@1": 0.2, "val/hard/pass@2": 0.4, "val/hard/pass@4": 0.6}
OTHER = {"val/held_out/avg@1": -3.5, "val/held_out/pass@1": 0.0}
REWARDS = {"reward/math": 0.125, "reward/short": -2.5}
FIRST = {"step": 0, "time_s": 50, "scheme": "int8", "val_reward_mean": 0.125, "val_samples": 30}


def with_sets(plan: RunPlan) -> RunPlan:
    val_sets = {
        "hard": ValSet(size=30, samples=4, temperature=1.0),
        "held_out": ValSet(size=30, samples=1, temperature=0.0),
    }
    return with_own_task(plan, val_sets=val_sets)


def before() -> StepMetrics:
    parsed = parse_metrics(json.dumps({**FIRST, **{key: value / 2 for key, value in VALIDATED.items()}, **OTHER}))
    assert parsed is not None
    return parsed


def folded(*lines: StepMetrics) -> RunState:
    return functools.reduce(fold, lines, RunState(9, MismatchBounds()))


def test_names_of_the_users_are_read_with_their_numbers(step_line: Callable) -> None:
    """In the order of the line; a value that is no number is not there, and a mean is null where no reward applied."""
    line = step_line(2, **REWARDS, **{"reward/none": None, "reward/text": "1", "val/a/b/avg@1": True})
    assert line.user_metrics == {"reward/math": 0.125, "reward/short": -2.5}
    assert list(line.user_metrics) == list(REWARDS) and step_line(2).user_metrics == {}


def test_a_step_is_told_with_its_rewards_and_each_validation(step_line: Callable) -> None:
    line = step_line(2, reward_mean=-0.5, val_reward_mean=0.25, **REWARDS, **VALIDATED, **OTHER)
    told = display.plain_step(folded(before(), line), line, now=0.0)
    start = "step 2/9  reward -0.500  rewards math 0.12  short -2.50  validation 0.250"
    assert told.startswith(f"{start}  hard avg@4 0.250, pass@4 0.600  held_out avg@1 -3.500, pass@1 0.000  ")
    assert display.plain_validation(before()) == (
        "validation before training 0.125 (30 problems, hard avg@4)  hard avg@4 0.125, pass@4 0.300  "
        "held_out avg@1 -3.500, pass@1 0.000"
    )


def test_panel_summary_and_status_show_every_validation_and_which_one_counts(
    tmp_path: Path, small_plan: Callable, step_line: Callable
) -> None:
    line = step_line(2, val_reward_mean=0.25, val_samples=30, **REWARDS, **VALIDATED, **OTHER)
    state, plan = folded(before(), line), with_sets(small_plan(tmp_path))
    sets = {
        "hard": "avg@4 0.250 (0.125 before), pass@4 0.600 (0.300 before)",
        "held_out": "avg@1 -3.500 (-3.500 before), pass@1 0.000 (0.000 before)",
    }
    rows = dict(display._rows(state, now=0.0, bars=False))
    assert rows["rewards"] == "math 0.12  short -2.50"
    assert rows["validation"] == "0.125 before, 0.250 after step 2  (30 problems, hard avg@4)"
    assert rows.items() >= sets.items()
    done = dict(summary.summary_rows(plan, state, seconds=9.0, folder="a"))
    assert done["reward"] == "0.125 before, 0.250 after (hard avg@4, 30 problems of the validation set)"
    assert done.items() >= sets.items()
    told = summary.summary_object(plan, state, state_name="done", exit_code=0, reason="", seconds=9.0)
    assert told["greedy"] is False and list(told["val_sets"]) == ["hard", "held_out"]
    assert told["val_sets"]["hard"] == {"avg@4": 0.25, "pass@1": 0.2, "pass@2": 0.4, "pass@4": 0.6}


@pytest.mark.parametrize(
    ("ends", "climbed"),
    [((40.0, 40.5), False), ((40.0, 42.0), True), ((0.001, 0.002), True), ((-4.0, -3.0), True), ((-3.0, -3.5), False)],
)
def test_an_own_reward_climbs_by_a_share_of_itself(
    tmp_path: Path, small_plan: Callable, ends: tuple[float, float], climbed: bool
) -> None:
    plan = small_plan(tmp_path)
    found = summary.Result(*ends, validated=True)
    assert found.climbed(with_own_task(plan)) is climbed
    assert summary.Result(0.5, 0.515, validated=True).climbed(plan) is False
    assert summary.Result(0.5, 0.525, validated=True).climbed(plan) is True


@pytest.mark.parametrize("accuracy", [40.0, 1.0, 0.0, -2.0])
def test_nobody_knows_whether_a_number_of_the_users_is_right(accuracy: float) -> None:
    sample = Sample("p", "r", "t", accuracy, None, 3, finished=True)
    assert ShownAnswer(1, sample, is_graded=False).grade == ""
    assert ShownAnswer(1, sample).grade == ("fine" if accuracy >= 1 else "bad")


def test_the_page_has_a_curve_for_each_name(
    tmp_path: Path, make_run: Callable[..., Path], metrics_line: Callable
) -> None:
    run_dir = make_run(tmp_path, done=4)
    plain = page(read_view(run_dir), now=0.0)
    with_sets(read_plan(run_dir / "plan.json")).write(run_dir / "plan.json")
    added = {**REWARDS, **VALIDATED, **OTHER, "val_reward_mean": 0.25, "val_reward_bf16_mean": 0.9, "val_samples": 30}
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics_line(5, **added)) + "\n")
    text = page(read_view(run_dir), now=0.0)
    for name in ("math", "short", "hard avg@4", "held_out avg@1", "hard pass@1", "hard pass@4", "held_out pass@1"):
        assert f"<title>{name}</title>" in text or f'"{name}"'.replace('"', "&quot;") in text
    for title in ("Rewards", "Validations", "Passed"):
        assert f"<strong>{title}</strong>" in text and f"<strong>{title}</strong>" not in plain
    (cost,) = [each for each in verdicts(read_view(run_dir)) if each.question == "What does the scheme cost?"]
    assert (cost.word, cost.text) == (Word.OPEN, "0.250 in int8, 0.900 in bf16, after step 5")


def test_summary_of_a_run_that_had_nothing_left_to_learn(
    tmp_path: Path, small_plan: Callable, step_line: Callable
) -> None:
    plan = small_plan(tmp_path, steps=2)
    state = functools.reduce(fold, (step_line(n, reward_mean=0.99) for n in (1, 2)), RunState(2, MismatchBounds()))
    top, of_own = (summary.try_next(each, state, folder="a")[0] for each in (plan, with_sets(plan)))
    assert top == "the reward was at its top from the start: harder problems leave something to learn"
    assert of_own.startswith("the reward did not climb")  # its top is not known
    assert summary.Result(0.99, 0.99, validated=True).stayed_at_top(plan)
    assert not summary.Result(0.99, 0.3, validated=True).stayed_at_top(plan)
    assert not summary.Result(None, None, validated=True).stayed_at_top(plan)


@pytest.mark.parametrize(("fraction", "is_advised"), [(1.0, True), (0.95, False), (None, False)])
def test_summary_of_a_run_whose_answers_were_cut(
    tmp_path: Path, small_plan: Callable, step_line: Callable, fraction: float | None, is_advised: bool
) -> None:
    plan = small_plan(tmp_path, steps=2)
    lines = (step_line(n, reward_mean=0.1 * n, unfinished_fraction=fraction) for n in (1, 2))
    state = functools.reduce(fold, lines, RunState(2, MismatchBounds()))
    limit = plan.task.max_response_tokens
    advice = (
        f"nearly all answers were cut at {limit} tokens: --set task.max_response_tokens=..., or ask for shorter ones"
    )
    assert (advice in summary.try_next(plan, state, folder="a")) == is_advised
