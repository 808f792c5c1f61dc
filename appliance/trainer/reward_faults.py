"""Responses that could not be graded: what each costs, how they are told, and when there are too many.

A reward function that raises, hangs, dies or returns no number in 0..1 says nothing about the response. In training
such a sample gets the mean reward of the others of its prompt: its advantage is 0, so it teaches nothing, and the mean
of the group stays what it is. (0 would teach that the response was wrong.) In validation it counts as wrong: there the
mean must not become better by failures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from appliance.errors import GuardStop
from appliance.record.events import append_event
from appliance.tasks.grading import Fault, Graded

IDLE_DEATH = "a reward process died while it waited for a response"


def note_idle_death(run_dir: Path) -> None:
    """An event for people: it costs nothing."""
    append_event(run_dir, kind="note", what=IDLE_DEATH, why="no reward is lost: the next response starts another one")


def neutral_accuracies(graded: Sequence[Graded]) -> list[float]:
    """0..1 per sample of one prompt; a fault gets the mean of those without one, 0 where there is none."""
    known = [each.accuracy for each in graded if each.fault is None]
    mean = sum(known) / len(known) if known else 0.0
    return [mean if each.fault is not None else each.accuracy for each in graded]


class RewardFaults:
    """Counts per step, tells once a step and validation, and stops a run whose rewards say too little."""

    def __init__(self, run_dir: Path, *, most: float) -> None:
        """most: share of a step's responses that may fail, 0..1."""
        self._run_dir = run_dir
        self._most = most
        self._graded = 0
        self._faults: Counter[Fault] = Counter()

    def end(self, what: str, *, graded: int, faults: Counter[Fault], last: Graded | None) -> int:
        """The rewards of a step or a validation are in. Returns how many of them failed.

        what: `step 3`, `the validation of step 3`.  graded, faults: since the start of the attempt.  last: the newest
        fault.  Raises GuardStop when more than `most` of them failed.
        """
        new = faults - self._faults
        count, of = new.total(), graded - self._graded
        self._graded, self._faults = graded, Counter(faults)
        if not count:
            return 0
        kinds = ", ".join(f"{number} {fault}" for fault, number in sorted(new.items()))
        why = last.why if last is not None else ""
        text = f"{count} of {of} rewards of {what} failed ({kinds})"
        append_event(self._run_dir, kind="reward", what=text, why=why, failed=count, graded=of)
        if count > self._most * of:
            hint = f"the last one: {why}; guard.reward_failures says how many may fail"
            raise GuardStop(f"{text}, more than {self._most:.0%}", hint=hint)
        return count
