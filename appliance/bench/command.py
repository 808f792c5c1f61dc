"""`appliance bench`: the same rollouts by several schemes, interleaved, in a child; medians, ratios, a verdict."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from appliance import console
from appliance.bench.job import (
    PROMPT_TOKENS,
    Job,
    Measurement,
    Shapes,
    Verdict,
    Workload,
    judge,
    parse_shapes,
    read_measurements,
)
from appliance.errors import EngineError, Interrupted, PreflightError
from appliance.plan.build import build_plan
from appliance.plan.env import PLAN_VARIABLE, THREADS_VARIABLE
from appliance.plan.model import RunPlan
from appliance.preflight.probes import read_host
from appliance.quant.scheme import Scheme
from appliance.recipe.schema import Recipe
from appliance.tasks.prepare import is_prepared

PAYS_FROM = 1.05  # below this a median ratio is within what these measurements scatter


def run_bench(recipe: Recipe, *, schemes: tuple[Scheme, ...], pairs: int, shapes: str | None, json_mode: bool) -> int:
    """Measure and print. Raises PreflightError for a scheme without kernels here, EngineError when the child fails."""
    not_here = [str(scheme) for scheme in schemes if scheme.is_fp8]
    if not_here:
        raise PreflightError(f"bench: this host has no kernels for {', '.join(not_here)}", hint="use bf16 and int8")
    parsed = parse_shapes(shapes) if shapes else None
    root = Path(recipe.cluster.run_dir).absolute()
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=".bench-") as folder:
        host = read_host(root)
        plan = build_plan(recipe, run_dir=Path(folder), host=host)
        env = dict(plan.env)
        if parsed is None:
            _prepare(plan)
        else:
            env |= {THREADS_VARIABLE: str(host.cores)}  # the plan's threads are for the recipe's own model
        workload = _shapes_workload(parsed) if parsed else _recipe_workload(plan)
        job = Job(
            workload=workload,
            schemes=schemes,
            pairs=pairs,
            kv_cache_gb=recipe.rollout.kv_cache_gb,
            seed=recipe.seed,
            results=str(Path(folder) / "results.jsonl"),
        )
        measured = _measure(job, folder=Path(folder), env=env)
    _show(job, judge(measured, schemes=schemes), measured=measured, json_mode=json_mode)
    return 0


def _shapes_workload(shapes: Shapes) -> Workload:
    return Workload(
        model_path="",
        prompts_parquet="",
        num_prompts=shapes.batch,
        samples_per_prompt=1,
        max_prompt_tokens=PROMPT_TOKENS,
        new_tokens=shapes.new_tokens,
        temperature=1.0,
        top_p=1.0,
        shapes=shapes,
    )


def _recipe_workload(plan: RunPlan) -> Workload:
    return Workload(
        model_path=plan.model.path,
        prompts_parquet=plan.task.train_parquet,
        num_prompts=plan.prompts_per_step,
        samples_per_prompt=plan.rollout.samples_per_prompt,
        max_prompt_tokens=plan.task.max_prompt_tokens,
        new_tokens=plan.task.max_response_tokens,
        temperature=plan.rollout.temperature,
        top_p=plan.rollout.top_p,
        shapes=None,
    )


def _prepare(plan: RunPlan) -> None:
    """Model and data of the recipe, made as `train` makes them when the cache has them not."""
    if is_prepared(plan):
        return
    console.say("making the recipe's model and data (kept for later)")
    plan_file = Path(plan.run_dir) / "plan.json"
    plan.write(plan_file)
    _child(["appliance.tasks.prepare", str(plan_file)], folder=Path(plan.run_dir), env=dict(plan.env))


def _measure(job: Job, *, folder: Path, env: dict[str, str]) -> list[Measurement]:
    job_file = folder / "job.json"
    job_file.write_text(job.to_json())
    shown = 0

    def tick() -> None:
        nonlocal shown
        for each in read_measurements(Path(job.results))[shown:]:
            console.say(f"pair {each.pair + 1}/{job.pairs}  {each.scheme:<6} {each.tokens_per_s:9.0f} tokens/s")
            shown += 1

    console.say(f"loading {len(job.schemes)} engines and warming up")
    env.pop(PLAN_VARIABLE)  # no run's folder to attest in
    _child(["appliance.bench.measure", str(job_file)], folder=folder, env=env, tick=tick)
    return read_measurements(Path(job.results))


def _child(module: list[str], *, folder: Path, env: dict[str, str], tick=lambda: None) -> None:
    """Run a module of ours; on failure keep its log beside the caches and raise EngineError that names it."""
    log = folder / "child.log"
    with log.open("wb") as out, _signals_end_us():
        process = subprocess.Popen(
            [sys.executable, "-m", *module],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | env,
            start_new_session=True,  # a group of its own: an engine may have processes of its own
        )
        try:
            while process.poll() is None:
                time.sleep(0.2)
                tick()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    tick()
    if process.returncode:
        kept = folder.parent / "bench-failed.log"
        log.replace(kept)
        raise EngineError(f"bench: {module[0]} ended with code {process.returncode}", hint=f"its log: {kept}")


@contextlib.contextmanager
def _signals_end_us() -> Iterator[None]:
    """SIGTERM inside the block raises Interrupted, so that what was begun is cleaned up, as it is after Ctrl-C."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Interrupted("stopped by SIGTERM")

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _show(job: Job, verdicts: list[Verdict], *, measured: list[Measurement], json_mode: bool) -> None:
    if json_mode:
        console.out(
            json.dumps(
                {
                    "schema_version": 1,
                    "workload": dataclasses.asdict(job.workload),
                    "pairs": job.pairs,
                    "base": str(job.schemes[0]),
                    "schemes": [dataclasses.asdict(verdict) for verdict in verdicts],
                    "measurements": [dataclasses.asdict(each) for each in measured],
                }
            )
        )
        return
    base = job.schemes[0]
    console.out(f"{'scheme':<8} {'tokens/s':>10}   ratio to {base} (median of {job.pairs} interleaved pairs, min-max)")
    for v in verdicts:
        console.out(f"{v.scheme:<8} {v.tokens_per_s:>10.0f}   {v.ratio:.2f} ({v.ratio_min:.2f}-{v.ratio_max:.2f})")
    for v in verdicts[1:]:
        pays = "pays" if v.ratio >= PAYS_FROM else "does not pay"
        console.out(f"{v.scheme} {pays} here for these rollouts: {v.ratio:.2f} times {base}")
