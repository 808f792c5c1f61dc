"""What the runs of a comparison left in their folders, read back as values, and the validation of their models.

The final validation: every run's `model/`, in a plain BF16 engine, on the same problems, greedily. Not the trainer's
own: that one is in the run's scheme, and a comparison asks what was trained. On a CPU one child validates all models
that lack it, so that the engine's imports are paid once.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import psutil

from appliance import console
from appliance.compare.arms import PlannedRun, has_result
from appliance.corrections.registry import CorrectionMethod
from appliance.files import Frozen, write_whole
from appliance.launch.resume import problems_of
from appliance.launch.side_job import run_child, work_folder
from appliance.preflight.probes import read_host
from appliance.record.code import as_it_runs
from appliance.record.events import append_event, read_events, read_metrics
from appliance.record.lines import finite, json_object
from appliance.record.plan import TaskFiles
from appliance.record.session import read_record
from appliance.settings.sections import Task
from appliance.terms.counts import counted
from appliance.terms.environment import PLAN_VARIABLE

FINAL_FILE = "final-validation.json"
_LOAD = "load"
_BUSY = 0.1  # of all cores, before the start
_LOOK_S = 3.0


class Step(NamedTuple):
    """The part of a line of metrics that a comparison needs, as in StepMetrics: 300 bytes, where a whole line takes 2
    KiB."""

    step: int
    scheme: str = ""
    reward_mean: float | None = None
    val_reward_mean: float | None = None
    mismatch_k3_kl: float | None = None
    is_truncated_fraction: float | None = None
    is_weight_max: float | None = None
    codes_changed_fraction: float | None = None
    step_s: float | None = None
    learning_rate: float | None = None


_of_step = attrgetter(*Step._fields)


@dataclass(frozen=True)
class RunResult:
    """Result of one run."""

    arm: str
    seed: int
    folder: str
    method: CorrectionMethod
    state: str
    reason: str
    steps: tuple[Step, ...]
    """Steps, each once; a validation before training has no reward."""
    rewards: tuple[float, ...]
    """Rewards of the final validation in BF16, problem by problem, empty where there is no model."""
    seconds: float
    """Seconds of the run's attempts, each from its first event to its last; pauses between them do not count."""
    busy: float | None
    """Share of the cores that other work kept busy before the run started; None: not known."""
    ended: float = 0.0
    """Time of the run's last event, Unix s; 0 where there is none."""
    host: str = ""
    """Processor, cores and GPUs of the machine that the run was on."""

    @property
    def final(self) -> float | None:
        return sum(self.rewards) / len(self.rewards) if self.rewards else None

    @property
    def trainer_final(self) -> float | None:
        """Mean reward of the trainer's last validation, in the run's scheme."""
        return self.steps[-1].val_reward_mean if self.steps else None

    @property
    def is_busy(self) -> bool:
        """Whether other work was on the machine, so that the run's times are no measurements."""
        return self.busy is None or self.busy > _BUSY


def read_result(run: PlannedRun) -> RunResult | None:
    """Read the result of a run; None where it has no result yet."""
    try:
        record = read_record(run.run_dir)
    except (OSError, ValueError):
        return None
    if not has_result(record):
        return None
    seconds, share, ended = _read_events(run.run_dir)
    return RunResult(
        arm=run.arm,
        seed=run.seed,
        folder=run.run_dir.name,
        method=run.plan.correction.method,
        state=str(record.state),
        reason=record.reason,
        steps=tuple(Step(*_of_step(line)) for line in read_metrics(run.run_dir)),
        rewards=read_final(run.run_dir),
        seconds=seconds,
        busy=share,
        ended=ended,
        host=_host(run.run_dir),
    )


def _host(folder: Path) -> str:
    host = read_host(folder)
    gpus = f", {len(host.gpus)} x {host.gpus[0].product}" if host.gpus else ""
    return f"{host.processor or 'unknown processor'}, {host.cores} cores{gpus}"


def _read_events(run_dir: Path) -> tuple[float, float | None, float]:
    """Return (seconds of the attempts, share of the cores that others kept busy before or None, unix s of the last
    sign)."""
    attempts: list[list[float]] = []  # the first and the last sign of each
    share = None
    for event in read_events(run_dir):
        if event.kind == _LOAD:  # written when the run was over
            share = finite(json_object(event.line).get("share"))
        elif event.kind == "resume" or not attempts:
            attempts.append([event.time, event.time])
        else:
            attempts[-1][1] = event.time
    return sum(end - start for start, end in attempts), share, attempts[-1][1] if attempts else 0.0


def note_busy(run_dir: Path, *, share: float) -> None:
    """Write into a run's events how busy others kept the machine before it. share: of all cores, 0..1."""
    append_event(
        run_dir, kind=_LOAD, what=f"{share:.0%} of the cores were busy before the start", share=round(share, 3)
    )


def busy_share() -> float:
    """Measure the share of all cores that are busy now, 0..1, over a few seconds. The load average of the last minute
    would have the run before in it."""
    return psutil.cpu_percent(interval=_LOOK_S) / 100


# The final validation


class Job(Frozen):
    """Work of the child (compare/child.py)."""

    run_dirs: tuple[str, ...]
    """Folders of runs, each with `model/`."""
    parquet: str
    """File of the problems."""
    task: Task
    """Task whose rewards judge: with the first run's copies of the user's files."""
    task_files: TaskFiles
    reward_failures: float
    """Share of a model's rewards that may fail."""
    max_prompt_tokens: int
    max_response_tokens: int
    trust_remote_code: bool
    tensor_parallel: int
    enforce_eager: bool
    seed: int


def write_final(run_dir: Path, rewards: list[float]) -> None:
    """Write the rewards of the final validation, in the order of the problems, whole or not at all."""
    write_whole(run_dir / FINAL_FILE, json.dumps({"schema_version": 1, "scheme": "bf16", "rewards": rewards}) + "\n")


def read_final(run_dir: Path) -> tuple[float, ...]:
    try:
        raw = json.loads((run_dir / FINAL_FILE).read_text())
    except (OSError, ValueError):
        return ()
    return tuple(float(each) for each in raw["rewards"])


def validate_models(runs: list[PlannedRun], *, stop: Callable[[], None]) -> None:
    """Validate the models of these runs that have none yet. stop: called often; what it raises ends the work. Raises
    EngineError when the engine fails, RecipeError when the plan of a run cannot be read."""
    waiting = [run for run in runs if _has_model(run.run_dir) and not read_final(run.run_dir)]
    at_once = len(waiting) if all(run.plan.is_cpu for run in waiting) else 1
    for start in range(0, len(waiting), max(1, at_once)):
        _validate(waiting[start : start + at_once], stop=stop)


def _has_model(run_dir: Path) -> bool:
    """Tell whether the run's model counts as a result: a run that failed may be resumed and end with another one."""
    try:
        return has_result(read_record(run_dir)) and (run_dir / "model").is_dir()
    except (OSError, ValueError):
        return False


def _validate(runs: list[PlannedRun], *, stop: Callable[[], None]) -> None:
    plan = runs[0].plan
    # The file that the run was made with. The plan of now may name another, which nobody made: it is named by the
    # commit of a tag that moved since, or by the one that the run began with.
    planned = Path(plan.task_files.val_parquet)
    with_the_run = problems_of(runs[0].run_dir).with_name(planned.name)
    job = Job(
        run_dirs=tuple(str(run.run_dir) for run in runs),
        parquet=str(with_the_run if with_the_run.is_file() else planned),
        task=as_it_runs(plan),
        task_files=plan.task_files,
        reward_failures=plan.guard.reward_failures,
        max_prompt_tokens=plan.task.max_prompt_tokens,
        max_response_tokens=plan.task.max_response_tokens,
        trust_remote_code=plan.model.trust_remote_code,
        tensor_parallel=plan.rollout.tensor_parallel,
        enforce_eager=plan.is_cpu,
        seed=plan.seed,
    )
    label = runs[0].label if len(runs) == 1 else f"{len(runs)} models"
    console.say(f"final validation of {label}: BF16, greedy")
    reported: set[Path] = set()

    def tick() -> None:
        stop()
        for run in runs:
            rewards = read_final(run.run_dir) if run.run_dir not in reported else ()
            if rewards:
                reported.add(run.run_dir)
                console.say(f"{run.label}: {sum(rewards) / len(rewards):.4f} on {counted(len(rewards), 'problem')}")

    with work_folder(str(runs[0].run_dir.parent), command="compare") as folder:
        job_file = folder / "job.json"
        job_file.write_text(job.model_dump_json())
        env = {name: value for name, value in plan.env if name != PLAN_VARIABLE}  # no run's folder to attest in
        run_child(["appliance.compare.child", str(job_file)], command="compare", folder=folder, env=env, tick=tick)
