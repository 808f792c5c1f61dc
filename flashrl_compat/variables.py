"""The one place that reads FlashRL's environment variables, and the log that they ask for. Imports no torch.

All problems are reported at once. Outside `FLASHRL_CONFIG` nothing of FlashRL's is on, as in FlashRL itself. The lines
that answer "is the patch even on?" go to stderr and FLASHRL_LOGGING_FILE, in FlashRL's format.
"""

from __future__ import annotations

import logging
import os.path
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import ApplianceError, RecipeError
from appliance.finding import Finding, fault
from appliance.recipe.text import full_path
from flashrl_compat.names import BY_NAME, IN_FILES, NAMES, Name, listed

CONFIG_VARIABLE = "FLASHRL_CONFIG"
LM_HEAD_VARIABLE = "FLASHRL_LMHEAD_FP32"
LEVEL_VARIABLE = "FLASHRL_LOGGING_LEVEL"
FILE_VARIABLE = "FLASHRL_LOGGING_FILE"
RELOAD_VARIABLE = "FLASHRL_TEST_RELOAD"
VARIABLES = (CONFIG_VARIABLE, LM_HEAD_VARIABLE, LEVEL_VARIABLE, FILE_VARIABLE, RELOAD_VARIABLE)

LOGGER = logging.getLogger("flashrl")
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

_FORMAT = "%(asctime)s - %(name)s - %(levelname)s - %(message)s"
_HUB_FILE = re.compile(r"([\w.-]+/[\w.-]+)/((?:[\w.-]+/)*[\w.-]+\.ya?ml)")
_HUB_MODEL = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class HubFile:
    """A file on the Hugging Face hub."""

    repo: str
    """`user/repo`."""
    path: str
    """Path of the file inside the repository."""


@dataclass(frozen=True)
class Variables:
    config: Name | Path | HubFile | None
    """A name of the table, a file, or a file on the hub; None: FlashRL is off."""
    lm_head_fp32: bool | None = None
    """Whether the head is in FP32; None where the variable says nothing."""
    log_level: int = logging.INFO
    """Level of `logging`."""
    log_file: Path | None = None
    """File for the log, or None."""
    reload: tuple[str, ...] = ()
    """Checkpoints, each a folder or a model on the hub, in order."""

    @property
    def shown(self) -> str:
        """`FLASHRL_CONFIG=...` as the user wrote it, for messages."""
        config = self.config
        text = config.theirs if isinstance(config, Name) else str(config)
        return f"{CONFIG_VARIABLE}={f'{config.repo}/{config.path}' if isinstance(config, HubFile) else text}"


def read_variables(environ: Mapping[str, str]) -> Variables:
    """Read the settings in `environ`; an empty value is none. Raises RecipeError with all problems.

    Without FLASHRL_CONFIG the others are not judged: nothing asks for them.
    """
    values = {name: value.strip() for name, value in environ.items() if name.startswith("FLASHRL_") and value.strip()}
    if CONFIG_VARIABLE not in values:
        return Variables(config=None)
    faults = _unknown_variables(values)
    variables = Variables(
        config=_config(values[CONFIG_VARIABLE], faults),
        lm_head_fp32=_switch(values.get(LM_HEAD_VARIABLE), faults),
        log_level=_level(values.get(LEVEL_VARIABLE, "INFO"), faults),
        log_file=_log_file(values.get(FILE_VARIABLE), faults),
        reload=_checkpoints(values.get(RELOAD_VARIABLE), faults),
    )
    if faults:
        raise RecipeError(faults)
    return variables


def idle_variables(environ: Mapping[str, str]) -> tuple[str, ...]:
    """List the variables of FlashRL's that are set and do nothing, because FLASHRL_CONFIG is not set."""
    return () if environ.get(CONFIG_VARIABLE) else tuple(name for name in VARIABLES if environ.get(name))


def _unknown_variables(given: Mapping[str, str]) -> list[Finding]:
    hint = "FlashRL's variables are " + ", ".join(f"`{name}`" for name in VARIABLES)
    return [fault((name,), "unknown variable", hint) for name in sorted(given) if name not in VARIABLES]


def _config(value: str, faults: list[Finding]) -> Name | Path | HubFile | None:
    if name := BY_NAME.get(value):
        return name
    path = full_path(value)
    if os.path.isfile(path):
        return path
    if found := _HUB_FILE.fullmatch(value):
        return HubFile(repo=found[1], path=found[2])
    hint = f"use one of {listed(NAMES)}, a YAML file in FlashRL's format, or `user/repo/file.yaml` on the hub"
    if (near := value.lower().replace("-", "_")) in IN_FILES:
        hint = f"did you mean `{near}`? {hint}" if near in BY_NAME else f"`{near}` is for `fn:` of a file; {hint}"
    fact = f"there is no file {value}" if value.endswith((".yaml", ".yml")) else f"unknown value `{value[:60]}`"
    faults.append(fault((CONFIG_VARIABLE,), fact, hint))
    return None


def _switch(value: str | None, faults: list[Finding]) -> bool | None:
    if value not in (None, "0", "1"):
        faults.append(fault((LM_HEAD_VARIABLE,), f"unknown value `{value[:60]}`", "use one of `0`, `1`"))
    return None if value is None else value == "1"


def _level(value: str, faults: list[Finding]) -> int:
    if value.upper() not in LEVELS:
        hint = "use one of " + ", ".join(f"`{level}`" for level in LEVELS)
        faults.append(fault((LEVEL_VARIABLE,), f"unknown value `{value[:60]}`", hint))
        return logging.INFO
    return logging.getLevelNamesMapping()[value.upper()]


def _log_file(value: str | None, faults: list[Finding]) -> Path | None:
    if value is None:
        return None
    path = full_path(value)
    if os.path.isdir(path) or not os.path.isdir(path.parent):
        faults.append(fault((FILE_VARIABLE,), f"{path} cannot be written", "name a file in a folder that exists"))
    return path


def _checkpoints(value: str | None, faults: list[Finding]) -> tuple[str, ...]:
    if value is None:
        return ()
    checkpoints = tuple(part.strip() for part in value.split(","))
    hint = "name folders or models on the hub (`user/repo`), with commas between them"
    for checkpoint in checkpoints:
        folder = Path(checkpoint)
        if checkpoint and folder.is_dir():
            if not (folder / "config.json").is_file() and not any(folder.glob("*.safetensors")):
                fact = f"`{checkpoint}` has no config.json and no safetensors"
                faults.append(fault((RELOAD_VARIABLE,), fact, "name a checkpoint's folder"))
        elif not _HUB_MODEL.fullmatch(checkpoint):
            faults.append(fault((RELOAD_VARIABLE,), f"`{checkpoint[:80]}` is no checkpoint", hint))
    return checkpoints


def start_logging(variables: Variables) -> None:
    """Start the log, once per process; a second call changes nothing. Raises RecipeError when the file cannot be
    opened."""
    if LOGGER.handlers:
        return
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if variables.log_file:
        try:
            handlers.append(logging.FileHandler(variables.log_file, mode="a"))
        except OSError as error:
            fact = f"{variables.log_file} cannot be written: {error.strerror}"
            raise RecipeError(
                [fault((FILE_VARIABLE,), fact, "name a file in a folder that you can write to")]
            ) from error
    LOGGER.setLevel(variables.log_level)
    LOGGER.propagate = False  # vLLM's processes may have a root handler: one line, not two
    for handler in handlers:
        handler.setFormatter(logging.Formatter(_FORMAT))
        LOGGER.addHandler(handler)


def tell_hints(error: ApplianceError) -> None:
    """Put the hints below the error in a traceback, because no command of ours is there to print them."""
    hints = [finding.remedy for finding in error.findings] if isinstance(error, RecipeError) else [error.hint]
    for hint in dict.fromkeys(filter(None, hints)):
        error.add_note(f"hint: {hint}")
