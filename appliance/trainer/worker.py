"""Imported by verl itself in every process of a run (`VERL_USE_EXTERNAL_MODULES`); an error here stops the process.

It gives verl our sender of weights and, where the plan asks for it, our engine, by verl's own registries, and the CPU
as one of verl's platforms (trainer/cpu_platform.py). In a run on a CPU it repairs the one call that cannot work there,
and fits the threads to the host. Log-probs are taken in chunks of tokens, transformers knows our attention
(trainer/attention.py), and a model of which something would be made up is not loaded.

Legend: T tokens, V words, L words of each token whose log-probs are requested.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from verl.workers.rollout import base

from appliance.control_groups import usable_cores
from appliance.patch import Patch, apply_patch
from appliance.quant.cpu_gemm import widen_gemms
from appliance.quant.loading import load_whole
from appliance.quant.support import RowSupport, current_support
from appliance.record.liveness import WORKER_ROLE, Heartbeat, keep_stacks
from appliance.terms.environment import ENGINE_VENDOR, THREADS_VARIABLE, VENDOR_VARIABLE
from appliance.trainer.cpu_platform import PROCESS_GROUP, gloo_only, is_run_on_cpu

LOG_PROBS = Patch(
    name="chunked-log-probs",
    target="verl.utils.torch_functional:logprobs_from_logits_v2",
    why=(
        "without flash-attn's kernel verl takes one log_softmax per token in a loop of Python, and keeps each result "
        "for the backward pass; of BF16 logits on a CPU it also rounds the log-probs to BF16"
    ),
    upstream="https://github.com/verl-project/verl/blob/v0.9.1/verl/utils/torch_functional.py",
    distribution="verl",
    sources={"0.9.1": "1074be97faf338ae07d3c2351db0752714541a17e0616a785ee65b6fc14ea262"},
    remove_when="verl's log-probs without flash-attn are in float32 and take many tokens at a time",
)
WHOLE_MODELS = Patch(
    name="whole-checkpoint",
    target="verl.utils.model:get_hf_auto_model_class",
    why=(
        "transformers fills what a checkpoint lacks with random numbers and leaves out what the model does not have, "
        "with a warning; verl loads the model that it trains with this class, and asks for no report"
    ),
    upstream="https://github.com/verl-project/verl/blob/v0.9.1/verl/utils/model.py",
    distribution="verl",
    sources={"0.9.1": "9023f5dc0acb0ccb377a842f5a8893afb716438da53281d8ea877ac12853e2bf"},
    remove_when="verl or transformers raises for a checkpoint that is not the model's",
)
CHUNK_ROWS = 1024
_CPU_LOGITS = 1 << 20  # of a chunk, 4 MiB: the size of its cache


class LogProbs(torch.autograd.Function):
    """log softmax(x) of some words of each token, and its gradient, the sum over them of g (onehot(word) - softmax(x)),
    in float32. At most CHUNK_ROWS tokens at a time: of the size of the logits x, which are kept, there is only their
    gradient.

    With a support the softmax is over its words. Another word has probability 0, log-prob -inf, and may have a gradient
    g of 0 alone."""

    @staticmethod
    def forward(ctx: Any, x_TV: Tensor, words_TL: Tensor, support: RowSupport | None = None) -> Tensor:
        """Return [T, L] float32 (float64 of float64), nats.  x_TV: of any float.  words_TL: int64 in 0..V-1."""
        ctx.save_for_backward(x_TV, words_TL)
        ctx.support = support
        wide = torch.promote_types(x_TV.dtype, torch.float32)
        rows = _rows(x_TV, support=support)
        chunks = zip(_chunks(x_TV, support=support, dtype=wide), words_TL.split(rows), strict=True)
        return torch.cat([x.log_softmax(dim=-1, dtype=wide).gather(1, words) for x, words in chunks])

    @staticmethod
    def backward(ctx: Any, grad_TL: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        x_TV, words_TL = ctx.saved_tensors
        grad_TV = torch.empty_like(x_TV)
        chunks = _chunks(x_TV, support=ctx.support, dtype=grad_TL.dtype)
        others = (each.split(_rows(x_TV, support=ctx.support)) for each in (grad_TV, words_TL, grad_TL))
        for x, into, words, grad in zip(chunks, *others, strict=True):
            whole = -grad.sum(dim=-1, keepdim=True)
            into.copy_(x.softmax(dim=-1, dtype=grad.dtype).mul_(whole).scatter_add_(1, words, grad))
        return grad_TV, None, None


def _chunks(x_TV: Tensor, *, support: RowSupport | None, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield some rows at a time: of the logits themselves, or with a support of a copy in this type."""
    rows = _rows(x_TV, support=support)
    if support is None:
        yield from x_TV.split(rows)
        return
    for x, of_chunk in zip(x_TV.split(rows), support.split(rows), strict=True):
        yield of_chunk.cut_(x.to(dtype, copy=True))


def _rows(x_TV: Tensor, *, support: RowSupport | None) -> int:
    most = CHUNK_ROWS if support is None else CHUNK_ROWS // 2  # there is a copy, and what is left out of it
    return min(most, max(1, _CPU_LOGITS // x_TV.shape[1])) if x_TV.device.type == "cpu" else most


def _in_chunks(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    heart = Heartbeat()

    @functools.wraps(original)
    def log_probs(logits: Tensor, labels: Tensor) -> Tensor:
        """Compute log-probs as verl does, but that `labels` may have one dimension more, several words for each
        token, and that the softmax is over the words of `current_support`."""
        heart.beat()  # of each forward, of a pass and of an update, which may take an hour
        logits_TV = logits.flatten(0, -2)
        words_TL = labels.reshape(len(logits_TV), labels.shape[-1] if labels.ndim == logits.ndim else 1)
        return LogProbs.apply(logits_TV, words_TL, current_support()).view(labels.shape)

    return log_probs


def _loading_whole(original: Callable[..., type]) -> Callable[..., type]:
    @functools.wraps(original)
    def get_hf_auto_model_class(hf_config: Any) -> type:
        """Return verl's class, with a `from_pretrained` that raises EngineError for a checkpoint that is not the
        model's."""
        auto_class = original(hf_config)

        def from_pretrained(pretrained_model_name_or_path: str, **settings: Any) -> Any:
            return load_whole(auto_class, pretrained_model_name_or_path, is_trained=True, **settings)

        return type(auto_class.__name__, (auto_class,), {"from_pretrained": staticmethod(from_pretrained)})

    return get_hf_auto_model_class


def fit_threads_to_host() -> None:
    """Compute with at most as many threads as this host has cores. Every process is given the plan's number, made
    from the head's cores. Call it before the process computes. The engine's processes, which this one starts, read
    the variable."""
    cores = usable_cores()
    if torch.get_num_threads() > cores:
        torch.set_num_threads(cores)
        os.environ[THREADS_VARIABLE] = str(cores)


keep_stacks(WORKER_ROLE)
apply_patch(LOG_PROBS, _in_chunks)
apply_patch(WHOLE_MODELS, _loading_whole)
importlib.import_module("appliance.trainer.attention")  # transformers knows it then

if is_run_on_cpu():
    fit_threads_to_host()
    widen_gemms()
    apply_patch(PROCESS_GROUP, gloo_only)

# By name: the module imports vLLM's side of verl, which only workers that send weights need.
base._ROLLOUT_REGISTRY[("vllm", "async")] = "appliance.trainer.sender.DigestingAdapter"

if os.environ.get(VENDOR_VARIABLE) == ENGINE_VENDOR:
    importlib.import_module("appliance.trainer.verl_engine")  # parts of verl that no other process of a run needs
