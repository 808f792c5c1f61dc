"""Three ways to show a run while it runs: a live panel, plain lines, JSON lines. Chosen by where the output goes."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live

from appliance import console
from appliance.record.events import Event, StepMetrics
from appliance.record.plan import RunPlan
from appliance.record.state import RunState
from appliance.report import display

_REDRAW_S = 0.5
_IN_A_STEP = frozenset({"rollout", "log-probs", "update", "sync"})
_QUARTERS = 4

News = Sequence[Event | StepMetrics]


class Progress:
    """Shows nothing. What shows something has a `show` of its own."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Nothing was begun."""

    def show(self, state: RunState, news: News, *, now: float) -> None:
        """Called a few times a second with the newest state and what has come since the last call."""


def choose_progress(plan: RunPlan, *, json_mode: bool, quiet: bool = False) -> Progress:
    """quiet: a live panel or nothing, because a caller has many runs and a line for each."""
    if json_mode:
        return JsonProgress()
    people = console.err_console()
    if console.is_live(people):
        return LiveProgress(plan, people)
    return Progress() if quiet else PlainProgress()


class LiveProgress(Progress):
    """The panel, redrawn by the caller's ticks: no thread beside the one that starts children."""

    def __init__(self, plan: RunPlan, people: Console) -> None:
        self._plan = plan
        self._people = people
        self._live = Live(console=people, auto_refresh=False, transient=True)
        self._drawn = 0.0

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._live.stop()

    def show(self, state: RunState, news: News, *, now: float) -> None:
        if not news and time.monotonic() < self._drawn + _REDRAW_S:
            return
        self._drawn = time.monotonic()
        people = self._people
        drawn = display.panel(self._plan, state, now=now, columns=people.width, ascii_only=people.options.ascii_only)
        self._live.update(drawn, refresh=True)


class PlainProgress(Progress):
    """One line per step and per phase; the phases inside a step only until the first step is done."""

    def __init__(self) -> None:
        self._steps_begun = False
        self._told: tuple[str, int] = ("", -1)

    def show(self, state: RunState, news: News, *, now: float) -> None:
        for item in news:
            line = self._line(state, item, now=now)
            if line:
                console.say(line)

    def _line(self, state: RunState, item: Event | StepMetrics, *, now: float) -> str:
        if isinstance(item, StepMetrics):
            if item.reward_mean is None:
                return display.plain_validation(item)
            self._steps_begun = True
            return display.plain_step(state, item, now=now)
        if item.kind == "phase":
            quiet = self._steps_begun and item.what in _IN_A_STEP
            return "" if quiet else f"phase {item.what}: {display.phase_text(item.what)}"
        if item.kind == "progress":
            return self._progress(item)
        return f"{item.kind}: {item.what}" if item.kind in ("note", "guard", "cluster") else ""

    def _progress(self, item: Event) -> str:
        """A line per quarter of the work."""
        if item.done is None or not item.total:
            return ""
        reached = (item.what, int(item.done / item.total * _QUARTERS))
        if reached == self._told:
            return ""
        self._told = reached
        note = f"  {item.note}" if item.note else ""
        return f"{item.what} {item.done:g}/{item.total:g}{note}"


class JsonProgress(Progress):
    """Every event and every line of metrics on stdout as it comes, with its `type` in front."""

    def show(self, state: RunState, news: News, *, now: float) -> None:
        for item in news:
            kind = "metrics" if isinstance(item, StepMetrics) else "event"
            console.out(json_line(kind, json.loads(item.line)))


def json_line(kind: str, values: dict[str, Any]) -> str:
    return json.dumps({"type": kind, **values})
