"""What a user reads of findings."""

from __future__ import annotations

from collections.abc import Iterable

from appliance.finding import Finding


def texts(findings: Iterable[Finding]) -> list[tuple[str, str]]:
    """Return (fact with its place, remedy) of each finding."""
    return [(finding.fact, finding.remedy) for finding in findings]
