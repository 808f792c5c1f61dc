"""Imported by verl itself in every process of a run (`VERL_USE_EXTERNAL_MODULES`); an error here stops the process.

It gives verl our sender of weights and, where the plan asks for it, our engine, by verl's own registries. On the
CPU flavour it registers the CPU as a platform, repairs the one call that cannot work there, and fits the threads to the
host.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl.workers.rollout import base

from appliance.patch import Patch, apply_patch
from appliance.record.liveness import WORKER_ROLE, keep_stacks
from appliance.record.plan import read_plan
from appliance.terms.environment import PLAN_VARIABLE
from appliance.trainer.cpu_platform import fit_threads_to_host, is_cpu_run

PROCESS_GROUP = Patch(
    name="cpu-process-group",
    target="verl.utils.distributed:initialize_global_process_group_ray",
    why="verl asks torch for `cpu:gloo,<device>:<backend>`; with the device `cpu` that names cpu twice, torch refuses",
    upstream="https://github.com/verl-project/verl/blob/v0.9.1/verl/utils/distributed.py",
    distribution="verl",
    version="0.9.1",
    source_sha256="761a94d1a2e058d31a0ac231c89a142abf5daf822e333bac75e84cafcf7507ac",
    remove_when="verl builds the backend string from a set of devices",
)


def _gloo_only(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def initialise(timeout_second: int | None = None, backend: str | None = None) -> None:
        return original(timeout_second=timeout_second, backend=backend or "cpu:gloo")

    return initialise


def _patches() -> tuple[tuple[Patch, Callable[[Callable[..., Any]], Callable[..., Any]]], ...]:
    return ((PROCESS_GROUP, _gloo_only),) if is_cpu_run() else ()


def _needed() -> tuple[str, ...]:
    """Modules of ours that register themselves, read from the plan: they import parts of verl that no other process
    of a run needs."""
    file = os.environ.get(PLAN_VARIABLE)
    if file is None:
        return ()
    return ("appliance.trainer.layer_rates",) if read_plan(Path(file)).norm_fed_lr_scale != 1 else ()


keep_stacks(WORKER_ROLE)

if is_cpu_run():
    fit_threads_to_host()

for _patch, _replacement in _patches():
    apply_patch(_patch, _replacement)

# By name: the module imports vLLM's side of verl, which only workers that send weights need.
base._ROLLOUT_REGISTRY[("vllm", "async")] = "appliance.trainer.sender.DigestingAdapter"

for _module in _needed():
    importlib.import_module(_module)
