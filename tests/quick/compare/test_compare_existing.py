"""What a comparison makes of the folders that it finds, and what it reads back out of them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hub_variables import set_hub
from plans import HOST

from appliance.compare import arms, command, results
from appliance.compare.arms import Existing, PlannedRun, look_at_run, plan_runs, resumed_run, set_aside
from appliance.compare.command import _ready, _where
from appliance.compare.file import load_comparison
from appliance.compare.results import (
    Job,
    Step,
    busy_share,
    note_busy,
    read_final,
    read_result,
    validate_models,
    write_final,
)
from appliance.compare.stored import read_results, result_of, write_results
from appliance.errors import Interrupted, PreflightError, RecipeError
from appliance.recipe.library import names
from appliance.recipe.load import is_written, load_recipe, to_yaml
from appliance.record.checkpoints import Facts, checkpoint_folder, seal
from appliance.record.events import append_event, append_line
from appliance.record.plan import RunPlan
from appliance.record.session import RunStatus, ask_to_stop, create_session
from appliance.settings.sections import Lora, Model

pytestmark = [pytest.mark.usefixtures("no_sample"), pytest.mark.slow]  # half a second each

TEXT = """\
recipe: arithmetic-tiny-int8
arms: {a: , b: [correction.method=icepop, correction.cap=]}
seeds: [0]
baseline: a
validation: 16
"""


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[PlannedRun]:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(TEXT)
    return plan_runs(load_comparison("c.yaml"))


def end(run: PlannedRun, *, state: RunStatus, code: int, recipe: str | None = None) -> None:
    """A run's folder as a launcher leaves it."""
    with create_session(run.plan, recipe_yaml=recipe or to_yaml(run.recipe), is_chosen=False) as session:
        session.finish(state=state, exit_code=code, reason="" if code == 0 else "why")


@pytest.mark.parametrize(
    ("state", "code", "existing"),
    [
        (RunStatus.DONE, 0, Existing.DONE),
        (RunStatus.FAILED, 6, Existing.DONE),  # the guard that the recipe asked for
        (RunStatus.STOPPED, 6, Existing.DONE),
        (RunStatus.FAILED, 5, Existing.UNFINISHED),
        (RunStatus.STOPPED, 130, Existing.UNFINISHED),
    ],
)
def test_a_result_is_a_good_end_or_a_stop_by_the_guard(
    planned: list[PlannedRun], state: RunStatus, code: int, existing: Existing
) -> None:
    assert look_at_run(planned[0]) is Existing.NOTHING
    end(planned[0], state=state, code=code)
    assert look_at_run(planned[0]) is existing
    assert (read_result(planned[0]) is not None) == (existing is Existing.DONE)


def test_a_run_of_another_recipe_is_not_taken_for_this_one(planned: list[PlannedRun]) -> None:
    end(planned[0], state=RunStatus.DONE, code=0, recipe=to_yaml(planned[1].recipe))
    assert look_at_run(planned[0]) is Existing.OTHER


def test_a_folder_that_is_no_run_is_not_taken_for_one(planned: list[PlannedRun]) -> None:
    planned[0].run_dir.mkdir(parents=True)
    assert look_at_run(planned[0]) is Existing.OTHER


def test_a_run_without_a_whole_checkpoint_is_done_again(planned: list[PlannedRun]) -> None:
    end(planned[0], state=RunStatus.STOPPED, code=130)
    (planned[0].run_dir / "checkpoints" / "global_step_3").mkdir(parents=True)  # no manifest: not whole
    assert resumed_run(planned[0]) is None


def test_a_run_whose_disk_of_checkpoints_is_gone_is_not_done_again(planned: list[PlannedRun]) -> None:
    end(planned[0], state=RunStatus.STOPPED, code=75)
    (planned[0].run_dir / "checkpoints").symlink_to(planned[0].run_dir / "gone")
    with pytest.raises(RecipeError, match=r"leads to .*gone, which is not there"):
        _ready(planned[0], state=look_at_run(planned[0]))
    assert planned[0].run_dir.is_dir()  # not set aside


def test_a_run_that_was_stopped_goes_on_from_its_newest_whole_checkpoint(
    planned: list[PlannedRun], capsys: pytest.CaptureFixture[str]
) -> None:
    run = planned[0]
    end(run, state=RunStatus.STOPPED, code=75)
    for step in (2, 4, 6):
        folder = checkpoint_folder(run.run_dir, step=step)
        folder.mkdir(parents=True)
        (folder / "data.pt").write_bytes(b"weights")
        seal(folder, facts=Facts(step=step, world_size=1, reason="", time=0.0))
    (folder / "data.pt").write_bytes(b"weight")  # the newest is damaged
    ready = _ready(run, state=look_at_run(run))
    assert capsys.readouterr().err == "a, seed 0: resumes after step 4\n"
    assert ready.resume is not None and ready.resume.step == 4
    newest = str(checkpoint_folder(run.run_dir, step=4))
    assert ready.plan.resume_from == newest and f"trainer.resume_from_path={newest}" in ready.plan.argv
    assert (ready.recipe, ready.plan.seed, ready.run_dir) == (run.recipe, run.plan.seed, run.run_dir)
    assert [path.name for path in run.run_dir.parent.iterdir()] == ["a-seed0"]  # nothing was set aside


@pytest.mark.parametrize("template", ["{{ messages }}", "{{ strftime_now('%d') }}{{ messages }}"])
@pytest.mark.parametrize("is_here", [True, False], ids=["here at first", "downloaded by the first run"])
def test_a_comparison_keeps_its_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, is_here: bool
) -> None:
    """What is done counts on another day, and once the model is here; a run that starts then has the same problems."""
    commit, today = "1" * 40, ["2026-11-28"]
    monkeypatch.chdir(tmp_path)
    set_hub(monkeypatch, HF_HUB_CACHE=str(tmp_path / "hub"), HF_HUB_OFFLINE="1")
    monkeypatch.setattr(arms, "examine", lambda *_, **__: (None, replace(HOST, today=today[0]), []))
    Path("r.yaml").write_text(
        "extends: arithmetic-tiny-int8\nmodel: {builtin: null, path: owner/m}\ntask: {long_prompts: drop}\n"
    )
    Path("c.yaml").write_text(TEXT.replace("arithmetic-tiny-int8", "r.yaml"))

    def download() -> None:
        snapshot = tmp_path / "hub" / "models--owner--m" / "snapshots" / commit
        (refs := snapshot.parents[1] / "refs").mkdir(parents=True)
        snapshot.mkdir(parents=True)
        (refs / "main").write_text(commit)
        (snapshot / "config.json").write_text("{}")
        (snapshot / "chat_template.jinja").write_text(template)

    if is_here:
        download()
    first, later = plan_runs(load_comparison("c.yaml"))
    end(first, state=RunStatus.DONE, code=0)
    if not is_here:
        download()
    today[0] = "2026-12-01"
    again, other = plan_runs(load_comparison("c.yaml"))
    assert (look_at_run(again), look_at_run(other)) == (Existing.DONE, Existing.NOTHING)
    assert (again.plan.task, other.plan.task) == (first.plan.task, later.plan.task)


@pytest.mark.slow  # 3 s each, by the clock
@pytest.mark.parametrize(("code", "why"), [(130, ""), (75, ""), (4, "SIGTERM"), (0, "SIGINT")])
def test_after_a_signal_no_other_run_is_started(
    planned: list[PlannedRun], monkeypatch: pytest.MonkeyPatch, code: int, why: str
) -> None:
    """Whatever its run ended with."""
    trained: list[str] = []

    def train(plan: RunPlan, **_: object) -> int:
        trained.append(plan.name)
        Path(plan.run_dir).mkdir(parents=True)
        if why:
            ask_to_stop(Path(plan.run_dir), why=why)
        return code

    monkeypatch.setattr(command, "run_training", train)
    ended: list[str] = []
    with pytest.raises(Interrupted, match="the comparison was stopped"):
        command._train(
            planned,
            total=2,
            stop=lambda: None,
            run_ended=lambda: ended.append("run"),
            command="appliance compare c.yaml",
        )
    assert ended == []
    assert len(planned) == 2 and len(trained) == 1
    noted = (planned[0].run_dir / "events.jsonl").exists()  # a run that is done is not started again to be told
    assert noted == (code not in (130, 75))


def test_a_disk_that_fills_up_is_the_fault_of_the_run_alone(
    planned: list[PlannedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(plan: RunPlan, **_: object) -> int:
        Path(plan.run_dir).mkdir(parents=True)
        (Path(plan.run_dir) / "events.jsonl").symlink_to("/dev/full")  # it takes no note
        return 5

    monkeypatch.setattr(command, "run_training", train)
    monkeypatch.setattr(command, "busy_share", lambda: 0.0)
    ended: list[str] = []
    failed = command._train(
        planned, total=2, stop=lambda: None, run_ended=lambda: ended.append("run"), command="appliance compare c.yaml"
    )
    assert failed == [(planned[0], 5), (planned[1], 5)]
    assert ended == []


def test_a_run_whose_launcher_is_gone_is_unfinished(planned: list[PlannedRun]) -> None:
    with create_session(planned[0].plan, recipe_yaml=to_yaml(planned[0].recipe), is_chosen=False):
        pass
    assert look_at_run(planned[0]) is Existing.UNFINISHED


def test_a_run_that_is_going_on_is_left_alone(planned: list[PlannedRun]) -> None:
    going_on = create_session(planned[0].plan, recipe_yaml=to_yaml(planned[0].recipe), is_chosen=False)
    with going_on, pytest.raises(PreflightError) as raised:
        look_at_run(planned[0])
    assert raised.value.message == f"{planned[0].run_dir}: this run is still running"


def test_what_is_set_aside_keeps_its_files_and_takes_the_next_number(tmp_path: Path) -> None:
    for text in ("first", "second"):
        (tmp_path / "a-seed0").mkdir()
        (tmp_path / "a-seed0" / "file").write_text(text)
        set_aside(tmp_path / "a-seed0")
    assert {path.name: (path / "file").read_text() for path in tmp_path.iterdir()} == {
        "a-seed0.aside-1": "first",
        "a-seed0.aside-2": "second",
    }


def validations(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """What the child is asked from here on, which then validates nothing."""
    jobs: list[Job] = []

    def child(argv: list[str], **_: object) -> None:
        jobs.append(Job.model_validate_json(Path(argv[1]).read_text()))

    monkeypatch.setattr(results, "run_child", child)
    return jobs


def test_a_model_is_validated_on_the_problems_that_its_run_was_made_with(
    planned: list[PlannedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tag of its model moved since: the plan of now names others, which nobody made."""
    validated = validations(monkeypatch)
    run = planned[0]
    end(run, state=RunStatus.DONE, code=0)
    (run.run_dir / "model").mkdir()
    own_parquet, other = Path(run.plan.task_files.val_parquet), run.run_dir / "of-another-commit" / "val.parquet"
    own_parquet.parent.mkdir(parents=True)
    own_parquet.touch()
    now = replace(run, plan=run.plan.replace(task_files=run.plan.task_files.replace(val_parquet=str(other))))
    validate_models([now], stop=lambda: None)
    own_parquet.unlink()  # the cache is elsewhere now
    validate_models([now], stop=lambda: None)
    assert [job.parquet for job in validated] == [str(own_parquet), str(other)]


def test_the_model_of_a_run_that_failed_is_not_validated(
    planned: list[PlannedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may go on and end with another one, which would have the rewards of this."""
    validated = validations(monkeypatch)
    for run, code in zip(planned, (5, 0), strict=True):
        end(run, state=RunStatus.FAILED if code else RunStatus.DONE, code=code)
        (run.run_dir / "model").mkdir()
    validate_models(planned, stop=lambda: None)
    assert [list(job.run_dirs) for job in validated] == [[str(planned[1].run_dir)]]


def test_a_result_has_the_curves_the_times_and_the_rewards(planned: list[PlannedRun]) -> None:
    run = planned[1]
    end(run, state=RunStatus.DONE, code=0)
    append_event(run.run_dir, kind="phase", what="start")
    note_busy(run.run_dir, share=0.23456)
    lines = [
        {"step": 0, "time_s": 1.0, "val_reward_mean": 0.1},
        {"step": 1, "time_s": 2.0, "reward_mean": 0.2, "mismatch_k3_kl": 1e-4, "scheme": "int8"},
        {"step": 2, "time_s": 3.0, "reward_mean": 0.4, "val_reward_mean": 0.5, "mismatch_k3_kl": None},
    ]
    for line in lines:
        append_line(run.run_dir / "metrics.jsonl", line)
    with (run.run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')  # a launcher that was killed
    write_final(run.run_dir, [1.0, 0.0, 1.0])
    result = read_result(run)
    assert result is not None
    assert [(row.step, row.reward_mean, row.val_reward_mean) for row in result.steps] == [
        (0, None, 0.1),
        (1, 0.2, None),
        (2, 0.4, 0.5),
    ]
    assert (result.rewards, result.final, result.busy, result.is_busy) == ((1.0, 0.0, 1.0), 2 / 3, 0.235, True)
    assert (str(result.method), result.steps[1].mismatch_k3_kl, result.steps[1].scheme) == ("icepop", 1e-4, "int8")
    assert result.seconds >= 0


def test_a_result_has_every_step_of_a_long_run(planned: list[PlannedRun]) -> None:
    run = planned[0]
    end(run, state=RunStatus.DONE, code=0)
    lines = [json.dumps({"step": step, "time_s": 1.0, "is_weight_max": step / 8}) for step in range(9001)]
    (run.run_dir / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    result = read_result(run)
    assert result is not None
    assert result.steps == tuple(Step(step, is_weight_max=step / 8) for step in range(9001))


def test_a_pause_is_no_time_of_a_run(planned: list[PlannedRun]) -> None:
    """Two attempts of 20 and 5 s with a night between them; the machine's load was written down a week later."""
    run = planned[0]
    end(run, state=RunStatus.DONE, code=0)
    times = [(100.0, "phase"), (120.0, "stop"), (40_000.0, "resume"), (40_005.0, "phase"), (700_000.0, "load")]
    for time_s, kind in times:
        append_line(run.run_dir / "events.jsonl", {"time": time_s, "kind": kind, "what": "", "share": 0.0})
    result = read_result(run)
    assert result is not None and result.seconds == 25.0 and not result.is_busy


def test_a_table_that_is_made_anew_has_days_and_machines_of_its_runs(planned: list[PlannedRun]) -> None:
    results = []
    for run, days in zip(planned, (2, 4), strict=True):
        end(run, state=RunStatus.DONE, code=0)
        append_line(run.run_dir / "events.jsonl", {"time": 86400.0 * days - 43200, "kind": "phase", "what": "done"})
        results.append(read_result(run))
    assert _where(results).partition(":")[0] == "Taken on 1970-01-02 to 1970-01-04"
    assert _where(results[:1]).partition(":")[0] == "Taken on 1970-01-02"
    elsewhere = [replace(result, host=host) for result, host in zip(results, ("A, 2 cores", "B, 8 cores"), strict=True)]
    assert _where(elsewhere).partition(": ")[2] == "A, 2 cores; B, 8 cores."


def test_the_share_that_others_take_is_of_now_and_of_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "_LOOK_S", 0.2)
    assert 0 <= busy_share() <= 1
    monkeypatch.setattr(results.psutil, "cpu_percent", lambda interval: 50.0 if interval == 0.2 else 0.0)
    assert busy_share() == 0.5


def test_a_finished_run_on_other_problems_is_not_taken_for_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe is the same, the file that it names is not."""
    monkeypatch.chdir(tmp_path)
    task = "task.kind=gsm8k, task.train_file=t.jsonl, task.val_file=v.jsonl"
    text = TEXT.replace("{a: ,", f"{{a: [{task}],").replace("b: [", f"b: [{task}, ")
    Path("c.yaml").write_text(text)
    for name in ("t", "v"):
        Path(f"{name}.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n' * 600)
    run = plan_runs(load_comparison("c.yaml"))[0]
    end(run, state=RunStatus.DONE, code=0)
    assert look_at_run(run) is Existing.DONE
    Path("v.jsonl").write_text('{"question": "1 + 2?", "answer": "#### 3"}\n' * 600)
    assert look_at_run(plan_runs(load_comparison("c.yaml"))[0]) is Existing.OTHER
    (run.run_dir / "plan.json").write_text("{")
    assert look_at_run(run) is Existing.OTHER


def test_rewards_that_are_half_written_are_none(tmp_path: Path) -> None:
    assert read_final(tmp_path) == ()
    (tmp_path / "final-validation.json").write_text(json.dumps({"rewards": [1.0]})[:-4])
    assert read_final(tmp_path) == ()


# Results of another machine


@pytest.fixture
def results_file(planned: list[PlannedRun], tmp_path: Path) -> Path:
    """Both runs', the folders of which are gone."""
    pairs = []
    for run, right in zip(planned, (3, 5), strict=True):
        end(run, state=RunStatus.DONE, code=0)
        append_line(run.run_dir / "metrics.jsonl", {"step": 1, "time_s": 2.0, "reward_mean": 0.2, "scheme": "int8"})
        write_final(run.run_dir, [float(index < right) for index in range(16)])
        result = read_result(run)
        assert result is not None
        pairs.append((run, result))
    shutil.rmtree(planned[0].run_dir.parent)
    write_results(tmp_path / "c.results.jsonl", runs=pairs)
    return tmp_path / "c.results.jsonl"


def test_results_of_another_machine_make_the_same_table(
    planned: list[PlannedRun], results_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "run_training", lambda *_, **__: pytest.fail("it is done"))
    assert command.run_compare("c.yaml", json_mode=True, results_file=results_file) == 0
    written = capsys.readouterr()
    assert "2 of 2 runs have their result in c.results.jsonl" in written.err
    runs = [run for arm in json.loads(written.out)["arms"] for run in arm["runs"]]
    assert [(run["final"], run["step"], run["reward"]) for run in runs] == [(3 / 16, [1], [0.2]), (5 / 16, [1], [0.2])]
    again = planned[0].run_dir.parent / "c.results.jsonl"
    assert read_results(again) == read_results(results_file)


def test_a_stored_result_of_another_run_is_not_taken(planned: list[PlannedRun], results_file: Path) -> None:
    (first, second), run = read_results(results_file), planned[0]
    assert result_of(run, stored=[second, first]) == (first.result, "")
    other_recipe = first.recipe | {"optimizer": first.recipe["optimizer"] | {"learning_rate": 1.0}}
    differing = [
        (second, ""),
        (replace(first, result=replace(first.result, seed=1)), ""),
        (replace(first, recipe=other_recipe), "its recipe is another one"),
        (replace(first, problems="arithmetic-0"), "it has other problems"),
        (replace(first, code={"r.py": "0"}), "its Python files are others"),
        (replace(first, result=replace(first.result, rewards=())), "its model was not validated, and is not here"),
    ]
    assert [result_of(run, stored=[other]) for other, _ in differing] == [(None, why) for _, why in differing]
    of_hub = replace(run, plan=run.plan.replace(weights=run.plan.weights.replace(commit="b" * 40)))
    (result, why) = result_of(of_hub, stored=[replace(first, commit="a" * 40)])
    assert result is None and why == f"its model is commit {'a' * 40}, now it is {'b' * 40}"
    stopped = replace(first.result, rewards=(), state="stopped")
    assert result_of(run, stored=[replace(first, result=stopped)]) == (stopped, "")


def test_results_that_would_be_overwritten_are_refused(
    planned: list[PlannedRun], results_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file may be the only copy of results of a wider comparison."""
    Path("c.yaml").write_text(TEXT.replace("icepop", "acr"))
    monkeypatch.setattr(command, "_train", lambda *_, **__: [])
    output = planned[0].run_dir.parent / results_file.name
    output.parent.mkdir()
    shutil.copyfile(results_file, output)
    with pytest.raises(RecipeError, match="1 of its results are of other runs, and would be overwritten"):
        command.run_compare("c.yaml", json_mode=True, results_file=output)
    assert output.read_bytes() == results_file.read_bytes()
    assert command.run_compare("c.yaml", json_mode=True, results_file=results_file) == 0
    said = capsys.readouterr().err
    unused = "b, seed 0: its stored result is not used: its recipe is another one"
    assert f"1 of 2 runs have their result in c.results.jsonl\n{unused}" in said


def test_a_key_that_came_later_counts_as_its_default(planned: list[PlannedRun], results_file: Path) -> None:
    first, _ = read_results(results_file)
    for section, key in (("rollout", "top_log_probs"), ("trainer", "old_log_probs"), ("correction", "method")):
        earlier = first.recipe | {section: {k: v for k, v in first.recipe[section].items() if k != key}}
        assert result_of(planned[0], stored=[replace(first, recipe=earlier)])[0] == first.result
    adapted = planned[0].recipe.model_copy(update={"model": Model(builtin="tiny-arithmetic", lora=Lora(rank=4))})
    plain = yaml.safe_load(to_yaml(adapted))
    del plain["model"]["lora"]["dropout"]
    assert is_written(adapted, plain=plain)
    of_icepop = read_results(results_file)[1]
    earlier = of_icepop.recipe | {"correction": {"cap": None, "bounds": [0.5, 5.0]}}
    assert (
        result_of(planned[1], stored=[replace(of_icepop, recipe=earlier)])[0] is None
    )  # its method is not the default


@pytest.mark.parametrize("name", names())
def test_a_recipe_that_is_written_out_is_known_again(name: str) -> None:
    recipe = load_recipe(name)
    assert is_written(recipe, plain=yaml.safe_load(to_yaml(recipe)))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", ""),
        ("{}\n", "c.results.jsonl:1: not of schema_version 1"),
        ('{"schema_version": 1}\n', "c.results.jsonl:1: recipe is not one that this program writes: Field required"),
        ("not json\n", "c.results.jsonl:1: Expecting value: line 1 column 1 (char 0)"),
    ],
)
def test_a_file_that_has_no_results_is_refused_with_its_line(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "c.results.jsonl"
    if not text:
        with pytest.raises(RecipeError, match="No such file"):
            read_results(file)
        return
    file.write_text(text)
    with pytest.raises(RecipeError) as caught:
        read_results(file)
    ((message, hint),) = caught.value.problems
    assert message == f"--results {file}: {tmp_path}/{problem}" and "NAME.results.jsonl" in hint
