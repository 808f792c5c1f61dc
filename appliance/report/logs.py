"""`appliance logs`: what the children of a run wrote, of one attempt, as it is or as it comes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from appliance import console
from appliance.errors import RecipeError
from appliance.finding import fault
from appliance.record.events import LINES_AT_ONCE, Tail
from appliance.record.liveness import STACKS_FOLDER
from appliance.record.session import has_launcher, log_dir, read_record
from appliance.report import summary
from appliance.report.folder import find_run, reading

_IN_ORDER = ("prepare", "scale", "profile", "train")  # of the work; any other log comes after
_LOOK_EVERY_S = 0.5
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def print_logs(
    run: str,
    *,
    run_root: Path,
    which: str | None = None,
    attempt: int | None = None,
    follow: bool = False,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Print logs on stdout, in the order of the work. which: the name of one log, None for all.  attempt: its number,
    None for the newest.  follow: until the run ends, through the attempts that come after the newest.  Raises
    RecipeError when there is none."""
    run_dir = find_run(run, run_root=run_root)
    number = attempt or _newest(run_dir)
    tails: dict[Path, Tail] = {}
    lives = has_ended = True
    while lives or has_ended:
        lives = follow and has_launcher(run_dir)
        has_ended = follow and attempt is None and number < _newest(run_dir)  # and another one has begun
        folder = log_dir(run_dir, attempt=number)
        with reading(run_dir):
            found = _logs(folder, which=which)
        for path in found:
            if path not in tails:
                console.say(f"== {summary.typed_path(path)}")
                tails[path] = Tail(path)
            for line in _lines(tails[path], run_dir=run_dir, half=has_ended or not lives):
                _show(line)
        if has_ended:
            number += 1
        elif lives:
            pause(_LOOK_EVERY_S)
    if not tails:
        raise _none(run, folder=folder, which=which)


def _newest(run_dir: Path) -> int:
    try:
        return read_record(run_dir).attempt
    except (OSError, ValueError) as error:
        raise RecipeError(
            [fault((str(run_dir),), f"cannot be read as a run: {error}", "name the --attempt")]
        ) from error


def _lines(tail: Tail, *, run_dir: Path, half: bool) -> Iterator[str]:
    """Yield lines as they are read: a log may be long. What goes wrong with a line that was given is not our
    reading."""
    while True:
        with reading(run_dir):
            lines = tail.read(most=LINES_AT_ONCE, half=half)
        if not lines:
            return
        yield from lines


def _none(run: str, *, folder: Path, which: str | None) -> RecipeError:
    """Return the error that says why there is nothing to show."""
    attempts = sorted(int(each.name) for each in folder.parent.glob("*") if each.name.isdecimal() and each.is_dir())
    if attempts and int(folder.name) not in attempts:
        numbers = ", ".join(map(str, attempts))
        return RecipeError(
            [fault((f"run `{run}`",), f"no logs of attempt {folder.name}", f"attempts with logs: {numbers}")]
        )
    there = [path.stem for path in _logs(folder, which=None)]
    if which is None or not there:
        return RecipeError(
            [fault((f"run `{run}`",), f"no logs in {folder} yet", f"appliance status {run} says where the run is")]
        )
    return RecipeError([fault((f"run `{run}`",), f"no log `{which}` in {folder}", f"there are: {', '.join(there)}")])


def _logs(folder: Path, *, which: str | None) -> list[Path]:
    """List the logs of the children, then the stacks of a stall."""
    logs = {path.stem: path for path in sorted(folder.glob("*.log"))}
    order = [*(name for name in _IN_ORDER if name in logs), *(name for name in logs if name not in _IN_ORDER)]
    stacks = [path for path in sorted((folder / STACKS_FOLDER).glob("*.txt")) if path.stat().st_size]
    if which is None:
        return [logs[name] for name in order]
    return stacks if which == STACKS_FOLDER else [logs[name] for name in order if name == which]


def _show(line: str) -> None:
    """Print a line without its colours; a bar that redraws itself becomes lines."""
    console.show(_COLOUR.sub("", line).rstrip("\r").replace("\r", "\n"))
