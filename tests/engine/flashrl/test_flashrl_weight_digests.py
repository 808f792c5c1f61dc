"""Digests of what the kernels compute with: one value that changes, changes one of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engines import Engine, free_engine, read_checkpoint, start_engine

from flashrl_compat import weight_digests

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CHANGED = "model.layers.1.mlp.up_proj.weight"
LAYER = "dp0:pp0:pcp0:tp0:model.layers.1.mlp.gate_up_proj.weight"
PARTS = (  # of the model: nothing is left out
    "embed_tokens",
    *("qkv_proj.weight", "qkv_proj.bias", "o_proj", "gate_up_proj", "down_proj"),
    *("input_layernorm", "post_attention_layernorm", "model.norm"),
)


def digests(engine: Engine) -> dict[str, str]:
    [of_rank] = engine.llm.collective_rpc("compute_weight_checksums")
    return of_rank


def update(engine: Engine, tensors: list[tuple[str, torch.Tensor]]) -> None:
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})


def in_another_bit(tensor: torch.Tensor, *, row: int, column: int) -> torch.Tensor:
    """The tensor with the lowest bit of one BF16 value flipped."""
    copy = tensor.clone()
    copy.view(torch.int16)[row, column] ^= 1
    return copy


def in_another_code(tensor: torch.Tensor, *, row: int, column: int) -> torch.Tensor:
    """The tensor with a value moved towards zero by one INT8 step of its row, and a little more for the rounding."""
    copy = tensor.clone()
    step = copy[row].abs().max().item() / 127
    value = copy[row, column].item()
    assert abs(value) > 2 * step, "neither the row's largest nor one that would cross zero"
    copy[row, column] = value - 1.2 * step * (1 if value > 0 else -1)
    return copy


@pytest.mark.parametrize(("scheme", "change"), [("int8", in_another_code), ("bf16", in_another_bit)])
def test_one_value_of_one_layer_changes_the_digest_of_that_layer_alone(
    two_checkpoints: tuple[Path, Path], ways_in: pytest.MonkeyPatch, scheme: str, change
) -> None:
    ways_in.setenv("FLASHRL_CONFIG", scheme)
    engine = start_engine(two_checkpoints[0], scheme="bf16")
    tensors = read_checkpoint(two_checkpoints[0])
    before = digests(engine)
    assert [part for part in PARTS if not any(part in name for name in before)] == []
    update(engine, tensors)
    with ways_in.context() as patch:
        patch.setattr(weight_digests, "UNIT_VECTORS", 24)  # in several parts it is the same
        assert digests(engine) == before
    weight = dict(tensors)[CHANGED]
    middle = weight[70].abs().sort().indices[len(weight[70]) * 3 // 4]
    update(
        engine,
        [(name, change(each, row=70, column=int(middle)) if name == CHANGED else each) for name, each in tensors],
    )
    after = digests(engine)
    assert [name for name in before if after[name] != before[name]] == [LAYER]
    free_engine(engine)
