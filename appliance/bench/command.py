"""`appliance bench`: the same rollouts by several schemes, interleaved, in a child; medians, ratios, a verdict."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from appliance import console
from appliance.bench.job import (
    GIB,
    BenchJob,
    EngineFacts,
    Measurement,
    Shapes,
    Workload,
    judge_schemes,
    parse_shapes,
    read_lines,
)
from appliance.errors import PreflightError, RecipeError
from appliance.finding import fault
from appliance.launch.side_job import (
    OF_AN_ENGINE,
    OF_THE_DATA,
    OF_THE_MODEL,
    examine_for,
    make_inputs,
    run_child,
    work_folder,
)
from appliance.plan.bench_results import ResultKey, SchemeResult, key_of_plan, write_result
from appliance.plan.build import installed_versions
from appliance.plan.engines import is_eager, layers_with_experts, quantises_experts
from appliance.plan.host import HostFacts
from appliance.plan.memory import is_estimated, kv_cache_beside
from appliance.plan.model_shape import model_shape
from appliance.preflight.report import plan_in
from appliance.recipe.schema import Recipe
from appliance.record.plan import RunPlan
from appliance.terms.counts import counted
from appliance.terms.devices import PAYS_FROM, why_not
from appliance.terms.environment import PLAN_VARIABLE, THREADS_VARIABLE
from appliance.terms.schemes import Scheme
from appliance.terms.settings import Dtype, Quantisation
from appliance.terms.shapes import ModelShape


def run_bench(
    recipe: Recipe,
    *,
    schemes: tuple[Scheme, ...],
    pairs: int,
    shapes: str | None,
    kv_memory_gb: float | None,
    json_mode: bool,
) -> int:
    """Measure, print, and keep what `auto` may read.

    kv_memory_gb: GiB for weights and KV cache together, per worker; None: the recipe's KV cache beside the weights.
    Raises PreflightError for what this host cannot do, RecipeError for what cannot be compared, EngineError when
    the child fails.
    """
    if len(set(schemes)) < len(schemes):
        raise RecipeError([fault(("--schemes",), "a scheme is named twice", "name each once; the first is the base")])
    parsed = parse_shapes(shapes) if shapes else None
    with work_folder(recipe.cluster.run_dir, command="bench") as folder:
        plan, host = plan_in(folder, recipe)
        _refuse_without_kernels(schemes, plan=plan, host=host)
        of_the_recipe = OF_THE_MODEL | OF_THE_DATA if parsed is None else frozenset()
        examine_for((plan,), recipe=recipe, host=host, about=OF_AN_ENGINE | of_the_recipe)
        env = dict(plan.env)
        if parsed is None:
            make_inputs(plan, command="bench")
        else:
            env |= {THREADS_VARIABLE: str(host.cores)}  # the plan's threads are for the recipe's own model
            if plan.is_cpu:
                kv_bytes = _kv_bytes(recipe, plan=plan, schemes=schemes, shape=None)
                _refuse_without_memory(parsed, engines=len(schemes), kv_bytes=kv_bytes, host=host)
        shape = None if parsed else model_shape(plan.model, weights=plan.weights)
        job = BenchJob(
            workload=parsed.workload if parsed else _recipe_workload(plan),
            engines=tuple(_engine(recipe, scheme=scheme) for scheme in schemes),
            eager=_eager(recipe, schemes=schemes, plan=plan, has_recipes_model=parsed is None),
            dtype=plan.trainer.dtype,
            tensor_parallel=1 if parsed else plan.rollout.tensor_parallel,
            pairs=pairs,
            kv_bytes=_kv_bytes(recipe, plan=plan, schemes=schemes, shape=shape),
            memory_bytes=int(kv_memory_gb * GIB) if kv_memory_gb else None,
            seed=recipe.seed,
            results=str(folder / "results.jsonl"),
            facts=str(folder / "facts.jsonl"),
        )
        measured, facts = _measure(job, folder=folder, env=env)
    verdicts = judge_schemes(measured, schemes=schemes)
    stored_in = _keep(verdicts, job=job, plan=plan, host=host)
    shown = {"verdicts": verdicts, "facts": facts, "stored_in": stored_in}
    console.out(as_json(job, measured=measured, **shown) if json_mode else table(job, **shown))
    return 0


def _refuse_without_kernels(schemes: tuple[Scheme, ...], *, plan: RunPlan, host: HostFacts) -> None:
    reasons = [why_not(scheme, device=plan.cluster.device, cpu_flags=host.cpu_flags) for scheme in schemes]
    if any(reasons):
        able = [s for s in Scheme if not why_not(s, device=plan.cluster.device, cpu_flags=host.cpu_flags)]
        message = "bench: " + "; ".join(filter(None, reasons))
        hint = f"use {', '.join(map(str, able))}; an emulated scheme has no speed to compare"
        raise PreflightError(message, hint=hint)


def _refuse_without_memory(shapes: Shapes, *, engines: int, kv_bytes: int, host: HostFacts) -> None:
    """Refuse engines that do not fit into memory together. Each had its weights in BF16 at first, and holds the head a
    second time, packed by vLLM: 15.7 GB were seen with two of six layers of 7B. Raises PreflightError."""
    packed_head = 2 * shapes.vocabulary * shapes.hidden
    needed, free = engines * (shapes.weight_bytes + packed_head + kv_bytes), host.memory_free_bytes
    if needed > free:
        raise PreflightError(
            f"bench: {counted(engines, 'engine')} of {counted(shapes.layers, 'layer')} "
            f"and {shapes.vocabulary:,} words take "
            f"{needed / GIB:.1f} GiB, this host has {free / GIB:.1f} GiB free",
            hint="measure fewer layers or words: `layers=1`, or `vocabulary=1024`, which compares the layers alone",
        )


def _engine(recipe: Recipe, *, scheme: Scheme) -> Quantisation:
    """Return the plan's quantisation, but for the profile: folded scales are weights like others to a kernel."""
    return Quantisation(
        scheme=scheme,
        ignore=recipe.quantization.ignore if scheme.quantised else (),
        lm_head_fp32=recipe.rollout.lm_head_fp32,
    )


def _kv_bytes(recipe: Recipe, *, plan: RunPlan, schemes: tuple[Scheme, ...], shape: ModelShape | None) -> int:
    """Compute the bytes of the KV cache of each engine, per worker, as in a run: on a GPU what its share of the memory
    leaves. shape: None where the model's sizes are not known, or are not the recipe's; then what a recipe gives an
    engine on a CPU."""
    if shape and is_estimated(plan, shape):
        return kv_cache_beside(plan, shape, schemes=schemes)
    return recipe.rollout.kv_cache_gb * GIB


def _eager(
    recipe: Recipe, *, schemes: tuple[Scheme, ...], plan: RunPlan, has_recipes_model: bool
) -> tuple[Scheme, ...]:
    """Return the schemes that a run of the recipe would have eager engines for."""
    layers = layers_with_experts(plan.weights) if has_recipes_model else 0
    experts = quantises_experts(recipe.quantization.ignore, layers=layers)
    of_plan = {"is_cpu": plan.is_cpu, "one_flow": plan.trainer.one_flow, "experts": experts}
    return tuple(each for each in schemes if is_eager(each, **of_plan))


def _recipe_workload(plan: RunPlan) -> Workload:
    return Workload(
        model_path=plan.weights.name_or_path,
        trust_remote_code=plan.model.trust_remote_code,
        prompts_parquet=plan.task_files.train_parquet,
        num_prompts=plan.batch.prompts_per_step,
        samples_per_prompt=plan.rollout.samples_per_prompt,
        most_at_once=plan.engine.max_concurrent_sequences,
        max_prompt_tokens=plan.task.max_prompt_tokens,
        new_tokens=plan.task.max_response_tokens,
        temperature=plan.rollout.temperature,
        top_p=plan.rollout.top_p,
        top_k=plan.rollout.top_k,
    )


def _measure(job: BenchJob, *, folder: Path, env: dict[str, str]) -> tuple[list[Measurement], list[EngineFacts]]:
    job_file = folder / "job.json"
    job_file.write_text(job.model_dump_json())
    loaded, shown = 0, 0

    def tick() -> None:
        nonlocal loaded, shown
        for engine in read_lines(job.facts, EngineFacts)[loaded:]:
            console.say(f"{engine.scheme}: " + ", ".join(f"{count} x {kernel}" for kernel, count in engine.kernels))
            loaded += 1
        for turn in read_lines(job.results, Measurement)[shown:]:
            console.say(f"pair {turn.pair + 1}/{job.pairs}  {turn.scheme:<11} {turn.tokens_per_s:9.0f} tokens/s")
            shown += 1

    console.say(f"loading {counted(len(job.engines), 'engine')} and warming up")
    env.pop(PLAN_VARIABLE)  # no run's folder to attest in
    run_child(["appliance.bench.child", str(job_file)], command="bench", folder=folder, env=env, tick=tick)
    return read_lines(job.results, Measurement), read_lines(job.facts, EngineFacts)


def _keep(verdicts: list[SchemeResult], *, job: BenchJob, plan: RunPlan, host: HostFacts) -> Path | None:
    """Keep the result where it may count; says why where it does not."""
    workload, shapes = job.workload, job.workload.shapes
    key = key_of_plan(plan, host=host)
    model = "the recipe's model"
    if shapes:
        key = dataclasses.replace(key, shapes=shapes.model.layer_slug, tensor_parallel=job.tensor_parallel)
        model = f"random weights, {counted(shapes.layers, 'layer')}, {shapes.vocabulary:,} words"
    if why := _why_not_kept(key, plan=plan, host=host, job=job):
        console.say(f"not kept for `auto`: {why}")
        return None
    return write_result(
        key,
        cache_dir=Path(plan.cache_dir),
        results=tuple(verdicts[1:]),
        measurement=f"bench of {model}, batch {workload.sequences}, {counted(workload.new_tokens, 'new token')}",
        pairs=job.pairs,
        kv_memory_bytes=job.memory_bytes,
    )


def _why_not_kept(key: ResultKey, *, plan: RunPlan, host: HostFacts, job: BenchJob) -> str:
    """Return the reason why a result would not be what its key says to `auto`, or an empty text."""
    installed = installed_versions()
    other = [name for name, version in key.versions if installed.get(name) != version]
    if job.schemes[0] is not Scheme.BF16:
        return "the base of the comparison is not bf16"
    if len(job.schemes) < 2:
        return "nothing was compared with bf16"
    if job.dtype is not Dtype.BF16:
        return f"these engines are in {job.dtype}, and `auto` chooses for BF16's"
    if plan.trainer.one_flow:
        return "trainer.forward: rollout has engines of its own, and `auto` chooses for the usual ones"
    if other:
        return f"{', '.join(other)}: installed in another version than runs use"
    if any(engine.ignore for engine in job.engines):
        return "quantization.ignore leaves layers in BF16"
    if any(engine.lm_head_fp32 for engine in job.engines):
        return "with rollout.lm_head_fp32 every engine differs from the usual ones"
    if not plan.is_cpu and not host.gpus_of(plan.cluster.device):
        return f"it was not measured on `{plan.cluster.device}`"
    return ""


def table(job: BenchJob, *, verdicts: list[SchemeResult], facts: list[EngineFacts], stored_in: Path | None) -> str:
    """Render one line per scheme, then one sentence per scheme but the base: whether it pays."""
    ratio = f"ratio to {job.schemes[0]} (median of {counted(job.pairs, 'interleaved pair')}, min-max)"
    rows = [
        (
            str(verdict.scheme),
            f"{verdict.tokens_per_s:.0f}",
            _size(engine.weight_bytes),
            _size(engine.kv_bytes),
            f"{min(engine.sequences, job.workload.sequences)} of {job.workload.sequences}",
            f"{verdict.ratio:.2f} ({verdict.ratio_min:.2f}-{verdict.ratio_max:.2f})",
        )
        for verdict, engine in zip(verdicts, facts, strict=True)
    ]
    head = ("scheme", "tokens/s", "weights", "KV cache", "at once", ratio)
    lines = [console.table(rows, head=head, numbers=range(1, 5), columns=console.columns())]
    lines += [_sentence(verdict, base=verdicts[0]) for verdict in verdicts[1:]]
    if job.memory_bytes:
        lines.append(f"each engine had {_size(job.memory_bytes)} a worker for weights and KV cache together")
    if stored_in:
        lines.append(f"kept: {stored_in}")
    return "\n".join(lines)


def _sentence(verdict: SchemeResult, *, base: SchemeResult) -> str:
    verdict_text = "pays" if verdict.ratio >= PAYS_FROM else "does not pay"
    speeds = f"{verdict.tokens_per_s:.0f} against {base.tokens_per_s:.0f} tokens/s"
    return (
        f"{verdict.scheme} {verdict_text} here for these rollouts: {verdict.ratio:.2f} times {base.scheme} ({speeds}; "
        f"it pays from {PAYS_FROM} on)"
    )


def as_json(
    job: BenchJob,
    *,
    verdicts: list[SchemeResult],
    facts: list[EngineFacts],
    measured: list[Measurement],
    stored_in: Path | None,
) -> str:
    return json.dumps(
        {
            "schema_version": 1,
            "workload": job.workload.model_dump(mode="json"),
            "pairs": job.pairs,
            "base": str(job.schemes[0]),
            "memory_bytes": job.memory_bytes,
            "schemes": [{**dataclasses.asdict(verdict), "pays": verdict.ratio >= PAYS_FROM} for verdict in verdicts],
            "engines": [{**each.model_dump(mode="json"), "kernels": dict(each.kernels)} for each in facts],
            "measurements": [each.model_dump(mode="json") for each in measured],
            "kept": str(stored_in) if stored_in else None,
        }
    )


def _size(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB // 10 else f"{size / (1 << 20):.1f} MiB"
