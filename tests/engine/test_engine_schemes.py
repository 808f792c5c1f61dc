"""Every scheme on a real engine: what its layers hold and compute against the codec, reloads, refusals.

The shapes are ragged: 352 input channels are two blocks of 128 and a rest of 96.

Legend: N output channels, K input channels, M tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engines import Engine, make_checkpoint, read_checkpoint, start_engine
from test_engine_int8 import (
    KERNEL,
    NUM_LAYERS,
    PARTS,
    checkpoint_layer,
    compute,
    held_codes,
    linear_layers,
    quantised_tokens,
)

from appliance.errors import EngineError
from appliance.quant.codec import dequantise, quantise, quantise_tokens
from appliance.quant.int4_gemm import Int4Gemm, WideInt4Gemm, has_int4_kernel
from appliance.terms.schemes import Scheme

pytestmark = pytest.mark.engine

SCHEMES = (Scheme.INT8, Scheme.INT4, Scheme.FP8, Scheme.FP8_CHANNEL, Scheme.FP8_BLOCK)
KERNELS = {scheme: f"QuantiseDequantise[{scheme}]" for scheme in SCHEMES} | {
    Scheme.INT8: KERNEL,
    Scheme.INT4: (Int4Gemm if has_int4_kernel() else WideInt4Gemm).name,
}


def start(folder: Path, scheme: Scheme, **settings: object) -> Engine:
    return start_engine(folder, scheme=scheme, emulated=scheme.spec.can_emulate, **settings)


@pytest.fixture(scope="module", params=SCHEMES)
def served(request: pytest.FixtureRequest, checkpoints: tuple[Path, Path]) -> Iterator[Engine]:
    """An engine of each scheme in turn, with the first checkpoint at the start and at the end of each test."""
    yield start(checkpoints[0], request.param)


def assert_holds(engine: Engine, folder: Path) -> None:
    """Codes and scales bit for bit."""
    for name, layer in linear_layers(engine).items():
        weight_NK, _ = checkpoint_layer(folder, name)
        expected = quantise(weight_NK, scheme=Scheme(engine.scheme))
        held = layer.quant_method.held_scale(layer)
        assert torch.equal(held.float(), expected.scale), name
        if engine.scheme == Scheme.INT8:
            codes_NK = held_codes(layer, scale_N1=expected.scale, length=weight_NK.shape[1])
        elif engine.scheme == Scheme.INT4:
            codes_NK = layer.quant_method.held_weight().codes_NK
        else:
            codes_NK = layer.weight.view(torch.uint8)
        assert torch.equal(codes_NK, expected.codes_NK.view(codes_NK.dtype)), name


def assert_computes(engine: Engine, folder: Path) -> None:
    """Products of the codec's values, to the rounding of sums and of the result.

    K products are summed in float32: K * 2^-24 of the terms' absolute sum. INT8 multiplies codes and scales in another
    order, which moves a term by less than 8 * 2^-24 of itself. The result is rounded to BF16 once: 2^-8 of it.
    """
    scheme = Scheme(engine.scheme)
    beyond = 0
    for name, layer in linear_layers(engine).items():
        weight_NK, bias_N = checkpoint_layer(folder, name)
        length = weight_NK.shape[1]
        x_MK = torch.randn(9, length, generator=torch.Generator().manual_seed(length)).to(torch.bfloat16)
        x_MK[2] *= 100
        x_MK[3] = 0
        if scheme is Scheme.INT4:  # activations as they are
            rounded_MK = x_MK.double()
        elif scheme is Scheme.INT8:
            rounded_MK = dequantise(quantised_tokens(x_MK, by=layer.quant_method.kernel_name)).double()
        else:
            rounded_MK = dequantise(quantise_tokens(x_MK, scheme=scheme)).double()
        rounded_NK = dequantise(quantise(weight_NK, scheme=scheme)).double()
        bias = torch.zeros(1) if bias_N is None else bias_N.double()
        wanted_MN = rounded_MK @ rounded_NK.t() + bias
        terms_MN = rounded_MK.abs() @ rounded_NK.abs().t() + bias.abs()
        tolerance_MN = (length + 8) * 2.0**-24 * terms_MN + 2.0**-8 * wanted_MN.abs()
        found_MN = compute(layer, x_MK, bias_N=bias_N)
        assert found_MN.dtype == torch.bfloat16
        assert bool(((found_MN.double() - wanted_MN).abs() <= tolerance_MN).all()), name
        exact_MN = x_MK.double() @ weight_NK.double().t() + bias
        beyond += int(((exact_MN - wanted_MN).abs() > tolerance_MN).sum())
    assert beyond > 0  # what is not quantised at all would not pass


def test_layers_hold_and_compute_what_the_codec_says(served: Engine, checkpoints: tuple[Path, Path]) -> None:
    assert len(linear_layers(served)) == NUM_LAYERS * len(PARTS)
    assert_holds(served, checkpoints[0])
    assert_computes(served, checkpoints[0])


def test_an_identity_reload_changes_nothing(served: Engine, checkpoints: tuple[Path, Path]) -> None:
    before = served.generate()
    tensors = read_checkpoint(checkpoints[0])
    random.Random(3).shuffle(tensors)
    served.load(tensors, bucket=5)
    assert_holds(served, checkpoints[0])
    assert served.generate() == before


def test_new_weights_are_those_of_a_fresh_engine(served: Engine, checkpoints: tuple[Path, Path]) -> None:
    before = served.generate()
    served.load(read_checkpoint(checkpoints[1]), bucket=7)
    assert_holds(served, checkpoints[1])
    assert_computes(served, checkpoints[1])
    assert served.generate() == start(checkpoints[1], Scheme(served.scheme)).generate() != before
    served.load(read_checkpoint(checkpoints[0]))
    assert served.generate() == before


def test_live_scheme_says_what_runs(served: Engine) -> None:
    from appliance.engine.attest import LiveScheme, live_scheme

    scheme = Scheme(served.scheme)
    assert live_scheme(served.model) == LiveScheme(
        scheme=scheme,
        emulated=scheme.spec.can_emulate,
        lm_head_fp32=False,
        kernels={KERNELS[scheme]: NUM_LAYERS * len(PARTS), "UnquantizedEmbeddingMethod": 2},
    )


def test_a_layer_that_fell_out_is_an_error(served: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    from appliance.engine.attest import live_scheme

    monkeypatch.setattr(served.model.model.layers[0].self_attn.o_proj, "quant_method", UnquantizedLinearMethod())
    with pytest.raises(EngineError) as raised:
        live_scheme(served.model)
    assert raised.value.message == (
        f"1 layer is not {served.scheme} and not to be left out, the first is model.layers.0.self_attn.o_proj"
    )


def test_layers_of_two_schemes_are_an_error(served: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from appliance.engine.attest import live_scheme

    other = Scheme.FP8 if served.scheme != Scheme.FP8 else Scheme.INT8
    monkeypatch.setattr(served.model.model.layers[0].self_attn.o_proj.quant_method, "scheme", other)
    with pytest.raises(EngineError) as raised:
        live_scheme(served.model)
    assert raised.value.message == f"layers of one engine run {', '.join(sorted((other, Scheme(served.scheme))))}"


def test_the_hook_sees_each_weight_with_its_codes(
    served: Engine, checkpoints: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's reload itself: an update of ours has hooks of its own."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    seen = {}
    layers = linear_layers(served)
    for layer in layers.values():
        monkeypatch.setattr(layer.quant_method, "on_quantised", lambda *values: seen.update({values[0]: values[1:]}))
    with set_current_vllm_config(served.runner.vllm_config), torch.no_grad():
        initialize_layerwise_reload(served.model)
        served.model.load_weights(read_checkpoint(checkpoints[0]))
        finalize_layerwise_reload(served.model, served.runner.vllm_config.model_config)
    assert len(seen) == len(layers)
    for name, layer in layers.items():
        few_RK, quantised = seen[layer]
        weight_NK = checkpoint_layer(checkpoints[0], name)[0]
        assert torch.equal(few_RK, weight_NK[:: -(-len(weight_NK) // 8)])
        wanted = quantise(weight_NK, scheme=Scheme(served.scheme))
        assert torch.equal(quantised.codes_NK.view(torch.uint8), wanted.codes_NK.view(torch.uint8))


def test_ignored_layers_stay_in_bf16(checkpoints: tuple[Path, Path]) -> None:
    from appliance.engine.attest import live_scheme

    ignore = ("model.layers.1.mlp.down_proj", "re:.*layers.2.self_attn.*")
    engine = start(checkpoints[0], Scheme.FP8_CHANNEL, ignore=ignore)
    kernels = {"QuantiseDequantise[fp8-channel]": 9, "KeptLinearMethod": 3, "UnquantizedEmbeddingMethod": 2}
    assert live_scheme(engine.model).kernels == kernels
    before = engine.generate()
    engine.load(read_checkpoint(checkpoints[1]), bucket=4)
    assert engine.generate() == start(checkpoints[1], Scheme.FP8_CHANNEL, ignore=ignore).generate() != before


def test_an_engine_whose_layers_are_not_loaded_by_loaders(tmp_path: Path) -> None:
    """Dummy weights, for benchmarks: quantised as they are."""
    folder = make_checkpoint(tmp_path / "a", seed=1, num_hidden_layers=1)
    for scheme in (Scheme.INT8, Scheme.INT4, Scheme.FP8_BLOCK):
        tokens = start(folder, scheme, load_format="dummy").generate(max_tokens=2)
        assert all(len(ids) == 2 for ids, _ in tokens)


@pytest.mark.parametrize("scheme", [Scheme.FP8, Scheme.FP8_CHANNEL, Scheme.FP8_BLOCK])
def test_fp8_on_a_cpu_must_be_asked_for_as_emulated(scheme: Scheme, checkpoints: tuple[Path, Path]) -> None:
    with pytest.raises(EngineError) as raised:
        start_engine(checkpoints[0], scheme=scheme)
    assert raised.value.message == f"a CPU has no kernels for `{scheme}`"
    assert raised.value.hint == "use int8, or ask for the scheme as emulated: for numerics only, it is slow"


@pytest.mark.parametrize("scheme", [Scheme.INT8, Scheme.BF16])
def test_only_fp8_is_ever_emulated(scheme: Scheme) -> None:
    from appliance.engine.config import ApplianceConfig
    from appliance.terms.settings import Quantisation

    with pytest.raises(EngineError) as raised:
        ApplianceConfig(Quantisation(scheme=scheme, emulated=True))
    assert raised.value.message == f"`{scheme}` is never emulated: only FP8 schemes are"


def test_the_method_without_its_settings_is_refused(checkpoints: tuple[Path, Path]) -> None:
    """`quantization=appliance` alone names no scheme: nothing is assumed."""
    with pytest.raises(EngineError) as raised:
        start_engine(checkpoints[0], scheme="bf16", quantization="appliance")
    assert raised.value.message == "quantization=appliance names no scheme"
