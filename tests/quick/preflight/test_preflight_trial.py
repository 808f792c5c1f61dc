"""Answers that `check` tries rewards on: right ones in the marks that models use, near misses, other rows' truths."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from plans import make_files, make_own_task, make_plan, make_reward

from appliance.files import digest_of
from appliance.preflight.inputs import RewardProblem, _own_problem
from appliance.record.plan import CodeFile
from appliance.settings import sections
from appliance.tasks import sample
from appliance.tasks.rewards import BUILT_IN
from appliance.tasks.sample import SampleVerdict, judge_sample
from appliance.tasks.task import RewardFunction, TaskDefinition
from appliance.tasks.trial_answers import in_marks, is_bare, near_misses, other_truth

WORKING = "Each costs $0.50, so 3 of them cost 3*.5=$<<3*.5=1.50>>1.50, and 10.75-1.50-2=7.25 are left."


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
        ("It is 2+3.\n#### 5", ("It is 2+3.\n#### 6", "It is 2+3.\n#### 15", "It is 2+3.\n#### -5")),
        (f"{WORKING}\n#### 7.25", (f"{WORKING}\n#### 7.26", f"{WORKING}\n#### 17.25", f"{WORKING}\n#### -7.25")),
        ("So \\boxed{x^2+1}. Done in 2 steps", ("So \\boxed{x^2+2}. Done in 2 steps",)),
        ("#### 5\nthat is 5", ()),  # what is changed is not in the mark
        ("Two and three\nmake 5", ()),
        ("He had 5 apples, bought 3 more, and ate 2 of them, so 6 are left.", ()),
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
        ("1", ["2", "3"], "3"),  # a tolerance of 1 is common
        ("100", ["104", "92", "80", "51"], "51"),
        ("Marie Curie", ["Curie", "Niels Bohr"], "Niels Bohr"),
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


def judged(folder: Path, *rewards: sections.Reward, truths: Sequence[object], program: str = "") -> SampleVerdict:
    folder.mkdir(exist_ok=True)
    file = folder / "d.jsonl"
    rows = ({"prompt": f"{number}?", "answer": truth} for number, truth in enumerate(truths))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code: tuple[CodeFile, ...] = ()
    if program:
        path = folder / "rewards.py"
        path.write_text(program)
        code = (CodeFile(path=str(path), copy_name="rewards.py", sha256=digest_of(path)),)
        rewards = (*rewards, make_reward("f", file=path))
    task = make_own_task(*rewards, truth="answer", train_file=str(file))
    verdict = judge_sample(task, files=make_files(*code))
    assert not verdict.failure, verdict.failure
    return verdict


GOOD = {
    "math": ["12", "\\frac{1}{2}", "x^2+1"],
    "number": ["12", "-3.5", "1,234"],
    "choice": ["A", "(B)", "C."],
    "exact": ["12", "Paris", "so\n#### 5"],
}
SOLUTIONS = [
    f"{WORKING}\n#### 7.25",
    "It is 0.5*20=<<0.5*20=10>>10 dollars a day.\nSo 10*7=<<10*7=70>>70 a week.\n#### 70",
    "We have $1.25+1.25=2.50$ for 2, thus\n$$\\boxed{\\frac{5}{2}}$$",
]


@pytest.mark.parametrize("name", ["math", "number"])
def test_solutions_whose_working_has_decimals_accuse_nobody(tmp_path: Path, name: str) -> None:
    assert judged(tmp_path, make_reward(name), truths=SOLUTIONS) == SampleVerdict(3)


@pytest.mark.parametrize("name", GOOD)
def test_rewards_of_ours_read_each_mark_and_give_nothing_to_a_near_miss(tmp_path: Path, name: str) -> None:
    assert judged(tmp_path, make_reward(name), truths=GOOD[name]) == SampleVerdict(3)
    assert judged(tmp_path, make_reward(name), truths=[GOOD[name][:2], GOOD[name][2]]) == SampleVerdict(2)


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
    "none for others, and nothing for the right one": (
        "def f(response, truth): return 0.0 if response == truth else -1.0 if not response else None",
        0,
        0,
    ),
    "verl": ("def f(data_source, solution_str, ground_truth, extra_info): return bool(solution_str)", 0, 3),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_functions_that_cannot_or_always_earn_are_told_and_no_others(tmp_path: Path, name: str) -> None:
    program, cannot, always = PROGRAMS[name]
    verdict = judged(tmp_path, truths=["12", "5", "703"], program=program)
    assert (verdict.wrong, verdict.easy) == (cannot, always)


WORDS = {  # (program, truths, always earns)
    "as many letters": ("def f(response, truth): return len(response) == len(truth)", ["Oslo", "Rome", "Bern"], 3),
    "the same beginning": ("def f(response, truth): return response[:3] == truth[:3]", ["Oslo", "Rome", "Bern"], 0),
    "fuzzy": (
        "import difflib\ndef f(response, truth): return difflib.SequenceMatcher(None, response, truth).ratio() >= 0.8",
        ["San Marino", "Costa Rica", "Sri Lanka"],
        0,
    ),
}


@pytest.mark.parametrize("name", WORDS)
def test_the_nearest_miss_alone_accuses_no_function(tmp_path: Path, name: str) -> None:
    program, truths, always = WORDS[name]
    verdict = judged(tmp_path, truths=truths, program=program)
    assert (verdict.wrong, verdict.easy) == (0, always), verdict


def test_the_right_answer_of_a_later_row_is_a_wrong_one_too(tmp_path: Path) -> None:
    truths = ["Paris"] * 60 + ["Rome"]
    verdict = judged(tmp_path, truths=truths, program="def f(response, truth): return bool(response)")
    assert (verdict.easy, verdict.first_easy) == (3, "row 1: `Rome` earns as much as the truth `Paris`")


COUNTDOWN = """
import json
def f(response, truth):
    wanted = json.loads(truth)
    return 1.0 if str(wanted["target"]) == response and wanted["numbers"] else PARTIAL if response else 0.0
"""


@pytest.mark.parametrize("partial", ["0.1", "0.0"])
@pytest.mark.parametrize("as_text", [True, False])
def test_a_truth_that_is_an_object_is_no_answer(tmp_path: Path, as_text: bool, partial: str) -> None:
    truths: list[object] = [{"target": number, "numbers": [1, number]} for number in (98, 7, 12)]
    truths = [json.dumps(truth) for truth in truths] if as_text else truths
    assert judged(tmp_path, truths=truths, program=COUNTDOWN.replace("PARTIAL", partial)) == SampleVerdict(3)


def test_a_list_of_numbers_is_for_the_function_to_read(tmp_path: Path) -> None:
    program = "import json\ndef f(response, truth): return response in map(str, json.loads(truth))"
    assert judged(tmp_path, truths=[[12, 13], [5, 6], [7, 8]], program=program) == SampleVerdict(3)


TESTS = ['[{"input": "1", "output": "1"}]', '[{"input": "2", "output": "2"}]']
STYLE = "def f(response, truth, *, row): return -0.1 if len(response) > 20 else 0.0"


def test_beside_code_and_a_judge_nothing_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = judged(tmp_path / "a", truths=TESTS, program=STYLE)
    assert alone.wrong == 0  # JSON of lists of objects is no answer
    assert judged(tmp_path / "b", make_reward("code"), truths=TESTS, program=STYLE) == SampleVerdict(2)
    scored = dataclasses.replace(BUILT_IN["judge"], grade=lambda _, **__: 0.5)
    monkeypatch.setitem(BUILT_IN, "judge", scored)
    judges = make_reward("judge", url="http://127.0.0.1:9/v1", model="m")
    truths = ["Oslo", "Rome"]
    assert judged(tmp_path / "c", truths=truths, program=STYLE).wrong == 2
    assert judged(tmp_path / "d", judges, truths=truths, program=STYLE) == SampleVerdict(2)
    assert judged(tmp_path / "e", judges.replace(weight=0.0), truths=truths, program=STYLE).wrong == 2


def test_a_pattern_and_what_reads_no_truth_are_not_asked_for_it(tmp_path: Path) -> None:
    truths = ["Oslo", "Rome"]
    pattern = make_reward("regex", pattern="^<think>")
    assert judged(tmp_path / "a", pattern, truths=truths) == SampleVerdict(2)
    assert judged(tmp_path / "b", make_reward("regex"), truths=["[A-Z]slo", "[A-Z]ome"]) == SampleVerdict(2)
    assert judged(tmp_path / "c", truths=truths, program="def f(response): return '!' in response") == SampleVerdict(2)


def test_a_reward_that_applies_to_no_right_answer(tmp_path: Path) -> None:
    programs = {"None": 0, "0.0 if not response else None": 2}
    for number, (value, cannot) in enumerate(programs.items()):
        program = f"def f(response, truth): return {value}"
        verdict = judged(tmp_path / str(number), make_reward("length", target=9), truths=["12", "5"], program=program)
        assert verdict.wrong == cannot
        earns = "row 1: the truth `12`, bare and in 8 marks, earns nothing, an empty response 0"
        assert verdict.first == (earns if cannot else "")


def test_of_long_texts_the_part_that_differs_is_shown(tmp_path: Path) -> None:
    program = "def f(response, truth): return response[:50] == truth[:50]"
    verdict = judged(tmp_path, truths=[f"{WORKING}\n#### 7.25", f"{WORKING}\n#### 12"], program=program)
    assert verdict.first_easy == (
        "row 1: `...7.25 are left. #### 17.25` earns as much as the truth `...7.25 are left. #### 7.25`"
    )


def test_a_function_that_compares_with_a_list_as_text_is_told(tmp_path: Path) -> None:
    truths = [["12", "twelve"], ["5", "five"]]
    verdict = judged(tmp_path, truths=truths, program=PROGRAMS["equal"][0])
    assert (
        verdict.first
        == 'row 1: the truth `["12", "twelve"]`, bare and in 8 marks, earns 0 at most, an empty response 0'
    )
    of_json = "import json\ndef f(response, truth): return response in json.loads(truth)"
    assert judged(tmp_path / "b", truths=truths, program=of_json) == SampleVerdict(2)


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
    verdict = judged(tmp_path, make_reward("exact"), truths=["12", "so\n#### 5"])
    assert (verdict.unread, verdict.first_unread) == (1, "row 1: `#### 12` earns 0")


def test_rewards_that_watch_only_or_do_not_judge_are_no_reason(tmp_path: Path) -> None:
    others = (make_reward("format"), make_reward("length", target=9), make_reward("regex", pattern="."))
    assert judged(tmp_path, *others, truths=["1", "2"]) == SampleVerdict(2)
    assert judged(tmp_path, make_reward("number"), *others, truths=["1", "2"]) == SampleVerdict(2)
    watched = make_reward("number").replace(weight=0.0)
    assert judged(tmp_path, watched, make_reward("regex", pattern="."), truths=["1", "2"]).easy == 0


@pytest.mark.parametrize(
    ("body", "is_doubted"),
    [
        ("len(response)", True),
        ("return None", True),
        ("return 0.5 if response else None", False),
        ("return None if truth == '1' else 0", False),
    ],
    ids=str,
)
def test_a_function_that_never_judges_is_named_beside_a_reward_that_does(
    tmp_path: Path, body: str, is_doubted: bool
) -> None:
    program = f"def f(response, truth):\n    {body}\n"
    verdict = judged(tmp_path, make_reward("number"), truths=["1", "2"], program=program)
    doubt = verdict.doubt
    assert verdict.remedy.startswith("return a number") == is_doubted
    meaning = "None means that a reward does not judge a row, and a function without `return` gives it"
    assert doubt == (f"`f` returned None to each of the 2 sampled rows: {meaning}" if is_doubted else "")


@pytest.mark.parametrize(
    ("body", "is_doubted"),
    [("f(response, truth)", True), ("f(response, truth='')", False), ("f(response)", False)],
)
def test_an_empty_truth_is_told_where_a_function_takes_it(tmp_path: Path, body: str, is_doubted: bool) -> None:
    program = f"def {body}:\n    return float('1' in response)\n"
    doubt = judged(tmp_path, make_reward("length", target=4), truths=["1", "1", " ", "1"], program=program).doubt
    assert doubt == ("in 1 of 4 rows the truth is empty, and `f` judges them: row 3" if is_doubted else "")


def test_an_empty_truth_that_a_function_does_not_judge_is_nothing_to_tell(tmp_path: Path) -> None:
    program = "def f(response, truth):\n    return float(truth in response) if truth else None\n"
    judges = make_reward("length", target=4)
    assert judged(tmp_path, judges, truths=["1", "1", "", "1"], program=program).doubt == ""


def test_a_truth_that_is_no_single_number_is_told_under_number(tmp_path: Path) -> None:
    rows = ["12", "$1,234.50", "-3", "50%", "7 apples", "so 1 and 2\n#### 5", "1e-5", "3 and 4", "2/3", 9]
    verdict = judged(tmp_path, make_reward("number"), truths=rows)
    what = "in 1 of 10 rows the truth is no single number, and `number` compares its numbers and nothing else: "
    assert verdict.doubt == f"{what}row 8: `3 and 4`"
    assert judged(tmp_path, make_reward("math"), truths=rows).doubt == ""


def test_a_task_of_ours_that_takes_a_wrong_answer_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(tmp_path / "runs" / "a-1").task
    assert judge_sample(plan, files=make_files()) == SampleVerdict(sample.SAMPLES)
    anything = RewardFunction("arithmetic", 1.0, lambda response: float(bool(response.text)))
    monkeypatch.setattr(TaskDefinition, "rewards", lambda _: (anything,))
    verdict = judge_sample(plan, files=make_files())
    assert verdict.wrong == sample.SAMPLES and " has 1, where `" in verdict.first


@pytest.mark.parametrize(
    ("body", "earns"),
    [
        ("return 1.0", "1"),
        ("return 0.3 + 0 * len(response)", "0.3"),
        ("return 1.0 if len(response) < 100 else 0.0", ""),
        ("return float('<answer>' in response)", ""),
        ("return float('```' not in response)", ""),
        ("return float(response.isascii())", ""),
        ("return 0.0", ""),
        ("return float('<tool>' in response)", ""),  # 0 to all that is tried, and 1 to what it waits for
    ],
    ids=str,
)
def test_a_function_of_the_response_alone_that_never_differs_is_doubted(tmp_path: Path, body: str, earns: str) -> None:
    verdict = judged(tmp_path, truths=["1", "2"], program=f"def f(response):\n    {body}\n")
    doubt = f"each of 8 very different responses to row 1, an empty one too, earns {earns} from `f`"
    assert verdict.doubt == (doubt if earns else "")
    assert ("nothing is learned" in verdict.remedy) == bool(earns)


def test_a_reward_that_only_watches_is_not_asked_for_differences(tmp_path: Path) -> None:
    """It may raise, or cost money."""
    program = "def f(response):\n    return 1.0\ndef g(response):\n    return 1 / (len(response) < 9)\n"
    watching = make_reward("g", file=tmp_path / "rewards.py").replace(weight=0.0)
    assert judged(tmp_path, watching, truths=["1", "2"], program=program).doubt.endswith("earns 1 from `f`")


def test_a_constant_beside_a_reward_that_compares_is_not_doubted(tmp_path: Path) -> None:
    program = "def f(response):\n    return 1.0\n"
    assert judged(tmp_path, make_reward("number"), truths=["1", "2"], program=program).doubt == ""
