"""The list that ends the stream of a weight update: what the trainer sent, in order, with a digest of each tensor.

It travels as one more tensor, so every transport that carries weights carries it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import torch
from torch import Tensor

from appliance.errors import SyncError
from appliance.sync.digest import digest
from appliance.sync.precision import Precision

MANIFEST_NAME = "appliance.manifest"


@dataclass(frozen=True)
class TensorRecord:
    """One tensor as the trainer had it. dtype: torch's name.  digest: of sync/digest.py."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str


@dataclass(frozen=True)
class Manifest:
    """sync: number of the weight update, from 1, by the trainer's count."""

    sync: int
    records: tuple[TensorRecord, ...]

    @property
    def digest(self) -> str:
        """Of the whole list: equal for every rank that was sent the same."""
        return hashlib.blake2b(self._json(), digest_size=16).hexdigest()

    def to_tensor(self) -> Tensor:
        """[bytes] uint8."""
        return torch.frombuffer(bytearray(self._json()), dtype=torch.uint8)

    def _json(self) -> bytes:
        rows = [[one.name, one.dtype, list(one.shape), one.digest] for one in self.records]
        return json.dumps({"sync": self.sync, "tensors": rows}, separators=(",", ":")).encode()


def record(name: str, tensor: Tensor) -> TensorRecord:
    return TensorRecord(name=name, dtype=str(tensor.dtype), shape=tuple(tensor.shape), digest=digest(tensor))


def read_manifest(tensor: Tensor) -> Manifest:
    """The inverse of `Manifest.to_tensor`. Raises SyncError when the bytes are not a manifest."""
    try:
        raw = json.loads(tensor.cpu().numpy().tobytes())
        records = tuple(TensorRecord(name, dtype, tuple(shape), said) for name, dtype, shape, said in raw["tensors"])
        return Manifest(sync=int(raw["sync"]), records=records)
    except (ValueError, TypeError, KeyError) as error:
        raise SyncError(f"weight update: the list of what was sent cannot be read: {error}") from error


def directive(precision: Precision) -> Tensor:
    """[bytes] uint8: the first tensor of an update that is not as planned."""
    return torch.frombuffer(bytearray(precision.to_json().encode()), dtype=torch.uint8)


def read_directive(tensor: Tensor) -> Precision:
    """The inverse of `directive`. Raises SyncError when the bytes are none."""
    try:
        return Precision.from_json(tensor.cpu().numpy().tobytes().decode())
    except ValueError as error:
        raise SyncError(f"weight update: the wanted precision cannot be read: {error}") from error


def check_arrival(manifest: Manifest, arrived: dict[str, TensorRecord], *, rank: int) -> None:
    """Raises SyncError unless exactly what was sent has arrived: the first tensors, both digests and the rank."""
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
