"""Which ends are answered by a new attempt, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.errors import is_restartable
from appliance.launch.command import keep_going
from appliance.record import checkpoints as seal_module
from appliance.record.checkpoints import CheckpointSearch, Facts, checkpoint_folder, seal
from appliance.record.events import append_event


@pytest.mark.parametrize(
    ("code", "error", "fault"),
    [
        (4, "EngineError", True),
        (4, "SyncError", True),
        (5, "ProcessDied", True),
        (5, "TrainingError", True),
        (4, "PatchError", False),
        (4, "AttestationError", False),
        (6, "GuardStop", False),
        (0, "", False),
        (1, "ApplianceError", False),
        (2, "RecipeError", False),
        (3, "PreflightError", False),
        (75, "", False),
        (130, "", False),
    ],
)
def test_faults_are_what_another_attempt_may_cure(code: int, error: str, fault: bool) -> None:
    assert is_restartable(code, error=error) is fault


def test_process_without_a_last_word_is_a_fault() -> None:
    assert is_restartable(5, error="")


def save(run_dir: Path, step: int) -> None:
    folder = checkpoint_folder(run_dir, step=step)
    folder.mkdir(parents=True)
    (folder / "data.pt").write_bytes(b"position")
    seal(folder, facts=Facts(step=step, world_size=1, reason="a test", time=1.0, val_reward=None, profile=()))


class Attempts:
    """Attempts that end with these codes, each after it has saved this step (None: nothing new)."""

    def __init__(self, run_dir: Path, *ends: tuple[int, int | None]) -> None:
        self.run_dir = run_dir
        self.ends = list(ends)
        self.searches: list[CheckpointSearch | None] = []

    def __call__(self, found: CheckpointSearch | None = None, restart: str = "") -> int:
        """found: what the restart goes on from, None for the first attempt."""
        self.searches.append(found)
        code, step = self.ends.pop(0)
        if step is not None:
            save(self.run_dir, step)
        return code


@pytest.fixture
def resume_run(tmp_path: Path) -> Callable[..., tuple[int, int]]:
    """Attempts as (code, saved step), the first one included. Returns the last code and how many there were."""

    def run(*ends: tuple[int, int | None], max_restarts: int = 9) -> tuple[int, int]:
        attempts = Attempts(tmp_path, *ends)
        code = keep_going(attempts(), run_dir=tmp_path, max_restarts=max_restarts, again=attempts)
        return code, len(ends) - len(attempts.ends)

    return run


def test_run_that_ends_well_is_not_restarted(resume_run: Callable) -> None:
    assert resume_run((0, 3), (0, None)) == (0, 1)


def test_faults_are_answered_until_the_run_is_done(resume_run: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    assert resume_run((5, 2), (4, 4), (0, 6)) == (0, 3)
    assert capsys.readouterr().err.splitlines() == [
        "restart 1 of 9, from the state after step 2",
        "restart 2 of 9, from the state after step 4",
    ]


def test_restarts_are_counted(resume_run: Callable) -> None:
    assert resume_run((5, 1), (5, 2), (5, 3), (5, 4), max_restarts=2) == (5, 3)


def test_none_are_wanted(resume_run: Callable) -> None:
    assert resume_run((5, 1), (0, 2), max_restarts=0) == (5, 1)


def test_without_a_checkpoint_there_is_nothing_to_go_on_from(
    resume_run: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    assert resume_run((5, None), (0, 1)) == (5, 1)
    assert capsys.readouterr().err == "not restarted: there is no whole checkpoint\n"


def test_same_fault_at_the_same_step_ends_it(resume_run: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    assert resume_run((5, 2), (5, None), (0, 3)) == (5, 2)
    assert capsys.readouterr().err.splitlines()[-1] == "not restarted: two attempts in a row got no further than step 2"


def test_stop_of_the_guard_after_a_fault_ends_it(resume_run: Callable) -> None:
    assert resume_run((5, 2), (6, 3), (0, 4)) == (6, 2)


def test_lasting_fault_is_read_from_the_newest_attempt(resume_run: Callable, tmp_path: Path) -> None:
    append_event(tmp_path, kind="failure", what="a patch does not fit", error="PatchError")
    assert resume_run((4, 2), (0, 3)) == (4, 1)
    append_event(tmp_path, kind="resume", what="attempt 2 resumes after step 2")
    assert resume_run((4, 5), (0, 6)) == (0, 2)


def test_each_attempt_gets_the_checkpoint_that_was_verified_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hashing one takes seconds per gigabyte: once is enough."""
    hashed: list[str] = []
    real = seal_module.hash_file
    monkeypatch.setattr(seal_module, "hash_file", lambda path: hashed.append(path.parent.name) or real(path))
    attempts = Attempts(tmp_path, (5, 2), (5, 3), (0, None))
    assert keep_going(attempts(), run_dir=tmp_path, max_restarts=9, again=attempts) == 0
    assert attempts.searches == [None, *(CheckpointSearch(checkpoint_folder(tmp_path, step=step)) for step in (2, 3))]
    assert hashed == ["global_step_2", "global_step_3"]
