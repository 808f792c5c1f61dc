"""FP8 without FP8 kernels: quantise-dequantise of weights and activations by the codec, for tests and numerics.

Never used unless a run asks for it as *emulated*. Codes and scales are held as a kernel would hold them, so a sync and
its proof are the real ones; the product is computed in float32 and is slow.

Legend: M tokens, N output channels, K input channels of this rank's part of the layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import linear
from vllm.model_executor.utils import replace_parameter

from appliance.engine.fp8_proof import EmulatedProof
from appliance.engine.quantised import OnlineLinearMethod
from appliance.errors import EngineError
from appliance.quant.codec import QuantisedWeight
from appliance.quant.codec_fp8 import Fp8Weight, dequantise_fp8, quantise_fp8_tokens, row_blocks
from appliance.terms.schemes import BLOCK, Scales, Scheme


class EmulatedLinearMethod(OnlineLinearMethod):
    """One per layer. layer.weight: float8 codes [N, K].  layer.weight_scale: float32, see the codec."""

    emulated = True
    proof = EmulatedProof

    def __init__(self, scheme: Scheme) -> None:
        """scheme: one of FP8."""
        super().__init__(scheme)
        self._block = (0, 0)

    def create_weights(
        self,
        layer: Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if self.scheme.spec.scales is Scales.BLOCK:
            cut_columns = [input_size_per_partition] if input_size_per_partition != input_size else []
            cut_rows = output_partition_sizes if layer.tp_size > 1 and not cut_columns else []
            _refuse_cut_blocks(layer, cut_rows + cut_columns)
        super().create_weights(
            layer, input_size_per_partition, output_partition_sizes, input_size, output_size, *args, **kwargs
        )

    def quantise(self, weight_NK: Tensor, *, absmax: Tensor | None) -> QuantisedWeight:
        from appliance.quant.numba_fp8 import quantise_fp8_numba  # a compiler that other schemes do not need

        return quantise_fp8_numba(weight_NK, scheme=self.scheme, absmax=absmax)

    def install(self, layer: Module, quantised: Fp8Weight) -> None:
        self._block = quantised.block
        replace_parameter(layer, "weight", quantised.codes_NK)
        replace_parameter(layer, "weight_scale", quantised.scale)

    def apply(self, layer: Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """In float32, rounded once to the type of `x`. A token that is not finite stays so, as in a kernel."""
        x_MK = x.reshape(-1, x.shape[-1])
        tokens = quantise_fp8_tokens(x_MK, scheme=self.scheme, finite=False)
        weight = Fp8Weight(layer.weight.data, scale=layer.weight_scale.data, block=self._block, scheme=self.scheme)
        tokens_MK = dequantise_fp8(tokens)
        y_MN = torch.cat([linear(tokens_MK, dequantise_fp8(part)) for part in row_blocks(weight)], dim=1)
        if bias is not None:
            y_MN += bias.float()
        return y_MN.to(x.dtype).reshape(*x.shape[:-1], -1)

    def held_scale(self, layer: Module) -> Tensor | None:
        return layer.weight_scale.data if hasattr(layer, "weight_scale") else None

    @property
    def kernel_name(self) -> str:
        return f"QuantiseDequantise[{self.scheme}]"


def _refuse_cut_blocks(layer: Module, sizes: list[int]) -> None:
    """Blocks are counted from the start of a rank's part: cut ones would differ with the number of ranks."""
    ragged = [size for size in sizes if size % BLOCK]
    if ragged:
        raise EngineError(
            f"{layer.prefix}: `fp8-block` over {layer.tp_size} ranks leaves {ragged[0]} channels to a rank, "
            f"which is not a multiple of {BLOCK}",
            hint="use `fp8-channel`, or fewer ranks for tensor parallelism",
        )
