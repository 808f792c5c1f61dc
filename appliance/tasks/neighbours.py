"""What lies beside a file of the user's: its imports find a neighbour first, as with `python rewards.py`.

This process has its own packages, and has imported many of them already. So a neighbour named `utils` or `code` may
be imported by the user's files only, never in place of what our libraries import by that name: the modules of the
user's folder get an `__import__` that looks into the folder first. A neighbour whose name another module has is
imported below a package of the folder; any other has its plain name.
"""

from __future__ import annotations

import builtins
import hashlib
import importlib
import importlib.util
import os.path
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    SourceFileLoader,
    SourcelessFileLoader,
)
from types import ModuleType
from typing import Any

PREFIX = "_user_code_"  # the names of all modules that only the user's files see begin so
_folders: dict[str, Folder] = {}


def folder_of_modules(path: str) -> Folder:
    """Return the folder of a path; each is made once in a process."""
    path = os.path.abspath(path)
    if path not in _folders:
        _folders[path] = Folder(path)
    return _folders[path]


class Folder:
    """A folder of the user's, whose modules the user's files import first."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._package = f"{PREFIX}beside_{hashlib.sha256(path.encode(errors='surrogateescape')).hexdigest()[:12]}"
        self._searched = {path}
        """Folders that are searched: this one and the packages in it."""
        package = ModuleType(self._package)
        package.__path__ = [path]
        sys.modules[self._package] = package
        self.builtins: dict[str, Any] = {**vars(builtins), "__import__": self._import}
        """Builtins of the folder's modules, which replace Python's."""
        sys.path_hooks.insert(0, self._finder)
        sys.path_importer_cache.pop(path, None)

    def _finder(self, path: str) -> FileFinder:
        """Find modules, as Python's hook for an entry of a path. Raises ImportError for an entry that is none of the
        folder's."""
        if path not in self._searched:
            raise ImportError(path=path)
        return _Finder(path, folder=self)

    def note_packages(self, paths: Sequence[str]) -> None:
        self._searched.update(paths)

    def _import(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] = (),
        level: int = 0,
    ) -> ModuleType:
        """Import as Python's `__import__` does."""
        top = name.partition(".")[0]
        if level or not self._wins(top):
            return builtins.__import__(name, globals, locals, fromlist, level)
        module = builtins.__import__(f"{self._package}.{name}", globals, locals, fromlist or ("*",), 0)
        return module if fromlist else sys.modules[f"{self._package}.{top}"]

    def _wins(self, top: str) -> bool:
        """Tell whether a module of the folder has this name, and by its plain name another one would be imported."""
        if top in sys.builtin_module_names:
            return False
        if f"{self._package}.{top}" in sys.modules:
            return True
        beside = importlib.machinery.PathFinder.find_spec(top, [self._path])
        if beside is None or beside.origin is None:  # a folder without `__init__.py` wins over nothing
            return False
        if top in sys.modules:
            origin = getattr(sys.modules[top], "__file__", None)
        else:
            plain = importlib.util.find_spec(top)
            origin = plain.origin if plain is not None else None
        return origin is None or os.path.realpath(origin) != os.path.realpath(beside.origin)


class _Finder(FileFinder):
    """Finder of the modules in a folder of the user's."""

    def __init__(self, path: str, *, folder: Folder) -> None:
        class Loader(SourceFileLoader):
            def exec_module(self, module: ModuleType) -> None:
                vars(module)["__builtins__"] = folder.builtins
                super().exec_module(module)

        loaders = (
            (ExtensionFileLoader, EXTENSION_SUFFIXES),
            (Loader, SOURCE_SUFFIXES),
            (SourcelessFileLoader, BYTECODE_SUFFIXES),
        )
        super().__init__(path, *loaders)
        self._folder = folder

    def find_spec(self, fullname: str, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = super().find_spec(fullname, target)
        if spec is not None and spec.submodule_search_locations:
            self._folder.note_packages(list(spec.submodule_search_locations))
        return spec
