"""Does quantising pay here: by what bench kept, else by what is reported of others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from plans import HOST, make_plan, make_rollout, on, with_trainer

from appliance.finding import Severity
from appliance.plan.bench_results import SchemeResult, result_key, write_result
from appliance.preflight.device import judge_gain
from appliance.preflight.inputs import read_inputs
from appliance.record.plan import RunPlan
from appliance.settings.sections import Forward
from appliance.tasks.library import TINY_MODELS
from appliance.terms.devices import StoredResult
from appliance.terms.schemes import Scheme
from appliance.terms.shapes import KNOWN

LARGE, SMALL = KNOWN["Qwen/Qwen2.5-32B"], KNOWN["Qwen/Qwen2.5-0.5B-Instruct"]


def planned(
    scheme: Scheme = Scheme.INT8, *, response: int = 8192, device: str = "h100-80gb", **rollout: object
) -> RunPlan:
    plan = on(make_plan(Path("/runs/a-1"), rollout=make_rollout(scheme, **rollout)), device)
    task = plan.task.replace(max_response_tokens=response)
    return plan.replace(task=task)


def stored(ratio: float) -> StoredResult:
    return StoredResult(ratios=((Scheme.INT8, ratio),), measurement="5 pairs")


@pytest.mark.parametrize(
    ("ratio", "severity", "text", "remedy"),
    [
        (1.63, Severity.INFO, "quantising pays here, measured: int8 1.63 times bf16 (5 pairs)", ""),
        (
            1.04,
            Severity.WARNING,
            "quantising does not pay here, measured: int8 1.04 times bf16 (5 pairs)",
            "use `bf16`",
        ),
    ],
)
def test_a_measurement_decides(ratio: float, severity: Severity, text: str, remedy: str) -> None:
    (only,) = judge_gain(planned(), host=HOST, shape=SMALL, stored=stored(ratio))
    assert (only.severity, only.message, only.remedy) == (severity, text, remedy)


@pytest.mark.parametrize(
    ("plan", "shape", "why"),
    [
        (planned(), SMALL, "the model has 0.5 billion weights (others report gains from 14 billion on)"),
        (planned(response=512), LARGE, "responses have up to 512 tokens (long ones gain)"),
        (
            planned(response=512),
            SMALL,
            "the model has 0.5 billion weights (others report gains from 14 billion on), and responses have up to "
            "512 tokens (long ones gain)",
        ),
        (
            planned(),
            TINY_MODELS["tiny-arithmetic"].shape,
            "with 3.0 million weights the time goes to the sampler and the processes around it",
        ),
    ],
)
def test_without_one_it_is_doubted(plan: RunPlan, shape, why: str) -> None:
    (only,) = judge_gain(plan, host=HOST, shape=shape, stored=None)
    assert only.text == (
        f"info: rollout.scheme: `int8` may be no faster than `bf16` here: {why}; not measured on this host"
    )
    assert only.remedy == "`appliance bench RECIPE` measures it, in minutes"


@pytest.mark.parametrize(
    ("scheme", "flags", "text"),
    [
        (Scheme.INT8, ("avx512f", "avx512_vnni"), ""),
        (
            Scheme.INT4,
            ("avx512f", "avx512_vnni"),
            "info: rollout.scheme: `int4` may be no faster than `bf16` here: on a CPU it saves memory and no time; not "
            "measured on this host",
        ),
        (
            Scheme.INT8,
            ("avx512_vnni", "amx_int8", "amx_bf16"),
            "info: rollout.scheme: `int8` may be no faster than `bf16` here: this processor has AMX, with which BF16 "
            "is fast as well; not measured on this host",
        ),
    ],
)
def test_on_a_cpu_its_kind_is_doubted_and_not_the_models_size(
    scheme: Scheme, flags: tuple[str, ...], text: str
) -> None:
    findings = judge_gain(
        planned(scheme, response=16, device="cpu"),
        host=replace(HOST, cpu_flags=frozenset(flags)),
        shape=SMALL,
        stored=None,
    )
    assert [finding.text for finding in findings] == [text] * bool(text)


def test_one_flow_leaves_out_amx_so_nothing_is_said_of_it() -> None:
    plan = with_trainer(planned(response=16, device="cpu"), forward=Forward.ROLLOUT)
    host = replace(HOST, cpu_flags=frozenset({"amx_int8", "amx_bf16"}))
    assert list(judge_gain(plan, host=host, shape=SMALL, stored=None)) == []


def test_nothing_is_said_of_a_large_model_with_long_responses_nor_of_bf16() -> None:
    assert list(judge_gain(planned(), host=HOST, shape=LARGE, stored=None)) == []
    assert list(judge_gain(planned(Scheme.BF16, response=8), host=HOST, shape=SMALL, stored=stored(0.5))) == []


def test_a_result_of_another_scheme_says_nothing() -> None:
    (only,) = judge_gain(planned(Scheme.FP8), host=HOST, shape=SMALL, stored=stored(0.5))
    assert only.severity is Severity.INFO


def test_what_bench_kept_is_found(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "runs" / "a-1", cache_dir=str(tmp_path))
    model = {"model": plan.model, "weights": plan.weights}
    key = result_key(device="cpu", host=HOST, **model, pins=plan.pins, tensor_parallel=1)
    kept = (SchemeResult(Scheme.INT8, tokens_per_s=1.0, ratio=0.9, ratio_min=0.8, ratio_max=1.0),)
    write_result(key, cache_dir=tmp_path, results=kept, measurement="5 pairs", pairs=5, kv_memory_bytes=None)
    assert read_inputs(plan, ask_hub=False, host=HOST).stored == StoredResult(((Scheme.INT8, 0.9),), "5 pairs")
    assert read_inputs(plan, ask_hub=False).stored is None
    one_flow = with_trainer(plan, forward=Forward.ROLLOUT)
    assert read_inputs(one_flow, ask_hub=False, host=HOST).stored is None
