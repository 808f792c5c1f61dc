"""The user's Python files in a run: copied, attested, and the same in every attempt."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from plans import HOST, make_reward, with_own_task
from stopped_runs import save, stopped, target_of

from appliance.errors import AttestationError, PreflightError, RecipeError
from appliance.launch import command
from appliance.launch.resume import Resume, begin_attempt, refuse_changes
from appliance.plan.build import build_plan
from appliance.preflight import inputs
from appliance.recipe.load import load_recipe, to_yaml
from appliance.recipe.schema import Recipe
from appliance.record.code import attested_code, copy_code, with_copies
from appliance.record.plan import CodeFile, RunPlan, read_plan
from appliance.record.session import create_session
from appliance.settings.sections import Reward
from appliance.tasks.tools import Schema, ToolsRequest


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture
def plan(tmp_path: Path, small_plan: Callable) -> RunPlan:
    return with_code(small_plan(tmp_path / "runs"), tmp_path / "a" / "rewards.py", "one")


def with_code(plan: RunPlan, file: Path, text: str) -> RunPlan:
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    code = (CodeFile(path=str(file), copy_name="rewards.py", sha256=digest(text)),)
    return with_own_task(plan, make_reward("f", file=file), tools=str(file), code=code)


def test_a_run_executes_its_copies(tmp_path: Path, plan: RunPlan) -> None:
    create_session(plan, recipe_yaml="", is_chosen=False).release()
    copy = Path(plan.run_dir) / "code" / "rewards.py"
    task = with_copies(plan)
    assert (copy.read_text(), task.rewards[0].file, task.tools) == ("one", str(copy), str(copy))
    assert plan.task_files.import_path == (str(tmp_path / "a"),)
    assert attested_code(plan) == {str(tmp_path / "a" / "rewards.py"): digest("one")}
    copy.write_text("two")
    with pytest.raises(AttestationError, match=f"^{copy} is not the file that was planned$"):
        attested_code(plan)


def test_a_file_that_changed_since_it_was_planned_is_refused_and_no_folder_is_left(plan: RunPlan) -> None:
    file = Path(plan.task_files.code[0].path)
    for change in (lambda: file.write_text("two"), file.unlink):
        change()
        with pytest.raises(RecipeError) as caught:
            create_session(plan, recipe_yaml="", is_chosen=False)
        assert caught.value.problems == [
            (f"{file}: it is not the file that was planned: it has changed since", "start again")
        ]
        assert not Path(plan.run_dir).exists()


RECIPE = """
name: small
model: {builtin: tiny-calculator}
task:
  kind: own
  train_file: DATA
  val_size: 1
  max_prompt_tokens: 16
  max_response_tokens: 6
  rewards: [{name: rewards.py:f}]
  tools: tools.py
batch: {prompts_per_step: 4}
cluster: {device: cpu, run_dir: RUNS}
trainer: {steps: 9, max_restarts: 1}
"""
GOOD, BROKEN = "def f(response): return len(response)", "def f(response:"


@pytest.fixture
def run_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """Of a run that failed after step 3, with the current folder's files, and what a further attempt is told."""
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"prompt": f"{n} + 1?"}) + "\n" for n in range(9)))
    (tmp_path / "r.yaml").write_text(RECIPE.replace("DATA", str(tmp_path / "d.jsonl")).replace("RUNS", str(tmp_path)))
    monkeypatch.chdir(mine(tmp_path / "a"))
    made_recipe = load_recipe(str(tmp_path / "r.yaml"))
    run_dir = stopped(build_plan(made_recipe, run_dir=tmp_path / "small-1", host=HOST))
    (run_dir / "recipe.yaml").write_text(to_yaml(made_recipe))
    save(run_dir, 3)
    return made_recipe


def mine(folder: Path, rewards: str = GOOD, tools: str = "def g(): return 1") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "rewards.py").write_text(rewards)
    (folder / "tools.py").write_text(tools)
    return folder


def attempts(monkeypatch: pytest.MonkeyPatch) -> list[RunPlan]:
    """The plans of those that come, which do nothing."""
    seen: list[RunPlan] = []

    def run(plan: RunPlan, *, resume: Resume, recipe_yaml: str, **_: object) -> int:
        begin_attempt(plan, resume=resume, recipe_yaml=recipe_yaml).release()
        seen.append(plan)
        return 0

    monkeypatch.setattr(command, "run_training", run)
    return seen


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tools, without the child that describes them, which loads transformers: once is enough for this file."""

    def read(asked: ToolsRequest) -> list[Schema]:
        assert Path(asked.file).read_text() == TOOLS
        return []

    monkeypatch.setattr(inputs, "read_tools", read)


def resume(made: Recipe, *, force: bool = False) -> int:
    return command.run_train(made, resume="auto", name=None, force=force, dry_run=False, json_mode=False, stages=())


OTHER = "it is not the file that the run began with"


def _without_place(message: str) -> str:
    """The message of a fault behind the line of the recipe that it names."""
    place, _, fact = message.partition(": ")
    assert re.search(r"r\.yaml:\d+$", place), message
    return fact


GIVE = "put it back as the run has it, start a new run with another --name, or take the change with --force"


@pytest.mark.parametrize("force", [False, True])
def test_a_resume_with_a_file_that_is_not_there_says_so(
    tmp_path: Path, run_recipe: Recipe, capsys: pytest.CaptureFixture[str], force: bool
) -> None:
    """Which no --force helps against."""
    file = tmp_path / "a" / "rewards.py"
    file.unlink()
    message, hint = f"{file}: no such file, or it cannot be read", "correct the path"
    with pytest.raises(PreflightError if force else RecipeError) as caught:
        resume(run_recipe, force=force)
    if isinstance(caught.value, RecipeError):
        ((refusal, what_to_do),) = caught.value.problems
        assert (_without_place(refusal), what_to_do) == (f"task.rewards: {message}", hint)
    else:
        assert f":10: task.rewards: {message}\nhint: {hint}\n" in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["a", "b"])
def test_a_resume_with_other_files_is_refused_by_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_recipe: Recipe, folder: str
) -> None:
    """From another folder a path of the recipe means another file. Nobody runs it before it is refused."""
    monkeypatch.chdir(mine(tmp_path / folder, BROKEN, "while True: pass"))
    with pytest.raises(RecipeError) as caught:
        resume(run_recipe)
    rewards, tools = (str(tmp_path / folder / name) for name in ("rewards.py", "tools.py"))
    assert [(_without_place(message), hint) for message, hint in caught.value.problems[-2:]] == [
        (f"task.rewards: {rewards}: {OTHER}", GIVE),
        (f"task.tools: {tools}: {OTHER}", GIVE),
    ]


def test_the_same_files_in_another_folder_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_recipe: Recipe
) -> None:
    monkeypatch.chdir(mine(tmp_path / "b"))
    refuse_changes(run_recipe, target=target_of(tmp_path / "small-1"), force=False)


def test_a_file_that_the_run_never_had_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_recipe: Recipe
) -> None:
    (tmp_path / "small-1" / "recipe.yaml").unlink()  # it says by itself that task.rewards is another one
    (tmp_path / "a" / "more.py").write_text(GOOD)
    task = run_recipe.task.model_copy(update={"rewards": [Reward(name="more.py:f")]})
    with pytest.raises(RecipeError) as caught:
        refuse_changes(
            run_recipe.model_copy(update={"task": task}), target=target_of(tmp_path / "small-1"), force=False
        )
    ((message, hint),) = caught.value.problems
    assert (_without_place(message), hint) == (f"task.rewards: {tmp_path / 'a' / 'more.py'}: {OTHER}", GIVE)


@pytest.mark.slow  # seconds each
def test_what_is_forced_runs_and_its_prompts_are_measured_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_recipe: Recipe
) -> None:
    mine(tmp_path / "a", "def f(response): return 2", TOOLS)
    seen, before = attempts(monkeypatch), read_plan(tmp_path / "small-1" / "plan.json")
    assert resume(run_recipe, force=True) == 0
    assert (tmp_path / "small-1" / "code" / "1-tools.py").read_text() == TOOLS and attested_code(seen[0])
    assert seen[0].task_files.schemas_file != before.task_files.schemas_file
    assert not told_of(tmp_path / "small-1", "changed")


@pytest.mark.slow  # seconds each
@pytest.mark.parametrize("tools", ["better.py", None])
def test_tools_of_another_name_and_none_at_all_are_forced_like_changed_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_recipe: Recipe, tools: str | None
) -> None:
    (tmp_path / "a" / "better.py").write_text(TOOLS)
    seen, before = attempts(monkeypatch), read_plan(tmp_path / "small-1" / "plan.json")
    task = {"tools": tools, "max_turns": None}
    changed = run_recipe.model_copy(update={"task": run_recipe.task.model_copy(update=task)})
    assert resume(changed, force=True) == 0
    assert Path(seen[0].task.tools or "").name == (tools or "")
    assert seen[0].task_files.schemas_file != before.task_files.schemas_file
    assert (tmp_path / "small-1" / "code" / "1-better.py").exists() == bool(tools) and attested_code(seen[0])
    (tmp_path / "a" / "tools.py").write_text(TOOLS)
    assert resume(run_recipe, force=True) == 0  # and added again
    assert Path(seen[1].task.tools).name == "tools.py" and attested_code(seen[1])


TOOLS = """
def g(a: int) -> int:
    '''
    Adds.

    Args:
        a: A number.
    '''
    return a
"""


@pytest.mark.slow
@pytest.mark.usefixtures("described")
@pytest.mark.parametrize("text", [BROKEN, None])
def test_an_attempt_that_nobody_asked_for_goes_on_with_the_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_recipe: Recipe, text: str | None
) -> None:
    """Somebody who writes the next version while a run is at work must not change it, nor end it."""
    run_dir, seen = tmp_path / "small-1", attempts(monkeypatch)
    mine(tmp_path / "a", GOOD, TOOLS)
    resume(run_recipe, force=True)
    for name in ("rewards.py", "tools.py"):
        (tmp_path / "a" / name).unlink() if text is None else (tmp_path / "a" / name).write_text(text)
    assert command.Attempts(run_recipe).through_faults(5, run_dir) == 0
    assert seen[1].task == seen[0].task
    assert attested_code(seen[1]) and (run_dir / "code" / "1-tools.py").read_text() == TOOLS
    note = "has changed since the run began: this attempt runs the copy in code/"
    assert told_of(run_dir, "changed") == [
        (f"{tmp_path / 'a' / 'rewards.py'} {note}", f"SHA-256 {digest(GOOD)}"),
        (f"{tmp_path / 'a' / 'tools.py'} {note}", f"SHA-256 {digest(TOOLS)}"),
    ]
    kinds = [json.loads(line)["kind"] for line in (run_dir / "events.jsonl").read_text().splitlines()]
    assert kinds[-3:] == ["resume", "note", "note"]  # else the page has the attempt before go on until now


def told_of(run_dir: Path, word: str) -> list[tuple[str, str]]:
    told = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [(each["what"], each["why"]) for each in told if word in each["what"]]


@pytest.mark.slow
@pytest.mark.usefixtures("described")
def test_the_code_of_the_steps_before_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_recipe: Recipe
) -> None:
    """Of an attempt that is begun twice, for the disk was full the first time, what ran is kept and nothing else."""
    run_dir = tmp_path / "small-1"
    before = {each.name: each.read_text() for each in (run_dir / "code").iterdir()}
    attempts(monkeypatch)
    for rewards in ("def f(response): return 2", "def f(response): return 3"):
        mine(tmp_path / "a", rewards, TOOLS)
        with monkeypatch.context() as full:
            full.setattr("appliance.launch.resume.write_record", MagicMock(side_effect=OSError("full")))
            with pytest.raises(PreflightError):
                resume(run_recipe, force=True)
        assert (run_dir / "code" / "0-rewards.py").read_text() == rewards
        assert {each.name: each.read_text() for each in (run_dir / "logs").rglob("*.py")} == before


def test_a_copy_that_changed_like_its_file_is_named(tmp_path: Path, run_recipe: Recipe) -> None:
    plan, file = read_plan(tmp_path / "small-1" / "plan.json"), tmp_path / "a" / "rewards.py"
    copy = tmp_path / "small-1" / "code" / "0-rewards.py"
    for each in (file, copy):
        each.write_text("other")
    with pytest.raises(RecipeError) as caught:
        copy_code(plan)
    message = f"{file}: it is not the file that was planned: it has changed since, and so did the run's copy {copy}"
    assert caught.value.problems == [(message, "put one of them back, or start a new run")]


def test_of_several_files_none_is_copied_where_one_changed(tmp_path: Path, run_recipe: Recipe) -> None:
    plan = read_plan(tmp_path / "small-1" / "plan.json")
    copies = [tmp_path / "small-1" / "code" / name for name in ("0-rewards.py", "1-tools.py")]
    for each in (*copies, tmp_path / "a" / "tools.py"):
        each.unlink()
    with pytest.raises(RecipeError):
        copy_code(plan)
    assert not any(each.exists() for each in copies)


def test_a_copy_that_was_lost_is_made_again(plan: RunPlan) -> None:
    create_session(plan, recipe_yaml="", is_chosen=False).release()
    (Path(plan.run_dir) / "code" / "rewards.py").unlink()
    copy_code(plan)
    assert attested_code(plan)
