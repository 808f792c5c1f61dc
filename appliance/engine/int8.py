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
from vllm.model_executor.layers.utils import check_cpu_sgl_kernel
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import CpuArchEnum, current_platform

from appliance.engine.quantised import OnlineLinearMethod
from appliance.quant.codec import Int8Weight, int8_scale, quantise_int8
from appliance.quant.scheme import Scheme

_ONEDNN_CACHED_PRIMITIVES = 32  # as vLLM's kernel has it


class Int8LinearMethod(OnlineLinearMethod):
    """One per layer. Keeps what vLLM's kernel holds only by address alive, see `install`."""

    scheme = Scheme.INT8

    def __init__(self) -> None:
        super().__init__()
        self.kernel = init_int8_linear_kernel(
            is_channelwise=True,
            is_static_input_scheme=False,
            input_symmetric=True,
            module_name=type(self).__name__,
        )
        self._held: Tensor | None = None

    def create_weights(self, layer: Module, *args: Any, **kwargs: Any) -> None:
        super().create_weights(layer, *args, **kwargs)
        for name in ("input_scale", "input_zero_point", "azp_adj"):  # the kernel looks for them
            layer.register_parameter(name, None)

    def quantise(self, weight_NK: Tensor, *, absmax: Tensor | None) -> Int8Weight:
        return quantise_for_kernel(weight_NK, absmax_N1=absmax)

    def install(self, layer: Module, quantised: Int8Weight) -> None:
        """Hand codes and scales to vLLM's kernel.

        The oneDNN handle keeps the address of the scale tensor. A layerwise reload copies the new values into the old
        tensors and drops the new ones, so the handle would read freed memory: hold the scales here for as long as the
        handle lives. Remove when: vLLM's CPUInt8ScaledMMLinearKernel owns its scales.
        """
        replace_parameter(layer, "weight", quantised.codes_NK)
        replace_parameter(layer, "weight_scale", quantised.scale_N1)
        if isinstance(self.kernel, CPUInt8ScaledMMLinearKernel) and not _takes_sgl(quantised.codes_NK):
            self._install_onednn(layer)
        else:
            self.kernel.process_weights_after_loading(layer)
        self._held = layer.weight_scale.data

    def _install_onednn(self, layer: Module) -> None:
        """As `process_weights_for_onednn` of vLLM's kernel, without the sum of each row of codes. Only asymmetric
        activations need that; it makes a float32 copy of the codes and takes as long as all the rest of a sync's work
        on a large layer. Remove when: vLLM computes `azp_adj` for asymmetric activations only."""
        codes_KN, scale_N1 = layer.weight.data.t(), layer.weight_scale.data
        self.kernel.dnnl_handler = ops.create_onednn_scaled_mm(
            codes_KN, scale_N1, torch.get_default_dtype(), True, False, _ONEDNN_CACHED_PRIMITIVES
        )
        self.kernel.linear_method = self.kernel._apply_weights_onednn
        layer.weight = None  # the handle has a packed copy

    def release(self) -> None:
        self._held = None
        if hasattr(self.kernel, "dnnl_handler"):
            del self.kernel.dnnl_handler

    def apply(self, layer: Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.kernel.apply_weights(layer, x, bias)

    def held_scale(self, layer: Module) -> Tensor | None:
        """A kernel with a handle reads what it was made with; the others read the layer's tensor."""
        if self._held is None or hasattr(self.kernel, "dnnl_handler"):
            return self._held
        return layer.weight_scale.data

    @property
    def kernel_name(self) -> str:
        """The kernel that multiplies, for the attestation (`...[sgl]` or `...[onednn]` where the CPU kernel chose)."""
        chosen = getattr(self.kernel, "linear_method", None)
        suffix = f"[{chosen.__name__.rsplit('_', 1)[-1]}]" if chosen is not None else ""
        return type(self.kernel).__name__ + suffix


def _takes_sgl(codes_NK: Tensor) -> bool:
    """What vLLM's CPU kernel asks before it packs a weight."""
    return current_platform.get_cpu_architecture() == CpuArchEnum.X86 and check_cpu_sgl_kernel(
        *codes_NK.shape, codes_NK.dtype
    )


def quantise_for_kernel(weight_NK: Tensor, *, absmax_N1: Tensor | None = None) -> Int8Weight:
    """The codec's result bit for bit, by vLLM's row quantiser on a CPU, by a Triton kernel on a GPU.

    weight_NK: [N, K].  absmax_N1: [N, 1] float32, of the whole rows where these are a part.
    Raises NumericsError when a value is not finite (vLLM's quantiser would not notice).
    """
    if not current_platform.is_cpu():
        from appliance.quant.triton_int8 import WIDEST_ROW, quantise_int8_triton  # Triton has no build for a CPU

        quantise = quantise_int8_triton if weight_NK.shape[1] <= WIDEST_ROW else quantise_int8
        return quantise(weight_NK.contiguous(), absmax_N1=absmax_N1)
    int8_scale(weight_NK)  # raises on what is not finite
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
