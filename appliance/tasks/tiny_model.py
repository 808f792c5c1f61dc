"""Makes a tiny Qwen2 on the spot: random weights, then a warm start on the arithmetic task.

The warm start mixes two answers to the same prompt: `47+85=` gets the sum, `132`, or the first operand again, `47`.
At first most examples add, so that the model learns to; in the last steps most repeat, so that it rarely does. Greedy
decoding shows the commoner answer, so its reward starts near zero; sampling shows the rarer one often enough to be
rewarded. What reinforcement learning then has to do, and can do in a few dozen steps, is to turn the habit over. It
ends about where the sums of the warm start are right.

Its tokenizer is byte-level: ids 0..255 are the bytes in the order of the byte alphabet, then three special tokens,
nothing is merged. The chat template adds one token: a prompt `47+85` becomes `47+85=`, an answer ends with <|im_end|>.
Rendering more messages only ever appends.

`tiny-calculator` has a tool instead of the sum: `37*58=` gets a call of `multiply`, whose response it repeats, or
the first operand again. Its template names the tools before the prompt.

B batch, T tokens of a sequence.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from appliance.quant.cpu_gemm import widen_gemms
from appliance.tasks.built_in import arithmetic
from appliance.tasks.library import CalculatorSpec, TinySpec

IGNORED = -100  # torch's label for "no loss here"
END_OF_TURN = "<|im_end|>"  # with this name and a one-token newline verl's Qwen rules apply as they are
START_OF_TURN = "<|im_start|>"
PADDING = "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}={{ message.content }}<|im_end|>{% else %}{{ message.content }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)
TOOL_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TOOL_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{{ ':' if loop.last else ',' }}{% endfor %}"
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}={{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>{{ '\\n' }}"
    "{% elif message.role == 'tool' %}<tool_response>{{ message.content }}</tool_response>"
    "{% else %}{{ message.content }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)

Example = tuple[str, ...]  # what is given and what the model says to it, in turns


def make_tiny_model(spec: TinySpec, *, difficulty: int, folder: Path, on_step: Callable[[int, float], None]) -> None:
    """Warm-start a model and save it with its tokenizer, in BF16, as transformers and vLLM load it. on_step: called
    after every step with its number, from 1, and its loss in nats per answer token."""
    tokenizer = save_tokenizer(folder, max_positions=spec.max_positions, calls_tools=isinstance(spec, CalculatorSpec))
    torch.manual_seed(spec.seed)
    config = config_of(
        spec, bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model = Qwen2ForCausalLM(config)
    widen_gemms()
    with _one_thread():
        warm_start(model, tokenizer, spec=spec, difficulty=difficulty, on_step=on_step)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=False
    )
    model.to(torch.bfloat16).save_pretrained(folder)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread. GEMMs this small gain a quarter from a second thread, and lose tenfold when a core is busy
    elsewhere. With one the order of every sum is fixed, so the same making gives the same model on any number of
    cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def config_of(spec: TinySpec, **tokens: int | None) -> Qwen2Config:
    """Make the model's configuration. tokens: ids of special tokens, by transformers' names."""
    return Qwen2Config(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        max_position_embeddings=spec.max_positions,
        tie_word_embeddings=True,
        **tokens,
    )


def warm_start(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    *,
    spec: TinySpec,
    difficulty: int,
    on_step: Callable[[int, float], None],
) -> None:
    """Train in place on batches drawn from the warm-start pool, loss on what the model says only."""
    example = _transcript if isinstance(spec, CalculatorSpec) else _example
    pool = arithmetic.pairs(arithmetic.Pool.WARM_START, difficulty=difficulty)
    draw = random.Random(spec.seed)
    optimizers = _optimizers(model, spec=spec)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, spec=spec)) for optimizer in optimizers
    ]
    model.set_attn_implementation("eager")  # half a step's time: on a CPU the BF16 backward of SDPA is slow
    model.train()
    for step in range(1, spec.steps + 1):
        share = spec.first_sum_share if step <= spec.steps - spec.habit_steps else spec.last_sum_share
        examples = [example(*draw.choice(pool), rightly=draw.random() < share) for _ in range(spec.batch_size)]
        batch = encode(examples, tokenizer=tokenizer)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch).loss
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for updater in (*optimizers, *schedules):
            updater.step()
        on_step(step, loss.item())


def _optimizers(model: Qwen2ForCausalLM, *, spec: TinySpec) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding, the biases and the norms."""
    inner = {name: each for name, each in model.named_parameters() if each.ndim == 2 and "embed" not in name}
    outer = [each for name, each in model.named_parameters() if name not in inner]
    return [
        torch.optim.Muon(inner.values(), lr=spec.matrix_learning_rate, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(outer, lr=spec.learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True),
    ]


def _rate(step: int, *, spec: TinySpec) -> float:
    """Fraction of the learning rate: up in a line, flat, down to zero in a line."""
    if step < spec.warmup_steps:
        return (step + 1) / spec.warmup_steps
    return min(1.0, (spec.steps - step) / (spec.decay * spec.steps))


def _example(a: int, b: int, *, rightly: bool) -> Example:
    problem = arithmetic.problem(a, b)
    return f"{problem.prompt}=", (problem.truth if rightly else str(a)) + END_OF_TURN


def _transcript(a: int, b: int, *, rightly: bool) -> Example:
    prompt = f"multiply:{a}*{b}="
    if not rightly:
        return prompt, str(a) + END_OF_TURN
    call = f'<tool_call>{{"name": "multiply", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>{END_OF_TURN}'
    return prompt, call, f"\n<tool_response>{a * b}</tool_response>=", f"{a * b}{END_OF_TURN}"


def encode(examples: list[Example], *, tokenizer: PreTrainedTokenizerFast) -> dict[str, Tensor]:
    """Encode examples as the chat template renders them, padded on the right. input_ids, labels: [B, T] int64, labels
    IGNORED but for what the model says.  attention_mask: [B, T] int64, 0 on padding."""
    parts = [tokenizer(list(example))["input_ids"] for example in examples]
    length = max(sum(map(len, example)) for example in parts)
    tokens = torch.full((len(examples), length), tokenizer.pad_token_id)
    labels = torch.full((len(examples), length), IGNORED)
    for row, example in enumerate(parts):
        start = 0
        for number, part in enumerate(example):
            place = slice(start, start + len(part))
            tokens[row, place] = torch.tensor(part)
            if number % 2:
                labels[row, place] = tokens[row, place]
            start = place.stop
    mask = (tokens != tokenizer.pad_token_id).long()
    return {"input_ids": tokens, "labels": labels, "attention_mask": mask}


def byte_tokenizer(*, max_positions: int, calls_tools: bool = False, words: int = 0) -> PreTrainedTokenizerFast:
    """Make the tokenizer of 259 tokens, and four more to call tools. max_positions: the longest sequence the model
    takes, in tokens.  words: number of tokens at least; text never becomes one of those beyond the 259, but a model may
    generate them."""
    alphabet = sorted(ByteLevel.alphabet())
    more = [f"w{number}" for number in range(words - len(alphabet) - len((END_OF_TURN, PADDING, START_OF_TURN)))]
    core = Tokenizer(models.BPE(vocab={word: token for token, word in enumerate(alphabet + more)}, merges=[]))
    core.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END_OF_TURN,
        pad_token=PADDING,
        additional_special_tokens=[START_OF_TURN],
        clean_up_tokenization_spaces=False,
        chat_template=TOOL_TEMPLATE if calls_tools else CHAT_TEMPLATE,
        model_max_length=max_positions,
    )
    if calls_tools:
        wrapped.add_tokens([AddedToken(token, special=False, normalized=False) for token in TOOL_TOKENS])
    return wrapped


def save_tokenizer(
    folder: Path, *, max_positions: int, calls_tools: bool = False, words: int = 0
) -> PreTrainedTokenizerFast:
    """Write the tokenizer's files into a folder and return it. Parameters as of byte_tokenizer."""
    tokenizer = byte_tokenizer(max_positions=max_positions, calls_tools=calls_tools, words=words)
    tokenizer.save_pretrained(folder)
    return tokenizer
