"""What the guard may do and what it takes for good and bad: every threshold with its unit, default and source.

Sources: [verl] its documentation of rollout correction; [prime-rl] its merge gate; [ours] chosen here, no source gives
one. A signal whose best value is 0 counts as recovered below half of its bound: both pairs of bounds that others
publish have that ratio (mean probability difference 0.005 and 0.01, verl's FAQ; token error 1.05 and 1.1, NeMo-RL).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from appliance.terms.schemes import Scheme

K3_KL = 0.015  # nats per token [prime-rl]
WEIGHT_MEAN = (0.5, 2.0)  # [verl]
WEIGHT_STD = 1.0  # [verl]
ESS = 0.3  # fraction [verl]
TRUNCATED_FRACTION = 0.05  # of tokens [ours]
FLOW_ON_GPU = 0.1  # of guard.k3_kl: with one flow a step is to be at least so much nearer. To be measured on a GPU


class Action(StrEnum):
    """Action against steps that are not well, the mild ones first."""

    WARN = "warn"
    TIGHTEN = "tighten"  # the correction's tightened form: cap down, rejection on
    RAISE_PRECISION = "raise-precision"  # more layers in BF16, then the next scheme up
    BF16 = "bf16"  # rollouts without any quantised layer
    STOP = "stop"  # save and stop


@dataclass(frozen=True)
class Bounds:
    """A signal is bad outside `bad` and fine within `fine`, which lies inside it; between them it is neither. Each is
    (lowest, highest); a value on a bound is on its better side."""

    bad: tuple[float, float]
    fine: tuple[float, float]

    @classmethod
    def below(cls, bound: float) -> Bounds:
        """Make the bounds of a signal whose best value is 0: bad above, fine below half of it."""
        return cls(bad=(-math.inf, bound), fine=(-math.inf, bound / 2))

    @classmethod
    def above(cls, share: float) -> Bounds:
        """Make the bounds of a share whose best value is 1: bad below, fine above twice of it, or half way to 1 where
        that is less."""
        return cls(bad=(share, math.inf), fine=(min(2 * share, (1 + share) / 2), math.inf))


@dataclass(frozen=True)
class Patience:
    """Numbers of steps in a row on which a guard's condition holds before it warns, and before it stops the run; at
    least 1."""

    warn_after: int
    stop_after: int


@dataclass(frozen=True)
class MismatchBounds:
    """Bounds beyond which a step's mismatch is bad; a field per signal of that name."""

    differing_fraction: Bounds = field(default=Bounds.below(0.0))
    k3_kl: Bounds = field(default=Bounds.below(K3_KL))
    weight_mean: Bounds = Bounds(bad=WEIGHT_MEAN, fine=(0.75, 1.5))
    weight_std: Bounds = field(default=Bounds.below(WEIGHT_STD))
    ess: Bounds = field(default=Bounds.above(ESS))
    truncated_fraction: Bounds = field(default=Bounds.below(TRUNCATED_FRACTION))


@dataclass(frozen=True)
class Collapse:
    """When training itself goes wrong, whatever the mismatch. All [ours]; windows in steps, rewards in the task's unit.

    `entropy`, `equal_samples` and `runaway_length` can also mean that the task is solved, so they hold only while the
    mean reward of the last steps is below solved_fraction of the range from reward_floor to reward_ceiling.

    Rewards of the user's own have no known range, reward_ceiling is None: what counts is what was seen. The floor is 0,
    or the mean of the first reward_window steps where that is below, and the best such mean stands for the ceiling. The
    reward can collapse once the best is further above the floor than it fell within those first steps, and the task can
    be solved once the best is so much above their mean.
    """

    gradient: Patience = Patience(warn_after=1, stop_after=3)
    """Patience with a gradient norm that is not finite; verl leaves out such an update."""
    log_probs: Patience = Patience(warn_after=1, stop_after=3)
    """Patience with log-probabilities, of rollouts or trainer, that are not finite; the step is not learned from."""
    reward: Patience = Patience(warn_after=1, stop_after=20)
    """Patience with a lost reward: the mean of the last reward_window steps has lost reward_lost_fraction of what the
    best such mean had above the floor. A best mean within reward_least_gain of the range cannot collapse."""
    entropy: Patience = Patience(warn_after=5, stop_after=40)
    """Patience with an entropy below entropy_left_fraction of its mean over the first entropy_window steps."""
    equal_samples: Patience = Patience(warn_after=5, stop_after=20)
    """Patience with equal samples: more than equal_above of the prompts got samples that are all the same, from which
    nothing can be learned."""
    runaway_length: Patience = Patience(warn_after=5, stop_after=20)
    """Patience with endless responses: more than unfinished_above of them reached the limit before they ended."""
    reward_window: int = 10
    reward_lost_fraction: float = 0.5
    reward_least_gain: float = 0.1
    reward_floor: float = 0.0
    reward_ceiling: float | None = 1.0
    solved_fraction: float = 0.9
    entropy_window: int = 5
    entropy_left_fraction: float = 0.02
    equal_above: float = 0.95
    unfinished_above: float = 0.95


@dataclass(frozen=True)
class Policy:
    """Actions and bounds of the guard of one run. Steps are counted, never timed."""

    scheme: Scheme
    """Scheme of the run's rollouts, the foot of the ladder."""
    actions: frozenset[Action] = frozenset({Action.WARN, Action.TIGHTEN, Action.BF16, Action.STOP})
    """Actions that may be taken; no other one ever is."""
    climb_bad: int = 3  # [ours]
    """Number of bad steps among the last climb_window judged steps at which the governor climbs. Of the first
    climb_window judged steps after a descent one bad one is enough."""
    climb_window: int = 5  # [ours]
    descend_fine: int = 20  # [ours]
    """Number of fine steps in a row after which the governor goes down, twice as many after each relapse."""
    cooling_steps: int = 5  # [ours] 1 is the delay of a change, the rest lets the optimizer follow
    """Steps after a climb that are not judged. A change takes effect at the next sync, so the next step's rollouts were
    made before it; after a descent only that one is not judged."""
    bf16_layer_fractions: tuple[float, ...] = (0.25, 0.5)  # [ours]
    """Growing shares of the quantised layers that stay BF16, the worst layers first, rung by rung."""
    mismatch: MismatchBounds = MismatchBounds()
    collapse: Collapse = Collapse()
