"""vLLM's own online FP8 quantisers, as far as they run on a CPU, give the codec's result bit for bit."""

from __future__ import annotations

import pytest
import torch
from test_codec import DTYPES, random_weight

from appliance.quant.codec import quantise, weight_absmax
from appliance.terms.schemes import Scheme

pytestmark = pytest.mark.engine

SHAPES = ((64, 100), (128, 256), (131, 300))


def weights(shape: tuple[int, int], dtype: torch.dtype) -> list[torch.Tensor]:
    plain_NK, holed_NK = random_weight(shape, dtype=dtype), random_weight(shape, dtype=dtype, seed=2)
    holed_NK[::3] = 0
    return [plain_NK, holed_NK, plain_NK * 1e-6, torch.zeros_like(plain_NK)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_per_channel(shape: tuple[int, int], dtype: torch.dtype) -> None:
    from vllm.model_executor.layers.quantization.online.fp8 import _fp8_channel_scale, _fp8_quant_per_channel

    for weight_NK in weights(shape, dtype):
        scale_N1 = _fp8_channel_scale(weight_absmax(weight_NK, scheme=Scheme.FP8_CHANNEL))
        quantised = quantise(weight_NK, scheme=Scheme.FP8_CHANNEL)
        assert torch.equal(quantised.scale, scale_N1)
        codes_NK = _fp8_quant_per_channel(weight_NK, scale_N1)
        assert torch.equal(quantised.codes_NK.view(torch.uint8), codes_NK.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_per_block(shape: tuple[int, int], dtype: torch.dtype) -> None:
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    for weight_NK in weights(shape, dtype):
        with torch.compiler.set_stance("force_eager"):
            codes_NK, scale = per_block_cast_to_fp8(weight_NK, block_size=[128, 128], use_ue8m0=False)
        found = quantise(weight_NK, scheme=Scheme.FP8_BLOCK)
        assert torch.equal(found.scale, scale)
        assert torch.equal(found.codes_NK.view(torch.uint8), codes_NK.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_scale_per_tensor(dtype: torch.dtype) -> None:
    """Its codes come from a CUDA kernel, which is not here."""
    from vllm.model_executor.layers.quantization.online.fp8 import _fp8_scale

    for weight_NK in weights((131, 300), dtype):
        absmax = weight_absmax(weight_NK, scheme=Scheme.FP8)
        assert torch.equal(quantise(weight_NK, scheme=Scheme.FP8).scale, _fp8_scale(absmax))
