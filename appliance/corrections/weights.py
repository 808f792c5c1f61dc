"""No correction, and those that weigh each token's loss by an importance weight.

Sources: Yao et al. 2025 (truncated importance sampling), verl 0.9.1, trainer/ppo/rollout_corr_helper.py (the others).
Legend: base.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from appliance.corrections.base import CLAMP, REJECT_K3_ABOVE, Corrected, Correction, tighter, token_weights

if TYPE_CHECKING:
    from torch import Tensor


class NoCorrection(Correction):
    name = "none"
    effect = "nothing"

    def act(self, x_BT: Tensor, *, real_BT: Tensor) -> Corrected:
        return Corrected()

    def tightened(self) -> Correction:
        """Weighed as `tis` does."""
        return Tis(cap=Tis.usual_cap, clip=self.clip, reject_k3_above=REJECT_K3_ABOVE)

    @property
    def text(self) -> str:
        return "no correction"


class Tis(Correction):
    name = "tis"
    compared = "`w` of a token"
    effect = "the loss is weighed by `min(w, cap)`"
    usual_cap = 2.0
    source = "the cap in most published runs"
    cuts_tokens = True

    def act(self, x_BT: Tensor, *, real_BT: Tensor) -> Corrected:
        w_BT = token_weights(x_BT)
        return Corrected(weights_BT=w_BT.clamp(max=self.cap), acted_BT=w_BT > self.cap)


class TisSequence(Correction):
    name = "tis-sequence"
    compared = "product of a sequence's `w`"
    effect = "every token of it is weighed by `min(product, cap)`"
    usual_cap = 2.0
    source = "published caps of a whole sequence are 2 to 10"

    def act(self, x_BT: Tensor, *, real_BT: Tensor) -> Corrected:
        product_BT = token_weights(x_BT.sum(dim=-1, keepdim=True)).expand_as(x_BT)
        return Corrected(weights_BT=product_BT.clamp(max=self.cap), acted_BT=product_BT > self.cap)


class IcePop(Correction):
    name = "icepop"
    compared = "`w` of a token"
    effect = "weighed by `w` inside, 0 outside"
    usual_bounds = (0.5, 5.0)
    source = "the bounds of IcePop"

    def act(self, x_BT: Tensor, *, real_BT: Tensor) -> Corrected:
        x_BT = x_BT.clamp(-CLAMP, CLAMP)
        low, high = map(math.log, self.bounds)
        outside_BT = (x_BT < low) | (x_BT > high)
        return Corrected(weights_BT=x_BT.exp().masked_fill(outside_BT, 0.0), acted_BT=outside_BT)

    def tightened(self) -> Correction:
        """The upper bound loses half of what it has above 1, as a cap does."""
        return replace(super().tightened(), bounds=(self.bounds[0], tighter(self.bounds[1])))
