"""A finding: what is wrong, or worth knowing, about one setting, one option, one file or row of data, or this host. It
is reported in this form alone: RecipeError is made of findings.

Rules yield findings, and no rule stops another one. They are one list, `preflight.report.RULES`, which
`recipe.rules.judge` runs: rules of the recipe (recipe/rules.py), those that need the model or the device
(plan/rules.py), and those that need this host (preflight/). What differs from the run that is resumed is found by
launch/changes.py and launch/resume.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum

FAULT = "recipe"  # the code of an error that is the recipe's: exit code 2


class Severity(StrEnum):
    """An error stops `check` and `train`, with exit code 2 where it is the recipe's and 3 where it is this host's; a
    warning or an info is shown and stops nothing."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True)
class Finding:
    severity: Severity
    code: str
    """Stable name of this kind of finding, for scripts."""
    keys: tuple[str, ...]
    """Dotted keys of the recipe that it concerns, the one to change first; or one option of the command line, file
    (`file:line` for a row of data), folder, variable or limit. None for a text that could not be read far enough to
    have a key."""
    message: str
    remedy: str = ""
    """Instruction for the user, or empty."""
    where: str = ""
    """Place where the user wrote the first key, `file:line` or an option; empty where nobody wrote it."""
    is_of_no_value: bool = False
    """Whether nothing can be made of the value of these keys, such as the name of no device: what else was found about
    them is about another value, and is not reported."""

    @property
    def place(self) -> str:
        """The key, option, file, folder or limit concerned; empty where there is none."""
        return self.keys[0] if self.keys else ""

    @property
    def is_fault(self) -> bool:
        """Whether the recipe is wrong, on whatever host."""
        return self.code == FAULT

    @property
    def is_error(self) -> bool:
        return self.severity is Severity.ERROR

    @property
    def fact(self) -> str:
        """The place and the message, `where: key: message`."""
        return ": ".join(filter(None, (self.where, self.place, self.message)))

    @property
    def text(self) -> str:
        return f"{self.severity}: {self.fact}"


def error(code: str, place: str, message: str, remedy: str = "") -> Finding:
    return Finding(Severity.ERROR, code, (place,), message, remedy)


def warning(code: str, place: str, message: str, remedy: str = "") -> Finding:
    return Finding(Severity.WARNING, code, (place,), message, remedy)


def fault(
    keys: tuple[str, ...], message: str, remedy: str = "", *, where: str = "", is_of_no_value: bool = False
) -> Finding:
    """Make an error of the recipe, or of what else the user typed or gave. keys: as of Finding; `Recipe.placed` places
    one of the recipe at the first key that the user wrote, unless `where` says the place."""
    return Finding(Severity.ERROR, FAULT, keys, message, remedy, where, is_of_no_value)


def concerns(finding: Finding, keys: Collection[tuple[str, ...]]) -> bool:
    """Tell whether a finding is about one of the keys, or about something below one. keys: split at their dots."""
    paths = [tuple(key.split(".")) for key in finding.keys]
    return any(path[: len(key)] == key for path in paths for key in keys)


def has_error(findings: Iterable[Finding]) -> bool:
    return any(finding.is_error for finding in findings)


def finding_lines(findings: Iterable[Finding]) -> list[str]:
    """Return lines `severity: where: place: message`, the worst first, each followed by its `hint:` line where there is
    a remedy."""
    shown = []
    for finding in sorted(findings, key=lambda finding: list(Severity).index(finding.severity)):
        shown += [finding.text, f"hint: {finding.remedy}"] if finding.remedy else [finding.text]
    return shown


def findings_as_json(findings: Iterable[Finding]) -> list[dict[str, object]]:
    """Return the documents of `--json`. `place` is the first of `keys`."""
    return [
        {
            "severity": finding.severity,
            "code": finding.code,
            "place": finding.place,
            "keys": list(finding.keys),
            "where": finding.where,
            "message": finding.message,
            "remedy": finding.remedy,
        }
        for finding in findings
    ]
