"""Which words tokens were drawn from, by a real engine on a CPU, and what the trainer makes of that.

The same engine reports the log-probs of all 512 words: a word that was left out has -inf. It reads prompts in parts,
and pushes requests out and resumes them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import CROWDED, Engine, note_preemptions, start_engine
from families import make_family
from test_engine_one_flow import trainers
from vllm import SamplingParams
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from appliance.engine.replica import support_of
from appliance.engine.sampling_masks import masks_of
from appliance.quant.support import RowSupport

pytestmark = pytest.mark.engine

VOCABULARY = 512
PROMPTS = [[(7 * row + 3 * column) % 490 + 1 for column in range(20 + 9 * row)] for row in range(6)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("model"), name="qwen2", seed=1)


@pytest.fixture(scope="module")
def reporting(folder: Path) -> Iterator[Engine]:
    yield start_engine(
        folder,
        scheme="int8",
        return_sampling_mask=True,
        **CROWDED,
        max_logprobs=VOCABULARY,
    )


def samples_of(engine: Engine, **settings: Any) -> list[tuple[list[int], Any]]:
    """(prompt, sample) of each."""
    usual = {"temperature": 1, "top_k": VOCABULARY, "max_tokens": 40, "ignore_eos": True, "detokenize": False}
    params = [SamplingParams(**(usual | {"seed": 11 * row} | settings)) for row in range(len(PROMPTS))]
    outputs = engine.llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
    return [(ids, sample) for ids, output in zip(PROMPTS, outputs, strict=True) for sample in output.outputs]


@pytest.mark.parametrize(
    "settings",
    [{"top_p": 0.9, "temperature": 1.3}, {"top_k": 7}, {"top_p": 0.8, "top_k": 20}, {"min_p": 0.02}, {}],
    ids=str,
)
def test_a_mask_has_the_words_that_have_a_log_prob(
    reporting: Engine, settings: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    preempted = note_preemptions(monkeypatch)
    sizes = []
    for _, sample in samples_of(reporting, logprobs=VOCABULARY, **settings):
        assert len(sample.sampling_mask.token_ids) == len(sample.token_ids) == 40
        for token, words, by_word in zip(
            sample.token_ids, sample.sampling_mask.token_ids, sample.logprobs, strict=True
        ):
            probabilities = {word: math.exp(entry.logprob) for word, entry in by_word.items() if entry.logprob > -1e30}
            assert token in words and sorted(words) == sorted(probabilities)
            assert abs(sum(probabilities.values()) - 1) < 2e-5  # float32, by PyTorch's log_softmax
            sizes.append(len(words))
    assert any(preempted), "requests were pushed out with tokens that they had, and resumed"
    top_k = settings.get("top_k", VOCABULARY)
    assert (min(sizes) < VOCABULARY) == bool(settings)
    if set(settings) == {"top_k"}:  # logits are BF16: some are equal, and all of those are drawn from
        assert min(sizes) == top_k < max(sizes)


def test_equal_logits_at_the_edge_are_in_or_out_as_vllm_has_it() -> None:
    """Top-k keeps all words that are equal to the k-th, top-p the last ones of them in the order of its sort."""
    logits_BV = torch.tensor([[3.0, 1.0, 2.0, 1.0, 1.0, 0.0], [0.0] * 6, [5.0, 4.0, 4.0, 4.0, 4.0, 3.0]])
    for top_k, top_p in ((3, None), (6, 0.5), (2, 0.7)):
        p_B = None if top_p is None else torch.full((3,), top_p)
        cut_BV = apply_top_k_top_p(logits_BV.clone(), torch.full((3,), top_k), p_B)
        masks = masks_of(cut_BV, tokens_B=[1, 0, 1])
        first, _, last = (row_V.isfinite().nonzero().flatten().tolist() for row_V in cut_BV)
        assert masks.to_nested_list() == [first, [], last]
        assert masks.slice_request(2, 1).to_nested_list() == [last]
    tied = apply_top_k_top_p(logits_BV.clone(), torch.full((3,), 3), None)
    assert masks_of(tied, tokens_B=[1, 1, 1]).to_nested_list() == [[0, 1, 2, 3, 4], [*range(6)], [0, 1, 2, 3, 4]]


def rows_of(samples: list[tuple[list[int], Any]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, RowSupport]:
    """(ids [1, T] of all sequences, positions [1, T], places of the token before each response token, their support)"""
    texts = [prompt + list(sample.token_ids) for prompt, sample in samples]
    ids = torch.tensor([[token for text in texts for token in text]])
    positions = torch.cat([torch.arange(len(text)) for text in texts])[None]
    ends = torch.tensor([len(text) for text in texts]).cumsum(0).tolist()
    places = [range(end - len(one.token_ids) - 1, end - 1) for end, (_, one) in zip(ends, samples, strict=True)]
    words = [words for _, sample in samples for words in sample.sampling_mask.token_ids]
    support = support_of(words)
    on_rows = RowSupport(torch.from_numpy(support.ids_F), torch.from_numpy(support.size_T).long())
    return ids, positions, torch.tensor([place for some in places for place in some]), on_rows


def reported(samples: list[tuple[list[int], Any]]) -> list[float]:
    return [
        step[token].logprob
        for _, sample in samples
        for token, step in zip(sample.token_ids, sample.logprobs, strict=True)
    ]


def test_one_flow_has_the_engines_log_probs_bit_for_bit(reporting: Engine, folder: Path) -> None:
    samples = samples_of(reporting, temperature=0.7, top_p=0.9, top_k=300, logprobs=0)
    ids, positions, places, support = rows_of(samples)
    model, _ = trainers(folder)
    flow = {"input_ids": ids, "position_ids": positions, "temperature": 0.7}
    labels = ids.roll(-1, 1)[:, places]
    with torch.no_grad():
        over, among_all = (
            model(**flow, logits_to_keep=places, shift_labels=labels, support=each) for each in (support, None)
        )
    assert over.log_probs[0].tolist() == reported(samples)
    assert torch.equal(over.entropy, among_all.entropy)
    assert (among_all.log_probs[0] < over.log_probs[0]).all()


def test_the_mean_weight_of_int8_rollouts_is_one(reporting: Engine, folder: Path) -> None:
    """Trained in BF16: among all words it would be the share that the trainer gives to the words that were kept."""
    from transformers import AutoModelForCausalLM

    from appliance.trainer.worker import LogProbs

    samples = samples_of(reporting, top_p=0.9, n=12, logprobs=0)
    ids, positions, places, support = rows_of(samples)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0, places]
    words = ids[0, places + 1][:, None]
    rollout = torch.tensor(reported(samples))
    over, among_all = ((LogProbs.apply(logits, words, each)[:, 0] - rollout).double().exp() for each in (support, None))
    error = over.std() / math.sqrt(len(over))
    sys.stdout.write(
        f"{len(over)} tokens: mean weight {over.mean():.5f} +- {error:.5f}, among all words {among_all.mean():.4f}\n"
    )
    assert len(over) == 6 * 12 * 40
    assert 0 < abs(over.mean() - 1) < 3 * error < 0.01
    assert 0.88 < among_all.mean() < 0.94
