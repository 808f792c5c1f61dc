"""What a process may open and start, and what a control group leaves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from appliance.finding import Severity
from appliance.plan.build import build_plan
from appliance.plan.host import UNLIMITED, Limits
from appliance.plan.memory import GIB, peak, shape_on_cpu
from appliance.preflight import probes
from appliance.preflight.checks import judge_limits
from appliance.preflight.probes import read_limits
from appliance.recipe.load import load_recipe


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


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_page_cache_that_can_be_taken_back_is_free(tmp_path: Path) -> None:
    stat = "anon 600\nactive_file 100\ninactive_file 250\ntotal_inactive_file 300\n"
    write(tmp_path, {"memory.max": "1000", "memory.current": "950", "memory.stat": stat})
    assert read_limits(tmp_path).memory_free_bytes == 300
    old = tmp_path / "old"
    names = {"limit_in_bytes": "1000", "usage_in_bytes": "950", "stat": stat}
    write(old / "memory", {f"memory.{name}": text for name, text in names.items()})
    assert read_limits(old).memory_free_bytes == 350


@pytest.mark.parametrize(
    ("membership", "memory", "pids"),
    [("0::/a/b", "", ""), ("5:pids:/a/b\n4:cpu,memory:/a/b\n0::/\n", "memory/", "pids/")],
)
def test_every_group_from_ours_up_to_the_root_limits(tmp_path: Path, membership: str, memory: str, pids: str) -> None:
    most, used = ("limit_in_bytes", "usage_in_bytes") if memory else ("max", "current")
    groups = {"a/b": (900, 100, 50), "a": (700, 200, 60), "a/c": (1, 1, 1)}
    for group, (limit, held, threads) in groups.items():
        write(tmp_path, {f"{memory}{group}/memory.{most}": str(limit), f"{memory}{group}/memory.{used}": str(held)})
        write(tmp_path, {f"{pids}{group}/pids.max": str(threads)})
    ours = tmp_path / "ours"
    ours.write_text(membership)
    limits = read_limits(tmp_path, membership=ours)
    assert (limits.memory_free_bytes, limits.threads) == (500, 50)


@pytest.mark.parametrize("membership", ["0::/a/b", "4:cpu,memory:/a/b\n0::/\n"])
def test_what_a_group_allows_does_not_depend_on_what_is_free(tmp_path: Path, membership: str) -> None:
    """The least of the groups from ours up to the root: plans are made by it, and are the same at any minute."""
    tree, name = ("memory/", "limit_in_bytes") if "memory" in membership else ("", "max")
    used = "usage_in_bytes" if tree else "current"
    for group, limit in (("a/b", 900), ("a", 700), ("a/c", 1)):
        write(tmp_path, {f"{tree}{group}/memory.{name}": str(limit)})
    ours = tmp_path / "ours"
    ours.write_text(membership)
    for used_bytes in (0, 650):
        write(tmp_path, {f"{tree}{group}/memory.{used}": str(used_bytes) for group in ("a/b", "a")})
        limits = read_limits(tmp_path, membership=ours)
        assert (limits.memory_bytes, limits.memory_free_bytes) == (700, 700 - used_bytes)


@pytest.mark.parametrize(("allowed", "total"), [(12 * GIB, 12 * GIB), (1 << 50, 64 * GIB)])
def test_a_container_has_the_memory_that_it_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: int, total: int
) -> None:
    """And plans its trainer's forward by that, not by its host's 64 GiB."""
    monkeypatch.setattr(probes.psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GIB, available=60 * GIB))
    monkeypatch.setattr(probes, "read_limits", lambda: Limits(memory_bytes=allowed, memory_free_bytes=allowed // 2))
    host = probes.read_host(tmp_path)
    assert host.memory_bytes == total
    sets = ("model.builtin=smollm2-135m", "cluster.device=cpu", "task.max_response_tokens=24")
    recipe = load_recipe("arithmetic-tiny-int8", sets=(*sets, "batch.prompts_per_step=64"))
    plan = build_plan(recipe, run_dir=tmp_path / "a-1", host=host)
    shape = shape_on_cpu(plan, None)
    assert shape is not None and peak(plan, shape) < total


def test_a_group_outside_of_a_containers_tree_is_not_followed(tmp_path: Path) -> None:
    write(tmp_path, {"tree/memory.max": "900", "out/memory.max": "1", "out/memory.current": "0", "ours": "0::/../out"})
    write(tmp_path, {"tree/memory.current": "0"})
    assert read_limits(tmp_path / "tree", membership=tmp_path / "ours").memory_free_bytes == 900


def test_the_soft_limit_of_threads_is_the_one_that_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda which: (300, 9000))
    limits = read_limits(tmp_path, membership=tmp_path / "none")
    assert (limits.threads, limits.open_files) == (300, 9000)


@pytest.mark.parametrize("text", ["max", "", None, "9223372036854771712"])
def test_no_limit(tmp_path: Path, text: str | None) -> None:
    """The number is what version 1 says where nothing limits."""
    for name in ("memory.max", "memory.current") if text is not None else ():
        (tmp_path / name).write_text(text)
    limits = read_limits(tmp_path)
    assert (limits.memory_bytes, limits.memory_free_bytes) == (UNLIMITED, UNLIMITED)


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
