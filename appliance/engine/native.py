"""FP8 by vLLM's own online methods, where a GPU has the kernels. Read only: nothing of this ran on a CPU.

Their numbers are the codec's. Per tensor and per channel they ask the other ranks for the absmax of a weight that is
cut; per block they do not, and refuse cut blocks.
"""

from __future__ import annotations

from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.layers.quantization.online.fp8 import (
    Fp8PerBlockOnlineLinearMethod,
    Fp8PerTensorOnlineLinearMethod,
    Fp8PtpcOnlineLinearMethod,
)

from appliance.quant.scheme import Scheme

_METHODS: dict[Scheme, type[LinearMethodBase]] = {
    Scheme.FP8: Fp8PerTensorOnlineLinearMethod,
    Scheme.FP8_CHANNEL: Fp8PtpcOnlineLinearMethod,
    Scheme.FP8_BLOCK: Fp8PerBlockOnlineLinearMethod,
}


def native_fp8_method(scheme: Scheme) -> LinearMethodBase:
    """scheme: one of FP8. vLLM raises ValueError where the GPU has no kernel for it."""
    return _METHODS[scheme]()


def native_scheme(method: object) -> Scheme | None:
    """Which scheme one of vLLM's own methods runs, or None."""
    return next((scheme for scheme, kind in _METHODS.items() if type(method) is kind), None)


def native_kernel_name(method: object) -> str:
    """The kernel that multiplies: one that only widens the weights (Marlin) shows here."""
    return type(method.fp8_linear).__name__
