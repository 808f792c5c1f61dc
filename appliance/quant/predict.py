"""The mismatch to expect: two streams of final hidden states through the same head, in bands of the vocabulary.

Legend: M positions, H width, R words of a band.
    z, z'   logits of the exact and of the quantised stream, float32
    KL(p' || p) = sum_v p'_v (z'_v - z_v) - (lse z' - lse z)
The sums run along the bands in float64 with a moving maximum: no more than one band of logits is ever held.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from appliance.quant.checkpoint import Checkpoint
from appliance.quant.mismatch import measure_mismatch
from appliance.quant.profile import Predicted

_POSITIONS = 1024  # at a time


@dataclass
class _Sums:
    """Of one softmax along the bands: the maximum so far, sums of exp(z - top), of it times d, the target's z."""

    top_M: Tensor
    mass_M: Tensor
    moment_M: Tensor
    target_M: Tensor

    @property
    def lse_M(self) -> Tensor:
        return self.top_M + self.mass_M.log()

    def add(self, logits_MR: Tensor, *, difference_MR: Tensor, target_M: Tensor, start: int) -> None:
        top_M = torch.maximum(self.top_M, logits_MR.amax(dim=1).double())
        scale_M = (self.top_M - top_M).exp()
        weight_MR = (logits_MR - top_M[:, None].float()).exp_()  # the maximum is one of the logits: exact in float32
        self.mass_M = self.mass_M * scale_M + weight_MR.sum(dim=1, dtype=torch.float64)
        moment_M = weight_MR.mul_(difference_MR).sum(dim=1, dtype=torch.float64)
        self.moment_M = self.moment_M * scale_M + moment_M
        self.top_M = top_M
        inside = (target_M >= start) & (target_M < start + logits_MR.shape[1])
        self.target_M[inside] = logits_MR[inside, target_M[inside] - start].double()


def predict_mismatch(
    exact_MH: Tensor, *, quantised_MH: Tensor, target_M: Tensor, checkpoint: Checkpoint, head_name: str
) -> Predicted:
    """exact_MH, quantised_MH: BF16, after the final norm.  target_M: [M] int64, the text's next token; M > 0."""
    exact, quantised = _new(len(target_M)), _new(len(target_M))
    for start, rows_RH in checkpoint.rows(head_name):
        rows_HR = rows_RH.float().t()
        for first in range(0, len(target_M), _POSITIONS):
            part = slice(first, first + _POSITIONS)
            z_MR = exact_MH[part].float() @ rows_HR
            zq_MR = quantised_MH[part].float() @ rows_HR
            for sums, logits_MR in ((exact, z_MR), (quantised, zq_MR)):
                view = _view(sums, part)
                view.add(logits_MR, difference_MR=zq_MR - z_MR, target_M=target_M[part], start=start)
                _store(sums, part, view)
    kl_M = quantised.moment_M / quantised.mass_M - (quantised.lse_M - exact.lse_M)
    on_text = measure_mismatch(exact.target_M - exact.lse_M, rollout_T=quantised.target_M - quantised.lse_M, cap=None)
    return Predicted(
        tokens=len(target_M),
        kl=max(0.0, float(kl_M.mean())),  # rounding can leave -1e-9
        k3_kl=on_text.k3_kl,
        kl_tokens=on_text.kl,
        probs_diff_mean=on_text.probs_diff_mean,
        weight_max=on_text.weight_max,
    )


def _new(size: int) -> _Sums:
    zero = torch.zeros(size, dtype=torch.float64)
    return _Sums(torch.full_like(zero, -torch.inf), zero.clone(), zero.clone(), zero.clone())


def _view(sums: _Sums, part: slice) -> _Sums:
    return _Sums(sums.top_M[part], sums.mass_M[part], sums.moment_M[part], sums.target_M[part])


def _store(sums: _Sums, part: slice, view: _Sums) -> None:
    sums.top_M[part], sums.mass_M[part], sums.moment_M[part] = view.top_M, view.mass_M, view.moment_M
