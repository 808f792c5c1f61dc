"""What the trainer's weights become on their way out."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

from appliance.engine.sync import SyncWorkerExtension
from appliance.sync.manifest import MANIFEST_NAME, read_manifest, record_tensor
from appliance.terms.environment import PLAN_VARIABLE
from appliance.trainer.sender import DigestedWeights, DigestingAdapter


def sent(
    weights: list[tuple[str, torch.Tensor]], *, dtype: torch.dtype = torch.bfloat16
) -> list[tuple[str, torch.Tensor]]:
    async def collect() -> list[tuple[str, torch.Tensor]]:
        return [item async for item in DigestedWeights(weights, sync=3, dtype=dtype)]

    return asyncio.run(collect())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_go_out_as_the_values_that_the_trainer_computes_with(dtype: torch.dtype) -> None:
    masters = torch.randn(8, 4)
    (name, tensor), *_ = sent([("a.weight", masters)], dtype=dtype)
    assert name == "a.weight" and tensor.dtype is dtype
    assert torch.equal(tensor, masters.to(dtype))


def test_other_types_go_out_as_they_are() -> None:
    weights = [("a", torch.randn(4).to(torch.bfloat16)), ("b", torch.arange(4))]
    assert [(name, tensor.dtype) for name, tensor in sent(weights)[:2]] == [("a", torch.bfloat16), ("b", torch.int64)]


def test_the_list_at_the_end_is_of_what_went_out() -> None:
    weights = [("a", torch.randn(4, 3)), ("b", torch.randn(5))]
    *tensors, (name, listed) = sent(weights)
    assert name == MANIFEST_NAME
    manifest = read_manifest(listed)
    assert manifest.sync == 3
    assert list(manifest.records) == [record_tensor(name, tensor) for name, tensor in tensors]


def test_sender_and_worker_of_a_run_meet_at_its_own_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's job id is the same in every run; verl's sender would remove another run's socket and take its place."""

    def as_verl(self: ServerAdapter) -> None:
        self.zmq_handle = "ipc:///tmp/rl-colocate-zmq-01000000-replica-0-rank-0.sock"

    monkeypatch.setattr(ServerAdapter, "__init__", as_verl)
    monkeypatch.setenv("VERL_RAY_JOB_ID", "01000000")
    sockets = set()
    for run in ("a", "b"):
        monkeypatch.setenv(PLAN_VARIABLE, str(Path("/runs") / run / "plan.json"))
        worker = SyncWorkerExtension.__new__(SyncWorkerExtension)
        worker.local_rank, worker.model_runner = 0, SimpleNamespace()
        assert worker._get_zmq_handle() == DigestingAdapter().zmq_handle
        sockets.add(worker._get_zmq_handle())
    assert len(sockets) == 2
