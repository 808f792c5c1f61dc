"""What is maximised: how rewards become advantages, what a loss makes of them, and how losses become one number.

Formulas are verl's, or in trainer/correction.py; here is what recipe, plan and corrections must know of
them: which bounds a loss has, what an importance weight acts on, and which correction has no
meaning beside it. docs/algorithms.md has it as a table.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True)
class ClipRange:
    """The probability ratio is clipped to 1 - low .. 1 + high."""

    low: float = 0.2
    """Distance of the lower bound from 1, 0..1; 1: no lower bound."""
    high: float = 0.2
    """Distance of the upper bound from 1, > 0."""


PLAIN = ClipRange()


class Advantage(StrEnum):
    GRPO = "grpo"
    DR_GRPO = "dr-grpo"
    RLOO = "rloo"
    REINFORCE_PLUS_PLUS = "reinforce++"
    OPO = "opo"
    GDPO = "gdpo"


class Aggregate(StrEnum):
    TOKEN_MEAN = "token-mean"
    SEQUENCE_MEAN = "sequence-mean"
    CONSTANT = "constant"


class Estimator(StrEnum):
    """Estimators of the divergence from the reference, by Schulman's names, with x = log p_reference - log p of a
    token."""

    K1 = "k1"
    """-x"""
    K2 = "k2"
    """x^2 / 2"""
    K3 = "k3"
    """exp(x) - 1 - x"""


class KlPlace(StrEnum):
    LOSS = "loss"
    REWARD = "reward"


class Loss(StrEnum):
    PPO = "ppo"
    GSPO = "gspo"
    CISPO = "cispo"
    SAPO = "sapo"
    GEO_MEAN = "geo-mean"
    TBPO = "tbpo"

    @property
    def spec(self) -> LossSpec:
        return LOSSES[self]


@dataclass(frozen=True)
class LossSpec:
    """Properties of a loss that recipe, plan and corrections have to know."""

    clip: ClipRange = ClipRange()
    """Clip range where the recipe gives none."""
    dual_clip: float = 3.0
    """Bound of the ratio where the advantage is negative and the recipe gives none, > 1."""
    source: str = ""
    """Origin of these bounds."""
    bounds: tuple[str, ...] = ("clip_low", "clip_high", "dual_clip")
    """Keys of the recipe for the bounds that the loss has."""
    in_nats: bool = False
    """Whether its bounds are of the logarithm of the ratio: exp(-clip_low), exp(clip_high)."""
    correction: str = ""
    """Correction that the loss's source uses with it."""
    of_sequences: bool = False
    """Whether its ratio is one number for a response, the geometric mean of its tokens' ratios."""
    weighs_responses: bool = False
    """Whether a token's weight would act on all tokens of its response."""
    keeps_gradient: bool = False
    """Whether a token outside of the bounds still learns."""
    fixed_bounds: str = ""
    """Reason why a correction cannot move the clip bounds of single tokens; empty where it can."""
    aggregate: Aggregate = Aggregate.TOKEN_MEAN
    """Aggregation where the recipe gives none."""
    own_aggregate: bool = False
    """Whether the loss has no other aggregation."""


LOSSES: dict[Loss, LossSpec] = {
    Loss.PPO: LossSpec(),
    Loss.GSPO: LossSpec(
        clip=ClipRange(low=3e-4, high=4e-4),
        source="the bounds of GSPO, of a response's mean ratio",
        bounds=("clip_low", "clip_high"),
        of_sequences=True,
        fixed_bounds="has one ratio for a whole response",
        aggregate=Aggregate.SEQUENCE_MEAN,
    ),
    Loss.CISPO: LossSpec(
        # Nothing below, as its source: at least 0.8 would continue to push what the step made improbable already.
        clip=ClipRange(low=1.0),
        bounds=("clip_high",),
        keeps_gradient=True,
        fixed_bounds="has a bound that is a weight and stops no gradient: a wider one gives back what the cap took",
    ),
    Loss.SAPO: LossSpec(
        bounds=(),
        keeps_gradient=True,
        fixed_bounds="has no bounds",
        aggregate=Aggregate.SEQUENCE_MEAN,
        own_aggregate=True,
    ),
    Loss.GEO_MEAN: LossSpec(
        clip=ClipRange(low=0.4, high=0.4),
        source="the bounds of GMPO, of the logarithm of a token's ratio",
        bounds=("clip_low", "clip_high"),
        in_nats=True,
        weighs_responses=True,
        fixed_bounds="multiplies the ratios of a whole response",
        aggregate=Aggregate.SEQUENCE_MEAN,
        own_aggregate=True,
    ),
    Loss.TBPO: LossSpec(
        clip=ClipRange(low=3e-4, high=4e-4),
        dual_clip=1.0007,
        source="the bounds of TBPO, of a response's mean ratio",
        correction="tis-geometric",
        of_sequences=True,
        weighs_responses=True,
        fixed_bounds="has one ratio for a whole response",
        aggregate=Aggregate.SEQUENCE_MEAN,
        own_aggregate=True,
    ),
}
