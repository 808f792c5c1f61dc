"""What an engine gets by FlashRL's variables: the settings of its rank, and what of FlashRL's is otherwise here.

Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from appliance.errors import RecipeError
from appliance.quant.files import PROFILE_FILE
from appliance.terms.settings import Quantisation
from flashrl_compat.config_file import (
    EXTERNAL_LAUNCHER,
    LOAD_FORMATS,
    Entry,
    entry_of_rank,
    read_config,
)
from flashrl_compat.names import Name
from flashrl_compat.variables import CONFIG_VARIABLE, LM_HEAD_VARIABLE, HubFile, Variables


@dataclass(frozen=True)
class EngineSettings:
    """load_format, backend: empty where the engine's own setting holds.  reload: checkpoints, in order.

    same_for_all: whether every rank gets the same.  notes: what differs from FlashRL, for the log.
    """

    quantisation: Quantisation
    load_format: str
    backend: str
    reload: tuple[str, ...]
    same_for_all: bool
    notes: tuple[str, ...]


def engine_settings(variables: Variables, *, rank: int) -> EngineSettings:
    """rank: data-parallel, in verl the replica's. Raises RecipeError."""
    assert variables.config is not None  # the caller asked
    entries = _entries(variables.config)
    entry = entry_of_rank(entries, rank=rank)
    return EngineSettings(
        quantisation=_with_lm_head(entry.quantisation, wanted=variables.lm_head_fp32),
        load_format="" if entry.load_format == LOAD_FORMATS[0] else entry.load_format,
        backend="" if entry.backend == EXTERNAL_LAUNCHER else entry.backend,
        reload=variables.reload,
        same_for_all=all(each == entry for each in entries),
        notes=_notes(entry),
    )


def _entries(config: Name | Path | HubFile) -> tuple[Entry, ...]:
    if isinstance(config, Name):
        return (Entry(config, Quantisation(scheme=config.scheme), load_format=LOAD_FORMATS[0], model="", backend=""),)
    if isinstance(config, HubFile):
        return read_config(_downloaded(config), shown=f"{config.repo}/{config.path}")
    return read_config(config)


def _downloaded(file: HubFile) -> Path:
    """The file and every profile of ours beside it. Nothing else: FlashRL's own profiles are pickles."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(file.repo, allow_patterns=[file.path, f"*{PROFILE_FILE}"])
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        fact = f"{CONFIG_VARIABLE}: {file.repo}/{file.path} is no file here and cannot be had from the hub"
        raise RecipeError([(fact, str(error).splitlines()[0])]) from error
    path = Path(folder) / file.path
    if not path.is_file():
        raise RecipeError([(f"{CONFIG_VARIABLE}: {file.repo} on the hub has no file {file.path}", "")])
    return path


def _with_lm_head(quantisation: Quantisation, *, wanted: bool | None) -> Quantisation:
    if wanted is False and quantisation.lm_head_fp32:
        hint = "unset the variable, or change the file"
        raise RecipeError([(f"{LM_HEAD_VARIABLE}: it is 0, and the file says lm_head_fp32: true", hint)])
    return quantisation.replace(lm_head_fp32=quantisation.lm_head_fp32 or wanted is True)


def _notes(entry: Entry) -> tuple[str, ...]:
    notes = [f"{entry.name.theirs}: FlashRL: {entry.name.meant}; here: {entry.name.differs}"]
    if entry.backend == EXTERNAL_LAUNCHER:
        notes.append("distributed_executor_backend: external_launcher of the file is left out, the engine's own holds")
    if entry.load_format != LOAD_FORMATS[0]:
        notes.append("load_format: dummy: the weights are random until the first sync")
    return tuple(notes)
