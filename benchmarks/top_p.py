"""Importance weights of rollouts sampled with top-p, on a real model:
`python -m benchmarks.top_p MODEL [-o docs/results]`.

MODEL is a folder of a dense Llama, Qwen2, Qwen3 or Mistral with a chat template. One engine of vLLM's in this process
answers small word problems in INT8 and reports the words that each token was drawn from. Two trainers compute the
log-probs of the sampled tokens over those words, as in a run: transformers' forward in BF16, and the rollouts' own (one
flow). BF16 also does so among all words. The mean of the weight p_trainer / p_rollout is to be 1; its standard
error is of the same tokens. Processor seconds of rollouts are those of three settings, one after another: all words,
top-p, and top-p with the words reported.
"""

from __future__ import annotations

import argparse
import datetime
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance import console
from appliance.bench.job import GIB
from appliance.control_groups import usable_cores
from appliance.tasks.built_in.word_problems import SYSTEM, pools
from appliance.terms.environment import EXACT_ON_CPU
from appliance.terms.schemes import Scheme
from appliance.terms.settings import Quantisation
from benchmarks.demo import processor
from benchmarks.sync import set_environment

if TYPE_CHECKING:
    from torch import Tensor
    from vllm import LLM


TOKENS_AT_ONCE = 256  # whose logits are there together


class Rollouts:
    """Responses of an engine in one row, prompt and response behind one another."""

    def __init__(self, outputs: list[Any]) -> None:
        import torch

        from appliance.engine.replica import support_of
        from appliance.quant.support import RowSupport

        pairs = [(list(output.prompt_token_ids), sample) for output in outputs for sample in output.outputs]
        rows = [prompt + list(sample.token_ids) for prompt, sample in pairs]
        ends = torch.tensor([len(row) for row in rows]).cumsum(0).tolist()
        places = [range(end - len(sample.token_ids), end) for end, (_, sample) in zip(ends, pairs, strict=True)]
        self.ids_T = torch.tensor([word for row in rows for word in row])
        self.positions_T = torch.cat([torch.arange(len(row)) for row in rows])
        self.predicting_N = torch.tensor([place - 1 for some in places for place in some])
        """Places of the token before each response token."""
        self.rollout_N = torch.tensor(
            [
                step[word].logprob
                for _, sample in pairs
                for word, step in zip(sample.token_ids, sample.logprobs, strict=True)
            ]
        )
        support = support_of([words for _, sample in pairs for words in sample.sampling_mask.token_ids])
        self.support = RowSupport(torch.from_numpy(support.ids_F), torch.from_numpy(support.size_T).long())


def engine_of(folder: Path, *, sequences: int, tokens: int, reports: bool) -> LLM:
    from vllm import LLM

    return LLM(
        str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=128 + tokens,
        max_num_seqs=sequences,
        kv_cache_memory_bytes=GIB // 2,
        logprobs_mode="processed_logprobs",
        return_sampling_mask=reports,
        **Quantisation(scheme=Scheme.INT8).engine_arguments(),
    )


def prompts_of(folder: Path, *, number: int) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    problems = [problem for column in zip(*pools()[0], strict=False) for problem in column][:number]
    chats = [
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": problem.prompt}] for problem in problems
    ]
    return [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
        for chat in chats
    ]


def generate(llm: LLM, prompts: list[list[int]], *, samples: int, **settings: float) -> tuple[list[Any], float]:
    """(outputs, processor seconds)"""
    from vllm import SamplingParams

    params = [
        SamplingParams(**settings, n=samples, seed=row * samples, logprobs=0, detokenize=False)
        for row in range(len(prompts))
    ]
    llm.reset_prefix_cache()
    began = time.process_time()
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return outputs, time.process_time() - began


def by_bf16(folder: Path, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
    """[N] log-probs of transformers' forward in BF16: over the words drawn from, and among all words."""
    import torch
    from transformers import AutoModelForCausalLM

    from appliance.terms.settings import ATTENTION_NAME
    from appliance.trainer.worker import LogProbs  # with it transformers knows our attention

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME)
    rows = {"input_ids": rollouts.ids_T[None], "position_ids": rollouts.positions_T[None], "use_cache": False}
    hidden_ND = model.model(**rows).last_hidden_state[0, rollouts.predicting_N]
    words_N1 = rollouts.ids_T[rollouts.predicting_N + 1][:, None]
    parts = (each.split(TOKENS_AT_ONCE) for each in (hidden_ND, words_N1, rollouts.support))
    pairs = [
        [LogProbs.apply(model.lm_head(hidden), words, each)[:, 0] for each in (support, None)]
        for hidden, words, support in zip(*parts, strict=True)
    ]
    over, among_all = (torch.cat(columns) for columns in zip(*pairs, strict=True))
    return over, among_all


def by_one_flow(folder: Path, rollouts: Rollouts) -> Tensor:
    """[N] log-probs of the rollouts' forward over the words drawn from."""
    import torch
    from transformers import AutoModelForCausalLM

    from appliance.trainer.rollout_forward import RolloutForward

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    RolloutForward(model, quantisation=Quantisation(scheme=Scheme.INT8), num_tokens=model.config.vocab_size)
    output = model(
        input_ids=rollouts.ids_T[None],
        position_ids=rollouts.positions_T[None],
        temperature=1.0,
        shift_labels=rollouts.ids_T[rollouts.predicting_N + 1][None],
        logits_to_keep=rollouts.predicting_N,
        support=rollouts.support,
    )
    log_probs: Tensor = output.log_probs[0]
    return log_probs


def row_of(name: str, log_probs_N: Tensor, *, rollout_N: Tensor) -> str:
    weights_N = (log_probs_N - rollout_N).double().exp()
    error = float(weights_N.std()) / math.sqrt(len(weights_N))
    mean, equal = float(weights_N.mean()), float((log_probs_N == rollout_N).double().mean())
    off = f"{(mean - 1) / error:+.1f}" if error else "exactly 1"
    return f"| {name} | {mean:.4f} | {error:.4f} | {off} | {float(weights_N.max()):.2f} | {equal:.1%} |"


ABOUT = (
    "Are importance weights right when rollouts are sampled with top-p, which leaves out the least likely words? Then",
    "the mean of the weights, p_trainer / p_rollout, is 1 within its error, if both are taken over the words that a",
    "token was drawn from. *errors from 1* is how many standard errors the mean is from 1; *equal bit for bit* the",
    "share of tokens whose log-prob is the engine's.",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--top-p", type=float, default=0.9)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--samples", type=int, default=4, help="samples of each prompt")
    parser.add_argument("--tokens", type=int, default=16, help="most tokens of a response")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("-o", "--output", type=Path, help="folder for top_p.md")
    options = parser.parse_args()
    import os

    os.environ |= EXACT_ON_CPU  # as a plan has it with one flow
    set_environment(options.threads)
    import torch

    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    llm = engine_of(options.model, sequences=options.prompts * options.samples, tokens=options.tokens, reports=True)
    config = llm.llm_engine.model_config
    prompts, words = prompts_of(options.model, number=options.prompts), config.get_vocab_size()
    usual = {"samples": options.samples, "max_tokens": options.tokens, "temperature": 1.0, "top_k": words}
    config.return_sampling_mask = False  # the runner asks it at each step
    generate(llm, prompts, **usual)  # once for all that is compiled and allocated
    _, all_words_s = generate(llm, prompts, **usual)
    _, silent_s = generate(llm, prompts, **usual, top_p=options.top_p)
    config.return_sampling_mask = True
    outputs, reporting_s = generate(llm, prompts, **usual, top_p=options.top_p)
    rollouts = Rollouts(outputs)
    sizes_N = rollouts.support.size_R.double()
    lines = [
        "# Importance weights with top-p",
        "",
        *ABOUT,
        "",
        f"`python -m benchmarks.top_p`, {datetime.date.today()}: {processor()}, threads: {options.threads}, model "
        f"`{options.model.name}`, INT8 rollouts without a profile, temperature 1, `top_p` {options.top_p:g}, "
        f"{len(rollouts.rollout_N):,} tokens.",
        "",
        f"Words that a token was drawn from, of {words:,}: mean {sizes_N.mean():.1f}, median {sizes_N.median():.0f}, "
        f"99 % {sizes_N.quantile(0.99):.0f}, most {sizes_N.max():.0f}.",
        "",
        f"Processor seconds of these rollouts: {all_words_s:.1f} with all words, {silent_s:.1f} with `top_p`, "
        f"{reporting_s:.1f} with the words reported.",
        "",
        "| log-probs of the trainer | mean weight | standard error | errors from 1 | largest | equal bit for bit |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    over, among_all = by_bf16(options.model, rollouts)
    sides = {"BF16": over, "BF16, among all words": among_all, "one flow": by_one_flow(options.model, rollouts)}
    lines += [row_of(name, log_probs_N, rollout_N=rollouts.rollout_N) for name, log_probs_N in sides.items()]
    text = "\n".join(lines) + "\n"
    console.out(text)
    if options.output:
        (options.output / "top_p.md").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
