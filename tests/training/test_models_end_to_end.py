"""Models without a row in the list of families, trained as a user would: two steps by INT8 rollouts, with weights that
move. Every update is proven, and what the updated engine answers is what a fresh one of the exported model answers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from trainings import train
from unlisted_models import UNLISTED, make_unlisted

pytestmark = pytest.mark.e2e(minutes=4)

# Norms behind blocks and soft caps; a fused checkpoint; LayerNorm and biases. The others run in `make torture`.
OFTEN = ("gemma2", "phi3", "starcoder2")
MODEL_TYPES = [
    pytest.param(model_type, marks=pytest.mark.long if model_type in OFTEN else pytest.mark.torture)
    for model_type in UNLISTED
]

WORDS = 288
SETS = (
    "model.builtin=null",
    "trainer.steps=2",
    "trainer.validate_every=2",
    "task.val_size=16",
    "batch.prompts_per_step=8",
    "quantization.prove_every=1",
    "algorithm.entropy_bonus=0.1",  # random models get no reward: this moves their weights
    "optimizer.learning_rate=3e-4",
    "rollout.lm_head_fp32=true",  # BF16 logits tie, and greedy answers would be a matter of luck
)
ANSWER = """
import json, os, sys
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
from transformers import AutoTokenizer
from vllm import LLM, SamplingParams
from appliance.engine.vllm_versions import let_vllm_pass_llvmlite
from appliance.terms.schemes import Scheme
from appliance.terms.settings import CPU_KV_BLOCK, LOAD_FORMAT, Quantisation

model, prompts = sys.argv[1], json.loads(sys.argv[2])
let_vllm_pass_llvmlite()
tokenizer = AutoTokenizer.from_pretrained(model)
settings = {"max_model_len": 64, "kv_cache_memory_bytes": 64 << 20, "enforce_eager": True}
settings |= {"load_format": LOAD_FORMAT, "block_size": CPU_KV_BLOCK}
llm = LLM(model, **settings, **Quantisation(scheme=Scheme.INT8, lm_head_fp32=True).engine_arguments())
ids = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]  # as rendered by the template
greedy = SamplingParams(temperature=0, max_tokens=6, detokenize=False, allowed_token_ids=list(range(len(tokenizer))))
answers = llm.generate([{"prompt_token_ids": each} for each in ids], greedy, use_tqdm=False)
said = [tokenizer.decode(each.outputs[0].token_ids, skip_special_tokens=True) for each in answers]
print("ANSWERS", json.dumps(said))
"""


def fresh_answers(model: Path, prompts: list[str]) -> list[str]:
    """What an INT8 engine that was started from a model's folder answers, greedily."""
    line = [sys.executable, "-c", ANSWER, str(model), json.dumps(prompts)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(next(each for each in done.stdout.splitlines() if each.startswith("ANSWERS ")).partition(" ")[2])


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_model_without_a_row_trains_by_int8_rollouts(tmp_path: Path, model_type: str) -> None:
    from appliance.tasks.tiny_model import save_tokenizer

    folder = tmp_path / "model"
    tokenizer = save_tokenizer(folder, max_positions=256, words=WORDS)
    tokens = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    make_unlisted(folder, model_type, seed=1, vocab_size=WORDS, **tokens)
    done = train(tmp_path, *SETS, f"model.path={folder}", name="unlisted")
    assert done.code == 0, done.stderr[-4000:]
    steps = [line for line in done.json_lines("metrics.jsonl") if line["step"]]
    assert [line["scheme"] for line in steps] == ["int8", "int8"]
    assert all(line["grad_norm"] > 0 and line["mismatch_k3_kl"] < 0.02 for line in steps), steps
    updates = done.json_lines("sync/rollout-0-0.jsonl")
    assert len(updates) >= 3
    is_tied = "lm_head.weight" not in load_file(folder / "model.safetensors")
    for update in updates:  # a tied head is compared with the embedding
        assert (update["layers_proven"], update["unproven"]) == (update["layers"], int(is_tied))
    before, after = (load_file(each / "model.safetensors") for each in (folder, done.run_dir / "model"))
    unmoved = [name for name in before if torch.equal(before[name], after[name])]
    assert before.keys() == after.keys() and len(unmoved) < len(before) / 2
    validated = [line for line in done.json_lines("samples.jsonl") if line["validation"]][-1]["validation"]
    answers = fresh_answers(done.run_dir / "model", [sample["prompt"] for sample in validated])
    assert answers == [sample["response"] for sample in validated]
