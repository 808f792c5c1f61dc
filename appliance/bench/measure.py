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

from vllm import LLM, SamplingParams

from appliance.bench.job import PROMPT_TOKENS, Job, Measurement, Shapes, Workload, read_job
from appliance.engine.attest import live_scheme
from appliance.engine.int8 import METHOD_NAME
from appliance.errors import ApplianceError, EngineError
from appliance.quant.scheme import Scheme

QUANTISATION = {Scheme.BF16: None, Scheme.INT8: METHOD_NAME}
Prompts = list[list[int]]


def main() -> int:
    job = read_job(Path(sys.argv[1]).read_text())
    try:
        run(job)
    except ApplianceError as error:
        sys.stderr.write(f"error: {error.message}\n")
        return error.exit_code
    return 0


def run(job: Job) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model_path = job.workload.model_path or _random_model(job.workload.shapes, folder=folder)
        engines = {scheme: _engine(job, scheme=scheme, model_path=model_path) for scheme in job.schemes}
        prompts = _prompts(job.workload, model_path=model_path)
        for pair in range(-1, job.pairs):  # -1 warms up and is not written
            for scheme, engine in engines.items():
                measured = _measure(engine, prompts=prompts, workload=job.workload, pair=pair, scheme=scheme)
                if pair >= 0:
                    _write(job, measured)


def _engine(job: Job, *, scheme: Scheme, model_path: str) -> LLM:
    """Raises EngineError when the engine does not run the scheme it was asked for."""
    workload = job.workload
    llm = LLM(
        model_path,
        skip_tokenizer_init=True,
        load_format="dummy" if workload.shapes else "auto",
        quantization=QUANTISATION[scheme],
        enforce_eager=True,
        max_model_len=workload.max_prompt_tokens + workload.new_tokens,
        max_num_seqs=workload.num_prompts * workload.samples_per_prompt,
        kv_cache_memory_bytes=job.kv_cache_gb << 30,
        logprobs_mode="processed_logprobs",
        enable_prefix_caching=False,
        seed=job.seed,
    )
    live = llm.apply_model(lambda model: live_scheme(model)[0])
    if set(live) != {scheme}:
        raise EngineError(f"bench: asked for {scheme}, the engine runs {live[0]}")
    return llm


def _prompts(workload: Workload, *, model_path: str) -> Prompts:
    if workload.shapes:
        return [
            [(7 * row + column) % 500 + 1 for column in range(PROMPT_TOKENS)] for row in range(workload.num_prompts)
        ]
    import pyarrow.parquet
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)
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


def _write(job: Job, measured: Measurement) -> None:
    with Path(job.results).open("a") as file:
        file.write(json.dumps(dataclasses.asdict(measured)) + "\n")


def _random_model(shapes: Shapes | None, *, folder: str) -> str:
    """A folder with nothing but a configuration: vLLM fills the weights (`load_format=dummy`)."""
    from transformers import Qwen2Config

    assert shapes is not None
    config = Qwen2Config(
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
    config.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    sys.exit(main())
