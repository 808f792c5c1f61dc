"""Comparisons: a file of `appliance compare` is one with a plan for each arm, or refused."""

from __future__ import annotations

from pathlib import Path

from fuzz_surface import attempt, fuzzed
from fuzz_text import ROOT, VARIANTS, as_json, broken, raw, seeds, tokens_of, values, variants, wild_text
from hypothesis import strategies as st

from appliance.compare.file import Comparison, load_comparison

SHIPPED = [file.read_text() for file in sorted((ROOT / "comparisons").glob("*.yaml"))]
KEYS = ["recipe", "set", "arms", "seeds", "baseline", "against", "validation", "margin"]
WORDS = [*KEYS, "bf16", "arithmetic-tiny-int8", "rollout.scheme=bf16"]
GOOD = {"recipe": "arithmetic-tiny-int8", "arms": {"a": [], "b": ["seed=1"]}, "seeds": [0], "baseline": "a"}
trees = st.dictionaries(st.sampled_from(KEYS), values, max_size=3).map(lambda wild: as_json(GOOD | wild).encode())
arms = st.dictionaries(wild_text, values, max_size=3).map(lambda wild: as_json(GOOD | {"arms": wild}).encode())


def load(file: Path) -> Comparison:
    comparison = load_comparison(str(file))
    assert all(each.texts is not None for each in comparison.arms)
    return comparison


@fuzzed(
    "comparisons", variants=VARIANTS, seed=seeds, content=st.one_of(raw, broken(SHIPPED), tokens_of(WORDS), trees, arms)
)
def test_fuzz_comparisons(room: Path, content: bytes, seed: int) -> None:
    for each in variants(content, seed):
        (room / "c.yaml").write_bytes(each)
        attempt("comparisons", lambda: load(room / "c.yaml"), folder=room)
