"""A saved model has the files of its base, byte for byte, but its weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig

from appliance.record.plan import WeightsPlan
from appliance.tasks.tiny_model import byte_tokenizer
from appliance.trainer.checkpoints import base_folder, put_base_files

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
WEIGHTS = {"model.safetensors"}
CARRIED = ("LICENSE", "NOTICE.txt", "modeling_own.py", "own.tiktoken", "tokenizer.model", "tokenizer.model.v3")
LEFT = (  # what lies beside a model that was trained, copied or converted somewhere
    *("README.md", ".gitattributes", "pytorch_model.bin", "model.ckpt", "model.gguf", "training_args.bin", "train.log"),
    *("data.parquet", "rows.jsonl", "rows.jsonl.gz", "trainer_state.json", "all_results.json", "train_results.json"),
    *("events.out.tfevents.1700000000.host.1.0", "optimizer.pt.part", "nohup.out", "notes.md", "plot.png"),
)
NOT_TAKEN = {*LEFT, "model.safetensors.index.json", *WEIGHTS}
OLD_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    **SIZES,
    "num_hidden_layers": 1,
    "vocab_size": 259,
    "max_position_embeddings": 64,
    "rope_theta": 500000.0,
    "rope_scaling": {"type": "linear", "factor": 2.0},
    "eos_token_id": [256, 258],
    "pad_token_id": None,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.31.0",
    "use_cache": False,
    "a_key_of_its_makers": {"x": 1},
}


def base_model(folder: Path, **config: object) -> Path:
    """As an older transformers and people leave one: what a save would drop, rename or move."""
    folder.mkdir()
    tokenizer = byte_tokenizer(max_positions=64)
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({**OLD_CONFIG, **config}, indent=4))
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, num_hidden_layers=1, vocab_size=259))
    model.to(torch.bfloat16).save_pretrained(folder / "made")
    (folder / "made" / "model.safetensors").rename(folder / "model.safetensors")
    for file in (folder / "made").iterdir():
        file.unlink()
    (folder / "made").rmdir()
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast", "made_by": "somebody"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=4))
    (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    (folder / "added_tokens.json").write_text('{"<|im_end|>": 256}')
    generation = {"eos_token_id": [256, 258], "temperature": 0.6, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    for name in (*CARRIED, *LEFT):
        (folder / name).write_text(f"{name} of the base")
    (folder / "model.safetensors.index.json").write_text("{}")
    return folder


def saved_by_transformers(base: Path, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """As verl saves one beside a checkpoint."""
    GenerationConfig.from_pretrained(base).save_pretrained(folder)
    AutoConfig.from_pretrained(base).save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    AutoModelForCausalLM.from_pretrained(base, dtype=dtype).save_pretrained(folder)
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_every_file_that_a_model_is_read_by_is_the_bases(
    tmp_path: Path, record_property: pytest.RecordProperty
) -> None:
    base = base_model(tmp_path / "base")
    saved = saved_by_transformers(base, tmp_path / "saved")
    bases = {name: content for name, content in files_of(base).items() if name not in NOT_TAKEN}
    before = files_of(saved)
    differ = {name for name in bases if before.get(name) != bases[name]} | (before.keys() - bases.keys() - WEIGHTS)
    assert {"config.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"} <= differ
    put_base_files(saved, base=base)
    after = files_of(saved)
    assert {name: content for name, content in after.items() if name not in WEIGHTS} == bases
    assert after["model.safetensors"] == before["model.safetensors"]
    record_property("said", f"files of a base: {len(bases)}, other ones after a save by transformers: {len(differ)}")
    assert (len(bases), len(differ)) == (12, 12)


def test_what_was_saved_is_read_as_the_base_is(tmp_path: Path) -> None:
    base = base_model(tmp_path / "base")
    saved = saved_by_transformers(base, tmp_path / "saved")
    put_base_files(saved, base=base)
    messages = [{"role": "user", "content": "1 + 2?"}]
    ids = torch.arange(40)[None]
    logits, renderings, stops = zip(
        *(
            (
                AutoModelForCausalLM.from_pretrained(folder)(ids).logits,
                AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, tokenize=False),
                GenerationConfig.from_pretrained(folder).eos_token_id,
            )
            for folder in (base, saved)
        ),
        strict=True,
    )
    assert torch.equal(*logits) and renderings[0] == renderings[1] and stops == ([256, 258], [256, 258])


def test_templates_in_a_folder_are_the_bases(tmp_path: Path) -> None:
    base = base_model(tmp_path / "base")
    saved = saved_by_transformers(base, tmp_path / "saved")
    for folder, text in ((base, "{{ messages }}"), (saved, "another")):
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(text)
    (saved / "additional_chat_templates" / "rag.jinja").write_text("none of the base's")
    put_base_files(saved, base=base)
    templates = {name: content for name, content in files_of(saved).items() if name.startswith("additional")}
    assert templates == {"additional_chat_templates/tool_use.jinja": b"{{ messages }}"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_configuration_names_the_type_to_run_in_whatever_is_saved(dtype: torch.dtype, tmp_path: Path) -> None:
    """Of a checkpoint in FP32 as well: the model runs in BF16, as the base does."""
    base = base_model(tmp_path / "base")
    saved = saved_by_transformers(base, tmp_path / "saved", dtype)
    put_base_files(saved, base=base)
    assert (saved / "config.json").read_bytes() == (base / "config.json").read_bytes()
    assert AutoModelForCausalLM.from_pretrained(saved).dtype is torch.bfloat16


def test_a_base_that_is_gone_leaves_what_was_saved(tmp_path: Path) -> None:
    weights = WeightsPlan(name_or_path=str(tmp_path))
    assert base_folder(weights) is None
    (tmp_path / "config.json").write_text("{}")
    assert base_folder(weights) == tmp_path
    name = "owner/name-that-nobody-has"
    assert base_folder(WeightsPlan(name_or_path=name, hub_name=name)) is None
