"""Online W8A8 for vLLM's linear layers: BF16 weights come in, INT8 codes and scales per output channel stay.

Weights are quantised when a layer has been loaded and again at every sync; activations are quantised per token by
vLLM's own kernel. vLLM 0.28 has online FP8 methods for linear layers and no INT8 one.

On a CPU two kernels of vLLM's multiply. `sgl`: its packed kernel of AVX-512 VNNI. On a host without AMX it packs a
weight several times faster than oneDNN (whose reorder with compensation has no fast version there) and multiplies as
fast, as long as 32 tokens and 32 rows of codes fit the core's cache together; beyond that it reads everything again and
again (docs/results/gemm.md). vLLM itself takes it on hosts with AMX only. `onednn`: everything else, and every host
with AMX, where oneDNN has the matrix unit.

Both quantise activations inside and make s = a / 127; oneDNN's path multiplies by 1 / s and gives the codec's codes;
sgl's multiplies by 127 / a, rounded once instead of twice, so that a code may differ by one where x / s lies within
127 * 2^-23 of a half (x = a / 2 does), and takes a below 1e-7 as 1e-7. Either is within the codec's bound. For a probe
of integers with a = 127 both factors are exactly 1.

Legend: M tokens, N output channels, K input channels of this rank's part of the layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from vllm import _custom_ops as ops
from vllm.model_executor.kernels.linear import init_int8_linear_kernel
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import CpuArchEnum, current_platform

from appliance.engine.kernel_proof import Int8Proof, quantise_rows
from appliance.engine.quantised import OnlineLinearMethod
from appliance.errors import NumericsError
from appliance.patch import Patch
from appliance.quant.codec import QuantisedWeight, all_finite
from appliance.quant.codec_int8 import int8_rows, quantise_int8
from appliance.terms.schemes import Scheme

LONGEST_PACKED_ROW = 8192
_TILE = 32  # rows and columns: what sgl's kernel takes without a rest
_ONEDNN_CACHED_PRIMITIVES = 32  # as vLLM's kernel has it


class Int8LinearMethod(OnlineLinearMethod):
    """One per layer. gemm: on a CPU, what multiplies."""

    proof = Int8Proof

    def __init__(self, scheme: Scheme) -> None:
        super().__init__(scheme)
        self.kernel = init_int8_linear_kernel(
            is_channelwise=True,
            is_static_input_scheme=False,
            input_symmetric=True,
            module_name=type(self).__name__,
        )
        self.gemm: OneDnnGemm | SglGemm | None = None

    def create_weights(self, layer: Module, *args: Any, **kwargs: Any) -> None:
        super().create_weights(layer, *args, **kwargs)
        for name in ("input_scale", "input_zero_point", "azp_adj"):  # the kernel looks for them
            layer.register_parameter(name, None)

    def quantise(self, weight_NK: Tensor, *, absmax: Tensor | None) -> QuantisedWeight:
        return quantise_for_kernel(weight_NK, absmax=absmax)

    def install(self, layer: Module, quantised: QuantisedWeight) -> None:
        """Hand codes and scales to vLLM's kernel.

        On a CPU the packed weight is this object's and not the layer's: a layerwise reload copies what a layer holds
        into the tensors that it held before, and the pass would cost as much as packing.
        """
        replace_parameter(layer, "weight_scale", quantised.scale)
        if isinstance(self.kernel, CPUInt8ScaledMMLinearKernel):
            layer.weight = None
            packed = SglGemm if packs_quickly(*quantised.codes_NK.shape) else OneDnnGemm
            self.gemm = packed(quantised.codes_NK, scale_N1=quantised.scale)
        else:
            replace_parameter(layer, "weight", quantised.codes_NK)
            self.kernel.process_weights_after_loading(layer)

    def release(self) -> None:
        self.gemm = None

    def apply(self, layer: Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.gemm is None:
            return self.kernel.apply_weights(layer, x, bias)
        return self.gemm(x.reshape(-1, x.shape[-1]), bias).reshape(*x.shape[:-1], -1)

    def held_scale(self, layer: Module) -> Tensor | None:
        return super().held_scale(layer) if self.gemm is None else self.gemm.scale_N1

    @property
    def kernel_name(self) -> str:
        """The kernel that multiplies, for the attestation (`...[sgl]` or `...[onednn]` on a CPU)."""
        suffix = "" if self.gemm is None else f"[{self.gemm.name}]"
        return type(self.kernel).__name__ + suffix


def quantise_for_kernel(weight_NK: Tensor, *, absmax: Tensor | None = None) -> QuantisedWeight:
    """The codec's result bit for bit, by vLLM's row quantiser on a CPU, by a Triton kernel on a GPU.

    weight_NK: [N, K].  absmax: [N, 1] float32, of the whole rows where these are a part.
    Raises NumericsError when a value is not finite (vLLM's quantiser would not notice).
    """
    if not current_platform.is_cpu():
        from appliance.quant.triton_int8 import WIDEST_ROW, quantise_int8_triton  # Triton has no build for a CPU

        quantise = quantise_int8_triton if weight_NK.shape[1] <= WIDEST_ROW else quantise_int8
        return quantise(weight_NK.contiguous(), absmax=absmax)
    if not all_finite(weight_NK):
        raise NumericsError("a weight to quantise has a value that is not finite")
    # The quantiser takes no scales: one more column that has the absmax, which is a value of the whole row.
    whole_NK = weight_NK if absmax is None else torch.cat([weight_NK, absmax.to(weight_NK.dtype)], dim=1)
    quantised = quantise_rows(whole_NK, into_NK=whole_NK.new_empty(whole_NK.shape, dtype=torch.int8))
    return int8_rows(quantised.codes_NK[:, : weight_NK.shape[1]].contiguous(), scale_N1=quantised.scale)


class OneDnnGemm:
    """A weight, packed. scale_N1: the very memory that is multiplied with.

    The handle keeps the address of the scale tensor, and nothing else does: held here for as long as it lives.
    """

    name = "onednn"

    def __init__(self, codes_NK: Tensor, *, scale_N1: Tensor) -> None:
        """As `process_weights_for_onednn` of vLLM's kernel, without the sum of each row of codes. Only asymmetric
        activations need that; it makes a float32 copy of the codes and takes as long as all the rest of a sync's work
        on a large layer. Remove when: vLLM computes `azp_adj` for asymmetric activations only."""
        self.scale_N1 = scale_N1
        self._handle = ops.create_onednn_scaled_mm(
            codes_NK.t(), scale_N1, torch.get_default_dtype(), True, False, _ONEDNN_CACHED_PRIMITIVES
        )

    def __call__(self, x_MK: Tensor, bias_N: Tensor | None) -> Tensor:
        """[M, N] in the type of `x_MK`: quantised per token, multiplied, plus the bias in float32, rounded once."""
        codes_MK, scale_M1, _ = ops.onednn_scaled_int8_quant(x_MK, None, None, True)
        y_MN = torch.empty((len(x_MK), self._handle.n), dtype=x_MK.dtype)
        ops.onednn_scaled_mm(self._handle, codes_MK, y_MN, scale_M1, None, None, bias_N)
        return y_MN


class SglGemm:
    """As OneDnnGemm. Codes and scales are handed over at every call: no address outlives its memory."""

    name = "sgl"

    def __init__(self, codes_NK: Tensor, *, scale_N1: Tensor) -> None:
        self.scale_N1 = scale_N1
        self._packed = torch.ops._C.convert_weight_packed(codes_NK)

    def __call__(self, x_MK: Tensor, bias_N: Tensor | None) -> Tensor:
        bias_N = None if bias_N is None else bias_N.float()
        return torch.ops._C.int8_scaled_mm_with_quant(x_MK, self._packed, self.scale_N1, bias_N, x_MK.dtype, True)


def packs_quickly(rows: int, columns: int) -> bool:
    """Whether a weight of this shape gets sgl's kernel on this host."""
    return rows % _TILE == 0 and columns % _TILE == 0 and columns <= LONGEST_PACKED_ROW and has_packed_kernel()


@functools.cache
def has_packed_kernel() -> bool:
    """The kernel is compiled for AVX-512 with VNNI and BF16 and checks nothing. AMX is asked of the processor itself:
    `_is_amx_tile_supported` is patched, below."""
    return (
        current_platform.get_cpu_architecture() == CpuArchEnum.X86
        and hasattr(torch.ops._C, "convert_weight_packed")
        and torch.cpu._is_vnni_supported()
        and torch.cpu._is_avx512_bf16_supported()
        and not torch.cpu.get_capabilities().get("amx_tile", False)
    )


NO_AMX_TILES = Patch(
    name="cpu-no-amx-tiles",
    target="torch.cpu:_is_amx_tile_supported",
    why=(
        "on a CPU with AMX, vLLM mixes kernels that each leave the tile registers in a state of their own (packed "
        "GEMMs through brgemm, attention): seen here as an illegal instruction in cpu_attention_with_kv_cache in some "
        "runs and not in others. vLLM asks this function; oneDNN, which restores the tiles, decides for itself and "
        "keeps using AMX"
    ),
    upstream="https://github.com/sgl-project/sglang/issues/28992",
    distribution="torch",
    version="2.13.0+cpu",
    source_sha256="cd8eeae518a7a395caa813bf636111bd3cc0748680abd0f0c135c42dabd8707b",
    remove_when="a vLLM release passes a day of generation with packed GEMMs and attention on an AMX host",
)


def no_amx_tiles(original: Callable[[], bool]) -> Callable[[], bool]:
    def _is_amx_tile_supported() -> bool:
        return False

    return _is_amx_tile_supported
