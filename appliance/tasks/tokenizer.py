"""The byte-level tokenizer of the built-in models: 256 bytes, three special tokens, nothing merged.

Ids 0..255 are the bytes in the order of the byte alphabet. The chat template adds one token: a prompt `47+85` becomes
`47+85=`, an answer ends with <|im_end|>. Rendering more messages only ever appends.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

END_OF_TURN = "<|im_end|>"  # with this name and a one-token newline verl's Qwen rules apply as they are
START_OF_TURN = "<|im_start|>"
PADDING = "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}={{ message.content }}<|im_end|>{% else %}{{ message.content }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)


def byte_tokenizer(*, max_positions: int) -> PreTrainedTokenizerFast:
    """259 tokens. max_positions: the longest sequence the model takes, in tokens."""
    alphabet = sorted(ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={character: token for token, character in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END_OF_TURN,
        pad_token=PADDING,
        additional_special_tokens=[START_OF_TURN],
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_positions,
    )


def save_tokenizer(folder: Path, *, max_positions: int) -> PreTrainedTokenizerFast:
    """Write the tokenizer's files into a folder and return it."""
    tokenizer = byte_tokenizer(max_positions=max_positions)
    tokenizer.save_pretrained(folder)
    return tokenizer
