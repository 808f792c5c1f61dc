"""What a person sees of a run while it runs: a live panel, plain lines, or JSON lines, by where the output goes."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from appliance import console
from appliance.console import printable
from appliance.guard.policy import MismatchBounds
from appliance.guard.signals import MismatchHealth, MismatchJudgement
from appliance.record.events import Event, StepMetrics
from appliance.record.plan import RunPlan
from appliance.record.state import RunState, by_set, judge_step, remaining_s, rewards_of, val_how
from appliance.report import draw
from appliance.terms.counts import counted
from appliance.terms.phases import OF_A_STEP, Phase
from appliance.terms.schemes import beside

PHASES = {
    Phase.STARTING: "starting",
    Phase.PREPARE: "preparing model and data",
    Phase.SCALE: "scaling the model (UAQ)",
    Phase.PROFILE: "profiling the model",
    Phase.IMPORT: "importing PyTorch, vLLM and verl",
    Phase.START: "starting Ray",
    Phase.LOAD_MODEL: "loading the trainer's model",
    Phase.RESTART_ENGINES: "starting new rollout engines",
    Phase.ATTEST: "checking what every worker runs",
    Phase.SYNC: "sending the weights to the rollout engine",
    Phase.VALIDATE: "validating",
    Phase.ROLLOUT: "generating rollouts",
    Phase.LOG_PROBS: "computing log-probabilities",
    Phase.UPDATE: "updating the policy",
    Phase.SAVE: "saving a checkpoint",
    Phase.EXPORT: "writing model/",
    Phase.DONE: "done",
}
_STYLES = {
    MismatchHealth.FINE: "green",
    MismatchHealth.BETWEEN: "green",
    MismatchHealth.BAD: "bold red",
    MismatchHealth.UNKNOWN: "",
}
_SPARK_WIDTH = 30
_BAR_WIDTH = 30
_FEWEST_COLUMNS_FOR_BARS = 70
_REDRAW_S = 0.5
_QUARTERS = 4

News = Sequence[Event | StepMetrics]


def phase_text(phase: str) -> str:
    return PHASES.get(phase, phase)


def title(plan: RunPlan) -> str:
    """Return the title of a run: `name: int8 rollouts, tis with cap 2`."""
    rollout = f"{plan.rollout.label}{', emulated,' if plan.emulates else ''} rollouts"
    return f"{plan.name}: {rollout}, {plan.correction_text}"


def plain_step(state: RunState, step: StepMetrics, *, now: float) -> str:
    """Return the line of one finished step. now: unix s."""
    left = remaining_s(state, now=now)
    parts = (
        f"step {step.step}/{state.steps}",
        f"reward {draw.number(step.reward_mean)}",
        f"rewards {rewards_text(step)}" if step.user_metrics and rewards_text(step) else "",
        "" if step.val_reward_mean is None else f"validation {_validated(step)}",
        *(f"{name} {set_text(metrics)}" for name, metrics in by_set(step).items()),
        draw.tokens_per_s(step.rollout_tokens_per_s),
        _plain_times(step),
        _scheme(step),
        _plain_mismatch(step, bounds=state.bounds),
        f"guard {level}" if (level := _guarded(step)) else "",
        "" if left is None or step.step >= state.steps else f"about {draw.duration(left)} left",
    )
    return "  ".join(part for part in parts if part)


def plain_validation(step: StepMetrics) -> str:
    """Return the line of the validation before training, which belongs to no step."""
    samples = "" if step.val_samples is None else f" ({counted(int(step.val_samples), 'problem')}, {val_how(step)})"
    sets = (f"  {name} {set_text(metrics)}" for name, metrics in by_set(step).items())
    return f"validation before training {_validated(step)}{samples}{''.join(sets)}"


def rewards_text(step: StepMetrics) -> str:
    """Return the mean of each reward, `right_sum 0.92  only_digits -0.02`; empty but for a task of the user's own."""
    return "  ".join(f"{name} {value:.2f}" for name, value in rewards_of(step).items())


def set_text(metrics: Mapping[str, float], *, before: Mapping[str, float] | None = None) -> str:
    """Return the metrics of a validation set, `avg@4 0.250, pass@4 0.600`: of several pass@k the largest k. before:
    their values before training, where they are known."""
    names = list(metrics)
    return ", ".join(
        f"{name} {metrics[name]:.3f}" + (f" ({before[name]:.3f} before)" if before and name in before else "")
        for name in (names[0], *names[1:][-1:])
    )


def set_rows(state: RunState) -> list[tuple[str, str]]:
    """Return (label, text) pairs of several validations; none where there is one."""
    now = bool(state.val_last_step)
    return [
        (name, set_text(metrics, before=state.sets_first.get(name) if now else None))
        for name, metrics in state.sets_last.items()
    ]


def _validated(step: StepMetrics) -> str:
    """Format the validation: `0.512 (bf16 0.520)`; one number where it was made in BF16 anyway, or only one was
    measured; `0.512 in bf16` where the step's rollouts were in another scheme."""
    scheme = f" in {step.validated_in}" if step.validated_in != step.scheme else ""
    both = step.val_reward_bf16_mean is not None and step.validated_in != "bf16"
    beside = f" (bf16 {draw.number(step.val_reward_bf16_mean)})" if both else ""
    return draw.number(step.val_reward_mean) + scheme + beside


def _guarded(step: StepMetrics) -> str:
    """Return the guard's level, from the first that does something."""
    return "" if step.guard_level == "observe" else step.guard_level


def step_parts(step: StepMetrics) -> dict[str, float]:
    """Split a step's seconds, in the order of the work, without parts that it does not have; `rest` is what no part
    accounts for."""
    seconds_s = (step.rollout_s, step.logprob_s, step.update_s, step.sync_s)
    known = {str(phase): seconds for phase, seconds in zip(OF_A_STEP, seconds_s, strict=True) if seconds}
    rest = (step.step_s or 0.0) - sum(known.values())
    return {**known, "rest": rest} if rest >= 0.05 else known


def _plain_times(step: StepMetrics) -> str:
    if step.step_s is None:
        return ""
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in step_parts(step).items())
    return f"took {step.step_s:.1f} s ({parts})" if parts else f"took {step.step_s:.1f} s"


def mismatch_reasons(step: StepMetrics, judgement: MismatchJudgement, *, bounds: MismatchBounds) -> tuple[str, ...]:
    """Return a phrase for each signal that makes the step's mismatch bad. bounds: as it was judged by."""
    if step.nonfinite_fraction:  # then no number of the mismatch is finite
        return (f"log-probs of {step.nonfinite_fraction:.2%} of the tokens are not finite",)
    (_, k3), (ess, _), (_, spread) = bounds.k3_kl.bad, bounds.ess.bad, bounds.weight_std.bad
    (low, high), (_, share) = bounds.weight_mean.bad, bounds.truncated_fraction.bad
    phrases = {
        "differing_fraction": lambda _: counted(
            round(step.differing_tokens or 0), "log-prob is not the rollouts'", plural="log-probs are not the rollouts'"
        ),
        "k3_kl": lambda value: f"k3 {beside(value, k3)} is above {k3:g}",
        "weight_mean": lambda value: (
            f"mean weight {beside(value, low, high, form='.2f')} is not within {low:g} to {high:g}"
        ),
        "weight_std": lambda value: f"spread of the weights {beside(value, spread)} is above {spread:g}",
        "ess": lambda value: f"ESS {beside(value, ess, form='.2f')} is below {ess:g}",
        "truncated_fraction": lambda value: f"share of cut weights {beside(value, share)} is above {share:g}",
    }
    return tuple(phrases[cause.signal](cause.value) for cause in judgement.causes)


def _plain_mismatch(step: StepMetrics, *, bounds: MismatchBounds) -> str:
    judgement = judge_step(step, bounds=bounds)
    if judgement.health is MismatchHealth.UNKNOWN:
        details = ""
    elif judgement.health is MismatchHealth.BAD:
        details = f": {', '.join(mismatch_reasons(step, judgement, bounds=bounds))}"
    else:
        details = f" (k3 {_k3(step, bounds=bounds)}, ESS {_ess(step, bounds=bounds)})"
    return f"mismatch {judgement.health.word}{details}"


def _k3(step: StepMetrics, *, bounds: MismatchBounds) -> str:
    return "-" if step.mismatch_k3_kl is None else beside(step.mismatch_k3_kl, bounds.k3_kl.bad[1], form=".1e")


def _ess(step: StepMetrics, *, bounds: MismatchBounds) -> str:
    return "-" if step.is_ess is None else beside(step.is_ess, bounds.ess.bad[0], form=".3f")


def _scheme(step: StepMetrics) -> str:
    scheme = f"{step.scheme} (emulated)" if step.emulated else step.scheme
    if not step.bf16_layers or step.scheme == "bf16":
        return scheme
    return f"{scheme}, {counted(int(step.bf16_layers), 'layer')} in bf16"


def _tiny(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def panel(plan: RunPlan, state: RunState, *, now: float, columns: int, ascii_only: bool = False) -> RenderableType:
    """Draw the live display. now: unix s.  columns: of the terminal; bars are left out of narrow ones."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    shown = draw.IN_ASCII if ascii_only else {}
    for label, text in _rows(state, now=now, bars=columns >= _FEWEST_COLUMNS_FOR_BARS):
        table.add_row(printable(label), Text(printable(text).translate(shown)) if isinstance(text, str) else text)
    return Panel(table, title=Text(title(plan)), title_align="left")


def _rows(state: RunState, *, now: float, bars: bool) -> Iterator[tuple[str, str | Text]]:
    def bar(done: float, total: float) -> str:
        return draw.bar(done, total=total, width=_BAR_WIDTH) + "  " if bars else ""

    work, last, left = state.work, state.last, remaining_s(state, now=now)
    about = "" if left is None else f"about {draw.duration(left)} left"
    since = draw.duration(now - state.phase_since) if state.phase_since else ""
    yield "phase", f"{phase_text(state.phase)}  {since}".rstrip()
    if work is not None:
        parts = (f"{work.done:g} of {work.total:g}", work.note, about)
        yield work.label, bar(work.done, work.total) + "  ".join(part for part in parts if part)
    until = f"  {about}" if about and work is None and state.step < state.steps else ""
    yield "step", f"{bar(state.step, state.steps)}{state.step} of {state.steps}{until}"
    if state.rewards:
        spark = draw.sparkline(state.rewards.some, width=_SPARK_WIDTH) if bars else ""
        yield "reward", f"{state.rewards.last[-1]:.3f}  {spark}".rstrip()
    if last is not None and (rewards := rewards_text(last)):
        yield "rewards", rewards
    if state.val_last is not None:
        yield "validation", validation_text(state)
        yield from set_rows(state)
    if last is not None:
        yield "speed", f"{draw.tokens_per_s(last.rollout_tokens_per_s)} of rollout in {_scheme(last)}"
        yield "step time", _times_text(last, bars=bars)
        yield "mismatch", _mismatch_text(last, bounds=state.bounds)
        if last.mismatch_top_kl is not None:
            yield "distributions", _distributions_text(last)
        if level := _guarded(last):
            yield "guard", level
        if last.proof_s is not None:
            yield "sync", _sync_text(last)
    if state.note:
        yield "note", state.note


def _sync_text(step: StepMetrics) -> str:
    """Return the last weight update: proven, and what it did to the codes where the scheme has codes."""
    of_codes = (
        ("codes changed", step.codes_changed_fraction),
        ("saturated", step.saturated_fraction),
        ("scales moved", step.scale_drift),
        ("layer error up to", step.layer_error_max),
    )
    told = (f"{words} {fraction:.2%}" for words, fraction in of_codes if fraction is not None)
    return "  ".join((f"proven in {step.proof_s:.2f} s", *told))


def validation_text(state: RunState) -> str:
    """Return the validation before training and the newest one after a step, as text."""
    before = "" if state.val_first is None else f"{state.val_first:.3f} before"
    now = f"{state.val_last:.3f} after step {state.val_last_step}" if state.val_last_step else ""
    if now and state.val_bf16 is not None:
        now += f" (bf16 {state.val_bf16:.3f})"
    samples = f"  ({counted(state.val_samples, 'problem')}, {state.val_how})" if state.val_samples else ""
    return ", ".join(part for part in (before, now) if part) + samples


def _times_text(step: StepMetrics, *, bars: bool) -> str:
    parts = step_parts(step)
    if not bars or not parts:
        return _plain_times(step).removeprefix("took ")
    legend = "  ".join(
        f"{fill} {name} {seconds:.1f}" for fill, (name, seconds) in zip(draw.FILLS, parts.items(), strict=False)
    )
    picture = draw.split_bar([*parts.values()], width=_BAR_WIDTH)
    return f"{draw.number(step.step_s, digits=1)} s  {picture}\n{legend}"


def _mismatch_text(step: StepMetrics, *, bounds: MismatchBounds) -> Text:
    health = judge_step(step, bounds=bounds).health
    (_, k3), (ess, _), (low, high) = bounds.k3_kl.bad, bounds.ess.bad, bounds.weight_mean.bad
    word = Text(health.word, style=_STYLES[health])
    mean = step.is_weight_mean
    weight = "-" if mean is None else beside(mean, low, high, form=".3f")
    return word.append(
        f"  k3 {_k3(step, bounds=bounds)} (below {k3:g})  ESS {_ess(step, bounds=bounds)} (above {ess:g})"
        f"  mean weight {weight} ({low:g} to {high:g})",
        style="default",
    )


def _distributions_text(step: StepMetrics) -> str:
    """Say what sampled tokens alone do not say."""
    equal = step.mismatch_top_equal_fraction or 0.0
    return f"{_tiny(step.mismatch_top_kl)} nats apart, equal at {equal:.2%} of the tokens"


class Progress(contextlib.ExitStack):
    """Shows nothing; its subclasses show the progress of a run."""

    def show(self, state: RunState, news: News, *, now: float) -> None:
        """Show progress; called a few times a second. state: the newest.  news: what has come since the last call."""


def choose_progress(plan: RunPlan, *, json_mode: bool, quiet: bool = False) -> Progress:
    """Choose how progress is shown. quiet: a live panel or nothing, because the caller has many runs and prints a line
    for each."""
    if json_mode:
        return JsonProgress()
    people = console.err_console()
    if console.is_live(people):
        return LiveProgress(plan, people)
    return Progress() if quiet else PlainProgress()


class LiveProgress(Progress):
    """The panel, redrawn by the caller's ticks: no thread beside the one that starts children."""

    def __init__(self, plan: RunPlan, people: Console) -> None:
        super().__init__()
        self._plan = plan
        self._people = people
        self._live = Live(console=people, auto_refresh=False, transient=True)
        self._drawn = 0.0

    def __enter__(self) -> Self:
        self.enter_context(self._live)
        return super().__enter__()

    def show(self, state: RunState, news: News, *, now: float) -> None:
        if not news and time.monotonic() < self._drawn + _REDRAW_S:
            return
        self._drawn = time.monotonic()
        people = self._people
        drawn = panel(self._plan, state, now=now, columns=people.width, ascii_only=people.options.ascii_only)
        self._live.update(drawn, refresh=True)


class PlainProgress(Progress):
    """Prints one line per step and per phase; the phases inside a step only until the first step is done."""

    def __init__(self) -> None:
        super().__init__()
        self._steps_begun = False
        self._printed: tuple[str, int] = ("", -1)

    def show(self, state: RunState, news: News, *, now: float) -> None:
        for item in news:
            if line := self._line(state, item, now=now):
                console.say(line)

    def _line(self, state: RunState, item: Event | StepMetrics, *, now: float) -> str:
        if isinstance(item, StepMetrics):
            if item.reward_mean is None:
                return plain_validation(item)
            self._steps_begun = True
            return plain_step(state, item, now=now)
        if item.kind == "phase":
            quiet = self._steps_begun and item.what in OF_A_STEP
            return "" if quiet else f"phase {item.what}: {phase_text(item.what)}"
        if item.kind == "progress":
            return self._progress(item)
        if item.kind not in ("note", "guard", "cluster") or item.why == "preflight":  # printed before
            return ""
        return f"{item.kind}: {item.what}"

    def _progress(self, item: Event) -> str:
        """Return a line per quarter of the work."""
        if item.done is None or not item.total:
            return ""
        reached = (item.what, int(item.done / item.total * _QUARTERS))
        if reached == self._printed:
            return ""
        self._printed = reached
        note = f"  {item.note}" if item.note else ""
        return f"{item.what} {item.done:g}/{item.total:g}{note}"


class JsonProgress(Progress):
    """Prints every event and every line of metrics on stdout as it comes, with its `type` in front."""

    def show(self, state: RunState, news: News, *, now: float) -> None:
        for item in news:
            kind = "metrics" if isinstance(item, StepMetrics) else "event"
            console.out(json_line(kind, json.loads(item.line)))


def json_line(kind: str, values: dict[str, Any]) -> str:
    return json.dumps({"type": kind, **values})
