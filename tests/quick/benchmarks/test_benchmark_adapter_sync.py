"""The page of updates of an adapter beside those of a merged model."""

from __future__ import annotations

from appliance.terms.schemes import Scheme
from benchmarks.adapter_sync import Row, page


def test_the_page_has_both_sides_and_their_ratios() -> None:
    row = Row(Scheme.INT8, bytes=(269_000_000, 9_768_960), seconds=(0.8, 0.1), ratio=0.13)
    text = page([row], model="A model", rank=16, pairs=4, prove_every=16)
    assert text.endswith("| int8 | 269.0 | 9.8 | 0.036 | 0.800 | 0.100 | 0.13 |\n")
    assert "A model, an adapter of rank 16 in BF16" in text and "4 updates of each kind" in text
