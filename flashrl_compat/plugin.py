"""vLLM's entry point for FlashRL's variables: a function run in every vLLM process, several times, in any order.

vLLM logs and skips an error while *importing* this module, so the import is trivial; an error inside `register`
propagates and stops the engine.
"""

from __future__ import annotations

import os


def register() -> None:
    """Prepare a process of vLLM. Raises RecipeError for values that mean nothing, EngineError for a version of vLLM
    that we do not know.

    vLLM calls plugins in no order to rely on and may be set to leave some out: the engine's own is called here, too.
    """
    from appliance.engine.plugin import register as register_engine
    from appliance.errors import ApplianceError
    from flashrl_compat.variables import (
        CONFIG_VARIABLE,
        LOGGER,
        idle_variables,
        read_variables,
        start_logging,
        tell_hints,
    )

    try:
        register_engine()  # refuses a vLLM that it does not know, before anything of it is imported
        import flashrl_compat.loader  # noqa: F401  registers the load format by its name

        variables = read_variables(os.environ)
        if variables.config is not None:
            start_logging(variables)
    except ApplianceError as error:
        tell_hints(error)
        raise
    if variables.config is None:
        for name in idle_variables(os.environ):
            LOGGER.warning("%s does nothing without %s; FLASHRL_CONFIG=bf16 is enough", name, CONFIG_VARIABLE)
        return
    from flashrl_compat.arguments import patch_engine_arguments
    from flashrl_compat.core import patch_core
    from flashrl_compat.first_load import patch_first_load
    from flashrl_compat.layerwise import patch_layerwise
    from flashrl_compat.metrics import patch_routes
    from flashrl_compat.refusals import patch_refusals
    from flashrl_compat.shared_memory import register as register_backend
    from flashrl_compat.weight_versions import patch_weight_versions

    patch_engine_arguments()
    patch_core()
    patch_refusals()
    patch_weight_versions()
    patch_first_load()
    patch_layerwise()
    patch_routes()
    register_backend()
