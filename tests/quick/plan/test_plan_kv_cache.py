"""What a plan says of a KV cache in FP8."""

from __future__ import annotations

from pathlib import Path

from plans import HOST

from appliance.plan.build import build_plan
from appliance.plan.verl_args import overrides
from appliance.recipe.load import load_recipe
from appliance.record.plan import RunPlan

KEY = "+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype"
PATCH = "cpu-fp8-rounding"


def planned(*sets: str) -> RunPlan:
    return build_plan(load_recipe("arithmetic-tiny-int8", sets=sets), run_dir=Path("/runs/a-1"), host=HOST)


def patches(plan: RunPlan) -> set[str]:
    return {name for attested in plan.attestations if attested.role == "rollout" for name in attested.patches}


def test_the_engines_are_told_and_attest_that_they_round() -> None:
    plan, usual = planned("rollout.kv_cache=fp8"), planned()
    assert dict(overrides(plan))[KEY] == "fp8_e4m3" and KEY not in dict(overrides(usual))
    assert PATCH in patches(plan) and PATCH not in patches(usual)
    (choice,) = [choice for choice in plan.choices if choice.key == "rollout.kv_cache"]
    assert choice.value == "fp8" and choice.why.startswith("half of the bytes for each token; a scale for keys and one")
    assert "rollout.kv_cache" not in [choice.key for choice in usual.choices]


def test_on_a_gpu_the_kernels_round_themselves() -> None:
    plan = planned("rollout.kv_cache=fp8", "cluster.device=h100")
    assert dict(overrides(plan))[KEY] == "fp8_e4m3" and PATCH not in patches(plan)
