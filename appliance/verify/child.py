"""The child that looks at one engine (`-m appliance.verify.child JOB`). Everything printed is vLLM's."""

from __future__ import annotations

import sys
from pathlib import Path

from vllm import LLM, SamplingParams

from appliance.errors import ApplianceError, EngineError
from appliance.verify.job import EngineCheck, EngineOutput, Job, LayerProbe, Worker, read_job, read_probe

WORKER = "appliance.verify.worker.VerifyWorker"
_NUM_PROMPTS = 4
_KV_CACHE_BYTES = 256 << 20


def main() -> int:
    job = read_job(Path(sys.argv[1]).read_text())
    try:
        seen = look(job)
    except ApplianceError as error:
        seen = EngineCheck(failed=error.message)
    seen.write(job.seen)
    return 0


def look(job: Job) -> EngineCheck:
    """Three updates of one engine. Raises ApplianceError."""
    llm = _engine(job)
    loaded = _say(llm, job=job)
    first, first_probes = _update(llm, job=job, perturb=False)
    other, other_probes = _update(llm, job=job, perturb=True)
    again, again_probes = _update(llm, job=job, perturb=False)
    return EngineCheck(
        failed="",
        first=first,
        same_as_loaded=first == loaded,
        moved=first.distance(other),
        returned=first == again,
        workers=tuple(
            _worker(rank, probes=probes)
            for rank, probes in enumerate(zip(first_probes, other_probes, again_probes, strict=True))
        ),
    )


def _engine(job: Job) -> LLM:
    """With the settings of a run, but for its sizes."""
    return LLM(
        job.model,
        trust_remote_code=job.trust_remote_code,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=job.enforce_eager,
        max_model_len=job.prompt_tokens + job.new_tokens,
        max_num_seqs=_NUM_PROMPTS,
        kv_cache_memory_bytes=_KV_CACHE_BYTES,
        logprobs_mode="processed_logprobs",
        enable_prefix_caching=False,  # a run resets it at each update
        tensor_parallel_size=job.tensor_parallel,
        distributed_executor_backend="mp" if job.tensor_parallel > 1 else "uni",
        worker_extension_cls=WORKER,
        seed=job.seed,
        **job.quantisation.engine_arguments(),
    )


def _update(llm: LLM, *, job: Job, perturb: bool) -> tuple[EngineOutput, list[LayerProbe]]:
    """One whole weight update of every worker; what the engine says then, and what its layers give."""
    failed = [text for text in llm.collective_rpc("verify_update", args=(perturb,)) if text]
    if failed:
        raise EngineError(failed[0])
    return _say(llm, job=job), [read_probe(text) for text in llm.collective_rpc("verify_probe")]


def _say(llm: LLM, *, job: Job) -> EngineOutput:
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    prompts = [
        {"prompt_token_ids": [(37 * row + 11 * column + 1) % vocabulary for column in range(job.prompt_tokens)]}
        for row in range(_NUM_PROMPTS)
    ]
    params = SamplingParams(
        temperature=0, max_tokens=job.new_tokens, ignore_eos=True, logprobs=0, prompt_logprobs=0, detokenize=False
    )
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return EngineOutput(
        tokens=tuple(tuple(each.outputs[0].token_ids) for each in outputs),
        log_probs=tuple(_chosen(each.outputs[0].logprobs, ids=each.outputs[0].token_ids) for each in outputs),
        prompt_log_probs=tuple(_chosen(each.prompt_logprobs[1:], ids=each.prompt_token_ids[1:]) for each in outputs),
    )


def _chosen(steps: list, *, ids: list[int]) -> tuple[float, ...]:
    """steps: vLLM's Logprob by token, per position."""
    return tuple(step[token].logprob for step, token in zip(steps, ids, strict=True))


def _worker(rank: int, *, probes: tuple[LayerProbe, LayerProbe, LayerProbe]) -> Worker:
    first, other, again = (dict(probe.layers) for probe in probes)
    live = probes[0]
    return Worker(
        rank=rank,
        scheme=live.scheme,
        emulated=live.emulated,
        lm_head_fp32=live.lm_head_fp32,
        kernels=live.kernels,
        layers=len(first),
        unmoved=tuple(name for name in first if other[name] == first[name]),
        unreturned=tuple(name for name in first if again[name] != first[name]),
    )


if __name__ == "__main__":
    sys.exit(main())
