"""Online W8A8 for vLLM's linear layers: BF16 weights come in, INT8 codes and scales per output channel stay.

Weights are quantised when a layer has been loaded and again at every sync; activations are quantised per token by
vLLM's own kernel. vLLM 0.28 has online FP8 methods for linear layers and no INT8 one; this follows their pattern
(`vllm/model_executor/layers/quantization/online/fp8.py`): a weight on the meta device, materialised layer by layer.

Legend: N output channels, K input channels of this rank's part of the layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from vllm import _custom_ops as ops
from vllm.model_executor.kernels.linear import init_int8_linear_kernel
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
from vllm.model_executor.parameter import ModelWeightParameter
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform

from appliance.quant.codec import Int8Weight, int8_scale, quantise_int8

METHOD_NAME = "appliance_int8"


@register_quantization_config(METHOD_NAME)
class Int8Config(QuantizationConfig):
    """Linear layers in INT8; embeddings, lm_head, norms and everything in `ignore` stay as the checkpoint has them."""

    def __init__(self, ignore: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.ignore = list(ignore)

    def get_name(self) -> str:
        return METHOD_NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 75  # INT8 tensor cores

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Int8Config:
        return cls(ignore=tuple(config.get("ignore", ())))

    def get_quant_method(self, layer: Module, prefix: str) -> QuantizeMethodBase | None:
        if not isinstance(layer, LinearBase):
            return None
        if should_ignore_layer(prefix, ignore=self.ignore, fused_mapping=self.packed_modules_mapping):
            return KeptLinearMethod()
        return Int8LinearMethod()


class KeptLinearMethod(UnquantizedLinearMethod):
    """A layer that `ignore` keeps in BF16 on purpose."""


class Int8LinearMethod(LinearMethodBase):
    """One per layer. Keeps what vLLM's kernel holds only by address alive, see `process_weights_after_loading`."""

    uses_meta_device = True

    def __init__(self) -> None:
        self.kernel = init_int8_linear_kernel(
            is_channelwise=True,
            is_static_input_scheme=False,
            input_symmetric=True,
            module_name=type(self).__name__,
        )
        self._held: Tensor | None = None

    def create_weights(
        self,
        layer: Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        layer.logical_widths = output_partition_sizes
        weight_NK = ModelWeightParameter(
            data=torch.empty(sum(output_partition_sizes), input_size_per_partition, device="meta", dtype=params_dtype),
            input_dim=1,
            output_dim=0,
            weight_loader=extra_weight_attrs.get("weight_loader"),
        )
        layer.register_parameter("weight", weight_NK)
        layer.register_parameter("input_scale", None)
        layer.register_parameter("input_zero_point", None)
        layer.register_parameter("azp_adj", None)
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: Module) -> None:
        """Quantise the layer's BF16 weight and hand it to vLLM's kernel.

        The oneDNN handle keeps the address of the scale tensor. A layerwise reload copies the new values into the old
        tensors and drops the new ones, so the handle would read freed memory: hold the scales here for as long as the
        handle lives. Remove when: vLLM's CPUInt8ScaledMMLinearKernel owns its scales.
        """
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        quantised = quantise_for_kernel(layer.weight.data)
        replace_parameter(layer, "weight", quantised.codes_NK)
        replace_parameter(layer, "weight_scale", quantised.scale_N1)
        self.kernel.process_weights_after_loading(layer)
        self._held = layer.weight_scale.data
        layer._already_called_process_weights_after_loading = True

    def apply(self, layer: Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.kernel.apply_weights(layer, x, bias)

    @property
    def kernel_name(self) -> str:
        """The kernel that multiplies, for the attestation (`...[sgl]` or `...[onednn]` where the CPU kernel chose)."""
        chosen = getattr(self.kernel, "linear_method", None)
        suffix = f"[{chosen.__name__.rsplit('_', 1)[-1]}]" if chosen is not None else ""
        return type(self.kernel).__name__ + suffix


def quantise_for_kernel(weight_NK: Tensor) -> Int8Weight:
    """The codec's result bit for bit, by vLLM's row quantiser where that is faster (CPU), else by the codec.

    weight_NK: [N, K].  Raises NumericsError when a value is not finite (vLLM's quantiser would not notice).
    """
    if not current_platform.is_cpu():
        return quantise_int8(weight_NK)
    int8_scale(weight_NK)  # raises on what is not finite
    codes_NK, scale_N1, _ = ops.onednn_scaled_int8_quant(weight_NK.contiguous(), None, None, True)
    # Zero rows and rows of denormals: the kernel multiplies by 1/s = inf and uses the code -128.
    overflow_N = scale_N1.reciprocal().isinf().squeeze(1)
    if bool(overflow_N.any()):
        codes_NK[overflow_N] = quantise_int8(weight_NK[overflow_N]).codes_NK
    return Int8Weight(codes_NK=codes_NK, scale_N1=scale_N1)
