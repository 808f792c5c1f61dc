"""The trained model out of a checkpoint, as the original class and in the original parametrisation.

The trainer calls it at the end of a run; `appliance export` starts it as a child, for it needs torch. Arguments of the
child: RUN (the run's folder) CHECKPOINT TARGET (the folder to make) REPORT (a folder whose events say what went wrong)
and, where only an adapter is asked for, ADAPTER_ONLY.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from appliance.errors import PreflightError, TrainingError
from appliance.files import whole_folder
from appliance.quant.uaq import fold_back
from appliance.record.checkpoints import ADAPTER_FOLDER
from appliance.record.events import exit_code_of
from appliance.record.plan import ModelPlan, UaqPlan

ADAPTER_ONLY = "adapter"


def main() -> int:
    run_dir, checkpoint, target, report = (Path(argument) for argument in sys.argv[1:5])
    export = _export_adapter if sys.argv[5:] == [ADAPTER_ONLY] else _export
    return exit_code_of(lambda: export(run_dir, checkpoint=checkpoint, target=target), run_dir=report)


def export_checkpoint(checkpoint: Path, *, target: Path, uaq: UaqPlan | None, model: ModelPlan | None = None) -> None:
    """checkpoint: `checkpoints/global_step_<n>`.  target: a new folder, there whole or not at all.

    uaq: what the run's model was scaled with.  model: that the run began with, to merge an adapter into.
    Raises TrainingError when the checkpoint has no model.
    """
    source = checkpoint / "actor" / "huggingface"
    if not (source / "config.json").is_file():
        raise TrainingError(f"the checkpoint has no model in {source}")
    with whole_folder(target) as partial:
        if (source.parent / ADAPTER_FOLDER).is_dir():
            from appliance.trainer.lora import merge  # torch and transformers, which nothing else here needs

            assert model is not None, "a run that trains an adapter says on which model"
            merge(
                model.path,
                commit=model.commit,
                trust_remote_code=model.trust_remote_code,
                actor=source.parent,
                target=partial,
            )
        elif uaq is None:
            shutil.copytree(source, partial, dirs_exist_ok=True)
        else:
            fold_back(source, target=partial, scale=uaq.scale)


def _export(run_dir: Path, *, checkpoint: Path, target: Path) -> None:
    """Raises PreflightError for a plan that cannot be read, and where the target cannot be written: what else is read
    was read before, for its hashes."""
    try:  # no more of the plan: the rest may be of another version
        raw: dict[str, Any] = json.loads((run_dir / "plan.json").read_bytes())
        uaq = None if raw["uaq"] is None else UaqPlan.model_validate(raw["uaq"])
        model = ModelPlan.model_validate(raw["model"]) if raw.get("lora") else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        hint = "export it with the version that made the run"
        raise PreflightError(f"{run_dir / 'plan.json'}: {error}", hint=hint) from error
    with _writing(target):
        export_checkpoint(checkpoint, target=target, uaq=uaq, model=model)


def _export_adapter(run_dir: Path, *, checkpoint: Path, target: Path) -> None:
    """Raises PreflightError where the run trained none, or the target cannot be written."""
    source = checkpoint / "actor" / ADAPTER_FOLDER
    if not source.is_dir():
        hint = "leave --adapter out: its checkpoints have the whole model"
        raise PreflightError(f"{run_dir} trained no adapter (model.lora)", hint=hint)
    with _writing(target), whole_folder(target) as partial:
        shutil.copytree(source, partial, dirs_exist_ok=True)


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        message = f"{target}: cannot be written: {error.strerror or error}"
        raise PreflightError(message, hint="free some space, or set -o to another folder") from error


if __name__ == "__main__":
    sys.exit(main())
