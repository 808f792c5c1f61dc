"""Smoothing's factors: by SmoothQuant's rule, and for INT8 behind a norm better ones, found from there.

A factor f_k divides channel k of an activation and multiplies column k of all that reads it. In INT8 a token's codes
have the step a_m / 127 and a row's b_n / 127, with

    a_m = max_k |x_mk| / f_k        b_n = max_k |w_nk| f_k

and rounding is off by half a step at most, by step^2 / 12 in the mean square. So the squared error of all outputs of
all tokens is about E / (12 * 127^2), with

    E = sum_m a_m^2 * sum_k f_k^2 |w_k|^2  +  sum_n b_n^2 * sum_k |x_k|^2 / f_k^2

where w_k is a column, and x_k a channel over all tokens. SmoothQuant's rule knows the largest values alone and balances
each channel by itself; E knows which channels are the largest of a token or of a row at all. `refine` starts from the
rule and doubles or halves the factors that lower E most, many at a time, until none does: E halves, and so does the
error that is measured (docs/results/smollm2.md, which also says why it stays with what a norm feeds).

Legend: M tokens, N output and K input channels, R rows of either.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from appliance.quant.profile import MAX_EXPONENT, power_of_two

_ROWS = 256  # of tokens and of weights, from which the steps' sizes are judged: sums over more change little
_ROUNDS = 64
_LEAST_GAIN = 1e-4  # of E, in a round
_REACH = 3  # doublings from the rule's factor: other text has other largest values


def by_rule(activation_K: Tensor, *, weight_K: Tensor, strength: float) -> Tensor:
    """Return the factors of SmoothQuant's rule, [K] float32, powers of two with median 1 (of the channels that have
    both ranges); 1 where a channel has no range. activation_K, weight_K: >= 0, the largest |x| and |w| of each channel.
    strength: alpha, in (0, 1].

    a_k^alpha / w_k^(1 - alpha), Xiao et al. 2023, SmoothQuant.
    """
    has_both_K = (activation_K > 0) & (weight_K > 0)
    ones_K = torch.ones_like(activation_K, dtype=torch.float64)
    if not bool(has_both_K.any()):
        return ones_K.float()
    log_K = strength * activation_K.double().log2() - (1 - strength) * weight_K.double().log2()
    log_K = torch.where(has_both_K, log_K - log_K[has_both_K].median(), torch.zeros_like(log_K))
    return power_of_two(torch.exp2(log_K))


def refine(scale_K: Tensor, *, x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    """Improve the factors: return [K] float32, powers of two, with which E is no larger than with `scale_K`. x_MK,
    weight_NK: without smoothing, of any float type, with two channels at least; of several matrices the rows of all."""
    error = _Error.between(x_MK, weight_NK=weight_NK)
    start_K = log_K = scale_K.double().log2()
    has_both_K = (error.x_square_K > 0) & (error.w_square_K > 0)
    best, share = error.total(log_K), 0.25
    for _ in range(_ROUNDS):
        doubled_K, halved_K = error.totals(log_K, by=1), error.totals(log_K, by=-1)
        by_K = torch.where(doubled_K < halved_K, 1.0, -1.0).double()
        in_reach_K = ((log_K + by_K - start_K).abs() <= _REACH) & ((log_K + by_K).abs() <= MAX_EXPONENT)
        change_K = torch.where(has_both_K & in_reach_K, torch.minimum(doubled_K, halved_K) - best, 0.0)
        order, before = change_K.argsort()[: int((change_K < 0).sum())], best
        order = order[: max(1, int(len(order) * share))]
        while len(order):
            trial_K = log_K.index_add(0, order, by_K[order])
            if (total := error.total(trial_K)) < best:
                log_K, best, share = trial_K, total, min(1.0, 1.5 * share)
                break
            order, share = order[: len(order) // 2], share / 2
        if before - best <= _LEAST_GAIN * before:
            break
    return torch.exp2(log_K).float()


@dataclass(frozen=True)
class _Error:
    """E of any factors. Sums are of all tokens and rows, the largest values of some of them."""

    x_RK: Tensor
    """Magnitudes of some tokens, float32."""
    w_RK: Tensor
    """Magnitudes of some rows of the weights, float32."""
    tokens: float
    """Number of tokens that each row of `x_RK` represents."""
    rows: float
    """Number of rows of the weights that each row of `w_RK` represents."""
    x_square_K: Tensor
    """|x_k|^2, float64."""
    w_square_K: Tensor
    """|w_k|^2, float64."""

    @classmethod
    def between(cls, x_MK: Tensor, *, weight_NK: Tensor) -> _Error:
        x_RK, w_RK = (values[:: -(-len(values) // _ROWS)].float().abs() for values in (x_MK, weight_NK))
        squares = (values.double().square().sum(dim=0) for values in (x_MK, weight_NK))
        return cls(x_RK, w_RK, len(x_MK) / len(x_RK), len(weight_NK) / len(w_RK), *squares)

    def total(self, log_K: Tensor) -> float:
        """E. log_K: the factors' logarithms to the base 2, float64."""
        scale_K = torch.exp2(log_K)
        of_tokens, of_rows = (values.amax(dim=1).double().square().sum() for values in self._steps(scale_K))
        activations = self.tokens * of_tokens * (self.w_square_K * scale_K.square()).sum()
        return float(activations + self.rows * of_rows * (self.x_square_K / scale_K.square()).sum())

    def totals(self, log_K: Tensor, *, by: int) -> Tensor:
        """[K] float64: E where the factor of channel k alone is multiplied by 2^by."""
        scale_K, factor = torch.exp2(log_K), 2.0**by
        token_RK, row_RK = self._steps(scale_K)
        w_K, x_K = self.w_square_K * scale_K.square(), self.x_square_K / scale_K.square()
        w_total_K, x_total_K = w_K.sum() + w_K * (factor**2 - 1), x_K.sum() + x_K * (factor**-2 - 1)
        activations_K = self.tokens * _squares(token_RK, changed_RK=token_RK / factor) * w_total_K
        return activations_K + self.rows * _squares(row_RK, changed_RK=row_RK * factor) * x_total_K

    def _steps(self, scale_K: Tensor) -> tuple[Tensor, Tensor]:
        """Return the magnitudes with the factors applied, of tokens and of rows: the largest one of each row is 127
        steps."""
        return self.x_RK / scale_K.float(), self.w_RK * scale_K.float()


def _squares(magnitude_RK: Tensor, *, changed_RK: Tensor) -> Tensor:
    """Return [K] float64: the sum over rows of the largest magnitude's square, where channel k alone is as in
    `changed_RK`."""
    largest_R2, place_R2 = magnitude_RK.topk(2, dim=1)
    others_RK = largest_R2[:, :1].expand_as(magnitude_RK).clone()
    others_RK.scatter_(1, place_R2[:, :1], largest_R2[:, 1:])
    return torch.maximum(others_RK, changed_RK).double().square().sum(dim=0)
