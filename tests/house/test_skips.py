"""The list of skips does its work: what it does not name fails the run. With two workers as with none."""

from __future__ import annotations

import pytest

SKIPPING_TEST = 'import pytest\n\ndef test_a():\n    pytest.skip("no docker here")\n\ndef test_b():\n    pass\n'


@pytest.fixture(params=["alone", "two workers"])
def workers(request: pytest.FixtureRequest, two_workers: tuple[str, ...]) -> tuple[str, ...]:
    return two_workers if request.param == "two workers" else ()


def test_unlisted_skip_fails(run_pytest, workers: tuple[str, ...]) -> None:
    skips = "# a comment\ntests/test_it.py::test_a: another reason\n"
    result = run_pytest({"test_it.py": SKIPPING_TEST}, *workers, skips=skips)
    assert result.returncode == 1
    assert (
        "this skip is not listed in tests/skips.txt:\ntests/test_it.py::test_a: no docker here\n"
        "counts: 2 to run, 0 deselected, 1 passed, 1 failed, 0 skipped\n"
    ) in result.stdout


def test_unlisted_skip_of_a_module_fails(run_pytest, workers: tuple[str, ...]) -> None:
    test = 'import pytest\n\npytest.importorskip("no_such_module")\n'
    result = run_pytest({"test_it.py": test, "test_other.py": "def test_b():\n    pass\n"}, *workers)
    assert result.returncode != 0
    assert (
        "this skip is not listed in tests/skips.txt:\n"
        "tests/test_it.py: could not import 'no_such_module': No module named 'no_such_module'\n"
    ) in result.stdout


def test_listed_skip_passes(run_pytest, workers: tuple[str, ...]) -> None:
    result = run_pytest({"test_it.py": SKIPPING_TEST}, *workers, skips="tests/test_it.py::*: no docker here\n")
    assert result.returncode == 0
    assert "counts: 2 to run, 0 deselected, 1 passed, 1 skipped\n" in result.stdout


@pytest.mark.parametrize("marker", ["torture", "long"])
def test_what_is_left_out_is_counted(run_pytest, workers: tuple[str, ...], marker: str) -> None:
    """By `-k`, and by the markers that keep the longest out of `make test`."""
    long = f"\nimport pytest\n\n@pytest.mark.{marker}\ndef test_bc():\n    pass\n"
    result = run_pytest({"test_it.py": SKIPPING_TEST + long}, *workers, "-k", "test_b")
    assert result.returncode == 0
    assert "counts: 1 to run, 2 deselected, 1 passed, 0 skipped\n" in result.stdout
