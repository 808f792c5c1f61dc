"""What a run's folder says, read at one moment: half a line, half a run and values that are not finite included."""

from __future__ import annotations

import contextlib
import os.path
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import RecipeError
from appliance.record.attestations import Attestation, read_attestations
from appliance.record.events import Event, MemorySample, StepMetrics, read_events, read_memory, read_metrics
from appliance.record.lines import json_object
from appliance.record.plan import RunPlan, read_plan
from appliance.record.samples import StepSamples, read_samples
from appliance.record.session import RUN_FILE, RunRecord, RunStatus, has_launcher, read_record
from appliance.record.state import RunState, fold

UNFINISHED = (RunStatus.STARTING, RunStatus.RUNNING)
_LOST = "its launcher is gone"
_MOST_NAMES = 10


@dataclass(frozen=True)
class Attempt:
    """number: from 1.  time: unix s of its first event.  after: the last step that it found done."""

    number: int
    time: float
    after: int


@dataclass(frozen=True)
class RunView:
    """All that a page shows. lines: each step once, in order, and a validation before training.  versions: (of, it)."""

    run_dir: Path
    plan: RunPlan
    record: RunRecord
    state: RunState
    lines: tuple[StepMetrics, ...]
    events: tuple[Event, ...]
    attempts: tuple[Attempt, ...]
    memory: list[MemorySample]
    samples: list[StepSamples]
    attests: list[Attestation]
    versions: list[tuple[str, str]]
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
        return max(sign.time for sign in (*self.events[-1:], *self.memory[-1:])) if self.events or self.memory else 0.0

    @property
    def is_live(self) -> bool:
        return self.record.state in UNFINISHED


def find_run(run: str, *, run_root: Path) -> Path:
    """The folder of a run, given by its path or its name under the run root. Raises RecipeError when there is none."""
    for folder in (Path(run), run_root / run):
        if os.path.isfile(folder / RUN_FILE):  # unlike Path.is_file it takes any text
            return folder.absolute()
    names = sorted(path.parent.name for path in run_root.glob(f"*/{RUN_FILE}"))
    hint = f"runs in {run_root}: {', '.join(names[-_MOST_NAMES:])}" if names else f"there are no runs in {run_root}"
    raise RecipeError([(f"run `{run}`: no folder of that path or name with a {RUN_FILE}", hint)])


@contextlib.contextmanager
def reading(run_dir: Path) -> Iterator[None]:
    """An OSError inside, for a file of another user or a folder in a file's place, is a RecipeError."""
    try:
        yield
    except OSError as error:
        raise RecipeError([(f"{run_dir}: cannot be read as a run: {error}", "")]) from error


def read_run(run_dir: Path) -> tuple[RunPlan, RunRecord]:
    """A run that says it goes on and has no launcher any more is stopped. Raises RecipeError."""
    try:
        plan, record = read_plan(run_dir / "plan.json"), read_record(run_dir)
    except (OSError, ValueError) as error:
        raise RecipeError([(f"{run_dir}: cannot be read as a run: {error}", "")]) from error
    if record.state in UNFINISHED and not has_launcher(run_dir):
        return plan, RunRecord(RunStatus.STOPPED, phase=record.phase, attempt=record.attempt, reason=_LOST)
    return plan, record


def read_view(run_dir: Path) -> RunView:
    """Raises RecipeError when the folder cannot be read as a run."""
    plan, record = read_run(run_dir)
    events, lines = tuple(read_events(run_dir)), read_metrics(run_dir)
    state = RunState(steps=plan.steps)
    for news in (*events, *lines):
        state = fold(state, news)
    resumed = [event for event in events if event.kind == "resume"]
    later = (Attempt(number, event.time, after=event.step or 0) for number, event in enumerate(resumed, start=2))
    return RunView(
        run_dir=run_dir,
        plan=plan,
        record=record,
        state=state,
        lines=lines,
        events=events,
        attempts=(*(Attempt(1, event.time, after=0) for event in events[:1]), *later),
        memory=read_memory(run_dir),
        samples=read_samples(run_dir),
        attests=read_attestations(run_dir)[0],
        versions=_versions(json_object(_text(run_dir / "versions.json"))),
        recipe_yaml=_text(run_dir / "recipe.yaml"),
    )


def _versions(raw: dict[str, object]) -> list[tuple[str, str]]:
    distributions = raw.get("distributions")
    named = distributions.items() if isinstance(distributions, dict) else ()
    plain = [(name, raw[name]) for name in ("model", "python", "platform", "fingerprint") if name in raw]
    return [(name, str(version)) for name, version in (*named, *plain)]


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.is_file() else ""
