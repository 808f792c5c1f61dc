"""Makes a profile, in a process of its own: `python -m appliance.profile.child (--plan PLAN | --job JOB)`. Progress and
failures are events, in the run's folder or in the command's; the exit code is that of the error."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
from transformers import AutoTokenizer, PreTrainedTokenizerBase

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
from appliance.quant.files import PROFILE_FILE, place_profile
from appliance.quant.profile import Origin, Profile, Settings, write_profile
from appliance.record.attestations import version_of
from appliance.record.events import append_event, exit_code_of
from appliance.record.liveness import keep_stacks
from appliance.record.plan import read_plan
from appliance.terms.clock import ANY_DAY, clock_of

_PHASE = "profile"
_VERSIONS = ("flashrl-appliance", "torch", "transformers", "safetensors")


def calibrated(job: ProfileJob, folder: Path, origin: Origin) -> Profile:
    def report(done: int, total: int) -> None:
        note = f"layer {done} of {total}"
        append_event(Path(job.report_dir), kind="progress", what=_PHASE, done=done, total=total, note=note)

    return calibrate(
        folder,
        sequences=read_sequences(job, folder=folder),
        scheme=job.scheme,
        settings=Settings(**job.model_dump(include={each.name for each in dataclasses.fields(Settings)})),
        origin=origin,
        on_layer=report,
    )


ProfileOf = Callable[[ProfileJob, Path, Origin], Profile]  # folder: of the model


def run(job: ProfileJob, *, profile_of: ProfileOf = calibrated) -> int:
    """The exit code of the job's child."""
    keep_stacks(_PHASE)
    return exit_code_of(lambda: make_profile(job, profile_of=profile_of), run_dir=Path(job.report_dir))


def make_profile(job: ProfileJob, *, profile_of: ProfileOf = calibrated) -> Path:
    """The folder with the job's profile: found in the cache, or made. Raises what `profile_of` raises."""
    append_event(Path(job.report_dir), kind="phase", what=_PHASE)
    found = find_profile(job) or _make(job, profile_of=profile_of)
    folder = Path(job.target or found)
    if job.target:
        place_profile(found, target=folder)
    append_event(Path(job.report_dir), kind=_PHASE, what=str(folder))
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
    with whole_folder(target, others_count=True) as made:
        write_profile(profile, folder=made)
    return target


def read_sequences(job: ProfileJob, *, folder: Path) -> list[list[int]]:
    """Token ids of prompts of the task with their answers, spread evenly over the data, as the chat template has them.
    At most job.prompts of at most job.longest tokens each, and job.max_tokens together. folder: of the tokenizer."""
    rows = pq.read_table(job.parquet, columns=["prompt", "reward_model"]).to_pylist()
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=job.trust_remote_code)
    step = max(1, len(rows) // job.prompts)
    sequences, left = [], job.max_tokens
    for row in rows[::step][: job.prompts]:
        tokens = _tokens(row, tokenizer=tokenizer)[: min(job.longest, left)]
        left -= len(tokens)
        sequences += [tokens] if tokens else []
    return sequences


def _tokens(row: dict, *, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    answer = (row["reward_model"] or {}).get("ground_truth") or ""
    messages = list(row["prompt"])
    if answer:
        messages.append({"role": "assistant", "content": answer})
    clock = clock_of(tokenizer, date=ANY_DAY)  # a profile is kept for runs of other days
    made = tokenizer.apply_chat_template(
        messages, add_generation_prompt=not answer, tokenize=True, return_dict=True, **clock
    )
    return list(made["input_ids"])


def main(arguments: list[str]) -> int:
    kind, path = arguments[0], Path(arguments[1])
    job = job_of_run(read_plan(path)) if kind == "--plan" else ProfileJob.model_validate_json(path.read_bytes())
    return run(job)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
