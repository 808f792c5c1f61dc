"""Tensor-parallel layers, one rank after another in this process: what each holds is its part of what one rank holds.

vLLM's real linear layers, built with the rank and number of ranks that are asked for, and loaded through their own
loaders. Engines of two processes are tested elsewhere; here the numbers are looked at.

Legend: N output channels, K input channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from engines import Engine, start_engine
from test_engine_int8 import held_codes
from torch import Tensor
from torch.nn import Module

from appliance.errors import EngineError
from appliance.quant.codec import quantise
from appliance.terms.schemes import Scheme

pytestmark = pytest.mark.engine

SCHEMES = (Scheme.INT8, Scheme.FP8, Scheme.FP8_CHANNEL, Scheme.FP8_BLOCK)
HEAD = 64
CASES = [
    (scheme, kind, ranks)
    for scheme in SCHEMES
    for kind in ("row", "merged", "qkv")
    for ranks in (2, 4)
    if (scheme, kind, ranks) != (Scheme.FP8_BLOCK, "qkv", 4)  # 64 channels of a key to a rank: refused, see below
]
Build = Callable[..., Module]


@pytest.fixture(scope="module")
def engine(checkpoints: tuple[Path, Path]) -> Engine:
    """Has set up vLLM's process groups."""
    return start_engine(checkpoints[0], scheme="bf16")


@pytest.fixture
def build(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    """A function (kind, scheme, rank, ranks) -> layer, not loaded yet."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor import parameter
    from vllm.model_executor.layers import linear

    from appliance.engine.config import ApplianceConfig
    from appliance.terms.settings import Quantisation

    def make_layer(kind: str, *, scheme: Scheme, rank: int, ranks: int, size: int = 256) -> Module:
        for module in (linear, parameter):
            monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
            monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: ranks)
        config = ApplianceConfig(Quantisation(scheme=scheme, emulated=scheme.spec.can_emulate))
        options = {"bias": False, "quant_config": config, "params_dtype": torch.bfloat16, "prefix": f"model.{kind}"}
        if kind == "row":
            return linear.RowParallelLinear(2 * size, 128, **options)
        if kind == "merged":
            return linear.MergedColumnParallelLinear(128, [2 * size, 2 * size], **options)
        return linear.QKVParallelLinear(128, HEAD, 8, 4, **options)

    with set_current_vllm_config(engine.runner.vllm_config), torch.no_grad():
        yield make_layer


def parts_of(kind: str) -> dict[object, Tensor]:
    """What a checkpoint has for the layer, by the name that vLLM's loaders have for each part. The largest values lie
    where only one of two ranks sees them."""
    rows = {"row": {None: 128}, "merged": {0: 512, 1: 512}, "qkv": {"q": 8 * HEAD, "k": 4 * HEAD, "v": 4 * HEAD}}[kind]
    columns = 512 if kind == "row" else 128
    parts = {}
    for number, (part, count) in enumerate(rows.items()):
        weight_NK = torch.randn(count, columns, generator=torch.Generator().manual_seed(number))
        weight_NK[:, 0] *= 3
        weight_NK[0] *= 5
        parts[part] = weight_NK.to(torch.bfloat16)
    return parts


def load(layer: Module, parts: dict[object, Tensor]) -> Module:
    for part, weight_NK in parts.items():
        layer.weight.weight_loader(layer.weight, weight_NK, *([] if part is None else [part]))
    assert layer.quant_method.held_scale(layer) is not None
    return layer


def shard(kind: str, parts: dict[object, Tensor], *, rank: int, ranks: int) -> Tensor:
    if kind == "row":
        return parts[None].chunk(ranks, dim=1)[rank]
    return torch.cat([weight_NK.chunk(ranks)[rank] for weight_NK in parts.values()])


def stored_weight(layer: Module, *, length: int) -> Tensor:
    if layer.quant_method.scheme is Scheme.INT8:
        scale_N1 = layer.quant_method.held_scale(layer)
        return held_codes(layer, scale_N1=scale_N1, length=length)
    return layer.weight.data.float()


@pytest.mark.parametrize(("scheme", "kind", "ranks"), CASES)
def test_a_rank_holds_its_part_of_what_one_rank_holds(build: Build, scheme: Scheme, kind: str, ranks: int) -> None:
    parts = parts_of(kind)
    whole = load(build(kind, scheme=scheme, rank=0, ranks=1), parts)
    whole_NK = shard(kind, parts, rank=0, ranks=1)
    codes_NK = stored_weight(whole, length=whole_NK.shape[1])
    assert torch.equal(codes_NK.float(), quantise(whole_NK, scheme=scheme).codes_NK.float())
    sizes = [len(weight_NK) for weight_NK in parts.values()]
    for rank in range(ranks):
        layer = load(build(kind, scheme=scheme, rank=rank, ranks=ranks), parts)
        length = whole_NK.shape[1] // (ranks if kind == "row" else 1)
        wanted_NK = shard(kind, dict(zip(parts, codes_NK.split(sizes), strict=True)), rank=rank, ranks=ranks)
        assert torch.equal(stored_weight(layer, length=length), wanted_NK)
        if scheme is Scheme.FP8 or (kind == "row" and scheme is not Scheme.FP8_BLOCK):
            assert torch.equal(layer.quant_method.held_scale(layer), whole.quant_method.held_scale(whole))


@pytest.mark.parametrize("scheme", [Scheme.INT8, Scheme.FP8, Scheme.FP8_CHANNEL])
def test_the_absmax_of_an_earlier_load_is_forgotten(build: Build, scheme: Scheme) -> None:
    """Smaller weights after larger ones, through vLLM's reload."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

    for kind in ("row", "merged"):
        parts = parts_of(kind)
        smaller = {part: weight_NK / 8 for part, weight_NK in parts.items()}
        layer = build(kind, scheme=scheme, rank=1, ranks=2)
        record_metadata_for_reloading(layer)
        load(layer, parts)
        initialize_layerwise_reload(layer)
        load(layer, smaller)
        finalize_layerwise_reload(layer, None)
        fresh = load(build(kind, scheme=scheme, rank=1, ranks=2), smaller)
        length = 256 if kind == "row" else 128
        assert torch.equal(layer.quant_method.held_scale(layer), fresh.quant_method.held_scale(fresh))
        assert torch.equal(stored_weight(layer, length=length), stored_weight(fresh, length=length))


def test_blocks_that_ranks_would_cut_are_refused(build: Build) -> None:
    for kind, size, channels in (("row", 96, 96), ("merged", 100, 100), ("qkv", 256, 64)):
        with pytest.raises(EngineError) as raised:
            build(kind, scheme=Scheme.FP8_BLOCK, rank=0, ranks=4 if kind == "qkv" else 2, size=size)
        ranks = 4 if kind == "qkv" else 2
        assert raised.value.message == (
            f"model.{kind}: `fp8-block` over {ranks} ranks leaves {channels} channels to a rank, "
            "which is not a multiple of 128"
        )
