"""The child that looks at one engine (`-m appliance.verify.child JOB`), and what it asks of each vLLM worker: take an
update made from the checkpoint's files, and say what each layer gives.

VerifyWorker is mixed into the worker by name, as a run's own extension, whose update it uses. Each worker reads the
files itself. Everything printed is vLLM's.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import Module
from vllm import LLM, SamplingParams
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.platforms import current_platform

from appliance.engine.attest import live_scheme
from appliance.engine.sync import SyncWorkerExtension
from appliance.errors import ApplianceError, EngineError
from appliance.hub import weight_files
from appliance.record.engine_start import starting
from appliance.terms.settings import CPU_KV_BLOCK, LOAD_FORMAT
from appliance.verify.job import CheckResult, EngineOutput, LayerProbe, VerifyJob, Worker

WORKER = "appliance.verify.child.VerifyWorker"
_NUM_PROMPTS = 4
_KV_CACHE_BYTES = 256 << 20
_NOISE = 0.1  # of a tensor's root mean square: far above what any scheme rounds away
_PROBE_TOKENS = 8
_NOT_WEIGHTS = "rotary_emb.inv_freq"  # old checkpoints bring it, no trainer sends it


def main() -> int:
    job = VerifyJob.model_validate_json(Path(sys.argv[1]).read_bytes())
    try:
        result = check_engine(job)
    except ApplianceError as error:
        result = CheckResult(failed=error.message)
    Path(job.result).write_text(result.model_dump_json())
    return 0


def check_engine(job: VerifyJob) -> CheckResult:
    """Send one engine three updates and return what it did. Raises ApplianceError."""
    with starting():
        llm = _engine(job)
    loaded = _say(llm, job=job)
    first, first_probes = _update(llm, job=job, perturb=False)
    other, other_probes = _update(llm, job=job, perturb=True)
    again, again_probes = _update(llm, job=job, perturb=False)
    return CheckResult(
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


def _engine(job: VerifyJob) -> LLM:
    """Start an engine with the settings of a run, but for its sizes."""
    block = {"block_size": CPU_KV_BLOCK} if current_platform.is_cpu() else {}  # as plan/verl_args.py has it
    return LLM(
        job.model,
        trust_remote_code=job.trust_remote_code,
        skip_tokenizer_init=True,
        config_format="hf",  # as a run's
        load_format=LOAD_FORMAT,
        dtype=job.dtype.in_torch,
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
        **block,
        **job.quantisation.engine_arguments(),
    )


def _update(llm: LLM, *, job: VerifyJob, perturb: bool) -> tuple[EngineOutput, list[LayerProbe]]:
    """Send one whole weight update to every worker; return what the engine answers then, and what its layers give."""
    failed = [text for text in llm.collective_rpc("verify_update", args=(perturb,)) if text]
    if failed:
        raise EngineError(failed[0])
    return _say(llm, job=job), [LayerProbe.model_validate_json(text) for text in llm.collective_rpc("verify_probe")]


def _say(llm: LLM, *, job: VerifyJob) -> EngineOutput:
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
    """Return the log-probs of the chosen tokens. steps: vLLM's Logprob by token, per position."""
    return tuple(step[token].logprob for step, token in zip(steps, ids, strict=True))


def _worker(rank: int, *, probes: tuple[LayerProbe, LayerProbe, LayerProbe]) -> Worker:
    first, other, again = (dict(probe.layers) for probe in probes)
    return Worker(
        **probes[0].model_dump(exclude={"layers"}),
        rank=rank,
        layers=len(first),
        unmoved=tuple(name for name in first if other[name] == first[name]),
        unreturned=tuple(name for name in first if again[name] != first[name]),
    )


class VerifyWorker(SyncWorkerExtension):
    """Extension of a worker for `verify`. Both methods return text, which every way of calling a worker can carry."""

    def verify_update(self, perturb: bool) -> str:
        """Make one whole update, tensor by tensor. Returns the error that ended it, or an empty text."""
        runner = self.model_runner
        update = self._weight_update()
        try:
            with set_current_vllm_config(runner.vllm_config), runner.device, torch.no_grad():
                update.begin()
                for name, tensor in _checkpoint_tensors(runner.model_config):
                    update.load([(name, _perturbed(tensor, name=name) if perturb else tensor)])
                update.finish()
        except ApplianceError as error:
            return error.message
        return ""

    def verify_probe(self) -> str:
        """Return a LayerProbe as JSON."""
        runner = self.model_runner
        live = live_scheme(runner.get_model())
        with set_current_vllm_config(runner.vllm_config), runner.device, torch.no_grad():
            layers = tuple(
                (name, _digest(out)) for name, out in _layer_outputs(runner.get_model(), runner.model_config.dtype)
            )
        return LayerProbe(
            scheme=live.scheme,
            emulated=live.emulated,
            lm_head_fp32=live.lm_head_fp32,
            kernels=tuple(sorted(live.kernels.items())),
            layers=layers,
        ).model_dump_json()


def _checkpoint_tensors(model_config: object) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors in the type of the engine, in the order of the files. model_config: vLLM's. Raises
    EngineError without files."""
    files = weight_files(_folder(model_config.model, revision=model_config.revision))
    if not files:
        hint = "give a model whose folder has safetensors files"
        raise EngineError(f"verify: {model_config.model} has no safetensors files to read", hint=hint)
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  not a mapping
                if not name.endswith(_NOT_WEIGHTS):
                    yield name, tensors.get_tensor(name).to(device=torch.get_default_device(), dtype=model_config.dtype)


def _folder(model: str, *, revision: str | None) -> Path:
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, revision=revision, allow_patterns=["*.safetensors"], local_files_only=True))


def _perturbed(tensor: Tensor, *, name: str) -> Tensor:
    """Return the tensor with noise that depends on its name alone, so that all workers make the same."""
    generator = torch.Generator("cpu").manual_seed(_seed(name))
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32, device="cpu").to(tensor.device)
    size = tensor.float().square().mean().sqrt().item() or 0.1
    return (tensor.float() + _NOISE * size * noise).to(tensor.dtype)


def _seed(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")


def _layer_outputs(model: Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield, for every layer with weights, what its kernel gives for a fixed input; of other layers, the weights."""
    for name, layer in model.named_modules():
        if isinstance(layer, LinearBase):
            channels = getattr(layer, "input_size_per_partition", layer.input_size)  # a replicated layer is not cut
            x_MK = _input(_PROBE_TOKENS, channels, name=name).to(dtype)
            yield name, layer.quant_method.apply(layer, x_MK, bias=layer.bias)
        elif isinstance(layer, ParallelLMHead):
            x_MK = _input(_PROBE_TOKENS, layer.embedding_dim, name=name).to(dtype)
            yield name, layer.quant_method.apply(layer, x_MK, bias=layer.bias)
        elif isinstance(layer, VocabParallelEmbedding):
            ids = torch.arange(min(_PROBE_TOKENS, layer.num_embeddings_per_partition))
            yield name, layer.quant_method.embedding(layer, ids)
        elif isinstance(layer, RoutedExperts):
            yield name, _experts(layer, name=name)
        elif own := [parameter.reshape(-1) for parameter in layer.parameters(recurse=False)]:
            yield name, torch.cat([each.float() for each in own])


def _experts(layer: RoutedExperts, *, name: str) -> Tensor:
    """Give every expert a token, on whatever rank it is."""
    experts, top_k = layer.global_num_experts, layer.top_k
    num_tokens = max(_PROBE_TOKENS, -(-experts // top_k))
    x_MK = _input(num_tokens, layer.hidden_size, name=name)
    ids = torch.arange(num_tokens * top_k).reshape(num_tokens, top_k) % experts
    if layer.quant_method.is_monolithic:
        logits = torch.zeros(num_tokens, experts).scatter_(1, ids, 10.0)
        return layer.forward_monolithic(x_MK.clone(), router_logits=logits.to(x_MK.dtype))
    weights = torch.full(ids.shape, 1 / top_k)
    return layer.forward_modular(x_MK.clone(), topk_weights=weights, topk_ids=ids.to(torch.int32))


def _input(tokens: int, channels: int, *, name: str) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(_seed(name))
    x_MK = torch.randn(tokens, channels, generator=generator, device="cpu")
    return x_MK.to(device=torch.get_default_device(), dtype=torch.bfloat16)


def _digest(out: Tensor) -> str:
    return hashlib.sha256(out.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
