"""The supervised child: Ray, verl's trainer and nothing else. `python -m appliance.trainer.entry <hydra overrides>`.

verl's own entry point starts a driver that starts a task runner in another process; here the driver is the trainer,
which saves a process, and a failure keeps its type until it becomes an exit code.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import multiprocessing  # noqa: F401  here, since what it spawns begins in the folder where it was imported
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from appliance.cluster.form import CPU_OBJECT_STORE_BYTES, cluster_of, cpus_for_ray
from appliance.errors import (
    ApplianceError,
    GuardStop,
    Interrupted,
    ProcessDied,
    SavedAndStopped,
    TrainingError,
    last_line,
)
from appliance.record.checkpoints import step_of
from appliance.record.events import append_event, append_failure, first_failure
from appliance.record.liveness import WORKER_HOOK, keep_stacks
from appliance.record.plan import RunPlan, read_plan
from appliance.record.session import asked_to_stop
from appliance.terms.environment import PLAN_VARIABLE, RAY_DIR_VARIABLE, RAY_OWN
from appliance.terms.phases import Phase
from appliance.trainer import forks
from appliance.trainer.stopping import Stopping

_OF_DEAD_ACTORS = frozenset({"ActorDiedError", "ActorUnavailableError"})  # Ray's, by name: it is not imported yet
# What the processes of a run import; these import the rest.
IMPORTS = (
    "torch",
    "transformers",
    "vllm.v1.worker.cpu_worker",
    "appliance.trainer.fit",
    "verl.workers.rollout.vllm_rollout.vllm_async_server",
)


def main() -> int:
    plan = read_plan(Path(os.environ[PLAN_VARIABLE]))
    keep_stacks("driver")
    try:
        if _has_forks(plan):
            append_event(Path(plan.run_dir), kind="phase", what=str(Phase.IMPORT))
            with forks.as_ray_worker():
                for name in IMPORTS:
                    if asked_to_stop(Path(plan.run_dir)):
                        break  # `train` hears it, and ends this process
                    importlib.import_module(name)
            forks.start_server(_forks_address())
        append_event(Path(plan.run_dir), kind="phase", what=str(Phase.START))
        train(plan, overrides=sys.argv[1:])
    except (SavedAndStopped, Interrupted) as asked:
        return asked.exit_code
    except Exception as error:  # the boundary of this process: every failure becomes an event and an exit code
        traceback.print_exception(error)
        return report(Path(plan.run_dir), error if isinstance(error, ApplianceError) else translate(error))
    return 0


def report(run_dir: Path, error: ApplianceError) -> int:
    """Report why this process ends, unless a worker already did: what it raised arrives here as somebody else's
    error. Returns the exit code."""
    said = first_failure(run_dir)
    if said is not None and said.exit_code is not None:
        return said.exit_code
    append_failure(run_dir, error)
    return error.exit_code


def _end(run_dir: Path, error: ApplianceError) -> None:
    """End this process at once: its main thread waits for something that cannot come. The subreaper ends the rest."""
    code = error.exit_code
    try:
        code = report(run_dir, error)
    finally:
        os._exit(code)  # also where nothing can be written


def translate(error: Exception) -> ApplianceError:
    """Return the error of ours that fits. One that was raised inside a Ray worker arrives as the cause of a
    RayTaskError."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, ApplianceError):
        return cause
    last = last_line(error)
    if type(error).__name__ in _OF_DEAD_ACTORS:  # one that the watch of the processes does not know
        return ProcessDied(f"a worker died: {last}", hint="the log has its last words")
    return TrainingError(f"{type(error).__name__}: {last}", hint="the log has the details")


def train(plan: RunPlan, *, overrides: list[str]) -> None:
    """Start Ray, build verl's trainer, fit, stop Ray. Raises what went wrong, after Ray is stopped.

    Importing verl takes seconds of one core, and so does starting Ray, mostly in other processes: they overlap, where
    no forks were to have the imports.
    """
    run_dir = Path(plan.run_dir)
    resumed = step_of(Path(plan.resume_from)) if plan.resume_from else None
    stopping = Stopping(run_dir, resumed_step=resumed or 0)
    importing = threading.Thread(target=importlib.import_module, args=("appliance.trainer.fit",))
    importing.start()
    with contextlib.ExitStack() as ending:
        ending.callback(stopping.over)  # however it ends, after Ray's own end
        on_death = ending.enter_context(_ray_of(plan))
        from ray.exceptions import RayActorError

        from appliance.trainer.process_watch import NAMED_AFTER_S, ProcessWatch

        processes = ProcessWatch(on_death=on_death, has_services=plan.cluster.has_own_ray)
        try:
            importing.join()
            from appliance.trainer.fit import fit  # raises here what it raised on the thread

            fit(plan, overrides=overrides, stopping=stopping, on_engine_death=on_death)
        except RayActorError:
            time.sleep(NAMED_AFTER_S)  # the watch says who it was, and ends this process
            raise
        finally:
            processes.stop()
    append_event(run_dir, kind="phase", what=str(Phase.DONE))


@contextlib.contextmanager
def _ray_of(plan: RunPlan) -> Iterator[Callable[[ApplianceError], None]]:
    """Start a Ray for the run, stopped at the end: its own on this host, or a cluster of several. Yields what to
    call, on any thread, when something that the trainer may be waiting for is gone; it does not return."""
    end = functools.partial(_end, Path(plan.run_dir))
    if plan.cluster.has_own_ray:
        import ray

        _start_ray(plan)
        try:
            yield end
        finally:
            ray.shutdown()
        return
    with cluster_of(plan, on_loss=end) as cluster:
        try:
            yield lambda error: end(cluster.lost() or error)  # a process may have died with its node
        except (SavedAndStopped, Interrupted, GuardStop):
            raise  # meant, whatever happened to a node
        except Exception as error:  # a boundary: a node that is gone fails every call there is, each in its own words
            if (loss := cluster.lost()) is not None:
                raise loss from error
            raise


def _has_forks(plan: RunPlan) -> bool:
    return plan.is_cpu and plan.cluster.has_own_ray


def _forks_address() -> Path:
    return Path(os.environ[RAY_DIR_VARIABLE], "forks")


def _start_ray(plan: RunPlan) -> None:
    """Start this run's own Ray, on this host. Its GPUs are the plan's ranks; its processes inherit this one's
    variables, and with them where the token is that it asks for."""
    import ray

    on_cpu = plan.is_cpu
    every_worker = {"worker_process_setup_hook": WORKER_HOOK}
    if _has_forks(plan):
        every_worker["py_executable"] = forks.worker_command(_forks_address())
    with contextlib.chdir(plan.run_dir):  # Ray's workers import from the folder where it is called
        ray.init(
            address="local",  # never a cluster that RAY_ADDRESS names
            num_cpus=cpus_for_ray(os.cpu_count() or 1, ranks=plan.cluster.gpus_per_node, is_cpu=on_cpu),
            num_gpus=plan.cluster.gpus_per_node if on_cpu else None,
            include_dashboard=False,
            object_store_memory=CPU_OBJECT_STORE_BYTES if on_cpu else None,
            _temp_dir=str(Path(os.environ[RAY_DIR_VARIABLE], RAY_OWN)),
            log_to_driver=True,
            runtime_env=every_worker,
        )


if __name__ == "__main__":
    sys.exit(main())
