"""Log-probs over the words that tokens were drawn from: the trainer's, their gradients, and the loss with them.

Models are in float64 and compared with transformers' forward of each sequence by itself: bounds as in
test_shared_prompts.py.  Legend: N response positions, V words, K of them, F words in all supports together.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from test_corrected_loss import make_batch
from test_shared_prompts import TEMPERATURE, assert_close, micro_batch, model_of, sequences
from test_top_words import K, centered, engine_of, weighed, whole_words, with_words
from torch import Tensor
from verl.utils.tensordict_utils import assign_non_tensor
from verl.utils.torch_functional import entropy_from_logits_with_chunking, logprobs_from_logits
from verl.workers.utils.padding import response_from_nested

import appliance.trainer.worker
from appliance.corrections.centering import coefficients
from appliance.corrections.registry import correction_of
from appliance.quant.support import RowSupport, Support, log_probs_over
from appliance.trainer.rollout_ops import log_probs_of
from appliance.trainer.support import SUPPORT_IDS, SUPPORT_SIZES
from appliance.trainer.top_words import TOP_IDS, TOP_TRAINER
from appliance.trainer.update_log_probs import UPDATE_LOG_PROBS

VOCABULARY = 288


def supports() -> Iterator[list[np.ndarray]]:
    """Of each sequence the words of each response token: the sampled one and some others; every fifth has all words."""
    generator = np.random.default_rng(4)
    for number, (_, response) in enumerate(sequences()):
        sets = [np.union1d(generator.choice(VOCABULARY, size=20, replace=False), [word]) for word in response]
        yield [
            words[:0] if (number + place) % 5 == 4 else generator.permutation(words) for place, words in enumerate(sets)
        ]


def with_supports(data: TensorDict) -> TensorDict:
    of_sequences = [
        (np.concatenate([*words, np.zeros(0, np.int32)]), np.array([len(some) for some in words]))
        for words in supports()
    ]
    for place, name in enumerate((SUPPORT_IDS, SUPPORT_SIZES)):
        rows = [torch.from_numpy(pair[place].astype(np.int32)) for pair in of_sequences]
        data[name] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    return data


def one_by_one(model: torch.nn.Module, data: TensorDict) -> Tensor:
    """[N, 1 + K] log-probs of the sampled word and of the batch's, -inf outside of the support: by definition, the
    logit less the logarithm of the sum over the support."""
    log_probs = []
    for (prompt, response), ids, words in zip(sequences(), data[TOP_IDS].unbind(), supports(), strict=True):
        logits_TV = model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        labels_TL = torch.cat([torch.tensor(response)[:, None], ids.long().view(-1, K)], dim=1)
        for logits_V, labels_L, some in zip(logits_TV / TEMPERATURE, labels_TL, words, strict=True):
            support = torch.from_numpy(some) if len(some) else torch.arange(VOCABULARY)
            log_probs_L = logits_V[labels_L] - logits_V[support].logsumexp(dim=0)
            log_probs.append(log_probs_L.where(torch.isin(labels_L, support), -torch.inf))
    return torch.stack(log_probs)


@pytest.mark.parametrize("shares", [False, True])
def test_log_probs_and_gradients_are_over_the_support_and_entropies_over_all_words(shares: bool) -> None:
    UPDATE_LOG_PROBS.end()
    model, data = model_of("qwen2"), with_supports(with_words(micro_batch(sequences(), entropy=True)))
    engine = engine_of(model, shares=shares)
    engine.engine_config.entropy_from_logits_with_chunking, engine.engine_config.entropy_from_logits_chunk_size = (
        True,
        8,
    )
    engine.compute_entropy_from_logits = entropy_from_logits_with_chunking

    def outputs_of(batch: TensorDict) -> dict[str, Tensor]:
        inputs, arguments = engine.prepare_model_inputs(batch)
        outputs = engine.prepare_model_outputs(model(**inputs, use_cache=False), arguments, batch, None)
        return {name: response_from_nested(rows, batch["response_mask"]).values() for name, rows in outputs.items()}

    outputs = outputs_of(data)
    both_NL = torch.cat([outputs["log_probs"][:, None], outputs[TOP_TRAINER]], dim=1)
    other = model_of("qwen2", attention="sdpa")
    wanted_NL = one_by_one(other, data)
    inside_NL = wanted_NL.isfinite()
    assert inside_NL[:, 0].all() and 0 < (~inside_NL).sum() < inside_NL.numel()
    assert torch.equal(both_NL.isfinite(), inside_NL) and (both_NL[~inside_NL] == -torch.inf).all()
    assert_close(both_NL[inside_NL].detach(), wanted_NL[inside_NL].detach(), "log-probs")
    weighed(both_NL.where(inside_NL, 0.0)).backward()
    weighed(wanted_NL.where(inside_NL, 0.0)).backward()
    for (name, parameter), wanted in zip(model.named_parameters(), other.parameters(), strict=True):
        assert_close(parameter.grad, wanted.grad, name)
    without = data.exclude(SUPPORT_IDS, SUPPORT_SIZES)
    assign_non_tensor(without, use_remove_padding=True, temperature=TEMPERATURE, calculate_entropy=True)
    among_all = outputs_of(without)
    assert torch.equal(outputs["entropy"], among_all["entropy"])
    assert (outputs["log_probs"] >= among_all["log_probs"]).all()


def test_a_reference_is_over_the_same_words() -> None:
    """So that its divergence is 0 where it is the policy."""
    model, data = model_of("qwen2"), with_supports(with_words(micro_batch(sequences())))
    log_probs = []
    with torch.no_grad():
        for reference in (False, True):
            engine = engine_of(model, shares=False, reference=reference)
            inputs, arguments = engine.prepare_model_inputs(data)
            outputs = engine.prepare_model_outputs(model(**inputs, use_cache=False), arguments, data, None)
            log_probs.append(outputs["log_probs"].values())
    assert torch.equal(*log_probs)


def row_support(rows: int, *, words: Tensor, vocabulary: int) -> RowSupport:
    generator = torch.Generator().manual_seed(3)
    is_in_RV = torch.rand(rows, vocabulary, generator=generator) < 0.3
    is_in_RV.scatter_(1, words[:, None], True)
    is_in_RV[::4] = False  # all words
    return RowSupport(is_in_RV.nonzero()[:, 1].int(), is_in_RV.sum(dim=1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_chunks_of_bf16_and_float32_logits_are_within_float32_of_the_definition(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By both of the trainer's functions, seven rows at a time. A log-prob is a difference of two numbers of at most
    16 in float32, one a sum of 40 exponentials: 2^-24 * (2 * 16 + 40). A gradient is at most 1, twice rounded, and
    rounded once to the logits' own type."""
    monkeypatch.setattr(appliance.trainer.worker, "_CPU_LOGITS", 7 * 40)
    generator = torch.Generator().manual_seed(2)
    x_TV = (3 * torch.randn(50, 40, generator=generator)).to(dtype)
    words_T, grad_T = torch.randint(0, 40, (50,), generator=generator), torch.randn(50, generator=generator)
    support = row_support(50, words=words_T, vocabulary=40)
    rows = support.split(1)
    exact_TV = x_TV.double().requires_grad_()
    wanted_T = torch.stack(
        [
            logits_V[word] - (logits_V[row.ids_F.long()] if len(row.ids_F) else logits_V).logsumexp(dim=0)
            for logits_V, word, row in zip(exact_TV, words_T, rows, strict=True)
        ]
    )
    (wanted_TV,) = torch.autograd.grad(wanted_T, exact_TV, grad_T.double())
    for name in ("worker", "rollout_ops"):
        leaf_TV = x_TV.clone().requires_grad_()
        if name == "worker":
            with log_probs_over(support):
                log_probs_T = logprobs_from_logits(leaf_TV, words_T)
        else:
            settings = {"num_tokens": 40, "temperature": 1.0, "with_entropy": False}
            log_probs_T, _ = log_probs_of(leaf_TV, words_T, **settings, support=support)
        (grad_TV,) = torch.autograd.grad(log_probs_T, leaf_TV, grad_T)
        assert log_probs_T.dtype == torch.float32
        assert (log_probs_T - wanted_T).abs().max() < 72 * 2.0**-24
        rounding = 2.0**-8 if dtype is torch.bfloat16 else 2.0**-22
        assert ((grad_TV - wanted_TV).abs() <= 2.0**-20 + rounding * wanted_TV.abs()).all()
        assert not grad_TV[wanted_TV == 0].any()


def test_the_rollouts_forward_does_what_an_engine_does_with_its_logits() -> None:
    """-inf outside, and one log_softmax over the whole vocabulary: bit for bit, and no other entropy."""
    generator, settings = torch.Generator().manual_seed(2), {"num_tokens": 36, "temperature": 0.7, "with_entropy": True}
    x_TV = torch.randn(50, 40, generator=generator).bfloat16()
    words_TL = torch.randint(0, 36, (50, 4), generator=generator)
    support = row_support(50, words=words_TL[:, 0], vocabulary=36)
    log_probs_TL, entropy_T = log_probs_of(x_TV, words_TL, **settings, support=support)
    logits_TV = x_TV.float()
    logits_TV[:, 36:] = -torch.inf
    logits_TV /= torch.full((50, 1), 0.7)
    engine_TV = support.cut_(logits_TV).log_softmax(dim=-1)
    assert torch.equal(log_probs_TL, engine_TV.gather(1, words_TL))
    assert torch.equal(entropy_T, log_probs_of(x_TV, words_TL, **settings)[1])


def test_supports_are_cut_joined_and_spread_by_token() -> None:
    first = Support(np.array([3, 1, 7, 9], np.int32), np.array([2, 1, 1], np.int32))
    other = Support(np.array([5], np.int32), np.array([1], np.int32))
    joined = first.first(2).followed_by(other)
    assert (joined.ids_F.tolist(), joined.size_T.tolist()) == ([3, 1, 7, 5], [2, 1, 1])
    spread = joined.spread([1, 0, 0, 1, 1])
    assert (spread.ids_F.tolist(), spread.size_T.tolist()) == ([3, 1, 7, 5], [2, 0, 0, 1, 1])


@pytest.mark.parametrize(("name", "cap"), [("score-centering", None), ("score-centering-tis", 1.5)])
def test_score_centering_leaves_out_the_words_outside(
    name: str, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of the K words have probability 0 on both sides: the loss is that of the others alone, and finite."""
    trainer, rollout = (words.clone() for words in whole_words(make_batch(3, highest=4.0)))
    trainer[..., 1:3] = rollout[..., 1:3] = -torch.inf
    correction = correction_of(name, cap=cap)
    results = {}
    for variant in ("with", "without"):
        pair = (trainer, rollout)
        if variant == "without":  # of no weight and no gradient: as if another word had stood there twice, at 0
            pair = tuple(words.where(words.isfinite(), -80.0) for words in pair)
        monkeypatch.setattr("test_top_words.whole_words", lambda _, pair=pair: pair)
        results[variant] = centered(correction, mode="token-mean")
    (loss, _, gradient, metrics), (wanted, _, other, others) = results["with"], results["without"]
    assert loss == pytest.approx(wanted, rel=1e-6) and torch.allclose(gradient, other, rtol=1e-6, atol=1e-12)
    assert not gradient[..., 1:3].any() and gradient.any()
    sizes = ({key: value for key, value in each.items() if "center" in key} for each in (metrics, others))
    assert next(sizes) == pytest.approx(next(sizes), rel=1e-6)
    coefficient = coefficients(trainer[0], rollout_TK=rollout[0], cap=cap)
    assert not coefficient[..., 1:3].any()
