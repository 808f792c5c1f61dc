"""Asynchronous GRPO with TRL: a tiny model learns to add, while `vllm serve` generates in processes of its own.

    python async_grpo.py  # and beside it `FLASHRL_CONFIG=int8 vllm serve`: README.md has the whole command

README.md says what is set here, and why.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import requests
import torch
from prometheus_client.parser import text_string_to_metric_families
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from train import LONGEST_ANSWER, right_sum, rows, tiny_model
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoTokenizer,
    PrinterCallback,
    TrainerCallback,
)
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

from appliance.tasks.built_in import arithmetic
from appliance.tasks.rows import Problem
from flashrl_compat.sender import with_manifest
from flashrl_compat.shared_memory import CHUNK_BYTES, ShmTrainer

CPU_ATTENTION = "tree_on_a_cpu"
ANSWER = {  # TRL parses answers, and knows no such chat template
    "type": "object",
    "x-regex": r"^(?P<content>[\s\S]*?)(?:<\|im_end\|>|$)",
    "properties": {"role": {"const": "assistant"}, "content": {"type": "string"}},
}


class Server:
    """What is asked of `vllm serve` besides tokens for training."""

    def __init__(self, url: str) -> None:
        self.url = url

    def weight_version(self) -> int:
        return int(requests.get(f"{self.url}/weight_info", timeout=60).json()["weight_version"])

    def measured(self, name: str, **labels: str) -> int:
        families = text_string_to_metric_families(requests.get(f"{self.url}/metrics", timeout=60).text)
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return int(sum(sample.value for sample in samples if labels.items() <= sample.labels.items()))

    def greedy(self, trainer: AsyncGRPOTrainer, problems: list[Problem]) -> float:
        """The share that it solves, with the weights that it has."""
        render = trainer.processing_class.apply_chat_template
        prompts = [[{"role": "user", "content": each.prompt}] for each in problems]
        body = {
            "model": trainer.model.config.name_or_path,
            "prompt": [render(each, add_generation_prompt=True, return_dict=False) for each in prompts],
            "temperature": 0,
            "max_tokens": LONGEST_ANSWER,
        }
        said = requests.post(f"{self.url}/v1/completions", json=body, timeout=600)
        said.raise_for_status()
        pairs = zip(said.json()["choices"], problems, strict=True)
        right = [arithmetic.score(response=choice["text"], truth=problem.truth) for choice, problem in pairs]
        return sum(right) / len(right)


class ProvenTransfer:
    """TRL's `weight_transfer`, through shared memory and with digests."""

    def __init__(self, server: Server) -> None:
        self.server, self.client = server, HTTPVLLMWeightSyncClient(server.url)
        self.sent = 0
        self.in_flight = 0

    def init_weight_transfer(self) -> None:
        self.client.init_weight_transfer_engine({})

    def pause(self) -> None:
        """Wait until what is in flight has ended. With `keep`, which is TRL's own, it would continue with other
        weights."""
        self.in_flight = self.server.measured("vllm:num_requests_running")
        requests.post(f"{self.server.url}/pause", params={"mode": "wait"}, timeout=300).raise_for_status()

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        source = with_manifest(iterator, number=self.sent + 1)
        ShmTrainer(client=self.client, source=source, chunk_bytes=CHUNK_BYTES).send_weights()
        self.sent += 1

    def resume(self) -> None:
        requests.post(f"{self.server.url}/resume", timeout=300).raise_for_status()

    def destroy(self) -> None:
        pass


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    tree_kv_index: Tensor,
    tree_cu_seqlens_q: Tensor,
    tree_cu_seqlens_k: Tensor,
    scaling: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """TRL's attention over a tree of samples, for which it has a GPU's kernel: a token sees its own path to the root.

    A segment of the tree lies behind all others on its path: of the path, a token sees what is not behind itself.
    """
    segments, tokens = len(tree_cu_seqlens_q) - 1, query.shape[2]
    number = torch.arange(segments)
    sees = torch.zeros(segments, tokens, dtype=torch.bool)
    sees[number.repeat_interleave(tree_cu_seqlens_k.diff()), tree_kv_index] = True
    mask = sees[number.repeat_interleave(tree_cu_seqlens_q.diff())].tril()
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None


def make_trainer(model: Path, problems: list[Problem], *, server: Server, steps: int) -> AsyncGRPOTrainer:
    settings = AsyncGRPOConfig(
        vllm_server_base_url=server.url,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,  # the tiny model trains in float32; each update is rounded as it is loaded
        gradient_checkpointing=False,
        max_steps=steps,
        token_budget=0,  # so many samples a step as the next two lines say
        per_device_train_batch_size=64,
        gradient_accumulation_steps=4,
        num_generations=8,
        max_inflight_tasks=256,
        max_completion_length=LONGEST_ANSWER,
        learning_rate=2e-4,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        output_dir="runs/trl",
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.response_schema = ANSWER
    parts = {
        "args": settings,
        "train_dataset": rows(problems),
        "processing_class": tokenizer,
        "weight_transfer": ProvenTransfer(server),
    }
    if torch.cuda.is_available():
        return AsyncGRPOTrainer(model=str(model), reward_funcs=right_sum, **parts)
    # TRL 1.16.0 asks CUDA for the name, to know the device's FLOP/s (trl/trainer/utils.py:1824)
    with mock.patch.object(torch.cuda, "get_device_name", return_value="no GPU"):
        trainer = AsyncGRPOTrainer(model=str(model), reward_funcs=right_sum, **parts)
    AttentionInterface.register(CPU_ATTENTION, attend)
    AttentionMaskInterface.register(CPU_ATTENTION, lambda **_: None)
    trainer.model.set_attn_implementation(CPU_ATTENTION)
    return trainer


class Told(TrainerCallback):
    """A line a step: the reward, TRL's own ratio of probabilities, the samples' age, and what the engine has proven."""

    def __init__(self, transfer: ProvenTransfer) -> None:
        self.transfer = transfer

    def on_log(self, args: object, state: object, control: object, logs: dict[str, float], **_: object) -> None:
        if "reward" not in logs:
            return
        mean, most = (logs[f"sample/staleness_{name}"] for name in ("mean", "max"))
        print(
            f"step {state.global_step}: reward {logs['reward']:.3f}, ratio {logs['ratio']:.3f}, "
            f"KL {logs['kl']:.4f}, {mean:.1f} updates old, at most {most:.0f}; "
            f"{self.transfer.server.weight_version()} proven, the last with {self.transfer.in_flight} in flight",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("runs/tiny-arithmetic"), help="made where it is missing")
    parser.add_argument("--server", default="http://localhost:8000", help="of `vllm serve`")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    problems = arithmetic.splits(difficulty=2, seed=0, train_size=0, val_size=512)
    server = Server(options.server.rstrip("/"))
    trainer = make_trainer(tiny_model(options.model), problems.train, server=server, steps=options.steps)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Told(trainer.weight_transfer))

    trainer.vllm_client.wait_for_server_ready()
    print(f"before: {server.greedy(trainer, problems.val):.3f} of {len(problems.val)} unseen problems", flush=True)
    trainer.train()
    aborted = server.measured("vllm:request_success_total", finished_reason="abort")
    print(
        f"after: {server.greedy(trainer, problems.val):.3f}, {server.weight_version()} updates proven, "
        f"{trainer.weight_transfer.sent} sent; {aborted} requests ended by an update"
    )


if __name__ == "__main__":
    main()
