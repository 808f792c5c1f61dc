"""Weights that LoRA was merged into, update after update, in a real engine: each is what a fresh engine has, and one
that is of another merge is not. The conditions of verl #7904 (token soup from the second update on), as far as a CPU
has them: it has no sleep mode, so the cache is reset and not freed.

The numbers that are asserted here are those of the table in docs/reliability.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from engines import start_engine
from faults import Bench, Tally, Tensors, given_to_vllm, new_update, sent, settle, start_bench, take
from torch import Tensor

pytestmark = pytest.mark.engine

UPDATES = 3
RANK = 4
TARGETS = {  # and the engine's layer that has it
    "model.layers.0.self_attn.q_proj": "model.layers.0.self_attn.qkv_proj",
    "model.layers.1.self_attn.o_proj": "model.layers.1.self_attn.o_proj",
    "model.layers.1.mlp.up_proj": "model.layers.1.mlp.gate_up_proj",
    "model.layers.2.mlp.down_proj": "model.layers.2.mlp.down_proj",
}


@pytest.fixture(scope="module")
def int8(checkpoints: tuple[Path, Path]) -> Iterator[Bench]:
    yield from start_bench(checkpoints, scheme="int8")


def product(name: str, shape: torch.Size, *, update: int) -> Tensor:
    """s B A of this update, in BF16, as PEFT adds it. Small beside the weights, and enough for codes to move."""
    generator = torch.Generator().manual_seed(1000 * update + list(TARGETS).index(name))
    a, b = (torch.randn(size, generator=generator) for size in ((RANK, shape[1]), (shape[0], RANK)))
    return (0.01 * b @ a).to(torch.bfloat16)


def merged(base: Tensors, *, update: int, times: int = 1) -> Tensors:
    """times: how often, 1 where nothing is wrong."""
    found = []
    for name, tensor in base:
        if (target := name.removesuffix(".weight")) in TARGETS and name.endswith(".weight"):
            for _ in range(times):
                tensor = tensor + product(target, tensor.shape, update=update)
        found.append((name, tensor))
    return found


def test_each_update_with_merged_weights_is_that_of_a_fresh_engine(int8: Bench, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    update, said = new_update(int8.engine), []
    for number in range(1, UPDATES + 1):
        take(int8.engine, sent(merged(int8.old, update=number), number=number), update=update)
        int8.engine.llm.reset_prefix_cache()
        said.append(int8.engine.generate())
    folder = tmp_path / "last"
    folder.mkdir()
    for each in Path(int8.engine.runner.vllm_config.model_config.model).glob("*.json"):
        (folder / each.name).write_bytes(each.read_bytes())
    save_file(dict(merged(int8.old, update=UPDATES)), folder / "model.safetensors", metadata={"format": "pt"})
    assert start_engine(folder, scheme="int8").generate() == said[-1]
    assert said[0] != said[1] != said[2]


WRONG: dict[str, Callable[[Tensors], Tensors]] = {
    "of the update before": lambda base: merged(base, update=1),
    "merged twice": lambda base: merged(base, update=2, times=2),
    "not merged": lambda base: base,
}


def test_a_tensor_of_another_merge_in_the_second_update(int8: Bench) -> None:
    """After its digest was made, and after it was checked; the first update of an adapter was proven."""
    on_the_way = Tally("tensor of another merge of LoRA, before transport (int8)")
    given = Tally("tensor of another merge of LoRA, given to vLLM (int8)")
    first, second = (sent(merged(int8.old, update=number), number=number) for number in (1, 2))

    def replaced(name: str, bad: Tensor) -> object:
        update = new_update(int8.engine)
        take(int8.engine, first, update=update)
        return take(int8.engine, [(one, bad if one == name else each) for one, each in second], update=update)

    def handed(name: str, bad: Tensor) -> object:
        update = new_update(int8.engine)
        take(int8.engine, first, update=update)
        with given_to_vllm(name, lambda tensor: bad):
            return take(int8.engine, second, update=update)

    for kind, make in WRONG.items():
        wrong = dict(make(int8.old))
        for target, layer in TARGETS.items():
            name = f"{target}.weight"
            bad = wrong[name]
            assert not bad.equal(dict(second)[name])
            says = f"weight update 2: {name} arrived with digest"
            int8.attempt(on_the_way, f"{kind} {name}", run=lambda n=name, b=bad: replaced(n, b), says=says)
            int8.attempt(given, f"{kind} {name}", run=lambda n=name, b=bad: handed(n, b), layer=layer)
    settle(on_the_way, cases=12)
    settle(given, cases=12)
