"""The rewards `math` and `number`: what a response answers, against a truth, as a careful person grades it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from appliance.tasks.answers import (
    all_boxes,
    answer_text,
    given_alternatives,
    last_sentence,
    marked_answer,
    stated_answer,
    truth_alternatives,
    unmarked_answers,
)
from appliance.tasks.maths import expressions, units, values
from appliance.tasks.maths.english import NO_PART_OF_A_UNIT, words_of
from appliance.tasks.maths.equality import LONGEST_ANSWER, is_same, is_same_node
from appliance.tasks.maths.expressions import Expression, Number, Operation, Symbol, UnreadableError
from appliance.tasks.maths.nodes import Based, Items, Named, Node, Option, Quantity, Words
from appliance.tasks.maths.notation import EUR, GBP, JPY, USD, normal_form
from appliance.tasks.maths.reading import read_answer
from appliance.tasks.task import Response

_TAIL = 1000  # characters of a text in which an unmarked answer is searched


def math(response: Response) -> float:
    """Return 1.0 when the answer is the truth, or one of its alternatives. The answer is what `marked_answer` says,
    else the whole response, else what it ends with. The answer of a truth that is a solution is read the same way."""
    text = answer_text(response.text)
    return float(any(_answers(text, truth=truth) for truth in given_alternatives(response.truth)))


def _answers(text: str, *, truth: str) -> bool:
    expected = all_boxes(truth) or marked_answer(truth) or truth.strip()
    answer = marked_answer(text)
    if answer is not None:
        if expected.rstrip("$ ").endswith("!") and re.search(rf"(?i)\banswer\W*{re.escape(answer)}!\W*\Z", text):
            answer += "!"  # of a truth such as 5! it is a factorial, of any other the end of a sentence
        together = all_boxes(text)
        return is_right(answer, truth=expected) or (together is not None and is_same(together, truth=expected))
    if is_same(text.strip(), truth=expected):
        return True
    if any(is_same(answer, truth=expected) for answer in unmarked_answers(text)):
        return True
    return stated_answer(text[-_TAIL:]) is None and _is_only_number(last_sentence(text), truth=expected)


_STATEMENT = re.compile(  # the words before the number in a sentence that has only this number
    r"(?i)[\w\s,':-]*?\b(?:is|are|was|were|be|equals?|has|have|had|gets?|got|needs?|makes?|made|takes?|took|costs?|earns?|"
    r"earned|pays?|paid|sells?|sold|gives?|contains?|buys?|bought|spends?|spent|saves?|saved|travels|travell?ed|walks|walked|runs|ran|drives|drove|eats|ate|reads|drinks|drank|uses|used|collects|"
    r"collected|receives|received|picks|picked|bakes|baked|wins|won|scores|scored|catches|caught|requires?|weighs|lasts|"
    r"measures|there're|it's)\s+"
    r"(?:(?:exactly|only|just|now|equal\s+to|a\s+total\s+of|in\s+total|still|about|approximately)\s+)*"
    r"(?:USD|EUR|GBP|[-$(\s])*"
)
_IS_LEFT = re.compile(r"[A-Za-z\s]+\b(?:is|are|was|were)\s+(?:left|needed|required|remaining|sold|used)")
_NOT_BEFORE = NO_PART_OF_A_UNIT - {"is", "are", "was", "and", "such", "given", "square", "at", "may", "choose"}
_NOT_BEHIND = (_NOT_BEFORE | {"squared", "cubed"}) - {
    "choose",
    "by",
    "over",
    "up",
    "base",
    "pi",
    "when",
    "where",
    "point",
}


def is_right(answer: str, *, truth: str) -> bool:
    """Tell whether a marked answer is the truth, or a sentence with one number, which is the truth."""
    return is_same(answer, truth=truth) or _is_only_number(answer, truth=truth)


def _is_only_number(answer: str, *, truth: str) -> bool:
    """Tell whether a marked answer in words, such as `There are 7 ways`, has one number, and that is the truth."""
    plain = normal_form(answer[:_TAIL])
    if len(answer) > LONGEST_ANSWER or "\\" in plain or "n't" in plain or not _has_words(read_answer(plain)):
        return False
    numbers = _scanned(plain)
    if len(numbers) != 1:
        return False
    before, behind = plain[: numbers[0][0]], plain[numbers[0][1] :]
    return (
        (_STATEMENT.fullmatch(before) is not None or (not before.strip() and _IS_LEFT.fullmatch(behind) is not None))
        and _NOT_BEFORE.isdisjoint(words_of(before))
        and _NOT_BEHIND.isdisjoint(words_of(behind))
        and len(re.findall(r"\d+", plain)) < 3
        and _is_number_of(numbers[0][2], truth=truth)
    )


def _has_words(node: Node) -> bool:
    return isinstance(node, Words) or (isinstance(node, Items) and any(map(_has_words, node.items)))


def _is_number_of(value: Quantity | Based, *, truth: str) -> bool:
    node = read_answer(normal_form(truth)) if len(truth) <= LONGEST_ANSWER else None
    return isinstance(node, Quantity) and not expressions.symbols(node.expression) and is_same_node(value, node)


# number

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d{1,2}(?:,\d{2})+,\d{3}|\d+)(?:\.\d+)?|\.\d+"
_POWER = r"\s*\^\s*(?:\{\s*-?\d+\s*\}|-?\d+)"
_NUMBER = re.compile(
    rf"""(?<![A-Za-z0-9_.])(?<!\d,)
    (?P<sign>-\s*(?:\(\s*)?)?(?:(?P<money>{USD}|{EUR}|{GBP}|{JPY})\s*)?(?P<inner>-)?
    (?P<value>
      (?:(?:{_DIGITS})\s*)?\\frac\s*(?:\{{\s*-?(?:{_DIGITS})\s*\}}|\d)\s*(?:\{{\s*(?:{_DIGITS})\s*\}}|\d+)
      | \\sqrt\s*(?:\{{\s*(?:{_DIGITS})\s*\}}|{_DIGITS})
      | (?:{_DIGITS})
        (?:\s*\*\s*10{_POWER}|[eE][+-]?\d+(?!\w)|\s*/\s*(?:{_DIGITS})(?!\s*/)|{_POWER}|\s*_\s*\{{?\s*\w+\s*\}}?)?
    )(?P<percent>\s*%)?(?P<multiple>\s*(?:hundred|thousand|million|billion|trillion|dozen)\b|[kKMB](?![A-Za-z0-9]))?""",
    re.VERBOSE,
)
_JOINED = re.compile(r"\s*(?:or|and|to|–|—|-|\+|\*|:|/|;|,\s+(?:or|and)|±)\s*")
_COMMA = re.compile(r"\s*,\s*")
_FACTOR = re.compile(r"[a-fijn-rt-zA-Z](?![A-Za-z°])")  # a letter that is no unit, close to a number
_NEGATED = re.compile(
    r"(?i)(?:\bnot|\bcannot|n't|\bnever|\b(?:more|less|fewer|greater|larger|smaller|higher|lower|other|rather)\s+than|\bat\s+(?:least|most)|"
    r"\babove|\bbelow|\bover|\bunder|\bup\s+to|\balmost|\bnearly)\s*(?:be\s+|equal\s+to\s+|equal\s+)?$|[≠<>≤≥]\s*$"
)
_NEGATED_BEHIND = re.compile(r"(?i)[\s)*]*(?:is|was|would\s+be)\s+(?:wrong|incorrect|not|false|too)\b")
_FOOTNOTE = re.compile(r"\s*\[\d{1,2}\](?=\W*$)")
_SHORT_MULTIPLES = {"k": "thousand", "K": "thousand", "M": "million", "B": "billion"}


def _scanned(text: str) -> list[tuple[int, int, Quantity | Based]]:
    """Return (start, end, value) of each number in a text in the normal form; no exponent or index of a letter or a
    unit."""
    scanned: list[tuple[int, int, Quantity | Based]] = []
    for match in _NUMBER.finditer(text):
        before = text[max(0, match.start() - 2) : match.start()].rstrip(" {-")
        if before.endswith(("^", "_")):
            continue
        node = read_answer(normal_form(match["value"].replace(",", "")))
        sign, start = match["sign"] or match["inner"] or "", match.start()
        if match["sign"] and re.search(r"[\d)\]}]\s*$|[A-Za-z]$", text[max(0, match.start() - 3) : match.start()]):
            sign, start = match["inner"] or "", match.start() + 1  # 5-3: no minus
        if isinstance(node, Quantity):
            value = expressions.negative(node.expression) if sign else node.expression
            multiple = (match["multiple"] or "").strip()
            factor = units.multiple_of((_SHORT_MULTIPLES.get(multiple, multiple),))
            value = Operation("product", (value, Number(Fraction(factor)))) if factor > 1 else value
            value = (
                Number(rational, is_decimal=expressions.has_decimal(value))
                if (rational := _exact(value)) is not None
                else value
            )
            if letter := _FACTOR.match(text, match.end()):
                value = Operation("product", (value, Symbol(letter[0])))  # 5x is no 5
            scanned.append((start, match.end(), Quantity(value, (units.PERCENT,) if match["percent"] else ())))
        elif isinstance(node, Based):
            scanned.append((start, match.end(), node))
    return scanned


def _exact(expression: Expression) -> Fraction | None:
    try:
        return values.exact(expression)
    except UnreadableError:
        return None


_BEGINS_WITH_NUMBER = re.compile(
    r"(?i)(?:about|approximately|exactly|equal\s+to|only|just|negative|minus|now|:|\W)*(?:USD|EUR)?[-$\s\\(]*(?:frac|sqrt|dfrac|tfrac|\$|[\d.½-¾])"
)


def _stated_numbers(plain: str) -> list[Quantity | Based]:
    """Return the first number that a statement begins with, and those that are joined to it; of an equation its side
    that is computed."""
    for side in reversed(plain.split("=")):
        scanned = _scanned(side)
        last = 0
        while last + 1 < len(scanned) and _JOINED.fullmatch(side[scanned[last][1] : scanned[last + 1][0]]):
            last += 1
        if scanned and (last == 0 or "=" not in plain):
            return [value for _, _, value in scanned[: last + 1]]
    return []


def _numbers_of_prose(text: str) -> list[Quantity | Based]:
    """Return the last number of a text, with those that are joined to it: `3 or 4`, `5-3`. Empty where it is denied."""
    stated = stated_answer(text[-_TAIL:])
    if stated and _BEGINS_WITH_NUMBER.match(stated):
        return _stated_numbers(normal_form(stated))
    plain = _FOOTNOTE.sub("", normal_form(text[-_TAIL:]))
    scanned = _scanned(plain)
    if not scanned:
        return next(
            filter(None, (_values(read_answer(normal_form(said)[:LONGEST_ANSWER])) for said in unmarked_answers(text))),
            [],
        )
    first = len(scanned) - 1
    while first and _JOINED.fullmatch(plain[scanned[first - 1][1] : scanned[first][0]]):
        first -= 1
    is_bracketed = plain[scanned[-1][1] :].lstrip()[:1] in (")", "]", "\\", "}")
    while first and is_bracketed and _COMMA.fullmatch(plain[scanned[first - 1][1] : scanned[first][0]]):
        first -= 1
    if _NEGATED.search(plain[: scanned[first][0]]) or _NEGATED_BEHIND.match(plain, scanned[-1][1]):
        return []
    return [value for _, _, value in scanned[first:]]


def _numbers(text: str) -> list[Quantity | Based]:
    """Return all numbers that an answer says: its value where it is one, else each number in its words."""
    plain = normal_form(text[-_TAIL:])
    if len(plain) <= LONGEST_ANSWER:
        node = read_answer(plain)
        if (values := _values(node)) is not None:
            return values
    return [value for _, _, value in _scanned(plain)]


def _values(node: Node) -> list[Quantity | Based] | None:
    """Return the values of an answer; None where it is words; empty where it is a value, but of letters."""
    match node:
        case Quantity():
            return [] if expressions.symbols(node.expression) else [node]
        case Based():
            return [node]
        case Named() | Option():
            return _values(node.value)
        case Items():
            parts = [_values(item) for item in node.items]
            return None if any(part is None for part in parts) else [value for part in parts for value in part or []]
    return None


def _truth_numbers(truth: str) -> list[Quantity | Based]:
    """Read the numbers of the truth. Raises ValueError where it has none."""
    marked = marked_answer(truth)
    for text in ([marked] if marked else []) + [truth]:
        if numbers := _numbers(text):
            return numbers
    raise ValueError(f"the truth `{truth[:60]}` has no number")


def is_single_number(truth: str) -> bool:
    """Tell whether the truth, or each of its alternatives, is one number and nothing else but its unit: `number`
    compares all numbers of any other with as many of the response, whatever else either says."""
    for alternative in truth_alternatives(truth):
        marked = marked_answer(alternative)
        node = read_answer(normal_form(marked or alternative)[:LONGEST_ANSWER])
        numbers = _values(node) if not isinstance(node, Items) else None
        if numbers is None or len(numbers) != 1:
            return False
    return True


def number(response: Response) -> float:
    """Return 1.0 when the number of the response is that of the truth: what a mark marks, else the last number of the
    text. A truth with several numbers needs all of them, in their order. Text around numbers is ignored, units too."""
    alternatives = given_alternatives(response.truth)
    return float(any(_has_numbers(response.text, expected=_truth_numbers(truth)) for truth in alternatives))


def _has_numbers(text: str, *, expected: Sequence[Quantity | Based]) -> bool:
    text = answer_text(text)
    marked = marked_answer(text)
    if marked is not None:
        numbers = _marked_numbers(marked)
    elif len(expected) == 1:
        numbers = _numbers_of_prose(text)
    else:
        numbers = [value for _, _, value in _scanned(normal_form(text[-_TAIL:]))][-len(expected) :]
    return len(numbers) == len(expected) and all(map(_is_same_number, numbers, expected))


def _marked_numbers(marked: str) -> list[Quantity | Based]:
    plain = normal_form(marked[-_TAIL:])
    if len(plain) <= LONGEST_ANSWER and (values := _values(read_answer(plain))) is not None:
        return values
    return _numbers_of_prose(marked)


def _is_same_number(answer: Quantity | Based, expected: Quantity | Based) -> bool:
    if not (isinstance(answer, Quantity) and isinstance(expected, Quantity)):
        return answer == expected
    if units.are_different_measures(answer.unit, expected.unit):
        return False
    plain = [Quantity(value.expression, tuple(set(value.unit) & {units.PERCENT})) for value in (answer, expected)]
    return is_same_node(plain[0], plain[1])
