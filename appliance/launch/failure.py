"""A child that failed, in at most eight lines: what happened, where the log is, what to try next. Pure."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from appliance.record.events import Event

_MOST_LINES = 8
_LONGEST = 300
_VAGUE = frozenset({"", "TrainingError", "ApplianceError"})  # errors that may hide a symptom we know


@dataclass(frozen=True)
class Symptom:
    """pattern: searched in the failure's text, or, where the child said nothing, in the end of the log.

    what: the fact.  advice: the remedy.
    """

    pattern: re.Pattern[str]
    what: str
    advice: str


def _symptom(pattern: str, what: str, advice: str) -> Symptom:
    return Symptom(re.compile(pattern), what, advice)


SYMPTOMS = (
    _symptom(
        r"Raylet is terminated",  # Ray adds what may have been the reason, a bus error among others
        "Ray's scheduler (raylet) died",
        "often the kernel ended it for want of memory (sudo dmesg | tail)",
    ),
    _symptom(
        r"CUDA out of memory|torch\.OutOfMemoryError|CUDA error: out of memory",
        "the GPU ran out of memory",
        "lower rollout.gpu_memory_utilization, batch.max_tokens_per_gpu or batch.micro_batch_sequences",
    ),
    _symptom(
        r"No available memory for the cache blocks|larger than the available KV cache memory",
        "the rollout engine has no memory for its KV cache",
        "raise rollout.gpu_memory_utilization, or lower task.max_response_tokens",
    ),
    _symptom(
        r"AF_UNIX path length|AF_UNIX path too long",
        "a socket's path is too long",
        "set TMPDIR to a short path such as /tmp",
    ),
    _symptom(
        r"Bus error|SIGBUS|No space left on device.*/dev/shm|/dev/shm.*No space left on device",
        "shared memory (/dev/shm) is full",
        "in a container start it with --shm-size=2g or more; df -h /dev/shm shows what is free",
    ),
    _symptom(r"No space left on device|Errno 28\b|Disk quota exceeded", "the disk is full", "free some space: df -h"),
    _symptom(
        r"ray\.exceptions\.OutOfMemoryError|\bMemoryError\b|Cannot allocate memory|can't allocate memory"
        r"|killed due to the node running low on memory",
        "this host ran out of memory",
        "close other programs, or lower batch.prompts_per_step and rollout.samples_per_prompt",
    ),
    _symptom(
        r"libnuma\.so|_OpNamespace' '_C[\w]*' object has no attribute",
        "vLLM's kernels did not load: the system library libnuma1 is missing",
        "install it: sudo apt-get install libnuma1",
    ),
    _symptom(
        r"InvalidCxxCompiler|No working C\+\+ compiler",
        "a C++ compiler is missing",
        "install one: sudo apt-get install g++",
    ),
    _symptom(
        r"GCS may have been killed|Failed to connect to GCS within",
        "the Ray head of the cluster is gone",
        "start the head again, then the other nodes: docs/cluster.md",
    ),
    _symptom(
        r"The current node timed out during startup",
        "Ray did not start within its 30 s",
        "this host is too busy: close other programs, and start again",
    ),
    _symptom(
        r"Address already in use|EADDRINUSE",
        "a port is in use",
        "end the program that holds it (ss -ltnp lists them), and start again",
    ),
    _symptom(
        r"Temporary failure in name resolution|Name or service not known|LocalEntryNotFoundError|OfflineModeIsEnabled"
        r"|We couldn't connect to 'https://huggingface\.co'",
        "the model hub cannot be reached",
        "set model.path to a folder that has the model, or give this host a network",
    ),
    _symptom(
        r"GatedRepoError|401 Client Error|403 Client Error",
        "the model hub refuses access",
        "accept the model's licence on its page and log in: hf auth login",
    ),
    _symptom(
        r"Read-only file system|Errno 30\b",
        "a folder is read-only",
        "set cluster.run_dir to a folder that can be written",
    ),
    _symptom(
        r"PermissionError: \[Errno (?:1|13)\]",
        "a file or folder cannot be written or read",
        "let this user write there, and in cluster.run_dir until the run ends",
    ),
    _symptom(
        r"Too many open files|Errno 24\b", "this user may not open more files", "raise the limit: ulimit -n 65535"
    ),
    _symptom(
        r"No module named '([\w.]+)'",
        "a Python package is missing",
        "set up again: make demo installs the locked requirements",
    ),
)

_SIGNALS = {
    signal.SIGKILL: (
        "most likely by the kernel, for want of memory",
        "sudo dmesg | tail shows it; use a smaller batch",
    ),
    signal.SIGSEGV: ("in native code", "start again; if it stays, report it with the log"),
    signal.SIGILL: ("this processor lacks an instruction", "use a processor with AVX2 or AVX-512"),
    signal.SIGBUS: ("shared memory (/dev/shm) may be full", "in a container start it with --shm-size=2g or more"),
}


def explain(
    *, child: str, phase: str, returncode: int, failure: Event | None, log_tail: str, log: str, next_command: str
) -> tuple[str, ...]:
    """The lines a person gets when a child failed.

    child: `preparation` or `training`.  returncode: negative for a signal.  failure: the child's last word, if any.
    log_tail: the end of its log.  log: the log's path.  next_command: shows the log.
    """
    what, hint = _what_and_hint(returncode=returncode, failure=failure, log_tail=log_tail)
    lines = [f"error: {child} failed in phase {phase}: {what[0]}", *what[1:]]
    tail = [*([f"hint: {hint}"] if hint else []), f"log: {log}", f"next: {next_command}"]
    return (*lines[: _MOST_LINES - len(tail)], *tail)


def reason(*, returncode: int, failure: Event | None, log_tail: str) -> str:
    """The same in one line, for `run.json`."""
    return _what_and_hint(returncode=returncode, failure=failure, log_tail=log_tail)[0][0]


def _what_and_hint(*, returncode: int, failure: Event | None, log_tail: str) -> tuple[list[str], str]:
    said = [] if failure is None else [_short(line) for line in failure.what.splitlines() if line.strip()]
    if failure is not None and said and failure.error not in _VAGUE:
        return said, failure.hint
    known = _find("\n".join(said)) if said else _find(_without_warnings(log_tail))
    if known is not None:
        return [known.what, *said], known.advice
    if said:
        return said, failure.hint if failure else ""
    if returncode < 0:
        return _by_signal(-returncode)
    last = last_error(log_tail)
    return [f"{last} (exit code {returncode})" if last else f"exit code {returncode}, and no word in the log"], ""


def _by_signal(number: int) -> tuple[list[str], str]:
    try:
        name = signal.Signals(number).name
    except ValueError:
        return [f"ended by signal {number}"], ""
    why, hint = _SIGNALS.get(signal.Signals(number), ("", ""))
    return [f"ended by signal {number} ({name}){', ' + why if why else ''}"], hint


def _find(text: str) -> Symptom | None:
    return next((symptom for symptom in SYMPTOMS if symptom.pattern.search(text)), None)


_NOISE = re.compile(r"\x1b\[[0-9;]*m|^\s*\((?:[\w:.]+ )?pid=\d+(?:, ip=[\d.]+)?\)\s*|^\s*\(\w+ pid=\d+\)\s*")
_WARNING = re.compile(r"\bWARN|[Ww]arn(?:ing)?\b|not available:|is not installed")
_ERROR_LINE = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit)(?::\s|$)")


def _without_warnings(log_tail: str) -> str:
    """A log that ended well is full of texts that name what a failure would: optional parts that are not installed."""
    return "\n".join(line for line in log_tail.splitlines() if not _WARNING.search(line))


def last_error(log_tail: str) -> str:
    """The last line of a log that reads like the end of a traceback, without colours and Ray's prefix; else empty."""
    lines = [_NOISE.sub("", _NOISE.sub("", line)).strip() for line in log_tail.splitlines()]
    return next((_short(line) for line in reversed(lines) if _ERROR_LINE.match(line)), "")


def _short(line: str) -> str:
    line = line.strip()
    return line if len(line) <= _LONGEST else line[: _LONGEST - 3] + "..."
