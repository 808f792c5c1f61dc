"""Makes a profile, in its own process: `python -m appliance.profile.child (--plan PLAN | --job JOB)`. Progress and
failures are events, in the run's folder or in the command's; the exit code is that of the error."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pyarrow.parquet as pq
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from appliance.errors import EngineError
from appliance.files import whole_folder
from appliance.profile.job import (
    ProfileJob,
    cache_folder,
    find_profile,
    job_of_run,
    key_of,
    model_folder,
)
from appliance.quant.calibrate import calibrate
from appliance.quant.checkpoint import ModelTensors, StreamedModel, why_unprofiled
from appliance.quant.files import PROFILE_FILE, NotSmoothed, place_profile
from appliance.quant.own_samples import ProfileSample, ProfileSampling, draw_samples
from appliance.quant.profile import Origin, Profile, Settings, Smoothing, write_profile
from appliance.record.attestations import version_of
from appliance.record.events import append_event, exit_code_of
from appliance.record.liveness import Heartbeat, keep_stacks
from appliance.record.plan import read_plan
from appliance.terms.clock import ANY_DAY, clock_of
from appliance.terms.phases import Phase

T = TypeVar("T")
_FEWEST_PROMPTS = 16
_VERSIONS = ("flashrl-appliance", "torch", "transformers", "safetensors")


def calibrated(job: ProfileJob, folder: Path, origin: Origin) -> Profile:
    """Calibrate the profile of a model on its own samples. A model of another structure gets one that smooths nothing,
    and says why; with a mismatch budget, for which layers must be measured, it is refused.

    folder: of the model. Raises EngineError.
    """

    def report(what: str, done: int, total: int) -> None:
        note = f"{what} {done} of {total}"
        append_event(Path(job.report_dir), kind="progress", what=str(Phase.PROFILE), done=done, total=total, note=note)

    settings = Settings(**job.model_dump(include={field.name for field in dataclasses.fields(Settings)}))
    trust = job.trust_remote_code
    is_measured = settings.mismatch_budget is not None
    architecture, reason = why_unprofiled(folder, is_measured=is_measured, trust_remote_code=trust)
    if reason:
        reasons = (NotSmoothed(architecture, reason),)
        return Profile(origin, job.scheme, settings, Smoothing(()), architecture=architecture, not_smoothed=reasons)
    samples = own_samples(job, folder=folder, on_token=functools.partial(report, "token"))
    return calibrate(
        folder,
        sequences=[sample.tokens for sample in samples],
        prompt_tokens=[sample.prompt_tokens for sample in samples],
        scheme=job.scheme,
        settings=settings,
        origin=origin,
        trust_remote_code=trust,
        on_layer=report,
    )


ProfileOf = Callable[[ProfileJob, Path, Origin], Profile]  # folder: of the model


def run(job: ProfileJob, *, profile_of: ProfileOf = calibrated) -> int:
    """Run the job and return the exit code of the child."""
    keep_stacks(str(Phase.PROFILE))
    return exit_code_of(lambda: make_profile(job, profile_of=profile_of), run_dir=Path(job.report_dir))


def make_profile(job: ProfileJob, *, profile_of: ProfileOf = calibrated) -> Path:
    """Make the job's profile, or find it in the cache, and return its folder. Raises what `profile_of` raises."""
    append_event(Path(job.report_dir), kind="phase", what=str(Phase.PROFILE))
    made_or_cached = find_profile(job) or _make(job, profile_of=profile_of)
    folder = Path(job.target or made_or_cached)
    if job.target:
        place_profile(made_or_cached, target=folder)
    append_event(Path(job.report_dir), kind="profile", what=str(folder))
    return folder


def _make(job: ProfileJob, *, profile_of: ProfileOf) -> Path:
    folder = model_folder(job.model, revision=job.revision)
    key, model_hash, data_hash = key_of(job, folder=folder)
    target = cache_folder(job, key=key)
    if (target / PROFILE_FILE).is_file():  # a model of the hub: found only now
        return target
    origin = Origin(
        kind="donor" if job.donor else "calibrated",
        model=job.model,
        revision=job.revision,
        model_hash=model_hash,
        data_hash=data_hash,
        donor=job.donor,
        versions={name: version_of(name) for name in _VERSIONS},
    )
    profile = profile_of(job, folder, origin)
    with whole_folder(target, for_cache=True) as made:
        write_profile(profile, folder=made)
    return target


def own_samples(
    job: ProfileJob, *, folder: Path, on_token: Callable[[int, int], None] = lambda done, total: None
) -> list[ProfileSample]:
    """Draw the model's answers to prompts of the task, as the rollouts of a run are drawn. The seed is the profile's
    own: runs with other seeds share it. folder: of the model and its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=job.trust_remote_code)
    prompts = read_prompts(job, tokenizer=tokenizer)
    sampling = ProfileSampling(
        temperature=job.temperature,
        top_p=job.top_p,
        top_k=job.top_k,
        max_tokens=job.response_tokens,
        stop=ends_of_responses(folder, tokenizer=tokenizer),
    )
    model = StreamedModel(ModelTensors(folder), trust_remote_code=job.trust_remote_code, beat=Heartbeat().beat)
    return draw_samples(model, prompts=prompts, sampling=sampling, on_token=on_token)


def read_prompts(job: ProfileJob, *, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Read token ids of prompts of the task, spread evenly over the data, as the chat template has them. At most
    job.prompts, and so many that they have at most job.max_tokens together with their responses; but at least
    _FEWEST_PROMPTS whatever their length, because only responses are compared. Raises EngineError where none fits."""
    rows = pq.read_table(job.parquet, columns=["prompt"]).to_pylist()
    prompts = []
    for row in _spread(rows, number=job.prompts):
        tokens = _tokens(row, job=job, tokenizer=tokenizer)
        if job.truncate_prompts:
            tokens = tokens[-job.max_prompt_tokens :]
        if 0 < len(tokens) <= job.max_prompt_tokens:
            prompts.append(tokens)
    if not prompts:
        hint = "raise task.max_prompt_tokens, or give other data"
        raise EngineError("no prompt of the task's training data fits task.max_prompt_tokens", hint=hint)
    tokens_each = sum(map(len, prompts)) / len(prompts) + job.response_tokens
    return _spread(prompts, number=max(_FEWEST_PROMPTS, int(job.max_tokens / tokens_each)))


def _spread(items: list[T], *, number: int) -> list[T]:
    """So many of the items, evenly; all where there are fewer."""
    if len(items) <= number:
        return items
    return [items[place * len(items) // number] for place in range(number)]


def _tokens(row: dict, *, job: ProfileJob, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    clock = clock_of(tokenizer, date=ANY_DAY)  # a profile is kept for runs of other days
    tools = {"tools": json.loads(Path(job.schemas_file).read_text())} if job.schemas_file else {}
    encoded = tokenizer.apply_chat_template(
        list(row["prompt"]), add_generation_prompt=True, tokenize=True, return_dict=True, **tools, **clock
    )
    return list(encoded["input_ids"])


def ends_of_responses(folder: Path, *, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Find the tokens at which an engine ends a response: the tokenizer's, and those of generation_config.json or, as
    vLLM does where there is none, of config.json. Raises EngineError for a file that cannot be read."""
    named = next((file for file in (folder / "generation_config.json", folder / "config.json") if file.is_file()), None)
    return frozenset({*(_named_ends(named) if named else ()), *_whole_numbers(tokenizer.eos_token_id)})


def _named_ends(file: Path) -> list[int]:
    hint = "mend the file, or fetch it again from where the model came from"
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise EngineError(f"{file}: not JSON that can be read: {error}", hint=hint) from error
    if not isinstance(content, dict):
        raise EngineError(f"{file}: not a mapping", hint=hint)
    end_ids = content.get("eos_token_id")
    ends = _whole_numbers(end_ids)
    if end_ids is not None and len(ends) != (len(end_ids) if isinstance(end_ids, list) else 1):
        raise EngineError(
            f"{file}: eos_token_id: {end_ids!r} is neither a token's number nor a list of them", hint=hint
        )
    return ends


def _whole_numbers(named: object) -> list[int]:
    return [number for number in (named if isinstance(named, list) else [named]) if type(number) is int]


def main(arguments: list[str]) -> int:
    kind, path = arguments[0], Path(arguments[1])
    job = job_of_run(read_plan(path)) if kind == "--plan" else ProfileJob.model_validate_json(path.read_bytes())
    return run(job)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
