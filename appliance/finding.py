"""A finding: what preflight has to say about one thing."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """An error stops `check` and `train` with exit code 3; the others are said and nothing more."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True)
class Finding:
    severity: Severity
    code: str
    """Stable, for scripts."""
    place: str
    """The recipe key, file or folder concerned."""
    message: str
    remedy: str = ""
    """What to do, or empty."""

    @property
    def text(self) -> str:
        return f"{self.severity}: {self.place}: {self.message}"


def error(code: str, place: str, message: str, remedy: str = "") -> Finding:
    return Finding(Severity.ERROR, code, place, message, remedy)


def warning(code: str, place: str, message: str, remedy: str = "") -> Finding:
    return Finding(Severity.WARNING, code, place, message, remedy)


def has_error(findings: list[Finding]) -> bool:
    return any(finding.severity is Severity.ERROR for finding in findings)


def lines(findings: list[Finding]) -> list[str]:
    """`severity: place: message`, the worst first, each followed by its `hint:` line where there is a remedy."""
    in_order = sorted(findings, key=lambda each: list(Severity).index(each.severity))
    return [line for each in in_order for line in (each.text, f"hint: {each.remedy}" if each.remedy else "") if line]


def as_json(findings: list[Finding]) -> list[dict[str, str]]:
    return [dataclasses.asdict(finding) for finding in findings]
