"""Expressions of one value, read from the normal form.

sum      [+-] product ((+ | -) product)*
product  power ((* | / | nothing) power)*        two numbers side by side are no product
power    atom [! | !! | °] [^ power [!]]
atom     number, letter with its index, ( sum ), { sum }, |sum|, floor, ceiling, \\frac, \\binom, \\sqrt[n]{}, f(sum)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

_DEEPEST = 40

FUNCTIONS = {
    *("sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh"),
    *("ln", "log", "lg", "exp"),
}
_INVERTED = {"sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh"}
_LOGARITHMS = {"ln", "log", "lg", "exp"}
CONSTANTS = {"π", "e", "i", "∞"}
_WORDS = {
    "pi": "π",
    "infinity": "∞",
    "infty": "∞",
    "inf": "∞",
    "theta": "θ",
    "sqrt": "\\sqrt",
    **{f: f for f in FUNCTIONS},
}
_WORDS |= {"alpha": "α", "beta": "β", "gamma": "γ", "lambda": "λ", "phi": "φ", "omega": "ω"}

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?|\.\d+)|(?P<command>\\(?:frac|binom|sqrt))|(?P<word>[A-Za-z]+|[α-ωΑ-Ω∞])"
    r"|(?P<mark>\\?[{}]|[-+*/^!_()\[\]|=°']|[⌊⌋⌈⌉]))"
)
_DERIVATIVE = re.compile(r"\\frac\s*\{\s*[d∂][^{}]*\}\s*\{\s*[d∂]\s*[A-Za-z]|\bd[a-z]/d[a-z]\b")
_CLOSING = {"(": ")", "{": "}", "[": "]", "⌊": "⌋", "⌈": "⌉"}


class UnreadableError(ValueError):
    """A text that is no expression, or an expression that cannot be evaluated."""


@dataclass(frozen=True)
class Number:
    value: Fraction
    is_decimal: bool = False
    """Whether the number is written with digits behind a decimal point, and so may be rounded."""


@dataclass(frozen=True)
class Symbol:
    name: str


@dataclass(frozen=True)
class Operation:
    name: str
    operands: tuple[Expression, ...]


Expression = Number | Symbol | Operation


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    is_apart: bool
    """Whether a blank is before the token."""


def read_expression(text: str) -> Expression:
    """Read the expression that the whole text is. Raises UnreadableError."""
    if _DERIVATIVE.search(text):
        raise UnreadableError("a derivative")
    parser = _Parser(tuple(_tokens(text)))
    expression = parser.sum()
    if parser.place < len(parser.tokens):
        raise UnreadableError(text[:60])
    return expression


def _tokens(text: str) -> Iterator[_Token]:
    place, end = 0, len(text.rstrip())
    while place < end:
        token = _TOKEN.match(text, place)
        if token is None or token.lastgroup is None:
            raise UnreadableError(text[:60])
        spelled = token[token.lastgroup]
        is_apart = token.start(token.lastgroup) > place
        if token.lastgroup == "word":
            yield from _letters(spelled, is_apart=is_apart)
        else:
            yield _Token(token.lastgroup, spelled, is_apart)
        place = token.end()


def _letters(run: str, *, is_apart: bool) -> Iterator[_Token]:
    """Yield a name of a function or a constant; else up to three letters, each a factor. What is longer is a word."""
    if (known := _WORDS.get(run)) is not None:
        yield _Token(
            "command" if known == "\\sqrt" else "function" if known in FUNCTIONS else "letter", known, is_apart
        )
        return
    if len(run) > 3:
        raise UnreadableError(run[:60])
    for number, letter in enumerate(run):
        yield _Token("letter", letter, is_apart and not number)


class _Parser:
    """Reader by recursive descent."""

    place: int
    """Place of the token that is read next."""

    def __init__(self, tokens: tuple[_Token, ...]) -> None:
        self.tokens = tokens
        self.place = 0
        self._depth = 0
        self._bars = 0

    def _next(self) -> _Token:
        if self.place == len(self.tokens):
            return _Token("end", "", False)
        return self.tokens[self.place]

    def _takes(self, *texts: str) -> str:
        token = self._next()
        if token.kind == "mark" and token.text in texts:
            self.place += 1
            return token.text
        return ""

    def _must_take(self, text: str) -> None:
        if not self._takes(text):
            raise UnreadableError(f"no {text}")

    def sum(self) -> Expression:
        sign = self._takes("+", "-")
        expression = self._product()
        if sign == "-":
            expression = negative(expression)
        while sign := self._takes("+", "-"):
            expression = Operation("sum" if sign == "+" else "difference", (expression, self._product()))
        return expression

    def _product(self) -> Expression:
        expression = self._power()
        while True:
            if sign := self._takes("*", "/"):
                minus = self._takes("-")
                factor = self._power()
                factor = negative(factor) if minus else factor
                expression = Operation("product" if sign == "*" else "quotient", (expression, factor))
            elif self._begins_factor():
                before, after = self.tokens[self.place - 1], self._next()
                factor = self._power()
                if before.kind == "number" and after.text == "\\frac" and isinstance(expression, Number):
                    expression = _mixed_number(expression, factor)
                else:
                    expression = Operation("product", (expression, factor))
            else:
                return expression

    def _begins_factor(self) -> bool:
        """Tell whether a factor follows without a sign. A number does not: 1 2 is not 2, x2 not 2x."""
        token = self._next()
        if token.kind == "mark":
            return token.text in "({⌊⌈"
        return token.kind in ("letter", "function", "command")

    def _power(self) -> Expression:
        expression = self._atom()
        if mark := self._takes("!", "°"):
            is_double = mark == "!" and self._takes("!")
            name = "double factorial" if is_double else "factorial" if mark == "!" else "degrees"
            expression = Operation(name, (expression,))
        if self._takes("^"):
            expression = Operation("power", (expression, self._exponent()))
            if self._takes("!"):
                expression = Operation("factorial", (expression,))
        if self._next().text in ("!", "°", "'"):
            raise UnreadableError("several factorials or degrees, or a derivative")
        return expression

    def _exponent(self) -> Expression:
        """Return the part in braces, or what is there without them: of `2^-3` and `2^10` the number, of `x^2y` the
        2."""
        if self._takes("-"):
            return negative(self._power())
        if self._next().text == "(" or self._next().kind != "number":
            return self._power()
        return self._atom()

    def _argument(self) -> Expression:
        """Read a command's argument: braced, or one letter or digit: `\\frac12` is a half."""
        token = self._next()
        if token.kind == "number" and "." not in token.text:
            digit, rest = token.text[0], token.text[1:]
            left = (_Token("number", rest, False),) if rest else ()
            self.tokens = (*self.tokens[: self.place], *left, *self.tokens[self.place + 1 :])
            return Number(Fraction(int(digit)))
        if token.text == "{" or token.kind in ("letter", "command"):
            return self._atom()
        raise UnreadableError("no argument")

    def _group(self, opening: str) -> Expression:
        expression = self.sum()
        self._must_take(_CLOSING[opening])
        return expression

    def _atom(self) -> Expression:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise UnreadableError("nested too deeply")
        expression = self._any_atom()
        self._depth -= 1
        return expression

    def _any_atom(self) -> Expression:
        token = self._next()
        if token.kind == "number":
            self.place += 1
            if len(token.text) > 400:
                raise UnreadableError("too many digits")
            value = Fraction(token.text)
            return Number(value, is_decimal=value.denominator != 1)  # 1000000.0 is as exact as 1000000
        if token.kind == "letter":
            self.place += 1
            return self._symbol(token.text)
        if token.kind == "function":
            self.place += 1
            return self._function(token.text)
        if token.kind == "command":
            self.place += 1
            return self._command(token.text)
        if opening := self._takes("(", "{", "⌊", "⌈"):
            inner = self._group(opening)
            if opening in "({":
                return inner
            return Operation("floor" if opening == "⌊" else "ceiling", (inner,))
        if self._takes("|"):
            inner = self.sum()
            self._must_take("|")
            return Operation("absolute", (inner,))
        raise UnreadableError("no value")

    def _symbol(self, letter: str) -> Expression:
        if self._next().text != "_":
            return self._of_argument(letter)
        self.place += 1
        index = self._next()
        if index.kind in ("number", "letter"):
            self.place += 1
            return Symbol(f"{letter}_{index.text}")
        self._must_take("{")
        parts = []
        while not self._takes("}"):
            part = self._next()
            if part.kind == "end":
                raise UnreadableError("no }")
            parts.append(part.text)
            self.place += 1
        return Symbol(f"{letter}_{''.join(parts)}")

    def _of_argument(self, letter: str) -> Expression:
        """Return the letter, or `f(x)` and `P(2)` as one: with one letter or number in the brackets, close to them."""
        tokens = self.tokens[self.place : self.place + 3]
        shape = [token.text if token.kind == "mark" else token.kind for token in tokens]
        if shape in (["(", "letter", ")"], ["(", "number", ")"]) and not any(token.is_apart for token in tokens):
            self.place += 3
            return Symbol(f"{letter}({tokens[1].text})")
        return Symbol(letter)

    def _function(self, name: str) -> Expression:
        base: Expression | None = None
        if self._takes("_"):
            if name not in ("log", "lg"):
                raise UnreadableError(f"an index of {name}")
            base = self._argument()
        exponent = self._exponent() if self._takes("^") else None
        value = Operation(name, (self._function_argument(name), *((base,) if base is not None else ())))
        if exponent is None:
            return value
        if exponent == negative(Number(Fraction(1))):
            if name not in _INVERTED:
                raise UnreadableError(f"the inverse of {name}")
            return Operation(f"arc{name}", value.operands)
        return Operation("power", (value, exponent))

    def _function_argument(self, name: str) -> Expression:
        """Read a function's argument: in brackets, else all factors up to the next sign, bracket or function: sin 2x is
        sin(2x). What is divided is the function, as in ln 2/2, but for sin π/6: its argument has numbers and π
        alone."""
        if self._next().text in ("(", "{", "|"):
            return self._power() if self._next().text != "(" else self._atom()
        expression = self._power()
        while self._next().kind in ("letter", "command") or self._next().text == "{":
            expression = Operation("product", (expression, self._power()))
        if self._next().text == "/" and name in _LOGARITHMS and expression == Number(Fraction(1)):
            raise UnreadableError("ln 1/2 is the logarithm of 1/2 to some, 0 to others")
        if self._next().text == "/" and name not in _LOGARITHMS and not symbols(expression):
            self.place += 1
            expression = Operation("quotient", (expression, self._power()))
        return expression

    def _command(self, name: str) -> Expression:
        if name == "\\sqrt":
            index: Expression = Number(Fraction(2))
            if self._takes("["):
                index = self._group("[")
            argument = self._atom() if self._next().text == "(" else self._radicand()
            return Operation("root", (argument, index))
        return Operation("quotient" if name == "\\frac" else "binomial", (self._argument(), self._argument()))

    def _radicand(self) -> Expression:
        """√12 is the root of 12, also `\\sqrt12`: nobody means its 1 alone."""
        return self._atom() if self._next().kind == "number" else self._argument()


def negative(expression: Expression) -> Expression:
    return Operation("negative", (expression,))


def _mixed_number(whole: Number, fraction: Expression) -> Expression:
    """`1\\frac{1}{2}` is 3/2: a fraction behind a number is added where it is a proper one of whole numbers."""
    if isinstance(fraction, Operation) and fraction.name == "quotient" and whole.value.denominator == 1:
        over, under = fraction.operands
        are_whole = isinstance(over, Number) and isinstance(under, Number) and not (over.is_decimal or under.is_decimal)
        if are_whole and 0 < over.value < under.value:
            return Number(whole.value + over.value / under.value)
    return Operation("product", (whole, fraction))


def walk(expression: Expression) -> Iterator[Expression]:
    """Yield the expression and all its parts."""
    yield expression
    if isinstance(expression, Operation):
        for operand in expression.operands:
            yield from walk(operand)


def symbols(expression: Expression) -> frozenset[str]:
    """Return the letters that mean something unknown."""
    return frozenset(part.name for part in walk(expression) if isinstance(part, Symbol) and part.name not in CONSTANTS)


def has_decimal(expression: Expression) -> bool:
    return any(isinstance(part, Number) and part.is_decimal for part in walk(expression))


def is_plain_number(expression: Expression) -> bool:
    """Tell whether nothing is left to compute: a number, its negative, or one number over another."""
    while isinstance(expression, Operation) and expression.name == "negative":
        (expression,) = expression.operands
    if isinstance(expression, Operation) and expression.name == "quotient":
        return all(map(is_plain_number, expression.operands))
    return isinstance(expression, Number)


def is_unfinished(expression: Expression) -> bool:
    """Tell whether it is sums, products and fractions of numbers that nobody has computed, as in a question."""
    if is_plain_number(expression):
        return False
    to_do = {"sum", "difference", "product", "quotient", "negative"}
    return all(
        isinstance(part, Number) or (isinstance(part, Operation) and part.name in to_do) for part in walk(expression)
    )
