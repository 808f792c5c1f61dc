"""Settings of one rollout engine: its scheme and everything that goes with it. Imports no torch. The value travels to
vLLM as `hf_overrides.quantization_config`, together with `quantization=appliance`."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from appliance.files import Frozen
from appliance.terms.schemes import Scheme

METHOD_NAME = "appliance"  # the name of our quantisation method in vLLM
LOAD_FORMAT = "appliance_whole"  # of our loader in vLLM, which compares what it loads with the model
ATTENTION_NAME = "appliance_packed"  # of our attention in transformers
CPU_KV_BLOCK = 32
"""Tokens of a block of an engine's KV cache on a CPU. Samples of a prompt, and prompts that begin alike, share whole
blocks: vLLM's own 128 tokens are more than many prompts have. Its attention wants a multiple of 32."""


class Dtype(StrEnum):
    """Data type of the trainer's forward and backward, of weights as they are sent, and of engines."""

    BF16 = "bf16"
    FP16 = "fp16"

    @property
    def in_torch(self) -> str:
        """Name of the type in torch, verl and vLLM."""
        return {Dtype.BF16: "bfloat16", Dtype.FP16: "float16"}[self]


class KvCache(StrEnum):
    """Number format of the keys and values that an engine keeps."""

    AUTO = "auto"
    """The engine's own type, 16 bits."""
    FP8 = "fp8"
    """FP8 (E4M3), 8 bits, with a scale for the keys and one for the values of each layer."""

    @property
    def in_vllm(self) -> str:
        """Name of the format in vLLM."""
        return {KvCache.AUTO: "auto", KvCache.FP8: "fp8_e4m3"}[self]


class OldLogProbs(StrEnum):
    """Sources of a step's old log-probs, which are of the policy before its update."""

    AUTO = "auto"
    """One of the others, which plan/derive.py chooses; in a recipe only."""
    RECOMPUTE = "recompute"
    """A pass over the batch before the update."""
    UPDATE = "update"
    """The forward of the step's only update, whose weights are still those that the pass would use."""
    ROLLOUT = "rollout"
    """The engines, whose log-probs the rollouts carry."""


class Schedule(StrEnum):
    """Course of the learning rate after the warm-up."""

    CONSTANT = "constant"
    COSINE = "cosine"
    LINEAR = "linear"

    def rate(self, step: int, *, steps: int, warmup_steps: int, least: float) -> float:
        """Return the learning rate of `linear` at a step, as a share of the full one. step: from 0.  steps: of the run.
        least: share that is left at the end."""
        assert self is Schedule.LINEAR, "verl has the others"
        if step < warmup_steps:
            return step / warmup_steps
        done = (step - warmup_steps) / max(1, steps - warmup_steps)
        return max(least, 1 - (1 - least) * done)


class Quantisation(Frozen):
    """Quantisation of one engine: what is quantised, and how."""

    scheme: Scheme
    emulated: bool = False
    """Whether an FP8 scheme is emulated by quantise-dequantise in floating point, where it has no kernels; for its
    numbers only."""
    ignore: tuple[str, ...] = ()
    """Layers kept in BF16, each an exact name or `re:` and a pattern, as compressed-tensors has them."""
    profile: str = ""
    """Folder of a profile whose smoothing is folded in, or empty."""
    lm_head_fp32: bool = False
    """Whether the last projection is in FP32."""

    @property
    def is_plain(self) -> bool:
        """Whether vLLM's own BF16 engine is meant, with nothing of ours in it."""
        return self.scheme is Scheme.BF16 and not self.lm_head_fp32

    def to_config(self) -> dict[str, Any]:
        """Return the value of `hf_overrides.quantization_config`: JSON types only."""
        return {"quant_method": METHOD_NAME, **self.model_dump(mode="json")}

    def engine_arguments(self) -> dict[str, Any]:
        """Return the arguments for vLLM's `LLM` or `EngineArgs`: none for a plain engine."""
        if self.is_plain:
            return {}
        return {"quantization": METHOD_NAME, "hf_overrides": {"quantization_config": self.to_config()}}


def quantisation_from_config(config: dict[str, Any]) -> Quantisation:
    """Invert `Quantisation.to_config`. Raises ValueError for what it never writes."""
    values = {key: value for key, value in config.items() if key != "quant_method"}
    return Quantisation.model_validate(values, strict=False)  # JSON has lists for tuples and texts for schemes
