"""The governor in a run: a step's numbers in, its decisions written down, and what they ask of the next steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from appliance.corrections.base import LossCorrection
from appliance.errors import GuardStop
from appliance.files import write_whole
from appliance.guard.governor import (
    Decision,
    GovernorState,
    Measures,
    ladder,
    measures_of_level,
    observe,
    place_on_ladder,
    resume,
)
from appliance.guard.policy import Action, Collapse, Patience, Policy
from appliance.guard.signals import Signals
from appliance.record.checkpoints import GUARD_FILE
from appliance.record.events import append_event
from appliance.record.lines import as_json, read
from appliance.record.plan import RunPlan
from appliance.trainer.metrics import StepTelemetry

_HALVINGS = 50  # of a share: far below what is shown of it


def policy_of(plan: RunPlan) -> Policy:
    """Return the recipe's thresholds, and the rest of the policy by its defaults. The bad steps may be spread over
    twice as many, less one."""
    guard = plan.guard
    return Policy(
        scheme=plan.rollout.scheme,
        actions=frozenset(guard.actions),
        climb_bad=guard.bad_steps,
        climb_window=2 * guard.bad_steps - 1,
        descend_fine=guard.fine_steps,
        cooling_steps=guard.cooling_steps,
        mismatch=plan.mismatch_bounds,
        collapse=Collapse(
            gradient=Patience(warn_after=1, stop_after=guard.gradient_steps),
            log_probs=Patience(warn_after=1, stop_after=guard.gradient_steps),
            reward_floor=plan.wrong_reward,
            reward_ceiling=None if plan.task.is_own else 1.0,
        ),
    )


def signals_of(
    line: dict[str, object], *, telemetry: StepTelemetry, cap: float | None, is_exact: bool = False
) -> Signals:
    """Collect a step's signals. line: the step's metrics by the names of docs/metrics.md, before what is not finite
    became null.

    cap: where a token's weight is cut. Without one no share of tokens is truncated, whatever the method drops.
    is_exact: as StepParts.is_exact.
    """
    mismatch = telemetry.mismatch
    names = [name for name in ("entropy", "unfinished_fraction") if name in line]
    adapts = bool(line.get("overflow_fraction")) and float(line["grad_scale"]) >= 1  # FP16 on the way to its factor
    if not telemetry.nonfinite_fraction and not adapts:  # else there was no update, and so no gradient
        names.append("grad_norm")
    return Signals(
        step=int(line["step"]),
        reward_mean=float(line.get("generated_reward_mean", line["reward_mean"])),  # also of what a filter left out
        differing_fraction=telemetry.differing_fraction if is_exact else None,
        k3_kl=mismatch.k3_kl,
        weight_mean=mismatch.weight_mean,
        weight_std=mismatch.weight_std,
        ess=mismatch.ess,
        truncated_fraction=None if cap is None else mismatch.truncated_fraction,
        equal_group_fraction=telemetry.equal_group_fraction,
        nonfinite_fraction=telemetry.nonfinite_fraction,
        **{name: float(line[name]) for name in names},
    )


@dataclass(frozen=True)
class Vocabulary:
    """The rows of a model's head, and the words of its tokenizer, which may be fewer.

    verl's engine samples words alone, and its log-probs are over them. The trainer's are over all rows. So every token
    has a log-ratio of -log(1 - s), where s is the share of probability that the trainer gives to rows without a word:
    next to none in a trained model, most of it in one with random weights.
    """

    rows: int
    words: int

    def explain(self, k3: float) -> str:
        """Explain how far rows without a word can be the cause of a mismatch, or return an empty text. k3: > 0, nats
        per token."""
        unsampled = self.rows - self.words
        if unsampled <= 0 or k3 <= 0:
            return ""
        return (
            f"the model has {self.rows:,} rows and its tokenizer {self.words:,} words, and rollouts never sample the "
            f"other {unsampled:,}: that alone would make this k3_kl if the trainer gave them {_share_for(k3):.0%} of "
            "the probability"
        )


def _share_for(k3: float) -> float:
    """Return the share s with -s - log(1 - s) = k3, which is what every token has then. By bisection: it grows with
    s."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if -middle - math.log1p(-middle) < k3 else (low, middle)
    return high


class Governor:
    """One run's governor: the state in `guard.json`, from which another attempt continues, and the judgement of each
    step."""

    vocabulary: Vocabulary | None
    """Vocabulary of the model, once it is loaded."""
    had_stopped: bool
    """Whether the governor stopped the attempt before: this one resumes, but not as if nothing had happened."""

    def __init__(self, plan: RunPlan) -> None:
        """Read guard.json, if it is there. Raises ValueError when it cannot be read."""
        self._run_dir = Path(plan.run_dir)
        self._planned = plan.loss_correction
        self.vocabulary = None
        self._policy = policy_of(plan)
        kept = self._run_dir / GUARD_FILE
        state = read(kept, GovernorState) if kept.exists() else GovernorState()
        self.had_stopped = state.stopped
        self._state = resume(state, policy=self._policy)

    def after_step(self, signals: Signals) -> Decision | None:
        """Judge a step, and write each decision as an event with its numbers. Returns the one to stop the run, where
        there is one."""
        self._state, decisions = observe(self._state, signals, policy=self._policy)
        write_whole(self._run_dir / GUARD_FILE, as_json(self._state) + "\n", durable=False)  # a checkpoint has its own
        for decision in decisions:
            append_event(
                self._run_dir,
                kind="guard",
                what=decision.text,
                why=self._reason(decision, signals=signals),
                step=decision.step,
                move=str(decision.move),
                action=None if decision.action is None else str(decision.action),
                level=decision.after.text,
                numbers=[cause.json_values() for cause in decision.causes],
            )
        return next((decision for decision in decisions if decision.action is Action.STOP), None)

    def _reason(self, decision: Decision, *, signals: Signals) -> str:
        """Return the causes, and what explains them where the vocabulary may."""
        causes = ", ".join(cause.text for cause in decision.causes)
        is_mismatch = any(cause.signal == "k3_kl" for cause in decision.causes)
        if not is_mismatch or self.vocabulary is None or signals.k3_kl is None:
            return causes
        return "; ".join(filter(None, (causes, self.vocabulary.explain(signals.k3_kl))))

    @property
    def level(self) -> str:
        """Level of the ladder that the governor is on, for people and metrics."""
        levels = ladder(self._policy)
        return levels[place_on_ladder(self._state.level, levels=levels)].text

    @property
    def measures(self) -> Measures:
        """Measures that are in force from now on."""
        return measures_of_level(self._state.level, policy=self._policy)

    @property
    def correction(self) -> LossCorrection:
        """Correction of the next step's loss."""
        return self._planned.tightened() if self.measures.tight else self._planned

    def metrics(self) -> dict[str, str | float | None]:
        """Return the keys of the step that is not judged yet: the governor's level, and what corrected the loss."""
        correction = self.correction
        return {
            "guard_level": self.level,
            "correction_cap": correction.cap,
            "correction_reject_k3": correction.reject_k3_above,
        }


def guard_stop(decision: Decision, *, saved: Path) -> GuardStop:
    """Return the error that ends the run. saved: the checkpoint of its last step."""
    return GuardStop(f"stopped by the guard: {decision.text}", hint=f"the state after this step is in {saved}")
