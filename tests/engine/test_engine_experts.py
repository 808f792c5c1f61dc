"""What quantised experts hold and compute, against the codec and float64; BF16 experts after a reload.

Legend: E experts, M tokens, N output channels, K input channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engines import Engine, free_engine, read_checkpoint, start_engine
from families import make_family
from test_engine_int8 import assert_computes
from torch import Tensor

from appliance.engine.experts import DOWN, GATE_UP, OnlineExpertsMethod, _refuse_unknown
from appliance.errors import EngineError
from appliance.quant.codec import quantise

pytestmark = pytest.mark.engine

NUM_EXPERTS, TOP, HIDDEN = 5, 2, 64
EXPERTS = "model.layers.{}.mlp.experts"
SCHEMES = ("int8", "fp8", "fp8-channel", "fp8-block")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("experts")
    return tuple(make_family(root / str(seed), name="qwen3-moe", seed=seed) for seed in (1, 2))


@pytest.fixture(scope="module", params=SCHEMES)
def engine(request: pytest.FixtureRequest, folders: tuple[Path, Path]) -> Iterator[Engine]:
    one = start_engine(folders[0], scheme=request.param, emulated=request.param != "int8")
    yield one
    free_engine(one)


def expert_layers(engine: Engine) -> dict[str, torch.nn.Module]:
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    return {layer.layer_name: layer for layer in engine.model.modules() if isinstance(layer, RoutedExperts)}


def stored(folder: Path, layer: str, *, expert: int, part: str) -> Tensor:
    """[N, K] BF16, gate above up."""
    tensors = dict(read_checkpoint(folder))
    names = {GATE_UP: ("gate_proj", "up_proj"), DOWN: ("down_proj",)}[part]
    return torch.cat([tensors[f"{layer}.{expert}.{name}.weight"] for name in names])


def assert_holds(engine: Engine, folder: Path) -> None:
    layers = expert_layers(engine)
    assert sorted(layers) == [EXPERTS.format(1), EXPERTS.format(2)]
    for name, layer in layers.items():
        gemms = layer.quant_method.gemms
        assert [(gemm.expert, gemm.part) for gemm in gemms] == [
            (expert, part) for expert in range(NUM_EXPERTS) for part in (GATE_UP, DOWN)
        ]
        assert layer.w13_weight is None and layer.w2_weight is None  # nothing in BF16 stays behind
        for gemm in gemms:
            weight_NK = stored(folder, name, expert=gemm.expert, part=gemm.part)
            if engine.scheme == "int8":
                assert_computes(gemm, weight_NK=weight_NK, bias_N=None, name=gemm.prefix)
                continue
            wanted = quantise(weight_NK, scheme=gemm.quant_method.scheme)
            assert torch.equal(gemm.weight.view(torch.uint8), wanted.codes_NK.view(torch.uint8))
            assert torch.equal(gemm.quant_method.held_scale(gemm), wanted.scale)


def test_experts_hold_the_codecs_codes(engine: Engine, folders: tuple[Path, Path]) -> None:
    """As loaded, and after updates."""
    assert_holds(engine, folders[0])
    engine.load(read_checkpoint(folders[1]), bucket=3)
    assert_holds(engine, folders[1])
    engine.load(read_checkpoint(folders[0])[::-1])
    assert_holds(engine, folders[0])


def chosen(logits_ME: Tensor) -> tuple[Tensor, Tensor]:
    """([M, TOP] float64 weights that sum to 1, [M, TOP] experts): softmax over all, the largest, renormalised."""
    most, ids_MT = logits_ME.double().softmax(dim=1).topk(TOP, dim=1)
    return most / most.sum(dim=1, keepdim=True), ids_MT


@pytest.mark.parametrize("num_tokens", [1, 7, 40])
def test_a_mixture_is_the_weighted_sum_of_its_experts(engine: Engine, num_tokens: int) -> None:
    """Each token by itself through each of its experts, and the sum in float64.

    Per token: vLLM's routing rounds the weights to BF16 (2^-8 of each term) after a softmax in float32, the sum is
    rounded once to BF16 (2^-8 of it), and 2^-14 of the terms is far more than their float32 products and sums need.
    """
    layer = expert_layers(engine)[EXPERTS.format(2)]
    generator = torch.Generator().manual_seed(num_tokens)
    x_MK = torch.randn(num_tokens, HIDDEN, generator=generator).to(torch.bfloat16)
    logits_ME = torch.randn(num_tokens, NUM_EXPERTS, generator=generator).to(torch.bfloat16)
    method: OnlineExpertsMethod = layer.quant_method
    with torch.no_grad():
        found_MK = method.apply_monolithic(layer, x_MK.clone(), logits_ME)
        weights_MT, ids_MT = chosen(logits_ME)
        for token in range(num_tokens):
            terms_TK = torch.stack(
                [
                    weight * by_hand(method, int(expert), x_MK[token : token + 1]).double()
                    for weight, expert in zip(weights_MT[token], ids_MT[token], strict=True)
                ]
            )
            wanted_K = terms_TK.sum(dim=0)
            tolerance_K = 2.0**-8 * wanted_K.abs() + (2.0**-8 + 2.0**-14) * terms_TK.abs().sum(dim=0)
            assert bool(((found_MK[token].double() - wanted_K).abs() <= tolerance_K).all())


def by_hand(method: OnlineExpertsMethod, expert: int, x_1K: Tensor) -> Tensor:
    """[K]: gate and up, SwiGLU, down, with vLLM's activation, which is held to float64 here: with AVX2 alone it cuts
    off what BF16 does not hold."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation, apply_moe_activation

    gate_up, down = (gemm for gemm in method.gemms if gemm.expert == expert)
    both_1N = gate_up(x_1K)
    hidden = torch.empty(1, both_1N.shape[1] // 2, dtype=torch.bfloat16)
    apply_moe_activation(MoEActivation.SILU, hidden, both_1N)
    gate, up = both_1N.double().chunk(2, dim=1)
    rounding = 2.0**-8 if torch.cpu._is_avx512_supported() else 2.0**-7
    exact = torch.nn.functional.silu(gate) * up
    assert bool(((hidden.double() - exact).abs() <= rounding * exact.abs() + 2.0**-20 * up.abs()).all())
    return down(hidden)[0]


def test_tokens_do_not_depend_on_their_neighbours(engine: Engine) -> None:
    layer = expert_layers(engine)[EXPERTS.format(1)]
    x_MK = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    logits_ME = torch.randn(9, NUM_EXPERTS, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    with torch.no_grad():
        together = layer.quant_method.apply_monolithic(layer, x_MK, logits_ME)
        order = torch.randperm(9, generator=torch.Generator().manual_seed(5))
        shuffled = layer.quant_method.apply_monolithic(layer, x_MK[order], logits_ME[order])
    assert torch.equal(shuffled, together[order])


REFUSED = {
    "biases": {"has_bias": True},
    "the activation gelu": {"activation": "gelu"},
    "biases, the activation gelu": {"has_bias": True, "activation": "gelu"},
}


@pytest.mark.parametrize("feature", REFUSED)
def test_what_the_loop_over_experts_does_not_do_is_refused(
    engine: Engine, feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    layer = expert_layers(engine)[EXPERTS.format(1)]
    _refuse_unknown(layer)
    for name, value in REFUSED[feature].items():
        monkeypatch.setattr(layer.moe_config, name, MoEActivation(value) if name == "activation" else value)
    with pytest.raises(EngineError) as raised:
        _refuse_unknown(layer)
    assert raised.value.message == f"{EXPERTS.format(1)}: quantised experts do not support {feature}"
    assert raised.value.hint == "use rollout.scheme=bf16, or keep the experts in BF16 by quantization.ignore"


def test_router_weights_on_the_input_are_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = expert_layers(engine)[EXPERTS.format(1)]
    monkeypatch.setattr(layer, "apply_router_weight_on_input", True)
    with pytest.raises(EngineError) as raised:
        _refuse_unknown(layer)
    assert raised.value.message.endswith("do not support router weights on the experts' input")


@pytest.mark.parametrize("ignored", [(), ("re:.*mlp.experts.*",)], ids=["bf16", "ignored"])
def test_bf16_experts_are_packed_anew(tmp_path: Path, ignored: tuple[str, ...]) -> None:
    """Of a size that vLLM does not pad: there a reload without packing is another model, and no error."""
    old, new = (
        make_family(tmp_path / str(seed), name="qwen3-moe", seed=seed, moe_intermediate_size=64) for seed in (1, 2)
    )
    scheme = "int8" if ignored else "bf16"
    fresh = start_engine(new, scheme=scheme, ignore=ignored)
    wanted_new = fresh.generate()
    free_engine(fresh)
    engine = start_engine(old, scheme=scheme, ignore=ignored)
    wanted_old = engine.generate()
    engine.load(read_checkpoint(old))
    assert engine.generate() == wanted_old
    engine.load(read_checkpoint(new))
    assert engine.generate() == wanted_new != wanted_old
    kinds = {type(layer.quant_method).__name__ for layer in expert_layers(engine).values()}
    assert kinds == {"KeptExpertsMethod" if ignored else "UnquantizedFusedMoEMethod"}
    free_engine(engine)
