"""A trainer's forward that is the rollouts': the engine's layers, fused and quantised as it has them, its operations.

The policy that learns is then the policy that sampled, log-probs included. What transformers built keeps its modules,
parameters and their names; only what they do is another thing (`put_in`), so checkpoints, weight updates, digests and
the exported model do not change. Parameters are FP32 masters; FSDP gives a forward what it rounds to BF16, which is
what a weight update sends.

Operations are vLLM's CPU kernels, and torch's where vLLM has torch's. What is not a product of weights has the gradient
of its plain formula, at the inputs that the kernel had (norms: one rounding from them). A quantised layer is passed
straight through: with codes of weights and activations W^ and X^, in BF16,

    Y = W^ X^ + b     dX = dY W^     dW = dY^T X^     db = sum dY

and its activations are kept for that as codes and scales, or made again from what is kept before them (`gated`). Scales
by the largest value never clip, so nothing is masked.

The codes kept are the codec's. oneDNN's are the same. sgl's kernel divides in another way and may round a tie to the
other side, and nothing else: x and a = 127 s are BF16, of significands X and A < 256, and 127 X / (2^k A) is n + 1/2
or off by 1 / (254 X) of it at least. The other code is as near to x; dW is another one by sum_t s_t |dY_tn| at most,
over tokens with a tie in channel k.

Legend: T tokens of all sequences in a row, S sequences, D channels of a head, N output and K input channels of a layer,
H width of the residual stream, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from verl.models.transformers.dense_common import CausalLMOutputForPPO

from appliance.errors import SyncError, TrainingError
from appliance.quant.codec import QuantisedWeight
from appliance.quant.codec_int8 import quantise_int8
from appliance.quant.cpu_gemm import OneDnnGemm, SglGemm, load_kernels, packs_quickly
from appliance.quant.files import kept_layers
from appliance.quant.layer_view import is_ignored
from appliance.quant.profile import Smoothing, fold, load_smoothing
from appliance.sync.manifest import Manifest, digest
from appliance.sync.precision import AS_PLANNED, Precision, quantisation_at
from appliance.terms.families import FAMILIES, Unit
from appliance.terms.settings import Quantisation

_HINT = "use trainer.forward: bf16"
_DEFAULT_ROPE = "default"
_ROPES = (_DEFAULT_ROPE, "llama3")
_BLOCK = 32  # tokens of a block of the attention's cache
_WHOLE_ROWS = 32  # channels that a head has to be a multiple of for the kernel's wide form


class _Plain(Function):
    """forward: the kernel.  backward: that of the plain formula, computed again. All inputs want gradients."""

    @staticmethod
    def forward(ctx: Any, kernel: Callable[..., Tensor], plain: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.plain = plain
        ctx.save_for_backward(*inputs)
        return kernel(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [each.detach().requires_grad_() for each in ctx.saved_tensors]
        with torch.enable_grad():
            output = ctx.plain(*inputs)
        return None, None, *torch.autograd.grad(output, inputs, grad)


def add_norm(x_TH: Tensor, residual_TH: Tensor | None, weight_H: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """(normed, new residual), both in the type of `x`: added and normed in float32, each rounded once."""
    return _AddNorm.apply(x_TH, residual_TH, weight_H, eps)


def _norm(summed: Tensor, weight_H: Tensor, *, eps: float) -> Tensor:
    normed = summed * torch.rsqrt(summed.pow(2).mean(dim=-1, keepdim=True) + eps)
    return normed.to(weight_H.dtype) * weight_H


class _AddNorm(Function):
    """Keeps the new residual, one rounding from what was normed, in place of both inputs."""

    @staticmethod
    def forward(
        ctx: Any, x_TH: Tensor, residual_TH: Tensor | None, weight_H: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        summed = x_TH.float() if residual_TH is None else x_TH.float() + residual_TH.float()
        kept = summed.to(x_TH.dtype)
        ctx.eps = eps
        ctx.save_for_backward(x_TH if residual_TH is None else kept, weight_H)
        return _norm(summed, weight_H, eps=eps), kept

    @staticmethod
    def backward(ctx: Any, grad_normed: Tensor, grad_kept: Tensor) -> tuple[Tensor | None, ...]:
        kept, weight_H = ctx.saved_tensors
        summed, weight_H = kept.float().requires_grad_(), weight_H.detach().requires_grad_()
        with torch.enable_grad():
            normed = _norm(summed, weight_H, eps=ctx.eps)
        of_sum, of_weight = torch.autograd.grad(normed, (summed, weight_H), grad_normed)
        grad = (of_sum + grad_kept).to(kept.dtype)
        return grad, grad if ctx.needs_input_grad[1] else None, of_weight, None


def head_norm(x: Tensor, weight_D: Tensor, *, eps: float) -> Tensor:
    """x: [T, heads, D]."""
    return add_norm(x, None, weight_D, eps=eps)[0]


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[T, I] of [T, 2I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


class Batch:
    """Sequences in one row, and what rotary embedding and attention need to know of them.

    positions_T: int64, from 0 at each sequence's start.  cos_sin: [positions, D], D / 2 cosines and then as many sines.
    window: tokens that a token sees at most; None, all before it.
    """

    def __init__(
        self,
        positions_T: Tensor,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        cos_sin: Tensor,
        scale: float,
        window: int | None = None,
    ) -> None:
        load_kernels()
        self.positions_T, self.cos_sin, self.scale, self.window = positions_T, cos_sin, scale, window
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        starts = torch.nonzero(positions_T == 0).flatten()
        ends = torch.cat([starts[1:], starts.new_tensor([len(positions_T)])])
        self.lengths: list[int] = (ends - starts).tolist()
        self.starts_S1 = torch.cat([starts, ends[-1:]]).int()
        self._lengths_S = (ends - starts).int()
        blocks_S = (ends - starts + _BLOCK - 1) // _BLOCK
        first_S = blocks_S.cumsum(0) - blocks_S
        self._blocks = int(blocks_S.sum())
        self._table = (first_S[:, None] + torch.arange(int(blocks_S.max()))).int()
        # blocks of a sequence stand one after another: a token's slot is its position after its sequence's first
        self._slots_T = first_S.repeat_interleave(ends - starts) * _BLOCK + positions_T
        self._isa = "vec" if head_dim % _WHOLE_ROWS == 0 else "vec16"
        self._schedule = torch.ops._C.get_scheduler_metadata(
            len(self.lengths),
            heads,
            kv_heads,
            head_dim,
            self._lengths_S,
            torch.bfloat16,
            self.starts_S1,
            True,
            -1 if window is None else window,
            self._isa,
            True,
            None,
            "auto",
        )

    def rotate(self, qk: Tensor) -> Tensor:
        """qk: [T, heads, D], of any number of heads."""
        return _Rotary.apply(qk, self.positions_T, self.cos_sin)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[T, heads, D]; q: the same.  k, v: [T, kv_heads, D]."""
        return _Plain.apply(self._kernel, self._formula, q, k, v)

    def _kernel(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache = torch.zeros(self._blocks, self.kv_heads, 2 * _BLOCK, self.head_dim, dtype=q.dtype)
        keys, values = cache.chunk(2, dim=2)
        out = torch.empty_like(q)
        torch.ops._C.cpu_attn_reshape_and_cache(k, v, keys, values, self._slots_T, self._isa, 1.0, 1.0, "auto")
        window = -1 if self.window is None else self.window
        torch.ops._C.cpu_attention_with_kv_cache(
            q,
            keys,
            values,
            out,
            self.starts_S1,
            self._lengths_S,
            self.scale,
            True,
            None,
            window,
            self._table,
            0.0,
            self._schedule,
            None,
            None,
            1.0,
            1.0,
            "auto",
        )
        return out

    def _formula(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = []
        for q_, k_, v_ in zip(*(each.split(self.lengths) for each in (q, k, v)), strict=True):
            mask = None
            if self.window is not None and len(q_) > self.window:
                places = torch.arange(len(q_))
                behind = places[:, None] - places
                mask = (behind >= 0) & (behind < self.window)
            parts.append(
                functional.scaled_dot_product_attention(
                    q_.transpose(0, 1)[None],
                    k_.transpose(0, 1)[None],
                    v_.transpose(0, 1)[None],
                    attn_mask=mask,
                    is_causal=mask is None,
                    scale=self.scale,
                    enable_gqa=True,
                )[0].transpose(0, 1)
            )
        return torch.cat(parts)


class _Rotary(Function):
    """A rotation of pairs of channels; its gradient is the rotation back."""

    @staticmethod
    def forward(ctx: Any, qk: Tensor, positions_T: Tensor, cos_sin: Tensor) -> Tensor:
        ctx.save_for_backward(positions_T, cos_sin)
        rotated = qk.reshape(len(qk), -1).clone(memory_format=torch.contiguous_format)
        torch.ops._C.rotary_embedding(positions_T, rotated, None, qk.shape[-1], cos_sin, True)
        return rotated.view(qk.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        positions_T, cos_sin = ctx.saved_tensors
        cos, sin = cos_sin[positions_T].float()[:, None].chunk(2, dim=-1)
        first, second = grad.float().chunk(2, dim=-1)
        return torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1).to(grad.dtype), None, None


@dataclass(frozen=True)
class Int8Weight:
    """Of one layer of the engine, until the next update: what multiplies, and what the gradients need.

    factor_K: of smoothing, powers of two; the weights times it are quantised.
    """

    quantised: QuantisedWeight
    gemm: SglGemm | OneDnnGemm
    factor_K: Tensor | None

    @classmethod
    def of(cls, weights: Sequence[Tensor], *, factor_K: Tensor | None) -> Int8Weight:
        """weights: of the linears that the engine fuses, [N, K] BF16 each, folded. Raises NumericsError."""
        load_kernels()
        quantised = quantise_int8(torch.cat([each.detach() for each in weights]))
        kind = SglGemm if packs_quickly(*quantised.codes_NK.shape) else OneDnnGemm
        return cls(quantised, kind(quantised.codes_NK, scale_N1=quantised.scale), factor_K)

    def __call__(
        self, x_TK: Tensor, weights: Sequence[Tensor], bias_N: Tensor | None, *, gated: bool = False
    ) -> Tensor:
        """[T, N] BF16. weights: those that it was made of, before folding: they get the gradients.

        gated: x is [T, 2K], and `silu_and_mul` of it is multiplied.
        """
        return _Int8Linear.apply(self, gated, x_TK, bias_N, *weights)


class _Int8Linear(Function):
    @staticmethod
    def forward(ctx: Any, layer: Int8Weight, gated: bool, x: Tensor, bias_N: Tensor | None, *weights: Tensor) -> Tensor:
        ctx.layer, ctx.gated, ctx.rows = layer, gated, [len(each) for each in weights]
        x_TK = silu_and_mul(x) if gated else x
        if any(ctx.needs_input_grad):
            codes = None if gated else quantise_int8(x_TK)
            ctx.save_for_backward(*((x,) if codes is None else (codes.codes_NK, codes.scale)))
        return layer.gemm(x_TK, bias_N)

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:
        needs_x, needs_bias, *needs_weights = ctx.needs_input_grad[2:]
        weight = ctx.layer.quantised
        grad_x = grad_TN @ (weight.codes_NK * weight.scale).to(grad_TN.dtype) if needs_x else None
        if ctx.gated:
            gate_up = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                x_TK = silu_and_mul(gate_up)
            codes = quantise_int8(x_TK.detach())
            codes_TK, scale_T1 = codes.codes_NK, codes.scale
            grad_x = torch.autograd.grad(x_TK, gate_up, grad_x)[0] if needs_x else None
        else:
            codes_TK, scale_T1 = ctx.saved_tensors
        grad_bias = grad_TN.sum(0, dtype=torch.float32).to(grad_TN.dtype) if needs_bias else None
        grads: list[Tensor | None] = [None] * len(ctx.rows)
        if any(needs_weights):
            grad_NK = grad_TN.t() @ (codes_TK * scale_T1).to(grad_TN.dtype)
            if ctx.layer.factor_K is not None:
                grad_NK *= ctx.layer.factor_K.to(grad_NK.dtype)
            grads = list(grad_NK.split(ctx.rows))
        return None, None, grad_x, grad_bias, *grads


class EngineLayer:
    """A linear layer as the engine has it: of one or several modules. name: the engine's.

    quantised: whether it computes in INT8 now.  sent: of each module's weight the digest with which the engines got it,
    to be held against what the next forward computes with; empty where that was done, or the weights have changed.
    """

    def __init__(self, name: str, parts: Sequence[tuple[str, nn.Linear]], *, smoothing: Smoothing) -> None:
        self.name, self.quantised = name, False
        self.sent: dict[str, str] = {}
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
        self.sent = {}

    def _check_sent(self) -> None:
        for name, part in self._parts:
            # of a copy: FSDP frees a weight by its storage's size, which is fixed for ever once numpy has looked at it
            ours, theirs = digest(part.weight.detach().clone()), self.sent[name]
            if ours != theirs:
                raise SyncError(f"{name}.weight: the trainer computes with digest {ours}, the engines got {theirs}")
        self.sent = {}

    def __call__(self, x: Tensor, *, gated: bool = False) -> Tensor:
        """[T, N] of [T, K]; gated: of [T, 2K]. Raises NumericsError for a weight that is not finite, SyncError for one
        that the engines have otherwise."""
        if self.sent:
            self._check_sent()
        weights = [part.weight for _, part in self._parts]
        biases = [part.bias for _, part in self._parts if part.bias is not None]
        bias_N = torch.cat(biases) if biases else None
        if not self.quantised:
            weight_NK = torch.cat(weights) if len(weights) > 1 else weights[0]  # a copy would be kept for backward
            if self._factor_K is not None:
                weight_NK = weight_NK * self._factor_K.to(weight_NK.dtype)
            return functional.linear(silu_and_mul(x) if gated else x, weight_NK, bias_N)
        if self._weight is None:
            folded = [
                fold(f"{name}.weight", weight.detach(), smoothing=self._smoothing)
                for (name, _), weight in zip(self._parts, weights, strict=True)
            ]
            self._weight = Int8Weight.of(folded, factor_K=self._factor_K)
        return self._weight(x, weights, bias_N, gated=gated)


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
        return self._down(self._gate_up(x), gated=True), residual

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
            layer.quantised = told.scheme.quantised and not (
                is_ignored(layer.name, ignore) or all(is_ignored(name, ignore) for name in layer.part_names)
            )

    def note_sent(self, manifest: Manifest) -> None:
        """The engines have this now, and so has this model until its weights change."""
        sent = {one.name: one.digest for one in manifest.records}
        for layer in self.linears():
            layer.sent = {name: sent.get(f"{name}.weight", "none") for name in layer.part_names}

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


def note_sent(manifest: Manifest) -> None:
    """As RolloutForward.note_sent. Nothing where the forward is BF16."""
    for flow in _PRESENT:
        flow.note_sent(manifest)


def quantised_layers() -> list[str]:
    """What computes in INT8 in this process now, by the engine's names."""
    return [layer.name for flow in _PRESENT for layer in flow.linears() if layer.quantised]


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
