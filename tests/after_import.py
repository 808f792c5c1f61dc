"""A hand on a module of a real training, from a `sitecustomize.py` on its PYTHONPATH."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Spoiling(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, spoil: Callable[[ModuleType], None]) -> None:
        self._name, self._spoil = name, spoil

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        load = spec.loader.exec_module

        def load_and_spoil(module: ModuleType) -> None:
            load(module)
            self._spoil(module)

        spec.loader.exec_module = load_and_spoil
        return spec


def after_import(name: str, spoil: Callable[[ModuleType], None]) -> None:
    """Call `spoil` with the module of that name once this process has loaded it."""
    sys.meta_path.insert(0, _Spoiling(name, spoil))
