"""From the second update on tensors go to vLLM's loaders by the routes that the first one has shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import free_engine, make_checkpoint, read_checkpoint
from families import FAMILIES, make_family
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.model_loader.reload import layerwise
from ways_and_faults import (
    IN_THE_WEIGHTS,
    ON_THE_WAY,
    SCHEMES,
    by_reload,
    by_tensor,
    refusals,
    start,
    tally_of,
)

from appliance.engine.int4 import Int4LinearMethod
from appliance.errors import SyncError

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_later_update_asks_the_model_for_no_place_and_counts_nothing(
    two_checkpoints: tuple[Path, Path], ways_in: pytest.MonkeyPatch, scheme: str
) -> None:
    ways_in.setenv("FLASHRL_CONFIG", scheme)
    engine = start(two_checkpoints[0])
    old = engine.generate()
    by_tensor(engine, read_checkpoint(two_checkpoints[1]))
    new = engine.generate()
    assert old != new
    ways_in.setattr(type(engine.model), "load_weights", None)
    ways_in.setattr(layerwise, "get_numel_loaded", None)
    for way, folder, says in ((by_reload, two_checkpoints[0], old), (by_tensor, two_checkpoints[1], new)):
        way(engine, read_checkpoint(folder)[::-1])
        assert engine.generate() == says


def test_an_update_in_int4_is_that_of_a_fresh_engine(ways_in: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """INT4's kernel has other arguments from vLLM 0.31 on."""
    folders = [make_checkpoint(tmp_path / str(seed), seed=seed, num_hidden_layers=2) for seed in (11, 12)]
    (tmp_path / "int4.yaml").write_text("configs: [{fn: int4}]")
    ways_in.setenv("FLASHRL_CONFIG", str(tmp_path / "int4.yaml"))
    engine, fresh = map(start, folders)
    old = engine.generate()
    by_tensor(engine, read_checkpoint(folders[1]))
    assert old != engine.generate() == fresh.generate()
    kernels = [type(module.quant_method) for module in engine.model.modules() if isinstance(module, LinearBase)]
    assert set(kernels) == {Int4LinearMethod}


LAST = ("self_attn.v_proj.bias", "self_attn.k_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_later_update_ends_with_its_last_tensor_whichever_that_is(
    two_checkpoints: tuple[Path, Path], ways_in: pytest.MonkeyPatch, scheme: str
) -> None:
    """And, as begun by hand, is refused without it."""
    ways_in.setenv("FLASHRL_CONFIG", scheme)
    engine = start(two_checkpoints[0])
    says = [engine.generate()]
    by_tensor(engine, read_checkpoint(two_checkpoints[1]))
    says.append(engine.generate())
    for turn, name in enumerate(LAST):
        weights = sorted(read_checkpoint(two_checkpoints[turn % 2]), key=lambda each: each[0].endswith(f"1.{name}"))
        by_tensor(engine, weights)
        assert engine.generate() == says[turn % 2]
    for name in LAST:
        engine = start(two_checkpoints[0])
        by_tensor(engine, read_checkpoint(two_checkpoints[1]))
        rest = [each for each in read_checkpoint(two_checkpoints[0]) if not each[0].endswith(f"1.{name}")]
        with pytest.raises(SyncError, match=r"1 layer did not receive all its weights: model\.layers\.1\."):
            by_reload(engine, rest)
        assert all("half-updated: 1 layer did not receive" in said for said in refusals(engine))
        free_engine(engine)


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_goes_to_and_fro(tmp_path: Path, ways_in: pytest.MonkeyPatch, name: str) -> None:
    """Its model is asked for experts alone in the end, whose GEMMs have no loader."""
    folders = [make_family(tmp_path / str(seed), name=name, seed=seed) for seed in (1, 2)]
    ways_in.setenv("FLASHRL_CONFIG", "int8")
    engine = start(folders[0])
    says, requested_names = [engine.generate()], []
    ask = type(engine.model).load_weights

    def asking(model: object, weights: list[tuple[str, object]]) -> object:
        requested_names.extend(name for name, _ in weights)
        return ask(model, weights)

    for number in (1, 0, 1):
        requested_names.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(engine.model), "load_weights", asking)
            by_tensor(engine, read_checkpoint(folders[number]))
        says.append(engine.generate())
    assert says[0] == says[2] != says[1] == says[3]
    assert [name for name in requested_names if ".experts." not in name] == []
    assert bool(requested_names) == (name == "qwen3-moe")
    free_engine(engine)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_route_to_another_place_is_caught(
    two_checkpoints: tuple[Path, Path], ways_in: pytest.MonkeyPatch, scheme: str
) -> None:
    """Keys and values have one shape: only what the kernel answers tells them apart."""
    ways_in.setenv("FLASHRL_CONFIG", scheme)
    engine = start(two_checkpoints[0])
    by_tensor(engine, read_checkpoint(two_checkpoints[1]))
    known = engine.worker.appliance_ways_in.update._routes._known
    keys, values = (f"model.layers.1.self_attn.{part}_proj.weight" for part in "kv")
    known[keys], known[values] = known[values], known[keys]
    with pytest.raises(SyncError, match=r"^weight update 2: model\.layers\.1\.self_attn\.qkv_proj on rank 0 is not as"):
        by_tensor(engine, read_checkpoint(two_checkpoints[0]))
    assert all("model.layers.1.self_attn.qkv_proj on rank 0 is not as" in said for said in refusals(engine))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_fault_of_a_second_update_is_caught_and_never_sampled_from(
    two_checkpoints: tuple[Path, Path], ways_in: pytest.MonkeyPatch, record_property, scheme: str
) -> None:
    ways = ("tensors", "reload")
    cases = [(way, fault, False) for way in ways for fault in IN_THE_WEIGHTS]
    cases += [(way, fault, True) for way in ways for fault in ON_THE_WAY]
    old, new = two_checkpoints
    called = f"faults in second updates by {len(ways)} ways ({scheme})"
    tally = tally_of(
        cases, called=called, scheme=scheme, ways_in=ways_in, old=old, weights=lambda: read_checkpoint(new), number=2
    )
    record_property("said", str(tally))
    assert tally.missed == []
    assert tally.caught == tally.injected == 22
