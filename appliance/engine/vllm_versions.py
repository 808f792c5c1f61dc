"""The vLLM versions that the engine and the plugin are tested with.

Every patch of vLLM has the hash of the source that it replaces in each of them (appliance/patch.py). Another version
is refused before anything of vLLM is imported, which may have moved there.
"""

from __future__ import annotations

from appliance.errors import EngineError
from appliance.patch import installed_version

VLLM_VERSIONS = ("0.28.0", "0.29.0", "0.30.0", "0.31.0")


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
