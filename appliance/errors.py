"""The error tree. Each leaf has the exit code that scripts rely on.

ApplianceError                 1   our own fault
├── RecipeError                2   the recipe or the command line: a list of problems, all at once
├── PreflightError             3   this host cannot run the plan: a list of findings
├── EngineError                4   the rollout engine or one of our patches
│   ├── PatchError             4   a patch that does not fit the installed source
│   ├── SyncError              4   a weight update that did not arrive
│   └── AttestationError       4   a worker that did not say, or said otherwise, what it runs
├── TrainingError              5   the training child failed
│   └── ProcessDied            5   a process that the training needs is gone
├── GuardStop                  6   stopped by a numerical guard
│   └── NumericsError          6   a value that must be finite is not
├── SavedAndStopped           75   a signal, after the state was saved
└── Interrupted              130   Ctrl-C
"""

from __future__ import annotations

MOST_SHOWN = 20


class ApplianceError(Exception):
    """An error with a place, a fact and a remedy.

    message: one line, starting with the place where there is one (`file:line: dotted.key: ...`).
    hint: what to do next, one line, or empty.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class RecipeError(ApplianceError):
    """One or more problems in what the user typed. `problems` are (message, hint) pairs, in the order of the file."""

    exit_code = 2

    def __init__(self, problems: list[tuple[str, str]]) -> None:
        hint = problems[0][1] if problems else ""
        super().__init__("\n".join(message for message, _ in problems), hint=hint)
        self.problems = problems

    @property
    def shown(self) -> list[tuple[str, str]]:
        """The first twenty of them, and how many more there are."""
        more = len(self.problems) - MOST_SHOWN
        return [*self.problems[:MOST_SHOWN], *([(f"and {more} more", "")] if more > 0 else [])]


class PreflightError(ApplianceError):
    """This host cannot run the plan. The findings were printed before this is raised."""

    exit_code = 3


class EngineError(ApplianceError):
    exit_code = 4


class PatchError(EngineError):
    """A patch whose version or source hash does not match what is installed."""


class SyncError(EngineError):
    """A weight update that did not arrive whole."""


class AttestationError(EngineError):
    """A worker's attestation is missing or says something else than the plan."""


class TrainingError(ApplianceError):
    exit_code = 5


class CheckpointError(TrainingError):
    """A checkpoint that could not be written."""


class ProcessDied(TrainingError):
    """A process that the training needs is gone."""


class GuardStop(ApplianceError):
    exit_code = 6


class NumericsError(GuardStop):
    """A value that must be finite is not."""


class SavedAndStopped(ApplianceError):
    exit_code = 75


class Interrupted(ApplianceError):
    exit_code = 130
