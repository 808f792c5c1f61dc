"""The smallest GGUF file that is read, made of bytes alone."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TEMPLATE = "{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}"
CODES = {bool: (7, "?"), int: (4, "I"), float: (6, "f")}  # type of a value -> its number in the format, struct's code
F32 = 0
ALIGNMENT = 32


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def entry(value: Any) -> bytes:
    """Type and value, as the format has them."""
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value, list):
        head = struct.pack("<I", 9)
        if isinstance(value[0], str):
            return head + struct.pack("<IQ", 8, len(value)) + b"".join(map(text, value))
        number, code = CODES[type(value[0])] if not isinstance(value[0], int) else (5, "i")
        return head + struct.pack(f"<IQ{len(value)}{code}", number, len(value), *value)
    number, code = CODES[type(value)]
    return struct.pack(f"<I{code}", number, value)


def raw_gguf(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[int, ...]],
    *,
    version: int = 3,
    kind: int = F32,
    values: Mapping[str, bytes] = {},
) -> bytes:
    """A file of float32 zeros. tensors: sizes in the file's order, by name.  kind: number of the tensors' type, whose
    bytes are not adapted.  values: what a tensor has instead of zeros."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(text(key) + entry(value) for key, value in metadata.items())
    weights = b""
    for name, shape in tensors.items():
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, len(weights))
        size = 4
        for number in shape:
            size *= number
        data = values.get(name, bytes(size))
        weights += data + bytes(-len(data) % ALIGNMENT)
    return head + bytes(-len(head) % ALIGNMENT) + weights


HIDDEN, WIDE, WORDS, HEADS, KV_HEADS, WIDTH = 8, 16, 8, 2, 1, 4
LAYER = {
    "attn_norm.weight": (HIDDEN,),
    "attn_q.weight": (HIDDEN, HEADS * WIDTH),
    "attn_k.weight": (HIDDEN, KV_HEADS * WIDTH),
    "attn_v.weight": (HIDDEN, KV_HEADS * WIDTH),
    "attn_output.weight": (HEADS * WIDTH, HIDDEN),
    "ffn_norm.weight": (HIDDEN,),
    "ffn_gate.weight": (HIDDEN, WIDE),
    "ffn_up.weight": (HIDDEN, WIDE),
    "ffn_down.weight": (WIDE, HIDDEN),
}
TENSORS = {
    "token_embd.weight": (HIDDEN, WORDS),
    "output_norm.weight": (HIDDEN,),
    **{f"blk.0.{name}": shape for name, shape in LAYER.items()},
}
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab", "Ġ", "Ġab"],
    "tokenizer.ggml.token_type": [3, 3, 3, 1, 1, 1, 1, 1],
    "tokenizer.ggml.merges": ["a b", "Ġ ab"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.chat_template": TEMPLATE,
}
METADATA = {
    "general.architecture": "llama",
    "general.name": "Tiny",
    "general.license": "mit",
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": WIDE,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.dimension_count": WIDTH,
    "llama.rope.freq_base": 10000.0,
    **TOKENIZER,
}
"""Of the smallest Llama that is read."""


def without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in METADATA.items() if key not in keys}


def write_tiny(path: Path, **changes: Any) -> Path:
    """The smallest file. changes: of `raw_gguf`."""
    path.write_bytes(raw_gguf(**{"metadata": METADATA, "tensors": TENSORS, **changes}))
    return path
