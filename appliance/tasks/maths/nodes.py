"""What an answer can be, once it is read."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.tasks.maths.expressions import Expression


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
    """Several answers in brackets, or in none."""

    opening: str
    """Bracket before the items; empty where the list has none."""
    items: tuple[Node, ...]
    closing: str
    """Bracket behind the items; empty where the list has none."""
    joined_by: str = ","
    """Word or sign between the items: `,`, `and` or `or`."""


@dataclass(frozen=True)
class Union:
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Matrix:
    kind: str
    """Letter of the LaTeX environment: empty where rows are in brackets, `v` for a determinant."""
    rows: tuple[tuple[Node, ...], ...]


@dataclass(frozen=True)
class Named:
    """`x = 5`, or x in an interval."""

    name: str
    value: Node
    difference: Expression | None = None
    """Left side minus right side, where the node is an equation of expressions."""


@dataclass(frozen=True)
class Relation:
    """An equation or inequality whose left side is no name, as `difference <sign> 0`."""

    difference: Expression
    sign: str
    """Sign of the relation: =, <, ≤ or ≠."""
    value: Node | None = None
    """Right side, where the left side is only letters."""


@dataclass(frozen=True)
class Option:
    """`(C) 12`: an option's letter and what it says."""

    letter: str
    value: Node


Node = Quantity | Words | Based | Items | Union | Matrix | Named | Relation | Option
