"""`appliance accept` on a CPU, so that the first run on a GPU does not fail over a typo: kernels and engines. Its
trainings: tests/training/test_accept_trainings.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from rehearsal import rehearse

from benchmarks.accept.rows import ROWS

pytestmark = pytest.mark.engine


@pytest.mark.long
def test_every_row_but_the_trainings(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    names = [row.id for row in ROWS if not row.trains]
    outcomes, files = rehearse(names, folder=tmp_path)
    record_property("said", f"accept: {len(outcomes)} of {len(ROWS)} rows rehearsed: kernels and engines")
    assert (len(outcomes), len(ROWS)) == (24, 35)
    page = (tmp_path / "cpu-rehearsal.md").read_text()
    assert page.startswith("# CPU rehearsal") and ": 24 passed, 0 failed, 0 skipped." in page
    assert {f"{name}.log" for name in names} < files
    parts = {part.name for name, one in outcomes.items() if name.startswith("reload-") for part in one.parts}
    assert parts == {"qwen2", "qwen3", "llama", "mistral+head", "qwen3-moe"}
    assert sum(len(one.parts) for name, one in outcomes.items() if name.startswith("reload-")) == 25


def test_a_reload_that_leaves_something_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm that changes after the proof: the answers do not return."""
    import torch

    from benchmarks.accept import engines
    from benchmarks.accept.ground import Ground, RowFailed

    taken = engines.taken

    def and_changed(ground: Ground, llm: object, update: object, **options: object) -> float:
        seconds = taken(ground, llm, update, **options)
        with torch.no_grad():
            engines.runner_of(llm).model.model.norm.weight[: 1 + options["sync"]] *= 1.5
        return seconds

    monkeypatch.setattr(engines, "taken", and_changed)
    with pytest.raises(RowFailed) as raised:
        engines.reload(Ground(row="reload", folder=tmp_path, rehearsal=True), scheme_name="bf16", families=["llama"])
    assert str(raised.value) == "llama: the first weights again do not give the first answers again"
