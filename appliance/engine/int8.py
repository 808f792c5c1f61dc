"""Online W8A8 for vLLM's linear layers: BF16 weights come in, INT8 codes and scales per output channel stay.

Weights are quantised when a layer has been loaded and again at every sync; activations are quantised per token by
vLLM's own kernel. vLLM 0.28 has online FP8 methods for linear layers and no INT8 one.

Legend: N output channels, K input channels of this rank's part of the layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from vllm import _custom_ops as ops
from vllm.model_executor.kernels.linear import init_int8_linear_kernel
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform

from appliance.engine.cpu_gemm import CpuGemm, pack
from appliance.engine.kernel_proof import Int8Proof
from appliance.engine.quantised import OnlineLinearMethod
from appliance.errors import NumericsError
from appliance.quant.codec import all_finite
from appliance.quant.codec_int8 import Int8Weight, quantise_int8
from appliance.terms.schemes import Scheme


class Int8LinearMethod(OnlineLinearMethod):
    """One per layer."""

    proof = Int8Proof

    def __init__(self, scheme: Scheme) -> None:
        super().__init__(scheme)
        self.kernel = init_int8_linear_kernel(
            is_channelwise=True,
            is_static_input_scheme=False,
            input_symmetric=True,
            module_name=type(self).__name__,
        )
        self.gemm: CpuGemm | None = None

    def create_weights(self, layer: Module, *args: Any, **kwargs: Any) -> None:
        super().create_weights(layer, *args, **kwargs)
        for name in ("input_scale", "input_zero_point", "azp_adj"):  # the kernel looks for them
            layer.register_parameter(name, None)

    def quantise(self, weight_NK: Tensor, *, absmax: Tensor | None) -> Int8Weight:
        return quantise_for_kernel(weight_NK, absmax_N1=absmax)

    def install(self, layer: Module, quantised: Int8Weight) -> None:
        """Hand codes and scales to vLLM's kernel.

        On a CPU the packed weight is this object's and not the layer's: a layerwise reload copies what a layer holds
        into the tensors that it held before, and the pass would cost as much as packing.
        """
        replace_parameter(layer, "weight_scale", quantised.scale_N1)
        if isinstance(self.kernel, CPUInt8ScaledMMLinearKernel):
            layer.weight = None
            self.gemm = pack(quantised.codes_NK, scale_N1=quantised.scale_N1)
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
        if self.gemm is not None:
            return self.gemm.scale_N1
        return layer.weight_scale.data if hasattr(layer, "weight_scale") else None

    @property
    def kernel_name(self) -> str:
        """The kernel that multiplies, for the attestation (`...[sgl]` or `...[onednn]` on a CPU)."""
        suffix = "" if self.gemm is None else f"[{self.gemm.name}]"
        return type(self.kernel).__name__ + suffix


def quantise_for_kernel(weight_NK: Tensor, *, absmax_N1: Tensor | None = None) -> Int8Weight:
    """The codec's result bit for bit, by vLLM's row quantiser on a CPU, by a Triton kernel on a GPU.

    weight_NK: [N, K].  absmax_N1: [N, 1] float32, of the whole rows where these are a part.
    Raises NumericsError when a value is not finite (vLLM's quantiser would not notice).
    """
    if not current_platform.is_cpu():
        from appliance.quant.triton_int8 import WIDEST_ROW, quantise_int8_triton  # Triton has no build for a CPU

        quantise = quantise_int8_triton if weight_NK.shape[1] <= WIDEST_ROW else quantise_int8
        return quantise(weight_NK.contiguous(), absmax_N1=absmax_N1)
    if not all_finite(weight_NK):
        raise NumericsError("a weight to quantise has a value that is not finite")
    if absmax_N1 is None:
        codes_NK, scale_N1, _ = ops.onednn_scaled_int8_quant(weight_NK.contiguous(), None, None, True)
    else:  # the quantiser takes no scales: one more column that has the absmax, which is a value of the whole row
        wider_NK = torch.cat([weight_NK, absmax_N1.to(weight_NK.dtype)], dim=1)
        codes_NK, scale_N1, _ = ops.onednn_scaled_int8_quant(wider_NK, None, None, True)
        codes_NK = codes_NK[:, :-1].contiguous()
    # Zero rows and rows of denormals: the kernel multiplies by 1/s = inf and uses the code -128.
    overflow_N = scale_N1.reciprocal().isinf().squeeze(1)
    if bool(overflow_N.any()):
        absmax_M1 = None if absmax_N1 is None else absmax_N1[overflow_N]
        codes_NK[overflow_N] = quantise_int8(weight_NK[overflow_N], absmax_N1=absmax_M1).codes_NK
    return Int8Weight(codes_NK=codes_NK, scale_N1=scale_N1)
