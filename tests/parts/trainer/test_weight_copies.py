"""A trainer of one rank that keeps during an update what it computes with: the BF16 copies of its weights, and in one
flow the dequantised weights that gradients are multiplied with. The same weights and gradients bit for bit, and each
copy made once for all micro-batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from test_lora import under_fsdp
from test_shared_prompts import micro_batch, sequences
from tiny_models import tiny
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from verl.utils.tensordict_utils import assign_non_tensor

import appliance.trainer.worker  # noqa: F401  our log-probs and our attention
from appliance.quant.codec import QuantisedWeight
from appliance.terms.schemes import Scheme
from appliance.terms.settings import Quantisation
from appliance.trainer import rollout_ops, verl_engine
from appliance.trainer.rollout_forward import RolloutForward
from appliance.trainer.update_log_probs import UPDATE_LOG_PROBS
from appliance.trainer.verl_engine import ApplianceEngine

UPDATES, MICRO_BATCHES = 2, 5


@pytest.fixture
def one_rank() -> Iterator[None]:
    UPDATE_LOG_PROBS.end()  # of this process: another test may have left it open
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def engine_of(*, keeps_copies: bool, checkpointing: bool, one_flow: bool = False) -> Any:
    """Of a tiny Llama with tied embeddings, with what an update needs of verl's and no configuration."""
    torch.manual_seed(0)
    model = tiny("llama", tie_word_embeddings=True, head_dim=32).float().train()  # the flow's kernel has no 16
    flow = None
    if one_flow:
        told = Quantisation(scheme=Scheme.INT8)
        flow = RolloutForward(
            model, quantisation=told, num_tokens=model.config.vocab_size, keeps_dequantised=keeps_copies
        )
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    engine: Any = ApplianceEngine.__new__(ApplianceEngine)
    engine.module, engine._keeps_copies, engine.shares_prompts = under_fsdp(model, ranks=1), keeps_copies, True
    engine.use_ulysses_sp, engine.ulysses_device_mesh, engine.ulysses_sequence_parallel_size = False, None, 1
    engine.pad_to_length, engine.scaler, engine._flow, engine._qat_enabled = None, None, flow, False
    engine._autocast_dtype = torch.bfloat16
    engine.engine_config = SimpleNamespace(use_no_sync_for_gradient_accumulation=True, reshard_after_forward=True)
    engine.optimizer_config = SimpleNamespace(clip_grad=1.0)
    engine.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine.is_mp_src_rank_with_outputs = lambda: False
    return engine


def batch() -> TensorDict:
    pairs = sequences()
    data = micro_batch(pairs)
    data["loss_mask"] = data["response_mask"]
    for name, index in (("prompts", 0), ("responses", 1)):
        rows = [torch.tensor(pair[index]) for pair in pairs]
        data[name] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    assign_non_tensor(data, use_dynamic_bsz=False, micro_batch_size_per_gpu=len(pairs) // MICRO_BATCHES)
    return data


def loss(model_output: dict[str, Tensor], data: TensorDict, dp_group: Any = None) -> tuple[Tensor, dict[str, Any]]:
    return (model_output["log_probs"].values() * 0.1).sum(), {}


def test_dequantised_weights_that_are_kept_change_no_bit_and_are_made_once_an_update(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, weights, counts = rollout_ops._rounded, [], []
    for keeps_copies in (False, True):
        engine = engine_of(keeps_copies=keeps_copies, checkpointing=False, one_flow=True)
        layers, counts_by_layer = engine._flow.linears(), Counter[str]()

        def rounded(
            quantised: QuantisedWeight,
            *,
            dtype: torch.dtype,
            layers: Any = layers,
            made: Counter[str] = counts_by_layer,
        ) -> Tensor:
            made.update(layer.name for layer in layers if layer._operand and layer._operand.quantised is quantised)
            return original(quantised, dtype=dtype)

        monkeypatch.setattr(rollout_ops, "_rounded", rounded)
        for _ in range(UPDATES):
            data = batch()
            assign_non_tensor(data, use_fused_kernels=True)
            engine.train_batch(data, loss)
            assert not any(layer._operand for layer in layers), "a copy outlives its weight"
        assert set(counts_by_layer) == {layer.name for layer in layers}
        weights.append({name: each.full_tensor().clone() for name, each in engine.module.named_parameters()})
        counts.append({*counts_by_layer.values()})
    assert counts == [{UPDATES * MICRO_BATCHES}, {UPDATES}]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_copies_that_are_kept_change_no_bit_and_are_made_once_an_update(
    one_rank: None, monkeypatch: pytest.MonkeyPatch, checkpointing: bool
) -> None:
    casts: Counter[str] = Counter()
    original = FSDPParam.init_unsharded_param
    monkeypatch.setattr(
        FSDPParam, "init_unsharded_param", lambda param: (casts.update([param._param_fqn]), original(param))[1]
    )
    returns: list[str] = []
    monkeypatch.setattr(verl_engine, "return_free_memory", lambda: returns.append("after an update"))
    weights, counts = [], []
    for keeps_copies in (False, True):
        engine = engine_of(keeps_copies=keeps_copies, checkpointing=checkpointing)
        casts.clear()
        for _ in range(UPDATES):
            engine.train_batch(batch(), loss)
            states = {group.sharded_state for group in groups_of(engine.module)}
            assert states == {ShardedState.SHARDED}, "a copy outlives its weight"
        weights.append({name: each.full_tensor().clone() for name, each in engine.module.named_parameters()})
        counts.append(dict(casts))
    anew, kept = counts
    assert len(returns) == 2 * UPDATES
    assert set(kept) == set(anew) and set(kept.values()) == {UPDATES}
    assert set(anew.values()) == {2 * UPDATES * MICRO_BATCHES}
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def groups_of(module: torch.nn.Module) -> list[Any]:
    states = [part._get_fsdp_state() for part in module.modules() if hasattr(part, "_get_fsdp_state")]
    return [param for state in states for group in state._fsdp_param_groups for param in group.fsdp_params]
