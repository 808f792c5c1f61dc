"""A checkpoint's manifest: every kind of damage is found, and none where there is none."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from appliance.quant.uaq import MARK_FILE
from appliance.record.checkpoints import (
    MANIFEST_FILE,
    OF_A_STEP,
    PROFILE_FOLDER,
    Facts,
    FileRecord,
    _own_hash,
    damage,
    hash_file,
    read_manifest,
    seal,
)
from appliance.record.liveness import HEARTBEAT_FILE
from appliance.terms.environment import LOG_DIR_VARIABLE

FACTS = Facts(step=3, world_size=1, reason="the end", time=1.5, val_reward=0.5, profile=(("p.safetensors", "ab"),))
FILES = {  # every kind of file of a real checkpoint: tests/training flips a bit in a real one
    "actor/model_world_size_1_rank_0.pt": b"weights" * 100,
    "actor/optim_world_size_1_rank_0.pt": b"moments" * 100,
    "actor/extra_state_world_size_1_rank_0.pt": b"random state",
    "actor/fsdp_config.json": b"{}",
    "actor/huggingface/chat_template.jinja": b"{{ messages }}",
    "actor/huggingface/config.json": b'{"a": 1}',
    "actor/huggingface/generation_config.json": b"{}",
    "actor/huggingface/model.safetensors": b"model" * 100,
    "actor/huggingface/tokenizer.json": b"{}",
    "actor/huggingface/tokenizer_config.json": b"{}",
    f"{PROFILE_FOLDER}/profile.safetensors": b"scales" * 100,
    "data.pt": b"position",
    "state.json": b"{}",
    MARK_FILE: b"{}",
    **dict.fromkeys(OF_A_STEP, b"{}\n"),
}


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    folder = tmp_path / "global_step_3"
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    seal(folder, facts=FACTS)
    return folder


def test_a_sealed_folder_is_whole_and_says_what_it_is(sealed: Path) -> None:
    assert damage(sealed) == []
    manifest = read_manifest(sealed)
    assert manifest.facts == FACTS
    assert [file.path for file in manifest.files] == sorted(FILES)
    assert manifest.bytes == sum(map(len, FILES.values()))
    assert manifest.files[-2:] == tuple(
        FileRecord(name, size=2, sha256=hash_file(sealed / name)) for name in ("state.json", MARK_FILE)
    )


@pytest.mark.parametrize("name", FILES)
def test_one_flipped_bit_is_found_in_every_kind_of_file(sealed: Path, name: str) -> None:
    content = bytearray((sealed / name).read_bytes())
    content[len(content) // 2] ^= 1
    (sealed / name).write_bytes(content)
    assert damage(sealed) == [f"{name} has other content than was saved"]


@pytest.mark.slow
def test_a_flipped_bit_in_the_manifest_is_found(sealed: Path) -> None:
    """Wherever it is: all places, white space too."""
    whole = (sealed / MANIFEST_FILE).read_bytes()
    missed: list[int] = []
    for place in range(len(whole)):
        (sealed / MANIFEST_FILE).write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        if not damage(sealed):
            missed.append(place)
    assert missed == []


def test_missing_cut_and_added_files_are_found(sealed: Path) -> None:
    (sealed / "data.pt").unlink()
    (sealed / "state.json").write_bytes(b"{")
    (sealed / "actor" / "more.pt").write_bytes(b"x")
    assert damage(sealed) == [
        "data.pt is missing",
        "state.json has 1 bytes instead of 2",
        "actor/more.pt is not in the manifest",
    ]


def test_a_link_in_place_of_a_file_is_found(sealed: Path, tmp_path: Path) -> None:
    (sealed / "data.pt").rename(tmp_path / "data.pt")
    (sealed / "data.pt").symlink_to(tmp_path / "data.pt")
    assert damage(sealed) == ["data.pt is missing"]


def test_without_a_manifest_a_folder_is_no_checkpoint(sealed: Path) -> None:
    (sealed / MANIFEST_FILE).unlink()
    assert damage(sealed) == ["no manifest.json"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"schema_version": 2}, "manifest.json cannot be read: manifest.json: not of schema_version 1"),
        (
            {"files": [{"path": "data.pt"}]},
            "manifest.json cannot be read: manifest.json: files.0.size is not one that this program writes: ",
        ),
        (
            {"facts": {}},
            "manifest.json cannot be read: manifest.json: facts.step is not one that this program writes: ",
        ),
        (
            {"files": [{"path": "../../etc/passwd", "size": 1, "sha256": ""}]},
            "manifest.json cannot be read: manifest.json names a file outside of the checkpoint: ../../etc/passwd",
        ),
        (
            {"files": [{"path": "/etc/passwd", "size": 1, "sha256": ""}]},
            "manifest.json cannot be read: manifest.json names a file outside of the checkpoint: /etc/passwd",
        ),
    ],
)
def test_a_manifest_that_is_none_of_ours_is_damage(sealed: Path, change: dict, problem: str) -> None:
    raw = json.loads((sealed / MANIFEST_FILE).read_text())
    raw |= change
    with contextlib.suppress(ValueError):  # a damaged one says so by its own hash; these were written so
        raw["sha256"] = _own_hash(FACTS, [FileRecord(**file) for file in raw["files"]])
    (sealed / MANIFEST_FILE).write_text(json.dumps(raw))
    found = damage(sealed)
    assert len(found) == 1 and found[0].startswith(problem)


def test_a_manifest_that_is_no_json_is_damage(sealed: Path) -> None:
    (sealed / MANIFEST_FILE).write_text("")
    assert damage(sealed) == ["manifest.json cannot be read: manifest.json: Expecting value: line 1 column 1 (char 0)"]


def test_whoever_seals_or_reads_a_checkpoint_says_that_it_lives(sealed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large model that takes longer than a run may be silent."""
    beat = sealed.parent / HEARTBEAT_FILE
    monkeypatch.setenv(LOG_DIR_VARIABLE, str(sealed.parent))
    assert damage(sealed) == [] and beat.exists()
    beat.unlink()
    (sealed / MANIFEST_FILE).unlink()
    seal(sealed, facts=FACTS)
    assert beat.exists()
