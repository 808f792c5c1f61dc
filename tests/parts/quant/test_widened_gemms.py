"""GEMMs of BF16 and FP16 on a CPU whose oneDNN has none: through float32, or through float64 whatever the batch.

Every CPU is taken for such a one here; torch's own kernels are back after each test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from appliance.quant import cpu_gemm
from appliance.quant.cpu_gemm import exact_linear, widen_gemms

TYPES = (torch.bfloat16, torch.float16)
OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "mm": lambda a, b, c: torch.mm(a[0], b[0]),
    "addmm": lambda a, b, c: torch.addmm(c[0], a[0], b[0], beta=0.5, alpha=2),
    "a linear layer": lambda a, b, c: functional.linear(a, b[0].t().contiguous(), c[0, 0]),
    "bmm": lambda a, b, c: torch.bmm(a, b),
    "baddbmm": lambda a, b, c: torch.baddbmm(c, a, b, beta=0.5, alpha=2),
}


@pytest.fixture
def widened(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cpu_gemm, "widened_types", lambda: frozenset(TYPES))
    cpu_gemm._widening.cache_clear()
    yield
    if cpu_gemm._widening.cache_info().currsize:
        cpu_gemm._widening()._library._destroy()
    cpu_gemm._widening.cache_clear()


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def operands(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return drawn(2, 7, 96, dtype=dtype), drawn(2, 96, 40, dtype=dtype).roll(1), drawn(2, 7, 40, dtype=dtype).roll(2)


@pytest.mark.usefixtures("widened")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_sums_are_of_wider_operands_and_rounded_once(operation: str, dtype: torch.dtype) -> None:
    """The bits of the same product in float32 and in float64; those sums differ from each other, so both are seen."""
    multiply, inputs = OPERATIONS[operation], operands(dtype)
    for exactly, wide in ((False, torch.float32), (True, torch.float64)):
        expected = multiply(*(each.to(wide) for each in inputs)).to(dtype)
        widen_gemms(exactly=exactly)
        found = multiply(*inputs)
        assert found.dtype is dtype and torch.equal(found, expected)


@pytest.mark.usefixtures("widened")
@pytest.mark.parametrize("operation", ["mm", "addmm", "a linear layer", "bmm"])
def test_a_large_weight_is_widened_some_columns_at_a_time(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns do not depend on each other; in float64 their sums round to the same bits."""
    multiply, inputs = OPERATIONS[operation], operands(torch.bfloat16)
    widen_gemms(exactly=True)
    expected = multiply(*inputs)
    widths, kernel = [], cpu_gemm._Widening._by_columns
    monkeypatch.setattr(cpu_gemm, "_WIDENED_AT_ONCE", 96 * 16 + 5)  # 16 columns of 40, of which 8 are the last
    monkeypatch.setattr(
        cpu_gemm._Widening, "_by_columns", lambda *all, **more: widths.append(1) or kernel(*all, **more)
    )
    assert torch.equal(multiply(*inputs), expected)
    assert len(widths) == (operation != "bmm")


@pytest.mark.usefixtures("widened")
def test_float32_keeps_its_kernel() -> None:
    a, b, _ = operands(torch.float32)
    before = torch.mm(a[0], b[0])
    widen_gemms(exactly=True)
    assert torch.equal(torch.mm(a[0], b[0]), before)


@pytest.mark.usefixtures("widened")
def test_an_exact_sum_does_not_depend_on_the_batch() -> None:
    weight_NK, bias_N = drawn(272, 256, dtype=torch.bfloat16), drawn(272, dtype=torch.bfloat16)
    x_MK = drawn(256, 256, dtype=torch.bfloat16).roll(1)
    widen_gemms(exactly=True)
    for bias in (None, bias_N):
        whole = functional.linear(x_MK, weight_NK, bias)
        assert torch.equal(whole, exact_linear(x_MK, weight_NK, bias))
        for rows in (1, 2, 7, 16, 100):
            parts = [functional.linear(part, weight_NK, bias) for part in x_MK.split(rows)]
            assert torch.equal(torch.cat(parts), whole)


@pytest.mark.usefixtures("widened")
def test_gradients_are_those_of_wider_operands() -> None:
    def gradients(dtype: torch.dtype) -> list[Tensor]:
        x, w = (each[0].float().to(dtype).requires_grad_() for each in operands(torch.bfloat16)[:2])
        (x @ w).backward(drawn(7, 40, dtype=torch.bfloat16).to(dtype))
        return [each.grad.bfloat16() for each in (x, w) if each.grad is not None]

    expected = gradients(torch.float32)
    widen_gemms()
    found = gradients(torch.bfloat16)
    assert len(found) == 2 and all(torch.equal(*each) for each in zip(found, expected, strict=True))


def test_a_cpu_with_fast_gemms_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_gemm, "widened_types", frozenset)
    monkeypatch.setattr(cpu_gemm, "_Widening", lambda: pytest.fail("a kernel was replaced"))
    widen_gemms()


def test_which_types_are_widened_is_what_onednn_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    with_amx_fp16, avx512, avx2 = (True, True), (True, False), (False, False)
    for (bf16, fp16), expected in ((with_amx_fp16, set()), (avx512, {torch.float16}), (avx2, set(TYPES))):
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda known=bf16: known)
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda known=fp16: known)
        assert cpu_gemm.widened_types.__wrapped__() == expected
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert cpu_gemm.widened_types.__wrapped__() == set()
