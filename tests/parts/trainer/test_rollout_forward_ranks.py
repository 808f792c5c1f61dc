"""The rollouts' forward under FSDP2 with two ranks, as verl wraps a model, against one process without it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from test_lora import under_fsdp
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from appliance.terms.schemes import Scheme
from appliance.terms.settings import Quantisation
from appliance.trainer.rollout_forward import RolloutForward

RANKS = 2
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
CASES = ({"tied": True, "checkpointing": False}, {"tied": False, "checkpointing": True})


def masters(*, tied: bool) -> PreTrainedModel:
    """In float32, as verl has it before FSDP."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES, vocab_size=96, num_hidden_layers=2, tie_word_embeddings=tied))
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape)
    return model.train()


def put_in(model: PreTrainedModel) -> RolloutForward:
    return RolloutForward(model, quantisation=Quantisation(scheme=Scheme.INT8), num_tokens=96)


def batch_of(rank: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rank)
    lengths = (5, 40, 19 + rank)
    ids = torch.randint(0, 96, (1, sum(lengths)), generator=generator)
    positions = torch.cat([torch.arange(each) for each in lengths])[None]
    return {"input_ids": ids, "position_ids": positions, "shift_labels": ids.roll(-1, 1), "temperature": 1.0}


def step(model: PreTrainedModel, rank: int) -> list[Tensor]:
    """Log-probs without a gradient and with one."""
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            before = model(**batch_of(rank), use_cache=False).log_probs
        log_probs = model(**batch_of(rank), use_cache=False).log_probs
        log_probs.sum().backward()
    return [before, log_probs.detach()]


def one_rank(rank: int, rendezvous: str) -> None:
    """A rank's process. It leaves what `wrapped` returns for each case in `<rendezvous>.<rank>`."""
    from torch.distributed import destroy_process_group, init_process_group

    torch.set_num_threads(1)
    init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    torch.save([wrapped(rank, **case) for case in CASES], f"{rendezvous}.{rank}")
    destroy_process_group()


def wrapped(rank: int, *, tied: bool, checkpointing: bool) -> tuple[list[Tensor], list[Tensor], dict, list[str]]:
    """(log-probs, those after an update, its gradients, names of the state). As `_build_fsdp_module` does it."""
    from torch.distributed.device_mesh import init_device_mesh
    from verl.utils.fsdp_utils import fsdp2_load_full_state_dict

    model = masters(tied=tied)
    flow = put_in(model)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    state = model.state_dict()
    under_fsdp(model, ranks=RANKS)
    fsdp2_load_full_state_dict(model, state, init_device_mesh("cpu", (RANKS,)), None)
    first = step(model, rank)
    grads = {name: each.grad.full_tensor() for name, each in model.named_parameters()}
    with torch.no_grad():
        for each in model.parameters():
            each -= 0.1 * each.grad
    flow.forget()
    return first, step(model, rank), grads, list(model.state_dict())


def log_probs_alone(model: PreTrainedModel, rank: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Without FSDP or checkpointing, and the gradients."""
    alone = copy.deepcopy(model).to(torch.bfloat16)
    put_in(alone)
    return step(alone, rank), {name: each.grad.float() for name, each in alone.named_parameters()}


@pytest.mark.slow
def test_two_ranks_compute_what_one_process_does(tmp_path: Path) -> None:
    """Log-probs bit for bit, before and after an update, with and without gradient checkpointing. Gradients of two
    batches are BF16, summed in float32 and halved: one rounding, 2^-24 of the sum."""
    rendezvous = str(tmp_path / "meet")
    torch.multiprocessing.spawn(one_rank, args=(rendezvous,), nprocs=RANKS)
    by_rank = [torch.load(f"{rendezvous}.{rank}") for rank in range(RANKS)]
    for case, *of_ranks in zip(CASES, *by_rank, strict=True):
        model = masters(tied=case["tied"])
        alone = [log_probs_alone(model, rank) for rank in range(RANKS)]
        for (first, _, grads, names), (log_probs, _) in zip(of_ranks, alone, strict=True):
            assert all(map(torch.equal, first, log_probs))
            assert names == list(model.state_dict())
            for name, grad in grads.items():
                assert torch.allclose(grad, (alone[0][1][name] + alone[1][1][name]) / 2, rtol=2**-23, atol=0), name
        with torch.no_grad():
            for name, each in model.named_parameters():
                each -= 0.1 * of_ranks[0][2][name]
        for rank, (first, second, *_) in enumerate(of_ranks):
            assert all(map(torch.equal, second, log_probs_alone(model, rank)[0]))
            assert not torch.equal(first[0], second[0])
