"""What scales losses in FP16: an overflow on one rank leaves an update out on all, is counted, and is kept."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_lora import under_fsdp
from test_verl_engine import tiny

RANKS, UPDATES = 2, 4
OVERFLOWS_IN = 1  # of the updates from 0, on the last rank alone


def engine_of(module: torch.nn.Module) -> Any:
    """Ours, with what an update needs of verl's and no configuration."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    from appliance.trainer.verl_engine import ApplianceEngine

    engine: Any = ApplianceEngine.__new__(ApplianceEngine)
    engine.module, engine.optimizer = module, torch.optim.AdamW(module.parameters(), lr=0.01)
    engine.optimizer_config, engine.ulysses_device_mesh = SimpleNamespace(clip_grad=1.0), None
    engine._flow, engine._qat_enabled = None, False
    engine.scaler = ShardedGradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    return engine


def one_rank(rank: int, folder: str, bad: float) -> None:
    """A rank's process: its updates, and what it saw of them, in `<folder>/<rank>.pt`. bad: what one loss is times."""
    os.environ["VERL_PLATFORM"] = "cpu"
    import appliance.trainer.worker  # noqa: F401  (verl's platform)

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    module = under_fsdp(tiny(), ranks=RANKS, dtype=torch.float16)
    engine, seen = engine_of(module), []
    for update in range(UPDATES):
        factor = bad if update == OVERFLOWS_IN and rank == RANKS - 1 else 1.0

        def forward_backward(data: Any, loss_function: Any, forward_only: bool, factor: float = factor) -> Any:
            ids = torch.arange(12)[None] + rank
            engine.scaler.scale(factor * module(input_ids=ids, labels=ids).loss).backward()
            return {"metrics": {}}

        engine.forward_backward_batch = forward_backward
        before = next(module.parameters()).full_tensor().clone()
        found = engine.train_batch({}, None)["metrics"]
        moved = not torch.equal(before, next(module.parameters()).full_tensor())
        seen.append((found["grad_scale"][0], found["overflow_fraction"][0], moved))
    torch.save((seen, engine.scaler.state_dict()), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("bad", [1e9, float("nan")])
def test_an_overflow_of_one_rank_leaves_the_update_out_on_all(tmp_path: Path, bad: float) -> None:
    """Or a loss that is NaN, as where log-probs are not finite (trainer/correction.py)."""
    torch.multiprocessing.spawn(one_rank, args=(str(tmp_path), bad), nprocs=RANKS)
    first, *others = [torch.load(tmp_path / f"{rank}.pt") for rank in range(RANKS)]
    seen, state = first
    assert seen == [(2.0**10, 0.0, True), (2.0**9, 1.0, False), (2.0**9, 0.0, True), (2.0**10, 0.0, True)]
    assert all(other == first for other in others)
    assert state["scale"] == 2.0**10 and json.loads(json.dumps(state)) == state


@pytest.mark.parametrize("scale", [2.0**10, 2.0**-3, 2.0**40])
def test_a_scaler_that_is_saved_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scale: float
) -> None:
    """Factor and updates since the last overflow, bit for bit."""
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    from appliance.trainer import verl_engine

    monkeypatch.setattr(FSDPEngine, "save_checkpoint", lambda *args, **kwargs: None)
    monkeypatch.setattr(FSDPEngine, "load_checkpoint", lambda *args, **kwargs: None)
    monkeypatch.setattr(verl_engine, "_plan", lambda: SimpleNamespace(model=SimpleNamespace(lora=None)))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    saved, loaded = engine_of(tiny()), engine_of(tiny())
    saved.scaler.load_state_dict(saved.scaler.state_dict() | {"scale": scale, "_growth_tracker": 7})
    saved.scaler.scale(torch.ones(1))  # it makes its tensors
    saved.save_checkpoint(str(tmp_path))
    loaded.scaler.scale(torch.ones(1))
    loaded.load_checkpoint(str(tmp_path))
    assert loaded.scaler.state_dict() == saved.scaler.state_dict()
    assert float(loaded.scaler.scale(torch.ones(1))) == scale
    (tmp_path / "scaler.json").unlink()
    with pytest.raises(FileNotFoundError):
        loaded.load_checkpoint(str(tmp_path))


def test_verls_own_is_off_without_a_gpu() -> None:
    """Why ours takes its place. Remove it when verl makes one for the device of its platform."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    with pytest.warns(UserWarning, match="CUDA is not available"):
        assert not ShardedGradScaler(growth_interval=400).is_enabled()
