"""A model's folder of safetensors, read by name, with an account of what is alive of it. Loads no transformers."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from appliance.errors import EngineError

_INDEX = "model.safetensors.index.json"
_ROWS = 4096  # of embedding and head at a time


def _indexed(index: Path) -> list[str]:
    """The files that an index names: beside it, nowhere else. Raises EngineError."""
    try:
        named = set(json.loads(index.read_text())["weight_map"].values())
        if outside := sorted(name for name in named if Path(name).name != name or name in ("", "..")):
            raise EngineError(f"{index}: names a file outside of its folder: {outside[0]}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise EngineError(f"{index}: cannot be read: {type(error).__name__}: {error}") from error
    return sorted(named)


@dataclass
class Ledger:
    """Bytes of tensors that are alive now, and the most that were."""

    alive_bytes: int = 0
    peak_bytes: int = 0

    def enter(self, tensor: Tensor) -> Tensor:
        """Count a tensor until its Python object is gone. Returns it."""
        size = tensor.numel() * tensor.element_size()
        self.alive_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.alive_bytes)
        weakref.finalize(tensor, self._leave, size)
        return tensor

    def _leave(self, size: int) -> None:
        self.alive_bytes -= size


class Checkpoint:
    """The safetensors of a model's folder, read by name, a tensor or some of its rows at a time.

    Raises EngineError when the folder has no safetensors, or lacks a tensor that is asked for.
    """

    def __init__(self, folder: Path, *, ledger: Ledger | None = None) -> None:
        self.folder = folder
        self.ledger = ledger or Ledger()
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise EngineError(f"{folder}: no safetensors", hint="name a folder with config.json and *.safetensors")
        index = folder / _INDEX
        if index.is_file():
            files = [folder / name for name in _indexed(index)]
        try:
            self._opened = [safe_open(file, framework="pt") for file in files]
        except (SafetensorError, OSError) as error:
            raise EngineError(f"{folder}: safetensors that cannot be read: {error}") from error
        self._place = {name: opened for opened in self._opened for name in opened.keys()}  # noqa: SIM118

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._place.clear()
        self._opened.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._place

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._place))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file(name).get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        """The tensor as stored."""
        return self._file(name).get_tensor(name)

    def rows(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """(first row, some rows in BF16) over the whole matrix, each counted while it is alive."""
        stored = self._file(name).get_slice(name)
        for start in range(0, stored.get_shape()[0], _ROWS):
            yield start, self.ledger.enter(stored[start : start + _ROWS].to(torch.bfloat16))

    def _file(self, name: str) -> Any:
        if name not in self._place:
            raise EngineError(f"{self.folder}: the checkpoint has no {name}")
        return self._place[name]
