"""Quantised experts: the two GEMMs of each expert run as separate quantised linear layers.

vLLM's INT8 method for experts is weight-only on CUDA and needs AMX on a CPU, and FP8 has no kernels on a CPU. Here one
expert after the other takes its tokens through the same kernels, codes and scales as a linear layer: correct first.
Biases, activations other than SwiGLU, expert parallelism and CUDA graphs are refused by name.

    y_m = sum over the experts e of token m, in ascending order, of  w_me * down_e(silu(gate_e(x_m)) * up_e(x_m))

Products are rounded to the activations' type as in a dense layer, the weighted sum is in float32 and rounded once.

Legend: E experts, M tokens, T experts of one token, N output channels, K input channels of this rank's part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation, apply_moe_activation
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase
from vllm.model_executor.layers.quantization.utils.quant_utils import amax_for_moe_weight_quant
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform

from appliance.engine.quantised import (
    OnlineLinearMethod,
    Quantising,
    WholeAbsmax,
    is_cut,
    refuse_cut_blocks,
    sample_rows,
)
from appliance.errors import EngineError
from appliance.quant.codec import QuantisedWeight
from appliance.terms.schemes import Scheme

try:
    from vllm.model_executor.layers.fused_moe.router.cpu_router import select_experts
except ImportError:  # Remove when: vLLM 0.28 and 0.29 are not served
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import select_experts

GATE_UP, DOWN = "w13", "w2"  # vLLM's names of the two weights of an expert
_SHARDS = {GATE_UP: ("w1", "w3"), DOWN: ("w2",)}  # and of the checkpoint's tensors that each is made of


class ExpertGemm(Module):
    """One of an expert's two GEMMs: what a method for linear layers sees in place of a linear layer.

    Not a submodule of the layer: nothing is ever loaded into it by name.
    """

    prefix: str
    """Name of the GEMM: of the experts' layer, then the expert and the part."""
    expert: int
    """Number of the expert on this rank."""
    part: str
    """Part of the expert: GATE_UP or DOWN."""

    def __init__(self, method: OnlineLinearMethod, *, prefix: str, expert: int, part: str) -> None:
        super().__init__()
        self.prefix = f"{prefix}.{expert}.{part}"
        self.expert = expert
        self.part = part
        self.quant_method = method
        for name in ("bias", "input_scale", "input_zero_point", "azp_adj"):  # kernels look for them
            self.register_parameter(name, None)

    def quantise(self, weight_NK: Tensor, *, absmax: Tensor | None) -> QuantisedWeight:
        """Quantise one of an expert's weights. absmax: of the whole weight, where this one is a part that does not show
        it. Raises NumericsError."""
        self.quant_method.require_shape(self.prefix, rows=len(weight_NK), length=weight_NK.shape[1])
        self.length = weight_NK.shape[1]
        self.logical_widths = [len(weight_NK)]
        self.weight = Parameter(weight_NK, requires_grad=False)
        quantised = self.quant_method.quantise(weight_NK, absmax=absmax)
        self.quant_method.install(self, quantised)
        return quantised

    def forward(self, x_MK: Tensor) -> Tensor:
        return self.quant_method.apply(self, x_MK)


class OnlineExpertsMethod(Quantising, OnlineMoEMethodBase):
    """The method of one layer of experts. `gemms` has two entries per expert of this rank: w13, then w2."""

    provable = False  # each of `gemms` is a separate layer
    supports_eplb = False

    def __init__(
        self, scheme: Scheme, *, emulated: bool, make: Callable[[], OnlineLinearMethod], layer: RoutedExperts
    ) -> None:
        """make: a new method of that scheme, for one GEMM."""
        super().__init__(layer.moe_config)
        _refuse_unknown(layer)
        self.scheme, self.emulated, self._make = scheme, emulated, make
        self.gemms: tuple[ExpertGemm, ...] = ()
        self._whole = WholeAbsmax(scheme)

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        ranks = self.moe.moe_parallel_config.tp_size
        cut = [intermediate_size_per_partition] if ranks > 1 else []
        refuse_cut_blocks(layer.layer_name, cut, scheme=self.scheme, num_ranks=ranks, unit="channels of an expert")
        self._cut = {
            GATE_UP: is_cut(self.scheme, rows_are_cut=False, num_ranks=ranks),
            DOWN: is_cut(self.scheme, rows_are_cut=ranks > 1, num_ranks=ranks),
        }
        if any(self._cut.values()):
            kwargs["weight_loader"] = self._whole.recording(kwargs["weight_loader"])
        self.gemms = tuple(
            ExpertGemm(self._make(), prefix=layer.layer_name, expert=expert, part=part)
            for expert in range(num_experts)
            for part in (GATE_UP, DOWN)
        )
        super().create_weights(layer, num_experts, hidden_size, intermediate_size_per_partition, *args, **kwargs)

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Quantise every expert and drop the BF16 weights. Raises NumericsError."""
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        weights = {GATE_UP: layer.w13_weight.data, DOWN: layer.w2_weight.data}
        ranks = self.moe.moe_parallel_config.tp_size
        for gemm in self.gemms:
            weight_NK = weights[gemm.part][gemm.expert]
            absmax = None
            if self._cut[gemm.part]:
                absmax = self._whole.take(
                    weight_NK,
                    ask=lambda own: amax_for_moe_weight_quant(own, ranks),
                    expert=gemm.expert,
                    shards=_SHARDS[gemm.part],
                )
            quantised = gemm.quantise(weight_NK, absmax=absmax)
            if self.on_quantised is not None:
                self.on_quantised(layer, sample_rows(weight_NK), quantised)
        replace_parameter(layer, "w13_weight", None)
        replace_parameter(layer, "w2_weight", None)
        layer._already_called_process_weights_after_loading = True

    @property
    def is_monolithic(self) -> bool:
        """Whether routing is this method's work: vLLM's router has no kernel on a CPU."""
        return current_platform.is_cpu()

    def apply_monolithic(
        self, layer: RoutedExperts, x: Tensor, router_logits: Tensor, input_ids: Tensor | None = None
    ) -> Tensor:
        """Route tokens as vLLM's BF16 experts on a CPU do, and compute the experts' outputs."""
        weights_MT, ids_MT = select_experts(
            hidden_states=x,
            router_logits=router_logits,
            top_k=self.moe.experts_per_token,
            use_grouped_topk=layer.use_grouped_topk,
            renormalize=layer.renormalize,
            topk_group=layer.topk_group,
            num_expert_group=layer.num_expert_group,
            custom_routing_function=layer.custom_routing_function,
            scoring_func=layer.scoring_func,
            routed_scaling_factor=layer.routed_scaling_factor,
            e_score_correction_bias=layer.e_score_correction_bias,
        )
        return self._mixture(x, weights_MT=weights_MT, ids_MT=ids_MT)

    def apply(
        self,
        layer: RoutedExperts,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: object,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """Compute the experts' outputs after vLLM's router (CUDA; read only). Shared experts are the runner's work."""
        return self._mixture(x, weights_MT=topk_weights, ids_MT=topk_ids)

    def _mixture(self, x_MK: Tensor, *, weights_MT: Tensor, ids_MT: Tensor) -> Tensor:
        sum_MK = torch.zeros(x_MK.shape, dtype=torch.float32, device=x_MK.device)
        for expert in ids_MT.unique().tolist():
            token, place = (ids_MT == expert).nonzero(as_tuple=True)
            y = self._expert(expert, x_MK[token]).float()
            sum_MK.index_add_(0, token, y * weights_MT[token, place, None].float())
        return sum_MK.to(x_MK.dtype)

    def _expert(self, expert: int, x_MK: Tensor) -> Tensor:
        gate_up, down = self.gemms[2 * expert : 2 * expert + 2]
        both = gate_up(x_MK)
        hidden = both.new_empty(len(both), both.shape[1] // 2)
        apply_moe_activation(self.moe.activation, hidden, both)
        return down(hidden)

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        return None

    @property
    def kernel_name(self) -> str:
        names = dict.fromkeys(gemm.quant_method.kernel_name for gemm in self.gemms)
        return f"{' and '.join(names)}, expert by expert"


def _refuse_unknown(layer: RoutedExperts) -> None:
    """Raise EngineError for what the experts' loop does not do."""
    config = layer.moe_config
    wrong = {
        "biases": config.has_bias,
        f"the activation {config.activation.value}": config.activation is not MoEActivation.SILU,
        "a limit or scale inside the activation": any(
            value is not None for value in (layer.swiglu_limit, layer.swiglu_alpha, layer.swiglu_beta)
        ),
        "router weights on the experts' input": layer.apply_router_weight_on_input,
        "expert parallelism": config.moe_parallel_config.use_ep,
        "CUDA graphs": not current_platform.is_cpu() and not get_current_vllm_config().model_config.enforce_eager,
    }
    unsupported = [what for what, is_so in wrong.items() if is_so]
    if unsupported:
        raise EngineError(
            f"{layer.layer_name}: quantised experts do not support {', '.join(unsupported)}",
            hint="use rollout.scheme=bf16, or keep the experts in BF16 by quantization.ignore",
        )


def pack_experts_again(layers: Iterable[Module]) -> None:
    """Call before a reload of the weights: vLLM's BF16 experts on a CPU are packed once, at the first load.

    A second load copies plain weights into the packed tensor: another model, without an error where nothing is padded.
    Without a kernel the method makes a new one, and packs. Remove when: UnquantizedFusedMoEMethod packs on reload.
    """
    for layer in layers:
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod) and method.unquantized_backend is UnquantizedMoeBackend.CPU:
            method.moe_kernel = None
