"""Whether an answer is the truth, as a careful person reads both. The grades of `math`, `number`, `dapo-math`, `gsm8k`.

Both are brought into one normal form (`notation.py`) and read (`reading.py`) into the same few kinds (`nodes.py`): a
quantity, words, items in their brackets, a union, a matrix, a relation. What is letters is words, compared as text; an
expression is compared by its value (`values.py`). **What is not read with certainty is not the same**: a wrong answer
is not to earn, and so a right one in a form that nobody foresaw does not.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from appliance.tasks.maths import expressions, units, values
from appliance.tasks.maths.expressions import Expression, Number, Operation, Symbol, UnreadableError
from appliance.tasks.maths.nodes import Items, Matrix, Named, Node, Option, Quantity, Relation, Union, Words
from appliance.tasks.maths.notation import normal_form
from appliance.tasks.maths.reading import read_answer, trimmed

LONGEST_ANSWER = 300  # characters; the longest answer of MATH-500 has 159


def is_same(answer: str, *, truth: str) -> bool:
    """Tell whether a careful person takes the answer for the truth. Never takes long, runs nothing, works in any
    thread."""
    if not answer or not truth:
        return False
    if max(len(answer), len(truth)) > LONGEST_ANSWER:
        return answer.strip() == truth.strip()
    answer_form, truth_form = normal_form(answer), normal_form(truth)
    if not answer_form or not truth_form:
        return False
    if plain_text(answer_form) == plain_text(truth_form):
        return True
    return is_same_node(read_answer(answer_form), read_answer(truth_form))


def prepare() -> None:
    """Import what the first comparison would: mpmath takes a tenth of a second."""
    is_same("\\sqrt{2}", truth="\\pi")


def single_value(text: str) -> Fraction | None:
    """Return the rational number that a text is, its unit and currency dropped; None where it is none, or several."""
    if not 0 < len(text) <= LONGEST_ANSWER:
        return None
    node = read_answer(normal_form(text))
    while isinstance(node, Named):
        node = node.value
    try:
        return values.exact(node.expression) if isinstance(node, Quantity) else None
    except UnreadableError:
        return None


_BLANKS = re.compile(r"(?<=[\d,.])( ) *(?=[\d.])|(?<=[A-Za-z])( ) *(?=[A-Za-z])|[ \u2009]")


def plain_text(text: str) -> str:
    """Drop blanks that distinguish nothing; those between two numbers or two words stay."""
    text = re.sub(r"([\^_])\{\s*(\w)\s*\}", r"\1\2", trimmed(text).replace("⟦", " ").replace("⟧", " ").strip())
    return _BLANKS.sub(lambda found: " " if found[1] or found[2] else "", text)


def _is_same_word(left: str, right: str) -> bool:
    """Case counts in names of one to three letters, as AB of a line and ab, but for a capital that begins a word."""
    if left == right:
        return True
    if left.isalpha() and (unit := units.unit_of_word(left)) is not None and unit == units.unit_of_word(right):
        return True
    if len(left) > 3 and len(right) > 3 and units.singular(left.lower()) == units.singular(right.lower()):
        return True
    if left.lower() != right.lower() or len(left) < 2:
        return False
    begins_a_sentence = left[1:] == right[1:] and left[1:].islower()
    return len(left) > 3 or left.lower() in ("yes", "no") or begins_a_sentence


def is_same_node(answer: Node, truth: Node) -> bool:
    """Tell whether two nodes are the same. answer: the answer's, truth: the truth's."""
    if isinstance(answer, Option) or isinstance(truth, Option):
        return _is_same_option(answer, truth)
    if isinstance(answer, Named) or isinstance(truth, Named):
        return _is_same_named(answer, truth)
    if isinstance(answer, Relation) or isinstance(truth, Relation):
        return _is_same_relation(answer, truth)
    if isinstance(answer, Union) or isinstance(truth, Union):
        parts = [_parts_of_union(node) for node in (answer, truth)]
        return parts[0] is not None and parts[1] is not None and _is_same_set(parts[0], parts[1])
    if isinstance(answer, Matrix) or isinstance(truth, Matrix):
        return _is_same_matrix(answer, truth)
    if isinstance(answer, Items) or isinstance(truth, Items):
        return _is_same_items(answer, truth)
    if isinstance(answer, Quantity) and isinstance(truth, Quantity):
        return _is_same_quantity(answer, truth)
    if isinstance(answer, Words) and isinstance(truth, Words):
        pairs = itertools.zip_longest(answer.words, truth.words, fillvalue="")
        return bool(answer.words) and all(itertools.starmap(_is_same_word, pairs))
    return answer == truth


def _is_same_option(answer: Node, truth: Node) -> bool:
    if isinstance(answer, Option) and isinstance(truth, Option):
        return answer.letter == truth.letter and is_same_node(answer.value, truth.value)
    option, other = (answer, truth) if isinstance(answer, Option) else (truth, answer)
    assert isinstance(option, Option)
    if isinstance(other, Quantity) and isinstance(other.expression, Symbol):
        return other.expression.name == option.letter
    return is_same_node(*((option.value, other) if option is answer else (other, option.value)))


def _is_same_named(answer: Node, truth: Node) -> bool:
    if isinstance(answer, Named) and isinstance(truth, Named):
        if _is_same_name(answer.name, truth.name) and is_same_node(answer.value, truth.value):
            return True
        return _are_multiples(answer.difference, truth.difference)
    with_name, other = (answer, truth) if isinstance(answer, Named) else (truth, answer)
    assert isinstance(with_name, Named)
    if isinstance(other, Relation):
        return other.sign == "=" and _are_multiples(with_name.difference, other.difference)
    if with_name.name.startswith("(") and (names := re.findall(r"\w+", with_name.name)) != sorted(names):
        return False  # (y, x) = (2, 3) is the point (3, 2)
    return is_same_node(*((with_name.value, other) if with_name is answer else (other, with_name.value)))


def _is_same_name(left: str, right: str) -> bool:
    """Tell whether two names are the same. One may have fewer words, `cost` for `total cost`, or a word's first letter,
    `A` for `Area`: x is not y."""
    if left.replace(" ", "") == right.replace(" ", ""):
        return True
    if {left, right} == {"y", "f(x)"}:
        return True
    words, others = {*left.lower().split()}, {*right.lower().split()}
    if not all(re.fullmatch("[a-z']+", word) for word in words | others):
        return False
    short, long = sorted((left.lower(), right.lower()), key=len)
    fewer = min(words, others, key=len)
    is_part = words <= others or others <= words
    return (is_part and all(len(word) > 2 for word in fewer)) or (
        len(short) == 1 and len(long) > 2 and long.startswith(short)
    )


def _are_multiples(left: Expression | None, right: Expression | None, *, of_same_sign: bool = False) -> bool:
    if left is None or right is None:
        return False
    try:
        return values.is_multiple(left, right, of_same_sign=of_same_sign)
    except UnreadableError:
        return False


def _is_same_relation(answer: Node, truth: Node) -> bool:
    if isinstance(answer, Relation) and isinstance(truth, Relation):
        is_one_way = answer.sign in "<≤"
        return answer.sign == truth.sign and _are_multiples(
            answer.difference, truth.difference, of_same_sign=is_one_way
        )
    relation, other = (answer, truth) if isinstance(answer, Relation) else (truth, answer)
    assert isinstance(relation, Relation)
    if relation.value is None:
        return False
    return is_same_node(*((relation.value, other) if relation is answer else (other, relation.value)))


def _parts_of_union(node: Node) -> tuple[Node, ...] | None:
    """Return the parts of a union, also of x < 2 or x > 3."""
    if isinstance(node, Union):
        return node.parts
    if isinstance(node, Items) and not node.opening and node.joined_by != "and":
        parts = tuple(item.value if isinstance(item, Named) else item for item in node.items)
        is_of_sets = all(isinstance(part, Items) and part.opening for part in parts)
        names = {item.name for item in node.items if isinstance(item, Named)}
        return parts if is_of_sets and len(names) == 1 else None
    return None


def _is_same_set(answers: Sequence[Node], truths: Sequence[Node]) -> bool:
    """Tell whether each member of one is a member of the other, and as often there."""
    if len(answers) != len(truths):
        return False
    left = list(truths)
    for node in answers:
        place = next((place for place, other in enumerate(left) if is_same_node(node, other)), None)
        if place is None:
            return False
        del left[place]
    return True


def _distinct(items: Sequence[Node]) -> list[Node]:
    distinct: list[Node] = []
    for item in items:
        if not any(is_same_node(item, other) for other in distinct):
            distinct.append(item)
    return distinct


def _is_same_items(answer: Node, truth: Node) -> bool:
    if not (isinstance(answer, Items) and isinstance(truth, Items)):
        items, other = (answer, truth) if isinstance(answer, Items) else (truth, answer)
        assert isinstance(items, Items)
        if items.opening != "{" or len(items.items) != 1:  # {5} is 5
            return False
        if items.items[0] == Words(("∅",)):
            return False
        return is_same_node(*((items.items[0], other) if items is answer else (other, items.items[0])))
    kinds = {answer.opening, truth.opening}
    if kinds <= {"", "{"}:
        if kinds == {"{"}:
            return _is_same_set(_distinct(answer.items), _distinct(truth.items))
        return _is_same_list(answer, truth)
    if kinds == {"", "("}:
        bare = answer if not answer.opening else truth
        names = [item.name for item in bare.items if isinstance(item, Named)]
        if len(names) < len(bare.items) or names != sorted(set(names)):  # x = 2, y = 3 is the point (2, 3)
            return False
    elif (answer.opening, answer.closing) != (truth.opening, truth.closing):
        return False
    return _are_same_in_order(answer.items, truth.items)


def _is_same_list(answer: Items, truth: Items) -> bool:
    """Compare lists in any order; but where both are words with commas alone between them, or one names what the other
    does not."""
    items = (*answer.items, *truth.items)
    are_named = {isinstance(item, Named) for item in items}
    are_letters = all(isinstance(item, Words) or _is_letter(item) for item in items)
    is_in_order = (
        are_letters and {answer.joined_by, truth.joined_by} == {","} and "{" not in (answer.opening, truth.opening)
    )
    if is_in_order:
        return _are_same_in_order(answer.items, truth.items)
    if len(are_named) == 2:
        names = [item.name for item in items if isinstance(item, Named)]
        if len(set(names)) > 1:
            return names == sorted(names) and _are_same_in_order(answer.items, truth.items)
    return _is_same_set(answer.items, truth.items)


def _is_letter(node: Node) -> bool:
    return isinstance(node, Quantity) and isinstance(node.expression, Symbol) and not node.unit


def _are_same_in_order(given: Sequence[Node], wanted: Sequence[Node]) -> bool:
    return len(given) == len(wanted) and all(map(is_same_node, given, wanted))


def _is_same_matrix(answer: Node, truth: Node) -> bool:
    if isinstance(answer, Matrix) and isinstance(truth, Matrix):
        return (
            answer.kind == truth.kind
            and len(answer.rows) == len(truth.rows)
            and all(map(_are_same_in_order, answer.rows, truth.rows))
        )
    matrix, other = (answer, truth) if isinstance(answer, Matrix) else (truth, answer)
    assert isinstance(matrix, Matrix)
    if not isinstance(other, Items) or (other.opening, other.closing) != ("(", ")") or matrix.kind:
        return False
    if any(len(row) != 1 for row in matrix.rows):  # a column is the point with these coordinates
        return False
    column = [row[0] for row in matrix.rows]
    return _are_same_in_order(*((column, other.items) if matrix is answer else (other.items, column)))


def _is_same_quantity(answer: Quantity, truth: Quantity) -> bool:
    percents = [units.PERCENT in quantity.unit for quantity in (answer, truth)]
    plain = [
        replace(quantity, unit=tuple(part for part in quantity.unit if part != units.PERCENT))
        for quantity in (answer, truth)
    ]
    left, right = answer.expression, truth.expression
    if percents[0] != percents[1] and (plain[0].unit or plain[1].unit):
        return False
    if not units.is_same_unit(plain[0].unit, plain[1].unit):
        factor = units.conversion(plain[0].unit, plain[1].unit)
        return factor is not None and _is_same_value(Operation("product", (left, Number(factor))), right)
    if expressions.is_unfinished(left) and expressions.is_plain_number(right):
        return False  # 47 + 85 is the question, 132 its answer
    if _is_same_value(left, right):
        return True
    if percents[0] == percents[1]:
        return False
    part, percent = (right, left) if percents[0] else (left, right)
    return _is_at_most_1(part) and _is_same_value(part, Operation("quotient", (percent, Number(Fraction(100)))))


def _is_same_value(left: Expression, right: Expression) -> bool:
    try:
        return values.is_same_value(left, right)
    except UnreadableError:
        return left == right and not expressions.symbols(left) and isinstance(left, Symbol)


def _is_at_most_1(expression: Expression) -> bool:
    """Say whether it is at most 1: only what is a share is the same as a percentage: 0.5 is 50%, 75 is not 7500%."""
    try:
        value = values.exact(expression)
    except UnreadableError:
        return False
    return value is not None and abs(value) <= 1
