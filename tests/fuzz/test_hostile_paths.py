"""Paths and links that lead elsewhere, and files that are none: each way out of the run's folder, tried and refused."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
from fuzz_surface import attempt
from plans import make_files, make_plan, with_model

from appliance.container.launch import container_spec
from appliance.errors import ApplianceError, EngineError, RecipeError
from appliance.launch.command import new_run_dir, run_export
from appliance.launch.resume import find_target, profile_file_of
from appliance.quant.checkpoint import ModelTensors
from appliance.recipe.load import load_recipe
from appliance.record.checkpoints import Facts, damage, find_newest, in_order, read_manifest, seal
from appliance.record.events import append_event
from appliance.record.session import RunRecord, read_record, write_record
from appliance.report.folder import find_run
from appliance.tasks.built_in import gsm8k
from appliance.tasks.library import data_key

OUT = ("../x", "..", ".", "/etc", "a/b", "a/../../b", "~", "", " ", "a\x00b", "a\nb", "x" * 300, "-x", "\ud800")
FACTS = Facts(step=3, world_size=1, reason="the end", time=1.5)


def recipe_with(room: Path, **changes: object) -> str:
    base = {"model": {"builtin": "tiny-arithmetic"}, "trainer": {"steps": 1}}
    base["task"] = {"max_prompt_tokens": 16, "max_response_tokens": 8}
    (room / "r.yaml").write_text(json.dumps(base | changes))
    return str(room / "r.yaml")


@pytest.fixture
def sealed(room: Path) -> Path:
    folder = room / "run/checkpoints/global_step_3"
    folder.mkdir(parents=True)
    (folder / "model.pt").write_bytes(b"weights")
    seal(folder, facts=FACTS)
    return folder


@pytest.mark.parametrize("name", OUT)
def test_a_name_is_one_component_of_a_path(room: Path, name: str) -> None:
    with pytest.raises(RecipeError):
        load_recipe(recipe_with(room, name=name))
    recipe = load_recipe(recipe_with(room, cluster={"run_dir": str(room / "runs")}))
    with pytest.raises(RecipeError, match="--name"):
        new_run_dir(recipe, name=name)
    with pytest.raises(RecipeError, match="--name"):
        find_target("auto", root=room, recipe_name="r", name=name)


@pytest.mark.parametrize("run_dir", ["../out", "runs/../../out", "~nobody-here/x", "x" * 300, "a\x00b", "a/" * 600])
def test_a_folder_of_runs_that_cannot_be_or_leads_out_is_refused(room: Path, run_dir: str) -> None:
    with pytest.raises(RecipeError, match=r"cluster\.run_dir"):
        load_recipe(recipe_with(room, cluster={"run_dir": run_dir}))


@pytest.mark.parametrize("path", ["../../outside", "/etc/passwd", "actor/../../outside", "..", "", "a/../../../b"])
def test_a_manifest_names_files_inside_only(sealed: Path, path: str) -> None:
    (sealed.parents[1] / "outside").write_bytes(b"weights")
    content = json.loads((sealed / "manifest.json").read_text())
    content["files"][0]["path"] = path
    own = {"facts": content["facts"], "files": content["files"]}
    content["sha256"] = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()  # as its forger would
    (sealed / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="names a file outside of the checkpoint"):
        read_manifest(sealed)
    assert find_newest(sealed.parents[1]).newest is None


def test_a_link_in_a_checkpoint_is_damage(sealed: Path) -> None:
    content = (sealed / "model.pt").read_bytes()
    elsewhere = sealed.parents[1] / "elsewhere"
    elsewhere.write_bytes(content)
    (sealed / "model.pt").unlink()
    (sealed / "model.pt").symlink_to(elsewhere)
    assert damage(sealed) == ["model.pt is missing"]


def test_a_linked_folder_in_a_checkpoint_is_damage(sealed: Path) -> None:
    (sealed / "more").symlink_to("/etc")
    assert damage(sealed) == ["more is not in the manifest"]


def test_a_link_to_a_checkpoint_is_none(sealed: Path) -> None:
    moved = sealed.rename(sealed.parents[1] / "elsewhere")
    sealed.symlink_to(moved)
    assert damage(sealed) == ["a symbolic link, not the folder that was saved"]
    assert find_newest(sealed.parents[1]).newest is None


@pytest.mark.parametrize("name", ["global_step_03", "global_step_٣", "global_step_-1", "global_step_" + "9" * 30])
def test_a_step_has_one_name(sealed: Path, name: str) -> None:
    (sealed.parent / name).mkdir()
    assert in_order(sealed.parents[1]) == [sealed]


@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_a_manifest_is_a_file(sealed: Path, kind: str) -> None:
    manifest = sealed / "manifest.json"
    manifest.unlink()
    if kind == "pipe":
        os.mkfifo(manifest)  # reading one waits for a writer, for ever
    elif kind == "link":
        manifest.symlink_to("/dev/zero")
    else:
        manifest.mkdir()
    lines = attempt("manifests", lambda: damage(sealed), folder=sealed.parents[2])
    assert lines[0] == "manifest.json cannot be read: manifest.json is not a regular file"


@pytest.mark.parametrize("name", ["../recipe.yaml", "/etc/passwd", "a/b", "."])
def test_the_profile_of_a_manifest_is_a_file_of_the_run(room: Path, name: str) -> None:
    assert profile_file_of(room, name) is None
    assert profile_file_of(room, "profile.safetensors") == room / "profile" / "profile.safetensors"


def test_a_run_with_links_is_not_resumed(room: Path) -> None:
    run_dir, victim = room / "run", room / "victim"
    run_dir.mkdir()
    write_record(run_dir, RunRecord())
    victim.write_text("mine\n")
    (run_dir / "events.jsonl").symlink_to(victim)
    with pytest.raises(RecipeError, match=r"events\.jsonl is a symbolic link, which a run never makes"):
        find_target(str(run_dir), root=room, recipe_name="r", name=None)
    with pytest.raises(OSError, match="symbolic links"):
        append_event(run_dir, kind="note", what="x")
    assert victim.read_text() == "mine\n"


@pytest.mark.parametrize("path", ["logs/2", "logs/2/train.log", "attest", "profile/scales.safetensors", "logs/1/ray"])
def test_a_link_at_any_depth_keeps_a_run_from_being_resumed(room: Path, path: str) -> None:
    """What the next attempt writes would land where it points."""
    run_dir = room / "run"
    (run_dir / path).parent.mkdir(parents=True)
    write_record(run_dir, RunRecord())
    (run_dir / path).symlink_to(room)
    with pytest.raises(RecipeError, match=f"run/{path} is a symbolic link, which a run never makes"):
        find_target(str(run_dir), root=room, recipe_name="r", name=None)


def test_links_among_the_logs_of_ray_and_a_linked_folder_of_checkpoints_may_be(room: Path) -> None:
    run_dir = room / "run"
    (run_dir / "logs/1/ray").mkdir(parents=True)
    (run_dir / "logs/1/ray/latest.log").symlink_to("gcs.log")
    (room / "elsewhere").mkdir()
    (run_dir / "checkpoints").symlink_to(room / "elsewhere")
    write_record(run_dir, RunRecord())
    assert find_target(str(run_dir), root=room, recipe_name="r", name=None) is not None


@pytest.mark.parametrize("attempt_number", ["../../../etc", -1, 1.5, True, 10**9, None])
def test_the_number_of_an_attempt_is_a_number(room: Path, attempt_number: object) -> None:
    said = {"state": "failed", "phase": "x", "attempt": attempt_number, "schema_version": 1}
    (room / "run.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match="attempt is not one that this program writes"):
        read_record(room)


@pytest.mark.parametrize("run", OUT)
def test_a_run_that_is_none_is_told(room: Path, run: str) -> None:
    with pytest.raises(RecipeError, match="no folder of that path or name"):
        find_run(run, run_root=room)


@pytest.mark.parametrize("path", ["~nobody-here/x", "x" * 300, "a\x00b", "/dev/null/x", "a/" * 3000])
def test_a_run_to_resume_that_cannot_be_is_told(room: Path, path: str) -> None:
    with pytest.raises(RecipeError, match="not the folder of a run"):
        find_target(path, root=room, recipe_name="r", name=None)


def test_export_writes_through_no_link(room: Path) -> None:
    run_dir = room / "run"
    run_dir.mkdir()
    write_record(run_dir, RunRecord())
    (room / "out").symlink_to(room / "victim")  # to nothing yet
    with pytest.raises(RecipeError, match="is there already and is not overwritten"):
        run_export(str(run_dir), run_root=room, step=None, output=room / "out")


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "..", "", 5, ["x"]])
def test_an_index_names_files_beside_it(room: Path, name: object) -> None:
    (room / "model.safetensors").write_bytes(b"")
    (room / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(EngineError, match=r"names a file outside of its folder|cannot be read"):
        ModelTensors(room)


def test_a_pipe_or_a_device_is_no_data(room: Path) -> None:
    os.mkfifo(room / "data.jsonl")
    task = make_plan(room / "runs" / "a-1").task.replace(kind="gsm8k")
    for file in (str(room / "data.jsonl"), "/dev/zero"):
        found = attempt("JSON lines", lambda file=file: gsm8k.TASK.check_rows(file), folder=room)
        assert found[0].fact == f"{file}: cannot be read: not a regular file"
        problem_set = attempt(
            "JSON lines",
            lambda file=file: data_key(task.replace(train_file=file), files=make_files(), model="m"),
            folder=room,
        )
        assert len(problem_set) == 12


def test_a_line_without_an_end_is_not_held_whole(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appliance.tasks.rows.MAX_LINE", 1 << 20)
    (room / "data.jsonl").write_bytes(b'{"question": "' + b"x" * (3 << 20))
    assert gsm8k.TASK.check_rows(room / "data.jsonl")[0].fact.endswith(
        "data.jsonl:1: a line of more than 1 MiB: the rest of the file is not read"
    )


@pytest.mark.parametrize("change", ["run folder", "model", "data"])
def test_a_container_gets_no_folder_over_its_own(room: Path, change: str) -> None:
    plan = make_plan(Path("/r-1") if change == "run folder" else room / "runs/r-1")
    if change == "model":
        plan = with_model(make_plan(room / "runs/r-1"), "/usr")
    if change == "data":
        plan = make_plan(room / "runs/r-1", task=plan.task.replace(train_file="/"))
    with pytest.raises(ApplianceError, match="would hide the image's own files"):
        container_spec(plan, (), typed="r", image=None, folder=room, user="0:0")
