"""Updates of a merged adapter, as verl makes them, in one engine whose memory is freed between them.

verl has an open report of engines that generate nonsense from the second such update on (its issue 7904, on a GPU, with
`free_cache_engine`). Here what sleeping frees, weights and KV cache, is overwritten before each update, and one thing
goes wrong in the second or third: between digest and engine, where the right merge is what was digested, or in what the
kernels hold afterwards. What goes wrong before the digest is the trainer's to see: tests/parts/trainer/test_lora.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from engines import free_engine, start_engine
from faults import (
    EMBEDDING,
    NORM,
    WEIGHT,
    Bench,
    Tally,
    Tensors,
    before_proof,
    free_scale,
    new_update,
    overwrite,
    recover,
    sent,
    start_bench,
    swap_in,
    take,
)
from test_engine_int8 import linear_layers
from torch import Tensor

from appliance.engine.update import WeightState, WeightUpdate
from appliance.errors import SyncError
from appliance.quant.codec_int8 import quantise_int8

pytestmark = pytest.mark.engine

FIRST, ONE = "model.layers.0.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight"  # of the stream; any
DIGEST, KERNEL = " arrived with digest ", " on rank 0 is not as received: "
ENGINE_FAULTS = {
    "int8": ("a norm", "the embedding", "an old kernel", "freed scales"),
    "bf16": ("a norm", "the embedding", "an old kernel"),
}
MERGES = ("half the scale", "not merged", "merged twice", "another base")
Merges = list[dict[str, dict[str, Tensor]]]  # by update, then by what went wrong


@pytest.fixture(scope="module")
def merges(checkpoints: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Merges:
    out = tmp_path_factory.mktemp("merges") / "merges.pt"
    script = Path(__file__).with_name("merged_worker.py")
    child = subprocess.run(
        [sys.executable, str(script), *map(str, checkpoints), str(out)],
        env=os.environ | {"PYTHONPATH": str(script.parents[2])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    return torch.load(out)


@pytest.fixture(scope="module", params=["int8", "bf16"])
def bench(request: pytest.FixtureRequest, checkpoints: tuple[Path, Path]) -> Iterator[Bench]:
    yield from start_bench(checkpoints, scheme=request.param)


def ordered(tensors: dict[str, Tensor]) -> Tensors:
    return sorted(tensors.items())


def free_memory(bench: Bench) -> None:
    """Somebody else's values in every parameter and in the KV cache."""
    for each in [*bench.engine.model.parameters(), *bench.engine.runner.kv_caches]:
        each.data.view(torch.uint8).random_(0, 120)


def updated(bench: Bench, merges: Merges, *, updates: int) -> WeightUpdate:
    update = new_update(bench.engine)
    for number in range(1, updates + 1):
        free_memory(bench)
        take(bench.engine, sent(ordered(merges[number - 1]["sent"]), number=number), update=update)
    return update


def test_the_third_merge_into_freed_memory_is_a_fresh_engine(
    bench: Bench, merges: Merges, checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    updated(bench, merges, updates=3)
    answer = bench.engine.generate()
    free_memory(bench)
    assert bench.engine.generate() != answer  # what was freed is what it computes with
    (tmp_path / "config.json").write_bytes((checkpoints[0] / "config.json").read_bytes())
    save_file(merges[2]["sent"], tmp_path / "model.safetensors", metadata={"format": "pt"})
    fresh = start_engine(tmp_path, scheme=bench.engine.scheme)
    assert fresh.generate() == answer
    free_engine(fresh)
    recover(bench.engine, bench.old)


def stream_faults(merges: Merges, *, number: int) -> dict[str, tuple[Tensors, str]]:
    """By fault, the update's tensors with it, and what the error must say. number: of the update, from 1."""
    merge, before = merges[number - 1], merges[number - 2]
    right = merge["sent"]
    swapped = right | {WEIGHT: right[WEIGHT.replace("1", "0")], WEIGHT.replace("1", "0"): right[WEIGHT]}
    one_left = right | {ONE: merge["not merged"][ONE]}
    faults = {name: (ordered(merge[name]), FIRST + DIGEST) for name in MERGES}
    return faults | {
        "the merge of the update before": (ordered(before["sent"]), FIRST + DIGEST),
        "one layer not merged": (ordered(one_left), ONE + DIGEST),
        "two layers swapped": (ordered(swapped), WEIGHT.replace("1", "0") + DIGEST),
        "dropped": ([each for each in ordered(right) if each[0] != WEIGHT], f"{WEIGHT} was sent and did not arrive"),
        "doubled": ([*ordered(right), (WEIGHT, right[WEIGHT])], f"{WEIGHT} came twice"),
        "cropped": (ordered(right | {WEIGHT: right[WEIGHT][:-1]}), f"vLLM refused {WEIGHT}"),
    }


def engine_faults(bench: Bench, tensors: dict[str, Tensor]) -> dict[str, tuple[Callable[[], bool], str]]:
    """By fault, what does it just before the proof, and what the error must say. Made when the update before is in."""
    layers, parameters = linear_layers(bench.engine), dict(bench.engine.model.named_parameters())

    def garbage(name: str) -> Callable[[], bool]:
        return lambda: overwrite(parameters[name].data, torch.randn_like(parameters[name].data))

    faults = {
        "a norm": (garbage(NORM), f"model.norm{KERNEL}"),
        "the embedding": (garbage(EMBEDDING), KERNEL),
    }
    name = "model.layers.2.mlp.down_proj"
    if bench.engine.scheme == "int8":
        codes = quantise_int8(tensors[f"{name}.weight"]).codes_NK
        freed = (lambda: free_scale(layers[name], codes), name + KERNEL)
        return faults | {
            "an old kernel": (swap_in(layers[name].quant_method), name + KERNEL),
            "freed scales": freed,
        }
    before = layers[name].cpu_linear
    weight = layers[name].weight.data
    if weight.numel():  # with AVX2 alone vLLM packs none
        old = weight.clone()
        return faults | {"an old kernel": (lambda: overwrite(layers[name].weight.data, old), name + KERNEL)}

    def keep() -> bool:
        changed = layers[name].cpu_linear is not before
        layers[name].cpu_linear = before
        return changed

    return faults | {"an old kernel": (keep, name + KERNEL)}


def attempt(
    bench: Bench,
    tally: Tally,
    stream: Tensors,
    *,
    update: WeightUpdate,
    says: str,
    around: AbstractContextManager[None],
) -> None:
    """One update after those that `update` has taken. After it the worker takes no other: nothing may sample."""
    free_memory(bench)
    caught = ""
    try:
        with around:
            take(bench.engine, stream, update=update)
    except SyncError as error:
        caught = error.message
        assert update.state is WeightState.BROKEN
        with pytest.raises(SyncError, match="the engine's weights are half-updated"):
            update.begin()
    finally:
        recover(bench.engine, bench.old)
    tally.injected += 1
    tally.caught += says in caught and caught != ""
    tally.missed += [] if says in caught and caught else [f"{says}: {caught or 'not caught'}"]


def test_a_fault_in_the_second_or_third_merge_is_caught(bench: Bench, merges: Merges) -> None:
    scheme = bench.engine.scheme
    tally = Tally(f"second and third update of a merged adapter ({scheme})")
    for number in (2, 3):
        right = sent(ordered(merges[number - 1]["sent"]), number=number)
        for tensors, says in stream_faults(merges, number=number).values():
            update = updated(bench, merges, updates=number - 1)
            attempt(bench, tally, [*tensors, right[-1]], update=update, says=says, around=nullcontext())
        for case in ENGINE_FAULTS[scheme]:
            update = updated(bench, merges, updates=number - 1)
            inject, says = engine_faults(bench, merges[number - 1]["sent"])[case]
            attempt(bench, tally, right, update=update, says=says, around=before_proof(inject))
    sys.stdout.write(f"{tally}\n")
    assert tally.missed == []
    assert tally.caught == tally.injected == {"int8": 28, "bf16": 26}[scheme]
