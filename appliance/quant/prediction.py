"""The mismatch to expect of quantised rollouts: two streams of activations through the head, in bands of words.

    z, z'   logits of the exact and of the quantised stream over the temperature, float32: products with rows of the
            head, and what the model's class makes of each, such as a multiple
    KL(p' || p) = sum_v p'_v (z'_v - z_v) - (lse z' - lse z)

The sums run along the bands in float64 with a moving maximum: no more than one band of logits is ever held.

Legend: B sequences of T tokens, M positions whose next token counts, H width, R words of a band, D draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from appliance.errors import EngineError
from appliance.quant.checkpoint import StreamedModel
from appliance.quant.mismatch import measure_mismatch
from appliance.quant.profile import Predicted

_BATCH_TOKENS = 2048  # of one forward: bounds the activations inside a layer
_POSITIONS = 1024  # of logits at a time


@dataclass(frozen=True)
class TokenBatch:
    """Some sequences of the text, of like lengths."""

    tokens_BT: Tensor
    """[B, T] int64, 0 on padding."""
    valid_BT: Tensor
    """[B, T] bool, false on padding, which is at the end only."""
    counted_BT: Tensor
    """[B, T] bool: tokens whose log-probability is compared, which are those of responses."""

    @property
    def before_BT(self) -> Tensor:
        """[B, T] bool: positions whose next token is compared."""
        return torch.nn.functional.pad(self.counted_BT[:, 1:], (0, 1))


def batches_of(sequences: Sequence[Sequence[int]], *, prompt_tokens: Sequence[int] = ()) -> list[TokenBatch]:
    """Put sequences of like lengths together. What comes after a token does not change it, so padding does no harm.

    prompt_tokens: how many tokens of each sequence no response has; empty: all but the first are compared.
    """
    if not any(sequences):
        raise EngineError("there is no text to calibrate with", hint="the task's training data has no prompts")
    starts = prompt_tokens or [1] * len(sequences)
    ordered = sorted(((each, start) for each, start in zip(sequences, starts, strict=True) if each), key=_length)
    batches = []
    while ordered:
        size = max(1, _BATCH_TOKENS // len(ordered[-1][0]))
        together, ordered = ordered[-size:], ordered[:-size]
        tokens_BT = torch.zeros(len(together), len(together[-1][0]), dtype=torch.int64)
        valid_BT = torch.zeros_like(tokens_BT, dtype=torch.bool)
        counted_BT = torch.zeros_like(valid_BT)
        for row, (sequence, start) in enumerate(together):
            tokens_BT[row, : len(sequence)] = torch.tensor(sequence)
            valid_BT[row, : len(sequence)] = True
            counted_BT[row, max(1, start) : len(sequence)] = True  # no model predicts the first token
        batches.append(TokenBatch(tokens_BT, valid_BT, counted_BT))
    return batches


def _length(sequence: tuple[Sequence[int], int]) -> int:
    return len(sequence[0])


def at_counted(model: StreamedModel, stream: Sequence[Tensor], *, batches: Sequence[TokenBatch]) -> Tensor:
    """Return [M, H] after the last norm, at the positions whose next token is compared. stream: [B, T, H] of each
    batch."""
    return torch.cat(
        [model.final_norm(hidden_BTH[batch.before_BT]) for hidden_BTH, batch in zip(stream, batches, strict=True)]
    )


def targets_of(batches: Sequence[TokenBatch]) -> Tensor:
    """Return [M] int64: the tokens that are compared, in the order of `at_counted`."""
    return torch.cat([batch.tokens_BT[batch.counted_BT] for batch in batches])


def predict(
    model: StreamedModel, *, exact_MH: Tensor, quantised_MH: Tensor, target_M: Tensor, temperature: float = 1.0
) -> Predicted | None:
    """Predict the mismatch of the two streams, None where no token is compared. exact_MH, quantised_MH: as
    `at_counted`."""
    if not len(target_M):
        return None
    parts = [slice(first, first + _POSITIONS) for first in range(0, len(target_M), _POSITIONS)]
    exact, quantised = ([_Softmax(target_M[part]) for part in parts] for _ in range(2))
    for start, rows_RH in model.checkpoint.rows(model.head_name):
        rows_HR = rows_RH.float().t()
        for part, softmax, softmax_q in zip(parts, exact, quantised, strict=True):
            z_MR = model.logits(exact_MH[part].float() @ rows_HR) / temperature
            zq_MR = model.logits(quantised_MH[part].float() @ rows_HR) / temperature
            softmax.add(z_MR, difference_MR=zq_MR - z_MR, start=start)
            softmax_q.add(zq_MR, difference_MR=zq_MR - z_MR, start=start)
    pairs = zip(exact, quantised, strict=True)
    kl_M = torch.cat([q.moment_M / q.mass_M - (q.lse_M - p.lse_M) for p, q in pairs])
    on_text = measure_mismatch(
        torch.cat([each.log_prob_M for each in exact]),
        rollout_T=torch.cat([each.log_prob_M for each in quantised]),
        cap=None,
    )
    return Predicted(
        tokens=len(target_M),
        kl=max(0.0, float(kl_M.mean())),  # rounding can leave -1e-9
        k3_kl=on_text.k3_kl,
        kl_tokens=on_text.kl,
        probs_diff_mean=on_text.probs_diff_mean,
        weight_max=on_text.weight_max,
    )


def head_gradients(
    model: StreamedModel, *, exact_MH: Tensor, temperature: float, draws: int, generator: torch.Generator
) -> Tensor:
    """Return [D, M, H] float32: the gradient of log p(y) at the input of the head, for words y that are drawn from p at
    every position, D times."""
    num_positions, width = exact_MH.shape
    gradient_DMH = torch.zeros(draws, num_positions, width)
    drawn_MD = torch.rand(num_positions, draws, dtype=torch.float64, generator=generator)
    for first in range(0, num_positions, _POSITIONS):
        part = slice(first, first + _POSITIONS)
        x_MH = exact_MH[part].float()
        softmax = _Softmax(torch.zeros(len(x_MH), dtype=torch.int64))
        for start, rows_RH in model.checkpoint.rows(model.head_name):
            z_MR = model.logits(x_MH @ rows_RH.float().t()) / temperature
            softmax.add(z_MR, difference_MR=torch.zeros_like(z_MR), start=start)
        lse_M, below_M1 = softmax.lse_M, torch.zeros(len(x_MH), 1, dtype=torch.float64)
        for _, rows_RH in model.checkpoint.rows(model.head_name):
            rows = rows_RH.float()
            z_MR, slope_MR = _with_slope(model, x_MH @ rows.t())
            p_MR = (z_MR / temperature - lse_M[:, None].float()).exp_()
            gradient_DMH[:, part] -= (p_MR * slope_MR) @ rows / temperature
            mass_MR = below_M1 + p_MR.cumsum(dim=1, dtype=torch.float64)
            place_MD = torch.searchsorted(mass_MR, drawn_MD[part].contiguous(), right=True)
            is_here_MD = (place_MD < len(rows)) & (drawn_MD[part] >= below_M1)
            position, draw = is_here_MD.nonzero(as_tuple=True)
            word = place_MD[position, draw]
            gradient_DMH[draw, first + position] += slope_MR[position, word, None] * rows[word] / temperature
            below_M1 = mass_MR[:, -1:]
    return gradient_DMH


def _with_slope(model: StreamedModel, product_MR: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits of the head's products, and the derivative of each by its product, [M, R] both."""
    product_MR.requires_grad_()
    with torch.enable_grad():
        logits_MR = model.logits(product_MR)
    (slope_MR,) = torch.autograd.grad(logits_MR.sum(), product_MR)
    return logits_MR.detach(), slope_MR


class _Softmax:
    """Sums of one softmax along the bands: the maximum so far, exp(z - top), the same times d, and the target's z."""

    def __init__(self, target_M: Tensor) -> None:
        """target_M: int64, the text's next tokens."""
        self._target_M = target_M
        self._top_M = torch.full(target_M.shape, -torch.inf, dtype=torch.float64)
        self.mass_M, self.moment_M, self._logit_M = (torch.zeros_like(self._top_M) for _ in range(3))

    @property
    def lse_M(self) -> Tensor:
        return self._top_M + self.mass_M.log()

    @property
    def log_prob_M(self) -> Tensor:
        """Log-probs of the targets."""
        return self._logit_M - self.lse_M

    def add(self, logits_MR: Tensor, *, difference_MR: Tensor, start: int) -> None:
        top_M = torch.maximum(self._top_M, logits_MR.amax(dim=1).double())
        scale_M = (self._top_M - top_M).exp()
        weight_MR = (logits_MR - top_M[:, None].float()).exp_()  # the maximum is one of the logits: exact in float32
        self.mass_M = self.mass_M * scale_M + weight_MR.sum(dim=1, dtype=torch.float64)
        moment_M = weight_MR.mul_(difference_MR).sum(dim=1, dtype=torch.float64)
        self.moment_M = self.moment_M * scale_M + moment_M
        self._top_M = top_M
        inside_M = (self._target_M >= start) & (self._target_M < start + logits_MR.shape[1])
        self._logit_M[inside_M] = logits_MR[inside_M, self._target_M[inside_M] - start].double()
