"""Whether an answer is the truth, as a careful person reads both. The grades of `math`, `number`, `dapo-math`, `gsm8k`.

Both are brought into one normal form (`notation.py`) and read into the same few kinds: a quantity, words, a sequence with
its brackets, a union, a matrix, a relation. What is letters is words, compared as text; an expression is compared by its
value (`expressions.py`). **What is not read with certainty is not the same**: a wrong answer never earns here, and a right
one in a form that nobody foresaw may not.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from appliance.tasks import expressions, units
from appliance.tasks.expressions import Expression, Number, Operation, Symbol, UnreadableError, read_expression
from appliance.tasks.notation import EUR, GBP, JPY, USD, normal_form

LONGEST_ANSWER = 300  # characters; the longest answer of MATH-500 has 159
_MOST_ITEMS = 40
_DEEPEST = 6


@dataclass(frozen=True)
class Quantity:
    """A value, with its unit where it has one."""

    expression: Expression
    unit: tuple[str, ...] = ()


@dataclass(frozen=True)
class Words:
    """Text, word by word."""

    words: tuple[str, ...]


@dataclass(frozen=True)
class Based:
    """A number in a base that it names: 101 in base 2 is neither 101 nor 5."""

    digits: str
    base: int


@dataclass(frozen=True)
class Items:
    """Several answers in brackets, or in none. opening, closing: empty of a list without."""

    opening: str
    items: tuple[Node, ...]
    closing: str
    joined_by: str = ","
    """`,`, `and` or `or`."""


@dataclass(frozen=True)
class Union:
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Matrix:
    kind: str
    """The LaTeX environment's letter: empty where rows are in brackets, `v` of a determinant."""
    rows: tuple[tuple[Node, ...], ...]


@dataclass(frozen=True)
class Named:
    """`x = 5`, or x in an interval."""

    name: str
    value: Node
    difference: Expression | None = None
    """Left side minus right, where it is an equation of expressions."""


@dataclass(frozen=True)
class Relation:
    """An equation or inequality whose left side is no name, as `difference <sign> 0`."""

    difference: Expression
    sign: str
    """=, <, ≤ or ≠."""
    value: Node | None = None
    """The right side, where the left one is only letters."""


@dataclass(frozen=True)
class Option:
    """`(C) 12`: an option's letter and what it says."""

    letter: str
    value: Node


Node = Quantity | Words | Based | Items | Union | Matrix | Named | Relation | Option


def is_same(answer: str, *, truth: str) -> bool:
    """Whether a careful person takes the answer for the truth. Never takes long, runs nothing, works in any thread."""
    if not 0 < len(answer) <= LONGEST_ANSWER or not 0 < len(truth) <= LONGEST_ANSWER:
        return False
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
    """The rational that a text is, its unit and currency dropped; None where it is none, or several."""
    if not 0 < len(text) <= LONGEST_ANSWER:
        return None
    node = read_answer(normal_form(text))
    while isinstance(node, Named):
        node = node.value
    try:
        return expressions.exact(node.expression) if isinstance(node, Quantity) else None
    except UnreadableError:
        return None


_BLANKS = re.compile(r"(?<=[\d,.])( ) *(?=[\d.])|(?<=[A-Za-z])( ) *(?=[A-Za-z])|[ \u2009]")


def plain_text(text: str) -> str:
    """Without blanks that tell nothing apart; those between two numbers or two words stay."""
    text = re.sub(r"([\^_])\{\s*(\w)\s*\}", r"\1\2", _trimmed(text).replace("⟦", " ").replace("⟧", " ").strip())
    return _BLANKS.sub(lambda found: " " if found[1] or found[2] else "", text)


_LEADING = re.compile(
    r"(?i)^(?:(?:so|thus|hence|therefore|then|finally|and|or)[,\s]+)*"
    r"(?:(?:the|my|our|your)\s+)?(?:final\s+|correct\s+|right\s+|numerical\s+)?"
    r"(?:(?:answer|result|solution|value|total|sum|number|ans)s?\s*(?:is\s*:?|are\s*:?|equals?|:|=)\s*|"
    r"(?:is|are|equals?|equal\s+to|approximately|approx\.?|about|roughly|around|exactly)\s+|[≈~=:⇒→]\s*)"
)
_COLON = re.compile(r"^[A-Za-z][A-Za-z' ]*[A-Za-z]{2}:\s+(?=\S)")


def _trimmed(text: str) -> str:
    """Without what stands around an answer: marks of a sentence, quotation marks, words that lead to it."""
    before = ""
    while text != before:
        before = text
        text = text.strip(' \t"#').removeprefix("*").strip()
        text = re.sub(r"(?<!\.)[.,;:]+$|(?<!\*)\*+$", "", text).strip() if not text.endswith("...") else text
        text = _COLON.sub("", _LEADING.sub("", text, count=1))
        if text.startswith("{") and _matching(text) == len(text) - 1:
            text = text[1:-1]
    return text


_OPENING, _CLOSING = "([{⟨⌊⌈", ")]}⟩⌋⌉"


def _matching(text: str) -> int:
    """The place of the bracket that closes the first one; -1 where there is none."""
    depth = 0
    for place, character in enumerate(text):
        depth += (character in _OPENING) - (character in _CLOSING)
        if not depth:
            return place
    return -1


def _split(text: str, separator: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """The parts between separators that are in no brackets, and these separators."""
    parts, separators, depth, begin, place = [], [], 0, 0, 0
    while place < len(text):
        character = text[place]
        if not depth and (found := separator.match(text, place)) and found.end() > place:
            parts.append(text[begin:place])
            separators.append(found[0].strip())
            begin = place = found.end()
            continue
        depth += (character in _OPENING) - (character in _CLOSING)
        place += 1
    return [*parts, text[begin:]], separators


_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])|(?<![\d.,])\d{1,2}(?:,\d{2})+,\d{3}(?![\d,])")
_LIST = re.compile(r"(?:\s*[,;]\s*(?:and|or)\s+|\s*[,;]\s*|\s+(?:and|or)\s+|\s+&\s+)")
_BEGIN = re.compile(r"\\begin\s*\{([a-z]*)matrix\}|\\begin\s*\{(array)\}\s*(?:\{[^{}]*\})?")
_END = re.compile(r"\\end\s*\{(?:[a-z]*matrix|array)\}")


def _without_thousands(text: str) -> str:
    """1,000 as 1000, but in brackets, where (1,200) may be two numbers."""
    joined, depth, end = [], 0, 0
    for found in _GROUPED.finditer(text):
        before = text[end : found.start()]
        depth += sum(map(before.count, "([")) + before.count("\\{")
        depth -= sum(map(before.count, ")]")) + before.count("\\}")
        joined += [before, found[0].replace(",", "") if depth <= 0 else found[0]]
        end = found.end()
    return "".join([*joined, text[end:]])


def read_answer(text: str, *, depth: int = 0) -> Node:
    """What a text in the normal form says."""
    text = _without_thousands(_trimmed(text))
    if depth > _DEEPEST:
        return _words(text)
    if (matrix := _read_matrix(text, depth=depth)) is not None:
        return matrix
    parts, separators = _split(text, _LIST)
    parts = [part for part in parts if part.strip()]
    if not 1 < len(parts) <= _MOST_ITEMS:
        return _read_item(text, depth=depth)
    items = tuple(
        inner
        for part in parts
        for node in (_read_item(_trimmed(part), depth=depth + 1),)
        for inner in (node.items if isinstance(node, Items) and not node.opening else (node,))
    )
    if isinstance(items[0], Named) and isinstance(items[0].value, Quantity):  # x = 2, 3 are two values of x
        name = items[0].name
        if not any(isinstance(item, Named) for item in items[1:]):
            return Named(name, Items("", (items[0].value, *items[1:]), "", joined_by=_connector(separators)))
    return Items("", items, "", joined_by=_connector(separators))


def _connector(separators: Sequence[str]) -> str:
    words = {word for separator in separators for word in ("and", "or") if word in separator}
    return "and" if "and" in words else "or" if words else ","


_OPTION = re.compile(r"\(([A-J])\)\s*(\S.*)|([A-J])[).:]\s+(\S.*)")
_ONE_OPTION = re.compile(r"\(\s*([A-Z])\s*\)|([A-Z])\s*\)")


def _read_item(text: str, *, depth: int) -> Node:
    text = text.strip()
    if letter := _ONE_OPTION.fullmatch(text):
        return Quantity(Symbol(letter[1] or letter[2]))
    if (option := _OPTION.fullmatch(text)) and not re.match(r"[-+*/^=∪_(]", option[2] or option[4]):
        return Option(option[1] or option[3], _read_item(_trimmed(option[2] or option[4]), depth=depth + 1))
    if re.fullmatch(r"(?i)(?:the\s+)?(?:set\s+of\s+)?(?:all\s+)?(?:real\s+numbers|reals)|ℝ", text):
        infinity = Symbol("∞")
        return Items("(", (Quantity(expressions.negative(infinity)), Quantity(infinity)), ")")
    if text == "DNE":
        text = "does not exist"
    for read in (_read_relation, _read_union, _read_brackets, _read_both_signs, _read_based, _read_quantity):
        if depth <= _DEEPEST and (node := read(text, depth=depth + 1)) is not None:
            return node
    return _words(text)


_RELATION = re.compile(r"[=<>≤≥≠∈]+")
_TURNED = {"<": ">", ">": "<", "≤": "≥", "≥": "≤", "=": "=", "≠": "≠"}
_NAME = re.compile(r"[A-Za-zα-ωΑ-Ω∠△][\w\s^_{}'α-ωΑ-Ω∠△|-]*(?:\([A-Za-zα-ω0-9, ∩∪|]*\))?")


def _read_relation(text: str, *, depth: int) -> Node | None:
    sides, signs = _split(text, _RELATION)
    if len(sides) < 2:
        return None
    sides = [side.strip() for side in sides]
    signs = [{"<=": "≤", ">=": "≥", "=<": "≤", "=>": "⇒"}.get(sign, sign) for sign in signs]
    if set(signs) <= {"="}:
        return _read_equation(sides, depth=depth) if all(sides) else None
    if signs == ["∈"]:
        return Named(_plain_name(sides[0]), read_answer(sides[1], depth=depth))
    if not all(sign in _TURNED for sign in signs) or len(sides) > 3:
        return None
    try:
        values = [read_expression(side) for side in sides]
    except UnreadableError:
        return None
    return _interval(values, signs) or _inequality(values, signs)


def _read_equation(sides: list[str], *, depth: int) -> Node | None:
    first, last = sides[0], sides[-1]
    difference = None
    if len(sides) == 2:
        try:
            difference = Operation("difference", (read_expression(first), read_expression(last)))
        except UnreadableError:
            difference = None
    if _is_name(first):
        return Named(_plain_name(first), read_answer(last, depth=depth), difference)
    if _is_name(last) and len(sides) == 2:
        return Named(_plain_name(last), read_answer(first, depth=depth), difference)
    names, values = (_split(side[1:-1], _LIST)[0] if _is_bracketed(side) else [] for side in (first, last))
    if len(names) > 1 and len(names) == len(values) and all(_is_name(name.strip()) for name in names):
        return Named(_plain_name(first), read_answer(last, depth=depth))
    try:
        if not expressions.symbols(left := read_expression(first)):
            return read_answer(last, depth=depth)
    except UnreadableError:
        return None
    if difference is None:
        return None
    has_numbers = any(isinstance(part, Number) for part in expressions.walk(left))
    return Relation(difference, "=", value=None if has_numbers else read_answer(last, depth=depth))


def _is_bracketed(text: str) -> bool:
    return text[:1] == "(" and _matching(text) == len(text) - 1


def _is_name(text: str) -> bool:
    """Whether it is what a value is given to: letters, with an index or an argument: `x_1`, `f(x)`, `Area`."""
    return _NAME.fullmatch(text) is not None and not re.search(r"\^|\d[A-Za-z]", text) and text not in ("e", "i", "π")


def _plain_name(text: str) -> str:
    return re.sub(r"[\s{}]", "", text)


def _interval(values: list[Expression], signs: list[str]) -> Node | None:
    """Of a letter between constants."""
    names = [
        value.name if isinstance(value, Symbol) and value.name not in expressions.CONSTANTS else "" for value in values
    ]
    if sum(map(bool, names)) != 1 or "≠" in signs or "=" in signs:
        return None
    if any(expressions.symbols(value) for value, name in zip(values, names, strict=True) if not name):
        return None
    if len(values) == 2 and names[1]:
        values, signs, names = values[::-1], [_TURNED[signs[0]]], names[::-1]
    infinity = Symbol("∞")
    if len(values) == 2:
        bound = Quantity(values[1])
        if signs[0] in "<≤":
            inner = Items("(", (Quantity(expressions.negative(infinity)), bound), ")" if signs[0] == "<" else "]")
        else:
            inner = Items("(" if signs[0] == ">" else "[", (bound, Quantity(infinity)), ")")
        return Named(names[0], inner)
    if not names[1] or len({sign in "<≤" for sign in signs}) > 1:
        return None
    if signs[0] in ">≥":
        values, signs = values[::-1], [_TURNED[sign] for sign in signs[::-1]]
    opening, closing = "(" if signs[0] == "<" else "[", ")" if signs[1] == "<" else "]"
    return Named(names[1], Items(opening, (Quantity(values[0]), Quantity(values[2])), closing))


def _inequality(values: list[Expression], signs: list[str]) -> Node | None:
    if len(values) != 2:
        return None
    left, right = values
    if signs[0] in ">≥":
        left, right, signs = right, left, [_TURNED[signs[0]]]
    return Relation(Operation("difference", (left, right)), signs[0])


_UNION = re.compile(r"\s*∪\s*|(?<=[)\]])\s*U\s*(?=[(\[])")


def _read_union(text: str, *, depth: int) -> Node | None:
    parts, _ = _split(text, _UNION)
    if not 1 < len(parts) <= _MOST_ITEMS:
        return None
    return Union(tuple(read_answer(part, depth=depth) for part in parts))


_BUILDER = re.compile(r"\s*([A-Za-z])\s*(?:∈\s*ℝ\s*)?[|:]\s*(\S.*)")


def _read_brackets(text: str, *, depth: int) -> Node | None:
    is_set = text.startswith("\\{") and text.endswith("\\}")
    inner = text[2:-2] if is_set else text[1:-1]
    if is_set:
        if _matching(text[1:]) != len(text) - 2:
            return None
        if not inner.strip():
            return Words(("∅",))
        if builder := _BUILDER.fullmatch(inner):
            return _read_item(builder[2], depth=depth)
    elif len(text) < 2 or text[0] not in "([⟨" or text[-1] not in ")]⟩" or _matching(text) != len(text) - 1:
        return None
    parts, _ = _split(inner, re.compile(r"\s*[,;]\s*"))
    if len(parts) > _MOST_ITEMS or (len(parts) < 2 and not is_set):
        return None
    opening, closing = ("{", "}") if is_set else (text[0].replace("⟨", "("), text[-1].replace("⟩", ")"))
    items = tuple(_read_item(_trimmed(part), depth=depth) for part in parts)
    return Items(opening, _flat(items) if is_set else items, closing)


def _flat(items: tuple[Node, ...]) -> tuple[Node, ...]:
    return tuple(
        inner for item in items for inner in (item.items if isinstance(item, Items) and not item.opening else (item,))
    )


def _read_both_signs(text: str, *, depth: int) -> Node | None:
    """`3 ± 2` is 5 and 1."""
    if not ("±" in text or "∓" in text or re.search(r"\+/-|\+-", text)):
        return None
    text = re.sub(r"\+/-|\+-", "±", text)
    upper, lower = (text.replace("±", plus).replace("∓", minus) for plus, minus in ("+-", "-+"))
    return Items("", (_read_item(upper, depth=depth), _read_item(lower, depth=depth)), "", joined_by="or")


_BASES = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_BASED = re.compile(
    r"\(?\s*(-?[0-9A-Za-z]+)\s*\)?\s*(?:_\s*\{?\s*(?:base\s*)?(\w+)\s*\}?|,?\s*\(?(?:in\s+)?base[\s-]+\{?(\w+)\}?\)?)"
)


def _read_based(text: str, *, depth: int) -> Node | None:
    found = _BASED.fullmatch(text)
    if found is None:
        return None
    digits, name = found[1].upper(), (found[2] or found[3]).lower()
    base = int(name) if re.fullmatch(r"\d{1,2}", name) else {"sixteen": 16}.get(name, 0)
    if name in _BASES:
        base = _BASES.index(name) + 2
    if not (digits.lstrip("-")[0].isdigit() or (found[1].isupper() and base > 10)) or not 2 <= base <= 36:
        return None
    try:
        int(digits, base)
    except ValueError:
        return None
    return Based(re.sub(r"^(-?)0+(?=.)", r"\1", digits), base)


_NUMBER_WORDS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_VALUE_OF_WORD = {word: value for value, word in enumerate(_NUMBER_WORDS)}
_VALUE_OF_WORD |= {word: 10 * value for value, word in enumerate(_TENS, start=2)}
_VALUE_OF_WORD |= {
    f"{tens}{between}{one}": _VALUE_OF_WORD[tens] + _VALUE_OF_WORD[one]
    for tens, one, between in itertools.product(_TENS, _NUMBER_WORDS[1:10], "- ")
}
_CURRENCY_FIRST = re.compile(rf"(-?)\s*({USD}|{EUR}|{GBP}|{JPY})\s*(-?.*)")
_UNIT_BEHIND = re.compile(r"(.*?[\d)}!π%°⟧])(\s*)([A-Za-zμΩ°%¢⟦][A-Za-zμΩ°%¢⟦⟧/^{}\d\s.*-]*)")


def _read_quantity(text: str, *, depth: int) -> Node | None:
    if (value := _value_of_words(text)) is not None:
        return Quantity(Number(value))
    unit: tuple[str, ...] = ()
    if money := _CURRENCY_FIRST.fullmatch(text):
        unit, text = (money[2],), money[1] + money[3]
    if not re.search(r"[\d\\α-ωΑ-Ω∞+*/^|]", text) and len(re.sub(r"[^A-Za-z]", "", text)) != 1 and text != "pi":
        return None  # letters alone are words
    for value, behind in _readings(text):
        try:
            expression = read_expression(value)
        except UnreadableError:
            continue
        factor = units.multiple_of(behind)
        if factor > 1:
            expression = Operation("product", (expression, Number(Fraction(factor))))
            expression = Number(exact) if (exact := expressions.exact(expression)) is not None else expression
        return Quantity(expression, unit + behind)
    return None


_FRACTION_WORDS = {"half": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "eighth": 8, "tenth": 10}
_FRACTION_IN_WORDS = re.compile(rf"(?:(a|an|\w+)[\s-]+)?({'|'.join(_FRACTION_WORDS)}|halve)s?")


def _value_of_words(text: str) -> Fraction | None:
    """`minus twelve`, `three quarters`; None of other words."""
    words = text.lower()
    sign = -1 if re.match(r"(?:minus|negative)\s", words) else 1
    words = re.sub(r"^(?:minus|negative)\s+", "", words)
    if (value := _VALUE_OF_WORD.get(words)) is not None:
        return Fraction(sign * value)
    if found := _FRACTION_IN_WORDS.fullmatch(words):
        over = 1 if found[1] in (None, "a", "an") else _VALUE_OF_WORD.get(found[1])
        if over is not None and (found[1] or found[2] == "half"):
            return Fraction(sign * over, _FRACTION_WORDS.get(found[2], 2))
    return None


def _readings(text: str) -> list[tuple[str, tuple[str, ...]]]:
    """(value, unit) as which a text may be read, the likeliest first."""
    readings: list[tuple[str, tuple[str, ...]]] = []
    found = _UNIT_BEHIND.fullmatch(text)
    if found and not any(re.search(rf"\b{name}\b", found[1]) for name in expressions.FUNCTIONS):
        value, gap, behind = found[1], found[2], found[3].replace("⟦", " ").replace("⟧", " ").strip(" .")
        is_marked = "⟦" in found[3] or behind[:1] in "°%¢"
        words = re.findall(r"[A-Za-zμΩ¢]+", behind)
        is_known = bool(words) and units.unit_of_word(words[0]) is not None
        parts = units.read_unit(behind)
        if parts is not None and (
            is_marked or (gap and not units.is_algebra(behind)) or (is_known and (gap or len(words[0]) > 1))
        ):
            readings.append((value, parts))
    return [*readings, (text.replace("⟦", " ").replace("⟧", " "), ())]


_ARTICLES = {"the", "a", "an"}
_TEXT_PART = re.compile(r"\d+(?:\.\d+)?|[^\W\d_]+|[^\s\w]|_")
_QUIET = set("\"'`.,!?⟦⟧{}")


def _words(text: str) -> Words:
    text = re.sub(r"(?<=[A-Za-z]{2})-(?=[A-Za-z]{2})", "", re.sub(r"(?<=\d)\s+to\s+(?=\d)", ":", text))
    parts = [part for part in _TEXT_PART.findall(text) if part not in _QUIET]
    if len(parts) > 1 and parts[0].lower() in _ARTICLES:
        parts = parts[1:]
    return Words(tuple(parts))


def _is_same_word(one: str, other: str) -> bool:
    """Case counts in names of one to three letters, as AB of a line and ab, but for a capital that begins a word."""
    if one == other:
        return True
    if one.isalpha() and (unit := units.unit_of_word(one)) is not None and unit == units.unit_of_word(other):
        return True
    if one.lower() != other.lower() or len(one) < 2:
        return False
    begins_a_sentence = one[1:] == other[1:] and one[1:].islower()
    return len(one) > 3 or one.lower() in ("yes", "no") or begins_a_sentence


def is_same_node(given: Node, wanted: Node) -> bool:
    """given: the answer's, wanted: the truth's."""
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
        is_same_name = given.name == wanted.name or any(re.search("[A-Za-z]{3}", node.name) for node in (given, wanted))
        if is_same_name and is_same_node(given.value, wanted.value):
            return True
        return _are_multiples(given.difference, wanted.difference)
    named, other = (given, wanted) if isinstance(given, Named) else (wanted, given)
    assert isinstance(named, Named)
    if isinstance(other, Relation):
        return other.sign == "=" and _are_multiples(named.difference, other.difference)
    return is_same_node(*((named.value, other) if named is given else (other, named.value)))


def _are_multiples(one: Expression | None, other: Expression | None, *, of_same_sign: bool = False) -> bool:
    if one is None or other is None:
        return False
    try:
        return expressions.is_multiple(one, other, of_same_sign=of_same_sign)
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
    """Those of x < 2 or x > 3 too."""
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
    """In any order; but where both are words with commas alone between them, or one names what the other does not."""
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
        return expressions.is_same_value(one, other)
    except UnreadableError:
        return one == other and not expressions.symbols(one) and isinstance(one, Symbol)


def _is_at_most_1(expression: Expression) -> bool:
    """Only what is a share is the same as a percentage: 0.5 is 50%, 75 is not 7500%."""
    try:
        value = expressions.exact(expression)
    except UnreadableError:
        return False
    return value is not None and abs(value) <= 1


def _read_matrix(text: str, *, depth: int) -> Matrix | None:
    begin = _BEGIN.match(text)
    if begin is None:
        return None
    end = _END.search(text, begin.end())
    if end is None or text[end.end() :].strip():
        return None
    kind = {"v": "v", "V": "V"}.get(begin[1] or "", "")
    inner = re.sub(r"\\hline|\\+\s*$", "", text[begin.end() : end.start()].strip()).strip()
    rows = [row.split("&") for row in re.split(r"\\\\", inner)]
    if sum(map(len, rows)) > _MOST_ITEMS * 2:
        return None
    return Matrix(kind, tuple(tuple(_read_item(_trimmed(cell), depth=depth + 1) for cell in row) for row in rows))
