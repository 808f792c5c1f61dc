"""`check`, `train` and `profile` of a model whose files lack a tensor: exit code 3, before anything is made."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from broken_checkpoints import write_broken
from plans import HOST
from safetensors.torch import load_file
from tiny_models import tiny

from appliance.plan.build import build_plan
from appliance.preflight.inputs import read_inputs
from appliance.preflight.weights import WeightsFacts
from appliance.recipe.load import load_recipe
from appliance.tasks.tiny_model import save_tokenizer

LOST = "model.layers.1.mlp.up_proj.weight"
LOST_TENSOR = (
    "model.path: {}: the weights are not those of the model in config.json: 1 is missing (model.layers.1.mlp."
    "up_proj.weight)\nhint: copy or download the model again, or correct its config.json\n"
)
UNBUFFERED = {"PYTHONUNBUFFERED": "1"}  # so that both streams come in the order in which they were written


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    tiny("llama").save_pretrained(folder)
    save_tokenizer(folder, max_positions=128)
    return folder


@pytest.fixture(scope="module")
def broken(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = {name: each for name, each in load_file(whole / "model.safetensors").items() if name != LOST}
    return write_broken(whole, tensors=tensors, folder=tmp_path_factory.mktemp("broken"), fault="", at="").folder


def changes(model: Path, *, run_dir: Path) -> list[str]:
    sizes = ("task.max_prompt_tokens=64", "task.max_response_tokens=16")
    return ["model.builtin=null", f"model.path={model}", f"cluster.run_dir={run_dir}", *sizes, "trainer.steps=2"]


# Commands one after another in one process, which holds a folder's weights against its config.json once.
COMMANDS = """
import sys
from appliance.cli import main

for command in ("check", "train", "profile"):
    sys.argv[1] = command
    try:
        main()
    except SystemExit as ended:
        print(f"{command} ended with {ended.code}", flush=True)
"""


def test_a_lost_tensor_ends_a_command_with_3(broken: Path, tmp_path: Path) -> None:
    """Each of the three that begin with preflight. What it says is on stdout where it is what was asked for."""
    sets = [word for each in changes(broken, run_dir=tmp_path) for word in ("--set", each)]
    argv = [sys.executable, "-c", COMMANDS, "", "arithmetic-tiny-int8", *sets]
    done = subprocess.run(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240, env=os.environ | UNBUFFERED
    )
    output, is_named_once = done.stdout, []
    for command in ("check", "train", "profile"):
        told, ended, output = output.partition(f"{command} ended with 3\n")
        is_named_once.append(bool(ended) and told.count(LOST_TENSOR.format(broken)) == 1)
    assert (is_named_once, output) == ([True] * 3, ""), done.stdout
    assert [*tmp_path.iterdir()] == []


def test_whole_files_are_taken_and_heard_where_children_may_run(whole: Path, broken: Path, tmp_path: Path) -> None:
    """That a broken one is heard is seen above."""

    def read(model: Path, **asks: bool) -> WeightsFacts:
        recipe = load_recipe("arithmetic-tiny-int8", sets=changes(model, run_dir=tmp_path))
        plan = build_plan(recipe, run_dir=tmp_path / "a", host=HOST)
        return read_inputs(plan, run_code=False, try_template=False, **asks).weights

    assert read(whole, ask_hub=True) == WeightsFacts()
    assert read(broken, ask_hub=False) == read(broken, ask_hub=True, read_weights=False) == WeightsFacts()
