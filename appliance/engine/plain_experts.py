"""What experts in BF16 must hold: the tensors received, as vLLM's kernel reads them.

One operation routes, multiplies twice and activates in between: no probe of it has an exact answer. What it multiplies
by are two parameters of the layer, handed to it at every call, and they are compared bit by bit. On a CPU each expert's
part is packed there by itself, an order of its rows and columns, zeros after it; with Triton it lies as it came; with
FlashInfer's CUTLASS up comes before gate. What other kernels make of it is not known here.

Legend: E experts, N output channels, K input channels of this rank's part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import pad
from vllm import _custom_ops
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from appliance.engine.tensor_slots import ALL, Slot

_PLAIN = (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON)
_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))  # a checkpoint has the one or the other


@dataclass(frozen=True)
class ExpertSlot(Slot):
    """An expert's part of a parameter [E, N, K]."""

    expert: int = 0
    stored_shape: tuple[int, int] = (0, 0)
    """[N, K] there, zeros included."""
    isa: str = ""
    """Instruction set of vLLM's packed kernel on a CPU, or empty."""
    dtype: torch.dtype = torch.bfloat16

    def cut(self, tensor: Tensor) -> Tensor:
        """Cut the expert's part out of a tensor, [N, K] as it must be stored."""
        own_NK = super().cut(tensor)
        if not self.isa:
            return own_NK
        more = [stored - given for stored, given in zip(self.stored_shape, own_NK.shape, strict=True)]
        whole_NK = pad(own_NK.to(self.dtype), (0, more[1], 0, more[0])).contiguous()
        return _custom_ops.cpu_prepack_moe_weight(whole_NK[None], self.isa)[0]

    def within(self, parameter: Tensor) -> Tensor:
        return parameter[self.expert, self.start : self.start + self.stored_shape[0]]


def expert_slots(model: Module, *, dtype: torch.dtype) -> Iterator[tuple[str, ExpertSlot]]:
    """Yield (name of a checkpoint's tensor, its place) of the experts that are not quantised and whose order is known
    here. dtype: the engine's."""
    for name, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(layer, RoutedExperts) and isinstance(method, UnquantizedFusedMoEMethod):
            yield from _of_layer(name, layer, method, dtype=dtype)


def _of_layer(
    name: str, layer: RoutedExperts, method: UnquantizedFusedMoEMethod, *, dtype: torch.dtype
) -> Iterator[tuple[str, ExpertSlot]]:
    config, backend = layer.moe_config, method.unquantized_backend
    parallel, hidden, width = config.moe_parallel_config, layer.hidden_size, layer.intermediate_size_per_partition
    isa, padded, order = "", width, (0, 1)
    if backend is UnquantizedMoeBackend.CPU:
        isa, padded = method.experts_cls.isa, method.experts_cls._padded_intermediate_size(config)
    elif backend is UnquantizedMoeBackend.FLASHINFER_CUTLASS:
        order = (1, 0)
    elif backend not in _PLAIN:
        return
    is_swiglu = config.activation is MoEActivation.SILU and config.is_act_and_mul
    kernel = getattr(method.moe_kernel, "fused_experts", None)  # none in an update that broke off
    if not is_swiglu or parallel.use_ep or getattr(kernel, "_use_zentorch", False):
        return
    rank_rows, whole = slice(parallel.tp_rank * width, (parallel.tp_rank + 1) * width), parallel.tp_size * width
    for expert in range(layer.local_num_experts):
        of_expert = {"expert": expert, "isa": isa, "dtype": dtype}
        for gate, up, down in _NAMES:
            source = f"{layer.layer_name}.{expert}"
            for half, part in zip(order, (gate, up), strict=True):
                yield (
                    f"{source}.{part}.weight",
                    ExpertSlot(
                        name,
                        "w13_weight",
                        3 * expert + (part == up),
                        start=half * padded,
                        rows=rank_rows,
                        shape=(whole, hidden),
                        stored_shape=(padded, hidden),
                        **of_expert,
                    ),
                )
            yield (
                f"{source}.{down}.weight",
                ExpertSlot(
                    name,
                    "w2_weight",
                    3 * expert + 2,
                    rows=ALL,
                    columns=rank_rows,
                    shape=(hidden, whole),
                    stored_shape=(hidden, padded),
                    **of_expert,
                ),
            )
