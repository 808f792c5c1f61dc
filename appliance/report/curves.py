"""The curves of a run over its steps. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from appliance.guard.policy import ESS, K3_KL, WEIGHT_MEAN
from appliance.page.stacked import stacked_chart
from appliance.page.svg import MOST, Bound, Chart, Mark, Point, Series, line_chart, thinned
from appliance.record.events import StepMetrics
from appliance.report.display import step_parts
from appliance.report.folder import RunView
from appliance.terms.schemes import Scheme

Value = Callable[[StepMetrics], float | None]

_PARTS = ("rollout", "log-probs", "update", "sync", "rest")
_PART_COLOURS = (0, 5, 2, 4, 7)


def curves(view: RunView) -> list[tuple[str, list[str]]]:
    """Figures by heading."""
    return [
        ("What it learned", _learned(view)),
        ("How far the rollout policy is from the trainer's", [*_mismatch(view), *_quantised(view)]),
        ("What a step takes", _spent(view)),
    ]


def _learned(view: RunView) -> list[str]:
    marks, scheme = attempt_marks(view), view.plan.rollout.label
    validation = [Series(scheme, _points(view.lines, lambda line: line.val_reward_mean, sparse=True), 0, dotted=True)]
    if scheme != str(Scheme.BF16):
        bf16 = _points(view.lines, lambda line: line.val_reward_bf16_mean, sparse=True)
        validation.append(Series("bf16", bf16, 1, dotted=True))
    return [
        _curve(view, Chart("Reward", "sampled, mean of a step", marks=marks), lambda s: s.reward_mean),
        line_chart(Chart("Validation", "greedy, unseen problems", marks=marks, legend=True), validation),
        _curve(view, Chart("Response", "tokens, mean", marks=marks, from_zero=True), lambda s: s.response_tokens_mean),
        _curve(view, Chart("Entropy", "nats per token", marks=marks), lambda s: s.entropy),
        _curve(view, Chart("Gradient norm", "before clipping", marks=marks, from_zero=True), lambda s: s.grad_norm),
    ]


def _mismatch(view: RunView) -> list[str]:
    marks = [*attempt_marks(view), *_guard_marks(view)]
    low, high = WEIGHT_MEAN
    guard, of_k3 = view.plan.guard, [Bound(K3_KL, f"bound {K3_KL}")]
    if guard.actions and guard.k3_kl != K3_KL:
        of_k3.append(Bound(guard.k3_kl, f"guard.k3_kl {guard.k3_kl:g}"))
    of_ess = [Bound(ESS, f"bound {ESS}")]
    of_weights = [Bound(low, f"mean above {low:g}"), Bound(high, f"mean below {high:g}")]
    k3 = Chart("Mismatch, k3", "nats per token, logarithmic", logarithmic=True, bounds=of_k3, marks=marks)
    before = "before truncation, logarithmic"
    weights = Chart("Importance weights", before, logarithmic=True, bounds=of_weights, marks=marks, legend=True)
    acted = Chart("Truncated", "share of the tokens that the correction acted on", marks=marks, from_zero=True)
    return [
        _curve(view, k3, lambda s: s.mismatch_k3_kl),
        _curve(view, Chart("Effective sample size", "share", bounds=of_ess, marks=marks), lambda s: s.is_ess),
        line_chart(
            weights,
            [
                Series("mean", _points(view.steps, lambda s: s.is_weight_mean), 0),
                Series("largest", _points(view.steps, lambda s: s.is_weight_max), 1),
            ],
        ),
        _curve(view, acted, lambda s: s.is_truncated_fraction),
    ]


def _quantised(view: RunView) -> list[str]:
    """What weight updates did to the codes; nothing for a run whose rollouts are in BF16 throughout."""
    if all(step.codes_changed_fraction is None for step in view.steps):
        return []
    marks = [*attempt_marks(view), *_guard_marks(view)]
    shown: tuple[tuple[str, str, Value], ...] = (
        ("Codes changed", "share, by an update", lambda s: s.codes_changed_fraction),
        ("Saturated codes", "share, at the largest value", lambda s: s.saturated_fraction),
        ("Scale drift", "mean |log(scale / first scale)|", lambda s: s.scale_drift),
        ("Quantisation error", "relative, of the worst layer", lambda s: s.layer_error_max),
    )
    return [_curve(view, Chart(title, unit, marks=marks, from_zero=True), value) for title, unit, value in shown]


def _spent(view: RunView) -> list[str]:
    marks = attempt_marks(view)
    timed = [step for step in view.steps if step.step_s is not None]
    rows = _together([(float(step.step), _split(step)) for step in timed])
    there = [place for place in range(len(_PARTS)) if any(parts[place] for _, parts in rows)]
    speed = Chart("Rollout speed", "tokens per second", marks=marks, from_zero=True)
    return [
        _curve(view, speed, lambda s: s.rollout_tokens_per_s),
        stacked_chart(
            Chart("Time of a step", "s", marks=marks, legend=True),
            [_PARTS[place] for place in there],
            [(x, [parts[place] for place in there]) for x, parts in rows],
            colours=[_PART_COLOURS[place] for place in there],
        ),
    ]


def _split(step: StepMetrics) -> list[float]:
    """Seconds per name of _PARTS."""
    known = dict(step_parts(step))
    return [max(0.0, known.get(name, 0.0)) for name in _PARTS]


def _together(rows: Sequence[tuple[float, list[float]]]) -> list[tuple[float, list[float]]]:
    """Means of runs of steps where there are too many to draw."""
    size = max(1, -(-len(rows) // MOST))
    runs = [rows[start : start + size] for start in range(0, len(rows), size)]
    return [
        (run[len(run) // 2][0], [sum(parts) / len(run) for parts in zip(*(each for _, each in run), strict=True)])
        for run in runs
    ]


def attempt_marks(view: RunView) -> list[Mark]:
    """Where a later attempt went on: between the last step it found done and its own first one."""
    return [
        Mark(attempt.after + 0.5, f"attempt {attempt.number} goes on after step {attempt.after}")
        for attempt in view.attempts[1:]
    ]


def _guard_marks(view: RunView) -> list[Mark]:
    told = [event for event in view.events if event.kind == "guard" and event.step is not None]
    return [Mark(float(event.step or 0), event.what, kind="mark warn") for event in told]


def _curve(view: RunView, chart: Chart, value: Value) -> str:
    return line_chart(chart, [Series("value", _points(view.steps, value), 0)])


def _points(lines: Sequence[StepMetrics], value: Value, *, sparse: bool = False) -> list[Point]:
    """sparse: most lines have none, and the curve goes on over them; else it breaks where a value is missing."""
    points = [(float(line.step), value(line)) for line in lines]
    return thinned([point for point in points if point[1] is not None] if sparse else points)
