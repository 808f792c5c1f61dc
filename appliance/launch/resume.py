"""Which run a `train --resume` means, whether it may be resumed and from where; and its folder put back to that step.

Only the run's own checkpoints are ever loaded, and only those whose every byte verifies: verl unpickles what is in
them. Up to `begin_attempt` nothing is written. Every move of that can be repeated: a launcher that is killed in between
leaves a folder that can be resumed all the same, for `run.json` gets the new number of the attempt last.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import BaseModel, ValidationError

from appliance import console
from appliance.errors import Interrupted, PreflightError, RecipeError, refuse_faults
from appliance.files import digest_of, partial_prefix, write_whole
from appliance.finding import Finding, error, fault
from appliance.launch.changes import REMEDIES, Change, refused_changes
from appliance.launch.supervise import wait_for_sweep
from appliance.plan.build import OriginalPlan, code_files, plan_task
from appliance.plan.derive import Pace
from appliance.quant.files import PROFILE_FILE
from appliance.quant.uaq import MARK_FILE, read_mark
from appliance.recipe.load import load_recipe
from appliance.recipe.schema import NAME_PATTERN, Recipe
from appliance.recipe.text import full_path
from appliance.record.attestations import ATTEST_FOLDER
from appliance.record.checkpoints import (
    ADAPTER_FOLDER,
    DAMAGED,
    FITS_FILE,
    FOLDER,
    GUARD_FILE,
    PROFILE_FOLDER,
    SCALER_FILE,
    CheckpointSearch,
    Facts,
    damage,
    find_newest,
    half_done,
    hash_file,
    in_order,
    is_leaving,
    line_of,
    owed_line,
    read_manifest,
    set_aside,
    step_of,
)
from appliance.record.code import changed_code, copy_code
from appliance.record.earlier_plans import with_keys_of_today
from appliance.record.events import METRICS_FILE, append_event, append_line, read_metrics
from appliance.record.lines import cut_lines
from appliance.record.plan import CODE_FOLDER, Choice, CodeFile, ProfilePlan, RunPlan, UaqPlan, WeightsPlan, sentence
from appliance.record.samples import SAMPLES_FILE
from appliance.record.session import (
    LOGS,
    RUN_FILE,
    RunRecord,
    RunStatus,
    Session,
    cannot_write,
    has_launcher,
    log_dir,
    newest_run_dir,
    read_record,
    versions,
    write_record,
)
from appliance.settings.sections import Model, Quantization, TaskKind
from appliance.sync.records import SYNC_FOLDER
from appliance.tasks.library import data_key
from appliance.terms.schemes import Scheme
from appliance.terms.settings import Dtype

_CLAIMED = frozenset({LOGS, CODE_FOLDER, "recipe.yaml", "plan.json", "versions.json"})  # written before run.json
_RAY_LOGS = "ray"  # of a run that failed: Ray's own, copied with the links in them and never written again
_MODEL = "model"


@dataclass(frozen=True)
class Target:
    """A run to resume."""

    run_dir: Path
    record: RunRecord
    checkpoint: Path | None = None
    """Checkpoint that the user named; None: the newest that is whole."""


@dataclass(frozen=True)
class Resume:
    """A run that may be resumed."""

    target: Target
    search: CheckpointSearch
    """Checkpoints that were looked at. Without a whole one the run starts from the beginning, in the same folder."""
    restart: str = ""
    """Number of this restart after a fault, in words for people; empty where a user asked for it."""

    @property
    def step(self) -> int:
        """Last finished step that is kept; 0 for a start from the beginning."""
        return (step_of(self.search.newest) or 0) if self.search.newest else 0


def find_target(resume: str, *, root: Path, recipe_name: str, name: str | None) -> Target | None:
    """Find the run that is meant, None for a new one. root: folder of the runs. Raises RecipeError when there is
    none where one was named, or its launcher still lives."""
    if resume == "never":
        return None
    checkpoint = None
    if name is not None and not NAME_PATTERN.fullmatch(name):
        raise RecipeError(
            [fault(("--name",), f"`{name}` is no name of a run", "use letters, digits, `.`, `_` and `-`")]
        )
    if resume == "auto":
        run_dir = root / name if name else newest_run_dir(root, name=recipe_name)
        if run_dir is None or not run_dir.exists():
            return None
        if not run_dir.is_dir():
            hint = "choose another --name, or move the file away"
            raise RecipeError([fault(("--resume",), f"{run_dir} is a file, not the folder of a run", hint)])
    else:
        run_dir, checkpoint = _parse_resume_path(resume, name=name)
    if link := _first_link(run_dir):
        hint = "replace the link by what it points to, if you trust that"
        raise RecipeError([fault(("--resume",), f"{link} is a symbolic link, which a run never makes", hint)])
    if has_launcher(run_dir):
        raise RecipeError([fault(("--resume",), f"the run {run_dir} is running", "wait for its end, or stop it")])
    return Target(run_dir, _record(run_dir), checkpoint)


def _first_link(run_dir: Path) -> Path | None:
    """Return the first symbolic link at any depth. `checkpoints/` may be one, to a larger disk: what lies in it is
    verified."""
    for folder, folders, files in os.walk(run_dir):
        here = Path(folder)
        names = [name for name in (*folders, *files) if here != run_dir or name != FOLDER]
        if links := sorted(name for name in names if (here / name).is_symlink()):
            return here / links[0]
        left_out = FOLDER if here == run_dir else _RAY_LOGS if here.parent == run_dir / LOGS else ""
        folders[:] = [name for name in folders if name != left_out]
    return None


def _parse_resume_path(resume: str, *, name: str | None) -> tuple[Path, Path | None]:
    """Return (folder of the run, the checkpoint that was named, or None for the newest). Raises RecipeError for another
    path, or one that is not the run `name`."""
    path = full_path(resume)
    is_checkpoint = step_of(path) is not None and path.parent.name == FOLDER
    run_dir = path.parent.parent if is_checkpoint else path
    if not os.path.isfile(run_dir / RUN_FILE):
        hint = "use `auto`, `never`, the folder of a run, or one of its checkpoints/global_step_<n>"
        raise RecipeError([fault((f"--resume {resume}",), "not the folder of a run, nor of a checkpoint in one", hint)])
    if name is not None and name != run_dir.name:
        raise RecipeError(
            [fault(("--name",), f"`{name}` is not the run of --resume, `{run_dir.name}`", "leave --name out")]
        )
    return run_dir, path if is_checkpoint else None


def _record(run_dir: Path) -> RunRecord:
    """Read the record of a run. A folder without `run.json` was claimed by a launcher that died at once: nothing
    began in it."""
    try:
        return read_record(run_dir)
    except FileNotFoundError:
        if others := sorted({path.name for path in run_dir.iterdir() if path.name[0] != "."} - _CLAIMED):
            hint = "name the run with --name"
            raise RecipeError(
                [fault(("--resume",), f"{run_dir} is not the folder of a run: it has {others[0]}", hint)]
            ) from None
        return RunRecord(attempt=0)
    except (OSError, ValueError) as error:
        raise RecipeError([fault(("--resume",), str(error))]) from error


def refuse_changes(recipe: Recipe, *, target: Target, force: bool) -> None:
    """Raise RecipeError with each key that differs from the run's recipe and may not (launch/changes.py), and with
    each of the user's Python files that the run has otherwise, or that is not there. force: let all pass but what
    its checkpoints could not be loaded with."""
    if not target.record.attempt:
        return
    run_dir, findings = target.run_dir, list[Finding]()
    if (file_before := run_dir / "recipe.yaml").is_file():
        changes = refused_changes(
            recipe, before=_recipe_before(file_before), has_checkpoint=bool(in_order(run_dir)), force=force
        )
        findings += (each for each in changes if not _is_begun_with(each.place, recipe, target=target))
    task = plan_task(recipe)
    if (code := code_files(task)) and not force:
        sums = _plan_before(run_dir).task_files.sums
        for file in code:
            key = "task.tools" if file.path == task.tools else "task.rewards"
            if not file.sha256:
                findings.append(fault((key,), f"{file.path}: no such file, or it cannot be read", "correct the path"))
            elif file.sha256 != sums.get(file.copy_name):
                message = f"{file.path}: it is not the file that the run began with"
                findings.append(fault((key,), message, REMEDIES[Change.FORCED]))
    refuse_faults(recipe.placed(finding) for finding in findings)


def _recipe_before(recipe_file: Path) -> Recipe:
    """Read the recipe that the run has kept. Raises RecipeError where it has what this version does not know, such
    as a key of an earlier one: what that key did, no attempt of this version can do."""
    try:
        return load_recipe(str(recipe_file), by_rules=False)
    except RecipeError as error:
        hint = (
            "such a run cannot be resumed by this version: finish it with the version that began it, which its "
            "versions.json names, or start a new run"
        )
        *others, last = error.findings  # the hint is shown once, below all of them
        raise RecipeError([*(replace(finding, remedy="") for finding in others), replace(last, remedy=hint)]) from error


def _is_begun_with(key: str, recipe: Recipe, *, target: Target) -> bool:
    """Tell whether the key names the very commit that the run's model was, without being named, when the run began."""
    original = original_plan(target) if key == "model.revision" and recipe.model.revision else None
    return original is not None and original.commit == recipe.model.revision


def is_done(target: Target, *, steps: int) -> bool:
    """Tell whether the run ended well, and after at least so many steps. Never when a checkpoint to go back to
    is named."""
    if target.record.state is not RunStatus.DONE or target.checkpoint is not None:
        return False
    return _plan_before(target.run_dir).trainer.steps >= steps


def original_plan(target: Target, *, alone: bool = False) -> OriginalPlan | None:
    """Return what the run was planned for; None for one that never began. Raises RecipeError when its plan cannot be
    read. alone: nobody asked for this attempt, which continues with the run's own copies of the user's files."""
    if not target.record.attempt:
        return None
    before = _plan_before(target.run_dir)
    return OriginalPlan(
        before.cluster.device,
        next((Scheme(each.value) for each in before.choices if each.key == "rollout.scheme"), None),  # if it was `auto`
        model=before.weights.hub_name,
        revision=before.model.revision or "",
        commit=before.weights.commit,
        data=before.task.data or "",
        data_commit=before.task_files.commit,
        date=before.task_files.date,
        pace=before.pace,
        code=before.task_files.sums if alone else {},
    )


def cache_of(target: Target) -> Path | None:
    """Return the cache that the run was made with, where it is still there: not always the one beside the run's
    folder."""
    if target.record.attempt and (folder := Path(_plan_before(target.run_dir).cache_dir)).is_dir():
        return folder
    return None


def find_start(target: Target) -> Resume:
    """Find the checkpoint that the run resumes from. Reads every byte of the checkpoints it looks at. Raises
    RecipeError for a named checkpoint that is damaged or not there, and where `checkpoints/` leads to what is not
    there."""
    where = target.run_dir / FOLDER
    if where.is_symlink() and not os.path.isdir(where):  # else the run would start from the beginning
        hint = "bring that folder back, for example by mounting its disk again"
        raise RecipeError([fault((str(where),), f"it leads to {os.readlink(where)}, which is not there", hint)])
    if target.checkpoint is None:
        return Resume(target, find_newest(target.run_dir))
    if not os.path.lexists(target.checkpoint):
        there = ", ".join(str(step_of(each)) for each in in_order(target.run_dir)) or "none"
        raise RecipeError(
            [fault((f"--resume {target.checkpoint}",), "no such checkpoint", f"steps with a checkpoint: {there}")]
        )
    if problems := damage(target.checkpoint):
        hint = f"use --resume {target.run_dir}, which takes the newest whole one"
        raise RecipeError([fault((f"--resume {target.checkpoint}",), f"damaged: {problems[0]}", hint)])
    return Resume(target, CheckpointSearch(target.checkpoint))


def find_misfits(resume: Resume, *, plan: RunPlan) -> list[Finding]:
    """Return everything for which this plan cannot continue the run: its checkpoint could not be loaded, or data or
    scales would be others. Settings that differ are faults of the recipe; files that differ are errors of this host.
    Raises RecipeError when the run's plan cannot be read."""
    checkpoint, run_dir = resume.search.newest, resume.target.run_dir
    misfits = list(_other_profile(plan, run_dir=run_dir)) if resume.target.record.attempt else []
    if checkpoint is None:
        return misfits
    facts = read_manifest(checkpoint).facts
    return [
        *misfits,
        *_other_size(resume, checkpoint, facts=facts, plan=plan),
        *_other_commit(resume.target, plan=plan),
        *_other_problems(plan, run_dir=run_dir),
        *_other_profile_file(checkpoint, facts=facts, run_dir=run_dir),
        *_other_scale(checkpoint, uaq=plan.uaq),
        *_other_adapter(checkpoint, plan=plan),
        *_other_dtype(checkpoint, plan=plan),
    ]


_OF_A_PROFILE = ("smoothing", "mismatch_budget", "ignore")  # keys of `quantization` that a profile is made by
_MISFIT = "resume"  # the code of a file, or of a commit on the hub, that is not the run's


def _other_profile(plan: RunPlan, *, run_dir: Path) -> Iterator[Finding]:
    """Yield the settings of another profile than the run has: it is made, or copied, once, and the rollouts would have
    the first one's scales. The run's may not be there yet."""
    run, now, profile_file = _plan_before(run_dir), plan.profile, run_dir / PROFILE_FOLDER / PROFILE_FILE
    before = run.profile
    if now is None or before is None or not profile_file.is_file():
        return
    if before.error_budget is not None and not now.source:
        message = "it was made with quantization.error_budget, which this version does not have"
        yield error(_MISFIT, str(profile_file), message, "finish it with the version that began it, or start a new run")
        return
    differ = {
        "rollout.scheme": now.scheme is not before.scheme,
        "quantization.profile": _is_other_profile(now.source, before=before.source, profile_file=profile_file),
    }
    if not now.source:  # one that is named was made without this recipe
        for key in _OF_A_PROFILE:
            differ[f"quantization.{key}"] = getattr(plan.quantization, key) != getattr(run.quantization, key)
    message = "the run's profile was made with another value, and is made once"
    for key in (key for key, is_other in differ.items() if is_other):
        yield fault((key,), message, "put back what the run has, or start a new run")


def _is_other_profile(source: str, *, before: str, profile_file: Path) -> bool:
    """Tell whether a profile is another one. A path may differ and name the same: of a run that was moved, or from
    another folder. profile_file: the run's."""
    if source == before or not (source and before):
        return source != before
    file = Path(source) / profile_file.name if Path(source).is_dir() else Path(source)
    return digest_of(file) not in ("", digest_of(profile_file))


def _other_size(resume: Resume, checkpoint: Path, *, facts: Facts, plan: RunPlan) -> Iterator[Finding]:
    ranks = plan.topology.gpus
    if facts.world_size != ranks:
        s = "" if facts.world_size == 1 else "s"
        message = f"{checkpoint.name} was saved by {facts.world_size} rank{s}, the plan has {ranks}"
        hint = "verl loads it with the same number only: set cluster.nodes and cluster.gpus_per_node back"
        yield fault(("cluster.gpus_per_node", "cluster.nodes"), message, hint)
    if resume.step > plan.trainer.steps:
        message = f"{checkpoint.name} is later than the last step, {plan.trainer.steps}"
        hint = f"set trainer.steps to {resume.step} at least, or name an older checkpoint"
        yield fault(("trainer.steps", "trainer.epochs"), message, hint)


def _other_commit(target: Target, *, plan: RunPlan) -> Iterator[Finding]:
    original, now = original_plan(target), plan.weights.commit
    is_same = original is not None and original.model == plan.weights.hub_name
    if is_same and original.commit and now and original.commit != now:
        revision = plan.model.revision or "main"
        message = f"{original.model}: {revision} is {now} on the hub now, the run began with {original.commit}"
        hint = f"continue with the run's own commit: --set model.revision={original.commit}"
        yield error(_MISFIT, "model.revision", message, hint)


def _other_problems(plan: RunPlan, *, run_dir: Path) -> Iterator[Finding]:
    if not has_problems_of(_with_tools_before(plan, run_dir), run_dir=run_dir):
        message = "the training problems are not those that the run began with"
        hint = "put the data file or the version of this program back, or start a new run"
        yield error(_MISFIT, "task", message, hint)


def _other_profile_file(checkpoint: Path, *, facts: Facts, run_dir: Path) -> Iterator[Finding]:
    """Yield files of the profile that have changed. One that is gone comes back from the checkpoint, if that has a
    copy."""
    for name, digest in facts.profile:
        path, has_copy = profile_file_of(run_dir, name), (checkpoint / PROFILE_FOLDER / name).is_file()
        if path is None:
            message = f"its manifest names `{name}` as a file of the profile, which is a path"
            hint = "resume from another checkpoint: --resume RUN/checkpoints/global_step_N"
            yield error(_MISFIT, str(checkpoint), message, hint)
        elif hash_file(path) != digest if path.is_file() else not has_copy:
            remedy = "remove it, and the checkpoint's copy is taken" if has_copy else "put it back"
            message = f"it is not the file that {checkpoint.name} was trained with"
            yield error(_MISFIT, str(path), message, f"{remedy}, or start a new run")


def profile_file_of(run_dir: Path, name: str) -> Path | None:
    """Return the path of a file of the run's own profile; None for a name that is a path."""
    return run_dir / PROFILE_FOLDER / name if Path(name).name == name else None


def _other_scale(checkpoint: Path, *, uaq: UaqPlan | None) -> Iterator[Finding]:
    """Yield another scale. Weights are scaled as the checkpoint's mark says, and not at all without one."""
    try:
        saved, now = read_mark(checkpoint), read_mark(Path(uaq.folder)) if uaq else None
    except PreflightError as problem:
        file, _, message = problem.message.partition(": ")
        yield error(_MISFIT, file, message, problem.hint)
        return
    scale, wanted = (mark.scale if mark else 1.0 for mark in (saved, uaq))
    if scale != wanted:
        message = f"the weights of {checkpoint.name} are scaled by {scale:g} (UAQ), and the plan says {wanted:g}"
        yield fault(("correction.uaq_scale",), message, "put it back, or start a new run")
    if uaq and saved and now and now.model_hash != saved.model_hash:
        message = f"it is of another model than {checkpoint.name} was trained with"
        hint = "remove its folder, which is then made again, or start a new run"
        yield error(_MISFIT, str(Path(uaq.folder) / MARK_FILE), message, hint)


def _other_adapter(checkpoint: Path, *, plan: RunPlan) -> Iterator[Finding]:
    """Yield another adapter. Another alpha would load, and be another model; another rank fails in verl."""
    file, lora = checkpoint / "actor" / ADAPTER_FOLDER / "adapter_config.json", plan.model.lora
    saved = None
    if file.is_file():
        config = json.loads(file.read_bytes())
        saved = (config["r"], config["lora_alpha"], sorted(config["target_modules"]))
    if saved != ((lora.rank, lora.alpha, sorted(lora.targets)) if lora else None):
        trained_with = "no LoRA" if saved is None else f"rank {saved[0]}, alpha {saved[1]}, {', '.join(saved[2])}"
        message = f"it differs from {checkpoint.name}, which was trained with {trained_with}"
        yield fault(("model.lora",), message, "put it back, or start a new run")


def _other_dtype(checkpoint: Path, *, plan: RunPlan) -> Iterator[Finding]:
    saved = Dtype.FP16 if (checkpoint / "actor" / SCALER_FILE).is_file() else Dtype.BF16
    if saved is not plan.trainer.dtype:
        message = f"{checkpoint.name} was trained in {saved}, and the plan says {plan.trainer.dtype}"
        yield fault(("trainer.dtype",), message, "put it back, or start a new run")


def _with_tools_before(plan: RunPlan, run_dir: Path) -> RunPlan:
    """Return the plan with the tools of the attempt before: other tools, or none, may leave other prompts too long."""
    before = _plan_before(run_dir)
    if not (plan.task.is_own and before.task.is_own):
        return plan
    task, files = plan.task.replace(tools=before.task.tools), plan.task_files.replace(code=before.task_files.code)
    return plan.replace(task=task, task_files=files)


class _TaskBefore(BaseModel):
    kind: str = ""
    tools: str | None = None
    data: str | None = None

    @property
    def is_own(self) -> bool:
        return self.kind == TaskKind.OWN


class _TaskFilesBefore(BaseModel):
    train_parquet: str
    code: tuple[CodeFile, ...] = ()
    commit: str = ""
    date: str = ""

    @property
    def sums(self) -> dict[str, str]:
        """SHA-256 of the user's Python files, by the names of their copies."""
        return {file.copy_name: file.sha256 for file in self.code}


class _TrainerBefore(BaseModel, strict=True):
    steps: int


class _TrainerMemoryBefore(BaseModel):
    gradient_checkpointing: bool | None = None
    keeps_copies: bool = False


class _BatchBefore(BaseModel):
    micro_batch_sequences: int | None = None


class _ClusterBefore(BaseModel):
    device: str


class _PlanBefore(BaseModel, strict=True):
    """Fields that are read of the plan of the attempt before: as few as possible, so that it may be of another
    version."""

    cache_dir: str
    cluster: _ClusterBefore
    model: Model
    weights: WeightsPlan
    task: _TaskBefore
    task_files: _TaskFilesBefore
    profile: ProfilePlan | None = None
    quantization: Quantization = Quantization()
    trainer: _TrainerBefore
    trainer_memory: _TrainerMemoryBefore = _TrainerMemoryBefore()
    batch: _BatchBefore = _BatchBefore()
    choices: tuple[Choice, ...]

    @property
    def pace(self) -> Pace | None:
        """How the trainer forwarded; None where a plan of another version does not say whether it kept activations, or
        how many sequences it forwarded at once. Where it does not say `keeps_copies`, nothing is kept: slower, and with
        no more memory than it had."""
        recomputes, sequences = self.trainer_memory.gradient_checkpointing, self.batch.micro_batch_sequences
        if recomputes is None or not sequences:
            return None
        why = "as the run began, whatever memory there is now"
        return Pace(recomputes, 0, why, sequences=sequences, keeps_copies=self.trainer_memory.keeps_copies)


def _plan_before(run_dir: Path) -> _PlanBefore:
    """Read the plan of the attempt before. Raises RecipeError when it cannot be read."""
    path = run_dir / "plan.json"
    try:
        return _PlanBefore.model_validate_json(with_keys_of_today(path.read_bytes()))
    except (OSError, ValueError) as error:
        why = sentence(error) if isinstance(error, ValidationError) else str(error)
        raise RecipeError([fault((str(path),), f"cannot be read: {why}", "start a new run")]) from error


def problems_of(run_dir: Path) -> Path:
    """Return the file of the training problems of a run that was made. Raises RecipeError when its plan cannot be
    read."""
    return Path(_plan_before(run_dir).task_files.train_parquet)


def has_problems_of(plan: RunPlan, *, run_dir: Path) -> bool:
    """Tell whether the plan asks for the very problems of a run that was made. May read the data files that the
    plan names.

    They are compared by the hash in their folder's name, of all that makes them. It knows a commit of the hub by
    whether the recipe named it.  Raises RecipeError when the run's plan cannot be read.
    """
    before, task, weights = _plan_before(run_dir), plan.task, plan.weights
    if plan.task_files.train_parquet == before.task_files.train_parquet:
        return True
    weights_before = before.weights
    name, commit = weights_before.identity.partition("@")[0], weights_before.commit
    is_same_model = bool(commit) and (weights.hub_name, weights.commit) == (name, commit)
    key = data_key(task, files=plan.task_files, model=weights_before.identity if is_same_model else weights.identity)
    return Path(before.task_files.train_parquet).parent.name == f"{task.kind}-{key}"


def warn_of_rejected(search: CheckpointSearch) -> None:
    for checkpoint in search.rejected:
        console.say(f"warning: {checkpoint.folder.name} is passed over: {checkpoint.why}")


# The next attempt.


def begin_attempt(plan: RunPlan, *, resume: Resume, recipe_yaml: str) -> Session:
    """Claim the run and bring its folder back to the end of the last step that is kept; nothing is thrown away. Raises
    RecipeError when another launcher has it, PreflightError when the folder cannot be written, or what a launcher that
    was killed has left is not gone in time."""
    run_dir, before = resume.target.run_dir, resume.target.record.attempt
    taken = RecipeError([fault(("--resume",), f"another program has just taken the run {run_dir}", "wait for its end")])
    try:
        session = Session(run_dir, record=RunRecord(attempt=before + 1), must_lock=True)
    except BlockingIOError:
        raise taken from None
    except OSError as error:
        raise cannot_write(run_dir, error) from error
    try:
        if _record(run_dir).attempt != before:
            raise taken
        wait_for_sweep(run_dir)
        _put_back(plan, resume=resume, recipe_yaml=recipe_yaml)
        write_record(run_dir, session.record)
    except OSError as error:
        session.release()
        raise cannot_write(run_dir, error) from error
    except (RecipeError, PreflightError):
        session.release()
        raise
    return session


def _put_back(plan: RunPlan, *, resume: Resume, recipe_yaml: str) -> None:
    run_dir, attempt, checkpoint = resume.target.run_dir, resume.target.record.attempt, resume.search.newest
    logs = log_dir(run_dir, attempt=attempt)
    logs.mkdir(parents=True, exist_ok=True)
    log_dir(run_dir, attempt=attempt + 1).mkdir(exist_ok=True)
    copy_code(plan, logs=logs)
    if resume.restart:
        append_event(run_dir, kind="restart", what=resume.restart, why="trainer.max_restarts", step=resume.step)
    how = f"resumes after step {resume.step}" if checkpoint else "starts from the beginning: no whole checkpoint"
    append_event(run_dir, kind="resume", what=f"attempt {attempt + 1} {how}", step=resume.step, attempt=attempt + 1)
    for code in changed_code(plan):
        message = f"{code.path} has changed since the run began: this attempt runs the copy in {CODE_FOLDER}/"
        append_event(run_dir, kind="note", what=message, why=f"SHA-256 {code.sha256}")
    write_record(run_dir, _cut_off(resume.target.record))  # what it says from here on until this attempt has begun
    for folder in (_MODEL, SYNC_FOLDER, ATTEST_FOLDER):
        if (run_dir / folder).exists():
            (run_dir / folder).rename(logs / folder)
    _put_checkpoints_aside(resume)
    last_step = resume.step if checkpoint else -1
    # The last step's line is written again, whole, after the validation that a stop cut.
    owes_line = owed_line(run_dir, checkpoint=checkpoint, plan=plan) is not None
    last_metrics_step = last_step - 1 if owes_line else last_step
    for name, last in ((METRICS_FILE, last_metrics_step), (FITS_FILE, last_step), (SAMPLES_FILE, last_step)):
        cut = cut_lines(run_dir / name, after=last, attempt=attempt, may_repeat=name == SAMPLES_FILE)
        if cut is not None:
            message = f"the lines of {name} after step {max(0, last)} are cut off"
            append_event(run_dir, kind="note", what=message, why=f"kept in {cut.name}")
    if checkpoint is not None and not owes_line and _plan_before(run_dir).trainer.steps == resume.step:
        _bring_back_line(run_dir, checkpoint=checkpoint)
    _restore(run_dir, checkpoint=checkpoint)
    for partial in run_dir.glob(f"{partial_prefix(run_dir / _MODEL)}*"):  # of an attempt that was killed
        shutil.rmtree(partial)
    now = versions(plan)
    _tell_versions(run_dir, now=now)
    texts = {
        "recipe.yaml": recipe_yaml,
        "plan.json": plan.to_json() + "\n",
        "versions.json": json.dumps(now, indent=2) + "\n",
    }
    for name, text in texts.items():
        if (run_dir / name).is_file() and not (logs / name).exists():
            shutil.copyfile(run_dir / name, logs / name)
        write_whole(run_dir / name, text)


def _cut_off(before: RunRecord) -> RunRecord:
    reason = f"attempt {before.attempt + 1} was cut off as it began"
    return replace(before, state=RunStatus.STOPPED, exit_code=Interrupted.exit_code, reason=reason)


def _bring_back_line(run_dir: Path, *, checkpoint: Path) -> None:
    """Append the line of the last step: an attempt may have died before the validation that the line waited for,
    which nobody asks for now."""
    line = line_of(checkpoint)
    if line and all(each.step != line["step"] for each in read_metrics(run_dir)):
        append_line(run_dir / METRICS_FILE, line)


def _tell_versions(run_dir: Path, *, now: dict[str, object]) -> None:
    """Note where this program or what it drives is another version than in the attempt before."""
    try:
        before = json.loads((run_dir / "versions.json").read_text())
    except (OSError, ValueError):
        return
    changed = [name for name in ("distributions", "python", "fingerprint") if before.get(name) != now.get(name)]
    if changed:
        message = f"this attempt runs with other versions than the attempt before: {', '.join(changed)}"
        append_event(run_dir, kind="note", what=message, why="versions.json has them, logs/ the earlier ones")


def _put_checkpoints_aside(resume: Resume) -> None:
    run_dir = resume.target.run_dir

    def put(folder: Path, condition: str, *, why: str, below: str = DAMAGED) -> None:
        aside = set_aside(folder, below=below).relative_to(run_dir)
        append_event(run_dir, kind="checkpoint", what=f"{folder.name} {condition} set aside", why=why, aside=str(aside))

    for checkpoint in resume.search.rejected:
        put(checkpoint.folder, "is damaged and", why=checkpoint.why)
    for folder in half_done(run_dir):
        if is_leaving(folder):
            shutil.rmtree(folder)
        else:
            put(folder, "was half written and is", why="")
    for folder in in_order(run_dir):
        if (step_of(folder) or 0) > resume.step:
            why = f"the run resumes after step {resume.step}"
            put(folder, "is later and", why=why, below=f"cut-{resume.target.record.attempt}")


def _restore(run_dir: Path, *, checkpoint: Path | None) -> None:
    """Restore the governor's memory as it was at the end of the step, none at the beginning; and what the next step
    needs and the run's folder has lost: files of the profile, the fits up to the step."""
    if checkpoint is None or not (checkpoint / GUARD_FILE).is_file():
        (run_dir / GUARD_FILE).unlink(missing_ok=True)
    else:
        write_whole(run_dir / GUARD_FILE, (checkpoint / GUARD_FILE).read_bytes())
    if checkpoint is None:
        return
    profile = run_dir / PROFILE_FOLDER
    lost = [each for each in (checkpoint / PROFILE_FOLDER).glob("*") if not (profile / each.name).exists()]
    fits, here = checkpoint / FITS_FILE, run_dir / FITS_FILE
    if fits.is_file() and not (here.is_file() and here.read_bytes() == fits.read_bytes()):
        lost.append(fits)
    for file in lost:
        name = file.relative_to(checkpoint)
        (run_dir / name).parent.mkdir(exist_ok=True)
        write_whole(run_dir / name, file.read_bytes())
        append_event(run_dir, kind="note", what=f"{name} is restored", why=f"from {checkpoint.name}")
