"""A disk that is full, or too small, before a run starts: on a real file system of 256 KiB."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from appliance.errors import PreflightError
from appliance.finding import Severity
from appliance.preflight.report import examine
from appliance.recipe.load import load_recipe
from appliance.record.session import create_session


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a small tmpfs cannot be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path, *, leave: int = 0) -> None:
    """leave: bytes that stay free, a multiple of a page."""
    with pytest.raises(OSError, match="No space left"), (folder / "other").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    if leave:
        with (folder / "other").open("r+b") as file:
            file.truncate((folder / "other").stat().st_size - leave)


@pytest.mark.parametrize("pages", [0, 1, 2])
def test_a_full_disk_refuses_the_run_and_leaves_nothing_behind(
    small_disk: Path, small_plan: Callable, pages: int
) -> None:
    """With no room, and with room for the folder's first files only."""
    plan = small_plan(small_disk)
    fill(small_disk, leave=4096 * pages)
    before = sorted(small_disk.rglob("*"))
    with pytest.raises(PreflightError) as caught:
        create_session(plan, recipe_yaml="name: small\n" * 1000, is_chosen=False)
    assert caught.value.exit_code == 3
    assert caught.value.message == f"{plan.run_dir}: no space left"
    assert caught.value.hint == "free some space, or set cluster.run_dir to a roomier place"
    assert sorted(small_disk.rglob("*")) == before


def test_a_disk_that_is_too_small_is_found_before_anything_is_written(small_disk: Path) -> None:
    recipe = load_recipe("arithmetic-tiny-int8", sets=(f"cluster.run_dir={small_disk}",))
    _, _, findings = examine(recipe, run_dir=small_disk / "a-1", ask_hub=False)
    (only,) = (each for each in findings if each.severity is Severity.ERROR)
    assert only.code == "disk"
    assert only.message == f"0.0 GiB free at {small_disk / 'a-1'}, the run needs about 0.3 GiB"
    assert list(small_disk.iterdir()) == []
