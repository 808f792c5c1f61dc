"""The precision of the rollouts in a run: what the governor asks for, told to the senders (or to new engines, see
engines.py), and held against what the engines then say that they run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import PreflightError, SyncError
from appliance.guard.ladder import Measures
from appliance.quant.files import read_file_header
from appliance.record.events import append_event
from appliance.record.plan import RunPlan, Switching
from appliance.sync.precision import AS_PLANNED, Precision, write_wanted
from appliance.sync.records import SYNC_FOLDER, Acknowledgement, SyncRecord, layer_errors_file
from appliance.terms.schemes import Scheme

BF16 = Precision(Scheme.BF16)


@dataclass(frozen=True)
class Live:
    """What the engines run since a weight update, by their own word."""

    label: str
    """`bf16+int8` where replicas differ."""

    emulated: bool
    bf16_layers: int = 0
    """Quantised layers that are in BF16 for now, of the engine that has most."""

    def metrics(self) -> dict[str, str | bool | int]:
        return {"scheme": self.label, "emulated": self.emulated, "bf16_layers": self.bf16_layers}


@dataclass(frozen=True)
class PrecisionState:
    """What a checkpoint keeps, so that a resumed attempt rolls out as the run would have without the break."""

    planned: str
    """The plan's label of the rollouts. For a plan with another one all the rest says nothing."""

    rollouts: Precision
    """Of the step after the checkpoint's."""

    decided: Precision
    """From the weight update after those on."""

    scheme: Scheme
    bf16_layer_fraction: float
    """Both: what the guard asks for. For a guard that asks for another one the rest says nothing."""


class RolloutPrecision:
    """`begin`, `want` something, let a weight update happen, and say what it brought with `took`."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan
        self._is_live = plan.guard.switching is Switching.LIVE
        self._run_dir = Path(plan.run_dir)
        self._measured: tuple[Scheme, float] = plan.rollout.scheme, 0.0
        self._decided = AS_PLANNED
        self._lasting = AS_PLANNED
        self._brought = AS_PLANNED
        self._wanted = AS_PLANNED
        self._told = AS_PLANNED
        self._must_rank = plan.guard.ranks_layers
        self.live = Live(plan.rollout.label, plan.rollout.emulated)

    def begin(self, measures: Measures, *, kept: PrecisionState | None) -> None:
        """Before the first weight update of an attempt; `want` is to follow before its first step.

        kept: of the checkpoint it goes on from, None: the measures hold from that update on. Raises as `want`.
        """
        measured = measures.scheme, measures.bf16_layer_fraction
        known = (self._plan.rollout.label, *measured)
        if kept is None or (kept.planned, kept.scheme, kept.bf16_layer_fraction) != known:
            self.want(measures)
        else:
            self._measured, self._decided = measured, kept.decided
            self._lasting = kept.rollouts
            self._ask(self._lasting)
        self._brought = self._lasting

    @property
    def state(self) -> PrecisionState:
        """At the end of a step, whether the guard has looked at it or not."""
        return PrecisionState(self._plan.rollout.label, self._brought, self._decided, *self._measured)

    def want(self, measures: Measures) -> None:
        """From the next weight update on. Raises PreflightError where the worst layers cannot be told.

        Which layers are the worst is asked when the measures change, and holds until they do: errors drift from step to
        step, and other layers would be another change of engines.
        """
        measured = measures.scheme, measures.bf16_layer_fraction
        if measured != self._measured:
            self._decided, self._measured = self._precision_of(measures), measured
        self._lasting = self._decided
        self._ask(self._lasting)

    @contextmanager
    def meanwhile(self, precision: Precision) -> Iterator[None]:
        """Weight updates in here ask for `precision`, those after it for what was wanted before."""
        self._ask(precision)
        try:
            yield
        finally:
            self._ask(self._lasting)

    @property
    def wanted(self) -> Precision:
        """What the next weight update is to bring; where that is not live, engines are to be started in it before."""
        return self._wanted

    @property
    def starts_in(self) -> Precision:
        """What engines are started in; all else is asked of them with a weight update."""
        return AS_PLANNED if self._is_live else self._wanted

    def validates_bf16(self, step: int) -> bool:
        """Whether the validation after this step (0: before training) is made in BF16 as well."""
        every, steps = self._plan.validate_bf16_every, self._plan.steps
        return every > 0 and (step == steps or (step % every == 0 and every < steps))

    def restarts_in(self, step: int, *, present: Precision) -> bool:
        """Whether this step has engines started. present: what those that run were started in."""
        if self._is_live:
            return False
        return self.starts_in != present or (self.validates_bf16(step) and self.starts_in != BF16)

    def _ask(self, precision: Precision) -> None:
        self._wanted = precision
        if self._is_live:
            write_wanted(self._run_dir, precision)

    def _precision_of(self, measures: Measures) -> Precision:
        if measures.scheme is Scheme.BF16:
            return BF16 if self._plan.rollout.scheme.quantised else AS_PLANNED
        scheme = None if measures.scheme is self._plan.rollout.scheme else measures.scheme
        share = measures.bf16_layer_fraction
        return Precision(scheme, tuple(sorted(set(worst_layers(self._plan, share=share)))) if share else ())

    def took(self, record: SyncRecord) -> None:
        """Raises SyncError when an engine runs something else than was asked for, PreflightError when the guard may ask
        for the worst layers and quantised engines do not tell them."""
        said = sorted(record.acknowledgements, key=lambda one: (one.replica, one.rank))
        problems = [problem for one in said if (problem := self._problem(one))]
        if problems:
            raise SyncError(f"weight update {said[0].sync}: {'; '.join(problems)}", hint="see sync/ in the run folder")
        if self._must_rank and any(Scheme(one.scheme).quantised for one in said):
            _ranking(self._plan)
            self._must_rank = False  # what was told once stays
        self.live = Live(
            label="+".join(dict.fromkeys(one.scheme for one in said)),
            emulated=any(one.emulated for one in said),
            bf16_layers=max(one.bf16_layers for one in said),
        )
        self._brought = self._lasting  # a run that is leaving may end its step in something else
        if self._wanted == self._lasting != self._told:
            self._told = self._lasting
            self._tell(said)

    def _problem(self, said: Acknowledgement) -> str:
        own = self._plan.rollout.replicas[said.replica].scheme
        wanted = (self._wanted.scheme or own) if own.quantised else own
        who = f"rollout rank {said.rank} of replica {said.replica}"
        if said.scheme != str(wanted):
            return f"{who} runs {said.scheme}, it was to run {wanted}"
        some = own.quantised and bool(self._wanted.bf16_layers or self._wanted.scheme is Scheme.BF16)
        if some is (said.bf16_layers > 0):
            return ""
        return f"{who} raised {said.bf16_layers} layers to bf16, it was to raise {'some' if some else 'none'}"

    def _tell(self, said: list[Acknowledgement]) -> None:
        layers = f" with {self.live.bf16_layers} layers in bf16" if self._lasting.bf16_layers else ""
        switched = sum(one.switched for one in said)
        how = f"{switched} layers changed" if self._is_live else "the first of these engines"
        append_event(
            self._run_dir,
            kind="note",
            what=f"rollouts from now on: {self.live.label}{layers}",
            why=f"weight update {said[0].sync}: {how}, all proven",
            bf16_layers=list(self._lasting.bf16_layers),
        )


def worst_layers(plan: RunPlan, *, share: float) -> tuple[str, ...]:
    """The given share of the quantised layers (rounded up), the worst first, as `ignore` would name them.

    By the output errors of the run's profile; without one by what engines of this run measured of a layer's weights
    when it was quantised last.  share: 0..1.  Raises PreflightError when neither is there.
    """
    ranked = _ranking(plan)
    ranked.sort(key=lambda each: (-each[0], each[1]))
    chosen = ranked[: math.ceil(share * len(ranked))]
    return tuple(name for _, names in chosen for name in names)


def _ranking(plan: RunPlan) -> list[tuple[float, tuple[str, ...]]]:
    """(error, names) of each layer, in any order, at least one. Raises PreflightError."""
    ranked = _by_profile(Path(plan.profile.folder)) if plan.profile is not None else []
    ranked = ranked or _by_engine(plan)
    if not ranked:
        raise PreflightError(
            "`raise-precision` has no layer errors to go by: no profile, and no engine tells any (kernels that pack "
            "their codes, such as Marlin's, do not)",
            hint="give a profile in quantization.profile, or leave `raise-precision` out of guard.actions",
        )
    return ranked


def _by_profile(folder: Path) -> list[tuple[float, tuple[str, ...]]]:
    """(error, names) of each layer that the profile does not keep in BF16 anyway."""
    layers = read_file_header(folder)["layers"]
    return [(float(each["output_error"]), tuple(each["layer"])) for each in layers if not each["kept"]]


def _by_engine(plan: RunPlan) -> list[tuple[float, tuple[str, ...]]]:
    replica = next(index for index, each in enumerate(plan.rollout.replicas) if each.scheme.quantised)
    file = layer_errors_file(Path(plan.run_dir), replica=replica, rank=0)
    before = Path(plan.run_dir).glob(f"logs/*/{SYNC_FOLDER}/{file.name}")
    oldest_first = sorted(before, key=lambda path: int(path.parts[-3]))
    errors: dict[str, float] = {}  # an attempt that began with layers in BF16 has measured the others only
    for path in (*oldest_first, *([file] if file.exists() else [])):
        errors |= json.loads(path.read_text())
    return [(float(error), (name,)) for name, error in errors.items()]
