"""The layers that UAQ scales with a learning rate of their own: which they are, and what a step of Adam's does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from appliance.terms.environment import ENGINE_VENDOR, child_env
from appliance.trainer.verl_engine import ApplianceEngine, split_rates

ENDS = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")


def tiny() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, vocab_size=32, num_hidden_layers=2))


def test_only_what_a_norm_feeds_moves_further_and_all_decays_alike() -> None:
    model = tiny()
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    split_rates(optimizer, parameters_by_name=model.named_parameters(), scale=4.0)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 4e-2]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # Adam's first step is the rate itself, whatever the gradient; the decay is rate * decay * weight
    for name, parameter in model.named_parameters():
        step = before[name] * (1 - 1e-2 * 0.1) - parameter.detach()
        wanted = 4e-2 if name.endswith(ENDS) else 1e-2
        assert torch.allclose(step, torch.full_like(step, wanted), rtol=0, atol=2.0**-20), name


def test_a_schedule_keeps_the_two_apart_and_no_parameter_is_lost() -> None:
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    split_rates(optimizer, parameters_by_name=model.named_parameters(), scale=1.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))
    optimizer.step()
    schedule.step()
    assert schedule.get_last_lr() == pytest.approx([1e-3, 1.5e-3])
    held = [id(each) for group in optimizer.param_groups for each in group["params"]]
    assert sorted(held) == sorted(id(each) for each in model.parameters())


def test_verl_finds_the_engine_by_the_plans_vendor_and_its_own_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_ENGINE_DEVICE", "cuda")
    assert EngineRegistry.get_engine_cls("language_model", "fsdp2") is FSDPEngineWithLMHead
    settings = {"is_cpu": True, "threads": 1, "kv_cache_gb": 1, "offline": True, "backends": ()}
    assert "VERL_ENGINE_VENDOR" not in dict(child_env(Path("/runs/a"), **settings))
    vendor = dict(child_env(Path("/runs/a"), **settings, own_engine=True))["VERL_ENGINE_VENDOR"]
    assert vendor == ENGINE_VENDOR
    monkeypatch.setenv("VERL_ENGINE_VENDOR", vendor)
    assert EngineRegistry.get_engine_cls("language_model", "fsdp2") is ApplianceEngine
