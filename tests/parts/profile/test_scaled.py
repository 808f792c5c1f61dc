"""The scaled model of a run: made once, whole or not at all, refused when the run no longer fits it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from plans import make_plan, with_model
from safetensors.torch import load_file, save_file
from tiny_models import tiny
from trainers import make_trainer

from appliance.errors import EngineError
from appliance.launch.command import run_export
from appliance.preflight.inputs import read_inputs, uaq_problem
from appliance.profile.job import job_of_run
from appliance.profile.uaq import is_scaled, make_scaled, scaling_child
from appliance.quant.uaq import MARK_FILE
from appliance.record.checkpoints import Facts, checkpoint_folder, seal
from appliance.record.plan import ProfilePlan, RunPlan, UaqPlan
from appliance.record.session import RunRecord, write_record
from appliance.terms.schemes import Scheme
from appliance.trainer.export import export_checkpoint


@pytest.fixture
def plan(tmp_path: Path) -> RunPlan:
    tiny("qwen2").save_pretrained(tmp_path / "model")
    run_dir = tmp_path / "runs" / "one"
    run_dir.mkdir(parents=True)
    plan = make_plan(run_dir, uaq=UaqPlan(scale=1.5, folder=str(run_dir / "scaled")))
    return with_model(plan, tmp_path / "model", provenance="Tiny, licence mit")


def test_a_run_without_uaq_needs_none(plan: RunPlan) -> None:
    bare = plan.replace(uaq=None)
    assert is_scaled(bare) and scaling_child(bare) is None
    assert bare.trained_model == bare.weights.name_or_path


def test_a_resumed_run_finds_it_and_scales_nothing_again(plan: RunPlan) -> None:
    child = scaling_child(plan)
    assert child is not None and child.argv[-2:] == ("appliance.profile.uaq", f"{plan.run_dir}/plan.json")
    make_scaled(plan)
    folder = Path(plan.trained_model)
    mark = json.loads((folder / MARK_FILE).read_text())
    assert (mark["scale"], mark["model"], mark["norms"]) == (1.5, plan.weights.name_or_path, 4)
    assert is_scaled(plan) and scaling_child(plan) is None
    before, after = (load_file(Path(each) / "model.safetensors") for each in (plan.weights.name_or_path, folder))
    name = "model.layers.0.input_layernorm.weight"
    assert torch.equal(after[name].float(), before[name].float() * 1.5)
    assert [path.name for path in Path(plan.run_dir).iterdir() if path.name.startswith(".")] == []


def test_what_a_killed_attempt_left_is_taken_away(plan: RunPlan) -> None:
    left = Path(plan.run_dir) / ".scaled-abc" / "half"
    left.mkdir(parents=True)
    assert not is_scaled(plan)
    make_scaled(plan)
    assert is_scaled(plan) and not left.parent.exists()


def test_another_scale_is_refused(plan: RunPlan) -> None:
    make_scaled(plan)
    with pytest.raises(EngineError) as raised:
        scaling_child(plan.replace(uaq=plan.uaq.replace(scale=2.0)))
    assert raised.value.message == f"{plan.uaq.folder}: made with uaq_scale 1.5, and the plan says 2"
    assert (
        raised.value.hint
        == "put correction.uaq_scale and the model back as the run began with them, or start another run"
    )


def test_a_model_that_has_changed_is_refused(plan: RunPlan) -> None:
    make_scaled(plan)
    tiny("qwen2", seed=1).save_pretrained(plan.weights.name_or_path)
    with pytest.raises(EngineError) as raised:
        is_scaled(plan)
    model = plan.weights.name_or_path
    assert raised.value.message == f"{plan.uaq.folder}: made from {model}, whose files have changed since"


def test_a_folder_without_a_mark_is_not_taken(plan: RunPlan) -> None:
    Path(plan.uaq.folder).mkdir()
    with pytest.raises(EngineError, match="scaled: not a model that UAQ scaled: "):
        is_scaled(plan)


def test_the_profile_is_of_the_scaled_model(plan: RunPlan) -> None:
    profile = ProfilePlan(folder=f"{plan.run_dir}/profile", source="", scheme=Scheme.INT8)
    assert job_of_run(plan.replace(profile=profile)).model == plan.uaq.folder


def test_a_plan_with_uaq_reads_back(plan: RunPlan) -> None:
    assert RunPlan.model_validate_json(plan.to_json()) == plan


def test_a_checkpoint_is_exported_in_the_original_parametrisation(plan: RunPlan, tmp_path: Path) -> None:
    make_scaled(plan)
    checkpoint = tmp_path / "global_step_1"
    (checkpoint / "actor").mkdir(parents=True)
    Path(plan.trained_model).rename(checkpoint / "actor" / "huggingface")
    export_checkpoint(checkpoint, target=tmp_path / "out", uaq=plan.uaq)
    folders = (Path(plan.weights.name_or_path), tmp_path / "out")
    before, after = (load_file(folder / "model.safetensors") for folder in folders)
    assert all(torch.equal(before[name], after[name].to(before[name].dtype)) for name in before)
    assert not (tmp_path / "out" / MARK_FILE).exists()


def trained(plan: RunPlan, *, step: int) -> Path:
    """A sealed checkpoint of the run that holds the scaled model as it was made: no update has moved it."""
    make_scaled(plan)
    folder = checkpoint_folder(Path(plan.run_dir), step=step)
    (folder / "actor").mkdir(parents=True)
    Path(plan.trained_model).rename(folder / "actor" / "huggingface")
    seal(folder, facts=Facts(step=step, world_size=1, reason="", time=0.0))
    return folder


def is_the_model(folder: Path, plan: RunPlan) -> bool:
    before, after = (load_file(each / "model.safetensors") for each in (Path(plan.weights.name_or_path), folder))
    equal = [torch.equal(before[name], after[name].to(before[name].dtype)) for name in before]
    return all(equal) and before.keys() == after.keys() and not (folder / MARK_FILE).exists()


def test_the_model_of_a_run_is_folded_back_and_names_what_it_was_trained_from(plan: RunPlan) -> None:
    """As the trainer makes `model/` at its end."""
    trained(plan, step=plan.trainer.steps)
    make_trainer(plan, stopping=SimpleNamespace(check=None)).export_model()
    assert is_the_model(Path(plan.run_dir) / "model", plan)
    assert "It was trained from Tiny, licence mit.\n" in (Path(plan.run_dir) / "model" / "README.md").read_text()


def test_what_the_command_exports_is_folded_back(plan: RunPlan, tmp_path: Path) -> None:
    """By the scale in the run's own plan."""
    trained(plan, step=4)
    plan.write(Path(plan.run_dir) / "plan.json")
    write_record(Path(plan.run_dir), RunRecord())
    assert run_export(plan.run_dir, run_root=tmp_path, step=None, output=tmp_path / "out") == 0
    assert is_the_model(tmp_path / "out", plan)


def test_preflight_knows_what_cannot_be_scaled(plan: RunPlan) -> None:
    assert uaq_problem(plan) == ""
    make_scaled(plan)
    folder = plan.uaq.folder
    twice = with_model(plan, folder)
    assert uaq_problem(twice) == f"{folder}: the model is scaled by UAQ already (uaq.json says so)"
    assert uaq_problem(twice.replace(uaq=None)) == ""
    with pytest.raises(EngineError, match=r"the model is scaled by UAQ already \(uaq.json says so\)"):
        make_scaled(twice.replace(uaq=UaqPlan(scale=1.5, folder=folder + "-again")))
    source = Path(plan.weights.name_or_path)
    (source / "model.safetensors").rename(source / "kept")
    assert uaq_problem(plan) == f"{source}: UAQ reads weights from *.safetensors, and the folder has none"
    (source / "model.safetensors").write_bytes(b"not one")
    assert uaq_problem(plan).startswith(f"{source}: its safetensors cannot be read: ")
    tensors = load_file(source / "kept")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, source / "model.safetensors")
    assert uaq_problem(plan) == f"{source}: UAQ: model.layers.1 has no mlp.up_proj.weight"
    assert read_inputs(plan, ask_hub=False).uaq_problem == uaq_problem(plan)  # and so it is a finding
