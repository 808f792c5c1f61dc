"""What one profiling is, as a value that goes to its child process; and finding its profile again, by the hash of the
model's files, of the text, and of every setting. Imports no torch.

A file's hash is remembered with its size and time, so that it is read once.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from appliance.errors import EngineError
from appliance.files import Frozen, write_whole
from appliance.hub import MODEL_FILES, cached_snapshot, download_model
from appliance.quant.files import PROFILE_FILE
from appliance.record.checkpoints import hash_file
from appliance.record.liveness import Heartbeat
from appliance.record.plan import RunPlan
from appliance.terms.schemes import Scheme

PROFILES_FOLDER = "profiles"  # in the cache
_RESPONSE_TOKENS = 48  # of the model's own: what they cost is a pass over its weights for each
_HASHES = "hashes.json"  # in the cache
_VERSION = 6  # raise it when the same inputs give another profile
_PLACES = {"schemas_file", "target", "report_dir", "cache_dir", "model", "revision", "parquet", "trust_remote_code"}


class ProfileJob(Frozen):
    """Work of one profiling: the profile to make or to find."""

    model: str
    """Folder or hub name."""
    revision: str = ""
    trust_remote_code: bool = False
    parquet: str = ""
    """File of the task's training data."""
    scheme: Scheme
    strength: float = 0.0
    """Strength of smoothing, 0..1."""
    mismatch_budget: float | None = None
    """Mismatch budget, nats per token."""
    measure_above: float | None = None
    """Mismatch, nats per token, above which the contributions of the layers are measured."""
    ignore: tuple[str, ...] = ()
    max_prompt_tokens: int = 0
    truncate_prompts: bool = False
    """Whether longer prompts lose their beginning; else they are left out."""
    schemas_file: str = ""
    """File of the schemas of the task's tools, or empty."""
    temperature: float = 1.0
    """Temperature of the rollouts."""
    top_p: float = 1.0
    """Top-p of the rollouts."""
    top_k: int = 0
    """Top-k of the rollouts; 0: all words."""
    response_tokens: int = 0
    """Tokens, at most, of one response that the model gives."""
    cache_dir: str
    target: str
    """Folder that gets `profile.safetensors`; empty: it stays in the cache."""
    report_dir: str
    """Folder of the events."""
    donor: str = ""
    """W8A8 checkpoint that gives the scales, so that no text is read; or empty."""
    prompts: int = 64
    """Number of prompts of the task, at most."""
    max_tokens: int = 2048
    """Tokens, at most, of all prompts and responses together, where that leaves enough prompts."""


def job_of_run(plan: RunPlan) -> ProfileJob:
    """Make the job of a training run: it profiles the model that is trained, which UAQ may have scaled."""
    return job_of_plan(plan).replace(model=plan.trained_model)


def job_of_plan(plan: RunPlan, *, target: str | None = None) -> ProfileJob:
    """Make the job of a plan that has a profile to make. target: another folder than the run's own."""
    profile = plan.profile
    assert profile is not None, "only a plan with a profile is profiled"
    return ProfileJob(
        model=plan.weights.name_or_path,
        revision=plan.model.revision or "",
        trust_remote_code=plan.model.trust_remote_code,
        parquet=plan.task_files.train_parquet,
        scheme=profile.scheme,
        strength=plan.quantization.smoothing,
        mismatch_budget=plan.quantization.mismatch_budget,
        measure_above=plan.guard.k3_kl,
        ignore=plan.quantization.ignore,
        max_prompt_tokens=plan.task.max_prompt_tokens,
        truncate_prompts=plan.task.truncates_prompts,
        schemas_file=plan.task_files.schemas_file,
        temperature=plan.rollout.temperature,
        top_p=plan.rollout.top_p,
        top_k=plan.rollout.top_k,
        response_tokens=min(plan.task.max_response_tokens, _RESPONSE_TOKENS),
        cache_dir=plan.cache_dir,
        target=profile.folder if target is None else target,
        report_dir=plan.run_dir,
    )


def model_folder(model: str, *, revision: str) -> Path:
    """Return the model's folder, downloaded from the hub where the model is a name there. Raises EngineError when the
    hub cannot be asked."""
    if (Path(model) / "config.json").is_file():
        return Path(model)
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return download_model(model, revision=revision, beat=Heartbeat().beat)
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        raise EngineError(
            f"{model}: not a folder with config.json, and the hub does not give it: {error}",
            hint="give a folder, or a name on the hub",
        ) from error


def model_hash(folder: Path, *, cache_dir: Path) -> str:
    """Compute the SHA-256 over names and contents of the model's files. Raises OSError when one cannot be read."""
    heart, hashes = Heartbeat(), []
    for file in _files_of(folder):
        hashes.append([file.name, file_hash(file, cache_dir=cache_dir)])
        heart.beat()
    return _digest(hashes)


def _files_of(folder: Path) -> list[Path]:
    return sorted({file for pattern in MODEL_FILES for file in folder.glob(pattern) if file.is_file()})


def _identity(file: Path) -> tuple[str, list[int]]:
    """Return its name in the memory of hashes, and what changes with its content."""
    now = file.stat()
    return str(file.resolve()), [now.st_size, now.st_mtime_ns]


def _is_known(file: Path, *, known: dict[str, list]) -> bool:
    name, state = _identity(file)
    return name in known and known[name][:2] == state


def file_hash(file: Path, *, cache_dir: Path) -> str:
    """Compute the SHA-256 of a file's content, which the cache remembers by the file's size and time of change."""
    memory = cache_dir / _HASHES
    known = _read(memory)
    name, state = _identity(file)
    if _is_known(file, known=known):
        return known[name][2]
    digest = hash_file(file)
    memory.parent.mkdir(parents=True, exist_ok=True)
    write_whole(memory, json.dumps({**_read(memory), name: [*state, digest]}), durable=False)
    return digest


def key_of(job: ProfileJob, *, folder: Path) -> tuple[str, str, str]:
    """Compute (key, model hash, data hash) of a job. folder: the model's. Raises OSError when a file cannot be read."""
    cache_dir = Path(job.cache_dir)
    model = model_hash(folder, cache_dir=cache_dir)
    source = Path(job.donor or job.parquet)
    data = model_hash(source, cache_dir=cache_dir) if job.donor else file_hash(source, cache_dir=cache_dir)
    tools = file_hash(Path(job.schemas_file), cache_dir=cache_dir) if job.schemas_file else ""
    settings = job.model_dump(mode="json", exclude=_PLACES if job.top_k else _PLACES | {"top_k"})
    return _digest({"version": _VERSION, "model": model, "data": data, "tools": tools, **settings})[:16], model, data


def find_known_profile(job: ProfileJob) -> Path | None:
    """Find a profile as find_profile does, but no file of the model is read again, which takes minutes for a large one:
    None where the cache does not know the hash of each. A profile's making leaves them there. A model of the hub is the
    one that its cache has: a run asks the hub first whether there is another. Raises OSError."""
    folder = Path(job.model)
    if not folder.is_absolute() and not (folder / "config.json").is_file():
        folder = cached_snapshot(job.model, revision=job.revision) or folder
    known = _read(Path(job.cache_dir) / _HASHES)
    files = [file for file in _files_of(folder) if not _is_known(file, known=known)]
    return None if files else find_profile(job.replace(model=str(folder)))


def find_profile(job: ProfileJob) -> Path | None:
    """Find the folder in the cache that has this profile already; None when there is none or the model is not here."""
    folder = Path(job.model)
    if not (folder / "config.json").is_file() or not (job.donor or Path(job.parquet).is_file()):
        return None
    found = cache_folder(job, key=key_of(job, folder=folder)[0])
    return found if (found / PROFILE_FILE).is_file() else None


def cache_folder(job: ProfileJob, *, key: str) -> Path:
    return Path(job.cache_dir) / PROFILES_FOLDER / key


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _read(memory: Path) -> dict[str, list]:
    try:
        known = json.loads(memory.read_text())
    except (OSError, ValueError):
        return {}  # none yet, or half of one: files are read again
    return known if isinstance(known, dict) else {}
