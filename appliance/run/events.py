"""What a run writes down while it runs: `events.jsonl` and `metrics.jsonl`, one JSON object a line.

Children append, the launcher reads. Nothing but the standard library: worker processes import this too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from appliance.errors import ApplianceError

EVENTS_FILE = "events.jsonl"
METRICS_FILE = "metrics.jsonl"
_LARGEST = 1e30
_TORN_AFTER_LOOKS = 20  # half a second: a write takes microseconds, but its process may have to wait for a core
_BETWEEN_LOOKS_S = 0.025


def append_event(run_dir: Path, *, kind: str, what: str, why: str = "", **extra: Any) -> None:
    """Append one event.

    kind: phase, progress, attest, failure, guard, checkpoint, resume, stop or note.  extra: JSON values.
    Raises OSError (a full disk, no such folder).
    """
    append_line(run_dir / EVENTS_FILE, {"time": time.time(), "kind": kind, "what": what, "why": why, **extra})


def append_line(path: Path, value: dict[str, Any]) -> None:
    """Append one JSON line in a single write, so that lines of several processes never mix. Raises OSError."""
    line = (json.dumps(value) + "\n").encode()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
    try:
        if _is_torn(descriptor):  # by a disk that was full, or a kill: what follows is a line of its own
            line = b"\n" + line
        if os.write(descriptor, line) < len(line):  # a full disk takes a part, without an error
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)


def _is_torn(descriptor: int) -> bool:
    """Whether the file ends within a line and stays so. A write of another process looks so while it is under way."""
    for _ in range(_TORN_AFTER_LOOKS):
        size = os.fstat(descriptor).st_size
        if not size or os.pread(descriptor, 1, size - 1) == b"\n":
            return False
        time.sleep(_BETWEEN_LOOKS_S)
    return True


def end_torn_line(path: Path) -> None:
    """What a full disk or a kill left of a line gets its end, so that the next line is one. Raises OSError."""
    with contextlib.suppress(FileNotFoundError), path.open("rb+") as file:
        if file.seek(0, os.SEEK_END) and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
            file.write(b"\n")


def append_failure(run_dir: Path, error: ApplianceError) -> None:
    """Append a `failure` event: the one line, the class, the hint and the exit code of an error of ours."""
    append_event(
        run_dir,
        kind="failure",
        what=error.message,
        error=type(error).__name__,
        hint=error.hint,
        exit_code=error.exit_code,
    )


def first_failure(run_dir: Path) -> Event | None:
    """The first `failure` event of a run's attempt, or None: what failed later failed because of it."""
    path = run_dir / EVENTS_FILE
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    first = None
    for event in map(parse_event, lines):
        if event is not None and event.kind == "resume":
            first = None
        elif event is not None and event.kind == "failure":
            first = first or event
    return first


def run_started(run_dir: Path) -> float:
    """Unix time of a run's first event, s; now when it has none yet."""
    path = run_dir / EVENTS_FILE
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    first = next((event for event in map(parse_event, lines) if event is not None), None)
    return time.time() if first is None else first.time


@dataclass(frozen=True)
class Event:
    """A line of `events.jsonl`. time: unix s.  why: the reason, for people.  done, total, note: of a `progress`.

    error, hint, exit_code: of a `failure`; error is the name of its class in appliance/errors.py.
    step: of a `stop`, whose state is saved; None where nothing was there to save.
    """

    time: float
    kind: str
    what: str
    why: str = ""
    done: float | None = None
    total: float | None = None
    note: str = ""
    error: str = ""
    hint: str = ""
    exit_code: int | None = None
    step: int | None = None
    line: str = field(default="", compare=False, repr=False)


@dataclass(frozen=True)
class StepMetrics:
    """The part of a line of `metrics.jsonl` that is shown. Units as in the contract; None where a line has no value.

    A validation before training has step 0 and no `reward_mean`.
    """

    step: int
    time_s: float
    scheme: str = ""
    emulated: bool = False
    guard_level: str = ""
    bf16_layers: float | None = None
    correction_cap: float | None = None
    nonfinite_fraction: float | None = None
    telemetry_s: float | None = None
    reward_mean: float | None = None
    response_tokens_mean: float | None = None
    rollout_tokens_per_s: float | None = None
    rollout_s: float | None = None
    logprob_s: float | None = None
    update_s: float | None = None
    sync_s: float | None = None
    step_s: float | None = None
    proof_s: float | None = None
    codes_changed_fraction: float | None = None
    saturated_fraction: float | None = None
    scale_drift: float | None = None
    layer_error_max: float | None = None
    mismatch_k3_kl: float | None = None
    is_weight_mean: float | None = None
    is_weight_std: float | None = None
    is_weight_max: float | None = None
    is_ess: float | None = None
    is_truncated_fraction: float | None = None
    val_reward_mean: float | None = None
    val_reward_bf16_mean: float | None = None
    val_samples: float | None = None
    grad_norm: float | None = None
    entropy: float | None = None
    reward_failures: float | None = None
    line: str = field(default="", compare=False, repr=False)


_NUMBERS = tuple(f.name for f in dataclasses.fields(StepMetrics) if f.type == "float | None")


def parse_event(line: str) -> Event | None:
    """The event of one line, None when the line is not one."""
    raw = json_object(line)
    time_s = finite(raw.get("time"))
    if time_s is None or not isinstance(raw.get("kind"), str) or not isinstance(raw.get("what"), str):
        return None
    code, step = finite(raw.get("exit_code")), finite(raw.get("step"))
    return Event(
        time=time_s,
        kind=raw["kind"],
        what=raw["what"],
        why=_text(raw.get("why")),
        done=finite(raw.get("done")),
        total=finite(raw.get("total")),
        note=_text(raw.get("note")),
        error=_text(raw.get("error")),
        hint=_text(raw.get("hint")),
        exit_code=None if code is None else int(code),
        step=None if step is None else int(step),
        line=line,
    )


def parse_metrics(line: str) -> StepMetrics | None:
    """The metrics of one line, None when the line is none."""
    raw = json_object(line)
    step, time_s = finite(raw.get("step")), finite(raw.get("time_s"))
    if step is None or time_s is None:
        return None
    return StepMetrics(
        step=int(step),
        time_s=time_s,
        scheme=_text(raw.get("scheme")),
        emulated=raw.get("emulated") is True,
        guard_level=_text(raw.get("guard_level")),
        line=line,
        **{name: finite(raw.get(name)) for name in _NUMBERS},
    )


class Tail:
    """The lines of a growing file, each once and only when it is whole. The file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._half = b""

    def read(self) -> list[str]:
        """The lines that were completed since the last call, without their line ends. Raises OSError."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(new)
        *whole, self._half = (self._half + new).split(b"\n")
        return [line.decode(errors="replace") for line in whole]


class RunTail:
    """Events and metrics of a run as they come, in the order of each file; a line that cannot be read is left out."""

    def __init__(self, run_dir: Path) -> None:
        self._events = Tail(run_dir / EVENTS_FILE)
        self._metrics = Tail(run_dir / METRICS_FILE)

    def read(self) -> list[Event | StepMetrics]:
        news = [parse_event(line) for line in self._events.read()]
        news += [parse_metrics(line) for line in self._metrics.read()]
        return [item for item in news if item is not None]


def json_object(text: str) -> dict[str, Any]:
    """The object that the text is; empty when it is none, or nested too deeply."""
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return raw if isinstance(raw, dict) else {}


def finite(value: object) -> float | None:
    """A finite one of the size of anything that is measured; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_LARGEST < value < _LARGEST:
        return None
    return float(value)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
