"""What FP16 on both sides would do to the mismatch, on the tiny model: `python -m benchmarks.fp16 [--model FOLDER]`.

The same FP32 weights, off BF16's values as after a few steps, are rounded to BF16 and to FP16. Of each, a real engine
samples answers, once as it is and once with its layers in INT8, and the trainer's forward (verl's log-probs under
autocast) is asked for the same tokens. Both sides of each ratio are in one table. Forwards alone: nobody trains here.

An engine of ours refuses FP16, so that for INT8 three things are changed in its process: what it accepts, the kernel
(vLLM's packed one knows BF16 alone and ends the process: both sides have oneDNN's), and the type that kernel is made
for. Nothing is sent and nothing is proven.
"""

from __future__ import annotations

import argparse
import datetime
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from appliance import console
from appliance.bench.job import GIB
from appliance.control_groups import usable_cores
from appliance.tasks.library import TINY_MODELS
from appliance.terms.schemes import Scheme
from appliance.terms.settings import Quantisation
from benchmarks.demo import processor
from benchmarks.one_flow import Sampled, environment

MODEL = "tiny-arithmetic"
DTYPES = ("bfloat16", "float16")
SEEDS = (0, 1, 2)
PROMPTS = 1000
LONGEST = 6  # tokens of an answer
MOVED = 6e-4  # of a weight, at most: AdamW's three steps at the demo's rate


def moved_weights(folder: Path, *, seed: int) -> Any:
    """The model in FP32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += MOVED * (2 * torch.rand(parameter.shape, generator=generator) - 1)
    return model


def prompts(folder: Path, *, seed: int) -> list[list[int]]:
    import random

    from transformers import AutoTokenizer

    tokenizer, draw = AutoTokenizer.from_pretrained(folder), random.Random(seed)
    pairs = [(draw.randrange(10, 100), draw.randrange(10, 100)) for _ in range(PROMPTS)]
    return [tokenizer(f"{a}+{b}=", add_special_tokens=False)["input_ids"] for a, b in pairs]


def accept_fp16(dtype: str) -> None:
    """In the engine's process: see the module's docstring."""
    import torch

    from appliance.engine import config, int8

    wanted, make = getattr(torch, dtype), torch.ops._C.create_onednn_scaled_mm_handler
    config.ApplianceConfig.get_supported_act_dtypes = lambda _: [wanted]
    int8.packs_quickly = lambda *_: False
    torch.ops._C.create_onednn_scaled_mm_handler = lambda codes, scale, _, *rest: make(codes, scale, wanted, *rest)


def sample(folder: Path, scheme: Scheme, dtype: str, seed: int, env: dict[str, str]) -> list[Sampled]:
    """By a real engine, in a process of its own. folder: a checkpoint in that type."""
    os.environ.update(env, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    from vllm import LLM, SamplingParams

    if scheme is not Scheme.BF16:
        accept_fp16(dtype)
    quantised = Quantisation(scheme=scheme).engine_arguments()
    memory = {"max_model_len": 32, "kv_cache_memory_bytes": GIB // 4}
    llm = LLM(str(folder), dtype=dtype, enforce_eager=True, logprobs_mode="processed_logprobs", **memory, **quantised)
    params = SamplingParams(max_tokens=LONGEST, logprobs=0, detokenize=False, seed=seed)
    asked = [{"prompt_token_ids": each} for each in prompts(folder, seed=seed)]
    found = []
    for output in llm.generate(asked, params, use_tqdm=False):
        ids = list(output.outputs[0].token_ids)
        steps = zip(output.outputs[0].logprobs, ids, strict=True)
        found.append(Sampled(list(output.prompt_token_ids), ids, [step[token].logprob for step, token in steps]))
    return found


def trainers(model: Any, rows: list[Sampled], *, dtype: str) -> list[float]:
    """Log-probs of the responses. model: rounded to that type.  rows: equally long ones beside each other."""
    import torch
    from verl.utils.torch_functional import logprobs_from_logits

    found = []
    with torch.no_grad(), torch.autocast("cpu", getattr(torch, dtype)):
        for (prompt, _), group in groupby(rows, key=lengths):
            ids_BL = torch.tensor([one.prompt + one.response for one in group])
            log_probs_BL = logprobs_from_logits(model(ids_BL).logits, ids_BL.roll(-1, 1))
            found += log_probs_BL[:, prompt - 1 : -1].float().flatten().tolist()
    return found


def lengths(one: Sampled) -> tuple[int, int]:
    return len(one.prompt), len(one.response)


def row(base: Path, scheme: Scheme, dtype: str, *, seed: int, env: dict[str, str]) -> tuple[float, float, float, int]:
    """k3, mean and largest absolute log-ratio in nats, tokens."""
    import torch
    from transformers import AutoTokenizer

    from appliance.quant.mismatch import measure_mismatch

    with tempfile.TemporaryDirectory() as rounded:
        model = moved_weights(base, seed=seed).to(getattr(torch, dtype))
        model.save_pretrained(rounded)
        AutoTokenizer.from_pretrained(base).save_pretrained(rounded)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            rows = sorted(pool.submit(sample, Path(rounded), scheme, dtype, seed, env).result(), key=lengths)
    ours = torch.tensor(trainers(model, rows, dtype=dtype), dtype=torch.float64)
    theirs = torch.tensor([each for one in rows for each in one.log_probs], dtype=torch.float64)
    gaps = (ours - theirs).abs()
    k3 = measure_mismatch(ours, rollout_T=theirs, cap=None).k3_kl
    return k3, float(gaps.mean()), float(gaps.max()), len(gaps)


def span(values: list[float]) -> str:
    low, high = f"{min(values):.1e}", f"{max(values):.1e}"
    return low if low == high else f"{low} to {high}"


def table(base: Path) -> list[str]:
    env = environment(usable_cores())
    lines = ["| rollouts / trainer | k3 | mean abs. log-ratio | largest | tokens |", "| --- | --- | --- | --- | --- |"]
    for scheme, name in ((Scheme.BF16, "not quantised"), (Scheme.INT8, "INT8, the rest")):
        for dtype, short in zip(DTYPES, ("BF16", "FP16"), strict=True):
            found = [row(base, scheme, dtype, seed=seed, env=env) for seed in SEEDS]
            k3, mean, largest, tokens = (list(each) for each in zip(*found, strict=True))
            cells = (f"{name}: {short} / {short}", span(k3), span(mean), f"{max(largest):.2g}", str(sum(tokens)))
            lines.append(f"| {' | '.join(cells)} |")
            console.say(lines[-1])
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a tiny model's folder; without it one is made")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        base = given.model or Path(folder)
        if given.model is None:
            from appliance.tasks.tiny_model import make_tiny_model

            make_tiny_model(TINY_MODELS[MODEL], difficulty=2, folder=base, on_step=lambda *_: None)
        lines = table(base)
    today = datetime.date.today().isoformat()
    console.out(f"{today}: {processor()}, {usable_cores()} cores; seeds {SEEDS}.\n\n" + "\n".join(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
