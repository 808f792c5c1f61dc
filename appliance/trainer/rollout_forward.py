"""A trainer's forward that is the rollouts': the engine's layers, fused and quantised as it has them, its operations.

The policy that learns is then the policy that sampled, log-probs included. What transformers built keeps its modules,
parameters and their names; only what they do is another thing (`put_in`), so checkpoints, weight updates, digests and
the exported model do not change. Parameters are FP32 masters; FSDP gives a forward what it rounds to BF16, which is
what a weight update sends.

Legend: T tokens of all sequences in a row, H width of the residual stream, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from verl.models.transformers.dense_common import CausalLMOutputForPPO

from appliance.errors import TrainingError
from appliance.quant.files import kept_layers
from appliance.quant.layer_view import is_ignored
from appliance.quant.profile import Smoothing, fold, load_smoothing
from appliance.sync.precision import AS_PLANNED, Precision, quantisation_at
from appliance.terms.families import FAMILIES, Unit
from appliance.terms.schemes import Scheme
from appliance.terms.settings import Quantisation
from appliance.trainer.rollout_ops import Batch, Int8Weight, add_norm, head_norm, silu_and_mul

_HINT = "use trainer.forward: bf16"
_DEFAULT_ROPE = "default"
_ROPES = (_DEFAULT_ROPE, "llama3")


class EngineLayer:
    """A linear layer as the engine has it: of one or several modules. name: the engine's.

    quantised: whether it computes in INT8 now.
    """

    def __init__(self, name: str, parts: Sequence[tuple[str, nn.Linear]], *, smoothing: Smoothing) -> None:
        self.name, self.quantised = name, False
        self._smoothing = smoothing
        self._parts = parts
        self._factor_K = smoothing.factor_of(f"{parts[0][0]}.weight")
        self._weight: Int8Weight | None = None

    @property
    def part_names(self) -> list[str]:
        return [name for name, _ in self._parts]

    def forget(self) -> None:
        """The weights have changed."""
        self._weight = None

    def __call__(self, x: Tensor) -> Tensor:
        """[T, N] of [T, K]. Raises NumericsError for a weight that is not finite."""
        weights = [part.weight for _, part in self._parts]
        biases = [part.bias for _, part in self._parts if part.bias is not None]
        bias_N = torch.cat(biases) if biases else None
        if not self.quantised:
            weight_NK = torch.cat(weights)
            if self._factor_K is not None:
                weight_NK = weight_NK * self._factor_K.to(weight_NK.dtype)
            return functional.linear(x, weight_NK, bias_N)
        if self._weight is None:
            folded = [
                fold(f"{name}.weight", weight.detach(), smoothing=self._smoothing)
                for (name, _), weight in zip(self._parts, weights, strict=True)
            ]
            self._weight = Int8Weight.of(folded, factor_K=self._factor_K)
        return self._weight(x, weights, bias_N)


class DecoderLayer:
    """What one decoder layer of Llama's kind does, in place of its `forward`."""

    def __init__(self, layer: nn.Module, *, prefix: str, units: Sequence[Unit], smoothing: Smoothing) -> None:
        self.layers = [
            EngineLayer(
                prefix + (unit.fused or unit.members[0]),
                [(prefix + member, layer.get_submodule(member)) for member in unit.members],
                smoothing=smoothing,
            )
            for unit in units
        ]
        self._qkv, self._o, self._gate_up, self._down = self.layers
        self._norms = [
            (layer.get_submodule(name), smoothing.factor_of(f"{prefix}{name}.weight"))
            for name in ("input_layernorm", "post_attention_layernorm")
        ]
        self._head_norms = [getattr(layer.self_attn, name, None) for name in ("q_norm", "k_norm")]

    def __call__(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        """([T, H], residual [T, H]): their sum is what transformers' layer returns."""
        heads, kv_heads, size = batch.heads, batch.kv_heads, batch.head_dim
        x, residual = self._norm(0, x, residual)
        qkv = self._qkv(x).view(len(x), -1, size)
        q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
        for place, norm in enumerate(self._head_norms):
            if norm is not None:
                normed = head_norm((q, k)[place], norm.weight, eps=norm.variance_epsilon)
                q, k = (normed, k) if place == 0 else (q, normed)
        q, k = batch.rotate(torch.cat([q, k], dim=1)).split([heads, kv_heads], dim=1)
        attended = batch.attend(q.contiguous(), k.contiguous(), v.contiguous())
        x = self._o(attended.reshape(len(x), -1))
        x, residual = self._norm(1, x, residual)
        return self._down(silu_and_mul(self._gate_up(x))), residual

    def _norm(self, place: int, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        norm, factor_H = self._norms[place]
        weight_H = norm.weight if factor_H is None else norm.weight * factor_H.to(norm.weight.dtype)
        return add_norm(x, residual, weight_H, eps=norm.variance_epsilon)


class RolloutForward:
    """Of one model. `forget` after each change of its weights."""

    def __init__(self, model: nn.Module, *, quantisation: Quantisation, num_tokens: int) -> None:
        """model: a causal language model of transformers, before FSDP. Raises TrainingError where it is not known.

        num_tokens: of the tokenizer; verl has engines never sample what a larger vocabulary has beyond it.
        """
        profile = Path(quantisation.profile) if quantisation.profile else None
        smoothing = Smoothing() if profile is None else load_smoothing(profile)
        self._quantisation = quantisation
        self._num_tokens = num_tokens
        self._kept = () if profile is None else kept_layers(profile)
        architecture = type(model).__name__
        family = FAMILIES.get(architecture)
        if family is None or family.mixture:
            raise TrainingError(f"trainer.forward: rollout does not know {architecture}", hint=_HINT)
        self._config = model.config
        self._cos_sin = _cos_sin(model)
        self._layers = [
            DecoderLayer(layer, prefix=f"model.layers.{place}.", units=family.dense, smoothing=smoothing)
            for place, layer in enumerate(model.model.layers)
        ]
        for mine, layer in zip(self._layers, model.model.layers, strict=True):
            layer.forward = mine.__call__
        model.forward = functools.partial(self, model)
        self.follow(AS_PLANNED)

    def follow(self, precision: Precision) -> None:
        """From now on compute in what an engine with the plan's settings does that is told this with an update."""
        told = quantisation_at(self._quantisation, precision)
        ignore = (*told.ignore, *self._kept)
        for layer in self.linears():
            layer.forget()
            layer.quantised = told.scheme is Scheme.INT8 and not (
                is_ignored(layer.name, ignore) or all(is_ignored(name, ignore) for name in layer.part_names)
            )

    def linears(self) -> list[EngineLayer]:
        return [linear for layer in self._layers for linear in layer.layers]

    def forget(self) -> None:
        for layer in self.linears():
            layer.forget()

    def __call__(
        self,
        model: nn.Module,
        *,
        input_ids: Tensor,
        position_ids: Tensor,
        shift_labels: Tensor,
        temperature: float,
        **_: Any,
    ) -> CausalLMOutputForPPO:
        """Log-probs [1, T] of `shift_labels`, in nats, and where no gradient is asked for the entropy [1, T].

        input_ids, shift_labels: [1, T].  position_ids: [1, T], from 0 at each sequence's start.
        """
        config, positions_T = self._config, position_ids[0]
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        batch = Batch(
            positions_T,
            heads=heads,
            kv_heads=config.num_key_value_heads,
            head_dim=size,
            cos_sin=self._cos_sin,
            scale=size**-0.5,
        )
        x: Tensor = model.model.embed_tokens(input_ids)[0]
        residual = None
        for layer in model.model.layers:
            x, residual = layer(x, residual, batch)
        norm = model.model.norm
        x, _ = add_norm(x, residual, norm.weight, eps=norm.variance_epsilon)
        logits_TV = model.lm_head(x).float()
        logits_TV[:, self._num_tokens :] = -torch.inf
        if temperature != 1:
            logits_TV = logits_TV / temperature
        log_probs_TV = logits_TV.log_softmax(dim=-1)
        entropy = None
        if not torch.is_grad_enabled():
            entropy = -(log_probs_TV.exp() * log_probs_TV)[:, : self._num_tokens].sum(dim=-1)[None]
        return CausalLMOutputForPPO(log_probs=log_probs_TV.gather(1, shift_labels[0][:, None]).T, entropy=entropy)


_PRESENT: list[RolloutForward] = []  # of this process: verl builds the model, and another of its objects sends weights


def put_in(model: nn.Module, *, quantisation: Quantisation, num_tokens: int) -> RolloutForward:
    """As RolloutForward."""
    _PRESENT[:] = [RolloutForward(model, quantisation=quantisation, num_tokens=num_tokens)]
    return _PRESENT[0]


def follow_engines(precision: Precision) -> None:
    """What the engines beside this process compute in from this update on. Nothing where the forward is BF16."""
    for flow in _PRESENT:
        flow.follow(precision)


def _cos_sin(model: nn.Module) -> Tensor:
    """[positions, D] BF16, as vLLM has it."""
    rotary, config = model.model.rotary_emb, model.config
    kind = config.rope_parameters["rope_type"]
    if kind not in _ROPES:
        raise TrainingError(f"trainer.forward: rollout does not know rope_type {kind}", hint=_HINT)
    make: Callable[..., Any] = rotary.compute_default_rope_parameters
    inverse, scaling = (make if kind == _DEFAULT_ROPE else ROPE_INIT_FUNCTIONS[kind])(config, None)
    angles = torch.outer(torch.arange(config.max_position_embeddings, dtype=torch.float32), inverse.float())
    return (torch.cat([angles.cos(), angles.sin()], dim=-1) * scaling).to(torch.bfloat16)
