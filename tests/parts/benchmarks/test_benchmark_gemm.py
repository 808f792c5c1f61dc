"""The GEMM benchmark: that it multiplies what it says, and that a ratio is one of turns."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from appliance.bench.job import NAMED_SHAPES, Shapes
from appliance.quant.cpu_gemm import has_packed_kernel, kernel_of
from benchmarks import gemm
from benchmarks.gemm import BF16, PACK, measure, table, weights_of

PLAIN = kernel_of(1, 1).name  # that of a shape which the packed one does not take
TINY = Shapes(hidden=64, intermediate=96, heads=4, kv_heads=2, layers=1)


@pytest.fixture(autouse=True)
def bfloat16() -> Iterator[None]:
    """vLLM's kernels answer in the default type."""
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


def test_the_weights_are_those_of_the_layer_as_vllm_fuses_them() -> None:
    """28 heads of 128, 4 for keys and 4 for values."""
    assert weights_of(NAMED_SHAPES["qwen2.5-7b"]) == {
        "qkv_proj": (4608, 3584),
        "o_proj": (3584, 3584),
        "gate_up_proj": (37888, 3584),
        "down_proj": (3584, 18944),
    }


def test_every_kernel_multiplies_by_the_weight() -> None:
    """INT8 rounds to 1/127 of a row's absmax, here about 4 of its standard deviations: an error of 4 / 127 / sqrt(12)
    of a number's size, of weight and of activation, is 0.013 of the product's norm; 0.02 of it are allowed."""
    torch.manual_seed(0)
    weight_NK, x_MK = torch.randn(96, 64), torch.randn(32, 64)
    wanted_MN = x_MK.double() @ weight_NK.double().t()
    packers = gemm._packers(weight_NK)
    assert set(packers) == {BF16, PLAIN} | ({"sgl"} if has_packed_kernel() else set())
    for pack in packers.values():
        assert (pack()(x_MK).double() - wanted_MN).norm() < 0.02 * wanted_MN.norm()


def test_a_ratio_is_the_median_of_those_of_single_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """2, 4, 6 s against 4, 1, 3 s: ratios of 0.5, 4 and 2. The ratio of the medians would be 4 / 3."""
    clock = iter([0, 0, *(0, 2), *(2, 6), *(6, 10), *(10, 11), *(11, 17), *(17, 20)])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    times = gemm._take_turns({BF16: int, "onednn": int}, turns=3)
    assert times == {BF16: [2, 4, 6], "onednn": [4, 1, 3]}
    assert gemm._to_bf16(times) == {BF16: 1, "onednn": 2}


def test_the_table_has_packing_and_each_number_of_tokens_for_each_layer() -> None:
    rows = measure(TINY, tokens=(1, 4), turns=1)
    assert [row.tokens for row in rows] == [PACK, 1, 4] * 4
    assert all(row.faster[BF16] == 1 and row.faster[PLAIN] > 0 for row in rows)
    lines = table(rows).splitlines()
    assert len(lines) == 2 + 12 and "| qkv_proj | 128 x 64 | packing |" in lines[2]
    assert lines[2].endswith("| sgl |" if has_packed_kernel() else f"| {PLAIN} |")
    assert {line.count("|") for line in lines} == {lines[0].count("|")}
