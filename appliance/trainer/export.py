"""The trained model out of a checkpoint, as the original class and in the original parametrisation."""

from __future__ import annotations

import shutil
from pathlib import Path

from appliance.errors import TrainingError
from appliance.files import whole_folder
from appliance.plan.model import UaqPlan
from appliance.quant.uaq import fold_back


def export_checkpoint(checkpoint: Path, *, target: Path, uaq: UaqPlan | None) -> None:
    """checkpoint: `checkpoints/global_step_<n>`.  target: a new folder, there whole or not at all.

    uaq: what the run's model was scaled with.  Raises TrainingError when the checkpoint has no model.
    """
    source = checkpoint / "actor" / "huggingface"
    if not (source / "config.json").is_file():
        raise TrainingError(f"the checkpoint has no model in {source}")
    with whole_folder(target) as partial:
        if uaq is None:
            shutil.copytree(source, partial, dirs_exist_ok=True)
        else:
            fold_back(source, target=partial, scale=uaq.scale)
