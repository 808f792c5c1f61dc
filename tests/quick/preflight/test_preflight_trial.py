"""Answers that `check` tries rewards on: right ones in the marks that models use, near misses, other rows' truths."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from plans import make_plan, own_plan, reward_plan

from appliance.files import digest_of
from appliance.preflight.inputs import RewardProblem, _own_problem
from appliance.record.plan import CodeFile, RewardPlan
from appliance.tasks import sample
from appliance.tasks.sample import Verdict, judge_sample
from appliance.tasks.task import Reward, Task
from appliance.tasks.trial_answers import in_marks, is_bare, near_misses, other_truth


@pytest.mark.parametrize(
    ("truth", "wrong"),
    [
        ("12", ("13", "112", "-12")),
        ("19", ("10", "119", "-19")),
        ("0", ("1", "10")),
        ("-5", ("-6", "-15", "5")),
        ("3.5", ("3.6", "13.5", "-3.5")),
        ("3.1415927", ("4.1415927", "13.1415927", "-3.1415927")),  # the last digit is within 1e-6 of it
        ("1234567", ("1234568", "11234567", "-1234567")),
        ("\\frac{1}{2}", ("\\frac{1}{3}",)),
        ("x^2+1", ("x^2+2",)),
        ("5 apples", ("6 apples",)),
        ("25\\text{ cm}^2", ("26\\text{ cm}^2",)),
        ("x^{12}", ("x^{13}",)),
        ("50\\%", ("51\\%",)),
        ("A", ("B",)),
        ("(B)", ("(A)",)),
        ("Paris", ("Parit",)),
        ("jazz", ("jaza",)),
        ("北京", ("北亭",)),
        ("?!", ()),
        ('["12", "13"]', ("112", "-12")),
        ("It is 2+3.\n#### 5", ("It is 2+3.\n#### 6",)),
    ],
)
def test_a_near_miss_is_surely_wrong(truth: str, wrong: tuple[str, ...]) -> None:
    if truth == "北京":
        wrong = (f"北{chr(ord('京') + 1)}",)
    assert near_misses(truth) == wrong


@pytest.mark.parametrize(
    ("truth", "others", "other"),
    [
        ("12", ["12", "12.0", "5"], "5"),
        ("12", ["1", "2", "120"], ""),  # a part of it
        ("yes", ["yes", "no"], "no"),
        ("1/2", ["0.5"], ""),  # nobody knows here whether it is the same
        ("A", ["A", "C"], "C"),
        ('["3", "4"]', ['["4", "5"]', "7"], "7"),
        ("5", ["It is 2+3.\n#### 6"], ""),
    ],
)
def test_a_truth_of_another_row_is_surely_wrong(truth: str, others: list[str], other: str) -> None:
    assert other_truth(truth, others) == other


def test_a_right_answer_is_bare_and_then_marked() -> None:
    assert in_marks('["7", "8"]') == (
        *("7", "#### 7", "\\boxed{7}", "\\(\\boxed{7}\\)", "Answer: 7", "**Answer:** 7", "<answer>7</answer>"),
        *("<think>\n\n</think>\n<answer>7</answer>", "```\n7\n```"),
    )
    assert is_bare("7") and not is_bare("so\n#### 7") and not is_bare("Thus \\boxed{7}")


def judged(folder: Path, *rewards: RewardPlan, truths: Sequence[object], program: str = "") -> Verdict:
    folder.mkdir(exist_ok=True)
    file = folder / "d.jsonl"
    rows = ({"prompt": f"{number}?", "answer": truth} for number, truth in enumerate(truths))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code: tuple[CodeFile, ...] = ()
    if program:
        path = folder / "rewards.py"
        path.write_text(program)
        code = (CodeFile(path=str(path), copy_name="rewards.py", sha256=digest_of(path)),)
        rewards = (*rewards, reward_plan("f", file=path))
    own = own_plan(*rewards, truth="answer", code=code)
    plan = make_plan(folder / "runs" / "a-1").task.replace(kind="own", train_file=str(file), own=own)
    verdict = judge_sample(plan)
    assert not verdict.failure, verdict.failure
    return verdict


GOOD = {
    "math": ["12", "\\frac{1}{2}", "x^2+1"],
    "number": ["12", "-3.5", "1,234"],
    "choice": ["A", "(B)", "C."],
    "exact": ["12", "Paris", "so\n#### 5"],
}


@pytest.mark.parametrize("name", GOOD)
def test_rewards_of_ours_read_each_mark_and_give_nothing_to_a_near_miss(tmp_path: Path, name: str) -> None:
    assert judged(tmp_path, reward_plan(name), truths=GOOD[name]) == Verdict(3)
    assert judged(tmp_path, reward_plan(name), truths=[GOOD[name][:2], GOOD[name][2]]) == Verdict(2)


PROGRAMS = {  # of the user's: (program, cannot earn, always earns)
    "equal": ("def f(response, truth): return response == truth", 0, 0),
    "in tags": ("def f(response, truth): return f'<answer>{truth}</answer>' in response", 0, 0),
    "partial credit": (
        "import difflib\ndef f(response, truth): return difflib.SequenceMatcher(None, response, truth).ratio()",
        0,
        0,
    ),
    "a tolerance": (
        "def f(response, truth):\n    try: return abs(float(response) - float(truth)) <= 1\n"
        "    except ValueError: return 0.0",
        0,
        0,
    ),
    "negative": ("def f(response, truth): return 0.0 if response == truth else -1.0", 0, 0),
    "none for others": ("def f(response, truth): return 1.0 if response == truth else None if response else 0.0", 0, 0),
    "raises for others": ("def f(response, truth): return float({truth: 1, '': 0}[response])", 0, 0),
    "contained": ("def f(response, truth): return truth in response", 0, 3),
    "always, but for nothing": ("def f(response, truth): return bool(response)", 0, 3),
    "always": ("def f(response, truth): return 1.0", 3, 0),
    "a stranger to the truth": ("def f(response): return bool(response)", 0, 0),
    "of another case": ("def f(response, truth): return response == truth + '!'", 3, 0),
    "TRL": ("def f(completions, answer, **_): return [float(bool(completions[0]))]", 0, 3),
    "verl": ("def f(data_source, solution_str, ground_truth, extra_info): return bool(solution_str)", 0, 3),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_functions_that_cannot_or_always_earn_are_told_and_no_others(tmp_path: Path, name: str) -> None:
    program, cannot, always = PROGRAMS[name]
    verdict = judged(tmp_path, truths=["12", "5", "703"], program=program)
    assert (verdict.wrong, verdict.easy) == (cannot, always)


def test_a_function_that_compares_with_a_list_as_text_is_told(tmp_path: Path) -> None:
    truths = [["12", "twelve"], ["5", "five"]]
    verdict = judged(tmp_path, truths=truths, program=PROGRAMS["equal"][0])
    assert verdict.first == 'row 1: the truth `["12", "twelve"]` earns 0, an empty response 0'
    of_json = "import json\ndef f(response, truth): return response in json.loads(truth)"
    assert judged(tmp_path / "b", truths=truths, program=of_json) == Verdict(2)


def test_what_is_told_names_the_row(tmp_path: Path) -> None:
    verdict = judged(tmp_path, truths=["12", "5"], program=PROGRAMS["contained"][0])
    assert _own_problem(verdict) == RewardProblem(
        "in 2 of 2 sampled rows a wrong answer earns as much as the right one: "
        "row 1: `112` earns as much as the truth `12`",
        is_rare=True,
        remedy="mend the reward; leave it where such an answer is meant to earn as much",
    )
    verdict = dataclasses.replace(verdict, easy=0, unread=1, first_unread="row 2: `Answer: 5` earns 0")
    found = _own_problem(verdict)
    what = "in 1 of 2 sampled rows the right answer earns nothing in a mark that models use: row 2: `Answer: 5` earns 0"
    assert found is not None and (found.message, found.is_rare) == (what, True)


def test_a_mark_that_a_reward_of_ours_does_not_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "_READ_IN_EVERY_MARK", ("exact",))
    verdict = judged(tmp_path, reward_plan("exact"), truths=["12", "so\n#### 5"])
    assert (verdict.unread, verdict.first_unread) == (1, "row 1: `#### 12` earns 0")


def test_rewards_that_watch_only_or_do_not_judge_are_no_reason(tmp_path: Path) -> None:
    others = (reward_plan("format"), reward_plan("length", target=9), reward_plan("regex", pattern="."))
    assert judged(tmp_path, *others, truths=["1", "2"]) == Verdict(2)
    assert judged(tmp_path, reward_plan("number"), *others, truths=["1", "2"]) == Verdict(2)
    watched = reward_plan("number").replace(weight=0.0)
    assert judged(tmp_path, watched, reward_plan("regex", pattern="."), truths=["1", "2"]).easy == 0


def test_a_truth_that_is_no_single_number_is_told_under_number(tmp_path: Path) -> None:
    rows = ["12", "$1,234.50", "-3", "50%", "7 apples", "so 1 and 2\n#### 5", "1e-5", "3 and 4", "2/3", 9]
    verdict = judged(tmp_path, reward_plan("number"), truths=rows)
    what = "in 1 of 10 rows the truth is no single number, and `number` compares its numbers and nothing else: "
    assert verdict.doubt == f"{what}row 8: `3 and 4`"
    assert judged(tmp_path, reward_plan("math"), truths=rows).doubt == ""


def test_a_task_of_ours_that_takes_a_wrong_answer_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(tmp_path / "runs" / "a-1").task
    assert judge_sample(plan) == Verdict(sample.SAMPLES)
    anything = Reward("arithmetic", 1.0, lambda response: float(bool(response.text)))
    monkeypatch.setattr(Task, "rewards", lambda _: (anything,))
    verdict = judge_sample(plan)
    assert verdict.wrong == sample.SAMPLES and " has 1, where `" in verdict.first
