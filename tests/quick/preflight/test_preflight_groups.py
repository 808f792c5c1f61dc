"""Layers that `int4` cannot hold, by the sizes of a model: refused before the start."""

from __future__ import annotations

from pathlib import Path

import pytest
from plans import HOST

from appliance.plan.build import build_plan
from appliance.preflight.device import judge_scale_groups
from appliance.recipe.load import load_recipe
from appliance.terms.shapes import ModelShape

USUAL = {"heads": 8, "kv_heads": 4, "head_size": 128, "hidden": 1024, "intermediate": 1024}
NEEDS = "on a rank, where output channels must be a multiple of 32 and input channels one of groups of 128, 64 or 32"
REMEDY = "name the layer in quantization.ignore, or use `int8`"


@pytest.mark.parametrize(
    ("sets", "sizes", "layer"),
    [
        ((), {}, ""),
        ((), {"intermediate": 1056}, ""),  # 33 groups of 32
        ((), {"intermediate": 1000}, "gate_up_proj is 2000 x 1024"),
        ((), {"head_size": 17}, "qkv_proj is 272 x 1024"),
        ((), {"expert_intermediate": 48, "experts": 4}, "down_proj is 1024 x 48"),
        (("rollout.tensor_parallel=2", "cluster.gpus_per_node=2"), {"intermediate": 1056}, "down_proj is 1024 x 528"),
        (("rollout.scheme=int8",), {"intermediate": 1000}, ""),
        (("quantization.ignore=[model.layers.0.mlp.down_proj]",), {"intermediate": 1000}, ""),
    ],
)
def test_layers_that_int4_cannot_hold_are_refused(sets: tuple[str, ...], sizes: dict[str, int], layer: str) -> None:
    recipe = load_recipe("arithmetic-tiny-int8", sets=("rollout.scheme=int4", *sets))
    plan = build_plan(recipe, run_dir=Path("/runs/a-1"), host=HOST)
    shown = [
        (str(each.severity), each.text, each.remedy) for each in judge_scale_groups(plan, ModelShape(**(USUAL | sizes)))
    ]
    wanted = ("error", f"error: rollout.scheme: `int4`: {layer} {NEEDS}", REMEDY)
    assert shown == ([wanted] if layer else [])
    assert list(judge_scale_groups(plan, None)) == []
