"""The precision of the rollouts in a run: what the governor asks for, passed to the senders (or to new engines, see
engines.py), and compared with what the engines then report that they run; and what depends on it, weight updates and
validation.

No rollout before each rank has proven the very update that was sent. verl updates at the start, after each step and,
with a colocated reward model, during validation: all by one call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.errors import PreflightError, SyncError, TrainingError
from appliance.guard.governor import Measures
from appliance.quant.files import read_file_header
from appliance.record.events import append_event
from appliance.record.lines import json_object
from appliance.record.plan import RunPlan
from appliance.settings.sections import SchemeChange
from appliance.sync.precision import write_wanted
from appliance.sync.records import SYNC_FOLDER, Acknowledgement, SyncRecord, check_sync, layer_errors_file
from appliance.terms.counts import counted
from appliance.terms.schemes import AS_PLANNED, Precision, Scheme
from appliance.trainer.engines import RolloutEngines

Metrics = dict[str, float]  # verl's

BF16 = Precision(Scheme.BF16)


@dataclass(frozen=True)
class Live:
    """Precision of the engines since a weight update, as they have reported it."""

    label: str
    """Name of the scheme; `bf16+int8` where replicas differ."""
    emulated: bool
    bf16_layers: int = 0
    """Quantised layers that are in BF16 for now, of the engine that has most."""

    def metrics(self) -> dict[str, str | bool | int]:
        return {"scheme": self.label, "emulated": self.emulated, "bf16_layers": self.bf16_layers}


@dataclass(frozen=True)
class PrecisionState:
    """Part of a checkpoint by which a resumed attempt rolls out as the run would have without the break."""

    planned: str
    """Label of the rollouts in the plan. In a plan with another label the rest of the state means nothing."""

    rollouts: Precision
    """Precision of the step after the checkpoint's."""

    decided: Precision
    """Precision from the weight update after those on."""

    scheme: Scheme
    bf16_layer_fraction: float
    """Share of layers in BF16 that the guard asks for, as it asks for `scheme`. For a guard that asks for others the
    rest of the state means nothing."""


class RolloutPrecision:
    """`begin`, `want` something, let a weight update happen, and say what it brought with `took`."""

    target: Precision
    """Precision that the next weight update is to bring; engines that do not change live are started in it before."""
    live: Live
    """Precision of the engines since the newest weight update."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan
        self._is_live = plan.guard.scheme_change is SchemeChange.LIVE
        self._run_dir = Path(plan.run_dir)
        self._measured: tuple[Scheme, float] = plan.rollout.scheme, 0.0
        self._decided = AS_PLANNED
        self._lasting = AS_PLANNED
        self._brought = AS_PLANNED
        self.target = AS_PLANNED
        self._reported = AS_PLANNED
        self._must_rank = plan.guard.ranks_layers
        self.live = Live(plan.rollout.label, plan.emulates)

    def begin(self, measures: Measures, *, saved: PrecisionState | None) -> None:
        """Begin an attempt, before its first weight update; `want` is to follow before its first step. saved: of the
        checkpoint it resumes from, None: the measures hold from that update on. Raises as `want`."""
        measured = measures.scheme, measures.bf16_layer_fraction
        known = (self._plan.rollout.label, *measured)
        if saved is None or (saved.planned, saved.scheme, saved.bf16_layer_fraction) != known:
            self.want(measures)
        else:
            self._measured, self._decided, self._lasting = measured, saved.decided, saved.rollouts
            self._ask(self._lasting)
        self._brought = self._lasting

    @property
    def state(self) -> PrecisionState:
        """State at the end of a step, whether the guard has looked at it or not."""
        return PrecisionState(self._plan.rollout.label, self._brought, self._decided, *self._measured)

    def want(self, measures: Measures) -> None:
        """Take measures from the next weight update on. Raises PreflightError where nobody knows the worst layers.

        Which layers are the worst is read when the measures change, and is used until they do: errors drift from step
        to step, and other layers would be another change of engines.
        """
        measured = measures.scheme, measures.bf16_layer_fraction
        if measured != self._measured:
            self._decided, self._measured = self._precision_of(measures), measured
        self._lasting = self._decided
        self._ask(self._lasting)

    @contextmanager
    def meanwhile(self, precision: Precision) -> Iterator[None]:
        """Have weight updates in here ask for `precision`, and those after it for what was wanted before."""
        self._ask(precision)
        try:
            yield
        finally:
            self._ask(self._lasting)

    @property
    def starts_in(self) -> Precision:
        """Precision that new engines start in. All else is requested from engines with a weight update."""
        return AS_PLANNED if self._is_live else self.target

    def validates_bf16(self, step: int) -> bool:
        """Return whether the validation after this step (0: before training) is made in BF16 as well."""
        every, steps = self._plan.trainer.validate_bf16_every, self._plan.trainer.steps
        return every > 0 and (step == steps or (step % every == 0 and every < steps))

    def restarts_in(self, step: int, *, present: Precision) -> bool:
        """Return whether this step has engines started. present: what those that run were started in."""
        if self._is_live:
            return False
        return self.starts_in != present or (self.validates_bf16(step) and self.starts_in != BF16)

    def _ask(self, precision: Precision) -> None:
        self.target = precision
        if self._is_live:
            write_wanted(self._run_dir, precision)

    def _precision_of(self, measures: Measures) -> Precision:
        if measures.scheme is Scheme.BF16:
            return BF16 if self._plan.rollout.scheme.quantised else AS_PLANNED
        scheme = None if measures.scheme is self._plan.rollout.scheme else measures.scheme
        share = measures.bf16_layer_fraction
        return Precision(scheme, tuple(sorted(set(worst_layers(self._plan, share=share)))) if share else ())

    def took(self, record: SyncRecord) -> None:
        """Take note of a weight update. Raises SyncError when an engine runs something else than was requested,
        PreflightError when the guard may ask for the worst layers and quantised engines do not tell them."""
        acknowledgements = sorted(
            record.acknowledgements, key=lambda acknowledgement: (acknowledgement.replica, acknowledgement.rank)
        )
        problems = list(filter(None, map(self._problem, acknowledgements)))
        if problems:
            raise SyncError(
                f"weight update {acknowledgements[0].sync}: {'; '.join(problems)}", hint="see sync/ in the run folder"
            )
        if self._must_rank and any(Scheme(engine.scheme).quantised for engine in acknowledgements):
            _ranking(self._plan)
            self._must_rank = False  # known once, known for good
        self.live = Live(
            label="+".join(dict.fromkeys(engine.scheme for engine in acknowledgements)),
            emulated=any(engine.emulated for engine in acknowledgements),
            bf16_layers=max(engine.bf16_layers for engine in acknowledgements),
        )
        self._brought = self._lasting  # a run that is leaving may end its step in something else
        if self.target == self._lasting != self._reported:
            self._reported = self._lasting
            self._tell(acknowledgements)

    def _problem(self, acknowledgement: Acknowledgement) -> str:
        planned = self._plan.rollout.replicas[acknowledgement.replica]
        scheme = (self.target.scheme or planned) if planned.quantised else planned
        who = f"rollout rank {acknowledgement.rank} of replica {acknowledgement.replica}"
        if acknowledgement.scheme != str(scheme):
            return f"{who} runs {acknowledgement.scheme}, it was to run {scheme}"
        some = planned.quantised and bool(self.target.bf16_layers or self.target.scheme is Scheme.BF16)
        if some is (acknowledgement.bf16_layers > 0):
            return ""
        return (
            f"{who} raised {counted(acknowledgement.bf16_layers, 'layer')} to bf16, it was to raise "
            f"{'some' if some else 'none'}"
        )

    def _tell(self, acknowledgements: list[Acknowledgement]) -> None:
        layers = f" with {counted(self.live.bf16_layers, 'layer')} in bf16" if self._lasting.bf16_layers else ""
        switched = sum(engine.switched for engine in acknowledgements)
        how = f"{counted(switched, 'layer')} changed" if self._is_live else "the first of these engines"
        append_event(
            self._run_dir,
            kind="note",
            what=f"rollouts from now on: {self.live.label}{layers}",
            why=f"weight update {acknowledgements[0].sync}: {how}, all proven",
            bf16_layers=list(self._lasting.bf16_layers),
        )


def worst_layers(plan: RunPlan, *, share: float) -> tuple[str, ...]:
    """Return the given share of the quantised layers (rounded up), the worst first, as `ignore` would name them.

    By the output errors of the run's profile; without one by what engines of this run measured of a layer's weights
    when it was quantised last.  share: 0..1.  Raises PreflightError when neither is there.
    """
    ranked = sorted(_ranking(plan), key=lambda each: (-each[0], each[1]))
    return tuple(name for _, names in ranked[: math.ceil(share * len(ranked))] for name in names)


def _ranking(plan: RunPlan) -> list[tuple[float, tuple[str, ...]]]:
    """Return (error, names) of each layer that the profile does not keep in BF16 anyway, in any order, at least one.
    Raises PreflightError."""
    layers = read_file_header(Path(plan.profile.folder))["layers"] if plan.profile is not None else []
    ranked = [(float(each["output_error"]), tuple(each["layer"])) for each in layers if not each["stays_in_bf16"]]
    ranked = ranked or _by_engine(plan)
    if not ranked:
        raise PreflightError(
            "`raise-precision` has no layer errors to go by: no profile, and no engine reports any (kernels that pack "
            "their codes, such as Marlin's, do not)",
            hint="give a profile in quantization.profile, or leave `raise-precision` out of guard.actions",
        )
    return ranked


def _by_engine(plan: RunPlan) -> list[tuple[float, tuple[str, ...]]]:
    replica = next(index for index, scheme in enumerate(plan.rollout.replicas) if scheme.quantised)
    file = layer_errors_file(Path(plan.run_dir), replica=replica, rank=0)
    before = Path(plan.run_dir).glob(f"logs/*/{SYNC_FOLDER}/{file.name}")
    oldest_first = sorted(before, key=lambda path: int(path.parts[-3]))
    errors: dict[str, float] = {}  # an attempt that began with layers in BF16 has measured the others only
    for path in (*oldest_first, *([file] if file.exists() else [])):
        errors |= json_object(path.read_text())  # a crash of the host may have left it empty
    return [(float(error), (name,)) for name, error in errors.items()]


class WeightUpdates:
    """Weight updates of an attempt, each with what it needs before, and proven after."""

    count: int
    """Number of updates so far."""
    last: SyncRecord | None
    """What the newest update brought; None before the first."""

    def __init__(
        self,
        plan: RunPlan,
        *,
        precision: RolloutPrecision,
        engines: RolloutEngines,
        restart: Callable[[str], None],
        attest: Callable[[], None],
        is_leaving: Callable[[], bool],
        after: Callable[[int], None] | None = None,
    ) -> None:
        """restart: has engines started in `precision.starts_in`; gets why.  attest: after an update with which layers
        changed.  is_leaving: whether the run was asked to stop: engines that start now would not be used.  after:
        called with the number of each update that is proven, before anything is generated."""
        self.count = 0
        self.last = None
        self._plan = plan
        self._precision = precision
        self._engines = engines
        self._restart = restart
        self._attest = attest
        self._is_leaving = is_leaving
        self._after = after

    def proven(self, update: Callable[..., Any]) -> Callable[..., Any]:
        """Return what replaces verl's call. It raises what `restart`, `attest` and `after` raise, SyncError when a rank
        has not proven the update, and as RolloutPrecision.took."""

        def update_and_check(*args: Any, **kwargs: Any) -> Any:
            present, target = self._engines.generation.precision, self._precision.starts_in
            asks = nullcontext()
            if target != present and self._is_leaving():
                asks = self._precision.meanwhile(present)  # the step ends with a proven update all the same
            elif target != present:
                self._restart(f"rollouts are to be {target.text}")
            with asks:
                result = update(*args, **kwargs)
                self.count += 1
                self.last = check_sync(
                    Path(self._plan.run_dir),
                    sync=self.count,
                    replicas=len(self._plan.rollout.replicas),
                    ranks=self._plan.rollout.tensor_parallel,
                    first=self._engines.generation.after_sync + 1,
                )
                self._precision.took(self.last)
            if any(one.switched for one in self.last.acknowledgements):
                self._attest()
            if self._after is not None:
                self._after(self.count)
            return result

        return update_and_check


class Validation:
    """Validations in what the engines run and, when it is due, with every layer in BF16 as well."""

    scheme: str
    """Scheme of the newest validation, which is not the step's where a change came with its weight update."""

    def __init__(self, plan: RunPlan, *, precision: RolloutPrecision, check_stop: Callable[[], None]) -> None:
        """check_stop: raises StopAsked when no new validation is to begin."""
        self.scheme = precision.live.label
        self._plan = plan
        self._precision = precision
        self._check_stop = check_stop
        self._line: dict[str, float | str | None] = {}

    def make(
        self,
        validate: Callable[[], Metrics],
        *,
        step: int,
        problems: Callable[[], int],
        update: Callable[[], None],
        by_set: Callable[[], Metrics] = dict,
    ) -> Metrics:
        """Validate, and return verl's metrics of the validation after a step, or those of each of several sets.

        validate: verl's own.  problems: how many were scored so far.  update: sends the weights as they are once more.
        by_set: of the newest validation, the mean that counts first; empty where there are no sets.
        Raises StopAsked, and TrainingError when verl reports no mean.
        """

        def measured() -> tuple[float, Metrics, Metrics]:
            values, sets = validate(), by_set()
            return (next(iter(sets.values())), sets, sets) if sets else (mean_of(values), sets, values)

        before, self.scheme = problems(), self._precision.live.label
        mean, sets, values = measured()
        scored = problems() - before
        bf16 = self._mean_in_bf16(mean, validate=lambda: measured()[0], step=step, update=update)
        means = {"val_reward_mean": mean, "val_reward_bf16_mean": bf16}
        self._line = {**means, "val_samples": scored, "val_scheme": self.scheme, **sets}
        return values

    def take(self) -> dict[str, float | str | None]:
        """Return the keys of a validation that is in no line of metrics yet."""
        line, self._line = self._line, {}
        return line

    def _mean_in_bf16(
        self, mean: float, *, validate: Callable[[], float], step: int, update: Callable[[], None]
    ) -> float | None:
        """Return the mean with every layer in BF16, by two more updates of the same weights. None: not due.  mean:
        in what the engines run."""
        self._check_stop()  # it may take new engines, twice
        if self._precision.live.label == str(Scheme.BF16):
            return mean
        if not self._precision.validates_bf16(step):
            return None
        with self._precision.meanwhile(BF16):
            update()
            if self._precision.live.label != str(Scheme.BF16):  # asked to stop a moment ago
                return None
            mean = validate()
        is_last = step >= self._plan.trainer.steps
        restarts = self._plan.guard.scheme_change is SchemeChange.RESTART
        if not (is_last and restarts):  # engines to end with: not worth a start
            update()
        return mean


def mean_of(verl: Metrics) -> float:
    """Return the one mean of verl's validation metrics. Raises TrainingError when there is none."""
    means = [value for name, value in verl.items() if name.startswith("val-core/") and "/mean@" in name]
    if len(means) != 1:
        raise TrainingError(f"expected one validation mean from verl, got {len(means)} in {sorted(verl)}")
    return float(means[0])
