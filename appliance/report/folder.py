"""What a run's folder says, read at one moment: half a line, half a run and values that are not finite included.

What is read becomes what a page shows at once: curves of a bounded number of points, some of the events, counts,
extremes and the last. Each line is read once. The page needs such bounds anyway: with 360 points for each curve it is
half a MB, with a point for each of 10,000 steps it would be more than 10 MB. Applied while reading, the bounds also
keep the live page as quick to write at the last step as at the first, and the launcher as small: for each update of 64
ranks it would have to hold 64 acknowledgements.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os.path
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from appliance.errors import RecipeError, SyncError
from appliance.finding import fault
from appliance.guard.policy import MismatchBounds
from appliance.guard.signals import MismatchHealth
from appliance.page.stacked import Band, merge_bands
from appliance.page.svg import Thinned
from appliance.record.attestations import Attestation, read_attestations
from appliance.record.events import (
    EVENTS_FILE,
    LINES_AT_ONCE,
    MEMORY_FILE,
    METRICS_FILE,
    Event,
    MemorySample,
    StepMetrics,
    Tail,
    parse_event,
    parse_memory,
    parse_metrics,
)
from appliance.record.lines import json_object, parse_line
from appliance.record.plan import RunPlan, read_plan
from appliance.record.samples import SampleReader, StepSamples
from appliance.record.session import RUN_FILE, RunRecord, RunStatus, has_launcher, read_record
from appliance.record.state import BoundedSeries, RunState, fold, judge_step
from appliance.report.display import mismatch_reasons, step_parts
from appliance.sync.precision import Generation, read_generation
from appliance.sync.records import Acknowledgement, Sent, lines_of_rank
from appliance.terms.phases import OF_A_STEP, Phase
from appliance.terms.schemes import Scheme

PARTS = (*map(str, OF_A_STEP), "rest")  # of a step's time
DOING = {  # the phases of what a run does
    "preparing": (Phase.STARTING, Phase.PREPARE, Phase.SCALE, Phase.PROFILE),
    "loading": (Phase.IMPORT, Phase.START, Phase.LOAD_MODEL, Phase.RESTART_ENGINES, Phase.ATTEST),
    "training": OF_A_STEP,
    "validating": (Phase.VALIDATE,),
    "saving": (Phase.SAVE, Phase.EXPORT),
}
UNFINISHED = (RunStatus.STARTING, RunStatus.RUNNING)
_LOST = "its launcher is gone"
_MOST_NAMES = 10
_MOST_LISTED = 400
_MOST_BANDS = 4096
_LEAST_OF_ALL = 1 / 2000  # of a run's time: a band that is shorter is too narrow to be drawn
_MOST_WAITING = 20_000  # acknowledgements that wait for those of other ranks
_LEAST_AT_ONCE = 100  # lines, however many ranks: a file is opened again each time
_PHASE_KINDS = frozenset({"phase", "failure", "stop", "resume", "restart"})
_BEGINNINGS = frozenset({"resume", "restart"})  # the first events of an attempt: whatever was running had ended before
_DOING_IN = {phase: name for name, phases in DOING.items() for phase in phases}
_NOT_LISTED = frozenset({"phase", "progress"})
_NUMBERS = tuple(each.name for each in dataclasses.fields(StepMetrics) if each.default is None)


@dataclass(frozen=True)
class Attempt:
    number: int
    """Number of the attempt, from 1."""
    time: float
    """Time of its first event, Unix s."""
    after: int
    """Last step that was done when the attempt began."""


class StepHistory:
    """What the lines of a run come to, each step once and in order."""

    count: int
    """Number of steps."""
    curves: defaultdict[str, Thinned]
    """Curves over the steps: of each number of StepMetrics by its name, and `calls_right`."""
    known: defaultdict[str, Thinned]
    """Curves of StepMetrics.user_metrics by name, over the lines that have the number."""
    validated: defaultdict[str, Thinned]
    """Mean rewards of validations, by the scheme in which they were made."""
    parts: dict[str, Thinned]
    """Seconds of the parts of a step by name, over the steps that have them."""
    judged: int
    """Number of steps with a mismatch."""
    bad: int
    """Number of steps with a mismatch out of its bounds."""
    broken: int
    """Number of steps that nothing was learned from, because a log-prob was not finite."""
    last_broken: int
    """Newest step that nothing was learned from; 0 where there is none."""
    last_bad: tuple[int, tuple[str, ...]] | None
    """Newest step with a mismatch out of its bounds, and the reasons."""
    newest: MismatchHealth | None
    """Health of the newest step with a mismatch."""
    k3: tuple[float, int] | None
    """Largest k3, nats, and its step."""
    ess: tuple[float, int] | None
    """Smallest effective sample size, 0..1, and its step."""
    both: StepMetrics | None
    """Newest line with a validation in another scheme than BF16 and one in BF16."""
    failures: float
    """Number of rewards that failed."""

    def __init__(self, bounds: MismatchBounds) -> None:
        """bounds: RunPlan.mismatch_bounds."""
        self._bounds = bounds
        self.count = 0
        self.curves = defaultdict(Thinned)
        self.known = defaultdict(Thinned)
        self.validated = defaultdict(Thinned)
        self.parts = {}
        self.judged = self.bad = self.broken = self.last_broken = 0
        self.last_bad = None
        self.newest = None
        self.k3 = None
        self.ess = None
        self.both = None
        self.failures = 0.0

    def extend(self, lines: Sequence[StepMetrics]) -> None:
        """Append lines. Many at once cost little each."""
        steps = [line for line in lines if line.reward_mean is not None or line.step > 0]
        xs = [float(line.step) for line in steps]
        for name in _NUMBERS:
            self.curves[name].extend(xs, [*map(attrgetter(name), steps)])
        self.curves["calls_right"].extend(xs, [*map(_calls_right, steps)])
        self._extend_parts([step for step in steps if step.step_s is not None])
        for line in lines:
            self._extend_known(line)
        for step in steps:
            self._judge(step)
        self.count += len(steps)

    def _extend_parts(self, steps: Sequence[StepMetrics]) -> None:
        xs, parts = [float(step.step) for step in steps], [step_parts(step) for step in steps]
        for name in PARTS:
            values = [max(0.0, each.get(name, 0.0)) for each in parts]
            self.parts.setdefault(name, Thinned()).extend(xs, values)

    def _extend_known(self, line: StepMetrics) -> None:
        in_scheme, bf16 = line.val_reward_mean, line.val_reward_bf16_mean
        for name, value in line.user_metrics.items():
            self.known[name].extend([float(line.step)], [value])
        for scheme, mean in {str(Scheme.BF16): bf16, line.validated_in: in_scheme}.items():
            if mean is not None:
                self.validated[scheme].extend([float(line.step)], [mean])
        if in_scheme is not None and bf16 is not None and line.validated_in != str(Scheme.BF16):
            self.both = line

    def _judge(self, step: StepMetrics) -> None:
        self.failures += step.reward_failures or 0
        if step.nonfinite_fraction:
            self.broken, self.last_broken = self.broken + 1, step.step
        if step.mismatch_k3_kl is not None:
            self.k3 = max(self.k3 or (step.mismatch_k3_kl, step.step), (step.mismatch_k3_kl, step.step))
        if step.is_ess is not None:
            self.ess = min(self.ess or (step.is_ess, step.step), (step.is_ess, step.step))
        judgement = judge_step(step, bounds=self._bounds)
        if judgement.health is MismatchHealth.UNKNOWN:
            return
        self.judged, self.newest = self.judged + 1, judgement.health
        if judgement.health is MismatchHealth.BAD:
            self.bad, self.last_bad = self.bad + 1, (step.step, mismatch_reasons(step, judgement, bounds=self._bounds))


def _calls_right(step: StepMetrics) -> float | None:
    """Count the calls of a sample that a tool answered without an error."""
    calls, failed = step.tool_calls_mean, step.tool_calls_failed_fraction
    return None if calls is None or failed is None else calls * (1 - failed)


class EventHistory:
    """What the events of a run come to, in their order."""

    started: float
    """Time of the first event, Unix s; 0 before there are any."""
    newest: float
    """Time of the last event, Unix s; 0 before there are any."""
    attempts: list[Attempt]
    """Attempts of the run, in their order."""
    by_kind: defaultdict[str, BoundedSeries[tuple[int, Event]]]
    """All events but phases and progress, by kind, each with its place among them."""
    findings: BoundedSeries[str]
    """Findings of preflight."""
    num_listed: int
    """Number of events but phases and progress."""

    def __init__(self) -> None:
        self.started = self.newest = 0.0
        self.attempts = []
        self.by_kind = defaultdict(BoundedSeries)
        self.findings = BoundedSeries()
        self.num_listed = 0
        self._first: list[Event] = []
        self._last: deque[Event] = deque(maxlen=3 * _MOST_LISTED // 4)
        self._bands: list[Band] = []
        self._open: Event | None = None

    def __bool__(self) -> bool:
        return bool(self.attempts)

    def add(self, event: Event) -> None:
        if not self.attempts:
            self.started = event.time
            self.attempts.append(Attempt(1, event.time, after=0))
        if event.kind == "resume":
            self.attempts.append(Attempt(len(self.attempts) + 1, event.time, after=event.step or 0))
        if event.kind in _PHASE_KINDS:
            self._close(self.newest if event.kind in _BEGINNINGS else event.time)
            self._open = event
        if event.kind not in _NOT_LISTED:
            self._list(event)
        self.newest = event.time

    def _list(self, event: Event) -> None:
        self.by_kind[event.kind] = self.by_kind[event.kind].and_one((self.num_listed, event))
        self.num_listed += 1
        self._last.append(event)
        if len(self._first) < _MOST_LISTED:
            self._first.append(event)
        if event.kind == "note" and event.why == "preflight":
            self.findings = self.findings.and_one(event.what)

    def _close(self, end: float) -> None:
        self._bands[-1:] = self._last_until(end)
        if len(self._bands) > _MOST_BANDS:
            self._bands = merge_bands(self._bands, least=_LEAST_OF_ALL * (end - self.started))

    def _last_until(self, end: float) -> list[Band]:
        """Return the last band and what is active since, one band where they are of one kind."""
        event = self._open
        if event is None or event.kind != "phase" or event.what not in _DOING_IN:
            return self._bands[-1:]
        return merge_bands([*self._bands[-1:], Band(event.time, end, _DOING_IN[event.what], 0)], least=0.0)

    def doing(self, *, ended: float) -> list[Band]:
        """Return bands with the names of DOING, each from its first phase to a phase of another, to the failure or stop
        that ended it, or to the last sign of its attempt. Unix s; of very many, short ones are put together. ended: of
        the run."""
        return [*self._bands[:-1], *self._last_until(ended)]

    def of_kinds(self, kinds: Sequence[str]) -> list[Event]:
        """Return the events of these kinds in their order; of very many, some."""
        return [event for _, event in sorted(each for kind in kinds for each in self.by_kind[kind].with_last())]

    def listed(self) -> tuple[list[Event], int]:
        """Return all events but phases and progress; of very many the first and the last, and how many are left out."""
        left_out = max(0, self.num_listed - _MOST_LISTED)
        return ([*self._first[: _MOST_LISTED // 4], *self._last] if left_out else self._first), left_out


@dataclass
class RankUpdates:
    """What one rank of an engine acknowledged."""

    name: str
    count: int = 0
    first: Acknowledgement | None = None
    newest: Acknowledgement | None = None
    has_switched: bool = False
    sent: dict[int, str] = dataclasses.field(default_factory=dict)
    """Manifests that the trainer sent to the rank, by the number of the update, of the few updates that another rank
    has not reached yet."""
    taken: dict[int, Acknowledgement] = dataclasses.field(default_factory=dict)
    """Acknowledgements, by the number of the update, of the same few updates."""


class UpdateHistory:
    """The weight updates of the newest attempt: what was sent to each rank of an engine, compared with what it took."""

    def __init__(self, run_dir: Path, *, places: Sequence[tuple[int, int]]) -> None:
        """places: (replica, rank of it)."""
        self.ranks = [RankUpdates(f"rollout-{replica}-{rank}") for replica, rank in places]
        self._run_dir = run_dir
        self._tails = [
            tuple(Tail(lines_of_rank(run_dir, role, *place)) for role in ("trainer", "rollout")) for place in places
        ]
        self._newest = self._settled = 0
        self._misses: list[str] = []
        self._num_misses = 0

    def read(self) -> None:
        """Read what is new, of all ranks side by side: updates that all ranks are past need no memory any more. Raises
        OSError."""
        most = max(_LEAST_AT_ONCE, _MOST_WAITING // max(1, len(self.ranks)))
        while any([self._read_rank(*each, most=most) for each in zip(self.ranks, self._tails, strict=True)]):
            self._settle()

    def _read_rank(self, rank: RankUpdates, tails: tuple[Tail, ...], *, most: int) -> bool:
        of_trainer, of_engine = (tail.read(most=most) for tail in tails)
        for sent in filter(None, (parse_line(line, Sent) for line in of_trainer)):
            if sent.sync > self._settled:
                rank.sent[sent.sync] = sent.manifest
        for taken in filter(None, (parse_line(line, Acknowledgement) for line in of_engine)):
            if taken.sync > self._settled:
                rank.count += taken.sync not in rank.taken
                rank.taken[taken.sync] = taken
                rank.first = taken if taken.sync == 1 else rank.first
                rank.newest = taken if rank.newest is None or taken.sync >= rank.newest.sync else rank.newest
                rank.has_switched |= bool(taken.switched)
        self._newest = max(self._newest, *rank.sent, *rank.taken, 0)
        return bool(of_trainer or of_engine)

    def _settle(self) -> None:
        """Settle updates up to the number that all have reached: each file is in order, so what it lacks below does not
        come."""
        firsts = self.generation().firsts
        told = [max(each, default=self._settled) for rank in self.ranks for each in (rank.sent, rank.taken)]
        for number in range(self._settled + 1, min(told) + 1):
            misses = [*self._misses_of(number, firsts=firsts, is_over=True)]
            self._misses = [*self._misses, *misses][:_MOST_NAMES]
            self._num_misses += len(misses)
            for rank in self.ranks:
                rank.sent.pop(number, None)
                rank.taken.pop(number, None)
            self._settled = number

    def generation(self) -> Generation:
        """Return the present engines; where the file cannot be read, the first ones, which are compared with the
        plan."""
        try:
            return read_generation(self._run_dir)
        except SyncError:
            return Generation()

    def misses(self, *, is_done: bool) -> tuple[list[str], int]:
        """Describe updates that an engine did not take as they were sent: the first sentences, and how many there are.
        is_done: False where the newest update may be on its way, or was when the run ended."""
        firsts = self.generation().firsts
        waiting = [
            miss
            for number in range(self._settled + 1, self._newest + 1)
            for miss in self._misses_of(number, firsts=firsts, is_over=is_done or number < self._newest)
        ]
        return [*self._misses, *waiting][:_MOST_NAMES], self._num_misses + len(waiting)

    def _misses_of(self, number: int, *, firsts: Sequence[int], is_over: bool) -> Iterator[str]:
        reference = next((rank.sent[number] for rank in self.ranks if number in rank.sent), None)
        for rank in self.ranks:
            taken = rank.taken.get(number)
            if taken is None:
                if is_over:
                    yield f"{rank.name} did not acknowledge update {number}"
            elif not (taken.manifest == rank.sent.get(number) == reference):
                yield f"{rank.name} took other weights than were sent with update {number}"
            elif (number in firsts or taken.switched) and taken.layers_proven < taken.layers:
                yield f"{rank.name} proved {taken.layers_proven} of {taken.layers} layers at update {number}"


class MemoryHistory:
    """Memory of a run over time. curve is in bytes over Unix s, peak in bytes; newest is the Unix time of the last
    sample, 0 before there is one."""

    def __init__(self) -> None:
        self.curve = Thinned()
        self.peak: int | None = None
        self.newest = 0.0

    def extend(self, samples: Sequence[MemorySample]) -> None:
        """Append samples."""
        self.curve.extend([each.time for each in samples], [float(each.pss_bytes) for each in samples])
        if samples:
            self.peak = max(self.peak or 0, *(each.pss_bytes for each in samples))
            self.newest = samples[-1].time


@dataclass(frozen=True)
class RunView:
    """Everything that the page of a run shows."""

    run_dir: Path
    plan: RunPlan
    record: RunRecord
    state: RunState
    steps: StepHistory
    events: EventHistory
    memory: MemoryHistory
    updates: UpdateHistory
    samples: list[StepSamples]
    attests: list[Attestation]
    versions: list[tuple[str, str]]
    """Versions: (name of the package or part, version)."""
    recipe_yaml: str

    @property
    def attempts(self) -> list[Attempt]:
        return self.events.attempts

    @property
    def started(self) -> float:
        """Unix s of the first event, 0 before it."""
        return self.events.started

    @property
    def ended(self) -> float:
        """Unix s of the last sign of the run."""
        return max(self.events.newest, self.memory.newest)

    @property
    def is_live(self) -> bool:
        return self.record.state in UNFINISHED


def find_run(run: str, *, run_root: Path) -> Path:
    """Find the folder of a run, given by its path or its name under the run root. Raises RecipeError when there is
    none."""
    for folder in (Path(run), run_root / run):
        if os.path.isfile(folder / RUN_FILE):  # unlike Path.is_file it takes any text
            return folder.absolute()
    names = sorted(path.parent.name for path in run_root.glob(f"*/{RUN_FILE}"))
    root = run_root if run_root.is_absolute() else f"./{run_root}"
    there = f"runs in {root}: {', '.join(names[-_MOST_NAMES:])}" if names else f"there are no runs in {root}"
    hint = f"{there}; or give the run's folder"
    raise RecipeError([fault((f"run `{run}`",), f"no folder of that path or name with a {RUN_FILE}", hint)])


@contextlib.contextmanager
def reading(run_dir: Path) -> Iterator[None]:
    """Turn an OSError of the block, for a file of another user or a folder in a file's place, into a RecipeError."""
    try:
        yield
    except OSError as error:
        raise _unreadable(run_dir, error) from error


def _unreadable(run_dir: Path, error: Exception) -> RecipeError:
    """Return the error for a folder that cannot be read as a run."""
    hint = "name another run"
    if isinstance(error, PermissionError):
        hint = f"let this user read its files, or {hint}"
    return RecipeError([fault((str(run_dir),), f"cannot be read as a run: {error}", hint)])


def read_run(run_dir: Path) -> tuple[RunPlan, RunRecord]:
    """Read the plan and the record of a run. One that is marked as running and has no launcher any more counts as
    stopped. Raises RecipeError."""
    try:
        plan, record = read_plan(run_dir / "plan.json"), read_record(run_dir)
    except (OSError, ValueError) as error:
        raise _unreadable(run_dir, error) from error
    if record.state in UNFINISHED and not has_launcher(run_dir):
        return plan, RunRecord(RunStatus.STOPPED, phase=record.phase, attempt=record.attempt, reason=_LOST)
    return plan, record


def read_view(run_dir: Path) -> RunView:
    """Read everything that the page of a run shows. Raises RecipeError when the folder cannot be read as a run."""
    return RunReader(run_dir).view()


class RunReader:
    """Reads a run again and again while it runs: only what is new. A last line without its end is half a line."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._state: RunState | None = None  # before the first look

    def view(self) -> RunView:
        """Return the run as it is now. Raises RecipeError when the folder cannot be read as a run, OSError."""
        plan, record = read_run(self._run_dir)
        if self._state is None:
            self._begin(plan)
        self._read_events()
        self._read_steps()
        while lines := self._memory_tail.read(most=LINES_AT_ONCE):
            self._memory.extend([*filter(None, map(parse_memory, lines))])
        self._updates.read()
        assert self._state is not None, "it has begun"
        return RunView(
            run_dir=self._run_dir,
            plan=plan,
            record=record,
            state=self._state,
            steps=self._steps,
            events=self._events,
            memory=self._memory,
            updates=self._updates,
            samples=self._samples.read(),
            attests=read_attestations(self._run_dir)[0],
            versions=_versions(json_object(_text(self._run_dir / "versions.json"))),
            recipe_yaml=_text(self._run_dir / "recipe.yaml"),
        )

    def _begin(self, plan: RunPlan) -> None:
        run_dir, rollout = self._run_dir, plan.rollout
        places = [*itertools.product(range(len(rollout.replicas)), range(rollout.tensor_parallel))]
        self._state = RunState(plan.trainer.steps, plan.mismatch_bounds)
        self._event_tail, self._step_tail = Tail(run_dir / EVENTS_FILE), Tail(run_dir / METRICS_FILE)
        self._memory_tail, self._samples = Tail(run_dir / MEMORY_FILE), SampleReader(run_dir)
        self._steps, self._events, self._memory = StepHistory(plan.mismatch_bounds), EventHistory(), MemoryHistory()
        self._updates = UpdateHistory(run_dir, places=places)

    def _read_events(self) -> None:
        for event in filter(None, map(parse_event, _lines_of(self._event_tail))):
            self._state = fold(self._state, event)
            self._events.add(event)

    def _read_steps(self) -> None:
        while raw := self._step_tail.read(most=LINES_AT_ONCE):
            lines = [*filter(None, map(parse_metrics, raw))]
            for line in lines:
                self._state = fold(self._state, line)
            self._steps.extend(lines)


def _lines_of(tail: Tail) -> Iterator[str]:
    while lines := tail.read(most=LINES_AT_ONCE):
        yield from lines


def _versions(raw: dict[str, object]) -> list[tuple[str, str]]:
    distributions = raw.get("distributions")
    named = distributions.items() if isinstance(distributions, dict) else ()
    plain = [(name, raw[name]) for name in ("model", "python", "platform", "fingerprint") if name in raw]
    return [(name, str(version)) for name, version in (*named, *plain)]


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.is_file() else ""
