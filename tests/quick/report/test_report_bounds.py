"""A step's mismatch has one word, by the run's own bounds, wherever the step is shown."""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from plans import make_guard
from rich.console import Console

from appliance.guard.policy import FLOW_ON_GPU
from appliance.record.plan import RunPlan, read_plan
from appliance.record.state import RunState, fold
from appliance.report import display
from appliance.report.display import PlainProgress
from appliance.report.folder import read_view
from appliance.report.page import page
from appliance.report.summary import print_status, summary_rows, try_next
from appliance.report.verdicts import verdicts
from appliance.settings.sections import Forward

K3 = 0.02  # of each step; the usual bound is 0.015
STEPS = 4


@pytest.fixture(params=[(0.05, "fine"), (0.001, "bad")], ids=["wide", "narrow"])
def run(request: pytest.FixtureRequest, tmp_path: Path, make_run: Callable, metrics_line: Callable) -> tuple:
    """A run's folder with a bound of its own, the bound, and the word for every step by it."""
    bound, word = request.param
    run_dir = make_run(tmp_path, steps=STEPS, done=STEPS)
    plan = read_plan(run_dir / "plan.json")
    plan.replace(guard=make_guard(k3_kl=bound)).write(run_dir / "plan.json")
    lines = [metrics_line(step, mismatch_k3_kl=K3) for step in range(1, STEPS + 1)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run_dir, bound, word


def state_of(run_dir: Path) -> tuple[RunPlan, RunState]:
    view = read_view(run_dir)
    return view.plan, view.state


def test_the_line_of_a_step_has_it(run: tuple, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir, bound, word = run
    _, state = state_of(run_dir)
    details = {"fine": " (k3 2.0e-02, ESS 0.990)", "bad": f": k3 0.02 is above {bound:g}"}
    assert f"  mismatch {word}{details[word]}" in display.plain_step(state, state.last, now=0.0)
    PlainProgress().show(state, [state.last], now=0.0)
    assert f"  mismatch {word}{details[word]}" in capsys.readouterr().err


def test_the_panel_has_it(run: tuple) -> None:
    run_dir, bound, word = run
    plan, state = state_of(run_dir)
    console = Console(file=io.StringIO(), width=120, record=True)
    console.print(display.panel(plan, state, now=0.0, columns=120))
    [row] = [line for line in console.export_text().splitlines() if "mismatch" in line]
    assert f"mismatch {word} k3 2.0e-02 (below {bound:g})" in " ".join(row.split())


def test_the_page_has_it(run: tuple) -> None:
    run_dir, bound, word = run
    view = read_view(run_dir)
    [answer] = [verdict for verdict in verdicts(view) if verdict.question == "Do rollouts and trainer agree?"]
    assert answer.word == word
    num_fine = STEPS if word == "fine" else 0
    within = f"within the bounds in {num_fine} of {STEPS} steps"
    assert answer.text.startswith(f"{within}; largest k3 2.0e-02 in step {STEPS} ")
    assert f"(bound {bound:g})" in answer.text
    text = page(view, now=1000.0)
    assert f"bound {bound:g}" in text and "bound 0.015" not in text


def test_status_and_summary_have_it(run: tuple, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir, _, word = run
    plan, state = state_of(run_dir)
    num_fine = STEPS if word == "fine" else 0
    print_status(str(run_dir), run_root=run_dir.parent)
    counted = f"fine in {num_fine} of {STEPS} steps"
    assert f"mismatch {counted}" in " ".join(capsys.readouterr().out.split())
    assert ("mismatch", counted) in summary_rows(plan, state, seconds=1.0, folder="a")
    advised = any(f"the mismatch was bad in {STEPS} of {STEPS}" in line for line in try_next(plan, state, folder="a"))
    assert advised == (word == "bad")


def test_a_step_of_one_flow_on_a_gpu_is_judged_as_the_guard_does(tmp_path: Path, make_run: Callable) -> None:
    """By a tenth of the recipe's bound."""
    plan = read_plan(make_run(tmp_path) / "plan.json")
    on_gpu = plan.replace(
        cluster=plan.cluster.replace(device="h100-80gb"),
        trainer=plan.trainer.replace(forward=Forward.ROLLOUT),
    )
    assert on_gpu.mismatch_bounds.k3_kl.bad[1] == FLOW_ON_GPU * plan.mismatch_bounds.k3_kl.bad[1]


def test_a_run_whose_mismatch_was_never_measured_is_not_called_fine(
    tmp_path: Path, make_run: Callable, step_line: Callable
) -> None:
    plan = read_plan(make_run(tmp_path) / "plan.json")
    unmeasured = {"mismatch_k3_kl": None, "is_ess": None, "is_weight_mean": None, "is_weight_std": None}
    lines = (step_line(step, **unmeasured) for step in (1, 2))
    state = functools.reduce(fold, lines, RunState(2, plan.mismatch_bounds))
    assert ("mismatch", "unknown") in summary_rows(plan, state, seconds=1.0, folder="a")
