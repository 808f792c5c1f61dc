"""What the governor may do, as planned for a device and a model, and what preflight refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from plans import HOST, INPUTS

from appliance.guard.policy import Action
from appliance.plan.build import build_plan
from appliance.plan.model import RunPlan, Switching
from appliance.plan.read import plan_from_dict
from appliance.preflight.finding import Finding
from appliance.preflight.guard import judge_guard
from appliance.preflight.probes import InputFacts, ModelShape
from appliance.recipe.load import load_recipe

USUAL = (Action.WARN, Action.TIGHTEN, Action.BF16, Action.STOP)
GRAPHS = "engines that run CUDA graphs must be restarted for it, which this version cannot do"
EXPERTS = "quantised experts cannot change their scheme while the engine runs"
GPU = ("cluster.device=a100",)


def planned(*sets: str) -> RunPlan:
    return build_plan(load_recipe("arithmetic-tiny-int8", sets=sets), run_dir=Path("/runs/a-1"), host=HOST)


def choice(plan: RunPlan, key: str) -> tuple[str, str]:
    return next((each.value, each.why) for each in plan.choices if each.key == key)


def findings(plan: RunPlan, inputs: InputFacts = INPUTS) -> list[tuple[str, str]]:
    found: list[Finding] = list(judge_guard(plan, inputs))
    assert all(str(each.severity) == "error" for each in found)
    return [(each.text, each.remedy) for each in found]


def test_on_a_cpu_engines_change_live_and_the_whole_ladder_is_there() -> None:
    plan = planned()
    assert (plan.guard.actions, plan.guard.switching) == (USUAL, Switching.LIVE)
    why = "engines run eagerly: a layer changes with a weight update, proven like any"
    assert choice(plan, "rollout.scheme_changes") == ("live", why)
    assert choice(plan, "guard.actions") == ("warn, tighten, bf16, stop", "the usual ladder")
    assert findings(plan) == []
    assert plan_from_dict(json.loads(plan.to_json())) == plan


def test_on_a_gpu_what_cannot_be_done_is_left_out_and_said() -> None:
    plan = planned(*GPU)
    assert (plan.guard.actions, plan.guard.switching) == (
        (Action.WARN, Action.TIGHTEN, Action.STOP),
        Switching.RESTART,
    )
    assert choice(plan, "rollout.scheme_changes") == ("restart", GRAPHS)
    assert choice(plan, "guard.actions") == ("warn, tighten, stop", f"without `bf16`: {GRAPHS}")
    assert choice(plan, "trainer.validate_bf16_every") == ("0", f"off: {GRAPHS}")
    assert findings(plan) == []


def test_on_a_gpu_what_was_asked_for_and_cannot_be_done_is_refused() -> None:
    plan = planned(*GPU, "guard.actions=[warn, raise-precision, bf16]", "trainer.validate_bf16_every=10")
    assert findings(plan) == [
        (
            f"error: guard.actions: `raise-precision`: {GRAPHS}",
            "leave `raise-precision` out of guard.actions",
        ),
        (f"error: guard.actions: `bf16`: {GRAPHS}", "leave `bf16` out of guard.actions"),
        (f"error: trainer.validate_bf16_every: validating in BF16 as well: {GRAPHS}", "set it to 0"),
    ]


def test_rollouts_in_bf16_change_nothing_anywhere() -> None:
    plan = planned(*GPU, "rollout.scheme=bf16", "guard.actions=[warn, bf16]")
    assert findings(plan) == []
    assert choice(plan, "trainer.validate_bf16_every") == (
        "0",
        "rollouts are in BF16 already: one validation is both",
    )


def test_a_model_with_experts_in_a_folder_is_known_when_planning(tmp_path: Path) -> None:
    shapes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_experts": 4}
    (tmp_path / "config.json").write_text(json.dumps(shapes))
    plan = planned("model.builtin=null", f"model.path={tmp_path}")
    assert (plan.guard.actions, plan.guard.switching) == (
        (Action.WARN, Action.TIGHTEN, Action.STOP),
        Switching.EXPERTS,
    )
    assert findings(plan) == []


def test_a_model_that_turns_out_to_have_experts_is_refused_before_the_start() -> None:
    plan = planned("trainer.validate_bf16_every=0")
    shape = ModelShape(heads=2, max_positions=0, architectures=("Qwen3MoeForCausalLM",))
    assert findings(plan, dataclasses.replace(INPUTS, model_shape=shape)) == [
        (f"error: guard.actions: `bf16`: {EXPERTS}", "leave `bf16` out of guard.actions")
    ]


@pytest.mark.parametrize(
    ("given", "every", "why"),
    [
        ("null", "30", "only at the end: it costs a validation and two weight updates"),
        ("0", "0", "off"),
        ("20", "20", "as given, and at the end"),
    ],
)
def test_validation_in_bf16_is_planned_with_a_reason(given: str, every: str, why: str) -> None:
    plan = planned(f"trainer.validate_bf16_every={given}")
    assert choice(plan, "trainer.validate_bf16_every") == (every, why)
    assert plan.validate_bf16_every == int(every)
