"""The operations of the rollouts' forward, with gradients: vLLM's CPU kernels, and torch where vLLM uses torch.

What is not a product of weights has the gradient of its plain formula, at the inputs that the kernel had. A quantised
layer is passed straight through: with codes of weights and activations W^ and X^, in BF16,

    Y = W^ X^ + b     dX = dY W^     dW = dY^T X^     db = sum dY

and its activations are kept for that as codes and scales. Scales by the largest value never clip, so nothing is masked.

Legend: T tokens of all sequences in a row, S sequences, D channels of a head, N output channels, K input channels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from appliance.quant.codec import QuantisedWeight
from appliance.quant.codec_int8 import quantise_int8
from appliance.quant.cpu_gemm import OneDnnGemm, SglGemm, load_kernels, packs_quickly

_BLOCK = 32  # tokens of a block of the attention's cache
_WHOLE_ROWS = 32  # channels that a head has to be a multiple of for the kernel's wide form


class _Plain(Function):
    """forward: the kernel, or the plain formula itself.  backward: that of the plain formula, computed again."""

    @staticmethod
    def forward(ctx: Any, kernel: Callable[..., Tensor], plain: Callable[..., Any], *inputs: Tensor) -> Any:
        ctx.plain = plain
        ctx.save_for_backward(*inputs)
        return kernel(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        inputs = [each.detach().requires_grad_(need) for each, need in zip(ctx.saved_tensors, needed, strict=True)]
        with torch.enable_grad():
            outputs = ctx.plain(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        found = iter(torch.autograd.grad(outputs, [each for each in inputs if each.requires_grad], grads))
        return None, None, *(next(found) if need else None for need in needed)


def add_norm(x_TH: Tensor, residual_TH: Tensor | None, weight_H: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """(normed, new residual), both in the type of `x`: added and normed in float32, each rounded once."""
    formula = functools.partial(_add_norm, eps=eps)
    inputs = (x_TH, weight_H) if residual_TH is None else (x_TH, weight_H, residual_TH)
    return _Plain.apply(formula, formula, *inputs)


def _add_norm(
    x_TH: Tensor, weight_H: Tensor, residual_TH: Tensor | None = None, *, eps: float
) -> tuple[Tensor, Tensor]:
    summed = x_TH.float() if residual_TH is None else x_TH.float() + residual_TH.float()
    normed = summed * torch.rsqrt(summed.pow(2).mean(dim=-1, keepdim=True) + eps)
    return normed.to(weight_H.dtype) * weight_H, summed.to(x_TH.dtype)


def head_norm(x: Tensor, weight_D: Tensor, *, eps: float) -> Tensor:
    """x: [T, heads, D]."""
    return add_norm(x, None, weight_D, eps=eps)[0]


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[T, I] of [T, 2I]."""
    return _Plain.apply(_silu_and_mul, _silu_and_mul, gate_up)


def _silu_and_mul(gate_up: Tensor) -> Tensor:
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

    def __call__(self, x_TK: Tensor, weights: Sequence[Tensor], bias_N: Tensor | None) -> Tensor:
        """[T, N] BF16. weights: those that it was made of, before folding: they get the gradients."""
        return _Int8Linear.apply(self, x_TK, bias_N, *weights)


class _Int8Linear(Function):
    @staticmethod
    def forward(ctx: Any, layer: Int8Weight, x_TK: Tensor, bias_N: Tensor | None, *weights: Tensor) -> Tensor:
        ctx.layer, ctx.rows = layer, [len(each) for each in weights]
        if any(ctx.needs_input_grad):
            codes = quantise_int8(x_TK)
            ctx.save_for_backward(codes.codes_NK, codes.scale)
        return layer.gemm(x_TK, bias_N)

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:
        codes_TK, scale_T1 = ctx.saved_tensors
        needs_x, needs_bias, *needs_weights = ctx.needs_input_grad[1:]
        weight = ctx.layer.quantised
        grad_x = grad_TN @ (weight.codes_NK * weight.scale).to(grad_TN.dtype) if needs_x else None
        grad_bias = grad_TN.sum(0, dtype=torch.float32).to(grad_TN.dtype) if needs_bias else None
        grads: list[Tensor | None] = [None] * len(ctx.rows)
        if any(needs_weights):
            grad_NK = grad_TN.t() @ (codes_TK * scale_T1).to(grad_TN.dtype)
            if ctx.layer.factor_K is not None:
                grad_NK *= ctx.layer.factor_K.to(grad_NK.dtype)
            grads = list(grad_NK.split(ctx.rows))
        return None, grad_x, grad_bias, *grads
