"""What one row found, as its process writes it and the runner reads it. Imports no torch."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from appliance.files import Frozen


class State(StrEnum):
    WAITING = "not run"
    RUNNING = "running"
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    INTERRUPTED = "interrupted"


class Figure(Frozen):
    """One number that was seen, such as (`int8, 7b qkv_proj, 64 tokens`, 1.82, `times BF16`)."""

    name: str
    value: float
    unit: str = ""

    @property
    def text(self) -> str:
        return f"{self.name}: {self.value:.4g} {self.unit}".rstrip()


class Part(Frozen):
    """One of several things that a row asks one after the other, such as a family; each has its own verdict."""

    name: str
    state: State = State.WAITING
    why: str = ""
    seconds: float = 0.0

    @property
    def text(self) -> str:
        why = f": {self.why}" if self.why else ""
        return f"{self.name}: {self.state}{f', {self.seconds:.0f} s' if self.seconds >= 1 else ''}{why}"


class Outcome(Frozen):
    row: str
    state: State
    why: str = ""
    """Reason why a row failed or was skipped."""
    seconds: float = 0.0
    checks: int = 0
    """Number of comparisons with a reference."""
    parts: tuple[Part, ...] = ()
    figures: tuple[Figure, ...] = ()
    stand_ins: tuple[str, ...] = ()
    """Functions that replaced kernels on a CPU."""

    @property
    def waiting(self) -> tuple[str, ...]:
        """Parts that did not begin."""
        return tuple(part.name for part in self.parts if part.state is State.WAITING)

    @property
    def why_by_parts(self) -> str:
        bad = (part for part in self.parts if part.state in (State.FAILED, State.INTERRUPTED))
        return "; ".join(f"{part.name}: {part.why}" for part in bad)

    def ended(self, how: str, *, state: State = State.FAILED) -> Outcome:
        """Return the outcome after its process is gone. how: the process ended badly; empty where it ended well.

        state: of a row that had not ended, and of the part that was running; one of which a part failed has failed.
        """
        if self.state is not State.RUNNING and not how:
            return self
        last = f", after {self.figures[-1].text}" if self.figures else ""
        end = f"{how or 'its process ended with 0 and said nothing'}{last}"
        in_a_part = any(part.state is State.RUNNING for part in self.parts)
        changed = (p.replace(state=state, why=end) if p.state is State.RUNNING else p for p in self.parts)
        has_failed = any(part.state is State.FAILED for part in self.parts)
        outcome = self.replace(parts=tuple(changed), state=State.FAILED if has_failed else state)
        reason = outcome.why_by_parts or self.why
        is_explained = in_a_part or (reason and not how)
        return outcome.replace(why=reason if is_explained else "; ".join(filter(None, (reason, end))))


OUTCOME = "outcome.json"  # in the folder of a row, and beside it the log
LOG = "log.txt"


def read_outcome(folder: Path) -> Outcome | None:
    """Read the outcome; None where the process wrote none that is whole."""
    try:
        return Outcome.model_validate_json((folder / OUTCOME).read_bytes())
    except (OSError, ValueError):
        return None
