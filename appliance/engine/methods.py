"""The linear methods of this engine, by the names that schemes have for them (`terms/schemes.py`): one line each."""

from __future__ import annotations

import functools
from collections.abc import Callable

from vllm.model_executor.layers.fused_moe import RoutedExperts

from appliance.engine.emulated import EmulatedLinearMethod
from appliance.engine.experts import OnlineExpertsMethod
from appliance.engine.int8 import Int8LinearMethod
from appliance.engine.quantised import Quantising
from appliance.engine.vllm_fp8 import native_fp8_method
from appliance.terms.schemes import Scheme

METHODS: dict[str, Callable[[Scheme], Quantising]] = {
    "int8": Int8LinearMethod,
    "vllm-fp8": native_fp8_method,
    "emulated-fp8": EmulatedLinearMethod,
}


def linear_method(scheme: Scheme, *, emulated: bool) -> Quantising:
    """A new one, for one layer. scheme: one that quantises. vLLM raises ValueError where a GPU has no kernel for it."""
    return METHODS[scheme.spec.emulation if emulated else scheme.spec.method](scheme)


def experts_method(scheme: Scheme, *, emulated: bool, layer: RoutedExperts) -> OnlineExpertsMethod:
    """For one layer of experts. scheme: one whose method, or emulation, is ours. Raises EngineError for a layer that
    they do not fit."""
    make = functools.partial(linear_method, scheme, emulated=emulated)
    return OnlineExpertsMethod(scheme, emulated=emulated, make=make, layer=layer)
