"""Plans of small runs, whose training child is a few lines of Python, and launchers as processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from left_behind import bystanders, left_of
from plans import make_plan

from appliance.processes import Process
from appliance.record.events import StepMetrics, parse_metrics
from appliance.record.plan import ExpectedAttestation, RunPlan
from appliance.terms.environment import PLAN_VARIABLE, RAY_DIR_VARIABLE, ray_dir
from appliance.terms.schemes import Scheme

# As written by a real run on two cores; only the numbers of a person's interest differ from step to step.
METRICS_LINE = {
    "step": 1,
    "time_s": 71.204,
    "reward_mean": 0.2148,
    "response_tokens_mean": 4.25,
    "rollout_tokens_per_s": 412.7,
    "rollout_s": 2.636,
    "logprob_s": 0.41,
    "update_s": 0.83,
    "sync_s": 0.11,
    "step_s": 4.05,
    "proof_s": None,
    "scheme": "int8",
    "emulated": False,
    "mismatch_k3_kl": 1.2e-4,
    "mismatch_kl": -3e-5,
    "probs_diff_mean": 0.0031,
    "probs_diff_max": 0.071,
    "is_weight_mean": 1.0004,
    "is_weight_std": 0.0152,
    "is_weight_max": 1.12,
    "is_ess": 0.9998,
    "is_truncated_fraction": 0.0,
    "clip_fraction": 0.0,
    "clipped_negative_fraction": 0.0,
    "grad_norm": 0.61,
    "entropy": 1.31,
}


def _step_line(step: int, **changes: object) -> StepMetrics:
    """One step's metrics, through the parser, as a run's file gives them."""
    parsed = parse_metrics(json.dumps({**METRICS_LINE, "step": step, "time_s": 60.0 + 4.0 * step, **changes}))
    assert parsed is not None
    return parsed


def _small_plan(root: Path, *, argv: tuple[str, ...] = (), name: str = "small-1", steps: int = 3) -> RunPlan:
    """A plan whose model and data are in the cache already."""
    run_dir = root / name
    plan = make_plan(run_dir, cache_dir=str(root / ".cache"), steps=steps, validate_every=steps)
    data = root / ".cache" / "data"
    data.mkdir(parents=True, exist_ok=True)
    for split in ("train", "val"):
        (data / f"{split}.parquet").touch()
    parquets = {"train_parquet": str(data / "train.parquet"), "val_parquet": str(data / "val.parquet")}
    return plan.replace(
        task_files=plan.task_files.replace(**parquets),
        argv=argv,
        env=(
            (PLAN_VARIABLE, str(run_dir / "plan.json")),
            (RAY_DIR_VARIABLE, ray_dir(run_dir, temporary=Path(tempfile.gettempdir()))),
            ("PYTHONUNBUFFERED", "1"),
        ),
        pins=(("rich", "1.0"),),
        attestations=(
            ExpectedAttestation(role="rollout", rank=0, scheme=Scheme.INT8),
            ExpectedAttestation(role="trainer", rank=0, scheme=Scheme.BF16),
        ),
    )


def _python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def _wait_until(condition: Callable[[], object], *, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def _is_alive(pid: int) -> bool:
    """A zombie whose new parent has not buried it yet is not alive."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


_LAUNCHER = """
import sys
from pathlib import Path
from appliance import console
from appliance.errors import ApplianceError
from appliance.record.plan import read_plan
from appliance.launch.train import run_training
try:
    sys.exit(run_training(read_plan(Path(sys.argv[1])), recipe_yaml="name: small\\n", findings=(), name="small",
                          json_mode="--json" in sys.argv, may_restart="--may-restart" in sys.argv))
except ApplianceError as error:
    sys.stderr.write(error.message + "\\n" + error.hint + "\\n")
    sys.exit(error.exit_code)
finally:  # as `appliance` ends
    console.drop_unwritten()
"""


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a launcher on a plan, as a process of its own; what is left of it at the end of a test is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(plan: RunPlan, *options: str) -> subprocess.Popen[str]:
        path = tmp_path / f"{plan.name}.plan.json"
        plan.write(path)
        process = subprocess.Popen(
            [*_python(_LAUNCHER), str(path), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "TERM": "dumb"},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


# Test files import nothing from here: there are several conftest.py. They ask for functions as fixtures.


@pytest.fixture(scope="session")
def step_line() -> Callable[..., StepMetrics]:
    return _step_line


@pytest.fixture(scope="session")
def small_plan() -> Callable[..., RunPlan]:
    return _small_plan


@pytest.fixture(scope="session")
def python() -> Callable[..., tuple[str, ...]]:
    return _python


@pytest.fixture
def processes_of() -> Callable[[Path], list[Process]]:
    """What the test left of a run. Launchers are among them while they live."""
    since = bystanders()
    return lambda run_dir: left_of(run_dir, since=since)


@pytest.fixture(scope="session")
def wait_until() -> Callable[..., None]:
    return _wait_until


@pytest.fixture(scope="session")
def is_alive() -> Callable[..., bool]:
    return _is_alive
