"""Which models the rollouts' forward is for, which of their layers it quantises, as vLLM has it, and what a row of
several sequences changes: nothing."""

from __future__ import annotations

import pytest
import torch
from tiny_models import ONE_FLOW, VOCABULARY, tiny
from transformers import LlamaConfig, LlamaForCausalLM

from appliance.errors import TrainingError
from appliance.terms import families
from appliance.terms.schemes import Precision, Scheme
from appliance.terms.settings import Quantisation
from appliance.trainer.rollout_forward import RolloutForward

LENGTHS = (1, 33, 7, 40)  # around a block of 32
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layers with and without a sliding window"),
        ({"logit_scale": 0.5}, "logit_scale"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "rope_type linear"),
        ({"head_dtype": "float32"}, "head_dtype"),
    ],
)
def test_what_only_vllm_would_do_is_refused(given: dict[str, object], why: str) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **given))
    with pytest.raises(TrainingError) as raised:
        RolloutForward(model, quantisation=Quantisation(scheme=Scheme.INT8), num_tokens=96)
    assert raised.value.message == f"trainer.forward: rollout does not know {why}"


def test_patterns_are_of_the_parts_of_a_fused_layer() -> None:
    """As compressed-tensors has it in vLLM: the whole one is named, or all of its parts are matched."""
    bf16_layers = {}
    for ignore in (r"re:.*\.(qkv|o)_proj", r"re:.*\.[qkv]_proj", "model.layers.0.self_attn.qkv_proj"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
        quantisation = Quantisation(scheme=Scheme.INT8, ignore=(ignore,))
        flow = RolloutForward(model, quantisation=quantisation, num_tokens=96)
        bf16_layers[ignore] = [each.name for each in flow.linears() if not each.scheme.quantised]
    o_proj, qkv_proj = (
        [f"model.layers.{layer}.self_attn.{name}" for layer in (0, 1)] for name in ("o_proj", "qkv_proj")
    )
    assert list(bf16_layers.values()) == [o_proj, qkv_proj, qkv_proj[:1]]


def test_another_architecture_is_refused_by_its_name() -> None:
    model = tiny("qwen3-moe")
    with pytest.raises(TrainingError) as raised:
        RolloutForward(model, quantisation=Quantisation(scheme=Scheme.INT8), num_tokens=VOCABULARY)
    assert raised.value.message == "trainer.forward: rollout does not know Qwen3MoeForCausalLM"


def test_a_family_is_known_once_its_row_says_that_its_forward_is_llamas(monkeypatch: pytest.MonkeyPatch) -> None:
    row = families.FAMILIES["LlamaForCausalLM"]
    monkeypatch.setitem(families.FAMILIES, row.architecture, families.Family(row.architecture, row.model_type))
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    with pytest.raises(TrainingError, match=r"^trainer\.forward: rollout does not know LlamaForCausalLM$"):
        RolloutForward(model, quantisation=Quantisation(scheme=Scheme.INT8), num_tokens=96)


@pytest.mark.parametrize("family", ONE_FLOW)
@pytest.mark.parametrize("scheme", [Scheme.INT8, Scheme.BF16])
def test_a_sequence_has_its_bits_whatever_it_is_packed_with(family: str, scheme: Scheme) -> None:
    """Attention, too; layers in BF16, for which vLLM promises it of no kernel, at these sizes."""
    model = tiny(family, head_dim=32)
    flow = RolloutForward(model, quantisation=Quantisation(scheme=Scheme.INT8), num_tokens=VOCABULARY)
    flow.follow(Precision(None if scheme.quantised else scheme))
    ids_1T = torch.randint(0, VOCABULARY, (1, sum(LENGTHS)))
    inputs = {
        "input_ids": ids_1T,
        "position_ids": torch.cat([torch.arange(each) for each in LENGTHS])[None],
        "shift_labels": ids_1T.roll(-1, 1),
    }
    with torch.no_grad():
        together = model(**inputs, temperature=0.8).log_probs.split(LENGTHS, dim=1)
        rows = zip(*(each.split(LENGTHS, dim=1) for each in inputs.values()), strict=True)
        for found, row in zip(together, rows, strict=True):
            assert torch.equal(found, model(**dict(zip(inputs, row, strict=True)), temperature=0.8).log_probs)
