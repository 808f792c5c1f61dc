"""FP8 quantisers against the codec, FP8 products against float64.

Legend: M or T tokens, N output channels, K input channels.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from appliance.quant.codec import QuantisedWeight, dequantise, quantise, quantise_tokens
from appliance.terms.schemes import BLOCK, Scheme
from benchmarks.accept.ground import Ground
from benchmarks.accept.kernels import BF16_U, U, seeded

ADDED_AT_ONCE = 32  # products in a step of a Hopper tensor core (engine/fp8_proof.py)
KEPT = 2.0**-13  # of the largest of them: what is below is cut off
IN_NORM = 2.0**-5  # DeepSeek-V3 (2024) saw nearly 2 % for sums of 4096 products on Hopper; ours are shorter


def quantisers(ground: Ground) -> None:
    """vLLM's: of a weight by one scale that the codec gives, and of tokens by scales of their own, bit for bit."""
    shapes = ground.size(((1, 16), (129, 896), (64, 4864), (33, 5120), (16, 27648)), tiny=((1, 16), (33, 352)))
    cases = {f"{rows} x {columns}": (rows, columns) for rows, columns in shapes}
    ground.run_parts(cases, lambda name: _quantise(ground, *cases[name]))


def _quantise(ground: Ground, rows: int, columns: int) -> None:
    value_MK = (torch.randn(rows, columns, generator=seeded(columns)) * 0.02).to(torch.bfloat16)
    for tensor_kind, scheme, expected in (
        ("weight", Scheme.FP8, quantise(value_MK, scheme=Scheme.FP8)),
        ("tokens", Scheme.FP8_CHANNEL, quantise_tokens(value_MK, scheme=Scheme.FP8_CHANNEL)),
    ):
        given = expected.scale.reshape(1) if tensor_kind == "weight" else None
        codes_MK, scale = _quantised(ground, value_MK, scale=given, scheme=scheme)
        same = torch.equal(scale.reshape(-1), expected.scale.reshape(-1))
        ground.hold(same, f"{tensor_kind}: scales are not the codec's")
        differ = int((codes_MK.view(torch.uint8) != expected.codes_NK.view(torch.uint8)).sum())
        ground.hold(not differ, f"{tensor_kind}: {differ} codes are not the codec's")


def _quantised(ground: Ground, value_MK: Tensor, *, scale: Tensor | None, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Codes and scales on the CPU. scale: None: of each token."""
    if ground.rehearsal:
        ground.stand_in("vLLM's FP8 quantisers: torch")
        own_scale = value_MK.float().abs().amax(dim=1, keepdim=True) / 448 if scale is None else scale
        floor = 1.0 / torch.tensor(448.0 * 512)
        own_scale = own_scale.maximum(floor) if scale is None else own_scale
        x_MK = value_MK.float() / own_scale if scale is None else value_MK.float() * own_scale.reciprocal()
        return x_MK.clamp(-448, 448).to(torch.float8_e4m3fn), own_scale
    from vllm import _custom_ops

    given = None if scale is None else scale.to(ground.device)
    codes_MK, own_scale = _custom_ops.scaled_fp8_quant(value_MK.to(ground.device), given, use_per_token_if_dynamic=True)
    return codes_MK.cpu(), own_scale.cpu()


def gemm(ground: Ground) -> None:
    """vLLM's CUTLASS product and torch's `_scaled_mm`, with a scale a token and one a weight or an output channel.

    The tensor core cuts off: of ADDED_AT_ONCE products and what was summed before, KEPT of the largest each time, so
    at most (K / 32) * 33 * 2^-13 of sum |products|, which is more than most answers are: so all of them together are
    held in norm as well, where what is cut off averages out. A probe of one value a token is exact, and found to 2^-7.
    """
    sizes = ground.size(
        ((16, 896, 896), (64, 1152, 896), (16, 3584, 256), (1024, 5120, 512)), tiny=((16, 64, 128), (33, 96, 256))
    )
    cases = {
        f"{scheme}, {tokens} tokens, {rows} x {columns}": (scheme, tokens, rows, columns)
        for tokens, rows, columns in sizes
        for scheme in (Scheme.FP8, Scheme.FP8_CHANNEL)
    }
    ground.run_parts(cases, lambda name: _gemm(ground, *cases[name]))


def _gemm(ground: Ground, scheme: Scheme, tokens: int, rows: int, columns: int) -> None:
    generator = seeded(rows)
    weight_NK = (torch.randn(rows, columns, generator=generator) * 0.02).to(torch.bfloat16)
    dense_MK = torch.randn(tokens, columns, generator=generator).to(torch.bfloat16)
    single_MK = torch.zeros(tokens, columns, dtype=torch.bfloat16)
    place_M = torch.randint(0, columns, (tokens,), generator=generator)
    single_MK[torch.arange(tokens), place_M] = (2 ** torch.randint(0, 4, (tokens,), generator=generator)).to(
        torch.bfloat16
    )
    weight = quantise(weight_NK, scheme=scheme)
    for what, x_MK, cut in (("dense", dense_MK, _cut(columns)), ("single values", single_MK, 0.0)):
        _hold_products(ground, quantise_tokens(x_MK, scheme=scheme), weight, cut=cut, product=what)


def _cut(columns: int) -> float:
    return -(-columns // ADDED_AT_ONCE) * (ADDED_AT_ONCE + 1) * KEPT


def _hold_products(ground: Ground, x: QuantisedWeight, weight: QuantisedWeight, *, cut: float, product: str) -> None:
    x_MK, w_NK = x.codes_NK.double() * x.scale.double(), dequantise(weight).double()
    for kernel, found_MN in _products(ground, x, weight).items():
        _hold_product(ground, found_MN, x_MK, w_NK, cut=cut, product=f"{kernel}, {product}")


def _hold_product(
    ground: Ground, found_MN: Tensor, left_MK: Tensor, right_NK: Tensor, *, cut: float, product: str
) -> None:
    """All in float64, on the CPU. found: rounded to BF16."""
    wanted_MN, size_MN = left_MK @ right_NK.t(), left_MK.abs() @ right_NK.abs().t()
    bound_MN = 2 * BF16_U * wanted_MN.abs() + (cut + 8 * U) * size_MN
    excess = float(((found_MN - wanted_MN).abs() - bound_MN).max())
    ground.hold(excess <= 0, f"{product}: an answer is {excess:.3g} beyond its bound")
    off = float((found_MN - wanted_MN).norm() / wanted_MN.norm())
    ground.hold(off <= IN_NORM, f"{product}: {off:.3g} from the exact product in norm, {IN_NORM:.3g} is allowed")


def _products(ground: Ground, x: QuantisedWeight, weight: QuantisedWeight) -> dict[str, Tensor]:
    """Compute products by kernel, [M, N] float64 on the CPU. torch takes scales of rows on both sides, or one on
    both."""
    codes_MK, scale_M1 = x.codes_NK.to(ground.device), x.scale.to(ground.device)
    codes_NK, scale = weight.codes_NK.to(ground.device), weight.scale.to(ground.device)
    scale_1N = scale.reshape(1, -1).expand(1, len(codes_NK)).contiguous()
    by_torch = torch._scaled_mm(codes_MK, codes_NK.t(), scale_a=scale_M1, scale_b=scale_1N, out_dtype=torch.bfloat16)
    if ground.rehearsal:
        ground.stand_in("CUTLASS's FP8 product: float32 in torch")
        by_cutlass = ((codes_MK.float() @ codes_NK.float().t()) * scale_M1 * scale_1N).to(torch.bfloat16)
    else:
        from vllm import _custom_ops

        by_cutlass = _custom_ops.cutlass_scaled_mm(
            codes_MK, codes_NK.t(), scale_a=scale_M1, scale_b=scale.reshape(-1, 1), out_dtype=torch.bfloat16
        )
    return {"torch": by_torch.double().cpu(), "CUTLASS": by_cutlass.double().cpu()}


def backward(ground: Ground) -> None:
    """Both gradients of a layer of `trainer.backward: fp8-block`, as the trainer makes them, with float64's of the same
    codes, which are made here on the CPU. What is summed over are output channels, and tokens; no multiples of 128.
    """
    if ground.rehearsal:
        ground.stand_in("torch's FP8 product in blocks: emulation, float64's sums")
    sizes = ground.size(((300, 1152, 896), (1000, 896, 4864)), tiny=((150, 200, 300),))
    cases = {f"{tokens} tokens, {rows} x {columns}": (tokens, rows, columns) for tokens, rows, columns in sizes}
    ground.run_parts(cases, lambda name: _backward(ground, *cases[name]))


def _backward(ground: Ground, tokens: int, rows: int, columns: int) -> None:
    from appliance.trainer.rollout_ops import EngineWeight

    generator, scheme = seeded(rows), Scheme.FP8_BLOCK
    weight_NK, x_TK, grad_TN = (
        (_uneven(torch.randn(shape, generator=generator)) * size).to(torch.bfloat16)
        for shape, size in (((rows, columns), 0.02), ((tokens, columns), 1.0), ((tokens, rows), 1e-3))
    )
    weight, passed = quantise(weight_NK, scheme=scheme), quantise_tokens(x_TK, scheme=scheme)

    def in_blocks(values: Tensor) -> Tensor:
        return dequantise(quantise_tokens(values.contiguous(), scheme=scheme)).double()

    layer = EngineWeight(_there(ground, weight), _no_forward, factor_K=None, fp8_backward=True)
    there_TN = grad_TN.to(ground.device)
    for product, computed, left, right, summed in (
        ("of the input", layer.grad_of_input(there_TN), in_blocks(grad_TN), dequantise(weight).double().t(), rows),
        (
            "of the weight",
            layer.grad_of_weight(there_TN, _there(ground, passed)),
            in_blocks(grad_TN.t()),
            in_blocks(dequantise(passed).t()),
            tokens,
        ),
    ):
        _hold_product(ground, computed.double().cpu(), left, right, cut=_cut(summed), product=f"gradient {product}")


def _uneven(values: Tensor) -> Tensor:
    """No two blocks beside each other have one size, so that a scale read from another place is seen."""
    of_row, of_column = (torch.arange(size) // BLOCK for size in values.shape)
    return values * 2.0 ** ((of_row[:, None] + 2 * of_column) % 4)


def _there(ground: Ground, quantised: QuantisedWeight) -> QuantisedWeight:
    device = ground.device
    return replace(quantised, codes_NK=quantised.codes_NK.to(device), scale=quantised.scale.to(device))


def _no_forward(x_TK: Tensor, bias_N: Tensor | None) -> Tensor:
    raise AssertionError("a gradient needs no forward")
