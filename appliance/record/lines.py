"""What one process of a run writes as JSON and another one reads: pydantic dataclasses, a file each or a line of one.

A file that is not of its kind raises. Of a line of a file that only grows, what is not of its kind counts as not there:
a run that was killed leaves half a line, and a disk that was full two in one.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from appliance.files import whole_file

STRICT = ConfigDict(strict=True)
LARGEST = 1e30
Number = Annotated[float, Field(gt=-LARGEST, lt=LARGEST)]  # of the size of anything that is measured
Count = Annotated[int, Field(ge=0, lt=1 << 62)]
Code = Annotated[int, Field(gt=-256, lt=256)]  # of a process that ended
Kind = TypeVar("Kind")


def finite(value: object) -> float | None:
    """Return a finite number of the size of anything that is measured; None for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and -LARGEST < value < LARGEST else None


Measured = Annotated[float | None, BeforeValidator(finite)]  # as a worker measured it: what is not finite is None


def as_json(record: Any, *, indent: int | None = None) -> str:
    """Write a record as JSON in ASCII, so that half a character of a log does no harm."""
    return json.dumps(dataclasses.asdict(record), indent=indent, default=str)


def read(path: Path, kind: type[Kind]) -> Kind:
    """Read a record from a file. Raises OSError when there is no such file, ValueError when it is not one that this
    program writes."""
    return parse(path.read_text(), kind, place=str(path))


def parse(text: str, kind: type[Kind], *, place: str) -> Kind:
    """Parse a record. place: where the text is from.  Raises ValueError, one line with the place."""
    try:
        raw = json.loads(text)
        if (version := _version(kind)) and (not isinstance(raw, dict) or raw.get("schema_version") != version):
            raise ValueError(f"not of schema_version {version}")
        return _reader(kind).validate_json(_without_halves(raw))
    except RecursionError as error:
        raise ValueError(f"{place}: nested too deeply") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    name = ".".join(map(str, first["loc"])) or "its content"
    raise ValueError(f"{place}: {name} is not one that this program writes: {first['msg']}")


def parse_line(text: str, kind: type[Kind]) -> Kind | None:
    """Parse a line; None where it is not of this kind. A field that has a default gets it where the line's value is of
    another type."""
    reader = _reader(kind)
    try:
        return reader.validate_json(text)
    except ValidationError as error:
        raw, wrong = json_object(text), {each["loc"][0] for each in error.errors(include_url=False) if each["loc"]}
    try:
        return reader.validate_json(_without_halves({key: raw[key] for key in raw.keys() - wrong}))
    except (ValidationError, RecursionError):
        return None


def lines_of(path: Path) -> Iterator[str]:
    """Yield the lines of a file that only grows and may not be there yet, as they are read. Raises OSError."""
    if path.is_file():
        with path.open(errors="replace") as file:
            yield from (line.removesuffix("\n") for line in file)


def cut_lines(path: Path, *, after: int, attempt: int, may_repeat: bool = False) -> Path | None:
    """Keep the lines of steps up to `after`, each step once; move the others into a file beside it, which is returned.

    A line that was torn by the end of a process is one of the others. None when there was nothing to cut.
    may_repeat: a step may have several lines.
    """
    if not path.exists() or all(is_kept for _, is_kept in _judged(path, after=after, may_repeat=may_repeat)):
        return None
    aside = path.with_name(f"{path.stem}.cut-{attempt}{path.suffix}")
    with whole_file(path) as kept, whole_file(aside) as cut, kept.open("wb") as to_keep, cut.open("wb") as to_cut:
        for line, is_kept in _judged(path, after=after, may_repeat=may_repeat):
            (to_keep if is_kept else to_cut).write(line)
    return aside


def _judged(path: Path, *, after: int, may_repeat: bool) -> Iterator[tuple[bytes, bool]]:
    """Yield each line and whether it stays, as it is read."""
    seen = bytearray(after + 1)  # a byte for each step
    with path.open("rb") as file:
        for line in file:
            step = _step(line)
            is_kept = step is not None and 0 <= step <= after and (may_repeat or not seen[step])
            if is_kept:
                seen[step or 0] = 1
            yield line, is_kept


def _step(line: bytes) -> int | None:
    """Return the step of a whole line, None for another one."""
    try:
        raw = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    step = raw.get("step") if isinstance(raw, dict) else None
    return step if type(step) is int else None


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object; empty when the text is none, or nested too deeply."""
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return raw if isinstance(raw, dict) else {}


def _without_halves(raw: object) -> bytes:
    """Write as JSON; half a character, which UTF-8 cannot have, becomes `?`."""
    return json.dumps(raw, ensure_ascii=False).encode(errors="replace")


@functools.cache
def _reader(kind: type[Kind]) -> TypeAdapter[Kind]:
    return TypeAdapter(kind)


def _version(kind: type) -> object:
    """Return the version that a file of this kind must have; None for a kind without one."""
    return next((field.default for field in dataclasses.fields(kind) if field.name == "schema_version"), None)
