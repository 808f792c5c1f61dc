"""The first problems of a recipe's data go through its reward before anything starts."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from plans import make_files, make_plan

from appliance.preflight import inputs as sampling
from appliance.preflight.inputs import RewardProblem, reward_problem
from appliance.record.plan import RunPlan
from appliance.settings.sections import Task
from appliance.tasks.sample import SAMPLES, SampleVerdict, judge_sample

WRONG = "what }\nno mark reads"  # a line of an answer ends it, and a brace ends a box


def task_of(kind: str, file: Path | None = None) -> Task:
    return make_plan(Path("/runs/a-1")).task.replace(kind=kind, train_file=str(file) if file else None)


def rows(file: Path, *made: dict[str, str]) -> Path:
    file.write_text("".join(json.dumps(each) + "\n" for each in made))
    return file


def math_rows(*answers: str) -> tuple[dict[str, str], ...]:
    return tuple({"problem": f"problem {number}", "answer": each} for number, each in enumerate(answers))


def test_arithmetic_grades_its_own_problems() -> None:
    assert judge_sample(task_of("arithmetic"), files=make_files()) == SampleVerdict(SAMPLES, 0, "")


def test_gsm8k_grades_the_first_rows(tmp_path: Path) -> None:
    made = [{"question": f"{number} + 1?", "answer": f"so #### {number + 1:,}"} for number in range(1234, 1250)]
    file = rows(tmp_path / "d.jsonl", *made)
    assert judge_sample(task_of("gsm8k", file), files=make_files()) == SampleVerdict(SAMPLES, 0, "")


def test_mathematics_is_graded_as_such(tmp_path: Path) -> None:
    file = rows(tmp_path / "d.jsonl", *math_rows("34", "\\frac{1}{2}", "x^2+1"))
    assert judge_sample(task_of("dapo-math", file), files=make_files()) == SampleVerdict(3, 0, "")


def test_an_answer_of_several_lines_is_right_in_a_box(tmp_path: Path) -> None:
    file = rows(tmp_path / "d.jsonl", *math_rows("\\begin{pmatrix}1\n2\\end{pmatrix}"))
    assert judge_sample(task_of("dapo-math", file), files=make_files()) == SampleVerdict(1, 0, "")


def test_an_answer_that_can_never_be_right_is_told(tmp_path: Path) -> None:
    file = rows(tmp_path / "d.jsonl", *math_rows("34", WRONG))
    assert judge_sample(task_of("dapo-math", file), files=make_files()) == SampleVerdict(
        2, 1, f"the right answer `{WRONG[:60]}` has 0, not 1"
    )


def planned(tmp_path: Path, kind: str, file: Path | None, **changes: object) -> RunPlan:
    plan = make_plan(tmp_path / "runs" / "a-1")
    task = plan.task.replace(kind=kind, train_file=str(file) if file else None, **changes)
    return plan.replace(task=task)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answers", "share", "is_rare"),
    [(("34",), "", False), (("34", WRONG), "1 of 2", True), (("34", WRONG, WRONG), "2 of 3", False)],
)
def test_a_plan_is_graded_in_a_child(tmp_path: Path, answers: tuple[str, ...], share: str, is_rare: bool) -> None:
    file = rows(tmp_path / "d.jsonl", *math_rows(*answers))
    found = reward_problem(planned(tmp_path, "dapo-math", file))
    message = f"{share} sampled rewards are wrong: the right answer `{WRONG[:60]}` has 0, not 1"
    assert found == (RewardProblem(message, is_rare=is_rare) if share else None)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("print('a library says hello')", None),
        (
            "import atexit; atexit.register(print, 'a library says goodbye')",
            None,
        ),
        ("import os; os.write(1, bytes([255, 10])); os.write(2, bytes([255, 10]))", None),
    ],
)
def test_what_a_library_prints_in_the_child_is_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, message: str | None
) -> None:
    (tmp_path / "sitecustomize.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    found = reward_problem(planned(tmp_path, "arithmetic", None))
    assert found == (RewardProblem(message) if message else None)


def test_a_file_of_the_current_folder_takes_no_place_of_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "random.py").write_text("raise RuntimeError('imported')")
    monkeypatch.chdir(tmp_path)
    assert reward_problem(planned(tmp_path, "arithmetic", None)) is None


def test_a_path_that_is_not_ascii_is_read_whatever_pythons_encoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    file = rows(tmp_path / "дані.jsonl", {"question": "1 + 1?", "answer": "#### 2"})
    assert reward_problem(planned(tmp_path, "gsm8k", file)) is None


def test_data_that_is_not_here_yet_is_not_graded(tmp_path: Path) -> None:
    assert reward_problem(planned(tmp_path, "gsm8k", None)) is None


def test_a_reward_function_that_raises_is_told(tmp_path: Path) -> None:
    """Problems that cannot be made stand in for a reward that fails."""
    found = reward_problem(planned(tmp_path, "word-problems", None, difficulty=5))
    message = "the rewards of the first problems: its process ended with 1: "
    assert found is not None and found.message.startswith(message) and "task.difficulty: 5" in found.message


def test_a_reward_function_that_hangs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_STARTS_WITHIN_S", 0.0)
    found = reward_problem(planned(tmp_path, "arithmetic", None, reward_timeout_s=0.001))
    remedy = "mend what takes so long, or raise task.reward_timeout_s"
    assert found == RewardProblem("the rewards of the first problems: no end after 0.001 s", remedy=remedy)
