"""The benchmark's judgement on given numbers, its table, its shapes. Its engines: tests/engine/test_engine_bench.py."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from plans import HOST, make_plan, with_trainer

from appliance.bench import command
from appliance.bench.command import _kv_bytes, _recipe_workload, _refuse_without_memory, _why_not_kept, table
from appliance.bench.job import BenchJob, EngineFacts, Measurement, Shapes, judge_schemes, parse_shapes, read_lines
from appliance.errors import EngineError, PreflightError, RecipeError
from appliance.plan.bench_results import ResultKey
from appliance.plan.build import build_plan, installed_versions
from appliance.plan.host import HostFacts, HostGpu
from appliance.plan.memory import GIB, moments, one_sequence
from appliance.preflight.probes import read_host
from appliance.recipe.load import load_recipe
from appliance.settings.sections import Forward
from appliance.tasks.library import TINY_MODELS
from appliance.terms.devices import GPUS, why_not
from appliance.terms.schemes import Scheme
from appliance.terms.settings import Dtype, Quantisation
from appliance.terms.shapes import KNOWN

BENCH = [sys.executable, "-m", "appliance", "bench", "arithmetic-tiny-int8"]


def measured(pair: int, scheme: Scheme, tokens_per_s: float) -> Measurement:
    return Measurement(pair=pair, scheme=scheme, tokens=int(tokens_per_s), seconds=1.0, processor_s=2.0)


def test_verdict_is_the_median_of_pairwise_ratios() -> None:
    speeds = [(100, 200), (400, 600), (100, 250)]  # ratios 2.0, 1.5, 2.5; the medians alone would say 2.5
    measurements = [
        measured(pair, scheme, speed)
        for pair, both in enumerate(speeds)
        for scheme, speed in zip((Scheme.BF16, Scheme.INT8), both, strict=True)
    ]
    base, int8 = judge_schemes(measurements, schemes=(Scheme.BF16, Scheme.INT8))
    assert (base.ratio, base.tokens_per_s) == (1.0, 100)
    assert (int8.ratio, int8.ratio_min, int8.ratio_max, int8.tokens_per_s) == (2.0, 1.5, 2.5, 250)


def test_a_pair_without_its_other_half_does_not_count() -> None:
    given = [measured(0, Scheme.BF16, 100), measured(0, Scheme.INT8, 150), measured(1, Scheme.BF16, 10)]
    assert judge_schemes(given, schemes=(Scheme.BF16, Scheme.INT8))[0].tokens_per_s == 100


def test_every_scheme_is_compared_with_the_first() -> None:
    given = [measured(0, Scheme.INT8, 200), measured(0, Scheme.BF16, 100), measured(0, Scheme.FP8, 300)]
    verdicts = judge_schemes(given, schemes=(Scheme.INT8, Scheme.BF16, Scheme.FP8))
    assert [(v.scheme, v.ratio) for v in verdicts] == [(Scheme.INT8, 1.0), (Scheme.BF16, 0.5), (Scheme.FP8, 1.5)]


def make_job(*, memory_bytes: int | None) -> BenchJob:
    return BenchJob(
        workload=Shapes(hidden=64, intermediate=128, heads=2, kv_heads=2, layers=1, batch=64).workload,
        engines=(Quantisation(scheme=Scheme.BF16), Quantisation(scheme=Scheme.INT8, ignore=("re:.*o_proj",))),
        eager=(Scheme.INT8,),
        tensor_parallel=1,
        pairs=5,
        kv_bytes=1 << 30,
        memory_bytes=memory_bytes,
        seed=0,
        results="results",
        facts="facts",
    )


def test_a_job_reads_back_the_same() -> None:
    job = make_job(memory_bytes=7)
    assert BenchJob.model_validate_json(job.model_dump_json()) == job


PLAIN = (Quantisation(scheme=Scheme.BF16), Quantisation(scheme=Scheme.INT8))
A100 = HostGpu("NVIDIA A100-SXM4-80GB", 80 << 30)


@pytest.mark.parametrize(
    ("engines", "device", "gpus", "torch", "why"),
    [
        (PLAIN, "cpu", (), None, ""),
        (PLAIN, "a100", (A100,), None, ""),
        (PLAIN[::-1], "cpu", (), None, "the base of the comparison is not bf16"),
        (PLAIN[:1], "cpu", (), None, "nothing was compared with bf16"),
        (PLAIN, "cpu", (), "1.0", "torch: installed in another version than runs use"),
        (
            (PLAIN[0], Quantisation(scheme=Scheme.INT8, ignore=("a",))),
            "cpu",
            (),
            None,
            "quantization.ignore leaves layers in BF16",
        ),
        (
            tuple(each.replace(lm_head_fp32=True) for each in PLAIN),
            "cpu",
            (),
            None,
            "with rollout.lm_head_fp32 every engine differs from the usual ones",
        ),
        (PLAIN, "h200", (), None, "it was not measured on `h200`"),
        (PLAIN, "h200", (A100,), None, "it was not measured on `h200`"),
    ],
)
def test_only_a_result_that_is_what_its_key_says_is_kept(
    engines: tuple[Quantisation, ...],
    device: str,
    gpus: tuple[HostGpu, ...],
    torch: str | None,
    why: str,
    tmp_path: Path,
) -> None:
    versions = (("torch", torch or installed_versions()["torch"] or ""),)
    key = ResultKey(device, processor="p", shapes="h1", versions=versions)
    job = make_job(memory_bytes=None).replace(engines=engines)
    host: HostFacts = dataclasses.replace(read_host(tmp_path), gpus=gpus)
    plan = make_plan(tmp_path, device=device)
    assert _why_not_kept(key, plan=plan, host=host, job=job) == why
    in_fp16 = _why_not_kept(key, plan=plan, host=host, job=job.replace(dtype=Dtype.FP16))
    assert bool(why) or in_fp16 == "these engines are in fp16, and `auto` chooses for BF16's"
    one_flow = with_trainer(plan, forward=Forward.ROLLOUT)
    slower = "trainer.forward: rollout has engines of its own, and `auto` chooses for the usual ones"
    assert bool(why) or _why_not_kept(key, plan=one_flow, host=host, job=job) == slower


def test_a_result_of_shapes_is_kept_for_one_rank_and_a_recipes_for_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: list[ResultKey] = []
    monkeypatch.setattr(command, "write_result", lambda key, **_: keys.append(key))
    monkeypatch.setattr(command, "_why_not_kept", lambda *_, **__: "")
    plan = make_plan(tmp_path)
    plan = plan.replace(rollout=plan.rollout.replace(tensor_parallel=2))
    of_shapes = make_job(memory_bytes=None)
    for job in (of_shapes, of_shapes.replace(workload=_recipe_workload(plan), tensor_parallel=2)):
        command._keep([], job=job, plan=plan, host=HOST)
    assert [key.tensor_parallel for key in keys] == [1, 2]
    assert keys[0].shapes == of_shapes.workload.shapes.model.layer_slug != keys[1].shapes


@pytest.mark.parametrize(("int8", "verdict_text"), [(105, "pays"), (104, "does not pay")])
def test_the_table_says_whether_it_pays(int8: int, verdict_text: str) -> None:
    job = make_job(memory_bytes=3 << 30)
    verdicts = judge_schemes([measured(0, Scheme.BF16, 100), measured(0, Scheme.INT8, int8)], schemes=job.schemes)
    facts = [
        EngineFacts(scheme=Scheme.BF16, weight_bytes=2 << 30, kv_bytes=1 << 30, sequences=10, kernels=()),
        EngineFacts(scheme=Scheme.INT8, weight_bytes=1 << 20, kv_bytes=2 << 30, sequences=200, kernels=()),
    ]
    assert table(job, verdicts=verdicts, facts=facts, stored_in=None).splitlines() == [
        "scheme  tokens/s   weights  KV cache   at once  ratio to bf16 (median of 5 interleaved pairs, min-max)",
        "bf16         100  2.00 GiB  1.00 GiB  10 of 64  1.00 (1.00-1.00)",
        f"int8         {int8}   1.0 MiB  2.00 GiB  64 of 64  1.0{int8 % 10} (1.0{int8 % 10}-1.0{int8 % 10})",
        f"int8 {verdict_text} here for these rollouts: 1.0{int8 % 10} times bf16 ({int8} against 100 tokens/s; "
        "it pays from 1.05 on)",
        "each engine had 3.00 GiB a worker for weights and KV cache together",
    ]


def test_an_engine_has_as_many_sequences_at_once_as_in_a_run(tmp_path: Path) -> None:
    """vLLM refuses more than it takes tokens in a step: on a CPU 4096."""
    sets = ("batch.prompts_per_step=1024", "rollout.samples_per_prompt=8")
    plan = build_plan(load_recipe("arithmetic-tiny-int8", sets=sets), run_dir=tmp_path / "run", host=HOST)
    assert _recipe_workload(plan).sequences == plan.engine.max_concurrent_sequences == 256
    assert _recipe_workload(plan.replace(batch=plan.batch.replace(prompts_per_step=2))).sequences == 2 * 8


@pytest.mark.parametrize("name", ["dapo-32b-int8", "dapo-7b-int8", "qwen3-8b-int8", "qwen3-32b-fp8", "gsm8k-0.5b-int8"])
def test_on_a_gpu_an_engine_has_the_kv_cache_of_a_run_where_all_fit(name: str, tmp_path: Path) -> None:
    """vLLM refuses one that does not hold the longest sequence."""
    recipe = load_recipe(name)
    plan, schemes = build_plan(recipe, run_dir=tmp_path / "run", host=HOST), (Scheme.BF16, Scheme.INT8)
    shape = KNOWN[plan.model.path]
    limit = GPUS[plan.cluster.device].memory_gib * GIB
    kv_bytes = _kv_bytes(recipe, plan=plan, schemes=schemes, shape=shape)
    in_run = next(part.size for part in moments(plan, shape)[0].parts if part.name == "its KV cache")
    assert one_sequence(plan, shape) <= kv_bytes <= in_run
    assert 2 * kv_bytes + 3 * shape.linear_weights // plan.rollout.tensor_parallel < limit
    assert _kv_bytes(recipe, plan=plan, schemes=schemes, shape=None) == recipe.rollout.kv_cache_gb * GIB


def test_on_a_cpu_an_engine_has_the_recipes_kv_cache(tmp_path: Path) -> None:
    recipe = load_recipe("arithmetic-tiny-int8", sets=("rollout.kv_cache_gb=3",))
    plan = build_plan(recipe, run_dir=tmp_path / "run", host=HOST)
    shape = TINY_MODELS[plan.model.builtin].shape
    assert _kv_bytes(recipe, plan=plan, schemes=(Scheme.BF16, Scheme.INT8), shape=shape) == 3 * GIB


def test_half_a_line_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    line = json.dumps({"pair": 0, "scheme": "int8", "tokens": 5, "seconds": 0.5, "processor_s": 0.9})
    file.write_text(f"{line}\n{line[:20]}")
    whole = Measurement(pair=0, scheme=Scheme.INT8, tokens=5, seconds=0.5, processor_s=0.9)
    assert read_lines(str(file), Measurement) == [whole]


def test_shapes_by_name_with_changes() -> None:
    expected = Shapes(hidden=3584, intermediate=18944, heads=28, kv_heads=4, layers=1, batch=16, vocabulary=152_064)
    assert parse_shapes("qwen2.5-7b,layers=1,batch=16") == expected
    assert parse_shapes("qwen2.5-7b,vocabulary=1024").vocabulary == 1024
    assert parse_shapes("qwen2.5-0.5b").vocabulary == 151_936


def test_shapes_count_their_weights() -> None:
    """7B's 28 layers are 6.53e9 weights in its GEMMs, embedding and head 2 x 152,064 x 3,584; two bytes each."""
    assert parse_shapes("qwen2.5-7b,layers=28").weight_bytes == 2 * KNOWN["Qwen/Qwen2.5-7B-Instruct"].weights
    assert parse_shapes("qwen2.5-7b,layers=28").weight_bytes // 10**8 == 152


def test_engines_that_do_not_fit_the_memory_are_refused() -> None:
    shapes, host = parse_shapes("qwen2.5-7b"), dataclasses.replace(HOST, memory_free_bytes=8 * GIB)
    with pytest.raises(PreflightError) as raised:
        _refuse_without_memory(shapes, engines=2, kv_bytes=GIB, host=host)
    assert (raised.value.message, raised.value.hint) == (
        "bench: 2 engines of 6 layers and 152,064 words take 13.3 GiB, this host has 8.0 GiB free",
        "measure fewer layers or words: `layers=1`, or `vocabulary=1024`, which compares the layers alone",
    )
    few = parse_shapes("qwen2.5-7b,vocabulary=1024")
    _refuse_without_memory(few, engines=2, kv_bytes=GIB, host=host)


def test_shapes_report_every_problem() -> None:
    with pytest.raises(RecipeError) as raised:
        parse_shapes("qwen2.5-7b,layer=1,batch=many")
    known = (
        "use qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-7b, qwen2.5-32b, hidden=N, intermediate=N, heads=N, kv_heads=N, "
        "layers=N, vocabulary=N, batch=N, new_tokens=N"
    )
    assert raised.value.problems == [
        ("--shapes qwen2.5-7b,layer=1,batch=many: `layer=1` is not a size", known),
        ("--shapes qwen2.5-7b,layer=1,batch=many: `batch=many` is not a size", known),
    ]


def test_shapes_that_no_engine_takes_are_refused_before_one_starts() -> None:
    text = "hidden=64,intermediate=96,heads=4,kv_heads=3,layers=1,vocabulary=500"
    with pytest.raises(RecipeError) as raised:
        parse_shapes(text)
    assert raised.value.problems == [
        (f"--shapes {text}: kv_heads must divide heads", "use the model's own numbers"),
        (f"--shapes {text}: the prompts are made of words 1 to 500", "use vocabulary=501 or more"),
    ]
    fitting = text.replace("kv_heads=3", "kv_heads=2")
    assert parse_shapes(fitting.replace("500", "501")).vocabulary == 501
    assert parse_shapes(fitting.replace(",vocabulary=500", "")).vocabulary == 1024


def bench(tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    argv = [*BENCH, *options, "--set", f"cluster.run_dir={tmp_path}"]
    return subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_bench_stops_at_preflight_before_an_engine_starts(tmp_path: Path) -> None:
    done = bench(tmp_path, "--set", "model.builtin=null", "--set", "model.path=/nonexistent")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.splitlines() == [
        "error: --set model.path=/nonexistent: model.path: /nonexistent: no such folder",
        "hint: correct the path",
        "error: this plan cannot run here: 1 finding above",
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_bench_refuses_schemes_without_kernels_with_the_reasons(tmp_path: Path) -> None:
    done = bench(tmp_path, "--schemes", "bf16,fp8,fp8-block")
    assert (done.returncode, done.stdout) == (3, "")
    flags = read_host(tmp_path).cpu_flags
    reasons = [why_not(scheme, device="cpu", cpu_flags=flags) for scheme in (Scheme.FP8, Scheme.FP8_BLOCK)]
    assert all(reasons)
    assert done.stderr.splitlines() == [
        f"error: bench: {reasons[0]}; {reasons[1]}",
        "hint: use bf16, int8, int4; an emulated scheme has no speed to compare",
    ]


@pytest.mark.slow
def test_a_scheme_named_twice_is_refused(tmp_path: Path) -> None:
    done = bench(tmp_path, "--schemes", "bf16,int8,bf16")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[0] == "error: --schemes: a scheme is named twice"


class EngineArguments(Exception):
    """Ends the start of an engine with what was asked of it."""


@pytest.mark.engine
@pytest.mark.parametrize("trusted", [False, True])
def test_an_engine_is_asked_for_as_a_run_asks(trusted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe's word on remote code, and BF16 whatever the checkpoint's own dtype is."""
    from appliance.bench import child

    class Recorded(child.LLM):
        def __init__(self, model: str, **arguments: object) -> None:
            raise EngineArguments(model, arguments["trust_remote_code"], arguments["dtype"])

    monkeypatch.setattr(child, "LLM", Recorded)
    sets = ("model.builtin=null", f"model.path={tmp_path}", f"model.trust_remote_code={str(trusted).lower()}")
    recipe = load_recipe("arithmetic-tiny-int8", sets=sets)
    plan = build_plan(recipe, run_dir=tmp_path / "run", host=read_host(tmp_path))
    job = make_job(memory_bytes=None).replace(workload=_recipe_workload(plan))
    with pytest.raises(EngineError) as raised:
        child._engine(job, quantisation=job.engines[0], model_path=job.workload.model_path)
    assert isinstance(raised.value.__cause__, EngineArguments)
    assert raised.value.__cause__.args == (str(tmp_path), trusted, "bfloat16")
