"""What a person sees of a run: one line each in plain text, and the panel of a terminal. Pure."""

from __future__ import annotations

from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from appliance.console import printable
from appliance.guard.policy import ESS, K3_KL, WEIGHT_MEAN
from appliance.record.events import StepMetrics
from appliance.record.health import judge
from appliance.record.plan import RunPlan
from appliance.record.state import RunState, remaining_s
from appliance.report import draw

PHASES = {
    "starting": "starting",
    "preflight": "looking at this host",
    "prepare": "making what the cache lacks",
    "scale": "scaling the model (UAQ)",
    "profile": "profiling the model",
    "start": "starting Ray",
    "load-model": "loading the trainer's model",
    "load-engine": "starting the rollout engine",
    "restart-engines": "starting new rollout engines",
    "attest": "checking what every worker runs",
    "sync": "sending the weights to the rollout engine",
    "validate": "validating, greedy",
    "rollout": "generating rollouts",
    "log-probs": "computing log-probabilities",
    "update": "updating the policy",
    "save": "saving a checkpoint",
    "export": "writing model/",
    "done": "done",
}
_SPARK_WIDTH = 30
_BAR_WIDTH = 30
_FEWEST_COLUMNS_FOR_BARS = 70


def phase_text(phase: str) -> str:
    return PHASES.get(phase, phase)


def title(plan: RunPlan) -> str:
    """`name: int8 rollouts, tis with cap 2`."""
    rollout = f"{plan.rollout.label}{', emulated,' if plan.rollout.emulated else ''} rollouts"
    return f"{plan.name}: {rollout}, {plan.correction.text}"


def plain_step(state: RunState, step: StepMetrics, *, now: float) -> str:
    """The line of one finished step. now: unix s."""
    parts = [f"step {step.step}/{state.steps}", f"reward {draw.number(step.reward_mean)}"]
    if step.val_reward_mean is not None:
        parts.append(f"validation {_validated(step)}")
    parts += [draw.tokens_per_s(step.rollout_tokens_per_s), _plain_times(step), _scheme(step), _plain_mismatch(step)]
    parts.append(_guarded(step))
    left = remaining_s(state, now=now)
    if left is not None and step.step < state.steps:
        parts.append(f"about {draw.duration(left)} left")
    return "  ".join(part for part in parts if part)


def plain_validation(step: StepMetrics) -> str:
    """The line of a validation that belongs to no step: the one before training."""
    samples = "" if step.val_samples is None else f" ({step.val_samples:.0f} problems, greedy)"
    return f"validation before training {_validated(step)}{samples}"


def _validated(step: StepMetrics) -> str:
    """`0.512 (bf16 0.520)`; one number where rollouts are in BF16 anyway, or only one was measured."""
    both = step.val_reward_bf16_mean is not None and step.scheme != "bf16"
    beside = f" (bf16 {draw.number(step.val_reward_bf16_mean)})" if both else ""
    return draw.number(step.val_reward_mean) + beside


def _guarded(step: StepMetrics) -> str:
    """`guard tighten`, from the first level that does something."""
    return f"guard {step.guard_level}" if step.guard_level not in ("", "observe") else ""


def step_parts(step: StepMetrics) -> tuple[tuple[str, float], ...]:
    """How a step's seconds split, in the order of the work; `rest` is what no part accounts for."""
    named = (
        ("rollout", step.rollout_s),
        ("log-probs", step.logprob_s),
        ("update", step.update_s),
        ("sync", step.sync_s),
    )
    known = tuple((name, seconds) for name, seconds in named if seconds is not None)
    rest = (step.step_s or 0.0) - sum(seconds for _, seconds in known)
    return (*known, ("rest", rest)) if rest >= 0.05 else known


def _plain_times(step: StepMetrics) -> str:
    if step.step_s is None:
        return ""
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in step_parts(step))
    return f"took {step.step_s:.1f} s ({parts})" if parts else f"took {step.step_s:.1f} s"


def _plain_mismatch(step: StepMetrics) -> str:
    verdict = judge(step)
    if verdict.word == "unknown":
        return "mismatch unknown"
    if not verdict.healthy:
        return f"mismatch bad: {', '.join(verdict.reasons)}"
    return f"mismatch fine (k3 {_tiny(step.mismatch_k3_kl)}, ESS {draw.number(step.is_ess)})"


def _scheme(step: StepMetrics) -> str:
    raised = f", {step.bf16_layers:g} layers in bf16" if step.bf16_layers and step.scheme != "bf16" else ""
    return (f"{step.scheme} (emulated)" if step.emulated else step.scheme) + raised


def _tiny(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def panel(plan: RunPlan, state: RunState, *, now: float, columns: int, ascii_only: bool = False) -> RenderableType:
    """The live display. now: unix s.  columns: of the terminal; bars are left out of narrow ones."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    bars = columns >= _FEWEST_COLUMNS_FOR_BARS
    for label, text in _rows(state, now=now, bars=bars, ascii_only=ascii_only):
        table.add_row(label, text)
    return Panel(table, title=Text(title(plan)), title_align="left")


def _rows(state: RunState, *, now: float, bars: bool, ascii_only: bool) -> list[tuple[str, Text]]:
    since = draw.duration(now - state.phase_since) if state.phase_since else ""
    rows = [("phase", _said(f"{phase_text(state.phase)}  {since}".rstrip()))]
    if state.work is not None:
        rows.append((printable(state.work.label), _work_text(state, now=now, bars=bars, ascii_only=ascii_only)))
    rows.append(("step", _step_text(state, now=now, bars=bars, ascii_only=ascii_only)))
    if state.rewards:
        spark = draw.sparkline(state.rewards, width=_SPARK_WIDTH, ascii_only=ascii_only) if bars else ""
        rows.append(("reward", Text(f"{state.rewards[-1]:.3f}  {spark}".rstrip())))
    if state.val_last is not None:
        rows.append(("validation", Text(validation_text(state))))
    if state.last is not None:
        rows += _step_rows(state.last, bars=bars, ascii_only=ascii_only)
    if state.note:
        rows.append(("note", _said(state.note)))
    return rows


def _said(text: str) -> Text:
    """What a child wrote into the run's folder, as `console.say` would show it."""
    return Text(printable(text))


def _step_rows(last: StepMetrics, *, bars: bool, ascii_only: bool) -> list[tuple[str, Text]]:
    rollout = f"{draw.tokens_per_s(last.rollout_tokens_per_s)} of rollout in {_scheme(last)}"
    times = _times_text(last, bars=bars, ascii_only=ascii_only)
    rows = [("speed", _said(rollout)), ("step time", times), ("mismatch", _mismatch_text(last))]
    if _guarded(last):
        rows.append(("guard", _said(last.guard_level)))
    return [*rows, ("sync", Text(sync_text(last)))] if last.proof_s is not None else rows


def sync_text(step: StepMetrics) -> str:
    """The last weight update: proven, and what it did to the codes where the scheme has codes."""
    parts = [f"proven in {step.proof_s:.2f} s"]
    for words, fraction in (
        ("codes changed", step.codes_changed_fraction),
        ("saturated", step.saturated_fraction),
        ("scales moved", step.scale_drift),
        ("layer error up to", step.layer_error_max),
    ):
        if fraction is not None:
            parts.append(f"{words} {fraction:.2%}")
    return "  ".join(parts)


def _work_text(state: RunState, *, now: float, bars: bool, ascii_only: bool) -> Text:
    work = state.work
    assert work is not None
    picture = draw.bar(work.done, total=work.total, width=_BAR_WIDTH, ascii_only=ascii_only) + "  " if bars else ""
    left = remaining_s(state, now=now)
    parts = [f"{work.done:g} of {work.total:g}", work.note, "" if left is None else f"about {draw.duration(left)} left"]
    return _said(picture + "  ".join(part for part in parts if part))


def _step_text(state: RunState, *, now: float, bars: bool, ascii_only: bool) -> Text:
    picture = draw.bar(state.step, total=state.steps, width=_BAR_WIDTH, ascii_only=ascii_only) + "  " if bars else ""
    left = remaining_s(state, now=now) if state.work is None else None
    about = "" if left is None or state.step >= state.steps else f"  about {draw.duration(left)} left"
    return Text(f"{picture}{state.step} of {state.steps}{about}")


def validation_text(state: RunState) -> str:
    """Greedy validation before training and the newest one after a step."""
    before = "" if state.val_first is None else f"{state.val_first:.3f} before"
    now = f"{state.val_last:.3f} after step {state.val_last_step}" if state.val_last_step else ""
    if now and state.val_bf16 is not None:
        now += f" (bf16 {state.val_bf16:.3f})"
    samples = f"  ({state.val_samples} problems, greedy)" if state.val_samples else ""
    return ", ".join(part for part in (before, now) if part) + samples


def _times_text(step: StepMetrics, *, bars: bool, ascii_only: bool) -> Text:
    parts = step_parts(step)
    if not bars or not parts:
        return Text(_plain_times(step).removeprefix("took "))
    legend = "  ".join(
        f"{draw.split_fill(index, ascii_only=ascii_only)} {name} {seconds:.1f}"
        for index, (name, seconds) in enumerate(parts)
    )
    picture = draw.split_bar([seconds for _, seconds in parts], width=_BAR_WIDTH, ascii_only=ascii_only)
    return Text(f"{draw.number(step.step_s, digits=1)} s  {picture}\n{legend}")


def _mismatch_text(step: StepMetrics) -> Text:
    verdict = judge(step)
    low, high = WEIGHT_MEAN
    word = Text(verdict.word, style={"fine": "green", "bad": "bold red"}.get(verdict.word, ""))
    return word.append(
        f"  k3 {_tiny(step.mismatch_k3_kl)} (below {K3_KL})  ESS {draw.number(step.is_ess)} (above {ESS})"
        f"  mean weight {draw.number(step.is_weight_mean)} ({low:g} to {high:g})",
        style="default",
    )
