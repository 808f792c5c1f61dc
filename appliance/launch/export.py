"""`appliance export`: the trained model of a checkpoint as a folder that plain transformers and plain vLLM load."""

from __future__ import annotations

import contextlib
import os.path
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from appliance import console
from appliance.errors import PreflightError, RecipeError
from appliance.files import partial_prefix
from appliance.launch.resume import warn_of_rejected
from appliance.launch.side_job import folder_elsewhere, new_folder, run_child
from appliance.recipe.text import full_path
from appliance.record.checkpoints import ADAPTER_FOLDER, checkpoint_folder, damage, find_newest, in_order
from appliance.record.session import cannot_write
from appliance.report.folder import find_run, reading

CHILD_MODULE, ADAPTER_ONLY = "appliance.trainer.export", "adapter"


def run_export(run: str, *, run_root: Path, step: int | None, output: Path, adapter: bool = False) -> int:
    """Make the folder `output`, which must not be there. step: of the checkpoint, None for the newest whole one.
    adapter: LoRA's alone.

    Raises RecipeError for a run, a step or an adapter that is not there, PreflightError for a damaged checkpoint or an
    output that cannot be written.
    """
    run_dir, target = find_run(run, run_root=run_root), full_path(str(output))
    if os.path.lexists(target):
        hint = "name a new folder, or remove what is there"
        raise RecipeError([(f"-o: {target} is there already and is not overwritten", hint)])
    with reading(run_dir):
        checkpoint = _checkpoint(run_dir, step=step)
        if adapter and not (checkpoint / "actor" / ADAPTER_FOLDER).is_dir():
            hint = "leave --adapter out: its checkpoints have the whole model"
            raise RecipeError([(f"--adapter: {run_dir} trained no adapter (model.lora)", hint)])
    with new_folder(target.parent, option="-o"), _nothing_half_made(target):
        try:
            with folder_elsewhere(command="export") as folder:
                run_child(
                    [CHILD_MODULE, *map(str, (run_dir, checkpoint, target, folder)), *([ADAPTER_ONLY] * adapter)],
                    command="export",
                    folder=folder,
                    env={},
                )
        except OSError as error:  # what concerns the target is told by the child
            raise cannot_write(Path(tempfile.gettempdir()), error, setting="TMPDIR") from error
    console.say(f"the {'adapter' if adapter else 'model'} of {checkpoint.name} is in {target}")
    console.out(str(target))
    return 0


@contextlib.contextmanager
def _nothing_half_made(target: Path) -> Iterator[None]:
    """A child that a signal has us end leaves what it had begun: as large as a model, hidden, in the user's folder."""
    half = re.compile(re.escape(partial_prefix(target)) + r"[a-z0-9_]{8}")  # as mkdtemp names it
    before = set(target.parent.iterdir())
    try:
        yield
    except BaseException:
        for each in set(target.parent.iterdir()) - before:
            if half.fullmatch(each.name):
                shutil.rmtree(each, ignore_errors=True)
        raise


def _checkpoint(run_dir: Path, *, step: int | None) -> Path:
    if step is None:
        found = find_newest(run_dir)
        warn_of_rejected(found)
        if found.newest is None:
            raise RecipeError([(f"{run_dir} has no whole checkpoint", "see its events.jsonl")])
        return found.newest
    folder = checkpoint_folder(run_dir, step=step)
    if not folder.is_dir():
        there = ", ".join(each.name.rpartition("_")[2] for each in in_order(run_dir)) or "none"
        raise RecipeError([(f"--step {step}: {run_dir} has no checkpoint of it", f"its steps: {there}")])
    problems = damage(folder)
    if problems:
        raise PreflightError(f"{folder} is damaged: {problems[0]}", hint="leave --step out for the newest whole one")
    return folder
