"""Preflight from end to end: plan, read, judge. And the plan with its findings, as text or as JSON."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from appliance import console, hub
from appliance.errors import RecipeError
from appliance.finding import Finding, finding_lines, findings_as_json
from appliance.plan.build import OriginalPlan, build_plan, planned_recipe, resolve
from appliance.plan.host import HostFacts
from appliance.plan.model_shape import model_shape
from appliance.plan.model_source import hub_name
from appliance.plan.rules import RULES as OF_PLAN
from appliance.plan.rules import judge_plan, knows_device
from appliance.preflight.checks import estimates
from appliance.preflight.checks import judge as judge_host
from appliance.preflight.inputs import InputFacts, look_at_inputs, model_bytes, read_inputs
from appliance.preflight.probes import read_host
from appliance.recipe.load import TypedRecipe, in_order, read_recipe, to_plain, to_yaml
from appliance.recipe.rules import Needs, Rule, judge
from appliance.recipe.schema import Recipe
from appliance.recipe.text import full_path
from appliance.record.plan import Choice, RunPlan
from appliance.tasks.library import task_of
from appliance.terms.counts import counted

# Heading -> the sections of a recipe whose choices stand below it; what no other names is of training.
_GROUPS = {
    "Rollouts": ("rollout", "engine", "quantization", "sync", "cluster"),
    "Training": (),
    "Guard and checkpoints": ("guard", "checkpoint"),
}
_NARROWEST = 40  # columns of a reason beside its choice; where a terminal has fewer it stands below
_LONGEST_VALUE = 28


def load_judged(name_or_path: str, *, sets: Iterable[str] = (), for_this_host: bool = True) -> Recipe:
    """Load the recipe of a command as load_recipe does. Raises RecipeError with everything that is wrong with it, and
    with the errors that it has by its model and this host, as far as they show without a child or the network.

    for_this_host: whether it is to run here, so that what this host lacks counts.
    """
    typed = read_recipe(name_or_path, sets=sets)
    if typed.faults:
        errors = [*typed.faults, *(finding for finding in _look_at(typed, for_this_host) if finding.is_error)]
        raise RecipeError(in_order(errors, file=typed.file))
    return typed.recipe


def _look_at(typed: TypedRecipe, for_this_host: bool) -> list[Finding]:
    """Judge a recipe that has faults by its plan, and by what can be read of this host."""
    recipe, run_dir = typed.recipe, run_dir_of(typed.recipe)
    host = read_host(run_dir.parent)
    plan = resolve(recipe, run_dir=run_dir, host=host)
    inputs = [look_at_inputs(plan)] if for_this_host else []
    return judge(RULES, recipe, plan, host, *inputs, unreadable=typed.unreadable)


def run_dir_of(recipe: Recipe) -> Path:
    """Return the folder of a run of the recipe's own name, below a folder that can be."""
    return full_path(planned_recipe(recipe).cluster.run_dir) / recipe.name


def examine(
    recipe: Recipe,
    *,
    run_dir: Path,
    ask_hub: bool,
    run_code: bool = True,
    cache_dir: Path | None = None,
    resume_from: Path | None = None,
    original: OriginalPlan | None = None,
    commit: str | None = None,
    data_commit: str | None = None,
    date: str | None = None,
    find_profile: Callable[[RunPlan], Path | None] = lambda plan: None,
) -> tuple[RunPlan, HostFacts, list[Finding]]:
    """Make the plan of a run and every finding about it: the faults of its recipe, and what this host has against it.
    Where the recipe has a fault, the inputs are read without a child process and without the network.

    run_dir: absolute.  ask_hub, run_code: as read_inputs; where no code runs, weights are not read either.
    cache_dir: None: beside the run's folder.  resume_from, original: as of resolve.
    commit, data_commit: of the recipe's model and `task.data` on the hub, from whoever has asked for it; None: the hub
    is asked where it may be.  date: as of resolve.
    find_profile: the folder of a profile that was made for the same plan before.
    """
    host = read_host(run_dir.parent)
    plan = resolve(
        recipe,
        run_dir=run_dir,
        host=host,
        cache_dir=cache_dir,
        resume_from=resume_from,
        original=original,
        commit=_commit(recipe, original=original, ask_hub=ask_hub) if commit is None else commit,
        data_commit=_data_commit(recipe, original=original, ask_hub=ask_hub) if data_commit is None else data_commit,
        date=date,
    )
    if judge_plan(recipe, plan, host=host):
        inputs = look_at_inputs(plan)
    else:
        profile = find_profile(plan)
        inputs = read_inputs(
            plan, ask_hub=ask_hub, run_code=run_code, read_weights=run_code, host=host, made_profile=profile
        )
    return plan, host, judge(RULES, recipe, plan, host, inputs)


def _on_this_host(recipe: Recipe, plan: RunPlan, host: HostFacts, inputs: InputFacts) -> list[Finding]:
    """Run the checks of this host. They are one rule because they depend on each other: those of the device are left
    out together where the plan is for another one than the recipe means, and what is slow is reported by one of two."""
    return judge_host(plan, host=host, inputs=inputs, knows_device=knows_device(recipe, host))


RULES = (*OF_PLAN, Rule(_on_this_host, Needs.INPUTS))
"""All rules: of the recipe, of its plan, and of this host."""


def _commit(recipe: Recipe, *, original: OriginalPlan | None, ask_hub: bool) -> str:
    """Return the commit of the recipe's model on the hub; empty where it has none or nobody asks. A tag or a branch
    that the recipe names stays what it was when the run began."""
    name, revision = hub_name(recipe), recipe.model.revision or ""
    if original and original.commit and revision and (original.model, original.revision) == (name, revision):
        return original.commit
    return hub.revision(name, requested=revision)[0] if name and ask_hub else ""


def _data_commit(recipe: Recipe, *, original: OriginalPlan | None, ask_hub: bool) -> str:
    """Return the commit of `task.data`; empty where there is none, nobody asks, or the run keeps the one that it began
    with."""
    name = recipe.task.data or ""
    return hub.data_commit(name) if name and ask_hub and not (original and original.data == name) else ""


def plan_in(
    folder: Path,
    recipe: Recipe,
    *,
    host: HostFacts | None = None,
    cache_dir: Path | None = None,
    least: Needs = Needs.RECIPE,
) -> tuple[RunPlan, HostFacts]:
    """Make the plan of a command that is no training, for its work in a folder, with the commits that `model.revision`
    and `task.data` are, where they are named and the hub knows them. host: None: it is read.  cache_dir, least: as
    for build_plan, whose errors it raises."""
    host = host or read_host(folder)
    name, wanted = hub_name(recipe), recipe.model.revision
    commit = hub.revision(name, requested=wanted)[0] if name and wanted else ""
    of_the_data = _data_commit(recipe, original=None, ask_hub=True)
    commits = {"commit": commit, "data_commit": of_the_data}
    return build_plan(recipe, run_dir=folder, host=host, cache_dir=cache_dir, least=least, **commits), host


def print_plan(plan: RunPlan, *, recipe: Recipe, findings: list[Finding], json_mode: bool, full: bool = False) -> None:
    """Print a plan on stdout, with its findings. full: with the resolved recipe and the child."""
    if json_mode:
        document = {"schema_version": 1, "recipe": to_plain(recipe), "plan": plan.model_dump(mode="json")}
        console.out(json.dumps({**document, "findings": findings_as_json(findings)}, indent=2))
        return
    needs = estimates(plan, model_bytes=model_bytes(plan), shape=model_shape(plan.model, weights=plan.weights))
    text, columns = to_yaml(recipe) if full else "", console.columns()
    console.show(plan_text(plan, needs=needs, findings=finding_lines(findings), recipe_yaml=text, columns=columns))


def plan_text(
    plan: RunPlan,
    *,
    needs: Sequence[tuple[str, str]],
    findings: Sequence[str] = (),
    recipe_yaml: str = "",
    columns: int | None = None,
) -> str:
    """Render a plan. needs: (what, how much) estimates.  findings: lines.  columns: of a terminal; None: one line for
    each thing.

    recipe_yaml: the resolved recipe; given, it is shown with the child, at the end, a command line that a shell reads.
    """
    data_commit = plan.task_files.commit
    files = {
        "run folder": plan.run_dir,
        "model": plan.weights.name_or_path,
        "model commit": f"{plan.weights.commit} of {plan.weights.hub_name}" if plan.weights.commit else "",
        "data commit": f"{data_commit} of {plan.task.data}" if data_commit else "",
        "training data": plan.task_files.train_parquet,
        "validation data": plan.task_files.val_parquet,
    }
    parts = [
        [_headline(plan), f"{plan.task.kind}: {task_of(plan.task, files=plan.task_files).describe}"],
        *_decided(plan.choices, columns=columns),
        ["Needs, estimated", *_pairs(needs, columns=columns)],
        ["Files", *_pairs([(what, path) for what, path in files.items() if path], columns=None)],
    ]
    if findings:
        parts.append(["Findings on this host", *findings])
    if recipe_yaml:
        parts += [["Recipe, resolved", recipe_yaml.rstrip()], ["Child", *_child(plan)]]
    else:
        parts.append(["`appliance plan RECIPE --full` adds the resolved recipe and the exact child."])
    return "\n\n".join("\n".join(part) for part in parts)


def _headline(plan: RunPlan) -> str:
    cluster = plan.cluster
    gpus = f"{cluster.gpus_per_node} x {cluster.device}"
    gpus += f" on each of {cluster.nodes} nodes" if cluster.nodes > 1 else ""
    emulated = ", emulated" if plan.emulates else ""
    samples = counted(plan.rollout.samples_per_prompt, "sample")
    steps, prompts = counted(plan.trainer.steps, "step"), counted(plan.batch.prompts_per_step, "prompt")
    backward = f"; gradients in fp8-block{emulated}" if plan.trainer.fp8_backward else ""
    rollouts = f"rollouts in {plan.rollout.label}{emulated}{backward}"
    return f"{plan.name}: {steps} of {prompts} x {samples}; {rollouts}; {plan.correction_text}; {gpus}"


def _decided(choices: Sequence[Choice], *, columns: int | None) -> Iterator[list[str]]:
    """Yield a heading and its choices, for each group that has some."""
    key_width = max(len(choice.key) for choice in choices)
    value_width = min(_LONGEST_VALUE, max(len(choice.value) for choice in choices))
    grouped: dict[str, list[str]] = {heading: [] for heading in _GROUPS}
    for choice in choices:
        section = choice.key.partition(".")[0]
        heading = next((name for name, sections in _GROUPS.items() if section in sections), "Training")
        begin = f"  {choice.key:<{key_width}}  {choice.value:<{value_width}}  "
        grouped[heading] += _wrapped(begin, choice.why, columns=columns)
    yield from ([heading, *lines] for heading, lines in grouped.items() if lines)


def _pairs(pairs: Sequence[tuple[str, str]], *, columns: int | None) -> Iterator[str]:
    width = max(len(what) for what, _ in pairs)
    for what, text in pairs:
        yield from _wrapped(f"  {what:<{width}}  ", text, columns=columns)


def _wrapped(begin: str, text: str, *, columns: int | None) -> list[str]:
    """Put the text behind its beginning, or below it where there is no room beside."""
    if columns is None or len(begin) + len(text) <= columns:
        return [f"{begin}{text}"]
    if columns - len(begin) < _NARROWEST:
        indent = " " * 6
        return [begin.rstrip(), *textwrap.wrap(text, columns, initial_indent=indent, subsequent_indent=indent)]
    return textwrap.wrap(text, columns, initial_indent=begin, subsequent_indent=" " * len(begin))


def _child(plan: RunPlan) -> Iterator[str]:
    yield from (f"{name}={shlex.quote(value)} \\" for name, value in plan.env)
    yield f"{shlex.join(plan.argv[:4])} \\"
    yield " \\\n".join(f"  {shlex.quote(argument)}" for argument in plan.argv[4:])
