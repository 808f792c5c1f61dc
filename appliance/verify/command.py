"""`appliance verify`: serve, change the weights, see the logits move, put them back, see them return.

One child per scheme, one after the other: an engine that dies takes nothing with it, and memory holds one at a time.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from appliance import console
from appliance.errors import EngineError, PreflightError
from appliance.plan.build import build_plan
from appliance.plan.env import PLAN_VARIABLE, THREADS_VARIABLE
from appliance.plan.host import HostFacts
from appliance.plan.model import RunPlan
from appliance.preflight.probes import read_host
from appliance.profile.found import find_profile
from appliance.profile.job import job_of_plan
from appliance.quant.device import CPU, why_not
from appliance.quant.files import read_file_header
from appliance.quant.scheme import Scheme
from appliance.quant.settings import Quantisation
from appliance.recipe.schema import Recipe
from appliance.run.child import make_inputs, run_child
from appliance.verify.job import Job, Said, Seen, read_seen
from appliance.verify.judge import Row, judge, label
from appliance.verify.show import as_json, table

CHILD = "appliance.verify.child"
_MOST_PROMPT_TOKENS = 24
_MOST_NEW_TOKENS = 16


def run_verify(recipe: Recipe, *, schemes: tuple[Scheme, ...] | None, emulate: bool, json_mode: bool) -> int:
    """Check each scheme and print a table. schemes: None takes the recipe's.

    emulate: FP8 by rounding in float, where the recipe does not ask for it.
    Raises PreflightError for a scheme without kernels here, EngineError when a worker is not what it should be.
    """
    root = Path(recipe.cluster.run_dir).expanduser().absolute()
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=".verify-") as folder:
        host = read_host(root)
        plan = build_plan(recipe, run_dir=Path(folder), host=host)
        asked = _asked(recipe, plan=plan, schemes=schemes, emulate=emulate)
        _refuse_without_kernels(asked, plan=plan, host=host)
        if plan.model.builtin:
            make_inputs(plan, command="verify")
        rows, reference = [], None
        for each in _with_profile(asked, profile=_profile(plan, asked=asked)):
            seen = _look(each, plan=plan, host=host, folder=Path(folder))
            rows += judge(each, seen=seen, reference=reference)
            reference = _reference(each, seen=seen, before=reference)
    console.out((as_json if json_mode else table)(rows))
    _raise_on_problems(rows)
    return 0


def _asked(
    recipe: Recipe, *, plan: RunPlan, schemes: tuple[Scheme, ...] | None, emulate: bool
) -> tuple[Quantisation, ...]:
    """BF16 first: the others are compared with it. Each once."""
    planned = list(plan.rollout.replicas)
    if schemes is not None:
        emulated = emulate or recipe.quantization.emulate
        like = {each.scheme: each for each in planned}
        other = Quantisation(Scheme.BF16, ignore=recipe.quantization.ignore, lm_head_fp32=recipe.rollout.lm_head_fp32)
        planned = [
            replace(like.get(scheme, other), scheme=scheme, emulated=emulated and scheme.is_fp8) for scheme in schemes
        ]
    reference = Quantisation(Scheme.BF16, lm_head_fp32=recipe.rollout.lm_head_fp32)
    quantised = (each for each in planned if each.scheme.quantised)
    return tuple(dict.fromkeys((reference, *quantised)))


def _profile(plan: RunPlan, *, asked: tuple[Quantisation, ...]) -> Path | None:
    """The profile that a run would use: the recipe's, else the one in the cache, where one has been made."""
    if plan.profile is None or not any(each.profile for each in asked):
        return None
    found = Path(plan.profile.source) if plan.profile.source else find_profile(job_of_plan(plan))
    if found is None:
        console.say("the run's profile is not made yet (`appliance profile` makes it): engines are checked without one")
    return found


def _with_profile(asked: tuple[Quantisation, ...], *, profile: Path | None) -> tuple[Quantisation, ...]:
    """What was planned, with the profile that is there in place of the one that a run would have in its folder."""
    kept = tuple(read_file_header(profile)["suggested_ignore"]) if profile else ()
    return tuple(
        replace(each, profile=str(profile or ""), ignore=tuple(dict.fromkeys((*each.ignore, *kept))))
        if each.profile
        else each
        for each in asked
    )


def _refuse_without_kernels(asked: tuple[Quantisation, ...], *, plan: RunPlan, host: HostFacts) -> None:
    reasons = [why_not(e.scheme, device=plan.device, cpu_flags=host.cpu_flags) for e in asked if not e.emulated]
    if any(reasons):
        message = "verify: " + "; ".join(filter(None, reasons))
        raise PreflightError(message, hint="leave it out, or check the numbers of an FP8 scheme with --emulate")


def _look(asked: Quantisation, *, plan: RunPlan, host: HostFacts, folder: Path) -> Seen:
    job_file, seen_file = folder / "job.json", folder / "seen.json"
    job = Job(
        model=plan.model.path,
        trust_remote_code=plan.model.trust_remote_code,
        quantisation=asked,
        tensor_parallel=plan.rollout.tensor_parallel,
        enforce_eager=plan.device == CPU,
        prompt_tokens=min(plan.task.max_prompt_tokens, _MOST_PROMPT_TOKENS),
        new_tokens=min(plan.task.max_response_tokens, _MOST_NEW_TOKENS),
        seed=plan.seed,
        seen=str(seen_file),
    )
    job_file.write_text(job.to_json())
    console.say(f"{label(asked.scheme, emulated=asked.emulated)}: an engine, and three weight updates")
    env = {name: value for name, value in plan.env if name != PLAN_VARIABLE}  # no run's folder to attest in
    if plan.device == CPU and job.tensor_parallel > 1:  # here nothing takes turns with the workers but themselves
        env[THREADS_VARIABLE] = str(max(1, host.cores // job.tensor_parallel))
    run_child([CHILD, str(job_file)], command="verify", folder=folder, env=env)
    return read_seen(seen_file)


def _reference(asked: Quantisation, *, seen: Seen, before: Said | None) -> Said | None:
    return before if asked.scheme.quantised else seen.first


def _raise_on_problems(rows: list[Row]) -> None:
    failed = [row for row in rows if row.problems]
    if failed:
        first = failed[0]
        message = (
            f"verify: {len(failed)} of {len(rows)} workers failed: {label(first.scheme, emulated=first.emulated)}: "
        )
        raise EngineError(message + first.problems[0], hint="do not train with this engine; all problems are above")
