"""The plugin as a distribution of its own (plugin/): which modules are in it, and what they need."""

from __future__ import annotations

import ast
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from appliance.engine import plugin
from appliance.errors import EngineError
from appliance.terms.schemes import Scheme

LIGHT = {"yaml": "pyyaml", "huggingface_hub": "huggingface-hub", "pydantic_core": "pydantic"}
OF_VLLM = {"torch", "numpy", "numba", "triton", "prometheus_client", "fastapi"}  # vLLM's; and a GPU's quantiser
TRAINERS = {"verl", "ray"}


@pytest.fixture(scope="module")
def reached(root: Path) -> set[str]:
    return runpy.run_path(str(root / "plugin" / "setup.py"))["modules"]()


def imports(root: Path, module: str) -> set[str]:
    path = root.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    nodes = list(ast.walk(ast.parse(file.read_text())))
    whole = {each.name for node in nodes if isinstance(node, ast.Import) for each in node.names}
    return whole | {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}


def test_the_plugin_needs_vllm_and_what_its_distribution_names(root: Path, reached: set[str]) -> None:
    """verl is imported by the module that verl's own engines load in the place of verl's extension, and by what that
    imports."""
    project = tomllib.loads((root / "plugin" / "pyproject.toml").read_text())["project"]
    declared = {each.partition(">")[0].partition("=")[0] for each in project["dependencies"]}
    outside = {
        (module, name.partition(".")[0])
        for module in reached
        for name in imports(root, module)
        if name.partition(".")[0] not in {*sys.stdlib_module_names, "appliance", "flashrl_compat"}
    }
    assert {module for module, name in outside if name in TRAINERS} == {
        "appliance.engine.adapter",
        "appliance.engine.sync",
    }
    needed = {LIGHT.get(name, name) for _, name in outside if name not in OF_VLLM | TRAINERS}
    assert needed == declared


def test_no_launcher_and_no_trainer_is_in_it(reached: set[str]) -> None:
    rooms = {"trainer", "launch", "cli", "report", "cluster", "preflight", "plan", "tasks"}
    assert {name for name in reached if name.split(".")[1:2] and name.split(".")[1] in rooms} == set()
    assert {f"appliance.quant.codec_{each.spec.codec}" for each in Scheme if each.quantised} <= reached
    assert {"flashrl_compat.worker", "flashrl_compat.sender", "appliance.engine.ways_in"} <= reached


def test_its_readme_has_no_link_that_breaks_once_it_is_installed(root: Path) -> None:
    links = re.findall(r"\]\(([^)]+)\)", (root / "plugin" / "README.md").read_text())
    assert [link for link in links if not link.startswith("https://")] == []


@pytest.mark.slow
def test_the_wheel_has_these_modules_and_leaves_no_traces(root: Path, reached: set[str], tmp_path: Path) -> None:
    before = sorted((root / "plugin").iterdir())
    arguments = ["wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "pip", *arguments, str(root / "plugin")], check=True)
    [wheel] = tmp_path.glob("*.whl")
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    modules = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in names}
    assert (modules, len(names)) == (reached, len(reached))
    assert sorted((root / "plugin").iterdir()) == before


def test_its_folder_alone_builds_nothing(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "plugin", tmp_path / "plugin")
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    arguments = [sys.executable, "-c", build, str(tmp_path)]
    child = subprocess.run(arguments, cwd=tmp_path / "plugin", capture_output=True, text=True)
    assert (child.returncode, sorted(tmp_path.glob("*.whl"))) == (1, [])
    assert child.stderr == (
        f"error: {tmp_path}: appliance, flashrl_compat: not there; flashrl-compat is made of the modules beside its "
        "folder\n"
        "hint: build it in a clone of the repository, or let pip make one: "
        '`pip install "git+URL-OF-THE-REPOSITORY#subdirectory=plugin"`\n'
    )


def test_both_distributions_in_one_environment_stop_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in plugin.DISTRIBUTIONS:
        folder = tmp_path / f"{name.replace('-', '_')}-0.1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EngineError) as caught:
        plugin.require_one_distribution()
    assert str(caught.value) == "flashrl-appliance and flashrl-compat are both installed: they bring the same files"


def test_one_distribution_alone_is_well() -> None:
    plugin.require_one_distribution()
