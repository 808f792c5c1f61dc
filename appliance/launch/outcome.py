"""How a run ended: a state, an exit code, a reason and lines for the person. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from appliance.errors import GuardStop, Interrupted
from appliance.launch import failure
from appliance.record.events import Event
from appliance.record.session import RunStatus
from appliance.record.state import RunState
from appliance.signals import code_of, stopped_by

_CODES_OF_CHILDREN = frozenset({2, 3, 4, 5, 6})
_NO_RESULT = "TrainingError: it ended without writing its result"


@dataclass(frozen=True)
class Child:
    """One of the two programs of a run. name: of its log file.  default_code: when it failed without a code of ours."""

    name: str
    title: str
    argv: tuple[str, ...]
    default_code: int


@dataclass(frozen=True)
class Outcome:
    """How a run ended. reason: one line, empty when done.  advice: lines for the person, empty when done."""

    state: RunStatus
    exit_code: int
    reason: str = ""
    advice: tuple[str, ...] = ()


DONE = Outcome(RunStatus.DONE, exit_code=0)


def interrupted(
    names: Sequence[str], *, stop: Event | None = None, training: bool = False, saved_step: int = 0
) -> Outcome:
    """names: the signals that came, in their order.  stop: the trainer's last word, if it had one.

    training: the run was in its training, so that there may have been something to save.  saved_step: that the attempt
    goes on from, 0 for none.
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


def failed(child: Child, *, returncode: int, state: RunState, log_tail: str, log: str, run: str) -> Outcome:
    """The outcome of a child that failed: its own word first, then what its exit and its log tell.

    returncode: negative for a signal, 0 for a child that ended well without its result.  log, run: paths to show.
    """
    if state.failure is not None and state.failure.error == GuardStop.__name__:
        return _guarded(state.failure, run=run)
    log_tail = log_tail if returncode else _NO_RESULT
    said = state.failure.exit_code if state.failure else None
    code = next((code for code in (said, returncode) if code in _CODES_OF_CHILDREN), child.default_code)
    return Outcome(
        RunStatus.FAILED,
        exit_code=code,
        reason=failure.reason(returncode=returncode, failure=state.failure, log_tail=log_tail),
        advice=failure.explain(
            child=child.title,
            phase=state.phase,
            returncode=returncode,
            failure=state.failure,
            log_tail=log_tail,
            log=log,
            next_command=f"appliance logs {run}",
        ),
    )


def _guarded(said: Event, *, run: str) -> Outcome:
    """The governor ended the run on purpose, after it was saved: no fault of a program."""
    advice = (said.what, *([f"hint: {said.hint}"] if said.hint else []), f"next: appliance logs {run}")
    return Outcome(RunStatus.STOPPED, exit_code=said.exit_code or 6, reason=said.what, advice=advice)
