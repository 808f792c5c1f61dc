"""A model with experts, on each kind of device: what is planned, what `auto` takes, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from plans import HOST, INPUTS

from appliance.bench.command import _eager
from appliance.errors import RecipeError
from appliance.finding import Severity
from appliance.plan.bench_results import SchemeResult, model_shapes, result_key, write_result
from appliance.plan.build import build_plan
from appliance.plan.engines import keeps_experts
from appliance.plan.host import HostGpu
from appliance.preflight.checks import judge
from appliance.preflight.device import judge_guard
from appliance.recipe.load import load_recipe
from appliance.record.plan import RunPlan
from appliance.settings.sections import SchemeChange
from appliance.terms.schemes import Scheme
from appliance.terms.settings import Dtype
from appliance.terms.shapes import ModelShape, read_shape

KEPT = r"quantization.ignore=['re:.*\.experts$']"
KEEP = f"keep them in BF16: {KEPT}"
SLOW = "INT8 experts run one after the other and without CUDA graphs: correct, and not fast; by rule, not measured"
PRODUCTS = {"a100": "NVIDIA A100-SXM4-80GB", "h100": "NVIDIA H100 80GB HBM3", "b200": "NVIDIA B200"}


@pytest.fixture
def moe(tmp_path: Path) -> Path:
    folder = tmp_path / "moe"
    folder.mkdir()
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "num_experts": 8,
        "vocab_size": 256,
        "max_position_embeddings": 4096,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def planned(folder: Path, *sets: str, device: str) -> RunPlan:
    given = (f"model.path={folder}", "model.builtin=null", f"cluster.device={device}", *sets)
    run_dir = folder.parent / "runs" / "a-1"
    return build_plan(load_recipe("arithmetic-tiny-int8", sets=given), run_dir=run_dir, host=HOST)


def test_activations_are_recomputed_and_the_plan_says_why(moe: Path) -> None:
    """No estimate covers experts, so nothing says that there is room."""
    choices = {choice.key: choice for choice in planned(moe, device="cpu").choices}
    recomputes = choices["trainer.gradient_checkpointing"]
    assert (recomputes.value, recomputes.why) == (
        "true",
        "activations are recomputed, which takes a third more time: the memory of a forward through experts is not "
        "estimated",
    )


def refused(plan: RunPlan, *, shape: ModelShape | None) -> list[tuple[str, str]]:
    """Errors about scheme and experts."""
    gpus = () if plan.is_cpu else (HostGpu(PRODUCTS[plan.cluster.device], 80 << 30),)
    findings = judge(
        plan, host=dataclasses.replace(HOST, gpus=gpus), inputs=dataclasses.replace(INPUTS, model_shape=shape)
    )
    about = [each for each in findings if each.severity is Severity.ERROR and each.code in ("scheme", "experts")]
    return [(each.text, each.remedy) for each in about]


def choices(plan: RunPlan) -> dict[str, tuple[str, str]]:
    return {each.key: (each.value, each.why) for each in plan.choices}


def test_experts_are_refused_in_fp16(moe: Path) -> None:
    sets = ("trainer.dtype=fp16", "quantization.profile=none")
    with pytest.raises(RecipeError) as raised:
        planned(moe, *sets, device="cpu")
    why = "trainer.dtype: engines have experts in BF16 alone"
    assert raised.value.problems == [(f"--set trainer.dtype=fp16: {why}", "use `bf16`")]
    named = planned(Path("owner/moe"), f"cluster.run_dir={moe.parent}", device="cpu")
    named = named.replace(trainer=named.trainer.replace(dtype=Dtype.FP16))
    assert refused(named, shape=read_shape(moe / "config.json")) == [(f"error: {why}", "use `bf16`")]


@pytest.mark.parametrize("forward", ["rollout", "linears"])
def test_experts_are_refused_with_the_rollouts_forward(moe: Path, forward: str) -> None:
    """Also where engines keep them in BF16, and of a model of the hub, of which preflight alone knows them."""
    setting, refusal = f"trainer.forward={forward}", f"trainer.forward: `{forward}` does not know experts"
    for kept_setting in ((), (KEPT,)):
        with pytest.raises(RecipeError) as raised:
            planned(moe, setting, *kept_setting, device="cpu")
        assert raised.value.problems == [(f"--set {setting}: {refusal}", "use `bf16`")]
        named = planned(Path("owner/moe"), setting, *kept_setting, f"cluster.run_dir={moe.parent}", device="cpu")
        assert refused(named, shape=read_shape(moe / "config.json")) == [(f"error: {refusal}", "use `bf16`")]


@pytest.mark.parametrize("device", ["a100", "h100"])
def test_int8_experts_on_a_gpu_get_an_engine_without_graphs_and_the_plan_says_why(moe: Path, device: str) -> None:
    plan = planned(moe, "rollout.scheme=int8", device=device)
    assert plan.engine.eager
    assert "actor_rollout_ref.rollout.enforce_eager=true" in plan.argv
    why = "quantised experts run one by one, which no CUDA graph can hold"
    assert choices(plan)["rollout.enforce_eager"] == ("true", why)
    assert plan.guard.scheme_change is SchemeChange.RESTART
    assert choices(plan)["rollout.scheme_changes"][1].startswith("quantised experts cannot change their scheme")
    assert refused(plan, shape=read_shape(moe / "config.json")) == []


def test_a_benchmark_has_the_engines_of_a_run(moe: Path) -> None:
    """Graphs, where a run of that scheme would have them."""
    every = (Scheme.BF16, Scheme.INT8)
    for sets, device, has_recipes_model, eager in (
        ((), "cpu", True, every),
        ((), "h100", True, (Scheme.INT8,)),
        (("quantization.ignore=['re:.*experts']",), "h100", True, ()),
        ((), "h100", False, ()),
    ):
        given = (f"model.path={moe}", "model.builtin=null", f"cluster.device={device}", *sets)
        recipe, plan = load_recipe("arithmetic-tiny-int8", sets=given), planned(moe, *sets, device=device)
        assert _eager(recipe, schemes=every, plan=plan, has_recipes_model=has_recipes_model) == eager


def test_a_live_change_of_experts_is_refused_for_what_they_are(moe: Path) -> None:
    """Not for graphs: the engine has none."""
    plan = planned(moe, "rollout.scheme=int8", "guard.scheme_change=live", device="h100")
    (found,) = judge_guard(plan, read_shape(moe / "config.json"))
    why = "quantised experts cannot change their scheme while the engine runs"
    assert found.message == f"a change of scheme cannot be `live`: {why}"


@pytest.mark.parametrize("scheme", ["rollout.scheme=int8", "rollout.scheme=fp8, quantization.emulate=true"])
def test_on_a_cpu_experts_that_stay_in_bf16_are_nothing_that_could_not_change(moe: Path, scheme: str) -> None:
    """In a folder as by a name, of which preflight alone knows the sizes."""
    named = dataclasses.replace(INPUTS, model_shape=read_shape(moe / "config.json"))
    sets = (*scheme.split(", "), "guard.scheme_change=live")
    for model, inputs in ((moe, INPUTS), (moe, named), (Path("owner/moe"), named)):
        more = (f"cluster.run_dir={moe.parent}",)
        kept = planned(model, *sets, KEPT, *more, device="cpu")
        assert list(judge_guard(kept, inputs.model_shape)) == []
        (finding,) = judge_guard(planned(model, *sets, *more, device="cpu"), inputs.model_shape)
        assert finding.code == "guard-scheme"
        one = "quantization.ignore=[model.layers.0.mlp.experts]"  # of two layers
        (finding,) = judge_guard(planned(model, *sets, one, *more, device="cpu"), inputs.model_shape)
        assert finding.code == "guard-scheme"
    auto = planned(moe, *scheme.split(", "), KEPT, device="cpu")
    assert auto.guard.scheme_change is SchemeChange.LIVE
    assert choices(auto)["rollout.scheme_changes"][1].startswith("engines run eagerly")
    assert auto.trainer.validate_bf16_every == auto.trainer.steps
    assert planned(moe, *scheme.split(", "), device="cpu").guard.scheme_change is SchemeChange.RESTART


@pytest.mark.parametrize(
    "sets", [("rollout.scheme=bf16",), ("rollout.scheme=int8", KEPT), ("rollout.scheme=fp8", KEPT)]
)
def test_experts_that_stay_in_bf16_keep_their_graphs(moe: Path, sets: tuple[str, ...]) -> None:
    plan = planned(moe, *sets, device="h100")
    assert not plan.engine.eager
    assert "actor_rollout_ref.rollout.enforce_eager=false" in plan.argv
    assert "rollout.enforce_eager" not in choices(plan)
    assert refused(plan, shape=read_shape(moe / "config.json")) == []


@pytest.mark.parametrize("device", ["h100", "b200"])
@pytest.mark.parametrize("scheme", ["fp8", "fp8-channel", "fp8-block"])
def test_fp8_experts_on_a_gpu_are_refused_before_the_start(moe: Path, device: str, scheme: str) -> None:
    found = refused(planned(moe, f"rollout.scheme={scheme}", device=device), shape=read_shape(moe / "config.json"))
    message = f"error: rollout.scheme: `{scheme}`: experts in FP8 run emulated only"
    assert found == [(message, f"use `bf16`, or {KEEP}")]


def test_emulated_experts_are_served_on_a_gpu_too(moe: Path) -> None:
    plan = planned(moe, "rollout.scheme=fp8", "quantization.emulate=true", device="h100")
    assert plan.engine.eager
    assert refused(plan, shape=read_shape(moe / "config.json")) == []


@pytest.mark.parametrize(
    ("device", "why"),
    [
        ("a100", SLOW),
        ("h100", f"{SLOW}: `appliance bench` measures it"),
        (
            "b200",
            "vLLM has no INT8 kernels for b200 (Blackwell), and experts in FP8 run emulated only; "
            "by rule, not measured",
        ),
    ],
)
def test_auto_takes_what_serves_the_experts(moe: Path, device: str, why: str) -> None:
    plan = planned(moe, "rollout.scheme=auto", device=device)
    assert plan.rollout.scheme is Scheme.BF16
    assert choices(plan)["rollout.scheme"] == ("bf16", why)
    assert refused(plan, shape=read_shape(moe / "config.json")) == []


def test_auto_goes_by_what_was_measured_of_the_experts(moe: Path) -> None:
    plan = planned(moe, "rollout.scheme=auto", device="h100")
    model = {"model": plan.model, "weights": plan.weights}
    key = result_key(device="h100", host=HOST, **model, pins=plan.pins, tensor_parallel=1)
    assert model_shapes(**model).endswith("-e8")
    kept = (SchemeResult(Scheme.FP8, 200.0, 2.0, 2.0, 2.0), SchemeResult(Scheme.INT8, 120.0, 1.2, 1.2, 1.2))
    write_result(key, cache_dir=Path(plan.cache_dir), results=kept, measurement="bench", pairs=3, kv_memory_bytes=None)
    assert planned(moe, "rollout.scheme=auto", device="h100").rollout.scheme is Scheme.INT8  # FP8 cannot have run


def test_auto_with_the_experts_kept_is_as_without_any(moe: Path) -> None:
    assert planned(moe, "rollout.scheme=auto", KEPT, device="b200").rollout.scheme is Scheme.FP8
    assert planned(moe, "rollout.scheme=auto", KEPT, device="h100").rollout.scheme is Scheme.INT8


def test_experts_that_a_name_did_not_tell_of_are_refused_with_the_way_out(moe: Path) -> None:
    plan = planned(Path("owner/moe"), "rollout.scheme=int8", f"cluster.run_dir={moe.parent}", device="h100")
    message = (
        "error: model.path: owner/moe has experts, and quantised ones need engines without CUDA graphs: from a name "
        "alone the plan cannot see that"
    )
    assert refused(plan, shape=read_shape(moe / "config.json")) == [
        (message, f"give the model's folder in model.path, or {KEEP}")
    ]
    assert refused(plan, shape=None) == []


@pytest.mark.parametrize(
    ("ignore", "kept"),
    [
        ((), False),
        (("model.layers.0.mlp.experts",), False),
        (("model.layers.0.mlp.experts", "model.layers.1.mlp.experts"), True),
        ((r"re:model\.layers\.\d+\.mlp\.experts",), True),
        (("re:experts",), False),  # a pattern is held against the beginning of a name
        (("re:(",), False),
    ],
)
def test_which_ignore_rules_keep_all_experts(ignore: tuple[str, ...], kept: bool) -> None:
    assert keeps_experts(ignore, layers=2) is kept
