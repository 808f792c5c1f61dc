"""The proof of vLLM's own `fp8-block`: what a compiler may decide is no fault, and everything else is.

How its layers run here without a GPU: native_layers.py. A kernel's numbers on a GPU were not seen (docs/gpu.md).

Legend: N output channels, K input channels; T tokens of a probe.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from faults import overwrite
from native_layers import (
    DOWN,
    GATE_UP,
    Tensors,
    new_update,
    received,
    refusal,
    served,
    take,
    tensors,
    vllm_settings,
)
from torch import Tensor
from torch.nn import Module

from appliance.engine.fp8 import native_fp8_method
from appliance.engine.fp8_proof import SLACK, NativeBlockProof
from appliance.engine.kernel_proof import ProofRequest
from appliance.engine.tensor_slots import LocalShape, Slot
from appliance.quant.codec import dequantise, quantise
from appliance.quant.codec_fp8 import BLOCK, spread_scale
from appliance.terms.schemes import Scheme

pytestmark = pytest.mark.engine

FP8 = torch.float8_e4m3fn
U = 2.0**-24
RECIPROCAL = torch.tensor(1 / 448, dtype=torch.float32)


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with vllm_settings(monkeypatch):
        yield


def one_proof(shape: tuple[int, int], *, sync: int = 1, full: bool = True) -> NativeBlockProof:
    request = ProofRequest(sync=sync, round=sync, full=full, thorough=full)
    local = LocalShape(channels=shape[0], length=shape[1], is_cut=False)
    return NativeBlockProof("layer", shape=local, scheme=Scheme.FP8_BLOCK, request=request)


def expecting(weight_NK: Tensor, *, sync: int = 1, full: bool = True) -> NativeBlockProof:
    one = one_proof(tuple(weight_NK.shape), sync=sync, full=full)
    one.take(Slot("layer", "weight", rows=slice(0, len(weight_NK))), weight_NK)
    return one


def gaussian(seed: int, shape: tuple[int, int] = (400, 300)) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def grid(seed: int, shape: tuple[int, int] = (400, 300)) -> Tensor:
    """Scales 5 * 2^-9, whose reciprocals no float is, and of the weights every third or so is a midpoint of codes."""
    generator = torch.Generator().manual_seed(seed)
    weight_NK = 5 * torch.randint(-31, 32, shape, generator=generator).float()
    weight_NK[::BLOCK, ::BLOCK] = 5 * 448
    return (weight_NK * 2.0**-9).to(torch.bfloat16)


# --- A compiled quantiser ---


def cast_by(x_of: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """vLLM's per_block_cast_to_fp8 (utils/deep_gemm.py) with other arithmetic. x_of: (w, a) in blocks -> (x, s)."""

    def cast(weight_NK: Tensor, block_size: list[int], use_ue8m0: bool) -> tuple[Tensor, Tensor]:
        assert block_size == [BLOCK, BLOCK] and not use_ue8m0
        (rows, columns), (over, right) = weight_NK.shape, (-size % BLOCK for size in weight_NK.shape)
        padded = torch.nn.functional.pad(weight_NK.float(), (0, right, 0, over))
        blocks = padded.view(-1, BLOCK, padded.shape[1] // BLOCK, BLOCK)
        x, scale = x_of(blocks, blocks.abs().amax(dim=(1, 3), keepdim=True).clamp(1e-4))
        return x.to(FP8).view(padded.shape)[:rows, :columns].contiguous(), scale.view(scale.shape[0], scale.shape[2])

    return cast


def _ada(w: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Inductor's constant, and Triton's way to E4M3 before compute capability 9.0: through FP16."""
    scale = a * RECIPROCAL
    return (w * (1.0 / scale)).half().float(), scale


def _hopper(w: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    scale = a * RECIPROCAL
    return w * (1.0 / scale), scale


def _worst(sign: int, *, by_fp16: bool) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Both divisions off by two units in the last place, the same way."""

    def x_of(w: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        scale = (a.double() / 448 * (1 + sign * 4 * U)).float()
        x = w * (1 / scale.double() * (1 - sign * 4 * U)).float()
        return x.half().float() if by_fp16 else x, scale

    return x_of


QUANTISERS = {"Ada": _ada, "Hopper": _hopper}
QUANTISERS |= {
    f"off by {sign * 8} u{', FP16' * by_fp16}": _worst(sign, by_fp16=by_fp16)
    for sign in (1, -1)
    for by_fp16 in (False, True)
}


def loaded(weight_NK: Tensor, by: str) -> Module:
    """A layer as such a quantiser leaves it, without vLLM: large enough for many blocks."""
    codes_NK, scale = cast_by(QUANTISERS[by])(weight_NK, [BLOCK, BLOCK], False)
    return holding(codes_NK, scale)


def holding(codes_NK: Tensor, scale: Tensor) -> Module:
    from vllm.model_executor.kernels.linear.scaled_mm.triton import TritonFp8BlockScaledMMKernel

    layer, method = Module(), native_fp8_method(Scheme.FP8_BLOCK)
    layer.output_size_per_partition, layer.input_size_per_partition = codes_NK.shape
    layer.weight = torch.nn.Parameter(codes_NK, requires_grad=False)
    layer.weight_scale_inv = torch.nn.Parameter(scale, requires_grad=False)
    layer.quant_method = method
    method.fp8_linear = TritonFp8BlockScaledMMKernel.__new__(TritonFp8BlockScaledMMKernel)
    method.apply = lambda layer, x, bias: x @ dequantised(layer).to(torch.bfloat16).t()
    return layer


def dequantised(layer: Module) -> Tensor:
    return dequantise(layer.quant_method.held_weight(layer))


@pytest.mark.parametrize("quantiser", QUANTISERS)
def test_what_a_compiler_may_decide_is_no_fault(quantiser: str) -> None:
    others = 0
    for kind, seed in itertools.product((gaussian, grid), range(1, 6)):
        weight_NK = kind(seed)
        layer, codec = loaded(weight_NK, quantiser), quantise(weight_NK, scheme=Scheme.FP8_BLOCK)
        others += int((layer.weight.data.view(torch.uint8) != codec.codes_NK.view(torch.uint8)).sum())
        for sync in (1, 2, 3):
            found = expecting(weight_NK, sync=sync, full=sync == 1).check(layer)
            assert found is None, (kind, seed, sync, str(found))
    assert others > 100  # else this would show nothing


@pytest.mark.parametrize("quantiser", QUANTISERS)
def test_updates_by_such_a_quantiser_are_proven(quantiser: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.quantization.online import fp8

    monkeypatch.setattr(fp8, "per_block_cast_to_fp8", cast_by(QUANTISERS[quantiser]))
    update = new_update(served(Scheme.FP8_BLOCK))
    for number in range(1, 11):
        proven = take(update, tensors(number))
        assert (proven.layers, proven.layers_proven, proven.unproven) == (2, 2, 0)


@pytest.mark.parametrize("kind", [gaussian, grid])
def test_both_codes_pass_only_where_a_weight_is_as_near_to_either(kind: Callable[[int], Tensor]) -> None:
    weight_NK = kind(1)
    layer_proof, codec = expecting(weight_NK), quantise(weight_NK, scheme=Scheme.FP8_BLOCK)
    outer = layer_proof._outer.view(FP8).double()
    inner = (layer_proof._outer - 1).view(FP8).double()
    x = (weight_NK.double() / spread_scale(codec.scale, block=codec.block, shape=(400, 300)).double()).view(-1)
    midpoint = (inner + outer) / 2
    near = (x[layer_proof._places.long()] / midpoint - 1).abs()
    assert len(near) > 100 and bool((near < SLACK * (1 + 2.0**-8)).all())
    assert len(near) < weight_NK.numel() * (0.03 if kind is gaussian else 0.3)


def test_every_other_change_of_a_code_is_seen() -> None:
    """Bits of codes, one at a time, at 64 places anywhere and at 16 where the next code passes too."""
    weight_NK = gaussian(1)
    right = quantise(weight_NK, scheme=Scheme.FP8_BLOCK)
    layer_proof = expecting(weight_NK)
    either = dict(zip(layer_proof._places.tolist(), layer_proof._outer.tolist(), strict=True))
    drawn = torch.randint(weight_NK.numel(), (64,), generator=torch.Generator().manual_seed(1)).tolist()
    unseen = 0
    for place in [*drawn, *list(either)[:16]]:
        for bit in range(8):
            codes_NK = right.codes_NK.clone()
            codes = codes_NK.view(torch.uint8).view(-1)
            codes[place] ^= 1 << bit
            passes = int(codes[place]) in (either.get(place), either.get(place, 0) - 1) or int(codes[place]) == 0x80
            found = layer_proof._find_wrong_code(holding(codes_NK, right.scale))
            assert (found is None) == passes, (place, bit)
            unseen += passes
    assert 0 < unseen < 32


def test_a_scale_may_be_off_by_rounding_only() -> None:
    weight_NK = gaussian(1)
    right = quantise(weight_NK, scheme=Scheme.FP8_BLOCK)
    for off, passes in ((2.0**-22, True), (-(2.0**-22), True), (2.0**-20, False), (-(2.0**-20), False)):
        scale = right.scale.clone()
        scale[3, 2] *= 1 + off
        found = expecting(weight_NK).check(holding(right.codes_NK, scale))
        assert (found is None) is passes, off
        assert passes or found.subject == "scale 11"
    for fault in (torch.nan, torch.inf, 0.0, -1.0):
        scale = right.scale.clone()
        scale[0, 1] = fault
        assert expecting(weight_NK).check(holding(right.codes_NK, scale)).subject == "scale 1"


def test_what_the_proof_remembered_is_dropped_when_it_is_done() -> None:
    weight_NK = gaussian(1)
    layer_proof = expecting(weight_NK)
    assert len(layer_proof._places) == len(layer_proof._outer) > 0
    assert layer_proof.check(loaded(weight_NK, "Hopper")) is None
    assert len(layer_proof._places) == len(layer_proof._outer) == 0


# --- Faults ---


def _blocks_swapped(codes_NK: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Two blocks of rows with all that is theirs."""
    return torch.cat([codes_NK[128:256], codes_NK[:128], codes_NK[256:]]), scale[[1, 0, 2]]


def _codes_swapped(codes_NK: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return _blocks_swapped(codes_NK, scale)[0], scale


def _scales_swapped(codes_NK: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return codes_NK, scale[[1, 0, 2]]


LAYER_FAULTS = {"blocks": (_blocks_swapped, "scale "), "codes": (_codes_swapped, "digest of the codes of 1 blocks")}
LAYER_FAULTS["scales"] = (_scales_swapped, "scale ")


@pytest.mark.parametrize("fault", LAYER_FAULTS)
def test_blocks_that_changed_places(fault: str) -> None:
    model = served(Scheme.FP8_BLOCK)
    layer, (change, expected) = model.mlp.gate_up_proj, LAYER_FAULTS[fault]

    def inject() -> bool:
        codes_NK, scale = change(layer.weight.data.view(torch.uint8).clone(), layer.weight_scale_inv.data.clone())
        moved = overwrite(layer.weight_scale_inv.data, scale) if fault != "codes" else False
        return overwrite(layer.weight.data.view(torch.uint8), codes_NK) if fault != "scales" else moved

    said = refusal(model, inject=inject)
    assert said.startswith(f"weight update 1: {GATE_UP} on rank 0 is not as received: {expected}"), said


def test_a_block_of_rows_that_stayed_behind_is_seen_when_its_turn_comes() -> None:
    """Its scales came, its codes did not: 3 blocks of rows, so within 3 updates after the full one."""
    weight_NK, before_NK = gaussian(1), gaussian(2)
    right, stale = (quantise(each, scheme=Scheme.FP8_BLOCK) for each in (weight_NK, before_NK))
    for block in range(3):
        codes_NK = right.codes_NK.clone()
        rows = slice(block * BLOCK, (block + 1) * BLOCK)
        codes_NK.view(torch.uint8)[rows] = stale.codes_NK.view(torch.uint8)[rows]
        layer = holding(codes_NK, right.scale)
        found = [expecting(weight_NK, sync=sync, full=False)._find_wrong_code(layer) for sync in range(4, 8)]
        assert [each is not None for each in found] == [sync % 4 == block for sync in range(4, 8)]


@pytest.mark.parametrize("name", [GATE_UP, DOWN])
@pytest.mark.parametrize("sync", [1, 2])
def test_a_kernel_that_multiplies_by_something_else(name: str, sync: int) -> None:
    """Codes and scales lie in the layer as they should: only the answer shows it. Probes of 32 tokens, and of 16."""
    faults: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
        "other weights": lambda codes_NK, scale: (codes_NK.roll(1, dims=0), scale),
        "input channels in another order": lambda codes_NK, scale: (codes_NK.flip(1), scale),
        "a scale of before": lambda codes_NK, scale: (codes_NK, scale * 1.02),
        "no scale": lambda codes_NK, scale: (codes_NK, torch.ones_like(scale)),
        "scales of other blocks": lambda codes_NK, scale: (codes_NK, scale.flip(0, 1)),
        "not finite": lambda codes_NK, scale: (codes_NK, scale * torch.nan),
    }
    for fault, change in faults.items():
        model = served(Scheme.FP8_BLOCK)
        update = new_update(model)
        if sync == 2:
            take(update, tensors(3))
        kernel = model.get_submodule(name).quant_method.fp8_linear
        right = kernel.apply_block_scaled_mm

        def wrong(
            *, B: Tensor, Bs: Tensor, change: Callable = change, right: Callable = right, **rest: Tensor
        ) -> Tensor:
            codes_NK, Bs = change(B.view(torch.uint8), Bs)
            return right(B=codes_NK.view(FP8), Bs=Bs, **rest)

        kernel.apply_block_scaled_mm = wrong
        said = refusal(model, inject=lambda: True, update=update)
        start = f"weight update {sync}: {name} on rank 0 is not as received: probe, output channel "
        assert said.startswith(start), (fault, said)


def test_groups_of_a_token_that_get_the_scale_of_another_token() -> None:
    model = served(Scheme.FP8_BLOCK)
    kernel = model.mlp.down_proj.quant_method.fp8_linear
    right = kernel.apply_block_scaled_mm
    kernel.apply_block_scaled_mm = lambda *, As, **rest: right(As=As.roll(1, dims=0), **rest)
    said = refusal(model, inject=lambda: True)
    assert said.startswith(f"weight update 1: {DOWN} on rank 0 is not as received: probe, output channel "), said


# --- No faults ---


def test_zeros() -> None:
    """A block of zeros, and zeros of either sign: what a product's is does not follow from them."""
    stream: Tensors = []
    for name, tensor in tensors(2):
        tensor[:, ::7] = -0.0
        tensor[: len(tensor) // 2] = 0.0
        stream.append((name, torch.zeros_like(tensor) if "gate" in name else tensor))
    model = served(Scheme.FP8_BLOCK)
    assert take(new_update(model), stream).layers_proven == 2
    weight_NK = received(DOWN, stream)
    codec = quantise(weight_NK, scheme=Scheme.FP8_BLOCK)
    codes_NK = codec.codes_NK.clone()
    negative = codes_NK.view(torch.uint8) == 0x80
    assert bool(negative.any())
    codes_NK.view(torch.uint8)[negative] = 0
    assert expecting(weight_NK).check(holding(codes_NK, codec.scale)) is None


def test_an_answer_is_one_weight_and_the_bound_is_met_with_room() -> None:
    """The derivation: a BF16 rounding of the codec's weight, 2^-8, and float32's few: half of what is allowed."""
    from appliance.engine.kernel_proof import compute_answer
    from appliance.engine.tensor_slots import local_shape

    model, seen = served(Scheme.FP8_BLOCK), set()
    layer = model.mlp.down_proj
    values_NK = dequantise(quantise(received(DOWN, tensors(1)), scheme=Scheme.FP8_BLOCK)).double()
    for sync in range(1, 61):
        request = ProofRequest(sync=sync, round=sync, full=False, thorough=False)
        layer_proof = NativeBlockProof(DOWN, shape=local_shape(layer), scheme=Scheme.FP8_BLOCK, request=request)
        out_TN = compute_answer(layer, layer_proof.probe_TK(), bias_N=None)
        wanted_TN = layer_proof.probe_TK().double() @ values_NK.t()
        assert bool(((out_TN - wanted_TN).abs() <= 2.0**-8 * (1 + 2.0**-12) * wanted_TN.abs()).all())
        assert len(set(layer_proof.columns_T.tolist())) == (32 if sync % 2 else 16)
        seen.update(layer_proof.columns_T.tolist())
    assert seen == set(range(160))  # missed by one of 160 with 160 * (0.8 * 0.9)^30 = 8e-3; the seeds are fixed


# --- Which kernels are asked ---


def _kernel(kind: str, *, rounds_up: bool) -> object:
    from vllm.model_executor.kernels.linear.scaled_mm.deep_gemm import DeepGemmFp8BlockScaledMMKernel
    from vllm.model_executor.kernels.linear.scaled_mm.flashinfer import FlashInferFp8DeepGEMMDynamicBlockScaledKernel

    deep = DeepGemmFp8BlockScaledMMKernel.__new__(DeepGemmFp8BlockScaledMMKernel)
    deep.use_deep_gemm_e8m0 = rounds_up
    if kind == "DeepGEMM":
        return deep
    both = FlashInferFp8DeepGEMMDynamicBlockScaledKernel.__new__(FlashInferFp8DeepGEMMDynamicBlockScaledKernel)
    both.fallback = deep
    return both


@pytest.mark.parametrize("kind", ["DeepGEMM", "FlashInfer or DeepGEMM"])
def test_scales_that_deep_gemm_makes_powers_of_two_are_not_asked(kind: str) -> None:
    """Which is vLLM's default: a plan turns it off (terms/environment.py), a process without a plan may have it."""
    method = native_fp8_method(Scheme.FP8_BLOCK)
    for rounds_up in (False, True):
        method.fp8_linear = _kernel(kind, rounds_up=rounds_up)
        assert method.provable is not rounds_up
    model = served(Scheme.FP8_BLOCK)
    for layer in (model.mlp.gate_up_proj, model.mlp.down_proj):
        layer.quant_method.fp8_linear = _kernel(kind, rounds_up=True)
    proven = new_update(model)._proof
    assert (len(proven._provable), proven._unasked) == (0, {GATE_UP, DOWN})


def test_blocks_have_one_bound_also_where_other_layers_multiply_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import envs

    envs.disable_envs_cache()  # an engine of another test in this process enabled it
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert not served(Scheme.FP8_BLOCK).mlp.down_proj.quant_method.multiplies_in_bf16


def test_packed_scales_are_not_told() -> None:
    codec = quantise(gaussian(1), scheme=Scheme.FP8_BLOCK)
    layer = holding(codec.codes_NK, codec.scale)
    held = layer.quant_method.held_weight(layer)
    assert held.codes_NK.shape == (400, 300) and held.scale.shape == (4, 3) and held.block == (128, 128)
    layer.weight_scale_inv = torch.nn.Parameter(torch.ones(4, 3, dtype=torch.int32), requires_grad=False)
    assert layer.quant_method.held_weight(layer) is None  # DeepGEMM's on Blackwell
