"""A request with a seed in real engines on a CPU: each token is where its number falls, whatever happens around it.

Engines report the log-probs of all 512 words that a token was drawn from. The token must be the one whose part of the
cumulative distribution, in float64, has the number of the request's seed and the token's position in it. Log-probs are
float32, by PyTorch's log_softmax: 512 of them are off by less than TOLERANCE together.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import CROWDED, Engine, note_preemptions, start_engine
from vllm import SamplingParams
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from appliance.engine.inverse_cdf import uniform_numbers
from appliance.engine.seeded_sampling import (
    SEEDED_SAMPLING,
    PositionedGenerator,
    row_uniforms,
    seeded_sampling,
)
from appliance.patch import apply_patch

pytestmark = pytest.mark.engine

VOCABULARY, NEW_TOKENS, TOLERANCE = 512, 40, 2e-5
PROMPTS = [[(7 * row + 3 * column) % 500 + 1 for column in range(20 + 9 * row)] for row in range(6)]
SEEDS = [0, 1, 2, -5, 2**63 - 1, 41]


@pytest.fixture(scope="module")
def crowded(checkpoints: tuple[Path, Path]) -> Iterator[Engine]:
    yield start_engine(
        checkpoints[0],
        scheme="int8",
        **CROWDED,
        max_logprobs=VOCABULARY,
    )


def generate(engine: Engine, prompts: list[list[int]], *, seeds: list[int | None], **settings: object) -> list:
    """The first sample of each prompt, with the log-probs of every word."""
    engine.llm.reset_prefix_cache()
    usual = {"temperature": 1, "max_tokens": NEW_TOKENS, "ignore_eos": True, "detokenize": False}
    params = [SamplingParams(**(usual | {"seed": seed, "logprobs": VOCABULARY} | settings)) for seed in seeds]
    outputs = engine.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def assert_drawn_by_seed(sample: object, *, seed: int, prompt: list[int]) -> None:
    tokens, logprobs = list(sample.token_ids), sample.logprobs
    positions = np.arange(len(prompt), len(prompt) + len(tokens), dtype=np.uint64)
    uniform_T = uniform_numbers(np.full(len(tokens), seed % 2**64, np.uint64), positions)
    for token, number, by_word in zip(tokens, uniform_T, logprobs, strict=True):
        probability_V = np.zeros(VOCABULARY)
        probability_V[list(by_word)] = np.exp([entry.logprob for entry in by_word.values()])
        assert abs(probability_V.sum() - 1) < TOLERANCE
        cumulative_V = probability_V.cumsum()
        assert cumulative_V[token] - probability_V[token] - TOLERANCE <= number <= cumulative_V[token] + TOLERANCE
        assert probability_V[token] > 0


@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.6}, {"top_p": 0.8}, {"top_k": 7}, {"min_p": 0.02}, {"temperature": 1.3, "top_p": 0.9}],
    ids=str,
)
def test_a_token_is_where_its_number_falls(
    crowded: Engine, settings: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    preempted = note_preemptions(monkeypatch)
    samples = generate(crowded, PROMPTS, seeds=SEEDS, **settings)
    assert any(preempted), "requests were pushed out with tokens that they had, and resumed"
    for sample, seed, prompt in zip(samples, SEEDS, PROMPTS, strict=True):
        assert_drawn_by_seed(sample, seed=seed, prompt=prompt)
    assert len({tuple(sample.token_ids) for sample in samples}) == len(samples)


def test_rows_without_a_seed_and_greedy_rows_stay_what_they_are(crowded: Engine) -> None:
    prompts, seeds = [PROMPTS[0]] * 5, [5, None, None, 6, None]
    temperatures = [1, 1, 0, 1, 1]
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=8, logprobs=VOCABULARY, detokenize=False)
        for temperature, seed in zip(temperatures, seeds, strict=True)
    ]
    outputs = crowded.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    samples = [output.outputs[0] for output in outputs]
    for row in (0, 3):
        assert_drawn_by_seed(samples[row], seed=seeds[row], prompt=prompts[row])
    for token, by_word in zip(samples[2].token_ids, samples[2].logprobs, strict=True):
        assert by_word[token].logprob == max(entry.logprob for entry in by_word.values())
    assert len({tuple(sample.token_ids) for sample in samples}) == 5


def test_samples_of_a_prompt_have_numbers_of_their_own(crowded: Engine) -> None:
    params = SamplingParams(n=3, seed=8, max_tokens=6, logprobs=VOCABULARY, detokenize=False)
    (output,) = crowded.llm.generate([{"prompt_token_ids": PROMPTS[1]}], params, use_tqdm=False)
    for number, sample in enumerate(output.outputs):
        assert_drawn_by_seed(sample, seed=8 + number, prompt=PROMPTS[1])


def request_at(seed: int, *, prompt_tokens: int, output_tokens: int) -> CachedRequestState:
    return CachedRequestState(
        req_id=str(seed),
        prompt_token_ids=[1] * prompt_tokens,
        mm_features=[],
        sampling_params=SamplingParams(seed=seed),
        generator=torch.Generator().manual_seed(seed),
        block_ids=([],),
        num_computed_tokens=0,
        output_token_ids=[2] * output_tokens,
    )


def test_a_position_follows_its_request() -> None:
    """vLLM appends to a request's tokens, and gives a resumed one a new list; what it throws away changes nothing."""
    request = request_at(3, prompt_tokens=10, output_tokens=0)
    generator = PositionedGenerator(request)
    (number,) = row_uniforms({0: generator}, rows=1)
    generator.set_offset(generator.get_offset() - 4)
    assert row_uniforms({0: generator}, rows=1) == [number]
    request.output_token_ids = [4, 5]
    assert generator.position == 12
    assert (
        row_uniforms({0: generator}, rows=1) == uniform_numbers(np.array([3], "u8"), np.array([12], "u8")) != [number]
    )


def test_top_p_of_a_large_vocabulary_has_its_distribution() -> None:
    """Drawn are the words of the nucleus, each as often as its share says."""
    apply_patch(SEEDED_SAMPLING, seeded_sampling)
    rows, vocabulary, top_p = 96, 49_152, 0.9
    logits_V = 3 * torch.randn(vocabulary, generator=torch.Generator().manual_seed(1))
    probability_V, order_V = torch.softmax(logits_V.double(), dim=0).sort(descending=True)
    before_V = probability_V.cumsum(0) - probability_V
    nucleus = before_V < top_p
    rank_V = torch.empty(vocabulary, dtype=torch.long).scatter_(0, order_V, torch.arange(vocabulary))
    sampler, ranks = TopKTopPSampler("raw_logprobs"), []
    for turn in range(8):
        requests = [request_at(rows * turn + row, prompt_tokens=5, output_tokens=turn) for row in range(rows)]
        generators = {row: PositionedGenerator(request) for row, request in enumerate(requests)}
        words, _ = sampler(logits_V.repeat(rows, 1), generators, None, torch.full((rows,), top_p))
        ranks.append(rank_V[words])
    ranks_N = torch.cat(ranks)
    assert (before_V[ranks_N] < top_p + 1e-4).all()  # vLLM sums 49,152 probabilities in float32
    tenths_N = (10 * before_V[ranks_N] / top_p).long().clamp(max=9)  # of the nucleus' mass, most common words first
    expected = torch.bincount((10 * before_V[nucleus] / top_p).long(), weights=probability_V[nucleus])
    expected *= len(ranks_N) / expected.sum()
    statistic = ((torch.bincount(tenths_N, minlength=10) - expected) ** 2 / expected).sum()
    assert statistic < 44.8  # chi-square of 9 degrees exceeds it once in a million


def chosen_log_probs(sample: object) -> list[float]:
    return [step[token].logprob for token, step in zip(sample.token_ids, sample.logprobs, strict=True)]


def test_a_prompt_read_in_parts_gives_the_bits_of_one_read_whole(
    crowded: Engine, checkpoints: tuple[Path, Path]
) -> None:
    whole = start_engine(checkpoints[0], scheme="int8", enable_chunked_prefill=False, max_logprobs=VOCABULARY)
    in_parts, at_once = (generate(engine, PROMPTS, seeds=SEEDS, logprobs=0) for engine in (crowded, whole))
    for sample, other in zip(in_parts, at_once, strict=True):
        assert list(sample.token_ids) == list(other.token_ids)
        assert chosen_log_probs(sample) == chosen_log_probs(other)


def test_ranks_are_those_of_the_log_probs(crowded: Engine) -> None:
    every_word, chosen_alone = (
        generate(crowded, PROMPTS[:2], seeds=SEEDS[:2], logprobs=number) for number in (VOCABULARY, 0)
    )
    for sample, alone in zip(every_word, chosen_alone, strict=True):
        for token, by_word, chosen in zip(alone.token_ids, sample.logprobs, alone.logprobs, strict=True):
            (entry,) = chosen.values()
            assert entry.logprob == by_word[token].logprob
            assert entry.rank == sum(other.logprob >= entry.logprob for other in by_word.values())
