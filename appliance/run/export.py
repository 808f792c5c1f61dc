"""The trained model of a checkpoint as a folder that plain transformers and plain vLLM load. Standard library only."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from appliance.errors import TrainingError

MODEL_IN_A_CHECKPOINT = Path("actor") / "huggingface"


def export(checkpoint: Path, *, target: Path) -> None:
    """Make `target`, which must not be there, whole or not at all.

    Raises TrainingError when the checkpoint has no model, OSError when the folder cannot be written.
    """
    source = checkpoint / MODEL_IN_A_CHECKPOINT
    if not (source / "config.json").is_file():
        raise TrainingError(f"{checkpoint} has no model in {MODEL_IN_A_CHECKPOINT}")
    partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
    try:
        shutil.copytree(source, partial)
        partial.rename(target)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
