"""Which run is resumed, where it goes on, and what its folder looks like then."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from plans import HOST

from appliance.errors import PreflightError, RecipeError
from appliance.plan.build import Begun, build_plan
from appliance.plan.model import RunPlan
from appliance.quant.scheme import Scheme
from appliance.recipe.dump import to_yaml
from appliance.recipe.load import load_recipe
from appliance.recipe.schema import Recipe
from appliance.run import go_on as going_on
from appliance.run import seal as seal_module
from appliance.run.attempt import begin_attempt, cut_lines
from appliance.run.checkpoints import Found, checkpoint_folder
from appliance.run.events import append_event, first_failure
from appliance.run.last_line import owed_line
from appliance.run.resume import (
    Resume,
    Target,
    begun_with,
    cache_of,
    find_start,
    find_target,
    is_done,
    is_harmless,
    refuse_changes,
    refuse_misfit,
)
from appliance.run.seal import Facts, hash_file, seal
from appliance.run.session import RunStatus, create_session, read_record
from appliance.run.summary import go_on_command


def recipe(*sets: str) -> Recipe:
    return load_recipe("arithmetic-tiny-int8", sets=sets)


def stopped(plan: RunPlan, *, last_step: int = 5, state: RunStatus = RunStatus.FAILED) -> Path:
    """The folder of a run whose first attempt ended after `last_step`."""
    with create_session(plan, recipe_yaml=to_yaml(recipe()), is_chosen=False) as session:
        run_dir = session.run_dir
        for step in range(last_step + 1):
            metric(run_dir, step)
        append_event(run_dir, kind="failure", what="the disk is full", why="TrainingError", exit_code=5)
        for folder in ("sync", "attest"):
            (run_dir / folder).mkdir()
            (run_dir / folder / "said.json").write_text("{}")
        (run_dir / "guard.json").write_text('{"step": 5}')
        session.finish(state=state, exit_code=5, reason="the disk is full")
    return run_dir


def metric(run_dir: Path, step: int, **more: float) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "time_s": 1.0 * step, **more}) + "\n")


def save(run_dir: Path, step: int, *, line: dict[str, object] | None = None, **facts: object) -> Path:
    folder = checkpoint_folder(run_dir, step=step)
    folder.mkdir(parents=True)
    (folder / "data.pt").write_bytes(b"x" * step)
    (folder / "guard.json").write_text(json.dumps({"step": step}))
    (folder / "state.json").write_text(
        json.dumps({"schema_version": 1, "step": step} | ({"line": line} if line else {}))
    )
    seal(folder, facts=Facts(**{"step": step, "world_size": 1, "reason": "", "time": 0.0, **facts}))
    return folder


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def target_of(run_dir: Path) -> Target:
    found = find_target("auto", root=run_dir.parent, recipe_name="small", name=run_dir.name)
    assert found is not None
    return found


def events(run_dir: Path, kind: str) -> list[tuple[str, str]]:
    lines = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [(line["what"], line["why"]) for line in lines if line["kind"] == kind]


# which run


def test_never_is_a_new_run_and_auto_one_where_there_is_none(tmp_path: Path, small_plan: Callable) -> None:
    stopped(small_plan(tmp_path))
    assert find_target("never", root=tmp_path, recipe_name="small", name="small-1") is None
    assert find_target("auto", root=tmp_path, recipe_name="other", name=None) is None
    assert find_target("auto", root=tmp_path, recipe_name="small", name="small-2") is None


def test_auto_takes_the_name_or_the_newest_of_the_recipe(tmp_path: Path, small_plan: Callable) -> None:
    for name in ("small-9", "small-10", "small-x"):
        stopped(small_plan(tmp_path, name=name))
    for name, found in ((None, "small-10"), ("small-9", "small-9"), ("small-x", "small-x")):
        target = find_target("auto", root=tmp_path, recipe_name="small", name=name)
        assert target is not None and target.run_dir == tmp_path / found and target.checkpoint is None


def test_a_path_names_a_run_or_one_of_its_checkpoints(tmp_path: Path, small_plan: Callable) -> None:
    run_dir = stopped(small_plan(tmp_path))
    folder = save(run_dir, 3)
    for path, checkpoint in ((run_dir, None), (folder, folder)):
        target = find_target(str(path), root=tmp_path / "elsewhere", recipe_name="", name=None)
        assert target == Target(run_dir, read_record(run_dir), checkpoint)


@pytest.mark.parametrize("path", ["nowhere", "runs", "/etc", "small-1/checkpoints"])
def test_another_path_is_refused(tmp_path: Path, path: str) -> None:
    hint = "use `auto`, `never`, the folder of a run, or one of its checkpoints/global_step_<n>"
    with pytest.raises(RecipeError) as caught:
        find_target(path, root=tmp_path, recipe_name="small", name=None)
    assert caught.value.problems == [(f"--resume {path}: not the folder of a run, nor of a checkpoint in one", hint)]


def test_a_path_and_another_name_are_refused(tmp_path: Path, small_plan: Callable) -> None:
    run_dir = stopped(small_plan(tmp_path))
    with pytest.raises(RecipeError) as caught:
        find_target(str(run_dir), root=tmp_path, recipe_name="small", name="b")
    assert caught.value.problems == [("--name: `b` is not the run of --resume, `small-1`", "leave --name out")]


def test_a_run_whose_launcher_lives_is_refused(tmp_path: Path, small_plan: Callable) -> None:
    with create_session(small_plan(tmp_path), recipe_yaml="", is_chosen=False), pytest.raises(RecipeError) as caught:
        target_of(tmp_path / "small-1")
    assert caught.value.problems == [
        (f"--resume: the run {tmp_path / 'small-1'} is running", "wait for its end, or stop it")
    ]


def test_done_is_done_unless_more_steps_are_asked_for(tmp_path: Path, small_plan: Callable) -> None:
    target = target_of(stopped(small_plan(tmp_path, steps=5), state=RunStatus.DONE))
    assert [is_done(target, steps=steps) for steps in (4, 5, 6)] == [True, True, False]
    assert not is_done(replace(target, checkpoint=tmp_path), steps=1)  # to go back to
    assert not is_done(target_of(stopped(small_plan(tmp_path, name="small-2"))), steps=1)


# the recipe


def test_what_a_change_of_the_recipe_means(tmp_path: Path, small_plan: Callable) -> None:
    target = target_of(stopped(small_plan(tmp_path)))
    harmless = ("trainer.steps=99", "checkpoint.keep=1", "guard.k3_kl=1", "logging.backends=[]", "cluster.run_dir=/x")
    refuse_changes(recipe(*harmless), target=target, force=False)
    changed = recipe("optimizer.learning_rate=1e-3", "seed=1", "trainer.steps=99")
    with pytest.raises(RecipeError) as caught:
        refuse_changes(changed, target=target, force=False)
    hint = "give what the run has, start a new one with another --name, or take the change with --force"
    assert caught.value.problems == [
        ("optimizer.learning_rate: the run has 0.0002, the recipe 0.001", ""),
        ("seed: the run has 0, the recipe 1", hint),
    ]
    refuse_changes(changed, target=target, force=True)


def test_every_harmless_key_is_a_key_of_the_recipe() -> None:
    flat = {
        f"{name}.{key}" for name, value in recipe().model_dump().items() if isinstance(value, dict) for key in value
    }
    assert {"trainer.steps", "trainer.validate_every", "checkpoint.keep", "guard.ess"} <= set(filter(is_harmless, flat))
    assert not {"seed", "rollout.scheme", "batch.prompts_per_step", "trainer.attention"} & set(
        filter(is_harmless, flat)
    )


# what does not fit


def resumed(run_dir: Path) -> Resume:
    return find_start(target_of(run_dir))


def test_another_number_of_ranks_is_said(tmp_path: Path, small_plan: Callable) -> None:
    plan = small_plan(tmp_path, steps=9)
    run_dir = stopped(plan)
    save(run_dir, 3, world_size=2)
    with pytest.raises(PreflightError) as caught:
        refuse_misfit(resumed(run_dir), plan=plan)
    assert caught.value.message == "global_step_3 was saved by 2 ranks, the plan has 1"


def test_fewer_steps_than_were_made_are_refused(tmp_path: Path, small_plan: Callable) -> None:
    plan = small_plan(tmp_path, steps=2)
    run_dir = stopped(plan)
    save(run_dir, 3)
    with pytest.raises(PreflightError, match=r"global_step_3 is later than trainer\.steps, 2"):
        refuse_misfit(resumed(run_dir), plan=plan)


def test_other_data_and_another_profile_are_refused(tmp_path: Path, small_plan: Callable) -> None:
    plan = small_plan(tmp_path, steps=9)
    run_dir = stopped(plan)
    (run_dir / "profile").mkdir()
    (run_dir / "profile" / "profile.safetensors").write_bytes(b"scales")
    digest = "9b6a3a7a4ad6cf8ac5ad5cfa2aa30ba3e6f6b1a8e7e4a3a2b8d4d0a4a3b2c1d0"
    save(run_dir, 3, profile=(("profile.safetensors", digest),))
    with pytest.raises(PreflightError, match="is not the one that global_step_3 was trained with"):
        refuse_misfit(resumed(run_dir), plan=plan)
    other = replace(plan, task=replace(plan.task, train_parquet="/other/train.parquet"))
    with pytest.raises(PreflightError, match="the training problems are not those that the run began with"):
        refuse_misfit(resumed(run_dir), plan=other)


def test_a_run_that_was_moved_has_the_problems_it_began_with(tmp_path: Path) -> None:
    """`cluster.run_dir` is harmless: run and cache may lie elsewhere now, and the cache may be made anew."""
    before, now = (tmp_path / "before", tmp_path / "now")
    plan = build_plan(recipe("trainer.steps=9"), run_dir=before / "small-1", host=HOST)
    save(stopped(plan), 3)
    before.rename(now)
    target = find_target("auto", root=now, recipe_name="", name="small-1")
    refuse_changes(recipe("trainer.steps=9", f"cluster.run_dir={now}"), target=target, force=False)
    start = find_start(target)
    assert cache_of(target) is None
    refuse_misfit(start, plan=build_plan(recipe("trainer.steps=9"), run_dir=now / "small-1", host=HOST))
    other = build_plan(recipe("trainer.steps=9", "task.seed=1"), run_dir=now / "small-1", host=HOST)
    with pytest.raises(PreflightError, match="the training problems are not those that the run began with"):
        refuse_misfit(start, plan=other)


def test_what_a_run_began_with_is_read_from_its_plan(tmp_path: Path) -> None:
    plan = build_plan(recipe("rollout.scheme=auto"), run_dir=tmp_path / "small-1", host=HOST)
    target = target_of(stopped(plan))
    assert begun_with(target) == Begun("cpu", Scheme.INT8) and cache_of(target) is None
    (tmp_path / ".cache").mkdir()
    assert cache_of(target) == tmp_path / ".cache"
    plain = build_plan(recipe(), run_dir=tmp_path / "small-2", host=HOST)
    assert begun_with(target_of(stopped(plain))) == Begun("cpu", None)
    (tmp_path / "small-3").mkdir()
    claimed = target_of(tmp_path / "small-3")
    assert begun_with(claimed) is None and cache_of(claimed) is None


def test_the_next_attempt_is_planned_as_the_run_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan says BF16, `auto` would be INT8 here, and the cache is that of a comparison."""
    sets = ("rollout.scheme=auto", "trainer.steps=9", f"cluster.run_dir={tmp_path}")
    cache = tmp_path / ".cache"
    cache.mkdir()
    run_dir = tmp_path / "comparison" / "small-1"
    plan = build_plan(recipe(*sets), run_dir=run_dir, host=HOST, cache_dir=cache, begun=Begun("cpu", Scheme.BF16))
    save(stopped(plan), 3)
    (run_dir / "recipe.yaml").write_text(to_yaml(recipe(*sets)))
    made: list[RunPlan] = []
    monkeypatch.setattr(going_on, "run_training", lambda plan, **_: made.append(plan) or 0)
    monkeypatch.chdir(tmp_path)
    words = shlex.split(go_on_command(run_dir))
    assert words == ["appliance", "train", "comparison/small-1/recipe.yaml", "--resume", "comparison/small-1"]
    again = load_recipe(words[2])
    code = going_on.resume_training(
        again, resume=words[4], name=None, force=False, dry_run=False, json_mode=False, steps=()
    )
    assert code == 0 and len(made) == 1
    assert (made[0].rollout.scheme, made[0].rollout.label) == (Scheme.BF16, "bf16")
    assert (made[0].cache_dir, made[0].run_dir) == (str(cache), str(run_dir))
    assert Path(made[0].resume_from).name == "global_step_3"


def test_a_restart_reads_its_checkpoint_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sets = ("trainer.steps=9", "trainer.max_restarts=1", f"cluster.run_dir={tmp_path}")
    run_dir = stopped(build_plan(recipe(*sets), run_dir=tmp_path / "small-1", host=HOST))
    save(run_dir, 3)
    hashed: list[str] = []
    monkeypatch.setattr(seal_module, "hash_file", lambda path: hashed.append(path.name) or hash_file(path))
    monkeypatch.setattr(going_on, "run_training", lambda *_, **__: 0)
    assert going_on.through_faults(5, recipe(*sets), run_dir, json_mode=False, steps=()) == 0
    assert sorted(hashed) == ["data.pt", "guard.json", "state.json"]


def test_a_named_checkpoint_that_is_damaged_is_refused(tmp_path: Path, small_plan: Callable) -> None:
    folder = save(stopped(small_plan(tmp_path)), 3)
    (folder / "data.pt").write_bytes(b"y" * 3)
    target = find_target(str(folder), root=tmp_path, recipe_name="", name=None)
    with pytest.raises(RecipeError) as caught:
        find_start(target)
    message = f"--resume {folder}: damaged: data.pt has other content than was saved"
    assert caught.value.problems == [(message, "use --resume auto, which takes the newest whole one")]


# the next attempt


def test_the_folder_goes_back_to_the_end_of_the_step(tmp_path: Path, small_plan: Callable) -> None:
    plan = small_plan(tmp_path, steps=9)
    run_dir = stopped(plan)
    save(run_dir, 3)
    assert first_failure(run_dir) is not None
    with begin_attempt(plan, resume=resumed(run_dir), recipe_yaml="name: small\n") as session:
        assert session.log_dir == run_dir / "logs" / "2" and session.log_dir.is_dir()
    assert read_record(run_dir).attempt == 2
    assert steps_in(run_dir / "metrics.jsonl") == [0, 1, 2, 3]
    assert steps_in(run_dir / "metrics.cut-1.jsonl") == [4, 5]
    assert json.loads((run_dir / "guard.json").read_text()) == {"step": 3}
    kept = {each.name for each in (run_dir / "logs" / "1").iterdir()}
    assert kept == {"sync", "attest", "plan.json", "recipe.yaml", "versions.json"}
    assert not (run_dir / "sync").exists() and not (run_dir / "attest").exists()
    assert events(run_dir, "resume") == [("attempt 2 goes on after step 3", "")]
    assert first_failure(run_dir) is None


def test_damaged_half_written_and_later_ones_are_set_aside(tmp_path: Path, small_plan: Callable) -> None:
    plan = small_plan(tmp_path, steps=9)
    run_dir = stopped(plan)
    for step in (1, 2, 3, 4, 5):
        save(run_dir, step)
    (run_dir / "checkpoints" / "global_step_5" / "data.pt").write_bytes(b"yyyyy")
    (run_dir / "checkpoints" / "partial-global_step_6").mkdir()
    target = find_target("auto", root=tmp_path, recipe_name="", name="small-1")
    begin_attempt(plan, resume=find_start(target), recipe_yaml="").release()
    assert steps_in(run_dir / "metrics.jsonl") == [0, 1, 2, 3, 4]
    named = find_target(str(run_dir / "checkpoints" / "global_step_2"), root=tmp_path, recipe_name="", name=None)
    begin_attempt(plan, resume=find_start(named), recipe_yaml="").release()
    folder = run_dir / "checkpoints"
    assert sorted(each.relative_to(folder).as_posix() for each in folder.glob("*step_*")) == [
        "global_step_1",
        "global_step_2",
    ]
    aside = sorted(each.relative_to(folder).as_posix() for each in folder.glob("*/*step_*"))
    assert aside == [
        "cut-2/global_step_3",
        "cut-2/global_step_4",
        "damaged/global_step_5",
        "damaged/partial-global_step_6",
    ]
    assert events(run_dir, "checkpoint")[:2] == [
        ("global_step_5 is damaged and set aside", "data.pt has other content than was saved"),
        ("partial-global_step_6 was half written and is set aside", ""),
    ]
    assert steps_in(run_dir / "metrics.jsonl") == [0, 1, 2]


def test_without_a_whole_checkpoint_the_run_starts_from_the_beginning(tmp_path: Path, small_plan: Callable) -> None:
    plan = small_plan(tmp_path, steps=9)
    run_dir = stopped(plan)
    begin_attempt(plan, resume=resumed(run_dir), recipe_yaml="").release()
    assert steps_in(run_dir / "metrics.jsonl") == []
    assert not (run_dir / "guard.json").exists()
    assert events(run_dir, "resume") == [("attempt 2 starts from the beginning: no whole checkpoint", "")]


def test_a_folder_that_was_only_claimed_gets_its_first_attempt(tmp_path: Path, small_plan: Callable) -> None:
    plan = small_plan(tmp_path, steps=9)
    (tmp_path / "small-1").mkdir()
    target = target_of(tmp_path / "small-1")
    assert target.record.attempt == 0
    refuse_changes(recipe(), target=target, force=False)
    begin_attempt(plan, resume=find_start(target), recipe_yaml="").release()
    assert read_record(tmp_path / "small-1").attempt == 1


def test_the_line_of_the_last_step_waits_for_the_validation_that_was_cut(tmp_path: Path, small_plan: Callable) -> None:
    """Only the last step's, only where a validation is due and the checkpoint has the line to write again."""
    plan = small_plan(tmp_path, steps=5)
    run_dir = stopped(plan)
    folder = save(run_dir, 5, line={"step": 5, "time_s": 5.0})
    start = resumed(run_dir)
    assert owed_line(run_dir, checkpoint=folder, plan=plan) == {"step": 5, "time_s": 5.0}
    for other in (replace(plan, steps=6), replace(plan, validate_every=0)):
        assert owed_line(run_dir, checkpoint=folder, plan=other) is None
    assert owed_line(run_dir, checkpoint=None, plan=plan) is None
    begin_attempt(plan, resume=start, recipe_yaml="").release()
    assert steps_in(run_dir / "metrics.jsonl") == [0, 1, 2, 3, 4]
    assert owed_line(run_dir, checkpoint=folder, plan=plan) is not None
    metric(run_dir, 5, val_reward_mean=0.5)
    assert owed_line(run_dir, checkpoint=folder, plan=plan) is None
    begin_attempt(plan, resume=resumed(run_dir), recipe_yaml="").release()
    assert steps_in(run_dir / "metrics.jsonl") == [0, 1, 2, 3, 4, 5]


def test_a_last_line_without_a_copy_or_with_its_validation_stays(tmp_path: Path, small_plan: Callable) -> None:
    for name, line in (("small-1", None), ("small-2", {"step": 5, "time_s": 5.0, "val_reward_mean": 0.0})):
        plan = small_plan(tmp_path, name=name, steps=5)
        run_dir = stopped(plan)
        save(run_dir, 5, line=line)
        begin_attempt(plan, resume=resumed(run_dir), recipe_yaml="").release()
        assert steps_in(run_dir / "metrics.jsonl") == [0, 1, 2, 3, 4, 5]


def test_a_torn_line_and_a_step_that_is_there_twice_are_cut(tmp_path: Path) -> None:
    for step in (0, 1, 2, 2, 3):
        metric(tmp_path, step)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "ti')
    aside = tmp_path / "metrics.cut-7.jsonl"
    assert cut_lines(tmp_path / "metrics.jsonl", after=3, attempt=7) == aside
    assert steps_in(tmp_path / "metrics.jsonl") == [0, 1, 2, 3]
    assert aside.read_text() == '{"step": 2, "time_s": 2.0}\n{"step": 4, "ti'
    assert cut_lines(tmp_path / "metrics.jsonl", after=3, attempt=8) is None
    assert not (tmp_path / "metrics.cut-8.jsonl").exists()


def test_of_two_launchers_one_gets_the_run(tmp_path: Path, small_plan: Callable) -> None:
    plan = small_plan(tmp_path, steps=9)
    run_dir = stopped(plan)
    first, second = resumed(run_dir), resumed(run_dir)
    taken = [(f"--resume: another program has just taken the run {run_dir}", "wait for its end")]
    with begin_attempt(plan, resume=first, recipe_yaml=""), pytest.raises(RecipeError) as caught:
        begin_attempt(plan, resume=second, recipe_yaml="")
    assert caught.value.problems == taken
    with pytest.raises(RecipeError) as caught:  # it ended, and the other's look is of before it
        begin_attempt(plan, resume=second, recipe_yaml="")
    assert caught.value.problems == taken
    assert read_record(run_dir).attempt == 2


def test_a_model_of_an_earlier_end_goes_aside(tmp_path: Path, small_plan: Callable) -> None:
    plan = small_plan(tmp_path, steps=9)
    run_dir = stopped(plan, state=RunStatus.DONE)
    (run_dir / "model").mkdir()
    (run_dir / "model.partial-77").mkdir()
    begin_attempt(plan, resume=Resume(target_of(run_dir), Found(None)), recipe_yaml="").release()
    assert (run_dir / "logs" / "1" / "model").is_dir()
    assert not (run_dir / "model").exists() and not (run_dir / "model.partial-77").exists()


def test_another_version_is_noted(tmp_path: Path, small_plan: Callable) -> None:
    plan = small_plan(tmp_path, steps=9)
    run_dir = stopped(plan)
    begin_attempt(plan, resume=resumed(run_dir), recipe_yaml="").release()
    assert events(run_dir, "note")[-1][0].startswith("the lines of metrics.jsonl after step 0 are cut off")
    said = json.loads((run_dir / "versions.json").read_text())
    (run_dir / "versions.json").write_text(json.dumps({**said, "python": "3.10.1"}))
    begin_attempt(plan, resume=resumed(run_dir), recipe_yaml="").release()
    told = "this attempt runs with other versions than the one before: python"
    assert events(run_dir, "note")[-1] == (told, "versions.json, and logs/ for those before")
