"""examples/calculator as it is: a tiny model learns to call a tool where it used to guess, over two turns."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from trainings import LEARNED_WITHIN_S, Finished, train

pytestmark = [pytest.mark.e2e(minutes=4), pytest.mark.long]

EXAMPLE = Path(__file__).parents[2] / "examples" / "calculator"
FILES = {"train_file": "problems.jsonl", "val_file": "unseen.jsonl", "tools": "tools.py"}


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    sets = [f"task.{key}={EXAMPLE / name}" for key, name in FILES.items()]
    done = train(tmp_path_factory.mktemp("calculator"), *sets, name="calculator", recipe=str(EXAMPLE / "recipe.yaml"))
    assert done.code == 0, done.stderr[-3000:]
    return done


def test_it_learns_to_call_the_tool(learned: Finished) -> None:
    lines = learned.json_lines("metrics.jsonl")
    before, after = lines[0]["val_reward_mean"], lines[-1]["val_reward_mean"]
    took = f"{lines[-1]['time_s']:.0f} s, {learned.processor_s:.0f} s of processors"  # the model is made in it
    sys.stdout.write(f"calculator: {before:.3f} before, {after:.3f} after {lines[-1]['step']} steps, {took}\n")
    assert before <= 0.10
    assert after >= 0.90 and lines[-1]["val_reward_bf16_mean"] >= 0.90
    assert {line["scheme"] for line in lines} == {"int8"}
    assert 0 < learned.processor_s < LEARNED_WITHIN_S


def test_the_share_of_right_calls_rises(learned: Finished) -> None:
    steps = learned.json_lines("metrics.jsonl")[1:]
    right = [step["tool_calls_mean"] * (1 - step["tool_calls_failed_fraction"]) for step in steps]
    assert sum(right[:3]) / 3 < 0.6 and sum(right[-3:]) / 3 > 0.7
    for step in steps:
        assert 1 <= step["turns_mean"] <= 2 and step["tool_tokens_mean"] > 0
        assert step["response_tokens_mean"] + step["tool_tokens_mean"] <= 96
        assert 0 <= step["mismatch_k3_kl"] < 0.015 and step["reward_failures"] == 0


def test_who_said_what_is_kept_and_shown(learned: Finished) -> None:
    last = learned.json_lines("samples.jsonl")[-1]["validation"]
    for sample in last:
        who = [name for name, _ in sample["turns"]]
        assert who in (["assistant", "tool", "assistant"], ["assistant"])
        assert sample["response"] == sample["turns"][-1][1]
    page = (learned.run_dir / "report.html").read_text()
    assert "Tool calls" in page and "a tool</p><pre>" in page


def test_the_schemas_lie_beside_the_data(learned: Finished) -> None:
    plan = json.loads((learned.run_dir / "plan.json").read_text())
    (schema,) = json.loads((Path(plan["task_files"]["train_parquet"]).parent / "tools.json").read_text())
    assert schema["function"]["name"] == "multiply" and plan["task"]["max_turns"] == 2
