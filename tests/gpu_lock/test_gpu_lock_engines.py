"""What verl's own server tells vLLM for each GPU recipe, and what vLLM makes of it on a Hopper. No engine starts."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import shipped
import test_plan_shipped
import torch
from plans import verl_config
from test_plan_shipped import planned

from appliance.terms.environment import PLAN_VARIABLE
from appliance.terms.schemes import Scheme

pytestmark = pytest.mark.usefixtures("hopper")
stubs = test_plan_shipped.stubs


@pytest.fixture
def server_class(monkeypatch: pytest.MonkeyPatch) -> type:
    """Ours, without Ray, and kept from starting an engine: `asked` is what it would start one with."""
    import ray
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica

    from appliance.engine.replica import load_replica

    monkeypatch.setattr(ray, "remote", lambda actor: actor)
    monkeypatch.setattr(vLLMReplica, "__init__", lambda self: None)

    class Server(load_replica()().server_class):
        async def run_server(self, args: argparse.Namespace) -> None:
            self.arguments = args

    return Server


def launched(server_class: type, config: Any, *, gpus: int) -> argparse.Namespace:
    """vLLM's command line, parsed. The server is not made by Ray, so it gets by hand what its constructor finds out."""
    server = object.__new__(server_class)
    server.config = server._init_config(config.actor_rollout_ref.rollout)
    server.model_config = server._init_model_config(config.actor_rollout_ref.model)
    server._validate_configs()
    vars(server).update(
        replica_rank=0,
        node_rank=0,
        nnodes=1,
        gpus_per_node=gpus,
        workers=[None] * server.config.tensor_model_parallel_size,
        profiler_controller=SimpleNamespace(check_enable=lambda: False),
        _disaggregation_role="null",
    )
    asyncio.run(server.launch_server())
    return server.arguments


@pytest.mark.parametrize("name", shipped.NAMES)
def test_vllm_takes_what_a_recipes_plan_tells_verl(
    name: str, server_class: type, stubs: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from vllm.config import CompilationMode, CUDAGraphMode
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    from appliance.engine.config import ApplianceConfig

    source = planned(name).model.path
    plan = planned(name, f"model.path={stubs[source]}", "quantization.profile=none")
    plan.write(tmp_path / "plan.json")
    monkeypatch.setenv(PLAN_VARIABLE, str(tmp_path / "plan.json"))
    asked = launched(server_class, verl_config(plan.argv[4:]), gpus=plan.cluster.gpus_per_node)
    vllm_config = AsyncEngineArgs.from_cli_args(asked).create_engine_config(
        usage_context=UsageContext.OPENAI_API_SERVER
    )
    is_plain = plan.engines[0].is_plain
    assert isinstance(vllm_config.quant_config, ApplianceConfig) is not is_plain
    assert is_plain is (plan.rollout.scheme is Scheme.BF16)
    assert vllm_config.use_v2_model_runner
    assert vllm_config.compilation_config.mode is CompilationMode.VLLM_COMPILE
    assert vllm_config.compilation_config.cudagraph_mode is CUDAGraphMode.FULL_AND_PIECEWISE
    assert vllm_config.model_config.enable_sleep_mode
    assert vllm_config.parallel_config.worker_extension_cls == "appliance.engine.sync.SyncWorkerExtension"
    assert vllm_config.parallel_config.distributed_executor_backend == "mp"
    assert vllm_config.parallel_config.tensor_parallel_size == plan.rollout.tensor_parallel
    assert vllm_config.scheduler_config.max_num_seqs == plan.engine.max_concurrent_sequences
    assert vllm_config.scheduler_config.max_num_batched_tokens == plan.engine.max_batched_tokens
    assert vllm_config.scheduler_config.enable_chunked_prefill is plan.rollout.chunked_prefill


def test_a_flow_has_vllms_own_kernels_one_by_one(
    server_class: type, stubs: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No compiler, no graphs, the runner whose log-probs are torch's, and attention in the batch-invariant mode."""
    from vllm.config import CompilationMode, CUDAGraphMode, set_current_vllm_config
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.attention.selector import get_attn_backend

    name, more = "gsm8k-0.5b-int8", ("trainer.forward=rollout", "quantization.profile=none")
    plan = planned(name, f"model.path={stubs[planned(name).model.path]}", *more)
    plan.write(tmp_path / "plan.json")
    for variable, value in dict(plan.env).items():
        if variable.startswith("VLLM_") or variable == PLAN_VARIABLE:
            monkeypatch.setenv(variable, value)
    monkeypatch.setenv(PLAN_VARIABLE, str(tmp_path / "plan.json"))
    asked = launched(server_class, verl_config(plan.argv[4:]), gpus=plan.cluster.gpus_per_node)
    vllm_config = AsyncEngineArgs.from_cli_args(asked).create_engine_config(
        usage_context=UsageContext.OPENAI_API_SERVER
    )
    assert vllm_config.compilation_config.mode is CompilationMode.NONE and not vllm_config.use_v2_model_runner
    assert vllm_config.compilation_config.cudagraph_mode is CUDAGraphMode.NONE
    assert vllm_config.compilation_config.custom_ops == ["all"] and vllm_config.cache_config.block_size == 16
    with set_current_vllm_config(vllm_config):
        assert get_attn_backend(64, torch.bfloat16, "auto").get_name() == "FLASH_ATTN"


def test_our_extension_clashes_with_nothing_of_vllms_worker() -> None:
    """vLLM refuses an extension that has an attribute of the worker's."""
    from vllm.v1.worker.gpu_worker import Worker

    from appliance.engine.sync import SyncWorkerExtension

    ours = {name for name in dir(SyncWorkerExtension) if not name.startswith("__")}
    assert {name for name in ours if hasattr(Worker, name)} == set()


def test_a_hopper_gets_the_third_flash_attention() -> None:
    """Both versions are there: their libraries load."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
    from vllm.v1.attention.selector import get_attn_backend
    from vllm.vllm_flash_attn import flash_attn_interface

    assert flash_attn_interface.FA2_AVAILABLE and flash_attn_interface.FA3_AVAILABLE
    with set_current_vllm_config(VllmConfig()):
        assert get_attn_backend(64, torch.bfloat16, "auto").get_name() == "FLASH_ATTN"
        assert get_flash_attn_version() == 3
