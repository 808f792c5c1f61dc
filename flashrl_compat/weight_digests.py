"""Digests of what a model computes with, for `/weight_checker`: engines of equal weights have equal ones.

A layer with a kernel multiplies the unit vectors. The products are its whole weight as the kernel has it:
column k is the answer to unit vector k. In BF16 and FP16 it is the weight itself, since each sum has one term. In INT8
it is code times scale; two codes of a row that are not equal differ by at least 1/127 of the larger, which BF16 (2^-8)
keeps apart. A hash of the layer's parameters would miss copies that a kernel has packed away, as vLLM's kernels for
CPUs do. Everything else (norms, embeddings, biases, scales) is hashed as it is.

Legend: N output channels, K input channels of this rank's part of a layer; M unit vectors at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import Module
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from appliance.engine.kernel_proof import ask_kernel
from appliance.engine.tensor_slots import expert_gemms, expert_shape, is_wide, local_shape

UNIT_VECTORS = 256  # multiplied at once: 75 MiB of answers of a head of 150,000 words


def weight_digests(model: Module, *, dtype: torch.dtype) -> dict[str, str]:
    """Return the SHA-256 of every weight of a model, in hexadecimal, by the parameter's name; of experts by the name of
    their product. dtype: the engine's. It takes a product of K tokens for each layer."""
    digests = {}
    for name, layer, length in _layers_with_kernels(model):
        layer_dtype = torch.float32 if is_wide(layer, "weight", dtype=dtype) else dtype
        digests[f"{name}.weight"] = _answers_digest(layer, length=length, dtype=layer_dtype)
    for name, parameter in model.named_parameters():
        if name not in digests and parameter.numel():
            digests[name] = _digest([parameter.data])
    return digests


def _layers_with_kernels(model: Module) -> Iterator[tuple[str, Module, int]]:
    """Yield the name of each layer that multiplies, the layer, and K."""
    for name, layer in model.named_modules():
        if isinstance(layer, LinearBase | ParallelLMHead):
            yield name, layer, local_shape(layer).length
    for name, (layer, gemm) in expert_gemms(model).items():
        yield name, gemm, expert_shape(layer, gemm).length


def _answers_digest(layer: Module, *, length: int, dtype: torch.dtype) -> str:
    starts = range(0, length, UNIT_VECTORS)
    vectors = (
        torch.eye(min(UNIT_VECTORS, length - start), length, device="cpu").roll(start, dims=1) for start in starts
    )
    return _digest(ask_kernel(layer, unit_MK, bias_N=None, dtype=dtype) for unit_MK in vectors)


def _digest(tensors: Iterator[Tensor] | list[Tensor]) -> str:
    state = hashlib.sha256()
    for tensor in tensors:
        state.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return state.hexdigest()
