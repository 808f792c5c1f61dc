"""What a correction is: one method with its limits. Recipe, plan, guard and the training's driver use it.

Quantised rollouts are sampled from a policy that is not quite the trainer's. A correction says what each token's loss
is multiplied by, which tokens stay, and between which bounds the probability ratio is clipped. The driver writes all of
that into the batch, and one loss reads it there, for every method (trainer/correction.py).

A new method is a subclass in its own file and its line in registry.py. Nothing here imports torch: a tensor brings
its methods along.

Legend: B sequences, T tokens of the longest response, padded. real_BT is true for a real token.
    x_BT = log p_trainer - log p_rollout     nats, float64, 0 at padding
    w_BT = exp(x)                            importance weight; x is clamped to -20..20 first, as verl does

All of it is detached: a weight changes the measure, never the objective. verl divides the sum of losses by the tokens
of the batch, dropped ones included: dropping makes a step smaller, not louder. Its group advantages also still count
dropped sequences.

What a correction corrects is a loss, and the two must fit: a loss whose ratio is of a whole response has no use for
what acts on its tokens one by one.

Source: Yao et al. 2025 (truncated importance sampling).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from appliance.corrections.objective import PLAIN, ClipRange, Loss
from appliance.errors import NumericsError
from appliance.finding import Finding, fault

if TYPE_CHECKING:
    from torch import Tensor

CLAMP = 20.0  # nats
REJECT_K3_ABOVE = 0.01  # nats per token: the usual limit of `k3-reject`


@dataclass(frozen=True)
class StepPart:
    """Some sequences of a step."""

    x_BT: Tensor
    real_BT: Tensor
    advantages_BT: Tensor
    """Advantages as verl has them, junk at padding."""


@dataclass(frozen=True)
class Corrected:
    """Correction of some sequences. None, from `LossCorrection.act`: left as it is."""

    weights_BT: Tensor | None = None
    """Factor of each token's loss, 0 at padding. None: 1."""
    kept_BT: Tensor | None = None
    """Real tokens that stay. None: all."""
    acted_BT: Tensor | None = None
    """Real tokens that were cut, weighted 0, dropped or clipped for the quantisation alone. None: none."""
    lower_BT: Tensor | None = None
    """Lower bound of the ratio. Only with upper_BT, and only of a method that `clips`."""
    upper_BT: Tensor | None = None


@dataclass(frozen=True)
class LossCorrection:
    """One method with its limits. A limit that the method lacks is None."""

    name: ClassVar[str]
    compared: ClassVar[str] = ""
    """Quantity that is compared with the limit, for docs/corrections.md; `effect` is what happens then."""
    effect: ClassVar[str]
    usual_cap: ClassVar[float | None] = None
    usual_bounds: ClassVar[tuple[float, float] | None] = None
    source: ClassVar[str] = ""
    """Origin of the usual limit."""
    cuts_tokens: ClassVar[bool] = False
    """Whether `cap` is where a single token's `w` itself is cut, so that the guard judges the share of tokens above it.
    The caps of other methods are of other quantities (a root, a whole sequence)."""
    clips: ClassVar[bool] = False
    """Whether the method, and not the recipe, sets the bounds of the ratio, token by token."""
    ratio_to: ClassVar[str] = "old_log_probs"
    """Field of the batch with the policy that the probability ratio is relative to."""
    has_shadow_pass: ClassVar[bool] = False
    reads_step: ClassVar[bool] = False
    """Whether `for_step` reads the step's sequences, so that no part of them can be corrected before all are known."""
    of_tokens: ClassVar[bool] = False
    """Whether the method weights or clips the tokens of a response one by one."""
    centers: ClassVar[bool] = False
    """Whether the loss gets the term of score centering (centering.py), with `cap` as the cap of its weights."""

    cap: float | None = None
    """Cap of the weights, > 0."""
    bounds: tuple[float, float] | None = None
    """Bounds of the weights, 0 < low <= 1 <= high."""
    clip: ClipRange = PLAIN
    """Clip range of the recipe."""
    loss: Loss = Loss.PPO
    """Loss that is corrected."""
    reject_k3_above: float | None = None
    """Mean k3 above which a sequence is dropped, whatever the method, nats; None: none is dropped."""

    def act(self, x_BT: Tensor, *, real_BT: Tensor) -> Corrected:
        """Apply the method itself, without `reject_k3_above`. What it returns for padding is overwritten."""
        raise NotImplementedError

    def apply(self, x_BT: Tensor, *, real_BT: Tensor) -> Corrected:
        """Apply the method and `reject_k3_above` to some sequences. Nothing is left None but the bounds where it
        does not clip."""
        x_BT, real_BT = x_BT.detach(), real_BT.bool()
        corrected = self.act(x_BT, real_BT=real_BT)
        weights_BT = x_BT.new_ones(x_BT.shape) if corrected.weights_BT is None else corrected.weights_BT
        kept_BT = real_BT if corrected.kept_BT is None else corrected.kept_BT & real_BT
        acted_BT = real_BT & False if corrected.acted_BT is None else corrected.acted_BT & real_BT
        if self.reject_k3_above is not None:
            stays_BT = (mean_k3(x_BT, real_BT=real_BT) <= self.reject_k3_above).unsqueeze(-1)
            kept_BT, acted_BT = kept_BT & stays_BT, acted_BT | (real_BT & ~stays_BT)
        return replace(corrected, weights_BT=weights_BT.masked_fill(~real_BT, 0.0), kept_BT=kept_BT, acted_BT=acted_BT)

    def for_step(self, parts: Iterable[StepPart], *, fitted: ClipRange | None) -> LossCorrection:
        """Return the correction of one step, whose sequences are `parts`; a method that reads them sets
        `reads_step`. fitted: clip range of the last shadow pass."""
        return self

    def count(self, corrected: Corrected, *, real_BT: Tensor) -> dict[str, float]:
        """Count what `metrics` needs of `apply`'s result, as numbers that add up over the parts of a step."""
        return {"tokens": int(real_BT.sum()), "acted": int(corrected.acted_BT.sum())}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float | None]:
        """Return the correction's keys of a step's line in metrics.jsonl. sums: of `count`."""
        return {"is_truncated_fraction": sums["acted"] / max(1, sums["tokens"])}

    @property
    def token_cap(self) -> float | None:
        """Value at which a token's importance weight is cut, None where it is not."""
        return self.cap if self.cuts_tokens else None

    def tightened(self) -> LossCorrection:
        """Return the correction for while the guard asks for a tighter one: half of what the cap has above 1, and
        sequences with a large k3 dropped."""
        drops = replace(self, reject_k3_above=REJECT_K3_ABOVE)
        return drops if self.cap is None else replace(drops, cap=tighten_limit(self.cap))

    @classmethod
    def refusals(cls, *, cap: float | None, bounds: tuple[float, ...] | None, clip: ClipRange) -> Iterator[Finding]:
        """Yield what is wrong with the limits that a recipe gives; a limit that is None is not given."""
        for key, given, usual in (("cap", cap, cls.usual_cap), ("bounds", bounds, cls.usual_bounds)):
            if given is not None and usual is None:
                yield fault((f"correction.{key}",), f"`{cls.name}` has no {key}", "remove it, or set it to null")
        if bounds is None or cls.usual_bounds is None:
            return
        keys, usual_low, usual_high = ("correction.bounds",), *cls.usual_bounds
        hint = f"give [low, high] such as [{usual_low:g}, {usual_high:g}], or null"
        if len(bounds) != 2:
            yield fault(keys, f"expected [low, high], got {len(bounds)} value{'' if len(bounds) == 1 else 's'}", hint)
        elif bounds[0] >= bounds[1]:
            message = f"the lower bound {bounds[0]:g} is not below the upper bound {bounds[1]:g}"
            yield fault(keys, message, hint)
        elif not bounds[0] <= 1 <= bounds[1]:
            span = f"[{bounds[0]:g}, {bounds[1]:g}]"
            yield fault(keys, f"{span} leaves out 1, the weight where rollout and trainer agree", hint)

    @classmethod
    def conflict(cls, loss: Loss) -> str:
        """Return why the method has no meaning beside that loss; empty where it has one."""
        does = "clips" if cls.clips else "weights"
        if cls.of_tokens and loss.spec.weighs_responses:
            of = "one ratio" if loss.spec.of_sequences else "one product"
            return f"`{cls.name}` {does} a response token by token, and `{loss}` has {of} for all of them"
        if cls.clips and loss.spec.fixed_bounds:
            return f"`{cls.name}` moves the clip bounds of single tokens, and `{loss}` {loss.spec.fixed_bounds}"
        return ""

    @property
    def text(self) -> str:
        """`tis with cap 2`, `icepop within 0.5..5`."""
        cap = "" if self.cap is None else f" with cap {self.cap:g}"
        within = "" if self.bounds is None else f" within {self.bounds[0]:g}..{self.bounds[1]:g}"
        drops = "" if self.reject_k3_above is None else f", sequences with k3 above {self.reject_k3_above:g} dropped"
        return f"{self.name}{cap}{within}{drops}"


def tighten_limit(limit: float) -> float:
    """Halve what a limit has above 1. One of 1 or less has nothing to give: below it weights of 1 are cut too."""
    return 1 + (limit - 1) / 2 if limit > 1 else limit


def log_ratio(trainer_BT: Tensor, *, rollout_BT: Tensor, real_BT: Tensor) -> Tensor:
    """Return x_BT in float64, detached, 0 at padding. Raises NumericsError when a real token's log-prob is not
    finite."""
    x_BT = trainer_BT.detach().double() - rollout_BT.detach().double()
    if not bool(x_BT[real_BT.bool()].isfinite().all()):
        raise NumericsError("a log-probability of this step's rollouts is not finite")
    return x_BT.masked_fill(~real_BT.bool(), 0.0)


def token_weights(x_BT: Tensor) -> Tensor:
    """Return w of each token, 1 at padding."""
    return x_BT.detach().clamp(-CLAMP, CLAMP).exp()


def mean_k3(x_BT: Tensor, *, real_BT: Tensor) -> Tensor:
    """Return [B], the mean of exp(x) - 1 - x over a sequence's tokens, nats; 0 for a sequence without tokens."""
    x_BT = x_BT.detach().clamp(-CLAMP, CLAMP)
    return (x_BT.expm1() - x_BT).sum(dim=-1) / real_BT.sum(dim=-1).clamp(min=1)
