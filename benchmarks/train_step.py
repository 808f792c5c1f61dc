"""An update of the trainer, two ways of it in turns: `python -m benchmarks.train_step`.

`benchmarks.step` has whole steps of whole systems. Here both ways are of one engine, and nothing else of a step is run.

    python -m benchmarks.train_step                          # prompts computed for each sequence, and once for all
    python -m benchmarks.train_step --compare one-flow       # the rollouts' INT8 forward, and one in BF16
    python -m benchmarks.train_step --compare dequantised    # one flow's weights dequantised in each backward, and once

Our FSDP engine of one rank over float32 masters, which keeps BF16 copies of the weights through an update, with our
attention and log-probs; random weights of SmolLM2-135M's shapes. The two sides are one engine and one model, which take
turns on the same batch: forward and backward of all micro-batches, then the clipped optimizer step, which is the same
on both. Seconds are wall time; processor seconds are of all threads, and depend less on what else the host does. A time
is the median of the turns, a ratio that of single turns with its range. The first turn of each side is not counted. On
a CPU verl needs a variable: VERL_PLATFORM=cpu.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from appliance import console
from appliance.control_groups import usable_cores
from appliance.tasks.library import PACKAGED_MODELS
from appliance.terms.settings import ATTENTION_NAME
from benchmarks.demo import processor
from benchmarks.one_flow import on_one_rank, put_in, ratios

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensordict import TensorDict
    from torch import Tensor
    from torch.nn import Module

    from appliance.trainer.rollout_forward import RolloutForward
    from appliance.trainer.verl_engine import ApplianceEngine

WHOLE, BF16, FLOW, DEQUANTISES = "whole sequences", "prompts once", "one flow", "one flow, dequantised each time"
COMPARED = {"prompts": (WHOLE, BF16), "one-flow": (FLOW, BF16), "dequantised": (DEQUANTISES, FLOW)}


@dataclass
class Times:
    """Of one side, turn by turn."""

    update_s: list[float] = field(default_factory=list)
    """Forward and backward of all micro-batches."""
    update_processor_s: list[float] = field(default_factory=list)
    optimizer_s: list[float] = field(default_factory=list)


def batch(*, prompts: int, samples: int, prompt_tokens: int, response_tokens: int, micro_batch: int) -> TensorDict:
    """Make a batch as verl's worker gets it. Prompts of three quarters to five quarters of `prompt_tokens`, responses
    of three quarters of `response_tokens` up to all."""
    import torch
    from tensordict import TensorDict
    from verl.utils.tensordict_utils import assign_non_tensor

    generator = torch.Generator().manual_seed(0)
    words = PACKAGED_MODELS["smollm2-135m"].shape.vocab

    def some(least: int, most: int) -> list[int]:
        length = int(torch.randint(least, most + 1, (1,), generator=generator))
        return torch.randint(0, words, (length,), generator=generator).tolist()

    pairs = []
    for _ in range(prompts):
        prompt = some(prompt_tokens * 3 // 4, prompt_tokens * 5 // 4)
        pairs += [(prompt, some(max(1, response_tokens * 3 // 4), response_tokens)) for _ in range(samples)]

    def nested(rows: list[list[int]]) -> Tensor:
        return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)

    data = TensorDict(
        {
            "input_ids": nested([prompt + response for prompt, response in pairs]),
            "position_ids": nested([[*range(len(prompt + response))] for prompt, response in pairs]),
            "prompts": nested([prompt for prompt, _ in pairs]),
            "responses": nested([response for _, response in pairs]),
            "response_mask": nested([[1] * len(response) for _, response in pairs]),
            "loss_mask": nested([[1] * len(response) for _, response in pairs]),
        },
        batch_size=len(pairs),
    )
    assign_non_tensor(
        data,
        use_remove_padding=True,
        temperature=1.0,
        calculate_entropy=False,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=micro_batch,
        max_response_len=response_tokens,
    )
    return data


class Engine:
    """Ours, with what an update needs and nothing else, on either side of each pair."""

    def __init__(self, *, layers: int) -> None:
        self.engine, self._forwards, self._flow = engine(layers=layers)

    def use(self, side: str, data: TensorDict) -> None:
        from verl.utils.tensordict_utils import assign_non_tensor

        is_flow = side in (FLOW, DEQUANTISES)
        self.engine.shares_prompts = side != WHOLE
        for module, forward in self._forwards[FLOW if is_flow else BF16]:
            module.forward = forward
        for layer in self._flow.linears():
            layer.keeps_dequantised = side == FLOW
        assign_non_tensor(data, use_fused_kernels=is_flow)

    def step(self) -> None:
        self.engine.optimizer_step()
        self._flow.forget()


def engine(
    *, layers: int
) -> tuple[ApplianceEngine, dict[str, list[tuple[Module, Callable[..., Any]]]], RolloutForward]:
    """Make (our engine, modules and their forwards by side, the rollouts' forward)."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import appliance.trainer.worker  # noqa: F401  our attention and log-probs
    from appliance.trainer.verl_engine import ApplianceEngine

    shape = PACKAGED_MODELS["smollm2-135m"].shape
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.max_positions,
        tie_word_embeddings=shape.tied,
        attn_implementation=ATTENTION_NAME,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).train()
    modules = [model, *model.model.layers, model.lm_head]
    forwards = {BF16: [(module, module.forward) for module in modules]}
    flow = put_in(model)
    forwards[FLOW] = [(module, module.forward) for module in modules]
    on_one_rank(model)
    new_engine = ApplianceEngine.__new__(ApplianceEngine)
    new_engine._keeps_copies, new_engine._flow = True, None
    new_engine.module, new_engine.use_ulysses_sp, new_engine.pad_to_length = model, False, None
    new_engine.ulysses_device_mesh, new_engine.ulysses_sequence_parallel_size = None, 1
    new_engine.scaler, new_engine._qat_enabled, new_engine._autocast_dtype = None, False, torch.bfloat16
    new_engine.engine_config = SimpleNamespace(use_no_sync_for_gradient_accumulation=True, reshard_after_forward=True)
    new_engine.optimizer_config = SimpleNamespace(clip_grad=1.0)
    new_engine.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.01)
    return new_engine, forwards, flow


def loss(model_output: dict[str, Tensor], data: TensorDict, dp_group: Any = None) -> tuple[Tensor, dict[str, Any]]:
    """A policy gradient with made-up advantages."""
    import torch
    from verl.workers.utils.padding import no_padding_2_padding

    log_probs = no_padding_2_padding(model_output["log_probs"], data)
    return (log_probs * torch.linspace(-1, 1, len(log_probs))[:, None]).mean(), {}


def timed(data: TensorDict, *, sides: tuple[str, str], turns: int, layers: int) -> dict[str, Times]:
    """Time the passes, by side."""
    trainer, times = Engine(layers=layers), {side: Times() for side in sides}
    engine = trainer.engine
    for turn in range(-1, turns):
        for side in sides:
            trainer.use(side, data)
            engine.optimizer_zero_grad()
            start, processor_start = time.perf_counter(), time.process_time()
            engine.forward_backward_batch(data, loss)
            done, processor_done = time.perf_counter(), time.process_time()
            trainer.step()
            if turn >= 0:
                times[side].update_s.append(done - start)
                times[side].update_processor_s.append(processor_done - processor_start)
                times[side].optimizer_s.append(time.perf_counter() - done)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8, help="samples of each prompt")
    parser.add_argument("--prompt-tokens", type=int, default=33)
    parser.add_argument("--response-tokens", type=int, default=24)
    parser.add_argument("--micro-batch", type=int, default=16, help="sequences of one forward")
    parser.add_argument("--layers", type=int, default=PACKAGED_MODELS["smollm2-135m"].shape.layers)
    parser.add_argument("--compare", choices=COMPARED, default="prompts", help="the two sides (default: prompts)")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("-o", "--output", type=Path, help="file for the page")
    options = parser.parse_args()
    import torch

    torch.set_num_threads(options.threads)
    data = batch(
        prompts=options.prompts,
        samples=options.samples,
        prompt_tokens=options.prompt_tokens,
        response_tokens=options.response_tokens,
        micro_batch=options.micro_batch,
    )
    sides = COMPARED[options.compare]
    times = timed(data, sides=sides, turns=options.turns, layers=options.layers)
    left, right = (times[side] for side in sides)
    tokens = int(data["input_ids"].offsets()[-1])
    lines = [
        f"{processor()}, {options.threads} threads. {options.prompts} prompts of {options.samples} samples, {tokens} "
        f"tokens, {tokens / len(data):.0f} of a sequence.",
        "",
        f"| | {' | '.join(sides)} | ratio |",
        "| --- | --- | --- | --- |",
    ]
    for name, key in (
        ("forward and backward, s", "update_s"),
        ("the same, processor s", "update_processor_s"),
        ("optimizer, s", "optimizer_s"),
    ):
        before, after = getattr(left, key), getattr(right, key)
        lines.append(f"| {name} | {median(before):.2f} | {median(after):.2f} | {ratios(before, after)} |")
    page = "\n".join(lines) + "\n"
    console.out(page)
    if options.output is not None:
        options.output.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
