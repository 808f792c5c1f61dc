"""A CPU as one of verl's platforms: torch.cpu with the calls that verl makes on torch.cuda, and gloo."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

from appliance.control_groups import usable_cores
from appliance.terms.environment import PLATFORM_VARIABLE, SERVER_VARIABLES, THREADS_VARIABLE


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What a call means where there is no device memory to free and no stream to wait for."""


def _zero(*args: Any, **kwargs: Any) -> int:
    return 0


def _device_namespace() -> SimpleNamespace:
    """`torch.cpu` plus the members of `torch.cuda` that verl calls without asking; memory counters read 0."""
    own = {name: getattr(torch.cpu, name) for name in dir(torch.cpu) if not name.startswith("__")}
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
    members = own | dict.fromkeys(does_nothing, _nothing) | dict.fromkeys(counters, _zero) | answers
    return SimpleNamespace(**members)


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """One "GPU" of verl's plan is one CPU rank. Chosen by VERL_PLATFORM=cpu.

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

    def current_device(self) -> str:  # type: ignore[override]
        """`cpu`: an index would become `cuda:0`."""
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


def is_cpu_run() -> bool:
    """Whether this process belongs to a run on the CPU flavour."""
    return os.environ.get(PLATFORM_VARIABLE, "") == "cpu"


def fit_threads_to_host() -> None:
    """At most as many as this host has cores. Every process is given the plan's number, made from the head's cores.

    Call it before the process computes. The engine's processes, which this one starts, read the variable.
    """
    cores = usable_cores()
    if torch.get_num_threads() > cores:
        torch.set_num_threads(cores)
        os.environ[THREADS_VARIABLE] = str(cores)
