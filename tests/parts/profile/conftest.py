"""A recipe of a tiny model in a folder, for the commands around a profile."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import tiny

from appliance.tasks.tiny_model import save_tokenizer

RECIPE = """
name: tiny
model: {{path: {model}}}
task: {{kind: arithmetic, difficulty: 2, val_size: 16, max_prompt_tokens: 8, max_response_tokens: 6}}
rollout: {{scheme: int8}}
trainer: {{steps: 1}}
cluster: {{device: cpu, run_dir: {runs}}}
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    model = tmp_path / "model"
    tiny("qwen2").save_pretrained(model)
    save_tokenizer(model, max_positions=128)
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE.format(model=model, runs=tmp_path / "runs"))
    return str(file)
