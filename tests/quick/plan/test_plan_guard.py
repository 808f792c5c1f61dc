"""What the governor may do, as planned for a device and a model, and what preflight refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from plans import HOST, INPUTS

from appliance.finding import Finding
from appliance.guard.policy import Action
from appliance.plan.build import build_plan
from appliance.preflight.device import judge_guard
from appliance.preflight.inputs import InputFacts
from appliance.recipe.load import load_recipe
from appliance.record.plan import RunPlan
from appliance.settings.sections import SchemeChange
from appliance.terms.settings import OldLogProbs
from appliance.terms.shapes import ModelShape

USUAL = (Action.WARN, Action.TIGHTEN, Action.BF16, Action.STOP)
STAYS = "new rollout engines take over, the trainer stays"
GRAPHS = "the engines hold CUDA graphs and compiled layers, which know one scheme"
EXPERTS = "quantised experts cannot change their scheme while the engine runs"
RANKS = "an engine of several ranks cannot change from one emulated scheme to another while it runs"
ASLEEP = "on a GPU a layer that changed would keep memory while the engine sleeps"
TWICE = "every validation in BF16 starts the engines twice"
GPU = ("cluster.device=a100",)
EMULATED = ("rollout.scheme=fp8", "quantization.emulate=true", "cluster.gpus_per_node=2")


def planned(*sets: str) -> RunPlan:
    return build_plan(load_recipe("arithmetic-tiny-int8", sets=sets), run_dir=Path("/runs/a-1"), host=HOST)


def choice(plan: RunPlan, key: str) -> tuple[str, str]:
    return next((each.value, each.why) for each in plan.choices if each.key == key)


def findings(plan: RunPlan, inputs: InputFacts = INPUTS) -> list[tuple[str, str]]:
    found: list[Finding] = list(judge_guard(plan, inputs.model_shape))
    assert all(str(each.severity) == "error" for each in found)
    return [(each.text, each.remedy) for each in found]


def test_on_a_cpu_engines_change_live_and_the_whole_ladder_is_there() -> None:
    plan = planned()
    assert (plan.guard.actions, plan.guard.scheme_change) == (USUAL, SchemeChange.LIVE)
    why = "engines run eagerly: a layer changes with a weight update, proven like any other"
    assert choice(plan, "rollout.scheme_changes") == ("live", why)
    assert choice(plan, "guard.actions") == ("warn, tighten, bf16, stop", "the usual ladder")
    assert findings(plan) == []
    assert RunPlan.model_validate_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("sets", "why"),
    [
        (GPU, GRAPHS),
        ((*GPU, "trainer.forward=rollout"), ASLEEP),
        (("cluster.device=h100", "rollout.scheme=fp8", "trainer.forward=rollout"), ASLEEP),
        ((*EMULATED, "rollout.tensor_parallel=2", "guard.actions=[raise-precision]"), RANKS),
    ],
)
def test_engines_are_restarted_where_they_cannot_change(sets: tuple[str, ...], why: str) -> None:
    plan = planned(*sets)
    assert plan.guard.scheme_change is SchemeChange.RESTART
    assert choice(plan, "rollout.scheme_changes") == ("restart", f"{why}: {STAYS}")
    assert choice(plan, "trainer.validate_bf16_every") == ("0", f"off: {TWICE}")
    assert findings(plan) == []


def test_ranks_matter_only_where_a_finer_scheme_may_be_asked_for() -> None:
    assert planned(*EMULATED, "rollout.tensor_parallel=2").guard.scheme_change is SchemeChange.LIVE
    assert planned(*EMULATED, "guard.actions=[raise-precision]").guard.scheme_change is SchemeChange.LIVE


def test_on_a_gpu_the_whole_ladder_is_there() -> None:
    plan = planned(*GPU, "trainer.validate_bf16_every=10")
    assert plan.guard.actions == USUAL
    assert choice(plan, "guard.actions") == ("warn, tighten, bf16, stop", "the usual ladder")
    assert choice(plan, "trainer.validate_bf16_every") == ("10", f"as given, and at the end: {TWICE}")
    assert findings(plan) == []


def test_a_restart_can_be_asked_for() -> None:
    plan = planned("guard.scheme_change=restart")
    assert plan.guard.scheme_change is SchemeChange.RESTART
    assert choice(plan, "rollout.scheme_changes") == ("restart", "as given")
    assert RunPlan.model_validate_json(plan.to_json()) == plan


def test_a_live_change_that_cannot_be_made_is_refused() -> None:
    live = "guard.scheme_change=live"
    assert findings(planned(*GPU, live)) == [
        (f"error: guard.scheme_change: a change of scheme cannot be `live`: {GRAPHS}", "set it to `restart`")
    ]
    assert findings(planned(*GPU, live, "guard.actions=[warn]", "trainer.validate_bf16_every=0")) == []
    assert len(findings(planned(*GPU, live, "guard.actions=[warn]"))) == 1  # a validation in BF16 at the end
    assert findings(planned(live)) == []


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
    sets = ("model.builtin=null", f"model.path={tmp_path}")
    plan = planned(*sets)
    assert (plan.guard.actions, plan.guard.scheme_change) == (USUAL, SchemeChange.RESTART)
    assert choice(plan, "rollout.scheme_changes") == ("restart", f"{EXPERTS}: {STAYS}")
    assert findings(plan) == []
    assert len(findings(planned(*sets, "guard.scheme_change=live"))) == 1


def test_a_model_that_turns_out_to_have_experts_is_refused_before_the_start() -> None:
    shape = ModelShape(heads=2, max_positions=0, architectures=("Qwen3MoeForCausalLM",))
    inputs = dataclasses.replace(INPUTS, model_shape=shape)
    assert findings(planned(), inputs) == [
        (f"error: guard.scheme_change: a change of scheme cannot be `live`: {EXPERTS}", "set it to `restart`")
    ]
    assert findings(planned("guard.scheme_change=restart"), inputs) == []


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
    assert plan.trainer.validate_bf16_every == int(every)


RAISE = "guard.actions=[raise-precision]"
NATIVE = ("cluster.device=h100", RAISE)
CUT = (
    "error: guard.actions: `raise-precision` ends with `fp8-block`, whose blocks cut the {} channels of a layer's part"
)
OTHER = "leave it out of guard.actions, or use other values of rollout.scheme or rollout.tensor_parallel"


def shaped(**sizes: int) -> InputFacts:
    shape = ModelShape(**({"heads": 8, "kv_heads": 4, "head_size": 128, "intermediate": 1024} | sizes), hidden=1024)
    return dataclasses.replace(INPUTS, model_shape=shape)


@pytest.mark.parametrize(
    ("sets", "inputs", "cut"),
    [
        ((*NATIVE, "rollout.scheme=fp8"), shaped(), None),
        ((*NATIVE, "rollout.scheme=fp8"), shaped(head_size=32), None),  # 256 and 128
        ((*NATIVE, "rollout.scheme=fp8"), shaped(head_size=24), 192),
        ((*NATIVE, "rollout.scheme=fp8-channel"), shaped(intermediate=1000), 1000),
        ((*NATIVE, "rollout.scheme=int8"), shaped(intermediate=1000), None),
        ((*NATIVE, "rollout.scheme=fp8"), INPUTS, None),
        ((*NATIVE[:1], "rollout.scheme=fp8"), shaped(intermediate=1000), None),
        ((*NATIVE, "rollout.scheme=fp8", "cluster.gpus_per_node=8", "rollout.tensor_parallel=8"), shaped(), None),
        (
            (*NATIVE, "rollout.scheme=fp8", "cluster.gpus_per_node=8", "rollout.tensor_parallel=8"),
            shaped(kv_heads=2, intermediate=8 * 64),
            64,
        ),
        ((*EMULATED, RAISE), shaped(intermediate=1000), None),
        ((*EMULATED, RAISE, "rollout.tensor_parallel=2"), shaped(intermediate=1000), 500),
        ((*EMULATED, RAISE, "rollout.tensor_parallel=2"), shaped(), None),
    ],
)
def test_a_finer_scheme_that_would_cut_its_blocks_is_refused_before_the_start(
    sets: tuple[str, ...], inputs: InputFacts, cut: int | None
) -> None:
    assert findings(planned(*sets), inputs) == ([] if cut is None else [(CUT.format(cut), OTHER)])


@pytest.mark.parametrize("device", ["l40s", "h100", "b200", "rtx5090"])
def test_blocks_are_ranked_by_their_engine_where_there_is_no_profile(device: str) -> None:
    """What its kernels tell: tests/engine/test_engine_native_choice.py."""
    plan = planned(f"cluster.device={device}", RAISE, "rollout.scheme=fp8-block", "quantization.profile=none")
    assert plan.profile is None and plan.guard.ranks_layers
    assert findings(plan) == []


def test_with_the_engines_log_probs_there_is_no_correction_to_tighten() -> None:
    asked = ("trainer.old_log_probs=rollout",)
    for sets in (asked, (), (*asked, "batch.mini_batch_prompts=16"), ("correction.method=adaptive",)):
        plan = planned("trainer.forward=rollout", *sets)
        assert plan.guard.actions == (Action.WARN, Action.BF16, Action.STOP)
        why = "without `tighten`: a correction has nothing to act on"
        assert choice(plan, "guard.actions") == ("warn, bf16, stop", why)
        assert plan.trainer.old_log_probs is OldLogProbs.ROLLOUT
        why = (
            "the engines': no pass over the batch before an update, whose own forward is checked against them; a "
            "correction has nothing to act on"
        )
        assert choice(plan, "trainer.old_log_probs") == ("rollout", why)
    for sets in (("trainer.old_log_probs=recompute",), ("batch.mini_batch_prompts=16",)):
        recomputes = planned("trainer.forward=rollout", *sets)
        assert (recomputes.trainer.old_log_probs, recomputes.guard.actions) == (OldLogProbs.RECOMPUTE, USUAL)
