"""UAQ's scaled model in a run's folder: the step of a run that makes it, and what runs in a process of its own,
`python -m appliance.profile.uaq PLAN`. Its progress and failures are events of the run.

The folder is made from the model, never from itself, and appears whole or not at all. Its mark says with what scale
and from which files: a resumed run finds it and makes nothing, and one whose recipe or model has changed is refused.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from appliance.errors import EngineError
from appliance.files import partial_prefix, whole_folder
from appliance.launch.outcome import Child
from appliance.launch.train import Step
from appliance.profile.cache import model_hash
from appliance.quant.uaq import MARK_FILE
from appliance.record.events import append_event, exit_code_of
from appliance.record.liveness import Heartbeat, keep_stacks
from appliance.record.plan import RunPlan, read_plan

PHASE = "scale"
_HINT = "give back what the run began with, or start another run"


@dataclass(frozen=True)
class Mark:
    """scale: what the weights were divided by.  model, model_hash: what was scaled.  norms: how many were."""

    scale: float
    model: str
    model_hash: str
    norms: int
    schema_version: int = 1


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
    mark = read_mark(Path(plan.uaq.folder)) if plan.uaq else None
    if plan.uaq is None or mark is None:
        return plan.uaq is None
    source, saved = Path(plan.model.path), Path(plan.resume_from) / MARK_FILE
    wrong = ""
    if mark.scale != plan.uaq.scale:
        wrong = f"made with uaq_scale {mark.scale:g}, and the plan says {plan.uaq.scale:g}"
    elif (source / "config.json").is_file() and _hash(source, plan) != mark.model_hash:  # a name on the hub is none
        wrong = f"made from {mark.model}, whose files have changed since"
    elif plan.resume_from and saved.is_file() and read_mark(saved.parent).model_hash != mark.model_hash:
        wrong = f"made from another model than {saved.parent.name} was trained with"
    if wrong:
        raise EngineError(f"{plan.uaq.folder}: {wrong}", hint=_HINT)
    return True


def _hash(source: Path, plan: RunPlan) -> str:
    return model_hash(source, cache_dir=Path(plan.cache_dir))


def scaling_child(plan: RunPlan) -> Child | None:
    """The child that makes the scaled model, None where none is needed or it is there. Raises as is_scaled."""
    argv = (sys.executable, "-m", "appliance.profile.uaq", str(Path(plan.run_dir) / "plan.json"))
    return None if is_scaled(plan) else Child("scale", "scaling (UAQ)", argv, default_code=4)


SCALING = Step(child=scaling_child, is_done=is_scaled, finish=lambda plan: None)


def make_scaled(plan: RunPlan) -> None:
    """Fill the folder that the plan names. Raises what `scale_folder` raises, OSError when it cannot be written."""
    from appliance.profile.child import model_folder
    from appliance.quant.uaq import scale_folder

    assert plan.uaq is not None, "only a plan with UAQ has a scaled model"
    run_dir, target, scale = Path(plan.run_dir), Path(plan.uaq.folder), plan.uaq.scale
    append_event(run_dir, kind="phase", what=PHASE)
    source = model_folder(plan.model.path, revision=plan.model.revision)
    for left in run_dir.glob(f"{partial_prefix(target)}*"):  # of an attempt that was killed
        shutil.rmtree(left)
    with whole_folder(target) as made:
        norms = scale_folder(source, target=made, scale=scale, on_file=Heartbeat().beat)
        mark = Mark(scale, plan.model.path, _hash(source, plan), norms)
        (made / MARK_FILE).write_text(json.dumps(asdict(mark), indent=2) + "\n")
    what = f"UAQ: {norms} norms and all that they feed are scaled by {scale:g}"
    append_event(run_dir, kind="note", what=what, why="correction.uaq_scale")


if __name__ == "__main__":
    keep_stacks(PHASE)
    found = read_plan(Path(sys.argv[1]))
    sys.exit(exit_code_of(lambda: make_scaled(found), run_dir=Path(found.run_dir)))
