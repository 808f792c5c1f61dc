"""Saving a run: what one finished step left behind, written where only whole checkpoints have a name.

What belongs to a step is taken at its end, after its metrics were written and the governor looked at them: position in
the data, random state, governor, its line of metrics.jsonl. Weights and optimizer do not move before the next update,
so that the step can be saved until then, in the middle of a rollout too.
"""

from __future__ import annotations

import errno
import fnmatch
import io
import json
import os.path
import random
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from ray.exceptions import RayTaskError

from appliance.errors import CheckpointError, last_line
from appliance.files import is_full, is_refused, sync_to_disk
from appliance.quant.kv_scales import Pairs
from appliance.quant.uaq import MARK_FILE
from appliance.record.checkpoints import (
    FOLDER,
    OF_A_STEP,
    PROFILE_FOLDER,
    STATE_FILE,
    CheckpointManifest,
    Facts,
    checkpoint_folder,
    damage,
    hash_file,
    in_order,
    partial_of,
    put_in_place,
    read_saved,
    remove_surplus,
    seal,
)
from appliance.record.events import METRICS_FILE, append_event
from appliance.record.lines import read
from appliance.record.plan import RunPlan, WeightsPlan
from appliance.settings.sections import Checkpoint
from appliance.terms.counts import counted
from appliance.terms.phases import Phase
from appliance.trainer.precision import PrecisionState
from appliance.trainer.process_watch import NAMED_AFTER_S

DATA_FILE = "data.pt"  # verl's name, read by its own resume
ASK_FILE = "save"  # `touch RUN/save` asks for a checkpoint at the end of the step
_FULL_BYTES = 16 << 20  # torch hides the reason of a failed write; with less than this free, the disk is full


# What a model is read by beside its weights: configuration, tokenizer, templates, code; and its licence. No card, which
# would be none of what was trained. A folder may hold anything else: data, checkpoints and logs of what made it.
_READ_BESIDE_WEIGHTS = ("*.json", "*.jinja", "*.model", "*.model.v[0-9]*", "*.txt", "*.tiktoken", "*.py")
_THE_BASES = (*_READ_BESIDE_WEIGHTS, "LICENSE*", "LICENCE*", "NOTICE*")
_NOT_THE_BASES = (".*", "README*", "*.index.json", "trainer_state.json", "*_results.json", MARK_FILE)
_TEMPLATES_FOLDER = "additional_chat_templates"


@dataclass(frozen=True)
class DriverRandom:
    torch: str
    """Torch's state as hex bytes."""
    numpy: list[Any]
    """State of numpy's generator, as its own `get_state` gives it, in lists."""
    python: list[Any]
    """State of Python's generator, as its own `getstate` gives it, in lists."""


@dataclass(frozen=True)
class DriverState:
    """Content of `state.json`: the part of a step that neither verl nor the governor keeps."""

    step: int
    random: DriverRandom
    line: dict[str, Any]
    """Line of metrics.jsonl about the step."""

    precision: PrecisionState
    kv_ranges: dict[str, tuple[float, float]] | None = None
    """Ranges that the scales of the engines' FP8 KV cache follow from in the step after this one: of keys and values,
    by layer; None for a cache of 16 bits."""
    schema_version: Literal[1] = 1


def why_save(plan: Checkpoint, *, step: int, is_last: bool, is_best: bool, is_asked: bool, since_save_s: float) -> str:
    """Return why this step is to be saved, empty when it is not. since_save_s: since the last save, or the start."""
    if is_last:
        return "the end"
    if is_asked:
        return f"asked for by the file `{ASK_FILE}`"
    if plan.keep_best and is_best:
        return "the best validation so far"
    if plan.every_steps and step % plan.every_steps == 0:
        return f"every {counted(plan.every_steps, 'step')}"
    if plan.every_minutes and since_save_s >= plan.every_minutes * 60:
        return f"every {plan.every_minutes:g} minutes"
    return ""


class Checkpoints:
    """The checkpoints of one attempt. `end_step` after every step, `begin_update` before the weights move."""

    saved_step: int
    """Newest step that is saved, or was resumed from; 0 without one."""

    def __init__(
        self, plan: RunPlan, *, save_workers: Callable[[Path, int], None], data_state: Callable[[], dict[str, Any]]
    ) -> None:
        """save_workers: has every rank write its part into a folder.  data_state: of the data loader."""
        self._plan = plan
        self._run_dir = Path(plan.run_dir)
        self._save_workers = save_workers
        self._data_state = data_state
        self._step_end: tuple[DriverState, dict[str, bytes]] | None = None  # with what its files hold, by name
        self.saved_step = 0
        self._saved_at_s = time.monotonic()
        self._best = max(
            (each.val_reward for each in read_saved(self._run_dir) if each.val_reward is not None), default=None
        )

    def begin_update(self) -> None:
        """Forget the step before: until this one ends there is nothing that could be saved."""
        self._step_end = None

    def end_step(
        self, line: dict[str, Any], *, precision: PrecisionState, is_last: bool, kv_ranges: Pairs | None = None
    ) -> None:
        """Remember the step that just ended, and save it when it is due. Raises as `save_now`.

        line: what metrics.jsonl got of it.  kv_ranges: of the engines' scales now.
        """
        step, val_reward = line["step"], line.get("val_reward_mean")
        data = self._data()  # before the random state: the loader's own may draw from it
        ranges = None if kv_ranges is None else dict(kv_ranges)
        state = DriverState(step=step, random=take_random(), line=line, precision=precision, kv_ranges=ranges)
        self._remember(state, data=data)
        is_best = val_reward is not None and (self._best is None or val_reward > self._best)
        self._best = val_reward if is_best else self._best
        ask = self._run_dir / ASK_FILE
        reason = why_save(
            self._plan.checkpoint,
            step=step,
            is_last=is_last,
            is_best=is_best,
            is_asked=ask.exists(),
            since_save_s=time.monotonic() - self._saved_at_s,
        )
        if reason:
            ask.unlink(missing_ok=True)  # before saving: who asks while it is written gets another one
            self.save_now(reason)

    def save_now(self, reason: str) -> Path | None:
        """Save the last finished step, if it is not saved yet. None when no step has ended or weights have moved since.

        reason: for the manifest and the event.  Raises CheckpointError, and a RayError when a worker died; the older
        checkpoints are then as they were.
        """
        if self._step_end is None:
            return None
        step = self._step_end[0].step
        folder = checkpoint_folder(self._run_dir, step=step)
        if self.saved_step == step:
            return folder
        append_event(self._run_dir, kind="phase", what=str(Phase.SAVE))
        started = time.monotonic()
        try:
            manifest = self._write(folder, *self._step_end, reason=reason)
        except (OSError, RuntimeError, RayTaskError) as error:  # Ray's others: a worker died, no fault of the disk's
            if isinstance(error, RayTaskError):
                time.sleep(NAMED_AFTER_S)  # a rank that waited for one that died fails as well, and may be heard first
            raise self._failed(folder, error) from error
        self.saved_step, self._saved_at_s = step, time.monotonic()
        gone, when = [], self._plan.checkpoint
        try:
            gone = remove_surplus(self._run_dir, keep=when.keep, keep_best=when.keep_best)
        except OSError as error:  # a reader on a network file system: tried again after the next save
            append_event(self._run_dir, kind="note", what=f"an older checkpoint could not be deleted: {error}")
        append_event(
            self._run_dir,
            kind="checkpoint",
            what=f"step {step} is saved",
            why=reason,
            step=step,
            bytes=manifest.bytes,
            seconds=round(time.monotonic() - started, 3),
            removed=gone,
        )
        return folder

    def restore(self, folder: Path) -> None:
        """Restore the driver's own part of a checkpoint. Raises ValueError when state.json is not one of ours."""
        state = read_state(folder)
        restore_random(state.random)
        self.saved_step = state.step
        self._remember(state, data=self._data())

    def _data(self) -> bytes:
        data = io.BytesIO()
        torch.save(self._data_state(), data)
        return data.getvalue()

    def _remember(self, state: DriverState, *, data: bytes) -> None:
        files = {DATA_FILE: data, STATE_FILE: (json.dumps(asdict(state)) + "\n").encode()}
        there = [path for name in OF_A_STEP if (path := self._run_dir / name).exists()]
        self._step_end = state, files | {path.name: path.read_bytes() for path in there}

    def _write(self, folder: Path, state: DriverState, files: dict[str, bytes], *, reason: str) -> CheckpointManifest:
        partial = partial_of(folder)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        self._save_workers(partial, state.step)
        saved, base = partial / "actor" / "huggingface", base_folder(self._plan.weights)
        if saved.is_dir() and base is not None:
            put_base_files(saved, base=base)
        for name, content in files.items():
            (partial / name).write_bytes(content)
        copy_scales(self._plan, partial)
        sync_to_disk(self._run_dir / METRICS_FILE)  # a checkpoint must not outlive the lines it counts
        facts = Facts(
            step=state.step,
            world_size=self._plan.topology.gpus,
            reason=reason,
            time=time.time(),
            val_reward=state.line.get("val_reward_mean"),
            profile=profile_identity(self._run_dir),
        )
        manifest = seal(partial, facts=facts)
        put_in_place(partial, folder=folder)
        problems = damage(folder)
        if problems:
            raise OSError(errno.EIO, f"what was written reads back otherwise: {problems[0]}")
        return manifest

    def _failed(self, folder: Path, error: Exception) -> CheckpointError:
        """Return the error that ends the run, after removing what was half written: its report needs room on the
        disk."""
        full = _full_folder(self._run_dir, error)
        shutil.rmtree(partial_of(folder), ignore_errors=True)
        why = f"no space left at {full}" if full else f"{type(error).__name__}: {last_line(error)}"
        refused = not full and is_refused(getattr(error, "cause", error))
        if refused:
            why = f"{folder.parent} cannot be written"
        older = [each.name for each in in_order(self._run_dir) if each != folder]
        first = "free some space, " if full else "let this user write there, " if refused else ""
        remedy = f"{first}then resume"
        hint = f"{remedy} with --resume auto: {older[-1]} is whole" if older else f"{remedy}; nothing was saved before"
        return CheckpointError(f"checkpoint {folder.name} could not be written: {why}", hint=hint)


def read_state(folder: Path) -> DriverState:
    """Read `state.json` of a checkpoint. Raises OSError, ValueError."""
    return read(folder / STATE_FILE, DriverState)


def profile_identity(run_dir: Path) -> tuple[tuple[str, str], ...]:
    """Return SHA-256 by name of what lies in the run's `profile/`, but the engine's configuration, which only names
    paths."""
    return tuple((path.name, hash_file(path)) for path in _profile_files(run_dir))


def _profile_files(run_dir: Path) -> list[Path]:
    folder = run_dir / PROFILE_FOLDER
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(path for path in found if path.is_file() and path.suffix != ".yaml")


def copy_scales(plan: RunPlan, target: Path) -> None:
    """Copy the profile, and the mark of UAQ: a run that lost them continues with the same. Raises OSError."""
    if files := _profile_files(Path(plan.run_dir)):
        (target / PROFILE_FOLDER).mkdir()
    for path in files:
        shutil.copyfile(path, target / PROFILE_FOLDER / path.name)
    if plan.uaq is not None and (mark := Path(plan.uaq.folder) / MARK_FILE).is_file():
        shutil.copyfile(mark, target / MARK_FILE)


def _full_folder(run_dir: Path, error: Exception) -> Path | None:
    """Return the folder on the disk that is full, links followed; None where something else went wrong.

    `checkpoints/` may lie on another disk than the run's folder, whose lines of metrics a save brings to the disk too.
    """
    folders = [each.resolve() for each in (run_dir / FOLDER, run_dir) if each.is_dir()]
    full = [each for each in folders if shutil.disk_usage(each).free < _FULL_BYTES]
    if is_full(getattr(error, "cause", error)) or is_full(error):
        return (full or folders)[0]
    return folders[0] if folders[0] in full else None


def at_its_place(data: Any) -> Iterator[Any]:
    """Return an iterator over a StatefulDataLoader, from where the checkpoint was; from the beginning of an epoch
    where there are fewer problems than that: a resume with other tools, whose schemas left more prompts too long."""
    try:
        return iter(data)
    except StopIteration:
        data.next_iter_state = None  # what its load_state_dict has set
        return iter(data)


def take_random() -> DriverRandom:
    kind, keys, position, has_gauss, cached = np.random.get_state()
    version, inner, gauss = random.getstate()
    return DriverRandom(
        torch=bytes(torch.get_rng_state().tolist()).hex(),
        numpy=[kind, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        python=[version, list(inner), gauss],
    )


def restore_random(state: DriverRandom) -> None:
    """Restore random states. Raises ValueError or TypeError for values that are none."""
    torch.set_rng_state(torch.tensor(list(bytes.fromhex(state.torch)), dtype=torch.uint8))
    kind, keys, *rest = state.numpy
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    version, inner, gauss = state.python
    random.setstate((version, tuple(inner), gauss))


def base_folder(weights: WeightsPlan) -> Path | None:
    """Return where the files of the model lie that a run began with: its folder, or the hub's cache. None where they
    do not, by now."""
    if weights.folder is not None:
        return weights.folder if os.path.isfile(weights.folder / "config.json") else None
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(weights.hub_name, "config.json", revision=weights.commit or None)
    return Path(config).parent if isinstance(config, str) else None


def put_base_files(folder: Path, *, base: Path) -> None:
    """Give a saved model the configuration, tokenizer, templates and code of its base, byte for byte.

    transformers writes its own when it saves: keys go or are renamed, a template moves into another file. Training
    changes weights only. The type in config.json is the base's too: it says in which one the model runs, whatever the
    file holds.
    """
    names = [path.name for path in base.iterdir() if path.is_file() and _is_the_bases(path.name)]
    for path in folder.iterdir():
        if path.is_file() and _is_the_bases(path.name) and path.name not in names:
            path.unlink()  # transformers' own, of what the base has elsewhere or not at all
    for name in names:
        shutil.copyfile(base / name, folder / name)
    shutil.rmtree(folder / _TEMPLATES_FOLDER, ignore_errors=True)
    if (base / _TEMPLATES_FOLDER).is_dir():
        shutil.copytree(base / _TEMPLATES_FOLDER, folder / _TEMPLATES_FOLDER)


def _is_the_bases(name: str) -> bool:
    """Tell whether a file of this name is one that a saved model has from its base."""
    is_read, is_left = (
        any(fnmatch.fnmatch(name, pattern) for pattern in patterns) for patterns in (_THE_BASES, _NOT_THE_BASES)
    )
    return is_read and not is_left
