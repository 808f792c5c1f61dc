"""vLLM's entry point `vllm.general_plugins`: a function run in every vLLM process, several times.

vLLM logs and skips an error while *importing* this module, so it imports nothing; an error inside `register` propagates
and stops the engine.
"""

from __future__ import annotations

import os

DISTRIBUTIONS = ("flashrl-appliance", "flashrl-compat")


def register() -> None:
    """Prepare a process of vLLM. Raises EngineError for an installation that is refused, PatchError. An error is an
    event of the run (or command) that the process belongs to: whoever started the engine sees no more than its text."""
    from appliance.engine.vllm_versions import require_known_version
    from appliance.record.events import report_failures

    with report_failures():  # before anything of vLLM is imported
        require_one_distribution()
        require_known_version()
    from vllm.platforms import current_platform

    import appliance.engine.config
    import appliance.engine.first_load  # noqa: F401  registers the load format by its name
    from appliance.engine.int8 import NO_AMX_TILES, no_amx_tiles
    from appliance.engine.sampling_masks import MASK_SETTING, SAMPLING_MASKS, mask_setting, sampling_masks
    from appliance.engine.seeded_sampling import SEEDED_REQUESTS, SEEDED_SAMPLING, seeded_requests, seeded_sampling
    from appliance.engine.token_ranks import TOKEN_RANKS, token_ranks
    from appliance.patch import apply_patch
    from appliance.quant.cpu_gemm import widen_gemms
    from appliance.record.engine_start import report_start_failures
    from appliance.record.liveness import keep_stacks
    from appliance.terms.environment import EXACT_ON_CPU, EXACT_VARIABLE

    keep_stacks("engine")
    report_start_failures()
    if current_platform.is_cpu():
        with report_failures():
            apply_patch(NO_AMX_TILES, no_amx_tiles)
            apply_patch(SEEDED_REQUESTS, seeded_requests)
            apply_patch(SEEDED_SAMPLING, seeded_sampling)
            apply_patch(MASK_SETTING, mask_setting)
            apply_patch(SAMPLING_MASKS, sampling_masks)
            apply_patch(TOKEN_RANKS, token_ranks)
            exactly = os.environ.get(EXACT_VARIABLE) == "1"
            for name, value in EXACT_ON_CPU.items() if exactly else ():
                os.environ.setdefault(name, value)  # a plan says them all, `vllm serve` was given one
            widen_gemms(exactly=exactly)


def require_one_distribution() -> None:
    """Refuse an installation that has both distributions: they bring the same files, perhaps of two versions, and
    removing one takes files of the other. Raises EngineError."""
    from importlib.metadata import distributions

    from appliance.errors import EngineError

    installed = {distribution.name for name in DISTRIBUTIONS for distribution in distributions(name=name)}
    if len(installed) > 1:
        raise EngineError(
            f"{' and '.join(DISTRIBUTIONS)} are both installed: they bring the same files",
            hint="pip uninstall both, and install one: flashrl-appliance has the plugin, too",
        )
