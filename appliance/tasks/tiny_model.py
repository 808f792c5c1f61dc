"""Makes a tiny Qwen2 on the spot: random weights, then a warm start on the arithmetic task.

The warm start mixes two habits for the same prompt: `47+85=` is answered with the sum `132` in `sum_share` of the
examples and with the operands side by side, `4785`, in the others. The model learns to compute both. Greedy decoding
shows the commoner habit, so its reward starts near zero; sampling shows the rarer one often enough to be rewarded.
What reinforcement learning then has to do, and can do in a few dozen steps, is to turn the habit over.

B batch, T tokens of a sequence.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from appliance.tasks import arithmetic
from appliance.tasks.tiny_spec import TinySpec
from appliance.tasks.tokenizer import save_tokenizer

IGNORED = -100  # torch's label for "no loss here"


def make_tiny_model(spec: TinySpec, *, difficulty: int, folder: Path, on_step: Callable[[int, float], None]) -> None:
    """Warm-start a model and save it with its tokenizer, in BF16, as transformers and vLLM load it.

    on_step: called after every step with its number, from 1, and its loss in nats per answer token.
    """
    tokenizer = save_tokenizer(folder, max_positions=spec.max_positions)
    torch.manual_seed(spec.seed)
    model = Qwen2ForCausalLM(_config(spec, tokenizer))
    warm_start(model, tokenizer, spec=spec, difficulty=difficulty, on_step=on_step)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=False
    )
    model.to(torch.bfloat16).save_pretrained(folder)


def _config(spec: TinySpec, tokenizer: PreTrainedTokenizerFast) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        max_position_embeddings=spec.max_positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def warm_start(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    *,
    spec: TinySpec,
    difficulty: int,
    on_step: Callable[[int, float], None],
) -> None:
    """Train in place on batches drawn from the warm-start pool, loss on the answer only, cosine learning rate."""
    pool = arithmetic.pairs(arithmetic.Pool.WARM_START, difficulty=difficulty)
    draw = random.Random(spec.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=spec.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, spec=spec))
    model.train()
    for step in range(1, spec.steps + 1):
        examples = [_example(*draw.choice(pool), adds=draw.random() < spec.sum_share) for _ in range(spec.batch_size)]
        batch = encode(examples, tokenizer=tokenizer)
        loss = model(input_ids=batch.tokens_BT, attention_mask=batch.mask_BT, labels=batch.labels_BT).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        on_step(step, loss.item())


def _rate(step: int, *, spec: TinySpec) -> float:
    """Fraction of the learning rate: linear warm-up, then a cosine to zero."""
    if step < spec.warmup_steps:
        return (step + 1) / spec.warmup_steps
    done = (step - spec.warmup_steps) / max(1, spec.steps - spec.warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * done))


def _example(a: int, b: int, *, adds: bool) -> tuple[str, str]:
    problem = arithmetic.problem(a, b)
    return problem.prompt, problem.truth if adds else f"{a}{b}"


@dataclass(frozen=True)
class Batch:
    """tokens_BT, labels_BT: [B, T] int64, labels IGNORED outside the answer.  mask_BT: [B, T] int64, 0 on padding."""

    tokens_BT: Tensor
    labels_BT: Tensor
    mask_BT: Tensor


def encode(examples: list[tuple[str, str]], *, tokenizer: PreTrainedTokenizerFast) -> Batch:
    """(prompt, answer) pairs as the chat template renders them, padded on the right."""
    prompts = tokenizer([f"{prompt}=" for prompt, _ in examples])["input_ids"]
    answers = tokenizer([f"{answer}{tokenizer.eos_token}" for _, answer in examples])["input_ids"]
    length = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    tokens = torch.full((len(examples), length), tokenizer.pad_token_id)
    labels = torch.full((len(examples), length), IGNORED)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        whole = torch.tensor(prompt + answer)
        tokens[row, : len(whole)] = whole
        labels[row, len(prompt) : len(whole)] = whole[len(prompt) :]
    mask = (tokens != tokenizer.pad_token_id).long()
    return Batch(tokens_BT=tokens, labels_BT=labels, mask_BT=mask)
