"""FLASHRL_CONFIG=bf16 with mixtures of experts: routers in FP32, and what no update waits for or vLLM leaves out."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from engines import free_engine, read_checkpoint, start_engine
from safetensors.torch import save_file
from torch import Tensor
from unlisted_models import make_unlisted

from appliance.errors import SyncError

pytestmark = [pytest.mark.engine, pytest.mark.slow]

EXPERTS = {"head_dim": 32, "moe_intermediate_size": 64}
# What a configuration needs, and what vLLM has in FP32. GLM's router is torch's own layer, ERNIE's is vLLM's.
ROUTERS: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "glm4_moe": (
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
        ("mlp.gate.weight", "mlp.gate.e_score_correction_bias"),
    ),
    "ernie4_5_moe": (
        {"moe_num_experts": 4, "moe_k": 2},
        ("mlp.gate.weight", "mlp.moe_statics.e_score_correction_bias"),
    ),
}


def with_routers(folder: Path, model_type: str, *, seed: int) -> Path:
    fields, wide = ROUTERS[model_type]
    make_unlisted(folder, model_type, seed=seed, **EXPERTS, **fields)
    weights = dict(read_checkpoint(folder))
    names = [name for name in weights if name.endswith(wide)]
    assert len(names) == len(wide)
    random = torch.Generator().manual_seed(seed)
    weights |= {name: torch.randn(weights[name].shape, generator=random) * 0.05 for name in names}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("is_listed", [False, True], ids=["", "with digests"])
@pytest.mark.parametrize("model_type", ROUTERS)
def test_a_router_in_fp32_is_updated_in_fp32(
    tmp_path: Path, ways_in: pytest.MonkeyPatch, model_type: str, is_listed: bool
) -> None:
    from flashrl_compat.sender import with_manifest

    ways_in.setenv("FLASHRL_CONFIG", "bf16")
    first, second = (with_routers(tmp_path / str(seed), model_type, seed=seed) for seed in (1, 2))
    fresh = start_engine(second, scheme="bf16")
    expected, says = of_routers(fresh.model.named_parameters()), fresh.generate()
    free_engine(fresh)
    engine = start_engine(first, scheme="bf16")
    sent: Iterable[tuple[str, Tensor]] = read_checkpoint(second)
    for each in with_manifest(sent, number=1, dtype=torch.float32) if is_listed else sent:
        engine.model.load_weights([each])
    found = of_routers(engine.model.named_parameters())
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    assert engine.generate() == says
    assert engine.llm.collective_rpc("appliance_weights", args=(False,)) == [(1, "whole", "")]
    free_engine(engine)


def test_layers_that_predict_more_are_left_out(tmp_path: Path, ways_in: pytest.MonkeyPatch) -> None:
    """GLM-4.5's checkpoints have one behind the last. The engine starts with such a folder, and reloads it."""
    ways_in.setenv("FLASHRL_CONFIG", "bf16")
    fields = {"num_nextn_predict_layers": 1, **EXPERTS, **ROUTERS["glm4_moe"][0]}
    first, second = (make_unlisted(tmp_path / str(seed), "glm4_moe", seed=seed, **fields) for seed in (1, 2))
    for folder in (first, second):
        weights = dict(read_checkpoint(folder))
        weights |= {name.replace("layers.1.", "layers.2."): weights[name].clone() for name in sorted(weights)}
        weights["model.layers.2.eh_proj.weight"] = torch.zeros(96, 192, dtype=torch.bfloat16)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    fresh = start_engine(second, scheme="bf16")
    says = fresh.generate()
    free_engine(fresh)
    engine = start_engine(first, scheme="bf16")
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(second)})
    assert engine.generate() == says
    for each in sorted(read_checkpoint(second), key=lambda each: "layers.2." in each[0]):  # after the end
        engine.model.load_weights([each])
    assert engine.generate() == says
    assert engine.llm.collective_rpc("appliance_weights", args=(False,)) == [(2, "whole", "")]
    free_engine(engine)


def test_a_routers_correction_may_come_last(tmp_path: Path, ways_in: pytest.MonkeyPatch) -> None:
    """No update waits for it, as the trainer's model has it as a buffer. One that differs is of the next update."""
    ways_in.setenv("FLASHRL_CONFIG", "bf16")
    engine = start_engine(with_routers(tmp_path / "1", "glm4_moe", seed=1), scheme="bf16")
    weights = read_checkpoint(with_routers(tmp_path / "2", "glm4_moe", seed=2))
    rest = [each for each in weights if not each[0].endswith("correction_bias")]
    [(name, correction)] = [each for each in weights if each[0].endswith("correction_bias")]
    for named_tensor in weights:
        engine.model.load_weights([named_tensor])
    says = engine.generate()
    for named_tensor in [*rest, (name, correction)]:
        engine.model.load_weights([named_tensor])
    assert engine.generate() == says
    assert engine.llm.collective_rpc("appliance_weights", args=(False,)) == [(2, "whole", "")]
    engine.model.load_weights([(name, correction + 1)])
    with pytest.raises(SyncError, match=r"^weight update: \d+ layers did not receive all their weights: "):
        engine.generate()
    free_engine(engine)


def test_a_routers_correction_is_kept_over_a_deep_sleep(tmp_path: Path, ways_in: pytest.MonkeyPatch) -> None:
    """As trainers leave it out. A CPU's worker sleeps by doing nothing: what a GPU drops is overwritten here."""
    ways_in.setenv("FLASHRL_CONFIG", "bf16")
    folder = with_routers(tmp_path, "glm4_moe", seed=1)
    engine = start_engine(folder, scheme="bf16")
    says = engine.generate()
    for _ in range(2):
        engine.llm.sleep(level=2)
        for parameter in engine.model.parameters():
            parameter.data.fill_(7.0)
        engine.llm.wake_up()
    for named_tensor in read_checkpoint(folder):
        if not named_tensor[0].endswith("correction_bias"):
            engine.model.load_weights([named_tensor])
    assert engine.generate() == says
    engine.llm.sleep(level=2)
    weights = {name: tensor.fill_(7.0) if "correction" in name else tensor for name, tensor in read_checkpoint(folder)}
    for parameter in engine.model.parameters():
        parameter.data.fill_(7.0)  # by chance what comes first
    engine.llm.wake_up()
    for named_tensor in sorted(weights.items(), key=lambda each: "correction" not in each[0]):
        engine.model.load_weights([named_tensor])
    found = of_routers(engine.model.named_parameters())
    assert [bool((each == 7.0).all()) for name, each in found.items() if "correction" in name] == [True]
    free_engine(engine)


def of_routers(parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    found = {name: parameter.data.clone() for name, parameter in parameters if ".gate." in name}
    assert found
    return found
