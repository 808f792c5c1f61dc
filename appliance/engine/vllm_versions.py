"""The vLLM versions that the engine and the plugin are tested with.

Every patch of vLLM has the hash of the source that it replaces in each of them (appliance/patch.py). Another version
is refused before anything of vLLM is imported, which may have moved there.
"""

from __future__ import annotations

import sys

from appliance.errors import EngineError
from appliance.patch import installed_version

VLLM_VERSIONS = ("0.28.0", "0.29.0", "0.30.0", "0.31.0")
_LLVMLITE = "llvmlite.binding.ffi"


def let_vllm_pass_llvmlite() -> None:
    """Let another engine start in a process that has imported numba. vLLM 0.31 on a CPU looks through the attributes of
    every imported module then, and reads the entry `kernel` of each that has a `__dict__`; llvmlite's library answers
    every name with a function of that name, this one too. Here it gets an empty one.

    Remove when: vLLM's `_rebind_kernels` (vllm/triton_utils/dispatcher.py) reads dictionaries alone.
    """
    if _LLVMLITE in sys.modules and vllm_version().startswith("0.31."):
        library = sys.modules[_LLVMLITE].lib
        # Its class has slots: `vars(library)` would ask for a function named `__dict__` too. Another llvmlite may have
        # no such table.
        if "_fntab" in dir(type(library)):
            library._fntab.setdefault("__dict__", {})


def vllm_version() -> str:
    """Return the installed version without its build, such as `0.28.0`; `nothing` where vLLM is not installed."""
    return installed_version("vllm").partition("+")[0]


def require_known_version() -> None:
    """Check the installed version of vLLM. Raises EngineError that names the versions where another one is
    installed."""
    installed = installed_version("vllm")
    if vllm_version() not in VLLM_VERSIONS:
        *most, last = VLLM_VERSIONS
        raise EngineError(
            f"vllm {installed} is installed: weight updates are proven with vllm {', '.join(most)} and {last} alone",
            hint="install one of these versions",
        )
