"""UAQ leaves the function, the INT8 codes and, folded back, the file as they are; other models are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import FAMILIES, tiny, tokens
from transformers import AutoModelForCausalLM

from appliance.errors import EngineError
from appliance.quant.codec import quantise
from appliance.quant.scheme import Scheme
from appliance.quant.smoothing import fold
from appliance.quant.uaq import is_uaq_scale, scale_folder, uaq_smoothing


def logits_of(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()(tokens()).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_a_scaled_model_computes_the_same_and_folds_back_to_the_same_file(family: str, tmp_path: Path) -> None:
    tiny(family).save_pretrained(tmp_path / "model")
    scale_folder(tmp_path / "model", target=tmp_path / "scaled", scale=2.0)
    scale_folder(tmp_path / "scaled", target=tmp_path / "back", scale=0.5)
    assert torch.equal(logits_of(tmp_path / "scaled"), logits_of(tmp_path / "model"))  # powers of two: no bound needed
    model, scaled, back = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "scaled", "back"))
    assert model.keys() == scaled.keys() == back.keys()
    assert all(torch.equal(model[name], back[name]) for name in model)
    moved = {name for name in model if not torch.equal(model[name], scaled[name])}
    experts = ("gate_proj.weight", "up_proj.weight", "gate_up_proj", "mlp.gate.weight")
    ends = (
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "q_proj.weight",
        "k_proj.weight",
        "v_proj.weight",
    )
    assert moved == {name for name in model if name.endswith((*ends, *experts))}
    for name in moved:
        assert torch.equal(scaled[name], model[name] * (2.0 if "layernorm" in name else 0.5))


def test_the_codes_before_training_are_the_same() -> None:
    model = tiny("qwen2")
    parameters = dict(model.named_parameters())
    smoothing = uaq_smoothing({name: tuple(each.shape) for name, each in parameters.items()}, scale=4.0)
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight"):
        weight = parameters[name].detach()
        codes = quantise(weight, scheme=Scheme.INT8)
        scaled = quantise(fold(name, weight, smoothing=smoothing), scheme=Scheme.INT8)
        assert torch.equal(scaled.codes_NK, codes.codes_NK)


def test_the_head_and_the_last_norm_stay() -> None:
    shapes = {name: tuple(each.shape) for name, each in tiny("qwen3").named_parameters()}
    smoothing = uaq_smoothing(shapes, scale=2.0)
    for name in ("model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"):
        assert name in shapes and smoothing.factor_of(name) is None


@pytest.mark.parametrize("missing", ["input_layernorm.weight", "self_attn.k_proj.weight", "mlp.up_proj.weight"])
def test_a_layer_without_the_pattern_is_refused(missing: str) -> None:
    shapes = {name: tuple(each.shape) for name, each in tiny("llama").named_parameters()}
    del shapes[f"model.layers.1.{missing}"]
    with pytest.raises(EngineError) as raised:
        uaq_smoothing(shapes, scale=2.0)
    assert raised.value.message == f"UAQ: model.layers.1 has no {missing}"


def test_a_model_without_decoder_layers_is_refused() -> None:
    with pytest.raises(EngineError) as raised:
        uaq_smoothing({"transformer.h.0.ln_1.weight": (4,)}, scale=2.0)
    assert raised.value.message == "UAQ: the model has no decoder layers by the names `….layers.<n>.…`"


def test_an_architecture_that_is_not_known_is_refused(tmp_path: Path) -> None:
    """Gemma's norm multiplies by 1 + its weight: the names fit, the scaling would not."""
    tiny("llama").save_pretrained(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"architectures": ["GemmaForCausalLM"]}))
    with pytest.raises(EngineError, match="UAQ: GemmaForCausalLM is not known to the quantised engine"):
        scale_folder(tmp_path / "model", target=tmp_path / "scaled", scale=2.0)
    assert not (tmp_path / "scaled").exists()


@pytest.mark.parametrize("scale", [1.5, 1.0, 0.0, -2.0, 2.0**13])
def test_a_scale_that_is_no_power_of_two_is_refused(scale: float) -> None:
    assert not is_uaq_scale(scale)
    with pytest.raises(ValueError, match="power of two"):
        uaq_smoothing({"model.layers.0.input_layernorm.weight": (4,)}, scale=scale)
