"""Two workers, as `make test` has them: a file is run whole, by the one it suits, and costly things are made once."""

from __future__ import annotations

import re

SAYS_WHO = """
import os

def test_it(record_property):
    record_property("said", f"{__name__} by {os.environ['PYTEST_XDIST_WORKER']}")
"""


def by_worker(said: str) -> dict[str, str]:
    """Module to worker, of the lines that SAYS_WHO adds to the summary."""
    return dict(re.findall(r"^(\w+) by (\w+)$", said, re.M))


def test_trainings_are_begun_by_one_and_what_computes_by_the_other(run_pytest, two_workers: tuple[str, ...]) -> None:
    training = "import pytest\n\npytestmark = pytest.mark.e2e\n" + SAYS_WHO
    result = run_pytest({"test_a.py": SAYS_WHO, "test_b.py": SAYS_WHO, "test_z.py": training}, *two_workers)
    assert result.returncode == 0, result.stdout
    found = by_worker(result.stdout)
    assert (found["test_z"], found["test_b"]) == ("gw0", "gw1") and "test_a" in found


def test_a_file_has_one_worker_and_so_has_the_folder_that_counts_its_cases(run_pytest, two_workers) -> None:
    """Two files alone would go to one worker each, as the next test shows."""
    again = SAYS_WHO.replace("test_it", "test_again").replace("{__name__}", "{__name__}_again")
    result = run_pytest({"fuzz/test_a.py": SAYS_WHO + again, "fuzz/test_b.py": SAYS_WHO}, *two_workers)
    assert result.returncode == 0, result.stdout
    found = by_worker(result.stdout)
    assert len(found) == 3 and len(set(found.values())) == 1


def test_what_both_ask_for_is_made_once(run_pytest, two_workers: tuple[str, ...]) -> None:
    asks = """
import time
from two_workers import once

def test_asks(folder_of_workers, record_property):
    log = folder_of_workers / "log"

    def make():
        with log.open("a") as file:
            file.write("made ")
        time.sleep(1)  # long enough for the other one to ask
        return ["what", "it", "is"]

    assert once(folder_of_workers / "it", make) == ["what", "it", "is"]
    assert log.read_text() == "made "
"""
    result = run_pytest({"test_a.py": asks + SAYS_WHO, "test_b.py": asks + SAYS_WHO}, *two_workers)
    assert result.returncode == 0, result.stdout
    assert set(by_worker(result.stdout).values()) == {"gw0", "gw1"}
    assert "counts: 4 to run, 0 deselected, 4 passed, 0 skipped\n" in result.stdout
