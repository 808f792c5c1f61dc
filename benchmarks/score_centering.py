"""What log-probs of the most likely words cost, in rollouts and in an update: `python -m benchmarks.score_centering`.

Shapes of SmolLM2-135M, random weights. Rollouts: one engine of vLLM's in this process answers the same prompts, every
second time with the K most likely words at each token, read into arrays as a run reads them. Updates: the trainer's
engine of one rank, as in benchmarks/train_step.py, over a batch of the same size; every second one has 1 + K words at
each response token and the term of score centering in its loss. Both sides of a ratio are neighbours in time. Seconds
are wall time; processor seconds are of all threads, and depend less on what else the host does. A time is the median of
the turns, a ratio that of single turns with its range; the first turn of each side is not counted. Memory is the most
that tensors of an update took above what they took before, from PyTorch's record of its allocations.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from appliance import console
from appliance.bench.job import GIB
from appliance.control_groups import usable_cores
from appliance.terms.schemes import Scheme
from appliance.terms.settings import Quantisation
from benchmarks.demo import processor
from benchmarks.one_flow import ratios
from benchmarks.sampling import MODELS
from benchmarks.sync import peak_of_tensors, set_environment

if TYPE_CHECKING:
    from tensordict import TensorDict
    from torch import Tensor

WITHOUT, WITH = "without", "with"
SHAPES = MODELS["SmolLM2-135M"]
BAR = 1.05

Times = dict[str, list[float]]


def in_turns(work: dict[str, Callable[[], object]], *, turns: int) -> tuple[Times, Times]:
    """(seconds, processor seconds) of each side, turn by turn."""
    seconds, processor_s = ({side: list[float]() for side in work} for _ in range(2))
    for turn in range(-1, turns):
        for side, call in work.items():
            began, worked = time.perf_counter(), time.process_time()
            call()
            if turn >= 0:
                seconds[side].append(time.perf_counter() - began)
                processor_s[side].append(time.process_time() - worked)
    return seconds, processor_s


def rollouts(*, sequences: int, prompt_tokens: int, tokens: int, words: int, turns: int) -> tuple[Times, Times]:
    import numpy as np
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    from appliance.bench.child import qwen2_config

    with tempfile.TemporaryDirectory() as folder:
        qwen2_config(SHAPES).save_pretrained(folder)
        llm = LLM(
            folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            enforce_eager=True,
            max_model_len=prompt_tokens + tokens,
            max_num_seqs=sequences,
            max_num_batched_tokens=max(2048, sequences * prompt_tokens),
            kv_cache_memory_bytes=GIB,
            logprobs_mode="processed_logprobs",
            max_logprobs=words,
            enable_prefix_caching=False,
            **Quantisation(scheme=Scheme.INT8).engine_arguments(),
        )
    prompts = [
        {"prompt_token_ids": [(7 * row + column) % 500 + 1 for column in range(prompt_tokens)]}
        for row in range(sequences)
    ]

    def generate(logprobs: int) -> None:
        always = {"max_tokens": tokens, "ignore_eos": True, "detokenize": False, "flat_logprobs": True}
        params = [SamplingParams(seed=row, logprobs=logprobs, **always) for row in range(sequences)]
        for request in llm.generate(prompts, params, use_tqdm=False):
            flat = request.outputs[0].logprobs
            np.array(flat.token_ids, np.int32).reshape(tokens, -1)
            np.array(flat.logprobs, np.float32).reshape(tokens, -1)

    times = in_turns({WITHOUT: lambda: generate(0), WITH: lambda: generate(words)}, turns=turns)
    cleanup_dist_env_and_memory()  # the trainer makes its own process group
    return times


def with_words(data: TensorDict, *, words: int) -> TensorDict:
    """A batch of train_step's with what an engine would bring, and the fields that the loss reads."""
    import torch
    from verl.utils.tensordict_utils import assign_non_tensor

    from appliance.corrections.registry import correction_of
    from appliance.trainer.correction import CENTERING
    from appliance.trainer.top_words import TOP_IDS, TOP_ROLLOUT

    lengths = data["response_mask"].offsets().diff().tolist()
    data, generator = data.clone(recurse=False), torch.Generator().manual_seed(1)
    ids = [torch.randint(0, SHAPES.vocabulary, (length * words,), generator=generator).int() for length in lengths]
    log_probs = [
        torch.randn(length, 2 * words, generator=generator).log_softmax(dim=-1)[:, :words].flatten()
        for length in lengths
    ]
    for name, rows in ((TOP_IDS, ids), (TOP_ROLLOUT, log_probs)):
        data[name] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    assign_non_tensor(data, **{CENTERING: correction_of("score-centering")})
    return data


def updates(
    *, prompts: int, samples: int, prompt_tokens: int, tokens: int, micro_batch: int, words: int, turns: int
) -> tuple[Times, Times, dict[str, int]]:
    """(seconds, processor seconds, extra bytes of tensors) of each side."""
    import torch
    from verl.utils.tensordict_utils import assign_non_tensor
    from verl.workers.config import FSDPActorConfig

    from appliance.tasks.library import PACKAGED_MODELS
    from appliance.trainer.correction import KEPT, REAL, WEIGHTS, corrected_loss
    from benchmarks.train_step import BF16, batch, engine

    def sides_of(prompts: int) -> dict[str, TensorDict]:
        sizes = {"prompt_tokens": prompt_tokens, "response_tokens": tokens, "micro_batch": micro_batch}
        plain = batch(prompts=prompts, samples=samples, **sizes)
        lengths = plain["response_mask"].offsets().diff().tolist()
        for name, value in (("old_log_probs", -10.8), (WEIGHTS, 1.0), ("advantages", 0.5)):
            rows = [torch.full((length,), value) for length in lengths]
            plain[name] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        plain[REAL] = plain[KEPT]
        assign_non_tensor(plain, global_batch_size=len(plain))
        return {WITHOUT: plain, WITH: with_words(plain, words=words)}

    trainer, forwards, _ = engine(layers=PACKAGED_MODELS["smollm2-135m"].shape.layers)
    for module, forward in forwards[BF16]:
        module.forward = forward
    trainer.shares_prompts, trainer.engine_config.forward_only = True, False
    config = FSDPActorConfig(
        strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=0.2, clip_ratio_high=0.2
    )

    def loss(model_output: dict[str, Tensor], data: TensorDict, dp_group: Any = None) -> tuple[Tensor, dict[str, Any]]:
        return corrected_loss(config, model_output, data, dp_group)

    def update(data: TensorDict) -> None:
        trainer.optimizer_zero_grad()
        trainer.forward_backward_batch(data, loss)
        trainer.optimizer_step()

    calls = {name: lambda data=data: update(data) for name, data in sides_of(prompts).items()}
    seconds, processor_s = in_turns(calls, turns=turns)
    of_one = sides_of(micro_batch // samples)  # one micro-batch: the others need what it has left again
    memory = {name: peak_of_tensors(lambda data=data: update(data), times=1) for name, data in of_one.items()}
    return seconds, processor_s, memory


ABOUT = (
    "What do the log-probs of the most likely words at each token, which score centering needs, cost in rollouts and",
    "in an update? Shapes of SmolLM2-135M, random weights; every second turn reports the words in the rollouts, and",
    "centers with them in the update. Seconds are wall time, *processor s* those of all threads, medians of the",
    "turns; *ratio* is the median of the turns' ratios, with its range.",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--samples", type=int, default=6, help="samples of each prompt")
    parser.add_argument("--prompt-tokens", type=int, default=33)
    parser.add_argument("--response-tokens", type=int, default=16)
    parser.add_argument("--micro-batch", type=int, default=12, help="sequences of one forward")
    parser.add_argument("--words", type=int, default=20, help="rollout.top_log_probs")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("-o", "--output", type=Path, help="folder for score_centering.md")
    options = parser.parse_args()
    set_environment(options.threads)
    sizes = {"prompt_tokens": options.prompt_tokens, "tokens": options.response_tokens, "words": options.words}
    sequences = options.prompts * options.samples
    generated = rollouts(sequences=sequences, turns=options.turns, **sizes)
    import torch

    torch.set_num_threads(options.threads)
    *updated, memory = updates(
        prompts=options.prompts, samples=options.samples, micro_batch=options.micro_batch, turns=options.turns, **sizes
    )
    both = [
        {side: [sum(pair) for pair in zip(one[side], other[side], strict=True)] for side in one}
        for one, other in zip(generated, updated, strict=True)
    ]
    lines = [
        "# The most likely words of each token: their cost",
        "",
        *ABOUT,
        "",
        f"`python -m benchmarks.score_centering`, {datetime.date.today()}: {processor()}, {options.threads} threads. "
        f"{options.prompts} prompts of {options.samples} samples, {options.prompt_tokens} and "
        f"{options.response_tokens} tokens each, INT8 rollouts, {options.words} words at each response token.",
        "",
        f"| | without | with {options.words} words | ratio |",
        "| --- | --- | --- | --- |",
    ]
    for name, times in (("rollouts", generated), ("update", updated), ("both", both)):
        for unit, of_sides in zip(("s", "processor s"), times, strict=True):
            cells = f"{median(of_sides[WITHOUT]):.2f} | {median(of_sides[WITH]):.2f}"
            lines.append(f"| {name}, {unit} | {cells} | {ratios(of_sides[WITH], of_sides[WITHOUT])} |")
    cells = " | ".join(f"{memory[side] / 2**20:.0f}" for side in (WITHOUT, WITH))
    lines.append(f"| tensors of an update, MiB | {cells} | {memory[WITH] / memory[WITHOUT]:.3f} |")
    text = "\n".join(lines) + "\n"
    console.out(text)
    if options.output:
        (options.output / "score_centering.md").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
