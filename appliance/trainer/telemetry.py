"""What a step's batch says beyond its means: mismatch by length, and prompts whose samples are all the same.

`metrics.jsonl` gets it under `mismatch_*` and `equal_group_fraction`, beside the contract's keys.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from appliance.quant.mismatch import Mismatch, measure_mismatch
from appliance.quant.mismatch_by_length import MismatchByLength, measure_by_length


@dataclass(frozen=True)
class StepTelemetry:
    """equal_group_fraction: prompts of which every sample is the same sequence of tokens, 0..1.

    nonfinite_fraction: tokens of which a log-probability is not finite, 0..1. Where there are some, no number of
    `mismatch` is finite either, and in `by_length` they count as equal.  seconds: that measuring took.
    """

    mismatch: Mismatch
    by_length: MismatchByLength
    equal_group_fraction: float
    nonfinite_fraction: float = 0.0
    seconds: float = 0.0

    def metrics(self) -> dict[str, Any]:
        """JSON values. `mismatch_by_length`: an object per bucket, in the words of LengthBucket."""
        whole = self.by_length.whole
        return {
            "equal_group_fraction": self.equal_group_fraction,
            "nonfinite_fraction": self.nonfinite_fraction,
            "mismatch_chi2": whole.chi2,
            "mismatch_ppl_gap": whole.ppl_gap,
            "mismatch_largest_nats": whole.largest.nats,
            "mismatch_largest_sequence": whole.largest.sequence,
            "mismatch_largest_position": whole.largest.position,
            "mismatch_by_length": [dataclasses.asdict(bucket) for bucket in self.by_length.buckets],
        }


def measure_batch(
    trainer: Iterable[Tensor],
    *,
    rollout: Iterable[Tensor],
    real: Iterable[Tensor],
    responses: Iterable[Tensor],
    prompts: Iterable[str],
    cap: float | None,
) -> StepTelemetry:
    """One row of tokens per sequence in each; prompts: the prompt's name per sequence.

    trainer, rollout: log-probabilities in nats.  real: the tokens that count.  cap: of a token's weight, > 0.
    A sequence without a token that counts is padding of the batch.  A token without two finite log-probs makes the
    whole mismatch not finite.
    """
    masks = [row.bool() for row in real]
    trainer_T = torch.cat([row[mask] for row, mask in zip(trainer, masks, strict=True)])
    rollout_T = torch.cat([row[mask] for row, mask in zip(rollout, masks, strict=True)])
    broken = float((~finite_pairs(trainer_T, rollout_T)).double().mean())
    if broken:
        trainer_T, rollout_T = with_finite_pairs(trainer_T, rollout_T)
    length_S = torch.tensor([int(mask.sum()) for mask in masks])
    counted = [int(length) > 0 for length in length_S]
    mismatch = measure_mismatch(trainer_T, rollout_T=rollout_T, cap=cap)
    return StepTelemetry(
        mismatch=Mismatch(**dict.fromkeys(dataclasses.asdict(mismatch), math.nan)) if broken else mismatch,
        by_length=measure_by_length(trainer_T, rollout_T=rollout_T, length_S=length_S, cap=cap),
        equal_group_fraction=equal_groups(
            (each for each, counts in zip(responses, counted, strict=True) if counts),
            prompts=(each for each, counts in zip(prompts, counted, strict=True) if counts),
        ),
        nonfinite_fraction=broken,
    )


def finite_pairs(trainer: Tensor, rollout: Tensor) -> Tensor:
    """Where both log-probs are finite, and the weight that they make is. As measure_mismatch asks for it."""
    x = trainer.double() - rollout.double()
    return torch.isfinite(x) & torch.isfinite(x.exp())


def with_finite_pairs(trainer: Tensor, rollout: Tensor) -> tuple[Tensor, Tensor]:
    """Both at 0 nats where one of them is not finite: nothing may be learned from such a step, but its numbers must
    pass through what follows."""
    good = finite_pairs(trainer, rollout)
    return trainer.where(good, 0.0), rollout.where(good, 0.0)


def equal_groups(responses: Iterable[Tensor], *, prompts: Iterable[str]) -> float:
    """Share of prompts with more than one sample of which all are the same; 0 when there is no such prompt."""
    kinds: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    samples: dict[str, int] = defaultdict(int)
    for prompt, response in zip(prompts, responses, strict=True):
        kinds[prompt].add(tuple(response.tolist()))
        samples[prompt] += 1
    groups = [prompt for prompt, count in samples.items() if count > 1]
    return sum(len(kinds[prompt]) == 1 for prompt in groups) / len(groups) if groups else 0.0
