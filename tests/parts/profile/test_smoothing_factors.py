"""Smoothing's factors: the rule, and those that are found from it, held against the error written out in float64.

What is held to float64 rounds magnitudes and their quotients by powers of two (exact) to float32 once, which is exact
for BF16; sums are float64: 1e-12.

Legend: M tokens, N output and K input channels.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from appliance.quant import smoothing_factors
from appliance.quant.codec import dequantise
from appliance.quant.codec_int8 import quantise_int8
from appliance.quant.smoothing_factors import _Error, by_rule, refine

M, N, K = 40, 24, 48


def layer(*, tokens: int = M, rows: int = N) -> tuple[Tensor, Tensor]:
    """(x, weight) BF16; channels are large in all tokens, in one token alone, or in one row of the weight alone."""
    generator = torch.Generator().manual_seed(5)
    x_MK = torch.randn(tokens, K, generator=generator) * torch.exp2(torch.randn(K, generator=generator))
    x_MK[:, 3] *= 40
    x_MK[0, 5::4] *= 30
    weight_NK = torch.randn(rows, K, generator=generator)
    weight_NK[0, 6::4] *= 30
    return x_MK.bfloat16(), weight_NK.bfloat16()


def rule(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    return by_rule(x_MK.abs().amax(0).float(), weight_K=weight_NK.abs().amax(0).float(), strength=0.5)


def expected(x_MK: Tensor, weight_NK: Tensor, scale_K: Tensor) -> float:
    """E of the module's docstring, term by term."""
    x, w, f = x_MK.double(), weight_NK.double(), scale_K.double()
    a_M, b_N = (x.abs() / f).amax(dim=1), (w.abs() * f).amax(dim=1)
    return float((a_M**2).sum() * (f**2 * (w**2).sum(0)).sum() + (b_N**2).sum() * ((x**2).sum(0) / f**2).sum())


def measured(x_MK: Tensor, weight_NK: Tensor, scale_K: Tensor) -> float:
    """Squared error of the codec's product, of its own squares."""
    exact = x_MK.double() @ weight_NK.double().t()
    x, w = (x_MK / scale_K).bfloat16(), (weight_NK * scale_K).bfloat16()
    product = dequantise(quantise_int8(x)).double() @ dequantise(quantise_int8(w)).double().t()
    return float((product - exact).square().sum() / exact.square().sum())


def test_the_error_is_that_of_the_formula_and_so_is_each_change() -> None:
    x_MK, weight_NK = layer()
    scale_K = rule(x_MK, weight_NK)
    error, log_K = _Error.between(x_MK, weight_NK=weight_NK), scale_K.double().log2()
    assert error.total(log_K) == pytest.approx(expected(x_MK, weight_NK, scale_K), rel=1e-12)
    for exponent in (1, -1):
        totals_K = error.totals(log_K, by=exponent)
        for k in range(K):
            changed_K = scale_K.clone()
            changed_K[k] *= 2.0**exponent
            assert float(totals_K[k]) == pytest.approx(expected(x_MK, weight_NK, changed_K), rel=1e-12), (k, exponent)


def test_some_tokens_and_rows_stand_for_all() -> None:
    """Every row twice has the sums of twice as many; 512 are judged by 256."""
    x_MK, weight_NK = layer(tokens=256, rows=256)
    twice = (x_MK.repeat_interleave(2, dim=0), weight_NK.repeat_interleave(2, dim=0))
    scale_K = rule(x_MK, weight_NK)
    once, both = (_Error.between(x, weight_NK=w) for x, w in ((x_MK, weight_NK), twice))
    log_K = scale_K.double().log2()
    assert both.total(log_K) == pytest.approx(4 * once.total(log_K), rel=1e-12)
    refined = [refine(scale_K, x_MK=x, weight_NK=w) for x, w in ((x_MK, weight_NK), twice)]
    assert torch.equal(*refined)


def test_refined_factors_lower_the_error_that_is_measured_and_no_single_step_lowers_it_further() -> None:
    x_MK, weight_NK = layer()
    scale_K = rule(x_MK, weight_NK)
    made_K = refine(scale_K, x_MK=x_MK, weight_NK=weight_NK)
    assert made_K.dtype is torch.float32 and bool((torch.frexp(made_K).mantissa == 0.5).all())
    assert expected(x_MK, weight_NK, made_K) < 0.8 * expected(x_MK, weight_NK, scale_K)
    assert measured(x_MK, weight_NK, made_K) < 0.85 * measured(x_MK, weight_NK, scale_K)
    error, log_K = _Error.between(x_MK, weight_NK=weight_NK), made_K.double().log2()
    near_K = (log_K - scale_K.double().log2()).abs() < smoothing_factors._REACH
    least = min(float(error.totals(log_K, by=by)[near_K].min()) for by in (1, -1))
    assert least >= error.total(log_K) * (1 - 2 * smoothing_factors._LEAST_GAIN)


def test_no_factor_goes_far_from_the_rule_and_a_channel_without_a_range_stays() -> None:
    x_MK, weight_NK = layer()
    x_MK[:, 7], weight_NK[:, 8] = 0, 0
    start_K = rule(x_MK, weight_NK)
    start_K[3] *= 2.0**9  # where E would have it come back all the way
    made_K = refine(start_K, x_MK=x_MK, weight_NK=weight_NK)
    moved_K = (made_K / start_K).log2().abs()
    assert float(moved_K.max()) == smoothing_factors._REACH
    assert (made_K[7], made_K[8]) == (start_K[7], start_K[8]) == (1, 1)


def test_scales_follow_the_formula_to_the_nearest_power_of_two() -> None:
    generator = torch.Generator().manual_seed(3)
    a_K, w_K = torch.rand(50, generator=generator) + 0.1, torch.rand(50, generator=generator) + 0.1
    a_K[7], w_K[8] = 0.0, 0.0
    alive = [k for k in range(50) if k not in (7, 8)]
    exact = a_K.double() ** 0.3 / w_K.double() ** 0.7
    centred = exact / exact[alive].median()
    scale_K = by_rule(a_K, weight_K=w_K, strength=0.3)
    assert (scale_K[7], scale_K[8]) == (1.0, 1.0)
    ratio = scale_K.double()[alive] / centred[alive]
    assert float(ratio.log2().abs().max()) <= 0.5 + 1e-9
    assert len(set(scale_K.tolist())) > 2
