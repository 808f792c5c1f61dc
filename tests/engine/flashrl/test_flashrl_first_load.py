"""Under FLASHRL_CONFIG an engine's first load is held as its updates are, whatever format it reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from broken_checkpoints import Count, Tensors
from engines import start_engine
from families import FAMILIES
from first_loads import CASES, add_consolidated, changed, count_faults, load, make_all, one_rank

from appliance.errors import WeightsError

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    root = tmp_path_factory.mktemp("whole")
    checkpoints = make_all(root)
    with one_rank(checkpoints["qwen3-moe"], meeting=root / "meeting"):
        yield checkpoints


def without_up(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if not name.endswith("layers.0.mlp.up_proj.weight")}


@pytest.mark.parametrize(("scheme", "families"), [("int8", tuple(FAMILIES)), ("bf16", ("qwen3-moe",))])
def test_every_fault_of_a_checkpoint_stops_the_engine(
    whole: dict[str, Path],
    tmp_path: Path,
    flashrl: pytest.MonkeyPatch,
    record_property,
    scheme: str,
    families: tuple[str, ...],
) -> None:
    flashrl.setenv("FLASHRL_CONFIG", scheme)
    fault = "tensor dropped, cropped, of another type, prefixed, layers: "
    count = Count(f"{fault}{len(families)} families (FLASHRL_CONFIG={scheme})")
    count_faults(count, whole={name: whole[name] for name in families}, folder=tmp_path)
    record_property("said", count.settle(cases=CASES[families]))


@pytest.mark.parametrize("load_format", ["auto", "safetensors", "hf"])
def test_it_is_held_by_any_format(
    whole: dict[str, Path], tmp_path: Path, flashrl: pytest.MonkeyPatch, load_format: str
) -> None:
    broken = changed(whole["qwen2"], tmp_path / "new", without_up)
    flashrl.setenv("FLASHRL_CONFIG", "bf16")
    load(whole["qwen2"], load_format=load_format)
    with pytest.raises(WeightsError, match=r"^first load: 1 layer did not .*: model\.layers\.0\.mlp\.gate_up_proj \("):
        load(broken, load_format=load_format)


def test_mistrals_own_files_are_held_by_the_names_that_the_class_gives_them(
    whole: dict[str, Path], tmp_path: Path, flashrl: pytest.MonkeyPatch
) -> None:
    """vLLM's `auto` prefers them to transformers' files."""
    flashrl.setenv("FLASHRL_CONFIG", "bf16")
    folder = changed(whole["mistral"], tmp_path / "new", dict)
    load(add_consolidated(folder), load_format="auto")
    add_consolidated(folder, leave_out="layers.1.feed_forward.w3.weight")
    with pytest.raises(WeightsError, match=r"gate_up_proj \(.* elements, no model\.layers\.1\.mlp\.up_proj\.weight\)$"):
        load(folder, load_format="auto")


def test_a_model_of_another_family_is_held_by_what_its_layers_get(
    tmp_path: Path, whole: dict[str, Path], flashrl: pytest.MonkeyPatch
) -> None:
    """Phi-3's checkpoints have one tensor for a fused layer, whose class nobody here knows."""
    from families import SIZES
    from transformers import Phi3Config, Phi3ForCausalLM

    Phi3ForCausalLM(Phi3Config(**(SIZES | {"pad_token_id": 0}))).bfloat16().save_pretrained(tmp_path / "whole")
    flashrl.setenv("FLASHRL_CONFIG", "bf16")
    load(tmp_path / "whole")
    name = "model.layers.1.self_attn.qkv_proj.weight"
    broken = changed(
        tmp_path / "whole", tmp_path / "new", lambda now: {each: now[each] for each in now if each != name}
    )
    with pytest.raises(WeightsError, match=r"1 layer did not .*: model\.layers\.1\.self_attn\.qkv_proj \(0 of 15360"):
        load(broken)


def test_an_engine_does_not_start_from_it(whole: dict[str, Path], tmp_path: Path, flashrl: pytest.MonkeyPatch) -> None:
    flashrl.setenv("FLASHRL_CONFIG", "int8")
    with pytest.raises(WeightsError, match=r"^first load: .* no model\.layers\.0\.mlp\.up_proj\.weight\)$"):
        start_engine(changed(whole["qwen2"], tmp_path / "new", without_up), scheme="bf16")
