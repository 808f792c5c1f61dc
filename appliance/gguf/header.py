"""What a GGUF file says before its weights: metadata and the place of each tensor. Standard library only.

The file is not trusted: every length is held against the bytes that are left before anything is read by it, so one that
is cropped or damaged is refused at once, by the place where it goes wrong. Layout: little-endian; magic, version,
numbers of tensors and of entries; the entries; the tensors' names, dimensions, types and offsets; and from the next
multiple of the alignment on the weights.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

Value = bool | int | float | str | list["Value"]

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_ALIGNMENT, _USUAL_ALIGNMENT = "general.alignment", 32
_MOST_ENTRIES, _MOST_TENSORS = 1 << 16, 1 << 18
_MOST_DIMENSIONS = 4
_LARGEST_TENSOR = 1 << 48  # weights; a product of damaged dimensions is soon larger
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class TensorType:
    name: str
    block: int
    """Weights that share a scale."""
    block_bytes: int


# By their numbers in a file. Those without a row were taken out of the format, or are not read by the package gguf.
TENSOR_TYPES: Mapping[int, TensorType] = {
    number: TensorType(*row)
    for number, row in {
        0: ("F32", 1, 4),
        1: ("F16", 1, 2),
        2: ("Q4_0", 32, 18),
        3: ("Q4_1", 32, 20),
        6: ("Q5_0", 32, 22),
        7: ("Q5_1", 32, 24),
        8: ("Q8_0", 32, 34),
        10: ("Q2_K", 256, 84),
        11: ("Q3_K", 256, 110),
        12: ("Q4_K", 256, 144),
        13: ("Q5_K", 256, 176),
        14: ("Q6_K", 256, 210),
        16: ("IQ2_XXS", 256, 66),
        17: ("IQ2_XS", 256, 74),
        18: ("IQ3_XXS", 256, 98),
        19: ("IQ1_S", 256, 50),
        20: ("IQ4_NL", 32, 18),
        21: ("IQ3_S", 256, 110),
        22: ("IQ2_S", 256, 82),
        23: ("IQ4_XS", 256, 136),
        29: ("IQ1_M", 256, 56),
        30: ("BF16", 1, 2),
        34: ("TQ1_0", 256, 54),
        35: ("TQ2_0", 256, 66),
        39: ("MXFP4", 32, 17),
    }.items()
}
UNQUANTISED = ("F32", "F16", "BF16")


class GgufError(Exception):
    """A GGUF file that cannot be read, or would be read wrongly."""

    message: str
    """The fact, without the file's name."""
    hint: str
    """Remedy: what to do next, one line."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class DamagedGguf(GgufError):
    """A file that is not a whole GGUF file."""

    def __init__(self, message: str) -> None:
        super().__init__(message, hint="fetch the file again, and compare its SHA-256 with the publisher's")


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    """Sizes in the order of the file: the last one of a torch shape comes first."""
    type: TensorType
    offset: int
    """First byte, from where the weights begin."""

    @property
    def size(self) -> int:
        """Size in the file, bytes."""
        return math.prod(self.shape) // self.type.block * self.type.block_bytes


@dataclass(frozen=True)
class Header:
    metadata: Mapping[str, Value]
    tensors: Mapping[str, Tensor]
    start: int
    """First byte of the weights in the file."""

    @property
    def architecture(self) -> str:
        """Name that llama.cpp gives the model's family, empty where there is none."""
        return self.text("general.architecture")

    def text(self, key: str) -> str:
        """Return a text of the metadata, empty where there is none."""
        value = self.metadata.get(key)
        return value if isinstance(value, str) else ""

    def number(self, key: str) -> int | None:
        value = self.metadata.get(key)
        return value if type(value) is int else None

    def fraction(self, key: str) -> float | None:
        value = self.metadata.get(key)
        return value if isinstance(value, float) else None

    @property
    def types(self) -> tuple[str, ...]:
        """Names of the types of its tensors, the one with most weights first."""
        weights: dict[str, int] = {}
        for tensor in self.tensors.values():
            weights[tensor.type.name] = weights.get(tensor.type.name, 0) + math.prod(tensor.shape)
        return tuple(sorted(weights, key=lambda name: -weights[name]))


def read_header(path: Path) -> Header:
    """Read the header of a GGUF file. Raises GgufError for a file that is damaged, cropped or of another format,
    OSError where it cannot be read."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        reader = _Reader(file, size=size)
        _check_version(reader)
        num_tensors, num_entries = reader.integer("Q"), reader.integer("Q")
        if num_tensors > _MOST_TENSORS or num_entries > _MOST_ENTRIES:
            raise DamagedGguf(f"it claims to have {num_tensors} tensors and {num_entries} entries of metadata")
        metadata = _read_metadata(reader, count=num_entries)
        tensors = [_read_tensor(reader) for _ in range(num_tensors)]
        alignment = metadata.get(_ALIGNMENT, _USUAL_ALIGNMENT)
        if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
            raise DamagedGguf(f"its {_ALIGNMENT} is {alignment!r}")
        start = -(-reader.position // alignment) * alignment
    _check_places(tensors, room=size - start, alignment=alignment)
    return Header(metadata=metadata, tensors={tensor.name: tensor for tensor in tensors}, start=start)


class _Reader:
    """Reads from the front, and never more than the file has."""

    def __init__(self, file: BinaryIO, *, size: int) -> None:
        self._file = file
        self._size = size
        self.position = 0

    @property
    def left(self) -> int:
        return self._size - self.position

    def take(self, count: int) -> bytes:
        if count > self.left:
            message = f"it ends within its header: {count} bytes are wanted at {self.position}, {self.left} are left"
            raise DamagedGguf(message)
        self.position += count
        return self._file.read(count)

    def integer(self, code: str) -> int:
        """code: of `struct`."""
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def string(self) -> str:
        begin, raw = self.position, self.take(self.integer("Q"))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise DamagedGguf(f"the text at {begin} is not UTF-8") from None


def _check_version(reader: _Reader) -> None:
    if (magic := reader.take(min(len(_MAGIC), reader.left))) != _MAGIC:
        raise GgufError(f"it is no GGUF file: it begins with {magic!r}", hint="give a GGUF file, or a model's folder")
    version = reader.integer("I")
    if version not in _VERSIONS:
        kind = "big-endian" if version & 0xFFFF == 0 else f"of version {version}"
        raise GgufError(f"it is {kind}; version 2 and 3 are read, little-endian", hint="convert the model again")


def _read_metadata(reader: _Reader, *, count: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for _ in range(count):
        key = reader.string()
        if key in metadata:
            raise DamagedGguf(f"it has {key} twice")
        metadata[key] = _read_value(reader, kind=reader.integer("I"), key=key)
    return metadata


def _read_value(reader: _Reader, *, kind: int, key: str) -> Value:
    if kind == _STRING:
        return reader.string()
    if code := _SCALARS.get(kind):
        return struct.unpack(f"<{code}", reader.take(struct.calcsize(code)))[0]
    if kind != _ARRAY:
        raise DamagedGguf(f"{key} has a value of type {kind}, which GGUF does not have")
    inner, length = reader.integer("I"), reader.integer("Q")
    if code := _SCALARS.get(inner):
        return list(struct.unpack(f"<{length}{code}", reader.take(length * struct.calcsize(code))))
    if inner != _STRING:
        raise DamagedGguf(f"{key} is a list of type {inner}, which no model has")
    if length * 8 > reader.left:  # each text has its own length in front
        raise DamagedGguf(f"{key} is a list of {length} texts, and {reader.left} bytes are left")
    return [reader.string() for _ in range(length)]


def _read_tensor(reader: _Reader) -> Tensor:
    name, dimensions = reader.string(), reader.integer("I")
    if not 1 <= dimensions <= _MOST_DIMENSIONS:
        raise DamagedGguf(f"tensor {name[:60]} has {dimensions} dimensions")
    shape = tuple(reader.integer("Q") for _ in range(dimensions))
    number, offset = reader.integer("I"), reader.integer("Q")
    if number not in TENSOR_TYPES:
        known = ", ".join(each.name for each in TENSOR_TYPES.values())
        message = f"tensor {name[:60]} is of type {number}, which the package gguf does not read"
        raise GgufError(message, hint=f"take the model in another quantisation: {known}")
    kind = TENSOR_TYPES[number]
    if 0 in shape or math.prod(shape) > _LARGEST_TENSOR or shape[0] % kind.block:
        raise DamagedGguf(f"tensor {name[:60]} in {kind.name} has the sizes {list(shape)}")
    return Tensor(name=name, shape=shape, type=kind, offset=offset)


def _check_places(tensors: list[Tensor], *, room: int, alignment: int) -> None:
    """Raise DamagedGguf where a tensor lies outside of the file, in another one or not at a multiple of the alignment.
    room: bytes that the file has for weights."""
    end = 0
    for tensor in sorted(tensors, key=lambda each: each.offset):
        if tensor.offset % alignment or tensor.offset < end:
            raise DamagedGguf(f"tensor {tensor.name[:60]} begins at {tensor.offset}, inside of another or unaligned")
        end = tensor.offset + tensor.size
    if end > room:
        raise DamagedGguf(f"it was cropped: its tensors take {end} bytes, and it has {max(0, room)} of them")
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise DamagedGguf("it has a tensor twice")
