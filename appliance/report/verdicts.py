"""What a run comes to, in a word and a sentence per question, by its view and what its processes wrote down."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from appliance.errors import SyncError
from appliance.guard.policy import ESS, K3_KL
from appliance.record import health
from appliance.record.events import StepMetrics
from appliance.record.session import RunStatus
from appliance.report import display, draw
from appliance.report.folder import RunView
from appliance.report.proofs import Trail, engines_of, judge_attested, misses, read_trails
from appliance.report.summary import climbed, go_on_command, result
from appliance.terms.schemes import Scheme

_MOST_SENTENCES = 3


class Word(StrEnum):
    """OPEN: nothing to judge by, or not yet."""

    FINE = "fine"
    WARN = "warning"
    BAD = "bad"
    OPEN = "open"

    @property
    def grade(self) -> str:
        """The class of the pages' style."""
        return self.name.lower()


@dataclass(frozen=True)
class Verdict:
    question: str
    word: Word
    text: str


def verdicts(view: RunView) -> list[Verdict]:
    """In the order in which a person would ask."""
    checks = (_outcome, _reward, _mismatch, _precision, _updates, _attested, _guard, _rewards)
    return [found for check in checks for found in check(view)]


def _outcome(view: RunView) -> list[Verdict]:
    record, state = view.record, view.state
    steps = f"{state.step} of {state.steps} steps"
    match record.state:
        case RunStatus.DONE:
            return [Verdict("Did it finish?", Word.FINE, f"{steps}, the model is in model/")]
        case RunStatus.FAILED | RunStatus.STOPPED:
            command = go_on_command(view.run_dir)
            parts = [f"{steps}: {record.reason or record.state}"]
            if state.failure is not None and state.failure.hint:
                parts.append(state.failure.hint)
            parts += [f"go on with: {command}"] if command else []
            word = Word.BAD if record.state is RunStatus.FAILED else Word.WARN
            return [Verdict("Did it finish?", word, "; ".join(parts))]
        case _:
            return [Verdict("Did it finish?", Word.OPEN, f"{steps}, now {display.phase_text(record.phase)}")]


def _reward(view: RunView) -> list[Verdict]:
    found = result(view.state)
    if found.before is None or found.after is None:
        return [Verdict("Did the reward climb?", Word.OPEN, "no step to compare with yet")]
    how = f"greedy, {view.state.val_samples} problems" if found.greedy else "sampled, means of five steps"
    text = f"{draw.number(found.before)} before, {draw.number(found.after)} after ({how})"
    word = Word.FINE if climbed(found) else Word.OPEN if view.is_live else Word.WARN
    return [Verdict("Did the reward climb?", word, text)]


def _mismatch(view: RunView) -> list[Verdict]:
    question = "Do rollouts and trainer agree?"
    judged = [(step, found) for step in view.steps if (found := health.judge(step)).word != "unknown"]
    if not judged:
        return [Verdict(question, Word.OPEN, "no step has a mismatch yet")]
    bad = [(step, found) for step, found in judged if not found.healthy]
    text = f"within the bounds in {len(judged) - len(bad)} of {len(judged)} steps"
    word = Word.FINE if not bad else Word.WARN if judged[-1][1].healthy else Word.BAD
    return [Verdict(question, word, "; ".join([text, *_worst(view.steps), *_newest(bad)]))]


def _worst(steps: Sequence[StepMetrics]) -> list[str]:
    k3 = [(step.mismatch_k3_kl, step.step) for step in steps if step.mismatch_k3_kl is not None]
    ess = [(step.is_ess, step.step) for step in steps if step.is_ess is not None]
    said = []
    if k3:
        worst, at = max(k3)
        said.append(f"largest k3 {worst:.1e} in step {at} (bound {K3_KL})")
    if ess:
        worst, at = min(ess)
        said.append(f"smallest effective sample size {worst:.3f} in step {at} (bound {ESS})")
    return said


def _newest(bad: Sequence[tuple[StepMetrics, health.Verdict]]) -> list[str]:
    return [f"step {step.step}: {', '.join(judged.reasons)}" for step, judged in bad[-1:]]


def _precision(view: RunView) -> list[Verdict]:
    """The model's greedy reward in the rollouts' scheme against BF16's, of the newest validation that has both."""
    both = [
        line
        for line in view.lines
        if line.val_reward_mean is not None
        and line.val_reward_bf16_mean is not None
        and line.scheme != str(Scheme.BF16)
    ]
    if not both:
        return []
    line = both[-1]
    own, bf16, problems = line.val_reward_mean, line.val_reward_bf16_mean, line.val_samples
    assert own is not None and bf16 is not None
    noise = _noise(bf16, problems=problems)
    text = f"{own:.3f} in {line.scheme}, {bf16:.3f} in bf16, after step {line.step}"
    if noise is None:
        return [Verdict("What does the scheme cost?", Word.OPEN, text)]
    text += f"; {problems:.0f} problems can tell apart ±{noise:.3f} (two standard errors, not paired)"
    return [Verdict("What does the scheme cost?", Word.FINE if own > bf16 - noise else Word.WARN, text)]


def _noise(mean: float, *, problems: float | None) -> float | None:
    """Two standard errors of the difference of two means of so many rewards of 0 or 1; None where they are not such."""
    if not problems or not 0.0 <= mean <= 1.0:
        return None
    return 2 * math.sqrt(2 * max(mean * (1 - mean), 1 / problems) / problems)


def _updates(view: RunView) -> list[Verdict]:
    question = "Did the weights arrive?"
    trails, failure = read_trails(view), view.state.failure
    if view.record.state is RunStatus.FAILED and failure is not None and failure.error == SyncError.__name__:
        return [Verdict(question, Word.BAD, failure.what)]
    wrong = misses(trails, engines=engines_of(view), is_done=view.record.state is RunStatus.DONE)
    if wrong:
        return [Verdict(question, Word.BAD, _first(wrong))]
    if not any(trail.taken for trail in trails):
        word = Word.WARN if view.record.state is RunStatus.DONE else Word.OPEN
        return [Verdict(question, word, "no engine has acknowledged an update in sync/")]
    return [Verdict(question, Word.FINE, _arrived(trails, attempt=view.record.attempt))]


def _arrived(trails: Sequence[Trail], *, attempt: int) -> str:
    updates, of = min(len(trail.taken) for trail in trails), f" of attempt {attempt}" if attempt > 1 else ""
    count = f"{sum(bool(trail.taken) for trail in trails)} of {len(trails)} engines' processes"
    told = [f"{updates} updates{of} arrived with the digests sent, at {count}"]
    for words, taken in (
        ("first", [trail.taken[1] for trail in trails if 1 in trail.taken]),
        ("newest", [trail.newest for trail in trails if trail.newest is not None]),
    ):
        proven, layers = sum(each.layers_proven for each in taken), sum(each.layers for each in taken)
        told.append(f"kernels proved {proven} of {layers} layers at the {words}")
    unproven = sum(each.unproven for each in taken)
    return "; ".join(told + [f"tensors there known by their digest alone: {unproven}"] * (unproven > 0))


def _attested(view: RunView) -> list[Verdict]:
    question = "Does every process run what it should?"
    expected, found = len(view.plan.attestations), judge_attested(view, trails=read_trails(view))
    said = expected - len(found.missing)
    if found.wrong or found.unreadable:
        return [Verdict(question, Word.BAD, _first([*found.wrong, *found.unreadable]))]
    if not said and view.record.state is not RunStatus.DONE:
        return [Verdict(question, Word.OPEN, "no process has said yet what it runs")]
    text = f"{said} of {expected} processes run the scheme, patches and versions of the plan, by their own word"
    if not found.missing and expected:
        return [Verdict(question, Word.FINE, text)]
    word = Word.OPEN if view.is_live else Word.WARN
    return [Verdict(question, word, "; ".join([text, *([_first(found.missing)] if found.missing else [])]))]


def _first(sentences: Sequence[str]) -> str:
    more = len(sentences) - _MOST_SENTENCES
    return "; ".join([*sentences[:_MOST_SENTENCES], *([f"and {more} more"] if more > 0 else [])])


def _guard(view: RunView) -> list[Verdict]:
    told = [event for event in view.events if event.kind == "guard"]
    if not view.plan.guard.actions:
        return [Verdict("Did the guard act?", Word.OPEN, "it may do nothing: guard.actions is empty")]
    if not told:
        return [Verdict("Did the guard act?", Word.FINE, "no step gave it a reason to")]
    times = "once" if len(told) == 1 else f"{len(told)} times"
    return [Verdict("Did the guard act?", Word.WARN, f"{times}, the last: {told[-1].what} ({told[-1].why})")]


def _rewards(view: RunView) -> list[Verdict]:
    """What could not be graded, and steps that nothing was learned from; nothing to say where all went well."""
    failed = sum(step.reward_failures or 0 for step in view.steps)
    broken = [step.step for step in view.steps if step.nonfinite_fraction]
    said = []
    if failed:
        said.append(f"{failed:.0f} rewards failed")
    if broken:
        said.append(
            f"{len(broken)} steps were not learned from: log-probabilities were not finite, last in {broken[-1]}"
        )
    return [Verdict("Was every response graded and learned from?", Word.WARN, "; ".join(said))] if said else []
