"""`appliance accept` on a CPU, so that the first run on a GPU does not fail over a typo: all but the rows that run the
code of others with another size or scheme. `make accept` rehearses those, too."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from benchmarks.accept.command import run_accept
from benchmarks.accept.outcome import State, read_outcome
from benchmarks.accept.rows import ROWS

pytestmark = pytest.mark.engine


REPEATED = {
    *("gemm-32b", "reload-bf16", "reload-fp8", "reload-fp8-channel", "reload-int8-experts", "sync-32b"),
    *("train-bf16", "train-fp8", "train-int8-1.5b"),
}


@pytest.mark.long
def test_every_kind_of_row(tmp_path: Path) -> None:
    names = [row.id for row in ROWS if row.id not in REPEATED]
    code = run_accept(only=tuple(names), output=tmp_path, run_root=tmp_path / "runs", rehearse=True)
    kept = tmp_path / "runs" / "accept" / "cpu-rehearsal"
    found = {name: read_outcome(kept / name) for name in names}
    assert {name: (one.state, one.why) for name, one in found.items()} == dict.fromkeys(found, (State.PASSED, ""))
    assert (code, len(found), len(ROWS)) == (0, 17, 26)
    assert all(one.checks > 0 for one in found.values())
    page = (tmp_path / "cpu-rehearsal.md").read_text()
    assert page.startswith("# CPU rehearsal") and ": 17 passed, 0 failed, 0 skipped." in page
    with tarfile.open(tmp_path / "cpu-rehearsal.tar.gz") as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    run = "train-int8/runs/accept/"
    wanted = {"plan.json", "metrics.jsonl", "events.jsonl", "attest/driver-0.json", "sync/rollout-0-0.jsonl"}
    assert {f"{name}.log" for name in names} | {run + each for each in wanted} < files
    assert any(name.startswith(f"{run}logs/") for name in files)
    reloads = [one for name, one in found.items() if name.startswith("reload-")]
    assert all(one.parts and {part.state for part in one.parts} == {State.PASSED} for one in reloads)


def test_a_reload_that_leaves_something_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm that changes after the proof: the answers do not return."""
    import torch

    from benchmarks.accept import engines
    from benchmarks.accept.ground import Ground, RowFailed

    taken = engines.taken

    def and_changed(ground: Ground, llm: object, update: object, **given: object) -> float:
        seconds = taken(ground, llm, update, **given)
        with torch.no_grad():
            engines.runner_of(llm).model.model.norm.weight[: 1 + given["sync"]] *= 1.5
        return seconds

    monkeypatch.setattr(engines, "taken", and_changed)
    with pytest.raises(RowFailed) as raised:
        engines.reload(Ground(row="reload", folder=tmp_path, rehearsal=True), by="bf16", families=["llama"])
    assert str(raised.value) == "llama: the first weights again do not give the first answers again"
