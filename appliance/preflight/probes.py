"""Reads the world once: this host, and what a plan wants to read and write. Judges nothing."""

from __future__ import annotations

import csv
import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from appliance import hub
from appliance.control_groups import usable_cores
from appliance.errors import EngineError
from appliance.plan.bench_results import read_result, result_key
from appliance.plan.host import HostFacts, HostGpu
from appliance.preflight.access import AccessFacts, read_access
from appliance.preflight.container import read_container
from appliance.preflight.disk import Disks, Written, nearest_existing, read_disks, read_written
from appliance.preflight.limits import read_limits
from appliance.preflight.model_files import damage, profile_problem
from appliance.preflight.sample import RewardProblem, reward_problem
from appliance.preflight.stack import StackFacts, read_stack
from appliance.quant.uaq import layers_to_scale
from appliance.record.plan import ModelPlan, RunPlan
from appliance.tasks.library import TASKS, is_from_hub
from appliance.terms.devices import StoredResult
from appliance.terms.shapes import KNOWN, ModelShape, read_shape

LIBRARIES = ("libnuma.so.1",)
PACKAGES = ("tensorboard", "trackio", "wandb", "flash_attn")
_NVIDIA_SMI_TIMEOUT_S = 10


@dataclass(frozen=True)
class InputFacts:
    """What the plan's inputs look like from here.

    model_missing: parts that the model folder lacks (`config.json`, `weights`, `tokenizer`), empty when complete or
    when the model is not a folder.  model_bytes: size of its weights, 0 when unknown.
    model_shape: by its config.json, None when unknown.
    model_is_cached: a hub name whose files are in the local hub cache.
    is_offline: the hub is needed, and HF_HUB_OFFLINE is set.
    hub_problem: why the hub cannot be reached, empty when it can or was not asked.
    profile_problem: why the folder of `quantization.profile` has none for this plan, empty when it has or none is
    given.
    uaq_problem: why UAQ cannot scale the model, empty when it can, is off, or the model is not here yet.
    model_damage: what is wrong with its files of weights.  model_problem: why the hub, which answers, does not give it.
    revision_problem: why it is not known which commit `model.revision` is.
    reward_problem: what is wrong with the rewards of the first problems.  stored: of `bench`, where one counts here.
    disks: that the run writes to.  written: by earlier attempts of the run.
    data_problems: (message, hint) with `file:line`.  has_data: the cache has the problems that are made of them.
    """

    model_folder_exists: bool
    model_missing: tuple[str, ...]
    model_bytes: int
    model_shape: ModelShape | None
    model_is_cached: bool
    is_offline: bool
    hub_problem: str
    data_problems: tuple[tuple[str, str], ...]
    has_data: bool
    disks: Disks
    profile_problem: str = ""
    uaq_problem: str = ""
    model_damage: tuple[str, ...] = ()
    model_problem: str = ""
    revision_problem: str = ""
    reward_problem: RewardProblem | None = None
    access: AccessFacts = field(default_factory=AccessFacts)
    stack: StackFacts = field(default_factory=StackFacts)
    stored: StoredResult | None = None
    written: Written = field(default_factory=Written)


def read_host(run_root: Path) -> HostFacts:
    """run_root: the folder that will hold the run folders; it need not exist."""
    memory, limits = psutil.virtual_memory(), read_limits()
    existing = nearest_existing(run_root)
    return HostFacts(
        cores=usable_cores(),
        memory_bytes=memory.total,
        memory_free_bytes=min(memory.available, limits.memory_free_bytes),
        cpu_flags=_cpu_flags(),
        gpus=read_gpus(),
        python=sys.version_info[:2],
        missing_libraries=tuple(name for name in LIBRARIES if not _loads(name)),
        shm_free_bytes=shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0,
        run_root_problem=_write_problem(existing),
        packages=frozenset(name for name in PACKAGES if importlib.util.find_spec(name)),
        processor=_processor(),
        container=read_container(run_root),
        limits=limits,
    )


def _write_problem(folder: Path) -> str:
    """Why nothing can be made in the folder, or an empty text. Nothing is written: a probe leaves no trace."""
    if not os.path.isdir(folder):
        return f"{folder} is not a folder"
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        return f"{folder} is on a read-only file system"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"{folder} cannot be written"
    return ""


def _cpu_flags() -> frozenset[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def _processor() -> str:
    """Such as `AMD EPYC, family 25, model 1`: the name alone is the same for several generations under a hypervisor."""
    first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}
    generation = [
        f"{word} {fields[key]}" for word, key in (("family", "cpu family"), ("model", "model")) if key in fields
    ]
    return ", ".join(filter(None, (fields.get("model name", ""), *generation)))


def read_gpus() -> tuple[HostGpu, ...]:
    """By nvidia-smi; none where there is no such program, or where it fails (no driver)."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    query = [program, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    rows = csv.reader(done.stdout.splitlines(), skipinitialspace=True)
    return tuple(HostGpu(product=name, memory_bytes=int(mib) << 20) for name, mib in rows)


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def read_inputs(plan: RunPlan, *, ask_hub: bool, host: HostFacts | None = None) -> InputFacts:
    """Reads data files in full.

    ask_hub: whether the network may be asked, and a child grade a sample, which takes seconds.
    host: for what `bench` kept; None: it is not looked up.
    """
    from appliance.tasks.prepare import has_data

    made = has_data(plan)
    folder = Path(plan.model.path)
    name = plan.model.hub_name
    is_folder = not plan.model.builtin and not name and folder.is_absolute()
    cached = bool(name) and _is_cached(plan.model)
    needs_model = bool(name) and not cached
    needs_hub = needs_model or (is_from_hub(plan.task) and not made)
    is_offline = needs_hub and hub.is_offline()
    asks = ask_hub and needs_hub and not is_offline
    hub_problem = hub.problem() if asks else ""
    data_problems = _data_problems(plan)
    access = read_access(plan, ask_network=ask_hub)  # before anything looks into the folder
    is_barred = str(folder) in access.unreadable
    may_look = is_folder and not is_barred and os.path.isdir(folder)
    return InputFacts(
        model_folder_exists=is_barred or os.path.isdir(folder),
        model_missing=hub.missing_parts(folder) if may_look else (),
        model_bytes=model_bytes(plan),
        model_shape=model_shape(plan),
        model_is_cached=cached,
        is_offline=is_offline,
        hub_problem=hub_problem,
        data_problems=data_problems,
        has_data=made,
        disks=read_disks(Path(plan.run_dir)),
        profile_problem=profile_problem(plan),
        uaq_problem=uaq_problem(plan),
        model_damage=damage(folder) if may_look else (),
        model_problem=_refusal(plan.model) if asks and needs_model and not hub_problem else "",
        revision_problem=_revision_problem(plan.model) if ask_hub else "",
        reward_problem=reward_problem(plan) if ask_hub and not data_problems else None,
        access=access,
        stack=read_stack(plan),
        stored=_stored(plan, host=host) if host else None,
        written=read_written(plan),
    )


def _is_cached(model: ModelPlan) -> bool:
    """Of a model with a revision: this very commit."""
    if not model.revision:
        return hub.is_cached(model.hub_name)
    folder = Path(model.path)
    return model.is_pinned and not hub.missing_parts(folder) and not damage(folder)


def _refusal(model: ModelPlan) -> str:
    """Where the commit is not known, of `main`: what stands against the revision is told by _revision_problem."""
    return hub.refusal(model.hub_name, revision=model.commit)


def _revision_problem(model: ModelPlan) -> str:
    if not model.revision or model.commit:
        return ""
    why = hub.revision(model.hub_name, of=model.revision)[1]
    return f"it is not known which commit of `{model.hub_name}` `{model.revision}` is: {why}"


def _stored(plan: RunPlan, *, host: HostFacts) -> StoredResult | None:
    key = result_key(device=plan.device, host=host, model=plan.model, pins=plan.pins)
    return read_result(key, cache_dir=Path(plan.cache_dir))[0]


def model_bytes(plan: RunPlan) -> int:
    """Size of the weights in the model's folder, 0 when it is not on this host yet."""
    folder = Path(plan.model.path)
    return hub.weight_bytes(folder) if folder.is_absolute() else 0


def uaq_problem(plan: RunPlan) -> str:
    """Why `correction.uaq_scale` cannot be, empty where it can, or the model is not on this host yet."""
    folder = Path(plan.model.path)
    if plan.uaq is None or not os.path.isfile(folder / "config.json"):
        return ""
    try:
        layers_to_scale(folder)
    except EngineError as error:
        return error.message
    return ""


def model_shape(plan: RunPlan) -> ModelShape | None:
    """By the model's config.json where that is on this host; else by its name, where we know it."""
    folder = Path(plan.model.path)
    if plan.model.builtin:
        return None
    if folder.is_absolute():
        return read_shape(folder / "config.json") or (KNOWN.get(plan.model.source) if plan.model.is_pinned else None)
    cached = hub.cached_snapshot(plan.model.source)
    return (read_shape(cached / "config.json") if cached else None) or KNOWN.get(plan.model.source)


def _data_problems(plan: RunPlan) -> tuple[tuple[str, str], ...]:
    files = [file for file in (plan.task.train_file, plan.task.val_file) if file]
    return tuple(problem for file in dict.fromkeys(files) for problem in TASKS[plan.task.kind].check_rows(file))
