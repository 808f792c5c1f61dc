"""From a recipe to its findings on this host: every part that preflight reads is also judged."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from plans import HOST

from appliance.finding import Severity
from appliance.plan.build import build_plan
from appliance.plan.host import ContainerFacts, Limits
from appliance.preflight.access import AccessFacts
from appliance.preflight.checks import judge
from appliance.preflight.inputs import RewardProblem, StackFacts, read_inputs
from appliance.preflight.report import examine
from appliance.quant.headers import Damage
from appliance.recipe.load import load_recipe
from appliance.settings.sections import SchemeChange
from appliance.terms.shapes import KNOWN

BAD = Damage(("a is cut short", "b is missing"), "copy it again")
HUB_MODEL = ("model.builtin=null", "model.path=owner/name")


@pytest.mark.parametrize(
    ("sets", "facts", "text"),
    [
        (
            ("model.builtin=null", "model.path=/m"),
            {"model_folder_exists": True, "model_missing": (), "model_damage": BAD},
            "error: model.path: /m: a is cut short; b is missing",
        ),
        (
            HUB_MODEL,
            {"model_is_cached": True, "model_damage": BAD},
            "error: model.path: `owner/name` in the hub's cache: a is cut short; b is missing",
        ),
        (HUB_MODEL, {"model_problem": "`owner/name`: no"}, "error: model.path: `owner/name`: no"),
        ((), {"reward_problem": RewardProblem("7 of 8 are wrong")}, "error: task.kind: 7 of 8 are wrong"),
        ((), {"access": AccessFacts(cache_problem="/c is theirs")}, "error: cluster.run_dir: /c is theirs"),
        ((), {"stack": StackFacts(patches=(("p", "differs"),))}, "error: patch p: differs"),
    ],
)
def test_what_is_read_is_judged(tmp_path: Path, sets: tuple[str, ...], facts: dict[str, object], text: str) -> None:
    plan = build_plan(load_recipe("arithmetic-tiny-int8", sets=sets), run_dir=tmp_path / "a-1", host=HOST)
    inputs = dataclasses.replace(read_inputs(plan, ask_hub=False), **facts)
    found = [each for each in judge(plan, host=HOST, inputs=inputs) if each.severity is Severity.ERROR]
    assert [each.text for each in found] == [text]
    assert all(each.remedy for each in found)


def test_a_few_wrong_rewards_are_a_warning(tmp_path: Path) -> None:
    plan = build_plan(load_recipe("arithmetic-tiny-int8"), run_dir=tmp_path / "a-1", host=HOST)
    few = RewardProblem("1 of 8 is wrong", is_rare=True)
    inputs = dataclasses.replace(read_inputs(plan, ask_hub=False), reward_problem=few)
    [found] = [each for each in judge(plan, host=HOST, inputs=inputs) if each.code == "reward"]
    assert found.text == "warning: task.kind: 1 of 8 is wrong" and found.remedy


def test_limits_of_the_host_are_judged(tmp_path: Path) -> None:
    plan = build_plan(load_recipe("arithmetic-tiny-int8"), run_dir=tmp_path / "a-1", host=HOST)
    low = dataclasses.replace(HOST, limits=Limits(open_files=1))
    inputs = read_inputs(plan, ask_hub=False)
    assert "open-files" in [each.code for each in judge(plan, host=low, inputs=inputs)]
    many = plan.replace(cluster=plan.cluster.replace(nodes=1024, gpus_per_node=8))  # with engines on one GPU each
    for files, is_told in ((512 + 2 * 8192 - 1, True), (512 + 2 * 8192, False)):
        host = dataclasses.replace(HOST, limits=Limits(open_files=files))
        assert ("open-files" in [each.code for each in judge(many, host=host, inputs=inputs)]) is is_told


IN_A_CONTAINER = ContainerFacts("gpu", "/runs", run_root_lasts=False, uid=1, gid=0)
ON_ONE_GPU = ("cluster.gpus_per_node=1", "cluster.nodes=1", "rollout.tensor_parallel=1", "trainer.sequence_parallel=1")
PACKED = "batch.max_tokens_per_gpu=18432"


@pytest.mark.parametrize(
    ("recipe", "sets", "host", "shape", "code"),
    [
        ("qwen3-32b-fp8", (*ON_ONE_GPU, PACKED), {}, "Qwen/Qwen3-32B", "gpu-memory"),
        ("dapo-7b-int8", ("trainer.attention=flash_attention_2",), {}, "", "flash-attention"),
        ("arithmetic-tiny-int8", (), {"container": IN_A_CONTAINER}, "", "no-volume"),
        ("arithmetic-tiny-int8", (), {"memory_free_bytes": 1 << 30}, "", "memory"),
    ],
)
def test_what_the_rooms_say_is_said_by_check(
    tmp_path: Path, recipe: str, sets: tuple[str, ...], host: dict[str, object], shape: str, code: str
) -> None:
    plan = build_plan(load_recipe(recipe, sets=sets), run_dir=tmp_path / "a-1", host=HOST)
    inputs = dataclasses.replace(read_inputs(plan, ask_hub=False), model_shape=KNOWN.get(shape))
    found = [each for each in judge(plan, host=dataclasses.replace(HOST, **host), inputs=inputs) if each.code == code]
    assert found and all(each.message and each.remedy for each in found)


def test_a_change_of_scheme_that_cannot_be_live_is_said_by_check(tmp_path: Path) -> None:
    """Of a model of the hub, whose experts are seen only here."""
    plan = build_plan(load_recipe("arithmetic-tiny-int8", sets=HUB_MODEL), run_dir=tmp_path / "a-1", host=HOST)
    assert plan.guard.scheme_change is SchemeChange.LIVE
    experts = dataclasses.replace(KNOWN["Qwen/Qwen2.5-32B"], architectures=("Qwen3MoeForCausalLM",))
    inputs = dataclasses.replace(read_inputs(plan, ask_hub=False), model_shape=experts)
    assert "guard-scheme" in [each.code for each in judge(plan, host=HOST, inputs=inputs)]


def test_lora_and_experts_of_a_model_of_the_hub_are_refused_by_check(tmp_path: Path) -> None:
    plan = build_plan(load_recipe("gsm8k-7b-lora-int8"), run_dir=tmp_path / "a-1", host=HOST)
    experts = dataclasses.replace(KNOWN["Qwen/Qwen2.5-32B"], architectures=("Qwen3MoeForCausalLM",))
    messages = {}
    for shape in (experts, KNOWN["Qwen/Qwen2.5-32B"]):
        inputs = dataclasses.replace(read_inputs(plan, ask_hub=False), model_shape=shape)
        messages[shape] = [each.message for each in judge(plan, host=HOST, inputs=inputs) if each.place == "model.lora"]
    assert list(messages.values()) == [["this model has experts, whose weights are no linear layers"], []]


def test_this_host_can_train_the_demo(tmp_path: Path) -> None:
    """With the reward of a sample, the installed stack and every limit: what `appliance check` says here."""
    recipe = load_recipe("arithmetic-tiny-int8", sets=(f"cluster.run_dir={tmp_path}",))
    _, _, findings = examine(recipe, run_dir=tmp_path / "a-1", ask_hub=True)
    assert [each.text for each in findings if each.severity is Severity.ERROR] == []
    is_slow = "scheme-slow" in {each.code for each in findings}  # a processor without VNNI
    assert [each.code for each in findings if each.severity is Severity.INFO] == ([] if is_slow else ["gain"])


def test_a_run_root_that_cannot_be_written_is_one_finding(tmp_path: Path) -> None:
    """The cache lies in it, and is no second one."""
    plan = build_plan(load_recipe("arithmetic-tiny-int8"), run_dir=tmp_path / "a-1", host=HOST)
    closed = dataclasses.replace(HOST, run_root_problem="/r cannot be written")
    access = AccessFacts(cache_problem="/r/.cache is theirs", wandb_key=False)
    inputs = dataclasses.replace(read_inputs(plan, ask_hub=False), access=access)
    found = [each.code for each in judge(plan, host=closed, inputs=inputs) if each.severity is Severity.ERROR]
    assert found == ["secret", "run-folder"]
