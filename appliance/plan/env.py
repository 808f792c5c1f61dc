"""The environment variables of a run's children. No other file of the launcher names one."""

from __future__ import annotations

from pathlib import Path

PLAN_VARIABLE = "APPLIANCE_PLAN"
RAY_DIR_VARIABLE = "APPLIANCE_RAY_DIR"  # set when the run starts: a fresh temporary folder, removed at the end
TENSORBOARD_DIR_VARIABLE = "TENSORBOARD_DIR"


def child_env(
    run_dir: Path, *, is_cpu: bool, cores: int, kv_cache_gb: int, offline: bool, backends: tuple[str, ...]
) -> tuple[tuple[str, str], ...]:
    """(name, value) pairs that the child gets on top of the launcher's own environment.

    offline: model and data are on this host, so nothing asks the hub.  kv_cache_gb: GiB, per engine, CPU only.
    """
    env = {
        PLAN_VARIABLE: str(run_dir / "plan.json"),
        "VERL_USE_EXTERNAL_MODULES": "appliance.trainer.worker",
        "VLLM_PLUGINS": "flashrl_appliance",  # no plugin of another package
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",  # forks after use would warn in every process
        "PYTHONUNBUFFERED": "1",
    }
    if offline:
        env["HF_HUB_OFFLINE"] = "1"
    if "wandb" not in backends:
        env["WANDB_MODE"] = "disabled"
    if "tensorboard" in backends:
        env[TENSORBOARD_DIR_VARIABLE] = str(run_dir / "tensorboard")
    if is_cpu:
        env |= _cpu_env(cores=cores, kv_cache_gb=kv_cache_gb)
    return tuple(sorted(env.items()))


def _cpu_env(*, cores: int, kv_cache_gb: int) -> dict[str, str]:
    return {
        "VERL_PLATFORM": "cpu",  # the platform that trainer/cpu_platform.py registers
        "VERL_ENGINE_DEVICE": "cuda",  # verl registers its FSDP engine for cuda and npu only; it runs on any device
        "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gb),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the default pins one thread to core 0
        "TORCHDYNAMO_DISABLE": "1",  # needs a C++ compiler and start-up time, gains nothing at these sizes
        "OMP_NUM_THREADS": str(cores),  # Ray would set 1
    }
