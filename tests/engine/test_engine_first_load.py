"""The first load of an engine, by a plan's loader and under FLASHRL_CONFIG: a checkpoint that is not the model's is
refused by name. vLLM's real loader and models, without the engine around them: a load takes milliseconds so."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from broken_checkpoints import Count, Tensors
from engines import start_engine
from families import FAMILIES
from first_loads import CASES, SCHEMES, add_consolidated, changed, count_faults, load, make_all, one_rank, planned

from appliance.errors import WeightsError
from appliance.terms.settings import LOAD_FORMAT

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    root = tmp_path_factory.mktemp("whole")
    checkpoints = make_all(root)
    with one_rank(checkpoints["qwen3-moe"], meeting=root / "meeting"):
        yield checkpoints


@pytest.mark.parametrize(("scheme", "families"), [("bf16", tuple(FAMILIES)), ("int8", ("qwen3-moe",))])
def test_every_fault_of_a_checkpoint_stops_a_plans_engine(
    whole: dict[str, Path], tmp_path: Path, record_property, scheme: str, families: tuple[str, ...]
) -> None:
    """In INT8 of the family that has all kinds of layers; under FLASHRL_CONFIG it is the other way round."""
    count = Count(
        f"tensor dropped, cropped, of another type, prefixed, layers: {len(families)} families (engine, {scheme})"
    )
    count_faults(count, whole={name: whole[name] for name in families}, folder=tmp_path, **planned(scheme))
    record_property("said", count.settle(cases=CASES[families]))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_checkpoint_is_taken_and_no_loader_stays_behind(
    whole: dict[str, Path], family: str, scheme: str
) -> None:
    model = load(whole[family], **planned(scheme))
    assert "load_weights" not in vars(model)
    loaders = [getattr(each, "weight_loader", None) for each in model.parameters()]
    assert [each for each in loaders if each and each.__qualname__.startswith("FirstLoad.")] == []


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        (
            "qwen2",
            lambda now: {name: each for name, each in now.items() if "layers.1.self_attn.k_proj" not in name},
            "1 layer did not receive all its weights: model.layers.1.self_attn.qkv_proj (24768 of 33024 elements, "
            "no model.layers.1.self_attn.k_proj.weight)",
        ),
        (
            "llama",
            lambda now: now | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(128, dtype=torch.bfloat16)},
            "model.layers.0.self_attn.q_proj.bias is not a weight of this model",
        ),
        (
            "qwen3-moe",
            lambda now: now | {"model.layers.1.mlp.experts.5.up_proj.weight": torch.zeros(48, 64)},
            "model.layers.1.mlp.experts.5.up_proj.weight is not a weight of this model",
        ),
        (
            "mistral",
            lambda now: now | {"model.norm.weight": torch.full_like(now["model.norm.weight"], float("nan"))},
            "model.norm.weight has a value that is not finite",
        ),
    ],
    ids=["a part of a fused layer", "a bias that no layer has", "an expert too many", "not finite"],
)
def test_what_vllm_takes_without_a_word_is_refused(
    whole: dict[str, Path], tmp_path: Path, family: str, change: Callable[[Tensors], Tensors], message: str, scheme: str
) -> None:
    folder = changed(whole[family], tmp_path / "new", change)
    if scheme == "bf16":
        load(folder, **planned(scheme) | {"load_format": "auto"})
    with pytest.raises(WeightsError) as raised:
        load(folder, **planned(scheme))
    assert raised.value.message == f"first load: {message}"
    assert raised.value.hint == "the checkpoint is not the model of its config.json: copy or download it again"


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_old_buffers_and_a_tied_head_are_taken(
    whole: dict[str, Path], tmp_path: Path, family: str, scheme: str
) -> None:
    def change(now: Tensors) -> Tensors:
        head = {} if "lm_head.weight" in now else {"lm_head.weight": now["model.embed_tokens.weight"].clone()}
        return now | head | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}

    load(changed(whole[family], tmp_path / "new", change), **planned(scheme))


def test_mistrals_own_files_beside_transformers_are_left_out(whole: dict[str, Path], tmp_path: Path) -> None:
    """Of a folder without an index vLLM's own loader reads both."""
    folder = add_consolidated(changed(whole["mistral"], tmp_path / "new", dict))
    with torch.no_grad():
        wanted = dict(load(whole["mistral"], **planned("bf16")).named_parameters())
        assert all(torch.equal(wanted[name], got) for name, got in load(folder, **planned("bf16")).named_parameters())
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"new has weights in Mistral's own format alone$"):
        load(folder, **planned("bf16"))


@pytest.mark.slow
def test_a_tensor_that_two_files_have_is_refused(whole: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(whole["llama"], tmp_path / "new", dict)
    os.link(folder / "model.safetensors", folder / "more.safetensors")
    with pytest.raises(WeightsError, match=r"^first load: \S+ is in two of the checkpoint's files$"):
        load(folder, **planned("bf16"))


def test_an_engine_does_not_start_from_it(whole: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(
        whole["qwen2"], tmp_path / "new", lambda now: {name: now[name] for name in now if "0.mlp.up_proj" not in name}
    )
    with pytest.raises(
        WeightsError, match=r"gate_up_proj \(45056 of 90112 elements, no model\.layers\.0\.mlp\.up_proj"
    ):
        start_engine(folder, scheme="int8", load_format=LOAD_FORMAT)
