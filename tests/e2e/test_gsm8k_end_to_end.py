"""Problems in words, whose prompts are too many tokens for one step of the engine: real vLLM, verl and Ray."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from trainings import train

from appliance.plan.read import read_plan

pytestmark = pytest.mark.e2e

STEPS, PROMPTS = 2, 16


def test_long_prompts_train(with_tiny_cache: Callable[[Path], Path], tmp_path: Path) -> None:
    question = "Anna has {} crates. " + "She puts 2 apples in each crate. " * 10 + "How many are they?"
    answer = "She puts 20 in each.\n{0}*20=<<{0}*20={1}>>{1}\n#### {1}"
    rows = [{"question": question.format(n), "answer": answer.format(n, n * 20)} for n in range(40)]
    file = tmp_path / "train.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    batch = (f"batch.prompts_per_step={PROMPTS}", "rollout.samples_per_prompt=2")
    sets = (
        f"task.train_file={file}",
        "task.val_size=8",
        f"trainer.steps={STEPS}",
        "trainer.validate_before=false",
        *batch,
    )
    done = train(with_tiny_cache(tmp_path), *sets, name="words", recipe="gsm8k-tiny-int8")
    assert done.code == 0, done.stderr[-4000:]
    plan = read_plan(done.run_dir / "plan.json")
    tokens = PROMPTS * min(len(row["question"]) for row in rows)  # a byte is a token; samples of a prompt share it
    assert tokens > int(next(choice.value for choice in plan.choices if choice.key == "engine.max_batched_tokens"))
    assert [line["step"] for line in done.json_lines("metrics.jsonl")] == list(range(1, STEPS + 1))
