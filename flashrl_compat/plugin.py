"""What vLLM's processes get for FlashRL's variables; called by our entry point in every one of them."""

from __future__ import annotations

import os

from appliance.errors import ApplianceError, RecipeError
from appliance.flashrl.log import LOGGER, start_logging
from appliance.flashrl.variables import CONFIG_VARIABLE, idle_variables, read_variables
from appliance.plan.env import PLAN_VARIABLE


def register() -> None:
    """Raises RecipeError for values that mean nothing, PatchError when vLLM is not the one we know."""
    import appliance.flashrl.loader  # noqa: F401  registers the load format by its name

    if PLAN_VARIABLE in os.environ:
        if os.environ.get(CONFIG_VARIABLE):
            LOGGER.warning("%s does nothing in a run of `appliance train`: its plan says the scheme", CONFIG_VARIABLE)
        return
    try:
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
    from appliance.flashrl.arguments import patch_engine_arguments

    patch_engine_arguments()


def tell_hints(error: ApplianceError) -> None:
    """Let the hints stand below the error in a traceback: no command of ours is there to print them."""
    hints = [hint for _, hint in error.problems] if isinstance(error, RecipeError) else [error.hint]
    for hint in dict.fromkeys(filter(None, hints)):
        error.add_note(f"hint: {hint}")
