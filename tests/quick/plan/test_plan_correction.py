"""What the plan makes of a correction: limits with their sources, the shadow pass, the scaled model."""

from __future__ import annotations

from pathlib import Path

import pytest
from plans import HOST

from appliance.corrections.objective import ClipRange, Loss
from appliance.corrections.weights import TisGeometric
from appliance.errors import RecipeError
from appliance.plan.build import build_plan
from appliance.recipe.load import load_recipe
from appliance.record.plan import RunPlan, ShadowPlan, UaqPlan


def planned(*sets: str) -> RunPlan:
    return build_plan(load_recipe("arithmetic-tiny-int8", sets=sets), run_dir=Path("/runs/a-1"), host=HOST)


def why(plan: RunPlan, key: str) -> tuple[str, str]:
    return next((each.value, each.why) for each in plan.choices if each.key == key)


def test_the_shadow_pass_of_calibrated_clipping() -> None:
    plan = planned("correction.method=calibrated-clipping", "algorithm.clip_high=0.28", "correction.cap=null")
    assert plan.shadow == ShadowPlan(sequences=64, forward_sequences=64)
    assert (plan.loss_correction.clip, plan.correction.cap) == (ClipRange(0.2, 0.28), 2.0)
    reason = "after step 1 and every 20 steps, 0.25 of a step's 256, equal on each rank"
    assert why(plan, "correction.shadow") == ("64 sequences", reason)
    assert RunPlan.model_validate_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("fraction", "micro", "expected"),
    [(0.1, 8, (25, 5)), (1.0, 32, (256, 32)), (0.05, 256, (12, 12)), (0.004, 8, (1, 1))],
)
def test_a_forward_of_the_shadow_pass_divides_it(fraction: float, micro: int, expected: tuple[int, int]) -> None:
    sets = (f"correction.shadow_fraction={fraction}", f"batch.micro_batch_sequences={micro}")
    shadow = planned("correction.method=calibrated-clipping", *sets).shadow
    assert (shadow.sequences, shadow.forward_sequences) == expected


def test_tbpo_has_the_bounds_of_its_source_where_none_are_given() -> None:
    plan = planned("algorithm.loss=tbpo", "correction.method=tis-geometric", "algorithm.clip_high=0.001")
    assert plan.loss_correction == TisGeometric(cap=2.0, clip=ClipRange(3e-4, 1e-3), loss=Loss.TBPO)
    assert (plan.algorithm.dual_clip, plan.correction_text) == (1.0007, "tbpo, tis-geometric with cap 2")
    chosen = {each.key: (each.value, each.why) for each in plan.choices if each.key.startswith("algorithm.")}
    source = "the bounds of TBPO, of a response's mean ratio"
    assert chosen.pop("algorithm.aggregate") == ("sequence-mean", "of `tbpo`")
    assert chosen == {"algorithm.clip_low": ("0.0003", source), "algorithm.dual_clip": ("1.0007", source)}
    actor = "actor_rollout_ref.actor"
    bounds = ("clip_ratio_low=0.0003", "clip_ratio_high=0.001", "clip_ratio_c=1.0007")
    assert {f"{actor}.policy_loss.loss_mode=tbpo", *(f"{actor}.{each}" for each in bounds)} < set(plan.argv)
    assert RunPlan.model_validate_json(plan.to_json()) == plan
    assert not [each for each in planned().choices if each.key.startswith("algorithm.")]


def test_no_other_method_has_one() -> None:
    assert planned().shadow is None


def test_trainer_and_engine_read_the_scaled_model() -> None:
    plan = planned("correction.uaq_scale=1.5")
    assert plan.uaq == UaqPlan(scale=1.5, folder="/runs/a-1/scaled") and plan.trained_model == "/runs/a-1/scaled"
    assert "actor_rollout_ref.model.path=/runs/a-1/scaled" in plan.argv
    assert plan.weights.name_or_path == planned().weights.name_or_path == planned().trained_model
    reason = "what a norm feeds is divided by 1.5 once before training, and model/ is folded back"
    assert why(plan, "correction.uaq_scale") == ("1.5", reason)


def test_a_learning_rate_of_their_own_needs_our_engine() -> None:
    plan = planned("optimizer.norm_fed_lr_scale=1.5")
    assert (plan.optimizer.norm_fed_lr_scale, dict(plan.env)["VERL_ENGINE_VENDOR"]) == (1.5, "appliance")
    on_gpu = planned("cluster.device=h100", "trainer.old_log_probs=recompute")
    assert "VERL_ENGINE_VENDOR" not in dict(on_gpu.env)


def test_the_most_likely_words_are_asked_for_where_a_correction_needs_them() -> None:
    plan = planned("correction.method=score-centering", "correction.cap=null")
    assert plan.rollout.top_log_probs == 20
    assert why(plan, "rollout.top_log_probs") == ("20", "`score-centering` needs them; the source has 20")
    assert "+actor_rollout_ref.rollout.engine_kwargs.vllm.max_logprobs=20" in plan.argv
    alone, with_words = planned(), planned("rollout.top_log_probs=30", "cluster.device=h100")
    assert (alone.rollout.top_log_probs, with_words.rollout.top_log_probs) == (0, 30)
    assert not [each for each in alone.argv if "max_logprobs" in each]
    # our engine, and log-probs of several words in the place of flash-attn's of one
    assert {("VERL_ENGINE_VENDOR", "appliance"), ("VERL_DISABLE_FLASH_ATTN_CE", "1")} < set(with_words.env)
    assert "VERL_DISABLE_FLASH_ATTN_CE" not in dict(planned("cluster.device=h100").env)
    assert RunPlan.model_validate_json(plan.to_json()) == plan


@pytest.mark.parametrize(("key", "value"), [("top_p", "0.9"), ("top_k", "50")])
def test_engines_report_the_words_that_are_drawn_from_where_some_are_left_out(key: str, value: str) -> None:
    plan, on_gpu = (planned(f"rollout.{key}={value}", f"cluster.device={device}") for device in ("cpu", "h100"))
    argument = "+actor_rollout_ref.rollout.engine_kwargs.vllm.return_sampling_mask=true"
    assert plan.rollout.leaves_words_out
    assert {argument, f"actor_rollout_ref.rollout.{key}={value}"} < set(plan.argv) and argument in on_gpu.argv
    assert dict(plan.env)["VERL_ENGINE_VENDOR"] == dict(on_gpu.env)["VERL_ENGINE_VENDOR"] == "appliance"
    expected = {"VERL_DISABLE_FLASH_ATTN_CE": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    assert expected.items() <= dict(on_gpu.env).items() and not expected.keys() & dict(plan.env)
    usual = planned("cluster.device=h100")
    assert argument not in usual.argv and not expected.keys() & dict(usual.env)
    with pytest.raises(RecipeError) as raised:
        planned(f"rollout.{key}={value}", "cluster.device=h100", "trainer.forward=rollout")
    place = f"--set rollout.{key}={value}: rollout.{key}"
    message = f"{place}: with `rollout` engines on a GPU do not report which words a token was drawn from"
    hint = f"use {'1.0' if key == 'top_p' else '0'}, or trainer.forward: bf16"
    assert raised.value.problems == [(message, hint)]
