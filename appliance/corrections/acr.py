"""ACR, adaptive clipping range: `tis`, with a wider upper clip bound where a weight was cut.

R = p_theta / p_trainer of a token, w = p_trainer / p_rollout, A its advantage, C the cap, e the clip range. To truncate
w at C is to replace p_rollout by max(p_rollout, p_trainer / C); with r = min(1, C / w) the objective is

    min(w, C) * min(R * A, clip(R, 1 - e_low, (1 + e_high) / r) * A)

Only the upper bound moves, and only on truncated tokens. Where the source leaves room: a negative advantage keeps
verl's dual clip, which the source does not mention, and the lower bound stays.

Source: QuRL, arXiv 2602.13953.  Legend: base.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from appliance.corrections.base import Corrected, Correction, token_weights

if TYPE_CHECKING:
    from torch import Tensor


class Acr(Correction):
    name = "acr"
    compared = "`w` of a token"
    effect = "as `tis`; where `w` was cut, the upper clip bound `1 + clip_high` is multiplied by `w / cap`"
    usual_cap = 2.0
    source = "the cap of tis"
    cuts_tokens = True
    clips = True

    def act(self, x_BT: Tensor, *, real_BT: Tensor) -> Corrected:
        w_BT = token_weights(x_BT)
        return Corrected(
            weights_BT=w_BT.clamp(max=self.cap),
            acted_BT=w_BT > self.cap,
            lower_BT=w_BT.new_full(w_BT.shape, 1 - self.clip.low),
            upper_BT=(1 + self.clip.high) * (w_BT / self.cap).clamp(min=1),
        )

    def count(self, found: Corrected, *, real_BT: Tensor) -> dict[str, float]:
        widened_BT = found.kept_BT & (found.upper_BT > 1 + self.clip.high)  # what the guard has dropped is not
        widened = {"widened": int(widened_BT.sum()), "upper": float(found.upper_BT[widened_BT].sum())}
        return super().count(found, real_BT=real_BT) | widened

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float | None]:
        """`acr_widened_fraction`: of the tokens. `acr_bound_mean`: over those that were widened, None without any."""
        mean = sums["upper"] / sums["widened"] if sums["widened"] else None
        share = sums["widened"] / max(1, sums["tokens"])
        return super().metrics(sums) | {"acr_widened_fraction": share, "acr_bound_mean": mean}
