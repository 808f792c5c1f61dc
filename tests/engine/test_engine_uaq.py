"""A model that UAQ scaled, served by real engines: the same answers, through fused layers, experts and their router."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import Engine, free_engine, read_checkpoint, start_engine
from families import make_family

from appliance.quant.uaq import scale_folder

pytestmark = pytest.mark.engine

# Nats. Every scaled weight is rounded to BF16 anew (2^-9 each), and some INT8 codes fall to the other side: with these
# random weights 0.03 in BF16 and 0.06 in INT8, where the two schemes themselves are 0.08 apart. Layers scaled without
# their norms are 0.6 away.
BOUND = 0.2


def both(folder: Path, *, engine: Engine, scale: float) -> tuple[list, list]:
    """What the engine answers with the folder's weights, and with them scaled; then it has the former again."""
    target = folder.parent / f"scaled-{scale:g}"
    if not target.exists():
        scale_folder(folder, target=target, scale=scale)
    engine.load(read_checkpoint(folder))
    before = engine.generate(max_tokens=6)
    engine.load(read_checkpoint(target))
    after = engine.generate(max_tokens=6)
    engine.load(read_checkpoint(folder))
    return before, after


def farthest(before: list, after: list) -> float:
    """Largest difference between log-probs of the first tokens, nats: later ones may follow another token."""
    return max(abs(one[1][0] - other[1][0]) for one, other in zip(before, after, strict=True))


@pytest.fixture
def mixture(tmp_path: Path):
    engine = start_engine(make_family(tmp_path / "mixture", name="qwen3-moe", seed=3), scheme="int8")
    yield engine, tmp_path / "mixture"
    free_engine(engine)


def test_a_dense_model_answers_the_same(engine: Engine, checkpoints: tuple[Path, Path]) -> None:
    """By a power of two codes and sums are the same bits, by any other scale they are near."""
    before, after = both(checkpoints[0], engine=engine, scale=2.0)
    assert before == after
    before, after = both(checkpoints[0], engine=engine, scale=1.5)
    assert farthest(before, after) < BOUND


def test_a_mixture_of_experts_answers_the_same(mixture: tuple[Engine, Path]) -> None:
    engine, folder = mixture
    before, after = both(folder, engine=engine, scale=2.0)
    assert before == after
    before, after = both(folder, engine=engine, scale=1.5)
    assert farthest(before, after) < BOUND


def test_weights_that_are_not_scaled_together_answer_otherwise(engine: Engine, checkpoints: tuple[Path, Path]) -> None:
    """The comparison can fail: the scaled layers under the norms of the model as it was."""
    folder = checkpoints[0]
    both(folder, engine=engine, scale=1.5)
    before = engine.generate(max_tokens=6)
    scaled = dict(read_checkpoint(folder.parent / "scaled-1.5"))
    engine.load([(name, scaled[name] if "proj" in name else each) for name, each in read_checkpoint(folder)])
    assert farthest(before, engine.generate(max_tokens=6)) > BOUND
    engine.load(read_checkpoint(folder))
