"""What an arm's runs come to, against the baseline's: means, an interval, a verdict. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from appliance.compare.interval import Interval
from appliance.compare.results import RunResult, Step
from appliance.corrections.registry import METHODS, NONE, CorrectionMethod


class Verdict(StrEnum):
    """Verdict on an arm: where the interval of its difference from the baseline lies, measured against the margin."""

    BASELINE = "baseline"
    """The arm is the baseline itself."""
    WITHIN = "within"
    """The whole interval lies within the margin."""
    FAILS = "fails"
    """The whole interval lies below the margin."""
    BETTER = "better"
    """The whole interval lies above the margin."""
    OPEN = "open"
    """The interval reaches over a bound of the margin."""
    STOPPED = "stopped"
    """A guard ended at least one run, so not every seed has a model."""
    MISSING = "missing"
    """There is no run to judge, or none to compare it with."""


@dataclass(frozen=True)
class ArmResult:
    """Result of one arm: a row of the table."""

    arm: str
    method: CorrectionMethod
    runs: tuple[RunResult, ...]
    final: float | None
    """Mean reward of the final validation, 0..1 for exact answers."""
    trainer_final: float | None
    """Mean reward of the trainer's last validation, in the run's scheme."""
    difference: Interval | None
    """Difference to the arm `against`, over the seeds that both have."""
    by_seed: tuple[tuple[int, Interval], ...]
    """Difference to the arm `against` for each seed by itself."""
    verdict: Verdict
    failing: tuple[int, ...]
    """Seeds whose whole interval is below -margin, or that a guard stopped."""
    truncated: float | None
    """Share of tokens that the correction acted on, mean over all steps."""
    truncated_max: float | None
    """Truncated share of the worst step."""
    inactive: bool
    """Whether there is a correction and it never acted."""
    k3_kl: float | None
    """Mismatch k3 in nats, median over all steps."""
    k3_max: float | None
    """Mismatch k3 in nats, largest over all steps."""
    codes_changed: float | None
    """Share of codes that a weight update changed, median."""
    step_s: float | None
    """Seconds of a step, median."""
    seconds: float | None
    """Seconds of a whole run, mean."""
    busy: bool
    """Whether other work was on the machine, so that the times are no measurements."""
    planned_seeds: int = 0
    """Number of seeds that the arm was to have."""
    against: str = ""
    """Arm that it is compared with, empty for the baseline."""


def _is_seen_in_cuts(method: CorrectionMethod) -> bool:
    """Tell whether a method that acts cuts, masks or drops tokens: centering alone does so without."""
    return method is not NONE and (not METHODS[method].centers or METHODS[method].usual_cap is not None)


def judge(
    results: Sequence[RunResult],
    *,
    arms: Sequence[str],
    baseline: str,
    margin: float,
    seeds: int = 0,
    against: Mapping[str, str] = MappingProxyType({}),
) -> list[ArmResult]:
    """Judge the arms: a row for each, in their order, also for an arm without runs. against: as in Comparison.  margin:
    of a mean reward, > 0.  seeds: how many each arm was to have; a verdict from fewer says so."""
    by_arm = {arm: tuple(sorted((r for r in results if r.arm == arm), key=lambda r: r.seed)) for arm in arms}
    rows = []
    for arm, runs in by_arm.items():
        steps = [row for run in runs for row in run.steps if row.reward_mean is not None]
        other = "" if arm == baseline else against.get(arm, baseline)
        base = {run.seed: run for run in by_arm.get(other, ()) if run.rewards}
        pairs = [(run, base[run.seed]) for run in runs if run.rewards and run.seed in base]
        difference = _interval(pairs) if pairs else None
        by_seed = tuple((pair[0].seed, _interval([pair])) for pair in pairs)
        stopped = [run.seed for run in runs if not run.rewards]
        below = [seed for seed, interval in by_seed if interval.high < -margin]
        verdict = Verdict.STOPPED if stopped else _verdict(difference, margin=margin)
        truncated, k3 = field_values(steps, "is_truncated_fraction"), field_values(steps, "mismatch_k3_kl")
        method = runs[0].method if runs else NONE
        rows.append(
            ArmResult(
                arm=arm,
                method=method,
                runs=runs,
                final=_mean(run.final for run in runs),
                trainer_final=_mean(run.trainer_final for run in runs if run.rewards),
                difference=difference,
                by_seed=by_seed,
                verdict=Verdict.BASELINE if arm == baseline else verdict,
                failing=tuple(sorted({*stopped, *below})),
                truncated=_mean(truncated),
                truncated_max=max(truncated, default=None),
                inactive=bool(truncated) and _is_seen_in_cuts(method) and max(truncated) == 0.0,
                k3_kl=_median(k3),
                k3_max=max(k3, default=None),
                codes_changed=_median(field_values(steps, "codes_changed_fraction")),
                step_s=_median(field_values(steps, "step_s")),
                seconds=_mean(run.seconds for run in runs),
                busy=any(run.is_busy for run in runs),
                planned_seeds=seeds,
                against=other,
            )
        )
    return rows


def _interval(pairs: Sequence[tuple[RunResult, RunResult]]) -> Interval:
    from appliance.compare.bootstrap import paired_interval  # loads numpy

    return paired_interval([list(a.rewards) for a, _ in pairs], baseline_SP=[list(b.rewards) for _, b in pairs])


def _verdict(difference: Interval | None, *, margin: float) -> Verdict:
    if difference is None:
        return Verdict.MISSING
    if -margin <= difference.low and difference.high <= margin:
        return Verdict.WITHIN
    if difference.high < -margin:
        return Verdict.FAILS
    return Verdict.BETTER if difference.low > margin else Verdict.OPEN


def verdict_text(row: ArmResult, *, margin: float) -> str:
    """Render a verdict for people: `within ±0.03, inactive`, `fails (3 of 3 seeds)`, `within ±0.03, from 2 of 3
    seeds`."""
    text = {
        Verdict.BASELINE: "baseline",
        Verdict.WITHIN: f"within ±{margin:g}",
        Verdict.FAILS: "fails",
        Verdict.BETTER: f"better by more than {margin:g}",
        Verdict.OPEN: f"open: the interval crosses ±{margin:g}",
        Verdict.STOPPED: "stopped by the guard",
        Verdict.MISSING: "no result"
        if row.final is None
        else f"nothing to compare with: no result of `{row.against}` with its seed{'' if len(row.runs) == 1 else 's'}",
    }[row.verdict]
    if row.verdict not in (Verdict.BASELINE, Verdict.MISSING) and len(row.by_seed) < row.planned_seeds:
        text += f", from {len(row.by_seed)} of {row.planned_seeds} seeds"
    if row.failing:
        text += f" ({len(row.failing)} of {len(row.runs)} seed{'' if len(row.runs) == 1 else 's'})"
    return f"{text}, inactive" if row.inactive else text


def curve(runs: Iterable[RunResult], field: str) -> list[tuple[int, float, float, float]]:
    """Return (step, mean, smallest, largest) over the runs that have the step. field: of Step."""
    by_step: dict[int, list[float]] = {}
    for run in runs:
        for row in run.steps:
            by_step.setdefault(row.step, []).extend(field_values([row], field))
    return [(step, sum(v) / len(v), min(v), max(v)) for step, v in sorted(by_step.items()) if v]


def field_values(steps: Iterable[Step], field: str) -> list[float]:
    """Return the values of the steps that have one. field: of Step."""
    return [found for row in steps if (found := getattr(row, field)) is not None]


def _mean(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found else None


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None
