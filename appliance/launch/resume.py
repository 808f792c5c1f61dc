"""Which run a `train --resume` means, whether it may go on, and from where. Looks only; launch/rewind.py does it.

Only the run's own checkpoints are ever loaded, and only those whose every byte verifies: verl unpickles what is in
them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError

from appliance.errors import PreflightError, RecipeError
from appliance.plan.build import OriginalPlan
from appliance.plan.problems import Problems, has_problems
from appliance.quant.uaq import MARK_FILE, read_mark
from appliance.recipe.load import load_recipe, to_plain
from appliance.recipe.schema import NAME_PATTERN, Recipe
from appliance.recipe.text import full_path
from appliance.record.checkpoints import (
    FOLDER,
    PROFILE_FOLDER,
    CheckpointSearch,
    Facts,
    Rejected,
    damage,
    find_newest,
    hash_file,
    read_manifest,
    step_of,
)
from appliance.record.plan import Choice, ModelPlan, RunPlan, UaqPlan, sentence
from appliance.record.session import LOGS, RUN_FILE, RunRecord, RunStatus, has_launcher, newest_run_dir, read_record
from appliance.terms.schemes import Scheme

NEVER, AUTO = "never", "auto"
_CLAIMED = frozenset({LOGS, "recipe.yaml", "plan.json", "versions.json"})  # written before run.json

_RAY_LOGS = "ray"  # of a run that failed: Ray's own, copied with the links in them and never written again

# What may change between two attempts: how long, what is watched, kept and shown, and where; never what is computed.
HARMLESS = frozenset({"name", "cluster.run_dir", "rollout.kv_cache_gb", "rollout.gpu_memory_utilization"})
HARMLESS_TRAINER = frozenset({"steps", "epochs", "validate_before", "validate_every", "max_restarts"})
HARMLESS_SECTIONS = frozenset({"checkpoint", "guard", "logging"})


@dataclass(frozen=True)
class Target:
    """A run to go on with. checkpoint: the one that was named, None: the newest that is whole."""

    run_dir: Path
    record: RunRecord
    checkpoint: Path | None = None


@dataclass(frozen=True)
class Resume:
    """A run that may go on. found: where from; nothing whole means from the beginning, in the same folder."""

    target: Target
    found: CheckpointSearch

    @property
    def step(self) -> int:
        """The last finished step that is kept; 0 for a start from the beginning."""
        return (step_of(self.found.newest) or 0) if self.found.newest else 0


def find_target(resume: str, *, root: Path, recipe_name: str, name: str | None) -> Target | None:
    """The run that is meant, None for a new one. root: folder of the runs.

    Raises RecipeError when there is none where one was named, or its launcher still lives.
    """
    if resume == NEVER:
        return None
    checkpoint = None
    if name is not None and not NAME_PATTERN.fullmatch(name):
        raise RecipeError([(f"--name: `{name}` is no name of a run", "use letters, digits, `.`, `_` and `-`")])
    if resume == AUTO:
        run_dir = root / name if name else newest_run_dir(root, name=recipe_name)
        if run_dir is None or not run_dir.exists():
            return None
    else:
        run_dir, checkpoint = _named(resume, name=name)
    if link := _first_link(run_dir):
        hint = "put what it points to in its place, if you trust it"
        raise RecipeError([(f"--resume: {link} is a symbolic link, which a run never makes", hint)])
    if has_launcher(run_dir):
        raise RecipeError([(f"--resume: the run {run_dir} is running", "wait for its end, or stop it")])
    return Target(run_dir, _record(run_dir), checkpoint)


def _first_link(run_dir: Path) -> Path | None:
    """A link at any depth. `checkpoints/` may be one, to a larger disk: what lies in it is verified."""
    for folder, folders, files in os.walk(run_dir):
        here = Path(folder)
        names = [name for name in (*folders, *files) if here != run_dir or name != FOLDER]
        if links := sorted(name for name in names if (here / name).is_symlink()):
            return here / links[0]
        left_out = FOLDER if here == run_dir else _RAY_LOGS if here.parent == run_dir / LOGS else ""
        folders[:] = [name for name in folders if name != left_out]
    return None


def _named(resume: str, *, name: str | None) -> tuple[Path, Path | None]:
    path = full_path(resume)
    is_checkpoint = step_of(path) is not None and path.parent.name == FOLDER
    run_dir = path.parent.parent if is_checkpoint else path
    if not os.path.isfile(run_dir / RUN_FILE):
        hint = "use `auto`, `never`, the folder of a run, or one of its checkpoints/global_step_<n>"
        raise RecipeError([(f"--resume {resume}: not the folder of a run, nor of a checkpoint in one", hint)])
    if name is not None and name != run_dir.name:
        raise RecipeError([(f"--name: `{name}` is not the run of --resume, `{run_dir.name}`", "leave --name out")])
    return run_dir, path if is_checkpoint else None


def _record(run_dir: Path) -> RunRecord:
    """A folder without `run.json` was claimed by a launcher that died at once: nothing began in it."""
    try:
        return read_record(run_dir)
    except FileNotFoundError:
        if others := sorted({path.name for path in run_dir.iterdir() if path.name[0] != "."} - _CLAIMED):
            hint = "name the run with --name"
            raise RecipeError([(f"--resume: {run_dir} is not the folder of a run: it has {others[0]}", hint)]) from None
        return RunRecord(attempt=0)
    except (OSError, ValueError) as error:
        raise RecipeError([(f"--resume: {error}", "")]) from error


def refuse_changes(recipe: Recipe, *, target: Target, force: bool) -> None:
    """Raises RecipeError, a problem a key, when the recipe is another one than the run's where that matters.

    force: let them pass.
    """
    kept = target.run_dir / "recipe.yaml"
    if force or not kept.is_file():
        return
    before, now = _flat(load_recipe(str(kept))), _flat(recipe)
    problems = [
        (f"{key}: the run has {before.get(key)!r}, the recipe {now.get(key)!r}", "")
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not is_harmless(key) and not _is_begun_with(key, recipe, target=target)
    ]
    if problems:
        hint = "give what the run has, start a new one with another --name, or take the change with --force"
        raise RecipeError([*problems[:-1], (problems[-1][0], hint)])


def _is_begun_with(key: str, recipe: Recipe, *, target: Target) -> bool:
    """Whether the key names the very commit that the run's model was, without being named, when the run began."""
    original = original_plan(target) if key == "model.revision" and recipe.model.revision else None
    return original is not None and original.commit == recipe.model.revision


def is_harmless(key: str) -> bool:
    """Whether a dotted key may differ between two attempts of one run."""
    section, _, name = key.partition(".")
    return key in HARMLESS or section in HARMLESS_SECTIONS or (section == "trainer" and name in HARMLESS_TRAINER)


def _flat(recipe: Recipe) -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in to_plain(recipe).items():
        if isinstance(value, dict):
            flat |= {f"{key}.{inner}": each for inner, each in value.items()}
        else:
            flat[key] = value
    return flat


def is_done(target: Target, *, steps: int) -> bool:
    """Whether the run ended well, and after at least so many steps. Never when a checkpoint to go back to is named."""
    if target.record.state is not RunStatus.DONE or target.checkpoint is not None:
        return False
    return _plan_before(target.run_dir).steps >= steps


def original_plan(target: Target) -> OriginalPlan | None:
    """What the run was planned for; None for one that never began. Raises RecipeError when its plan cannot be read."""
    if not target.record.attempt:
        return None
    before = _plan_before(target.run_dir)
    return OriginalPlan(
        before.device,
        before.automatic,
        model=before.model.hub_name,
        revision=before.model.revision,
        commit=before.model.commit,
    )


def cache_of(target: Target) -> Path | None:
    """The cache that the run was made with, where it is still there: not always the one beside the run's folder."""
    folder = Path(_plan_before(target.run_dir).cache_dir) if target.record.attempt else None
    return folder if folder is not None and folder.is_dir() else None


def find_start(target: Target) -> Resume:
    """Where the run goes on. Reads every byte of the checkpoints it looks at.

    Raises RecipeError for a named checkpoint that is damaged, and where `checkpoints/` leads to what is not there.
    """
    where = target.run_dir / FOLDER
    if where.is_symlink() and not os.path.isdir(where):  # else the run would start from the beginning
        hint = "bring it back, such as the disk that it is on"
        raise RecipeError([(f"{where} leads to {os.readlink(where)}, which is not there", hint)])
    if target.checkpoint is None:
        return Resume(target, find_newest(target.run_dir))
    problems = damage(target.checkpoint)
    if problems:
        message = f"--resume {target.checkpoint}: damaged: {problems[0]}"
        raise RecipeError([(message, "use --resume auto, which takes the newest whole one")])
    return Resume(target, CheckpointSearch(target.checkpoint))


def refuse_misfit(resume: Resume, *, plan: RunPlan) -> None:
    """Raises PreflightError when this plan cannot load the checkpoint, or would go on with other data or scales."""
    folder = resume.found.newest
    if folder is None:
        return
    facts = read_manifest(folder).facts
    ranks = plan.topology.gpus
    if facts.world_size != ranks:
        message = f"{folder.name} was saved by {_ranks(facts.world_size)}, the plan has {ranks}"
        hint = "verl loads it with the same number only: set cluster.nodes and cluster.gpus_per_node back"
        raise PreflightError(message, hint=hint)
    if resume.step > plan.steps:
        message = f"{folder.name} is later than trainer.steps, {plan.steps}"
        raise PreflightError(message, hint=f"set trainer.steps to {resume.step} at least, or name an older checkpoint")
    original, now = original_plan(resume.target), plan.model.commit
    is_same = original is not None and original.model == plan.model.hub_name
    if is_same and original.commit and now and original.commit != now:
        what = plan.model.revision or "main"
        message = f"{original.model}: {what} is {now} on the hub now, the run began with {original.commit}"
        raise PreflightError(message, hint=f"go on with what it began with: --set model.revision={original.commit}")
    if not has_problems(plan, _plan_before(resume.target.run_dir).problems):
        message = "the training problems are not those that the run began with"
        raise PreflightError(message, hint="put the data file or the version of this program back, or start a new run")
    _refuse_other_profile(folder, facts=facts, run_dir=resume.target.run_dir)
    _refuse_other_scale(folder, uaq=plan.uaq)


def _refuse_other_profile(folder: Path, *, facts: Facts, run_dir: Path) -> None:
    """A file that is gone is restored by attempt.py where the checkpoint has a copy; older ones have none."""
    for name, digest in facts.profile:
        path = plan_profile_file(run_dir, name)
        has_copy = (folder / PROFILE_FOLDER / name).is_file()
        if hash_file(path) != digest if path.is_file() else not has_copy:
            message = f"{path} is not the one that {folder.name} was trained with"
            remedy = "remove it, and the checkpoint's copy is taken" if has_copy else "put it back"
            raise PreflightError(message, hint=f"{remedy}, or start a new run")


def _refuse_other_scale(folder: Path, *, uaq: UaqPlan | None) -> None:
    """Weights are scaled as the checkpoint's mark says. One of an older version has none: the run's own counts."""
    saved, now = read_mark(folder), read_mark(Path(uaq.folder)) if uaq else None
    if saved is None and (now is not None or uaq is None):
        return
    scale, wanted = (each.scale if each else 1.0 for each in (saved, uaq))
    if scale != wanted:
        message = f"the weights of {folder.name} are scaled by {scale:g} (UAQ), and the plan says {wanted:g}"
        raise PreflightError(message, hint="put correction.uaq_scale back, or start a new run")
    if uaq and saved and now and now.model_hash != saved.model_hash:
        message = f"{Path(uaq.folder) / MARK_FILE} is of another model than {folder.name} was trained with"
        raise PreflightError(message, hint="remove its folder, which is then made again, or start a new run")


def _ranks(number: int) -> str:
    return f"{number} rank{'' if number == 1 else 's'}"


def plan_profile_file(run_dir: Path, name: str) -> Path:
    """A file of the run's own profile. Raises PreflightError for a name that is a path."""
    if Path(name).name != name:
        raise PreflightError(f"the manifest names `{name}` as a file of the profile")
    return run_dir / PROFILE_FOLDER / name


class _TaskBefore(BaseModel):
    train_parquet: str


class _PlanBefore(BaseModel, strict=True):
    """What is asked of the plan of the attempt before: as little as can be, so that it may be of another version."""

    steps: int
    cache_dir: str
    device: str
    model: ModelPlan
    task: _TaskBefore
    choices: tuple[Choice, ...]

    @property
    def problems(self) -> Problems:
        model = self.model
        return Problems(self.task.train_parquet, model=model.identity, builtin=model.builtin, commit=model.commit)

    @property
    def automatic(self) -> Scheme | None:
        """What `auto` meant for it, None where nothing asked."""
        return next((Scheme(each.value) for each in self.choices if each.key == "rollout.scheme"), None)


def _plan_before(run_dir: Path) -> _PlanBefore:
    """Raises RecipeError when the run's plan cannot be read."""
    path = run_dir / "plan.json"
    try:
        return _PlanBefore.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        why = sentence(error) if isinstance(error, ValidationError) else str(error)
        raise RecipeError([(f"{path}: cannot be read: {why}", "start a new run")]) from error


def has_problems_of(plan: RunPlan, *, run_dir: Path) -> bool:
    """Whether the plan's problems are those of a run that was made. Raises RecipeError when its plan cannot be read."""
    return has_problems(plan, problems_of(run_dir))


def problems_of(run_dir: Path) -> Problems:
    """Of a run that was made, by its own plan. Raises RecipeError when that cannot be read."""
    return _plan_before(run_dir).problems


def rejected_texts(rejected: tuple[Rejected, ...]) -> list[str]:
    return [f"{each.folder.name} is passed over: {each.why}" for each in rejected]
