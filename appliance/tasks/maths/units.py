"""Units of answers: which words behind a number, or signs before it, mean the same.

A unit that only one of two answers has makes no difference: 5 cm answers 5. Two that differ do: 5 cm is not 5 m, but
500 cm is. Words that are no unit of measure, such as `red apples`, may be fewer on one side.
"""

from __future__ import annotations

import re
from fractions import Fraction

from appliance.tasks.maths.english import NO_PART_OF_A_UNIT
from appliance.tasks.maths.notation import EUR, GBP, JPY, USD

PERCENT = "%"
_CURRENCIES = {USD, EUR, GBP, JPY}
_SPELLINGS = {
    "mm": "mm millimeter millimeters millimetre millimetres",
    "cm": "cm cms centimeter centimeters centimetre centimetres",
    "dm": "dm decimeter decimeters decimetre decimetres",
    "m": "m meter meters metre metres",
    "km": "km kms kilometer kilometers kilometre kilometres",
    "inch": "in inch inches",
    "ft": "ft foot feet",
    "yd": "yd yds yard yards",
    "mi": "mi mile miles",
    "mg": "mg milligram milligrams",
    "g": "g gram grams",
    "kg": "kg kgs kilogram kilograms kilo kilos",
    "lb": "lb lbs pound pounds",
    "oz": "oz ounce ounces",
    "t": "ton tons tonne tonnes",
    "ms": "ms millisecond milliseconds",
    "s": "s sec secs second seconds",
    "min": "min mins minute minutes",
    "h": "h hr hrs hour hours",
    "day": "day days",
    "week": "week weeks",
    "month": "month months",
    "year": "year years yr yrs",
    "ml": "ml mL milliliter milliliters millilitre millilitres",
    "l": "l L liter liters litre litres",
    "gal": "gal gallon gallons",
    "quart": "quart quarts",
    "pint": "pint pints",
    "rad": "rad rads radian radians",
    "N": "N newton newtons",
    "J": "J joule joules",
    "kJ": "kJ kilojoule kilojoules",
    "W": "W watt watts",
    "kW": "kW kilowatt kilowatts",
    "V": "V volt volts",
    "A": "A amp amps ampere amperes",
    "Hz": "Hz hertz",
    "Pa": "Pa pascal pascals",
    "K": "K kelvin kelvins",
    "mol": "mol mols mole moles",
    "Ω": "Ω ohm ohms",
    "°": "° deg degs degree degrees",
    "C": "C celsius",
    "F": "F fahrenheit",
    "am": "am AM",
    "pm": "pm PM",
    "dozen": "dozen dozens",
    "thousand": "thousand thousands",
    "million": "million millions",
    "billion": "billion billions",
    "trillion": "trillion trillions",
    "hundred": "hundred hundreds",
    "%": "% percent pct",
    "cent": "cent cents ¢",
    USD: f"{USD} dollar dollars buck bucks usd",
    EUR: f"{EUR} euro euros eur",
    GBP: f"{GBP} gbp sterling",
    JPY: f"{JPY} yen jpy",
}
_UNIT_OF = {spelling: unit for unit, spellings in _SPELLINGS.items() for spelling in spellings.split()}
_SPEEDS = {"mph": "mi", "kph": "km", "kmh": "km", "kmph": "km"}
_MULTIPLES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_IN_BASE_UNITS = {  # (what is measured, how many of the smallest unit here)
    **{
        "mm": ("length", 1),
        "cm": ("length", 10),
        "dm": ("length", 100),
        "m": ("length", 1000),
        "km": ("length", 10**6),
    },
    **{"inch": ("feet", 1), "ft": ("feet", 12), "yd": ("feet", 36), "mi": ("feet", 63_360)},
    **{"mg": ("mass", 1), "g": ("mass", 1000), "kg": ("mass", 10**6)},
    **{"oz": ("weight", 1), "lb": ("weight", 16), "ml": ("volume", 1), "l": ("volume", 1000)},
    **{"ms": ("time", 1), "s": ("time", 1000), "min": ("time", 60_000), "h": ("time", 3_600_000)},
    **{"day": ("time", 86_400_000), "week": ("time", 604_800_000), "cent": ("dollars", 1), USD: ("dollars", 100)},
}
_NO_WORDS = {
    "of",
    "the",
    "a",
    "an",
    "in",
    "total",
    "each",
    "all",
    "left",
    "altogether",
    "remaining",
    "unit",
    "units",
}
_MOST_WORDS = 3  # of a unit that is no measure
_POWERS = {"square": "^2", "sq": "^2", "squared": "^2", "cubic": "^3", "cubed": "^3", "cu": "^3"}
_PART = re.compile(r"[A-Za-zμΩ¢]++|[°%]|\^\s*+\{?+\s*+-?+\d\s*+\}?+|/")
_WHOLE = re.compile(rf"(?:\s*+(?:{_PART.pattern})[.*·-]?+)+\s*+")
_LETTERS_OF_ALGEBRA = set("abcxyz")


def unit_of_word(word: str) -> str | None:
    """Return the unit that a word or abbreviation names; None where it names none."""
    if word in _SPEEDS:
        return word
    return _UNIT_OF.get(word) or (_UNIT_OF.get(word.lower()) if len(word) > 2 else None)


def multiple_of(parts: tuple[str, ...]) -> int:
    """Return what a number is multiplied by: `2 dozen` is 24."""
    factor = 1
    for part in parts:
        factor *= _MULTIPLES.get(part, 1)
    return factor


def conversion(left: tuple[str, ...], right: tuple[str, ...]) -> Fraction | None:
    """Return how many of the other unit one of the first is: 60 of hours and minutes. None where they measure two
    things."""
    if len(left) != 1 or len(right) != 1 or left[0] not in _IN_BASE_UNITS or right[0] not in _IN_BASE_UNITS:
        return None
    (kind, size), (other_kind, other_size) = _IN_BASE_UNITS[left[0]], _IN_BASE_UNITS[right[0]]
    return Fraction(size, other_size) if kind == other_kind else None


def read_unit(text: str) -> tuple[str, ...] | None:
    """Read the parts of a unit such as `cm^2`, `miles per hour` or `red apples`; None where the text is none."""
    if not _WHOLE.fullmatch(text):
        return None
    words = re.findall(r"[A-Za-z]+", text)
    if not NO_PART_OF_A_UNIT.isdisjoint(word.lower() for word in words):
        return None
    if sum(unit_of_word(word) is None and word.lower() not in _NO_WORDS for word in words) > _MOST_WORDS:
        return None
    parts: list[str] = []
    power = ""
    for part in _PART.findall(text):
        word = part.replace(" ", "").replace("{", "").replace("}", "")
        if word in ("squared", "cubed"):
            if not parts or parts[-1] not in _SPELLINGS:
                return None  # 7 squared is 49
            parts.append(_POWERS[word])
        elif word.lower() in _POWERS:
            power = _POWERS[word.lower()]
        elif word in _SPEEDS:
            parts += [_SPEEDS[word], "/", "h"]
        elif word.lower() in ("per", "/"):
            parts.append("/")
        elif word.lower() not in _NO_WORDS or (word == text.strip()):
            parts.append(unit_of_word(word) or singular(word.lower()))
            if power:
                parts.append(power)
                power = ""
    return tuple(parts)


def singular(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


def may_be_factors(text: str, *, value: str) -> bool:
    """Tell whether letters that no font marks as a unit may be factors of the value before
    them: `2 m g`, `\\sqrt2 g`."""
    words = re.findall(r"[A-Za-zμΩ]+", text)
    if re.search(r"[A-Za-zα-ωΑ-Ω]", re.sub(r"\\(?:frac|sqrt|binom)|pi|π|USD|EUR", "", value)):
        return any(len(word) < 3 for word in words)
    letters = [word for word in words if len(word) == 1]
    if "/" in text and all(unit_of_word(word) for word in words):
        return False
    is_computed = re.search(r"frac|sqrt|π|pi|\^|[()!]", value) is not None
    if letters and "^" in text and letters != ["m"]:
        return True
    return len(letters) > (0 if is_computed else 1) or (bool(letters) and any(len(word) == 2 for word in words))


def is_algebra(text: str) -> bool:
    """Tell whether letters behind a number, apart from it, are factors rather than a unit: `2 xy`, but no `2 men`."""
    words = re.findall(r"[A-Za-z]+", text)
    return not any(unit_of_word(word) for word in words) and all(
        len(word) < 3 or (len(word) == 3 and set(word) <= _LETTERS_OF_ALGEBRA) for word in words
    )


def is_same_unit(left: tuple[str, ...], right: tuple[str, ...]) -> bool:
    """Tell whether a careful person takes two units for the same; an empty unit is none and differs from nothing."""
    left, right = (tuple(part for part in unit if part not in _MULTIPLES) for unit in (left, right))
    if not left or not right or left == right:
        return True
    currencies = set(left) & _CURRENCIES
    if currencies:
        return currencies == set(right) & _CURRENCIES
    if {"lb", GBP} in ({*left, *right}, {*left} | {*right}):
        return True
    measures = [tuple(part for part in unit if part in _SPELLINGS or part[0] in "^/") for unit in (left, right)]
    words = [{part for part in unit if part not in _SPELLINGS and part[0] not in "^/"} for unit in (left, right)]
    return measures[0] == measures[1] and (words[0] <= words[1] or words[1] <= words[0])


def are_different_measures(left: tuple[str, ...], right: tuple[str, ...]) -> bool:
    """Tell whether both have units of measure or money, and not the same ones."""
    measures = [
        tuple(
            part
            for part in unit
            if (part in _SPELLINGS or part[0] in "^/") and part not in _MULTIPLES and part != PERCENT
        )
        for unit in (left, right)
    ]
    return bool(measures[0] and measures[1]) and not is_same_unit(measures[0], measures[1])
