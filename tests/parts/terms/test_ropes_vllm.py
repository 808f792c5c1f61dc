"""Lengths and angles of a rope: `appliance/terms/ropes.py` against vLLM and transformers themselves."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.config.model import _get_and_verify_max_len
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT, get_rope
from vllm.transformers_utils.config import patch_rope_parameters
from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

from appliance.terms.ropes import most_positions, rope_conflict, ropes_of
from appliance.terms.shapes import read_shape

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
FACTORS = [1.0 + index / 8 for index in range(16)]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": FACTORS,
    "long_factor": FACTORS[::-1],
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
# The rope of a config.json, and the tokens that vLLM serves.
ROPES: list[tuple[dict[str, Any], int]] = [
    ({}, 64),
    ({"rope_type": "default"}, 64),
    ({"rope_type": "default", "factor": 2.0}, 128),
    ({"rope_type": "linear", "factor": 2.0}, 128),
    ({"rope_type": "linear", "factor": 1.5}, 96),
    ({"rope_type": "linear", "factor": 1.33}, 85),
    ({"type": "linear", "factor": 3}, 192),
    ({"rope_type": "dynamic", "factor": 2.0}, 128),
    (YARN, 64),
    ({**YARN, "type": "yarn"}, 64),
    ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 64),
    ({"rope_type": "yarn", "factor": 2.5, "original_max_position_embeddings": 64}, 64),
    ({"rope_type": "yarn", "factor": 2.0}, 64),
    (LLAMA3, 64),
    (LONGROPE, 64),
    ({**LONGROPE, "rope_type": "longrope", "factor": 4.0}, 64),
    ({key: value for key, value in LONGROPE.items() if key != "rope_type"} | {"type": "su"}, 64),
]
SPELLINGS = ("rope_scaling", "rope_parameters")
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "qwen3_moe")
OTHERS: list[tuple[dict[str, Any], int]] = [
    ({"model_type": "llama", "max_sequence_length": 48}, 48),
    ({"model_type": "llama", "seq_length": 200}, 64),
    ({"model_type": "llama", "model_max_length": 100}, 100),
    ({"model_type": "llama", "model_max_length": 40, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 80),
    ({"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0}, 64),
    ({"model_type": "mistral", "sliding_window": 16}, 64),
    ({"model_type": "phi3", "original_max_position_embeddings": 16, "rope_scaling": LONGROPE, "pad_token_id": 0}, 64),
    (
        {
            "model_type": "gemma3_text",
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        64,
    ),
]
GRID = [
    ({"model_type": family, spelling: rope}, length)
    for family in FAMILIES
    for spelling in SPELLINGS
    for rope, length in ROPES
]


def written(config: dict[str, Any], folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps({**SIZES, **config}))
    return folder / "config.json"


def takes(file: Path, tokens: int) -> bool:
    """Whether vLLM serves sequences of so many tokens."""
    config = AutoConfig.from_pretrained(file.parent)
    patch_rope_parameters(config)
    lengths = ModelArchConfigConvertorBase(config, config).derive_max_model_len_and_key()
    try:
        _get_and_verify_max_len(
            hf_config=config,
            model_arch_config=type("Lengths", (), {"derived_max_model_len_and_key": lengths})(),
            tokenizer_config=None,
            max_model_len=tokens,
            disable_sliding_window=False,
            sliding_window=None,
        )
    except ValueError:
        return False
    return True


def test_a_models_longest_sequence_is_vllms(tmp_path, record_property):
    """Every configuration, to the token: vLLM takes as many as are said, and refuses one more."""
    agreed = 0
    for config, length in (*GRID, *OTHERS):
        file = written(config, tmp_path)
        shape = read_shape(file)
        assert shape is not None and shape.max_positions == length, config
        assert takes(file, length) and not takes(file, length + 1), config
        agreed += 1
    record_property("said", f"configurations with a rope: {agreed}, lengths as vLLM's: {agreed}")
    assert agreed == len(FAMILIES) * len(SPELLINGS) * len(ROPES) + len(OTHERS) == 178


def trainers_angles(rope: dict[str, Any], *, length: int, folder: Path) -> torch.Tensor:
    """cos of each position [length, 32], as transformers rotates a batch of one sequence."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = AutoConfig.from_pretrained(written({"model_type": "llama", "rope_parameters": rope}, folder).parent)
    assert config.rope_parameters["rope_type"] in {*ROPE_INIT_FUNCTIONS, "default"}
    return LlamaRotaryEmbedding(config)(torch.zeros(1, 1, 32), torch.arange(length)[None])[0][0]


def engines_angles(rope: dict[str, Any], *, length: int, most: int, folder: Path) -> torch.Tensor:
    """The same of vLLM, for sequences of up to `most` tokens."""
    config = AutoConfig.from_pretrained(written({"model_type": "llama", "rope_parameters": rope}, folder).parent)
    patch_rope_parameters(config)
    vllm_config = VllmConfig(device_config=DeviceConfig("cpu"))
    vllm_config.model_config = type("Model", (), {"max_model_len": most, "dtype": torch.float32})()
    _ROPE_DICT.clear()  # its keys leave out the longest sequence
    with set_current_vllm_config(vllm_config):
        rope_layer = get_rope(32, max_position=64, rope_parameters=config.rope_parameters, dtype=torch.float32)
    if hasattr(rope_layer, "long_short_cos_sin_cache"):
        table = rope_layer.long_short_cos_sin_cache
        begin = rope_layer.original_max_position_embeddings if rope_layer.use_long_rope else 0
    else:
        table, begin = rope_layer.cos_sin_cache, 0
    cos = table[begin : begin + length].chunk(2, dim=-1)[0]
    assert len(cos) == length, "vLLM's table has fewer positions"
    return torch.cat((cos, cos), dim=-1)


@pytest.mark.parametrize(
    ("rope", "length", "most"),
    [
        ({"rope_type": "default"}, 64, 64),
        ({"rope_type": "linear", "factor": 2.0}, 64, 128),
        (YARN, 100, 128),
        (LLAMA3, 64, 64),
        (LONGROPE, 16, 16),
        (LONGROPE, 17, 64),
    ],
)
def test_engine_and_trainer_rotate_by_the_same_angles(rope, length, most, tmp_path):
    trainers = trainers_angles(rope, length=length, folder=tmp_path)
    engines = engines_angles(rope, length=length, most=most, folder=tmp_path)
    torch.testing.assert_close(trainers, engines, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("rope", "length", "most"), [({"rope_type": "dynamic", "factor": 2.0}, 65, 128), (LONGROPE, 16, 64)]
)
def test_what_is_refused_rotates_by_other_angles(rope, length, most, tmp_path):
    """A dynamic rope past what the model was made for, of which vLLM has no angles at all; a short sequence of a
    longrope in an engine that takes long ones."""
    ropes = ropes_of({"max_position_embeddings": 64, "rope_scaling": rope})
    assert rope_conflict(ropes, longest=most)
    trainers = trainers_angles(rope, length=length, folder=tmp_path)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(
            trainers, engines_angles(rope, length=length, most=most, folder=tmp_path), atol=1e-2, rtol=0
        )


VERLS_SERVER = """
import types

from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

import appliance.trainer.worker  # verl's platform
from appliance.engine.replica import load_replica

vLLMReplica.__init__ = lambda self: None
ours = load_replica()().server_class.__ray_metadata__.modified_class
server = types.SimpleNamespace(
    config=types.SimpleNamespace(max_model_len=128),
    model_config=types.SimpleNamespace(hf_config=types.SimpleNamespace(max_position_embeddings=64)),
)
try:
    vLLMHttpServer._validate_configs(server)
except ValueError as error:
    print("verl's:", error)
ours._validate_configs(server)
print("ours: taken")
"""


def test_verls_server_takes_a_sequence_as_long_as_vllm_takes():
    """verl compares with `max_position_embeddings` alone, and refuses what YaRN is for. In a process of its own: the
    import silences warnings for a whole process, and brings the modules by which an API server is known."""
    output = subprocess.run(
        [sys.executable, "-c", VERLS_SERVER],
        env=os.environ | {"VERL_PLATFORM": "cpu"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    assert "verl's: max_model_len (128) should be less" in output
    assert output.endswith("ours: taken\n")


def test_no_length_is_no_limit():
    assert most_positions({"model_type": "llama"}) == 0
