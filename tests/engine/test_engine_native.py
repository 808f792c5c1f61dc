"""The proof of vLLM's own online FP8 methods, and what puts a layer of theirs at fault.

How they run here without a GPU: native_layers.py. What is particular to `fp8-block`: test_engine_native_blocks.py.

Legend: N output channels, K input channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from faults import before_proof, flip_bit, given_to_vllm, overwrite
from native_layers import (
    DOWN,
    GATE_UP,
    SHAPES,
    Mlp,
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
from torch._subclasses import FakeTensorMode
from torch.nn import Module

from appliance.engine import fp8
from appliance.engine import update as weight_update
from appliance.engine.attest import live_scheme
from appliance.errors import SyncError
from appliance.quant.codec import quantise
from appliance.terms.schemes import Scheme

pytestmark = pytest.mark.engine

KERNELS = {
    Scheme.FP8: "PerTensorTorchFP8ScaledMMLinearKernel",
    Scheme.FP8_CHANNEL: "ChannelWiseTorchFP8ScaledMMLinearKernel",
    Scheme.FP8_BLOCK: "TritonFp8BlockScaledMMKernel",
}
SCHEMES = tuple(KERNELS)
EXACT = (Scheme.FP8, Scheme.FP8_CHANNEL)  # codes and scales bit for bit
PLACES = (0.0, 0.31, 1.0)


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with vllm_settings(monkeypatch):
        yield


def assert_holds(model: Mlp, stream: Tensors, *, scheme: Scheme) -> None:
    """The codec's codes and scales, bit for bit, and in the memory that vLLM's kernel is handed."""
    for name in (GATE_UP, DOWN):
        layer, expected = model.get_submodule(name), quantise(received(name, stream), scheme=scheme)
        stored = layer.quant_method.held_weight(layer)
        assert torch.equal(stored.codes_NK.view(torch.uint8), expected.codes_NK.view(torch.uint8)), name
        assert torch.equal(stored.scale, expected.scale), name
        assert stored.codes_NK.data_ptr() == layer.weight.data_ptr()
        in_blocks = scheme is Scheme.FP8_BLOCK
        assert stored.scale.data_ptr() == (layer.weight_scale_inv if in_blocks else layer.weight_scale).data_ptr()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_loaded_and_reloaded_is_the_codecs_and_proven(scheme: Scheme) -> None:
    model = served(scheme)
    assert_holds(model, tensors(1), scheme=scheme)
    update = new_update(model)
    for number in range(1, 18):  # all rows at 1, 8 and 16, and each part of them in between
        stream = tensors(1 + number % 3)
        proven = take(update, stream)
        assert (proven.layers, proven.layers_proven, proven.unproven) == (2, 2, 0)
        assert_holds(model, stream, scheme=scheme)
    live = live_scheme(model)
    assert (live.scheme, live.emulated, live.kernels) == (scheme, False, {KERNELS[scheme]: 2})


def test_a_layer_whose_turn_it_is_not_is_not_unproven() -> None:
    update = new_update(served(Scheme.FP8_CHANNEL), prove_every=2)
    proven = [take(update, tensors(number)) for number in range(1, 6)]
    assert [one.layers_proven for one in proven] == [2, 1, 1, 1, 1]
    assert {(one.layers, one.unproven) for one in proven} == {(2, 0)}


@pytest.mark.parametrize("scheme", EXACT)
def test_the_kernel_that_multiplies_in_bf16_is_proven(scheme: Scheme, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's batch-invariant path: scales are rounded to BF16, activations stay."""
    from vllm import envs

    envs.disable_envs_cache()  # an engine of another test in this process enabled it
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    model = served(scheme)
    assert model.mlp.down_proj.quant_method.multiplies_in_bf16
    assert take(new_update(model), tensors(2)).layers_proven == 2


@pytest.mark.parametrize("name", [GATE_UP, DOWN])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_bit_flipped_in_a_code_or_a_scale(scheme: Scheme, name: str) -> None:
    scale_bits = (0, 7, 22, 23, 30, 31) if scheme in EXACT else (4, 7, 22, 23, 30, 31)  # up to 2^-21 may be rounding
    for part, bits in (("weight", range(8)), ("scale", scale_bits)):
        for place in PLACES if part == "weight" or scheme is not Scheme.FP8 else (0.0,):
            for bit in bits:
                model = served(scheme)
                stored_weight = model.get_submodule(name).quant_method.held_weight

                def inject(
                    model: Mlp = model,
                    stored: Callable = stored_weight,
                    part: str = part,
                    at: float = place,
                    bit: int = bit,
                ) -> bool:
                    weight = stored(model.get_submodule(name))
                    one = weight.codes_NK if part == "weight" else weight.scale
                    return overwrite(one, flip_bit(one.contiguous(), at=at, bit=bit))

                said = refusal(model, inject=inject)
                found = "digest of the codes of 1 blocks" if part == "weight" else "scale "
                assert said.startswith(f"weight update 1: {name} on rank 0 is not as received: {found}"), (place, bit)


@pytest.mark.parametrize("name", [GATE_UP, DOWN])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_that_changed_places_and_weights_that_stayed(scheme: Scheme, name: str) -> None:
    def swap(codes_NK: Tensor, before_NK: Tensor) -> Tensor:
        swapped_NK = codes_NK.clone()
        swapped_NK[[3, 70]] = codes_NK[[70, 3]]
        return swapped_NK

    for change in (swap, lambda codes_NK, before_NK: before_NK):
        model = served(scheme)
        layer = model.get_submodule(name)
        before_NK = layer.quant_method.held_weight(layer).codes_NK.clone().view(torch.uint8)

        def inject(layer: Module = layer, before_NK: Tensor = before_NK, change: Callable = change) -> bool:
            codes_NK = layer.quant_method.held_weight(layer).codes_NK.view(torch.uint8)
            return overwrite(codes_NK, change(codes_NK, before_NK))

        said = refusal(model, inject=inject)
        assert said.startswith(f"weight update 1: {name} on rank 0 is not as received: digest of the codes"), change


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_bit_flipped_in_what_vllm_is_given(scheme: Scheme, name: str) -> None:
    """The sign: every code of a weight this large changes with it."""
    layer = DOWN if "down" in name else GATE_UP
    with given_to_vllm(name, lambda tensor: flip_bit(tensor, at=0.31, bit=15)), pytest.raises(SyncError) as raised:
        take(new_update(served(scheme)), tensors(2))
    assert raised.value.message.startswith(f"weight update 1: {layer} on rank 0 is not as received: ")


KERNEL_FAULTS = {
    "other weights": lambda codes_KN, scale: (codes_KN.roll(1, dims=1), scale),
    "input channels in another order": lambda codes_KN, scale: (codes_KN.flip(0), scale),
    "a scale of before": lambda codes_KN, scale: (codes_KN, scale * 1.02),
    "no scale": lambda codes_KN, scale: (codes_KN, torch.ones_like(scale)),
    "not finite": lambda codes_KN, scale: (codes_KN, scale * torch.nan),
}


@pytest.mark.parametrize("fault", KERNEL_FAULTS)
@pytest.mark.parametrize("name", [GATE_UP, DOWN])
@pytest.mark.parametrize("scheme", EXACT)
def test_a_kernel_that_multiplies_by_something_else(scheme: Scheme, name: str, fault: str) -> None:
    """Codes and scales lie in the layer as they should: only the answer shows it."""
    model = served(scheme)
    kernel = model.get_submodule(name).quant_method.fp8_linear
    right = kernel.apply_scaled_mm

    def wrong(*, B: Tensor, Bs: Tensor, **others: object) -> Tensor:
        codes_KN, Bs = KERNEL_FAULTS[fault](B.view(torch.uint8), Bs)
        return right(B=codes_KN.t().contiguous().t().view(B.dtype), Bs=Bs, **others)

    kernel.apply_scaled_mm = wrong
    said = refusal(model, inject=lambda: True)
    assert said.startswith(f"weight update 1: {name} on rank 0 is not as received: probe, output channel "), said


def test_a_token_that_gets_the_scale_of_another() -> None:
    model = served(Scheme.FP8_CHANNEL)
    kernel = model.mlp.down_proj.quant_method.fp8_linear
    right = kernel.apply_scaled_mm
    kernel.apply_scaled_mm = lambda *, As, **others: right(As=As.roll(1, dims=0), **others)
    said = refusal(model, inject=lambda: True)
    assert said.startswith(f"weight update 1: {DOWN} on rank 0 is not as received: probe, output channel "), said


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_layer_of_zeros(scheme: Scheme) -> None:
    """As models begin that were made deeper. Per tensor its scale is 0, and vLLM's quantiser makes codes of 0 * inf."""
    zeros = [(name, torch.zeros_like(tensor) if "down" in name else tensor) for name, tensor in tensors(2)]
    update = new_update(served(scheme))
    assert take(update, zeros).layers_proven == 2
    assert take(update, tensors(3)).layers_proven == 2


@pytest.mark.parametrize("scheme", EXACT)
def test_an_answer_is_one_weight_and_the_bound_is_met_with_room(scheme: Scheme) -> None:
    """The derivation: a BF16 rounding of the codec's weight, 2^-8, and float32's few: half of what is allowed."""
    from appliance.engine.fp8_proof import NativeFp8Proof
    from appliance.engine.kernel_proof import ProofRequest, compute_answer
    from appliance.engine.tensor_slots import local_shape

    model, seen = served(scheme), set()
    layer, weight_NK = model.mlp.down_proj, quantise(received(DOWN, tensors(1)), scheme=scheme)
    values_NK = weight_NK.codes_NK.double() * weight_NK.scale.double()
    for sync in range(1, 100):
        request = ProofRequest(sync=sync, round=sync, full=False, thorough=False)
        layer_proof = NativeFp8Proof(DOWN, shape=local_shape(layer), scheme=scheme, request=request)
        out_TN = compute_answer(layer, layer_proof.probe_TK(), bias_N=None)
        wanted_TN = layer_proof.probe_TK().double() @ values_NK.t()
        assert bool(((out_TN - wanted_TN).abs() <= 2.0**-8 * (1 + 2.0**-12) * wanted_TN.abs()).all())
        assert len(set(layer_proof.columns_T.tolist())) == 16
        seen.update(layer_proof.columns_T.tolist())
    assert seen == set(range(160))  # a tenth of a part of ten is drawn each time: missed with 160 * 0.9^99 = 5e-3


@pytest.mark.parametrize("scheme", SCHEMES)
def test_telemetry_of_vllms_own_methods(scheme: Scheme) -> None:
    model = served(scheme)
    update = new_update(model)
    first, same, other = (take(update, tensors(seed)).telemetry for seed in (2, 2, 3))
    assert (first.codes_changed_fraction, same.codes_changed_fraction) == (None, 0.0)
    assert other.codes_changed_fraction > 0.5
    assert (first.scale_drift, same.scale_drift) == (0.0, 0.0) and other.scale_drift > 0
    assert 0.0 < first.layer_error_max < 1 / 16  # the codec's bound for one weight, so for their norm
    assert set(update.telemetry.layer_errors) == {GATE_UP, DOWN}
    layer, heard = model.mlp.down_proj, []
    layer.quant_method.on_quantised = lambda *what: heard.append(what)
    layer.quant_method.process_weights_after_loading(layer)  # as vLLM does once more when all is loaded
    assert heard == []


def test_what_cannot_be_asked_is_counted_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that packs its codes (here by the list, on a GPU Marlin): digests only, and the count says so."""
    monkeypatch.setattr(fp8, "_READ_ROWS", frozenset())
    update = new_update(served(Scheme.FP8_CHANNEL))
    report = take(update, tensors(2))
    assert (report.layers, report.layers_proven, report.unproven, report.telemetry) == (0, 0, 3, None)


def test_padding_of_a_kernel_is_no_part_of_the_weight() -> None:
    """CUTLASS's kernel: K and N to multiples of 16, scales of 1."""
    from vllm.model_executor.kernels.linear.scaled_mm.cutlass import CutlassFP8ScaledMMLinearKernel

    model = served(Scheme.FP8_CHANNEL)
    layer = model.mlp.gate_up_proj
    layer.output_size_per_partition, layer.input_size_per_partition = 315, 97  # of 320 and 100 that are held
    method = layer.quant_method
    method.fp8_linear = CutlassFP8ScaledMMLinearKernel.__new__(CutlassFP8ScaledMMLinearKernel)
    wanted, held = quantise(received(GATE_UP, tensors(1)), scheme=Scheme.FP8_CHANNEL), method.held_weight(layer)
    assert torch.equal(held.codes_NK.view(torch.uint8), wanted.codes_NK.view(torch.uint8)[:315, :97])
    assert torch.equal(held.scale, wanted.scale[:315]) and method.provable


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if vLLM had captured each model's forward."""
    monkeypatch.setattr(weight_update, "replays_graphs", lambda *_, **__: True)


@pytest.mark.parametrize("is_eager", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_graphs_are_of_models_on_a_gpu_that_are_not_eager(device: str, *, is_eager: bool) -> None:
    with FakeTensorMode():
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(torch.empty(2, device=device))
    config = SimpleNamespace(enforce_eager=is_eager)
    assert weight_update.replays_graphs(model, model_config=config) is (device == "cuda" and not is_eager)


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_update_moves_no_tensor_that_a_cuda_graph_may_read(scheme: Scheme) -> None:
    update = new_update(served(scheme))
    assert {take(update, tensors(seed)).layers_proven for seed in (1, 2, 3)} == {2}


def test_a_tensor_that_moved_is_refused_though_the_layer_answers_right(request: pytest.FixtureRequest) -> None:
    """The proof asks the layer, which finds its new tensor; a graph would replay with the old one."""
    model = served(Scheme.FP8_CHANNEL)
    layer = model.get_submodule(DOWN)

    def move() -> bool:
        layer.weight.data = layer.weight.data.t().clone().t()
        return True

    eager = new_update(model)
    with before_proof(move):
        assert take(eager, tensors(2)).layers_proven == 2
    request.getfixturevalue("graphs")
    update = new_update(model)
    assert refusal(model, inject=move, update=update) == (
        f"weight update 1: CUDA graphs read the old place of {DOWN}.weight"
    )
    assert update.fault == f"weight update 1: CUDA graphs read the old place of {DOWN}.weight"
