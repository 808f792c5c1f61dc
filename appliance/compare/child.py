"""The child that validates trained models (`-m appliance.compare.child JOB`). Everything printed is vLLM's."""

from __future__ import annotations

import asyncio
import functools
import gc
import sys
from pathlib import Path
from typing import Any

from appliance.compare.results import Job, write_final
from appliance.errors import TrainingError
from appliance.record.engine_start import starting
from appliance.record.events import exit_code_of
from appliance.tasks.grading import Graded
from appliance.tasks.library import rewards_of
from appliance.tasks.response_text import ResponseReader
from appliance.tasks.task import Response
from appliance.terms.clock import clock_of
from appliance.trainer.rewards import RewardPool

_KV_CACHE_BYTES = 256 << 20
_AT_ONCE = 256  # sequences in the engine; the others wait in its queue


def main() -> int:
    file = Path(sys.argv[1])
    return exit_code_of(lambda: validate(Job.model_validate_json(file.read_bytes())), run_dir=file.parent)


def validate(job: Job) -> None:
    import pyarrow.parquet as pq  # none of it is for the pool's processes, which import this file

    rows = pq.read_table(job.parquet).to_pylist()
    pool = RewardPool(
        load=functools.partial(rewards_of, job.task, files=job.task_files),
        import_path=job.task_files.import_path,
        workers=job.task.reward_workers,
        timeout_s=job.task.reward_timeout_s,
    )
    try:
        for run_dir in map(Path, job.run_dirs):
            responses = _responses(run_dir / "model", rows=rows, job=job)
            write_final(run_dir, rewards(responses, pool=pool, most_failures=job.reward_failures))
    finally:
        pool.close()


def rewards(responses: list[Response], *, pool: RewardPool, most_failures: float) -> list[float]:
    """Grade responses: one reward per problem, in their order. A failed reward counts 0, or the least of all where that
    is below 0, as in every validation. most_failures: share of the rewards that may fail.  Raises TrainingError where
    more fail."""

    async def grades() -> list[Graded]:
        return list(await asyncio.gather(*map(pool.grade, responses)))

    graded = asyncio.run(grades())
    failed = [each.why for each in graded if each.fault is not None]
    if len(failed) > most_failures * len(graded):
        text = f"{len(failed)} of {len(graded)} rewards of the final validation failed, more than {most_failures:.0%}"
        raise TrainingError(text, hint=f"the last one: {failed[-1]}; guard.reward_failures says how many may fail")
    least = min(0.0, *(each.accuracy for each in graded))
    return [least if each.fault is not None else each.accuracy for each in graded]


def _responses(model: Path, *, rows: list[dict[str, Any]], job: Job) -> list[Response]:
    """Generate one response per problem, in the order of the rows, as in training (trainer/rollouts.py)."""
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=job.trust_remote_code)
    with starting():
        llm = LLM(
            str(model),
            trust_remote_code=job.trust_remote_code,
            skip_tokenizer_init=True,
            config_format="hf",  # as a run's
            dtype="bfloat16",
            enforce_eager=job.enforce_eager,
            max_model_len=job.max_prompt_tokens + job.max_response_tokens,
            max_num_seqs=_AT_ONCE,
            **({"kv_cache_memory_bytes": _KV_CACHE_BYTES} if job.enforce_eager else {}),
            tensor_parallel_size=job.tensor_parallel,
            distributed_executor_backend="mp" if job.tensor_parallel > 1 else "uni",
            seed=job.seed,
        )
    stops = llm.llm_engine.model_config.try_get_generation_config().get("eos_token_id", tokenizer.eos_token_id)
    params = SamplingParams(
        temperature=0,
        max_tokens=job.max_response_tokens,
        detokenize=False,
        stop_token_ids=[stops] if isinstance(stops, int) else list(stops),
    )
    prompts, clock = [], clock_of(tokenizer, date=job.task_files.date)
    for row in rows:
        ids = tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, tokenize=True, return_dict=False, **clock
        )
        prompts.append({"prompt_token_ids": list(ids)[-job.max_prompt_tokens :]})
    outputs = llm.generate(prompts, params, use_tqdm=False)
    answers = [(list(each.outputs[0].token_ids), each.outputs[0].finish_reason == "stop") for each in outputs]
    reader = ResponseReader(tokenizer)
    del llm
    gc.collect()
    return [
        Response(
            reader.text(ids, finished=finished),
            row["reward_model"]["ground_truth"],
            row["extra_info"].get("row") or "",
            token_ids=tuple(ids),
            begun=reader.begun,
        )
        for row, (ids, finished) in zip(rows, answers, strict=True)
    ]


if __name__ == "__main__":
    sys.exit(main())
