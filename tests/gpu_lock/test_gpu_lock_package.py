"""The GPU flavour's environment: what is locked is there, our modules load, patches fit, nvcc fits the headers."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import pkgutil
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest
import torch

import appliance
import benchmarks
import flashrl_compat
from appliance import patch
from appliance.plan import build

CUDA = Path(os.environ["CUDA_HOME"])
MODULES = sorted(
    module.name
    for package in (appliance, benchmarks, flashrl_compat)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if not module.name.endswith("__main__")
)


def test_what_is_locked_is_installed(root: Path) -> None:
    pins = dict(re.findall(r"^([a-z0-9][\w.-]*)==(\S+)", (root / "requirements/gpu.txt").read_text(), re.M))
    found = importlib.metadata.distributions(path=[sysconfig.get_path("purelib")])
    installed = {each.name.lower().replace("_", "-").replace(".", "-"): each.version for each in found}
    assert len(pins) > 250
    assert {name: installed.get(name.replace(".", "-")) for name in pins} == pins


@pytest.mark.usefixtures("hopper")
def test_every_module_of_the_program_loads() -> None:
    assert len(MODULES) > 190
    for name in MODULES:
        importlib.import_module(name)


def test_the_smoke_test_of_the_image_passes(root: Path) -> None:
    """In a process of its own: there is no driver and no platform of vLLM's in it. It applies every patch."""
    script = [sys.executable, root / "container/smoke.py", "--flavour", "gpu"]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    live = sorted({*build.VERL_PATCHES, *build.DRIVER_PATCHES})
    assert f"smoke: plugin and patches live: {', '.join(live)}\n" in done.stdout


@pytest.mark.parametrize(("package", "others"), [(appliance, {"cpu-no-amx-tiles"}), (flashrl_compat, set())])
def test_every_patch_record_of_this_flavour_fits(
    monkeypatch: pytest.MonkeyPatch, package: ModuleType, others: set[str]
) -> None:
    """Judged by the sources alone, as preflight does. others: records of the other flavour, for torch's build for
    CPUs."""
    monkeypatch.setattr(patch, "_PACKAGE", Path(package.__file__).parent)
    unfit = {name: patch.why_unfit(record) for name, record in patch.recorded.__wrapped__().items()}
    assert len(unfit) > 12
    assert {name for name, why in unfit.items() if why} == others, unfit


def test_nvcc_headers_and_torch_are_of_one_cuda() -> None:
    output = subprocess.run([CUDA / "bin/nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    headers = int(re.search(r"#define CUDA_VERSION (\d+)", (CUDA / "include/cuda.h").read_text())[1])
    assert f"{headers // 1000}.{headers % 1000 // 10}" == torch.version.cuda
    assert f"release {torch.version.cuda}," in output
