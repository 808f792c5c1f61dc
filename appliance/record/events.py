"""What a run writes down while it runs, one JSON object a line: `events.jsonl`, `metrics.jsonl` and `memory.jsonl`.
Children append, the launcher reads, but for the memory, which it measures."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic.dataclasses import dataclass

from appliance.errors import ApplianceError, is_restartable
from appliance.processes import find_processes
from appliance.record.lines import STRICT, Code, Count, Number, finite, json_object, lines_of, parse_line
from appliance.terms.environment import EVENTS_VARIABLE, PLAN_VARIABLE, RUN_VARIABLE

EVENTS_FILE = "events.jsonl"
METRICS_FILE = "metrics.jsonl"
MEMORY_FILE = "memory.jsonl"
LINES_AT_ONCE = 500  # of a file that is read from its start: what it takes of memory
REWARD, VALIDATION = _NAMED = "reward/", "val/"  # that keys begin with which have a name of the user's in them
_TORN_AFTER_LOOKS = 20  # half a second: a write takes microseconds, but its process may have to wait for a core
_BETWEEN_LOOKS_S = 0.025
_MEMORY_EVERY_S = 5.0
_TIMES_ITS_COST = 100  # for reading memory the kernel walks the pages: 45 ms for 1.7 GB, measured


def append_event(run_dir: Path, *, kind: str, what: str, why: str = "", **extra: Any) -> None:
    """Append one event. kind: one of those that metric_catalogue.py lists.  extra: JSON values.
    Raises OSError (a full disk, no such folder)."""
    append_line(run_dir / EVENTS_FILE, {"time": time.time(), "kind": kind, "what": what, "why": why, **extra})


def append_line(path: Path, value: dict[str, Any]) -> None:
    """Append one JSON line in a single write, so that lines of several processes never mix. Raises OSError."""
    line = (json.dumps(value) + "\n").encode()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
    try:
        if _is_torn(descriptor):  # by a disk that was full, or a kill: what follows is a separate line
            line = b"\n" + line
        if os.write(descriptor, line) < len(line):  # a full disk takes a part, without an error
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)


def _is_torn(descriptor: int) -> bool:
    """Tell whether the file ends within a line and stays so. A write of another process looks so while it is under
    way."""
    for _ in range(_TORN_AFTER_LOOKS):
        size = os.fstat(descriptor).st_size
        if not size or os.pread(descriptor, 1, size - 1) == b"\n":
            return False
        time.sleep(_BETWEEN_LOOKS_S)
    return True


def append_failure(run_dir: Path, error: ApplianceError) -> None:
    """Append a `failure` event: the one line, the class, the hint and the exit code of an error of ours."""
    append_event(run_dir, kind="failure", what=error.message, **_of_failure(error))


def failure_event(error: ApplianceError) -> Event:
    """Make the event that `append_failure` appends, for when appending fails."""
    values = {"time": time.time(), "kind": "failure", "what": error.message, "why": "", **_of_failure(error)}
    return Event(**values, line=json.dumps(values))


def _of_failure(error: ApplianceError) -> dict[str, Any]:
    return {"error": type(error).__name__, "hint": error.hint, "exit_code": error.exit_code}


@contextlib.contextmanager
def report_failures(run_dir: Path | None = None) -> Iterator[None]:
    """Make a `failure` event of an error of ours inside the block, and raise it again.

    vLLM and Ray send only the text of an error to whoever called, and of an error at start-up not even that. An event
    that is written where the error is raised keeps its class, hint and exit code.  run_dir: the folder that gets the
    event; None: that of the run that this process belongs to, if it belongs to one.
    """
    try:
        yield
    except ApplianceError as error:
        run_dir = run_dir or events_folder()
        if run_dir is not None:
            append_failure(run_dir, error)
        raise


def events_folder() -> Path | None:
    """Return the folder whose events this process may append to: its command's, else its run's; None where it has
    none."""
    if folder := os.environ.get(EVENTS_VARIABLE):
        return Path(folder)
    return Path(os.environ[PLAN_VARIABLE]).parent if PLAN_VARIABLE in os.environ else None


def exit_code_of(work: Callable[[], object], *, run_dir: Path) -> int:
    """Return the exit code of a child: 0, or that of an error of ours. Any other error is reported as our own fault and
    raised again. run_dir: the folder that gets the event."""
    try:
        with report_failures(run_dir):
            work()
    except ApplianceError as error:
        return error.exit_code
    except Exception as error:  # every failure becomes an event, whatever it is
        append_failure(run_dir, ApplianceError(f"{type(error).__name__}: {error}", hint="the log has the details"))
        raise
    return 0


def first_failure(run_dir: Path, *, since_s: float = 0.0) -> Event | None:
    """Return the first `failure` event of a run's attempt, or None: what failed later failed because of it. since_s:
    Unix time of the first event that counts."""
    first = None
    for event in read_events(run_dir):
        if event.kind == "resume":
            first = None
        elif event.kind == "failure" and event.time >= since_s:
            first = first or event
    return first


def may_restart(run_dir: Path, *, code: int) -> bool:
    """Tell whether another attempt may fare better than the newest one, which ended with this code."""
    failure = first_failure(run_dir)
    return is_restartable(code, error=failure.error if failure else "")


def run_started(run_dir: Path) -> float:
    """Return the Unix time of a run's first event, s; the time now when it has none yet."""
    first = next(read_events(run_dir), None)
    return time.time() if first is None else first.time


@dataclass(frozen=True, config=STRICT)
class Event:
    """A line of `events.jsonl`."""

    time: Number
    """Time of the event, Unix s."""
    kind: str
    what: str
    why: str = ""
    """Reason, for people."""
    done: Number | None = None
    """Amount of work that is done, in a `progress` event; `total` and `note` are of such events, too."""
    total: Number | None = None
    note: str = ""
    error: str = ""
    """Name of the error's class in appliance/errors.py, in a `failure` event; `hint` and `exit_code` are of such
    events, too."""
    hint: str = ""
    exit_code: Code | None = None
    step: Count | None = None
    """Step whose state is saved, in a `stop` event; None where there was nothing to save."""
    line: str = field(default="", compare=False, repr=False)


@dataclass(frozen=True, config=STRICT)
class StepMetrics:
    """The part of a line of `metrics.jsonl` that is shown. Units as in docs/metrics.md; None where a line has no
    value. A validation before training has step 0 and no `reward_mean`."""

    step: Count
    time_s: Number
    scheme: str = ""
    emulated: bool = False
    guard_level: str = ""
    bf16_layers: Number | None = None
    nonfinite_fraction: Number | None = None
    reward_mean: Number | None = None
    response_tokens_mean: Number | None = None
    unfinished_fraction: Number | None = None
    rollout_tokens_per_s: Number | None = None
    rollout_s: Number | None = None
    logprob_s: Number | None = None
    update_s: Number | None = None
    sync_s: Number | None = None
    step_s: Number | None = None
    proof_s: Number | None = None
    codes_changed_fraction: Number | None = None
    saturated_fraction: Number | None = None
    scale_drift: Number | None = None
    layer_error_max: Number | None = None
    mismatch_k3_kl: Number | None = None
    mismatch_top_kl: Number | None = None
    """Divergence of whole distributions, where engines report their most likely words, as is
    `mismatch_top_equal_fraction`."""
    mismatch_top_equal_fraction: Number | None = None
    score_centering: Number | None = None
    is_weight_mean: Number | None = None
    is_weight_std: Number | None = None
    is_weight_max: Number | None = None
    is_ess: Number | None = None
    is_truncated_fraction: Number | None = None
    is_above_cap_fraction: Number | None = None
    """Share of the tokens whose weight is above the cap; None with a method that cuts no token's weight, and in lines
    of older code."""
    mismatch_equal_fraction: Number | None = None
    """Share of the tokens whose two log-probs are the same."""
    differing_tokens: Number | None = None
    """Tokens whose log-prob is not the rollouts', in a step in which all should be the same."""
    val_reward_mean: Number | None = None
    val_reward_bf16_mean: Number | None = None
    val_samples: Number | None = None
    val_scheme: str = ""
    """Scheme of `val_reward_mean`; empty in lines of older code: see `validated_in`."""
    grad_norm: Number | None = None
    learning_rate: Number | None = None
    entropy: Number | None = None
    clipped_negative_fraction: Number | None = None
    reward_failures: Number | None = None
    turns_mean: Number | None = None
    tool_calls_mean: Number | None = None
    tool_calls_failed_fraction: Number | None = None
    user_metrics: dict[str, float] = field(default_factory=dict)
    """Metrics that have a name of the user's in their key, in the line's order: `reward/<name>`,
    `val/<set>/avg@<n>`."""
    line: str = field(default="", compare=False, repr=False)

    @property
    def validated_in(self) -> str:
        """Scheme that `val_reward_mean` was measured in."""
        return self.val_scheme or self.scheme


Parsed = TypeVar("Parsed", Event, StepMetrics)


def parse_event(line: str) -> Event | None:
    """Parse an event; None when the line is none."""
    return _with_line(parse_line(line, Event), line)


def parse_metrics(line: str) -> StepMetrics | None:
    """Parse a line of metrics; None when the line is none."""
    parsed = _with_line(parse_line(line, StepMetrics), line)
    if parsed is not None and any(f'"{start}' in line for start in _NAMED):
        numbers = {key: finite(value) for key, value in json_object(line).items() if key.startswith(_NAMED)}
        object.__setattr__(parsed, "user_metrics", {key: value for key, value in numbers.items() if value is not None})
    return parsed


def _with_line(parsed: Parsed | None, line: str) -> Parsed | None:
    if parsed is not None:
        object.__setattr__(parsed, "line", line)
    return parsed


def read_events(run_dir: Path) -> Iterator[Event]:
    """Yield the events of a run in their order, as they are read; lines that are no event are left out. Raises
    OSError."""
    return (event for event in map(parse_event, lines_of(run_dir / EVENTS_FILE)) if event is not None)


def read_metrics(run_dir: Path) -> Iterator[StepMetrics]:
    """Yield the lines of metrics of a run as read_events does. Each step comes once: where a step was done again, a
    resume has cut the earlier line."""
    return (line for line in map(parse_metrics, lines_of(run_dir / METRICS_FILE)) if line is not None)


class Tail:
    """The lines of a growing file, each once and only when it is whole. The file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self, *, most: int | None = None, half: bool = False) -> list[str]:
        """Read the lines that were completed since the last call, without their line ends. Raises OSError. most: as
        many at once, the others with the next call; None: all.  half: take a last line that is not complete as well,
        because nobody will complete it."""
        lines: list[str] = []
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._offset)
            for raw in itertools.islice(file, most):
                if not (half or raw.endswith(b"\n")):
                    break  # its end may come before a next look at the file, which would take it for a line
                lines.append(raw.removesuffix(b"\n").decode(errors="replace"))
                self._offset += len(raw)
        return lines


class RunTail:
    """Events and metrics of a run as they come, in the order of each file; a line that cannot be read is left out."""

    def __init__(self, run_dir: Path) -> None:
        self._tails = ((Tail(run_dir / EVENTS_FILE), parse_event), (Tail(run_dir / METRICS_FILE), parse_metrics))

    def read(self) -> list[Event | StepMetrics]:
        return [*self.stream()]

    def stream(self) -> Iterator[Event | StepMetrics]:
        """Yield the same as they are read, so that they are never all in memory."""
        for tail, parse in self._tails:
            while lines := tail.read(most=LINES_AT_ONCE):
                yield from (item for item in map(parse, lines) if item is not None)


@dataclass(frozen=True, config=STRICT)
class MemorySample:
    """A line of `memory.jsonl`."""

    time: Number
    """Time of the sample, Unix s."""
    pss_bytes: Count
    """Proportional set size of all processes on the launcher's host, where a page that several share counts in
    parts."""
    processes: Count


class MemoryWatch:
    """Measures the memory of a run now and then, and writes it down. A disk that is full now, or no /proc, costs
    nothing but samples."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._next = 0.0

    def tick(self, *, now: float) -> None:
        """Measure when it is time to. now: s of a steady clock."""
        if now < self._next:
            return
        started = time.perf_counter()
        with contextlib.suppress(OSError):
            below = find_processes(f"{RUN_VARIABLE}={self._run_dir}", below=os.getpid())
            sizes = [pss_bytes(pid) for pid in (os.getpid(), *(process.pid for process in below))]
            append_line(self._run_dir / MEMORY_FILE, asdict(MemorySample(time.time(), sum(sizes), len(sizes))))
        self._next = now + max(_MEMORY_EVERY_S, _TIMES_ITS_COST * (time.perf_counter() - started))


def pss_bytes(pid: int) -> int:
    """Read the proportional set size of one process; 0 for a process that ended or belongs to somebody else."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) << 10


def parse_memory(line: str) -> MemorySample | None:
    """Parse a sample of memory; None when the line is none."""
    return parse_line(line, MemorySample)
