"""What one profiling is, as a value that goes to its child process. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from appliance.plan.model import RunPlan
from appliance.quant.scheme import Scheme

PROMPTS = 64  # of the task, with their answers
MAX_TOKENS = 2048  # of all prompts together
PROFILES = "profiles"  # below the cache folder
HASHES = "hashes.json"


@dataclass(frozen=True)
class ProfileJob:
    """One profile to make or to find. model: folder or hub name.  parquet: the task's training data.

    target: the folder that gets `profile.safetensors`, or empty to leave it in the cache.  report_dir: where events go.
    longest: tokens, where a prompt with its answer is cut.  donor: a W8A8 checkpoint, and then no text is read.
    """

    model: str
    revision: str
    trust_remote_code: bool
    parquet: str
    scheme: Scheme
    strength: float
    error_budget: float | None
    ignore: tuple[str, ...]
    longest: int
    cache_dir: str
    target: str
    report_dir: str
    donor: str = ""
    prompts: int = PROMPTS
    max_tokens: int = MAX_TOKENS

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2)


def read_job(text: str) -> ProfileJob:
    return TypeAdapter(ProfileJob).validate_json(text)


def job_of_run(plan: RunPlan) -> ProfileJob:
    """The profiling of a training run: of the model that is trained, which UAQ has scaled."""
    return replace(job_of_plan(plan), model=plan.trained_model or plan.model.source)


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
        longest=plan.task.max_prompt_tokens + plan.task.max_response_tokens,
        cache_dir=plan.cache_dir,
        target=profile.folder if target is None else target,
        report_dir=plan.run_dir,
    )


def cache_folder(job: ProfileJob, *, key: str) -> Path:
    return Path(job.cache_dir) / PROFILES / key
