"""Functions of the user's Python files. Whatever is imported here runs: only a process of its own may do it."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from appliance.tasks.task import Response


def load_function(file: str, name: str) -> Callable[[Response], object]:
    """Raises what the file raises when it is imported, and AttributeError without such a function."""
    function = getattr(load_module(file), name)

    def value(response: Response) -> object:
        row: dict[str, Any] = json.loads(response.row) if response.row else {}
        return function(response.text, response.truth, row=row)

    return value


def load_module(file: str) -> ModuleType:
    """Each file once in a process."""
    name = f"_user_code_{file}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(file))
        assert spec is not None and spec.loader is not None, "a path ends in .py"
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]
