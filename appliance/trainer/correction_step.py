"""The correction of one step on the driver: reads the batch as the loss will get it, and writes what verl cannot."""

from __future__ import annotations

import torch
import transfer_queue
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta

from appliance.plan.model import CorrectionPlan
from appliance.quant.correction import ClipRange, CorrectionMethod
from appliance.trainer.corrected import CorrectionStep, LossBatch, adaptive_share, adaptive_weights, check_correction
from appliance.trainer.tightened import tightened_fields

WEIGHTS = "rollout_is_weights"  # by this name verl's actor finds weights in a batch


def correct_step(
    batch: KVBatchMeta, *, plan: CorrectionPlan, planned: CorrectionPlan | None = None, clip: ClipRange | None = None
) -> tuple[KVBatchMeta, CorrectionStep]:
    """The batch for the loss, after verl's part of the correction. Raises as check_correction.

    plan: what corrects this step.  planned: what verl was told, where that is another one by now.  clip: see `correct`.
    """
    share = None
    if plan.method is CorrectionMethod.ADAPTIVE:
        found = _read(batch)
        share = adaptive_share(found, plan=plan)
        batch = _write(batch, {WEIGHTS: adaptive_weights(found, plan=plan, share=share)})
    if planned is not None and plan != planned:
        batch = _write(batch, tightened_fields(_read(batch), plan=plan, share=share))
    return batch, check_correction(_read(batch), plan=plan, share=share, clip=clip)


def _read(batch: KVBatchMeta) -> LossBatch:
    """`loss_mask` is the mask before anything was dropped."""
    fields = ["old_log_probs", "rollout_log_probs", "loss_mask", "response_mask", "advantages"]
    weighed = WEIGHTS in (batch.fields or ())
    select = [*fields, WEIGHTS] if weighed else fields
    data = transfer_queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=select)
    trainer, rollout, real, kept, advantages = (data[name].unbind() for name in fields)
    weights = data[WEIGHTS].unbind() if weighed else None
    return LossBatch(trainer, rollout, real, kept, advantages, weights)


def _write(batch: KVBatchMeta, fields: dict[str, tuple[Tensor, ...]]) -> KVBatchMeta:
    """fields: a row of tokens per sequence."""
    nested = {name: torch.nested.as_nested_tensor(list(rows), layout=torch.jagged) for name, rows in fields.items()}
    values = TensorDict(nested, batch_size=len(batch))
    return transfer_queue.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=values)
