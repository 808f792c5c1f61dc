"""What every quantising method of ours offers, and the part that linear layers share: online, one layer at a time.

BF16 weights come in; when a layer is complete (INT8 on a CPU: as each comes) they are quantised, and codes and scales
stay. It follows vLLM's online FP8 methods (`vllm/model_executor/layers/quantization/online/fp8.py`): a weight on the
meta device, materialised layer by layer, at the first load and at every sync.

Legend: N output channels, K input channels of this rank's part of the layer.
"""

from __future__ import annotations

import functools
import inspect
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.layers.quantization.utils.quant_utils import amax_for_tp_weight_quant
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, initialize_online_processing
from vllm.model_executor.parameter import ModelWeightParameter

from appliance.errors import EngineError
from appliance.quant.codec import QuantisedWeight, weight_absmax
from appliance.terms.schemes import BLOCK, Scales, Scheme

QuantisedHook = Callable[[Module, Tensor, QuantisedWeight], None]
_SAMPLED_ROWS = 8


class Quantising:
    """A method object that quantises its layer's weights; linear layers and experts have it as a base."""

    scheme: Scheme
    """Scheme of weights and activations, together with `emulated`."""
    emulated: bool = False
    proof: Callable[..., Any]
    """Class of the KernelProof for layers with this method."""
    provable: bool = True
    """Whether the kernel of such a layer can be proven."""
    on_quantised: QuantisedHook | None = None
    """Function that is called with (layer, `sample_rows` of a weight, codes and scales of all its rows) after each
    quantisation. Set it on an object, or with `staticmethod` on a class."""
    known_finite: bool = False
    """Whether somebody has checked before that all tensors of a weight are finite."""

    @property
    @abstractmethod
    def kernel_name(self) -> str:
        """Name of what multiplies, for the attestation."""

    @abstractmethod
    def held_scale(self, layer: Module) -> Tensor | None:
        """Return the memory itself from which the kernel reads the weight's scales, or None before the first load."""


class OnlineLinearMethod(Quantising, LinearMethodBase):
    """Method of one layer."""

    planned: Scheme
    """Scheme of the layer when the method was made; `scheme` may become another one (precision.py)."""

    uses_meta_device = True

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = self.planned = scheme
        self._whole = WholeAbsmax(scheme)

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
        rows_are_cut = input_size_per_partition != input_size
        cut = [input_size_per_partition] if rows_are_cut else output_partition_sizes if layer.tp_size > 1 else []
        refuse_cut_blocks(layer.prefix, cut, scheme=self.scheme, num_ranks=layer.tp_size)
        self.require_shape(layer.prefix, rows=sum(output_partition_sizes), length=input_size_per_partition)
        loader = extra_weight_attrs["weight_loader"]
        self._needs_whole = is_cut(self.scheme, rows_are_cut=rows_are_cut, num_ranks=layer.tp_size)
        weight_NK = ModelWeightParameter(
            data=torch.empty(sum(output_partition_sizes), input_size_per_partition, device="meta", dtype=params_dtype),
            input_dim=1,
            output_dim=0,
            weight_loader=self._whole.recording(loader) if self._needs_whole else loader,
        )
        layer.register_parameter("weight", weight_NK)
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: Module) -> None:
        """Quantise the layer's BF16 weight and hand it to what multiplies. Raises NumericsError."""
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        for _, call in get_layerwise_info(layer).loaded_weights:
            call.arguments.clear()  # the tensors that were written into the weight: vLLM keeps them until it is done
        self.install(layer, self._quantised(layer))
        layer._already_called_process_weights_after_loading = True

    def _quantised(self, layer: Module) -> QuantisedWeight:
        """Free the weight's memory: vLLM still has the parameter."""
        weight_NK = layer.weight.data
        absmax = None
        if self._needs_whole:
            absmax = self._whole.take(weight_NK, ask=lambda own: amax_for_tp_weight_quant(own, True))
        quantised = self.quantise(weight_NK, absmax=absmax)
        if self.on_quantised is not None:
            self.on_quantised(layer, sample_rows(weight_NK), quantised)
        layer.weight.data = weight_NK.new_empty(0)
        return quantised

    def require_shape(self, name: str, *, rows: int, length: int) -> None:
        """Check that this method has a kernel for a weight of this shape. name: of the layer. Raises EngineError where
        it has none."""

    @abstractmethod
    def quantise(self, weight_NK: Tensor, *, absmax: Tensor | None) -> QuantisedWeight:
        """Quantise to the codec's result, bit for bit."""

    @abstractmethod
    def install(self, layer: Module, quantised: QuantisedWeight) -> None:
        """Replace the layer's weight by codes and scales, in the layout that the kernel wants."""

    def held_scale(self, layer: Module) -> Tensor | None:
        return layer.weight_scale.data if hasattr(layer, "weight_scale") else None

    def release(self) -> None:
        """Let go of what is held beside the layer's tensors: the layer is in BF16 until the next `install`."""


def sample_rows(weight_NK: Tensor, *, start: int = 0, count: int | None = None) -> Tensor:
    """Copy a sample of a weight: those rows that this part has of up to _SAMPLED_ROWS evenly spread ones. start: the
    part's first row.  count: of all rows, where these are a part."""
    step = sampling_step(len(weight_NK) if count is None else count)
    return weight_NK[-start % step :: step].clone()


def sampling_step(count: int) -> int:
    return max(1, -(-count // _SAMPLED_ROWS))


def is_cut(scheme: Scheme, *, rows_are_cut: bool, num_ranks: int) -> bool:
    """Return whether a rank's part of a weight can have another absmax than the whole weight where they share a scale.

    Rows are cut when a layer is row-parallel. Blocks of 128 are never cut: a layer where they would be is refused.
    """
    if scheme.spec.scales is Scales.TENSOR:
        return num_ranks > 1
    return rows_are_cut and scheme.spec.scales is Scales.CHANNEL


def refuse_cut_blocks(name: str, sizes: list[int], *, scheme: Scheme, num_ranks: int, unit: str = "channels") -> None:
    """Refuse a layer whose blocks would be cut: they are counted from the start of a rank's part, so that cut ones
    would differ with the number of ranks.

    sizes: of a layer's cut dimensions, on this rank.  Raises EngineError.
    """
    ragged = [size for size in sizes if size % BLOCK]
    if scheme.spec.scales is Scales.BLOCK and ragged:
        raise EngineError(
            f"{name}: `{scheme}` over {num_ranks} ranks leaves {ragged[0]} {unit} to a rank, "
            f"which is not a multiple of {BLOCK}",
            hint="use `fp8-channel`, or fewer ranks for tensor parallelism",
        )


class WholeAbsmax:
    """Absmax of a layer's whole tensors, taken when a loader cuts this rank's part out of them.

    Every rank receives every tensor of the checkpoint, so no communication is needed: one rank that fails does not
    leave another one waiting in the middle of a sync.
    """

    def __init__(self, scheme: Scheme) -> None:
        self._scheme = scheme
        self._by_part: dict[tuple[object, object], Tensor] = {}  # by number of the expert, and part

    def recording(self, loader: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a loader, so that the absmax of what it gets is recorded. loader: a bound method of the layer."""
        signature = inspect.signature(loader)

        @functools.wraps(loader)
        def recording_loader(*args: Any, **kwargs: Any) -> Any:
            values = signature.bind(*args, **kwargs).arguments
            # Layerwise loading calls twice: first on the meta device, to count elements.
            if not values["param"].is_meta:
                held = values["loaded_weight"].to(values["param"].dtype)  # a trainer's float32 is rounded first
                place = values.get("expert_id"), values.get("shard_id", values.get("loaded_shard_id"))
                self._by_part[place] = weight_absmax(held, scheme=self._scheme)
            return loader(*args, **kwargs)

        return recording_loader

    def take(
        self,
        weight_NK: Tensor,
        *,
        ask: Callable[[Tensor], Tensor],
        expert: int | None = None,
        shards: tuple[str, ...] = (),
    ) -> Tensor:
        """Take the absmax for a rank's part of a weight, in the shape of the scale. It is forgotten: the next load
        has its own.

        ask: the other ranks, where no loader ran: dummy weights, as vLLM's own methods do.  shards: all where none is
        named.
        """
        wanted = [(expert, shard) for shard in shards] if shards else list(self._by_part)
        parts = [self._by_part.pop(place) for place in wanted if place in self._by_part]
        if not parts:
            return ask(weight_absmax(weight_NK, scheme=self._scheme))
        return torch.stack(parts).amax(dim=0).to(weight_NK.device)
