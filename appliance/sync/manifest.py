"""The list that ends the stream of a weight update: what the trainer sent, in order, with a digest of each tensor.

It travels as one more tensor, so every transport that carries weights carries it.

The digest depends on every bit of a tensor and has 16 bytes, the same on every device. The bytes are cut into rows of
C = 16384. Each row is multiplied by a fixed pseudo-random [C, 16] matrix of int8 numbers from -63..63 without 0, in
exact integer arithmetic, and BLAKE2b hashes the 16 int32 results of every row, the bytes that fill no row, the dtype
and the shape.

* A change of one byte, so of any one bit, changes all 16 results of its row, with certainty: the byte's difference
  times a number that is not 0, and |difference * number| < 2^31.
* Two bytes or blocks of a row that changed places go unseen when 16 pairs of independent numbers agree: 126^-16, below
  2^-111. Rows that changed places, other rows, another dtype or shape: BLAKE2b's 2^-128.

On one core that is 8 to 10 GB/s, by an integer matrix product that CPU and CUDA both have; without VNNI torch's runs at
70 MB/s, and one in float64, which has every partial sum, at 450. A sum over 64-bit words
with odd factors does not see two words change places that differ in their highest bit only; XXH3 (39 GB/s) proves
nothing about one bit and has no CUDA version. At |number| <= 63 a pair of products of bytes fits in 16 bits, where some
CPUs without VNNI saturate.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass

import torch
from torch import Tensor

from appliance.errors import SyncError
from appliance.terms.schemes import Precision

MANIFEST_NAME = "appliance.manifest"
DIRECTIVE_NAME = "appliance.precision"  # of the first tensor of an update that is not as planned
ROW_BYTES = 16384
COLUMNS = 16
MIN_ROWS = 32  # below it BLAKE2b alone is quick enough; CUDA's product wants more than 16 rows
_LARGEST = 63
_ALIGNED = 256  # bytes
_WIDENED_ROWS = 64  # 8 MiB in float64


def digest(tensor: Tensor) -> str:
    """Return the digest of a tensor, 32 hexadecimal digits. tensor: any dtype, shape and device; one that is not
    contiguous is copied."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    rows = flat.numel() // ROW_BYTES
    if rows < MIN_ROWS:
        rows = 0
    state = hashlib.blake2b(f"{tensor.dtype} {list(tensor.shape)} {rows}\n".encode(), digest_size=16)
    if rows:
        bytes_RC = flat[: rows * ROW_BYTES].view(torch.int8).view(rows, ROW_BYTES)
        state.update(_bytes(_product(bytes_RC)))
    state.update(_bytes(flat[rows * ROW_BYTES :]))
    return state.hexdigest()


def _product(bytes_RC: Tensor) -> Tensor:
    """Return [R, COLUMNS] int32, exact."""
    if bytes_RC.device.type != "cpu" or torch.cpu._is_vnni_supported():
        return torch._int_mm(bytes_RC, _factors(bytes_RC.device))
    factors = _factors(bytes_RC.device).t().double()
    return torch.cat([factors.mm(rows.t().double()).t().int() for rows in bytes_RC.split(_WIDENED_ROWS)])


def _bytes(tensor: Tensor) -> bytearray:
    """Return a copy, and without numpy, which a trainer need not have: FSDP frees a weight by its storage's size, which
    is fixed for ever once numpy has looked at it."""
    content = bytearray(tensor.nbytes)
    if content:
        torch.frombuffer(content, dtype=tensor.dtype).copy_(tensor.reshape(-1))
    return content


@functools.cache
def _factors(device: torch.device) -> Tensor:
    """Return [ROW_BYTES, COLUMNS] int8 in -63..63, never 0; from SHAKE-256, so the same everywhere and for ever.

    Column by column in memory: with both operands row by row cuBLAS 13 has no INT8 product (pytorch #169956).
    """
    stream = hashlib.shake_256(b"flashrl-appliance digest 1").digest(ROW_BYTES * COLUMNS)
    number = torch.frombuffer(bytearray(stream), dtype=torch.uint8).to(torch.int16) % (2 * _LARGEST) - _LARGEST
    factors = torch.where(number >= 0, number + 1, number).to(torch.int8).view(ROW_BYTES, COLUMNS)
    return factors.t().contiguous().t().to(device)


@dataclass(frozen=True)
class TensorRecord:
    """A tensor as the trainer had it."""

    name: str
    dtype: str
    """Data type by torch's name."""
    shape: tuple[int, ...]
    digest: str


@dataclass(frozen=True)
class Manifest:
    sync: int
    """Number of the weight update, from 1, by the trainer's count."""
    records: tuple[TensorRecord, ...]

    @property
    def digest(self) -> str:
        """Hash the whole list: the same for every rank that was sent the same."""
        return hashlib.blake2b(self._json(), digest_size=16).hexdigest()

    def to_tensor(self) -> Tensor:
        """Return the manifest as a tensor, [bytes] uint8."""
        return torch.frombuffer(bytearray(self._json()), dtype=torch.uint8)

    def _json(self) -> bytes:
        rows = [[one.name, one.dtype, list(one.shape), one.digest] for one in self.records]
        return json.dumps({"sync": self.sync, "tensors": rows}, separators=(",", ":")).encode()


def record_tensor(name: str, tensor: Tensor) -> TensorRecord:
    return TensorRecord(name=name, dtype=str(tensor.dtype), shape=tuple(tensor.shape), digest=digest(tensor))


def read_manifest(tensor: Tensor) -> Manifest:
    """Read a manifest: the inverse of `Manifest.to_tensor`. Raises SyncError when the bytes are not a manifest."""
    try:
        raw = json.loads(tensor.cpu().numpy().tobytes())
        records = tuple(TensorRecord(name, dtype, tuple(shape), said) for name, dtype, shape, said in raw["tensors"])
        return Manifest(sync=int(raw["sync"]), records=records)
    except (ValueError, TypeError, KeyError) as error:
        raise SyncError(f"weight update: the list of what was sent cannot be read: {error}") from error


def precision_tensor(precision: Precision) -> Tensor:
    """Return the first tensor of an update that is not as planned, [bytes] uint8. Spaces fill its last 256 bytes: a
    transport that packs tensors one behind the other (vLLM's) leaves the next ones where they may be read as BF16."""
    text = precision.to_json().encode()
    return torch.frombuffer(bytearray(text.ljust(-(-len(text) // _ALIGNED) * _ALIGNED)), dtype=torch.uint8)


def check_arrival(manifest: Manifest, arrived: dict[str, TensorRecord], *, rank: int) -> None:
    """Check that exactly what was sent has arrived. Raises SyncError with the first tensors that differ, both digests
    and the rank."""
    sent = {one.name: one for one in manifest.records}
    problems = [f"{name} was sent and did not arrive" for name in sent if name not in arrived]
    problems += [f"{name} arrived and was not sent" for name in arrived if name not in sent]
    problems += [_difference(one, arrived[name]) for name, one in sent.items() if arrived.get(name, one) != one]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise SyncError(f"weight update {manifest.sync}: " + "; ".join(problems[:3]) + f"{more} (rank {rank})")


def _difference(sent: TensorRecord, arrived: TensorRecord) -> str:
    if (sent.dtype, sent.shape) != (arrived.dtype, arrived.shape):
        return (
            f"{sent.name} was sent as {sent.dtype} {list(sent.shape)} and arrived as "
            f"{arrived.dtype} {list(arrived.shape)}"
        )
    return f"{sent.name} arrived with digest {arrived.digest}, it was sent with {sent.digest}"
