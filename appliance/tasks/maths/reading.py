"""Reads an answer in the normal form: the few kinds of `nodes.py`. What is not read with certainty is words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from appliance.tasks.maths import expressions, values
from appliance.tasks.maths.english import DENIALS, is_name, words_of
from appliance.tasks.maths.expressions import Expression, Number, Operation, Symbol, UnreadableError, read_expression
from appliance.tasks.maths.nodes import Items, Matrix, Named, Node, Option, Quantity, Relation, Union, Words
from appliance.tasks.maths.quantities import read_based, read_quantity

_MOST_ITEMS = 40
_DEEPEST = 6


_LEADING = re.compile(
    r"(?i)^(?:(?:so|thus|hence|therefore|then|finally|and|or)[,\s]+)*"
    r"(?:(?:the|my|our|your)\s+)?(?:final\s+|correct\s+|right\s+|numerical\s+)?"
    r"(?:(?:answer|result|solution|value|total|sum|number|ans)s?\s*(?:is\s*:?|are\s*:?|equals?|:|=)\s*|"
    r"(?:is|are|equals?|equal\s+to|approximately|approx\.?|about|roughly|around|exactly)\s+|[≈~=:⇒→]\s*)"
)
_LABEL = re.compile(r"([A-Za-z][A-Za-z' ]*[A-Za-z]{2}):\s+(\S.*)")


def trimmed(text: str) -> str:
    """Return an answer without what surrounds it: marks of a sentence, quotation marks, words that lead to it."""
    before = ""
    while text != before:
        before = text
        text = text.strip(' \t"#').removeprefix("*").strip()
        text = re.sub(r"(?<!\.)[.,;:]+$|(?<!\*)\*+$", "", text).strip() if not text.endswith("...") else text
        text = _LEADING.sub("", text, count=1)
        if len(text) > 2 and text[0] == text[-1] == "'":
            text = text[1:-1]
        if text.startswith("{") and _matching(text) == len(text) - 1:
            text = text[1:-1]
    return text


_OPENING, _CLOSING = "([{⟨⌊⌈", ")]}⟩⌋⌉"


def _matching(text: str) -> int:
    """Return the place of the bracket that closes the first one; -1 where there is none."""
    depth = 0
    for place, character in enumerate(text):
        depth += (character in _OPENING) - (character in _CLOSING)
        if not depth:
            return place
    return -1


def _split(text: str, separator: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """Return the parts between separators that are in no brackets, and these separators."""
    parts, separators, depth, begin, place = [], [], 0, 0, 0
    while place < len(text):
        character = text[place]
        if not depth and (match := separator.match(text, place)) and match.end() > place:
            parts.append(text[begin:place])
            separators.append(match[0].strip())
            begin = place = match.end()
            continue
        depth += (character in _OPENING) - (character in _CLOSING)
        place += 1
    return [*parts, text[begin:]], separators


_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])|(?<![\d.,])\d{1,2}(?:,\d{2})+,\d{3}(?![\d,])")
_LIST = re.compile(r"(?:\s*[,;]\s*(?:and|or)\s+|\s*[,;]\s*|\s+(?:and|or)\s+|\s+&\s+)")
_BEGIN = re.compile(r"\\begin\s*\{([a-z]*)matrix\}|\\begin\s*\{(array)\}\s*(?:\{[^{}]*\})?")
_END = re.compile(r"\\end\s*\{(?:[a-z]*matrix|array)\}")


_OUTWARD = re.compile(r"(\])([^\[\]()]*[,;][^\[\]()]*)([\[\]])|(\[)([^\[\]()]*[,;][^\[\]()]*)(\[)")  # ]2, 5[ is (2, 5)


def _without_thousands(text: str) -> str:
    """Write 1,000 as 1000, but not in brackets, where (1,200) may be two numbers."""
    joined, depth, end = [], 0, 0
    for match in _GROUPED.finditer(text):
        before = text[end : match.start()]
        depth += sum(map(before.count, "([")) + before.count("\\{")
        depth -= sum(map(before.count, ")]")) + before.count("\\}")
        joined += [before, match[0].replace(",", "") if depth <= 0 else match[0]]
        end = match.end()
    return "".join([*joined, text[end:]])


def read_answer(text: str, *, depth: int = 0) -> Node:
    """Read what a text in the normal form says."""
    text = _without_thousands(trimmed(text))
    if depth > _DEEPEST:
        return _words(text)
    if interval := _OUTWARD.fullmatch(text):
        opening, inner, closing = filter(None, interval.groups())
        text = f"{'(' if opening == ']' else '['}{inner}{')' if closing == '[' else ']'}"
    if (matrix := _read_matrix(text, depth=depth)) is not None:
        return matrix
    parts, separators = _split(text, _LIST)
    parts = [part for part in parts if part.strip()]
    if not 1 < len(parts) <= _MOST_ITEMS:
        return _read_item(text, depth=depth)
    items = tuple(
        inner
        for part in parts
        for node in (_read_item(trimmed(part), depth=depth + 1),)
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
_NO_OPTION = re.compile(r"\A\(?[A-J]\)?\.?\Z|\s\(?[A-J][).:]\s")  # another option
_ONE_OPTION = re.compile(r"\(\s*([A-Z])\s*\)|([A-Z])\s*\)")


def _read_item(text: str, *, depth: int) -> Node:
    text = text.strip()
    if letter := _ONE_OPTION.fullmatch(text):
        return Quantity(Symbol(letter[1] or letter[2]))
    if (label := _LABEL.fullmatch(text)) and is_name(label[1]):
        return Named(_plain_name(label[1]), read_answer(label[2], depth=depth + 1))
    if (option := _OPTION.fullmatch(text)) and not re.match(r"[-+*/^=∪_(]", option[2] or option[4]):
        if _NO_OPTION.search(option[2] or option[4]) or (text[1] == ":" and not DENIALS.isdisjoint(words_of(text))):
            return _words(text)
        return Option(option[1] or option[3], _read_item(trimmed(option[2] or option[4]), depth=depth + 1))
    if re.fullmatch(r"(?i)(?:the\s+)?(?:set\s+of\s+)?(?:all\s+)?(?:real\s+numbers|reals)|ℝ", text):
        infinity = Symbol("∞")
        return Items("(", (Quantity(expressions.negative(infinity)), Quantity(infinity)), ")")
    if text == "DNE":
        text = "does not exist"
    if depth > _DEEPEST:
        return _words(text)
    for read in (_read_relation, _read_union, _read_brackets, _read_both_signs):
        if (node := read(text, depth=depth + 1)) is not None:
            return node
    return read_based(text) or read_quantity(text) or _words(text)


_RELATION = re.compile(r"[=<>≤≥≠∈]+")
_MOST_WORDS = 6  # of a name
_TURNED = {"<": ">", ">": "<", "≤": "≥", "≥": "≤", "=": "=", "≠": "≠"}
_INDEX = r"(?:\s*_\s*(?:\{[\w\s,]*\}|\w+))?"
_NAME = re.compile(  # a letter or points, perhaps with an index or an argument; else words
    rf"[∠△]?\s*(?:[A-Za-zα-ωΑ-Ω]{_INDEX}|[A-Za-z]'+(?=\s*\()|[A-Z]{{2,4}}|[a-z]{{2,3}})(?:\s*\([A-Za-zα-ω0-9, ∩∪|]*\))?"
)
_NOUNS = re.compile(r"(?:[A-Za-z]+\s+)*[A-Za-z]{2,}(?:\s+(?:∠?\s*[A-Za-z]{1,4}|of|at))?")


def _read_relation(text: str, *, depth: int) -> Node | None:
    sides, signs = _split(text, _RELATION)
    if len(sides) < 2:
        return None
    sides = [side.strip() for side in sides]
    signs = [{"<=": "≤", ">=": "≥", "=<": "≤", "=>": "⇒"}.get(sign, sign) for sign in signs]
    if set(signs) <= {"="}:
        return _read_equation(sides, depth=depth) if all(sides) else None
    if signs == ["∈"]:
        return Named(_plain_name(sides[0]), read_answer(sides[1], depth=depth)) if _is_name(sides[0]) else None
    if not all(sign in _TURNED for sign in signs) or len(sides) > 3:
        return None
    try:
        values = [read_expression(side) for side in sides]
    except UnreadableError:
        return None
    return _interval(values, signs) or _inequality(values, signs)


def _read_equation(sides: list[str], *, depth: int) -> Node | None:
    first, last = sides[0], sides[-1]
    if len(sides) > 2 and not all(_is_roughly(side, last) for side in sides[1:-1]):
        return None  # a = b = c is read as a = c where b is c
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
    names, parts = (_split(side[1:-1], _LIST)[0] if _is_bracketed(side) else [] for side in (first, last))
    if len(names) > 1 and len(names) == len(parts) and all(_is_name(name.strip()) for name in names):
        return Named(_plain_name(first), read_answer(last, depth=depth))
    try:
        if not expressions.symbols(left := read_expression(first)):
            if not _is_roughly(first, last):
                return None
            is_total_first = expressions.is_plain_number(left) and expressions.is_unfinished(read_expression(last))
            return read_answer(first if is_total_first else last, depth=depth)
    except UnreadableError:
        return None
    if difference is None:
        return None
    is_more = any(
        isinstance(part, Number) or (isinstance(part, Operation) and part.name == "negative")
        for part in expressions.walk(left)
    )
    return Relation(difference, "=", value=None if is_more else read_answer(last, depth=depth))


_ROUGHLY = Fraction(1, 100)


def _is_roughly(side: str, last: str) -> bool:
    """Tell whether two sides of an equation have one value, to a hundredth where they have no letters: 5/3 = 1.67."""
    left, right = read_quantity(side), read_quantity(last)
    if left is None or right is None:
        return False
    try:
        bound = (
            Fraction(0) if expressions.symbols(left.expression) or expressions.symbols(right.expression) else _ROUGHLY
        )
        return values.is_same_value(left.expression, right.expression, bound=bound)
    except UnreadableError:
        return False


def _is_bracketed(text: str) -> bool:
    return text[:1] == "(" and _matching(text) == len(text) - 1


def _is_name(text: str) -> bool:
    """Tell whether it is what a value is given to: letters, with an index or an argument: `x_1`, `f(x)`, `Area`."""
    if text in ("e", "i", "π") or len(text.split()) > _MOST_WORDS or not is_name(text):
        return False
    return _NAME.fullmatch(text) is not None or (
        _NOUNS.fullmatch(text) is not None and any(len(word) > 2 for word in text.split())
    )


def _plain_name(text: str) -> str:
    return " ".join(re.sub(r"[{}]", "", text).split())


def _interval(values: list[Expression], signs: list[str]) -> Node | None:
    """Read the interval of a letter between constants."""
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
    items = tuple(_read_item(trimmed(part), depth=depth) for part in parts)
    return Items(opening, _flat(items) if is_set else items, closing)


def _flat(items: tuple[Node, ...]) -> tuple[Node, ...]:
    return tuple(
        inner for item in items for inner in (item.items if isinstance(item, Items) and not item.opening else (item,))
    )


def _read_both_signs(text: str, *, depth: int) -> Node | None:
    """Read `3 ± 2` as 5 and 1."""
    if not ("±" in text or "∓" in text or re.search(r"\+/-|\+-", text)):
        return None
    text = re.sub(r"\+/-|\+-", "±", text)
    upper, lower = (text.replace("±", plus).replace("∓", minus) for plus, minus in ("+-", "-+"))
    return Items("", (_read_item(upper, depth=depth), _read_item(lower, depth=depth)), "", joined_by="or")


_ARTICLES = {"the", "a", "an"}
_TEXT_PART = re.compile(r"(?:\d+)?\.\d+|\d+|[^\W\d_]+|[^\s\w]|_")
_QUIET = set('"`?⟦⟧')
_QUIET_IN_PROSE = set("{}.,!")


def _words(text: str) -> Words:
    """Word by word. Marks of sentences are left out where no mathematics is: 3!:2 is not 3:2."""
    text = re.sub(r"(?<=[A-Za-z]{2})'(?=[a-z]{1,2}\b)", "", text)
    text = re.sub(r"(?<=[A-Za-z][a-z])-(?=[a-z]{2})", "", re.sub(r"(?<=\d)\s+to\s+(?=\d)", ":", text))
    text = re.sub(r"([\^_])\s*\{\s*(\w)\s*\}", r"\1\2", text)
    text = re.sub(r"(\\[A-Za-z]+)\s*\{\s*(\w+)\s*\}", r"\1 \2", text)
    quiet = set(_QUIET)
    if not re.search(r"[\\^_{}]", text):
        quiet |= _QUIET_IN_PROSE - ({"!"} if re.search(r"\d", text) else set())
    parts = [part for part in _TEXT_PART.findall(text) if part not in quiet]
    if len(parts) > 1 and parts[0].lower() in _ARTICLES:
        parts = parts[1:]
    return Words(tuple(parts))


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
    return Matrix(kind, tuple(tuple(_read_item(trimmed(cell), depth=depth + 1) for cell in row) for row in rows))
