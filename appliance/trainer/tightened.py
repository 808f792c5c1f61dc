"""The correction while the governor has it tightened, and how that reaches the loss.

What is tightened, by method: the cap of `tis`, `acr`, `adaptive`, `tis-sequence` and `calibrated-clipping` and the
upper bound of `icepop` lose half of what they have above 1; `k3-reject` drops above half of its limit; `none` weighs as
`tis`. With all of them but `k3-reject`, sequences with a large mean k3 are dropped as well. The bounds of the two masks
stay.

How a value that changes in the middle of a run travels: verl's configuration is frozen in every worker, and a policy
loss sees nothing of the driver but the fields of its batch. So the driver computes what the tightened method asks for
and writes it over verl's weights and mask, in the fields that the loss reads anyway. No worker has to be told, and
mini-batches, micro-batches and ranks agree by themselves.

`acr` truncates in the loss, whose cap C0 is the plan's. It uses w only as min(w, C0) and max(1, w / C0), and it is
linear in the advantages, so a smaller cap C is exactly weights times C0 / C with advantages times C / C0:

    min(w C0 / C, C0) * (A C / C0) = min(w, C) * A          max(1, (w C0 / C) / C0) = max(1, w / C)
"""

from __future__ import annotations

import torch
from torch import Tensor

from appliance.guard.ladder import Measures, tighter_cap
from appliance.plan.model import CorrectionPlan
from appliance.quant.correction import CorrectionMethod
from appliance.trainer.corrected import LossBatch, corrected_rows


def tightened(plan: CorrectionPlan, *, measures: Measures) -> CorrectionPlan:
    """What corrects the loss while the governor stands where it asks for `measures`."""
    if measures.reject_k3_above is None:
        return plan
    drops = plan.replace(reject_k3_above=measures.reject_k3_above)
    match plan.method:
        case CorrectionMethod.NONE:
            return drops.replace(method=CorrectionMethod.TIS, cap=measures.cap)
        case CorrectionMethod.TIS | CorrectionMethod.ADAPTIVE:
            return drops.replace(cap=measures.cap)
        case CorrectionMethod.ACR:
            return drops.replace(cap=measures.cap, loss_cap=plan.cap)
        case CorrectionMethod.TIS_SEQUENCE | CorrectionMethod.CALIBRATED_CLIPPING if plan.cap is not None:
            return drops.replace(cap=tighter_cap(plan.cap))
        case CorrectionMethod.ICEPOP if plan.bounds is not None:
            return drops.replace(bounds=(plan.bounds[0], tighter_cap(plan.bounds[1])))
        case CorrectionMethod.K3_REJECT if plan.cap is not None:
            return plan.replace(cap=plan.cap / 2)
    return drops


def tightened_fields(batch: LossBatch, *, plan: CorrectionPlan, share: float | None) -> dict[str, tuple[Tensor, ...]]:
    """Fields of the batch, a row per sequence, in place of those that verl wrote by the plan without tightening."""
    weights, kept = corrected_rows(batch, plan=plan, share=share)
    fields = {"response_mask": tuple(row.to(old.dtype) for row, old in zip(kept, batch.kept, strict=True))}
    if weights is not None:
        fields["rollout_is_weights"] = weights
    if plan.loss_cap is not None and plan.cap is not None:
        smaller = plan.cap / plan.loss_cap
        fields["advantages"] = tuple(torch.mul(row, smaller) for row in batch.advantages)
    return fields
