"""The list of skips does its work: what it does not name fails the run."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

SKIPPING_TEST = 'import pytest\n\ndef test_a():\n    pytest.skip("no docker here")\n\ndef test_b():\n    pass\n'


def run_pytest(root: Path, folder: Path, *, test: str, skips: str) -> subprocess.CompletedProcess[str]:
    (folder / "tests").mkdir()
    shutil.copy(root / "tests/conftest.py", folder / "tests")
    (folder / "tests/skips.txt").write_text(skips)
    (folder / "tests/test_it.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "--rootdir", ".", "-p", "no:cacheprovider", "tests"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_unlisted_skip_fails(root: Path, tmp_path: Path) -> None:
    skips = "# a comment\ntests/test_it.py::test_a: another reason\n"
    result = run_pytest(root, tmp_path, test=SKIPPING_TEST, skips=skips)
    assert result.returncode == 1
    assert (
        "this skip is not listed in tests/skips.txt:\ntests/test_it.py::test_a: no docker here\n"
        "counts: 2 to run, 0 deselected, 1 passed, 1 failed, 0 skipped\n"
    ) in result.stdout


def test_unlisted_skip_of_a_module_fails(root: Path, tmp_path: Path) -> None:
    test = 'import pytest\n\npytest.importorskip("no_such_module")\n'
    result = run_pytest(root, tmp_path, test=test, skips="")
    assert result.returncode != 0
    assert (
        "this skip is not listed in tests/skips.txt:\n"
        "tests/test_it.py: could not import 'no_such_module': No module named 'no_such_module'\n"
    ) in result.stdout


def test_listed_skip_passes(root: Path, tmp_path: Path) -> None:
    result = run_pytest(root, tmp_path, test=SKIPPING_TEST, skips="tests/test_it.py::*: no docker here\n")
    assert result.returncode == 0
    assert "counts: 2 to run, 0 deselected, 1 passed, 1 skipped\n" in result.stdout
