"""The cores that a process may use: where it may run, and what its control groups give time of."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from appliance.control_groups import usable_cores


@pytest.fixture(autouse=True)
def a_large_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{text}\n")


@pytest.mark.parametrize(
    ("text", "cores"),
    [("400000 100000", 4), ("150000 100000", 2), ("5000 100000", 1), ("max 100000", 64), ("9900000 100000", 64)],
)
def test_what_docker_was_told_by_cpus(tmp_path: Path, text: str, cores: int) -> None:
    """A part of a core counts as one; more than there are is no limit."""
    write(tmp_path, {"cpu.max": text})
    assert usable_cores(tmp_path, membership=tmp_path / "none") == cores


@pytest.mark.parametrize(("quota", "cores"), [("250000", 3), ("-1", 64)])
def test_an_older_control_group_says_it_in_two_files(tmp_path: Path, quota: str, cores: int) -> None:
    write(tmp_path, {"cpu/cpu.cfs_quota_us": quota, "cpu/cpu.cfs_period_us": "100000"})
    assert usable_cores(tmp_path, membership=tmp_path / "none") == cores


@pytest.mark.parametrize("files", [{}, {"cpu.max": ""}, {"cpu.max": "4"}, {"cpu.max": "0 0"}, {"cpu.max": "a b"}])
def test_without_a_limit_that_can_be_read_all_cores_count(tmp_path: Path, files: dict[str, str]) -> None:
    write(tmp_path, files)
    assert usable_cores(tmp_path, membership=tmp_path / "none") == 64


@pytest.mark.parametrize(
    ("membership", "file", "text"),
    [("0::/a/b", "a/cpu.max", "300000 100000"), ("4:cpuacct,cpu:/a/b\n0::/", "cpu/a/cpu.cfs_quota_us", "300000")],
)
def test_a_group_above_ours_limits_as_well(tmp_path: Path, membership: str, file: str, text: str) -> None:
    write(tmp_path, {file: text, "a/b/cpu.max": "900000 100000", "cpu/a/cpu.cfs_period_us": "100000"})
    write(tmp_path, {"ours": membership})
    assert usable_cores(tmp_path, membership=tmp_path / "ours") == 3


def test_a_cpu_set_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5})
    write(tmp_path, {"cpu.max": "400000 100000"})
    assert usable_cores(tmp_path, membership=tmp_path / "none") == 1
