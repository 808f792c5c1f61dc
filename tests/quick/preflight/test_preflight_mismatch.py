"""What a profile predicts, against the guard: the warning, and what it names as help with which numbers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from plans import HOST, INPUTS

from appliance.errors import RecipeError
from appliance.finding import Severity
from appliance.plan.build import build_plan
from appliance.preflight.checks import judge
from appliance.preflight.inputs import InputFacts
from appliance.preflight.mismatch import Expected
from appliance.quant.choice import Candidate
from appliance.recipe.load import load_recipe
from appliance.record.plan import RunPlan
from appliance.terms.devices import StoredResult
from appliance.terms.schemes import Scheme
from appliance.terms.shapes import KNOWN

# Of 400 multiplications 100 are in BF16 already; the first of these layers has most of the mismatch.
LAYERS = (Candidate(("a",), 0.015, 60), Candidate(("b",), 0.004, 100), Candidate(("c",), 0.001, 140))
FAR = Expected(0.02, tokens=900, candidates=LAYERS, kept_multiplications=100)
MESSAGE = (
    "the profile predicts a mismatch of 0.02 nats per token, measured on 900 tokens; above 0.015 a step is bad "
    "(guard.k3_kl)"
)
ONE_FLOW = "`trainer.forward: rollout`, with `trainer.attention: auto`, has exactly none (docs/one-flow.md)"
BF16 = "`rollout.scheme: bf16` leaves only the mismatch that BF16's own rounding makes"


def planned(*sets: str, recipe: str = "arithmetic-tiny-int8") -> RunPlan:
    return build_plan(load_recipe(recipe, sets=sets), run_dir=Path("/runs/a-1"), host=HOST)


def warned(
    *sets: str, expected: Expected | None = FAR, recipe: str = "arithmetic-tiny-int8", **facts: object
) -> list[tuple[str, str]]:
    """(message, remedy) of the finding about the mismatch. facts: changes of INPUTS."""
    inputs: InputFacts = dataclasses.replace(INPUTS, expected=expected, **facts)
    found = judge(planned(*sets, recipe=recipe), host=HOST, inputs=inputs)
    assert not any(each.severity is Severity.ERROR for each in found if each.code == "mismatch")  # exit codes stay
    return [(each.message, each.remedy) for each in found if each.code == "mismatch"]


def test_what_a_budget_keeps_is_said_with_its_reason_and_its_cost() -> None:
    kept_layers = ("a.0.o_proj", "a.0.{q,k,v}_proj", "a.1.{q,k,v}_proj")
    chosen = dataclasses.replace(FAR, kl=0.009, kept_layers=kept_layers, without_budget=0.02, budget=0.01)
    choice = (
        "3 layers stay in BF16, 25.0% of the multiplications ({}): predicted mismatch 0.009 nats per token, measured "
        "on 900 tokens, instead of 0.02, for a budget of 0.01: 2 {{q,k,v}}_proj, 1 o_proj; `appliance profile` and "
        "the run's profile/quantization.yaml name them"
    )
    assert warned(expected=chosen) == [(choice.format("`appliance bench` measures what they cost in time"), "")]
    stored = StoredResult(ratios=((Scheme.INT8, 2.0),), measurement="measured")
    cost = "rollouts 1.60 times as fast as in BF16, not 2.00, by `bench`"
    assert warned(expected=chosen, stored=stored) == [(choice.format(cost), "")]


def test_a_budget_that_no_choice_meets_is_a_warning() -> None:
    chosen = dataclasses.replace(FAR, kl=0.0101, kept_layers=("a.0.o_proj",), without_budget=0.02, budget=0.01)
    message = (
        "the budget of 0.01 nats per token is not met: the nearest of the measured choices has a predicted "
        "mismatch of 0.0101"
    )
    assert warned(expected=chosen)[1:] == [(message, "a smaller budget keeps more layers in BF16")]
    assert len(warned(expected=dataclasses.replace(chosen, kl=0.01))) == 1
    nothing_kept = dataclasses.replace(chosen, kept_layers=(), without_budget=None)  # each trial was worse than none
    assert warned(expected=nothing_kept) == [(message, "a smaller budget keeps more layers in BF16")]


def test_a_mismatch_outside_the_guards_bound_names_three_ways_with_their_numbers() -> None:
    budget = "`quantization.mismatch_budget: 0.0075` would keep 40% of the multiplications in BF16"
    assert warned() == [(MESSAGE, f"{budget}; {ONE_FLOW}; or {BF16}")]


def test_a_prediction_by_few_tokens_is_called_so() -> None:
    ((message, _),) = warned(expected=dataclasses.replace(FAR, tokens=255))
    assert message == MESSAGE.replace("measured on 900 tokens", "measured on few tokens (255)")
    ((message, _),) = warned(expected=dataclasses.replace(FAR, tokens=256))
    assert message == MESSAGE.replace("900", "256")


def test_what_the_budget_costs_in_time_comes_from_bench() -> None:
    """Of the time of a quantised step 40 % of the multiplications lose what they gained: 1 / (1/2 + 0.4 * 1/2)."""
    stored = StoredResult(ratios=((Scheme.INT8, 2.0),), measurement="measured")
    ((_, remedy),) = warned(stored=stored)
    assert "40% of the multiplications in BF16 (rollouts 1.43 times as fast as in BF16, not 2.00, by `bench`)" in remedy
    assert remedy.endswith(f"{BF16}, and is 2.00 times slower by `bench`")
    slow = StoredResult(ratios=((Scheme.INT8, 0.9),), measurement="measured")
    assert "by `bench`" not in warned(stored=slow)[0][1]


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        ((), None),
        ((), dataclasses.replace(FAR, kl=0.015)),
        (("guard.k3_kl=0.03",), FAR),
        (("trainer.forward=rollout",), FAR),
        (("rollout.scheme=bf16",), None),
    ],
)
def test_nothing_is_said_within_the_bound_and_where_there_is_no_mismatch(
    sets: tuple[str, ...], expected: Expected | None
) -> None:
    assert warned(*sets, expected=expected) == []


def test_a_profile_without_contributions_names_the_budget_without_its_cost() -> None:
    ((_, remedy),) = warned(expected=Expected(0.02, tokens=900))
    assert remedy.startswith("`quantization.mismatch_budget: 0.0075` keeps as many layers in BF16 as that takes; ")


def test_the_budget_follows_the_guards_bound_and_a_named_profile_has_to_go() -> None:
    ((message, remedy),) = warned("guard.k3_kl=0.004", "quantization.profile=/p", expected=Expected(0.02, tokens=900))
    assert "above 0.004 a step is bad" in message
    assert remedy.startswith("`quantization.mismatch_budget: 0.002` in place of `quantization.profile` keeps ")


@pytest.mark.parametrize(
    "sets",
    [
        ("rollout.scheme=auto", "rollout.replicas=[int8, fp8]", "quantization.emulate=true", "cluster.gpus_per_node=2"),
        ("rollout.scheme=auto", "rollout.replicas=[int8, bf16]", "cluster.gpus_per_node=2"),
        ("rollout.lm_head_fp32=true",),
        ("model.lora={rank: 8}",),
        ("model.lora={rank: 8, sync: adapter, dropout: 0.1}",),
        ("rollout.tensor_parallel=2", "cluster.gpus_per_node=2"),
    ],
)
def test_one_flow_is_not_advised_where_it_is_refused(sets: tuple[str, ...]) -> None:
    with pytest.raises(RecipeError):
        planned("trainer.forward=rollout", *sets)
    ((_, remedy),) = warned(*sets)
    assert "trainer.forward" not in remedy and BF16 in remedy


def test_one_flow_is_advised_beside_an_adapter_that_goes_alone() -> None:
    ((_, remedy),) = warned("model.lora={rank: 8, sync: adapter}")
    assert "`trainer.forward: rollout`" in remedy


def test_one_flow_is_not_advised_for_experts_and_gpus() -> None:
    shape = dataclasses.replace(KNOWN["Qwen/Qwen2.5-0.5B-Instruct"], experts=8)
    ((_, of_experts),) = warned(model_shape=shape)
    ((_, on_gpu),) = warned(recipe="gsm8k-0.5b-int8")
    other = dataclasses.replace(KNOWN["Qwen/Qwen2.5-0.5B-Instruct"], beyond_one_flow="windows in a part of the layers")
    ((_, of_windows),) = warned(model_shape=other)
    assert "trainer.forward" not in of_experts + on_gpu + of_windows
