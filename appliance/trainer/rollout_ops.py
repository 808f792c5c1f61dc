"""The operations of the rollouts' forward, with their gradients (trainer/rollout_forward.py puts them together).

They are the engine's kernels (trainer/rollout_kernels.py). What is not a product of weights has the gradient
of its plain formula, at the inputs that the kernel had (norms: one rounding from them). A quantised layer is passed
straight through: with codes of weights and activations W^ and X^, in BF16,

    Y = W^ X^ + b     dX = dY W^     dW = dY^T X^     db = sum dY

and its activations are kept for that as codes and scales, or made again from what is kept before them (`gated`). Scales
by the largest value never clip, so nothing is masked.

Or in E4M3 (`fp8_backward`, of layers in `fp8-block`; on a CPU emulated as the forward is), as Jet-RL has it
(arXiv 2601.14243): what is multiplied shares a scale over 128 of the dimension that is summed over, and weights over
128 x 128. With Q of 1 x 128 blocks of its rows, of the codec's floor,

    dX = Q(dY) W^     dW = Q(dY^T) Q(X^^T)^T     in float64 by block (CUDA: float32), rounded to BF16

W^ by the codes of the forward; X^ by those that it kept, dequantised and quantised again along tokens. The last block
of tokens is shorter, which is as good as padded: zeros add nothing, and to no largest value.

An adapter beside a quantised layer (LoRA) has u = A X in BF16 and adds B u, rounded once more, to Y, as the engine
does; its gradients are those of that formula, with A and B as they are multiplied, scale and smoothing within. The
codes of its base have none then, and no activations are quantised for them.

    du = B^T dY     dB = dY u^T     dA = du X^T     dX += A^T du

The codes kept are the codec's. oneDNN's are the same. sgl's kernel divides in another way and may round a tie to the
other side, and nothing else: x and a = 127 s are BF16, of significands X and A < 256, and 127 X / (2^k A) is n + 1/2
or off by 1 / (254 X) of it at least. The other code is as near to x; dW is another one by sum_t s_t |dY_tn| at most,
over tokens with a tie in channel k.

Legend: T tokens of all sequences in a row, S sequences, D channels of a head, N output and K input channels of a layer,
H width of the residual stream, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from appliance.errors import NumericsError
from appliance.quant.codec import QuantisedWeight, all_finite, chunk_rows, dequantise, quantise
from appliance.quant.codec_fp8 import quantise_fp8_tokens, transposed
from appliance.quant.codec_int8 import dequantise_rows, int8_rows
from appliance.quant.cpu_gemm import quantise_weight
from appliance.quant.support import RowSupport
from appliance.terms.schemes import Scheme
from appliance.trainer.attention import Sequences, attend
from appliance.trainer.rollout_kernels import Gemm, kernels_of, plain_norm

Note = Callable[[str, Tensor], None]  # LayerTrace.note itself: of a dataclass FSDP hands on a copy
_HEAD_CHUNKS = 4  # of a thread at once: a row of a large vocabulary is half of one


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
    """Return (normed, new residual), both in the type of `x`: added and normed in float32, each rounded once."""
    return _AddNorm.apply(x_TH, residual_TH, weight_H, eps)


class _AddNorm(Function):
    """Keeps the new residual, one rounding from what was normed, in place of both inputs."""

    @staticmethod
    def forward(
        ctx: Any, x_TH: Tensor, residual_TH: Tensor | None, weight_H: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        normed, new_residual = kernels_of(x_TH).add_norm(x_TH, residual_TH, weight_H, eps=eps)
        ctx.eps = eps
        ctx.save_for_backward(x_TH if residual_TH is None else new_residual, weight_H)
        return normed, new_residual

    @staticmethod
    def backward(ctx: Any, grad_normed: Tensor, grad_new_residual: Tensor) -> tuple[Tensor | None, ...]:
        new_residual, weight_H = ctx.saved_tensors
        summed, weight_H = new_residual.float().requires_grad_(), weight_H.detach().requires_grad_()
        with torch.enable_grad():
            normed = plain_norm(summed, weight_H, eps=ctx.eps)
        of_sum, of_weight = torch.autograd.grad(normed, (summed, weight_H), grad_normed)
        grad = (of_sum + grad_new_residual).to(new_residual.dtype)
        return grad, grad if ctx.needs_input_grad[1] else None, of_weight, None


def head_norm(x: Tensor, weight_D: Tensor, *, eps: float) -> Tensor:
    """Compute the norm of each head. x: [T, heads, D]."""
    return add_norm(x, None, weight_D, eps=eps)[0]


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return [T, I] of [T, 2I]."""
    kernel = kernels_of(gate_up).silu_and_mul
    return _silu_and_mul(gate_up) if kernel is None else _Plain.apply(kernel, _silu_and_mul, gate_up)


def _silu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


@dataclass(frozen=True)
class AdapterPart:
    """Adapter of one of the modules that a layer of the engine is made of, as the engine multiplies with it."""

    a_RK: Tensor
    b_NR: Tensor
    """Times alpha / rank."""


def adapter_product(x: Tensor, parts: Sequence[AdapterPart | int], *, gated: bool) -> Tensor:
    """Return [T, N] of [T, K], what adapters add to a layer; gated: of [T, 2K], as in EngineWeight. parts: of the
    modules that the layer is made of; for one without an adapter the number of its output channels."""
    sizes = tuple(len(part.b_NR) if isinstance(part, AdapterPart) else part for part in parts)
    present = tuple(isinstance(part, AdapterPart) for part in parts)
    matrices = [matrix for part in parts if isinstance(part, AdapterPart) for matrix in (part.a_RK, part.b_NR)]
    return _AdapterProduct.apply(x, gated, sizes, present, *matrices)


class _AdapterProduct(Function):
    """Product of a layer's input with its adapters. For the backward pass the input is kept as it is before
    `silu_and_mul`, and the product with A is computed again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gated: bool, sizes: tuple[int, ...], present: tuple[bool, ...], *matrices: Tensor
    ) -> Tensor:
        ctx.gated, ctx.sizes, ctx.present = gated, sizes, present
        ctx.save_for_backward(x, *matrices)
        x_TK, multiply = silu_and_mul(x) if gated else x, kernels_of(x).linear
        pairs, outputs = zip(matrices[::2], matrices[1::2], strict=True), []
        for size, has_adapter in zip(sizes, present, strict=True):
            if has_adapter:
                a_RK, b_NR = next(pairs)
                outputs.append(multiply(multiply(x_TK, a_RK, None), b_NR, None))
            else:
                outputs.append(x.new_zeros(len(x), size))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:
        x, *matrices = ctx.saved_tensors
        x_TK, multiply = x, kernels_of(x).linear
        if ctx.gated:
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                x_TK = silu_and_mul(x)
        grads_by_part = grad_TN.split(ctx.sizes, dim=1)
        grads_TN = [grad for grad, has_adapter in zip(grads_by_part, ctx.present, strict=True) if has_adapter]
        grad_u_parts, grad_b = [], []
        for grad, a_RK, b_NR in zip(grads_TN, matrices[::2], matrices[1::2], strict=True):
            grad_u_parts.append(grad @ b_NR)
            grad_b.append(grad.t() @ multiply(x_TK.detach(), a_RK, None))
        grad_u = torch.cat(grad_u_parts, dim=1)
        grad_a = (grad_u.t() @ x_TK.detach()).split([len(a_RK) for a_RK in matrices[::2]])
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grad_u @ torch.cat(matrices[::2])
            grad_x = torch.autograd.grad(x_TK, x, grad_x)[0] if ctx.gated else grad_x
        return grad_x, None, None, None, *itertools.chain(*zip(grad_a, grad_b, strict=True))


def linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """Return [T, N] of [T, K], for a layer that is not quantised."""
    return _Linear.apply(kernels_of(x).linear, x, weight_NK, bias_N)


class _Linear(Function):
    @staticmethod
    def forward(
        ctx: Any, kernel: Callable[..., Tensor], x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x_TK, weight_NK)
        return kernel(x_TK, weight_NK, bias_N)

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:
        (x_TK, weight_NK), (of_x, of_weight, of_bias) = ctx.saved_tensors, ctx.needs_input_grad[1:]
        grad_bias = grad_TN.sum(0, dtype=torch.float32).to(grad_TN.dtype) if of_bias else None
        return None, grad_TN @ weight_NK if of_x else None, grad_TN.t() @ x_TK if of_weight else None, grad_bias


class PackedRow:
    """Sequences in one row, and what rotary embedding and attention need to know of them."""

    positions_T: Tensor
    """Positions, int64, from 0 at each sequence's start; segments may share a prefix (Sequences)."""
    cos_sin: Tensor
    """Rotary embedding, [positions, D]: D / 2 cosines and then as many sines."""
    window: int | None
    """Number of tokens that a token sees at most; None: all before it."""

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
        trace: Note | None = None,
    ) -> None:
        """trace: of a single sequence, what gets its layers."""
        kernels = kernels_of(positions_T)
        kernels.load()
        self._trace = trace
        self.positions_T, self.cos_sin, self.scale, self.window = positions_T, cos_sin, scale, window
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self._sequences = Sequences.from_positions(positions_T)
        sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        self._kernel = kernels.attention(self._sequences, **sizes, scale=scale, window=window)

    def note(self, name: str, output: Tensor) -> Tensor:
        """Trace an output, and return it. name: the engine's."""
        if self._trace is not None:
            self._trace(name, output)
        return output

    def rotate(self, qk: Tensor) -> Tensor:
        """Rotate by position. qk: [T, heads, D], of any number of heads."""
        return _Rotary.apply(qk, self.positions_T, self.cos_sin)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return [T, heads, D]; q: the same.  k, v: [T, kv_heads, D]."""
        return _Plain.apply(self._kernel, self._formula, q, k, v)

    def _formula(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, sequences=self._sequences, scale=self.scale, window=self.window)


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
class EngineWeight:
    """Weight of one layer of the engine, until the next update: what multiplies, and what the gradients need."""

    quantised: QuantisedWeight
    gemm: Gemm
    """Product [T, N] of activations [T, K] and a bias [N] or None."""
    factor_K: Tensor | None
    """Factors of smoothing, powers of two, by which the columns of the weights are multiplied before they are
    quantised."""
    factor_N: Tensor | None = None
    """Factors of smoothing, powers of two, by which the rows of the weights are multiplied before they are
    quantised."""
    fp8_backward: bool = False
    """Whether gradients are multiplied in E4M3; `quantised` is then in `fp8-block`."""
    keeps_dequantised: bool = False
    """Whether the weight that gradients are multiplied with is dequantised once, for all backwards until the next
    update, and then takes 2 bytes per element."""
    name: str = "a layer"
    """Name of the layer, for errors."""

    @classmethod
    def from_linears(
        cls,
        weights: Sequence[Tensor],
        *,
        scheme: Scheme,
        factor_K: Tensor | None,
        factor_N: Tensor | None = None,
        fp8_backward: bool = False,
        keeps_dequantised: bool = False,
        name: str = "a layer",
    ) -> EngineWeight:
        """Quantise a layer. weights: of the linears that the engine fuses, [N, K] BF16 each, folded. Raises
        NumericsError."""
        kernels, integers = kernels_of(weights[0]), scheme is Scheme.INT8
        kernels.load()
        if integers:
            parts = [quantise_weight(each.detach()) for each in weights]
            codes_NK = torch.cat([each.codes_NK for each in parts])
            quantised = int8_rows(codes_NK, scale_N1=torch.cat([each.scale for each in parts]))
        else:
            quantised = quantise(torch.cat([each.detach() for each in weights]), scheme=scheme)
        fp8_backward &= scheme is Scheme.FP8_BLOCK
        gemm = kernels.gemm(quantised, integers=integers)
        return cls(quantised, gemm, factor_K, factor_N, fp8_backward, keeps_dequantised, name)

    def codes_of(self, x_TK: Tensor) -> QuantisedWeight:
        """Return codes of activations. Raises NumericsError."""
        try:
            scheme = self.quantised.scheme
            return kernels_of(x_TK).codes(x_TK, scheme=scheme, integers=scheme is Scheme.INT8)
        except NumericsError as error:
            raise NumericsError(f"{self.name} in training: {error.message}") from None

    def require_finite(self, x_TK: Tensor) -> None:
        """Check activations of which no codes are made. Raises NumericsError."""
        if not all_finite(x_TK):
            raise NumericsError(f"{self.name} in training: an activation has a value that is not finite")

    def __call__(
        self, x_TK: Tensor, weights: Sequence[Tensor], bias_N: Tensor | None, *, gated: bool = False
    ) -> Tensor:
        """Return [T, N] BF16. weights: those that it was made of, before folding: they get the gradients; none where
        they are frozen. gated: x is [T, 2K], and `silu_and_mul` of it is multiplied."""
        if not torch.is_grad_enabled():
            return self.gemm(silu_and_mul(x_TK) if gated else x_TK, bias_N)
        place_TN = _EngineLinear.apply(self, gated, x_TK, bias_N, *weights)
        return _Multiplied.apply(place_TN, self.gemm, x_TK.detach(), bias_N, gated)

    def grad_of_input(self, grad_TN: Tensor) -> Tensor:
        """Return [T, K] in the type of `grad_TN`. A token whose gradient is not finite stays so."""
        if self.fp8_backward:
            grad_TK = kernels_of(grad_TN).product(_in_blocks(grad_TN), transposed(self.quantised))
            return grad_TK.to(grad_TN.dtype)
        if self.keeps_dequantised and grad_TN.dtype is torch.bfloat16:
            return grad_TN @ self._dequantised
        return grad_TN @ _rounded(self.quantised, dtype=grad_TN.dtype)

    @cached_property
    def _dequantised(self) -> Tensor:
        """Dequantised weight, [N, K] BF16."""
        return _rounded(self.quantised, dtype=torch.bfloat16)

    def grad_of_weight(self, grad_TN: Tensor, passed: QuantisedWeight) -> Tensor:
        """Return [N, K] in the type of `grad_TN`. passed: the activations [T, K]. What is not finite stays so."""
        if self.fp8_backward:
            tokens, channels = _in_blocks(grad_TN.t()), _in_blocks(dequantise(passed).t())
            grad_NK = kernels_of(grad_TN).product(tokens, channels).to(grad_TN.dtype)
        else:
            grad_NK = grad_TN.t() @ _rounded(passed, dtype=grad_TN.dtype)
        grad_NK = grad_NK if self.factor_K is None else grad_NK * self.factor_K.to(grad_NK)
        return grad_NK if self.factor_N is None else grad_NK * self.factor_N.to(grad_NK)[:, None]


def _in_blocks(values: Tensor) -> QuantisedWeight:
    return quantise_fp8_tokens(values.contiguous(), scheme=Scheme.FP8_BLOCK, finite=False)


def _rounded(quantised: QuantisedWeight, *, dtype: torch.dtype) -> Tensor:
    if quantised.scheme is Scheme.INT8:
        return dequantise_rows(quantised.codes_NK, quantised.scale, dtype=dtype)
    return dequantise(quantised).to(dtype)


class _Multiplied(Function):
    """What is multiplied is kept before it (`_EngineLinear`): gradient checkpointing stops there when it computes
    again, as it does for torch's own layers, and leaves out a layer's last product."""

    @staticmethod
    def forward(ctx: Any, place_TN: Tensor, gemm: Gemm, x: Tensor, bias_N: Tensor | None, gated: bool) -> Tensor:
        return gemm(silu_and_mul(x) if gated else x, bias_N)

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:
        return grad_TN, None, None, None, None


class _EngineLinear(Function):
    """[T, N] without values: where the gradient of the product goes."""

    @staticmethod
    def forward(
        ctx: Any, layer: EngineWeight, gated: bool, x: Tensor, bias_N: Tensor | None, *weights: Tensor
    ) -> Tensor:
        ctx.layer, ctx.gated, ctx.rows = layer, gated, [len(each) for each in weights]
        if gated:
            ctx.save_for_backward(x)
        elif weights:
            codes = layer.codes_of(x)
            ctx.save_for_backward(codes.codes_NK, codes.scale)
            ctx.block = codes.block
        else:
            layer.require_finite(x)
        return x.new_empty(1).expand(len(x), len(layer.quantised.codes_NK))

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:
        needs_x, needs_bias, *needs_weights = ctx.needs_input_grad[2:]
        weight = ctx.layer.quantised
        grad_x = ctx.layer.grad_of_input(grad_TN) if needs_x else None
        if ctx.gated:
            gate_up = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                x_TK = silu_and_mul(gate_up)
            if ctx.rows:
                passed = ctx.layer.codes_of(x_TK.detach())
            else:
                ctx.layer.require_finite(x_TK.detach())
            grad_x = torch.autograd.grad(x_TK, gate_up, grad_x)[0] if needs_x else None
        elif ctx.rows:
            codes_TK, scale = ctx.saved_tensors
            passed = QuantisedWeight(codes_TK, scale=scale, block=ctx.block, scheme=weight.scheme)
        grad_bias = grad_TN.sum(0, dtype=torch.float32).to(grad_TN.dtype) if needs_bias else None
        grads: list[Tensor | None] = [None] * len(ctx.rows)
        if any(needs_weights):
            grads = list(ctx.layer.grad_of_weight(grad_TN, passed).split(ctx.rows))
        return None, None, grad_x, grad_bias, *grads


def log_probs_of(
    logits_TV: Tensor,
    labels: Tensor,
    *,
    num_tokens: int,
    temperature: float,
    with_entropy: bool,
    support: RowSupport | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return (log-probs of `labels`, entropy [T], which has no gradient): float32, nats, over the first `num_tokens`.

    labels: [T], or [T, L]: some words of each token, of which the first alone has a gradient.
    support: of each token's log-probs; None: all words. The entropy is of all words.
    """
    words_TL = labels.view(len(labels), -1)
    first_T, others, entropy_T = _LogProbs.apply(logits_TV, words_TL, num_tokens, temperature, with_entropy, support)
    return (first_T if labels.ndim == 1 else torch.cat([first_T[:, None], others], dim=1)), entropy_T


class _LogProbs(Function):
    """Some tokens at a time, in float32; between forward and backward only the logits in their own type are kept."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        words_TL: Tensor,
        num_tokens: int,
        temperature: float,
        with_entropy: bool,
        support: RowSupport | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        ctx.num_tokens, ctx.temperature, ctx.support = num_tokens, temperature, support
        ctx.save_for_backward(logits_TV, words_TL[:, 0])
        chosen: list[Tensor] = []
        entropies: list[Tensor] = []
        rows = chunk_rows(logits_TV, chunks=_HEAD_CHUNKS)
        parts = zip(logits_TV.split(rows), words_TL.split(rows), _split(support, rows=rows), strict=False)
        for logits, words, of_part in parts:
            scaled = _scaled(logits, num_tokens=num_tokens, temperature=temperature)
            log_softmax = kernels_of(scaled).log_softmax
            if with_entropy or of_part is None:
                log_probs = log_softmax(scaled)
            if with_entropy:
                entropies.append(-log_probs.exp().mul_(log_probs)[:, :num_tokens].sum(dim=-1))
            if of_part is not None:
                log_probs = log_softmax(of_part.cut_(scaled))
            chosen.append(log_probs.gather(1, words))
        log_probs_TL = torch.cat(chosen)
        others_TL = log_probs_TL[:, 1:].clone()
        entropy_T = torch.cat(entropies) if with_entropy else None
        ctx.mark_non_differentiable(others_TL, *([] if entropy_T is None else [entropy_T]))  # a later call replaces it
        return log_probs_TL[:, 0].clone(), others_TL, entropy_T

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor, *_: object) -> tuple[Tensor | None, ...]:
        """Compute, with p = softmax(z / t): dz = dy (1[label] - p) / t."""
        logits_TV, labels_T = ctx.saved_tensors
        grad_TV = torch.empty_like(logits_TV)
        rows = chunk_rows(logits_TV, chunks=_HEAD_CHUNKS)
        parts = (each.split(rows) for each in (logits_TV, labels_T, grad_T, grad_TV))
        for logits, labels, grad, into, of_part in zip(*parts, _split(ctx.support, rows=rows), strict=False):
            scaled = _scaled(logits, num_tokens=ctx.num_tokens, temperature=ctx.temperature)
            minus = (scaled if of_part is None else of_part.cut_(scaled)).softmax(dim=-1)
            minus.scatter_add_(1, labels[:, None], minus.new_full((len(labels), 1), -1.0))
            into.copy_(minus.mul_(-grad[:, None] / ctx.temperature))
        grad_TV[:, ctx.num_tokens :] = 0
        return grad_TV, None, None, None, None, None


def _split(support: RowSupport | None, *, rows: int) -> Iterator[RowSupport | None]:
    """Yield so many rows at a time; without a support None for ever."""
    return itertools.repeat(None) if support is None else support.split(rows)


def _scaled(logits_RV: Tensor, *, num_tokens: int, temperature: float) -> Tensor:
    """Return a copy in float32, divided by the temperature; -inf for what is never sampled."""
    logits_RV = logits_RV.to(torch.float32, copy=True)
    logits_RV[:, num_tokens:] = -torch.inf
    if temperature == 1:
        return logits_RV
    return logits_RV.div_(logits_RV.new_full((len(logits_RV), 1), temperature))  # CUDA multiplies by a number's inverse
