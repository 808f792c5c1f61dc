"""What an engine says when it cannot start is what the user reads."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError, model_validator

from appliance.errors import EngineNotStarted, PatchError, WeightsError, is_restartable
from appliance.guard.policy import MismatchBounds
from appliance.launch.outcome import Child, failed_outcome
from appliance.launch.side_job import run_child
from appliance.record.engine_start import LOGGERS, not_started, report_start_failures, starting
from appliance.record.events import EVENTS_FILE, append_failure, first_failure
from appliance.record.session import RunStatus
from appliance.record.state import RunState
from appliance.terms.environment import EVENTS_VARIABLE, PLAN_VARIABLE

CORE, WORKERS = LOGGERS
WHY = "Sliding window for some but all layers is not supported."
ELSEWHERE = "Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}"
OF_A_WORKER = "WorkerProc initialization failed due to an exception. See stack trace for root cause."


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(EVENTS_VARIABLE, str(tmp_path))
    report_start_failures()
    report_start_failures()  # vLLM calls a plugin several times
    return tmp_path


def log(logger: str, error: Exception, *, message: str) -> None:
    """As vLLM's processes do when they end."""
    try:
        raise error
    except Exception:  # the exception that is logged
        logging.getLogger(logger).exception(message)


def test_the_first_error_of_an_engines_processes_is_the_users(folder: Path) -> None:
    log(WORKERS, AssertionError(WHY), message="WorkerProc failed to start.")
    log(CORE, Exception(OF_A_WORKER), message="EngineCore failed to start.")
    assert len((folder / EVENTS_FILE).read_text().splitlines()) == 1
    with pytest.raises(EngineNotStarted) as raised, starting():
        log(WORKERS, AssertionError(WHY), message="WorkerProc failed to start.")
        raise RuntimeError(ELSEWHERE)
    assert raised.value.message == f"the rollout engine does not start: AssertionError: {WHY}"
    assert raised.value.hint == "these are vLLM's own words; the log says where the error was raised"


def test_what_fails_after_the_start_is_no_failure_to_start(folder: Path) -> None:
    log(CORE, ValueError("later"), message="EngineCore encountered a fatal error.")
    assert first_failure(folder) is None


def test_an_error_of_ours_stays_what_it_is(folder: Path) -> None:
    with pytest.raises(PatchError, match="another source"), starting():
        raise PatchError("another source")


def test_an_error_of_ours_in_an_engines_process_is_the_users_and_stays_what_it_is(folder: Path) -> None:
    """Of whatever raised it: nobody there need have reported it."""
    why = WeightsError("first load: a.weight has a value that is not finite", hint="copy it again")
    with pytest.raises(WeightsError) as raised, starting():
        log(WORKERS, why, message="WorkerProc failed to start.")
        log(CORE, Exception(OF_A_WORKER), message="EngineCore failed to start.")
        raise RuntimeError(ELSEWHERE)
    assert (raised.value.message, raised.value.hint) == (why.message, why.hint)
    assert not is_restartable(raised.value.exit_code, error=type(raised.value).__name__)


def test_an_earlier_childs_failure_is_not_this_ones(folder: Path) -> None:
    append_failure(folder, EngineNotStarted("an earlier engine"))
    time.sleep(0.01)
    with pytest.raises(EngineNotStarted, match="ValueError: now"), starting():
        raise ValueError("now")


def test_an_engine_outside_of_a_run_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(EVENTS_VARIABLE)
    monkeypatch.delenv(PLAN_VARIABLE, raising=False)
    log(CORE, ValueError("now"), message="EngineCore failed to start.")
    assert not (folder / EVENTS_FILE).exists()


def test_rules_of_vllms_configuration_are_told_without_their_input() -> None:
    class ModelConfig(BaseModel):
        length: int

        @model_validator(mode="after")
        def refuse(self) -> ModelConfig:
            raise ValueError("User-specified max_model_len (64)\nis greater than 32")

    with pytest.raises(EngineNotStarted) as raised, starting():
        ModelConfig(length=64)
    assert isinstance(raised.value.__cause__, ValidationError)
    why = "ValidationError: Value error, User-specified max_model_len (64) is greater than 32"
    assert raised.value.message == f"the rollout engine does not start: {why}"


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (AssertionError(WHY), False),
        (NotImplementedError("no kernel"), False),
        (KeyError("factor"), False),
        (ValueError("Free memory on device (1 GiB) is less than desired"), True),
        (RuntimeError("NCCL error"), True),
        (OSError("a port is in use"), True),
    ],
)
def test_what_is_refused_is_not_tried_again(error: Exception, again: bool) -> None:
    made = not_started(error)
    assert is_restartable(made.exit_code, error=type(made).__name__) is again


def test_a_known_symptom_has_its_remedy(folder: Path) -> None:
    append_failure(folder, not_started(ValueError("No available memory for the cache blocks.")))
    state = RunState(1, MismatchBounds(), failure=first_failure(folder))
    child = Child(name="train", title="training", argv=(), default_code=5)
    outcome = failed_outcome(child, returncode=4, state=state, log_tail="", log="/l", run="/r")
    assert (outcome.state, outcome.exit_code) == (RunStatus.FAILED, 4)
    assert outcome.reason == "the rollout engine has no memory for its KV cache"
    assert "ValueError: No available memory for the cache blocks." in outcome.advice[1]


def test_a_commands_child_says_what_its_engine_said(tmp_path: Path) -> None:
    """The child, which is any module, logs as vLLM's processes do; its own error has no reason."""
    code = f"""
import logging, sys
from pathlib import Path
from appliance.record.engine_start import report_start_failures, starting
from appliance.record.events import exit_code_of
report_start_failures()
def work():
    with starting():
        try:
            raise AssertionError({WHY!r})
        except AssertionError:
            logging.getLogger({CORE!r}).exception("EngineCore failed to start.")
        raise RuntimeError({ELSEWHERE!r})
sys.exit(exit_code_of(work, run_dir=Path({str(tmp_path)!r})))
"""
    (tmp_path / "stands_for_bench.py").write_text(code)
    append_failure(tmp_path, EngineNotStarted("what an earlier child of this folder said"))
    time.sleep(0.01)
    with pytest.raises(EngineNotStarted) as raised:
        run_child(["stands_for_bench"], command="bench", folder=tmp_path, env={"PYTHONPATH": f"{tmp_path}"})
    assert raised.value.message == f"the rollout engine does not start: AssertionError: {WHY}"
