"""vLLM's entry point `vllm.general_plugins`: a function run in every vLLM process, several times.

vLLM logs and skips an error while *importing* this module, so the import is trivial; an error inside `register`
propagates and stops the engine.
"""

from __future__ import annotations

from collections.abc import Callable

from appliance.patch import Patch, apply_patch

NO_AMX_TILES = Patch(
    name="cpu-no-amx-tiles",
    target="torch.cpu:_is_amx_tile_supported",
    why=(
        "on a CPU with AMX, vLLM mixes kernels that each leave the tile registers in a state of their own (packed "
        "GEMMs through brgemm, attention): seen here as an illegal instruction in cpu_attention_with_kv_cache in some "
        "runs and not in others. vLLM asks this function; oneDNN, which restores the tiles, decides for itself and "
        "keeps using AMX"
    ),
    upstream="https://github.com/sgl-project/sglang/issues/28992",
    distribution="torch",
    version="2.13.0+cpu",
    source_sha256="cd8eeae518a7a395caa813bf636111bd3cc0748680abd0f0c135c42dabd8707b",
    remove_when="a vLLM release passes a day of generation with packed GEMMs and attention on an AMX host",
)


def register() -> None:
    from vllm.platforms import current_platform

    import appliance.engine.config  # noqa: F401  registers the quantisation method by its name
    from appliance.record.events import report_failures
    from appliance.record.liveness import keep_stacks

    keep_stacks("engine")
    if current_platform.is_cpu():
        with report_failures():
            apply_patch(NO_AMX_TILES, _never)


def _never(original: Callable[[], bool]) -> Callable[[], bool]:
    def _is_amx_tile_supported() -> bool:
        return False

    return _is_amx_tile_supported
