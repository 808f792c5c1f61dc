"""The last projection in FP32: the checkpoint's BF16 weights, multiplied and summed in float32.

vLLM's LogitsProcessor calls `lm_head.quant_method.apply` and keeps the type of what comes back; the sampler works in
float32 anyway, so logits are rounded to BF16 nowhere. vLLM has a setting of its own (`head_dtype`), which on a CPU
makes a float32 copy of the whole weight for each step; here a part that fits the cache is widened at a time.

Nothing is packed or copied after loading: what is multiplied is the layer's own tensor, so the head is right after a
reload, and where it is the embedding's.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import linear
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

_CHUNK_ELEMENTS = 1 << 20  # 4 MiB in float32: large enough for a GEMM, small enough to be still in the cache


class Fp32HeadMethod(UnquantizedEmbeddingMethod):
    """For `lm_head`, and for the embedding that may be one. Looking up an embedding stays as it is."""

    def process_weights_after_loading(self, layer: Module) -> None:
        """Nothing: vLLM's CPU backend would pack a BF16 copy that only its own `apply` reads."""

    def apply(self, layer: Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[M, V] float32. layer.weight: [V, K]; V: this rank's part of the vocabulary, padding included."""
        if x.is_cuda:  # products of BF16 values are exact in float32, and so are sums in it: no copy needed (read only)
            out_MV = torch.mm(x.reshape(-1, x.shape[-1]), layer.weight.t(), out_dtype=torch.float32)
        else:
            out_MV = _widened_product(x.reshape(-1, x.shape[-1]), layer.weight)
        if bias is not None:
            out_MV += bias.float()
        return out_MV.reshape(*x.shape[:-1], -1)


def _widened_product(x_MK: Tensor, weight_VK: Tensor) -> Tensor:
    x_MK = x_MK.float()
    out_MV = torch.empty((len(x_MK), len(weight_VK)), dtype=torch.float32)
    rows = max(1, _CHUNK_ELEMENTS // weight_VK.shape[1])
    for start in range(0, len(weight_VK), rows):
        part = slice(start, start + rows)
        out_MV[:, part] = linear(x_MK, weight_VK[part].float())
    return out_MV
