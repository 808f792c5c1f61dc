"""Problems in words, whose prompts are too many tokens for one step of the engine, and a signal that ends the training:
real vLLM, verl and Ray."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from left_behind import bystanders, left_of
from ray_from_outside import REFUSED_BY_GRPC, REFUSED_BY_HTTP, Seen, look
from trainings import Finished, command, holding, ray_dir

from appliance.preflight.probes import read_host
from appliance.quant.files import PROFILE_FILE
from appliance.record.plan import read_plan
from appliance.terms.devices import automatic_scheme
from appliance.terms.schemes import Scheme

pytestmark = [pytest.mark.e2e(minutes=2), pytest.mark.long]

STEPS, PROMPTS = 2, 16
QUESTION = "Anna has {} crates. " + "She puts 2 apples in each crate. " * 10 + "How many are they?"
ANSWER = "She puts 20 in each.\n{0}*20=<<{0}*20={1}>>{1}\n#### {1}"
ROWS = [{"question": QUESTION.format(n), "answer": ANSWER.format(n, n * 20)} for n in range(40)]
SETS = (
    "task.val_size=8",
    "trainer.steps=200",
    "trainer.validate_before=false",
    "rollout.scheme=auto",
    f"batch.prompts_per_step={PROMPTS}",
    "rollout.samples_per_prompt=2",
    *("correction.method=sequence-mask", "correction.cap=null", "correction.bounds=[0.8, 1.25]"),
)


@pytest.fixture(scope="module")
def seen_and_stopped(
    tmp_path_factory: pytest.TempPathFactory, with_tiny_cache: Callable[[Path], Path]
) -> tuple[Seen, Finished]:
    """SIGTERM after two steps. Before it, somebody from outside asks its Ray."""
    root = with_tiny_cache(tmp_path_factory.mktemp("words"))
    run_dir, file = root / "words", root / "train.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    since = bystanders()
    line = command(root, f"task.train_file={file}", *SETS, name="words", recipe="gsm8k-tiny-int8")
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics, deadline = run_dir / "metrics.jsonl", time.monotonic() + 600
    while not has_steps(metrics) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.5)
    assert has_steps(metrics), process.communicate(timeout=60)[1][-3000:]
    try:
        seen = look(ray_dir(run_dir), run_dir=run_dir, launcher=process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=300)
    left = tuple(map(str, left_of(run_dir, since=since)))
    return seen, Finished(code=process.returncode, stdout=stdout, stderr=stderr, run_dir=run_dir, left=left)


def has_steps(metrics: Path) -> bool:
    return metrics.exists() and len(metrics.read_text().splitlines()) >= STEPS


@pytest.fixture(scope="module")
def stopped(seen_and_stopped: tuple[Seen, Finished]) -> Finished:
    return seen_and_stopped[1]


def test_long_prompts_train_in_the_scheme_that_auto_means(stopped: Finished, tmp_path: Path) -> None:
    run_dir = stopped.run_dir
    plan = read_plan(run_dir / "plan.json")
    tokens = PROMPTS * min(len(row["question"]) for row in ROWS)  # a byte is a token; samples of a prompt share it
    assert tokens > int(next(choice.value for choice in plan.choices if choice.key == "engine.max_batched_tokens"))
    lines = stopped.json_lines("metrics.jsonl")[:STEPS]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert any(0 < line["is_truncated_fraction"] < 1 for line in lines)  # the masked sequences
    meant, why = automatic_scheme("cpu", cpu_flags=read_host(tmp_path).cpu_flags)
    assert ("rollout.scheme", str(meant), why) in [(each.key, each.value, each.why) for each in plan.choices]
    assert {line["scheme"] for line in lines} == {str(meant)}
    attested = json.loads((run_dir / "attest" / "rollout-0-0.json").read_text())
    assert attested["scheme"] == str(meant)
    assert (run_dir / "profile" / PROFILE_FILE).is_file() is (meant is Scheme.INT8)


def test_a_signal_in_mid_training_ends_everything(stopped: Finished) -> None:
    """Its state is saved, code 75, no process left."""
    assert stopped.code == 75, stopped.stderr[-3000:]
    assert stopped.left == ()
    record = json.loads((stopped.run_dir / "run.json").read_text())
    last = stopped.json_lines("metrics.jsonl")[-1]["step"]
    assert (record["state"], record["exit_code"], record["reason"]) == (
        "stopped",
        75,
        f"stopped by SIGTERM, the state after step {last} is saved",
    )
    assert (stopped.run_dir / "checkpoints" / f"global_step_{last}" / "data.pt").is_file()
    assert not ray_dir(stopped.run_dir).exists()


def test_only_its_token_opens_its_ray(seen_and_stopped: tuple[Seen, Finished]) -> None:
    """Over the network, on one host: Ray's agent, which starts programs, where it has its port, and two other parts."""
    seen, stopped = seen_and_stopped
    assert seen.modes == (0o700, 0o600) and len(seen.token) == 64
    assert seen.http["runtime_env_agent"] == REFUSED_BY_HTTP
    assert set(seen.http.values()) == {REFUSED_BY_HTTP}, seen.http
    assert seen.store == REFUSED_BY_GRPC
    assert seen.telling == ()
    assert holding(stopped.run_dir, seen.token) == [] and seen.token not in stopped.stdout + stopped.stderr
