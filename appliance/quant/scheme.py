"""The closed set of schemes: how the rollout engine holds and multiplies weights."""

from __future__ import annotations

from enum import StrEnum


class Scheme(StrEnum):
    """bf16 is the unquantised reference; the rest quantise the linear layers of the rollout engine only."""

    BF16 = "bf16"
    INT8 = "int8"  # W8A8: symmetric int8 per output channel, dynamic symmetric int8 per token
    FP8 = "fp8"  # per tensor
    FP8_CHANNEL = "fp8-channel"  # per output channel, dynamic per token
    FP8_BLOCK = "fp8-block"  # 128x128 weights, 1x128 activations

    @property
    def quantised(self) -> bool:
        return self is not Scheme.BF16

    @property
    def is_fp8(self) -> bool:
        return self in (Scheme.FP8, Scheme.FP8_CHANNEL, Scheme.FP8_BLOCK)
