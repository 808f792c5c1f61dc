"""What lies beside a file of the user's is what its imports find, whatever else has the name; and nobody else's do."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from plans import make_files

from appliance.record.plan import CodeFile
from appliance.tasks.user_code import load_module


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages; what is imported of it is forgotten."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(folder: Path, **modules: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in modules.items():
        path = folder / f"{name.replace('__dot__', '/')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    return folder


def test_a_neighbour_wins_over_an_installed_package(installed: Path, tmp_path: Path) -> None:
    write(installed, utils="WHOSE = 'installed'", grading="WHOSE = 'installed'\nimport utils\nOTHER = utils.WHOSE")
    beside = write(
        tmp_path / "mine",
        utils="WHOSE = 'mine'",
        helper="import utils\nfrom utils import WHOSE as ALSO\ndef late():\n    import utils\n    return utils.WHOSE",
        rewards="import utils, helper\nimport grading as theirs\nfrom utils import WHOSE\nfrom utils import *\n"
        "found = [utils.WHOSE, helper.utils.WHOSE, helper.ALSO, helper.late(), WHOSE, theirs.OTHER, theirs.WHOSE]",
    )
    module = load_module(str(beside / "rewards.py"))
    assert module.found == ["mine"] * 5 + ["installed"] * 2
    assert importlib.import_module("utils").WHOSE == "installed"  # as our own libraries get it


@pytest.mark.parametrize("name", ["json", "random", "code", "statistics", "pydantic"])
def test_a_neighbour_wins_over_what_this_process_has_imported_and_over_the_standard_library(
    tmp_path: Path, installed: Path, name: str
) -> None:
    module = importlib.import_module(name)
    beside = write(tmp_path / "mine", **{name: "WHOSE = 'mine'", "rewards": f"import {name}\nfound = {name}.WHOSE"})
    assert load_module(str(beside / "rewards.py")).found == "mine"
    assert importlib.import_module(name) is module and not hasattr(module, "WHOSE")


def test_a_built_in_module_is_nobodys(tmp_path: Path) -> None:
    beside = write(tmp_path / "mine", sys="WHOSE = 'mine'", rewards="import sys\nfound = hasattr(sys, 'WHOSE')")
    assert load_module(str(beside / "rewards.py")).found is False


def test_a_package_beside_it_has_its_submodules_and_relative_imports(installed: Path, tmp_path: Path) -> None:
    write(installed, tools__dot____init__="", tools__dot__add="WHOSE = 'installed'", names="WHOSE = 'installed'")
    beside = write(
        tmp_path / "mine",
        tools__dot____init__="from . import add",
        tools__dot__add="from .base import WHOSE\nimport names\nOTHER = names.WHOSE",
        tools__dot__base="WHOSE = 'mine'",
        names="WHOSE = 'mine'",
        rewards="import tools.add\nimport tools.base as base\nfrom tools import add\nfrom tools.add import OTHER\n"
        "found = [tools.add.WHOSE, base.WHOSE, add.WHOSE, OTHER, tools.base.WHOSE]",
    )
    assert load_module(str(beside / "rewards.py")).found == ["mine"] * 5


def test_a_folder_without_modules_wins_over_nothing(installed: Path, tmp_path: Path) -> None:
    """Such as `datasets/`, which holds data."""
    write(installed, data_of__dot____init__="WHOSE = 'installed'")
    beside = write(tmp_path / "mine", rewards="import data_of\nfound = data_of.WHOSE")
    (beside / "data_of").mkdir()
    (beside / "data_of" / "rows.jsonl").write_text("{}")
    assert load_module(str(beside / "rewards.py")).found == "installed"


def test_a_neighbour_whose_name_nothing_else_has_keeps_it(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that it is the same module for who imports it in another way."""
    write(installed, clashing="WHOSE = 'installed'")
    beside = write(
        tmp_path / "mine",
        clashing="WHOSE = 'mine'",
        unlike_any="import clashing\nclass A: pass",
        rewards="import importlib\nimport unlike_any\nfound = unlike_any.clashing.WHOSE\n"
        "same = importlib.import_module('unlike_any') is unlike_any",
    )
    monkeypatch.setattr(sys, "path", [*sys.path, str(beside)])  # as processes that run the user's code have it
    module = load_module(str(beside / "rewards.py"))
    assert (module.found, module.same, module.unlike_any.A.__module__) == ("mine", True, "unlike_any")


def test_files_of_two_folders_have_the_neighbours_of_theirs(installed: Path, tmp_path: Path) -> None:
    for name in ("one", "other"):
        write(tmp_path / name, utils=f"WHOSE = {name!r}", rewards="import utils\nfound = utils.WHOSE")
    assert [load_module(str(tmp_path / name / "rewards.py")).found for name in ("one", "other")] == ["one", "other"]


def test_the_runs_copy_has_the_neighbours_of_the_users_file(installed: Path, tmp_path: Path) -> None:
    beside = write(tmp_path / "mine", utils="WHOSE = 'mine'", rewards="import utils\nfound = utils.WHOSE")
    copy = write(tmp_path / "code", rewards=(beside / "rewards.py").read_text()) / "rewards.py"
    code = CodeFile(path=str(beside / "rewards.py"), copy_name="rewards.py", sha256="")
    files = make_files(code)
    assert files.folder_of(str(copy)) == files.folder_of(code.path) == str(beside)
    assert load_module(str(copy), beside=str(beside)).found == "mine"


def test_a_neighbour_that_is_missing_is_an_import_error(tmp_path: Path) -> None:
    beside = write(tmp_path / "mine", rewards="import no_such_neighbour")
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_neighbour'"):
        load_module(str(beside / "rewards.py"))
    broken = write(tmp_path / "other", json="import no_such_neighbour", rewards="import json")
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_neighbour'"):
        load_module(str(broken / "rewards.py"))
    assert json.loads("1") == 1
