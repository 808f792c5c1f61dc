"""Quantities: numbers in digits, in words or in a base, with money before them or a unit behind."""

from __future__ import annotations

import itertools
import re
from fractions import Fraction

from appliance.tasks.maths import expressions, units, values
from appliance.tasks.maths.expressions import Number, Operation, UnreadableError, read_expression
from appliance.tasks.maths.nodes import Based, Quantity
from appliance.tasks.maths.notation import EUR, GBP, JPY, USD

_BASES = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_BASED = re.compile(
    r"\(?\s*(-?[0-9A-Za-z]+)\s*\)?\s*(?:_\s*\{?\s*\(?(?:base\s*)?(\w+)\)?\s*\}?|,?\s*\(?(?:in\s+)?base[\s-]+\{?(\w+)\}?\)?)"
)


def read_based(text: str) -> Based | None:
    match = _BASED.fullmatch(text)
    if match is None:
        return None
    digits, name = match[1].upper(), (match[2] or match[3]).lower()
    base = int(name) if re.fullmatch(r"\d{1,2}", name) else {"sixteen": 16}.get(name, 0)
    if name in _BASES:
        base = _BASES.index(name) + 2
    if not (digits.lstrip("-")[0].isdigit() or (match[1].isupper() and base > 10)) or not 2 <= base <= 36:
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
_HYPHENATED = re.compile(r"\d{3,}-\d{3,}|\d+(?:-\d+){2,}|\d+(?:/\d+){2,}")
_UNIT_BEHIND = re.compile(r"(.*?[\d)}!π%°⟧])(\s*)([A-Za-zμΩ°%¢⟦][A-Za-zμΩ°%¢⟦⟧/^{}\d\s.*-]*)")


def read_quantity(text: str) -> Quantity | None:
    if (value := _value_of_words(text)) is not None:
        return Quantity(Number(value))
    unit: tuple[str, ...] = ()
    if money := _CURRENCY_FIRST.fullmatch(text):
        unit, text = (money[2],), money[1] + money[3]
    if not re.search(r"[\d\\α-ωΑ-Ω∞+*/^|]", text) and len(re.sub(r"[^A-Za-z]", "", text)) != 1:
        is_of_function = any(re.search(rf"\b{name}\b[ (]", text) for name in (*expressions.FUNCTIONS, "sqrt"))
        if not is_of_function and text.lower() not in ("pi", "infinity") and not _DIFFERENCE.fullmatch(text):
            return None  # letters alone are words
    if _HYPHENATED.fullmatch(text):
        return None  # a date or the like
    for value, behind in _readings(text):
        try:
            expression = read_expression(value)
        except UnreadableError:
            continue
        factor = units.multiple_of(behind)
        if factor > 1:
            expression = Operation("product", (expression, Number(Fraction(factor))))
            expression = Number(exact) if (exact := values.exact(expression)) is not None else expression
        return Quantity(expression, unit + behind)
    return None


_LETTER = r"\s*\(?\s*[A-Za-z](?:_\w)?\s*\)?\s*"
_DIFFERENCE = re.compile(rf"-?{_LETTER}(?:-{_LETTER})+|-{_LETTER}")  # y - x
_FRACTION_WORDS = {"half": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "eighth": 8, "tenth": 10}
_FRACTION_IN_WORDS = re.compile(rf"(?:(a|an|\w+)[\s-]+)?({'|'.join(_FRACTION_WORDS)}|halve)s?")


def _value_of_words(text: str) -> Fraction | None:
    """Read `minus twelve` or `three quarters`; None for other words."""
    words = text.lower()
    sign = -1 if re.match(r"(?:minus|negative)\s", words) else 1
    words = re.sub(r"^(?:minus|negative)\s+", "", words)
    if (value := _VALUE_OF_WORD.get(words)) is not None or (value := _large_number(words)) is not None:
        return Fraction(sign * value)
    if match := _FRACTION_IN_WORDS.fullmatch(words):
        over = 1 if match[1] in (None, "a", "an") else _VALUE_OF_WORD.get(match[1])
        if over is not None and (match[1] or match[2] == "half"):
            return Fraction(sign * over, _FRACTION_WORDS.get(match[2], 2))
    return None


_LARGE = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9}


def _large_number(words: str) -> int | None:
    """Read `two hundred five` or `one thousand`: each multiple once, the largest first."""
    total, part, smallest = 0, None, 10**12
    for word in re.split(r"[\s-]+", words):
        if word in _LARGE:
            if part is None or (word == "hundred" and part > 99) or (word != "hundred" and _LARGE[word] >= smallest):
                return None
            if word == "hundred":
                part *= 100
            else:
                smallest = _LARGE[word]
                total, part = total + part * smallest, None
        elif (value := _VALUE_OF_WORD.get(word)) is None:
            return None
        elif part is None:
            part = value
        elif value and (part % 100 == 0 or (part % 100 in range(20, 100, 10) and value < 10)) and part:
            part += value
        else:
            return None
    return total + (part or 0)


def _readings(text: str) -> list[tuple[str, tuple[str, ...]]]:
    """Return (value, unit) as which a text may be read, the likeliest first."""
    readings: list[tuple[str, tuple[str, ...]]] = []
    match = _UNIT_BEHIND.fullmatch(text)
    if match and not any(re.search(rf"\b{name}\b", match[1]) for name in expressions.FUNCTIONS):
        value, gap, behind = match[1], match[2], match[3].replace("⟦", " ").replace("⟧", " ").strip(" .")
        is_marked = "⟦" in match[3] or behind[:1] in "°%¢"
        words = re.findall(r"[A-Za-zμΩ¢]+", behind)
        is_known = bool(words) and units.unit_of_word(words[0]) is not None
        parts = units.read_unit(behind)
        is_factor = not is_marked and units.may_be_factors(behind, value=value)
        if (parts is not None and not is_factor) and (
            is_marked or (gap and not units.is_algebra(behind)) or (is_known and (gap or len(words[0]) > 1))
        ):
            readings.append((value, parts))
    return [*readings, (text.replace("⟦", " ").replace("⟧", " "), ())]
