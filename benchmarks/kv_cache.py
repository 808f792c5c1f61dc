"""A KV cache in FP8 beside one of 16 bits: `python -m benchmarks.kv_cache MODEL [--profile DIR] [-o docs/results]`.

MODEL is the folder of a language model with a chat template. Per scheme there are two engines in this process, one with
keys and values of 16 bits, one with FP8. Both get the same memory for their cache. Word problems are read as a run
reads them; a part of the prompts, and no response, measures the scales. Then each engine samples responses to the
others with the same seeds, and the trainer's forward (transformers, BF16) gives the log-probs of what was sampled.
The FP8 engine does so three times: with scales of 1 as vLLM writes keys and values, which cuts off their bits; with
scales of 1 and rounding; and with the measured scales and rounding, as a run. `k3` is a run's `mismatch_k3_kl`; the
error is that of the mean over responses; `ESS` the effective sample size of the tokens' weights, as a share of them.
Every engine also reads the responses that the one of 16 bits has sampled, the same tokens: the root mean square of what
their log-probs change by is what 8 bits change, without the chance of other samples.

The throughput is measured with a cache so small that it binds: the engines take turns with the same requests.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance import console
from appliance.control_groups import usable_cores
from appliance.quant.kv_scales import Pairs, calibration_prompts, scales_of
from appliance.terms.environment import KV_CACHE_VARIABLE
from appliance.terms.schemes import Scheme
from appliance.terms.settings import CPU_KV_BLOCK, KvCache, Quantisation
from benchmarks.demo import processor
from benchmarks.sync import set_environment

if TYPE_CHECKING:
    from torch import Tensor
    from vllm import LLM

MIB = 1 << 20
CALIBRATION, PROBLEMS, SAMPLES, NEW_TOKENS = 24, 48, 4, 16
ROUNDS, FEW = 2, 16  # of the throughput: turns, and prompts
AT_ONCE = 16  # sequences of a forward of the trainer
CUT, ONES, OURS = "scales of 1, bits cut off as by vLLM", "scales of 1, rounded", "scales measured, rounded"


_ENGINES: list[Engine] = []  # an engine of vLLM 0.31 that is collected ends the process groups of the others


@dataclass(frozen=True)
class Sampled:
    """Responses of one engine, with the prompts that they answer."""

    prompts: list[list[int]]
    responses: list[list[int]]
    log_probs: list[list[float]]
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(map(len, self.responses))


class Engine:
    """One engine of vLLM's in this process."""

    def __init__(self, model: Path, *, scheme: Scheme, kv_cache: KvCache, cache_bytes: int) -> None:
        from vllm import LLM

        self.kv_cache = kv_cache
        _ENGINES.append(self)
        quantisation = Quantisation(scheme=scheme)
        self.llm: LLM = LLM(
            str(model),
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=512,
            max_num_seqs=256,
            block_size=CPU_KV_BLOCK,
            kv_cache_memory_bytes=cache_bytes,
            kv_cache_dtype=kv_cache.in_vllm,
            logprobs_mode="processed_logprobs",
            config_format="hf",
            **quantisation.engine_arguments(),
        )

    @property
    def blocks(self) -> int:
        return self.llm.llm_engine.vllm_config.cache_config.num_gpu_blocks

    def scales(self) -> Any:
        """The worker's part of the scales."""
        from appliance.engine.kv_cache import KvCacheScales

        worker = self.llm.llm_engine.model_executor.driver_worker
        return KvCacheScales(getattr(worker, "worker", worker).model_runner.get_model())

    def read(self, prompts: Sequence[list[int]]) -> None:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, skip_reading_prefix_cache=True)
        self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)

    def read_again(self, sampled: Sampled) -> Tensor:
        """The log-probs of all tokens of the responses, [N] float64, read with their prompts."""
        import torch
        from vllm import SamplingParams

        self.llm.reset_prefix_cache()
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        rows = [[*prompt, *ids] for prompt, ids in zip(sampled.prompts, sampled.responses, strict=True)]
        outputs: list[Any] = self.llm.generate([{"prompt_token_ids": ids} for ids in rows], params, use_tqdm=False)
        log_probs = [
            output.prompt_logprobs[place][ids[place]].logprob
            for prompt, ids, output in zip(sampled.prompts, rows, outputs, strict=True)
            for place in range(len(prompt), len(ids))
        ]
        return torch.tensor(log_probs, dtype=torch.float64)

    def sample(self, prompts: Sequence[list[int]], *, samples: int, new_tokens: int, seed: int) -> Sampled:
        from vllm import SamplingParams

        self.llm.reset_prefix_cache()
        params = [
            SamplingParams(n=samples, seed=seed + place * samples, max_tokens=new_tokens, logprobs=0, detokenize=False)
            for place in range(len(prompts))
        ]
        started = time.perf_counter()
        outputs: list[Any] = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - started
        pairs = [(ids, sample) for ids, output in zip(prompts, outputs, strict=True) for sample in output.outputs]
        return Sampled(
            prompts=[ids for ids, _ in pairs],
            responses=[list(sample.token_ids) for _, sample in pairs],
            log_probs=[
                [words[token].logprob for token, words in zip(sample.token_ids, sample.logprobs, strict=True)]
                for _, sample in pairs
            ],
            seconds=seconds,
        )


def folded(model: Path, *, profile: Path, folder: Path) -> Path:
    """Copy a model with the smoothing of a profile folded in, as a run's engines get it with each update."""
    from safetensors.torch import load_file, save_file

    from appliance.quant.profile import fold, load_smoothing

    smoothing = load_smoothing(profile)
    shutil.copytree(model, folder)
    for file in folder.glob("*.safetensors"):
        tensors = {name: fold(name, tensor, smoothing=smoothing) for name, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    return folder


def trainer_log_probs(model: Any, sampled: Sampled) -> Iterator[Tensor]:
    """Of each response, [T] float64: the log-probs of the trainer's forward in BF16."""
    import torch

    rows = [
        (len(prompt), [*prompt, *response]) for prompt, response in zip(sampled.prompts, sampled.responses, strict=True)
    ]
    for start in range(0, len(rows), AT_ONCE):
        part = rows[start : start + AT_ONCE]
        ids_BT = torch.zeros(len(part), max(len(ids) for _, ids in part), dtype=torch.int64)
        mask_BT = torch.zeros_like(ids_BT)
        for row, (_, ids) in enumerate(part):
            ids_BT[row, : len(ids)], mask_BT[row, : len(ids)] = torch.tensor(ids), 1
        with torch.inference_mode():
            logits_BTV = model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).logits
        for row, (first, ids) in enumerate(part):
            log_probs_TV = logits_BTV[row, first - 1 : len(ids) - 1].double().log_softmax(-1)
            yield log_probs_TV.gather(1, torch.tensor(ids[first:])[:, None])[:, 0]


def mismatch(model: Any, sampled: Sampled) -> tuple[float, float, float]:
    """(k3 in nats per token, its standard error over responses, effective sample size as a share of the tokens)."""
    import torch

    sums, lengths, weights = [], [], []
    for trainer_T, rollout in zip(trainer_log_probs(model, sampled), sampled.log_probs, strict=True):
        x_T = trainer_T - torch.tensor(rollout, dtype=torch.float64)
        sums.append(float((torch.expm1(x_T) - x_T).sum()))
        lengths.append(len(rollout))
        weights.append(x_T.exp())
    mean = sum(sums) / sum(lengths)
    residuals = [total - mean * length for total, length in zip(sums, lengths, strict=True)]
    error = len(sums) ** 0.5 * statistics.pstdev(residuals) / sum(lengths)
    weights_T = torch.cat(weights)
    return mean, error, float(weights_T.sum() ** 2 / weights_T.square().sum()) / len(weights_T)


def word_problems(tokenizer: Any, *, count: int) -> list[list[int]]:
    """Prompts of the built-in task, as a run has them."""
    from appliance.tasks.built_in.word_problems import TASK, USUAL_DIFFICULTY

    problems = TASK.make(difficulty=USUAL_DIFFICULTY, seed=0, train_size=count, val_size=1).train
    chats = [
        [{"role": role, "content": text} for role, text in (*problem.before, ("user", problem.prompt))]
        for problem in problems
    ]
    return [
        list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False))
        for chat in chats
    ]


def scales_by_label(engine: Engine, prompts: Sequence[list[int]]) -> Mapping[str, Pairs]:
    """Scales of 1, and those that a run would measure on these prompts, by the labels of rows."""
    worker_scales = engine.scales()
    worker_scales.begin({})
    engine.read(calibration_prompts(list(prompts)))
    ours = scales_of(worker_scales.end())
    ones = {name: (1.0, 1.0) for name in ours}
    return {CUT: ones, ONES: ones, OURS: ours}


@contextmanager
def writing(label: str) -> Iterator[None]:
    """Have caches written as a row's label says."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    ours = CPUAttentionBackendImpl.do_kv_cache_update
    if label == CUT:
        CPUAttentionBackendImpl.do_kv_cache_update = ours.__wrapped__
    try:
        yield
    finally:
        CPUAttentionBackendImpl.do_kv_cache_update = ours


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_cache", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--profile", type=Path, help="folder of a profile, whose smoothing INT8 gets")
    parser.add_argument("--schemes", default="bf16,int8")
    parser.add_argument("--problems", type=int, default=PROBLEMS)
    parser.add_argument("--cache-mib", type=int, default=512)
    parser.add_argument("--small-cache-mib", type=int, default=16, help="cache that binds, for the throughput")
    parser.add_argument("--no-throughput", action="store_true", help="for a host that does other work, too")
    parser.add_argument("-o", "--output", type=Path, help="folder for kv-cache.md")
    options = parser.parse_args()
    threads = usable_cores()
    set_environment(threads)
    os.environ.pop(KV_CACHE_VARIABLE, None)  # vLLM prefers it to the size that an engine is given
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from appliance.engine.kv_cache import FP8_ROUNDING, rounding
    from appliance.patch import apply_patch, installed_version

    torch.set_num_threads(threads)
    apply_patch(FP8_ROUNDING, rounding)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    prompts = word_problems(tokenizer, count=CALIBRATION + options.problems)
    calibration, problems = prompts[:CALIBRATION], prompts[CALIBRATION:]
    trainer = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).eval()
    lines = [
        "# Keys and values in FP8",
        "",
        f"Made by `python -m benchmarks.kv_cache`, {datetime.date.today()}: {processor()}, {threads} threads, vLLM "
        f"{installed_version('vllm')}. "
        f"{options.model.name}, {len(problems)} word problems with {SAMPLES} responses of up to {NEW_TOKENS} tokens "
        f"each, scales measured on {len(calibration)} other prompts ({sum(map(len, calibration))} tokens).",
        "",
        "| rollouts | keys and values | k3, nats per token | ESS | tokens | change of log-probs, nats | blocks |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]

    def add(line: str) -> None:
        lines.append(line)
        console.say(line)

    schemes = [Scheme(name) for name in options.schemes.split(",")]
    models = dict.fromkeys(schemes, options.model)
    if options.profile:
        scratch = tempfile.TemporaryDirectory()
        copy = folded(options.model, profile=options.profile, folder=Path(scratch.name) / "model")
        models |= {scheme: copy for scheme in schemes if scheme.quantised}
    ratios = []
    for scheme in schemes:
        blocks, in_16_bits = {}, None
        for kv_cache in KvCache:
            settings = {"scheme": scheme, "kv_cache": kv_cache, "cache_bytes": options.cache_mib * MIB}
            engine = Engine(models[scheme], **settings)
            blocks[kv_cache] = engine.blocks
            by_label: Mapping[str, Pairs | None] = {"": None}
            if kv_cache is KvCache.FP8:
                by_label = scales_by_label(engine, calibration)
            for label, scales in by_label.items():
                if scales is not None:
                    engine.scales().write(scales, sync=1)
                with writing(label):
                    sampled = engine.sample(problems, samples=SAMPLES, new_tokens=NEW_TOKENS, seed=1)
                    log_probs_N = engine.read_again(in_16_bits[0] if in_16_bits else sampled)
                in_16_bits = in_16_bits or (sampled, log_probs_N)
                change = float((log_probs_N - in_16_bits[1]).square().mean().sqrt())
                k3, error, ess = mismatch(trainer, sampled)
                name = "16 bits" if scales is None else f"FP8, {label}"
                add(
                    f"| {scheme} | {name} | {k3:.5f} ± {error:.5f} | {ess:.4f} | {sampled.tokens} | {change:.4f} |"
                    f" {engine.blocks} |"
                )
        ratios.append(f"{scheme}: {blocks[KvCache.FP8] / blocks[KvCache.AUTO]:.2f}")
    lines += [
        "",
        f"Blocks in {options.cache_mib} MiB with FP8, as a multiple of those with 16 bits: {', '.join(ratios)}.",
    ]
    if not options.no_throughput:
        lines += ["", *throughput(options, problems[:FEW], models=models)]
    text = "\n".join(lines) + "\n"
    console.out(text)
    if options.output:
        (options.output / "kv-cache.md").write_text(text)
    return 0


def throughput(options: argparse.Namespace, prompts: list[list[int]], *, models: Mapping[Scheme, Path]) -> list[str]:
    """Lines about engines whose cache binds."""
    cache_bytes = options.small_cache_mib * MIB
    scheme = Scheme(options.schemes.split(",")[-1])
    settings = {"scheme": scheme, "cache_bytes": cache_bytes}
    engines = {kv_cache: Engine(models[scheme], kv_cache=kv_cache, **settings) for kv_cache in KvCache}
    fp8 = engines[KvCache.FP8]
    fp8.scales().write(scales_by_label(fp8, prompts[:CALIBRATION])[OURS], sync=1)
    rates: dict[KvCache, list[float]] = {kv_cache: [] for kv_cache in KvCache}
    for turn in range(-1, ROUNDS):  # -1 warms up
        for kv_cache, engine in engines.items():
            sampled = engine.sample(prompts, samples=SAMPLES, new_tokens=NEW_TOKENS, seed=7)
            if turn >= 0:
                rates[kv_cache].append(sampled.tokens / sampled.seconds)
    ratios = [one / other for one, other in zip(rates[KvCache.FP8], rates[KvCache.AUTO], strict=True)]
    lines = [
        f"With a cache of {options.small_cache_mib} MiB for {len(prompts) * SAMPLES} sequences, {scheme} rollouts, "
        f"medians of {ROUNDS} turns:",
        "",
        "| keys and values | blocks | tokens/s |",
        "| --- | --- | --- |",
    ]
    for kv_cache, engine in engines.items():
        lines.append(f"| {kv_cache} | {engine.blocks} | {statistics.median(rates[kv_cache]):.0f} |")
    ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
    return [*lines, "", f"FP8 is {ratio} times as fast, turn by turn."]


if __name__ == "__main__":
    sys.exit(main())
