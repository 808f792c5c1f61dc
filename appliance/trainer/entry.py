"""The supervised child: Ray, verl's trainer and nothing else. `python -m appliance.trainer.entry <hydra overrides>`.

verl's own entry point starts a driver that starts a task runner in another process; here the driver is the trainer,
which saves a process, and a failure keeps its type until it becomes an exit code.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from appliance.errors import ApplianceError, SyncError, TrainingError
from appliance.plan.model import RunPlan, read_plan
from appliance.run.events import append_event

PLAN_VARIABLE = "APPLIANCE_PLAN"
RAY_DIR_VARIABLE = "APPLIANCE_RAY_DIR"


def main() -> int:
    plan = read_plan(Path(os.environ[PLAN_VARIABLE]))
    run_dir = Path(plan.run_dir)
    try:
        train(plan, overrides=sys.argv[1:])
    except ApplianceError as error:
        return _report(run_dir, error)
    except Exception as error:  # the boundary of this process: every failure becomes an event and an exit code
        raise SystemExit(_report(run_dir, translate(error))) from error
    return 0


def _report(run_dir: Path, error: ApplianceError) -> int:
    append_event(
        run_dir,
        kind="failure",
        what=error.message,
        why=type(error).__name__,
        hint=error.hint,
        exit_code=error.exit_code,
    )
    return error.exit_code


def translate(error: Exception) -> ApplianceError:
    """The error of ours that fits. An error of ours raised inside a Ray worker arrives as a RayTaskError whose cause
    or text still names it; through vLLM's engine process only the text survives."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, ApplianceError):
        return cause
    text = str(error).strip()
    last = text.splitlines()[-1] if text else type(error).__name__
    for kind in (SyncError, *_subclasses(ApplianceError)):
        if f"{kind.__name__}: " in text:
            return kind(text.rsplit(f"{kind.__name__}: ", 1)[1].splitlines()[0].strip("'\")"))
    return TrainingError(f"{type(error).__name__}: {last}", hint="the log has the whole story")


def _subclasses(kind: type[ApplianceError]) -> list[type[ApplianceError]]:
    return [leaf for child in kind.__subclasses__() for leaf in (child, *_subclasses(child))]


def train(plan: RunPlan, *, overrides: list[str]) -> None:
    """Start Ray, build verl's trainer, fit, stop Ray. Raises what went wrong, after Ray is stopped."""
    run_dir = Path(plan.run_dir)
    append_event(run_dir, kind="phase", what="start")
    import ray

    _start_ray(plan)
    try:
        from appliance.trainer.fit import fit

        fit(plan, overrides=overrides)
    finally:
        ray.shutdown()
    append_event(run_dir, kind="phase", what="done")


def _start_ray(plan: RunPlan) -> None:
    """A Ray of this run's own, on this host. Its GPUs are the plan's ranks; workers inherit this process's variables."""
    import ray

    ray.init(
        num_cpus=max(8, os.cpu_count() or 1),  # verl asks for a CPU per actor; they share the cores
        num_gpus=plan.gpus_per_node if plan.device == "cpu" else None,
        include_dashboard=False,
        object_store_memory=256 << 20 if plan.device == "cpu" else None,
        _temp_dir=os.environ.get(RAY_DIR_VARIABLE),
        log_to_driver=True,
    )


if __name__ == "__main__":
    sys.exit(main())
