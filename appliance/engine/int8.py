"""Online W8A8 for vLLM's linear layers: BF16 weights come in, INT8 codes and scales per output channel stay.

Weights are quantised when a layer has been loaded and again at every sync; activations are quantised per token by
vLLM's own kernel. vLLM 0.31 has online FP8 methods for linear layers and no INT8 one.

On a CPU one of three kernels multiplies (quant/cpu_gemm.py).

Legend: M tokens, N output channels, K input channels of this rank's part of the layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from vllm.model_executor.kernels.linear import init_int8_linear_kernel
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform

from appliance.engine.kernel_proof import Int8Proof
from appliance.engine.quantised import OnlineLinearMethod, sample_rows
from appliance.errors import EngineError
from appliance.patch import Patch
from appliance.quant.codec import QuantisedWeight
from appliance.quant.codec_int8 import int8_rows, quantise_int8
from appliance.quant.cpu_gemm import OneDnnGemm, SglGemm, WideGemm, packed, quantise_weight
from appliance.terms.schemes import Scheme

_CUTLASS = 16


class Int8LinearMethod(OnlineLinearMethod):
    """Method of one layer.

    A row's codes depend on that row alone: on a CPU, on one rank, a layer's tensors are quantised where they lie, each
    into its rows, and no weight is assembled of them.
    """

    gemm: OneDnnGemm | SglGemm | WideGemm | None
    """Kernel that multiplies on a CPU; None before the first load, and on a GPU."""
    dtype: torch.dtype
    """Type of activations and of the result."""

    proof = Int8Proof

    def __init__(self, scheme: Scheme) -> None:
        super().__init__(scheme)
        self.kernel = init_int8_linear_kernel(
            is_channelwise=True, is_static_input_scheme=False, input_symmetric=True, module_name=type(self).__name__
        )
        self.gemm = None
        self.dtype = torch.bfloat16
        self._codes_NK: Tensor | None = None  # of a layer whose parts are coming
        self._parts: dict[int, _Part] = {}  # by their first row

    def create_weights(self, layer: Module, *args: Any, weight_loader: Any, **kwargs: Any) -> None:
        at_once = layer.tp_size == 1 and current_platform.is_cpu()
        loader = self._quantising(weight_loader) if at_once else weight_loader
        super().create_weights(layer, *args, weight_loader=loader, **kwargs)
        self.dtype = layer.weight.dtype
        for name in ("input_scale", "input_zero_point", "azp_adj"):  # the kernel looks for them
            layer.register_parameter(name, None)

    def _quantising(self, loader: MethodType) -> MethodType:
        """Return a layer's loader that quantises the parts of a weight. Bound to the layer, as vLLM undoes it for its
        records.

        Nothing is copied into the weight, which is what vLLM counts of a part that it gives twice: where one part of a
        layer goes by a route (routes.py), they all do, or the layer is reported as incomplete.
        """
        load = loader.__func__

        @functools.wraps(load)
        def quantising_loader(layer: Module, param: Tensor, loaded_weight: Tensor, *shard: Any) -> None:
            if param.is_meta or layer.quant_method is not self:  # vLLM counts elements; a layer that is BF16 for now
                load(layer, param, loaded_weight, *shard)
                return
            param.data = param.data.new_empty(()).expand_as(param)  # the shape says whether a layer is complete
            rows = _rows(layer.logical_widths, *shard)
            if loaded_weight.shape != (len(rows), param.shape[1]):
                whole, given = list(param.shape), list(loaded_weight.shape)
                raise ValueError(f"{layer.prefix}, rows {rows.start} to {rows.stop} of {whole}, was given {given}")
            if self._codes_NK is None:
                self._codes_NK = loaded_weight.new_empty(param.shape, dtype=torch.int8)
            weight_NK, into_NK = loaded_weight.to(param.dtype), self._codes_NK[rows.start : rows.stop]
            quantised = quantise_for_kernel(weight_NK, into_NK=into_NK, known_finite=self.known_finite)
            few_NK = sample_rows(weight_NK, start=rows.start, count=len(param))
            self._parts[rows.start] = _Part(quantised.scale, few_NK)

        return MethodType(quantising_loader, loader.__self__)

    def _quantised(self, layer: Module) -> QuantisedWeight:
        if self._codes_NK is None:  # a GPU, several ranks, dummy weights
            return super()._quantised(layer)
        codes_NK, parts = self._codes_NK, [part for _, part in sorted(self._parts.items())]
        scale_N1 = torch.cat([part.scale_N1 for part in parts])
        if len(scale_N1) != len(codes_NK):  # a checkpoint lacks one, or has one twice
            raise EngineError(f"{layer.prefix} of {len(codes_NK)} rows was given {len(scale_N1)}")
        self._codes_NK, self._parts = None, {}
        quantised = int8_rows(codes_NK, scale_N1=scale_N1)
        if self.on_quantised is not None:
            self.on_quantised(layer, torch.cat([part.few_NK for part in parts]), quantised)
        return quantised

    def quantise(self, weight_NK: Tensor, *, absmax: Tensor | None) -> QuantisedWeight:
        return quantise_for_kernel(weight_NK, absmax=absmax, known_finite=self.known_finite)

    def install(self, layer: Module, quantised: QuantisedWeight) -> None:
        """Hand codes and scales to vLLM's kernel.

        On a CPU the packed weight is this object's and not the layer's: a layerwise reload copies what a layer has
        into the tensors that it held before, and the pass would cost as much as packing.
        """
        replace_parameter(layer, "weight_scale", quantised.scale)
        if isinstance(self.kernel, CPUInt8ScaledMMLinearKernel):
            layer.weight = self.gemm = None  # the old packed weight goes before there is a new one
            self.gemm = packed(quantised.codes_NK, scale_N1=quantised.scale, dtype=self.dtype)
        else:
            refuse_ragged(layer.prefix, quantised.codes_NK)
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
        """The kernel that multiplies, for the attestation (`...[sgl]`, `...[onednn]` or `...[float32]` on a CPU)."""
        suffix = "" if self.gemm is None else f"[{self.gemm.name}]"
        return type(self.kernel).__name__ + suffix


@dataclass(frozen=True)
class _Part:
    """Quantised part of a weight: its codes exist already."""

    scale_N1: Tensor
    few_NK: Tensor
    """Rows of the weight that `sample_rows` copied."""


def _rows(widths: list[int], shard: str | int | tuple[int, ...] | None = None) -> range:
    """Return the rows of a layer that a tensor is for. widths: rows of each of its parts.  shard: as vLLM's loaders
    name parts."""
    number = "qkv".index(shard) if isinstance(shard, str) else shard
    places = range(len(widths)) if number is None else number if isinstance(number, tuple) else (number,)
    start = sum(widths[: places[0]])
    return range(start, start + sum(widths[place] for place in places))


def refuse_ragged(name: str, codes_NK: Tensor) -> None:
    """Refuse a layer that vLLM would give to a Triton kernel, which rounds before it adds the bias: no proof covers
    that. Raises EngineError."""
    if any(size % _CUTLASS for size in codes_NK.shape):
        raise EngineError(
            f"{name}: {codes_NK.shape[0]} x {codes_NK.shape[1]} on this rank; on a GPU `int8` needs multiples of "
            f"{_CUTLASS}, as its CUTLASS kernel does",
            hint="name the layer in quantization.ignore, or use fewer ranks for tensor parallelism",
        )


def quantise_for_kernel(
    weight_NK: Tensor, *, absmax: Tensor | None = None, known_finite: bool = False, into_NK: Tensor | None = None
) -> QuantisedWeight:
    """Quantise to the codec's result, bit for bit: by vLLM's row quantiser on a CPU, by a Triton kernel on a GPU.

    weight_NK: [N, K].  absmax: [N, 1] float32, of the whole rows where these are a part.  into_NK: on a CPU, memory for
    the codes of whole rows.
    Raises NumericsError when a value is not finite, and not known to be (vLLM's quantiser would not notice).
    """
    if not current_platform.is_cpu():
        from appliance.quant.triton_int8 import WIDEST_ROW, quantise_int8_triton  # Triton has no build for a CPU

        quantise = quantise_int8_triton if weight_NK.shape[1] <= WIDEST_ROW else quantise_int8
        return quantise(weight_NK.contiguous(), absmax=absmax)
    if absmax is None:
        return quantise_weight(weight_NK, known_finite=known_finite, into_NK=into_NK)
    # The quantiser takes no scales: one more column that has the absmax, which is a value of the whole row.
    whole_NK = torch.cat([weight_NK, absmax.to(weight_NK.dtype)], dim=1)
    quantised = quantise_weight(whole_NK, known_finite=known_finite)
    return int8_rows(quantised.codes_NK[:, : weight_NK.shape[1]].contiguous(), scale_N1=quantised.scale)


NO_AMX_TILES = Patch(
    name="cpu-no-amx-tiles",
    target="torch.cpu:_is_amx_tile_supported",
    why=(
        "on a CPU with AMX, vLLM mixes kernels that each leave the tile registers in a state of their own (packed "
        "GEMMs through brgemm, attention): seen here as an illegal instruction in cpu_attention_with_kv_cache in some "
        "runs and not in others. vLLM asks this function; oneDNN, which restores the tiles, decides for itself and "
        "keeps using AMX, but with one flow"
    ),
    upstream="https://github.com/sgl-project/sglang/issues/28992",
    distribution="torch",
    sources={"2.13.0+cpu": "cd8eeae518a7a395caa813bf636111bd3cc0748680abd0f0c135c42dabd8707b"},
    remove_when="a vLLM release passes a day of generation with packed GEMMs and attention on an AMX host",
)


def no_amx_tiles(original: Callable[[], bool]) -> Callable[[], bool]:
    def _is_amx_tile_supported() -> bool:
        return False

    return _is_amx_tile_supported
