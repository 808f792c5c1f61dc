"""What one profiling is, as a value that goes to its child process. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from appliance.frozen import Frozen
from appliance.record.plan import RunPlan
from appliance.terms.schemes import Scheme

PROMPTS = 64  # of the task, with their answers
MAX_TOKENS = 2048  # of all prompts together
PROFILES = "profiles"  # below the cache folder
HASHES = "hashes.json"


class ProfileJob(Frozen):
    """One profile to make or to find."""

    model: str
    """Folder or hub name."""
    revision: str
    trust_remote_code: bool
    parquet: str
    """The task's training data."""
    scheme: Scheme
    strength: float
    """Of smoothing, 0..1."""
    error_budget: float | None
    ignore: tuple[str, ...]
    longest: int
    """Tokens, where a prompt with its answer is cut."""
    cache_dir: str
    target: str
    """The folder that gets `profile.safetensors`, or empty to leave it in the cache."""
    report_dir: str
    """Where events go."""
    donor: str = ""
    """A W8A8 checkpoint, and then no text is read."""
    prompts: int = PROMPTS
    max_tokens: int = MAX_TOKENS


def job_of_run(plan: RunPlan) -> ProfileJob:
    """The profiling of a training run: of the model that is trained, which UAQ has scaled."""
    return job_of_plan(plan).replace(model=plan.trained_model or plan.model.source)


def job_of_plan(plan: RunPlan, *, target: str | None = None) -> ProfileJob:
    """The profiling of a plan that has a profile to make. target: another folder than the run's own."""
    profile = plan.profile
    assert profile is not None, "only a plan with a profile is profiled"
    return ProfileJob(
        model=plan.model.path or plan.model.source,
        revision=plan.model.revision,
        trust_remote_code=plan.model.trust_remote_code,
        parquet=plan.task.train_parquet,
        scheme=profile.scheme,
        strength=profile.smoothing,
        error_budget=profile.error_budget,
        ignore=profile.ignore,
        longest=plan.task.longest,
        cache_dir=plan.cache_dir,
        target=profile.folder if target is None else target,
        report_dir=plan.run_dir,
    )


def cache_folder(job: ProfileJob, *, key: str) -> Path:
    return Path(job.cache_dir) / PROFILES / key
