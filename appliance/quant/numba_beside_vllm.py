"""numba in a process in which vLLM starts engines: what imports numba calls the function here."""

from __future__ import annotations

import importlib.metadata
import sys

_LLVMLITE = "llvmlite.binding.ffi"


def let_vllm_pass_llvmlite() -> None:
    """Let an engine start in a process that has imported numba; does nothing before that. vLLM 0.31 on a CPU looks
    through the attributes of every imported module then, and reads the entry `kernel` of each that has a `__dict__`;
    llvmlite's library answers every name with a function of that name, this one too. Here it gets an empty one.

    Remove when: vLLM's `_rebind_kernels` (vllm/triton_utils/dispatcher.py) reads dictionaries alone.
    """
    if _LLVMLITE in sys.modules and _vllm_version().startswith("0.31."):
        library = sys.modules[_LLVMLITE].lib
        # Its class has slots: `vars(library)` would ask for a function named `__dict__` too. Another llvmlite may have
        # no such table.
        if "_fntab" in dir(type(library)):
            library._fntab.setdefault("__dict__", {})


def _vllm_version() -> str:
    """Return the installed version, or an empty text: a sender of weights has no vLLM."""
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return ""
