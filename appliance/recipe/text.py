"""Text that a user wrote: YAML as a tree in which every value knows its line, paths that can be, patterns that compile.

The tree is built on the events of PyYAML's parser, with none of its tags or guesses: its own nodes hide anchors, and
go to any depth. Refused: duplicate keys, anchors and aliases, tags, several documents, more than 64 KiB, more than 8
levels, numbers that are not finite, control characters (a line break in a value is one) and halves of a character.
Plain scalars follow YAML 1.2: `1e-6` is a number, `on`, `yes` and `22:22` are text.
"""

from __future__ import annotations

import math
import os
import os.path
import re
import unicodedata
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import yaml

from appliance.finding import Finding, fault

MAX_BYTES = 64 * 1024
MAX_DEPTH = 8
MAX_PATH_BYTES, MAX_NAME_BYTES = 1024, 255  # Linux takes 4096 and 255; a run needs some below it
MAX_PATTERN = 200  # characters: deeper ones would end re's own recursion
_WRITE = "close brackets and quotes, indent with spaces, put a text with `: ` or ` #` in quotes"
_MAX_DIGITS = 18  # fits an int64; a longer row of digits is a slip or an attack

_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]+")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")

Scalar = None | bool | int | float | str


class Refused(Enum):
    """Stands for a value that was refused, so that nobody complains about it twice."""

    VALUE = "refused"


@dataclass(frozen=True)
class Node:
    value: Scalar | list[Node] | dict[str, Node] | Refused
    """A scalar, a list of nodes, or a mapping of nodes."""
    place: str
    """`file:line`, or the option it came from."""


class _TooDeep(Exception):
    """Stops the reading of a document that nests too deep."""


def scalar(text: str) -> Scalar:
    """Read a plain scalar by YAML 1.2's core rules. Raises ValueError with the reason for a number that is none."""
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if _INT.fullmatch(text):
        if len(text.lstrip("+-")) > _MAX_DIGITS:
            raise ValueError("a number of more than 18 digits")
        return int(text)
    if _NOT_FINITE.fullmatch(text) or (FLOAT.fullmatch(text) and not math.isfinite(float(text))):
        raise ValueError("not a finite number")
    return float(text) if FLOAT.fullmatch(text) else text


def in_yaml(value: Scalar) -> str:
    """Write a scalar as YAML has it: `true`, `false` and `null`, and anything else as its text."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def odd_character(text: str) -> str:
    """Return the first control character or lone surrogate of a text, such as `U+001B`, or an empty text. No name and
    no path needs one; on a terminal, in a log and in another program's grammar they are read as commands."""
    return next((f"U+{ord(each):04X}" for each in text if unicodedata.category(each) in ("Cc", "Cs")), "")


def parse(raw: bytes, *, file: str) -> tuple[Node | None, list[Finding]]:
    """Read the tree and every fault on the way; no tree when the document cannot be read at all. file: how messages
    call the text."""
    if len(raw) > MAX_BYTES:
        message = f"more than {MAX_BYTES} bytes, the most that a recipe may have"
        return None, [fault((), message, "is this a recipe?", where=file)]
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        return None, [fault((), "not UTF-8 text", "save the file as UTF-8", where=f"{file}:{line}")]
    reader = _Reader(file=file)
    try:
        tree = reader.document(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{file}:{mark.line + 1}" if mark else file
        return None, [*reader.faults, fault((), f"not YAML: {error.problem or error.context}", _WRITE, where=where)]
    except yaml.YAMLError as error:
        return None, [*reader.faults, fault((), f"not YAML: {str(error).splitlines()[0]}", where=file)]
    except (ValueError, OverflowError):  # PyYAML's own: the number of an escape or of a %YAML line
        return None, [*reader.faults, fault((), "not YAML: an escape that stands for no character", where=file)]
    except _TooDeep:
        return None, reader.faults
    return tree, reader.faults


class _Reader:
    """Folds PyYAML's events into nodes and collects what is refused."""

    def __init__(self, *, file: str) -> None:
        self.file = file
        self.faults: list[Finding] = []

    def document(self, text: str) -> Node:
        self._events = yaml.parse(text, Loader=yaml.SafeLoader)
        root = Node({}, self.file)
        documents = 0
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    self._refuse(event, "a second document", "a file holds one recipe")
                node = self._node(next(self._events), path=())
                root = node if documents == 1 else root
        return root

    def _place(self, event: yaml.Event) -> str:
        return f"{self.file}:{event.start_mark.line + 1}"

    def _refuse(self, event: yaml.Event, message: str, hint: str, *, path: tuple[str, ...] = ()) -> None:
        keys = (".".join(path),) if path else ()
        self.faults.append(fault(keys, message, hint, where=self._place(event)))

    def _node(self, event: yaml.Event, *, path: tuple[str, ...]) -> Node:
        if len(path) > MAX_DEPTH:
            self._refuse(event, f"more than {MAX_DEPTH} levels deep", "a recipe has three levels")
            raise _TooDeep
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            self._refuse(event, "anchors and aliases are not allowed", "write the value out", path=path)
        if isinstance(event, yaml.AliasEvent):
            return Node(Refused.VALUE, self._place(event))
        if event.tag is not None:
            self._refuse(event, f"the tag `{event.tag}` is not allowed", "write the plain value", path=path)
        if isinstance(event, yaml.MappingStartEvent):
            return Node(self._mapping(path), self._place(event))
        if isinstance(event, yaml.SequenceStartEvent):
            return Node(self._sequence(path), self._place(event))
        return Node(self._scalar(event, path=path), self._place(event))

    def _scalar(self, event: yaml.ScalarEvent, *, path: tuple[str, ...]) -> Scalar | Refused:
        if odd := odd_character(event.value):
            self._refuse(event, f"the control character {odd} is not allowed", "remove it", path=path)
            return Refused.VALUE
        if event.style is not None:  # quoted or block: always text
            return event.value
        try:
            return scalar(event.value)
        except ValueError as error:
            self._refuse(event, f"{error}: `{event.value[:40]}`", "", path=path)
            return Refused.VALUE

    def _sequence(self, path: tuple[str, ...]) -> list[Node]:
        items: list[Node] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            items.append(self._node(event, path=(*path, str(len(items)))))
        return items

    def _mapping(self, path: tuple[str, ...]) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key = self._key(event, path=path)
            value = self._node(next(self._events), path=(*path, key))
            if key in entries:
                first = entries[key].place.rsplit(":", 1)[-1]
                self._refuse(event, f"the key is already in line {first}", "keep one of them", path=(*path, key))
            else:
                entries[key] = Node(value.value, self._place(event))
        return entries

    def _key(self, event: yaml.Event, *, path: tuple[str, ...]) -> str:
        if isinstance(event, yaml.ScalarEvent):
            if event.anchor is not None:
                self._refuse(event, "anchors and aliases are not allowed", "write the value out", path=path)
            if odd := odd_character(event.value):
                self._refuse(event, f"a key with the control character {odd}", "remove it", path=path)
                return "?"
            return event.value
        self._refuse(event, "a key must be text", "", path=path)
        self._node(event, path=(*path, "?"))
        return "?"


def full_path(path: str) -> Path:
    """Make a path absolute, with `~` for a home. Any text will do: Path.expanduser also fails for `./~x`, a file's
    name."""
    return Path(os.path.expanduser(path)).absolute()


def path_problem(path: str) -> str:
    """Return why no file can have this path, or an empty text."""
    if path.startswith("~") and os.path.expanduser(path).startswith("~"):
        return f"`{path.partition('/')[0][:60]}` is nobody's home on this host"
    parts = os.fsencode(path).split(b"/")
    if len(os.fsencode(path)) > MAX_PATH_BYTES or max(map(len, parts)) > MAX_NAME_BYTES:
        return f"a path has at most {MAX_PATH_BYTES} bytes, and {MAX_NAME_BYTES} in each of its names"
    return ""


def pattern_problem(pattern: str) -> str:
    """Return why this is no regular expression, or an empty text."""
    if len(pattern) > MAX_PATTERN:
        return f"more than {MAX_PATTERN} characters"
    try:
        re.compile(pattern)
    except (re.error, OverflowError) as error:  # the latter for a repetition count
        return str(error)
    return ""
