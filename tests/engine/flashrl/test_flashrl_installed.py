"""`pip install ./plugin` beside vLLM, where there is no appliance: its engine is the one that the appliance makes."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from engines import PROMPTS, free_engine, start_engine

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")


def others(folder: Path) -> Path:
    """This environment's packages but for the appliance. That works without `site`, which would add them all."""
    own = {Path(str(file)).parts[0] for file in importlib.metadata.distribution("flashrl-appliance").files}
    for each in Path(sysconfig.get_path("platlib")).iterdir():
        if each.name not in own:
            (folder / each.name).symlink_to(each)
    return folder


def test_the_installed_wheel_alone_ends_in_the_engine_of_the_new_weights(
    two_checkpoints: tuple[Path, Path], root: Path, tmp_path: Path
) -> None:
    wheels, installed, packages = (tmp_path / name for name in ("wheels", "installed", "packages"))
    packages.mkdir()
    build = ("--no-deps", "--no-index", "--no-build-isolation", "-w", str(wheels), str(root / "plugin"))
    subprocess.run([*PIP, "wheel", *build], check=True, timeout=120)
    [wheel] = wheels.glob("flashrl_compat-*.whl")
    target = ("--no-deps", "--no-index", "--target", str(installed), str(wheel))
    subprocess.run([*PIP, "install", *target], check=True, timeout=120)

    path = (str(installed), os.environ.get("PYTHONPATH", ""), str(others(packages)))  # in between: another vLLM
    settings = {"FLASHRL_CONFIG": "int8", "PYTHONPATH": os.pathsep.join(filter(None, path))}
    script, result = Path(__file__).with_name("installed_plugin.py"), tmp_path / "said.json"
    arguments = (str(installed), *map(str, two_checkpoints), json.dumps(PROMPTS), str(result))
    child = subprocess.run(
        [sys.executable, "-S", str(script), *arguments],
        cwd=tmp_path,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert child.returncode == 0, child.stderr[-4000:]
    assert "rank 0 took weight update 1 by load_weights: 26 tensors in " in child.stderr
    found = json.loads(result.read_text())
    assert found["version"] == "1"
    for folder, says in zip(two_checkpoints, found["said"], strict=True):
        engine = start_engine(folder, scheme="int8")
        assert [(tokens, log_probs) for tokens, log_probs in says] == engine.generate()
        free_engine(engine)
