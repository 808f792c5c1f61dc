"""The first problems of a recipe's data go through its reward before anything starts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from plans import make_plan

from appliance.plan.model import RunPlan
from appliance.preflight import sample as sampling
from appliance.preflight.sample import reward_problem
from appliance.tasks.sample import SAMPLES, Sample, problem_of, sampled


def of(kind: str, file: Path | None = None) -> Sample:
    return Sample(kind, file=str(file or ""), difficulty=2, seed=0)


def rows(file: Path, *made: dict[str, str]) -> Path:
    file.write_text("".join(json.dumps(each) + "\n" for each in made))
    return file


def math_rows(*answers: str) -> tuple[dict[str, str], ...]:
    return tuple({"problem": f"problem {number}", "answer": each} for number, each in enumerate(answers))


def test_arithmetic_grades_its_own_problems() -> None:
    assert len(sampled(of("arithmetic"))) == SAMPLES
    assert problem_of(of("arithmetic")) == ""


def test_gsm8k_grades_the_first_rows(tmp_path: Path) -> None:
    made = [{"question": f"{number} + 1?", "answer": f"so #### {number + 1:,}"} for number in range(1234, 1250)]
    file = rows(tmp_path / "d.jsonl", *made)
    assert len(sampled(of("gsm8k", file))) == SAMPLES
    assert problem_of(of("gsm8k", file)) == ""


def test_mathematics_is_graded_as_such(tmp_path: Path) -> None:
    assert problem_of(of("dapo-math", rows(tmp_path / "d.jsonl", *math_rows("34", "\\frac{1}{2}", "x^2+1")))) == ""


def test_an_answer_that_can_never_be_right_is_told(tmp_path: Path) -> None:
    """The reward reads answers of up to 300 characters."""
    file = rows(tmp_path / "d.jsonl", *math_rows("34", "x" * 301))
    assert problem_of(of("dapo-math", file)) == (
        f"1 of 2 sampled rewards are wrong: the right answer `{'x' * 60}` has 0, not 1"
    )


def planned(tmp_path: Path, kind: str, file: Path | None, **changes: object) -> RunPlan:
    plan = make_plan(tmp_path / "runs" / "a-1")
    task = dataclasses.replace(plan.task, kind=kind, train_file=str(file or ""), **changes)
    return dataclasses.replace(plan, task=task)


@pytest.mark.parametrize(("answers", "has"), [(("34",), ""), (("x" * 301,), "1 of 1 sampled rewards are wrong: ")])
def test_a_plan_is_graded_in_a_child(tmp_path: Path, answers: tuple[str, ...], has: str) -> None:
    file = rows(tmp_path / "d.jsonl", *math_rows(*answers))
    found = reward_problem(planned(tmp_path, "dapo-math", file))
    assert found.startswith(has) and bool(found) is bool(has)


def test_data_that_is_not_here_yet_is_not_graded(tmp_path: Path) -> None:
    assert reward_problem(planned(tmp_path, "gsm8k", None)) == ""


def test_a_reward_function_that_raises_is_told(tmp_path: Path) -> None:
    """Problems that cannot be made stand in for a reward that fails."""
    found = reward_problem(planned(tmp_path, "arithmetic", None, difficulty=99))
    assert found.startswith("the reward function failed: ") and "99" in found


def test_a_reward_function_that_hangs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_STARTS_WITHIN_S", 0.0)
    found = reward_problem(planned(tmp_path, "arithmetic", None, reward_timeout_s=0.001))
    assert found == "no reward of the first problems after 0.001 s"
