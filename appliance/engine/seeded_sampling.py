"""Samples of requests with a seed in vLLM on a CPU: one number per seed and position in place of a generator's stream.

vLLM 0.31 draws an exponential number for each word of each row, first for the whole batch, then again row by row from
each request's generator, on one thread: half of the decoding of a small model (docs/results/sampling.md). A generator's
stream also depends on how often it was asked, and on a CPU it cannot be wound back after a part of a prompt.

Here each row takes one number, of its request's seed and its position (inverse_cdf.py). Temperature, min-p, top-k and
top-p are applied by vLLM, before; greedy requests and batches in which no request has a seed are vLLM's own. A request
without a seed beside others with one takes its number from PyTorch's generator. Log-probs are of the same logits: raw
ones by vLLM, processed ones as its own sampler computes them. Speculative decoding draws from the generators as before,
but for the bonus token after the accepted ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from appliance.patch import Patch

SEEDED_REQUESTS = Patch(
    name="cpu-seeded-requests",
    target="vllm.v1.worker.gpu_input_batch:InputBatch.add_request",
    why=(
        "the sampler is given a generator per row, and neither the request's position nor a generator that can be "
        "wound back on a CPU"
    ),
    upstream="https://github.com/vllm-project/vllm/blob/v0.28.0/vllm/v1/sample/ops/topk_topp_sampler.py",
    distribution="vllm",
    sources={
        "0.28.0": "5bdfa6b31ba25b3cf8147a8b94410adf8779c5ee913e37ea16a9241f9af430df",
        "0.29.0": "33b3f53b9b1925fff021d309efa6afc68d2cefe11edbf12e353bb4c7b17eb65b",
        "0.30.0": "33b3f53b9b1925fff021d309efa6afc68d2cefe11edbf12e353bb4c7b17eb65b",
        "0.31.0": "33b3f53b9b1925fff021d309efa6afc68d2cefe11edbf12e353bb4c7b17eb65b",
    },
    remove_when="vLLM's runner for CPUs draws by seed and position, as its V2 runner does",
)
SEEDED_SAMPLING = Patch(
    name="cpu-seeded-sampling",
    target="vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler.forward_cpu",
    why=(
        "an exponential number is drawn for each word of each row, on one thread, once for nothing and once from the "
        "row's generator: half of the decoding of a small model with 49,152 words"
    ),
    upstream="https://github.com/vllm-project/vllm/blob/v0.28.0/vllm/v1/sample/ops/topk_topp_sampler.py",
    distribution="vllm",
    sources={
        "0.28.0": "4757f56b45dcfa11f824076847d380ca3156f36eee094570902d776db00fcf45",
        "0.29.0": "a72923c2aa685b9d9db43ee83cb70d103daf8f78ad7ce7a4fd72f50070de1978",
        "0.30.0": "a72923c2aa685b9d9db43ee83cb70d103daf8f78ad7ce7a4fd72f50070de1978",
        "0.31.0": "863f32f93b24230350e52a86c4f63b3f20b68b85f58aa7c5b477dea0d1287fa7",
    },
    remove_when="vLLM's sampler for CPUs draws one number per row, or on all threads, by seed and position",
)


class PositionedGenerator(torch.Generator):
    """A request's generator that knows how many tokens its request has, and is not rewound."""

    def __init__(self, request: CachedRequestState) -> None:
        self.seed_bits = request.generator.initial_seed()
        """The request's seed modulo 2^64."""
        self.manual_seed(self.seed_bits)  # of the stream, which speculative decoding draws from
        self._request = weakref.ref(request)

    def __new__(cls, request: CachedRequestState) -> PositionedGenerator:
        return super().__new__(cls, device="cpu")

    @property
    def position(self) -> int:
        """Tokens before the next one: of the prompt, and generated."""
        return self._request().num_tokens

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:
        """Do nothing. vLLM winds a generator back when it throws a sample away, after a part of a prompt; here the
        number of the same position is the same again."""


def seeded_requests(original: Callable[..., int]) -> Callable[..., int]:
    def add_request(self: InputBatch, request: CachedRequestState) -> int:
        if type(request.generator) is torch.Generator:
            request.generator = PositionedGenerator(request)
        return original(self, request)

    return add_request


def seeded_sampling(
    original: Callable[..., tuple[Tensor, Tensor | None]],
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    def forward_cpu(
        self: TopKTopPSampler,
        logits: Tensor,
        generators: dict[int, torch.Generator],
        k: Tensor | None,
        p: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """logits: [B, V] float32.  generators: by row, of the rows with a seed."""
        logits = apply_top_k_top_p(logits, k, p)
        if hasattr(self, "drawn_from"):  # engine/sampling_masks.py asks for them
            self.drawn_from.append(logits)
        if not generators or not all(isinstance(one, PositionedGenerator) for one in generators.values()):
            return original(self, logits, generators, None, None)
        from appliance.engine.inverse_cdf import draw_words  # a compiler that engines without seeds do not need

        words = draw_words(logits, row_uniforms(generators, rows=len(logits)))
        if self.logprobs_mode not in PROCESSED_LOGPROBS_MODES:
            return words, None
        is_logits = self.logprobs_mode == "processed_logits"
        return words, logits if is_logits else logits.log_softmax(dim=-1, dtype=torch.float32)

    return forward_cpu


def row_uniforms(generators: dict[int, torch.Generator], *, rows: int) -> NDArray[np.float64]:
    """Return one number per row, [B] float64 in [0, 1): by seed and position where a row has a seed, else by PyTorch's
    own generator."""
    from appliance.engine.inverse_cdf import uniform_numbers

    uniform_B = torch.rand(rows, dtype=torch.float64).numpy() if len(generators) < rows else np.empty(rows)
    seeds = np.array([generator.seed_bits for generator in generators.values()], dtype=np.uint64)
    positions = np.array([generator.position for generator in generators.values()], dtype=np.uint64)
    uniform_B[list(generators)] = uniform_numbers(seeds, positions)
    return uniform_B
