"""The rewards `math`, `number` and `choice`: what a response answers, against a truth, as a careful person grades it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from appliance.tasks import expressions, units
from appliance.tasks.answers import all_boxes, marked_answer, truth_alternatives, unmarked_answers
from appliance.tasks.equality import (
    LONGEST_ANSWER,
    Based,
    Items,
    Named,
    Node,
    Option,
    Quantity,
    is_same,
    is_same_node,
    prepare,
    read_answer,
)
from appliance.tasks.notation import EUR, GBP, JPY, USD, normal_form
from appliance.tasks.task import Response


def given_alternatives(truth: str) -> tuple[str, ...]:
    """The alternatives of a truth that is there. Raises ValueError where the row has none."""
    if not truth.strip():
        raise ValueError("the row has no truth to compare with: task.truth names its field")
    return truth_alternatives(truth)


def math(response: Response) -> float:
    """1.0 when the answer is the truth, or one of its alternatives. The answer is what `marked_answer` says, else the
    whole response, else what it ends with. Of a truth that is a solution it is read the same way."""
    alternatives = given_alternatives(response.truth)
    return float(any(_answers(response.text, truth=truth) for truth in alternatives))


def _answers(text: str, *, truth: str) -> bool:
    wanted = all_boxes(truth) or marked_answer(truth) or truth.strip()
    answer = marked_answer(text)
    if answer is not None:
        if is_same(answer, truth=wanted):
            return True
        together = all_boxes(text)
        return together is not None and is_same(together, truth=wanted)
    if is_same(text.strip(), truth=wanted):
        return True
    if any(is_same(answer, truth=wanted) for answer in unmarked_answers(text)):
        return True
    numbers = _numbers_of_prose(text)
    node = read_answer(normal_form(wanted)) if len(wanted) <= LONGEST_ANSWER else None
    return len(numbers) == 1 and isinstance(node, Quantity) and is_same_node(numbers[0], node)


# number

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d{1,2}(?:,\d{2})+,\d{3}|\d+)(?:\.\d+)?|\.\d+"
_POWER = r"\s*\^\s*(?:\{\s*-?\d+\s*\}|-?\d+)"
_NUMBER = re.compile(
    rf"""(?<![\w.])(?<!\d,)
    (?P<sign>-\s*)?(?:(?P<money>{USD}|{EUR}|{GBP}|{JPY})\s*)?(?P<inner>-)?
    (?P<value>
      (?:(?:{_DIGITS})\s*)?\\frac\s*(?:\{{\s*-?(?:{_DIGITS})\s*\}}|\d)\s*(?:\{{\s*(?:{_DIGITS})\s*\}}|\d+)
      | \\sqrt\s*(?:\{{\s*(?:{_DIGITS})\s*\}}|{_DIGITS})
      | (?:{_DIGITS})(?:\s*\*\s*10{_POWER}|[eE][+-]?\d+(?!\w)|\s*/\s*(?:{_DIGITS})(?!\s*/)|{_POWER}|!(?=\W*$)|\s*_\s*\{{?\s*\w+\s*\}}?)?
    )(?P<percent>\s*%)?""",
    re.VERBOSE,
)
_JOINED = re.compile(r"\s*(?:or|and|to|–|—|-|\+|\*|:|/|;|,\s+(?:or|and)|±)\s*")
_COMMA = re.compile(r"\s*,\s*")
_NEGATED = re.compile(r"(?i)\b(?:not|n't|never)\s*(?:be\s+|equal\s+to\s+|equal\s+)?$|≠\s*$")


def _scanned(text: str) -> list[tuple[int, int, Quantity | Based]]:
    """(start, end, value) of each number in a text in the normal form; no exponent or index of a letter or a unit."""
    scanned: list[tuple[int, int, Quantity | Based]] = []
    for found in _NUMBER.finditer(text):
        before = text[max(0, found.start() - 2) : found.start()].rstrip(" {-")
        if before.endswith(("^", "_")):
            continue
        node = read_answer(found["value"].replace(",", ""))
        sign, start = found["sign"] or found["inner"] or "", found.start()
        if found["sign"] and re.search(r"[\d)\]}]\s*$|[A-Za-z]$", text[max(0, found.start() - 3) : found.start()]):
            sign, start = found["inner"] or "", found.start() + 1  # 5-3: no minus
        if isinstance(node, Quantity):
            value = expressions.negative(node.expression) if sign else node.expression
            scanned.append((start, found.end(), Quantity(value, (units.PERCENT,) if found["percent"] else ())))
        elif isinstance(node, Based):
            scanned.append((start, found.end(), node))
    return scanned


def _numbers_of_prose(text: str, *, tail: int = 1000) -> list[Quantity | Based]:
    """The last number of a text, with those that are joined to it: `3 or 4`, `5-3`. Empty where it is denied."""
    plain = normal_form(text[-tail:])
    scanned = _scanned(plain)
    if not scanned:
        return []
    first = len(scanned) - 1
    while first and _JOINED.fullmatch(plain[scanned[first - 1][1] : scanned[first][0]]):
        first -= 1
    if _NEGATED.search(plain[: scanned[first][0]]):
        return []
    return [value for _, _, value in scanned[first:]]


def _numbers(text: str) -> list[Quantity | Based]:
    """All numbers that an answer says: its value where it is one, else each number in its words."""
    plain = normal_form(text)
    if len(plain) <= LONGEST_ANSWER:
        node = read_answer(plain)
        if (values := _values(node)) is not None:
            return values
    return [value for _, _, value in _scanned(plain)]


def _values(node: Node) -> list[Quantity | Based] | None:
    """None where it is words; empty where it is a value, but of letters."""
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
    """Raises ValueError where the truth has no number."""
    marked = marked_answer(truth)
    for text in ([marked] if marked else []) + [truth]:
        if numbers := _numbers(text):
            return numbers
    raise ValueError(f"the truth `{truth[:60]}` has no number")


def read_numbers(truth: str) -> None:
    """Raises ValueError where an alternative of the truth has no number, or the row has no truth."""
    for alternative in given_alternatives(truth):
        _truth_numbers(alternative)


def is_single_number(truth: str) -> bool:
    """Whether the truth, or each of its alternatives, is one number and nothing else but its unit: `number` compares all
    numbers of any other with as many of the response, whatever else either says."""
    for alternative in truth_alternatives(truth):
        marked = marked_answer(alternative)
        node = read_answer(normal_form(marked or alternative)[:LONGEST_ANSWER])
        values = _values(node) if not isinstance(node, Items) else None
        if values is None or len(values) != 1:
            return False
    return True


def number(response: Response) -> float:
    """1.0 when the number of the response is that of the truth: what a mark marks, else the last one of the text. Of a
    truth with several numbers all of them, in their order. What stands around numbers is ignored, units too."""
    alternatives = given_alternatives(response.truth)
    return float(any(_has_numbers(response.text, wanted=_truth_numbers(truth)) for truth in alternatives))


def _has_numbers(text: str, *, wanted: Sequence[Quantity | Based]) -> bool:
    marked = marked_answer(text)
    if marked is not None and (given := _marked_numbers(marked)):
        pass
    elif len(wanted) == 1:
        given = _numbers_of_prose(text)
    else:
        given = [value for _, _, value in _scanned(normal_form(text[-1000:]))][-len(wanted) :]
    return len(given) == len(wanted) and all(map(_is_same_number, given, wanted))


def _marked_numbers(marked: str) -> list[Quantity | Based]:
    plain = normal_form(marked)
    if len(plain) <= LONGEST_ANSWER and (values := _values(read_answer(plain))) is not None:
        return values
    return _numbers_of_prose(marked)


def _is_same_number(given: Quantity | Based, wanted: Quantity | Based) -> bool:
    if not (isinstance(given, Quantity) and isinstance(wanted, Quantity)):
        return given == wanted
    if units.are_different_measures(given.unit, wanted.unit):
        return False
    plain = [Quantity(value.expression, tuple(set(value.unit) & {units.PERCENT})) for value in (given, wanted)]
    return is_same_node(plain[0], plain[1])


# choice

_SPEAKER = r"I(?:['\u2019][a-z]|[ \t]+(?!(?:is|was|because|since|as|and|or|for|with|which)\b)[a-z])"
_LETTER = rf"[*(\[{{\s\"']*(?!{_SPEAKER})([A-J])(?![A-Za-z'])"
_SAYS = r"(?:answer|choice|option)"
_CHOSEN = re.compile(
    rf"(?:(?i:{_SAYS})(?i:\s+(?:is|would\s+be|must\s+be|should\s+be))?[*_ \t]*:?[*_]*|<answer>|####)"
    rf"(?:[ \t\n]*(?i:option|choice|answer))?[ \t\n]*{_LETTER}"
)
_ALONE = re.compile(r"(?m)^[*(\[\s]*([A-J])[*)\].:\s]*$")
_BRACKETED = re.compile(r"\(([A-J])\)(?!\s*(?:is|was|are)\s+(?:wrong|incorrect|not|false|eliminated|ruled|impossible|out))")
_DENIED = re.compile(
    r"(?i)(?:\bnot|n't|n’t|\bneither|\bnor|\bexcept|\bwrong|\bincorrect|\beliminate\w*|\bexclude\w*|\brules? out|\brather than|"
    r"\binstead of)\s*(?:is|be|by|:|the|answer|choice|option|with|\s)*[\s*(]*$"
)
_ANOTHER = re.compile(r"[\s*)\]}.\"']*(?:,?\s*(?:or|and)\b|[,/&;])\s*(?i:option|choice)?[\s*(\[{]*[A-J](?![A-Za-z'])")


def read_letter(truth: str) -> str:
    """The letter, A to J, that a truth is. Raises ValueError where it is none."""
    plain = normal_form(marked_answer(truth) or truth)
    found = re.fullmatch(r"(?i)[*\s]*\(?\s*([A-J])\s*\)?[.:*\s]*(?:(?<=[).:*\s])\S.*)?", plain)
    letter = found[1].upper() if found and (len(plain) < 6 or re.match(r"\(?[A-Za-z]\s*[).:]", plain)) else ""
    if not letter:
        raise ValueError(f"the truth `{truth[:60]}` is not a letter from A to J")
    return letter


def read_letters(truth: str) -> None:
    """Raises ValueError where an alternative of the truth is no letter from A to J, or the row has no truth."""
    for alternative in given_alternatives(truth):
        read_letter(alternative)


def choice(response: Response) -> float:
    """1.0 when the letter that is chosen last, A to J, is the truth: in a mark of an answer or after `answer is`; else
    alone on a line; else in brackets. The I of who speaks, as in `the answer I get`, is none; two letters, as in
    `A or B`, are no choice, and one that is denied is none."""
    wanted = {read_letter(truth) for truth in given_alternatives(response.truth)}
    return float(_chosen_letter(response.text) in wanted)


def _chosen_letter(text: str) -> str:
    """Empty where none is chosen."""
    marked = marked_answer(text)
    if marked is not None and (letter := _marked_letter(marked)) is not None:
        return letter
    plain = normal_form_of_lines(text)
    for pattern in (_CHOSEN, _ALONE, _BRACKETED):
        found = [
            letter for letter in pattern.finditer(plain) if not _DENIED.search(plain[max(0, letter.start(1) - 40) : letter.start(1)])
        ]
        if found:
            return "" if _ANOTHER.match(plain, found[-1].end(1)) else found[-1][1]
    return ""


def normal_form_of_lines(text: str) -> str:
    """Each of the last lines in the normal form."""
    return "\n".join(normal_form(line) for line in text[-20_000:].splitlines())


_ONE_LETTER = re.compile(r"[*\s\"']*\(?\[?\s*([A-Ja-j])\s*[)\]]?(?:[.:,*\"'\s]*|(?:\s*[.:)]|(?<=\)))\s*\S.*)")
_SPOKEN = re.compile(rf"{_SPEAKER}")


def _marked_letter(marked: str) -> str | None:
    """Of what a mark marks: the letter, empty where it says another thing; None where it is prose to search."""
    plain = normal_form(marked).strip()
    plain = re.sub(r"(?i)^(?:the\s+)?(?:correct\s+|final\s+)?(?:answer|option|choice)(?:\s+is)?\s*:?\s*", "", plain).strip()
    if _SPOKEN.match(plain):
        return None
    found = _ONE_LETTER.fullmatch(plain)
    if found:
        return "" if _ANOTHER.match(plain, found.end(1)) else found[1].upper()
    if found := re.match(r"\(?([A-J])\)?(?![A-Za-z'])", plain):
        return "" if _ANOTHER.match(plain, found.end(1)) else found[1]
    return None if len(plain) > 40 else ""
