"""UAQ's scaled model in a run's folder: whether it is there, and the step of a run that makes it. Imports no torch.

The folder is made from the model, never from itself, and appears whole or not at all. Its mark says with what scale
and from which files: a resumed run finds it and makes nothing, and one whose recipe or model has changed is refused.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from appliance.errors import EngineError
from appliance.plan.model import RunPlan
from appliance.profile.cache import model_hash
from appliance.quant.uaq_layers import MARK_FILE
from appliance.run.outcome import Child
from appliance.run.train import Step

CHILD_MODULE = "appliance.profile.scale_child"
_HINT = "give back what the run began with, or start another run"


@dataclass(frozen=True)
class Mark:
    """scale: what the weights were divided by.  model, model_hash: what was scaled.  norms: how many were."""

    scale: float
    model: str
    model_hash: str
    norms: int
    schema_version: int = 1

    def write(self, folder: Path) -> None:
        (folder / MARK_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n")


def read_mark(folder: Path) -> Mark | None:
    """None where the folder is not there. Raises EngineError for one that is there and has no mark of ours."""
    if not folder.exists():
        return None
    try:
        return Mark(**json.loads((folder / MARK_FILE).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise EngineError(f"{folder}: not a model that UAQ scaled: {error}", hint="remove the folder") from error


def is_scaled(plan: RunPlan) -> bool:
    """Whether the run needs no scaled model, or has it. Raises EngineError for one of another scale or model."""
    if plan.uaq is None:
        return True
    folder = Path(plan.uaq.folder)
    mark = read_mark(folder)
    if mark is None:
        return False
    if mark.scale != plan.uaq.scale:
        message = f"{folder}: made with uaq_scale {mark.scale:g}, and the plan says {plan.uaq.scale:g}"
        raise EngineError(message, hint=_HINT)
    source = Path(plan.model.path)
    is_here = (source / "config.json").is_file()  # a name on the hub is not
    if is_here and model_hash(source, cache_dir=Path(plan.cache_dir)) != mark.model_hash:
        raise EngineError(f"{folder}: made from {mark.model}, whose files have changed since", hint=_HINT)
    saved = Path(plan.resume_from) / MARK_FILE  # of an older version there is none
    if plan.resume_from and saved.is_file() and read_mark(saved.parent).model_hash != mark.model_hash:
        raise EngineError(f"{folder}: made from another model than {saved.parent.name} was trained with", hint=_HINT)
    return True


def scaling_child(plan: RunPlan) -> Child | None:
    """The child that makes the scaled model, None where none is needed or it is there. Raises as is_scaled."""
    if is_scaled(plan):
        return None
    argv = (sys.executable, "-m", CHILD_MODULE, str(Path(plan.run_dir) / "plan.json"))
    return Child("scale", "scaling (UAQ)", argv, default_code=4)


def _nothing(plan: RunPlan) -> None:
    """The child did it all."""


SCALING = Step(child=scaling_child, is_done=is_scaled, finish=_nothing)
