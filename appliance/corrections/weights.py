"""The published corrections: none, those that weight each token's loss, and those that drop a sequence whole.

ACR (adaptive clipping range) is `tis` with a wider upper clip bound where a weight was cut. R = p_theta / p_trainer of
a token, w = p_trainer / p_rollout, A its advantage, C the cap, e the clip range. To truncate w at C is to replace
p_rollout by max(p_rollout, p_trainer / C); with r = min(1, C / w) the objective is

    min(w, C) * min(R * A, clip(R, 1 - e_low, (1 + e_high) / r) * A)

Only the upper bound moves, and only on truncated tokens. Where the source leaves room: a negative advantage keeps
verl's dual clip, which the source does not mention, and the lower bound stays.

Sources: Yao et al. 2025 (truncated importance sampling); QuRL, arXiv 2602.13953 (ACR); QaRL, arXiv 2604.07853 (the
geometric mean as a weight); verl 0.9.1,
trainer/ppo/rollout_corr_helper.py (the others), whose k1 is log(p_rollout / p_trainer), -x: bounds here are of w.
Legend: base.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from appliance.corrections.base import (
    CLAMP,
    REJECT_K3_ABOVE,
    Corrected,
    LossCorrection,
    mean_k3,
    tighten_limit,
    token_weights,
)
from appliance.corrections.objective import ClipRange
from appliance.finding import Finding, fault

if TYPE_CHECKING:
    from torch import Tensor

MAX_K3 = 1.0  # nats per token; a sequence this far away is another policy's


class NoCorrection(LossCorrection):
    name = "none"
    effect = "nothing"

    def act(self, x_BT: Tensor, *, real_BT: Tensor) -> Corrected:
        return Corrected()

    def tightened(self) -> LossCorrection:
        """Return weights as `tis` has them, or those of `tis-geometric` where a weight acts on a whole response."""
        method = TisGeometric if self.loss.spec.weighs_responses else Tis
        return method(cap=method.usual_cap, clip=self.clip, loss=self.loss, reject_k3_above=REJECT_K3_ABOVE)

    @property
    def text(self) -> str:
        return "no correction"


class Tis(LossCorrection):
    name = "tis"
    compared = "`w` of a token"
    effect = "the loss is weighted by `min(w, cap)`"
    usual_cap = 2.0
    source = "the cap in most published runs"
    cuts_tokens = True
    of_tokens = True

    def act(self, x_BT: Tensor, *, real_BT: Tensor) -> Corrected:
        w_BT = token_weights(x_BT)
        return Corrected(weights_BT=w_BT.clamp(max=self.cap), acted_BT=w_BT > self.cap)


class Acr(Tis):
    name = "acr"
    effect = "as `tis`; where `w` was cut, the upper clip bound `1 + clip_high` is multiplied by `w / cap`"
    source = "the cap of tis"
    clips = True

    def act(self, x_BT: Tensor, *, real_BT: Tensor) -> Corrected:
        w_BT = token_weights(x_BT)
        return Corrected(
            weights_BT=w_BT.clamp(max=self.cap),
            acted_BT=w_BT > self.cap,
            lower_BT=w_BT.new_full(w_BT.shape, 1 - self.clip.low),
            upper_BT=(1 + self.clip.high) * (w_BT / self.cap).clamp(min=1),
        )

    def count(self, corrected: Corrected, *, real_BT: Tensor) -> dict[str, float]:
        widened_BT = corrected.kept_BT & (corrected.upper_BT > 1 + self.clip.high)  # what the guard has dropped is not
        widened = {"widened": int(widened_BT.sum()), "upper": float(corrected.upper_BT[widened_BT].sum())}
        return super().count(corrected, real_BT=real_BT) | widened

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float | None]:
        """Add `acr_widened_fraction`: of the tokens. `acr_bound_mean`: over those that were widened, None without
        any."""
        mean = sums["upper"] / sums["widened"] if sums["widened"] else None
        share = sums["widened"] / max(1, sums["tokens"])
        return super().metrics(sums) | {"acr_widened_fraction": share, "acr_bound_mean": mean}


class TisSequence(LossCorrection):
    name = "tis-sequence"
    compared = "product of a sequence's `w`"
    effect = "every token of it is weighted by `min(product, cap)`"
    usual_cap = 2.0
    source = "published caps of a whole sequence are 2 to 10"

    def act(self, x_BT: Tensor, *, real_BT: Tensor) -> Corrected:
        product_BT = token_weights(x_BT.sum(dim=-1, keepdim=True)).expand_as(x_BT)
        return Corrected(weights_BT=product_BT.clamp(max=self.cap), acted_BT=product_BT > self.cap)


class TisGeometric(LossCorrection):
    name = "tis-geometric"
    compared = "geometric mean of a sequence's `w`"
    effect = "every token of it is weighted by `min(mean, cap)`"
    usual_cap = 2.0
    source = "the cap of TBPO's weight"

    def act(self, x_BT: Tensor, *, real_BT: Tensor) -> Corrected:
        mean_B1 = x_BT.sum(dim=-1, keepdim=True) / real_BT.sum(dim=-1, keepdim=True).clamp(min=1)
        mean_BT = token_weights(mean_B1).expand_as(x_BT)
        return Corrected(weights_BT=mean_BT.clamp(max=self.cap), acted_BT=mean_BT > self.cap)


class IcePop(LossCorrection):
    name = "icepop"
    compared = "`w` of a token"
    effect = "weighted by `w` inside, 0 outside"
    usual_bounds = (0.5, 5.0)
    source = "the bounds of IcePop"
    of_tokens = True

    def act(self, x_BT: Tensor, *, real_BT: Tensor) -> Corrected:
        x_BT = x_BT.clamp(-CLAMP, CLAMP)
        low, high = map(math.log, self.bounds)
        outside_BT = (x_BT < low) | (x_BT > high)
        return Corrected(weights_BT=x_BT.exp().masked_fill(outside_BT, 0.0), acted_BT=outside_BT)

    def tightened(self) -> LossCorrection:
        """Take from the upper bound half of what it has above 1, as from a cap."""
        return replace(super().tightened(), bounds=(self.bounds[0], tighten_limit(self.bounds[1])))


class SequenceMask(LossCorrection):
    name = "sequence-mask"
    compared = "product of a sequence's `w`"
    effect = "the sequence is dropped outside"
    usual_bounds = (0.5, 2.0)
    source = "verl's bounds for a product"

    def log_statistic(self, x_BT: Tensor, *, real_BT: Tensor) -> Tensor:
        """Return [B], the log of what is compared with the bounds; 0 for a sequence without tokens."""
        return x_BT.clamp(-CLAMP, CLAMP).sum(dim=-1)

    def act(self, x_BT: Tensor, *, real_BT: Tensor) -> Corrected:
        low, high = map(math.log, self.bounds)
        log_B = self.log_statistic(x_BT, real_BT=real_BT)
        return _dropped((log_B < low) | (log_B > high), real_BT=real_BT)


class GeometricMask(SequenceMask):
    name = "geometric-mask"
    compared = "geometric mean of a sequence's `w`"
    usual_bounds = (0.999, 1.001)
    source = "verl's bounds for a geometric mean"

    def log_statistic(self, x_BT: Tensor, *, real_BT: Tensor) -> Tensor:
        return super().log_statistic(x_BT, real_BT=real_BT) / real_BT.sum(dim=-1).clamp(min=1)


class K3Reject(LossCorrection):
    name = "k3-reject"
    compared = "mean of `exp(x) - 1 - x` over a sequence, nats"
    effect = "the sequence is dropped above"
    usual_cap = REJECT_K3_ABOVE
    source = "verl's limit for a sequence's k3-KL, nats"

    def act(self, x_BT: Tensor, *, real_BT: Tensor) -> Corrected:
        return _dropped(mean_k3(x_BT, real_BT=real_BT) > self.cap, real_BT=real_BT)

    def tightened(self) -> LossCorrection:
        """Halve the limit above which sequences are dropped."""
        return replace(self, cap=self.cap / 2)

    @classmethod
    def refusals(cls, *, cap: float | None, bounds: tuple[float, ...] | None, clip: ClipRange) -> Iterator[Finding]:
        yield from super().refusals(cap=cap, bounds=bounds, clip=clip)
        if cap is not None and cap > MAX_K3:
            message = f"the cap of `{cls.name}` is a sequence's k3-KL in nats, and {cap:g} rejects next to nothing"
            yield fault(("correction.cap",), message, f"give one such as {cls.usual_cap:g}, or null")


def _dropped(goes_B: Tensor, *, real_BT: Tensor) -> Corrected:
    goes_BT = goes_B.unsqueeze(-1) & real_BT
    return Corrected(kept_BT=~goes_BT, acted_BT=goes_BT)
