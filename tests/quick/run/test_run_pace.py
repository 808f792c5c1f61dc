"""A run that is resumed forwards as many sequences at once as it began with, and recomputes activations if it did: both
change the bits of a step, and memory, which decides about them at first, may be another by now."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from plans import HOST
from stopped_runs import recipe, stopped, target_of

from appliance.launch.resume import original_plan
from appliance.plan.build import OriginalPlan, build_plan
from appliance.plan.memory import GIB
from appliance.record.plan import RunPlan

SETS = ("task.max_prompt_tokens=64", "task.max_response_tokens=24")
SETS += ("batch.prompts_per_step=16", "rollout.samples_per_prompt=8")
BUILT_IN = ("model.builtin=smollm2-135m", *SETS)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}


def planned(run_dir: Path, *sets: str, gib: int, original: OriginalPlan | None = None) -> RunPlan:
    host = dataclasses.replace(HOST, memory_bytes=gib * GIB)
    return build_plan(recipe(*sets), run_dir=run_dir, host=host, original=original)


def pace(plan: RunPlan) -> tuple[bool, int]:
    return plan.trainer_memory.gradient_checkpointing, plan.batch.micro_batch_sequences


def has_forgotten(run_dir: Path, *keys: str) -> None:
    """Its plan is of a version that did not write them."""
    file = run_dir / "plan.json"
    raw: dict[str, Any] = json.loads(file.read_text())
    for key in keys:
        del raw["batch" if key in raw["batch"] else "trainer_memory"][key]
    file.write_text(json.dumps(raw))


@pytest.mark.parametrize("began_on", [8, 64])
def test_a_resumed_run_trains_as_it_began_whatever_memory_its_host_has(tmp_path: Path, began_on: int) -> None:
    first = planned(tmp_path / "small-1", *BUILT_IN, gib=began_on)
    original = original_plan(target_of(stopped(first)))
    assert pace(planned(tmp_path / "small-2", *BUILT_IN, gib=8)) != pace(planned(tmp_path / "s", *BUILT_IN, gib=64))
    for gib in (8, 64):
        again = planned(tmp_path / "small-1", *BUILT_IN, gib=gib, original=original)
        assert (again.trainer_memory, again.batch) == (first.trainer_memory, first.batch), gib
        assert again.argv == first.argv
        why = {choice.key: choice.why for choice in again.choices}
        assert why["trainer.gradient_checkpointing"] == "as the run began, whatever memory there is now"
        assert why["batch.micro_batch_sequences"] == "as the run began, whatever memory there is now"


def test_a_run_that_began_before_copies_were_kept_keeps_none(tmp_path: Path) -> None:
    """Its plan does not say whether there was room for all that is kept now."""
    first = planned(tmp_path / "small-1", *BUILT_IN, gib=64)
    assert first.trainer_memory.keeps_copies
    run_dir = stopped(first)
    has_forgotten(run_dir, "keeps_copies")
    again = planned(run_dir, *BUILT_IN, gib=64, original=original_plan(target_of(run_dir)))
    assert again.trainer_memory == first.trainer_memory.replace(keeps_copies=False)


def test_a_model_that_has_arrived_since_changes_nothing(tmp_path: Path) -> None:
    """As one of the hub, whose sizes nobody knew when the run was planned."""
    folder = tmp_path / "model"
    sets = ("model.builtin=null", f"model.path={folder}", *SETS)
    first = planned(tmp_path / "small-1", *sets, gib=64)
    original = original_plan(target_of(stopped(first)))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    assert pace(planned(tmp_path / "small-2", *sets, gib=64)) != pace(first)
    assert planned(tmp_path / "small-1", *sets, gib=64, original=original).trainer_memory == first.trainer_memory


@pytest.mark.parametrize(
    "keys",
    [("gradient_checkpointing",), ("micro_batch_sequences",), ("gradient_checkpointing", "micro_batch_sequences")],
)
def test_a_run_that_did_not_write_it_down_is_planned_as_a_new_one(tmp_path: Path, keys: tuple[str, ...]) -> None:
    run_dir = stopped(planned(tmp_path / "small-1", *BUILT_IN, gib=64))
    has_forgotten(run_dir, *keys)
    original = original_plan(target_of(run_dir))
    new = planned(run_dir, *BUILT_IN, gib=8)
    assert planned(run_dir, *BUILT_IN, gib=8, original=original) == new


def test_what_the_recipe_sets_is_taken(tmp_path: Path) -> None:
    run_dir = stopped(planned(tmp_path / "small-1", *BUILT_IN, gib=8))
    original = original_plan(target_of(run_dir))
    again = planned(run_dir, *BUILT_IN, "batch.micro_batch_sequences=4", gib=64, original=original)
    assert again.batch.micro_batch_sequences == 4
    assert {choice.key: choice.why for choice in again.choices}["batch.micro_batch_sequences"] == "as given"


def test_another_batch_or_device_by_force_is_planned_anew(tmp_path: Path) -> None:
    """The sequences of before would not share out a step of 9 prompts x 8; and a GPU has another memory."""
    run_dir = stopped(planned(tmp_path / "small-1", *BUILT_IN, gib=64))
    original = original_plan(target_of(run_dir))
    for key in ("batch.prompts_per_step=9", "cluster.device=h200"):
        new = planned(run_dir, *BUILT_IN, key, gib=8)
        assert planned(run_dir, *BUILT_IN, key, gib=8, original=original).trainer_memory == new.trainer_memory, key
