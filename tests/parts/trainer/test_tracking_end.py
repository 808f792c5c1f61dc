"""The end of the tracking backends: whatever they do, the run ends as it would have."""

from __future__ import annotations

import contextvars
import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import plans
import pytest

from appliance.errors import GuardStop
from appliance.trainer import fit
from appliance.trainer.fit import finish_tracking
from appliance.trainer.stopping import Stopping

WHAT = "a backend of logging.backends did not end well: it may lack the last numbers"


def events(run_dir: Path) -> list[tuple[str, str, str]]:
    lines = (run_dir / "events.jsonl").read_text().splitlines() if (run_dir / "events.jsonl").exists() else []
    return [(event["kind"], event["what"], event["why"]) for event in map(json.loads, lines)]


def broken() -> None:
    raise ConnectionError("no network")


def test_a_good_end_says_nothing(tmp_path: Path) -> None:
    called: list[str] = []
    finish_tracking(lambda: called.append("finish"), run_dir=tmp_path)
    assert called == ["finish"] and events(tmp_path) == []


def test_an_error_becomes_a_note(tmp_path: Path) -> None:
    finish_tracking(broken, run_dir=tmp_path)
    assert events(tmp_path) == [("note", WHAT, "ConnectionError: no network")]


def test_a_backend_that_hangs_is_left_behind(tmp_path: Path) -> None:
    release, began = threading.Event(), time.monotonic()
    finish_tracking(lambda: release.wait(30), run_dir=tmp_path, within_s=0.2)
    took = time.monotonic() - began
    release.set()
    assert took < 10 and events(tmp_path) == [("note", WHAT, "not done within 0.2 s")]


def test_where_no_note_can_be_written_it_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    finish_tracking(broken, run_dir=tmp_path / "gone")
    assert caplog.messages[0].startswith(f"{WHAT} (ConnectionError: no network); no event could be written: ")


def test_a_backend_finds_its_run_by_a_context_variable(tmp_path: Path) -> None:
    """As trackio does."""
    current = contextvars.ContextVar[str]("current")
    current.set("run")
    seen: list[str] = []
    finish_tracking(lambda: seen.append(current.get()), run_dir=tmp_path)
    assert seen == ["run"]


class Tracked:
    """A trainer with a tracking backend that cannot end. ends: what `fit` raises, or None."""

    def __init__(self, run_dir: Path, *, ends: Exception | None) -> None:
        self.run_dir, self._ends = run_dir, ends
        self.logger = SimpleNamespace(finish=broken)

    def fit(self, rollouts: object) -> None:
        if self._ends is not None:
            raise self._ends

    engines, governor = SimpleNamespace(stop_watching=lambda: None), SimpleNamespace()
    init = export_model = lambda self: None


@pytest.mark.parametrize("ends", [GuardStop("k3_kl"), None])
def test_a_run_ends_as_it_did_whatever_its_backends_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: Exception | None
) -> None:
    closed: list[str] = []
    queue = SimpleNamespace(init=lambda config: None, close=lambda: closed.append("queue"))
    pool = SimpleNamespace(close=lambda: closed.append("pool"))
    monkeypatch.setattr(fit, "compose_config", lambda overrides: SimpleNamespace(transfer_queue=None))
    monkeypatch.setattr(fit, "apply_patch", lambda *_: None)
    monkeypatch.setattr(fit, "transfer_queue", queue)
    monkeypatch.setattr(fit, "pool_for", lambda plan: pool)
    monkeypatch.setattr(fit, "_rollouts", lambda *_, **__: None)
    monkeypatch.setattr(fit, "_vocabulary", lambda *_, **__: None)
    monkeypatch.setattr(fit, "ApplianceTrainer", lambda **_: Tracked(tmp_path, ends=ends))
    stopping = Stopping(tmp_path)
    try:
        fit.fit(plans.make_plan(tmp_path), overrides=[], stopping=stopping, on_engine_death=lambda error: None)
        raised = None
    except Exception as error:
        raised = error
    finally:
        stopping.over()
    assert raised is ends
    assert closed == ["pool", "queue"]
    assert events(tmp_path) == [("note", WHAT, "ConnectionError: no network")]
