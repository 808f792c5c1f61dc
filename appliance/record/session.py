"""The folder of one run: claimed by its name, written once, and `run.json`, which always has the run's state."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import re
import shutil
import time
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from appliance.errors import PreflightError, RecipeError
from appliance.files import is_full, is_refused, write_whole
from appliance.finding import fault
from appliance.record.attestations import fingerprint, version_of
from appliance.record.code import copy_code
from appliance.record.lines import STRICT, Code, as_json, read
from appliance.record.plan import RunPlan

SCHEMA_VERSION = 1
RUN_FILE = "run.json"
LOGS = "logs"
STOP_FILE = ".stop"
_LOCK_FILE = ".lock"
_LOOKING_TAKES_S = 1.0
_locks_between_attempts: dict[Path, int] = {}  # file descriptors of this launcher, by the run's folder


class RunStatus(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, config=STRICT)
class RunRecord:
    """Contents of `run.json`."""

    state: RunStatus = RunStatus.STARTING
    phase: str = "starting"
    attempt: Annotated[int, Field(ge=0, lt=10**6)] = 1
    """Number of the attempt, which names a folder of logs; 0 for a run that never began."""
    exit_code: Code | None = None
    """Exit code; None until the end."""
    reason: str = ""
    """Reason of the end, one line; empty unless the run failed or was stopped."""
    schema_version: Literal[1] = 1


class Session:
    """A run while its launcher lives. Leaving it by an error marks the run as failed. The launcher has a lock on the
    folder: a run whose state is `running` and whose lock is free has lost its launcher."""

    def __init__(self, run_dir: Path, *, record: RunRecord, must_lock: bool = False) -> None:
        """Take the run's lock. must_lock: raise BlockingIOError when another launcher has the run."""
        self.run_dir = run_dir
        self.record = record
        if (lock := _locks_between_attempts.pop(run_dir, None)) is not None:
            self._lock = lock
            return
        self._lock = os.open(run_dir / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._take_lock()
        except BlockingIOError:
            if must_lock:
                self.release()
                raise
        except OSError:  # a network file system may have no locks; has_launcher then believes run.json
            pass

    def _take_lock(self) -> None:
        """Take the lock, and wait for those who have it for a moment because they look (`has_launcher`)."""
        deadline = time.monotonic() + _LOOKING_TAKES_S
        while True:
            try:
                return fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.01)

    @property
    def log_dir(self) -> Path:
        return log_dir(self.run_dir, attempt=self.record.attempt)

    def release(self) -> None:
        """Let go of the lock, for a run that never began."""
        os.close(self._lock)

    def keep_lock(self) -> None:
        """Keep the lock beyond the end of this attempt: for the next one of this launcher, or until `let_go`."""
        _locks_between_attempts[self.run_dir] = os.dup(self._lock)

    def update(self, *, state: RunStatus, phase: str) -> None:
        """Write the state of the run, if it changed. A disk that is full now does not end the run: its children report
        it."""
        moved = replace(self.record, state=state, phase=phase)
        if moved != self.record:
            self.record = moved
            with contextlib.suppress(OSError):
                write_record(self.run_dir, moved, durable=False)  # a disk that a checkpoint keeps busy has us wait

    def finish(self, *, state: RunStatus, exit_code: int, reason: str) -> None:
        """Write how the run ended. Raises OSError."""
        ended = replace(self.record, state=state, exit_code=exit_code, reason=reason)
        write_record(self.run_dir, ended)
        self.record = ended

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is not None and self.record.exit_code is None:
                code = getattr(error, "exit_code", 1)
                with contextlib.suppress(OSError):  # the error that is raised further says more
                    self.finish(state=RunStatus.FAILED, exit_code=code, reason=f"{kind.__name__}: {error}")
        finally:
            os.close(self._lock)


def create_session(plan: RunPlan, *, recipe_yaml: str, is_chosen: bool) -> Session:
    """Claim the run's name and write its folder, whole or not at all.

    is_chosen: the name is one that we chose, so that losing it to another launcher is no mistake of the user.
    Raises RecipeError when the name is in use or a file of the user's code has changed,
    PreflightError when the folder cannot be written.
    """
    run_dir = Path(plan.run_dir)
    try:
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        run_dir.mkdir()  # the claim: of two launchers one succeeds
    except FileExistsError:
        raise _in_use(run_dir, is_chosen=is_chosen) from None
    except OSError as error:
        raise cannot_write(run_dir, error) from error
    record = RunRecord()
    try:
        session = Session(run_dir, record=record, must_lock=True)
    except BlockingIOError:  # it is the folder of a launcher that resumes what one that died had claimed
        raise _in_use(run_dir, is_chosen=is_chosen) from None
    except OSError as error:
        shutil.rmtree(run_dir, ignore_errors=True)
        raise cannot_write(run_dir, error) from error
    try:
        log_dir(run_dir, attempt=record.attempt).mkdir(parents=True)
        copy_code(plan)
        (run_dir / "recipe.yaml").write_text(recipe_yaml)
        plan.write(run_dir / "plan.json")
        (run_dir / "versions.json").write_text(json.dumps(versions(plan), indent=2) + "\n")
        write_record(run_dir, record)
    except (RecipeError, OSError) as error:
        shutil.rmtree(run_dir, ignore_errors=True)
        session.release()
        with contextlib.suppress(OSError):  # over NFS a file that is open keeps its folder
            run_dir.rmdir()
        if isinstance(error, OSError):
            raise cannot_write(run_dir, error) from error
        raise
    return session


def free_run_dir(root: Path, *, name: str) -> Path:
    """Return `<root>/<name>-<n>` with the number after the highest in use, from 1."""
    return root / f"{name}-{_highest(root, name=name) + 1}"


def newest_run_dir(root: Path, *, name: str) -> Path | None:
    """Return `<root>/<name>-<n>` with the highest number in use, None when there is none."""
    number = _highest(root, name=name)
    return root / f"{name}-{number}" if number else None


def _highest(root: Path, *, name: str) -> int:
    pattern = re.compile(re.escape(name) + r"-([1-9][0-9]*)")  # as it is written, so that a number has one name
    names = [entry.name for entry in root.iterdir()] if root.is_dir() else []
    return max((int(match[1]) for match in map(pattern.fullmatch, names) if match), default=0)


def log_dir(run_dir: Path, *, attempt: int) -> Path:
    return run_dir / LOGS / str(attempt)


def write_record(run_dir: Path, record: RunRecord, *, durable: bool = True) -> None:
    """Replace `run.json` as a whole. durable: as of `whole_file`.  Raises OSError."""
    write_whole(run_dir / RUN_FILE, as_json(record, indent=2) + "\n", durable=durable)


def read_record(run_dir: Path) -> RunRecord:
    """Read `run.json`. Raises OSError when there is none, ValueError when it is not one that this program writes.

    A crash of the host may leave it empty (`Session.update`): the run was running, and its logs count its attempts.
    """
    try:
        return read(run_dir / RUN_FILE, RunRecord)
    except ValueError:
        if (run_dir / RUN_FILE).read_bytes().strip(b"\0"):
            raise
    attempts = [int(path.name) for path in (run_dir / LOGS).glob("[1-9]*") if path.name.isdecimal()]
    return RunRecord(RunStatus.RUNNING, attempt=max(attempts, default=1))


def let_go(run_dir: Path) -> None:
    """Release a lock that was kept, when no attempt follows."""
    if (lock := _locks_between_attempts.pop(run_dir, None)) is not None:
        os.close(lock)


def has_launcher(run_dir: Path) -> bool:
    """Tell whether a launcher has the run's lock, this one between two attempts aside. Where that cannot be known (no
    locks, or not our folder): whether run.json has no exit code."""
    if run_dir in _locks_between_attempts:
        return False
    try:
        descriptor = os.open(run_dir / _LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return _has_no_end(run_dir)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # several may look at once
    except BlockingIOError:
        return True
    except OSError:
        return _has_no_end(run_dir)
    finally:
        os.close(descriptor)
    return False


def _has_no_end(run_dir: Path) -> bool:
    try:
        return read_record(run_dir).exit_code is None
    except (OSError, ValueError):
        return True


def cannot_write(path: Path, error: OSError, *, setting: str = "cluster.run_dir") -> PreflightError:
    """Make a finding of an OSError met while a run's files were written. setting: what chooses the path."""
    if is_full(error):
        return PreflightError(f"{path}: no space left", hint=f"free some space, or set {setting} to a roomier place")
    if is_refused(error):
        return PreflightError(f"{path}: cannot be written", hint=f"set {setting} to a folder that you can write to")
    return PreflightError(f"{path}: {error.strerror or error}", hint=f"set {setting} to another folder")


def _in_use(run_dir: Path, *, is_chosen: bool) -> RecipeError:
    if not run_dir.is_dir():
        return RecipeError(
            [fault((str(run_dir),), "a file is in the way", "choose another --name, or another cluster.run_dir")]
        )
    if is_chosen:
        return RecipeError([fault((str(run_dir),), "another run has just taken this folder", "start again")])
    message = f"`{run_dir.name}` is in use: {run_dir}"
    return RecipeError([fault(("--name",), message, "choose another one, or leave it out")])


def versions(plan: RunPlan) -> dict[str, object]:
    names = sorted({"flashrl-appliance", *(name for name, _ in plan.pins)})
    return {
        "schema_version": SCHEMA_VERSION,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "distributions": {name: version_of(name) or None for name in names},
        **({"model": f"{plan.weights.hub_name}@{plan.weights.commit or 'unknown'}"} if plan.weights.hub_name else {}),
        "fingerprint": fingerprint(),
    }


def ask_to_stop(run_dir: Path, *, why: str) -> None:
    """Leave a request to save and stop, for the trainer looks for it all the time (trainer/stopping.py): Ray takes over
    the signal handlers of its process, which waits inside calls that no handler interrupts.

    why: the signal's name, one word.  Raises OSError (a full disk).
    """
    write_whole(run_dir / STOP_FILE, f"{why}\n", durable=False)


def asked_to_stop(run_dir: Path) -> str:
    """Return the reason why the run was asked to stop, or an empty text when nobody asked."""
    try:
        return (run_dir / STOP_FILE).read_text().strip()
    except OSError:
        return ""


def forget_stop(run_dir: Path) -> None:
    """Forget the request of an earlier attempt: it does not count for the next one."""
    with contextlib.suppress(OSError):
        (run_dir / STOP_FILE).unlink(missing_ok=True)
