"""Mixtures of experts under FLASHRL_CONFIG: each way in ends in the engine of the new weights, or in no token."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import read_checkpoint, start_engine
from families import make_family
from faults import flip_bit, given_to_vllm
from ways_and_faults import (
    SCHEMES,
    WAYS,
    Weights,
    by_tensor,
    cropped,
    doubled,
    dropped,
    flipped,
    lent,
    refusals,
    start,
    swapped,
    tally_of,
)

from appliance.errors import SyncError

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layer 0 is dense, two have experts; `1` and `2` are of other weights."""
    root = tmp_path_factory.mktemp("experts")
    for seed in (1, 2):
        make_family(root / str(seed), name="qwen3-moe", seed=seed)
    return root


@pytest.fixture(scope="module")
def fresh_answers(experts: Path) -> dict[str, list]:
    """What an engine of the second checkpoint says, by scheme."""
    return {scheme: start_engine(experts / "2", scheme=scheme).generate() for scheme in SCHEMES}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_way_ends_in_the_engine_of_the_new_experts(
    experts: Path, fresh_answers: dict[str, list], ways_in: pytest.MonkeyPatch, scheme: str
) -> None:
    new = fresh_answers[scheme]
    ways_in.setenv("FLASHRL_CONFIG", scheme)
    engine = start(experts / "1")
    old = engine.generate()
    assert old != new
    first, second = read_checkpoint(experts / "1"), read_checkpoint(experts / "2")
    for way in WAYS.values():
        for weights, says in ((second[::-1], new), (first, old)):
            way(engine, weights)
            assert engine.generate() == says
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(experts / "2")})
    assert engine.generate() == new
    assert engine.llm.llm_engine.get_weight_version() == str(2 * len(WAYS) + 1)


def packed(weights: Weights) -> Weights:
    """As transformers 5 names its parameters: a layer's experts in two tensors."""
    import torch

    tensors, packed_tensors = dict(weights), []
    for name, tensor in weights:
        layer, _, part = name.partition(".experts.")
        if not part:
            packed_tensors.append((name, tensor))
        elif part == "0.gate_proj.weight":
            gate, up, down = (
                torch.stack([tensors[f"{layer}.experts.{expert}.{each}_proj.weight"] for expert in range(5)])
                for each in ("gate", "up", "down")
            )
            packed_tensors.append((f"{layer}.experts.gate_up_proj", torch.cat([gate, up], dim=1)))
            packed_tensors.append((f"{layer}.experts.down_proj", down))
    return packed_tensors


@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts_of_a_layer_in_one_tensor_are_proven_one_by_one(
    experts: Path, fresh_answers: dict[str, list], ways_in: pytest.MonkeyPatch, scheme: str
) -> None:
    """With and without digests, and never twice."""
    from flashrl_compat.sender import with_manifest

    ways_in.setenv("FLASHRL_CONFIG", scheme)
    engine = start(experts / "1")
    old = engine.generate()
    first, second = (packed(read_checkpoint(experts / name)) for name in "12")
    by_tensor(engine, lent(second))
    assert engine.generate() == fresh_answers[scheme]
    by_tensor(engine, list(with_manifest(first, number=2)))
    assert engine.generate() == old
    twice = [each for each in second if each[0].endswith("gate_up_proj")][:1] * 2
    with pytest.raises(SyncError, match=r"experts\.0\.gate_proj\.weight came twice"):
        by_tensor(engine, twice)


def experts_first(folder: Path) -> Weights:
    """The faults are in the first tensors of a kind."""
    return sorted(read_checkpoint(folder), key=lambda each: ".experts." not in each[0])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_fault_in_an_expert_is_caught_and_never_sampled_from(
    experts: Path, ways_in: pytest.MonkeyPatch, record_property, scheme: str
) -> None:
    """Swapped: gate and up of one expert, which have one shape."""
    faults = [(dropped, False), (doubled, False), (cropped, False), (swapped, True), (flipped, True)]
    cases = [(way, *fault) for way in WAYS for fault in faults]
    called, new = f"faults in experts' updates by {len(WAYS)} ways ({scheme})", experts / "2"
    tally = tally_of(
        cases, called=called, scheme=scheme, ways_in=ways_in, old=experts / "1", weights=lambda: experts_first(new)
    )
    record_property("said", str(tally))
    assert tally.missed == []
    assert tally.caught == tally.injected == 30


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_expert_that_waits_for_others_is_copied_out_of_the_senders_memory(
    experts: Path, fresh_answers: dict[str, list], ways_in: pytest.MonkeyPatch, scheme: str
) -> None:
    ways_in.setenv("FLASHRL_CONFIG", scheme)
    engine = start(experts / "1")
    by_tensor(engine, lent(read_checkpoint(experts / "2")))
    assert engine.generate() == fresh_answers[scheme]


@pytest.mark.parametrize(
    ("scheme", "part", "clean"),
    [("bf16", "gate", 0), ("bf16", "up", 1), ("bf16", "down", 0), ("int8", "gate", 0), ("int8", "down", 0)],
)
def test_a_bit_of_an_expert_that_flips_after_its_receipt_is_caught(
    experts: Path, ways_in: pytest.MonkeyPatch, scheme: str, part: str, clean: int
) -> None:
    """One of the exponent's, in the last weight of an expert. clean: updates before that one; after the first one
    expert in eight is looked at in BF16, one row in eight in INT8."""
    ways_in.setenv("FLASHRL_CONFIG", scheme)
    engine, layer = start(experts / "1"), "model.layers.2.mlp.experts"
    for _ in range(clean):
        by_tensor(engine, read_checkpoint(experts / "2"))
    with (
        given_to_vllm(
            f"{layer}.{2 if clean else 4}.{part}_proj.weight", lambda tensor: flip_bit(tensor, at=1.0, bit=10)
        ),
        pytest.raises(SyncError, match=rf"weight update {clean + 1}: {layer}\S* on rank 0 is not as received: "),
    ):
        by_tensor(engine, read_checkpoint(experts / "1"))
    assert all(layer in said for said in refusals(engine))


def test_every_tensor_of_experts_in_bf16_is_looked_at(
    experts: Path, ways_in: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a kernel, or where the kernel reads it; and one that nobody looked at is told."""
    ways_in.setenv("FLASHRL_CONFIG", "bf16")
    engine, logged, weights = start(experts / "1"), [], read_checkpoint(experts / "2")
    monkeypatch.setattr(engine.worker.appliance_ways_in, "_tell", logged.append)
    by_tensor(engine, weights)
    known = engine.worker.appliance_ways_in.update._proof._slots
    found = [known.pop(name) for name, _ in weights if ".experts." in name]
    assert len(found) == 2 * 5 * 3
    by_tensor(engine, weights)
    assert [line.partition(" layers proven")[2] for line in logged] == ["", ", of 30 tensors nothing else is known"]
