"""`appliance verify`: serve, change the weights, see the logits move, put them back, see them return. One child per
scheme, one after the other: an engine that dies takes nothing with it, and only one is in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from appliance import console
from appliance.errors import EngineError, PreflightError
from appliance.launch.side_job import (
    OF_A_PROFILE,
    OF_AN_ENGINE,
    OF_THE_MODEL,
    examine_for,
    make_inputs,
    run_child,
    work_folder,
)
from appliance.plan.host import HostFacts
from appliance.preflight.probes import read_host
from appliance.preflight.report import plan_in
from appliance.profile.job import find_profile, job_of_plan
from appliance.recipe.rules import Needs
from appliance.recipe.schema import Recipe
from appliance.record.lines import finite
from appliance.record.plan import RunPlan
from appliance.terms.counts import counted
from appliance.terms.devices import why_not
from appliance.terms.environment import IN_ONE_PROCESS, PLAN_VARIABLE, THREADS_VARIABLE
from appliance.terms.schemes import Scheme
from appliance.terms.settings import Quantisation
from appliance.verify.job import CheckResult, Row, VerifyJob, judge_engine, label

CHILD = "appliance.verify.child"
_LEAST_PROMPT_TOKENS, _MOST_PROMPT_TOKENS = 2, 24  # the first one has no log-prob that could move
_MOST_NEW_TOKENS = 16


def run_verify(recipe: Recipe, *, schemes: tuple[Scheme, ...] | None, emulate: bool, json_mode: bool) -> int:
    """Check each scheme and print a table. schemes: None takes the recipe's.

    emulate: FP8 by rounding in float, where the recipe does not ask for it.
    Raises PreflightError for what this host cannot do, EngineError when a worker is not what it should be.
    """
    with work_folder(recipe.cluster.run_dir, command="verify") as folder:
        host = read_host(folder)
        plans = _plans(folder, recipe, schemes=schemes, emulate=emulate, host=host)
        plan, engines = plans[0], _engines_of(plans)
        _refuse_without_kernels([each for each, _ in engines], plan=plan, host=host)
        examine_for(plans, recipe=recipe, host=host, about=OF_THE_MODEL | OF_A_PROFILE | OF_AN_ENGINE)
        if plan.weights.is_cached or plan.weights.is_pinned:
            make_inputs(plan, command="verify")
        rows, reference = [], None
        eager = any(plan.engine.eager for plan in plans)  # all alike: they are compared
        for quantisation, own_plan in engines:
            if quantisation.profile:  # the one that is there, in place of the one that a run would have in its folder
                quantisation = quantisation.replace(profile=str(_profile(own_plan) or ""))
            seen = _look(quantisation, plan=plan, eager=eager, host=host, folder=folder)
            rows += judge_engine(quantisation, seen=seen, reference=reference)
            reference = reference if quantisation.scheme.quantised else seen.first
    console.out(as_json(rows) if json_mode else table(rows, columns=console.columns()))
    if failed := [row for row in rows if row.problems]:
        workers = counted(len(rows), "worker")
        message = f"verify: {len(failed)} of {workers} failed: {label(failed[0])}: {failed[0].problems[0]}"
        raise EngineError(message, hint="do not train with this engine; all problems are above")
    return 0


def _plans(
    folder: Path, recipe: Recipe, *, schemes: tuple[Scheme, ...] | None, emulate: bool, host: HostFacts
) -> list[RunPlan]:
    """Return the plans of the command line's schemes. Rules about keys as they were typed were judged of the recipe
    itself."""
    recipes = _recipes(recipe, schemes=schemes, emulate=emulate)
    return [plan_in(folder, each, host=host, least=Needs.PLAN)[0] for each in recipes]


def _recipes(recipe: Recipe, *, schemes: tuple[Scheme, ...] | None, emulate: bool) -> Iterator[Recipe]:
    """Yield the recipe as the command line has it; with `schemes` one for each, as a run in that scheme would have
    it."""
    emulated = emulate or recipe.quantization.emulate
    quantization = recipe.quantization.model_copy(update={"emulate": emulated})
    for scheme in schemes or (None,):
        change = {} if scheme is None else {"scheme": scheme, "replicas": None}
        rollout = recipe.rollout.model_copy(update=change)
        yield recipe.model_copy(update={"rollout": rollout, "quantization": quantization})


def _engines_of(plans: list[RunPlan]) -> tuple[tuple[Quantisation, RunPlan], ...]:
    """Return the quantisation that each engine is started with, and the plan that sets it. BF16 first: the others are
    compared with it. Each once."""
    head_fp32 = plans[0].rollout.lm_head_fp32
    plan_of = {Quantisation(scheme=Scheme.BF16, lm_head_fp32=head_fp32): plans[0]}
    for plan in plans:
        plan_of |= {quantisation: plan for quantisation in plan.engines if quantisation.scheme.quantised}
    return tuple(plan_of.items())


def _profile(plan: RunPlan) -> Path | None:
    """Return the profile that a run would use: the recipe's, else the one in the cache, where one has been made."""
    assert plan.profile is not None, "an engine of the plan has one"
    folder = Path(plan.profile.source) if plan.profile.source else find_profile(job_of_plan(plan))
    if folder is None:
        console.say(
            f"{plan.profile.scheme}: the run's profile is not made yet (`appliance profile` makes it): the engine is "
            "checked without one"
        )
    return folder


def _refuse_without_kernels(asked: list[Quantisation], *, plan: RunPlan, host: HostFacts) -> None:
    reasons = [why_not(e.scheme, device=plan.cluster.device, cpu_flags=host.cpu_flags) for e in asked if not e.emulated]
    if any(reasons):
        message = "verify: " + "; ".join(filter(None, reasons))
        raise PreflightError(
            message, hint="leave that scheme out, or check the numbers of an FP8 scheme with --emulate"
        )


def _look(quantisation: Quantisation, *, plan: RunPlan, eager: bool, host: HostFacts, folder: Path) -> CheckResult:
    job_file, result_file = folder / "job.json", folder / "result.json"
    job = VerifyJob(
        model=plan.weights.name_or_path,
        trust_remote_code=plan.model.trust_remote_code,
        quantisation=quantisation,
        dtype=plan.trainer.dtype,
        tensor_parallel=plan.rollout.tensor_parallel,
        enforce_eager=eager,
        prompt_tokens=min(max(_LEAST_PROMPT_TOKENS, plan.task.max_prompt_tokens), _MOST_PROMPT_TOKENS),
        new_tokens=min(plan.task.max_response_tokens, _MOST_NEW_TOKENS),
        seed=plan.seed,
        result=str(result_file),
    )
    job_file.write_text(job.model_dump_json())
    console.say(f"{label(quantisation)}: starting an engine, then three weight updates")
    env = {name: value for name, value in plan.env if name != PLAN_VARIABLE}  # no run's folder to attest in
    env |= IN_ONE_PROCESS  # a separate core may begin before all prompts have come: another batch, other last bits
    if plan.is_cpu and job.tensor_parallel > 1:  # here nothing takes turns with the workers but themselves
        env[THREADS_VARIABLE] = str(max(1, host.cores // job.tensor_parallel))
    try:
        run_child([CHILD, str(job_file)], command="verify", folder=folder, env=env)
    except EngineError as error:  # an engine that died is a row like others
        return CheckResult(failed=f"{error.message} ({error.hint})" if error.hint else error.message)
    return CheckResult.model_validate_json(result_file.read_bytes())


_HEAD = ("scheme", "worker", "moved by", "layers moved", "returned", "from bf16", "verdict", "kernels")


def table(rows: list[Row], *, columns: int | None = None) -> str:
    """Render a line per worker, then a line per problem. columns: as for console.table."""
    problems = [
        f"{label(row)}{f' worker {row.worker.rank}' if row.worker else ''}: {problem}"
        for row in rows
        for problem in row.problems
    ]
    return "\n".join([console.table(map(_cells, rows), head=_HEAD, columns=columns), *problems])


def _cells(row: Row) -> tuple[str, ...]:
    verdict = "FAILED" if row.problems else "live"
    if row.worker is None:
        return label(row), "-", "-", "-", "-", "-", verdict, "-"
    worker = row.worker
    return (
        label(row),
        str(worker.rank),
        _nats(row.moved),
        f"{worker.layers - len(worker.unmoved)} of {worker.layers}",
        "bit for bit" if row.returned and not worker.unreturned else "no",
        _nats(row.from_bf16),
        verdict,
        "; ".join(f"{count} x {name}" for name, count in worker.kernels),
    )


def _nats(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g} nats"


def as_json(rows: list[Row]) -> str:
    return json.dumps(
        {"schema_version": 1, "live": not any(row.problems for row in rows), "workers": [*map(_plain, rows)]}
    )


def _plain(row: Row) -> dict[str, object]:
    """Return a flat object per worker; nats, null for what is no number, and names of layers."""
    worker = {"rank": None, "kernels": {}, "layers": 0, "unmoved": [], "unreturned": []}
    if row.worker:
        worker |= {**row.worker.model_dump(mode="json"), "kernels": dict(row.worker.kernels)}
    return worker | {
        "scheme": str(row.scheme),
        "emulated": row.emulated,
        "moved": finite(row.moved),
        "returned": row.returned,
        "from_bf16": finite(row.from_bf16),
        "problems": list(row.problems),
    }
