"""GGUF files of transformers' models, as llama.cpp's converter writes them, by the writer of the package gguf."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from sentencepiece import SentencePieceProcessor
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3-moe": "qwen3moe"}
"""llama.cpp's names of the families."""
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    **{f"self_attn.{part}_proj.weight": f"attn_{part}.weight" for part in "qkv"},
    **{f"self_attn.{part}_proj.bias": f"attn_{part}.bias" for part in "qkv"},
    **{f"self_attn.{part}_norm.weight": f"attn_{part}_norm.weight" for part in "qk"},
    "self_attn.o_proj.weight": "attn_output.weight",
    **{f"mlp.{part}_proj.weight": f"ffn_{part}.weight" for part in ("gate", "up", "down")},
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_GATE_UP = "mlp.experts.gate_up_proj"
NORMAL, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 3, 4, 5, 6


def permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp rotates channels 0 and 1, 2 and 3, ... of a head together; transformers channel i of the first half and
    of the second."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def tensors_of(model: PreTrainedModel, *, family: str) -> dict[str, np.ndarray]:
    """By llama.cpp's names, in float32."""
    config, tensors = model.config, {}
    for name, weights in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        layer, rest = (found[1], found[2]) if (found := _LAYER.fullmatch(name)) else ("", name)
        prefix = f"blk.{layer}." if layer else ""
        array = _array(weights)
        if rest == _GATE_UP:
            gate, up = np.split(array, 2, axis=1)
            tensors |= {f"{prefix}ffn_gate_exps.weight": gate.copy(), f"{prefix}ffn_up_exps.weight": up.copy()}
            continue
        if ARCHITECTURES[family] == "llama" and rest in ("self_attn.q_proj.weight", "self_attn.k_proj.weight"):
            array = permuted(array, config.num_attention_heads if ".q_" in rest else config.num_key_value_heads)
        tensors[prefix + _NAMES[rest]] = array
    return tensors


def _array(weights: Tensor) -> np.ndarray:
    return weights.float().numpy()


def write_model(
    path: Path,
    model: PreTrainedModel,
    *,
    family: str,
    tokenizer: PreTrainedTokenizerFast | SentencePieceProcessor,
    pre: str = "",
    is_prefixed: bool = True,
    kind: str = "F32",
    more: dict[str, np.ndarray] | None = None,
) -> Path:
    """kind: of the matrices, as in gguf's GGMLQuantizationType.  more: further tensors."""
    config, writer = model.config, gguf.GGUFWriter(path, ARCHITECTURES[family])
    writer.add_name(family)
    writer.add_license("apache-2.0")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if ARCHITECTURES[family] == "llama":
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_vocab_size(config.vocab_size)
    writer.add_key_length(config.head_dim if hasattr(config, "head_dim") else 16)
    writer.add_value_length(config.head_dim if hasattr(config, "head_dim") else 16)
    if family == "qwen3-moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if isinstance(tokenizer, SentencePieceProcessor):
        write_pieces(writer, tokenizer, is_prefixed=is_prefixed)
    else:
        write_byte_level(writer, tokenizer, pre=pre, words=config.vocab_size)
    quantised = gguf.GGMLQuantizationType[kind]
    for name, array in (tensors_of(model, family=family) | (more or {})).items():
        if array.ndim == 1 or kind == "F32" or "gate_inp" in name:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quantize(array, quantised), raw_dtype=quantised)
    _close(writer)
    return path


def write_byte_level(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerFast, *, pre: str, words: int) -> None:
    """words: tokens that the model has, of which those beyond the tokenizer's are unused."""
    core: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    by_number = {number: token for token, number in tokenizer.get_vocab().items()}
    tokens = [by_number.get(number, f"[PAD{number}]") for number in range(words)]
    kinds = dict.fromkeys(core["model"]["vocab"], NORMAL)
    kinds |= {each["content"]: CONTROL if each["special"] else USER_DEFINED for each in core["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.get(token, UNUSED) for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in core["model"]["merges"]])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)


def write_pieces(writer: gguf.GGUFWriter, pieces: SentencePieceProcessor, *, is_prefixed: bool) -> None:
    """is_prefixed: whether a space is put in front of a text."""
    numbers = range(pieces.get_piece_size())
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([pieces.id_to_piece(number) for number in numbers])
    writer.add_token_scores([pieces.get_score(number) for number in numbers])
    writer.add_token_types([_kind(pieces, number) for number in numbers])
    writer.add_bos_token_id(pieces.bos_id())
    writer.add_eos_token_id(pieces.eos_id())
    writer.add_unk_token_id(pieces.unk_id())
    writer.add_add_space_prefix(is_prefixed)
    writer.add_chat_template("{{ messages[0].content }}")


def _kind(pieces: SentencePieceProcessor, number: int) -> int:
    kinds = {2: pieces.is_unknown, CONTROL: pieces.is_control, UNUSED: pieces.is_unused, BYTE: pieces.is_byte}
    return next((kind for kind, is_it in kinds.items() if is_it(number)), NORMAL)


def _close(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
