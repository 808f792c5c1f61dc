"""The set-up script on hosts where it cannot work: it says what is missing, and leaves nothing half-made."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def clone(root: Path, tmp_path: Path) -> Path:
    """What the script reads, without .venv."""
    shutil.copytree(root / "requirements", tmp_path / "clone/requirements")
    shutil.copy(root / "pyproject.toml", tmp_path / "clone")
    return tmp_path / "clone"


def set_up(clone: Path, *arguments: str, python: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """Run the script. `python` is what a `python3.11` of its own does before it becomes the real one."""
    program = clone.parent / "bin/python3.11"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f'#!/bin/sh\n{python}\nexec {sys.base_prefix}/bin/python3.11 "$@"\n')
    program.chmod(0o755)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "APPLIANCE_"))}
    return subprocess.run(
        [clone / "requirements/setup.sh", *arguments],
        env={**inherited, "PATH": f"{program.parent}:/usr/bin:/bin", **env},
        capture_output=True,
        text=True,
        check=False,
    )


def test_setup_refuses_another_python(clone: Path) -> None:
    result = set_up(clone, python="echo CPython 3.12.1 Linux x86_64; exit")
    assert result.returncode == 1
    assert result.stderr == (
        "error: python3.11 is CPython 3.12.1 Linux x86_64: untested\n"
        "hint: this project is locked and tested for CPython 3.11 on x86-64 Linux; put a python3.11 on the PATH\n"
    )


def test_setup_names_the_missing_package_and_its_command(clone: Path) -> None:
    result = set_up(clone, python='case "$*" in *libnuma.so.1*) exit 1;; esac')
    assert result.returncode == 1
    assert result.stderr == (
        "error: this host lacks system packages that Python and vLLM need: libnuma1\n"
        "hint: on Debian and Ubuntu, as root: apt-get update && apt-get install -y libnuma1; elsewhere, what has "
        "libnuma.so.1\n"
    )
    assert not (clone / ".venv").exists()


def test_setup_prints_missing_packages_for_a_script(clone: Path) -> None:
    result = set_up(clone, "missing", python='case "$*" in *libnuma.so.1*|*ensurepip*) exit 1;; esac')
    assert (result.returncode, result.stdout, result.stderr) == (0, "python3.11-venv\nlibnuma1\n", "")


def test_setup_refuses_a_wheel_of_another_version(clone: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "vllm-0.27.0+cpu-cp38-abi3-manylinux_2_35_x86_64.whl"
    wheel.touch()
    result = set_up(clone, APPLIANCE_VLLM_WHEEL=str(wheel))
    assert result.returncode == 1
    assert result.stderr == (
        f"error: APPLIANCE_VLLM_WHEEL={wheel} is not a wheel of vllm 0.31.0+cpu\n"
        "hint: name a file such as vllm-0.31.0+cpu-cp38-abi3-manylinux_2_35_x86_64.whl, or unset it\n"
    )


@pytest.mark.parametrize(("held_gb", "is_enough"), [(2, False), (3, True)])
def test_setup_counts_what_the_old_one_gives_back(clone: Path, tmp_path: Path, held_gb: int, is_enough: bool) -> None:
    (tmp_path / "bin").mkdir()
    for name, said in (("df", "Filesystem\\n/dev/a 9 9 2097152 9 /"), ("du", f"{held_gb << 20}\\t.venv")):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\nprintf '{said}\\n'\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (clone / ".venv/bin").mkdir(parents=True)
    result = set_up(clone, python='case "$*" in *-m\\ venv*) exit 1;; esac')
    assert result.returncode == 1 and (clone / ".venv/bin").exists() == (not is_enough)
    if not is_enough:
        assert result.stderr == (
            f"error: 4 GB free in {clone} without .venv, the set-up needs 5\n"
            "hint: free some space, or clone to another disk\n"
        )


@pytest.mark.slow
def test_setup_never_takes_another_torch_and_can_be_repeated(clone: Path) -> None:
    """Sources without the +cpu build, and no network: both runs end with the remedy, and without any torch."""
    nothing = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1"}
    for _ in range(2):
        result = set_up(clone, **nothing)
        assert result.returncode == 1
        assert result.stderr.splitlines()[-2:] == [
            f"error: torch==2.13.0+cpu: failed, {clone}/.venv/setup.log has its output",
            "hint: torch's CPU build is not in pip's sources, and not in reach at "
            "https://download.pytorch.org/whl/cpu; where you have its wheel, set PIP_FIND_LINKS to the wheel's folder",
        ]
        assert list(clone.glob(".venv/lib/*/site-packages/torch*")) == []


@pytest.mark.parametrize(
    ("output", "hint"),
    [
        ("it broke", "mend what the lines above say, and run the same command again"),
        (
            "HTTPSConnectionPool: NameResolutionError",
            "pip does not reach an index that has it: set HTTPS_PROXY, or PIP_INDEX_URL to a mirror, and run the same "
            "command again",
        ),
        (
            "THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE",
            "pip's index gives other files than the lock names: set PIP_INDEX_URL to PyPI or to a true mirror of it",
        ),
        (
            "[Errno 28] No space left on device",
            "free some space on the disk of {clone} or of TMPDIR, and run the same command again",
        ),
    ],
)
def test_setup_gives_a_later_failure_a_remedy_of_its_own(clone: Path, tmp_path: Path, output: str, hint: str) -> None:
    """By its own output: torch came from PyTorch's own index, which is not to blame any more."""
    venv = tmp_path / "venv-python"
    venv.write_text(
        '#!/bin/sh\ncase "$*" in\n'
        "*--index-url*) exit 0;;\n"
        "*torch-cpu.txt*) echo No matching distribution found for torch; exit 1;;\n"
        f"*setuptools.txt*) echo '{output}'; exit 1;;\nesac\n"
    )
    venv.chmod(0o755)
    made = f'case "$*" in *-m\\ venv*) mkdir -p .venv/bin; cp {venv} .venv/bin/python; exit;; esac'
    result = set_up(clone, python=made)
    assert result.returncode == 1
    error, remedy = result.stderr.splitlines()[-2:]
    assert error.endswith(f"packages of cpu.txt and dev.txt: failed, {clone}/.venv/setup.log has its output")
    assert remedy == f"hint: {hint.format(clone=clone)}"


def test_setup_says_what_it_needs_of_a_host_without_debians_packages(clone: Path) -> None:
    result = set_up(clone, python='case "$*" in *libnuma.so.1*|*ensurepip*) exit 1;; esac')
    hint = result.stderr.splitlines()[-1]
    assert hint.endswith("; elsewhere, what has Python's modules venv and ensurepip, libnuma.so.1")


def test_setup_without_python_says_where_it_looked(clone: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python3").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bin/python3").chmod(0o755)
    result = set_up(clone, python="exit 1")
    assert result.returncode == 1
    assert result.stderr == (
        "error: no python3.11 and no python3 on the PATH\n"
        "hint: install CPython 3.11; on Debian and Ubuntu, as root: apt-get update && apt-get install -y "
        "python3.11-venv\n"
    )
