"""Rows of `appliance accept` on a CPU, as the command runs them, and what they leave."""

from __future__ import annotations

import tarfile
from pathlib import Path

from benchmarks.accept.command import run_accept
from benchmarks.accept.outcome import Outcome, State, read_outcome


def rehearse(names: list[str], *, folder: Path) -> tuple[dict[str, Outcome], set[str]]:
    """What each row found, and the names of the files in the archive. Every row and each part of one has passed, with
    something that was held."""
    code = run_accept(only=tuple(names), output=folder, run_root=folder / "runs", rehearse=True)
    run_folder = folder / "runs" / "accept" / "cpu-rehearsal"
    outcomes = {name: read_outcome(run_folder / name) for name in names}
    assert {name: (one.state, one.why) for name, one in outcomes.items()} == dict.fromkeys(outcomes, (State.PASSED, ""))
    assert all(one.checks > 0 for one in outcomes.values())
    assert {part.state for one in outcomes.values() for part in one.parts} <= {State.PASSED}
    assert code == 0
    with tarfile.open(folder / "cpu-rehearsal.tar.gz") as archive:
        return outcomes, {name.partition("/")[2] for name in archive.getnames()}
