"""The rewards of a task of the user's own on three real rows: what they do to the child that asks them, and say."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path

import pytest
from finding_texts import texts
from plans import HOST, INPUTS, make_plan, make_reward, with_own_task

from appliance.files import digest_of
from appliance.finding import Severity
from appliance.launch.side_job import OF_A_PROFILE, examine_for
from appliance.preflight import inputs
from appliance.preflight.checks import judge
from appliance.preflight.inputs import RewardProblem, read_inputs, reward_problem
from appliance.recipe.schema import Recipe
from appliance.record.plan import CodeFile, RunPlan
from appliance.settings.sections import Reward
from appliance.tasks.own_task import parse_row
from appliance.tasks.rows import write_parquet
from appliance.tasks.user_code import FORMS, ChildOutput

ROWS = [{"prompt": f"{number} + 1?", "answer": str(number + 1)} for number in range(1, 9)]


def planned(folder: Path, *rewards: Reward, truth: str = "answer", rows: list[dict[str, str]] = ROWS) -> RunPlan:
    data = folder / "d.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in rows))
    files = dict.fromkeys(each.file for each in rewards if each.file)
    code = tuple(CodeFile(path=file, copy_name=Path(file).name, sha256=digest_of(Path(file))) for file in files)
    plan = make_plan(folder / "runs" / "a-1")
    return with_own_task(plan, *rewards, truth=truth or None, code=code, train_file=str(data), reward_timeout_s=1.0)


def of_program(folder: Path, program: str, **changes: object) -> RewardProblem | None:
    file = folder / "rewards.py"
    file.write_text(program)
    return reward_problem(planned(folder, make_reward("f", file=file), **changes))


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        "def f(response, truth): return response == truth",
        "import sys\nprint('{\"verdict\": 1}')\ndef f(response, truth):\n    print(response)\n"
        "    sys.stdout.flush()\n    return response == truth",
        "import os\nos.fork()\ndef f(response, truth):\n    os.fork()\n    return response == truth",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()\n"
        "def f(response, truth): return response == truth",
        "import subprocess\nsubprocess.Popen(['sleep', '600'])\ndef f(response, truth): return response == truth",
        "import sys\ndef f(response, truth): return (response == truth) - len(sys.stdin.read())",
        "from beside import same\ndef f(response, truth): return same(response, truth)",
        "def f(completions, answer, **_): return [float(c == a) for c, a in zip(completions, answer)]",
    ],
)
def test_what_a_function_does_beside_its_value_disturbs_nothing(tmp_path: Path, program: str) -> None:
    (tmp_path / "beside.py").write_text("def same(a, b): return a == b")
    assert of_program(tmp_path, program) is None


IMPORT, CALL = "the import of {file}", "{file}:f on the truth of row 1"
FAILED = "{file}:f failed on the truth of row 1: "
REMEDIES = {
    "the import of {file} failed": "mend the file, or install what it imports",
    "there is no function": "use one of `g`",
    "no end after": "mend what takes so long, or raise task.reward_timeout_s",
    "its process ended": "mend the file: a reward must not end its process",
    "returned None": "return a number: a function without `return` gives None",
}
OF_WRONG = (
    "mend the function, the rows or task.truth, or take a reward that reads such answers; "
    "leave it where your function wants another form"
)
LENGTH = "UserCodeError: `f` returned a list of 2 for one completion, not a list of one"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            "import no_such_module",
            IMPORT + " failed: ModuleNotFoundError: No module named 'no_such_module' (rewards.py, line 1)",
        ),
        ("def f(:", IMPORT + " failed: SyntaxError: invalid syntax (rewards.py, line 1)"),
        ("raise SystemExit(3)", IMPORT + " failed: SystemExit: 3 (rewards.py, line 1)"),
        ("def g(response): return 1", "{file}: there is no function `f` in it"),
        ("import os\nos._exit(5)", IMPORT + ": its process ended with 5: no message"),
        ("import os\nos.kill(os.getpid(), 9)", IMPORT + ": its process ended with -9: no message"),
        pytest.param("while True: pass", IMPORT + ": no end after 4 s", marks=pytest.mark.slow),
        (
            "def f(response):\n    g()\ndef g(): raise ValueError('no\\nsuch')",
            FAILED + "ValueError: no (rewards.py, line 3)",
        ),
        (
            "def f(response): return 1 / len(response)",
            "{file}:f failed on an empty response: ZeroDivisionError: division by zero (rewards.py, line 1)",
        ),
        ("import sys\ndef f(response): sys.exit('bye')", FAILED + "SystemExit: bye (rewards.py, line 2)"),
        ("import os\ndef f(response): os._exit(0)", CALL + ": its process ended with 0: no message"),
        pytest.param("def f(response):\n    while True: pass", CALL + ": no end after 4 s", marks=pytest.mark.slow),
        ("def f(response): return 'much'", CALL + ": the reward `f` returned 'much', not a finite number"),
        ("def f(response): return float('nan')", CALL + ": the reward `f` returned nan, not a finite number"),
        ("def f(response): return None", "{file}:f returned None to the truth of row 1, so no reward applies to it"),
        (
            "class R:\n    def __repr__(self): return 1 / 0\ndef f(response): return R()",
            FAILED + "ZeroDivisionError: division by zero (rewards.py, line 2)",
        ),
        (
            "def f(completions): return [1.0, 1.0]",
            FAILED + LENGTH,
        ),
    ],
)
def test_a_function_that_gives_no_reward_is_an_error_that_names_file_and_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, message: str
) -> None:
    if "no end after 4 s" in message:
        monkeypatch.setattr(inputs, "_STARTS_WITHIN_S", 3.0)
    found = of_program(tmp_path, program)
    remedy = next((each for words, each in REMEDIES.items() if words in message), RewardProblem("").remedy)
    assert found == RewardProblem(message.format(file=tmp_path / "rewards.py"), remedy=remedy)


SLOW = "import time\ndef f(response, truth):\n    time.sleep(0.3)\n    return response == f'<answer>{truth}</answer>'"


@pytest.mark.slow  # 8 s, by the clock
def test_the_time_is_that_of_one_grading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """27 of them here, of 0.3 s each, and an import: within 4 s each."""
    monkeypatch.setattr(inputs, "_STARTS_WITHIN_S", 3.0)
    assert of_program(tmp_path, SLOW) is None


def test_where_a_judge_is_is_told_before_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed: list[str] = []
    monkeypatch.setattr(
        inputs,
        "run_child",
        lambda *_, **__: printed.append(capsys.readouterr().err) or ChildOutput({}, 0, is_late=False, printed=""),
    )
    judges = [make_reward("judge", url=url, model="m") for url in ("http://b/v1", "http://a/v1", "http://b/v1")]
    reward_problem(planned(tmp_path, *judges, make_reward("judge", file="/a/rewards.py")))
    sends = "note: `judge` sends what it is tried on to {}: the first rows, their truths and responses\n"
    assert printed == [sends.format("http://a/v1") + sends.format("http://b/v1")]


def test_a_judge_that_fails_has_a_hint_of_its_own(tmp_path: Path) -> None:
    problem = reward_problem(planned(tmp_path, make_reward("judge", url="http://127.0.0.1:9/v1", model="m")))
    failed = "the reward `judge` failed on the truth of row 1: ConnectError: All connection attempts failed"
    remedy = "see that the API at its url answers and has its model; APPLIANCE_JUDGE_KEY holds the key"
    assert problem == RewardProblem(failed, remedy=remedy)


def test_a_function_that_is_not_there_is_looked_for_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text("from json import dumps\ndef exact(response): return 1.0\ndef other(response): return 1.0")
    found = reward_problem(planned(tmp_path, make_reward("exatc", file=file)))
    assert found == RewardProblem(f"{file}: there is no function `exatc` in it", remedy="did you mean `exact`?")


def test_a_function_of_another_form_is_an_error_that_shows_the_three(tmp_path: Path) -> None:
    found = of_program(tmp_path, "def f(text, label): return 1.0")
    file = tmp_path / "rewards.py"
    assert found == RewardProblem(f"{file}: `f(text, label)` is none of the three forms of a reward: {FORMS}")


def test_with_tools_a_reward_is_asked_with_a_conversation(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text("def f(response, truth, *, messages): return float(messages[1]['content'] == truth)")
    plan = planned(tmp_path, make_reward("f", file=file))
    found = reward_problem(plan.replace(task=plan.task.replace(tools="/a/tools.py")))
    assert found is None and reward_problem(plan) is not None


def test_a_truth_that_earns_nothing_is_a_warning(tmp_path: Path) -> None:
    problem = of_program(tmp_path, "def f(response, truth): return response == truth.upper() + '.'")
    what = "row 1: the truth `2`, bare and in 8 marks, earns 0 at most, an empty response 0"
    message = f"in 3 of 3 sampled rows the right answer earns no more than an empty response: {what}"
    assert problem == RewardProblem(message, is_rare=True, remedy=OF_WRONG)


def test_a_reward_that_wants_the_answer_marked_is_asked_with_its_marks(tmp_path: Path) -> None:
    assert of_program(tmp_path, "def f(response, truth): return response == f'#### {truth}'") is None


RAISES = "def f(response, truth): return {} if not response or response.isdigit() else {}"


@pytest.mark.parametrize("marked", ["int(response)", "__import__('sys').exit(2)"])
def test_a_reward_that_raises_on_a_marked_answer_has_no_right_one_in_it(tmp_path: Path, marked: str) -> None:
    what = "row 1: the truth `2`, bare and in 8 marks, earns 0 at most, an empty response 0"
    message = f"in 3 of 3 sampled rows the right answer earns no more than an empty response: {what}"
    assert of_program(tmp_path, RAISES.format(0, marked)) == RewardProblem(message, is_rare=True, remedy=OF_WRONG)


def test_a_marked_answer_that_ends_the_process_is_to_blame_itself(tmp_path: Path) -> None:
    message = "the rewards on the truth of row 1, marked as an answer: its process ended with 3: no message"
    found = of_program(tmp_path, RAISES.format(0, "__import__('os')._exit(3)"))
    assert found == RewardProblem(message, remedy=REMEDIES["its process ended"])


def test_without_a_truth_numbers_are_enough(tmp_path: Path) -> None:
    assert of_program(tmp_path, "def f(response): return 0.0", truth="") is None
    assert of_program(tmp_path, "def f(response, truth=''): return 0.0", truth="") is None


def test_a_function_that_takes_a_truth_is_told_that_there_is_none(tmp_path: Path) -> None:
    found = of_program(tmp_path, "def f(response, truth): return response == truth", truth="")
    assert found == RewardProblem(
        "`f` takes a `truth`, and the rows have none: set task.truth to its field", is_rare=True
    )


def test_commands_that_are_no_training_do_not_run_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its findings they say none."""
    file = tmp_path / "rewards.py"
    file.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef f(response, truth): return 0.0")
    rows = [{"prompt": f"{number} + 1?", "answer": str(number + 1)} for number in range(1000)]
    plan = planned(tmp_path, make_reward("f", file=file), rows=rows)
    assert read_inputs(plan, ask_hub=True).reward_problem is not None and (tmp_path / "ran").exists()
    (tmp_path / "ran").unlink()
    examine_for((plan,), recipe=Recipe(), host=HOST, about=OF_A_PROFILE)
    assert not (tmp_path / "ran").exists()


def test_files_that_are_not_there_are_told_before_any_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a child"))
    plan = planned(tmp_path, make_reward("f", file="/no/rewards.py"))
    names = ("/no/rewards.py", "/no/tools.py")
    code = tuple(CodeFile(path=name, copy_name=Path(name).name, sha256="") for name in names)
    task, files = plan.task.replace(tools="/no/tools.py"), plan.task_files.replace(code=code)
    plan = plan.replace(task=task, task_files=files)
    why, remedy = "no such file, or it cannot be read", "correct the path"
    for ask_hub in (True, False):
        found = read_inputs(plan, ask_hub=ask_hub)
        assert found.reward_problem == RewardProblem(f"/no/rewards.py: {why}", remedy=remedy)
        assert texts(found.tool_faults) == [(f"task.tools: /no/tools.py: {why}", remedy)]


def test_code_for_data_of_the_hub_is_imported(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    for program, message in (
        ("def f(response): return 1", ""),
        ("def f(response, truth): return 1", ""),  # whether rows have one is not known yet
        ("1 / 0", "ZeroDivisionError: division by zero (rewards.py, line 1)"),
    ):
        file.write_text(program)
        plan = planned(tmp_path, make_reward("f", file=file))
        problem = reward_problem(plan.replace(task=plan.task.replace(train_file=None)))
        failed = RewardProblem(
            f"the import of {file} failed: {message}", remedy=REMEDIES["the import of {file} failed"]
        )
        assert problem == (failed if message else None)


def test_rows_of_the_hub_are_graded_once_a_run_has_made_its_data(tmp_path: Path) -> None:
    plan = planned(tmp_path, make_reward("number"))
    files = plan.task_files.replace(train_parquet=str(tmp_path / "train.parquet"))
    plan = plan.replace(task=plan.task.replace(train_file=None), task_files=files)
    assert reward_problem(plan) is None
    made = [parse_row(row | {"answer": "none"}, settings=plan.task) for row in ROWS]
    write_parquet({"train": made}, path=tmp_path / "train.parquet", kind="own")
    message = "the reward `number` failed on the truth of row 1: ValueError: the truth `none` has no number"
    assert reward_problem(plan) == RewardProblem(message)


def test_rows_of_the_hub_that_are_not_graded_are_told(tmp_path: Path) -> None:
    plan = planned(tmp_path, make_reward("exact"))
    from_hub = plan.replace(task=plan.task.replace(train_file=None, data="owner/sums"))
    message = "info: task.data: rewards are not tried on rows of owner/sums before a run has prepared its data"
    hint = "look at its rows with `appliance data preview`; on the rows of a task.train_file rewards are tried at once"

    def findings_of(plan: RunPlan, **facts: object) -> list[tuple[str, str]]:
        findings = judge(plan, host=HOST, inputs=dataclasses.replace(INPUTS, **facts))
        return [(each.text, each.remedy) for each in findings if each.code == "not-scored"]

    assert findings_of(from_hub, has_data=False) == [(message, hint)]
    assert findings_of(from_hub, has_data=True) == findings_of(plan, has_data=False) == []


def test_what_is_found_stands_at_the_rewards(tmp_path: Path) -> None:
    plan = planned(tmp_path, make_reward("exact"))
    for is_rare, severity in ((True, Severity.WARNING), (False, Severity.ERROR)):
        facts = INPUTS.__class__(**{**vars(INPUTS), "reward_problem": RewardProblem("it is odd", is_rare=is_rare)})
        found = [each for each in judge(plan, host=HOST, inputs=facts) if each.code == "reward"]
        assert [(each.severity, each.place, each.message) for each in found] == [
            (severity, "task.rewards", "it is odd")
        ]


def test_code_of_the_model_is_warned_of(tmp_path: Path) -> None:
    def warnings_of(*rewards: Reward) -> list[tuple[Severity, str]]:
        findings = judge(planned(tmp_path, *rewards), host=HOST, inputs=INPUTS)
        return [(each.severity, each.message) for each in findings if each.code == "no-sandbox"]

    message = "`code` runs the programs that the model writes as you: it limits them, and it is no sandbox"
    assert warnings_of(make_reward("code"), make_reward("exact")) == [(Severity.WARNING, message)]
    assert warnings_of(make_reward("code", file="/a/rewards.py"), make_reward("exact")) == []


def test_where_a_judge_is_is_warned_of(tmp_path: Path) -> None:
    judges = [make_reward("judge", url=url, model="m") for url in ("http://b/v1", "http://a/v1", "http://b/v1")]
    plan = planned(tmp_path, *judges, make_reward("judge", file="/a/rewards.py"))
    found = [each for each in judge(plan, host=HOST, inputs=INPUTS) if each.code == "judge"]
    sent = "and the key of APPLIANCE_JUDGE_KEY if it is set"
    assert [each.text for each in found] == [
        f"warning: task.rewards: `judge` sends prompts, truths and responses to {url}, {sent}"
        for url in ("http://a/v1", "http://b/v1")
    ]
