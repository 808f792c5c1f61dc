"""What a process may open and start, and what a control group leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.plan.host import UNLIMITED, Limits
from appliance.preflight.finding import Severity
from appliance.preflight.limits import judge_limits, read_limits


def test_this_process_has_limits() -> None:
    limits = read_limits()
    assert limits.open_files > 0 and limits.threads > 0 and limits.memory_free_bytes > 0


def test_a_control_group_leaves_what_it_has_not_given(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("3000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "pids.max").write_text("77\n")
    assert (read_limits(tmp_path).memory_free_bytes, read_limits(tmp_path).threads) == (2000, 77)


def test_an_older_control_group_says_it_elsewhere(tmp_path: Path) -> None:
    for name, text in (("memory/memory.limit_in_bytes", "500"), ("memory/memory.usage_in_bytes", "600")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert read_limits(tmp_path).memory_free_bytes == 0


@pytest.mark.parametrize("text", ["max", "", None, "9223372036854771712"])
def test_no_limit(tmp_path: Path, text: str | None) -> None:
    """The number is what version 1 says where nothing limits."""
    for name in ("memory.max", "memory.current") if text is not None else ():
        (tmp_path / name).write_text(text)
    assert read_limits(tmp_path).memory_free_bytes == UNLIMITED


@pytest.mark.parametrize(
    ("limits", "cores", "found"),
    [
        (Limits(), 2, []),
        (Limits(open_files=1024, threads=2048), 32, []),
        (
            Limits(open_files=256),
            2,
            [
                (
                    "error: ulimit -n: a process may open 256 files, Ray and vLLM want 1024",
                    "ulimit -Hn 65536, or in a container --ulimit nofile=65536:65536",
                )
            ],
        ),
        (
            Limits(threads=4096),
            128,
            [
                (
                    "warning: ulimit -u: 4096 processes and threads are allowed, a run on 128 cores may start 8192",
                    "raise it (ulimit -u), or in a container --pids-limit=-1",
                )
            ],
        ),
    ],
)
def test_limits_are_judged(limits: Limits, cores: int, found: list[tuple[str, str]]) -> None:
    judged = list(judge_limits(limits, cores=cores))
    assert [(each.text, each.remedy) for each in judged] == found
    assert all(each.severity in (Severity.ERROR, Severity.WARNING) for each in judged)
