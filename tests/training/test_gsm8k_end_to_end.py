"""Problems in words, whose prompts are too many tokens for one step of the engine: real vLLM, verl and Ray."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from trainings import train

from appliance.preflight.probes import read_host
from appliance.quant.files import PROFILE_FILE
from appliance.record.plan import read_plan
from appliance.terms.devices import automatic_scheme
from appliance.terms.schemes import Scheme

pytestmark = pytest.mark.e2e

STEPS, PROMPTS = 2, 16


def test_long_prompts_train_in_the_scheme_that_auto_means(
    with_tiny_cache: Callable[[Path], Path], tmp_path: Path
) -> None:
    question = "Anna has {} crates. " + "She puts 2 apples in each crate. " * 10 + "How many are they?"
    answer = "She puts 20 in each.\n{0}*20=<<{0}*20={1}>>{1}\n#### {1}"
    rows = [{"question": question.format(n), "answer": answer.format(n, n * 20)} for n in range(40)]
    file = tmp_path / "train.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    mask = ("correction.method=sequence-mask", "correction.cap=null", "correction.bounds=[0.8, 1.25]")
    batch = (f"batch.prompts_per_step={PROMPTS}", "rollout.samples_per_prompt=2")
    sets = (
        f"task.train_file={file}",
        "task.val_size=8",
        f"trainer.steps={STEPS}",
        "trainer.validate_before=false",
        "rollout.scheme=auto",
        *batch,
        *mask,
    )
    done = train(with_tiny_cache(tmp_path), *sets, name="words", recipe="gsm8k-tiny-int8")
    assert done.code == 0, done.stderr[-4000:]
    plan = read_plan(done.run_dir / "plan.json")
    tokens = PROMPTS * min(len(row["question"]) for row in rows)  # a byte is a token; samples of a prompt share it
    assert tokens > int(next(choice.value for choice in plan.choices if choice.key == "engine.max_batched_tokens"))
    lines = done.json_lines("metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert any(0 < line["is_truncated_fraction"] < 1 for line in lines)  # the masked sequences
    meant, why = automatic_scheme("cpu", cpu_flags=read_host(tmp_path).cpu_flags)
    assert ("rollout.scheme", str(meant), why) in [(each.key, each.value, each.why) for each in plan.choices]
    assert {line["scheme"] for line in lines} == {str(meant)}
    attested = json.loads((done.run_dir / "attest" / "rollout-0-0.json").read_text())
    assert attested["scheme"] == str(meant)
    assert (done.run_dir / "profile" / PROFILE_FILE).is_file() is (meant is Scheme.INT8)
