"""The trainings of `appliance accept` on a CPU, by each scheme, and on two ranks: tests/engine/test_accept_rehearsal.py
has its other rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from rehearsal import rehearse

from appliance.terms.schemes import Scheme
from benchmarks.accept.rows import ROWS

pytestmark = [pytest.mark.e2e(minutes=15), pytest.mark.torture]


def test_every_training(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    rows = [row for row in ROWS if row.trains]
    arguments_by_row = {row: dict(row.arguments) for row in rows if "scheme_names" in dict(row.arguments)}
    assert [row.id for row in rows if row not in arguments_by_row] == ["train-smollm2"]
    schemes = {scheme for scheme in Scheme if not scheme.spec.not_on_gpu}
    assert {each["scheme_names"] for each in arguments_by_row.values()} == {*schemes, "bf16+int8"}
    usual = {each["scheme_names"] for row, each in arguments_by_row.items() if row.gpus == 1 and "dtype" not in each}
    assert usual == schemes
    names = [row.id for row in rows]
    found, files = rehearse(names, folder=tmp_path)
    record_property("said", f"accept: {len(found)} of {len(ROWS)} rows rehearsed: trainings")
    assert (len(found), len(ROWS)) == (11, 35)
    expected = {"plan.json", "metrics.jsonl", "events.jsonl", "attest/driver-0.json", "sync/rollout-0-0.jsonl"}
    runs = [(name, "accept") for name in names if name != "train-smollm2"]
    for name, run_name in (*runs, ("train-smollm2", "bf16"), ("train-smollm2", "int8")):
        run = f"{name}/runs/{run_name}/"
        assert {f"{name}.log"} | {run + each for each in expected} < files
        assert any(file.startswith(f"{run}logs/") for file in files)
