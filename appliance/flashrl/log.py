"""Where the lines go that answer "is the patch even on?": stderr and FLASHRL_LOGGING_FILE, in FlashRL's format."""

from __future__ import annotations

import logging

from appliance.flashrl.variables import Variables

LOGGER = logging.getLogger("flashrl")

_FORMAT = "%(asctime)s - %(name)s - %(levelname)s - %(message)s"


def start_logging(variables: Variables) -> None:
    """Once per process; a second call changes nothing. Raises OSError when the file cannot be opened."""
    if LOGGER.handlers:
        return
    LOGGER.setLevel(variables.log_level)
    LOGGER.propagate = False  # vLLM's processes may have a root handler: one line, not two
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if variables.log_file:
        handlers.append(logging.FileHandler(variables.log_file, mode="a"))
    for handler in handlers:
        handler.setFormatter(logging.Formatter(_FORMAT))
        LOGGER.addHandler(handler)
