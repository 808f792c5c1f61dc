"""What a step's batch says beyond its means: mismatch by length, and prompts whose samples are all the same.

`metrics.jsonl` gets it under `mismatch_*` and `equal_group_fraction`, beside the contract's keys.

Legend: S sequences; N their response positions, sequence after sequence; T those of them that count.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
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
    trainer_N: Tensor,
    *,
    rollout_N: Tensor,
    real_N: Tensor,
    responses_N: Tensor,
    row_S: Tensor,
    prompts: Sequence[str],
    cap: float | None,
) -> StepTelemetry:
    """trainer_N, rollout_N: log-probabilities in nats.  real_N: the tokens that count.  responses_N: tokens.

    row_S: [S] int64, positions of each sequence, sum N.  prompts: the prompt's name per sequence.
    cap: of a token's weight, > 0.  A sequence without a token that counts is padding of the batch.  A token without two
    finite log-probs makes the whole mismatch not finite.
    """
    real_N = real_N.bool()
    trainer_T, rollout_T = trainer_N[real_N], rollout_N[real_N]
    broken = float((~finite_pairs(trainer_T, rollout_T)).double().mean())
    if broken:
        trainer_T, rollout_T = with_finite_pairs(trainer_T, rollout_T)
    length_S = torch.segment_reduce(real_N.double(), "sum", lengths=row_S).long()
    counted = length_S.bool().tolist()
    mismatch = measure_mismatch(trainer_T, rollout_T=rollout_T, cap=cap)
    return StepTelemetry(
        mismatch=Mismatch(**dict.fromkeys(dataclasses.asdict(mismatch), math.nan)) if broken else mismatch,
        by_length=measure_by_length(trainer_T, rollout_T=rollout_T, length_S=length_S, cap=cap),
        equal_group_fraction=equal_groups(
            compress(responses_N.split(row_S.tolist()), counted), prompts=compress(prompts, counted)
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
    kinds: dict[str, set[bytes]] = defaultdict(set)
    samples: dict[str, int] = defaultdict(int)
    for prompt, response in zip(prompts, responses, strict=True):
        kinds[prompt].add(response.numpy().tobytes())
        samples[prompt] += 1
    groups = [prompt for prompt, count in samples.items() if count > 1]
    return sum(len(kinds[prompt]) == 1 for prompt in groups) / len(groups) if groups else 0.0
