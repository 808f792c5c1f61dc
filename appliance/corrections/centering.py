"""Score centering: the mean of the score under the policy that sampled is taken out of each token's gradient.

The gradient of a policy's log-probs, the score, has mean 0 under that policy: with tokens sampled from it a constant
advantage teaches nothing. Quantised rollouts are sampled from another policy q, under which the score's mean is not 0:
each token then also carries a push of the same direction, whatever was sampled, and the pushes add up to a drift. Here
that mean is computed and taken out. With p of the trainer's policy, H the words that the engine found most likely at a
token and A the token's advantage, the loss of the token gets the term

    A * sum over v in H of (m(v) - alpha p(v)) log p(v)        the bracket detached
    rest of q, of p = 1 - sum over H, at least 1e-6             rho = (rest of q) / (rest of p)
    without weights           m = q                alpha = rho
    weights min(p / q, C)     m = min(p, C q)      alpha = min(1, C rho)

Words outside of H are taken to have q = rho p. Since the score's mean under p is 0, theirs is -alpha times that of H
under p, so that H alone is needed. Where no weight is cut the term is 0 whatever q is, for the weights make the mean 0
by themselves; and it is 0 where q = p.

p is the policy that is being updated, as in the sources: of a step with several updates each has its own.

The source has 1e-6 below the rest of p alone. Here it is below both, so that rho is 1 where q = p.

Source: arXiv 2609.20807, equation 14, as NeMo-RL's guide has it (loss_fn.score_centering).  Legend: base.py; K words.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.corrections.base import REJECT_K3_ABOVE, Corrected, LossCorrection
from appliance.corrections.distributions import rest_of
from appliance.corrections.objective import Loss
from appliance.corrections.weights import Tis

if TYPE_CHECKING:
    from torch import Tensor


class ScoreCentering(LossCorrection):
    name = "score-centering"
    compared = "probabilities of the engine's most likely words"
    effect = "the mean score under the rollouts' policy is taken out of the gradient"
    centers = True

    def act(self, x_BT: Tensor, *, real_BT: Tensor) -> Corrected:
        return Corrected()

    def tightened(self) -> LossCorrection:
        """Return the same with weights: `score-centering-tis`."""
        cap = ScoreCenteringTis.usual_cap
        return ScoreCenteringTis(cap=cap, clip=self.clip, loss=self.loss, reject_k3_above=REJECT_K3_ABOVE)

    @classmethod
    def conflict(cls, loss: Loss) -> str:
        return _conflict(cls, loss)


class ScoreCenteringTis(Tis):
    name = "score-centering-tis"
    compared = "`w` of a token, and these probabilities"
    effect = "as `tis`, and the mean score that the cap leaves is taken out"
    source = "the cap of tis"
    centers = True

    @classmethod
    def conflict(cls, loss: Loss) -> str:
        return _conflict(cls, loss)


def _conflict(method: type[LossCorrection], loss: Loss) -> str:
    if loss.spec.of_sequences or loss.spec.weighs_responses:
        return f"`{method.name}` centers the score of each token, and `{loss}` has one ratio for a whole response"
    return ""


def coefficients(trainer_TK: Tensor, *, rollout_TK: Tensor, cap: float | None) -> Tensor:
    """Return [T, K] float64, detached: the factor of each word's log-prob, m - alpha p.

    trainer_TK, rollout_TK: log-probs of the engine's most likely words, nats, after temperature; -inf for a word that
    the engine cannot sample.  cap: of the importance weights; None: there are none.
    """
    trainer_TK, rollout_TK = trainer_TK.detach().double(), rollout_TK.detach().double()
    p_TK, m_TK = trainer_TK.exp(), rollout_TK.exp()
    alpha_T = rest_of(rollout_TK) / rest_of(trainer_TK)
    if cap is not None:
        m_TK, alpha_T = p_TK.minimum(cap * m_TK), (cap * alpha_T).clamp(max=1)
    return m_TK - alpha_T.unsqueeze(-1) * p_TK


def size_of(coefficient_TK: Tensor, *, trainer_TK: Tensor) -> Tensor:
    """Return [T] float64: how much is taken out, the sum over the whole vocabulary of the mean score's sizes with
    respect to the logits. Without weights that is the sum of |q - p| over the K words and the rest.

    The coefficients' own sizes do not say it: where little is left for other words alpha may be any number, and a
    multiple of p has no gradient but there.
    """
    p_TK, whole_T1 = trainer_TK.detach().double().exp(), coefficient_TK.sum(dim=-1, keepdim=True)
    of_words_T = (coefficient_TK - whole_T1 * p_TK).abs().sum(dim=-1)
    return of_words_T + whole_T1.squeeze(-1).abs() * rest_of(trainer_TK.detach())
