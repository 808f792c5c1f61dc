"""The rank of each sampled token among all words, which vLLM computes with every log-prob, at a seventh of its cost."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from appliance.patch import Patch

TOKEN_RANKS = Patch(
    name="cpu-token-ranks",
    target="vllm.v1.sample.ops.logprobs:batched_count_greater_than",
    why=(
        "where nothing is compiled, as in runs on a CPU, comparing and summing makes two tensors as large as the "
        "log-probs, one of them in int64: a sixth of a decoding step of SmolLM2"
    ),
    upstream="https://github.com/vllm-project/vllm/blob/v0.28.0/vllm/v1/sample/ops/logprobs.py",
    distribution="vllm",
    sources={
        "0.28.0": "85f6567d21b23b98274c081523095c12e12c4bb09f0aea797f64235e55bb2d77",
        "0.29.0": "85f6567d21b23b98274c081523095c12e12c4bb09f0aea797f64235e55bb2d77",
        "0.30.0": "85f6567d21b23b98274c081523095c12e12c4bb09f0aea797f64235e55bb2d77",
        "0.31.0": "85869de0f00bb508e22b4995ea7d0db2be72aeb33f444922abfa6f9984ea24d6",
    },
    remove_when="vLLM can leave out the ranks, or counts them without a tensor of int64",
)


def token_ranks(original: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def batched_count_greater_than(x: Tensor, values: Tensor) -> Tensor:
        """x: [B, V]; values: [B, 1]."""
        if x.device.type != "cpu" or x.dtype is not torch.float32 or values.dtype is not torch.float32:
            return original(x, values)
        from appliance.engine.rank_kernel import count_at_least  # a compiler that engines without log-probs do not need

        return count_at_least(x, values)

    from vllm.v1.sample import sampler

    sampler.batched_count_greater_than = batched_count_greater_than  # it has the function by its own name
    return batched_count_greater_than
