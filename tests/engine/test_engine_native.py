"""vLLM's own online FP8 methods, on layers of vLLM's and outside of an engine: weights arrive through the reload of a
real update, and PyTorch's kernels, which vLLM takes on a CPU too, multiply.

On a CPU `fp8-channel` is whole. The quantiser of `fp8` is a CUDA kernel: the same operations in torch stand in for it.
`fp8-block` needs a GPU, or AMX and then computes another thing.

Legend: N output channels, K input channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from faults import before_proof, flip_bit, given_to_vllm, overwrite
from torch import Tensor
from torch.nn import Module

from appliance.engine import native
from appliance.engine.attest import live_scheme
from appliance.engine.native import native_fp8_method
from appliance.engine.update import SyncReport, WeightUpdate
from appliance.errors import SyncError
from appliance.quant.codec import quantise
from appliance.quant.scheme import Scheme

pytestmark = pytest.mark.engine

SCHEMES = (Scheme.FP8, Scheme.FP8_CHANNEL)
KERNELS = {
    Scheme.FP8: "PerTensorTorchFP8ScaledMMLinearKernel",
    Scheme.FP8_CHANNEL: "ChannelWiseTorchFP8ScaledMMLinearKernel",
}
GATE_UP, DOWN = "mlp.gate_up_proj", "mlp.down_proj"
SHAPES = {"mlp.gate_proj.weight": (160, 100), "mlp.up_proj.weight": (160, 100), "mlp.down_proj.weight": (96, 160)}
PLACES = (0.0, 0.31, 1.0)

Tensors = list[tuple[str, Tensor]]


class Mlp(Module):
    """The linear layers of a model's MLP, one of them fused of two."""

    def __init__(self, scheme: Scheme) -> None:
        from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear

        super().__init__()
        ours = SimpleNamespace(get_quant_method=lambda layer, prefix: native_fp8_method(scheme))
        common = {"bias": False, "quant_config": ours, "disable_tp": True}
        self.mlp = Module()
        self.mlp.gate_up_proj = MergedColumnParallelLinear(100, [160, 160], prefix=GATE_UP, **common)
        self.mlp.down_proj = RowParallelLinear(160, 96, prefix=DOWN, **common)

    def load_weights(self, weights: Tensors) -> set[str]:
        for name, tensor in weights:
            if name == "mlp.down_proj.weight":
                self.mlp.down_proj.weight.weight_loader(self.mlp.down_proj.weight, tensor)
            else:
                part = ("mlp.gate_proj.weight", "mlp.up_proj.weight").index(name)
                self.mlp.gate_up_proj.weight.weight_loader(self.mlp.gate_up_proj.weight, tensor, part)
        return {name for name, _ in weights}


def tensors(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return [(name, torch.randn(shape, generator=generator).to(torch.bfloat16)) for name, shape in SHAPES.items()]


def stand_in(weight_NK: Tensor, *, scale: Tensor) -> tuple[Tensor, Tensor]:
    """As vLLM 0.28's static_scaled_fp8_quant (csrc/quantization/fp8/common.cuh): the product with 1 / s."""
    scaled_NK = weight_NK.float() * scale.reciprocal()
    largest = torch.tensor(448.0)
    return torch.fmax(-largest, torch.fmin(scaled_NK, largest)).to(torch.float8_e4m3fn), scale  # NaN becomes 448


@pytest.fixture(autouse=True)
def vllm_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What vLLM's layers ask for when they are made, on one rank, in BF16 and eager."""
    from vllm import _custom_ops, config
    from vllm.model_executor import parameter

    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: 1)
    monkeypatch.setattr(_custom_ops, "scaled_fp8_quant", stand_in)
    settings = config.VllmConfig(compilation_config=config.CompilationConfig(mode=config.CompilationMode.NONE))
    settings.model_config = SimpleNamespace(dtype=torch.bfloat16)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with config.set_current_vllm_config(settings), torch.no_grad():
            yield
    finally:
        torch.set_default_dtype(default)


def served(scheme: Scheme, *, seed: int = 1) -> Mlp:
    """With its first weights, loaded as a checkpoint's."""
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    model = Mlp(scheme)
    record_metadata_for_reloading(model)
    model.load_weights(tensors(seed))
    return model


def new_update(model: Mlp, **settings: int) -> WeightUpdate:
    untied = SimpleNamespace(hf_text_config=SimpleNamespace(tie_word_embeddings=False))
    return WeightUpdate(model, model_config=untied, **settings)


def take(update: WeightUpdate, stream: Tensors) -> SyncReport:
    update.begin()
    update.load([(name, tensor.clone()) for name, tensor in stream])
    return update.finish()


def refusal(model: Mlp, *, inject: Callable[[], bool]) -> str:
    """What an update to other weights ends with, where something happens between vLLM's end and the proof."""
    with before_proof(inject), pytest.raises(SyncError) as raised:
        take(new_update(model), tensors(2))
    return raised.value.message


def received(name: str, stream: Tensors) -> Tensor:
    by_name = dict(stream)
    if name == DOWN:
        return by_name["mlp.down_proj.weight"]
    return torch.cat([by_name["mlp.gate_proj.weight"], by_name["mlp.up_proj.weight"]])


def assert_holds(model: Mlp, stream: Tensors, *, scheme: Scheme) -> None:
    """The codec's codes and scales, bit for bit, and in the memory that vLLM's kernel is handed."""
    for name in (GATE_UP, DOWN):
        layer, wanted = model.get_submodule(name), quantise(received(name, stream), scheme=scheme)
        held = layer.quant_method.held_weight(layer)
        assert torch.equal(held.codes_NK.view(torch.uint8), wanted.codes_NK.view(torch.uint8)), name
        assert torch.equal(held.scale, wanted.scale), name
        assert held.codes_NK.data_ptr() == layer.weight.data_ptr()
        assert held.scale.data_ptr() == layer.weight_scale.data_ptr()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_loaded_and_reloaded_is_the_codecs_and_proven(scheme: Scheme) -> None:
    model = served(scheme)
    assert_holds(model, tensors(1), scheme=scheme)
    update = new_update(model)
    for number in range(1, 18):  # all rows at 1, 8 and 16, and each part of them in between
        stream = tensors(1 + number % 3)
        proven = take(update, stream).proven
        assert (proven.layers, proven.layers_proven, proven.unproven) == (2, 2, 0)
        assert_holds(model, stream, scheme=scheme)
    live = live_scheme(model)
    assert (live.scheme, live.emulated, live.kernels) == (scheme, False, {KERNELS[scheme]: 2})


def test_a_layer_whose_turn_it_is_not_is_not_unproven() -> None:
    update = new_update(served(Scheme.FP8_CHANNEL), prove_every=2)
    proven = [take(update, tensors(number)).proven for number in range(1, 6)]
    assert [one.layers_proven for one in proven] == [2, 1, 1, 1, 1]
    assert {(one.layers, one.unproven) for one in proven} == {(2, 0)}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_kernel_that_multiplies_in_bf16_is_proven(scheme: Scheme, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's batch-invariant path: scales are rounded to BF16, activations stay."""
    from vllm import envs

    envs.disable_envs_cache()  # an engine of another test in this process enabled it
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    model = served(scheme)
    assert model.mlp.down_proj.quant_method.multiplies_in_bf16
    assert take(new_update(model), tensors(2)).proven.layers_proven == 2


@pytest.mark.parametrize("name", [GATE_UP, DOWN])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_bit_flipped_in_a_code_or_a_scale(scheme: Scheme, name: str) -> None:
    for what, bits in (("weight", range(8)), ("weight_scale", (0, 7, 22, 23, 30, 31))):
        for place in PLACES if what == "weight" or scheme is Scheme.FP8_CHANNEL else (0.0,):
            for bit in bits:
                model = served(scheme)
                held = model.get_submodule(name).quant_method.held_weight

                def inject(
                    model: Mlp = model, held: Callable = held, what: str = what, at: float = place, bit: int = bit
                ) -> bool:
                    weight = held(model.get_submodule(name))
                    one = weight.codes_NK if what == "weight" else weight.scale
                    return overwrite(one, flip_bit(one.contiguous(), at=at, bit=bit))

                said = refusal(model, inject=inject)
                found = "digest of the codes of 1 blocks" if what == "weight" else "scale "
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
@pytest.mark.parametrize("scheme", SCHEMES)
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
    assert take(update, zeros).proven.layers_proven == 2
    assert take(update, tensors(3)).proven.layers_proven == 2


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_answer_is_one_weight_and_the_bound_is_met_with_room(scheme: Scheme) -> None:
    """The derivation: a BF16 rounding of the codec's weight, 2^-8, and float32's few: half of what is allowed."""
    from appliance.engine.expect import local_shape
    from appliance.engine.fp8_proof import NativeFp8Proof
    from appliance.engine.kernel_proof import answer
    from appliance.engine.schedule import Ask

    model, seen = served(scheme), set()
    layer, weight_NK = model.mlp.down_proj, quantise(received(DOWN, tensors(1)), scheme=scheme)
    values_NK = weight_NK.codes_NK.double() * weight_NK.scale.double()
    for sync in range(1, 100):
        asked = Ask(sync=sync, round=sync, full=False, thorough=False)
        one = NativeFp8Proof(DOWN, shape=local_shape(layer), scheme=scheme, ask=asked)
        out_TN = answer(layer, one.probe_TK(), bias_N=None)
        wanted_TN = one.probe_TK().double() @ values_NK.t()
        assert bool(((out_TN - wanted_TN).abs() <= 2.0**-8 * (1 + 2.0**-12) * wanted_TN.abs()).all())
        assert len(set(one.columns_T.tolist())) == 16
        seen.update(one.columns_T.tolist())
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
    assert set(update._telemetry.layer_errors) == {GATE_UP, DOWN}
    layer, heard = model.mlp.down_proj, []
    layer.quant_method.on_quantised = lambda *what: heard.append(what)
    layer.quant_method.process_weights_after_loading(layer)  # as vLLM does once more when all is loaded
    assert heard == []


def test_what_cannot_be_asked_is_counted_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that packs its codes (here by the list, on a GPU Marlin): digests only, and the count says so."""
    monkeypatch.setattr(native, "_READ_ROWS", frozenset())
    update = new_update(served(Scheme.FP8_CHANNEL))
    report = take(update, tensors(2))
    proven = report.proven
    assert (proven.layers, proven.layers_proven, proven.unproven, report.telemetry) == (0, 0, 3, None)


def test_blocks_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their bits are those of a compiled quantiser, whose division a GPU may round otherwise."""
    from vllm.model_executor.kernels.linear.scaled_mm.triton import TritonFp8BlockScaledMMKernel

    method = native_fp8_method(Scheme.FP8_BLOCK)
    method.fp8_linear = TritonFp8BlockScaledMMKernel.__new__(TritonFp8BlockScaledMMKernel)
    layer = Module()
    layer.quant_method, layer.output_size_per_partition, layer.input_size_per_partition = method, 160, 300
    assert not method.provable and method.held_weight(layer) is None
    layer.weight = torch.nn.Parameter(torch.zeros(160, 300).to(torch.float8_e4m3fn), requires_grad=False)
    layer.weight_scale_inv = torch.nn.Parameter(torch.ones(2, 3, dtype=torch.float32), requires_grad=False)
    held = method.held_weight(layer)  # for the telemetry
    assert held.codes_NK.shape == (160, 300) and held.scale.shape == (2, 3) and held.block == (128, 128)
    layer.weight_scale_inv = torch.nn.Parameter(torch.ones(2, 3, dtype=torch.int32), requires_grad=False)
    assert method.held_weight(layer) is None  # DeepGEMM's packed scales


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
