"""A finding: what preflight has to say about one thing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """An error stops `check` and `train` with exit code 3; the others are said and nothing more."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True)
class Finding:
    """code: stable, for scripts.  place: the recipe key, file or folder concerned.  remedy: what to do, or empty."""

    severity: Severity
    code: str
    place: str
    message: str
    remedy: str = ""

    @property
    def text(self) -> str:
        return f"{self.severity}: {self.place}: {self.message}"


def has_error(findings: list[Finding]) -> bool:
    return any(finding.severity is Severity.ERROR for finding in findings)
