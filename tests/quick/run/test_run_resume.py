"""Which run is resumed, whether it may go on, and from where."""

from __future__ import annotations

import functools
import json
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from plans import HOST
from stopped_runs import events, misfits, recipe, resumed, save, stopped, target_of, without_pace

from appliance.errors import PreflightError, RecipeError, refuse_faults
from appliance.guard.policy import MismatchBounds
from appliance.launch import command
from appliance.launch.changes import CHANGES, REMEDIES, Change, change_of
from appliance.launch.resume import (
    Resume,
    Target,
    begin_attempt,
    cache_of,
    find_misfits,
    find_start,
    find_target,
    is_done,
    original_plan,
    refuse_changes,
)
from appliance.plan.build import OriginalPlan, build_plan
from appliance.preflight import report
from appliance.preflight.disk import Disk, Disks
from appliance.recipe import library
from appliance.recipe.load import load_recipe, to_yaml
from appliance.record import checkpoints as seal_module
from appliance.record.checkpoints import hash_file
from appliance.record.events import append_event, read_events
from appliance.record.plan import RunPlan
from appliance.record.session import RunRecord, RunStatus, create_session, read_record, write_record
from appliance.record.state import RunState
from appliance.report.folder import RunReader, read_run
from appliance.report.page import write_page
from appliance.report.summary import go_on_command, try_next
from appliance.terms.schemes import Scheme

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


def test_a_run_whose_disk_of_checkpoints_is_gone_does_not_start_from_the_beginning(
    tmp_path: Path, small_plan: Callable
) -> None:
    run_dir, large = stopped(small_plan(tmp_path)), tmp_path / "large"
    save(run_dir, 3)
    (run_dir / "checkpoints").rename(large)
    (run_dir / "checkpoints").symlink_to(large)
    target = find_target(str(run_dir), root=tmp_path, recipe_name="", name=None)
    assert target is not None and find_start(target).step == 3
    large.rename(tmp_path / "gone")
    of_a_step = replace(target, checkpoint=run_dir / "checkpoints" / "global_step_3")
    for meant in (target, of_a_step):
        with pytest.raises(RecipeError) as caught:
            find_start(meant)
        message = f"{run_dir / 'checkpoints'}: it leads to {large}, which is not there"
        assert caught.value.problems == [(message, "bring that folder back, for example by mounting its disk again")]
    (run_dir / "checkpoints").unlink()
    (run_dir / "checkpoints").symlink_to("x" * 300)  # asked for, it is an error of its own, as of a disk that failed
    with pytest.raises(RecipeError, match="xxx, which is not there"):
        find_start(target)


def test_a_path_names_a_run_or_one_of_its_checkpoints(tmp_path: Path, small_plan: Callable) -> None:
    run_dir = stopped(small_plan(tmp_path))
    folder = save(run_dir, 3)
    for path, checkpoint in ((run_dir, None), (folder, folder)):
        target = find_target(str(path), root=tmp_path / "elsewhere", recipe_name="", name=None)
        assert target == Target(run_dir, read_record(run_dir), checkpoint)


@pytest.mark.parametrize("name", ["small-1", None])
def test_a_file_of_a_runs_name_is_no_run(tmp_path: Path, name: str | None) -> None:
    (tmp_path / "small-1").touch()
    with pytest.raises(RecipeError) as caught:
        find_target("auto", root=tmp_path, recipe_name="small", name=name)
    message = f"--resume: {tmp_path / 'small-1'} is a file, not the folder of a run"
    assert caught.value.problems == [(message, "choose another --name, or move the file away")]


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
    hint = "put it back as the run has it, start a new run with another --name, or take the change with --force"
    rate = "--set optimizer.learning_rate=1e-3: optimizer.learning_rate"
    assert caught.value.problems == [
        (f"{rate}: the run has 0.0002, the recipe 0.001", hint),
        ("--set seed=1: seed: the run has 0, the recipe 1", hint),
    ]
    refuse_changes(changed, target=target, force=True)


@pytest.mark.parametrize("checkpoints", [0, 1])
def test_what_a_checkpoint_holds_is_not_to_be_forced(tmp_path: Path, small_plan: Callable, checkpoints: int) -> None:
    """A run without a checkpoint begins again, and takes it."""
    run_dir = stopped(small_plan(tmp_path))
    for step in range(checkpoints):
        save(run_dir, step + 1)
    with pytest.raises(RecipeError) as caught:
        refuse_changes(recipe("model.lora={rank: 8}"), target=target_of(run_dir), force=False)
    ((message, hint),) = caught.value.problems
    lora = '{"rank": 8, "alpha": null, "targets": null, "dropout": 0.0, "sync": "merge"}'
    assert message == f"--set model.lora={{rank: 8}}: model.lora: the run has null, the recipe {lora}"
    assert hint == REMEDIES[Change.NEVER if checkpoints else Change.FORCED]
    forced = functools.partial(refuse_changes, target=target_of(run_dir), force=True)
    forced(recipe("optimizer.learning_rate=1e-3"))
    for never in ("model.lora={rank: 8}", "optimizer.norm_fed_lr_scale=1.5"):
        if not checkpoints:
            forced(recipe(never))
            continue
        with pytest.raises(RecipeError) as caught:
            forced(recipe(never, "optimizer.learning_rate=1e-3"))
        assert [hint for _, hint in caught.value.problems] == [REMEDIES[Change.NEVER]], never


def test_a_run_s_own_recipe_is_not_judged_by_the_rules_of_today(tmp_path: Path, small_plan: Callable) -> None:
    """It is compared: what it has that does nothing is refused with the way on, not at a line of the run's file."""
    target = target_of(stopped(small_plan(tmp_path)))
    kept = target.run_dir / "recipe.yaml"
    text = to_yaml(recipe("rollout.scheme=fp8", "quantization.emulate=true"))
    kept.write_text(text.replace("smoothing: 0.5", "smoothing: 0.7"))
    now = recipe("rollout.scheme=fp8", "quantization.emulate=true")
    with pytest.raises(RecipeError) as caught:
        refuse_changes(now, target=target, force=False)
    assert [message for message, _ in caught.value.problems] == [
        f"{library.find('arithmetic-tiny-int8')}: quantization.smoothing: the run has 0.7, the recipe 0.5"
    ]


def test_a_learning_rate_that_sinks_has_its_steps(tmp_path: Path, small_plan: Callable) -> None:
    """It would jump: verl's schedule takes the new number of steps with the old place."""
    run_dir = stopped(small_plan(tmp_path))
    (run_dir / "recipe.yaml").write_text(to_yaml(recipe("optimizer.schedule=cosine")))
    with pytest.raises(RecipeError) as caught:
        refuse_changes(recipe("optimizer.schedule=cosine", "trainer.steps=99"), target=target_of(run_dir), force=False)
    ((message, hint),) = caught.value.problems
    assert message.startswith("--set trainer.steps=99: trainer.steps: the run has ")
    assert hint == REMEDIES[Change.FORCED]


def test_the_keys_that_may_change_are_these_and_no_others() -> None:
    """The table names keys of the recipe, and sections; what may not change decides what is computed."""
    keys = {
        f"{name}.{key}" if key else name
        for name, value in recipe().model_dump().items()
        for key in (value if isinstance(value, dict) else ("",))
    }
    of_the_running = {key for key in keys if key.partition(".")[0] in ("checkpoint", "guard", "logging")}
    free = {key for key in keys if change_of(key) is Change.FREE}
    assert free - of_the_running == {
        *("name", "cluster.run_dir", "rollout.kv_cache_gb", "rollout.gpu_memory_utilization"),
        *("trainer.steps", "trainer.epochs", "trainer.validate_before", "trainer.validate_every"),
        "trainer.max_restarts",
    }
    assert of_the_running < free and len(of_the_running) > 10
    assert {key for key in CHANGES if key not in keys} == {"checkpoint", "guard", "logging"}, "these name no key"


# what does not fit

OTHER_PROBLEMS = "task: the training problems are not those that the run began with"


def test_another_number_of_ranks_is_said(tmp_path: Path, small_plan: Callable) -> None:
    plan = small_plan(tmp_path, steps=9)
    run_dir = stopped(plan)
    save(run_dir, 3, world_size=2)
    remedy = "verl loads it with the same number only: set cluster.nodes and cluster.gpus_per_node back"
    fact = "cluster.gpus_per_node: global_step_3 was saved by 2 ranks, the plan has 1"
    assert misfits(run_dir, plan) == [(fact, remedy)]


def test_fewer_steps_than_were_made_are_refused(tmp_path: Path, small_plan: Callable) -> None:
    plan = small_plan(tmp_path, steps=2)
    run_dir = stopped(plan)
    save(run_dir, 3)
    remedy = "set trainer.steps to 3 at least, or name an older checkpoint"
    assert misfits(run_dir, plan) == [("trainer.steps: global_step_3 is later than the last step, 2", remedy)]


def test_all_misfits_are_reported_at_once_each_with_its_place(tmp_path: Path, small_plan: Callable) -> None:
    """Wrong settings have the line or option where they were written, and make the exit code that of a recipe."""
    plan = small_plan(tmp_path, steps=2)
    run_dir = stopped(plan)
    mark = {"scale": 1.5, "model": "/m", "model_hash": "aa", "norms": 9, "schema_version": 1}
    save(run_dir, 3, world_size=2, files={"actor/scaler.json": b"{}", "uaq.json": json.dumps(mark).encode()})
    typed = recipe("trainer.steps=2", "cluster.gpus_per_node=1")
    placed = [typed.placed(finding) for finding in find_misfits(resumed(run_dir), plan=plan)]
    places = [(finding.place, finding.where) for finding in placed]
    assert places[:2] == [
        ("cluster.gpus_per_node", "--set cluster.gpus_per_node=1"),
        ("trainer.steps", "--set trainer.steps=2"),
    ]
    assert [place for place, _ in places[2:]] == ["correction.uaq_scale", "trainer.dtype"]
    assert all(where for _, where in places)
    with pytest.raises(RecipeError) as caught:
        refuse_faults(placed)
    assert len(caught.value.problems) == 4


def test_other_data_and_another_profile_are_refused(tmp_path: Path, small_plan: Callable) -> None:
    plan = small_plan(tmp_path, steps=9)
    run_dir = stopped(plan)
    (run_dir / "profile").mkdir()
    (run_dir / "profile" / "profile.safetensors").write_bytes(b"scales")
    digest = "9b6a3a7a4ad6cf8ac5ad5cfa2aa30ba3e6f6b1a8e7e4a3a2b8d4d0a4a3b2c1d0"
    save(run_dir, 3, profile=(("profile.safetensors", digest),))
    file = run_dir / "profile" / "profile.safetensors"
    (fact, _), *more = misfits(run_dir, plan)
    assert (fact, more) == (f"{file}: it is not the file that global_step_3 was trained with", [])
    other = plan.replace(task_files=plan.task_files.replace(train_parquet="/other/train.parquet"))
    assert [fact for fact, _ in misfits(run_dir, other)] == [OTHER_PROBLEMS, fact]


@pytest.mark.parametrize("checkpoints", [0, 1])
@pytest.mark.parametrize(
    ("sets", "key"),
    [
        (["quantization.smoothing=0.7"], "quantization.smoothing"),
        (["quantization.mismatch_budget=0.1"], "quantization.mismatch_budget"),
        (["quantization.ignore=[lm_head]"], "quantization.ignore"),
        (["quantization.profile={other}"], "quantization.profile"),
        (["rollout.scheme=fp8-channel", "quantization.emulate=true"], "rollout.scheme"),
    ],
)
def test_another_profile_than_the_one_that_was_made_is_refused(
    tmp_path: Path, sets: list[str], key: str, checkpoints: int
) -> None:
    """With --force, too: the run's is not made again, and the plan would say what the rollouts have not."""
    usual = ("rollout.scheme=int8", "trainer.steps=9")
    run_dir, other = tmp_path / "small-1", tmp_path / "other"
    plan = build_plan(recipe(*usual), run_dir=run_dir, host=HOST)
    stopped(plan)
    changed = recipe(*usual, *(text.format(other=other) for text in sets))
    again = build_plan(changed, run_dir=run_dir, host=HOST)
    for step in range(3, 3 + checkpoints):
        save(run_dir, step)
    refuse_changes(changed, target=target_of(run_dir), force=True)
    assert misfits(run_dir, again) == []  # none was made yet
    for folder in (run_dir / "profile", other):
        folder.mkdir()
        (folder / "profile.safetensors").write_text(folder.name)
    assert misfits(run_dir, plan) == []
    (fact, remedy), *more = misfits(run_dir, again)
    assert (fact, more) == (f"{key}: the run's profile was made with another value, and is made once", [])
    assert remedy == "put back what the run has, or start a new run"


def test_a_profile_of_a_key_that_is_gone_is_finished_by_the_version_that_began_it(tmp_path: Path) -> None:
    """With --force, too. One that is named was made without the recipe, whose key said nothing of it."""
    plan = build_plan(recipe("rollout.scheme=int8", "trainer.steps=9"), run_dir=tmp_path / "small-1", host=HOST)
    run_dir = stopped(plan)
    before = json.loads((run_dir / "plan.json").read_text())
    before["profile"]["error_budget"] = 0.02
    (run_dir / "plan.json").write_text(json.dumps(before))
    assert misfits(run_dir, plan) == []  # none was made yet
    (run_dir / "profile").mkdir()
    file = run_dir / "profile" / "profile.safetensors"
    file.touch()
    fact = f"{file}: it was made with quantization.error_budget, which this version does not have"
    assert misfits(run_dir, plan) == [(fact, "finish it with the version that began it, or start a new run")]


def test_a_run_whose_recipe_has_a_key_that_is_gone_is_finished_by_the_version_that_began_it(tmp_path: Path) -> None:
    plan = build_plan(recipe("trainer.steps=9"), run_dir=tmp_path / "small-1", host=HOST)
    run_dir = stopped(plan)
    recipe_file = run_dir / "recipe.yaml"
    text = recipe_file.read_text()
    for key, value in (("error_budget", "0.02"), ("told_by_a_later_version", "1")):
        recipe_file.write_text(text.replace("quantization:\n", f"quantization:\n  {key}: {value}\n"))
        with pytest.raises(RecipeError) as caught:
            refuse_changes(recipe("trainer.steps=9"), target=target_of(run_dir), force=False)
        ((message, hint),) = caught.value.problems
        assert message.endswith(f"quantization.{key}: unknown key") and message.startswith(f"{recipe_file}:")
        assert hint == (
            "such a run cannot be resumed by this version: finish it with the version that began it, which its "
            "versions.json names, or start a new run"
        )
    recipe_file.write_text(text)
    refuse_changes(recipe("trainer.steps=9"), target=target_of(run_dir), force=False)


def test_a_profile_that_was_named_may_lie_elsewhere_now(tmp_path: Path) -> None:
    run_dir, before, now = (tmp_path / name for name in ("small-1", "before", "now"))
    usual = ("rollout.scheme=int8", "trainer.steps=9")
    stopped(build_plan(recipe(*usual, f"quantization.profile={before}"), run_dir=run_dir, host=HOST))
    for folder in (run_dir / "profile", now):
        folder.mkdir()
        (folder / "profile.safetensors").write_text("scales")
    for folder in (now, tmp_path / "gone"):
        plan = build_plan(recipe(*usual, f"quantization.profile={folder}"), run_dir=run_dir, host=HOST)
        assert misfits(run_dir, plan) == []


@pytest.mark.parametrize("is_named", [False, True])
def test_layers_may_be_kept_by_the_recipe_where_the_profile_was_named(tmp_path: Path, is_named: bool) -> None:
    """It was made without this recipe, and the engines keep what the recipe says beside what it says."""
    run_dir, profile_folder = tmp_path / "small-1", tmp_path / "named"
    usual = ("rollout.scheme=int8", "trainer.steps=9", *[f"quantization.profile={profile_folder}"] * is_named)
    stopped(build_plan(recipe(*usual), run_dir=run_dir, host=HOST))
    for folder in (run_dir / "profile", profile_folder):
        folder.mkdir()
        (folder / "profile.safetensors").write_text("scales")
    plan = build_plan(recipe(*usual, "quantization.ignore=[lm_head]"), run_dir=run_dir, host=HOST)
    keys = [fact.partition(":")[0] for fact, _ in misfits(run_dir, plan)]
    assert keys == ([] if is_named else ["quantization.ignore"])


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
    assert find_misfits(start, plan=build_plan(recipe("trainer.steps=9"), run_dir=now / "small-1", host=HOST)) == []
    other = build_plan(recipe("trainer.steps=9", "task.seed=1"), run_dir=now / "small-1", host=HOST)
    assert [finding.fact for finding in find_misfits(start, plan=other)] == [OTHER_PROBLEMS]


def test_what_a_run_began_with_is_read_from_its_plan(tmp_path: Path) -> None:
    plan = build_plan(recipe("rollout.scheme=auto"), run_dir=tmp_path / "small-1", host=HOST)
    target = target_of(stopped(plan))
    assert without_pace(target) == OriginalPlan("cpu", Scheme.INT8) and cache_of(target) is None
    (tmp_path / ".cache").mkdir()
    assert cache_of(target) == tmp_path / ".cache"
    plain = build_plan(recipe(), run_dir=tmp_path / "small-2", host=HOST)
    assert without_pace(target_of(stopped(plain))) == OriginalPlan("cpu", None)
    (tmp_path / "small-3").mkdir()
    claimed = target_of(tmp_path / "small-3")
    assert original_plan(claimed) is None and cache_of(claimed) is None


def test_a_run_of_another_version_goes_on_from_what_its_plan_has(tmp_path: Path) -> None:
    """Nothing is asked of it but what the attempt before was planned with."""
    plan = build_plan(recipe("rollout.scheme=auto", "trainer.steps=9"), run_dir=tmp_path / "small-1", host=HOST)
    run_dir = stopped(plan)
    save(run_dir, 3)
    file, target = run_dir / "plan.json", target_of(run_dir)
    raw = json.loads(file.read_text())
    for key in ("engine", "optimizer", "shadow"):
        del raw[key]
    file.write_text(json.dumps({**raw, "told_by_another_version": 1}))
    assert without_pace(target) == OriginalPlan("cpu", Scheme.INT8)
    assert find_misfits(find_start(target), plan=plan) == []
    with pytest.raises(RecipeError) as raised:
        read_run(run_dir)
    why = "not a plan that this version reads: engine: Field required, and 3 more"
    assert raised.value.message == f"{run_dir}: cannot be read as a run: {why}"
    file.write_text(json.dumps({**raw, "trainer": {"steps": "nine"}}))
    with pytest.raises(RecipeError) as raised:
        original_plan(target)
    why = "not a plan that this version reads: trainer.steps: Input should be a valid integer"
    assert raised.value.message == f"{file}: cannot be read: {why}"


def test_the_next_attempt_is_planned_as_the_run_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan says BF16, `auto` would be INT8 here, and the cache is that of a comparison."""
    sets = ("rollout.scheme=auto", "trainer.steps=9", f"cluster.run_dir={tmp_path}")
    cache = tmp_path / ".cache"
    cache.mkdir()
    run_dir = tmp_path / "comparison" / "small-1"
    plan = build_plan(
        recipe(*sets), run_dir=run_dir, host=HOST, cache_dir=cache, original=OriginalPlan("cpu", Scheme.BF16)
    )
    save(stopped(plan), 3)
    (run_dir / "recipe.yaml").write_text(to_yaml(recipe(*sets)))
    plans: list[RunPlan] = []
    hosts: list[Path] = []  # the host is asked once for all of it
    monkeypatch.setattr(command, "run_training", lambda plan, **_: plans.append(plan) or 0)
    monkeypatch.setattr(report, "read_host", lambda root: hosts.append(root) or HOST)
    monkeypatch.chdir(tmp_path)
    words = shlex.split(go_on_command(run_dir))
    assert words == ["appliance", "train", "comparison/small-1/recipe.yaml", "--resume", "comparison/small-1"]
    again = load_recipe(words[2])
    code = command.run_train(again, resume=words[4], name=None, force=False, dry_run=False, json_mode=False, stages=())
    assert code == 0 and len(plans) == 1 and len(hosts) == 1
    assert (plans[0].rollout.scheme, plans[0].rollout.label) == (Scheme.BF16, "bf16")
    assert (plans[0].cache_dir, plans[0].run_dir) == (str(cache), str(run_dir))
    assert Path(plans[0].resume_from).name == "global_step_3"


def test_a_dry_run_of_a_resume_prints_its_plan_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    again = recipe("trainer.steps=9", f"cluster.run_dir={tmp_path}")
    run_dir = tmp_path / "small-1"
    save(stopped(build_plan(again, run_dir=run_dir, host=HOST, original=OriginalPlan("cpu", Scheme.INT8))), 3)
    (run_dir / "recipe.yaml").write_text(to_yaml(again))
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    monkeypatch.setattr(command, "run_training", lambda *_, **__: pytest.fail("a training was started"))
    code = command.run_train(
        again, resume=str(run_dir), name=None, force=False, dry_run=True, json_mode=True, stages=()
    )
    captured = capsys.readouterr()
    assert code == 0
    assert Path(json.loads(captured.out)["plan"]["resume_from"]).name == "global_step_3"
    assert captured.err == "the run small-1 resumes after step 3\n"
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before


@pytest.mark.parametrize("name", ["my runs", "r$(touch owned)", "a'b; touch owned", "-x"])
def test_commands_to_be_typed_have_their_paths_as_one_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    run_dir = tmp_path / name / "small-1"
    save(run_dir, 3)
    monkeypatch.chdir(tmp_path)
    folder = f"{name}/small-1" if name[0] != "-" else f"./{name}/small-1"
    words = ["appliance", "train", f"{folder}/recipe.yaml", "--resume", folder]
    assert shlex.split(go_on_command(run_dir)) == words
    said = subprocess.run(["bash", "-c", f"printf '%s\\n' {go_on_command(run_dir)}"], capture_output=True, check=True)
    assert said.stdout.decode().splitlines() == words
    assert not list(tmp_path.glob("**/owned"))
    plan, state = build_plan(recipe(), run_dir=run_dir, host=HOST), RunState(1, MismatchBounds())
    assert shlex.split(try_next(plan, state, folder=folder)[-1]) == ["appliance", "status", folder]


@pytest.mark.slow
def test_an_attempt_needs_room_for_the_rest_of_the_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk has what the estimate wants less the checkpoints that are there: a restart and a resume both go on."""
    sets = ("trainer.steps=9", "checkpoint.every_steps=1", "trainer.max_restarts=1", f"cluster.run_dir={tmp_path}")
    run_dir = stopped(build_plan(recipe(*sets), run_dir=tmp_path / "small-1", host=HOST))
    (run_dir / "recipe.yaml").write_text(to_yaml(recipe(*sets)))
    mib = 1 << 20
    for step in (2, 3, 5):  # the last one is damaged: it is moved aside and stays
        save(run_dir, step, spare=40 * mib)
    (run_dir / "checkpoints" / "global_step_5" / "data.pt").write_bytes(b"y" * 5)
    (run_dir / "checkpoints" / "damaged").mkdir()
    (run_dir / "checkpoints" / "damaged" / "other").write_bytes(bytes(mib))
    monkeypatch.setattr(command, "run_training", lambda *_, **__: 0)
    free = [333 * mib]  # a quarter of a GiB, 3 models of 6 MiB, 3 checkpoints of 46 MiB, less 2 of 40 MiB
    monkeypatch.setattr("appliance.preflight.report.read_host", lambda _: HOST)

    def disks(folder: Path) -> Disks:
        return Disks(disk := Disk(str(folder), free_bytes=free[0], number=1), checkpoints=disk)

    monkeypatch.setattr("appliance.preflight.inputs.read_disks", disks)
    again = load_recipe(str(run_dir / "recipe.yaml"))

    def attempt() -> int | None:
        return command.run_train(
            again, resume="auto", name="small-1", force=False, dry_run=False, json_mode=False, stages=()
        )

    assert attempt() == 0
    assert command.Attempts(again).through_faults(5, run_dir) == 0
    free[0] = 330 * mib
    with pytest.raises(PreflightError, match="this plan cannot run here: 1 finding above"):
        attempt()


@pytest.mark.parametrize("name", ["small-1", "moved by hand"])
def test_a_restart_reads_its_checkpoint_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Whatever the folder is called now: --resume takes its path."""
    sets = ("trainer.steps=9", "trainer.max_restarts=1", f"cluster.run_dir={tmp_path}")
    run_dir = stopped(build_plan(recipe(*sets), run_dir=tmp_path / name, host=HOST))
    save(run_dir, 3)
    hashed: list[str] = []
    monkeypatch.setattr(seal_module, "hash_file", lambda path: hashed.append(path.name) or hash_file(path))
    restarts_allowed: list[bool] = []
    monkeypatch.setattr(
        command, "run_training", lambda *_, may_restart, **__: restarts_allowed.append(may_restart) or 0
    )
    assert command.Attempts(recipe(*sets)).through_faults(5, run_dir) == 0
    assert restarts_allowed == [True]
    assert sorted(hashed) == ["data.pt", "guard.json", "state.json"]


def test_a_restart_that_preflight_refuses_is_not_told_by_the_resume_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = ("trainer.steps=9", "trainer.max_restarts=2", f"cluster.run_dir={tmp_path}")
    run_dir = stopped(build_plan(recipe(*sets), run_dir=tmp_path / "small-1", host=HOST))
    save(run_dir, 3)

    def begun(plan: RunPlan, *, resume: Resume, recipe_yaml: str, **_: object) -> int:
        begin_attempt(plan, resume=resume, recipe_yaml=recipe_yaml).release()
        return 0

    monkeypatch.setattr(command, "run_training", begun)
    with monkeypatch.context() as full:
        disk = Disk(str(tmp_path), free_bytes=0, number=1)
        full.setattr("appliance.preflight.inputs.read_disks", lambda _: Disks(disk, checkpoints=disk))
        with pytest.raises(PreflightError, match="this plan cannot run here"):
            command.Attempts(recipe(*sets)).through_faults(5, run_dir)
    command.Attempts(recipe(*sets)).resume(target_of(run_dir), force=True)
    assert events(run_dir, "restart") == []
    append_event(run_dir, kind="failure", what="an engine died", error="EngineError", exit_code=4)
    assert command.Attempts(recipe(*sets)).through_faults(4, run_dir) == 0
    assert events(run_dir, "restart") == [("restart 1 of 2, from the state after step 3", "trainer.max_restarts")]
    beginnings = [each.kind for each in read_events(run_dir) if each.kind in ("resume", "restart")]
    assert beginnings == ["resume", "restart", "resume"]


def test_a_resume_reports_its_misfits_with_what_preflight_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, now = (
        ("trainer.steps=9", f"cluster.run_dir={tmp_path}"),
        ("trainer.steps=2", f"cluster.run_dir={tmp_path}"),
    )
    run_dir = stopped(build_plan(recipe(*began), run_dir=tmp_path / "small-1", host=HOST))
    save(run_dir, 3, world_size=2)
    monkeypatch.setattr(command, "run_training", lambda *_, **__: pytest.fail("it would train"))
    disk = Disk(str(tmp_path), free_bytes=0, number=1)
    monkeypatch.setattr("appliance.preflight.inputs.read_disks", lambda _: Disks(disk, checkpoints=disk))
    with pytest.raises(RecipeError) as caught:
        command.Attempts(recipe(*now)).resume(target_of(run_dir), force=True)
    keys = {finding.place: finding.where for finding in caught.value.findings}
    assert keys["trainer.steps"] == "--set trainer.steps=2" and "cluster.gpus_per_node" in keys
    assert any(finding.code == "disk" for finding in caught.value.findings)


def test_the_page_stops_waiting_when_no_restart_follows(tmp_path: Path) -> None:
    sets = ("trainer.steps=9", f"cluster.run_dir={tmp_path}")
    run_dir = stopped(build_plan(recipe(*sets), run_dir=tmp_path / "small-1", host=HOST))
    write_record(run_dir, RunRecord(RunStatus.FAILED, exit_code=5))
    write_page(RunReader(run_dir), target=run_dir / "report.html", may_restart=True)
    assert 'data-reload-s="10"' in (run_dir / "report.html").read_text()
    assert command.Attempts(recipe(*sets)).through_faults(5, run_dir) == 5  # there is no checkpoint
    assert 'data-reload-s="0"' in (run_dir / "report.html").read_text()


def test_a_named_checkpoint_that_is_damaged_is_refused(tmp_path: Path, small_plan: Callable) -> None:
    """`auto` would be the newest run of the recipe's name, or a new one."""
    run_dir = stopped(small_plan(tmp_path))
    folder = save(run_dir, 3)
    (folder / "data.pt").write_bytes(b"y" * 3)
    target = find_target(str(folder), root=tmp_path, recipe_name="", name=None)
    with pytest.raises(RecipeError) as caught:
        find_start(target)
    message = f"--resume {folder}: damaged: data.pt has other content than was saved"
    assert caught.value.problems == [(message, f"use --resume {run_dir}, which takes the newest whole one")]


def test_a_named_checkpoint_that_is_not_there_is_not_called_damaged(tmp_path: Path, small_plan: Callable) -> None:
    run_dir = stopped(small_plan(tmp_path))
    missing = save(run_dir, 3).with_name("global_step_9")
    target = find_target(str(missing), root=tmp_path, recipe_name="", name=None)
    with pytest.raises(RecipeError) as caught:
        find_start(target)
    assert caught.value.problems == [(f"--resume {missing}: no such checkpoint", "steps with a checkpoint: 3")]
