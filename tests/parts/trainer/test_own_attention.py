"""Which classes of transformers take the trainer's attention: those that do keep the sequences of a row apart, and
those that do not are refused by name, before anything is trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from plans import HOST
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention
from unlisted_models import build_unlisted, make_unlisted

import appliance.trainer.attention  # noqa: F401  registers it
from appliance.errors import PreflightError, TrainingError, WeightsError
from appliance.plan.build import build_plan
from appliance.quant.loading import ask_transformers, load_whole, own_attention
from appliance.recipe.load import load_recipe
from appliance.tasks.prepare import _check_weights
from appliance.terms.families import why_own_attention
from appliance.terms.settings import ATTENTION_NAME

TAKE_OURS = (
    *("arcee", "biogpt", "cohere", "ernie4_5", "gemma", "glm", "gpt2", "gpt_neox", "olmo", "olmo3", "opt", "phi"),
    *("granite", "phi3", "gemma2", "gemma3_text", "olmo2", "smollm3", "glm4", "cohere2", "stablelm", "starcoder2"),
)
# With ours set the first four raise KeyError, and the others take no notice of it.
HAVE_THEIR_OWN = ("falcon", "gptj", "gpt_neo", "nemotron", "bloom", "codegen", "mpt", "xglm")
FIELDS: dict[str, dict[str, object]] = {
    "codegen": {"n_embd": 64, "n_head": 4, "rotary_dim": 16},
    "gpt_neo": {"attention_types": [[["global"], 2]], "num_layers": 2},
    "gptj": {"rotary_dim": 16},
    "opt": {"ffn_dim": 160, "word_embed_proj_dim": 96},
}
LENGTHS = (5, 7)


@pytest.mark.parametrize("model_type", TAKE_OURS)
def test_sequences_of_a_row_do_not_see_each_other(model_type: str) -> None:
    """In FP32, where only the order of sums may differ: 1e-4 is a thousand times that, and logits are about 1."""
    fields = FIELDS.get(model_type, {})
    model = build_unlisted(model_type, seed=1, dtype="float32", attention=ATTENTION_NAME, **fields).eval()
    ids_1T = torch.randint(1, 500, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(2))
    positions_1T = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    with torch.no_grad():
        in_a_row = model(input_ids=ids_1T, position_ids=positions_1T, use_cache=False).logits[0]
        alone = [
            model(input_ids=ids, position_ids=torch.arange(ids.shape[1])[None], use_cache=False).logits[0]
            for ids in ids_1T.split(LENGTHS, dim=1)
        ]
    torch.testing.assert_close(in_a_row, torch.cat(alone), rtol=0, atol=1e-4)


@pytest.mark.parametrize("model_type", [*TAKE_OURS, *HAVE_THEIR_OWN])
def test_a_class_with_an_attention_of_its_own_is_refused(tmp_path: Path, model_type: str) -> None:
    folder = make_unlisted(tmp_path, model_type, seed=1, **FIELDS.get(model_type, {}))
    config = AutoConfig.from_pretrained(folder)
    (name,) = config.architectures
    assert ask_transformers(folder).own_attention == (name if model_type in HAVE_THEIR_OWN else "")
    config._attn_implementation = ATTENTION_NAME
    if model_type in TAKE_OURS:
        assert type(load_whole(AutoModelForCausalLM, str(folder), config=config, is_trained=True)).__name__ == name
        return
    with pytest.raises(WeightsError) as refused:
        load_whole(AutoModelForCausalLM, str(folder), config=config, is_trained=True)
    assert refused.value.message == f"{folder}: {why_own_attention(name)}"


def test_a_model_that_was_fetched_is_refused_before_a_worker_loads_it(tmp_path: Path) -> None:
    """From the hub its files are not here when preflight looks."""
    folder = make_unlisted(tmp_path / "model", "falcon", seed=1)
    sets = ["model.builtin=null", f"model.path={folder}", "task.max_prompt_tokens=64", "task.max_response_tokens=16"]
    plan = build_plan(load_recipe("arithmetic-tiny-int8", sets=sets), run_dir=tmp_path / "a", host=HOST)
    with pytest.raises(PreflightError) as refused:
        _check_weights(folder, plan=plan)
    assert refused.value.message.endswith(why_own_attention("FalconForCausalLM"))


@pytest.mark.parametrize(("base", "takes_ours"), [("LlamaAttention", True), ("Module", False)])
def test_what_counts_is_the_code_of_attention(base: str, takes_ours: bool) -> None:
    """A model's own code may have a norm of Llama and an attention of its own, or Llama's attention under another
    name."""
    llama = build_unlisted("llama", seed=1)
    parent = LlamaAttention if base == "LlamaAttention" else torch.nn.Module
    forward = {} if takes_ours else {"forward": lambda self, hidden_states, **_: (hidden_states, None)}
    llama.model.layers[0].self_attn.__class__ = type("OwnAttention", (parent,), {"__module__": __name__, **forward})
    assert own_attention(llama) == ("" if takes_ours else "LlamaForCausalLM")


@pytest.mark.parametrize("model_type", ["persimmon", "gpt_bigcode"])
def test_a_class_that_gives_no_positions_is_refused(model_type: str) -> None:
    model = build_unlisted(model_type, seed=1, attention=ATTENTION_NAME)
    with pytest.raises(
        TrainingError, match="Attention attends without the positions that tell sequences of a row apart"
    ):
        model(input_ids=torch.ones(1, 3, dtype=torch.int64), position_ids=torch.arange(3)[None])


class AttentionNorm(torch.nn.RMSNorm):
    """A norm of remote code, whose name says where it stands."""


def test_a_norm_that_is_called_attention_is_none() -> None:
    model = build_unlisted("olmo2", seed=1)
    model.model.layers[0].input_layernorm = AttentionNorm(8)
    assert own_attention(model) == ""
