"""The child that measures: an engine per scheme in this process, taking turns (`-m appliance.bench.child JOB`), and
vLLM's worker with two additions: a budget for weights and KV cache together, and what it contains, in numbers.

Results go to the job's file, one JSON object a line; everything printed is vLLM's.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import Qwen2Config
from vllm import LLM, SamplingParams
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

from appliance.bench.job import GIB, PROMPT_TOKENS, PROMPT_WORDS, BenchJob, EngineFacts, Measurement, Shapes, Workload
from appliance.engine.attest import live_scheme
from appliance.engine.quantised import Quantising
from appliance.errors import EngineError
from appliance.record.engine_start import starting
from appliance.record.events import exit_code_of
from appliance.terms.clock import ANY_DAY, clock_of
from appliance.terms.schemes import Scheme
from appliance.terms.settings import CPU_KV_BLOCK, LOAD_FORMAT, Quantisation

# Of a GPU's memory: what each engine must find free at its start, though its KV cache is of a given size.
SHARE: dict[str, float] = {}
BLOCK: dict[str, int] = {}
if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as DeviceWorker

    BLOCK["block_size"] = CPU_KV_BLOCK  # as plan/verl_args.py has it
else:
    from vllm.v1.worker.gpu_worker import Worker as DeviceWorker

    SHARE["gpu_memory_utilization"] = 0.01  # vLLM's own 0.92 refuses the second engine of a process

WORKER = "appliance.bench.child.BudgetWorker"
MEMORY_KEY = "appliance_memory_bytes"  # in vLLM's additional_config

Prompts = list[list[int]]


def main() -> int:
    file = Path(sys.argv[1])
    job = BenchJob.model_validate_json(file.read_bytes())
    return exit_code_of(lambda: run(job), run_dir=file.parent)


def run(job: BenchJob) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model_path = job.workload.model_path or folder
        if job.workload.shapes:  # nothing but a configuration: vLLM fills the weights (`load_format=dummy`)
            qwen2_config(job.workload.shapes).save_pretrained(folder)
        engines = {each.scheme: _engine(job, quantisation=each, model_path=model_path) for each in job.engines}
        prompts = _prompts(job.workload, model_path=model_path)
        for pair in range(-1, job.pairs):  # -1 warms up and is not written
            for scheme, engine in engines.items():
                measured = _measure(engine, prompts=prompts, workload=job.workload, pair=pair, scheme=scheme)
                if pair >= 0:
                    _write(measured, path=job.results)


def _engine(job: BenchJob, *, quantisation: Quantisation, model_path: str) -> LLM:
    """Start the engine. Raises EngineError when it does not run the scheme it was asked for, or its weights leave no
    room."""
    workload, scheme = job.workload, quantisation.scheme
    with starting():
        llm = LLM(
            model_path,
            trust_remote_code=workload.trust_remote_code,
            skip_tokenizer_init=True,
            dtype=job.dtype.in_torch,
            config_format="hf",  # as a run's
            load_format="dummy" if workload.shapes else LOAD_FORMAT,
            tensor_parallel_size=job.tensor_parallel,
            enforce_eager=scheme in job.eager,
            max_model_len=workload.max_prompt_tokens + workload.new_tokens,
            max_num_seqs=workload.sequences,
            kv_cache_memory_bytes=job.memory_bytes or job.kv_bytes,
            worker_cls=WORKER,
            additional_config={MEMORY_KEY: job.memory_bytes},
            logprobs_mode="processed_logprobs",
            enable_prefix_caching=True,  # as a run's; emptied before each repetition, as by a run's update
            seed=job.seed,
            **SHARE,
            **BLOCK,
            **quantisation.engine_arguments(),
        )
    workers = [EngineFacts.model_validate_json(text) for text in llm.collective_rpc("bench_facts")]
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
            [(7 * row + column) % PROMPT_WORDS + 1 for column in range(PROMPT_TOKENS)]
            for row in range(workload.num_prompts)
        ]
    import pyarrow.parquet
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=workload.trust_remote_code)
    column = pyarrow.parquet.read_table(workload.prompts_parquet, columns=["prompt"])["prompt"].to_pylist()
    chosen = [column[index % len(column)] for index in range(workload.num_prompts)]
    clock = clock_of(tokenizer, date=ANY_DAY)
    ids = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False, **clock)
        for chat in chosen
    ]
    return [list(each)[-workload.max_prompt_tokens :] for each in ids]


def _measure(engine: LLM, *, prompts: Prompts, workload: Workload, pair: int, scheme: Scheme) -> Measurement:
    params = [
        SamplingParams(
            n=workload.samples_per_prompt,
            seed=place * workload.samples_per_prompt if workload.temperature else None,  # as a run's samples have one
            temperature=workload.temperature,
            top_p=workload.top_p,
            top_k=workload.top_k,
            max_tokens=workload.new_tokens,
            ignore_eos=workload.shapes is not None,
            logprobs=0,
            detokenize=False,
        )
        for place in range(len(prompts))
    ]
    engine.reset_prefix_cache()
    started, processor_started = time.perf_counter(), time.process_time()
    outputs: list[Any] = engine.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    seconds, processor_s = time.perf_counter() - started, time.process_time() - processor_started
    tokens = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    return Measurement(pair=pair, scheme=scheme, tokens=tokens, seconds=seconds, processor_s=processor_s)


def _write(line: Measurement | EngineFacts, *, path: str) -> None:
    with Path(path).open("a") as file:
        file.write(line.model_dump_json() + "\n")


def qwen2_config(shapes: Shapes) -> Qwen2Config:
    """Make the configuration of a Qwen2 of these layer shapes: untied, BF16."""
    return Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        vocab_size=shapes.vocabulary,
        hidden_size=shapes.hidden,
        intermediate_size=shapes.intermediate,
        num_hidden_layers=shapes.layers,
        num_attention_heads=shapes.heads,
        num_key_value_heads=shapes.kv_heads,
        max_position_embeddings=max(4096, PROMPT_TOKENS + shapes.new_tokens),
        tie_word_embeddings=False,
        dtype="bfloat16",
    )


class BudgetWorker(DeviceWorker):
    """vLLM's worker with a budget for weights and KV cache together; vLLM is given its name in `worker_cls`."""

    def determine_available_memory(self) -> int:
        """Set the KV cache to what the weights leave of the budget. vLLM calls this when the model is loaded and the KV
        cache is not allocated yet. Raises EngineError when no room is left."""
        budget = self.vllm_config.additional_config[MEMORY_KEY]
        if budget is not None:
            weights = weight_bytes(self.model_runner.get_model())
            if weights >= budget:
                raise EngineError(
                    f"bench: the weights take {weights / GIB:.4f} GiB, --kv-memory gives {budget / GIB:.4f} GiB",
                    hint="give more: it is the memory for weights and KV cache together",
                )
            self.cache_config.kv_cache_memory_bytes = budget - weights
        return super().determine_available_memory()

    def bench_facts(self) -> str:
        """Return EngineFacts of this worker as JSON, which every way of calling a worker can carry."""
        runner = self.model_runner
        live = live_scheme(runner.get_model())
        cache = runner.kv_cache_config
        return EngineFacts(
            scheme=live.scheme,
            weight_bytes=weight_bytes(runner.get_model()),
            kv_bytes=sum(tensor.size for tensor in cache.kv_cache_tensors),
            sequences=int(get_max_concurrency_for_kv_cache_config(self.vllm_config, cache)),
            kernels=tuple(sorted(live.kernels.items())),
        ).model_dump_json()


def weight_bytes(model: Module) -> int:
    """Count the bytes of a loaded model's weights, each once, in the form that is multiplied.

    A CPU kernel that packs a weight leaves nothing of it in the layer. Its size is counted from the shape that
    vLLM recorded before loading: by the scheme's bytes where the layer is quantised, else by the recorded type. Scales
    count where the kernel reads them.
    """
    live: dict[int, int] = {}
    other_bytes = 0
    for layer in model.modules():
        for tensor in layer.parameters(recurse=False):
            live[tensor.data_ptr() if tensor.numel() else 0] = tensor.nbytes
        method = getattr(layer, "quant_method", None)
        if isinstance(method, Quantising) and (scale := method.held_scale(layer)) is not None:
            live.setdefault(scale.data_ptr(), scale.nbytes)
        for name, recorded in get_layerwise_info(layer).restore_metadata[0].items():
            if _is_gone(getattr(layer, name, None)):
                other_bytes += int(recorded.numel() * _item_bytes(method, recorded))
    return sum(live.values()) + other_bytes


def _is_gone(tensor: Tensor | None) -> bool:
    return tensor is None or not tensor.numel() or tensor.device == torch.device("meta")


def _item_bytes(method: object, recorded: Tensor) -> float:
    is_code = isinstance(method, Quantising) and recorded.ndim > 1
    return method.scheme.spec.bytes_per_weight if is_code else recorded.itemsize


if __name__ == "__main__":
    sys.exit(main())
