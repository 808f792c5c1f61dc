"""Where the lines go that answer "is the patch even on?": stderr and FLASHRL_LOGGING_FILE, in FlashRL's format."""

from __future__ import annotations

import logging
from pathlib import Path

from appliance.errors import ApplianceError, RecipeError
from flashrl_compat.variables import FILE_VARIABLE, Variables

LOGGER = logging.getLogger("flashrl")

_FORMAT = "%(asctime)s - %(name)s - %(levelname)s - %(message)s"


def start_logging(variables: Variables) -> None:
    """Once per process; a second call changes nothing. Raises RecipeError when the file cannot be opened."""
    if LOGGER.handlers:
        return
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if variables.log_file:
        handlers.append(_to_file(variables.log_file))
    LOGGER.setLevel(variables.log_level)
    LOGGER.propagate = False  # vLLM's processes may have a root handler: one line, not two
    for handler in handlers:
        handler.setFormatter(logging.Formatter(_FORMAT))
        LOGGER.addHandler(handler)


def _to_file(path: Path) -> logging.Handler:
    try:
        return logging.FileHandler(path, mode="a")
    except OSError as error:
        fact = f"{FILE_VARIABLE}: {path} cannot be written: {error.strerror}"
        raise RecipeError([(fact, "name a file in a folder that you can write to")]) from error


def tell_hints(error: ApplianceError) -> None:
    """Let the hints stand below the error in a traceback: no command of ours is there to print them."""
    hints = [hint for _, hint in error.problems] if isinstance(error, RecipeError) else [error.hint]
    for hint in dict.fromkeys(filter(None, hints)):
        error.add_note(f"hint: {hint}")
