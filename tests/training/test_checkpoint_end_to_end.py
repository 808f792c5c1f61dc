"""The checkpoint of a real training, every file of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from plans import FILES_OF_BUILTIN
from trainings import STEPS, Finished

from appliance.preflight.disk import BYTES_SAVED_PER_WEIGHT
from appliance.record.checkpoints import MANIFEST_FILE, checkpoint_folder, damage, read_manifest
from appliance.tasks.library import TINY_MODELS

pytestmark = pytest.mark.e2e

KINDS_OF_FILE = {  # of a checkpoint; a rank's own end in _world_size_<n>_rank_<m>.pt
    *("actor/model", "actor/optim", "actor/extra_state", "actor/fsdp_config.json"),
    *(f"actor/huggingface/{name}" for name in FILES_OF_BUILTIN),
    *("data.pt", "guard.json", "state.json", "profile/profile.safetensors"),
}


def test_a_flipped_bit_is_found_in_each_file_of_its_checkpoint(short: Finished, tmp_path: Path) -> None:
    """All of them at once, for each file is judged by itself; then the manifest, by whose hash they are known."""
    folder = tmp_path / "global_step"
    shutil.copytree(checkpoint_folder(short.run_dir, step=STEPS), folder)
    assert damage(folder) == []
    files = [file.path for file in read_manifest(folder).files]
    assert {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()} == {
        *files,
        MANIFEST_FILE,
    }
    assert KINDS_OF_FILE - {path.partition("_world_size")[0] for path in files} == set()
    for path in files:
        flip(folder / path)
    assert damage(folder) == [f"{path} has other content than was saved" for path in files]
    for path in files:
        flip(folder / path)
    assert damage(folder) == []
    flip(folder / MANIFEST_FILE)
    (problem,) = damage(folder)
    assert problem.startswith(f"{MANIFEST_FILE} cannot be read: ")


def test_its_size_is_the_one_that_preflight_asks_room_for(short: Finished) -> None:
    weights = TINY_MODELS["tiny-arithmetic"].shape.weights
    size = read_manifest(checkpoint_folder(short.run_dir, step=STEPS)).bytes
    assert size == pytest.approx(BYTES_SAVED_PER_WEIGHT * weights, rel=0.02)


def flip(file: Path) -> None:
    """The lowest bit of the byte in the middle."""
    middle = file.stat().st_size // 2
    with file.open("r+b") as opened:
        opened.seek(middle)
        (byte,) = opened.read(1)
        opened.seek(middle)
        opened.write(bytes([byte ^ 1]))
