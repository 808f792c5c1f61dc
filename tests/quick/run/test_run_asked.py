"""A signal that comes where no step is made: between two attempts, in the preflight of a resume, beside a fault."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
from plans import HOST
from stopped_runs import is_free, recipe, save, stopped

from appliance.launch import command, train
from appliance.launch.subreaper import SubreaperReport
from appliance.launch.train import run_training
from appliance.plan.build import build_plan
from appliance.recipe.load import to_yaml
from appliance.recipe.schema import Recipe
from appliance.record.checkpoints import CheckpointSearch
from appliance.record.session import RunStatus, Session, asked_to_stop, read_record
from appliance.report import page as report
from appliance.report.folder import RunReader

SIGNALS = [(signal.SIGTERM, 75), (signal.SIGHUP, 75), (signal.SIGINT, 130)]
# Its engine dies while it leaves, as where all processes of a service get the signal.
FAILING = """
import os, sys, time
from pathlib import Path
from appliance.record.events import append_event
from appliance.record.session import asked_to_stop
run_dir = Path(os.environ["APPLIANCE_PLAN"]).parent
append_event(run_dir, kind="phase", what="rollout")
while not asked_to_stop(run_dir):
    (run_dir / "ready").touch()
    time.sleep(0.02)
append_event(run_dir, kind="failure", what="rollout engine 0 died", error="EngineError", exit_code=4)
sys.exit(4)
"""


class Unheard(Exception):
    """Nobody of the program listened."""


@pytest.fixture(autouse=True)
def this_process_lives_on() -> Iterator[None]:
    def unheard(number: int, frame: FrameType | None) -> None:
        raise Unheard

    before = {number: signal.signal(number, unheard) for number, _ in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def failed_run(root: Path) -> tuple[Recipe, Path]:
    """A run that failed after its step 3 was saved."""
    run_recipe = recipe("trainer.steps=9", "trainer.max_restarts=3", f"cluster.run_dir={root}")
    run_dir = stopped(build_plan(run_recipe, run_dir=root / "small-1", host=HOST))
    (run_dir / "recipe.yaml").write_text(to_yaml(run_recipe))
    save(run_dir, 3)
    return run_recipe, run_dir


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_between_two_attempts_the_saved_state_counts(
    number: signal.Signals, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """While a checkpoint is verified, which takes seconds per gigabyte."""
    run_recipe, run_dir = failed_run(tmp_path)
    monkeypatch.setattr(command, "find_newest", lambda _: signal.raise_signal(number))
    with pytest.raises(SystemExit) as left:
        command.Attempts(run_recipe).through_faults(5, run_dir)
    assert left.value.code == code
    assert capsys.readouterr().err == f"stopped by {number.name}, the state after step 3 is saved\n"
    with pytest.raises(Unheard):  # what was there before it holds again
        signal.raise_signal(number)


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_in_the_preflight_of_a_resume_the_saved_state_counts(
    number: signal.Signals, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    run_recipe, run_dir = failed_run(tmp_path)
    monkeypatch.setattr(command, "examine", lambda *_, **__: signal.raise_signal(number))
    how = {"resume": "auto", "name": run_dir.name, "force": False, "json_mode": False, "stages": ()}
    with pytest.raises(SystemExit) as left:
        command.run_train(run_recipe, dry_run=False, **how)
    assert left.value.code == code
    assert capsys.readouterr().err == f"stopped by {number.name}, the state after step 3 is saved\n"


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_before_the_training_of_a_resumed_run_the_saved_state_counts(
    number: signal.Signals, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its problems are made again, as where the cache is gone."""
    run_recipe, run_dir = failed_run(tmp_path)
    monkeypatch.setattr(
        train, "supervise", lambda *_, **__: signal.raise_signal(number) or SubreaperReport(-15, (), ())
    )
    how = {"resume": "auto", "name": run_dir.name, "force": False, "json_mode": False, "stages": ()}
    assert command.run_train(run_recipe, dry_run=False, **how) == code
    reason = f"stopped by {number.name}, the state after step 3 is saved"
    record = read_record(run_dir)
    assert (record.state, record.attempt, record.exit_code) == (RunStatus.STOPPED, 2, code)
    assert record.reason == reason


@pytest.mark.slow
def test_a_fault_beside_a_signal_is_not_answered_by_a_restart(
    tmp_path: Path, small_plan: Callable, python: Callable, launch: Callable, wait_until: Callable
) -> None:
    plan = small_plan(tmp_path, argv=python(FAILING))
    run_dir, process = Path(plan.run_dir), launch(plan, "--may-restart")
    wait_until((run_dir / "ready").exists, seconds=60.0)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 4 and "rollout engine 0 died" in err
    assert restarts_after(run_dir, code=4) == []


def test_a_signal_that_comes_when_the_attempt_has_failed_is_heard(
    tmp_path: Path, small_plan: Callable, python: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = small_plan(tmp_path, argv=python("raise SystemExit(5)"))
    finish = Session.finish

    def late(self: Session, **how: object) -> None:
        signal.raise_signal(signal.SIGTERM)
        finish(self, **how)

    monkeypatch.setattr(Session, "finish", late)
    code = run_training(plan, recipe_yaml="name: small\n", findings=(), name="small-1", json_mode=False, quiet=True)
    assert (code, asked_to_stop(Path(plan.run_dir))) == (5, "SIGTERM")
    assert restarts_after(Path(plan.run_dir), code=5) == []


def test_a_signal_that_comes_while_the_last_page_is_written_is_heard(
    tmp_path: Path, small_plan: Callable, python: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = small_plan(tmp_path, argv=python("raise SystemExit(5)"))

    def write(run: RunReader, **_: object) -> None:
        if run.view().record.exit_code is not None:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(report, "write_page", write)
    code = run_training(plan, recipe_yaml="name: small\n", findings=(), name="small-1", json_mode=False, quiet=True)
    assert (code, asked_to_stop(Path(plan.run_dir))) == (5, "SIGTERM")
    assert restarts_after(Path(plan.run_dir), code=5) == []


def test_between_two_attempts_the_run_is_held(
    tmp_path: Path, small_plan: Callable, python: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = small_plan(tmp_path, argv=python("raise SystemExit(5)"))
    how = {"recipe_yaml": "name: small\n", "findings": (), "name": "small-1", "json_mode": False, "quiet": True}
    code, run_dir, free = run_training(plan, may_restart=True, **how), Path(plan.run_dir), []
    monkeypatch.setattr(command, "find_newest", lambda run: free.append(is_free(run)) or CheckpointSearch(None))
    assert command.Attempts(recipe(f"cluster.run_dir={tmp_path}")).through_faults(code, run_dir) == 5
    assert free == [False] and is_free(run_dir)


def restarts_after(run_dir: Path, *, code: int) -> list[object]:
    """What the restarts of a run whose first attempt ended with this code would go on from."""
    save(run_dir, 3)
    found: list[object] = []
    command.keep_going(code, run_dir=run_dir, max_restarts=3, again=lambda each, _: found.append(each) or 0)
    return found
