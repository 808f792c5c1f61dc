"""Two policies compared by whole distributions, over the words that the engine found most likely at a token.

A sampled token's log-prob says nothing of the other words: policies that differ can agree on it. So at each generated
token the engine also reports its k most likely words with their log-probs, and the trainer computes its own log-probs
of the same words. All other words count as one further word, whose probability is what is left of 1.

The divergence of a token, with q of the rollout policy and p of the trainer's, is the sum over these k + 1 words of

    q log(q / p) - q + p  =  q (expm1(-d) + d)        d = log q - log p

The two last terms of each word add up to 0 over all words. They make every summand at least 0, and 0 only where q = p,
so that rounding cannot hide a difference, or make a divergence negative. Log-probs are float32, with an error of up to
2^-24 of their size: what is left of 1 is known to about 1e-7, and is taken as at least LEAST_REST. Putting words
together never makes a divergence larger: this one is a lower bound of that of the whole distributions. No torch is
imported: a tensor brings its methods along.

Legend: T tokens, K words.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

LEAST_REST = 1e-6  # probability; of NeMo-RL's score centering


def rest_of(log_probs_TK: Tensor) -> Tensor:
    """Return [T] float64: the probability of all other words, at least LEAST_REST."""
    return (1 - log_probs_TK.double().exp().sum(dim=-1)).clamp(min=LEAST_REST)


def divergence(rollout_TK: Tensor, *, trainer_TK: Tensor) -> Tensor:
    """Return [T] float32, nats, detached: the divergence of the rollouts' policy from the trainer's. Both arguments:
    log-probs of the same words, whose probability may be 0 in the rollouts'."""
    rollout_TK, trainer_TK = rollout_TK.detach().double(), trainer_TK.detach().double()
    terms_T = _terms(rest_of(rollout_TK).log(), rest_of(trainer_TK).log())
    return (_terms(rollout_TK, trainer_TK).sum(dim=-1) + terms_T).float()


def _terms(log_q: Tensor, log_p: Tensor) -> Tensor:
    """Return q log(q / p) - q + p of each word."""
    d = log_q - log_p
    return (log_q.exp() * (d.neg().expm1() + d)).where(log_q.isfinite(), log_p.exp())
