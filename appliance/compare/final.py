"""The final validation: every run's `model/`, in a plain BF16 engine, on the same problems, greedily.

Not the trainer's own validation: that one is in the run's scheme, and a comparison asks what was trained. On a CPU one
child validates all models that lack it, so that the engine's imports are paid once.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from appliance import console
from appliance.compare.arms import PlannedRun
from appliance.compare.results import read_final
from appliance.launch.resume import problems_of
from appliance.launch.side_job import run_child
from appliance.launch.workspace import work_folder
from appliance.terms.devices import CPU
from appliance.terms.environment import PLAN_VARIABLE

_CHILD = "appliance.compare.child"


@dataclass(frozen=True)
class Job:
    """models: folders of runs, each with `model/`.  parquet: the problems.  seed: of the engine."""

    run_dirs: tuple[str, ...]
    parquet: str
    max_prompt_tokens: int
    max_response_tokens: int
    trust_remote_code: bool
    tensor_parallel: int
    enforce_eager: bool
    seed: int

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def read_job(text: str) -> Job:
    return TypeAdapter(Job).validate_json(text)


def validate_models(runs: list[PlannedRun], *, stop: Callable[[], None]) -> None:
    """Validate the models of these runs that have none yet. stop: called often; what it raises ends the work.

    Raises EngineError when the engine fails, RecipeError when the plan of a run cannot be read.
    """
    waiting = [run for run in runs if (run.run_dir / "model").is_dir() and not read_final(run.run_dir)]
    at_once = len(waiting) if all(run.plan.device == CPU for run in waiting) else 1
    for start in range(0, len(waiting), max(1, at_once)):
        _validate(waiting[start : start + at_once], stop=stop)


def _validate(runs: list[PlannedRun], *, stop: Callable[[], None]) -> None:
    plan = runs[0].plan
    job = Job(
        run_dirs=tuple(str(run.run_dir) for run in runs),
        parquet=_problems(runs[0]),
        max_prompt_tokens=plan.task.max_prompt_tokens,
        max_response_tokens=plan.task.max_response_tokens,
        trust_remote_code=plan.model.trust_remote_code,
        tensor_parallel=plan.rollout.tensor_parallel,
        enforce_eager=plan.device == CPU,
        seed=plan.seed,
    )
    label = runs[0].label if len(runs) == 1 else f"{len(runs)} models"
    console.say(f"final validation of {label}: BF16, greedy")
    with work_folder(str(runs[0].run_dir.parent), command="compare") as folder:
        job_file = folder / "job.json"
        job_file.write_text(job.to_json())
        env = {name: value for name, value in plan.env if name != PLAN_VARIABLE}  # no run's folder to attest in
        told: set[Path] = set()

        def tick() -> None:
            stop()
            for run in runs:
                rewards = read_final(run.run_dir) if run.run_dir not in told else ()
                if rewards:
                    told.add(run.run_dir)
                    console.say(f"{run.label}: {sum(rewards) / len(rewards):.4f} on {len(rewards)} problems")

        run_child([_CHILD, str(job_file)], command="compare", folder=folder, env=env, tick=tick)


def _problems(run: PlannedRun) -> str:
    """The file that the run was made with. The plan of now may name another, which nobody made: it is named by the
    commit of a tag that moved since, or by the one that the run began with."""
    planned = Path(run.plan.task.val_parquet)
    own = problems_of(run.run_dir).with_name(planned.name)
    return str(own if own.is_file() else planned)
