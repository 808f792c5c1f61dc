"""The child that validates trained models (`-m appliance.compare.child JOB`). Everything printed is vLLM's."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from transformers import AutoTokenizer
from vllm import LLM, SamplingParams

from appliance.compare.results import Job, write_final
from appliance.record.events import exit_code_of
from appliance.tasks.library import TASKS

_KV_CACHE_BYTES = 256 << 20
_AT_ONCE = 256  # sequences in the engine; the others wait in its queue


def main() -> int:
    file = Path(sys.argv[1])
    return exit_code_of(lambda: validate(Job.model_validate_json(file.read_bytes())), run_dir=file.parent)


def validate(job: Job) -> None:
    rows = pq.read_table(job.parquet).to_pylist()
    for run_dir in map(Path, job.run_dirs):
        write_final(run_dir, _rewards(run_dir / "model", rows=rows, job=job))


def _rewards(model: Path, *, rows: list[dict[str, Any]], job: Job) -> list[float]:
    """One per problem, in the order of the rows: prompts and scores as in training (trainer/rollouts.py)."""
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=job.trust_remote_code)
    llm = LLM(
        str(model),
        trust_remote_code=job.trust_remote_code,
        skip_tokenizer_init=True,
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
    prompts = []
    for row in rows:
        ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=True, return_dict=False)
        prompts.append({"prompt_token_ids": list(ids)[-job.max_prompt_tokens :]})
    outputs = llm.generate(prompts, params, use_tqdm=False)
    texts = [tokenizer.decode(each.outputs[0].token_ids, skip_special_tokens=True) for each in outputs]
    del llm
    gc.collect()
    return [
        TASKS[row["data_source"]].score(response=text, truth=row["reward_model"]["ground_truth"])
        for row, text in zip(rows, texts, strict=True)
    ]


if __name__ == "__main__":
    sys.exit(main())
