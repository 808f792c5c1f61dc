"""The digest of a tensor: what it holds, bit by bit, in 16 bytes. The same on every device.

The bytes are cut into rows of C = 16384. Each row is multiplied by a fixed pseudo-random [C, 16] matrix of int8
numbers from -63..63 without 0, in exact integer arithmetic, and BLAKE2b hashes the 16 int32 results of every row, the
bytes that fill no row, the dtype and the shape.

* A change of one byte, so of any one bit, changes all 16 results of its row, with certainty: the byte's difference
  times a number that is not 0, and |difference * number| < 2^31.
* Two bytes or blocks of a row that changed places go unseen when 16 pairs of independent numbers agree: 126^-16, below
  2^-111. Rows that changed places, other rows, another dtype or shape: BLAKE2b's 2^-128.

Why this one: on one core 8 to 10 GB/s, an integer matrix product that CPU and CUDA both have, one read of the tensor.
A sum over 64-bit words with odd factors is as fast (5 to 14 GB/s) and certain for one bit, but does not see two words
change places that differ in their highest bit only. XXH3 is faster (39 GB/s), proves nothing about one bit and has no
CUDA version: every tensor would go through the host. At |number| <= 63 a pair of products of bytes fits in 16 bits,
where some CPUs without VNNI saturate.
"""

from __future__ import annotations

import functools
import hashlib

import torch
from torch import Tensor

ROW_BYTES = 16384
COLUMNS = 16
MIN_ROWS = 32  # below it BLAKE2b alone is quick enough; CUDA's product wants more than 16 rows
_LARGEST = 63


def digest(tensor: Tensor) -> str:
    """32 hexadecimal digits. tensor: any dtype, shape and device; one that is not contiguous is copied."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    rows = flat.numel() // ROW_BYTES
    if rows < MIN_ROWS:
        rows = 0
    state = hashlib.blake2b(f"{tensor.dtype} {list(tensor.shape)} {rows}\n".encode(), digest_size=16)
    if rows:
        bytes_RC = flat[: rows * ROW_BYTES].view(torch.int8).view(rows, ROW_BYTES)
        state.update(_bytes(torch._int_mm(bytes_RC, _factors(tensor.device))))
    state.update(_bytes(flat[rows * ROW_BYTES :]))
    return state.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).cpu().numpy())


@functools.cache
def _factors(device: torch.device) -> Tensor:
    """[ROW_BYTES, COLUMNS] int8 in -63..63, never 0; from SHAKE-256, so the same everywhere and for ever."""
    stream = hashlib.shake_256(b"flashrl-appliance digest 1").digest(ROW_BYTES * COLUMNS)
    number = torch.frombuffer(bytearray(stream), dtype=torch.uint8).to(torch.int16) % (2 * _LARGEST) - _LARGEST
    return torch.where(number >= 0, number + 1, number).to(torch.int8).view(ROW_BYTES, COLUMNS).to(device)
