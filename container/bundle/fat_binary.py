"""CUDA code in a compiled library: of each kernel the one image that a GPU takes stays, the others become zeros, which
pack to nothing. Nothing moves, so every offset stays right.

A section `.nv_fatbin` holds containers one after the other, aligned to 8: a header (magic, version, its own size, the
size of what follows) and entries. An entry has a header (kind, version, its own size, the size of its image, ...) and
an image: machine code of one architecture, or PTX, which the driver compiles for a later one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

MAGIC = 0xBA55ED50
PTX, MACHINE_CODE = 1, 2
_SECTION = b".nv_fatbin"
_ARCHITECTURE_AT = 28  # in the header of an entry: after kind, version, sizes, and the toolkit's version


@dataclass(frozen=True)
class Image:
    """Of one entry."""

    kind: int
    architecture: int
    """Such as 90."""
    start: int
    """Start of its bytes in the file."""
    end: int
    """End of its bytes in the file."""


def keep_one(library: bytes, *, architecture: int) -> bytes:
    """The library with one image of each container, for a GPU of this architecture; other files as they are.

    Raises ValueError for a section that is not as described.
    """
    slim = bytearray(library)
    for start, end in _fat_sections(library):
        for images in _containers(library, start=start, end=end):
            kept = usable(images, architecture=architecture)
            for image in images:
                if image not in kept:
                    slim[image.start : image.end] = bytes(image.end - image.start)
    return bytes(slim)


def usable(images: list[Image], *, architecture: int) -> list[Image]:
    """What a GPU of this architecture runs: machine code of its own, else of an earlier one of its generation, else
    the newest PTX that is not too new. Nothing of a container that is for other GPUs alone."""
    same = [
        image
        for image in images
        if image.kind == MACHINE_CODE
        and image.architecture // 10 == architecture // 10
        and image.architecture <= architecture
    ]
    texts = [image for image in images if image.kind == PTX and image.architecture <= architecture]
    able = same or texts
    newest = max((image.architecture for image in able), default=None)
    return [image for image in able if image.architecture == newest]


def _fat_sections(data: bytes) -> Iterator[tuple[int, int]]:
    """(start, end) in a 64-bit ELF file of this byte order; none in other files."""
    if data[:6] != b"\x7fELF\x02\x01":
        return
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, table + number * size) for number in range(count)]
    for name, _, _, _, start, length in headers:
        at = headers[names][4] + name
        if data[at : data.index(b"\0", at)] == _SECTION:
            yield start, start + length


def _containers(data: bytes, *, start: int, end: int) -> Iterator[list[Image]]:
    at = start
    while at + 16 <= end:
        magic, _, header, size = struct.unpack_from("<IHHQ", data, at)
        if magic != MAGIC:
            if any(data[at : at + 8]):
                raise ValueError(f"no container of CUDA code at byte {at}")
            at += 8  # between two of them
            continue
        stop = at + header + size
        if stop > end:
            raise ValueError(f"the container of CUDA code at byte {at} goes beyond its section")
        yield list(_images(data, start=at + header, end=stop))
        at = -(-stop // 8) * 8


def _images(data: bytes, *, start: int, end: int) -> Iterator[Image]:
    at = start
    while at < end:
        kind, _, header, size = struct.unpack_from("<HHIQ", data, at)
        (architecture,) = struct.unpack_from("<I", data, at + _ARCHITECTURE_AT)
        if not header:
            raise ValueError(f"an entry without a header at byte {at}")
        yield Image(kind, architecture, start=at + header, end=at + header + size)
        at += header + size
