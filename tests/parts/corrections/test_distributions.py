"""How far whole distributions are apart: against the definition in float64, over K words and one for all others.

Inputs are float32 and taken as exact. What is left of 1 is a difference of float64 numbers, known to K * 2^-53 of 1 and
at least 1e-6: to 1e-9 of its size. The result is rounded to float32, 2^-24.  Legend: T tokens, V and K words.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from appliance.corrections.distributions import divergence
from appliance.quant.mismatch import TopWords

T, V, K = 200, 61, 6


def policies(seed: int, *, apart: float) -> tuple[Tensor, Tensor, Tensor]:
    """(log q [T, V], log p [T, V], ids of q's K most likely words), float32."""
    generator = torch.Generator().manual_seed(seed)
    logits_TV = 3 * torch.randn(T, V, generator=generator)
    log_q_TV = logits_TV.log_softmax(dim=-1)
    log_p_TV = (logits_TV + apart * torch.randn(T, V, generator=generator)).log_softmax(dim=-1)
    return log_q_TV, log_p_TV, log_q_TV.topk(K).indices


def by_definition(log_q_TK: Tensor, log_p_TK: Tensor) -> np.ndarray:
    q, p = (np.exp(each.double().numpy()) for each in (log_q_TK, log_p_TK))
    q, p = (np.column_stack([each, 1 - each.sum(axis=1)]) for each in (q, p))
    return (q * np.log(q / p)).sum(axis=1)


@pytest.mark.parametrize("apart", [0.02, 0.5, 3.0])
def test_it_is_the_divergence_of_k_words_and_the_rest(apart: float) -> None:
    log_q_TV, log_p_TV, ids_TK = policies(1, apart=apart)
    log_q_TK, log_p_TK = (each.gather(1, ids_TK) for each in (log_q_TV, log_p_TV))
    wanted_T, found_T = by_definition(log_q_TK, log_p_TK), divergence(log_q_TK, trainer_TK=log_p_TK)
    has_rest_T = (1 - log_q_TK.double().exp().sum(dim=-1) > 1e-6) & (1 - log_p_TK.double().exp().sum(dim=-1) > 1e-6)
    assert int(has_rest_T.sum()) > T // 2
    # the definition's own sum loses 2^-53 of terms of up to 10
    assert found_T[has_rest_T].tolist() == pytest.approx(wanted_T[has_rest_T.numpy()], rel=1e-6, abs=1e-13)
    whole_T = (log_q_TV.double().exp() * (log_q_TV.double() - log_p_TV.double())).sum(dim=-1)
    assert bool((found_T >= 0).all()) and bool((found_T.double() <= whole_T * (1 + 1e-6) + 1e-6).all())


def test_it_is_zero_for_equal_policies_and_for_no_others() -> None:
    """One unit of float32 in one log-prob of one word: with another word sampled, log-probs would be equal."""
    log_q_TV, _, ids_TK = policies(2, apart=0.0)
    log_q_TK = log_q_TV.gather(1, ids_TK)
    assert not bool(divergence(log_q_TK, trainer_TK=log_q_TK).any())
    log_p_TK = log_q_TK.clone()
    log_p_TK[:, K - 1] = torch.nextafter(log_p_TK[:, K - 1], torch.zeros(T))
    assert bool((divergence(log_q_TK, trainer_TK=log_p_TK) > 0).all())


def test_a_word_that_the_engine_cannot_sample_counts_by_the_trainers_probability() -> None:
    log_q_TK, log_p_TK = torch.tensor([[0.0, -torch.inf]]), torch.tensor([[0.5, 0.25]]).log()
    # log 2 of the word itself; the two rests are 1e-6 and 0.25
    assert float(divergence(log_q_TK, trainer_TK=log_p_TK)) == pytest.approx(float(np.log(2)), abs=2e-5)


def test_words_lie_where_the_model_spoke() -> None:
    """Of two turns with a tool's answer between them; the builder has cut the first turn's last token."""
    first = TopWords(np.array([[1, 2], [3, 4], [5, 6]], np.int32), np.full((3, 2), -1.0, np.float32))
    second = TopWords(np.array([[7, 8]], np.int32), np.full((1, 2), -2.0, np.float32))
    whole = first.first(2).followed_by(second).spread([1, 1, 0, 0, 1])
    assert whole.ids_TK.tolist() == [[1, 2], [3, 4], [0, 0], [0, 0], [7, 8]]
    assert whole.log_probs_TK[:, 0].tolist() == [-1.0, -1.0, 0.0, 0.0, -2.0]
    assert (whole.ids_TK.dtype, whole.log_probs_TK.dtype) == (np.int32, np.float32)
