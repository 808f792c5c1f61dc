"""How a run ended: a state, an exit code, a reason, and for the person at most eight lines. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from appliance.errors import EngineNotStarted, EngineRefused, GuardStop, Interrupted
from appliance.record.events import Event
from appliance.record.session import RunStatus
from appliance.record.state import RunState
from appliance.signals import code_of, stopped_by

_CODES_OF_CHILDREN = frozenset({2, 3, 4, 5, 6})
_NO_RESULT = "TrainingError: the process ended without writing its result"
_MOST_LINES = 8
_LONGEST = 300
_VAGUE = frozenset(
    {"", "TrainingError", "ApplianceError", EngineNotStarted.__name__, EngineRefused.__name__}
)  # errors that may hide a symptom we know


@dataclass(frozen=True)
class Child:
    """One of the programs that a run starts."""

    name: str
    """Name of its log file, without the suffix."""
    title: str
    argv: tuple[str, ...]
    default_code: int
    """Exit code of a failure for which the child gave no code of ours."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    state: RunStatus
    exit_code: int
    reason: str = ""
    """Reason of the end, one line; empty when the run is done."""
    advice: tuple[str, ...] = ()
    """Lines for the person; empty when the run is done."""


DONE = Outcome(RunStatus.DONE, exit_code=0)


def interrupted_outcome(
    names: Sequence[str], *, stop: Event | None = None, training: bool = False, saved_step: int = 0
) -> Outcome:
    """Return the outcome of a run that signals stopped. names: the signals that came, in their order.  stop: the
    trainer's `stop` event, if there was one.

    training: the run was in its training, so that there may have been something to save.  saved_step: the step that the
    attempt resumed from, 0 for none.
    """
    if stop is not None:
        code = code_of(names[0], saved_step=stop.step or 0)
        return Outcome(RunStatus.STOPPED, exit_code=code, reason=stop.what, advice=(stop.what,))
    if not training:
        reason = stopped_by(names[0], saved_step=saved_step)
        code = code_of(names[0], saved_step=saved_step) if len(names) == 1 else Interrupted.exit_code
        return Outcome(RunStatus.STOPPED, exit_code=code, reason=reason, advice=(reason,))
    if len(names) > 1:
        reason = f"stopped at once by {names[1]}, the second signal; what was not saved before is lost"
    else:
        reason = f"stopped by {names[0]}, and the state was not saved in time; what was not saved before is lost"
    return Outcome(RunStatus.STOPPED, exit_code=Interrupted.exit_code, reason=reason, advice=(reason,))


def failed_outcome(child: Child, *, returncode: int, state: RunState, log_tail: str, log: str, run: str) -> Outcome:
    """Return the outcome of a child that failed: what it reported first, then what its exit code and its log show.
    returncode: negative for a signal, 0 for a child that ended well without its result.  log, run: paths to show."""
    failure, next_line = state.failure, f"next: appliance logs {run}"
    if failure is not None and failure.error == GuardStop.__name__:  # on purpose, after it was saved
        advice = (failure.what, *_hint(failure.hint), next_line)
        return Outcome(RunStatus.STOPPED, exit_code=GuardStop.exit_code, reason=failure.what, advice=advice)
    codes = (failure.exit_code if failure else None, returncode)
    reasons, hint = _reasons_and_hint(returncode, failure=failure, log_tail=log_tail if returncode else _NO_RESULT)
    tail = (*_hint(hint), f"log: {log}", next_line)
    lines = (f"error: {child.title} failed in phase {state.phase}: {reasons[0]}", *reasons[1:])
    return Outcome(
        RunStatus.FAILED,
        exit_code=next((code for code in codes if code in _CODES_OF_CHILDREN), child.default_code),
        reason=reasons[0],
        advice=(*lines[: _MOST_LINES - len(tail)], *tail),
    )


def _hint(hint: str) -> tuple[str, ...]:
    return (f"hint: {hint}",) if hint else ()


def _reasons_and_hint(returncode: int, *, failure: Event | None, log_tail: str) -> tuple[list[str], str]:
    reported = [] if failure is None else [_short(line) for line in failure.what.splitlines() if line.strip()]
    if failure is not None and reported and failure.error not in _VAGUE:
        return reported, failure.hint
    # A log that ended well is full of texts that name what a failure would: optional parts that are not installed.
    text = reported or [line for line in log_tail.splitlines() if not _WARNING.search(line)]
    for pattern, fact, advice in SYMPTOMS:
        if re.search(pattern, "\n".join(text)):
            return [fact, *reported], advice
    if failure is not None and reported:
        return reported, failure.hint
    if returncode < 0:
        return _by_signal(-returncode)
    last = _last_error(log_tail)
    return [f"{last} (exit code {returncode})" if last else f"exit code {returncode}, and no word in the log"], ""


def _by_signal(number: int) -> tuple[list[str], str]:
    try:
        known = signal.Signals(number)
    except ValueError:
        return [f"ended by signal {number}"], ""
    why, hint = _SIGNALS.get(known, ("", ""))
    return [f"ended by signal {number} ({known.name}){', ' + why if why else ''}"], hint


def _last_error(log_tail: str) -> str:
    """Return the last line of a log that reads like the end of a traceback, without colours and Ray's prefix; else
    empty."""
    lines = [_NOISE.sub("", _NOISE.sub("", line)).strip() for line in log_tail.splitlines()]
    return next((_short(line) for line in reversed(lines) if _ERROR_LINE.match(line)), "")


def _short(line: str) -> str:
    line = line.strip()
    return line if len(line) <= _LONGEST else line[: _LONGEST - 3] + "..."


_NOISE = re.compile(r"\x1b\[[0-9;]*m|^\s*\((?:[\w:.]+ )?pid=\d+(?:, ip=[\d.]+)?\)\s*|^\s*\(\w+ pid=\d+\)\s*")
_WARNING = re.compile(r"\bWARN|[Ww]arn(?:ing)?\b|not available:|is not installed")
_ERROR_LINE = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit)(?::\s|$)")

# (searched in the failure's text, or, where the child said nothing, in the end of its log; the fact; the remedy)
SYMPTOMS = (
    (
        r"Raylet is terminated",  # Ray adds what may have been the reason, a bus error among others
        "Ray's scheduler (raylet) died",
        "often the kernel ended it for want of memory (sudo dmesg | tail): close other programs, or use a smaller "
        "batch",
    ),
    (
        r"CUDA out of memory|torch\.OutOfMemoryError|CUDA error: out of memory",
        "the GPU ran out of memory",
        "lower rollout.gpu_memory_utilization, batch.max_tokens_per_gpu or batch.micro_batch_sequences",
    ),
    (
        r"No available memory for the cache blocks|larger than the available KV cache memory",
        "the rollout engine has no memory for its KV cache",
        "raise rollout.gpu_memory_utilization, or lower task.max_response_tokens",
    ),
    (
        r"AF_UNIX path length|AF_UNIX path too long",
        "a socket's path is too long",
        "set TMPDIR to a short path such as /tmp",
    ),
    (
        r"Bus error|SIGBUS|No space left on device.*/dev/shm|/dev/shm.*No space left on device",
        "shared memory (/dev/shm) is full",
        "in a container start it with --shm-size=2g or more; df -h /dev/shm shows what is free",
    ),
    (r"No space left on device|Errno 28\b|Disk quota exceeded", "the disk is full", "free some space: df -h"),
    (
        r"\bOutOfMemoryError\b|\bMemoryError\b|Cannot allocate memory|can't allocate memory"
        r"|killed due to the node running low on memory",
        "this host ran out of memory",
        "close other programs, or lower batch.micro_batch_sequences, batch.prompts_per_step or "
        "rollout.samples_per_prompt",
    ),
    (
        r"libnuma\.so|_OpNamespace' '_C[\w]*' object has no attribute",
        "vLLM's kernels did not load: the system library libnuma1 is missing",
        "install it: sudo apt-get install libnuma1",
    ),
    (
        r"InvalidCxxCompiler|No working C\+\+ compiler",
        "a C++ compiler is missing",
        "install one: sudo apt-get install g++",
    ),
    (
        r"GCS may have been killed|Failed to connect to GCS within",
        "the Ray head of the cluster is gone",
        "start the head again, then the other nodes: docs/cluster.md",
    ),
    (
        r"The current node timed out during startup",
        "Ray did not start within its 30 s",
        "this host is too busy: close other programs, and start again",
    ),
    (
        r"Address already in use|EADDRINUSE",
        "a port is in use",
        "end the program that uses it (ss -ltnp shows which), and start again",
    ),
    (
        r"Temporary failure in name resolution|Name or service not known|LocalEntryNotFoundError|OfflineModeIsEnabled"
        r"|We couldn't connect to 'https://huggingface\.co'",
        "the model hub cannot be reached",
        "set model.path to a folder that has the model, or give this host a network",
    ),
    (
        r"GatedRepoError|401 Client Error|403 Client Error",
        "the model hub refuses access",
        "accept the model's licence on its page and log in: hf auth login",
    ),
    (
        r"Read-only file system|Errno 30\b",
        "a folder is read-only",
        "set cluster.run_dir to a folder that can be written",
    ),
    (
        r"PermissionError: \[Errno (?:1|13)\]",
        "a file or folder cannot be written or read",
        "let this user write there, and in cluster.run_dir until the run ends",
    ),
    (r"Too many open files|Errno 24\b", "this user may not open more files", "raise the limit: ulimit -n 65535"),
    (
        r"Error: No module named '[\w.]+'",  # an optional part that is not there is mentioned without `Error: `
        "a Python package is missing",
        "set up again: make demo installs the locked requirements",
    ),
)

_SIGNALS = {
    signal.SIGKILL: (
        "most likely by the kernel, for want of memory",
        "sudo dmesg | tail shows it; use a smaller batch",
    ),
    signal.SIGSEGV: ("in native code", "start again; if it happens again, report it with the log"),
    signal.SIGILL: ("this processor lacks an instruction", "use a processor with AVX2 or AVX-512"),
    signal.SIGBUS: ("shared memory (/dev/shm) may be full", "in a container start it with --shm-size=2g or more"),
}
