"""FP8 for vLLM's linear layers: by vLLM's own online methods, which a GPU runs, and emulated, for tests and numerics.

vLLM's `fp8` and `fp8-channel` have the codec's numbers. `fp8-block` has them up to rounding: its quantiser is compiled,
and a compiled division need not be rounded as IEEE has it. Where its kernel is DeepGEMM, vLLM would make the scales
powers of two and quantise the codes once more: the codec has no such numbers, and a plan sees to it that vLLM does not
(terms/environment.py). Per tensor and per channel they ask the other ranks for the absmax of a weight that is cut; per
block they do not, and refuse cut blocks.

Emulated: quantise-dequantise of weights and activations by the codec, never used unless a run asks for it. Codes and
scales are held as a kernel would hold them, so a sync and its proof are the real ones; the product (quant/cpu_gemm.py)
is slow, and a token's does not depend on the others.

Legend: M tokens, N output channels, K input channels of this rank's part of the layer.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Module
from vllm import envs
from vllm.model_executor.kernels.linear.scaled_mm import cutlass, deep_gemm, flashinfer, pytorch, triton
from vllm.model_executor.layers.quantization.online.fp8 import (
    Fp8PerBlockOnlineLinearMethod,
    Fp8PerTensorOnlineLinearMethod,
    Fp8PtpcOnlineLinearMethod,
)
from vllm.model_executor.utils import replace_parameter

from appliance.engine.fp8_proof import EmulatedProof, NativeBlockProof, NativeFp8Proof
from appliance.engine.quantised import OnlineLinearMethod, Quantising, sample_rows
from appliance.quant.codec import QuantisedWeight
from appliance.quant.codec_fp8 import weight_block
from appliance.quant.cpu_gemm import multiply_fp8
from appliance.terms.schemes import Scheme

# Kernels that read codes in rows, as they were made: [K, N] with strides (1, K), CUTLASS's padded to multiples of 16,
# and [N, K] for blocks. Marlin, Humming, B12X and the CPU's AMX kernel each pack them in another order.
_READ_ROWS = frozenset(
    {
        pytorch.BlockWiseTorchFP8ScaledMMLinearKernel,
        pytorch.ChannelWiseTorchFP8ScaledMMLinearKernel,
        cutlass.CutlassFP8ScaledMMLinearKernel,
        cutlass.CutlassFp8BlockScaledMMKernel,
        deep_gemm.DeepGemmFp8BlockScaledMMKernel,
        flashinfer.FlashInferFP8ScaledMMLinearKernel,
        flashinfer.FlashInferFp8DeepGEMMDynamicBlockScaledKernel,
        pytorch.PerTensorTorchFP8ScaledMMLinearKernel,
        triton.TritonFp8BlockScaledMMKernel,
    }
)


class NativeFp8Method(Quantising):
    """One of vLLM's methods, with what our proof asks of it. vLLM's class comes after this one."""

    proof = NativeFp8Proof

    def process_weights_after_loading(self, layer: Module) -> None:
        is_done = getattr(layer, "_already_called_process_weights_after_loading", False)
        if is_done or self.on_quantised is None:  # keeps nothing: vLLM frees the weight as soon as it has replaced it
            super().process_weights_after_loading(layer)
            return
        weight_NK = layer.weight.data
        super().process_weights_after_loading(layer)
        if (held := self.held_weight(layer)) is not None:
            self.on_quantised(layer, sample_rows(weight_NK), held)

    def held_weight(self, layer: Module) -> QuantisedWeight | None:
        """Return codes [N, K] and scales where the kernel reads them, without padding. None where it packs them."""
        scale = self.held_scale(layer) if type(self.fp8_linear) in _READ_ROWS else None
        rows, columns = layer.output_size_per_partition, layer.input_size_per_partition
        block = weight_block(self.scheme, shape=(rows, columns))
        blocks = -(-rows // block[0]), -(-columns // block[1])
        if scale is None or scale.dtype is not torch.float32 or scale.shape != blocks:  # DeepGEMM may pack scales
            return None
        codes = layer.weight.data if self.scheme is Scheme.FP8_BLOCK else layer.weight.data.t()
        return QuantisedWeight(codes[:rows, :columns], scale=scale, block=block, scheme=self.scheme)

    def held_scale(self, layer: Module) -> Tensor | None:
        scale = getattr(layer, "weight_scale_inv" if self.scheme is Scheme.FP8_BLOCK else "weight_scale", None)
        if scale is None or self.scheme is Scheme.FP8_BLOCK:
            return None if scale is None else scale.data
        return scale.data.view(-1, 1) if self.scheme is Scheme.FP8 else scale.data[: layer.output_size_per_partition]

    @property
    def provable(self) -> bool:
        """Whether codes and scales can be computed beforehand and compared with the layer's."""
        return type(self.fp8_linear) in _READ_ROWS

    @property
    def multiplies_in_bf16(self) -> bool:
        """Batch-invariant: `apply` widens the weights and multiplies in BF16, without this kernel."""
        return envs.VLLM_BATCH_INVARIANT and not isinstance(self.fp8_linear, cutlass.CutlassFP8ScaledMMLinearKernel)

    @property
    def kernel_name(self) -> str:
        """Name of the kernel, which also shows one that only widens the weights (Marlin)."""
        return type(self.fp8_linear).__name__


class NativeTensorMethod(NativeFp8Method, Fp8PerTensorOnlineLinearMethod):
    scheme = Scheme.FP8


class NativeChannelMethod(NativeFp8Method, Fp8PtpcOnlineLinearMethod):
    scheme = Scheme.FP8_CHANNEL


class NativeBlockMethod(NativeFp8Method, Fp8PerBlockOnlineLinearMethod):
    scheme = Scheme.FP8_BLOCK
    proof = NativeBlockProof
    multiplies_in_bf16 = False

    @property
    def provable(self) -> bool:
        kernel = self.fp8_linear
        if isinstance(kernel, flashinfer.FlashInferFp8DeepGEMMDynamicBlockScaledKernel):
            kernel = kernel.fallback
        rounds_up = isinstance(kernel, deep_gemm.DeepGemmFp8BlockScaledMMKernel) and kernel.use_deep_gemm_e8m0
        return super().provable and not rounds_up


_METHODS = {kind.scheme: kind for kind in (NativeTensorMethod, NativeChannelMethod, NativeBlockMethod)}


def native_fp8_method(scheme: Scheme) -> NativeFp8Method:
    """Return vLLM's method with our proof. scheme: one of FP8. vLLM raises ValueError where the GPU has no kernel for
    it."""
    return _METHODS[scheme]()


class EmulatedLinearMethod(OnlineLinearMethod):
    """The method of one layer. layer.weight: float8 codes [N, K].  layer.weight_scale: float32, see the codec."""

    emulated = True
    proof = EmulatedProof

    def quantise(self, weight_NK: Tensor, *, absmax: Tensor | None) -> QuantisedWeight:
        from appliance.quant.numba_fp8 import quantise_fp8_numba  # a compiler that other schemes do not need

        return quantise_fp8_numba(weight_NK, scheme=self.scheme, absmax=absmax)

    def install(self, layer: Module, quantised: QuantisedWeight) -> None:
        replace_parameter(layer, "weight", quantised.codes_NK)
        replace_parameter(layer, "weight_scale", quantised.scale)

    def apply(self, layer: Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y_MN = multiply_fp8(x.reshape(-1, x.shape[-1]), self.held_weight(layer), bias)
        return y_MN.reshape(*x.shape[:-1], -1)

    def held_weight(self, layer: Module) -> QuantisedWeight:
        codes_NK = layer.weight.data
        block = weight_block(self.scheme, shape=codes_NK.shape)
        return QuantisedWeight(codes_NK, scale=layer.weight_scale.data, block=block, scheme=self.scheme)

    @property
    def kernel_name(self) -> str:
        return f"QuantiseDequantise[{self.scheme}]"
