"""UAQ leaves the function and, folded back, the file as they are; models without its pattern are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny_models import FAMILIES, tiny, tokens
from torch import Tensor
from transformers import AutoModelForCausalLM

from appliance.errors import EngineError, NumericsError
from appliance.quant.codec import quantise
from appliance.quant.uaq import fold_back, scale_folder, scaled
from appliance.terms.families import norm_fed
from appliance.terms.schemes import Scheme

ENDS = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")
EXPERTS = ("gate_up_proj", "mlp.gate.weight")
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")


def logits_of(folder: Path, *, dtype: torch.dtype) -> Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()(tokens()).logits


def weights_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("family", FAMILIES)
def test_by_a_power_of_two_the_same_function_and_back_the_same_file(family: str, tmp_path: Path) -> None:
    tiny(family).save_pretrained(tmp_path / "model")
    scale_folder(tmp_path / "model", target=tmp_path / "scaled", scale=2.0)
    fold_back(tmp_path / "scaled", target=tmp_path / "back", scale=2.0)
    folders = (tmp_path / "scaled", tmp_path / "model")
    assert torch.equal(*(logits_of(folder, dtype=torch.bfloat16) for folder in folders))
    model, scaled_weights, back = (weights_of(tmp_path / name) for name in ("model", "scaled", "back"))
    assert model.keys() == scaled_weights.keys() == back.keys()
    assert all(torch.equal(model[name], back[name]) and back[name].dtype is torch.bfloat16 for name in model)
    moved = {name for name in model if not torch.equal(model[name], scaled_weights[name])}
    assert moved == {name for name in model if name.endswith((*ENDS, *EXPERTS, *NORMS))}
    for name in moved:
        assert torch.equal(scaled_weights[name], model[name] * (2.0 if name.endswith(NORMS) else 0.5))


@pytest.mark.parametrize("family", FAMILIES)
def test_by_any_other_scale_the_same_function_to_rounding_and_back_the_same_weights(
    family: str, tmp_path: Path
) -> None:
    """In float32 two roundings of 2^-25 per scaled weight; through two layers of sums of 64 and 96 terms 1e-5 is wide.
    In BF16 one rounding of 2^-9 per scaled weight, which the model makes anyway at every one of its activations."""
    tiny(family).save_pretrained(tmp_path / "model")
    scale_folder(tmp_path / "model", target=tmp_path / "scaled", scale=1.5)
    fold_back(tmp_path / "scaled", target=tmp_path / "back", scale=1.5)
    model, made, back = (weights_of(tmp_path / name) for name in ("model", "scaled", "back"))
    assert {each.dtype for each in made.values()} == {torch.bfloat16, torch.float32}
    assert all(torch.equal(model[name], back[name].bfloat16()) for name in model)
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        wanted, found = (logits_of(tmp_path / name, dtype=dtype).double() for name in ("model", "scaled"))
        assert float((found - wanted).norm() / wanted.norm()) < bound


@given(scale=st.floats(1 / 4096, 4096), weights=st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=9))
@settings(deadline=None, max_examples=100, derandomize=True)
def test_scaling_rounds_once_and_the_way_back_is_exact(scale: float, weights: list[float]) -> None:
    weight = torch.tensor(weights).bfloat16()
    weight = weight * (weight.abs() > 1e-30)  # far from the end of the exponents
    scaled_weight = scaled(weight, factor=1 / scale, may_widen=True)
    expected = weight.double() / scale
    step = (
        2.0**-24 if scaled_weight.dtype is torch.float32 else 2.0**-8
    )  # half a unit of the last place, and double's own
    assert bool(((scaled_weight.double() - expected).abs() <= step * expected.abs()).all())
    assert torch.equal(scaled(scaled_weight, factor=scale, may_widen=False).bfloat16(), weight)


def test_the_codes_before_training_are_the_same() -> None:
    weight = dict(tiny("qwen2").named_parameters())["model.layers.0.self_attn.q_proj.weight"].detach()
    codes = quantise(weight, scheme=Scheme.INT8)
    made = quantise(scaled(weight, factor=0.25, may_widen=True), scheme=Scheme.INT8)
    assert torch.equal(made.codes_NK, codes.codes_NK)
    other = quantise(scaled(weight, factor=1 / 1.5, may_widen=True), scheme=Scheme.INT8)
    assert float((other.codes_NK != codes.codes_NK).float().mean()) < 0.01  # a tie falls to the other side


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_a_weight_that_does_not_fit_raises(bad: float) -> None:
    with pytest.raises(NumericsError) as raised:
        scaled(torch.tensor([1.0, bad]), factor=4.0, may_widen=True)
    assert raised.value.message == "UAQ: a weight times 4 does not fit float32"


def test_the_head_and_the_last_norm_stay() -> None:
    names = dict(tiny("qwen3").named_parameters())
    layers = norm_fed(names)
    for name in ("model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"):
        assert name in names and name not in layers.norms | layers.linears


def test_the_router_of_a_mixture_is_scaled_with_its_experts() -> None:
    layers = norm_fed(dict(tiny("qwen3-moe").named_parameters()))
    assert {"model.layers.0.mlp.gate.weight", "model.layers.0.mlp.experts.gate_up_proj"} <= layers.linears
    one_by_one = [f"mlp.experts.{expert}.{part}_proj.weight" for expert in range(2) for part in ("gate", "up", "down")]
    own = (*NORMS, *(f"self_attn.{letter}_proj.weight" for letter in "qkv"), "mlp.gate.weight", *one_by_one)
    found = norm_fed(f"model.layers.0.{name}" for name in own)
    assert {name for name in found.linears if "experts" in name} == {
        f"model.layers.0.{name}" for name in one_by_one if "down" not in name
    }


@pytest.mark.parametrize("missing", ["input_layernorm.weight", "self_attn.k_proj.weight", "mlp.up_proj.weight"])
def test_a_layer_without_the_pattern_is_refused(missing: str) -> None:
    names = dict(tiny("llama").named_parameters())
    del names[f"model.layers.1.{missing}"]
    with pytest.raises(EngineError) as raised:
        norm_fed(names)
    assert raised.value.message == f"model.layers.1 has no {missing}"


def test_a_model_without_decoder_layers_is_refused() -> None:
    with pytest.raises(EngineError) as raised:
        norm_fed(["transformer.h.0.ln_1.weight"])
    assert raised.value.message == "the model has no decoder layers by the names `….layers.<n>.…`"


def test_an_architecture_that_is_not_known_is_refused(tmp_path: Path) -> None:
    """Gemma's norm multiplies by 1 + its weight: the names fit, the scaling would not."""
    tiny("llama").save_pretrained(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"architectures": ["GemmaForCausalLM"]}))
    with pytest.raises(EngineError, match="UAQ: GemmaForCausalLM is not in the list of model families"):
        scale_folder(tmp_path / "model", target=tmp_path / "scaled", scale=2.0)
    assert not (tmp_path / "scaled").exists()
