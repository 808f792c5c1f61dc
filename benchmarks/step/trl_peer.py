"""TRL on the work of `benchmarks.step`, in its own process: a JSON line on stdout for each step.

`GRPOTrainer` as TRL releases it. Where it generates with vLLM, that is in this process (`colocate`) and in BF16, with
our plugin, without which vLLM on a CPU takes no weight update; the environment is `VLLM_ON_A_CPU` of the benchmark.
Everything else is TRL's and transformers' default.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback

from appliance import console
from appliance.tasks.graders import number
from appliance.tasks.task import Response


def reward(completions: list[list[dict[str, str]]], answer: list[str], **_: object) -> list[float]:
    return [number(Response(turns[0]["content"], truth)) for turns, truth in zip(completions, answer, strict=True)]


class StepTimes(TrainerCallback):
    """Prints the seconds of each optimiser step, generation and weight update included."""

    def __init__(self) -> None:
        self.started = 0.0
        self.seconds = 0.0

    def on_step_begin(self, args: object, state: object, control: object, **_: object) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
        self.seconds = time.perf_counter() - self.started

    def on_log(self, args: object, state: object, control: object, logs: dict[str, float], **_: object) -> None:
        if "reward" in logs:
            line = {
                "step_s": self.seconds,
                "reward_mean": logs["reward"],
                "response_tokens_mean": logs["completions/mean_length"],
            }
            console.out(json.dumps(line))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--problems", type=Path, required=True, help="JSON lines with `system`, `question`, `answer`")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--prompts", type=int, required=True, help="prompts of a step")
    parser.add_argument("--samples", type=int, required=True, help="samples of each prompt")
    parser.add_argument("--response-tokens", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--micro-batch", type=int, required=True, help="sequences of one forward")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--vllm", action="store_true")
    parser.add_argument("--uncorrected", action="store_true", help="no importance sampling for what vLLM sampled")
    options = parser.parse_args()
    from trl import GRPOConfig, GRPOTrainer  # fetched by the benchmark, and by it alone

    rows = [json.loads(line) for line in options.problems.read_text().splitlines()]
    problems = [
        {
            "prompt": [
                {"role": "system", "content": row["system"]},
                {"role": "user", "content": row["question"]},
            ],
            "answer": row["answer"],
        }
        for row in rows
    ]
    settings = GRPOConfig(
        use_vllm=options.vllm,
        vllm_mode="colocate",
        vllm_max_model_length=128,
        vllm_importance_sampling_correction=not options.uncorrected,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=2.0,
        use_cpu=True,
        bf16=True,  # FP32 masters, and products in BF16 under autocast
        gradient_checkpointing=options.checkpointing,
        max_steps=options.steps,
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=options.prompts * options.samples // options.micro_batch,
        num_generations=options.samples,
        max_completion_length=options.response_tokens,
        learning_rate=options.learning_rate,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        output_dir="trl",
    )
    trainer = GRPOTrainer(
        model=str(options.model), reward_funcs=reward, args=settings, train_dataset=Dataset.from_list(problems)
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(StepTimes())
    trainer.train()
    return 0


if __name__ == "__main__":
    sys.exit(main())
