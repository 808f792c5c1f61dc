"""Preflight from end to end: read, judge. And findings as text and as JSON values."""

from __future__ import annotations

import json
from pathlib import Path

from appliance import hub
from appliance.plan.build import OriginalPlan, build_plan, hub_name
from appliance.plan.host import HostFacts
from appliance.plan.show import plan_text
from appliance.preflight.checks import estimates, judge
from appliance.preflight.finding import Finding, as_json, lines
from appliance.preflight.probes import model_bytes, model_shape, read_host, read_inputs
from appliance.recipe.load import to_plain, to_yaml
from appliance.recipe.schema import Recipe
from appliance.record.plan import RunPlan


def examine(
    recipe: Recipe,
    *,
    run_dir: Path,
    ask_hub: bool,
    cache_dir: Path | None = None,
    resume_from: Path | None = None,
    original: OriginalPlan | None = None,
    commit: str | None = None,
) -> tuple[RunPlan, HostFacts, list[Finding]]:
    """The plan of a run and everything that this host has against it.

    run_dir: absolute.  ask_hub: whether the network and a child may be asked, which can take seconds.
    cache_dir: None: beside the run's folder.  resume_from, original: as build_plan.
    commit: of the recipe's model on the hub, from whoever has asked for it; None: the hub is asked where it may be.
    Raises RecipeError where the plan cannot be made.
    """
    host = read_host(run_dir.parent)
    plan = build_plan(
        recipe,
        run_dir=run_dir,
        host=host,
        cache_dir=cache_dir,
        resume_from=resume_from,
        original=original,
        commit=_commit(recipe, original=original, ask_hub=ask_hub) if commit is None else commit,
    )
    return plan, host, judge(plan, host=host, inputs=read_inputs(plan, ask_hub=ask_hub, host=host))


def _commit(recipe: Recipe, *, original: OriginalPlan | None, ask_hub: bool) -> str:
    """Of the recipe's model on the hub, empty where it has none or nobody asks.

    A tag or a branch that the recipe names stays what it was when the run began.
    """
    name, revision = hub_name(recipe), recipe.model.revision or ""
    if (
        original is not None
        and revision
        and (original.model, original.revision) == (name, revision)
        and original.commit
    ):
        return original.commit
    return hub.revision(name, of=revision)[0] if name and ask_hub else ""


def commit_for(recipe: Recipe) -> str:
    """The commit that the recipe's `model.revision` is; empty without one, and where that cannot be told."""
    name, wanted = hub_name(recipe), recipe.model.revision
    return hub.revision(name, of=wanted)[0] if name and wanted else ""


def plan_as(
    plan: RunPlan,
    *,
    recipe: Recipe,
    findings: list[Finding],
    json_mode: bool,
    full: bool = False,
    columns: int | None = None,
) -> str:
    """The plan with the findings attached, as JSON or as text. full, columns: of the text, as in plan/show.py."""
    if json_mode:
        document = {"schema_version": 1, "recipe": to_plain(recipe), "plan": plan.model_dump(mode="json")}
        return json.dumps({**document, "findings": as_json(findings)}, indent=2)
    needs = estimates(plan, model_bytes=model_bytes(plan), shape=model_shape(plan))
    recipe_yaml = to_yaml(recipe) if full else ""
    return plan_text(plan, needs=needs, findings=lines(findings), recipe_yaml=recipe_yaml, columns=columns)
