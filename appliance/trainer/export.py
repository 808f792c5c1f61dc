"""The trained model out of a checkpoint, as the original class and in the original parametrisation.

The trainer calls it at the end of a run; `appliance export` starts it as a child, for it needs torch. Arguments of the
child: RUN (the run's folder) CHECKPOINT TARGET (the folder to make) REPORT (a folder whose events say what went wrong).
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from appliance.errors import PreflightError, TrainingError
from appliance.files import whole_folder
from appliance.quant.uaq import fold_back
from appliance.record.events import exit_code_of
from appliance.record.plan import UaqPlan


def main() -> int:
    run_dir, checkpoint, target, report = (Path(argument) for argument in sys.argv[1:])
    return exit_code_of(lambda: _export(run_dir, checkpoint=checkpoint, target=target), run_dir=report)


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


def _export(run_dir: Path, *, checkpoint: Path, target: Path) -> None:
    """Raises PreflightError for a plan that cannot be read, and where the target cannot be written: what else is read
    was read before, for its hashes."""
    try:  # no more of the plan: the rest may be of another version
        raw = json.loads((run_dir / "plan.json").read_bytes())["uaq"]
        uaq = None if raw is None else UaqPlan.model_validate(raw)
    except (OSError, ValueError, KeyError, TypeError) as error:
        hint = "export it with the version that made the run"
        raise PreflightError(f"{run_dir / 'plan.json'}: {error}", hint=hint) from error
    try:
        export_checkpoint(checkpoint, target=target, uaq=uaq)
    except OSError as error:
        message = f"{target}: cannot be written: {error.strerror or error}"
        raise PreflightError(message, hint="free some space, or set -o to another folder") from error


if __name__ == "__main__":
    sys.exit(main())
