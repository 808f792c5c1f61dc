"""Answers that rewards are tried on before a run: right ones in the marks that models use, and wrong ones near by."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal

from appliance.tasks.answers import marked_answer, truth_alternatives

_MARKS = (
    "#### {}",
    "\\boxed{{{}}}",
    "\\(\\boxed{{{}}}\\)",
    "Answer: {}",
    "**Answer:** {}",
    "<answer>{}</answer>",
    "<think>\n\n</think>\n<answer>{}</answer>",
    "```\n{}\n```",
)
_LONGEST = 60  # characters of a truth that is an answer, and no solution that ends with one
_NUMBER = re.compile(r"(-?)(\d+)(\.\d+)?")
_WORDS = re.compile(r"[^\W\d]+(?:[ '-][^\W\d]+)*")
_MOST_DIGITS = 5  # of a decimal that differs from one with another last digit: rewards compare to 1e-6
_LETTERS = "ABCDE"


def in_marks(truth: str) -> tuple[str, ...]:
    """Return a right answer bare, then in each mark; of several right answers the first."""
    answer = truth_alternatives(truth)[0]
    return answer, *(mark.format(answer) for mark in _MARKS)


def first_right(
    answers: Iterable[str],
    *,
    ask: Callable[[str], float],
    above: float,
    before_marked: Callable[[], None] = lambda: None,
) -> tuple[int, float]:
    """Find the first answer that earns more than `above`, else the best one. Returns its place and what it earns.

    answers: bare, then marked.  ask: what a text earns.  before_marked: called before each marked one is tried.
    """
    best, best_place = -math.inf, 0
    for place, text in enumerate(answers):
        if place:
            before_marked()
        if (earned := ask(text)) > best:
            best, best_place = earned, place
        if best > above:
            break
    return best_place, best


def wrong_answers(truth: str, truths: Iterable[str]) -> list[str]:
    """List the near misses, the nearest first, and a right answer of another row. truths: of other rows."""
    other = other_truth(truth, truths)
    return [*near_misses(truth), *([other] if other else [])]


def is_bare(truth: str) -> bool:
    """Tell whether a truth is an answer and nothing else, which fits into any mark."""
    answer = truth_alternatives(truth)[0]
    marks = ("####", "\\boxed", "<answer", "```", "nswer:")
    return len(answer) <= _LONGEST and "\n" not in answer and not any(mark in answer for mark in marks)


def near_misses(truth: str) -> tuple[str, ...]:
    """Make wrong answers that look like a right one: another last digit, a digit more, the other sign, another letter.
    Of a solution they are the solution with another answer in its mark; without a mark nobody knows what its answer
    is."""
    alternatives = truth_alternatives(truth)
    answer = alternatives[0]
    if not is_bare(truth):
        return tuple(text for text in _with_other_answers(answer) if text not in alternatives)
    if re.fullmatch(r"\(?[A-J]\)?\.?", answer.strip()):
        letter, right = answer.strip("(). "), "".join(alternatives)
        wrong = [answer.replace(letter, other) for other in _LETTERS if other not in right][:1]
    elif number := _NUMBER.fullmatch(answer.strip()):
        sign, whole, fraction = number.groups()
        wrong = [_with_another_digit(answer.strip()), f"{sign}1{whole}{fraction or ''}"]
        if Decimal(answer.strip()):
            wrong.append(f"{'' if sign else '-'}{whole}{fraction or ''}")
    else:
        wrong = [_with_another_digit(answer)]
    return tuple(text for text in wrong if text and text not in alternatives)


def _with_other_answers(solution: str) -> Iterator[str]:
    marked = marked_answer(solution) or ""
    before, _, behind = solution.rpartition(marked) if is_bare(marked) and marked else ("", "", "")
    for miss in near_misses(marked) if before else ():
        changed = f"{before}{miss}{behind}"
        if marked_answer(changed) == miss:  # the mark contains it, and not what follows the mark
            yield changed


def other_truth(truth: str, truths: Iterable[str]) -> str:
    """Find a right answer of another row that is surely wrong for this one; empty where there is none."""
    alternatives = [_plain(text) for text in truth_alternatives(truth)]
    for other in truths:
        text = truth_alternatives(other)[0]
        plain = _plain(text)
        if (
            is_bare(other)
            and plain
            and not any(plain in one or one in plain for one in alternatives)
            and _differ(text, truth)
        ):
            return text
    return ""


def _plain(text: str) -> str:
    return re.sub(r"[\W_]", "", text).lower()


def _differ(answer: str, truth: str) -> bool:
    """Say of two numbers that no tolerance can make them the same; words differ; of anything else nothing is known, as
    of 1/2 and 0.5."""
    texts = [text.strip() for text in (answer, *truth_alternatives(truth))]
    if all(map(_WORDS.fullmatch, texts)):
        return True
    if not all(map(_NUMBER.fullmatch, texts)):
        return False
    number, *rights = map(Decimal, texts)
    return all(abs(number - right) > max(Decimal(1), abs(number) / 4, abs(right) / 4) for right in rights)


def _with_another_digit(answer: str) -> str:
    """Return the last digit changed; of a decimal of many digits the first; the last letter where there are no digits.
    Empty where there are neither."""
    digits = [place for place, character in enumerate(answer) if character in "0123456789"]
    raised = [place for place in digits if re.search(r"[\^_]\{?\d*$", answer[:place])]  # of a unit, such as cm^2
    if digits := [place for place in digits if place not in raised] or raised:
        is_long = "." in answer and len(digits) > _MOST_DIGITS
        place = digits[0] if is_long else digits[-1]
        return f"{answer[:place]}{(int(answer[place]) + 1) % 10}{answer[place + 1 :]}"
    letters = [place for place, character in enumerate(answer) if character.isalpha()]
    if not letters:
        return ""
    letter = answer[letters[-1]]
    other = {"z": "a", "Z": "A"}.get(letter, chr(ord(letter) + 1))
    return f"{answer[: letters[-1]]}{other}{answer[letters[-1] + 1 :]}"
