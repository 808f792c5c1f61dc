"""A model whose positions, windows, template or tokenizer engine and trainer would see differently."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from plans import HOST, INPUTS

from appliance.finding import Severity
from appliance.plan.build import build_plan
from appliance.preflight.checks import judge
from appliance.recipe.load import load_recipe
from appliance.tasks.templates import TemplateFacts
from appliance.terms.shapes import ModelShape, read_shape


def findings(**facts: object) -> list[tuple[str, str]]:
    """(text, remedy) about a model in a folder. facts: of it, as in InputFacts."""
    recipe = load_recipe("arithmetic-tiny-int8", sets=("model.builtin=null", "model.path=/m"))
    plan = build_plan(recipe, run_dir=Path("/runs/a-1"), host=HOST)
    found = judge(plan, host=HOST, inputs=dataclasses.replace(INPUTS, **facts))
    return [(each.text, each.remedy) for each in found if each.severity is not Severity.INFO]


WRITTEN = {"num_attention_heads": 4, "hidden_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 64}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
LONGROPE = {"type": "su", "original_max_position_embeddings": 10}
LAYERS = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 16}
NO_ROPE = "train sequences no longer than the model was made for (task.max_prompt_tokens, task.max_response_tokens) "
NO_ROPE += 'with a copy whose config.json has "rope_type": "default", or another model'
WINDOW_OF_8 = "/m: some of its layers have a sliding window, of 8 tokens"
NO_WINDOW = 'use a copy whose config.json has "use_sliding_window": false, and no layer_types, or another model'
WITHIN_8 = f"keep prompt and response within 8 tokens together, or {NO_WINDOW}"


@pytest.mark.parametrize(
    ("architecture", "config", "findings_of_it"),
    [
        ("Qwen2ForCausalLM", {"rope_scaling": {"type": "linear", "factor": 2}}, []),
        ("Qwen2ForCausalLM", {"rope_scaling": {**LONGROPE, "original_max_position_embeddings": 14}}, []),
        (
            "Qwen2ForCausalLM",
            {"rope_scaling": DYNAMIC},
            [
                "/m: its rope_type is `dynamic`: the trainer's frequencies change with a batch's length, the engine's "
                "do not"
            ],
        ),
        (
            "LlamaForCausalLM",
            {"rope_parameters": LONGROPE},
            [
                "/m: its rope_type is `longrope`, and sequences of up to 14 tokens pass its 10: the engine then "
                "rotates all sequences by the long factors, the trainer only those of long batches"
            ],
        ),
        (
            "Qwen3ForCausalLM",
            {"rope_parameters": {"rope_type": "spiral"}},
            ["/m: its rope_type is `spiral`; the known ones are default, linear, llama3, longrope, yarn"],
        ),
        ("Qwen3ForCausalLM", LAYERS, []),
        (
            "Qwen2ForCausalLM",
            LAYERS,
            ["/m: some of its layers have a sliding window, of 16 tokens: vLLM does not start with them"],
        ),
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
            ["/m: some of its layers have a sliding window, of 16 tokens: vLLM does not start with them"],
        ),
        (
            "Qwen3ForCausalLM",
            {**LAYERS, "sliding_window": 8},
            [f"{WINDOW_OF_8}: the trainer goes by layer_types, vLLM treats all layers alike"],
        ),
        (
            "LlamaForCausalLM",
            {**LAYERS, "sliding_window": 8},
            [f"{WINDOW_OF_8}: vLLM goes by layer_types, the trainer gives no layer a window"],
        ),
        (
            "MistralForCausalLM",
            {**LAYERS, "sliding_window": 8},
            [f"{WINDOW_OF_8}: vLLM goes by layer_types, the trainer gives every layer the window"],
        ),
        (
            "Cohere2ForCausalLM",
            {**LAYERS, "sliding_window": 8},
            [f"{WINDOW_OF_8}: since vLLM 0.29 a token there sees one token more than in the trainer"],
        ),
        (  # as published
            "Cohere2ForCausalLM",
            {"model_type": "cohere2", "sliding_window": 8, "sliding_window_pattern": 4},
            [f"{WINDOW_OF_8}: since vLLM 0.29 a token there sees one token more than in the trainer"],
        ),
        ("Cohere2ForCausalLM", {"model_type": "cohere2", "sliding_window": 8, "sliding_window_pattern": 1}, []),
        ("Cohere2ForCausalLM", LAYERS, []),
        ("Gemma2ForCausalLM", {**LAYERS, "sliding_window": 8}, []),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, []),
        ("Qwen2ForCausalLM", {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1}, []),
    ],
)
def test_positions_and_windows_that_engine_and_trainer_see_differently(
    architecture: str, config: dict[str, object], findings_of_it: list[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**WRITTEN, "architectures": [architecture], **config}))
    judged = findings(model_shape=read_shape(tmp_path / "config.json"))
    remedies = {
        "its rope_type": NO_ROPE,
        "since vLLM 0.29": "keep prompt and response within 8 tokens together, or another model",
    }
    remedies |= {"of 8 tokens": WITHIN_8, "of 16 tokens": NO_WINDOW}
    assert judged == [
        (f"error: model.path: {text}", next(remedy for words, remedy in remedies.items() if words in text))
        for text in findings_of_it
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (0, ""),
        (151936, ""),
        (151665, ""),
        (
            259,
            "the model has 151,936 rows and its tokenizer 259 words: rollouts never sample the others, and what "
            "probability the trainer gives them is mismatch",
        ),
        (151937, "the tokenizer has 151,937 words and the model 151,936 rows: a token without a row ends the training"),
    ],
)
def test_a_tokenizer_that_is_not_the_models(words: int, message: str) -> None:
    shape = ModelShape(vocab=151936, architectures=("Qwen2ForCausalLM",))
    found = findings(model_shape=shape, template=TemplateFacts(tokens=words))
    assert [text for text, _ in found] == ([f"warning: model.path: {message}"] if message else [])


def test_what_a_template_does_to_messages_is_found() -> None:
    lost = TemplateFacts("the model's chat template does not take messages of user: it leaves out x", "mend it")
    assert findings(template=lost) == [(f"error: model.path: {lost.problem}", "mend it")]
    long_prompts = TemplateFacts(long_prompts="most are too long")
    assert findings(template=long_prompts) == [("warning: task.max_prompt_tokens: most are too long", "raise it")]
    long_truths = TemplateFacts(long_truths="`83` has 2")
    remedy = "raise it: an answer that is cut before its end is wrong"
    assert findings(template=long_truths) == [("warning: task.max_response_tokens: `83` has 2", remedy)]
    no_prompt = TemplateFacts(begin_of_answer="<|im_start|>assistant\n")
    assert findings(template=no_prompt) == [
        (
            "warning: model.path: the chat template has no generation prompt: it renders the same with and without "
            "add_generation_prompt, so the model has to write `<|im_start|>assistant\\n` itself before it answers",
            "end the template with what begins an answer, under {% if add_generation_prompt %}",
        )
    ]
