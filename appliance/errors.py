"""The error tree: the exit code that scripts rely on, and whether another attempt of the run may fare better.

An error becomes an event of the run with its class's name (record/events.py), a line for people and an exit code
(cli.py).

ApplianceError                 1          our own fault
├── RecipeError                2          the recipe, the command line or the data: findings, all at once
├── PreflightError             3          the plan cannot run here, or a folder of it cannot be written
├── EngineError                4  again   the rollout engine or one of our patches
│   ├── EngineNotStarted       4  again   an engine that could not start, in vLLM's own words
│   │   └── EngineRefused      4          the same, where it would refuse the model and its settings again
│   ├── PatchError             4          a patch that does not fit the installed source
│   ├── WeightsError           4          a checkpoint that is not the model of its config.json
│   ├── SyncError              4  again   a weight update that did not arrive
│   └── AttestationError       4          a worker that did not report, or misreported, what it runs
├── TrainingError              5  again   the training child failed
│   ├── CheckpointError        5          a checkpoint that could not be written
│   └── ProcessDied            5  again   a process that the training needs is gone
├── GuardStop                  6          stopped by a numerical guard
│   └── NumericsError          6          a value that must be finite is not
├── SavedAndStopped           75          a signal, after the state was saved
└── Interrupted              130          Ctrl-C

Besides it: console.StdoutError (3), what stdout says when it cannot be written, and console.READER_GONE (141).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from appliance.finding import Finding, fault

MOST_SHOWN = 20


class ApplianceError(Exception):
    """An error with a place, a fact and a remedy."""

    message: str
    """One line, which starts with the place where there is one (`file:line: dotted.key: ...`)."""
    hint: str
    """Remedy: what to do next, one line, or empty."""

    exit_code = 1
    restartable = False
    """Whether another attempt of a run may fare better: not where the same is there again at the next start."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    @classmethod
    def retold(cls, message: str, *, hint: str) -> ApplianceError:
        """Make the error that another process wrote down."""
        return cls(message, hint=hint)


class RecipeError(ApplianceError):
    """One or more faults in what the user typed or gave."""

    findings: tuple[Finding, ...]
    """Faults in the order of the file, each with its place."""

    exit_code = 2

    def __init__(self, findings: Iterable[Finding]) -> None:
        self.findings = tuple(findings)
        hint = self.findings[0].remedy if self.findings else ""
        super().__init__("\n".join(finding.fact for finding in self.findings), hint=hint)

    @classmethod
    def retold(cls, message: str, *, hint: str) -> RecipeError:
        *others, last = message.splitlines() or [""]
        return cls([*(fault((), line) for line in others), fault((), last, hint)])

    @property
    def problems(self) -> list[tuple[str, str]]:
        """(fact with its place, remedy) of each finding."""
        return [(finding.fact, finding.remedy) for finding in self.findings]

    @property
    def shown(self) -> list[tuple[str, str]]:
        """The first twenty problems, and how many more there are."""
        more = len(self.problems) - MOST_SHOWN
        return [*self.problems[:MOST_SHOWN], *([(f"and {more} more", "")] if more > 0 else [])]


def refuse_faults(findings: Iterable[Finding]) -> None:
    """Raise RecipeError with all errors, those of this host too, when one of them is the recipe's."""
    errors = [finding for finding in findings if finding.is_error]
    if any(finding.is_fault for finding in errors):
        raise RecipeError(errors)


class PreflightError(ApplianceError):
    """The plan cannot run here: this host, its model or its data stand against it. The findings were printed before
    this is raised."""

    exit_code = 3


class EngineError(ApplianceError):
    exit_code = 4
    restartable = True


class EngineNotStarted(EngineError):
    """An engine could not start, because of a fault that vLLM met."""


class EngineRefused(EngineNotStarted):
    """An engine could not start, because vLLM refuses the model or its settings, and would refuse them the next time as
    well."""

    restartable = False


class PatchError(EngineError):
    """A patch whose version or source hash does not match what is installed."""

    restartable = False


class WeightsError(EngineError):
    """A checkpoint that is not the model of its config.json: the next start would find the same."""

    restartable = False


class SyncError(EngineError):
    """A weight update that did not arrive whole."""


class AttestationError(EngineError):
    """A worker's attestation is missing, or differs from the plan."""

    restartable = False


class TrainingError(ApplianceError):
    exit_code = 5
    restartable = True


class CheckpointError(TrainingError):
    """A checkpoint that could not be written."""

    restartable = False


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


def first_line(error: BaseException) -> str:
    """Describe another library's error for a message of ours: the first line of its text, or what kind it is."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def last_line(error: BaseException) -> str:
    """Describe another library's error by the last line of its text, which in a traceback is what was raised; for a
    message that already names the kind of the error."""
    return (str(error).strip().splitlines() or ["no message"])[-1].strip()


def _classes(root: type[ApplianceError]) -> Iterator[type[ApplianceError]]:
    yield root
    for each in root.__subclasses__():
        yield from _classes(each)


def error_class(name: str) -> type[ApplianceError] | None:
    """Return the class of the tree with this name, as an event has it; None for another name."""
    return next((each for each in _classes(ApplianceError) if each.__name__ == name), None)


def is_restartable(code: int, *, error: str) -> bool:
    """Tell whether another attempt may fare better than one that ended with this exit code. error: the name of its
    error's class, empty where no error was reported."""
    named = error_class(error)
    codes = {each.exit_code for each in _classes(ApplianceError) if each.restartable}
    return code in codes and (named is None or named.restartable)
