"""Every scheme x every family x every way in which weights come: 6 x 6 x 5 cells, each with a real vLLM.

"Identical" is greedy tokens and their log-probs, without a tolerance. One engine serves the cells of a scheme and a
family; a second one, started from the new weights and gone before the cells run, says what they should give.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
import torch
from engines import Engine, free_engine, read_checkpoint, start_engine
from families import FAMILIES, SIZES, make_family

from appliance.engine.attest import live_scheme
from appliance.terms.schemes import Scheme

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NUM_CELLS = 180
NUM_CYCLES = 20
MAX_TOKENS = 2  # one that reads the prompt, one that reads the cache

Tensors = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Pair:
    """An engine of one scheme and family.

    old, new: two checkpoints of the same shapes.  wanted_old, wanted_new: what fresh engines generate with them.
    """

    engine: Engine
    old: Tensors
    new: Tensors
    wanted_old: list
    wanted_new: list

    def load(self, tensors: Tensors, *, bucket: int = 1000) -> list:
        """What the engine generates after one whole weight update."""
        report = self.engine.load(tensors, bucket=bucket)
        assert report.tensors == len(tensors)
        return self.engine.generate(max_tokens=MAX_TOKENS)


def whole_tiles(name: str) -> dict[str, int]:
    """A family's widths, each the next multiple of 32: what INT4's kernel takes."""
    sizes = SIZES | dict(FAMILIES[name].sizes)
    widths = ("hidden_size", "intermediate_size", "moe_intermediate_size")
    return {key: -(-sizes[key] // 32) * 32 for key in widths if key in sizes}


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Scheme, str], tuple[Path, Path]]:
    """A function (scheme, family) -> two checkpoints."""
    root = tmp_path_factory.mktemp("families")

    @functools.cache
    def pair_of(name: str, **sizes: int) -> tuple[Path, Path]:
        kind = f"{name}-{len(sizes)}"
        return tuple(make_family(root / f"{kind}-{seed}", name=name, seed=seed, **sizes) for seed in (1, 2))

    return lambda scheme, name: pair_of(name, **(whole_tiles(name) if scheme is Scheme.INT4 else {}))


@pytest.fixture(scope="module", params=product(Scheme, FAMILIES), ids="-".join)
def pair(request: pytest.FixtureRequest, families: Callable[[Scheme, str], tuple[Path, Path]]) -> Iterator[Pair]:
    scheme, family = request.param
    old, new = families(scheme, family)
    fresh = start_engine(new, scheme=scheme, emulated=scheme.spec.can_emulate)
    wanted_new = fresh.generate(max_tokens=MAX_TOKENS)
    free_engine(fresh)
    engine = start_engine(old, scheme=scheme, emulated=scheme.spec.can_emulate)
    live = live_scheme(engine.model)
    assert (live.scheme, live.emulated) == (scheme, scheme.spec.can_emulate)
    yield Pair(
        engine=engine,
        old=read_checkpoint(old),
        new=read_checkpoint(new),
        wanted_old=engine.generate(max_tokens=MAX_TOKENS),
        wanted_new=wanted_new,
    )
    free_engine(engine)


def identity(pair: Pair) -> None:
    assert pair.load(pair.old) == pair.wanted_old


def perturb_and_restore(pair: Pair) -> None:
    """In each cycle another tensor moves, spread over the layers; alone it must show, and be gone again."""
    for cycle in range(NUM_CYCLES):
        place = cycle * len(pair.old) // NUM_CYCLES
        moved = list(pair.old)
        name, tensor = moved[place]
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(cycle))
        moved[place] = (name, (tensor.float() + tensor.float().abs().mean() * noise).to(tensor.dtype))
        assert pair.load(moved) != pair.wanted_old, f"cycle {cycle}: {name} moved, and nothing else did"
        assert pair.load(pair.old) == pair.wanted_old, f"cycle {cycle}: {name}"


def new_weights(pair: Pair) -> None:
    assert pair.wanted_new != pair.wanted_old
    assert pair.load(pair.new) == pair.wanted_new
    pair.engine.load(pair.old)
    masters = [(name, tensor.float() * (1 + 2.0**-10)) for name, tensor in pair.new]  # less than half a unit of BF16
    assert pair.load(masters) == pair.wanted_new


def shuffled_order(pair: Pair) -> None:
    """After other weights: what would not be replaced is not what it was."""
    for seed in range(3):
        pair.engine.load(pair.new)
        assert pair.load(random.Random(seed).sample(pair.old, len(pair.old)), bucket=5) == pair.wanted_old


def tiny_buckets(pair: Pair) -> None:
    for bucket in (1, 2):
        pair.engine.load(pair.new, bucket=bucket)
        assert pair.load(pair.old, bucket=bucket) == pair.wanted_old


WAYS: tuple[Callable[[Pair], None], ...] = (identity, perturb_and_restore, new_weights, shuffled_order, tiny_buckets)
_PASSED: set[str] = set()


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_cell(pair: Pair, way: Callable[[Pair], None], request: pytest.FixtureRequest) -> None:
    way(pair)
    _PASSED.add(request.node.name)


def test_the_matrix_is_whole() -> None:
    """Runs after the cells. A cell that is not there would not be missed otherwise."""
    wanted = {f"test_cell[{scheme}-{family}-{way.__name__}]" for scheme, family, way in product(Scheme, FAMILIES, WAYS)}
    assert wanted - _PASSED == set()
    assert len(_PASSED) == len(wanted) == NUM_CELLS
