"""So many steps in one go, and the half of them, SIGKILL to the whole run, and the other half: the same tokens, metrics
and weights, with everything that a resume has to bring back. `make torture`."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from killable import Run
from test_fp16_end_to_end import OVERFLOWING
from test_val_sets_end_to_end import RECIPE as VAL_SETS

from appliance.record.checkpoints import checkpoint_folder

pytestmark = pytest.mark.torture

OF_A_CLOCK = "_s"
CALCULATOR = Path(__file__).parents[2] / "examples" / "calculator"
WEIGHTS = "model/model.safetensors"


@dataclass(frozen=True)
class Case:
    """steps: of the run; it is killed once the half of them is saved.  in_order: results are kept as they were asked
    for. Dynamic sampling keeps them as they come, so that samples.jsonl shows another prompt of the same batch."""

    steps: int
    sets: dict[str, str] = field(default_factory=dict)
    in_order: bool = True


CASES = {
    # The rate still rises when it is killed: one that began anew would be another.
    "warm-up": Case(20, {"optimizer.warmup_steps": "15"}),
    "dapo-uaq-clipping": Case(
        8,
        {
            "algorithm.kind": "dapo",
            "algorithm.overlong_tokens": "4",
            "algorithm.overlong_penalty": "0.5",
            "batch.generation_prompts": "16",
            "correction.uaq_scale": "1.5",
            "correction.method": "calibrated-clipping",
            "correction.shadow_every": "3",
        },
        in_order=False,
    ),
    # Rewards so large that gradients overflow: what losses are scaled by has fallen when it is killed, and counts.
    "fp16": Case(6, OVERFLOWING | {"cluster.gpus_per_node": "2"}),
    "two-ranks": Case(6, {"cluster.gpus_per_node": "2"}),
    # A turn's seed comes from the sample's, and what is computed together is the same again.
    "tools": Case(
        4,
        {
            "model.builtin": "tiny-calculator",
            "task.kind": "own",
            "task.train_file": str(CALCULATOR / "problems.jsonl"),
            "task.val_file": str(CALCULATOR / "unseen.jsonl"),
            "task.prompt": "question",
            "task.truth": "answer",
            "task.rewards": "[{name: exact}]",
            "task.tools": str(CALCULATOR / "tools.py"),
            "task.max_prompt_tokens": "16",
            "task.max_response_tokens": "96",
        },
    ),
    "val-sets": Case(4, {**VAL_SETS, "trainer.validate_every": "1"}),
    # Of the adapter and its optimizer; what is dropped is drawn anew.
    "lora": Case(4, {"model.lora.rank": "8", "model.lora.dropout": "0.1", "optimizer.learning_rate": "2e-3"}),
    # With precision that rises around the kill, for both sides; the old log-probs are the rollouts'.
    "one-flow": Case(
        6,
        {
            "trainer.forward": "rollout",
            "trainer.old_log_probs": "rollout",
            "batch.prompts_per_step": "16",
            "batch.mini_batch_prompts": "8",
            "correction.cap": "0.9",
            "guard.bad_steps": "1",
            "guard.cooling_steps": "0",
            "guard.actions": "[raise-precision, bf16]",
        },
    ),
    # One level a step: it is killed while the engines have a quarter in BF16 and the half is decided, but not sent.
    "governed": Case(
        8,
        {
            "guard.k3_kl": "1e-12",
            "guard.bad_steps": "1",
            "guard.cooling_steps": "0",
            "guard.actions": "[warn, tighten, raise-precision, bf16]",
        },
    ),
}


def without_times(run: Run) -> list[dict[str, Any]]:
    """Every line of metrics without what a clock says."""
    lines = run.lines("metrics.jsonl")
    return [{key: value for key, value in line.items() if not key.endswith(OF_A_CLOCK)} for line in lines]


def samples(run: Run, case: Case) -> list[Any]:
    """(step, validation, training) of each line."""
    lines = run.lines("samples.jsonl")
    return [(line["step"], line["validation"], line["training"] if case.in_order else None) for line in lines]


@pytest.mark.parametrize("name", CASES)
def test_a_run_in_two_halves_is_the_run_in_one_go(name: str, new_run: Callable[..., Run]) -> None:
    case = CASES[name]
    half = case.steps // 2
    sets = {**case.sets, "trainer.steps": str(case.steps), "checkpoint.every_steps": str(half)}
    whole, halves = new_run(f"whole-{name}", **sets), new_run(f"halves-{name}", **sets)
    whole.start()
    assert whole.end() == 0, whole.log_text[-3000:]
    halves.start()
    saved = f"step {half} is saved"
    assert halves.wait_for(lambda: saved in [event["what"] for event in halves.events("checkpoint")]), halves.log_text[
        -3000:
    ]
    halves.launcher.kill()
    assert halves.end() == -signal.SIGKILL and halves.steps[-1] < case.steps
    halves.start()
    assert halves.end() == 0, halves.log_text[-3000:]
    assert [event["what"] for event in halves.events("resume")] == [f"attempt 2 resumes after step {half}"]
    assert halves.steps == whole.steps and [step for step in whole.steps if step] == list(range(1, case.steps + 1))
    assert without_times(halves) == without_times(whole)
    assert samples(halves, case) == samples(whole, case)
    assert len(samples(whole, case)) >= case.steps
    assert halves.lines("clipping.jsonl") == whole.lines("clipping.jsonl")
    assert bool(whole.lines("clipping.jsonl")) == ("calibrated-clipping" in case.sets.values())
    assert (halves.run_dir / WEIGHTS).read_bytes() == (whole.run_dir / WEIGHTS).read_bytes()
    assert halves.damaged_files() == [] and halves.processes() == []
    if name == "fp16":
        scales = [line["grad_scale"] for line in whole.lines("metrics.jsonl")]
        assert scales[half - 1] < 65536, scales
        saved = [checkpoint_folder(each.run_dir, step=case.steps) / "actor" / "scaler.json" for each in (whole, halves)]
        assert saved[0].read_bytes() == saved[1].read_bytes()
    if name == "one-flow":
        assert {line["mismatch_k3_kl"] for line in whole.lines("metrics.jsonl") if line["step"]} == {0.0}
    if name == "governed":
        in_bf16 = [line["bf16_layers"] for line in whole.lines("metrics.jsonl")]
        assert 0 < in_bf16[half] < in_bf16[half + 1] < in_bf16[half + 2], in_bf16
    if case.sets.get("algorithm.kind") == "dapo":
        assert sum(line["filtered_prompts"] for line in whole.lines("metrics.jsonl")) > 0
