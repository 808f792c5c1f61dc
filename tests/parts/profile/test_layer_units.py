"""Units that are found by trying a decoder layer: those of the list where a family has a row, and of other classes what
their code says. Every check of the search is seen to refuse a layer that only it can tell."""

from __future__ import annotations

import pytest
import torch
from smoothings import found_units, random_smoothing
from tiny_models import FAMILIES, ONE_FLOW, tiny
from torch import Tensor, nn
from unlisted_models import UNLISTED, build_unlisted

from appliance.quant.layer_units import (
    ADDS_TO_WEIGHT,
    FEEDS_NO_LINEAR,
    NOT_PASSED_ON,
    OTHER_NAME,
    READ_ELSEWHERE,
)
from appliance.quant.profile import fold, require_all_folded
from appliance.terms.families import FAMILIES as KNOWN
from appliance.terms.families import Unit

IN, OUT = "input_layernorm", "post_attention_layernorm"
QKV_PARTS = tuple(f"self_attn.{part}_proj" for part in "qkv")
GATE_UP_PARTS = ("mlp.gate_proj", "mlp.up_proj")
FUSED_QKV = Unit(("self_attn.qkv_proj",), norm=IN, fused="self_attn.qkv_proj", ignored_as=QKV_PARTS)
FUSED_GATE_UP = Unit(("mlp.gate_up_proj",), norm=OUT, fused="mlp.gate_up_proj", ignored_as=GATE_UP_PARTS)
O_PROJ = Unit(("self_attn.o_proj",), through="self_attn.v_proj")
DOWN_PROJ = Unit(("mlp.down_proj",), through="mlp.up_proj")


def qkv(norm: str) -> Unit:
    return Unit(QKV_PARTS, norm=norm, fused="self_attn.qkv_proj")


def gate_up(norm: str) -> Unit:
    return Unit(GATE_UP_PARTS, norm=norm, fused="mlp.gate_up_proj")


LLAMA = KNOWN["LlamaForCausalLM"].dense
BEHIND_BLOCKS = {"post_attention_layernorm": FEEDS_NO_LINEAR, "post_feedforward_layernorm": FEEDS_NO_LINEAR}
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
GEMMA_NORMS = (IN, OUT, "pre_feedforward_layernorm", "post_feedforward_layernorm")
WITHOUT_NORMS = (qkv(""), O_PROJ, gate_up(""), DOWN_PROJ)
EXPECTED: dict[str, tuple[tuple[Unit, ...], dict[str, str]]] = {
    "granite": (LLAMA, {}),
    "smollm3": (LLAMA, {}),
    "phi3": ((FUSED_QKV, O_PROJ, FUSED_GATE_UP, DOWN_PROJ), {}),
    "glm4": (
        (qkv(IN), O_PROJ, FUSED_GATE_UP, DOWN_PROJ),
        {"post_self_attn_layernorm": FEEDS_NO_LINEAR, "post_mlp_layernorm": FEEDS_NO_LINEAR},
    ),
    "cohere2": ((qkv(IN), O_PROJ, gate_up(IN), DOWN_PROJ), {}),
    "starcoder2": ((qkv(IN), O_PROJ, Unit(("mlp.c_fc",), norm=OUT), Unit(("mlp.c_proj",))), {}),
    "olmo2": (WITHOUT_NORMS, BEHIND_BLOCKS | dict.fromkeys(HEAD_NORMS, FEEDS_NO_LINEAR)),
    "gemma2": (WITHOUT_NORMS, dict.fromkeys(GEMMA_NORMS, ADDS_TO_WEIGHT)),
    "gemma3_text": (WITHOUT_NORMS, dict.fromkeys((*GEMMA_NORMS, *HEAD_NORMS), ADDS_TO_WEIGHT)),
}


@pytest.mark.parametrize("family", ONE_FLOW)
@pytest.mark.parametrize("layer", [0, 1])
def test_of_a_listed_family_the_units_of_its_row_are_found(family: str, layer: int) -> None:
    model = tiny(family)
    found = found_units(model, layer)
    assert found.units == KNOWN[type(model).__name__].dense
    assert found.not_smoothed == (dict.fromkeys(HEAD_NORMS, FEEDS_NO_LINEAR) if family == "qwen3" else {})


def test_experts_and_a_router_are_more_than_linear_layers() -> None:
    """They need their row: all else of it is found."""
    assert set(FAMILIES) == {*ONE_FLOW, "qwen3-moe"}
    found = found_units(tiny("qwen3-moe"), 0)
    assert found.units == tuple(unit for unit in KNOWN["Qwen3MoeForCausalLM"].mixture if "experts" not in str(unit))
    assert found.not_smoothed == {OUT: FEEDS_NO_LINEAR} | dict.fromkeys(HEAD_NORMS, FEEDS_NO_LINEAR)


@pytest.mark.parametrize("model_type", UNLISTED)
def test_of_any_other_class_what_its_code_says_is_found(model_type: str) -> None:
    model = build_unlisted(model_type, seed=1).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for layer in range(2):
        found = found_units(model, layer)
        assert (found.units, found.not_smoothed) == EXPECTED[model_type]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("model_type", UNLISTED)
def test_smoothing_by_the_found_units_changes_no_bit_of_the_logits(model_type: str, dtype: str) -> None:
    """Powers of two move exponents alone, so the tolerance is 0."""
    model = build_unlisted(model_type, seed=1, dtype=dtype).eval()
    smoothing = random_smoothing(model, seed=3)
    units, _ = EXPECTED[model_type]
    sources = {f"{unit.norm or unit.through}.weight" for unit in units if unit.norm or unit.through}
    assert {group.source.partition(".layers.0.")[2] for group in smoothing.groups} - {""} == sources
    tokens = torch.randint(0, 512, (2, 20), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        plain = model(tokens, use_cache=False).logits
        changed = 0
        for name, parameter in model.named_parameters():
            folded = fold(name, parameter, smoothing=smoothing)
            changed += not torch.equal(folded, parameter)
            parameter.copy_(folded)
        require_all_folded((name for name, _ in model.named_parameters()), smoothing=smoothing)
        assert torch.equal(model(tokens, use_cache=False).logits, plain)
    assert changed > 2 * len(sources)


def granite() -> nn.Module:
    return build_unlisted("granite", seed=1).eval()


def test_a_norm_that_something_else_reads_too_is_refused() -> None:
    model = granite()
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) + 0.5 * x
    found = found_units(model, 0)
    assert found.not_smoothed == {OUT: READ_ELSEWHERE}
    assert found.units == (qkv(IN), O_PROJ, gate_up(""), DOWN_PROJ)


def test_a_norm_that_a_part_of_a_fused_layer_reads_is_refused() -> None:
    """An engine multiplies the columns of all of its parts."""
    model = granite()
    layer = model.model.layers[0]
    values: list[Tensor] = []
    layer.register_forward_pre_hook(lambda _, arguments: values.append(arguments[0]))
    layer.self_attn.v_proj.register_forward_pre_hook(lambda _, arguments: (values[-1],))
    found = found_units(model, 0)
    assert found.not_smoothed == {IN: "a part of self_attn.qkv_proj reads the output, and the rest does not"}
    assert found.units == (qkv(""), O_PROJ, gate_up(OUT), DOWN_PROJ)


def test_a_source_that_is_no_factor_of_the_product_is_refused() -> None:
    """SwiGLU with its halves exchanged: the last rows pass through silu."""
    model = build_unlisted("glm4", seed=1).eval()
    mlp = model.model.layers[0].mlp

    def forward(x: Tensor) -> Tensor:
        up, gate = mlp.gate_up_proj(x).chunk(2, dim=-1)
        return mlp.down_proj(up * mlp.activation_fn(gate))

    mlp.forward = forward
    found = found_units(model, 0)
    assert found.not_smoothed["mlp.up_proj"] == NOT_PASSED_ON
    assert found.units[-1] == Unit(("mlp.down_proj",))


def test_a_source_that_something_else_reads_too_is_refused() -> None:
    model = granite()
    attention = model.model.layers[0].self_attn
    attention.register_forward_pre_hook(
        lambda module, _, keywords: module.__dict__.update(now=keywords), with_kwargs=True
    )
    attention.register_forward_hook(
        lambda module, _, output: (output[0] + module.v_proj(module.now["hidden_states"]).repeat(1, 1, 3), *output[1:])
    )
    found = found_units(model, 0)
    assert found.not_smoothed == {"self_attn.v_proj": NOT_PASSED_ON}
    assert found.units == (qkv(IN), Unit(("self_attn.o_proj",)), gate_up(OUT), DOWN_PROJ)


def test_a_source_whose_values_have_a_bound_is_refused() -> None:
    """OLMo's `clip_qkv`: no value of the trial is near it, and that of a real prompt may be."""
    from transformers import OlmoConfig, OlmoForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_hidden_layers": 1}
    for bound, through in ((None, "self_attn.v_proj"), (8.0, "")):
        torch.manual_seed(0)
        model = OlmoForCausalLM(OlmoConfig(vocab_size=64, clip_qkv=bound, **sizes)).bfloat16()
        units = {unit.members[0]: unit.through for unit in found_units(model, 0).units}
        assert (units["self_attn.o_proj"], units["mlp.down_proj"]) == (through, "mlp.up_proj")


def test_a_norm_by_another_name_is_refused() -> None:
    model = granite()
    layer = model.model.layers[0]
    layer.ln_2 = layer.post_attention_layernorm
    del layer.post_attention_layernorm
    layer.__dict__["post_attention_layernorm"] = layer.ln_2
    assert found_units(model, 0).not_smoothed == {"ln_2": OTHER_NAME}


def test_a_norm_of_zeros_shows_nothing() -> None:
    model = granite()
    model.model.layers[0].input_layernorm.weight.data.zero_()
    found = found_units(model, 0)
    assert found.not_smoothed[IN] == ADDS_TO_WEIGHT and found.units[0] == qkv("")
