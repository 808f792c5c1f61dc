"""Values of expressions: exact where they are rational, else to 60 digits; and whether two are the same.

Two expressions are the same when their values are. Without letters: exact for rationals, to 1e-6 of the larger where
one is written with a decimal point, else to 40 digits. With letters: at several points, to the same bounds; that two
which differ agree there has a chance of about 1e-40. Powers and factorials beyond some thousand digits are not
computed: such an expression is the same as none. So nothing here takes longer than moments, and any thread may call it.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from appliance.tasks.maths.expressions import (
    CONSTANTS,
    Expression,
    Number,
    Operation,
    Symbol,
    UnreadableError,
    has_decimal,
    symbols,
    walk,
)

DECIMALS = Fraction(1, 10**6)  # of the larger number, where one of the two is written as a decimal
_DIGITS = (60, 120)  # with which values are computed
_MORE_DIGITS = (120, 180)  # of values far from zero, where more digits cancel
_NOISE = 1e-40  # relative error that 60 digits stay within
_MOST_BITS = 20_000  # of a rational
_LARGEST_EXPONENT = 1e5  # times the binary logarithm of the base
_LARGEST_FACTORIAL = 500
_POINTS = 5
_LEAST_POINTS = 3


def exact(expression: Expression) -> Fraction | None:
    """Compute its value where that is rational and found without rounding. Raises UnreadableError for a division by
    zero."""
    if isinstance(expression, Number):
        return expression.value
    if isinstance(expression, Symbol):
        return None
    operands = [exact(operand) for operand in expression.operands]
    if any(operand is None for operand in operands):
        return None
    value = _exact_operation(expression.name, *(operand for operand in operands if operand is not None))
    if value is not None and max(value.numerator.bit_length(), value.denominator.bit_length()) > _MOST_BITS:
        raise UnreadableError("too large a number")
    return value


def _exact_operation(name: str, first: Fraction, second: Fraction = Fraction(0)) -> Fraction | None:
    match name:
        case "sum":
            return first + second
        case "difference":
            return first - second
        case "product":
            return first * second
        case "quotient":
            if not second:
                raise UnreadableError("a division by zero")
            return first / second
        case "negative":
            return -first
        case "absolute":
            return abs(first)
        case "floor":
            return Fraction(math.floor(first))
        case "ceiling":
            return Fraction(math.ceil(first))
        case "factorial":
            if first.denominator > 1 or first < 0:
                return None
            if first > _LARGEST_FACTORIAL:
                raise UnreadableError("too large a factorial")
            return Fraction(math.factorial(int(first)))
        case "double factorial":
            if first.denominator > 1 or not 0 <= first <= _LARGEST_FACTORIAL:
                raise UnreadableError("a double factorial of no whole number, or too large")
            return Fraction(math.prod(range(int(first), 0, -2)))
        case "binomial":
            if first.denominator > 1 or second.denominator > 1 or not 0 <= second <= first <= _LARGEST_FACTORIAL:
                return None
            return Fraction(math.comb(int(first), int(second)))
        case "power":
            return _exact_power(first, second)
        case "root":
            if not second:
                raise UnreadableError("a root of degree 0")
            return _exact_power(first, 1 / second)
    return None


def _exact_power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if exponent.denominator > 1:
        root = _exact_root(base, exponent.denominator)
        return None if root is None else _exact_power(root, Fraction(exponent.numerator))
    if not base:
        if exponent < 0:
            raise UnreadableError("a division by zero")
        return Fraction(0 if exponent else 1)
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if base in (1, -1):
        return base if exponent % 2 else Fraction(1)
    if abs(exponent) * bits > _MOST_BITS:
        return None  # to be computed with rounding, if at all
    return base ** int(exponent)


def _exact_root(base: Fraction, degree: int) -> Fraction | None:
    """Compute the root; that of a negative number by an odd degree is negative."""
    if degree > 64:
        return None
    if base < 0:
        root = _exact_root(-base, degree) if degree % 2 else None
        return None if root is None else -root
    over, under = (_whole_root(part, degree) for part in (base.numerator, base.denominator))
    return None if over is None or under is None else Fraction(over, under)


def _whole_root(number: int, degree: int) -> int | None:
    low, high = 0, 1 << (number.bit_length() // degree + 1)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if middle**degree < number else (low, middle)
    return low if low**degree == number else None


_contexts = threading.local()


def _context(digits: int) -> Any:
    """mpmath with so many digits. Each thread has its own: functions such as cot raise the precision while they run."""
    import mpmath

    by_digits = _contexts.__dict__
    if digits not in by_digits:
        by_digits[digits] = mpmath.MPContext()
    by_digits[digits].dps = digits
    return by_digits[digits]


def _value(expression: Expression, *, at: Mapping[str, Fraction], digits: int) -> Any:
    """Return the complex number, rounded. Raises UnreadableError where there is none, or it would take long."""
    context = _context(digits)
    if isinstance(expression, Number):
        return context.mpf(expression.value.numerator) / expression.value.denominator
    if isinstance(expression, Symbol):
        if expression.name in CONSTANTS:
            if expression.name == "∞":
                raise UnreadableError("infinity")
            return {"π": +context.pi, "e": +context.e, "i": context.mpc(0, 1)}[expression.name]
        value = at[expression.name]
        return context.mpf(value.numerator) / value.denominator
    operands = [_value(operand, at=at, digits=digits) for operand in expression.operands]
    try:
        value = _operation(context, expression.name, *operands)
    except (ArithmeticError, ValueError, TypeError, NotImplementedError, context.NoConvergence) as error:
        raise UnreadableError(str(error)) from error
    if not context.isfinite(value):
        raise UnreadableError("no finite value")
    return value


def _operation(context: Any, name: str, first: Any, second: Any = None) -> Any:
    match name:
        case "sum":
            return first + second
        case "difference":
            return first - second
        case "product":
            return first * second
        case "quotient":
            return first / second
        case "negative":
            return -first
        case "absolute":
            return abs(first)
        case "degrees":
            return first * context.pi / 180
        case "floor" | "ceiling":
            return (context.floor if name == "floor" else context.ceil)(first)
        case "factorial":
            return context.gamma(_bounded(first, 1e4) + 1)
        case "double factorial":
            raise UnreadableError("a double factorial of a letter")
        case "binomial":
            return context.binomial(_bounded(first, 1e4), _bounded(second, 1e4))
        case "power":
            return _power(context, first, second)
        case "root":
            if first.imag == 0 and first.real < 0 and second.imag == 0 and second.real % 2 == 1:
                return -_power(context, -first, 1 / second)
            return _power(context, first, 1 / second)
        case "exp":
            return context.exp(_bounded(first, 1e5))
        case "ln" | "log" | "lg":
            base = 10 if second is None and name != "ln" else second
            return context.log(first) if base is None else context.log(first) / context.log(base)
    name = name.replace("arc", "a", 1) if name.startswith("arc") else name
    return getattr(context, name)(_bounded(first, 1e9))


def _bounded(value: Any, most: float) -> Any:
    if abs(value) > most:
        raise UnreadableError("too large a value")
    return value


def _power(context: Any, base: Any, exponent: Any) -> Any:
    if base == 0:
        return base**exponent
    logarithm = abs(context.log(abs(base))) if abs(base) != 0 else 0
    if abs(exponent) * (logarithm + 1) > _LARGEST_EXPONENT:
        raise UnreadableError("too large a power")
    return base**exponent


def is_same_value(left: Expression, right: Expression, *, bound: Fraction = Fraction(0)) -> bool:
    """Tell whether two expressions have the same value, for each value of their letters. bound: relative to the larger,
    0..1; at least 1e-6 where one is written as a decimal. Raises UnreadableError."""
    bound = max(bound, DECIMALS) if has_decimal(left) or has_decimal(right) else bound
    first, second = exact(left), exact(right)
    if first is not None and second is not None:
        return abs(first - second) <= bound * max(abs(first), abs(second))
    if infinity := [
        expression for expression in (left, right) if any(part == Symbol("∞") for part in walk(expression))
    ]:
        return len(infinity) == 2 and left == right
    pairs = list(_values_at_points(left, right))
    return len(pairs) > 0 and all(is_within(*pair, bound=float(bound) or _NOISE) for pair in pairs)


def is_within(first: Any, second: Any, *, bound: float) -> bool:
    """Tell whether two values differ by at most the bound, relative to the larger. bound: 0..1."""
    return bool(abs(first - second) <= bound * max(abs(first), abs(second)))


def is_multiple(left: Expression, right: Expression, *, of_same_sign: bool = False) -> bool:
    """Tell whether one is a constant times the other, not zero times. of_same_sign: a positive one. Raises
    UnreadableError."""
    if symbols(left) != symbols(right) or not symbols(left):
        return False
    bound = float(DECIMALS) if has_decimal(left) or has_decimal(right) else _NOISE
    ratios = [first / second for first, second in _values_at_points(left, right) if second != 0]
    if len(ratios) < _LEAST_POINTS or ratios[0] == 0:
        return False
    if of_same_sign and not (abs(ratios[0].imag) < _NOISE and ratios[0].real > 0):
        return False
    return all(is_within(ratio, ratios[0], bound=bound) for ratio in ratios)


def _values_at_points(left: Expression, right: Expression) -> Iterator[tuple[Any, Any]]:
    """Their values at several points, or their only ones. Raises UnreadableError where there are too few."""
    names = sorted(symbols(left) | symbols(right))
    count, failure = 0, UnreadableError("no values")
    for at, digits in _points(names, operations={*_operations(left), *_operations(right)}):
        try:
            pair = (_without_noise(left, at=at, digits=digits), _without_noise(right, at=at, digits=digits))
        except UnreadableError as error:
            failure = error
            continue
        count += 1
        yield pair
    if count < (_LEAST_POINTS if names else 1):
        raise failure


_PIECEWISE = {"absolute", "root", "power", "floor", "ceiling", "ln", "log", "lg"}
_WIDE_POINTS = 6


def _operations(expression: Expression) -> set[str]:
    return {part.name for part in walk(expression) if isinstance(part, Operation)}


def _points(names: Sequence[str], *, operations: set[str]) -> Iterator[tuple[dict[str, Fraction], tuple[int, int]]]:
    """Yield points, and the digits to compute with: near zero, and far from it where |x + 4| may be x + 4 near zero
    alone; whole numbers too where something is rounded to them."""
    for point in range(_POINTS if names else 1):
        yield {name: _coordinate(name, point) for name in names}, _DIGITS
    if names and operations & _PIECEWISE:
        for point in range(_WIDE_POINTS):
            yield {name: _wide_coordinate(name, point) for name in names}, _MORE_DIGITS
    if names and operations & {"floor", "ceiling"}:
        for whole in (2, -3, 7):
            yield {name: Fraction(whole + place) for place, name in enumerate(names)}, _DIGITS


def _wide_coordinate(name: str, point: int) -> Fraction:
    """Return the value of a letter at a point far from zero: 3 to 60, at the first point positive, at the second
    negative."""
    digest = hashlib.sha256(f"{name} far {point}".encode()).digest()
    size = Fraction(int.from_bytes(digest[:6], "big"), 1 << 48) * 57 + 3
    is_negative = bool(digest[6] % 2) if point > 1 else point == 1
    return -size if is_negative else size


def _coordinate(name: str, point: int) -> Fraction:
    """Return the value of a letter at a point, always the same: up to 3, of either sign but positive for all letters at
    the first."""
    digest = hashlib.sha256(f"{name} {point}".encode()).digest()
    size = Fraction(int.from_bytes(digest[:6], "big"), 1 << 48) * 3 + Fraction(1, 10)
    return -size if point and digest[6] % 2 else size


def _without_noise(expression: Expression, *, at: Mapping[str, Fraction], digits: tuple[int, int]) -> Any:
    """Return the value, zero where it is only the error of rounding: what is not shrinks with more digits."""
    rough = _value(expression, at=at, digits=digits[0])
    if abs(rough) > 1e-30:
        return rough
    fine = _value(expression, at=at, digits=digits[1])
    return fine if abs(fine) > abs(rough) / 10**20 else _context(digits[0]).mpf(0)
