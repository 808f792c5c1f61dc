"""GGUF files that are damaged, or would be read wrongly: each is refused, by what is wrong with it."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
from gguf_files import HIDDEN, METADATA, TENSORS, TOKENIZER, WIDTH, raw_gguf, without, write_tiny

from appliance.gguf.families import ROPE_FACTORS, model_config
from appliance.gguf.header import DamagedGguf, GgufError, read_header
from appliance.gguf.source import check_gguf, gguf_facts, is_gguf, read_rope_factors
from appliance.gguf.tokenizer import special_tokens

DAMAGED = 500  # files with one byte changed


def refusal(path: Path) -> str:
    with pytest.raises(GgufError) as caught:
        check_gguf(path)
    assert caught.value.hint
    return caught.value.message


def changed(path: Path, metadata: dict[str, object] | None = None, **changes: object) -> Path:
    return write_tiny(path / "x.gguf", metadata=METADATA | (metadata or {}), **changes)


def test_the_smallest_file_is_read(tmp_path: Path) -> None:
    facts = gguf_facts(write_tiny(tmp_path / "x.gguf"))
    assert (facts.problem, facts.shape.architectures, facts.shape.layers) == ("", ("LlamaForCausalLM",), 1)
    assert facts.provenance == (f"Tiny, from x.gguf (SHA-256 {facts.sha256}); licence mit; weights in F32")


def test_every_cropped_file_is_refused(tmp_path: Path, record_property) -> None:
    whole = write_tiny(tmp_path / "x.gguf").read_bytes()
    path = tmp_path / "cropped.gguf"
    start = read_header(tmp_path / "x.gguf").start
    lengths = (*range(0, start, 3), *range(start, len(whole), 32))
    for length in lengths:
        path.write_bytes(whole[:length])
        with pytest.raises(GgufError):
            check_gguf(path)
    record_property("said", f"GGUF files cropped at every third byte: {len(lengths)} refused, 0 read")


def test_a_damaged_file_is_refused_or_read_and_nothing_else(tmp_path: Path, record_property) -> None:
    """A changed byte may be one of a weight, of a name nobody reads or of a size that another one bears out."""
    whole, draw, path = write_tiny(tmp_path / "x.gguf").read_bytes(), random.Random(0), tmp_path / "damaged.gguf"
    counts = {True: 0, False: 0}
    header = read_header(tmp_path / "x.gguf").start
    for _ in range(DAMAGED):
        place = draw.randrange(header)
        path.write_bytes(whole[:place] + bytes([whole[place] ^ draw.randrange(1, 256)]) + whole[place + 1 :])
        try:
            check_gguf(path)
        except GgufError:
            counts[False] += 1
        else:
            counts[True] += 1
    assert counts[False] > DAMAGED // 2
    record_property("said", f"GGUF headers with one byte changed: {counts[False]} refused, {counts[True]} read")


def test_lengths_beyond_the_file_are_refused_without_being_read(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    key = struct.pack("<Q", 1) + b"k"
    for value in (
        struct.pack("<IQ", 8, 1 << 60),  # a text
        struct.pack("<IIQ", 9, 4, 1 << 60),  # a list of numbers
        struct.pack("<IIQ", 9, 8, 1 << 60),  # a list of texts
    ):
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + value)
        with pytest.raises(DamagedGguf):
            read_header(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60))
    with pytest.raises(DamagedGguf, match="tensors"):
        read_header(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 1}, "it is of version 1; version 2 and 3 are read, little-endian"),
        ({"version": 3 << 24}, "it is big-endian; version 2 and 3 are read, little-endian"),
        ({"kind": 4}, "tensor token_embd.weight is of type 4, which the package gguf does not read"),
        ({"kind": 2}, f"tensor token_embd.weight in Q4_0 has the sizes [{HIDDEN}, 8]"),
    ],
)
def test_another_format_is_refused_by_name(tmp_path: Path, change: dict[str, int], said: str) -> None:
    assert refusal(changed(tmp_path, **change)) == said


def test_what_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"<!DOCTYPE html><html>not found</html>")
    assert refusal(tmp_path / "x.gguf") == "it is no GGUF file: it begins with b'<!DO'"


METADATA_REFUSED = {
    "family": (
        {"general.architecture": "gemma2"},
        "its model is of the family `gemma2`; llama, qwen2, qwen3, qwen3moe",
    ),
    "heads of each layer": ({"llama.attention.head_count_kv": [1, 1]}, "its llama.attention.head_count_kv, a number"),
    "experts in a llama": ({"llama.expert_count": 8}, "its llama.expert_count is 8, which is not read, and may change"),
    "yarn": ({"llama.rope.scaling.type": "yarn"}, "its llama.rope.scaling.type is 'yarn', which is not read"),
    "a window": ({"llama.attention.sliding_window": 8}, "its llama.attention.sliding_window is 8, which is not read"),
    "a scale": ({"llama.attention.scale": 0.5}, "its llama.attention.scale is 0.5, which is not read"),
    "half rotated": ({"llama.attention.key_length": 8}, "4 of the 8 channels of a head are rotated"),
    "other values": ({"llama.attention.value_length": 8}, "the heads of its values have another width"),
    "another width": ({"llama.feed_forward_length": 24}, "tensor blk.0.ffn_gate.weight has the sizes [8, 16], by its"),
    "more layers": ({"llama.block_count": 2}, "tensor blk.1.attn_norm.weight is missing and 8 more"),
    "another tokenizer": ({"tokenizer.ggml.model": "bert"}, "its tokenizer (tokenizer.ggml.model) is `bert`"),
    "other words": ({"tokenizer.ggml.pre": "tekken"}, "how it cuts a text into words (tokenizer.ggml.pre) is `tekken`"),
    "a token twice": ({"tokenizer.ggml.tokens": ["a"] * 8}, "7 of its tokens are there twice"),
    "too few kinds": ({"tokenizer.ggml.token_type": [1]}, "it has 8 tokens and 1 kinds of tokens"),
    "too many tokens": (
        {"tokenizer.ggml.tokens": list("abcdefghi"), "tokenizer.ggml.token_type": [1] * 9},
        "it has 9 tokens, and its model 8 rows for them",
    ),
    "another merge": ({"tokenizer.ggml.merges": ["a c"]}, "its merge `a c` is not made of its tokens"),
    "no end": ({"tokenizer.ggml.eos_token_id": 99}, "it does not say which of its tokens ends an answer"),
    "two ends": (
        {"tokenizer.ggml.eot_token_id": 0},
        "it names two tokens that end an answer (tokenizer.ggml.eos_token_id is 2, tokenizer.ggml.eot_token_id 0)",
    ),
    "no padding": (
        {"tokenizer.ggml.token_type": [1, 3, 3, 1, 1, 1, 1, 1]},
        "it has no control token for padding besides those that begin and end a text",
    ),
}


@pytest.mark.parametrize("name", METADATA_REFUSED)
def test_what_would_be_read_wrongly_is_refused_by_name(tmp_path: Path, name: str) -> None:
    metadata, said = METADATA_REFUSED[name]
    assert refusal(changed(tmp_path, metadata)).startswith(said)


def test_a_llama_that_does_not_say_its_kv_heads_is_refused(tmp_path: Path) -> None:
    """transformers then leaves queries and keys in llama.cpp's order of channels."""
    path = write_tiny(
        tmp_path / "x.gguf",
        metadata=without("llama.attention.head_count_kv") | {"llama.attention.head_count": 2},
        tensors={**TENSORS, "blk.0.attn_k.weight": (HIDDEN, HIDDEN), "blk.0.attn_v.weight": (HIDDEN, HIDDEN)},
    )
    why = "and without it transformers mixes up the channels of each head"
    assert refusal(path) == f"its llama.attention.head_count_kv is not there, {why}"


OPTIONAL = {"tokenizer.ggml.bos_token_id", "tokenizer.ggml.padding_token_id"}


@pytest.mark.parametrize("key", sorted(TOKENIZER.keys() - OPTIONAL))
def test_a_missing_part_of_the_tokenizer_is_named(tmp_path: Path, key: str) -> None:
    path = write_tiny(tmp_path / "x.gguf", metadata=without(key))
    if key == "tokenizer.chat_template":  # preflight's to judge, as of any model
        assert (gguf_facts(path).problem, gguf_facts(path).chat_template) == ("", "")
    else:
        assert key in refusal(path)


@pytest.mark.parametrize("name", [name for name in TENSORS])
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    tensors = {other: shape for other, shape in TENSORS.items() if other != name}
    assert refusal(changed(tmp_path, tensors=tensors)).startswith(f"tensor {name} ")


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.0.attn_q_norm.weight", "blk.0.ffn_gate_exps.weight"])
def test_a_tensor_that_transformers_would_leave_out_is_refused(tmp_path: Path, name: str) -> None:
    said = refusal(changed(tmp_path, tensors={**TENSORS, name: (8,)}))
    assert said == f"tensor {name} is not one that a model of `llama` has"


def test_a_head_of_its_own_is_one(tmp_path: Path) -> None:
    tied = model_config(read_header(changed(tmp_path)))
    own = model_config(read_header(changed(tmp_path, tensors={**TENSORS, "output.weight": (HIDDEN, 8)})))
    assert (tied["tie_word_embeddings"], own["tie_word_embeddings"]) == (True, False)


def test_llama_3_scaling_is_read_from_its_factors_and_another_one_refused(tmp_path: Path) -> None:
    """Base 1e6: of the two frequencies of a head of four channels one has a wavelength of 6 tokens, one of 6,283."""

    def factors(*values: float) -> dict[str, object]:
        tensors = {**TENSORS, ROPE_FACTORS: (WIDTH // 2,)}
        return {"tensors": tensors, "values": {ROPE_FACTORS: struct.pack("<2f", *values)}}

    base = {"llama.rope.freq_base": 1e9}
    path = changed(tmp_path, base, **factors(1.0, 32.0))
    header = read_header(path)
    rope = model_config(header, rope_factors=read_rope_factors(path, header))["rope_parameters"]
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("llama3", 32.0, 8192)
    assert model_config(read_header(path), rope_factors=(1.0, 1.0))["rope_parameters"]["rope_type"] == "default"
    said = refusal(changed(tmp_path, base, **factors(2.0, 32.0)))
    assert said == "its rope_freqs.weight scales positions differently from Llama 3.1"


def test_padding_is_never_what_ends_an_answer(tmp_path: Path) -> None:
    assert special_tokens(check_gguf(changed(tmp_path))) == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    named = special_tokens(check_gguf(changed(tmp_path, {"tokenizer.ggml.padding_token_id": 1})))
    assert named["pad_token"] == "<|im_start|>"


def test_padding_without_a_usual_name_is_a_control_token_that_no_prompt_has(tmp_path: Path) -> None:
    tokens = ["<|turn|>", "<|im_start|>", "<|im_end|>", "<|spare|>", "b", "a", "Ġ", "ab"]
    changes = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3, 3, 1, 1, 1, 1],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eot_token_id": 2,
        "tokenizer.chat_template": METADATA["tokenizer.chat_template"] + "<|turn|>",
    }
    assert special_tokens(check_gguf(changed(tmp_path, changes)))["pad_token"] == "<|spare|>"
    only_the_turn = changes | {"tokenizer.ggml.token_type": [3, 3, 3, 1, 1, 1, 1, 1]}
    assert special_tokens(check_gguf(changed(tmp_path, only_the_turn)))["pad_token"] == "<|turn|>"


def test_facts_follow_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    assert gguf_facts(path).problem == "it cannot be read: No such file or directory"
    first = gguf_facts(write_tiny(path))
    path.write_bytes(raw_gguf(METADATA | {"general.name": "Another"}, TENSORS))
    second = gguf_facts(path)
    assert first.sha256 != second.sha256 and second.provenance.startswith("Another, from x.gguf")


def test_a_folder_of_such_a_name_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "folder.gguf").mkdir()
    assert (is_gguf(str(tmp_path / "folder.gguf")), is_gguf("models/X.GGUF"), is_gguf("owner/name")) == (
        False,
        True,
        False,
    )
