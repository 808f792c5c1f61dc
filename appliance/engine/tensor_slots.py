"""Which part of a checkpoint's tensor a rank's layer must hold, and where: our own mapping.

vLLM's weight loaders decide the same on their way, and a proof that used them would believe what it has to prove. What
is used here of vLLM: the classes and sizes of its layers.

Legend: N output channels, K input channels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Module
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from appliance.engine.experts import DOWN, GATE_UP, ExpertGemm, OnlineExpertsMethod
from appliance.errors import EngineError
from appliance.terms import families

ALL = slice(None)


@dataclass(frozen=True)
class Slot:
    """One tensor's place: `tensor[rows, columns]` are the rows of the layer's parameter from `start` on."""

    layer: str
    """Name of the module."""
    parameter: str
    """`weight`, `bias` or another."""
    part: int = 0
    """Number within a fused layer."""
    start: int = 0
    rows: slice = field(default_factory=lambda: ALL)
    columns: slice = field(default_factory=lambda: ALL)
    shape: tuple[int, ...] = ()
    """Shape of the whole tensor, where the layer gives it."""

    def fits(self, tensor: Tensor) -> bool:
        return not self.shape or tensor.shape == self.shape

    def cut(self, tensor: Tensor) -> Tensor:
        """Cut this rank's part out of a tensor."""
        return tensor[self.rows] if tensor.ndim < 2 else tensor[self.rows, self.columns]

    def within(self, parameter: Tensor) -> Tensor:
        """Return the view of the layer's parameter in which that part lies."""
        if self.rows == ALL:
            return parameter
        return parameter[self.start : self.start + self.rows.stop - self.rows.start]


@dataclass(frozen=True)
class LocalShape:
    """Shape of a rank's weight: N output channels, padding of a vocabulary included, K input channels."""

    channels: int
    length: int
    is_cut: bool
    """Whether other ranks have other parts of the checkpoint's tensors."""


def slots(model: Module, *, tied_head: bool) -> dict[str, tuple[Slot, ...]]:
    """Map the name of each of a checkpoint's tensors to its places in this rank's layers. tied_head: lm_head is the
    embedding, and none of its own tensors is used.  Raises EngineError for a linear layer whose class is unknown
    here."""
    slots_by_source: dict[str, list[Slot]] = defaultdict(list)
    heads = {name for name, layer in model.named_modules() if isinstance(layer, ParallelLMHead)}
    embeddings = (name for name, layer in model.named_modules() if isinstance(layer, VocabParallelEmbedding))
    embedding = next((name for name in embeddings if name not in heads), "")
    for name, layer in model.named_modules():
        if isinstance(layer, LinearBase):
            places = _linear(name, layer)
        elif isinstance(getattr(layer, "quant_method", None), OnlineExpertsMethod):
            places = _experts(layer)
        elif isinstance(layer, VocabParallelEmbedding):
            held = layer.shard_indices  # rows of the checkpoint; vLLM pads the vocabulary after them
            rows = slice(held.org_vocab_start_index, held.org_vocab_end_index)
            slot = Slot(name, "weight", rows=rows, shape=(layer.org_vocab_size, layer.embedding_dim))
            places = [(f"{embedding if tied_head and name in heads else name}.weight", slot)]
        elif not hasattr(layer, "quant_method"):  # experts and attention have one, and parameters of another kind
            own = layer.named_parameters(recurse=False)
            places = [(f"{name}.{key}", Slot(name, key, shape=tuple(held.shape))) for key, held in own]
        else:
            places = []
        for source, slot in places:
            slots_by_source[source].append(slot)
    return {source: tuple(places) for source, places in slots_by_source.items()}


def part_names(name: str) -> list[str]:
    """Return a layer's names in a checkpoint: those of its parts where it is fused."""
    parent, _, leaf = name.rpartition(".")
    return [f"{parent}.{part}" for part in families.FUSED_LAYERS.get(leaf, ())] or [name]


def _linear(name: str, layer: LinearBase) -> Iterator[tuple[str, Slot]]:
    sources, parts = part_names(name), _parts(name, layer)
    if len(sources) != len(parts):
        fact = f"{name} holds {len(parts)} layers, in an order that no proof knows"
        hint = "use a model of another type, or unset FLASHRL_CONFIG"
        raise EngineError(f"{fact}: no weight update of this model is proven", hint=hint)
    columns = ALL
    if isinstance(layer, RowParallelLinear):
        width = layer.input_size_per_partition
        columns = slice(layer.tp_rank * width, (layer.tp_rank + 1) * width)
    start, before, fused = 0, 0, (sum(whole for whole, _, _ in parts), layer.input_size)
    for part, (source, (whole, width, index)) in enumerate(zip(sources, parts, strict=True)):
        rows, shape = slice(index * width, (index + 1) * width), (whole, layer.input_size)
        yield f"{source}.weight", Slot(name, "weight", part, start=start, rows=rows, columns=columns, shape=shape)
        yield f"{source}.bias", Slot(name, "bias", part, start=start, rows=rows, shape=shape[:1])
        if len(parts) > 1:  # some families' checkpoints have one tensor for all
            rows = slice(before + rows.start, before + rows.stop)
            yield f"{name}.weight", Slot(name, "weight", part, start=start, rows=rows, shape=fused)
            yield f"{name}.bias", Slot(name, "bias", part, start=start, rows=rows, shape=fused[:1])
        start, before = start + width, before + whole


def _parts(name: str, layer: LinearBase) -> list[tuple[int, int, int]]:
    """Return, for each part of a layer: its rows in the checkpoint, on this rank, and the number of this rank's
    portion."""
    rank, ranks = layer.tp_rank, layer.tp_size
    if isinstance(layer, QKVParallelLinear):
        kv_rank = rank // layer.num_kv_head_replicas  # ranks beyond the key-value heads hold copies
        heads = [
            (layer.total_num_heads, layer.num_heads, layer.head_size, rank),
            (layer.total_num_kv_heads, layer.num_kv_heads, layer.head_size, kv_rank),
            (layer.total_num_kv_heads, layer.num_kv_heads, layer.v_head_size, kv_rank),
        ]
        return [(total * size, own * size, portion) for total, own, size, portion in heads]
    if isinstance(layer, MergedColumnParallelLinear):
        return [(size, size // ranks, rank) for size in layer.output_sizes]
    if isinstance(layer, ColumnParallelLinear):
        return [(layer.output_size, layer.output_size // ranks, rank)]
    if isinstance(layer, RowParallelLinear | ReplicatedLinear):
        return [(layer.output_size, layer.output_size, 0)]
    raise EngineError(f"{name} is a {type(layer).__name__}: no proof knows how it is cut over ranks")


def _experts(layer: RoutedExperts) -> Iterator[tuple[str, Slot]]:
    """Expert for expert: gate and up lie in one GEMM, down in another."""
    hidden, width = layer.hidden_size, layer.intermediate_size_per_partition
    parallel = layer.moe_config.moe_parallel_config
    rank_rows, whole = slice(parallel.tp_rank * width, (parallel.tp_rank + 1) * width), parallel.tp_size * width
    for gemm in layer.quant_method.gemms:
        source = f"{layer.layer_name}.{gemm.expert}"
        if gemm.part == DOWN:
            yield f"{source}.down_proj.weight", Slot(gemm.prefix, "weight", columns=rank_rows, shape=(hidden, whole))
            continue
        for part, name in enumerate(families.EXPERT_PARTS[families.GATE_UP]):
            slot = Slot(gemm.prefix, "weight", part, start=part * width, rows=rank_rows, shape=(whole, hidden))
            yield f"{source}.{name}.weight", slot


def expert_gemms(model: Module) -> dict[str, tuple[RoutedExperts, ExpertGemm]]:
    """Return the GEMMs of quantised experts, by names of ours: they are no modules of the model."""
    layers = [
        layer for layer in model.modules() if isinstance(getattr(layer, "quant_method", None), OnlineExpertsMethod)
    ]
    return {gemm.prefix: (layer, gemm) for layer in layers for gemm in layer.quant_method.gemms}


def expert_shape(layer: RoutedExperts, gemm: ExpertGemm) -> LocalShape:
    width, is_cut = layer.intermediate_size_per_partition, layer.moe_config.moe_parallel_config.tp_size > 1
    if gemm.part == GATE_UP:
        return LocalShape(channels=2 * width, length=layer.hidden_size, is_cut=is_cut)
    return LocalShape(channels=layer.hidden_size, length=width, is_cut=is_cut)


def local_shape(layer: Module) -> LocalShape:
    """Return the shape of a layer's weight on this rank. layer: linear, or lm_head."""
    if isinstance(layer, VocabParallelEmbedding):
        return LocalShape(layer.num_embeddings_per_partition, layer.embedding_dim, is_cut=layer.tp_size > 1)
    if isinstance(layer, RowParallelLinear | ColumnParallelLinear):
        sizes = layer.output_size_per_partition, layer.input_size_per_partition
        return LocalShape(*sizes, is_cut=layer.tp_size > 1)
    return LocalShape(layer.output_size, layer.input_size, is_cut=False)


def is_wide(layer: Module | None, parameter: str, *, dtype: torch.dtype) -> bool:
    """Return whether a model in that type loads this parameter in FP32, as some do with their routers. layer: None:
    experts, which are not."""
    if layer is None or dtype is torch.float32:
        return False
    created = get_layerwise_info(layer).restore_metadata[0].get(parameter)  # what is packed may be another one
    held = getattr(layer, parameter, None) if created is None else created  # what vLLM reloads where it lies
    return held is not None and held.dtype is torch.float32


def round_to_engine(tensor: Tensor, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Round a tensor to the values that an engine in that type can have, whatever the trainer's type."""
    return tensor.to(dtype)
