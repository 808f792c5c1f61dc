"""What a run comes to, in a word and a sentence per question.

Two of them rest on what the processes wrote down about themselves, held against the plan: attestations and weight
updates, read anew from `attest/` and `sync/`, which hold the newest attempt. A line of metrics says nothing of either.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from appliance.errors import SyncError
from appliance.guard.policy import ESS, K3_KL
from appliance.plan.engines import finer_schemes
from appliance.record.attestations import check_attestations
from appliance.record.events import StepMetrics
from appliance.record.lines import read_lines
from appliance.record.plan import ExpectedAttestation
from appliance.record.session import RunStatus
from appliance.record.state import judge
from appliance.report import display, draw
from appliance.report.folder import RunView
from appliance.report.summary import go_on_command, result
from appliance.sync.precision import Generation, attestations_at, read_generation
from appliance.sync.records import SYNC_FOLDER, Acknowledgement, Sent
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


_Said = tuple[Word, str]


@dataclass(frozen=True)
class _Trail:
    """Of one rank of an engine, by number of the update. sent: digest of what the trainer sent it."""

    name: str
    sent: dict[int, str]
    taken: dict[int, Acknowledgement]

    @property
    def newest(self) -> Acknowledgement | None:
        return self.taken[max(self.taken)] if self.taken else None


def verdicts(view: RunView) -> list[Verdict]:
    """In the order in which a person would ask."""
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
    return [Verdict(question, *said) for question, answer in answers.items() if (said := answer(view)) is not None]


def _outcome(view: RunView) -> _Said:
    record, state = view.record, view.state
    steps = f"{state.step} of {state.steps} steps"
    match record.state:
        case RunStatus.DONE:
            return Word.FINE, f"{steps}, the model is in model/"
        case RunStatus.FAILED | RunStatus.STOPPED:
            command = go_on_command(view.run_dir)
            parts = [f"{steps}: {record.reason or record.state}"]
            if state.failure is not None and state.failure.hint:
                parts.append(state.failure.hint)
            parts += [f"go on with: {command}"] if command else []
            word = Word.BAD if record.state is RunStatus.FAILED else Word.WARN
            return word, "; ".join(parts)
        case _:
            return Word.OPEN, f"{steps}, now {display.phase_text(record.phase)}"


def _reward(view: RunView) -> _Said:
    found = result(view.state)
    if found.before is None or found.after is None:
        return Word.OPEN, "no step to compare with yet"
    how = (
        f"{view.state.val_how}, {view.state.val_samples} problems"
        if found.validated
        else "sampled, means of five steps"
    )
    text = f"{draw.number(found.before)} before, {draw.number(found.after)} after ({how})"
    word = Word.FINE if found.climbed(view.plan) else Word.OPEN if view.is_live else Word.WARN
    return word, text


def _mismatch(view: RunView) -> _Said:
    judged = [(step, found) for step in view.steps if (found := judge(step)).word != "unknown"]
    if not judged:
        return Word.OPEN, "no step has a mismatch yet"
    bad = [(step, found) for step, found in judged if not found.healthy]
    said = [f"within the bounds in {len(judged) - len(bad)} of {len(judged)} steps", *_worst(view.steps)]
    said += [f"step {step.step}: {', '.join(found.reasons)}" for step, found in bad[-1:]]
    word = Word.FINE if not bad else Word.WARN if judged[-1][1].healthy else Word.BAD
    return word, "; ".join(said)


def _worst(steps: Sequence[StepMetrics]) -> Iterator[str]:
    k3 = [(step.mismatch_k3_kl, step.step) for step in steps if step.mismatch_k3_kl is not None]
    ess = [(step.is_ess, step.step) for step in steps if step.is_ess is not None]
    if k3:
        yield "largest k3 {:.1e} in step {} (bound {})".format(*max(k3), K3_KL)
    if ess:
        yield "smallest effective sample size {:.3f} in step {} (bound {})".format(*min(ess), ESS)


def _precision(view: RunView) -> _Said | None:
    """The model's validation in the rollouts' scheme against BF16's, the newest that has both."""
    both = [
        (line, own, bf16)
        for line in view.lines
        if (own := line.val_reward_mean) is not None
        and (bf16 := line.val_reward_bf16_mean) is not None
        and line.scheme != str(Scheme.BF16)
    ]
    if not both:
        return None
    line, own, bf16 = both[-1]
    problems = line.val_samples
    text = f"{own:.3f} in {line.scheme}, {bf16:.3f} in bf16, after step {line.step}"
    if not problems or view.plan.task.own is not None:  # only of rewards of 0 or 1 the mean tells the noise
        return Word.OPEN, text
    noise = 2 * math.sqrt(2 * max(bf16 * (1 - bf16), 1 / problems) / problems)
    text += f"; {problems:.0f} problems can tell apart ±{noise:.3f} (two standard errors, not paired)"
    return Word.FINE if own > bf16 - noise else Word.WARN, text


def _updates(view: RunView) -> _Said:
    is_done = view.record.state is RunStatus.DONE
    trails, failure = _trails(view), view.state.failure
    if view.record.state is RunStatus.FAILED and failure is not None and failure.error == SyncError.__name__:
        return Word.BAD, failure.what
    if wrong := list(_misses(trails, engines=_engines(view), is_done=is_done)):
        return Word.BAD, _first(wrong)
    if not any(trail.taken for trail in trails):
        return Word.WARN if is_done else Word.OPEN, "no engine has acknowledged an update in sync/"
    return Word.FINE, _arrived(trails, attempt=view.record.attempt)


def _trails(view: RunView) -> list[_Trail]:
    """One per rank of each engine of the plan, in the order of ranks; a line that cannot be read is left out."""
    rollout, folder = view.plan.rollout, view.run_dir / SYNC_FOLDER
    ranks = itertools.product(range(len(rollout.replicas)), range(rollout.tensor_parallel))
    return [
        _Trail(
            name=f"rollout-{place}",
            sent={each.sync: each.manifest for each in read_lines(folder / f"trainer-{place}.jsonl", Sent)},
            taken={each.sync: each for each in read_lines(folder / f"rollout-{place}.jsonl", Acknowledgement)},
        )
        for place in (f"{replica}-{rank}" for replica, rank in ranks)
    ]


def _engines(view: RunView) -> Generation:
    """The present ones; where the file cannot be read the first ones, which are held against the plan."""
    try:
        return read_generation(view.run_dir)
    except SyncError:
        return Generation()


def _misses(trails: Sequence[_Trail], *, engines: Generation, is_done: bool) -> Iterator[str]:
    """Updates that an engine did not take as they were sent, one sentence each.

    is_done: False where the newest update may be on its way, or was when the run ended.
    """
    newest = max((number for trail in trails for number in (*trail.sent, *trail.taken)), default=0)
    reference = {number: digest for trail in reversed(trails) for number, digest in trail.sent.items()}
    for number in range(1, newest + 1):
        for trail in trails:
            taken = trail.taken.get(number)
            if taken is None:
                if is_done or number < newest:
                    yield f"{trail.name} did not acknowledge update {number}"
            elif not (taken.manifest == trail.sent.get(number) == reference.get(number)):
                yield f"{trail.name} took other weights than were sent with update {number}"
            elif (number in engines.firsts or taken.switched) and taken.layers_proven < taken.layers:
                yield f"{trail.name} proved {taken.layers_proven} of {taken.layers} layers at update {number}"


def _arrived(trails: Sequence[_Trail], *, attempt: int) -> str:
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


def _attested(view: RunView) -> _Said:
    """By the plan, the program that began the attempt, what the present engines were started in, and what updates
    changed an engine's precision to since."""
    trails, plan = _trails(view), view.plan
    expected = [_by_now(view, each, trails=trails) for each in attestations_at(plan, _engines(view).precision)]
    fingerprint = dict(view.versions).get("fingerprint", "")
    found = check_attestations(view.run_dir, expected, pins=plan.pins, fingerprint=fingerprint)
    said = len(expected) - len(found.missing)
    if found.wrong or found.unreadable:
        return Word.BAD, _first([*found.wrong, *found.unreadable])
    if not said and view.record.state is not RunStatus.DONE:
        return Word.OPEN, "no process has said yet what it runs"
    text = f"{said} of {len(expected)} processes run the scheme, patches and versions of the plan, by their own word"
    if not found.missing and expected:
        return Word.FINE, text
    word = Word.OPEN if view.is_live else Word.WARN
    return word, "; ".join([text, *([_first(found.missing)] if found.missing else [])])


def _by_now(view: RunView, planned: ExpectedAttestation, *, trails: Sequence[_Trail]) -> ExpectedAttestation:
    """A worker whose layers changed their precision with an update has attested anew what they run since."""
    if planned.role != "rollout" or planned.rank >= len(trails):
        return planned
    trail, raised_to = trails[planned.rank], (Scheme.BF16, *finer_schemes(view.plan))
    newest = trail.newest if any(each.switched for each in trail.taken.values()) else None
    if newest is None or newest.scheme not in raised_to:
        return planned
    return planned.replace(scheme=Scheme(newest.scheme), emulated=newest.emulated)


def _first(sentences: Sequence[str]) -> str:
    more = len(sentences) - _MOST_SENTENCES
    return "; ".join([*sentences[:_MOST_SENTENCES], *([f"and {more} more"] if more > 0 else [])])


def _guard(view: RunView) -> _Said:
    told = [event for event in view.events if event.kind == "guard"]
    if not view.plan.guard.actions:
        return Word.OPEN, "it may do nothing: guard.actions is empty"
    if not told:
        return Word.FINE, "no step gave it a reason to"
    times = "once" if len(told) == 1 else f"{len(told)} times"
    return Word.WARN, f"{times}, the last: {told[-1].what} ({told[-1].why})"


def _rewards(view: RunView) -> _Said | None:
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
    return (Word.WARN, "; ".join(said)) if said else None
