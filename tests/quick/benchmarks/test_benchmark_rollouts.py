"""The page of whole rollouts: pairs of a turn, a model of more layers than were measured, shares."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.rollouts import FEW, LAYERS_OF_7B, MORE, OTHER, extrapolated, of_7b, page, pairs_of


def _result(*turns: tuple[float, float], layers: int) -> dict[str, object]:
    """turns: seconds of BF16 and of INT8, for 2,000 and 500 tokens."""
    measurements = [
        {"pair": number, "scheme": scheme, "tokens": tokens, "seconds": seconds, "processor_s": 2 * seconds}
        for number, turn in enumerate(turns)
        for scheme, tokens, seconds in zip(("bf16", "int8"), (2000, 500), turn, strict=True)
    ]
    workload = {"shapes": {"layers": layers}, "num_prompts": 4, "samples_per_prompt": 1}
    return {"measurements": measurements, "workload": workload, "host": "a host", "date": "2026-11-29", "others": 0.25}


def test_a_pair_has_the_seconds_of_as_many_tokens() -> None:
    result = _result((4.0, 1.0), (6.0, 2.0), layers=1)
    assert pairs_of(result, clock="seconds") == [(2.0, 2.0), (3.0, 4.0)]
    assert pairs_of(result, clock="processor_s") == [(4.0, 4.0), (6.0, 8.0)]


def test_times_that_are_linear_in_the_layers_are_met_exactly() -> None:
    """BF16: 5 + 3 n, INT8: 4 + 2 n. A layer more in one of two pairs shows what its error does to the whole."""
    few, more = [(5 + 3 * 2, 4 + 2 * 2)], [(5 + 3 * 6, 4 + 2 * 6), (5 + 3 * 7, 4 + 2 * 6)]
    assert extrapolated(few, more, layers=(2, 6), whole=28) == [
        (5 + 3 * 28, 4 + 2 * 28),
        (5 + 3 * 28 + 3 * 26 / 4, 4 + 2 * 28),
    ]


def test_the_page_says_what_was_measured_and_what_was_not(tmp_path: Path) -> None:
    for layers in (FEW, MORE):
        bf16, int8 = 2 * (1 + 3 * layers), (1 + 1 * layers) / 2
        of_7b(layers).file(tmp_path).write_text(json.dumps(_result((bf16, int8), layers=layers)))
    parts = {"linear layers": 60.0, OTHER: 40.0}
    shares = {"bf16": {"a decoding step": parts}, "int8": {"a decoding step": parts | {"linear layers": 10.0}}}
    (tmp_path / "rollouts-shares.json").write_text(json.dumps(shares))
    text = page(tmp_path)
    whole = (1 + 3 * LAYERS_OF_7B) / (1 + LAYERS_OF_7B)
    assert (
        f"| Qwen2.5-7B, 28 layers, **extrapolated** from {FEW} and {MORE} | 85.00 | 29.00 "
        f"| {whole:.2f} ({whole:.2f}-{whole:.2f}) | {whole:.2f} ({whole:.2f}-{whole:.2f}) | 1.5 |  |\n"
    ) in text
    assert f"| Qwen2.5-7B's shapes, {FEW} of 28 layers | 4.00 | 2.00 | 2.00 (2.00-2.00) |" in text and "| 25% |" in text
    assert "| a decoding step | linear layers | 60.0 | 60 % | 10.0 | 20 % |" in text
    assert "| a decoding step | **all** | 100.0 | | 50.0 | 2.00 times |" in text
    assert "| a decoding step | if linear layers cost nothing | | | | 2.50 times |" in text
    assert "SmolLM2-135M" not in text, "it was not measured"


@pytest.mark.parametrize("turns", [[], [(1.0, 1.0)]])
def test_each_pair_of_one_case_goes_with_each_of_the_other(turns: list[tuple[float, float]]) -> None:
    assert len(extrapolated(turns, [(2.0, 2.0)] * 3, layers=(1, 4), whole=28)) == 3 * len(turns)
