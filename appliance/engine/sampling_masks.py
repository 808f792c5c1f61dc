"""vLLM's `return_sampling_mask` on a CPU: which words each token was drawn from, where top-p, top-k or min-p leave some
out.

vLLM 0.31 reports them from its V2 runner, which needs Triton, and refuses the setting for the runner that it has on a
CPU. From that one's output on, through scheduler and output processor, everything is there: here the runner gives them.
They are the words with a finite logit in the tensor that the token is drawn from.

Legend: B rows, V words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.outputs import ModelRunnerOutput, SamplingMaskLists
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from appliance.patch import Patch

MASK_SETTING = Patch(
    name="cpu-sampling-mask-setting",
    target="vllm.config.vllm:VllmConfig._verify_sampling_replay_config",
    why="`return_sampling_mask` is refused for the runner of a CPU, which `cpu-sampling-masks` makes report masks",
    upstream="https://github.com/vllm-project/vllm/blob/v0.28.0/vllm/config/vllm.py",
    distribution="vllm",
    sources={
        "0.28.0": "131ec249087718415fb411b6e721c2c1854de709897078e1b748664bbd4dd691",
        "0.29.0": "131ec249087718415fb411b6e721c2c1854de709897078e1b748664bbd4dd691",
        "0.30.0": "131ec249087718415fb411b6e721c2c1854de709897078e1b748664bbd4dd691",
        "0.31.0": "131ec249087718415fb411b6e721c2c1854de709897078e1b748664bbd4dd691",
    },
    remove_when="vLLM's runner for CPUs reports sampling masks",
)
SAMPLING_MASKS = Patch(
    name="cpu-sampling-masks",
    target="vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens",
    why="the runner of a CPU does not say which words top-p and top-k left for a token",
    upstream="https://github.com/vllm-project/vllm/blob/v0.28.0/vllm/v1/worker/gpu_model_runner.py",
    distribution="vllm",
    sources={
        "0.28.0": "e764887f827c2fb2801743335fe9f6a637eb2540f2a9eec913417a4f37f1c3e2",
        "0.29.0": "e764887f827c2fb2801743335fe9f6a637eb2540f2a9eec913417a4f37f1c3e2",
        "0.30.0": "e764887f827c2fb2801743335fe9f6a637eb2540f2a9eec913417a4f37f1c3e2",
        "0.31.0": "047e6a4738dead564fe9b997672e5737a9af3514a1b07fbc87c9f7df6a372d1b",
    },
    remove_when="vLLM's runner for CPUs reports sampling masks",
)


def mask_setting(original: Callable[[Any], None]) -> Callable[[VllmConfig], None]:
    def verify(self: VllmConfig) -> None:
        """All that vLLM asks of the setting but its runner."""
        original(
            SimpleNamespace(
                model_config=self.model_config, speculative_config=self.speculative_config, use_v2_model_runner=True
            )
        )

    return verify


def sampling_masks(original: Callable[..., Any]) -> Callable[..., Any]:
    def sample_tokens(self: GPUModelRunner, grammar_output: Any) -> Any:
        if not self.model_config.return_sampling_mask:
            return original(self, grammar_output)
        drawn_from: list[Tensor] = []
        self.sampler.topk_topp_sampler.drawn_from = drawn_from  # engine/seeded_sampling.py adds its logits
        try:
            output = original(self, grammar_output)
        finally:
            del self.sampler.topk_topp_sampler.drawn_from
        if drawn_from:
            assert isinstance(output, ModelRunnerOutput), "nothing is scheduled ahead on a CPU"
            output.sampling_masks = masks_of(drawn_from[0], tokens_B=[len(ids) for ids in output.sampled_token_ids])
        return output

    return sample_tokens


def masks_of(logits_BV: Tensor, *, tokens_B: Sequence[int]) -> SamplingMaskLists:
    """Collect the words that could be drawn, row by row: none for a row without a token.

    logits_BV: -inf where a word could not be drawn.  tokens_B: 1, or 0 after a part of a prompt, whose sample vLLM
    throws away.
    """
    is_kept_BV = np.isfinite(logits_BV.numpy())
    is_kept_BV[np.equal(tokens_B, 0)] = False
    offsets = np.zeros(len(is_kept_BV) + 1, np.int64)
    np.cumsum(is_kept_BV.sum(axis=1), out=offsets[1:])
    ids = (np.flatnonzero(is_kept_BV) % is_kept_BV.shape[1]).astype(np.int32)
    return SamplingMaskLists(ids, offsets)
