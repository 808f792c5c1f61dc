"""The mismatch that a profile predicts, against the guard: what `check` says, and a run before its first step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from appliance.finding import Finding, Severity, warning
from appliance.quant.choice import Candidate, candidates_of, choose_fewest
from appliance.quant.files import is_by_own_samples, read_file_header
from appliance.record.plan import RunPlan
from appliance.terms.counts import counted
from appliance.terms.devices import StoredResult
from appliance.terms.schemes import beside
from appliance.terms.shapes import ModelShape

CODE = "mismatch"
FEW_TOKENS = 256  # below it a predicted mean is uncertain


@dataclass(frozen=True)
class Expected:
    """Prediction of a profile."""

    kl: float
    """Predicted mismatch, nats per token, with the layers in BF16 that the profile keeps there."""
    tokens: int
    """Number of compared tokens, on which the prediction rests."""
    candidates: tuple[Candidate, ...] = ()
    """Quantised layers whose contributions were measured."""
    kept_multiplications: int = 0
    """Multiplications of one token that are in BF16 already."""
    kept_layers: tuple[str, ...] = ()
    """Layers that stay in BF16 for a mismatch budget."""
    without_budget: float | None = None
    """Predicted mismatch, nats per token, if no layer stayed in BF16; None where no budget keeps any."""
    budget: float | None = None
    """Budget that the profile was made for, nats per token."""

    @property
    def basis(self) -> str:
        """Phrase about the tokens that the prediction rests on: `measured on 900 tokens`."""
        on = f"{self.tokens} tokens" if self.tokens >= FEW_TOKENS else f"few tokens ({self.tokens})"
        return f"measured on {on}"

    @property
    def multiplications(self) -> int:
        """Multiplications of one token in all layers that could be quantised."""
        return self.kept_multiplications + sum(layer.multiplications for layer in self.candidates)


def expected_of(folder: Path) -> Expected | None:
    """Read the prediction of the profile in a folder; None where it predicts nothing of rollouts. Raises EngineError
    when there is no profile."""
    header = read_file_header(folder)
    if not header["predicted"] or not is_by_own_samples(header):
        return None
    layers = [{"multiplications": 0, "contribution": None, **layer} for layer in header["layers"]]
    before, kept_layers = header.get("predicted_all"), [layer for layer in layers if layer["stays_in_bf16"]]
    return Expected(
        header["predicted"]["kl"],
        tokens=header["predicted"]["tokens"],
        candidates=tuple(candidates_of(layer for layer in layers if not layer["stays_in_bf16"])),
        kept_multiplications=sum(layer["multiplications"] for layer in kept_layers),
        kept_layers=tuple(layer_name(layer["linears"]) for layer in kept_layers),
        without_budget=before["kl"] if before else None,
        budget=header["settings"]["mismatch_budget"],
    )


def layer_name(linears: Sequence[str]) -> str:
    """Name a layer; a fused one `model.layers.3.self_attn.{q,k,v}_proj`."""
    first, *others = linears
    if not others:
        return first
    parts = (name.rpartition(".")[2].removesuffix("_proj") for name in linears)
    return f"{first.rpartition('.')[0]}.{{{','.join(parts)}}}_proj"


def judge_mismatch(
    plan: RunPlan, *, expected: Expected | None, shape: ModelShape | None, stored: StoredResult | None
) -> Iterator[Finding]:
    """Yield what a mismatch budget keeps in BF16, why and at what cost, a warning where it is not met, and another one
    where the guard would find the first step bad, with what would help. shape: None where the model is not known yet.
    stored: what `bench` has measured of this plan."""
    bound = plan.guard.k3_kl
    if expected is not None and expected.without_budget is not None:
        yield Finding(Severity.INFO, CODE, ("quantization.mismatch_budget",), _choice(plan, expected, stored))
    if expected is not None and expected.budget is not None and expected.kl > expected.budget:
        message = (
            f"the budget of {expected.budget:g} nats per token is not met: the nearest of the measured choices has "
            f"a predicted mismatch of {beside(expected.kl, expected.budget)}"
        )
        yield warning(CODE, "quantization.mismatch_budget", message, "a smaller budget keeps more layers in BF16")
    if plan.trainer.one_flow or expected is None or expected.kl <= bound:
        return
    message = (
        f"the profile predicts a mismatch of {beside(expected.kl, bound)} nats per token, {expected.basis}; above "
        f"{bound:g} a step is bad (guard.k3_kl)"
    )
    ways = [_budget(plan, expected=expected, stored=stored), *_one_flow(plan, shape), *_bf16(plan, stored)]
    yield warning(CODE, "rollout.scheme", message, f"{'; '.join(ways[:-1])}; or {ways[-1]}")


def _choice(plan: RunPlan, expected: Expected, stored: StoredResult | None) -> str:
    part = expected.kept_multiplications / max(1, expected.multiplications)
    cost = slower_by(part, plan=plan, stored=stored) or "`appliance bench` measures what they cost in time"
    layers = counted(len(expected.kept_layers), "layer stays", plural="layers stay")
    return (
        f"{layers} in BF16, {part:.1%} of the multiplications ({cost}): predicted "
        f"mismatch {expected.kl:.2g} nats per token, {expected.basis}, instead of {expected.without_budget:.2g}, "
        f"for a budget of {expected.budget:g}: {_by_kind(expected.kept_layers)}; `appliance profile` and the run's "
        "profile/quantization.yaml name them"
    )


def _by_kind(layers: Iterable[str]) -> str:
    """Count layers by kind: `12 down_proj, 3 o_proj`. layers: as `layer_name` names them."""
    numbers = Counter(layer.rpartition(".")[2] for layer in layers)
    return ", ".join(f"{number} {kind}" for kind, number in numbers.most_common())


def _budget(plan: RunPlan, *, expected: Expected, stored: StoredResult | None) -> str:
    """Phrase which budget to set: half of the guard's bound, below which the guard calls a mismatch fine."""
    budget = float(f"{plan.guard.k3_kl / 2:.2g}")
    key = f"`quantization.mismatch_budget: {budget:g}`"
    if plan.profile is not None and plan.profile.source:
        key += " in place of `quantization.profile`"
    chosen = choose_fewest(expected.candidates, kl=expected.kl, budget=budget)
    if not chosen:
        return f"{key} keeps as many layers in BF16 as that takes"
    part = (expected.kept_multiplications + sum(layer.multiplications for layer in chosen)) / expected.multiplications
    slower = slower_by(part, plan=plan, stored=stored)
    return f"{key} would keep {part:.0%} of the multiplications in BF16{f' ({slower})' if slower else ''}"


def slower_by(part: float, *, plan: RunPlan, stored: StoredResult | None) -> str:
    """Phrase what a part of the multiplications in BF16 costs in time, by what `bench` has measured here; empty where
    it has measured nothing."""
    gain = dict(stored.ratios).get(plan.rollout.scheme) if stored else None
    if not gain or gain <= 1:
        return ""
    ratio = 1 / (1 / gain + part * (1 - 1 / gain))  # all that is gained is gained by these multiplications
    return f"rollouts {ratio:.2f} times as fast as in BF16, not {gain:.2f}, by `bench`"


def _one_flow(plan: RunPlan, shape: ModelShape | None) -> Iterator[str]:
    rollout, trainer = plan.rollout, plan.trainer
    can = (
        plan.is_cpu
        and (plan.model.lora is None or (plan.sends_adapters and not plan.model.lora.dropout))
        and not (shape and (shape.has_experts or shape.beyond_one_flow))
        and all(scheme.spec.trained_in for scheme in rollout.replicas)
        and not rollout.lm_head_fp32
        and len(set(rollout.replicas)) == 1
        and (rollout.tensor_parallel, trainer.sequence_parallel) == (1, 1)
    )
    if can:
        yield "`trainer.forward: rollout`, with `trainer.attention: auto`, has exactly none (docs/one-flow.md)"


def _bf16(plan: RunPlan, stored: StoredResult | None) -> Iterator[str]:
    gain = dict(stored.ratios).get(plan.rollout.scheme) if stored else None
    lost = f", and is {gain:.2f} times slower by `bench`" if gain and gain > 1 else ""
    yield f"`rollout.scheme: bf16` leaves only the mismatch that BF16's own rounding makes{lost}"
