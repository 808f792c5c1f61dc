"""A GGUF file as an ordinary folder of a model in BF16. Loads torch.

transformers reads the weights: it knows llama.cpp's names, takes every quantisation that the package gguf can undo, and
turns back the order in which llama.cpp has the channels of a head (`llama` alone: llama.cpp rotates neighbours, and
transformers halves). Configuration and tokenizer are made here, for transformers reads only a part of them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from appliance.gguf.families import HEAD, model_config
from appliance.gguf.header import DamagedGguf, GgufError, Header
from appliance.gguf.source import check_gguf, read_rope_factors
from appliance.gguf.tokenizer import load_tokenizer, make_tokenizer, special_tokens

# Texts in which tokenizers differ: digits, spaces, contractions, letters beyond ASCII, code.
_PROBES = (
    "What is 12 plus 3456?",
    "  two spaces,\n\n\tand\r\nlines  ",
    "I'll say DON'T: they've 1,234.50€, naïve café ½ 中文 🙂",
    "def f(x):\n    return x+1  # y=[1,2];",
)


def convert(source: Path, *, folder: Path) -> None:
    """Write the model of a GGUF file into a folder. Raises GgufError for a file that is refused, or whose weights are
    not finite, OSError where one cannot be read or written."""
    header = check_gguf(source)
    config = model_config(header, rope_factors=read_rope_factors(source, header))
    tokenizer, special = make_tokenizer(header), special_tokens(header)
    ids = {
        f"{name.removesuffix('_token')}_token_id": tokenizer.token_to_id(special[name])
        for name in ("bos_token", "eos_token", "pad_token")
        if name in special
    }
    model = load_weights(source, config=config | ids, is_tied=HEAD not in header.tensors)
    model.generation_config = GenerationConfig(**ids, do_sample=False)
    model.save_pretrained(folder)
    save_tokenizer(header, folder=folder)


def save_tokenizer(header: Header, *, folder: Path) -> None:
    """Write the tokenizer's files. folder: with the model's config.json.  Raises GgufError where transformers, and with
    it vLLM, would take another tokenizer: for some families it takes its own, whatever the files say."""
    tokenizer = load_tokenizer(header)
    tokenizer.save_pretrained(folder)
    loaded = AutoTokenizer.from_pretrained(folder)
    for text in _PROBES:
        if loaded(text)["input_ids"] != tokenizer(text)["input_ids"]:
            message = (
                f"for a model of `{header.architecture}` transformers cuts text into words differently from the file"
            )
            raise GgufError(message, hint="use the model's own folder of safetensors from the hub as model.path")


def load_weights(source: Path, *, config: dict[str, Any], is_tied: bool) -> PreTrainedModel:
    """Load the model in BF16. config: of model_config, and its special tokens.  is_tied: whether the embedding is the
    head as well.  Raises GgufError where transformers left a weight out, or one is not finite."""
    known = dict(config)
    settings = AutoConfig.for_model(known.pop("model_type"), **known)
    # Alone in a folder: beside the user's file may lie an adapter or a configuration, which transformers would take.
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / source.name).symlink_to(source.absolute())
        model, loading = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=source.name, config=settings, dtype=torch.bfloat16, output_loading_info=True
        )
    left_out = set(loading["missing_keys"]) - ({"lm_head.weight"} if is_tied else set())
    if left_out:
        message = f"transformers does not read {len(left_out)} of its weights, {min(left_out)} first"
        raise GgufError(message, hint="use the model's own folder of safetensors from the hub as model.path")
    for name, weights in model.named_parameters():
        if not weights.isfinite().all():
            raise DamagedGguf(f"weights of {name} are not finite")
    return model
