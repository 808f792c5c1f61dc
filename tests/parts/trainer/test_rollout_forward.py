"""Gradients of the rollouts' forward against a float64 reference of the straight-through formula.

U is BF16's unit roundoff: 8 significant bits, so a rounding changes a number by at most 2^-8 of itself. Sums are in
float32, n terms by at most n * 2^-24 of the sum of magnitudes, which SLACK holds for all sizes here, with products of
two roundings. Every bound is for each element: the magnitudes that it is made of, times its roundings.

Legend: as the module's, and I channels between gate and down.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from smoothings import random_smoothing
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from appliance.errors import NumericsError
from appliance.quant import codec_int8, cpu_gemm
from appliance.quant.codec import dequantise, quantise
from appliance.quant.codec_int8 import dequantise_int8, quantise_int8
from appliance.quant.cpu_gemm import OneDnnGemm, SglGemm, WideGemm, has_packed_kernel, kernel_of
from appliance.quant.files import Origin, Settings
from appliance.quant.profile import Profile, Smoothing, write_profile
from appliance.terms.schemes import AS_PLANNED, Precision, Scheme
from appliance.terms.settings import Quantisation
from appliance.trainer import rollout_ops
from appliance.trainer.rollout_forward import RolloutForward
from appliance.trainer.rollout_ops import (
    EngineWeight,
    PackedRow,
    add_norm,
    head_norm,
    linear,
    log_probs_of,
    silu_and_mul,
)

KERNELS = (SglGemm, OneDnnGemm, WideGemm)
U = 2.0**-8
SLACK = 1.05
EPS = 1e-6
LENGTHS = (1, 33, 7, 40)  # around a block of 32
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
MODELS = {
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {"tie_word_embeddings": False, "num_attention_heads": 4, "num_key_value_heads": 2},
    ),
}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def random(*shape: int, scale: float = 1.0) -> Tensor:
    """BF16, and asking for its gradient."""
    return (torch.randn(shape) * scale).to(torch.bfloat16).requires_grad_()


def wide(*tensors: Tensor) -> list[Tensor]:
    return [each.detach().double().requires_grad_() for each in tensors]


def assert_within(computed: Tensor | None, expected: Tensor, bound: Tensor) -> None:
    """`found` is the gradient, in BF16: its own rounding is of the bound too. The bound is not a hundred times off."""
    assert computed is not None
    share = ((computed.double() - expected).abs() / (SLACK * bound + 1e-30)).max()
    assert 0.01 < share <= 1, f"{float(share):.3f} of the bound"


# --- quantised layers


@pytest.mark.parametrize("smoothed", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [((64, 32), 96), ((50, 30), 90)], ids=["sgl", "onednn"])
def test_quantised_layer_passes_gradients_straight_through(
    rows: tuple[int, int], columns: int, *, smoothed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """dX = dY W^ and dW = dY^T X^: W^, X^ and the product are rounded once each, 2 U of |dY| |W^|; db: one rounding."""
    monkeypatch.setattr(codec_int8, "chunk_rows", lambda _: 7)
    factor_K = 2.0 ** torch.randint(-3, 4, (columns,)) if smoothed else torch.ones(columns)
    factor_N = 2.0 ** torch.randint(-3, 4, (sum(rows),)) if smoothed else torch.ones(sum(rows))
    factors = {"factor_K": factor_K, "factor_N": factor_N} if smoothed else {"factor_K": None}
    weights = [random(each, columns) for each in rows]
    x_TK, bias_N, grad_TN = random(41, columns), random(sum(rows)), random(41, sum(rows)).detach()
    parts = zip(weights, factor_N.split(rows), strict=True)
    folded = [(weight.detach() * factor_K * factor_R[:, None]).to(torch.bfloat16) for weight, factor_R in parts]
    layer = EngineWeight.from_linears(folded, scheme=Scheme.INT8, **factors)
    assert isinstance(layer.gemm, SglGemm if columns == 96 and has_packed_kernel() else kernel_of(1, 1))
    layer(x_TK, weights, bias_N).backward(grad_TN)
    dequantised_NK = dequantise_int8(layer.quantised).double()
    passed_TK = dequantise_int8(quantise_int8(x_TK.detach())).double()
    grad_TN = grad_TN.double()
    assert_within(x_TK.grad, grad_TN @ dequantised_NK, 2 * U * (grad_TN.abs() @ dequantised_NK.abs()))
    factor_NK = factor_N[:, None] * factor_K
    wanted_NK, bound_NK = grad_TN.t() @ passed_TK * factor_NK, 2 * U * (grad_TN.abs().t() @ passed_TK.abs()) * factor_NK
    for weight, wanted, bound in zip(weights, wanted_NK.split(rows), bound_NK.split(rows), strict=True):
        assert_within(weight.grad, wanted, bound)
    assert_within(bias_N.grad, grad_TN.sum(0), U * grad_TN.sum(0).abs() + 41 * 2.0**-24 * grad_TN.abs().sum(0))


def test_an_int4_layer_has_gradients_of_its_own_weights_and_of_activations_as_they_are() -> None:
    """dX = dY W' and dW = dY^T X: no BF16 number is rounded again, and the product is once; K = 96 or T = 41 sums in
    float32 besides. The rows of both weights are quantised by themselves."""
    weights = [random(64, 96), random(32, 96)]
    x_TK, bias_N, grad_TN = random(41, 96), random(96), random(41, 96).detach()
    layer = EngineWeight.from_linears([weight.detach() for weight in weights], scheme=Scheme.INT4, factor_K=None)
    y_TN = layer(x_TK, weights, bias_N)
    y_TN.backward(grad_TN)
    values_NK = dequantise(layer.quantised).double()
    assert torch.equal(values_NK[64:], dequantise(quantise(weights[1].detach(), scheme=Scheme.INT4)).double())
    grad_TN, passed_TK = grad_TN.double(), x_TK.detach().double()
    wanted_TN = passed_TK @ values_NK.t() + bias_N.detach().double()
    terms_TN = passed_TK.abs() @ values_NK.abs().t() + bias_N.detach().double().abs()
    assert bool(((y_TN.detach().double() - wanted_TN).abs() <= U * wanted_TN.abs() + 97 * 2.0**-24 * terms_TN).all())
    assert_within(x_TK.grad, grad_TN @ values_NK, 2 * U * (grad_TN.abs() @ values_NK.abs()))
    wanted_NK, bound_NK = grad_TN.t() @ passed_TK, 2 * U * (grad_TN.abs().t() @ passed_TK.abs())
    for weight, wanted, bound in zip(weights, wanted_NK.split([64, 32]), bound_NK.split([64, 32]), strict=True):
        assert_within(weight.grad, wanted, bound)


@pytest.mark.parametrize("columns", [96, 90], ids=["sgl", "onednn"])
def test_codes_kept_for_the_gradient_are_those_that_were_multiplied(columns: int) -> None:
    """The identity shows them: y = code * s, rounded to BF16, and 127 * U / (1 + U) < 1/2. The other half of the tokens
    is all ties that BF16 has: half the largest value, and the odd multiples of its 254th part. There sgl's kernel may
    choose the other side."""
    x_TK = torch.randn(200, columns).to(torch.bfloat16)
    x_TK[100:] = torch.randint(-127, 128, (100, columns)) * 2
    x_TK[100:] += x_TK[100:].sign()
    x_TK[100:, 1] = 254
    x_TK[100:] *= 2.0 ** torch.randint(-8, 8, (100, 1))
    x_TK[:100, 0] = x_TK[:100].abs().amax(dim=1) / 2
    layer = EngineWeight.from_linears([torch.eye(columns, dtype=torch.bfloat16)], scheme=Scheme.INT8, factor_K=None)
    codes = layer.codes_of(x_TK)
    scale_TK = 127 * codes.scale.double() * layer.quantised.scale.double().t()
    shown_TK = (layer.gemm(x_TK, None).double() / scale_TK).round()
    steps_TK = x_TK.double() * 127 / x_TK.double().abs().amax(dim=1, keepdim=True)
    differs = shown_TK != codes.codes_NK
    if isinstance(layer.gemm, SglGemm):
        assert float((steps_TK - shown_TK).abs().max()) <= 0.5
        assert bool(((steps_TK - steps_TK.trunc()).abs() == 0.5)[differs].all())
    else:
        assert not differs.any()


def test_codes_kept_are_the_codecs_in_every_row() -> None:
    x_TK = torch.randn(300, 90).to(torch.bfloat16) * 2.0 ** torch.randint(-140, 120, (300, 1))
    x_TK[7] = 0
    layer = EngineWeight.from_linears([torch.eye(90, dtype=torch.bfloat16)], scheme=Scheme.INT8, factor_K=None)
    kept, codec = layer.codes_of(x_TK.t().contiguous().t()), quantise_int8(x_TK)
    assert torch.equal(kept.codes_NK, codec.codes_NK) and torch.equal(kept.scale, codec.scale)
    x_TK[3, 5] = torch.inf
    with pytest.raises(NumericsError, match=r"^a layer in training: an activation to quantise has a value that is not"):
        layer.codes_of(x_TK)


def test_a_pass_without_gradients_keeps_no_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    x_TK, weight_NK = random(5, 96), random(64, 96)
    layer = EngineWeight.from_linears([weight_NK], scheme=Scheme.INT8, factor_K=None)
    wanted_TN = layer(x_TK, [weight_NK], None)
    monkeypatch.setattr(EngineWeight, "codes_of", None)
    with torch.no_grad():
        assert torch.equal(layer(x_TK, [weight_NK], None), wanted_TN)


def test_a_weight_that_is_not_finite_is_refused() -> None:
    weight_NK = random(64, 96).detach()
    weight_NK[3, 5] = torch.nan
    with pytest.raises(NumericsError) as caught:
        EngineWeight.from_linears([random(8, 96), weight_NK], scheme=Scheme.INT8, factor_K=None)
    assert str(caught.value) == "a weight to quantise has a value that is not finite"


# --- what is between them


def float64_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + EPS) * weight


def norm_bounds(summed: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """(of d sum, of d weight), for n = i s, dn = w dy, ds = i (dn - n mean(dn n)), dw = sum(dy n).

    Rounded are s (kept in BF16, so i by U and n by 2 U) and dn; for dw: n again, the product, and the sum.
    """
    inverse = torch.rsqrt(summed.pow(2).mean(dim=-1, keepdim=True) + EPS)
    normed, turned = (summed * inverse).abs(), (grad * weight).abs()
    each = 2 * turned + 6 * normed * (turned * normed).mean(dim=-1, keepdim=True)
    return U * inverse * each, 5 * U * (grad.abs() * normed).reshape(-1, len(weight)).sum(0)


@pytest.mark.parametrize("with_residual", [False, True])
def test_add_norm(*, with_residual: bool) -> None:
    """Both inputs get the gradient of the sum: that of the norm plus that of the new residual, rounded once more."""
    x, residual, weight = random(70, 64), random(70, 64, scale=4.0), random(64)
    grad_normed, grad_kept = random(70, 64).detach(), random(70, 64).detach()
    normed, summed_kept = add_norm(x, residual if with_residual else None, weight, eps=EPS)
    torch.autograd.backward([normed, summed_kept], [grad_normed, grad_kept])
    x_, residual_, weight_ = wide(x, residual, weight)
    summed = x_ + residual_ if with_residual else x_ * 1
    torch.autograd.backward([float64_norm(summed, weight_), summed], [grad_normed.double(), grad_kept.double()])
    assert float((summed_kept.double() - summed).detach().abs().max()) <= U * float(summed.detach().abs().max())
    of_sum, of_weight = norm_bounds(summed.detach(), weight_.detach(), grad_normed.double())
    assert_within(x.grad, x_.grad, of_sum + U * x_.grad.abs())
    assert_within(weight.grad, weight_.grad, of_weight)
    if with_residual:
        assert torch.equal(x.grad, residual.grad)


def test_only_the_new_residual_is_used() -> None:
    """As where everything behind a norm is frozen: its own output gets no gradient."""
    x, residual, weight = random(9, 64), random(9, 64), random(64)
    add_norm(x, residual, weight, eps=EPS)[1].sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    assert torch.equal(residual.grad, torch.ones_like(x))


def test_head_norm() -> None:
    qkv, weight, grad = random(30, 6, 32), random(32), random(30, 4, 32).detach()
    head_norm(qkv[:, :4], weight, eps=EPS).backward(grad)
    qkv_, weight_ = wide(qkv, weight)
    float64_norm(qkv_[:, :4], weight_).backward(grad.double())
    of_x, of_weight = norm_bounds(qkv_.detach()[:, :4], weight_.detach(), grad.double())
    assert_within(qkv.grad[:, :4], qkv_.grad[:, :4], of_x + U * qkv_.grad[:, :4].abs())
    assert_within(weight.grad, weight_.grad, of_weight)
    assert not qkv.grad[:, 4:].any()


@pytest.mark.parametrize("widened", [frozenset(), frozenset({torch.bfloat16})])
def test_linear_that_is_not_quantised(widened: frozenset[torch.dtype], monkeypatch: pytest.MonkeyPatch) -> None:
    """As a layer kept in BF16 and the last projection, on hosts of both kinds: y, dX, dW and db are rounded once."""
    monkeypatch.setattr(cpu_gemm, "widened_types", lambda: widened)
    x_TK, weight_NK, bias_N, grad_TN = random(41, 96), random(50, 96), random(50), random(41, 50).detach()
    y_TN = linear(x_TK, weight_NK, bias_N)
    y_TN.backward(grad_TN)
    inputs = wide(x_TK, weight_NK, bias_N)
    wanted_TN = functional.linear(*inputs)
    wanted_TN.backward(grad_TN.double())
    sums = [functional.linear(*(each.abs() for each in inputs))]
    sums += [grad_TN.double().abs() @ inputs[1].abs(), grad_TN.double().abs().t() @ inputs[0].abs()]
    pairs = [
        (y_TN, wanted_TN),
        *((mine.grad, each.grad) for mine, each in zip((x_TK, weight_NK), inputs, strict=False)),
    ]
    for (found, wanted), of_sum in zip(pairs, sums, strict=True):
        assert_within(found, wanted, U * wanted.abs() + 96 * 2.0**-24 * of_sum)
    assert_within(bias_N.grad, inputs[2].grad, U * inputs[2].grad.abs() + 41 * 2.0**-24 * grad_TN.double().abs().sum(0))


def test_silu_and_mul_before_a_quantised_layer() -> None:
    """As the layer alone, and dY W^ then goes on: with `e` its bound, d up = d silu(g), d g = d up s (1 + g (1 - s)),
    each of a factor rounded (silu(g); d up) and itself rounded: 2 U, and `e` in place of `d`. The bracket is 0 at
    g = -1.28 and computed in float32."""
    gate_up, weight, grad_TN = random(50, 2 * 96, scale=3.0), random(64, 96), random(50, 64).detach()
    layer = EngineWeight.from_linears([weight], scheme=Scheme.INT8, factor_K=None)
    layer(gate_up, [weight], None, gated=True).backward(grad_TN)
    passed_TK = dequantise_int8(quantise_int8(silu_and_mul(gate_up.detach()))).double()
    dequantised_NK, grad_TN = dequantise_int8(layer.quantised).double(), grad_TN.double()
    assert_within(weight.grad, grad_TN.t() @ passed_TK, 2 * U * (grad_TN.abs().t() @ passed_TK.abs()))
    (gate_up_,) = wide(gate_up)
    gate, up = gate_up_.chunk(2, dim=-1)
    grad_TK, off_TK = grad_TN @ dequantised_NK, 2 * U * (grad_TN.abs() @ dequantised_NK.abs())
    (functional.silu(gate) * up).backward(grad_TK)
    with torch.no_grad():
        sigmoid = gate.sigmoid()
        slope = (sigmoid * (1 + gate * (1 - sigmoid))).abs()
        carried = torch.cat([off_TK * up.abs() * slope, off_TK * functional.silu(gate).abs()], dim=-1)
        near_zero = torch.cat([(grad_TK * up).abs() * (1 + gate.abs()), torch.zeros_like(up)], dim=-1)
    assert_within(gate_up.grad, gate_up_.grad, carried + 2 * U * gate_up_.grad.abs() + 2.0**-21 * near_zero)


# --- log-probs


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit those of all tokens at once, though a few are computed at a time; d z = dy (1[label] - p) / t,
    rounded once: U of it, and of the difference where it cancels 8 roundings of float32."""
    logits_TV, labels_T, grad_T = random(41, 300, scale=4.0), torch.randint(0, 290, (41,)), torch.randn(41)
    monkeypatch.setattr(rollout_ops, "chunk_rows", lambda _, chunks: 7)
    settings = {"num_tokens": 290, "temperature": temperature}
    log_probs_T, entropy_T = log_probs_of(logits_TV, labels_T, **settings, with_entropy=True)
    whole_TV = logits_TV.detach().float()[:, :290]
    masked_TV = functional.pad(whole_TV, (0, 10), value=-torch.inf) / temperature
    at_once_TV = masked_TV.log_softmax(dim=-1)
    assert torch.equal(log_probs_T, at_once_TV.gather(1, labels_T[:, None])[:, 0])
    assert not entropy_T.requires_grad
    log_probs_T.backward(grad_T)
    (logits_,) = wide(logits_TV)
    wanted_TV = (logits_[:, :290] / temperature).log_softmax(dim=-1)
    assert torch.allclose(entropy_T.double(), -(wanted_TV.exp() * wanted_TV).sum(dim=-1), rtol=290 * 2.0**-24)
    wanted_TV.gather(1, labels_T[:, None])[:, 0].backward(grad_T.double())
    magnitude_TV = torch.zeros(41, 300, dtype=torch.float64)
    magnitude_TV[:, :290] = wanted_TV.detach().exp()
    magnitude_TV.scatter_add_(1, labels_T[:, None], torch.ones(41, 1, dtype=torch.float64))
    magnitude_TV *= grad_T.double().abs()[:, None] / temperature
    assert_within(logits_TV.grad, logits_.grad, U * logits_.grad.abs() + 2.0**-21 * magnitude_TV)
    assert not logits_TV.grad[:, 290:].any()


def test_log_probs_without_entropy() -> None:
    logits_TV, labels_T = random(5, 30), torch.randint(0, 30, (5,))
    log_probs_T, entropy_T = log_probs_of(logits_TV, labels_T, num_tokens=30, temperature=1.0, with_entropy=False)
    assert entropy_T is None
    assert log_probs_T.requires_grad


# --- tokens that see each other


def batch_of(lengths: tuple[int, ...], *, window: int | None = None) -> PackedRow:
    positions_T = torch.cat([torch.arange(each) for each in lengths])
    angles = torch.outer(torch.arange(64.0), 10000.0 ** (-torch.arange(0, 32, 2) / 32))
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1).to(torch.bfloat16)
    return PackedRow(positions_T, heads=4, kv_heads=2, head_dim=32, cos_sin=cos_sin, scale=0.3, window=window)


def float64_rotated(x: Tensor, positions_T: Tensor, cos_sin: Tensor) -> Tensor:
    cos, sin = cos_sin.double()[positions_T][:, None].chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def test_rotary() -> None:
    """In float32, and rounded once: U of the result; what cancels, 4 roundings of float32 of the two numbers."""
    batch, qk, grad = batch_of(LENGTHS), random(81, 6, 32), random(81, 6, 32).detach()
    rotated = batch.rotate(qk)
    rotated.backward(grad)
    (qk_,) = wide(qk)
    expected = float64_rotated(qk_, batch.positions_T, batch.cos_sin)
    expected.backward(grad.double())
    both = grad.double().unflatten(-1, (2, 16)).abs().sum(dim=-2).repeat(1, 1, 2)
    assert_within(qk.grad, qk_.grad, U * qk_.grad.abs() + 2.0**-22 * both)
    assert float((rotated.double() - expected).abs().max()) <= 3 * U * float(expected.abs().max())


def float64_attended(q: Tensor, k: Tensor, v: Tensor, *, lengths: tuple[int, ...], scale: float, window: int) -> Tensor:
    """By the definition, in whatever type `q` has."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    places = torch.cat([torch.arange(each) for each in lengths])
    sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    behind = places[:, None] - places
    seen = (sequence[:, None] == sequence) & (behind >= 0) & (behind < window)
    scores = torch.einsum("ihd,jhd->hij", q, k) * scale
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, -torch.inf).softmax(dim=-1), v)


@pytest.mark.parametrize("window", [None, 16])
def test_attention_of_packed_sequences_with_grouped_queries(window: int | None) -> None:
    """O = P V, dV = P^T dO, dS = P (dO V^T - dO O), dQ = c dS K, dK = c dS^T Q, P the probabilities, c the scale.

    Rounded are P, O, dS and what comes out; dK and dV are sums over the two queries of a group, each rounded before: 2.
    With magnitudes throughout |dS| <= M = P (|dO| |V| + |dO| P |V|), off by 2 U M for O and dS. Scores in float32 are
    exact beside that.
    """
    batch = batch_of(LENGTHS, window=window)
    q, k, v, grad = random(81, 4, 32), random(81, 2, 32), random(81, 2, 32), random(81, 4, 32).detach()
    batch.attend(q, k, v).backward(grad)
    q_, k_, v_ = wide(q, k, v)
    settings = {"lengths": LENGTHS, "scale": 0.3, "window": window or 81}
    float64_attended(q_, k_, v_, **settings).backward(grad.double())
    with torch.no_grad():
        # P itself: what one-hot values are attended to
        probabilities = float64_attended(q_, k_, torch.eye(81).double()[:, None].repeat(1, 2, 1), **settings)
        p = probabilities.transpose(0, 1)
        v2, k2, dy = v_.abs().repeat_interleave(2, dim=1), k_.abs().repeat_interleave(2, dim=1), grad.double().abs()
        reached = torch.einsum("ihd,jhd->hij", dy, v2)
        m = p * (reached + (p * reached).sum(dim=-1, keepdim=True))
        of_q = 0.3 * torch.einsum("hij,jhd->ihd", m, k2)
        of_k = 0.3 * torch.einsum("hij,ihd->jhd", m, q_.abs()).unflatten(1, (2, 2)).sum(dim=2)
        of_v = torch.einsum("hij,ihd->jhd", p, dy).unflatten(1, (2, 2)).sum(dim=2)
    assert_within(q.grad, q_.grad, 2 * U * of_q + U * q_.grad.abs())
    assert_within(k.grad, k_.grad, (2 + 2) * U * of_k)
    assert_within(v.grad, v_.grad, (1 + 2) * U * of_v)


def test_no_gradient_leaves_its_sequence() -> None:
    batch = batch_of(LENGTHS)
    for place in range(len(LENGTHS)):
        q, k, v = random(81, 4, 32), random(81, 2, 32), random(81, 2, 32)
        batch.attend(q, k, v).split(LENGTHS)[place].float().pow(2).sum().backward()
        for head_input in (q, k, v):
            largest = [float(part.abs().max()) for part in head_input.grad.split(LENGTHS)]
            own_gradient = largest.pop(place)
            assert not any(largest)
            # a token that sees only itself has the weight one: left are 32 float32 roundings of dO V - dO O
            alone = LENGTHS[place] == 1 and head_input is not v
            assert own_gradient < 32 * 2**-24 * 32 if alone else own_gradient > 0


# --- whole models


def tiny(name: str, **sizes: object) -> PreTrainedModel:
    model, config, own = MODELS[name]
    made_model = model(config(**(SIZES | own | sizes)))
    for parameter in made_model.parameters():
        spread = 0.1 * torch.randn(parameter.shape)
        parameter.data = spread if parameter.ndim > 1 else parameter.data + spread
    return made_model.to(torch.bfloat16)


def put_in(model: nn.Module) -> RolloutForward:
    return RolloutForward(model, quantisation=Quantisation(scheme=Scheme.INT8), num_tokens=model.config.vocab_size)


def packed(model: nn.Module, lengths: tuple[int, ...] = LENGTHS) -> dict[str, Tensor]:
    ids = torch.randint(0, model.config.vocab_size, (1, sum(lengths)))
    positions = torch.cat([torch.arange(each) for each in lengths])[None]
    return {"input_ids": ids, "position_ids": positions, "shift_labels": ids.roll(-1, 1)}


def float64_log_probs(
    model: nn.Module,
    parameters: dict[str, Tensor],
    inputs: dict[str, Tensor],
    passed: list[Tensor],
    adapters: dict[str, tuple[Tensor, Tensor]] | None = None,
) -> Tensor:
    """[T]: transformers' formulas with each layer's input and weights in place of themselves dequantised.

    parameters: the parameters in float64.  passed: dequantised inputs, in the order in which the layers ran.
    adapters: by layer, A and B times its scale, which read the inputs themselves.
    """
    config, inputs_of = model.config, iter(passed)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    positions_T = inputs["position_ids"][0]
    theta = config.rope_parameters["rope_theta"]
    angles = torch.outer(torch.arange(512.0), 1.0 / theta ** (torch.arange(0, size, 2.0) / size))
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1).to(torch.bfloat16)

    def instead(value: Tensor, exact: Tensor) -> Tensor:
        return exact + (value - exact).detach()

    def linear(x: Tensor, *names: str) -> Tensor:
        weight = torch.cat([parameters[f"{name}.weight"] for name in names])
        codes = EngineWeight.from_linears([weight.to(torch.bfloat16)], scheme=Scheme.INT8, factor_K=None).quantised
        biases = [parameters[f"{name}.bias"] for name in names if f"{name}.bias" in parameters]
        y = instead(next(inputs_of), x) @ instead(dequantise_int8(codes).double(), weight).t()
        if adapters is not None:
            matrices = [adapters[name] for name in names]
            y = y + torch.cat([x @ a_RK.t() @ b_NR.t() for a_RK, b_NR in matrices], dim=1)
        return y + torch.cat(biases) if biases else y

    x = parameters["model.embed_tokens.weight"][inputs["input_ids"][0]]
    for place in range(config.num_hidden_layers):
        here = f"model.layers.{place}."
        y = float64_norm(x, parameters[here + "input_layernorm.weight"])
        qkv = linear(y, *(f"{here}self_attn.{each}_proj" for each in "qkv")).unflatten(-1, (-1, size))
        q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
        if here + "self_attn.q_norm.weight" in parameters:
            q = float64_norm(q, parameters[here + "self_attn.q_norm.weight"])
            k = float64_norm(k, parameters[here + "self_attn.k_norm.weight"])
        q, k = (float64_rotated(each, positions_T, cos_sin) for each in (q, k))
        attended = float64_attended(q, k, v, lengths=LENGTHS, scale=size**-0.5, window=81)
        x = x + linear(attended.flatten(1), here + "self_attn.o_proj")
        y = float64_norm(x, parameters[here + "post_attention_layernorm.weight"])
        gate, up = linear(y, here + "mlp.gate_proj", here + "mlp.up_proj").chunk(2, dim=-1)
        x = x + linear(functional.silu(gate) * up, here + "mlp.down_proj")
    y = float64_norm(x, parameters["model.norm.weight"])
    logits = y @ parameters.get("lm_head.weight", parameters["model.embed_tokens.weight"]).t() / 0.8
    return logits.log_softmax(dim=-1).gather(1, inputs["shift_labels"][0][:, None]).flatten()


def record_inputs(passed: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Append to `passed`, from now on, what each INT8 product multiplies, dequantised, in float64."""

    def recording(kind: type) -> None:
        call = kind.__call__

        def recorded(gemm: Callable[..., Tensor], x_TK: Tensor, bias_N: Tensor | None) -> Tensor:
            passed.append(dequantise_int8(quantise_int8(x_TK)).double())
            return call(gemm, x_TK, bias_N)

        monkeypatch.setattr(kind, "__call__", recorded)

    for kind in KERNELS:
        recording(kind)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_a_whole_model(
    name: str, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, str], None]
) -> None:
    """A path from the loss to a parameter has some 12 roundings of gradients and 12 of operands for each of 2 layers.
    Independent, uniform: sqrt(48) * U / sqrt(3) = 0.016 of the norm; twice that is allowed. A token's path that is
    left out, or a factor, is more than a tenth."""
    model, passed = tiny(name), []

    record_inputs(passed, monkeypatch)
    put_in(model)
    inputs, weights_T = packed(model), torch.randn(81)
    log_probs = model(**inputs, temperature=0.8).log_probs[0]
    (log_probs * weights_T).sum().backward()
    assert len(passed) == 8
    parameters = dict(zip(dict(model.named_parameters()), wide(*model.parameters()), strict=True))
    expected = float64_log_probs(model, parameters, inputs, passed)
    (expected * weights_T).sum().backward()
    gaps, cosines = {}, {}
    for parameter_name, parameter in model.named_parameters():
        mine, other = parameter.grad.double().flatten(), parameters[parameter_name].grad.flatten()
        if parameter_name.endswith("k_proj.bias"):
            continue  # moves all scores of a query alike, but for the rotation: next to nothing remains
        gaps[parameter_name] = float((mine - other).norm() / other.norm())
        cosines[parameter_name] = float(functional.cosine_similarity(mine, other, dim=0))
    record_property("said", f"{name}: gradients at most {max(gaps.values()):.4f} from float64's")
    assert max(gaps.values()) < 0.032, gaps
    assert min(cosines.values()) > 1 - 0.032**2 / 2, cosines
    assert float((log_probs - expected).abs().max()) < 0.1


def test_a_sequence_learns_nothing_from_another_one() -> None:
    """Tokens of one kind stand in each sequence: a sequence's log-probs move the embeddings of its own tokens only."""
    model = tiny("qwen3")
    put_in(model)
    inputs = packed(model)
    inputs["input_ids"] = torch.cat([torch.full((each,), place) for place, each in enumerate(LENGTHS)])[None]
    for place in range(len(LENGTHS)):
        model.zero_grad()
        model(**inputs, temperature=1.0).log_probs[0].split(LENGTHS)[place].sum().backward()
        moved = model.model.embed_tokens.weight.grad.any(dim=1).nonzero().flatten()
        assert moved.tolist() == [place]


def bytes_saved(model: nn.Module, run: Callable[[], object]) -> int:
    """Of all tensors that `run` keeps for the gradients, storages counted once and the model's own not at all."""
    storages = {each.untyped_storage().data_ptr(): each for each in model.parameters()}
    of_parameters = set(storages)

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor  # kept, so that no other one gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        run()
    return sum(each.untyped_storage().nbytes() for address, each in storages.items() if address not in of_parameters)


def test_a_layer_keeps_half_of_what_transformers_keeps(record_property: Callable[[str, str], None]) -> None:
    """An eighth of Qwen2.5-7B's width (heads of 64 in place of 128, 7 in place of 28), 512 tokens: what a second layer
    adds. Transformers' layer in BF16 with sdpa, as FSDP runs it."""
    sizes = {"hidden_size": 448, "intermediate_size": 2368, "num_attention_heads": 7, "head_dim": 64}
    added = {}
    for kind in ("transformers", "rollout"):
        totals = []
        for layers in (1, 2):
            model = tiny("qwen2", **sizes, num_hidden_layers=layers, attn_implementation="sdpa")
            inputs = packed(model, (512,))
            if kind == "rollout":
                put_in(model)
                inputs["temperature"] = 1.0
            else:
                inputs["use_cache"] = False
                del inputs["shift_labels"]
            totals.append(bytes_saved(model, functools.partial(model, **inputs)))
        added[kind] = totals[1] - totals[0]
    share = added["rollout"] / added["transformers"]
    record_property("said", f"saved for the gradients, bytes a layer: {added}, {share:.3f} of transformers'")
    assert share < 0.5


def test_gradient_checkpointing_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """And computes each layer again but for its last product, which nothing needs."""
    model, products = tiny("qwen2").train(), []
    for kind in KERNELS:
        original = kind.__call__
        monkeypatch.setattr(kind, "__call__", lambda *args, own=original: products.append(1) or own(*args))
    put_in(model)
    inputs, calls = packed(model), []
    for layer in model.model.layers:
        original = layer.forward
        layer.forward = lambda *args, own=original: calls.append(1) or own(*args)
    results = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.zero_grad()
        log_probs = model(**inputs, temperature=1.0).log_probs
        log_probs.sum().backward()
        results.append([log_probs.detach(), *(each.grad.clone() for each in model.parameters())])
    assert len(calls) == 2 + 4
    assert len(products) == 2 * 4 + 2 * (4 + 3)
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("name", MODELS)
def test_smoothing_changes_no_bit_of_what_is_not_quantised(name: str, tmp_path: Path) -> None:
    """Nor of a gradient: every factor comes back out of it. With one factor for all channels of a layer the codes are
    the same too, and so is what they give."""
    inputs = packed(tiny(name)) | {"temperature": 0.8}
    results: dict[tuple[str, Scheme], list[Tensor]] = {}
    for scheme in (Scheme.BF16, Scheme.INT8):
        for kind in ("plain", "random", "equal"):
            torch.manual_seed(3)
            model = tiny(name)
            smoothing = random_smoothing(model, seed=4) if kind != "plain" else Smoothing()
            if kind == "equal":
                equal = [
                    torch.full_like(group.scale_K, 4 if "v_proj" in group.source else 0.25)
                    for group in smoothing.groups
                ]
                groups = zip(smoothing.groups, equal, strict=True)
                smoothing = Smoothing(tuple(replace(group, scale_K=scale_K) for group, scale_K in groups))
            folder = tmp_path / f"{scheme}-{kind}"
            write_profile(Profile(Origin("donor", "m"), Scheme.INT8, Settings(), smoothing), folder=folder)
            told = Quantisation(scheme=Scheme.INT8, profile=str(folder))
            flow = RolloutForward(model, quantisation=told, num_tokens=model.config.vocab_size)
            flow.follow(Precision(scheme))
            log_probs = model(**inputs).log_probs
            log_probs.sum().backward()
            results[kind, scheme] = [log_probs.detach(), *(parameter.grad for parameter in model.parameters())]
    for kind, scheme in (("random", Scheme.BF16), ("equal", Scheme.BF16), ("equal", Scheme.INT8)):
        assert all(map(torch.equal, results[kind, scheme], results["plain", scheme])), (kind, scheme)
    assert not torch.equal(results["random", Scheme.INT8][0], results["plain", Scheme.INT8][0])


def test_a_finer_scheme_that_engines_are_told_is_the_trainers_until_the_next_update() -> None:
    """As by the governor's `raise-precision`."""
    model, by_scheme = tiny("qwen2"), {}
    inputs = packed(model)
    for scheme in (Scheme.FP8, Scheme.FP8_CHANNEL, Scheme.BF16):
        quantisation = Quantisation(scheme=scheme, emulated=scheme.quantised)
        RolloutForward(model, quantisation=quantisation, num_tokens=96)
        by_scheme[scheme] = model(**inputs, temperature=1.0).log_probs
    flow = RolloutForward(model, quantisation=Quantisation(scheme=Scheme.FP8, emulated=True), num_tokens=96)
    told = {Scheme.FP8_CHANNEL: Precision(Scheme.FP8_CHANNEL), Scheme.BF16: Precision(Scheme.BF16)}
    for scheme, precision in (*told.items(), (Scheme.FP8, AS_PLANNED)):
        flow.follow(precision)
        now = model(**inputs, temperature=1.0).log_probs
        assert [torch.equal(now, wanted) for wanted in by_scheme.values()] == [scheme is each for each in by_scheme]


def test_an_activation_that_is_not_finite_is_told_with_its_layer() -> None:
    """Where its codes are made: in the forward, or of a gated layer in the backward."""
    model = tiny("qwen2")
    put_in(model)
    inputs, layer = packed(model) | {"temperature": 1.0}, model.model.layers[1]
    end = "in training: an activation to quantise has a value that is not finite"
    layer.input_layernorm.weight.data[3] = torch.inf
    with torch.no_grad():
        assert bool(model(**inputs).log_probs.isnan().any())  # a step that is not learned from, trainer/metrics.py
    with pytest.raises(NumericsError) as raised:
        model(**inputs)
    assert raised.value.message == f"model.layers.1.self_attn.qkv_proj {end}"
    weight = random(64, 32)
    down = EngineWeight.from_linears([weight], scheme=Scheme.INT8, factor_K=None, name="down")
    gate_up = random(5, 64)
    gate_up.data[2, 40] = torch.nan
    y = down(gate_up, [weight], None, gated=True)
    with pytest.raises(NumericsError) as raised:
        y.sum().backward()
    assert raised.value.message == f"down {end}"
