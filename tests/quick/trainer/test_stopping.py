"""When the trainer may stop, and what it says of itself then. The request is the launcher's file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.errors import Interrupted, SavedAndStopped
from appliance.record.session import ask_to_stop, asked_to_stop, forget_stop
from appliance.trainer import stopping as looking
from appliance.trainer.stopping import StopAsked, Stopping

LOOKS_S = 0.2  # several looks of the thread


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looking, "LOOK_EVERY_S", LOOKS_S / 4)


class Ended:
    """Stands where `os._exit` stands: the codes that the process would have ended with."""

    def __init__(self) -> None:
        self.codes: list[int] = []

    def __call__(self, code: int) -> None:
        self.codes.append(code)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def last_event(run_dir: Path) -> dict[str, object]:
    event = json.loads((run_dir / "events.jsonl").read_text().splitlines()[-1])
    event.pop("time")
    return event


def test_request_is_one_word_until_it_is_forgotten(tmp_path: Path) -> None:
    assert asked_to_stop(tmp_path) == ""
    ask_to_stop(tmp_path, why="SIGTERM")
    assert asked_to_stop(tmp_path) == "SIGTERM"
    forget_stop(tmp_path)
    forget_stop(tmp_path)
    assert asked_to_stop(tmp_path) == ""


def test_nobody_asked(tmp_path: Path) -> None:
    stopping = Stopping(tmp_path, end=Ended())
    stopping.check()
    assert not stopping.is_requested


def test_before_the_first_step_the_process_ends_by_itself_with_130(tmp_path: Path) -> None:
    ended = Ended()
    Stopping(tmp_path, end=ended)
    ask_to_stop(tmp_path, why="SIGTERM")
    wait_until(lambda: ended.codes)
    assert ended.codes == [130]
    assert last_event(tmp_path) == {
        "kind": "stop",
        "what": "stopped by SIGTERM, there was nothing to save",
        "why": "SIGTERM",
    }


def test_resumed_attempt_without_a_step_of_its_own_is_saved_already(tmp_path: Path) -> None:
    ended = Ended()
    Stopping(tmp_path, resumed_step=7, end=ended)
    ask_to_stop(tmp_path, why="SIGTERM")
    wait_until(lambda: ended.codes)
    assert ended.codes == [75]
    assert (last_event(tmp_path)["what"], last_event(tmp_path)["step"]) == (
        "stopped by SIGTERM, the state after step 7 is saved",
        7,
    )


def test_finished_step_that_is_not_saved_waits_for_the_main_thread(tmp_path: Path) -> None:
    ended = Ended()
    stopping = Stopping(tmp_path, end=ended)
    stopping.begin_change()
    stopping.end_step(1, saved=0)
    ask_to_stop(tmp_path, why="SIGINT")
    wait_until(lambda: stopping.is_requested)
    with pytest.raises(StopAsked):
        stopping.check()
    time.sleep(LOOKS_S)
    assert ended.codes == []
    stopping.note_saved(1)
    error = stopping.leave()
    assert isinstance(error, SavedAndStopped)
    assert error.message == "stopped by SIGINT, the state after step 1 is saved"


def test_weights_ahead_of_the_last_line_are_no_time_to_stop(tmp_path: Path) -> None:
    """The second step has updated the weights; the state after the first is on disk."""
    ended = Ended()
    stopping = Stopping(tmp_path, resumed_step=1, end=ended)
    stopping.begin_change()
    ask_to_stop(tmp_path, why="SIGTERM")
    wait_until(lambda: stopping.is_requested)
    time.sleep(LOOKS_S)
    assert ended.codes == []
    stopping.end_step(2, saved=2)  # the step's own checkpoint
    wait_until(lambda: ended.codes)
    assert (ended.codes, last_event(tmp_path)["step"]) == ([75], 2)


def test_request_after_the_end_changes_nothing(tmp_path: Path) -> None:
    ended = Ended()
    stopping = Stopping(tmp_path, end=ended)
    stopping.over()
    ask_to_stop(tmp_path, why="SIGTERM")
    time.sleep(LOOKS_S)
    assert ended.codes == []


def test_leaving_with_nothing_saved_is_an_interruption(tmp_path: Path) -> None:
    stopping = Stopping(tmp_path, end=Ended())
    error = stopping.leave()
    assert isinstance(error, Interrupted)
    assert error.message == "stopped by a request, there was nothing to save"
