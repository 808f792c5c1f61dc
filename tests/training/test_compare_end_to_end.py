"""A real comparison of two arms, one step each: stopped by Ctrl-C in each of its runs, started again, and shown."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.compare.results import read_final
from appliance.compare.stored import StoredRun, read_results

pytestmark = [pytest.mark.e2e, pytest.mark.long]

PROBLEMS = 64
TEXT = f"""\
recipe: arithmetic-tiny-int8
set: {{trainer.steps: 1, trainer.validate_before: false, correction.cap: , cluster.run_dir: made}}
arms:
  bf16: {{rollout.scheme: bf16, correction.method: none}}
  int8-tis:
seeds: [3]
baseline: bf16
validation: {PROBLEMS}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, with_tiny_cache: Callable[[Path], Path]) -> Path:
    folder = tmp_path_factory.mktemp("comparison")
    (folder / "made").mkdir()
    with_tiny_cache(folder / "made")
    (folder / "both.yaml").write_text(TEXT)
    return folder


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "appliance", "compare", "both.yaml", *options]
    environment = {**os.environ, "NO_COLOR": "1"}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def stopped_in(folder: Path, run: str) -> tuple[int, str]:
    """(exit code, stderr) of the comparison when it gets SIGINT as the trainer of a run has begun."""
    process = start(folder)
    log = folder / "made" / "both" / run / "logs" / "1" / "train.log"
    deadline = time.monotonic() + 600
    while not log.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    return process.returncode, stderr


@pytest.fixture(scope="module")
def stopped(folder: Path) -> tuple[int, str]:
    """(exit code, stderr) of a comparison that was stopped in its first run."""
    return stopped_in(folder, "bf16-seed3")


@pytest.fixture(scope="module")
def half(folder: Path, stopped: tuple[int, str]) -> list[StoredRun]:
    """Stored results of a comparison that was stopped in its second run."""
    code, stderr = stopped_in(folder, "int8-tis-seed3")
    assert code == 130, stderr
    return read_results(folder / "made" / "both" / "both.results.jsonl")


@pytest.fixture(scope="module")
def finished(folder: Path, half: list[StoredRun]) -> tuple[str, str]:
    """(stdout, stderr) of the same command, started again."""
    process = start(folder, "--json")
    stdout, stderr = process.communicate(timeout=1200)
    assert process.returncode == 0, stderr[-3000:]
    return stdout, stderr


def test_ctrl_c_ends_it_and_says_how_to_go_on(stopped: tuple[int, str]) -> None:
    code, stderr = stopped
    assert code == 130, stderr
    assert stderr.endswith(
        "error: the comparison was stopped\nhint: `appliance compare both.yaml` runs what is missing\n"
    )


def test_a_run_that_has_ended_is_validated_and_written_before_the_next_one_begins(
    folder: Path, half: list[StoredRun]
) -> None:
    assert [(line.result.arm, line.result.seed, len(line.result.rewards)) for line in half] == [("bf16", 3, PROBLEMS)]
    assert "| bf16 | 3 | done | 1 |" in (folder / "made" / "both" / "both.md").read_text()


def test_a_run_that_was_stopped_is_set_aside_and_done_again(folder: Path, finished: tuple[str, str]) -> None:
    said = "int8-tis, seed 3: stopped before it saved anything, set aside as int8-tis-seed3.aside-1\n"
    assert said in finished[1]
    states = {path.parent.name: json.loads(path.read_text())["state"] for path in folder.glob("made/both/*/run.json")}
    ended = {"bf16-seed3": "done", "int8-tis-seed3": "done"}
    assert states == {**ended, "bf16-seed3.aside-1": "stopped", "int8-tis-seed3.aside-1": "stopped"}


def test_every_model_is_validated_in_bf16_on_the_same_problems(folder: Path, finished: tuple[str, str]) -> None:
    both = folder / "made" / "both"
    for name in ("bf16-seed3", "int8-tis-seed3"):
        rewards = read_final(both / name)
        assert len(rewards) == PROBLEMS and set(rewards) <= {0.0, 1.0}
    last = json.loads((both / "bf16-seed3" / "metrics.jsonl").read_text().splitlines()[-1])
    rewards = read_final(both / "bf16-seed3")
    # The trainer's own validation of the BF16 arm has the same problems; batches differ, and with them a near tie.
    assert sum(rewards) / PROBLEMS == pytest.approx(last["val_reward_mean"], abs=2 / PROBLEMS)


def test_the_result_has_a_row_for_each_arm_and_lies_in_the_folder(folder: Path, finished: tuple[str, str]) -> None:
    document = json.loads(finished[0])
    assert [(arm["arm"], len(arm["runs"]), arm["runs"][0]["step"]) for arm in document["arms"]] == [
        ("bf16", 1, [1]),
        ("int8-tis", 1, [1]),
    ]
    assert document["arms"][1]["inactive"] is True and document["arms"][1]["difference"]["mean"] is not None
    both = folder / "made" / "both"
    assert json.loads((both / "both.json").read_text()) == document
    assert (both / "both.html").read_text().startswith("<!doctype html>")
    assert (both / "both.md").read_text().startswith("# both\n")
    assert not list(both.glob(".compare-*"))


def test_a_comparison_that_is_done_only_shows_its_result(folder: Path, finished: tuple[str, str]) -> None:
    process = start(folder)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "2 runs in made/both, 2 of them done\n" in stderr and "run 1 of" not in stderr
    assert [line.split()[0] for line in stdout.splitlines() if line.strip().startswith(("bf16 ", "int8-tis "))] == [
        "bf16",
        "int8-tis",
    ]
