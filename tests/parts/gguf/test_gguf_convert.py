"""GGUF files of every family against the transformers model that they were written of: the same logits, and tokens."""

from __future__ import annotations

import functools
import io
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_models import tensors_of, write_model
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tiny_models import FAMILIES, tiny
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from appliance.gguf.convert import convert
from appliance.gguf.header import TENSOR_TYPES, DamagedGguf, GgufError

TOKENS = torch.tensor([[5, 250, 17, 99, 3, 42, 42, 7]])
TEXTS = (
    "What is 12 plus 345?",
    "  two spaces,\n\n\tand\r\nlines  ",
    "I'll say DON'T, they've 1,234.50€ — naïve café ½ 中文 日本語 🙂",
    "<|im_start|>user\nhi<|im_end|>\n",
    "x=3;y=[1,2]  # code\n    return x+y",
    "",
)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
IN_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
LLAMA3 = (  # of meta-llama/Meta-Llama-3-8B's tokenizer.json
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
PUBLISHED = {  # how the publishers' own tokenizer.json cuts a text into words
    "gpt-2": GPT2,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]),
    "qwen2": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3.replace("{1,3}", "")), "isolated"), IN_BYTES]),
    "llama-bpe": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), IN_BYTES]),
}


def published(pre: str) -> PreTrainedTokenizerFast:
    """A small tokenizer in the form of the publisher's, trained on the texts, with special tokens first and one that is
    no special one last."""
    core = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    core.pre_tokenizer, core.decoder = PUBLISHED[pre], decoders.ByteLevel()
    if pre == "qwen2":
        core.normalizer = normalizers.NFC()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=285, special_tokens=special, initial_alphabet=IN_BYTES.alphabet(), show_progress=False
    )
    core.train_from_iterator(["What is 12 plus 3 plus 34? user user hi plus don't they've"] * 8, trainer)
    core.add_tokens(["<tool_call>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template="{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}",
    )


def written_model(model: PreTrainedModel, folder: Path, *, family: str, **changes: object) -> Path:
    """The folder that the model's GGUF file is converted to."""
    settings = {"tokenizer": published("smollm"), "pre": "smollm", **changes}
    source = write_model(folder / "model.gguf", model, family=family, **settings)
    (folder / "made").mkdir()
    convert(source, folder=folder / "made")
    return folder / "made"


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(TOKENS).logits


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_model_that_the_file_is_of(tmp_path: Path, family: str, is_tied: bool) -> None:
    """The same BF16 weights in the same order, so the same logits but for the order of float32 sums."""
    changes = {"sliding_window": None} if family == "mistral" else {}
    changes |= {"norm_topk_prob": True} if family == "qwen3-moe" else {}  # llama.cpp knows no other
    model = tiny(family, tie_word_embeddings=is_tied, **changes)
    model.save_pretrained(tmp_path / "reference")
    folder = written_model(model, tmp_path, family=family)
    config = json.loads((folder / "config.json").read_text())
    assert (config["tie_word_embeddings"], config["dtype"]) == (is_tied, "bfloat16")
    torch.testing.assert_close(logits(folder), logits(tmp_path / "reference"), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_heads_wider_than_their_share_of_the_model_are_read(tmp_path: Path, family: str) -> None:
    """As in Qwen3-0.6B, whose file has no rope.dimension_count."""
    changes = {"norm_topk_prob": True} if family == "qwen3-moe" else {}
    model = tiny(family, head_dim=32, **changes)
    model.save_pretrained(tmp_path / "reference")
    torch.testing.assert_close(
        logits(written_model(model, tmp_path, family=family)), logits(tmp_path / "reference"), rtol=0, atol=1e-5
    )


def test_what_lies_beside_the_file_plays_no_part(tmp_path: Path) -> None:
    model = tiny("llama", num_hidden_layers=1)
    model.save_pretrained(tmp_path / "reference")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "nowhere"}')
    (tmp_path / "config.json").write_text('{"model_type": "gemma2"}')
    (tmp_path / "generation_config.json").write_text("{")
    torch.testing.assert_close(
        logits(written_model(model, tmp_path, family="llama")), logits(tmp_path / "reference"), rtol=0, atol=1e-5
    )


def test_dequantised_weights_are_the_package_ggufs(tmp_path: Path) -> None:
    model = tiny("llama", hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    written = tensors_of(model, family="llama")
    for kind in ("Q8_0", "Q4_0", "Q5_1"):
        (tmp_path / kind).mkdir()
        folder = written_model(model, tmp_path / kind, family="llama", kind=kind)
        number = gguf.GGMLQuantizationType[kind]
        exact = gguf.dequantize(gguf.quantize(written["blk.0.ffn_down.weight"], number), number)
        read = AutoModelForCausalLM.from_pretrained(folder).model.layers[0].mlp.down_proj.weight
        assert torch.equal(read, torch.from_numpy(exact).bfloat16()), kind


def test_the_types_that_are_read_are_those_that_the_package_undoes() -> None:
    sizes = {number: (kind.block, kind.block_bytes) for number, kind in TENSOR_TYPES.items()}
    theirs = {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items() if int(kind) in sizes}
    assert theirs == sizes
    assert {int(gguf.GGMLQuantizationType[kind.name]) for kind in TENSOR_TYPES.values()} == set(TENSOR_TYPES)
    for number, (block, size) in sizes.items():
        zeros = np.zeros((1, size), np.uint8) if block > 1 or number == 30 else np.zeros((1, 1), np.float32)
        gguf.dequantize(zeros, gguf.GGMLQuantizationType(number))


@pytest.mark.parametrize("pre", PUBLISHED)
def test_text_becomes_the_publishers_tokens(tmp_path: Path, pre: str) -> None:
    tokenizer = published(pre)
    family = "qwen2" if pre == "qwen2" else "llama"
    read = AutoTokenizer.from_pretrained(
        written_model(tiny(family), tmp_path, family=family, tokenizer=tokenizer, pre=pre)
    )
    assert {text: read(text)["input_ids"] for text in TEXTS} == {text: tokenizer(text)["input_ids"] for text in TEXTS}
    assert [read.decode(tokenizer(text)["input_ids"]) for text in TEXTS] == [
        tokenizer.decode(tokenizer(text)["input_ids"]) for text in TEXTS
    ]
    assert (read.eos_token, read.pad_token, read.chat_template) == (
        "<|im_end|>",
        "<|endoftext|>",
        tokenizer.chat_template,
    )
    assert read.decode(read("<tool_call><|im_end|>")["input_ids"], skip_special_tokens=True) == "<tool_call>"


@functools.cache
def pieces(*, is_prefixed: bool) -> SentencePieceProcessor:
    """SentencePiece's own BPE, trained as Llama 2's: bytes for what is unknown, digits apart. is_prefixed: whether it
    puts a space in front."""
    written = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat that sat on the mat is not the hat of the bat, 1234 and 56"] * 20),
        model_writer=written,
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        hard_vocab_limit=False,
        add_dummy_prefix=is_prefixed,
        minloglevel=1,
    )
    return SentencePieceProcessor(model_proto=written.getvalue())


@pytest.mark.parametrize("is_prefixed", [True, False])
def test_text_becomes_sentencepieces_tokens(tmp_path: Path, is_prefixed: bool) -> None:
    published = pieces(is_prefixed=is_prefixed)
    model = tiny("llama", vocab_size=published.get_piece_size())
    changes = {"tokenizer": published, "is_prefixed": is_prefixed}
    read = AutoTokenizer.from_pretrained(written_model(model, tmp_path, family="llama", **changes))
    for text in (*TEXTS, "the cat sat on the hat"):
        if text and "<|" not in text:
            assert read(text, add_special_tokens=False)["input_ids"] == published.encode(text), text
            assert read(text)["input_ids"] == [1, *published.encode(text)], "Llama's tokenizers begin a text"
            assert read.decode(published.encode(text)) == text
    assert (read.bos_token, read.eos_token, read.pad_token, read.unk_token) == ("<s>", "</s>", "<unk>", "<unk>")


def test_a_tokenizer_that_transformers_would_replace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GgufError, match="for a model of `qwen2` transformers cuts text into words differently"):
        written_model(tiny("qwen2"), tmp_path, family="qwen2", tokenizer=published("llama-bpe"), pre="llama-bpe")


def test_a_weight_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    model = tiny("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = float("nan")
    with pytest.raises(DamagedGguf, match=r"weights of model.layers.1.mlp.up_proj.weight are not finite"):
        written_model(model, tmp_path, family="llama")


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.1.attn_output.bias"])
def test_biases_that_transformers_would_leave_out_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(GgufError, match=f"tensor {name} is not one that a model of `llama` has"):
        written_model(tiny("llama"), tmp_path, family="llama", more={name: np.ones(64, np.float32)})
