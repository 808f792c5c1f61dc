"""Folders of runs that ended, as their launchers and trainers leave them."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import replace
from pathlib import Path

from appliance.launch.resume import Resume, Target, find_misfits, find_start, find_target, original_plan
from appliance.plan.build import OriginalPlan
from appliance.recipe.load import load_recipe, to_yaml
from appliance.recipe.schema import Recipe
from appliance.record.checkpoints import Facts, checkpoint_folder, seal
from appliance.record.events import append_event
from appliance.record.plan import RunPlan
from appliance.record.session import RunStatus, create_session


def recipe(*sets: str) -> Recipe:
    return load_recipe("arithmetic-tiny-int8", sets=sets)


def stopped(plan: RunPlan, *, last_step: int = 5, state: RunStatus = RunStatus.FAILED) -> Path:
    """The folder of a run whose first attempt ended after `last_step`."""
    with create_session(plan, recipe_yaml=to_yaml(recipe()), is_chosen=False) as session:
        run_dir = session.run_dir
        for step in range(last_step + 1):
            metric(run_dir, step)
        append_event(run_dir, kind="failure", what="the disk is full", error="TrainingError", exit_code=5)
        for folder in ("sync", "attest"):
            (run_dir / folder).mkdir()
            (run_dir / folder / "said.json").write_text("{}")
        (run_dir / "guard.json").write_text('{"step": 5}')
        session.finish(state=state, exit_code=5, reason="the disk is full")
    return run_dir


def metric(run_dir: Path, step: int, **more: float) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "time_s": 1.0 * step, **more}) + "\n")


def save(
    run_dir: Path,
    step: int,
    *,
    line: dict[str, object] | None = None,
    spare: int = 0,
    files: dict[str, bytes] | None = None,
    **facts: object,
) -> Path:
    """spare: bytes of a file of holes, for what counts sizes.  files: more of them, by path.  facts: of seal.Facts."""
    folder = checkpoint_folder(run_dir, step=step)
    folder.mkdir(parents=True)
    (folder / "data.pt").write_bytes(b"x" * step)
    (folder / "guard.json").write_text(json.dumps({"step": step}))
    (folder / "state.json").write_text(
        json.dumps({"schema_version": 1, "step": step} | ({"line": line} if line else {}))
    )
    for name, content in (files or {}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    if spare:
        (folder / "spare").touch()
        os.truncate(folder / "spare", spare)
    seal(folder, facts=Facts(**{"step": step, "world_size": 1, "reason": "", "time": 0.0, **facts}))
    return folder


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def target_of(run_dir: Path) -> Target:
    found = find_target("auto", root=run_dir.parent, recipe_name="small", name=run_dir.name)
    assert found is not None
    return found


def without_pace(target: Target) -> OriginalPlan | None:
    """What the run began with, but for how its trainer forwards, which test_run_pace.py has."""
    original = original_plan(target)
    return replace(original, pace=None) if original else None


def events(run_dir: Path, kind: str) -> list[tuple[str, str]]:
    lines = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [(line["what"], line["why"]) for line in lines if line["kind"] == kind]


def resumed(run_dir: Path) -> Resume:
    return find_start(target_of(run_dir))


def misfits(run_dir: Path, plan: RunPlan) -> list[tuple[str, str]]:
    """What this plan cannot continue the run for: (fact, remedy)."""
    return [(finding.fact, finding.remedy) for finding in find_misfits(resumed(run_dir), plan=plan)]


def is_free(run_dir: Path) -> bool:
    """Of any launcher, as another process finds it."""
    with (run_dir / ".lock").open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
