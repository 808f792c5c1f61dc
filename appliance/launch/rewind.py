"""The next attempt of a run: its folder put back to the end of the last step that is kept, nothing thrown away.

Every move can be repeated: a launcher that is killed in between leaves a folder that can be resumed all the same, for
`run.json` gets the new number of the attempt last.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from appliance.errors import RecipeError
from appliance.files import partial_prefix, write_whole
from appliance.launch.resume import Resume
from appliance.record.attestations import ATTEST_FOLDER
from appliance.record.checkpoints import (
    DAMAGED,
    FITS_FILE,
    GUARD_FILE,
    PROFILE_FOLDER,
    half_done,
    in_order,
    is_leaving,
    owed_line,
    set_aside,
    step_of,
)
from appliance.record.events import EVENTS_FILE, METRICS_FILE, append_event, end_torn_line
from appliance.record.plan import RunPlan
from appliance.record.samples import SAMPLES_FILE
from appliance.record.session import RunRecord, Session, cannot_write, log_dir, read_record, versions, write_record
from appliance.sync.records import SYNC_FOLDER

MODEL = "model"
LINES_OF_A_STEP = (FITS_FILE, SAMPLES_FILE)  # what else has a line per step


def begin_attempt(plan: RunPlan, *, resume: Resume, recipe_yaml: str) -> Session:
    """Claim the run and bring its folder back to where it goes on.

    Raises RecipeError when another launcher has it, PreflightError when the folder cannot be written.
    """
    run_dir = resume.target.run_dir
    before = resume.target.record
    try:
        session = Session(run_dir, record=RunRecord(attempt=before.attempt + 1), must_lock=True)
    except BlockingIOError:
        raise _taken(run_dir) from None
    except OSError as error:
        raise cannot_write(run_dir, error) from error
    try:
        if _attempt_now(run_dir) != before.attempt:
            raise _taken(run_dir)
        _put_back(plan, resume=resume, recipe_yaml=recipe_yaml)
        write_record(run_dir, session.record)
    except OSError as error:
        session.release()
        raise cannot_write(run_dir, error) from error
    except RecipeError:
        session.release()
        raise
    return session


def _put_back(plan: RunPlan, *, resume: Resume, recipe_yaml: str) -> None:
    run_dir, attempt = resume.target.run_dir, resume.target.record.attempt
    logs = log_dir(run_dir, attempt=attempt)
    logs.mkdir(parents=True, exist_ok=True)
    log_dir(run_dir, attempt=attempt + 1).mkdir(exist_ok=True)
    end_torn_line(run_dir / EVENTS_FILE)
    append_event(
        run_dir, kind="resume", what=_words(resume, attempt=attempt + 1), step=resume.step, attempt=attempt + 1
    )
    _put_checkpoints_aside(resume)
    after = resume.step if resume.found.newest else -1
    # The last step's line is written again, whole, after the validation that a stop cut.
    owed = owed_line(run_dir, checkpoint=resume.found.newest, plan=plan) is not None
    for name, last in ((METRICS_FILE, after - owed), *((name, after) for name in LINES_OF_A_STEP)):
        cut = cut_lines(run_dir / name, after=last, attempt=attempt, may_repeat=name == SAMPLES_FILE)
        _tell_cut(run_dir, name=name, step=last, cut=cut)
    _restore_guard(run_dir, checkpoint=resume.found.newest)
    if resume.found.newest is not None:
        _restore_lost(run_dir, checkpoint=resume.found.newest)
    for folder in (SYNC_FOLDER, ATTEST_FOLDER, MODEL):
        if (run_dir / folder).exists():
            (run_dir / folder).rename(logs / folder)
    for partial in run_dir.glob(f"{partial_prefix(run_dir / MODEL)}*"):  # of an attempt that was killed
        shutil.rmtree(partial)
    made = {"recipe.yaml": recipe_yaml, "plan.json": plan.to_json() + "\n"}
    now = versions(plan)
    made["versions.json"] = json.dumps(now, indent=2) + "\n"
    _tell_versions(run_dir, now=now)
    for name, text in made.items():
        if (run_dir / name).is_file() and not (logs / name).exists():
            shutil.copyfile(run_dir / name, logs / name)
        write_whole(run_dir / name, text)


def _tell_versions(run_dir: Path, *, now: dict[str, object]) -> None:
    """A note where this program or what it drives is another version than in the attempt before."""
    try:
        before = json.loads((run_dir / "versions.json").read_text())
    except (OSError, ValueError):
        return
    changed = [name for name in ("distributions", "python", "fingerprint") if before.get(name) != now.get(name)]
    if changed:
        what = f"this attempt runs with other versions than the one before: {', '.join(changed)}"
        append_event(run_dir, kind="note", what=what, why="versions.json, and logs/ for those before")


def _words(resume: Resume, *, attempt: int) -> str:
    if resume.found.newest is None:
        return f"attempt {attempt} starts from the beginning: no whole checkpoint"
    return f"attempt {attempt} goes on after step {resume.step}"


def _put_checkpoints_aside(resume: Resume) -> None:
    run_dir = resume.target.run_dir
    for each in resume.found.rejected:
        aside = set_aside(each.folder, below=DAMAGED)
        _say_aside(run_dir, what=f"{each.folder.name} is damaged and set aside", why=each.why, aside=aside)
    for folder in half_done(run_dir):
        if is_leaving(folder):
            shutil.rmtree(folder)
        else:
            aside = set_aside(folder, below=DAMAGED)
            _say_aside(run_dir, what=f"{folder.name} was half written and is set aside", why="", aside=aside)
    for folder in in_order(run_dir):
        if (step_of(folder) or 0) > resume.step:
            aside = set_aside(folder, below=f"cut-{resume.target.record.attempt}")
            why = f"the run goes on after step {resume.step}"
            _say_aside(run_dir, what=f"{folder.name} is later and set aside", why=why, aside=aside)


def _say_aside(run_dir: Path, *, what: str, why: str, aside: Path) -> None:
    append_event(run_dir, kind="checkpoint", what=what, why=why, aside=str(aside.relative_to(run_dir)))


def _tell_cut(run_dir: Path, *, name: str, step: int, cut: Path | None) -> None:
    if cut is not None:
        what = f"the lines of {name} after step {max(0, step)} are cut off"
        append_event(run_dir, kind="note", what=what, why=f"kept in {cut.name}")


def cut_lines(path: Path, *, after: int, attempt: int, may_repeat: bool = False) -> Path | None:
    """Keep the lines of steps up to `after`, each step once; move the others into a file beside it, which is returned.

    A line that was torn by the end of a process is one of the others. None when there was nothing to cut.
    may_repeat: a step may have several lines.
    """
    if not path.exists():
        return None
    kept: list[bytes] = []
    cut: list[bytes] = []
    seen: set[int] = set()
    for line in path.read_bytes().splitlines(keepends=True):
        step = _step(line)
        keep = step is not None and step <= after and (may_repeat or step not in seen)
        (kept if keep else cut).append(line)
        if step is not None and keep:
            seen.add(step)
    if not cut:
        return None
    aside = path.with_name(f"{path.stem}.cut-{attempt}{path.suffix}")
    write_whole(aside, b"".join(cut))
    write_whole(path, b"".join(kept))
    return aside


def _step(line: bytes) -> int | None:
    """The step of a whole line, None for another one."""
    try:
        raw = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    step = raw.get("step") if isinstance(raw, dict) else None
    return step if isinstance(step, int) and not isinstance(step, bool) else None


def _restore_guard(run_dir: Path, *, checkpoint: Path | None) -> None:
    """The governor's memory as it was at the end of the step; none at the beginning."""
    kept = checkpoint / GUARD_FILE if checkpoint else None
    if kept is not None and kept.is_file():
        write_whole(run_dir / GUARD_FILE, kept.read_bytes())
    else:
        (run_dir / GUARD_FILE).unlink(missing_ok=True)


def _restore_lost(run_dir: Path, *, checkpoint: Path) -> None:
    """What the next step needs and the run's folder has lost: files of the profile, the fits up to the step."""
    here = run_dir / PROFILE_FOLDER
    lost = [each for each in (checkpoint / PROFILE_FOLDER).glob("*") if not (here / each.name).exists()]
    fits = checkpoint / FITS_FILE
    if fits.is_file() and not _is_copy(run_dir / FITS_FILE, of=fits):
        lost.append(fits)
    for file in lost:
        name = file.relative_to(checkpoint)
        (run_dir / name).parent.mkdir(exist_ok=True)
        write_whole(run_dir / name, file.read_bytes())
        append_event(run_dir, kind="note", what=f"{name} is restored", why=f"from {checkpoint.name}")


def _is_copy(file: Path, *, of: Path) -> bool:
    return file.is_file() and file.read_bytes() == of.read_bytes()


def _attempt_now(run_dir: Path) -> int:
    try:
        return read_record(run_dir).attempt
    except FileNotFoundError:
        return 0


def _taken(run_dir: Path) -> RecipeError:
    return RecipeError([(f"--resume: another program has just taken the run {run_dir}", "wait for its end")])
