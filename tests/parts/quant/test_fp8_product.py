"""Emulated FP8 products: exact sums, so that a token's do not depend on the others; and how far rounding moves them."""

from __future__ import annotations

import pytest
import torch
from fp8_bounds import CASES, U, odd, off
from torch import Tensor

from appliance.quant.codec import QuantisedWeight, quantise
from appliance.quant.codec_fp8 import quantise_fp8_tokens, spread_scale, widened_fp8
from appliance.quant.cpu_gemm import fp8_product, multiply_fp8
from appliance.terms.schemes import Scheme

FP8 = [each for each in Scheme if each.spec.codec == "fp8"]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def bf16(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).to(torch.bfloat16)


@pytest.mark.parametrize("scheme", FP8)
@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (200, 352), (640, 896)])
def test_a_token_is_multiplied_alike_alone_and_in_any_batch(scheme: Scheme, rows: int, columns: int) -> None:
    """Bit for bit. In float32 the largest is not."""
    weight, x_MK, bias_N = quantise(bf16(rows, columns), scheme=scheme), odd(bf16(96, columns)), bf16(rows)
    alone_MN = torch.cat([multiply_fp8(token_1K, weight, bias_N) for token_1K in x_MK.split(1)])
    threads = torch.get_num_threads()
    try:
        for batch, many in ((96, 1), (33, 1), (17, 2)):
            torch.set_num_threads(many)
            found = [multiply_fp8(part_MK, weight, bias_N) for part_MK in x_MK.split(batch)]
            assert torch.equal(torch.cat(found), alone_MN)
    finally:
        torch.set_num_threads(threads)


def test_sums_are_exact_up_to_the_longest_row_of_the_largest_codes() -> None:
    """Integers of 2^-9, whose sum stays below 2^53: the largest codes with one of the smallest among them."""
    codes_2K = torch.full((2, 1 << 17), 448.0)
    codes_2K[1, ::2], codes_2K[0, 77] = -448.0, 2.0**-9
    codes_2K = codes_2K.to(torch.float8_e4m3fn)
    one = torch.ones(1, 1)
    operand = QuantisedWeight(codes_2K, scale=one, block=(2, 1 << 17), scheme=Scheme.FP8)
    steps_2K = (widened_fp8(codes_2K).double() * 2**9).long()
    exact = [[int((a * b).sum()) for b in steps_2K] for a in steps_2K]
    assert max(abs(each) for row in exact for each in row) > 2**52
    assert torch.equal(fp8_product(operand, operand), (torch.tensor(exact).double() * 2.0**-18).float())


def dequantised(quantised: QuantisedWeight) -> Tensor:
    """float64, exact."""
    codes_NK = quantised.codes_NK
    return widened_fp8(codes_NK).double() * spread_scale(
        quantised.scale.double(), block=quantised.block, shape=tuple(codes_NK.shape)
    )


@pytest.mark.parametrize("scheme", FP8)
def test_product_of_the_operands_that_the_codec_has(scheme: Scheme) -> None:
    """Rounded three times: to float32, with the bias, to BF16."""
    weight, x_MK, bias_N = quantise(bf16(200, 300, scale=0.05), scheme=scheme), odd(bf16(50, 300)), bf16(200)
    x_dequantised = dequantised(quantise_fp8_tokens(x_MK, scheme=scheme))
    product = x_dequantised @ dequantised(weight).t()
    wanted = product + bias_N.double()
    bound = U * wanted.abs() + 2.0**-23 * (product.abs() + wanted.abs())
    assert bool(((multiply_fp8(x_MK, weight, bias_N).double() - wanted).abs() <= bound).all())


@pytest.mark.parametrize("tokens", CASES)
def test_blocks_are_as_near_to_the_exact_product_as_their_codes(tokens: int) -> None:
    """|Y - X W| <= e(X) |W| + |X| e(W) + e(X) e(W), and one rounding."""
    weight_NK, x_MK = odd(bf16(200, 300, scale=0.05)), odd(bf16(tokens, 300))
    product = multiply_fp8(x_MK, quantise(weight_NK, scheme=Scheme.FP8_BLOCK), None).double()
    x, w, of_x, of_w = x_MK.double(), weight_NK.double(), off(x_MK, rows=1), off(weight_NK, rows=128, floor=1e-4)
    wanted = x @ w.t()
    bound = of_x @ w.abs().t() + (x.abs() + of_x) @ of_w.t()
    share = ((product - wanted).abs() / (bound * (1 + U) + U * wanted.abs() + 1e-30)).max()
    assert 0.01 < share <= 1
    assert not product[~x.any(dim=1)].any()


def test_a_token_that_is_not_finite_stays_so_and_alone() -> None:
    x_MK = bf16(5, 256)
    weight = quantise(bf16(64, 256), scheme=Scheme.FP8_BLOCK)
    clean_MN = multiply_fp8(x_MK, weight, None)
    x_MK[1, 200], x_MK[3, 3] = torch.nan, torch.inf
    found_MN = multiply_fp8(x_MK, weight, None)
    assert not torch.isfinite(found_MN[[1, 3]]).any()
    assert torch.equal(found_MN[[0, 2, 4]], clean_MN[[0, 2, 4]])
