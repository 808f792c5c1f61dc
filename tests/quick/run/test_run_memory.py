"""How much memory a run's processes take, measured seldom enough to cost nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import psutil
import pytest

from appliance.record.events import MEMORY_FILE, MemorySample, MemoryWatch, parse_memory, pss_bytes
from appliance.record.lines import lines_of


def samples(run_dir: Path) -> list[MemorySample]:
    return [*filter(None, map(parse_memory, lines_of(run_dir / MEMORY_FILE)))]


def test_it_is_the_proportional_set_size(tmp_path: Path) -> None:
    MemoryWatch(tmp_path).tick(now=0.0)
    (sample,) = samples(tmp_path)
    own = psutil.Process().memory_full_info().pss
    assert sample.processes >= 1 and sample.pss_bytes >= 0.8 * own > 1 << 20
    assert pss_bytes(os.getpid()) == pytest.approx(own, rel=0.1)
    assert pss_bytes(2**22 + 1) == 0  # above the largest process id


def test_it_is_measured_at_most_every_five_seconds(tmp_path: Path) -> None:
    watch = MemoryWatch(tmp_path)
    for now in (0.0, 0.1, 4.9):
        watch.tick(now=now)
    assert len(samples(tmp_path)) == 1
    watch.tick(now=1e6)
    assert len(samples(tmp_path)) == 2


def test_what_costs_more_is_measured_more_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((0.0, 2.0, 2.0, 2.0))  # a measurement of two seconds
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    watch = MemoryWatch(tmp_path)
    watch.tick(now=0.0)
    watch.tick(now=199.0)
    assert len(samples(tmp_path)) == 1


def test_a_folder_that_cannot_be_written_costs_samples_only(tmp_path: Path) -> None:
    MemoryWatch(tmp_path / "gone").tick(now=0.0)
    assert samples(tmp_path / "gone") == []


def test_lines_that_are_none_are_left_out(tmp_path: Path) -> None:
    good = {"time": 1.0, "pss_bytes": 5, "processes": 2}
    lines = ["[]", "null", "{", json.dumps({**good, "pss_bytes": "x"}), json.dumps(good), '{"time": 1']
    (tmp_path / MEMORY_FILE).write_text("\n".join(lines))
    assert samples(tmp_path) == [MemorySample(1.0, 5, 2)]
