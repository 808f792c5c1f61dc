"""Tiny random models in the layout in which the hub has published ones: several files of weights with an index, a
tokenizer and a chat template of their own, several tokens that end an answer, and the older spelling of config.json."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from unlisted_models import build_unlisted

ORIGINAL_POSITIONS = 64
FREQUENCIES = 8  # of the half of a head's 32 channels that is rotated
# By model_type: what its configuration needs, and the type of its weights.
PUBLISHED: dict[str, tuple[dict[str, object], str]] = {
    "phi3": (
        {
            "tie_word_embeddings": False,
            "original_max_position_embeddings": ORIGINAL_POSITIONS,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1 + place / FREQUENCIES for place in range(FREQUENCIES)],
                "long_factor": [2.0 + place for place in range(FREQUENCIES)],
            },
        },
        "float32",
    ),
    "granite": ({"tie_word_embeddings": True}, "float16"),
}
SPECIAL = ("<unk>", "<s>", "</s>", "<|endoftext|>", "<|assistant|>", "<|end|>", "<|user|>", "<|system|>")
PADDED_ROWS = 4  # of the embedding, which no word has
PADDING, END_OF_TURN = "<|endoftext|>", "<|end|>"
MERGES = (("1", "0"), ("2", "0"), ("w", "h"), ("wh", "a"))
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
REMOTE_CODE = 'raise RuntimeError("code that comes with a model was run")\n'


def published_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes with a few merges, which begins each text with `<s>` unless it is asked not to."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*SPECIAL, *alphabet, *("".join(pair) for pair in MERGES)]
    core = Tokenizer(models.BPE({word: token for token, word in enumerate(words)}, list(MERGES), unk_token="<unk>"))
    core.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    special_tokens = {"bos_token": "<s>", "eos_token": PADDING, "pad_token": PADDING, "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=core, **special_tokens, chat_template=CHAT_TEMPLATE, model_max_length=4 * ORIGINAL_POSITIONS
    )


def make_published(folder: Path, model_type: str, *, seed: int) -> PreTrainedTokenizerFast:
    """A checkpoint in that layout; returns its tokenizer. `auto_map` names code in the folder that raises."""
    fields, dtype = PUBLISHED[model_type]
    tokenizer = published_tokenizer()
    rows = len(tokenizer) + PADDED_ROWS
    ends = tokenizer.convert_tokens_to_ids([END_OF_TURN, PADDING])
    special = {"bos_token_id": 1, "eos_token_id": ends[1], "pad_token_id": tokenizer.pad_token_id}
    model = build_unlisted(model_type, seed=seed, dtype=dtype, vocab_size=rows, **special, **fields)
    model.generation_config.eos_token_id = ends
    model.save_pretrained(folder, max_shard_size=100_000)
    tokenizer.save_pretrained(folder)
    _spell_as_published(folder, model_type, dtype=dtype)
    return tokenizer


def _spell_as_published(folder: Path, model_type: str, *, dtype: str) -> None:
    """Keys of config.json as transformers 4 wrote them, and the chat template inside tokenizer_config.json."""
    config_file, tokenizer_file = folder / "config.json", folder / "tokenizer_config.json"
    config = json.loads(config_file.read_text())
    rope = config.pop("rope_parameters")
    del config["dtype"]
    config |= {"torch_dtype": dtype, "transformers_version": "4.43.3"}
    beside = ("rope_theta", "partial_rotary_factor")
    config |= {key: rope[key] for key in beside if key in rope}
    rope_type = rope.pop("rope_type")
    config["rope_scaling"] = None
    if rope_type == "longrope":
        config["rope_scaling"] = {key: rope[key] for key in ("long_factor", "short_factor")} | {"type": rope_type}
    config["auto_map"] = {
        "AutoConfig": f"configuration_{model_type}.Config",
        "AutoModelForCausalLM": f"modeling_{model_type}.Model",
    }
    config_file.write_text(json.dumps(config, indent=2))
    for name in ("configuration", "modeling"):
        (folder / f"{name}_{model_type}.py").write_text(REMOTE_CODE)
    (folder / "chat_template.jinja").unlink()
    settings = json.loads(tokenizer_file.read_text())
    del settings["backend"]
    settings |= {"chat_template": CHAT_TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    tokenizer_file.write_text(json.dumps(settings, indent=2))


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's files, in BF16."""
    from safetensors.torch import load_file

    tensors = [pair for file in sorted(folder.glob("*.safetensors")) for pair in load_file(file).items()]
    return {name: tensor.bfloat16() for name, tensor in tensors}
