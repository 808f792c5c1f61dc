"""The child that measures: an engine per scheme in this process, taking turns (`-m appliance.bench.measure JOB`).

Results go to the job's file, one JSON object a line; everything printed is vLLM's.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from transformers import Qwen2Config
from vllm import LLM, SamplingParams

from appliance.bench.job import (
    PROMPT_TOKENS,
    EngineFacts,
    Job,
    Measurement,
    Shapes,
    Workload,
    facts_from_json,
    read_job,
)
from appliance.bench.worker import MEMORY_KEY, WORKER
from appliance.errors import ApplianceError, EngineError
from appliance.launch.side_job import ERROR_MARK
from appliance.terms.schemes import Scheme
from appliance.terms.settings import Quantisation

Prompts = list[list[int]]


def main() -> int:
    job = read_job(Path(sys.argv[1]).read_text())
    try:
        run(job)
    except ApplianceError as error:
        sys.stderr.write(f"\n{ERROR_MARK}{error.message}\n")
        return error.exit_code
    return 0


def run(job: Job) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model_path = job.workload.model_path or _random_model(job.workload.shapes, folder=folder)
        engines = {each.scheme: _engine(job, quantisation=each, model_path=model_path) for each in job.engines}
        prompts = _prompts(job.workload, model_path=model_path)
        for pair in range(-1, job.pairs):  # -1 warms up and is not written
            for scheme, engine in engines.items():
                measured = _measure(engine, prompts=prompts, workload=job.workload, pair=pair, scheme=scheme)
                if pair >= 0:
                    _write(measured, path=job.results)


def _engine(job: Job, *, quantisation: Quantisation, model_path: str) -> LLM:
    """Raises EngineError when the engine does not run the scheme it was asked for, or its weights leave no room."""
    workload, scheme = job.workload, quantisation.scheme
    llm = LLM(
        model_path,
        trust_remote_code=workload.trust_remote_code,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        load_format="dummy" if workload.shapes else "auto",
        tensor_parallel_size=job.tensor_parallel,
        enforce_eager=True,
        max_model_len=workload.longest,
        max_num_seqs=workload.sequences,
        kv_cache_memory_bytes=job.memory_bytes or job.kv_bytes,
        worker_cls=WORKER,
        additional_config={MEMORY_KEY: job.memory_bytes},
        logprobs_mode="processed_logprobs",
        enable_prefix_caching=False,
        seed=job.seed,
        **quantisation.engine_arguments(),
    )
    workers = [facts_from_json(text) for text in llm.collective_rpc("bench_facts")]
    other = [each.scheme for each in workers if each.scheme != scheme]
    if other:
        raise EngineError(f"bench: asked for {scheme}, the engine runs {other[0]}")
    facts = EngineFacts(
        scheme=scheme,
        weight_bytes=sum(each.weight_bytes for each in workers),
        kv_bytes=sum(each.kv_bytes for each in workers),
        sequences=min(each.sequences for each in workers),
        kernels=workers[0].kernels,
    )
    _write(facts, path=job.facts)
    return llm


def _prompts(workload: Workload, *, model_path: str) -> Prompts:
    if workload.shapes:
        return [
            [(7 * row + column) % 500 + 1 for column in range(PROMPT_TOKENS)] for row in range(workload.num_prompts)
        ]
    import pyarrow.parquet
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=workload.trust_remote_code)
    column = pyarrow.parquet.read_table(workload.prompts_parquet, columns=["prompt"])["prompt"].to_pylist()
    chosen = [column[index % len(column)] for index in range(workload.num_prompts)]
    return [
        list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False))[
            -workload.max_prompt_tokens :
        ]
        for chat in chosen
    ]


def _measure(engine: LLM, *, prompts: Prompts, workload: Workload, pair: int, scheme: Scheme) -> Measurement:
    params = SamplingParams(
        n=workload.samples_per_prompt,
        temperature=workload.temperature,
        top_p=workload.top_p,
        max_tokens=workload.new_tokens,
        ignore_eos=workload.shapes is not None,
        logprobs=0,
        detokenize=False,
    )
    started = time.perf_counter()
    outputs: list[Any] = engine.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - started
    tokens = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    return Measurement(pair=pair, scheme=scheme, tokens=tokens, seconds=seconds)


def _write(line: Measurement | EngineFacts, *, path: str) -> None:
    with Path(path).open("a") as file:
        file.write(json.dumps(dataclasses.asdict(line)) + "\n")


def _random_model(shapes: Shapes | None, *, folder: str) -> str:
    """A folder with nothing but a configuration: vLLM fills the weights (`load_format=dummy`)."""
    assert shapes is not None
    qwen2_config(shapes).save_pretrained(folder)
    return folder


def qwen2_config(shapes: Shapes) -> Qwen2Config:
    """A Qwen2 of these layer shapes: untied, BF16."""
    return Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        vocab_size=shapes.vocabulary,
        hidden_size=shapes.hidden,
        intermediate_size=shapes.intermediate,
        num_hidden_layers=shapes.layers,
        num_attention_heads=shapes.heads,
        num_key_value_heads=shapes.kv_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )


if __name__ == "__main__":
    sys.exit(main())
