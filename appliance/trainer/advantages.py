"""The advantage that verl's trainer cannot compute: `gdpo` reads each reward by itself, and verl's trainer hands its
estimators their sum. The formula is verl's; its inputs are what the driver graded.

Legend: B sequences, T response positions of the longest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import transfer_queue
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.core_algos import compute_gdpo_outcome_advantage


def gdpo(
    parts: Mapping[str, Sequence[float]], *, weights: Mapping[str, float], uids: Sequence[str], mask_BT: Tensor
) -> Tensor:
    """[B, T] float32: with r_k the k-th reward of a response, of its group's mean m_k and deviation s_k, the sum over k
    of weight_k * (r_k - m_k) / (s_k + 1e-6), then of all the step's tokens made mean 0 and variance 1; 0 where the mask
    is. parts: by reward, of each response, NaN where its grade was lost: it is left out of every mean, deviation and
    variance, and has 0, as has one that is alone with its grade.  uids: of its prompt.  mask_BT: tokens that count.

    Source: GDPO, arXiv 2601.05242; verl 0.9.1, `gdpo`.
    """
    names, uid_B, real_BT = list(parts), np.array(uids, dtype=object), mask_BT.float()
    graded = Counter(uid for uid, *values in zip(uids, *parts.values(), strict=True) if np.isfinite(values).all())
    kept_B = np.isfinite(list(parts.values())).all(axis=0) & np.array([graded[uid] > 1 for uid in uids])
    advantages_BT = torch.zeros_like(real_BT)
    if not kept_B.any():
        return advantages_BT
    advantages_BT[kept_B], _ = compute_gdpo_outcome_advantage(
        real_BT[kept_B],  # of rewards that are given one by one it takes the device
        real_BT[kept_B],
        uid_B[kept_B],
        config={"gdpo_reward_keys": names, "gdpo_reward_weights": [weights[name] for name in names]},  # type: ignore[arg-type]
        non_tensor_batch={name: np.array(parts[name])[kept_B] for name in names},
        batch={"prompts": real_BT.new_zeros(int(kept_B.sum()), 0), "attention_mask": mask_BT[kept_B].long()},
    )
    return advantages_BT


def with_gdpo(batch: KVBatchMeta, *, parts: Mapping[str, Sequence[float]], weights: Mapping[str, float]) -> KVBatchMeta:
    """The batch with these advantages. parts: in the order of its keys."""
    data = transfer_queue.kv_batch_get(
        keys=batch.keys, partition_id=batch.partition_id, select_fields=["response_mask"]
    )
    rows = data["response_mask"].unbind()
    uids = [key.rsplit("_", 2)[0] for key in batch.keys]
    found_BT = gdpo(parts, weights=weights, uids=uids, mask_BT=pad_sequence(list(rows), batch_first=True))
    cut = [found[: len(row)] for found, row in zip(found_BT, rows, strict=True)]
    values = torch.nested.as_nested_tensor(cut, layout=torch.jagged)
    fields = TensorDict({"advantages": values, "returns": values}, batch_size=len(batch))
    return transfer_queue.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)
