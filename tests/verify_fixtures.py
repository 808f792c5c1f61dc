"""A tiny model to verify, and a recipe for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.recipe.load import load_recipe
from appliance.recipe.schema import Recipe


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 of the real class with random weights, tied embeddings, biases, and sizes that two ranks can share."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from appliance.tasks.tiny_model import save_tokenizer

    torch.manual_seed(5)
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    tiny_model = Qwen2ForCausalLM(config)
    for parameter in tiny_model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.08)
    folder = tmp_path_factory.mktemp("verify") / "model"
    tiny_model.to(torch.bfloat16).save_pretrained(folder)
    save_tokenizer(folder, max_positions=256)
    return folder


@pytest.fixture
def settings(model: Path, tmp_path: Path) -> tuple[str, ...]:
    """For `--set`: the tiny recipe with this model."""
    return ("model.builtin=null", f"model.path={model}", f"cluster.run_dir={tmp_path}")


@pytest.fixture
def recipe(settings: tuple[str, ...]) -> Recipe:
    return load_recipe("arithmetic-tiny-int8", sets=settings)
