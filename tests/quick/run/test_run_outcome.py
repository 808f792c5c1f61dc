"""How the end of a child becomes the end of a run, and what a person is told of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from appliance.guard.policy import MismatchBounds
from appliance.launch.outcome import Child, Outcome, failed_outcome
from appliance.record.events import Event
from appliance.record.session import RunStatus
from appliance.record.state import RunState

CHILD = Child("train", "training", (), default_code=5)
STOP = Event(
    1.0,
    "failure",
    "stopped by the guard: step 2: warn -> stop: k3_kl 0.02 above 0.015 (1 step in a row)",
    error="GuardStop",
    hint="the state after this step is in runs/a/checkpoints/global_step_2",
    exit_code=6,
)

TRACEBACK = """\
\x1b[36m(TaskRunner pid=4711)\x1b[0m Traceback (most recent call last):
\x1b[36m(TaskRunner pid=4711)\x1b[0m   File "x.py", line 1, in <module>
\x1b[36m(TaskRunner pid=4711)\x1b[0m ValueError: the shapes 3 and 4 do not fit
(raylet) some noise after it
"""


def outcome(*, returncode: int = 1, failure: Event | None = None, log_tail: str = "") -> Outcome:
    state = RunState(4, MismatchBounds(), phase="load-model", failure=failure)
    log = "runs/a/logs/1/train.log"
    return failed_outcome(CHILD, returncode=returncode, state=state, log_tail=log_tail, log=log, run="runs/a")


def explained(**end: object) -> tuple[str, ...]:
    return outcome(**end).advice


def failure(what: str, *, error: str = "TrainingError", hint: str = "") -> Event:
    return Event(1.0, "failure", what, error=error, hint=hint, exit_code=5)


def test_precise_failure_is_told_as_it_is() -> None:
    said = failure("rollout-0-0 runs bf16, the plan says int8", error="AttestationError", hint="see attest/")
    assert explained(returncode=4, failure=said, log_tail="No space left on device") == (
        "error: training failed in phase load-model: rollout-0-0 runs bf16, the plan says int8",
        "hint: see attest/",
        "log: runs/a/logs/1/train.log",
        "next: appliance logs runs/a",
    )


def test_known_symptom_comes_before_a_vague_failure() -> None:
    said = failure("OSError: [Errno 28] No space left on device: 'x'")
    assert explained(failure=said) == (
        "error: training failed in phase load-model: the disk is full",
        "OSError: [Errno 28] No space left on device: 'x'",
        "hint: free some space: df -h",
        "log: runs/a/logs/1/train.log",
        "next: appliance logs runs/a",
    )


def test_child_without_a_word_is_explained_by_the_end_of_its_log() -> None:
    assert explained(log_tail=TRACEBACK) == (
        "error: training failed in phase load-model: ValueError: the shapes 3 and 4 do not fit (exit code 1)",
        "log: runs/a/logs/1/train.log",
        "next: appliance logs runs/a",
    )


def test_silent_child_is_explained_by_its_exit_code() -> None:
    assert explained(returncode=3)[0] == (
        "error: training failed in phase load-model: exit code 3, and no word in the log"
    )


def test_kill_is_explained_by_memory() -> None:
    assert explained(returncode=-9)[:2] == (
        "error: training failed in phase load-model: ended by signal 9 (SIGKILL), "
        "most likely by the kernel, for want of memory",
        "hint: sudo dmesg | tail shows it; use a smaller batch",
    )


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "the GPU ran out of memory"),
        (
            "ValueError: No available memory for the cache blocks. Try increasing",
            "the rollout engine has no memory for its KV cache",
        ),
        ("OSError: AF_UNIX path length cannot exceed 107 bytes: /x", "a socket's path is too long"),
        ("OSError: [Errno 28] No space left on device: '/dev/shm/psm_1'", "shared memory (/dev/shm) is full"),
        (
            "(raylet) Raylet is terminated. Possible reasons include: (2) SIGSEGV or SIGBUS",
            "Ray's scheduler (raylet) died",
        ),
        ("RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried", "this host ran out of memory"),
        ("OutOfMemoryError: Refer to the documentation on how to address", "this host ran out of memory"),
        (
            "ImportError: libnuma.so.1: cannot open shared object file: No such file or directory",
            "vLLM's kernels did not load: the system library libnuma1 is missing",
        ),
        (
            "AttributeError: '_OpNamespace' '_C' object has no attribute 'init_cpu_threads_env'",
            "vLLM's kernels did not load: the system library libnuma1 is missing",
        ),
        ("torch._inductor.exc.InvalidCxxCompiler: No working C++ compiler found", "a C++ compiler is missing"),
        ("OSError: [Errno 98] Address already in use", "a port is in use"),
        (
            "socket.gaierror: [Errno -3] Temporary failure in name resolution",
            "the model hub cannot be reached",
        ),
        ("huggingface_hub.errors.GatedRepoError: 403 Client Error.", "the model hub refuses access"),
        ("OSError: [Errno 30] Read-only file system: '/x'", "a folder is read-only"),
        ("OSError: [Errno 24] Too many open files", "this user may not open more files"),
        ("ModuleNotFoundError: No module named 'verl'", "a Python package is missing"),
    ],
)
def test_symptoms_are_known_by_what_the_libraries_print(line: str, what: str) -> None:
    assert outcome(log_tail=f"noise\n{line}\nmore noise").reason == what


def test_never_more_than_eight_lines() -> None:
    said = failure("\n".join(f"recipe.yaml:{n}: a problem" for n in range(40)), error="RecipeError", hint="see above")
    lines = explained(returncode=2, failure=said)
    assert len(lines) == 8
    assert lines[-3:] == ("hint: see above", "log: runs/a/logs/1/train.log", "next: appliance logs runs/a")


def test_long_lines_are_cut() -> None:
    assert len(outcome(failure=failure("x" * 5000)).reason) == 300


def test_last_error_ignores_lines_that_only_mention_one() -> None:
    log_tail = "KeyError: 'a'\nINFO retrying after TimeoutError happened"
    assert outcome(log_tail=log_tail).reason == "KeyError: 'a' (exit code 1)"
    assert outcome(log_tail="all is well").reason == "exit code 1, and no word in the log"


NOISE = """\
Failed to import the DeepSelect extension (vllm._deepselect_C): No module named 'vllm._deepselect_C'
/site-packages/verl/workers/engine/__init__.py:32: UserWarning: torchtitan engine is not available: \
ModuleNotFoundError("No module named 'torchtitan'")
  warnings.warn(f"torchtitan engine is not available: {e!r}", stacklevel=1)
WARNING 11-21 cpu.py:1] cannot load libnuma.so.1: Address already in use
"""


def test_start_up_noise_explains_nothing() -> None:
    """Texts of a run that ended well. They name what a failure would."""
    assert explained(failure=failure("ValueError: cap must be finite"), log_tail=NOISE)[0] == (
        "error: training failed in phase load-model: ValueError: cap must be finite"
    )
    assert outcome(log_tail=NOISE).reason == "exit code 1, and no word in the log"
    assert outcome(returncode=-9, log_tail=NOISE).reason.startswith("ended by signal 9 (SIGKILL)")


def test_a_stop_by_the_guard_is_no_failure() -> None:
    assert outcome(returncode=6, failure=STOP) == Outcome(
        RunStatus.STOPPED,
        exit_code=6,
        reason=STOP.what,
        advice=(STOP.what, f"hint: {STOP.hint}", "next: appliance logs runs/a"),
    )


def test_a_number_that_must_be_finite_still_fails_the_run() -> None:
    ended = outcome(returncode=6, failure=replace(STOP, error="NumericsError"))
    assert (ended.state, ended.exit_code) == (RunStatus.FAILED, 6)
