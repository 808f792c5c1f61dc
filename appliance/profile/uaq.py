"""UAQ's scaled model in a run's folder: the step of a run that makes it, and its child,
`python -m appliance.profile.uaq PLAN`, whose progress and failures are events of the run.

The folder is made from the model, never from itself, and appears whole or not at all. Its mark says with what scale
and from which files: a resumed run finds it and makes nothing, and one whose recipe or model has changed is refused.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from appliance.errors import EngineError, PreflightError
from appliance.files import partial_prefix, whole_folder
from appliance.launch.outcome import Child
from appliance.launch.train import Stage
from appliance.processes import module_argv
from appliance.profile.job import model_folder, model_hash
from appliance.quant.uaq import MARK_FILE, ScaledMark, read_mark, scale_folder
from appliance.record.events import append_event, exit_code_of
from appliance.record.liveness import Heartbeat, keep_stacks
from appliance.record.plan import RunPlan, read_plan
from appliance.terms.phases import Phase


def is_scaled(plan: RunPlan) -> bool:
    """Tell whether the run needs no scaled model, or has it. Raises EngineError for one of another scale or model."""
    if plan.uaq is None:
        return True
    folder, source, resumed = Path(plan.uaq.folder), Path(plan.weights.name_or_path), Path(plan.resume_from)
    try:
        mark = read_mark(folder)
    except PreflightError as error:
        raise EngineError(f"not a model that UAQ scaled: {error.message}", hint="remove the folder") from error
    if mark is None and folder.exists():
        raise EngineError(f"{folder}: not a model that UAQ scaled: it has no {MARK_FILE}", hint="remove the folder")
    if mark is None:
        return False
    saved = read_mark(resumed) if plan.resume_from else None
    wrong = ""
    if mark.scale != plan.uaq.scale:
        wrong = f"made with uaq_scale {mark.scale:g}, and the plan says {plan.uaq.scale:g}"
    elif (source / "config.json").is_file() and _hash(source, plan) != mark.model_hash:  # a name on the hub is none
        wrong = f"made from {mark.model}, whose files have changed since"
    elif saved and saved.model_hash != mark.model_hash:
        wrong = f"made from another model than {resumed.name} was trained with"
    if wrong:
        raise EngineError(
            f"{folder}: {wrong}",
            hint="put correction.uaq_scale and the model back as the run began with them, or start another run",
        )
    return True


def _hash(source: Path, plan: RunPlan) -> str:
    return model_hash(source, cache_dir=Path(plan.cache_dir))


def scaling_child(plan: RunPlan) -> Child | None:
    """Return the child that makes the scaled model; None where none is needed or it is there. Raises as is_scaled
    does."""
    argv = module_argv("appliance.profile.uaq", str(Path(plan.run_dir) / "plan.json"))
    return None if is_scaled(plan) else Child(str(Phase.SCALE), "scaling (UAQ)", argv, default_code=4)


SCALING = Stage(child=scaling_child, is_done=is_scaled, finish=lambda plan: None)


def make_scaled(plan: RunPlan) -> None:
    """Fill the folder that the plan names. Raises what `scale_folder` raises, OSError when it cannot be written."""
    assert plan.uaq is not None, "only a plan with UAQ has a scaled model"
    run_dir, target, scale = Path(plan.run_dir), Path(plan.uaq.folder), plan.uaq.scale
    append_event(run_dir, kind="phase", what=str(Phase.SCALE))
    source = model_folder(plan.weights.name_or_path, revision=plan.model.revision or "")
    for left in run_dir.glob(f"{partial_prefix(target)}*"):  # of an attempt that was killed
        shutil.rmtree(left)
    with whole_folder(target) as scaled:
        norms = scale_folder(source, target=scaled, scale=scale, on_file=Heartbeat().beat)
        mark = ScaledMark(scale=scale, model=plan.weights.name_or_path, model_hash=_hash(source, plan), norms=norms)
        (scaled / MARK_FILE).write_text(mark.model_dump_json(indent=2) + "\n")
    what = f"UAQ: {norms} norms and all that they feed are scaled by {scale:g}"
    append_event(run_dir, kind="note", what=what, why="correction.uaq_scale")


if __name__ == "__main__":
    keep_stacks(str(Phase.SCALE))
    found = read_plan(Path(sys.argv[1]))
    sys.exit(exit_code_of(lambda: make_scaled(found), run_dir=Path(found.run_dir)))
