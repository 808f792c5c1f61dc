"""Real vLLM engines in this process, on tiny random Qwen2 models."""

from __future__ import annotations

import functools
import gc
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["TORCHDYNAMO_DISABLE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"  # threads that wait for each other in turn slow tiny layers 40 times on a busy host
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"

CROWDED = {
    "enable_chunked_prefill": True,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 8,
    "block_size": 32,
    "kv_cache_memory_bytes": 1 << 18,
}
"""Arguments of an engine that reads prompts in parts of at most 32 tokens, with a KV cache for two of six sequences."""
PROMPTS = ([1, 2, 3, 4], [9, 2, 3, 4, 7], [5, 5, 6], [100, 200, 300, 400, 17, 23])


def note_preemptions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The output tokens of each request that is pushed out from now on, in an engine of this process."""
    from vllm.v1.core.sched.scheduler import Scheduler

    preempted, original = [], Scheduler._preempt_request

    def preempt(scheduler: Scheduler, request: object, *args: object, **others: object) -> None:
        preempted.append(request.num_output_tokens)
        original(scheduler, request, *args, **others)

    monkeypatch.setattr(Scheduler, "_preempt_request", preempt)
    return preempted


def make_checkpoint(folder: Path, *, seed: int, tied: bool = True, **shape: int) -> Path:
    """A Qwen2 of the real class with random BF16 weights, whose biases are not zero.

    shape: fields of Qwen2Config in place of the ones below.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    config = Qwen2Config(**(sizes | shape), tie_word_embeddings=tied)
    model = Qwen2ForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.08) if parameter.ndim > 1 else parameter.data.add_(
            0.05 * torch.randn_like(parameter)
        )
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def read_checkpoint(folder: Path) -> list[tuple[str, object]]:
    from safetensors.torch import load_file

    return sorted(load_file(folder / "model.safetensors").items())


def int8_kernel(rows: int = 128, columns: int = 128) -> str:
    """The name of the kernel that an INT8 layer of this shape gets on this host."""
    from appliance.quant.cpu_gemm import kernel_of

    return f"CPUInt8ScaledMMLinearKernel[{kernel_of(rows, columns).name}]"


@dataclass
class Engine:
    """A vLLM engine of one scheme, with what the tests ask of it."""

    llm: object
    scheme: str

    @property
    def worker(self):
        worker = self.llm.llm_engine.model_executor.driver_worker
        return getattr(worker, "worker", worker)

    @property
    def runner(self):
        return self.worker.model_runner

    @property
    def model(self):
        return self.runner.model

    def behind_graphs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """With what vLLM's V1 runner of GPUs puts around a model for CUDA graphs; it asks the model itself."""
        from vllm.compilation.cuda_graph import CUDAGraphWrapper
        from vllm.config import CUDAGraphMode

        around = CUDAGraphWrapper.__new__(CUDAGraphWrapper)  # its own __init__ asks for a pool of a GPU
        around.runnable, around.runtime_mode, around.is_debugging_mode = self.model, CUDAGraphMode.FULL, False
        monkeypatch.setattr(self.runner, "model", around)
        monkeypatch.setattr(self.runner, "get_model", around.unwrap)

    def generate(self, *, max_tokens: int = 16, resets: bool = True) -> list[tuple[list[int], list[float]]]:
        """Greedy tokens and their log-probs, per prompt. resets: the prefix cache, before."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=0, detokenize=False)
        if resets:
            self.llm.reset_prefix_cache()
        outputs = self.llm.generate([{"prompt_token_ids": list(p)} for p in PROMPTS], params, use_tqdm=False)
        return [
            (list(o.outputs[0].token_ids), [next(iter(p.values())).logprob for p in o.outputs[0].logprobs])
            for o in outputs
        ]

    def update(self, **settings: object):
        """A WeightUpdate on this engine's model. settings: further ones of it."""
        from appliance.engine.update import WeightUpdate

        return WeightUpdate(self.model, model_config=self.runner.vllm_config.model_config, **settings)

    def load(
        self, tensors: list[tuple[str, object]], *, bucket: int = 1000, weight_update: object = None, **settings: object
    ):
        """One whole weight update in buckets of `bucket` tensors. weight_update: a WeightUpdate; None: a new one with
        these settings."""
        import torch
        from vllm.config import set_current_vllm_config

        update = weight_update or self.update(**settings)
        with set_current_vllm_config(self.runner.vllm_config), torch.no_grad():
            update.begin()
            for start in range(0, len(tensors), bucket):
                update.load([(name, tensor.clone()) for name, tensor in tensors[start : start + bucket]])
            return update.finish()


def start_engine(
    folder: Path,
    *,
    scheme: str,
    emulated: bool = False,
    ignore: tuple[str, ...] = (),
    lm_head_fp32: bool = False,
    **settings: object,
) -> Engine:
    """settings: further ones of vLLM's LLM."""
    import torch
    from vllm import LLM

    from appliance.terms.schemes import Scheme
    from appliance.terms.settings import Quantisation

    quantisation = Quantisation(
        scheme=Scheme(scheme), emulated=emulated, ignore=tuple(ignore), lm_head_fp32=lm_head_fp32
    )
    usual = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 64 << 20}
    torch.set_num_threads(1)  # where torch was imported before the line above
    forget_engines()
    with own_worker_class():
        llm = LLM(
            str(folder),
            enforce_eager=True,
            max_model_len=128,
            logprobs_mode="processed_logprobs",
            **(usual | quantisation.engine_arguments() | settings),
        )
    client = llm.llm_engine.engine_core
    if hasattr(client, "_finalizer"):  # in vLLM 0.31 an engine that is gone ends the process groups of those that live
        client._finalizer.detach()
    return Engine(llm=llm, scheme=scheme)


@contextmanager
def own_worker_class() -> Iterator[None]:
    """vLLM mixes an engine's extension into the class of its worker, for good: into one that no later engine has."""
    from vllm.v1.worker import cpu_worker

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_worker, "CPUWorker", type("CPUWorker", (cpu_worker.CPUWorker,), {}))
        yield


def forget_engines() -> None:
    """Before an engine is started in this process, where others were."""
    from vllm.distributed import destroy_distributed_environment, destroy_model_parallel
    from vllm.model_executor.layers import rotary_embedding
    from vllm.v1.engine import core

    core.freeze_gc_heap = lambda: None  # it collects three times, and hides the engine's own garbage
    destroy_model_parallel()  # a dense model made no group of experts; engines that live on use the new groups
    destroy_distributed_environment()
    rotary_embedding._ROPE_DICT.clear()  # engines of one process share them, and with them a broken update


def run_here(module: list[str], *, log: Path, tick: Callable[[], None], **_: object) -> int:
    """In place of `side_job._run`: a child of ours in this process, which has imported vLLM already. Its exit code."""
    log.touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", module)
        code = importlib.import_module(module[0]).main()
    tick()
    return code


@functools.cache
def freeze_once() -> None:
    """What is there when the first engine is gone, vLLM's modules above all, is not looked through at the end of each
    later one, which took a second."""
    gc.freeze()


def free_engine(engine: Engine) -> None:
    """Let go of a whole engine: weights, KV cache and handles. `engine` is of no use afterwards."""
    from vllm.config import get_cached_compilation_config
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

    for layer in engine.model.modules():  # online quantisation hides a reference to the layer in the value
        LAYERWISE_INFO.pop(layer, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "unfreeze", lambda: None)
        engine.llm.llm_engine.engine_core.engine_core.model_executor.shutdown()
    engine.llm = None  # its own shutdown would also end the process groups of the engines that live on
    get_cached_compilation_config.cache_clear()
    gc.collect()
    freeze_once()
