"""GRPO with TRL: a tiny model learns to add. vLLM generates in this process, quantised as FLASHRL_CONFIG says.

    FLASHRL_CONFIG=int8 python train.py

README.md says what is set here, and why.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

ON_A_CPU = {  # before vLLM is imported; TRL passes no such argument on
    "TORCHDYNAMO_DISABLE": "1",  # nothing is compiled
    "VLLM_USE_AOT_COMPILE": "0",  # or vLLM insists on compiling: TRL cannot say `enforce_eager`
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # vLLM would pin the trainer's threads, too: it is one process
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GB
}
if not torch.cuda.is_available():
    for name, value in ON_A_CPU.items():
        os.environ.setdefault(name, value)

from datasets import Dataset
from torch import Tensor
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from vllm import LLM, SamplingParams

from appliance.quant.mismatch import measure_mismatch
from appliance.tasks.built_in import arithmetic
from appliance.tasks.library import TINY_MODELS
from appliance.tasks.rows import Problem
from appliance.tasks.tiny_model import make_tiny_model

LONGEST_ANSWER = 6  # tokens


def right_sum(completions: list[list[dict[str, str]]], truth: list[str], **_: object) -> list[float]:
    pairs = zip(completions, truth, strict=True)
    return [arithmetic.score(response=turns[0]["content"], truth=each) for turns, each in pairs]


def rows(problems: list[Problem]) -> Dataset:
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": each.prompt}], "truth": each.truth} for each in problems]
    )


class MeasuredGRPOTrainer(GRPOTrainer):
    """TRL's, which also logs our mismatch of the log-probs that TRL's own ratio is of."""

    def __init__(self, *, args: GRPOConfig, **more: object) -> None:
        """Raises ValueError for sampling among some of the words."""
        if args.top_p < 1 or args.top_k or args.min_p:
            raise ValueError(
                "top_p, top_k, min_p: vLLM's log-probs would be among the words that these leave, TRL's among all "
                "words, so every ratio would be too small: leave them out"
            )
        super().__init__(args=args, **more)

    def compute_loss(self, model: torch.nn.Module, inputs: dict[str, Tensor], *args: object, **more: object) -> Tensor:
        real = (inputs["completion_mask"] * inputs.get("tool_mask", 1)).bool()
        trainer, rollout = (inputs[name][real] for name in ("old_per_token_logps", "sampling_per_token_logps"))
        found = measure_mismatch(trainer, rollout_T=rollout, cap=self.vllm_importance_sampling_clip_max)
        for name in ("k3_kl", "ess", "weight_mean"):
            self._metrics["train" if self.model.training else "eval"][f"mismatch/{name}"].append(getattr(found, name))
        return super().compute_loss(model, inputs, *args, **more)


def make_trainer(model: Path, problems: list[Problem], *, steps: int) -> GRPOTrainer:
    settings = GRPOConfig(
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=64,
        vllm_gpu_memory_utilization=0.3,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=2.0,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,  # the tiny model trains in float32; each update is rounded as it is loaded
        max_steps=steps,
        per_device_train_batch_size=256,
        num_generations=8,
        max_completion_length=LONGEST_ANSWER,
        learning_rate=2e-4,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        output_dir="runs/trl",
    )
    return MeasuredGRPOTrainer(model=str(model), reward_funcs=right_sum, args=settings, train_dataset=rows(problems))


class Told(TrainerCallback):
    """A line a step: the reward, TRL's own importance sampling ratios, our mismatch, and what the engine has proven."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def on_log(self, args: object, state: object, control: object, logs: dict[str, float], **_: object) -> None:
        if "reward" not in logs:
            return
        low, mean, high = (logs[f"sampling/importance_sampling_ratio/{name}"] for name in ("min", "mean", "max"))
        weight, k3, ess = (logs[f"mismatch/{name}"] for name in ("weight_mean", "k3_kl", "ess"))
        print(
            f"step {state.global_step}: reward {logs['reward']:.3f}; TRL: ratio {mean:.5f} ({low:.3f} to {high:.3f}); "
            f"ours: weight {weight:.5f}, k3 {k3:.2e}, ESS {ess:.6f}; {proven_updates(self.llm)} updates proven",
            flush=True,
        )


def proven_updates(llm: LLM) -> int:
    """Return how many weight updates every rank has taken and proven."""
    return min(version for version, *_ in llm.collective_rpc("appliance_weights", args=(False,)))


def greedy(trainer: GRPOTrainer, problems: list[Problem]) -> float:
    """The share that the engine solves, with the weights that it has."""
    render = trainer.processing_class.apply_chat_template
    prompts = [[{"role": "user", "content": each.prompt}] for each in problems]
    tokens = [render(each, add_generation_prompt=True, return_dict=False) for each in prompts]
    settings = SamplingParams(temperature=0, max_tokens=LONGEST_ANSWER)
    answers = trainer.vllm_generation.llm.generate(
        [{"prompt_token_ids": each} for each in tokens], settings, use_tqdm=False
    )
    right = [
        arithmetic.score(response=answer.outputs[0].text, truth=problem.truth)
        for answer, problem in zip(answers, problems, strict=True)
    ]
    return sum(right) / len(right)


def tiny_model(folder: Path) -> Path:
    """A Qwen2 of 3 M parameters that can add and rarely does, made once: about a minute and a half."""
    if not (folder / "config.json").is_file():
        print(f"making {folder}", flush=True)
        make_tiny_model(TINY_MODELS["tiny-arithmetic"], difficulty=2, folder=folder, on_step=lambda step, loss: None)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("runs/tiny-arithmetic"), help="made where it is missing")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    problems = arithmetic.splits(difficulty=2, seed=0, train_size=0, val_size=512)
    trainer = make_trainer(tiny_model(options.model), problems.train, steps=options.steps)
    llm = trainer.vllm_generation.llm
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Told(llm))

    print(f"before: {greedy(trainer, problems.val):.3f} of {len(problems.val)} unseen problems", flush=True)
    trainer.train()
    trainer.vllm_generation.sync_weights()  # TRL itself updates the engine before it samples, not after a step
    print(f"after: {greedy(trainer, problems.val):.3f}, {proven_updates(llm)} updates proven")


if __name__ == "__main__":
    main()
