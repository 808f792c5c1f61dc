"""A patch fits exactly what it was made for, or raises; and every patch of this program fits what is installed."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from appliance import patch as patch_module
from appliance.errors import PatchError
from appliance.patch import Patch, applied_patches, apply_patch, recorded, source_hash

PACKAGE = Path(patch_module.__file__).parent
SOURCE = """
def double(value):
    return 2 * value


class Thing:
    def size(self):
        return 7
"""


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A module of its own for each test, and no patch applied yet in this process."""
    (tmp_path / "patch_target.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "patch_target", raising=False)
    monkeypatch.setattr(patch_module, "_APPLIED", {})
    import patch_target

    yield patch_target
    del sys.modules["patch_target"]


def record(name: str = "a-patch", **other: object) -> Patch:
    fields = {
        "target": "patch_target:double",
        "why": "a test",
        "upstream": "https://example.invalid/1",
        "distribution": "pydantic",
        "sources": here("a" * 64),
        "remove_when": "never",
    }
    return Patch(name=name, **(fields | other))


def here(digest: str) -> dict[str, str]:
    """Sources of a patch for the installed version alone."""
    return {importlib.metadata.version("pydantic"): digest}


def plus_one(original):
    return lambda *args: original(*args) + 1


def test_a_patch_replaces_its_target(target) -> None:
    apply_patch(record(sources=here(source_hash(target.double))), plus_one)
    assert target.double(5) == 11
    assert applied_patches() == ("a-patch",)


def test_a_patch_replaces_a_method(target) -> None:
    wanted = source_hash(target.Thing.size)
    apply_patch(record(target="patch_target:Thing.size", sources=here(wanted)), plus_one)
    assert target.Thing().size() == 8


def test_a_second_call_changes_nothing(target) -> None:
    one = record(sources=here(source_hash(target.double)))
    apply_patch(one, plus_one)
    apply_patch(one, plus_one)
    assert target.double(5) == 11
    assert applied_patches() == ("a-patch",)


def test_applied_lists_the_names_sorted(target) -> None:
    assert applied_patches() == ()
    apply_patch(record("b", sources=here(source_hash(target.double))), plus_one)
    apply_patch(record("a", target="patch_target:Thing.size", sources=here(source_hash(target.Thing.size))), plus_one)
    assert applied_patches() == ("a", "b")


def test_another_version_is_refused(target) -> None:
    with pytest.raises(PatchError) as raised:
        apply_patch(record(sources={"0.0.1": source_hash(target.double), "0.0.2": "a" * 64}), plus_one)
    installed = importlib.metadata.version("pydantic")
    assert raised.value.message == f"patch a-patch: made for pydantic 0.0.1, 0.0.2; {installed} is installed"
    assert raised.value.hint == "install the locked requirements (make demo does)"
    assert raised.value.exit_code == 4
    assert (target.double(5), applied_patches()) == (10, ())


def test_another_source_is_refused(target) -> None:
    with pytest.raises(PatchError) as raised:
        apply_patch(record(), plus_one)
    assert raised.value.message == (
        "patch a-patch: the source of patch_target:double is not the one it was made for "
        f"(sha256 {source_hash(target.double)})"
    )
    assert raised.value.hint == "reinstall the locked requirements, or renew the patch for the changed source"
    assert (target.double(5), applied_patches()) == (10, ())


def test_a_target_that_somebody_else_replaced_is_refused(target) -> None:
    expected = source_hash(target.double)

    def double(value):
        return 3 * value

    target.double = double
    with pytest.raises(PatchError):
        apply_patch(record(sources=here(expected)), plus_one)
    assert target.double is double


@pytest.mark.parametrize("missing", ["patch_target:gone", "patch_target:Thing.gone", "patch_target:Gone.size"])
def test_a_missing_target_is_refused(target, missing: str) -> None:
    with pytest.raises(PatchError) as raised:
        apply_patch(record(target=missing), plus_one)
    assert raised.value.message == f"patch a-patch: {missing} does not exist"
    assert applied_patches() == ()


def test_an_error_of_the_targets_own_import_is_told_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_broken.py").write_text("import sys\nsys.no_such_thing\n")
    monkeypatch.syspath_prepend(tmp_path)
    record = Patch(
        name="p",
        target="half_broken:f",
        why="",
        upstream="",
        distribution="pytest",
        sources={importlib.metadata.version("pytest"): ""},
        remove_when="",
    )
    with pytest.raises(AttributeError, match="no_such_thing"):
        apply_patch(record, lambda original: original)


def test_one_changed_letter_changes_the_hash(target, tmp_path: Path) -> None:
    before = source_hash(target.double)
    (tmp_path / "patch_target_2.py").write_text(SOURCE.replace("2 * value", "3 * value"))
    import patch_target_2

    assert source_hash(patch_target_2.double) != before
    assert source_hash(patch_target_2.Thing) == source_hash(target.Thing)


def patch_records() -> dict[str, str]:
    """`module:CONSTANT` of every patch record in the program, by its syntax tree, to the patch's name."""
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "Patch"
                and node.args == []
                and node.keywords[0].arg
            ):
                module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
                name = next(keyword.value.value for keyword in node.keywords if keyword.arg == "name")
                names[f"{module}:{_assigned_to(path, node)}"] = name
    return names


def _assigned_to(path: Path, call: ast.Call) -> str:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and node.lineno <= call.lineno <= (node.end_lineno or 0):
            return node.targets[0].id
    raise AssertionError(f"{path}:{call.lineno}: a patch is a constant of its module")


TRY_ALL = """
import importlib, json, sys
import verl  # first, as in a worker: it imports trainer/worker.py, which imports the other modules
from appliance.patch import applied_patches, apply_patch
for name in json.loads(sys.argv[1]):
    module, constant = name.split(":")
    apply_patch(getattr(importlib.import_module(module), constant), lambda original: original)
print("applied", json.dumps(applied_patches()))
"""


@pytest.mark.slow
def test_every_patch_fits_what_is_installed() -> None:
    """In a process of its own, as verl's workers start: the platform is chosen, verl is imported, then all else."""
    records = patch_records()
    assert set(records.values()) >= {"chunked-log-probs", "cpu-process-group", "no-load-balancer", "cpu-no-amx-tiles"}
    environment = os.environ | {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "appliance.trainer.worker"}
    environment.pop("APPLIANCE_PLAN", None)
    child = subprocess.run(
        [sys.executable, "-c", TRY_ALL, json.dumps(list(records))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    said = next(line for line in child.stdout.splitlines() if line.startswith("applied "))
    assert json.loads(said.removeprefix("applied ")) == sorted(records.values())


def test_every_patch_says_why_where_and_until_when() -> None:
    assert recorded()
    for name, record in recorded().items():
        assert record.why.strip() and record.remove_when.strip(), name
        assert record.upstream.startswith("https://"), name
        assert all(len(digest) == 64 for digest in record.sources.values()), name
