"""Which models the rollouts' forward is for, and which of their layers it quantises: as vLLM has it."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from appliance.errors import TrainingError
from appliance.terms.schemes import Scheme
from appliance.terms.settings import Quantisation
from appliance.trainer.rollout_forward import RolloutForward

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
    kept = {}
    for ignore in (r"re:.*\.(qkv|o)_proj", r"re:.*\.[qkv]_proj", "model.layers.0.self_attn.qkv_proj"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
        quantisation = Quantisation(scheme=Scheme.INT8, ignore=(ignore,))
        flow = RolloutForward(model, quantisation=quantisation, num_tokens=96)
        kept[ignore] = [each.name for each in flow.linears() if not each.scheme.quantised]
    o_proj, qkv_proj = (
        [f"model.layers.{layer}.self_attn.{name}" for layer in (0, 1)] for name in ("o_proj", "qkv_proj")
    )
    assert list(kept.values()) == [o_proj, qkv_proj, qkv_proj[:1]]
