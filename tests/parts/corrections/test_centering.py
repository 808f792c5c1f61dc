"""Score centering against the mean score that it takes out, summed over the whole vocabulary in float64.

The score of a word v is the gradient of log p(v) with respect to the logits: onehot(v) - p. Its mean under the
rollouts' policy q with weights w is the sum over all words of q w (onehot - p). Score centering computes it from K of
them and takes the others to have q = rho p, so that where q is such, the two are the same but for float64's rounding.

Legend: T tokens, V words of the vocabulary, K of them.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from appliance.corrections.centering import coefficients, size_of
from appliance.corrections.objective import Loss
from appliance.corrections.registry import correction_of

T, V, K = 60, 97, 8
# Sums of V terms below 1 (V * 2^-53 = 1e-14); rho is a ratio of rests, here at least 1e-2, known to 1e-12 of it.
ATOL = 1e-11


def policies(*, seed: int, apart: float = 0.5, alike_beyond: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """(logits of p [T, V], q [T, V], ids of the K words that q finds most likely); beyond them q is as p."""
    generator = torch.Generator().manual_seed(seed)
    logits_TV = 2 * torch.randn(T, V, generator=generator, dtype=torch.float64)
    p_TV = logits_TV.softmax(dim=-1)
    ids_TK = p_TV.topk(K).indices
    noise_TV = (apart * torch.randn(T, V, generator=generator, dtype=torch.float64)).exp()
    if alike_beyond:
        noise_TV = torch.ones_like(p_TV).scatter(1, ids_TK, noise_TV.gather(1, ids_TK))
    q_TV = p_TV * noise_TV
    return logits_TV, q_TV / q_TV.sum(dim=-1, keepdim=True), ids_TK


def gradient(logits_TV: Tensor, q_TV: Tensor, ids_TK: Tensor, *, cap: float | None) -> Tensor:
    """[T, V]: of the term with respect to the logits."""
    leaf_TV = logits_TV.clone().requires_grad_()
    trainer_TK = leaf_TV.log_softmax(dim=-1).gather(1, ids_TK)
    coefficient_TK = coefficients(trainer_TK, rollout_TK=q_TV.log().gather(1, ids_TK), cap=cap)
    assert not coefficient_TK.requires_grad
    (coefficient_TK * trainer_TK).sum().backward()
    return leaf_TV.grad


def mean_score(p_TV: Tensor, q_TV: Tensor, *, cap: float | None) -> Tensor:
    """[T, V], by its definition."""
    weight_TV = torch.ones_like(q_TV) if cap is None else (p_TV / q_TV).clamp(max=cap)
    mass_TV = q_TV * weight_TV
    return mass_TV - mass_TV.sum(dim=-1, keepdim=True) * p_TV


def test_what_is_taken_out_is_told_by_its_size() -> None:
    logits_TV, q_TV, ids_TK = policies(seed=8)
    trainer_TK, rollout_TK = logits_TV.log_softmax(dim=-1).gather(1, ids_TK), q_TV.log().gather(1, ids_TK)
    for cap in (None, 1.2):
        found_T = size_of(coefficients(trainer_TK, rollout_TK=rollout_TK, cap=cap), trainer_TK=trainer_TK)
        wanted_T = mean_score(logits_TV.softmax(dim=-1), q_TV, cap=cap).abs().sum(dim=-1)
        assert torch.allclose(found_T, wanted_T, rtol=0, atol=V * ATOL)


@pytest.mark.parametrize("cap", [None, 1.2, 0.8])
@pytest.mark.parametrize("seed", range(3))
def test_its_gradient_is_the_mean_score_under_the_rollouts_policy(cap: float | None, seed: int) -> None:
    logits_TV, q_TV, ids_TK = policies(seed=seed)
    found_TV, wanted_TV = (
        gradient(logits_TV, q_TV, ids_TK, cap=cap),
        mean_score(logits_TV.softmax(dim=-1), q_TV, cap=cap),
    )
    assert float(wanted_TV.abs().max()) > 0.01
    assert torch.allclose(found_TV, wanted_TV, rtol=0, atol=ATOL)


def test_all_words_need_no_guess_of_the_others() -> None:
    logits_TV, q_TV, _ = policies(seed=4, alike_beyond=False)
    every_TV = torch.arange(V).expand(T, V)
    wanted_TV = mean_score(logits_TV.softmax(dim=-1), q_TV, cap=1.3)
    # the rests, of which nothing is left, count as 1e-6: p is off by that part of it
    assert torch.allclose(gradient(logits_TV, q_TV, every_TV, cap=1.3), wanted_TV, rtol=0, atol=1e-6)


def test_it_is_zero_where_no_weight_is_cut() -> None:
    logits_TV, q_TV, ids_TK = policies(seed=5, apart=2.0, alike_beyond=False)
    assert not bool(gradient(logits_TV, q_TV, ids_TK, cap=1e9).any())


@pytest.mark.parametrize("cap", [None, 2.0, 1.0])
def test_it_is_zero_in_one_flow(cap: float | None) -> None:
    """Log-probs equal as float32; also where nothing is left for the other words, or less than nothing by rounding."""
    logits_TV, _, ids_TK = policies(seed=6)
    log_p_TK = (torch.linspace(1, 20, T)[:, None] * logits_TV).log_softmax(dim=-1).float().gather(1, ids_TK)
    rests_T = 1 - log_p_TK.double().exp().sum(dim=-1)
    assert bool((rests_T < 0).any()) and bool((rests_T > 1e-6).any())
    assert not bool(coefficients(log_p_TK, rollout_TK=log_p_TK, cap=cap).any())


def test_a_word_that_the_engine_cannot_sample_has_no_mass() -> None:
    logits_TV, q_TV, ids_TK = policies(seed=7)
    q_TV[:, ids_TK[0, 0]] = 0
    found_TV = gradient(logits_TV, q_TV / q_TV.sum(dim=-1, keepdim=True), ids_TK, cap=2.0)
    assert bool(found_TV.isfinite().all())


def test_the_guard_weighs_what_was_only_centered() -> None:
    tight = correction_of("score-centering").tightened()
    assert (tight.name, tight.cap, tight.reject_k3_above, tight.centers) == ("score-centering-tis", 2.0, 0.01, True)


@pytest.mark.parametrize("name", ["score-centering", "score-centering-tis"])
def test_a_loss_with_one_ratio_for_a_response_is_refused(name: str) -> None:
    refused = {loss for loss in Loss if type(correction_of(name)).conflict(loss)}
    assert refused == {Loss.GSPO, Loss.GEO_MEAN, Loss.TBPO}
    assert type(correction_of(name)).conflict(Loss.GSPO) == (
        f"`{name}` centers the score of each token, and `gspo` has one ratio for a whole response"
    )
