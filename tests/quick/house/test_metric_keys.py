"""docs/metrics.md is the catalogue, and the catalogue has exactly the keys that the code writes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from appliance.corrections.calibrated import Fit
from appliance.corrections.objective import ClipRange
from appliance.record import metric_catalogue as catalogue
from appliance.record.events import Event, MemorySample, StepMetrics

NOT_OF_A_LINE = {"user_metrics", "line"}  # of StepMetrics: what the reader adds
WRITERS = {  # functions whose dict literals become a line of metrics.jsonl
    "sync.records": {"metrics"},
    "tasks.grading": {"set_metrics"},
    "trainer.correction": {"centering_metrics", "prepare"},
    "trainer.engines": {"take_restart"},
    "trainer.governor": {"metrics"},
    "trainer.kv_scales": {"metrics"},
    "trainer.metrics": {"metrics", "step_metrics", "_reference_kl"},
    "trainer.precision": {"metrics", "make"},
    "trainer.replay_buffer": {"end_step"},
    "trainer.rewards": {"reward_means"},
    "trainer.trainer": {"_compute_metrics", "_validate", "_write", "on_train_end"},
    "trainer.turns": {"metrics"},
}
NAMES_OF_VERL = ("_FROM_VERL", "_TIMINGS_S")  # in trainer.metrics: our key to verl's


def literal_keys(tree: ast.AST) -> Iterator[str]:
    """The keys of dict literals; a part of an f-string that is computed is `<>`."""
    for node in ast.walk(tree):
        keys = node.keys if isinstance(node, ast.Dict) else [node.key] if isinstance(node, ast.DictComp) else []
        for key in keys:
            if isinstance(key, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "<>" for part in key.values)
            elif isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield key.value


def functions(tree: ast.Module, names: set[str]) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in names]


def assigned(tree: ast.Module, name: str) -> ast.expr:
    [value] = [node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == name]
    return value


@pytest.fixture(scope="module")
def written(modules: dict[str, ast.Module]) -> set[str]:
    """Every key that the code writes into metrics.jsonl."""
    writers = WRITERS | {name: {"metrics"} for name in modules if name.startswith("corrections.")}
    for module, names in WRITERS.items():
        assert {node.name for node in functions(modules[module], names)} == names, f"{module} has others by now"
    trees = [tree for module, names in writers.items() for tree in functions(modules[module], names)]
    metrics = modules["trainer.metrics"]
    trees += [assigned(metrics, name) for name in NAMES_OF_VERL]
    return {key for tree in trees for key in literal_keys(tree)} | {
        *ast.literal_eval(assigned(metrics, "SCALER_METRICS"))
    }


def test_the_page_is_the_catalogue(root: Path) -> None:
    assert (root / "docs/metrics.md").read_text() == catalogue.page(), (
        "write it: python -m appliance.record.metric_catalogue >docs/metrics.md"
    )


def test_the_catalogue_has_every_key_that_is_written_and_no_other(written: set[str]) -> None:
    keys = [re.sub(r"<\w+>", "<>", metric.key) for metric in catalogue.METRICS.metrics]
    assert sorted(keys) == sorted(written)


def test_the_catalogue_has_every_key_that_is_read() -> None:
    read = {field.name for field in fields(StepMetrics)} - NOT_OF_A_LINE
    assert [key for key in read if not catalogue.is_known(key)] == []


def test_a_key_with_a_name_of_the_users_is_known_by_its_pattern() -> None:
    keys = ("reward/rewards.py:right sum-2", "val/held out/avg@32", "val/aime/pass@8", "step_s")
    assert all(map(catalogue.is_known, keys))
    assert [key for key in ("reward/", "val/aime", "step_s2", "xstep") if catalogue.is_known(key)] == []


def test_an_object_of_a_length_is_described_whole(modules: dict[str, ast.Module]) -> None:
    classes = {node.name: node for node in modules["quant.mismatch"].body if isinstance(node, ast.ClassDef)}
    of_a_bucket = {
        node.target.id
        for name in ("Mismatch", "LengthBucket")
        for node in classes[name].body
        if isinstance(node, ast.AnnAssign)
    }
    table = catalogue.BY_LENGTH
    described = {*re.findall(r"`(\w+)`", table.about), *(metric.key for metric in table.metrics)}
    assert described == of_a_bucket


def test_the_lines_of_the_other_files_are_described_whole() -> None:
    of_an_event = {field.name for field in fields(Event)} - {"line"}
    assert {metric.key for metric in catalogue.EVENTS.metrics} == of_an_event
    assert {metric.key for metric in catalogue.MEMORY.metrics} == {field.name for field in fields(MemorySample)}
    of_a_fit = {"step", *(field.name for kind in (ClipRange, Fit) for field in fields(kind))} - {"bounds"}
    assert {metric.key for metric in catalogue.CLIPPING.metrics} == of_a_fit


def test_each_key_is_described_once_in_words() -> None:
    metrics = [metric for file in catalogue.FILES for metric in file.metrics]
    assert [metric.key for metric in metrics if not metric.meaning or metric.meaning.endswith(".")] == []
    keys = [metric.key for metric in catalogue.METRICS.metrics]
    assert len(keys) == len(set(keys))


def test_each_kind_of_event_is_named(modules: dict[str, ast.Module]) -> None:
    appended = {
        keyword.value.value
        for tree in modules.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("append_event")
        for keyword in node.keywords
        if keyword.arg == "kind" and isinstance(keyword.value, ast.Constant)
    }
    [kind] = [metric for metric in catalogue.EVENTS.metrics if metric.key == "kind"]
    assert sorted(re.findall(r"`([a-z]+)`", kind.meaning)) == sorted(appended | {"failure"})
