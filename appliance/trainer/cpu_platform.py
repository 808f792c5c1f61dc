"""The CPU as one of verl's platforms, by verl's own registry: torch.cpu with the calls that verl makes on torch.cuda,
and gloo. An import registers it and repairs nothing; `PROCESS_GROUP` is the patch of the one call that cannot work
there. verl has to be imported first: in a run it imports trainer/worker.py, which needs this module whole.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

from appliance.patch import Patch
from appliance.terms.environment import PLATFORM_VARIABLE, SERVER_VARIABLES

PROCESS_GROUP = Patch(
    name="cpu-process-group",
    target="verl.utils.distributed:initialize_global_process_group_ray",
    why="verl asks torch for `cpu:gloo,<device>:<backend>`; with the device `cpu` that names cpu twice, torch refuses",
    upstream="https://github.com/verl-project/verl/blob/v0.9.1/verl/utils/distributed.py",
    distribution="verl",
    sources={"0.9.1": "761a94d1a2e058d31a0ac231c89a142abf5daf822e333bac75e84cafcf7507ac"},
    remove_when="verl builds the backend string from a set of devices",
)


def is_run_on_cpu() -> bool:
    return os.environ.get(PLATFORM_VARIABLE) == "cpu"


def gloo_only(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def initialise(timeout_second: int | None = None, backend: str | None = None) -> None:
        return original(timeout_second=timeout_second, backend=backend or "cpu:gloo")

    return initialise


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing: there is no device memory to free and no stream to wait for."""


def _device_namespace() -> SimpleNamespace:
    """Return `torch.cpu` plus the members of `torch.cuda` that verl calls without asking; memory counters read 0."""
    inherited = {name: getattr(torch.cpu, name) for name in dir(torch.cpu) if not name.startswith("__")}
    does_nothing = ("empty_cache", "ipc_collect", "set_device", "manual_seed", "manual_seed_all")
    counters = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    answers = {
        "reset_peak_memory_stats": _nothing,
        "mem_get_info": lambda *args: (0, 0),
        "get_rng_state": torch.get_rng_state,
        "set_rng_state": torch.set_rng_state,
        "is_available": lambda: False,
        "get_device_name": lambda *args: "cpu",
        "current_device": lambda: "cpu",
    }
    members = (
        inherited | dict.fromkeys(does_nothing, _nothing) | dict.fromkeys(counters, lambda *args, **kwargs: 0) | answers
    )
    return SimpleNamespace(**members)


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """One "GPU" of verl's plan is one CPU rank. Chosen by VERL_PLATFORM=cpu, and never found by itself.

    Ray's resource stays `GPU`, because verl's resource check counts only GPU and NPU; the run's Ray is started with
    as many of them as the plan has ranks.
    """

    _namespace = _device_namespace()

    device_name = "cpu"
    vendor_name = "cpu"
    set_device = synchronize = set_allocator_settings = empty_cache = profiler_start = profiler_stop = cudart = _nothing

    @property
    def device_module(self) -> ModuleType:
        return self._namespace  # type: ignore[return-value]

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Return whether this run is on a CPU: verl asks where no platform is named, and in a run on GPUs it must not
        choose this one for a process that sees none."""
        return is_run_on_cpu()

    def current_device(self) -> str:  # type: ignore[override]
        """Return `cpu`: an index would become `cuda:0`."""
        return "cpu"

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def rollout_env_vars(self) -> dict[str, str]:
        return SERVER_VARIABLES
