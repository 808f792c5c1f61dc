"""What a comparison says of its arms: verdicts from rewards, labels from what the corrections did."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from page_parts import Parts

from appliance.compare.command import INACTIVE_NOTE, TIMES_NOTE, ComparisonReport, as_json, markdown, page, table
from appliance.compare.file import Arm, Comparison
from appliance.compare.judge import Verdict, curve, judge, verdict_text
from appliance.compare.results import RunResult, Step
from appliance.corrections.registry import NONE, CorrectionMethod

PROBLEMS = 400
MARGIN = 0.03


def a_step(number: int, **changes: object) -> Step:
    row = Step(
        step=number,
        reward_mean=0.1 * number,
        mismatch_k3_kl=1e-4 * number,
        is_truncated_fraction=0.0,
        is_weight_max=1.1,
        codes_changed_fraction=0.01,
        step_s=2.0,
        learning_rate=1e-5 / number if number else None,
        val_reward_mean=None,
        scheme="int8",
    )
    return row._replace(**changes)


def a_run(arm: str, *, seed: int = 0, right: int = 380, **changes: object) -> RunResult:
    """right: of the 400 problems, the first so many."""
    run = RunResult(
        arm=arm,
        seed=seed,
        folder=f"{arm}-seed{seed}",
        method=CorrectionMethod("tis"),
        state="done",
        reason="",
        steps=(a_step(1), a_step(2, val_reward_mean=0.9)),
        rewards=tuple(float(index < right) for index in range(PROBLEMS)),
        seconds=60.0,
        busy=0.02,
    )
    return replace(run, **changes)


def row_of(arm: str, *runs: RunResult):
    base = [a_run("base", seed=run.seed) for run in runs] or [a_run("base")]
    return judge([*base, *runs], arms=["base", arm], baseline="base", margin=MARGIN)[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "verdict", "text"),
    [
        (380, Verdict.WITHIN, "within ±0.03, inactive"),
        (372, Verdict.OPEN, "open: the interval crosses ±0.03, inactive"),  # -0.02, and 0.014 to each side
        (366, Verdict.OPEN, "open: the interval crosses ±0.03, inactive"),  # -0.035, and 0.018 to each side
        (340, Verdict.FAILS, "fails (3 of 3 seeds), inactive"),
    ],
)
def test_the_verdict_is_about_the_whole_interval(right: int, verdict: Verdict, text: str) -> None:
    row = row_of("arm", *(a_run("arm", seed=seed, right=right) for seed in (0, 1, 2)))
    assert (row.verdict, verdict_text(row, margin=MARGIN)) == (verdict, text)
    assert row.difference is not None and row.difference.mean == pytest.approx((right - 380) / PROBLEMS)
    assert [seed for seed, _ in row.by_seed] == [0, 1, 2]


def test_an_arm_can_be_better() -> None:
    runs = [a_run("base", right=300), a_run("arm", right=380)]
    row = judge(runs, arms=["base", "arm"], baseline="base", margin=MARGIN)[1]
    assert (row.verdict, verdict_text(row, margin=MARGIN)) == (Verdict.BETTER, "better by more than 0.03, inactive")
    row = judge(
        [a_run("base", right=366), a_run("arm", right=380)], arms=["base", "arm"], baseline="base", margin=MARGIN
    )[1]
    assert row.verdict is Verdict.OPEN  # better by 0.035 in the mean alone


def test_an_arm_is_compared_with_the_one_that_it_names() -> None:
    runs = [a_run("base", right=380), a_run("gspo", right=200), a_run("gspo-int8", right=180)]
    arms = [run.arm for run in runs]
    rows = judge(runs, arms=arms, baseline="base", margin=MARGIN, against={"gspo-int8": "gspo"})
    assert [row.against for row in rows] == ["", "base", "gspo"]
    assert [row.difference and row.difference.mean for row in rows] == [None, -0.45, -0.05]


def test_the_baseline_is_not_judged() -> None:
    row = judge([a_run("base")], arms=["base"], baseline="base", margin=MARGIN)[0]
    assert (row.verdict, row.difference, row.by_seed, row.final) == (Verdict.BASELINE, None, (), 0.95)


def test_a_correction_that_acted_in_one_step_is_not_inactive() -> None:
    acted = a_run("arm", seed=1, steps=(a_step(1), a_step(2, is_truncated_fraction=0.01)))
    row = row_of("arm", a_run("arm"), acted)
    assert (row.inactive, row.truncated, row.truncated_max) == (False, pytest.approx(0.0025), 0.01)


@pytest.mark.parametrize(("method", "inactive"), [("none", False), ("score-centering", False), ("tis", True)])
def test_an_arm_whose_method_cuts_nothing_is_not_called_inactive(method: str, inactive: bool) -> None:
    """Without a correction, or with centering alone, which acts on every token's score and truncates none."""
    row = row_of("arm", a_run("arm", method=CorrectionMethod(method)))
    assert row.inactive == inactive


def test_a_run_that_a_guard_stopped_is_a_failed_seed() -> None:
    stopped = a_run("arm", seed=1, rewards=(), state="failed", reason="GuardStop: stopped by the guard")
    row = row_of("arm", a_run("arm"), stopped)
    assert (row.verdict, row.failing) == (Verdict.STOPPED, (1,))
    assert verdict_text(row, margin=MARGIN) == "stopped by the guard (1 of 2 seeds), inactive"


def test_an_arm_without_runs_has_a_row() -> None:
    row = row_of("arm")
    assert (row.verdict, row.final, row.truncated, row.seconds) == (Verdict.MISSING, None, None, None)


@pytest.mark.parametrize(("problems", "text"), [(99, "open: the interval crosses ±0.03"), (100, "within ±0.03")])
def test_equal_rewards_of_few_problems_leave_it_open(problems: int, text: str) -> None:
    given = {"rewards": (1.0,) * problems, "method": NONE}
    runs = [a_run("base", **given), a_run("arm", **given)]
    row = judge(runs, arms=["base", "arm"], baseline="base", margin=MARGIN)[1]
    assert verdict_text(row, margin=MARGIN) == text


@pytest.mark.parametrize("base", [[], [a_run("base", rewards=())], [a_run("base", seed=2)]])
def test_an_arm_whose_baseline_has_no_result_has_nothing_to_compare_with(base: list[RunResult]) -> None:
    for seeds, its in (((0,), "seed"), ((0, 1), "seeds")):
        runs = [a_run("arm", seed=seed, method=NONE) for seed in seeds]
        row = judge([*base, *runs], arms=["base", "arm"], baseline="base", margin=MARGIN, seeds=2)[1]
        text = f"nothing to compare with: no result of `base` with its {its}"
        assert (row.verdict, verdict_text(row, margin=MARGIN)) == (Verdict.MISSING, text)


def test_only_seeds_that_both_have_are_compared() -> None:
    rows = judge(
        [a_run("base", seed=0), a_run("arm", seed=0, right=340), a_run("arm", seed=1, right=0)],
        arms=["base", "arm"],
        baseline="base",
        margin=MARGIN,
    )
    assert rows[1].difference is not None and rows[1].difference.mean == pytest.approx(-0.1)
    assert rows[1].final == pytest.approx((0.85 + 0.0) / 2)


def test_a_curve_has_the_mean_and_the_range_of_the_runs_that_have_the_step() -> None:
    short = a_run("arm", steps=(a_step(1, reward_mean=0.4),))
    found = curve([a_run("arm"), short], "reward_mean")
    assert found == [(1, pytest.approx(0.25), 0.1, 0.4), (2, 0.2, 0.2, 0.2)]


@pytest.mark.slow
def test_of_a_long_run_every_step_counts_and_some_points_are_drawn(shown: ComparisonReport) -> None:
    """A validation every 37 steps, the share truncated large between them: what is left out of either shows."""
    steps = [a_step(0, reward_mean=None, val_reward_mean=0.1)]
    for number in range(1, 9001):
        validated = 0.5 if number % 37 == 0 else None
        steps.append(a_step(number, is_truncated_fraction=(number % 4) / 10, val_reward_mean=validated))
    runs = [a_run("base"), a_run("bad", steps=tuple(steps))]
    rows = judge(runs, arms=["base", "bad"], baseline="base", margin=MARGIN)
    assert rows[1].truncated == pytest.approx(0.15) and rows[1].truncated_max == 0.3
    assert (rows[1].k3_kl, rows[1].k3_max) == (pytest.approx(1e-4 * 4500.5), pytest.approx(0.9))
    document = json.loads(as_json(replace(shown, rows=[rows[1]])))
    run = document["arms"][0]["runs"][0]
    assert (run["step"], run["validation"].count(0.5)) == ([*range(9001)], 9000 // 37)
    of_arm = re.findall(r'class="curve" points="([^"]+)"', page(replace(shown, rows=rows)))[1::2]
    assert {len(points.split()) for points in of_arm} == {3000, 3001}  # one for three, and of step 0 not all


@pytest.fixture
def shown() -> ComparisonReport:
    """A baseline, an arm that never acted, one that failed on a busy machine, and one without runs."""
    arms = ("base", "<tis>", "bad", "none")
    busy = {"busy": 0.5, "steps": (a_step(1), a_step(2, is_truncated_fraction=0.02, mismatch_k3_kl=0.4))}
    results = [
        *(a_run(arm, seed=seed) for arm in ("base", "<tis>") for seed in (0, 1)),
        *(a_run("bad", seed=seed, right=100, **busy) for seed in (0, 1)),
    ]
    comparison = Comparison(
        name="c",
        file=Path("c.yaml"),
        recipe=Path("recipes/r.yaml"),
        arms=tuple(Arm(name, "c.yaml:1", ()) for name in arms),
        seeds=(0, 1),
        baseline="base",
        validation=PROBLEMS,
        margin=MARGIN,
    )
    rows = judge(results, arms=arms, baseline="base", margin=MARGIN)
    return ComparisonReport(comparison, rows=rows, where="Taken on a day.", command="appliance compare c")


def test_the_table_names_verdicts_and_explains_its_words(shown: ComparisonReport) -> None:
    lines = table(shown, columns=200).splitlines()
    by_arm = {line.split()[0]: line for line in lines}
    assert "within ±0.03, inactive" in by_arm["<tis>"] and "+0.0000" in by_arm["<tis>"]
    assert "fails (2 of 2 seeds)" in by_arm["bad"] and "~2.00 s" in by_arm["bad"] and "1.00 %" in by_arm["bad"]
    assert by_arm["none"].split()[-2:] == ["no", "result"]
    equal = next(line for line in table(replace(shown, rows=shown.rows[:2])).splitlines() if "reaches" in line)
    assert equal.startswith(
        "An interval reaches 0.007 to each side in the median of the arms, 0.007 at most"
    )  # 3 / 400
    together = "All 6 runs together took ~6 min 0 s, the final validation apart."
    assert lines[-3:] == [INACTIVE_NOTE, together, f"~ {TIMES_NOTE}"]


def test_a_row_shows_what_the_guard_made_of_a_run_without_a_correction(shown: ComparisonReport) -> None:
    """Its share of truncated tokens, and from which steps on its rollouts were in which scheme."""
    schemes = ("int8", "int8", "bf16", "bf16", "int8")
    truncated = (0.0, 0.0, 0.02, 0.0, 0.0)
    steps = [a_step(0, reward_mean=None, scheme="bf16")]  # a validation
    steps += [
        a_step(n, scheme=s, is_truncated_fraction=t) for n, (s, t) in enumerate(zip(schemes, truncated, strict=True), 1)
    ]
    free = {"method": NONE}
    runs = [a_run("base"), a_run("plain", **free), a_run("governed", steps=tuple(steps), **free)]
    rows = judge(runs, arms=["base", "plain", "governed"], baseline="base", margin=MARGIN)
    text = markdown(replace(shown, rows=rows))
    lines = text.partition("## By seed")[0].splitlines()
    told = {line.split(" | ")[0]: line.split(" | ")[7] for line in lines if line.startswith("| ")}
    assert (told["| plain"], told["| governed"]) == ("-", "0.40 %")
    note = "governed, seed 0: rollouts in int8, from step 3 on in bf16, from step 5 on in int8."
    assert note in lines and text.count("rollouts in") == 1
    assert note in Parts(page(replace(shown, rows=rows))).texts


def test_json_has_every_run_and_no_rewards_of_single_problems(shown: ComparisonReport) -> None:
    document = json.loads(as_json(shown))
    assert [(arm["arm"], arm["verdict"], len(arm["runs"])) for arm in document["arms"]] == [
        ("base", "baseline", 2),
        ("<tis>", "within", 2),
        ("bad", "fails", 2),
        ("none", "missing", 0),
    ]
    run = document["arms"][2]["runs"][0]
    assert (run["step"], run["truncated"], run["final"], run["problems"]) == ([1, 2], [0.0, 0.02], 0.25, 400)
    assert "rewards" not in run and run["learning_rate"] == [1e-5, 5e-6]
    assert [each["own"] for arm in document["arms"][1:3] for each in arm["runs"]] == [0.9, 0.9, None, None]


def test_the_page_needs_nothing_else_and_escapes_names(shown: ComparisonReport) -> None:
    text = page(shown)
    parts = Parts(text)
    assert (parts.links, parts.seen.count("script")) == ([], 1)  # the page's own, see page/__init__.py
    assert "<tis>" not in text and "&lt;tis&gt;" in text
    assert parts.seen.count("figure") == 7 and "url(" not in text


def test_markdown_has_a_line_per_run(shown: ComparisonReport) -> None:
    text = markdown(shown)
    assert sum(line.startswith("| bad | ") for line in text.splitlines()) == 3  # the table's and two seeds'
    assert "| bad | 1 | done | 2 | 0.2500 | -0.7000 |" in text
    own, *_ = [line for line in text.splitlines() if line.startswith("| <tis> | 1 | ")]
    assert own.split(" | ")[7:9] == ["0.9000", "2.0e-04"]


def test_markdown_explains_every_column(shown: ComparisonReport) -> None:
    text = markdown(shown)
    head = next(line for line in text.splitlines() if line.startswith("| arm | "))
    explained = text.partition("## What the columns say")[2].partition("## By seed")[0]
    assert sorted(re.findall(r"\*\*(.+?)\*\*", explained)) == sorted(head.strip("| ").split(" | ")[1:])


def test_a_verdict_from_fewer_seeds_than_asked_says_so() -> None:
    runs = [*(a_run("base", seed=seed, right=380) for seed in (0, 1, 2)), a_run("arm", seed=0, right=380)]
    row = judge(runs, arms=["base", "arm"], baseline="base", margin=MARGIN, seeds=3)[1]
    assert verdict_text(row, margin=MARGIN) == "within ±0.03, from 1 of 3 seeds, inactive"
