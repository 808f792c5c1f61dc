"""What a run comes to, in a word and a sentence per question.

Two of them rest on what the processes wrote down about themselves, compared with the plan: attestations and weight
updates, read again from `attest/` and `sync/`, which hold the newest attempt. A line of metrics says nothing of either.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from appliance.errors import SyncError
from appliance.guard.signals import MismatchHealth
from appliance.plan.engines import finer_schemes
from appliance.record.attestations import check_attestations
from appliance.record.plan import ExpectedAttestation
from appliance.record.session import RunStatus
from appliance.report import display, draw
from appliance.report.folder import RankUpdates, RunView
from appliance.report.summary import go_on_command, result
from appliance.sync.precision import attestations_at
from appliance.terms.counts import counted
from appliance.terms.schemes import Scheme, beside

_MOST_SENTENCES = 3


class Word(StrEnum):
    """Answer to a question about a run; OPEN where there is nothing to judge by, or not yet."""

    FINE = "fine"
    WARN = "warning"
    BAD = "bad"
    OPEN = "open"

    @property
    def grade(self) -> str:
        """Class of the pages' style."""
        return self.name.lower()


@dataclass(frozen=True)
class RunVerdict:
    question: str
    word: Word
    text: str


_Said = tuple[Word, str]


def verdicts(view: RunView) -> list[RunVerdict]:
    """Return the verdicts in the order in which a person would ask."""
    answers = {
        "Did it finish?": _outcome,
        "Did the reward climb?": _reward,
        "Do rollouts and trainer agree?": _mismatch,
        "What does the scheme cost?": _precision,
        "Did the weights arrive?": _updates,
        "Does every process run what it should?": _attested,
        "Did the guard act?": _guard,
        "Was every response graded and learned from?": _rewards,
    }
    return [RunVerdict(question, *said) for question, answer in answers.items() if (said := answer(view)) is not None]


def _outcome(view: RunView) -> _Said:
    record, state = view.record, view.state
    steps = f"{state.step} of {counted(state.steps, 'step')}"
    match record.state:
        case RunStatus.DONE:
            return Word.FINE, f"{steps}, the model is in model/"
        case RunStatus.FAILED | RunStatus.STOPPED:
            command = go_on_command(view.run_dir)
            parts = [f"{steps}: {record.reason or record.state}"]
            if state.failure is not None and state.failure.hint:
                parts.append(state.failure.hint)
            parts += [f"to resume: {command}"] if command else []
            word = Word.BAD if record.state is RunStatus.FAILED else Word.WARN
            return word, "; ".join(parts)
        case _:
            return Word.OPEN, f"{steps}, now {display.phase_text(record.phase)}"


def _reward(view: RunView) -> _Said:
    rewards = result(view.state)
    if rewards.before is None or rewards.after is None:
        return Word.OPEN, "no other step to compare with" + " yet" * view.is_live
    how = (
        f"{view.state.val_how}, {counted(view.state.val_samples, 'problem')}"
        if rewards.validated
        else "sampled, means of at most five steps"
    )
    text = f"{draw.number(rewards.before)} before, {draw.number(rewards.after)} after ({how})"
    word = Word.FINE if rewards.climbed(view.plan) else Word.OPEN if view.is_live else Word.WARN
    return word, text


def _mismatch(view: RunView) -> _Said:
    steps, bounds = view.steps, view.plan.mismatch_bounds
    if steps.newest is None:
        return Word.OPEN, "no step has a mismatch yet"
    sentences = [f"within the bounds in {steps.judged - steps.bad} of {counted(steps.judged, 'step')}"]
    if steps.k3 is not None:
        (k3, step), (_, bound) = steps.k3, bounds.k3_kl.bad
        sentences.append(f"largest k3 {beside(k3, bound, form='.1e')} in step {step} (bound {bound:g})")
    if steps.ess is not None:
        (ess, step), (bound, _) = steps.ess, bounds.ess.bad
        smallest = f"smallest effective sample size {beside(ess, bound, form='.3f')}"
        sentences.append(f"{smallest} in step {step} (bound {bound:g})")
    if steps.last_bad is None:
        return Word.FINE, "; ".join(sentences)
    step, reasons = steps.last_bad
    sentences.append(f"step {step}: {', '.join(reasons)}")
    return Word.BAD if steps.newest is MismatchHealth.BAD else Word.WARN, "; ".join(sentences)


def _precision(view: RunView) -> _Said | None:
    """Return the model's validation in the rollouts' scheme against BF16's, the newest that has both."""
    if (line := view.steps.both) is None:
        return None
    in_scheme, bf16, problems = line.val_reward_mean, line.val_reward_bf16_mean, line.val_samples
    assert in_scheme is not None and bf16 is not None, "it has both"
    text = f"{in_scheme:.3f} in {line.validated_in}, {bf16:.3f} in bf16, after step {line.step}"
    if not problems or view.plan.task.is_own:  # only of rewards of 0 or 1 the mean tells the noise
        return Word.OPEN, text
    noise = 2 * math.sqrt(2 * max(bf16 * (1 - bf16), 1 / problems) / problems)
    validated = counted(int(problems), "problem")
    text += f"; with {validated}, less than ±{noise:.3f} is noise (two standard errors, not paired)"
    return Word.FINE if in_scheme > bf16 - noise else Word.WARN, text


def _updates(view: RunView) -> _Said:
    is_done = view.record.state is RunStatus.DONE
    ranks, failure = view.updates.ranks, view.state.failure
    if view.record.state is RunStatus.FAILED and failure is not None and failure.error == SyncError.__name__:
        return Word.BAD, failure.what
    wrong, count = view.updates.misses(is_done=is_done)
    if wrong:
        return Word.BAD, _first(wrong, count=count)
    if not any(rank.count for rank in ranks):
        return Word.WARN if is_done else Word.OPEN, "no engine has acknowledged an update in sync/"
    return Word.FINE, _arrived(ranks, attempt=view.record.attempt)


def _arrived(ranks: Sequence[RankUpdates], *, attempt: int) -> str:
    updates = counted(min(rank.count for rank in ranks), "update")
    of_attempt = f" of attempt {attempt}" if attempt > 1 else ""
    processes = counted(len(ranks), "engine process", plural="engines' processes")
    count = f"{sum(bool(rank.count) for rank in ranks)} of {processes}"
    sentences = [f"{updates}{of_attempt} arrived with the digests that were sent, at {count}"]
    for words, taken in (
        ("first", [rank.first for rank in ranks if rank.first is not None]),
        ("newest", [rank.newest for rank in ranks if rank.newest is not None]),
    ):
        proven, layers = sum(each.layers_proven for each in taken), sum(each.layers for each in taken)
        sentences.append(f"kernels proved {proven} of {layers} layers at the {words} update")
    unproven = sum(each.unproven for each in taken)
    return "; ".join(sentences + [f"tensors of the newest known by their digest alone: {unproven}"] * (unproven > 0))


def _attested(view: RunView) -> _Said:
    """Judge attestations by the plan, the program that began the attempt, what the present engines were started in, and
    what updates changed an engine's precision to since."""
    plan = view.plan
    expected = [_by_now(view, each) for each in attestations_at(plan, view.updates.generation().precision)]
    fingerprint = dict(view.versions).get("fingerprint", "")
    attested = check_attestations(view.run_dir, expected, pins=plan.pins, fingerprint=fingerprint)
    count = len(expected) - len(attested.missing)
    if attested.wrong or attested.unreadable:
        return Word.BAD, _first([*attested.wrong, *attested.unreadable])
    if not count and view.record.state is not RunStatus.DONE:
        return Word.OPEN, "no process has reported yet what it runs"
    text = f"{count} of {len(expected)} processes report the scheme, patches and versions of the plan"
    if not attested.missing and expected:
        return Word.FINE, text
    word = Word.OPEN if view.is_live else Word.WARN
    return word, "; ".join([text, *([_first(attested.missing)] if attested.missing else [])])


def _by_now(view: RunView, planned: ExpectedAttestation) -> ExpectedAttestation:
    """Return what is expected of a worker by now: one whose layers changed their precision with an update has attested
    again."""
    ranks = view.updates.ranks
    if planned.role != "rollout" or planned.rank >= len(ranks):
        return planned
    rank, raised_to = ranks[planned.rank], (Scheme.BF16, *finer_schemes(view.plan))
    newest = rank.newest if rank.has_switched else None
    if newest is None or newest.scheme not in raised_to:
        return planned
    return planned.replace(scheme=Scheme(newest.scheme), emulated=newest.emulated)


def _first(sentences: Sequence[str], *, count: int | None = None) -> str:
    """count: of all of them, where not all are given."""
    more = (len(sentences) if count is None else count) - _MOST_SENTENCES
    return "; ".join([*sentences[:_MOST_SENTENCES], *([f"and {more} more"] if more > 0 else [])])


def _guard(view: RunView) -> _Said:
    events = view.events.by_kind["guard"]
    if not view.plan.guard.actions:
        return Word.OPEN, "the guard may do nothing: guard.actions is empty"
    if not events:
        return Word.FINE, "no step gave it a reason to"
    _, last = events.last[-1]
    times = "once" if events.count == 1 else f"{events.count} times"
    return Word.WARN, f"{times}, the last: {last.what} ({last.why})"


def _rewards(view: RunView) -> _Said | None:
    """Report what could not be graded, and steps that nothing was learned from; nothing to say where all went well."""
    steps, sentences = view.steps, []
    if steps.failures:
        sentences.append(f"{counted(int(steps.failures), 'reward')} failed")
    if steps.broken:
        last = f"log-probabilities were not finite, last in step {steps.last_broken}"
        broken = counted(steps.broken, "step was", plural="steps were")
        sentences.append(f"{broken} not learned from: {last}")
    return (Word.WARN, "; ".join(sentences)) if sentences else None
