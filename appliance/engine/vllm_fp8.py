"""FP8 by vLLM's own online methods, which a GPU runs: vLLM's classes, and what each of their layers says of itself.

`fp8` and `fp8-channel` have the codec's numbers. `fp8-block` has them up to rounding: its quantiser is compiled, and a
compiled division need not be rounded as IEEE has it. Where its kernel is DeepGEMM, vLLM would make the scales powers of
two and quantise the codes once more: the codec has no such numbers, and a plan sees to it that vLLM does not
(terms/environment.py).

Per tensor and per channel they ask the other ranks for the absmax of a weight that is cut; per block they do not, and
refuse cut blocks.

Legend: N output channels, K input channels of this rank's part of the layer.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Module
from vllm import envs
from vllm.model_executor.kernels.linear.scaled_mm.cutlass import (
    CutlassFp8BlockScaledMMKernel,
    CutlassFP8ScaledMMLinearKernel,
)
from vllm.model_executor.kernels.linear.scaled_mm.deep_gemm import DeepGemmFp8BlockScaledMMKernel
from vllm.model_executor.kernels.linear.scaled_mm.flashinfer import (
    FlashInferFp8DeepGEMMDynamicBlockScaledKernel,
    FlashInferFP8ScaledMMLinearKernel,
)
from vllm.model_executor.kernels.linear.scaled_mm.pytorch import (
    BlockWiseTorchFP8ScaledMMLinearKernel,
    ChannelWiseTorchFP8ScaledMMLinearKernel,
    PerTensorTorchFP8ScaledMMLinearKernel,
)
from vllm.model_executor.kernels.linear.scaled_mm.triton import TritonFp8BlockScaledMMKernel
from vllm.model_executor.layers.quantization.online.fp8 import (
    Fp8PerBlockOnlineLinearMethod,
    Fp8PerTensorOnlineLinearMethod,
    Fp8PtpcOnlineLinearMethod,
)

from appliance.engine.fp8_block_proof import NativeBlockProof
from appliance.engine.fp8_proof import NativeFp8Proof
from appliance.engine.quantised import Quantising
from appliance.quant.codec_fp8 import Fp8Weight, weight_block
from appliance.terms.schemes import Scheme

# Kernels that read codes in rows, as they were made: [K, N] with strides (1, K), CUTLASS's padded to multiples of 16,
# and [N, K] for blocks. Marlin, Humming, B12X and the CPU's AMX kernel pack them in orders of their own.
_READ_ROWS = frozenset(
    {
        BlockWiseTorchFP8ScaledMMLinearKernel,
        ChannelWiseTorchFP8ScaledMMLinearKernel,
        CutlassFP8ScaledMMLinearKernel,
        CutlassFp8BlockScaledMMKernel,
        DeepGemmFp8BlockScaledMMKernel,
        FlashInferFP8ScaledMMLinearKernel,
        FlashInferFp8DeepGEMMDynamicBlockScaledKernel,
        PerTensorTorchFP8ScaledMMLinearKernel,
        TritonFp8BlockScaledMMKernel,
    }
)


class NativeFp8Method(Quantising):
    """Ours of a method of vLLM's, whose class comes after this one."""

    proof = NativeFp8Proof

    def process_weights_after_loading(self, layer: Module) -> None:
        is_done = getattr(layer, "_already_called_process_weights_after_loading", False)
        if is_done or self.on_quantised is None:
            super().process_weights_after_loading(layer)
            return
        weight_NK = layer.weight.data
        super().process_weights_after_loading(layer)
        held = self.held_weight(layer)
        if held is not None:
            self.on_quantised(layer, weight_NK, held)

    def held_weight(self, layer: Module) -> Fp8Weight | None:
        """Codes [N, K] and scales where the kernel reads them, without padding. None where it packs them."""
        if type(self.fp8_linear) not in _READ_ROWS:
            return None
        scale = self.held_scale(layer)
        rows, columns = layer.output_size_per_partition, layer.input_size_per_partition
        block = weight_block(self.scheme, shape=(rows, columns))
        blocks = -(-rows // block[0]), -(-columns // block[1])
        if scale is None or scale.dtype is not torch.float32 or scale.shape != blocks:  # DeepGEMM may pack scales
            return None
        codes = layer.weight.data if self.scheme is Scheme.FP8_BLOCK else layer.weight.data.t()
        return Fp8Weight(codes[:rows, :columns], scale=scale, block=block, scheme=self.scheme)

    def held_scale(self, layer: Module) -> Tensor | None:
        held = getattr(layer, "weight_scale_inv" if self.scheme is Scheme.FP8_BLOCK else "weight_scale", None)
        if held is None:
            return None
        if self.scheme is Scheme.FP8:
            return held.data.view(-1, 1)
        return held.data[: layer.output_size_per_partition] if self.scheme is Scheme.FP8_CHANNEL else held.data

    @property
    def provable(self) -> bool:
        """Whether codes and scales can be told beforehand and found in the layer."""
        return type(self.fp8_linear) in _READ_ROWS

    @property
    def multiplies_in_bf16(self) -> bool:
        """Batch-invariant: `apply` widens the weights and multiplies in BF16, without this kernel."""
        return envs.VLLM_BATCH_INVARIANT and not isinstance(self.fp8_linear, CutlassFP8ScaledMMLinearKernel)

    @property
    def kernel_name(self) -> str:
        """One that only widens the weights (Marlin) shows here."""
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
        deep = kernel.fallback if isinstance(kernel, FlashInferFp8DeepGEMMDynamicBlockScaledKernel) else kernel
        rounds_up = isinstance(deep, DeepGemmFp8BlockScaledMMKernel) and deep.use_deep_gemm_e8m0
        return super().provable and not rounds_up


_METHODS = {kind.scheme: kind for kind in (NativeTensorMethod, NativeChannelMethod, NativeBlockMethod)}


def native_fp8_method(scheme: Scheme) -> NativeFp8Method:
    """scheme: one of FP8. vLLM raises ValueError where the GPU has no kernel for it."""
    return _METHODS[scheme]()
