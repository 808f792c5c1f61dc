"""docs/gpu.md names everything that a plan sets otherwise on a GPU."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from plans import HOST

from appliance.plan.build import build_plan
from appliance.recipe.load import load_recipe
from appliance.record.plan import RunPlan
from appliance.terms.families import FAMILIES

PAGE = Path(__file__).resolve().parents[3] / "docs" / "gpu.md"


def planned(device: str) -> RunPlan:
    sets = (f"cluster.device={device}", "cluster.gpus_per_node=2")
    return build_plan(load_recipe("arithmetic-tiny-int8", sets=sets), run_dir=Path("/runs/a-1"), host=HOST)


def differing(one: dict[str, str], other: dict[str, str]) -> set[str]:
    return {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}


def overrides(plan: RunPlan) -> dict[str, str]:
    """By the last part of the key, as people know it; `trainer.device` by two."""
    pairs = (each.lstrip("+").split("=", maxsplit=1) for each in plan.argv[4:])
    return {key if key == "trainer.device" else key.rsplit(".", 1)[-1]: value for key, value in pairs}


def test_the_page_has_every_setting_that_differs() -> None:
    cpu, gpu = planned("cpu"), planned("h100")
    patches = [{name for each in plan.attestations for name in each.patches} for plan in (cpu, gpu)]
    names = (
        differing(overrides(cpu), overrides(gpu)) | differing(dict(cpu.env), dict(gpu.env)) | patches[0] ^ patches[1]
    )
    assert names >= {"enforce_eager", "enable_sleep_mode", "VLLM_ENABLE_V1_MULTIPROCESSING", "cpu-no-amx-tiles"}
    on_the_page = {
        part for quoted in re.findall(r"`([^`]+)`", PAGE.read_text()) for part in {quoted, quoted.rsplit(".", 1)[-1]}
    }
    assert names - on_the_page == set()


def test_the_page_names_the_families_of_vllms_v2_runner() -> None:
    """vLLM itself is asked in tests/engine/test_engine_runner.py."""
    *dense, last = [each.architecture.removesuffix("ForCausalLM") for each in FAMILIES.values() if not each.mixture]
    [row] = [line for line in PAGE.read_text().splitlines() if line.startswith("| vLLM's model runner")]
    assert f"| V1 | V2 for every model (*built and loaded* for dense {', '.join(dense)} and {last}: " in row
    assert "If it misbehaves: `VLLM_USE_V2_MODEL_RUNNER=0`" in row


def test_the_page_names_every_file_of_verl_that_knows_flash_attention() -> None:
    [folder] = find_spec("verl").submodule_search_locations
    known = {
        file.relative_to(folder)
        for file in Path(folder).rglob("*.py")
        if re.search("flash_attn|flash_attention", file.read_text(), re.IGNORECASE)
    }
    table = PAGE.read_text().partition("## What verl")[2].partition("\n## ")[0]
    named_files = {
        part if "/" in part else f"models/transformers/{part}" for part in re.findall(r"`([^`]+(?:\.py|/))`", table)
    }
    assert Path("models/transformers/monkey_patch.py") in known
    assert [file for file in known if not any(file.is_relative_to(each) for each in named_files)] == []
