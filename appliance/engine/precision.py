"""Layers that change their precision from one weight update to the next, in an engine that runs eagerly. (Another
engine is restarted in another precision: trainer/engines.py.)

A quantised linear layer becomes a BF16 one by another method object, and back: everything that asks a layer what it is
(kernels, proof, attestation, telemetry) sees one that was built so. It happens between two updates, when vLLM's reload
has put the layer back to its BF16 form on the meta device; the old kernel's tensors are dropped, since nothing refers
to their addresses but a CUDA graph, and there is none.

Experts and vLLM's own FP8 methods cannot change.
"""

from __future__ import annotations

import functools

from torch import Tensor
from torch.nn import Module
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from appliance.engine.config import ApplianceConfig, KeptLinearMethod
from appliance.engine.quantised import OnlineLinearMethod, Quantising
from appliance.engine.tensor_slots import part_names
from appliance.errors import SyncError
from appliance.sync.precision import precision_of
from appliance.terms.schemes import Precision, Scheme
from appliance.terms.settings import Quantisation


class RaisedLinearMethod(KeptLinearMethod):
    """Method of a layer that is in BF16 for the time being."""

    quantised: OnlineLinearMethod
    """Method that the layer goes back to."""

    def __init__(self, quantised: OnlineLinearMethod) -> None:
        super().__init__()
        self.quantised = quantised


def raised_layers(model: Module, *, planned: Quantisation) -> int:
    """Count the layers that are in BF16 for now: those that the plan's settings quantise and that are not, in this
    engine. It was started otherwise than planned, or a weight update changed it."""
    config = _config(planned)
    return sum(
        isinstance(layer.quant_method, UnquantizedLinearMethod | UnquantizedFusedMoEMethod)
        and config.quantises(layer, name=name)
        for name, layer in model.named_modules()
        if hasattr(layer, "quant_method")
    )


_config = functools.lru_cache(maxsize=1)(ApplianceConfig)  # reads the profile


def read_directive(tensor: Tensor) -> Precision:
    """Read a directive: the inverse of `precision_tensor` in sync/manifest.py. Raises SyncError for other bytes."""
    try:
        return precision_of(tensor.cpu().numpy().tobytes().decode())
    except ValueError as error:
        raise SyncError(f"weight update: the requested precision cannot be read: {error}") from error


class PrecisionSwitch:
    """The quantised linear layers of one model. `change` before an update's reload begins, `release` when it has."""

    def __init__(self, model: Module) -> None:
        self._layers: dict[str, Module] = {}
        self._fixed = ""  # a quantised layer that cannot change
        for name, layer in model.named_modules():
            method = getattr(layer, "quant_method", None)
            if isinstance(method, OnlineLinearMethod | RaisedLinearMethod):
                self._layers[name] = layer
            elif isinstance(method, Quantising):
                self._fixed = self._fixed or name
        self._changed: list[Module] = []

    def change(self, precision: Precision) -> tuple[str, ...]:
        """Change the layers' precision, and return the names of those that are now another way than before. Raises
        SyncError, before anything changed. An engine without quantised layers has nothing to change, whatever
        precision is asked for."""
        if self._fixed and not precision.is_planned:
            raise SyncError(f"weight update: {self._fixed} cannot change its precision while the engine runs")
        goals = {name: precision.scheme or _quantised_method(layer).planned for name, layer in self._layers.items()}
        for name, scheme in goals.items():
            _require_possible(name, self._layers[name], scheme)
        goals |= dict.fromkeys(self._layers_named(precision.bf16_layers), Scheme.BF16)
        changed = [name for name, scheme in goals.items() if _scheme(self._layers[name]) is not scheme]
        for name in changed:
            layer, method = self._layers[name], _quantised_method(self._layers[name])
            if goals[name] is Scheme.BF16:
                layer.quant_method = RaisedLinearMethod(method)
            else:
                method.scheme = goals[name]
                layer.quant_method = method
        self._changed = [self._layers[name] for name in changed]
        return tuple(changed)

    def _layers_named(self, entries: tuple[str, ...]) -> list[str]:
        """Find the layers by their own name, or by those of all their parts. An entry that names nothing is refused."""
        requested, known, names = set(entries), set[str](), []
        for name in self._layers:
            parts = part_names(name)
            known |= {name, *parts}
            if name in requested or requested.issuperset(parts):
                names.append(name)
            elif requested.intersection(parts):
                raise SyncError(f"weight update: only a part of {name} is to be in BF16")
        unknown = sorted(requested - known)
        if unknown and self._layers:
            raise SyncError(f"weight update: `{unknown[0]}` is to be in BF16 and is no quantised layer of this engine")
        return names

    def release(self) -> None:
        """Release what the old kernels of the changed layers held. Their new tensors stay, and are not copied into old
        ones."""
        for layer in self._changed:
            get_layerwise_info(layer).kernel_tensors = None
            if isinstance(layer.quant_method, RaisedLinearMethod):
                layer.quant_method.quantised.release()
            elif hasattr(layer, "cpu_linear"):  # vLLM's packed BF16 weight
                del layer.cpu_linear


def _quantised_method(layer: Module) -> OnlineLinearMethod:
    method = layer.quant_method
    return method.quantised if isinstance(method, RaisedLinearMethod) else method


def _scheme(layer: Module) -> Scheme:
    return Scheme.BF16 if isinstance(layer.quant_method, RaisedLinearMethod) else layer.quant_method.scheme


def _require_possible(name: str, layer: Module, scheme: Scheme) -> None:
    method = _quantised_method(layer)
    if scheme in (Scheme.BF16, method.scheme, method.planned):
        return
    alike = method.emulated and scheme.spec.emulation == method.scheme.spec.emulation
    if not alike or layer.tp_size > 1:
        raise SyncError(f"weight update: {name} is {method.scheme} and cannot become {scheme} while the engine runs")
