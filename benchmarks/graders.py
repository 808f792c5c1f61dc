"""Which answers graders reward: `python -m benchmarks.graders FILE... [-o FOLDER]`. Ours beside those that others use.

Each FILE has answers: a TSV as in tests/quick/tasks/grades (what, reward, truth, response, grade), of which the lines
of `math` count, or JSON lines with `truth`, `response` and, where it is known, `grade`. Of each grader: right answers
that earn nothing, wrong answers that earn 1, milliseconds a grade; where no grade is known, how many earn and how many
of these are graded otherwise by ours. A grader that raises an error counts as 0. mathruler is measured where it can
be imported. Into FOLDER goes `graders.json`.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from appliance import console
from appliance.tasks.graders import math
from appliance.tasks.task import Response

Grade = Callable[[str, str], bool]
"""(truth, response)"""


@dataclass(frozen=True)
class Answer:
    truth: str
    response: str
    grade: int | None


@dataclass(frozen=True)
class Result:
    """Of one grader on one file."""

    file: str
    grader: str
    answers: int
    earned: int
    wrong_that_earn: int
    right_that_do_not: int
    unlike_ours: int
    ms_each: float


def read_answers(path: Path) -> Iterator[Answer]:
    with path.open(encoding="utf-8", newline="") as file:
        if path.suffix == ".tsv":
            for line in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
                if line["reward"] == "math":
                    yield Answer(line["truth"], line["response"], int(line["grade"]))
            return
        for text in file:
            row = json.loads(text)
            yield Answer(row["truth"], row["response"], row.get("grade"))


def ours(truth: str, response: str) -> bool:
    return math(Response(text=response, truth=truth)) == 1.0


def math_verifys(truth: str, response: str) -> bool:
    from math_verify import parse, verify

    return bool(verify(parse(f"\\boxed{{{truth}}}", parsing_timeout=5), parse(response, parsing_timeout=5)))


def verls_gsm8k(truth: str, response: str) -> bool:
    from verl.utils.reward_score import gsm8k

    return gsm8k.compute_score(response, truth, method="flexible") == 1.0


def verls_math(truth: str, response: str) -> bool:
    from verl.utils.reward_score import math_reward

    return math_reward.compute_score(response, truth) == 1.0


def verls_dapo(truth: str, response: str) -> bool:
    from verl.utils.reward_score import math_dapo

    return bool(math_dapo.compute_score(response, truth, strict_box_verify="\\boxed" in response)["acc"])


def verls_prime(truth: str, response: str) -> bool:
    from verl.utils.reward_score import prime_math

    return bool(prime_math.compute_score(response, truth)[0])


def mathrulers(truth: str, response: str) -> bool:
    from mathruler.grader import extract_boxed_content, grade_answer

    return bool(grade_answer(extract_boxed_content(response), truth))


def graders() -> dict[str, Grade]:
    others: dict[str, Grade] = {
        "ours": ours,
        f"math-verify {importlib.metadata.version('math-verify')}": math_verifys,
        "verl gsm8k (flexible)": verls_gsm8k,
        "verl math_reward": verls_math,
        "verl math_dapo": verls_dapo,
        "verl prime_math": verls_prime,
    }
    try:
        others[f"mathruler {importlib.metadata.version('mathruler')}"] = mathrulers
    except importlib.metadata.PackageNotFoundError:
        console.say("mathruler is not here: not measured")
    return others


def grade_all(grade: Grade, answers: list[Answer]) -> tuple[list[bool], float]:
    """(grades, milliseconds each)"""
    grades = []
    started_s = time.perf_counter()
    for answer in answers:
        try:
            grades.append(grade(answer.truth, answer.response))
        except Exception:  # of a library that is measured: it gives no grade
            grades.append(False)
    return grades, (time.perf_counter() - started_s) / max(1, len(answers)) * 1e3


def measure(path: Path) -> list[Result]:
    answers = list(read_answers(path))
    results: list[Result] = []
    first_grades: list[bool] = []
    for name, grade in graders().items():
        grade_all(grade, answers[:2])  # its imports
        grades, ms_each = grade_all(grade, answers)
        first_grades = first_grades or grades
        graded = list(zip(answers, grades, first_grades, strict=True))
        results.append(
            Result(
                file=path.stem,
                grader=name,
                answers=len(answers),
                earned=sum(grades),
                wrong_that_earn=sum(earns and answer.grade == 0 for answer, earns, _ in graded),
                right_that_do_not=sum(not earns and answer.grade == 1 for answer, earns, _ in graded),
                unlike_ours=sum(earns != ours_earns for _, earns, ours_earns in graded),
                ms_each=round(ms_each, 2),
            )
        )
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("-o", "--output", type=Path, help="folder for graders.json")
    arguments = parser.parse_args()
    results = [result for path in arguments.files for result in measure(path)]
    header = "| answers | grader | number | earn | wrong that earn | right that do not | unlike ours | ms each |"
    lines = [
        f"| {each.file} | {each.grader} | {each.answers} | {each.earned} | {each.wrong_that_earn} | "
        f"{each.right_that_do_not} | {each.unlike_ours} | {each.ms_each:g} |"
        for each in results
    ]
    console.out("\n".join([header, "| --- | --- | --- | --- | --- | --- | --- | --- |", *lines]))
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        text = json.dumps([asdict(result) for result in results], indent=1)
        (arguments.output / "graders.json").write_text(text + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
