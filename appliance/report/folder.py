"""What a run's folder says, read at one moment: half a line, half a run and values that are not finite included."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from appliance.record.events import (
    EVENTS_FILE,
    METRICS_FILE,
    Event,
    StepMetrics,
    parse_event,
    parse_metrics,
)
from appliance.record.lines import json_object
from appliance.record.memory import MemorySample, read_memory
from appliance.record.plan import RunPlan
from appliance.record.samples import StepSamples, read_samples
from appliance.record.session import RunRecord, RunStatus
from appliance.record.state import RunState, fold
from appliance.report.status import read_run


@dataclass(frozen=True)
class Attest:
    """One file of `attest/`: what a process says it runs. kernels: (name, how many layers)."""

    process: str
    role: str
    scheme: str
    emulated: bool
    patches: tuple[str, ...]
    kernels: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Attempt:
    """number: from 1.  time: unix s of its first event.  after: the last step that it found done."""

    number: int
    time: float
    after: int


@dataclass(frozen=True)
class RunView:
    """All that a page shows. steps: each one once, in their order, without a validation before training.

    lines: `steps` with that one.  checkpoints: steps whose state is in the folder.  versions: (name, version).
    """

    run_dir: Path
    plan: RunPlan
    record: RunRecord
    state: RunState
    lines: tuple[StepMetrics, ...]
    events: tuple[Event, ...]
    attempts: tuple[Attempt, ...]
    memory: tuple[MemorySample, ...]
    samples: tuple[StepSamples, ...]
    attests: tuple[Attest, ...]
    versions: tuple[tuple[str, str], ...]
    recipe_yaml: str

    @property
    def steps(self) -> tuple[StepMetrics, ...]:
        return tuple(line for line in self.lines if line.reward_mean is not None or line.step > 0)

    @property
    def started(self) -> float:
        """Unix s of the first event, 0 before it."""
        return self.events[0].time if self.events else 0.0

    @property
    def ended(self) -> float:
        """Unix s of the last sign of the run."""
        signs = [self.events[-1].time if self.events else 0.0, self.memory[-1].time if self.memory else 0.0]
        return max(signs)

    @property
    def is_live(self) -> bool:
        return self.record.state in (RunStatus.STARTING, RunStatus.RUNNING)


def read_view(run_dir: Path) -> RunView:
    """Raises RecipeError when the folder cannot be read as a run."""
    plan, record = read_run(run_dir)
    events = read_events(run_dir)
    lines = read_metrics(run_dir)
    state = RunState(steps=plan.steps)
    for news in (*events, *lines):
        state = fold(state, news)
    return RunView(
        run_dir=run_dir,
        plan=plan,
        record=record,
        state=state,
        lines=lines,
        events=events,
        attempts=_attempts(events),
        memory=tuple(read_memory(run_dir)),
        samples=tuple(read_samples(run_dir)),
        attests=_attests(run_dir),
        versions=_versions(run_dir / "versions.json"),
        recipe_yaml=_text(run_dir / "recipe.yaml"),
    )


def read_events(run_dir: Path) -> tuple[Event, ...]:
    return tuple(event for event in map(parse_event, _lines(run_dir / EVENTS_FILE)) if event is not None)


def read_metrics(run_dir: Path) -> tuple[StepMetrics, ...]:
    """Each step once, in their order; of a step that was done again the later line."""
    lines = map(parse_metrics, _lines(run_dir / METRICS_FILE))
    found = {each.step: each for each in lines if each is not None}
    return tuple(found[step] for step in sorted(found))


def _attempts(events: tuple[Event, ...]) -> tuple[Attempt, ...]:
    resumed = [event for event in events if event.kind == "resume"]
    first = [Attempt(1, events[0].time, after=0)] if events else []
    return (*first, *(Attempt(n, event.time, after=event.step or 0) for n, event in enumerate(resumed, start=2)))


def _attests(run_dir: Path) -> tuple[Attest, ...]:
    found = [(path.stem, json_object(_text(path))) for path in sorted((run_dir / "attest").glob("*.json"))]
    return tuple(
        Attest(
            process=name,
            role=str(raw.get("role", "")),
            scheme=str(raw.get("scheme", "")),
            emulated=raw.get("emulated") is True,
            patches=_names(raw.get("patches")),
            kernels=_kernels(raw.get("detail")),
        )
        for name, raw in found
    )


def _names(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()


def _kernels(detail: object) -> tuple[tuple[str, int], ...]:
    kernels = detail.get("kernels") if isinstance(detail, dict) else None
    counts = kernels.items() if isinstance(kernels, dict) else ()
    return tuple((str(name), count) for name, count in counts if isinstance(count, int))


def _versions(path: Path) -> tuple[tuple[str, str], ...]:
    raw = json_object(_text(path))
    distributions = raw.get("distributions")
    named = distributions.items() if isinstance(distributions, dict) else ()
    plain = [(name, raw[name]) for name in ("model", "python", "platform", "fingerprint") if name in raw]
    return tuple((str(name), str(version)) for name, version in (*named, *plain))


def _lines(path: Path) -> list[str]:
    """Whole ones: the last one of a run that was killed may be half a line."""
    return _text(path).split("\n")[:-1]


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.is_file() else ""
