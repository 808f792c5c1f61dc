"""Makes a run's scaled model (UAQ), in a process of its own: `python -m appliance.profile.scale_child PLAN`.

Progress and failures are events of the run; the exit code is that of the error.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from appliance.files import partial_prefix, whole_folder
from appliance.plan.model import RunPlan
from appliance.plan.read import read_plan
from appliance.profile.child import model_folder
from appliance.profile.found import model_hash
from appliance.profile.scaled import Mark
from appliance.quant.uaq import scale_folder
from appliance.run.events import append_event, exit_code_of
from appliance.run.heartbeat import Heartbeat
from appliance.run.stacks import keep_stacks

PHASE = "scale"


def make_scaled(plan: RunPlan) -> None:
    """Fill the folder that the plan names. Raises what `scale_folder` raises, OSError when it cannot be written."""
    assert plan.uaq is not None, "only a plan with UAQ has a scaled model"
    run_dir, target = Path(plan.run_dir), Path(plan.uaq.folder)
    append_event(run_dir, kind="phase", what=PHASE)
    source = model_folder(plan.model.path, revision=plan.model.revision)
    for left in run_dir.glob(f"{partial_prefix(target)}*"):  # of an attempt that was killed
        shutil.rmtree(left)
    with whole_folder(target) as made:
        norms = scale_folder(source, target=made, scale=plan.uaq.scale, on_file=Heartbeat().beat)
        hashed = model_hash(source, cache_dir=Path(plan.cache_dir))
        Mark(plan.uaq.scale, plan.model.path, hashed, norms).write(made)
    what = f"UAQ: {norms} norms and all that they feed are scaled by {plan.uaq.scale:g}"
    append_event(run_dir, kind="note", what=what, why="correction.uaq_scale")


def main(arguments: list[str]) -> int:
    keep_stacks(PHASE)
    plan = read_plan(Path(arguments[0]))
    return exit_code_of(lambda: make_scaled(plan), run_dir=Path(plan.run_dir))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
