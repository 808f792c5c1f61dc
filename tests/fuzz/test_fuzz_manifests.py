"""A checkpoint's manifest: either every file is as it was sealed, or the damage is said."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from fuzz_surface import attempt, fuzzed
from fuzz_text import HOSTILE, VARIANTS, as_json, broken, deep, raw, seeds, values, variants, wild_text
from hypothesis import strategies as st

from appliance.record.checkpoints import Facts, damage, find_newest, read_manifest, read_saved, seal, surplus

FACTS = Facts(step=3, world_size=1, reason="the end", time=1.5, val_reward=0.5, profile=(("p.safetensors", "ab"),))


@pytest.fixture
def sealed(room: Path) -> Path:
    folder = room / "checkpoints/global_step_3"
    (folder / "actor").mkdir(parents=True)
    (folder / "actor/model.pt").write_bytes(b"weights")
    seal(folder, facts=FACTS)
    shutil.copyfile(folder / "manifest.json", room / "good.json")
    return folder


def signed(content: dict[str, Any]) -> str:
    """With the hash over itself that it would need: whoever writes a manifest can write that too."""
    digest = hashlib.sha256(
        json.dumps({"facts": content.get("facts"), "files": content.get("files")}, sort_keys=True).encode()
    )
    return as_json({**content, "sha256": digest.hexdigest()})


@st.composite
def changed(draw: st.DrawFn) -> str:
    """A manifest like the good one, signed, with wild values in it."""
    path = draw(st.one_of(st.just("actor/model.pt"), st.sampled_from(HOSTILE), wild_text))
    record = {"path": path, "size": 7, "sha256": hashlib.sha256(b"weights").hexdigest()}
    content: dict[str, Any] = {"schema_version": 1, "facts": json.loads(json.dumps(vars(FACTS))), "files": [record]}
    for _ in range(draw(st.integers(0, 3))):
        level = draw(
            st.sampled_from([content, content["facts"] if isinstance(content["facts"], dict) else content, record])
        )
        level[draw(st.sampled_from([*level, "new"]))] = draw(values)
    return signed(content)


def judge(folder: Path, content: bytes) -> list[str]:
    (folder / "manifest.json").write_bytes(content)
    problems = damage(folder)
    found = find_newest(folder.parent.parent)
    assert (found.newest is None) == bool(problems)
    surplus(read_saved(folder.parent.parent), keep=1, keep_best=True)
    if not problems:
        files = read_manifest(folder).files
        assert [each.path for each in files] == ["actor/model.pt"], "a manifest names what was not sealed"
    return problems


GOOD = signed({"schema_version": 1, "facts": vars(FACTS), "files": []})
contents = st.one_of(raw, broken([GOOD]), changed().map(str.encode), st.sampled_from(deep(2000)).map(str.encode))


@fuzzed("manifests", variants=VARIANTS, seed=seeds, content=contents)
def test_fuzz_manifests(sealed: Path, content: bytes, seed: int) -> None:
    for each in variants(content, seed):
        attempt("manifests", lambda content=each: judge(sealed, content), folder=sealed.parent.parent)
