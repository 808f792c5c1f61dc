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
    given, wanted = normal_form(answer), normal_form(truth)
    if not given or not wanted:
        return False
    if plain_text(given) == plain_text(wanted):
        return True
    return is_same_node(read_answer(given), read_answer(wanted))


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


def _is_same_word(one: str, other: str) -> bool:
    """Case counts in names of one to three letters, as AB of a line and ab, but for a capital that begins a word."""
    if one == other:
        return True
    if one.isalpha() and (unit := units.unit_of_word(one)) is not None and unit == units.unit_of_word(other):
        return True
    if len(one) > 3 and len(other) > 3 and units.singular(one.lower()) == units.singular(other.lower()):
        return True
    if one.lower() != other.lower() or len(one) < 2:
        return False
    begins_a_sentence = one[1:] == other[1:] and one[1:].islower()
    return len(one) > 3 or one.lower() in ("yes", "no") or begins_a_sentence


def is_same_node(given: Node, wanted: Node) -> bool:
    """Tell whether two nodes are the same. given: the answer's, wanted: the truth's."""
    if isinstance(given, Option) or isinstance(wanted, Option):
        return _is_same_option(given, wanted)
    if isinstance(given, Named) or isinstance(wanted, Named):
        return _is_same_named(given, wanted)
    if isinstance(given, Relation) or isinstance(wanted, Relation):
        return _is_same_relation(given, wanted)
    if isinstance(given, Union) or isinstance(wanted, Union):
        parts = [_parts_of_union(node) for node in (given, wanted)]
        return parts[0] is not None and parts[1] is not None and _is_same_set(parts[0], parts[1])
    if isinstance(given, Matrix) or isinstance(wanted, Matrix):
        return _is_same_matrix(given, wanted)
    if isinstance(given, Items) or isinstance(wanted, Items):
        return _is_same_items(given, wanted)
    if isinstance(given, Quantity) and isinstance(wanted, Quantity):
        return _is_same_quantity(given, wanted)
    if isinstance(given, Words) and isinstance(wanted, Words):
        pairs = itertools.zip_longest(given.words, wanted.words, fillvalue="")
        return bool(given.words) and all(itertools.starmap(_is_same_word, pairs))
    return given == wanted


def _is_same_option(given: Node, wanted: Node) -> bool:
    if isinstance(given, Option) and isinstance(wanted, Option):
        return given.letter == wanted.letter and is_same_node(given.value, wanted.value)
    option, other = (given, wanted) if isinstance(given, Option) else (wanted, given)
    assert isinstance(option, Option)
    if isinstance(other, Quantity) and isinstance(other.expression, Symbol):
        return other.expression.name == option.letter
    return is_same_node(*((option.value, other) if option is given else (other, option.value)))


def _is_same_named(given: Node, wanted: Node) -> bool:
    if isinstance(given, Named) and isinstance(wanted, Named):
        if _is_same_name(given.name, wanted.name) and is_same_node(given.value, wanted.value):
            return True
        return _are_multiples(given.difference, wanted.difference)
    named, other = (given, wanted) if isinstance(given, Named) else (wanted, given)
    assert isinstance(named, Named)
    if isinstance(other, Relation):
        return other.sign == "=" and _are_multiples(named.difference, other.difference)
    if named.name.startswith("(") and (names := re.findall(r"\w+", named.name)) != sorted(names):
        return False  # (y, x) = (2, 3) is the point (3, 2)
    return is_same_node(*((named.value, other) if named is given else (other, named.value)))


def _is_same_name(one: str, other: str) -> bool:
    """One may have fewer words, `cost` for `total cost`, or a word's first letter, `A` for `Area`: x is not y."""
    if one.replace(" ", "") == other.replace(" ", ""):
        return True
    if {one, other} == {"y", "f(x)"}:
        return True
    words, others = {*one.lower().split()}, {*other.lower().split()}
    if not all(re.fullmatch("[a-z']+", word) for word in words | others):
        return False
    short, long = sorted((one.lower(), other.lower()), key=len)
    fewer = min(words, others, key=len)
    is_part = words <= others or others <= words
    return (is_part and all(len(word) > 2 for word in fewer)) or (
        len(short) == 1 and len(long) > 2 and long.startswith(short)
    )


def _are_multiples(one: Expression | None, other: Expression | None, *, of_same_sign: bool = False) -> bool:
    if one is None or other is None:
        return False
    try:
        return values.is_multiple(one, other, of_same_sign=of_same_sign)
    except UnreadableError:
        return False


def _is_same_relation(given: Node, wanted: Node) -> bool:
    if isinstance(given, Relation) and isinstance(wanted, Relation):
        is_one_way = given.sign in "<≤"
        return given.sign == wanted.sign and _are_multiples(
            given.difference, wanted.difference, of_same_sign=is_one_way
        )
    relation, other = (given, wanted) if isinstance(given, Relation) else (wanted, given)
    assert isinstance(relation, Relation)
    if relation.value is None:
        return False
    return is_same_node(*((relation.value, other) if relation is given else (other, relation.value)))


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


def _is_same_set(given: Sequence[Node], wanted: Sequence[Node]) -> bool:
    """Each of one is one of the other, how often is the same."""
    if len(given) != len(wanted):
        return False
    left = list(wanted)
    for node in given:
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


def _is_same_items(given: Node, wanted: Node) -> bool:
    if not (isinstance(given, Items) and isinstance(wanted, Items)):
        items, other = (given, wanted) if isinstance(given, Items) else (wanted, given)
        assert isinstance(items, Items)
        if items.opening != "{" or len(items.items) != 1:  # {5} is 5
            return False
        if items.items[0] == Words(("∅",)):
            return False
        return is_same_node(*((items.items[0], other) if items is given else (other, items.items[0])))
    kinds = {given.opening, wanted.opening}
    if kinds <= {"", "{"}:
        if kinds == {"{"}:
            return _is_same_set(_distinct(given.items), _distinct(wanted.items))
        return _is_same_list(given, wanted)
    if kinds == {"", "("}:
        bare = given if not given.opening else wanted
        names = [item.name for item in bare.items if isinstance(item, Named)]
        if len(names) < len(bare.items) or names != sorted(set(names)):  # x = 2, y = 3 is the point (2, 3)
            return False
    elif (given.opening, given.closing) != (wanted.opening, wanted.closing):
        return False
    return _are_same_in_order(given.items, wanted.items)


def _is_same_list(given: Items, wanted: Items) -> bool:
    """Compare lists in any order; but where both are words with commas alone between them, or one names what the other
    does not."""
    items = (*given.items, *wanted.items)
    are_named = {isinstance(item, Named) for item in items}
    are_letters = all(isinstance(item, Words) or _is_letter(item) for item in items)
    is_in_order = (
        are_letters and {given.joined_by, wanted.joined_by} == {","} and "{" not in (given.opening, wanted.opening)
    )
    if is_in_order:
        return _are_same_in_order(given.items, wanted.items)
    if len(are_named) == 2:
        names = [item.name for item in items if isinstance(item, Named)]
        if len(set(names)) > 1:
            return names == sorted(names) and _are_same_in_order(given.items, wanted.items)
    return _is_same_set(given.items, wanted.items)


def _is_letter(node: Node) -> bool:
    return isinstance(node, Quantity) and isinstance(node.expression, Symbol) and not node.unit


def _are_same_in_order(given: Sequence[Node], wanted: Sequence[Node]) -> bool:
    return len(given) == len(wanted) and all(map(is_same_node, given, wanted))


def _is_same_matrix(given: Node, wanted: Node) -> bool:
    if isinstance(given, Matrix) and isinstance(wanted, Matrix):
        return (
            given.kind == wanted.kind
            and len(given.rows) == len(wanted.rows)
            and all(map(_are_same_in_order, given.rows, wanted.rows))
        )
    matrix, other = (given, wanted) if isinstance(given, Matrix) else (wanted, given)
    assert isinstance(matrix, Matrix)
    if not isinstance(other, Items) or (other.opening, other.closing) != ("(", ")") or matrix.kind:
        return False
    if any(len(row) != 1 for row in matrix.rows):  # a column is the point with these coordinates
        return False
    column = [row[0] for row in matrix.rows]
    return _are_same_in_order(*((column, other.items) if matrix is given else (other.items, column)))


def _is_same_quantity(given: Quantity, wanted: Quantity) -> bool:
    percents = [units.PERCENT in quantity.unit for quantity in (given, wanted)]
    plain = [
        replace(quantity, unit=tuple(part for part in quantity.unit if part != units.PERCENT))
        for quantity in (given, wanted)
    ]
    one, other = given.expression, wanted.expression
    if percents[0] != percents[1] and (plain[0].unit or plain[1].unit):
        return False
    if not units.is_same_unit(plain[0].unit, plain[1].unit):
        factor = units.conversion(plain[0].unit, plain[1].unit)
        return factor is not None and _is_same_value(Operation("product", (one, Number(factor))), other)
    if expressions.is_unfinished(one) and expressions.is_plain_number(other):
        return False  # 47 + 85 is the question, 132 its answer
    if _is_same_value(one, other):
        return True
    if percents[0] == percents[1]:
        return False
    part, percent = (other, one) if percents[0] else (one, other)
    return _is_at_most_1(part) and _is_same_value(part, Operation("quotient", (percent, Number(Fraction(100)))))


def _is_same_value(one: Expression, other: Expression) -> bool:
    try:
        return values.is_same_value(one, other)
    except UnreadableError:
        return one == other and not expressions.symbols(one) and isinstance(one, Symbol)


def _is_at_most_1(expression: Expression) -> bool:
    """Say whether it is at most 1: only what is a share is the same as a percentage: 0.5 is 50%, 75 is not 7500%."""
    try:
        value = values.exact(expression)
    except UnreadableError:
        return False
    return value is not None and abs(value) <= 1
