"""From a recipe to what runs: the child gets the arguments and the environment that the recipe says, and no others."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from fuzz_surface import attempt, fuzzed
from fuzz_text import HOSTILE, as_json, values, wild_text
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import strategies as st
from omegaconf import OmegaConf
from plans import DISK, HOST
from pydantic import ValidationError

from appliance import hub
from appliance.errors import refuse_faults
from appliance.plan.build import resolve
from appliance.plan.host import HostFacts, HostGpu
from appliance.plan.rules import judge_plan
from appliance.plan.verl_args import hydra_value
from appliance.preflight.checks import estimates, judge
from appliance.preflight.disk import Disks
from appliance.preflight.inputs import InputFacts
from appliance.preflight.report import plan_text
from appliance.recipe.load import read_recipe, to_yaml
from appliance.recipe.schema import SECTIONS, Recipe
from appliance.record.plan import RunPlan
from appliance.tasks.rewards import BUILT_IN
from appliance.terms.environment import child_env

HOSTS = (
    HOST,
    dataclasses.replace(HOST, gpus=(HostGpu("NVIDIA H100 80GB HBM3", 80 << 30),) * 8),
    dataclasses.replace(HOST, gpus=(HostGpu("Tesla K80", 11 << 30),)),
)
BASE = {"model": {"builtin": "tiny-arithmetic"}, "task": {"max_prompt_tokens": 16, "max_response_tokens": 8}}
INPUTS = InputFacts(True, (), 0, None, True, True, "", (), True, Disks(DISK, checkpoints=DISK))
PARSER = OverridesParser.create()
ENVIRONMENT = {
    name
    for capability in (None, (9, 0), (10, 0))
    for name, _ in child_env(
        Path("/x"),
        is_cpu=capability is None,
        threads=1,
        kv_cache_gb=1,
        offline=True,
        backends=("tensorboard", "trackio"),
        own_engine=True,
        one_flow=True,
        reports_support=True,
        capability=capability,
    )
}


@pytest.fixture(scope="module", autouse=True)
def hydra_is_warm() -> None:
    """What OmegaConf and the hub load at their first use is nothing that a text asked for."""
    hub.cached_snapshot("owner/name")
    assert parsed(f"a.b={hydra_value(['${x', 'y'])}") == ("a.b", ["${x", "y"])


def parsed(text: str) -> tuple[str, Any]:
    """(key, value) of one override as Hydra and OmegaConf read it. Raises what they raise."""
    override = PARSER.parse_override(text)
    assert not override.is_sweep_override() and not override.is_delete(), text
    held = OmegaConf.create({"value": override.value()})
    return override.key_or_group, OmegaConf.to_container(held, resolve=True)["value"]


@st.composite
def changes(draw: st.DrawFn) -> dict[str, Any]:
    """Recipes that mostly load: sizes of every magnitude, texts of every kind where texts belong."""
    tree: dict[str, Any] = json.loads(as_json(BASE)) | {"trainer": {"steps": draw(st.sampled_from((1, 3, 10**15)))}}
    for _ in range(draw(st.integers(1, 3))):
        section = draw(st.sampled_from(sorted(SECTIONS)))
        name, field = draw(st.sampled_from(sorted(SECTIONS[section].model_fields.items(), key=lambda pair: pair[0])))
        kind = str(field.annotation)
        if "str" in kind:
            value: Any = draw(wild_text)
        elif "bool" in kind:
            value = draw(st.booleans())
        elif "int" in kind:
            value = draw(st.one_of(st.integers(0, 64), st.sampled_from((2**31, 10**9, 10**18 - 1))))
        elif "float" in kind and "tuple" not in kind:
            value = draw(st.one_of(st.floats(0, 1), st.sampled_from((1e-300, 1.5, 1e6, 1e300))))
        else:
            value = draw(values)
        tree.setdefault(section, {})[name] = value
    if draw(st.booleans()):
        path = draw(st.one_of(st.sampled_from(HOSTILE), wild_text))
        tree["model"] = {"path": path}
        tree["task"] |= {"kind": "gsm8k", "train_file": draw(wild_text)}
    return tree


def plan(file: Path, *, host: int) -> RunPlan:
    typed = read_recipe(str(file))
    resolved = judged(typed.recipe, run_dir=file.parent / "runs/r-1", host=HOSTS[host])
    refuse_faults(typed.faults)
    return resolved


def judged(recipe: Recipe, *, run_dir: Path, host: HostFacts) -> RunPlan:
    """The plan of any recipe, after everything that reads it: nothing of it raises, whatever is wrong."""
    resolved = resolve(recipe, run_dir=run_dir, host=host)
    faults = judge_plan(recipe, resolved, host=host)
    judge(resolved, host=host, inputs=INPUTS)
    plan_text(resolved, recipe_yaml=to_yaml(recipe), needs=estimates(resolved, model_bytes=0, shape=None))
    assert RunPlan.model_validate_json(resolved.to_json()) == resolved
    refuse_faults(faults)
    return resolved


@fuzzed("plans", tree=changes(), host=st.integers(0, 1))
def test_fuzz_plans(room: Path, tree: dict[str, Any], host: int) -> None:
    (room / "recipe.yaml").write_text(as_json(tree))
    resolved = attempt("plans", lambda: plan(room / "recipe.yaml", host=host), folder=room)
    if resolved is None:
        return
    assert all("\0" not in each for each in (*resolved.argv, *(value for _, value in resolved.env)))
    assert {name for name, _ in resolved.env} <= ENVIRONMENT
    assert dict(resolved.env)["APPLIANCE_PLAN"] == str(room / "runs/r-1/plan.json")
    texts = [
        each for each in resolved.argv if each.startswith(("actor_rollout_ref.model.path=", "data.t", "trainer.e"))
    ]
    assert [parsed(each)[0] for each in texts] == [each.partition("=")[0] for each in texts]
    wanted = resolved.trained_model
    assert parsed(next(each for each in texts if "model.path=" in each)) == ("actor_rollout_ref.model.path", wanted)


def members(annotation: Any) -> Iterator[Any]:
    """The members of the enums, and the literal values, that a type allows."""
    if inspect.isclass(annotation) and issubclass(annotation, Enum):
        yield from annotation
    for inner in get_args(annotation):
        yield from members(inner) if get_origin(annotation) is not Literal else (inner,)


VALUES = (
    *(None, True, False, 0, 1, 2, 3, 5, 7, 8, 12, 16, 64, 1000, 10**9, 10**15, 1e-300, 1e-6, 1e-4, 0.25, 0.5, 0.9),
    *(1.0, 1.5, 2.0, 1e6, 1e300, "auto", "none", "h100", "h1000", "cpu", "b200", "tiny-arithmetic", "tiny-calculator"),
    *("tiny-none", "owner/name", "./here", "~nobody-here/x", "../x", "rewards.py", "rewards.py:score", "{a}", "x"),
    *([], [0.5], [0.5, 2.0], ["re:("], ["re:a{99999999999}", "lm_head"], ["fp8", "auto", "bf16"], ["int8"] * 3),
    *([{"name": "math"}], [{"name": "math"}, {"name": "rewards.py:score", "weight": 0.0}], [{"name": "judge"}]),
    *([{"name": "exct"}], [{"name": "exct", "pattern": "("}, {"name": "math"}], [{"name": "~nobody-here/x.py:"}]),
    *({"a": {}}, {"a": {"size": 3}, "b": {"file": "b.jsonl", "samples": 4}}, {"rank": 8, "targets": ["q_proj"] * 2}),
    *("x" * 300, [0.9, 0.999], "10.0.0.7:6379", 29500, ["trackio", "tensorboard"], "owner/name:x", "a" * 40),
)

REWARDS = st.lists(
    st.builds(lambda name: {"name": name}, st.sampled_from((*BUILT_IN, "exct", "MATH", ":", "x.py:f", "\0.py:f", "~"))),
    max_size=3,
)


@functools.cache
def legal(section: str) -> dict[str, list[Any]]:
    """By key, the values of its type: those that pydantic takes for it."""
    model = SECTIONS[section]

    def takes(name: str, value: Any) -> bool:
        try:
            model.model_validate({name: value})
        except ValidationError:
            return False
        return True

    return {
        name: [value for value in (*VALUES, *members(field.annotation)) if takes(name, value)]
        for name, field in model.model_fields.items()
    }


@st.composite
def typed_recipes(draw: st.DrawFn) -> dict[str, Any]:
    """Keys with any values of their types, which break rule upon rule, some of them upon a recipe that has a plan."""
    bases = {}, {**BASE, "trainer": {"steps": 3}}, {**BASE, "task": {"kind": "own", "rewards": draw(REWARDS)}}
    tree: dict[str, Any] = json.loads(as_json(draw(st.sampled_from(bases))))
    for _ in range(draw(st.integers(1, 16))):
        section = draw(st.sampled_from(sorted(SECTIONS)))
        name, values_of_it = draw(st.sampled_from(sorted(legal(section).items(), key=lambda pair: pair[0])))
        tree.setdefault(section, {})[name] = draw(st.sampled_from(values_of_it))
    return tree


@fuzzed("typed recipes", tree=typed_recipes(), host=st.integers(0, len(HOSTS) - 1))
def test_every_recipe_of_the_schema_s_types_has_a_plan(room: Path, tree: dict[str, Any], host: int) -> None:
    recipe = Recipe.model_validate(tree)
    attempt("typed recipes", lambda: judged(recipe, run_dir=room / "runs/r-1", host=HOSTS[host]), folder=room)


@fuzzed(
    "overrides",
    text=st.one_of(wild_text, st.text("'\\${}[](),:=+~ a\n\t\"", max_size=12)),
    rest=st.lists(wild_text, max_size=2),
)
def test_fuzz_overrides(room: Path, text: str, rest: list[str]) -> None:
    """A text is never another override, an interpolation or a list: what Hydra reads is that text."""
    text, *rest = (each.replace("\0", "").replace("\ud800", "") for each in (text, *rest))  # recipe/text.py refuses
    for value in (text, [text, *rest]):
        override = f"a.b={hydra_value(value)}"
        assert attempt("overrides", lambda each=override: parsed(each), folder=room) == ("a.b", value)
