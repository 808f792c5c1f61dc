"""What benchmarks/zero_point.py compares: its asymmetric GEMM against float64."""

from __future__ import annotations

import pytest
import torch

from appliance.quant.codec_int8 import quantise_int8
from appliance.quant.cpu_gemm import load_kernels, saturates
from benchmarks import zero_point


@pytest.mark.parametrize("low", [-255, -128, -31, 0])
def test_the_asymmetric_gemm_answers_as_integers_do(low: int) -> None:
    """Of integers over a range of 255 the scale is 1 and the codes are they, less the zero point, whatever that is.

    With u = 2^-24: the sum of codes, the correction's sum, their scales, their products, the difference and the bias
    are rounded once each, below 8 u of the two magnitudes; then BF16 rounds. The bias leaves a small rest, so that a
    forgotten zero point or a code that is off by one is far beyond that."""
    load_kernels()
    if saturates():
        pytest.skip("without VNNI oneDNN's sums are wrong, and the engine does not take it")
    generator = torch.Generator().manual_seed(low + 300)
    quantised = quantise_int8(torch.randn(96, 352, generator=generator).bfloat16() + 0.5)
    probe_MK = torch.randint(low, low + 256, (5, 352), generator=generator)
    probe_MK[:, 0], probe_MK[:, 1] = low, low + 255
    gemm = zero_point.AsymmetricGemm(quantised.codes_NK, scale_N1=quantised.scale)
    scale_1N = quantised.scale.double().t()
    exact_MN = (probe_MK @ quantised.codes_NK.long().t()).double() * scale_1N
    zero = -128 - low
    correction_1N = abs(zero) * quantised.codes_NK.long().sum(1).abs().double() * scale_1N
    bias_N = -exact_MN[1].bfloat16()
    for bias in (None, bias_N):
        wanted_MN = exact_MN if bias is None else exact_MN + bias.double()
        bound_MN = 8 * 2.0**-24 * (exact_MN.abs() + 2 * correction_1N) + 2.0**-8 * wanted_MN.abs()
        answer_MN = gemm(probe_MK.bfloat16(), bias).double()
        assert bool(((answer_MN - wanted_MN).abs() <= bound_MN).all())


def test_an_asymmetric_step_is_a_255th_of_the_range() -> None:
    """The product with an identity shows the values that were multiplied: within half a step, and BF16's rounding."""
    load_kernels()
    torch.manual_seed(0)
    x_MK = (torch.rand(40, 64) - 0.1).bfloat16()
    quantised = quantise_int8(torch.eye(64).bfloat16())
    gemm = zero_point.AsymmetricGemm(quantised.codes_NK, scale_N1=quantised.scale)
    step_M1 = (x_MK.float().amax(1, keepdim=True) - x_MK.float().amin(1, keepdim=True)) / 255
    shown_MK = gemm(x_MK, None).float()
    assert bool(((shown_MK - x_MK.float()).abs() <= 0.501 * step_M1 + 2.0**-8 * shown_MK.abs() + 1e-6).all())


def test_a_token_of_equal_channels_becomes_zero() -> None:
    """What vLLM's quantiser does with it, and why docs/results/zero-point.md wants 0 in every range. Remove when: a
    release of vLLM has 0 in the range."""
    load_kernels()
    quantised = quantise_int8(torch.eye(64).bfloat16())
    gemm = zero_point.AsymmetricGemm(quantised.codes_NK, scale_N1=quantised.scale)
    assert torch.equal(gemm(torch.full((1, 64), 3.0).bfloat16(), None), torch.zeros(1, 64).bfloat16())
