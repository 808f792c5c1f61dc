"""The INT4 codec against plain numpy and float64, and what multiplies by its codes: vLLM's kernel, in vLLM's layout.

Legend: M tokens, N output channels (rows), K input channels, G groups of a row.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Module

from appliance.errors import NumericsError
from appliance.quant.codec_int4 import dequantise_int4, int4_tokens, quantise_int4
from appliance.quant.int4_gemm import Int4Gemm, WideInt4Gemm, has_int4_kernel, pack_int4, packed_int4, unpack_int4
from appliance.quant.numba_int4 import quantise_int4_numba
from appliance.terms.schemes import group_size

SHAPES = ((32, 32), (64, 96), (33, 256), (960, 576))  # groups of 32, 32, 128 and 64; the last is SmolLM2-135M's qkv
GEMMS = (Int4Gemm, WideInt4Gemm)


def random_weight(shape: tuple[int, int], *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Groups of very different sizes: a scale must not reach another group."""
    generator = torch.Generator().manual_seed(sum(shape))
    sizes = 2.0 ** torch.randint(-8, 8, (shape[0], shape[1] // 32), generator=generator)
    return (torch.randn(shape, generator=generator) * sizes.repeat_interleave(32, dim=1)).to(dtype)


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Round float32 to BF16, to nearest and ties to even, by its bits; as float32."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_codes_scales_and_values_equal_the_formulas(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight_NK = random_weight(shape, dtype=dtype)
    group = group_size(shape[1])
    w_NGC = weight_NK.float().numpy().reshape(shape[0], -1, group)
    scale_NG1 = to_bf16(np.abs(w_NGC).max(axis=2, keepdims=True) / np.float32(7.5))
    codes_NGC = np.clip(np.rint(w_NGC / scale_NG1), -8, 7)
    quantised = quantise_int4(weight_NK)
    assert (quantised.codes_NK.dtype, quantised.block) == (torch.int8, (1, group))
    assert np.array_equal(quantised.scale.numpy(), scale_NG1[:, :, 0])
    assert np.array_equal(quantised.codes_NK.numpy(), codes_NGC.reshape(shape))
    values_NK = to_bf16(codes_NGC.astype(np.float32) * scale_NG1).reshape(shape)
    assert np.array_equal(dequantise_int4(quantised).numpy(), values_NK)


@pytest.mark.parametrize("shape", SHAPES)
def test_compiled_code_is_the_codec(shape: tuple[int, int]) -> None:
    """With ties, groups of zeros, the largest BF16 numbers and those whose scale rounds to 0."""
    weight_NK = random_weight(shape)
    weight_NK[2] = 0
    weight_NK[3] = torch.arange(shape[1]) % 31 / 2 - 7.5  # a scale of 1: each code, and each tie
    weight_NK[4, 0], weight_NK[5, :3] = torch.finfo(torch.bfloat16).max, 2.0**-133
    compiled, codec = quantise_int4_numba(weight_NK), quantise_int4(weight_NK)
    assert torch.equal(compiled.codes_NK, codec.codes_NK)
    assert torch.equal(compiled.scale, codec.scale)
    strided = quantise_int4_numba(weight_NK.repeat(1, 2)[:, : shape[1]])
    assert torch.equal(strided.codes_NK, codec.codes_NK)
    weight_NK[6, 7] = float("inf")
    with pytest.raises(NumericsError, match="a weight to quantise has a value that is not finite"):
        quantise_int4_numba(weight_NK)


@pytest.mark.parametrize("shape", SHAPES)
def test_error_is_within_nine_sixteenths_of_a_step(shape: tuple[int, int]) -> None:
    """The bound of the codec's docstring; and rounding to nearest needs half a step, so a coarser codec would show."""
    weight_NK = random_weight(shape)
    quantised = quantise_int4(weight_NK)
    steps_NK = quantised.scale.double().repeat_interleave(quantised.block[1], dim=1)
    error_NK = (weight_NK.double() - dequantise_int4(quantised).double()).abs() / steps_NK
    assert 0.45 < float(error_NK.max()) <= 9 / 16
    assert set(quantised.codes_NK.unique().tolist()) == set(range(-8, 8))


def test_a_group_is_the_largest_that_divides_the_row() -> None:
    assert [group_size(length) for length in (4096, 576, 192, 96, 352, 32, 48, 100)] == [128, 64, 64, 32, 32, 32, 0, 0]


def test_groups_of_zeros_and_of_denormals_have_codes_zero() -> None:
    weight_NK = torch.zeros(2, 64)
    weight_NK[0, 32:] = 2.0**-149
    weight_NK[1, 0] = -1.0
    quantised = quantise_int4(weight_NK)
    assert quantised.scale.tolist() == [[0.0], [float(torch.tensor(1 / 7.5).bfloat16())]]
    assert quantised.codes_NK.nonzero().tolist() == [[1, 0]] and quantised.codes_NK[1, 0] == -7


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    weight_NK = random_weight((32, 64))
    weight_NK[5, 40] = bad
    with pytest.raises(NumericsError, match="a weight to quantise has a value that is not finite"):
        quantise_int4(weight_NK)


def test_a_row_without_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="`int4` has no group that divides 48 input channels"):
        quantise_int4(torch.zeros(32, 48))


def test_activations_stay_as_they_are() -> None:
    tokens_MK = random_weight((3, 96))
    assert torch.equal(dequantise_int4(int4_tokens(tokens_MK)), tokens_MK.float())
    tokens_MK[1, 5] = float("inf")
    with pytest.raises(NumericsError, match="an activation to quantise has a value that is not finite"):
        int4_tokens(tokens_MK)


def test_packing_is_undone_code_by_code() -> None:
    codes_NK = torch.randint(-8, 8, (48, 64), dtype=torch.int8, generator=torch.Generator().manual_seed(1))
    packed = pack_int4(codes_NK)
    assert (packed.dtype, packed.nbytes) == (torch.int32, codes_NK.numel() // 2)
    assert torch.equal(unpack_int4(packed), codes_NK)


@pytest.mark.parametrize("shape", [(32, 32), (96, 256)])
def test_packing_is_what_vllm_makes_of_a_checkpoint_in_int4(shape: tuple[int, int]) -> None:
    """Of GPTQ's layout, by the class that vLLM's CPU backend takes for it."""
    from vllm.model_executor.kernels.linear import CPUWNA16LinearKernel, MPLinearLayerConfig
    from vllm.model_executor.layers.quantization.utils.quant_utils import pack_quantized_values_into_int32
    from vllm.scalar_type import scalar_types

    quantised, (rows, length) = quantise_int4(random_weight(shape)), shape
    config = MPLinearLayerConfig(
        full_weight_shape=(length, rows),
        partition_weight_shape=(length, rows),
        weight_type=scalar_types.uint4b8,
        act_type=torch.bfloat16,
        group_size=quantised.block[1],
        zero_points=False,
    )
    layer, unsigned_KN = Module(), (quantised.codes_NK + 8).t().int()
    layer.q = torch.nn.Parameter(pack_quantized_values_into_int32(unsigned_KN, scalar_types.uint4b8, 0), False)
    layer.q.input_dim = layer.q.packed_dim = 0
    layer.s = torch.nn.Parameter(quantised.scale.t().contiguous().bfloat16(), False)
    layer.s.output_dim = 1
    assert CPUWNA16LinearKernel.can_implement(config) == (True, None)
    CPUWNA16LinearKernel(config, w_q_param_name="q", w_s_param_name="s").process_weights_after_loading(layer)
    gemm = packed_int4(quantised)
    assert torch.equal(layer.q.data, gemm.packed)
    assert torch.equal(layer.s.data, gemm.scale_GN)


def require_kernel(kind: type[Int4Gemm]) -> None:
    if kind is Int4Gemm and not has_int4_kernel():
        pytest.skip("vLLM's INT4 kernel needs AVX-512")


@pytest.mark.parametrize("kind", GEMMS)
@pytest.mark.parametrize("shape", [(32, 32), (64, 96), (96, 256), (960, 576), (576, 1536)])
def test_products_are_those_of_the_codecs_values(shape: tuple[int, int], kind: type[Int4Gemm]) -> None:
    """Against float64. Products of BF16 numbers are exact in float32; with the bias K sums are rounded to 2^-24 of the
    terms' absolute sum each, in any order, and the result is rounded to BF16 once, 2^-8 of it."""
    require_kernel(kind)
    weight_NK = random_weight(shape)
    quantised, (rows, length) = quantise_int4(weight_NK), shape
    gemm = kind(quantised.codes_NK, scale_NG=quantised.scale)
    values_NK = dequantise_int4(quantised).double()
    generator = torch.Generator().manual_seed(3)
    bias_N = torch.randn(rows, generator=generator).bfloat16()
    for tokens in (1, 2, 9):
        x_MK = torch.randn(tokens, length, generator=generator).bfloat16()
        for bias in (None, bias_N):
            added_N = torch.zeros(rows) if bias is None else bias
            wanted_MN = x_MK.double() @ values_NK.t() + added_N.double()
            terms_MN = x_MK.double().abs() @ values_NK.abs().t() + added_N.double().abs()
            bound_MN = (length + 1) * 2.0**-24 * terms_MN + 2.0**-8 * wanted_MN.abs()
            answer_MN = gemm(x_MK, bias)
            assert answer_MN.dtype is torch.bfloat16
            assert bool(((answer_MN.double() - wanted_MN).abs() <= bound_MN).all())
    exact_MN = x_MK.double() @ weight_NK.double().t() + added_N.double()
    assert bool(((exact_MN - wanted_MN).abs() > bound_MN).any())  # what is not quantised would not pass


def test_a_tokens_product_depends_on_no_other_token() -> None:
    """Bit for bit, in batches of all sizes up to more than two of the kernel's tiles of eight tokens."""
    require_kernel(Int4Gemm)
    quantised = quantise_int4(random_weight((96, 256)))
    gemm = Int4Gemm(quantised.codes_NK, scale_NG=quantised.scale)
    x_MK = torch.randn(20, 256, generator=torch.Generator().manual_seed(4)).bfloat16()
    whole_MN = gemm(x_MK, None)
    for tokens in range(1, 20):
        assert torch.equal(gemm(x_MK[:tokens], None), whole_MN[:tokens])
        assert torch.equal(gemm(x_MK[tokens:], None), whole_MN[tokens:])
