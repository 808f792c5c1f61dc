"""How experts are called: by `ignore`, in telemetry, and where layers that are in BF16 for now are counted. Layers are
empty ones of vLLM's classes, in a tree as vLLM 0.31 builds it. No engine."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Module
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import QKVParallelLinear, ReplicatedLinear, UnquantizedLinearMethod

from appliance.engine.config import ApplianceConfig, KeptExpertsMethod, KeptLinearMethod, require_ignored_layers
from appliance.engine.precision import raised_layers
from appliance.engine.quantised import Quantising, sample_rows
from appliance.engine.telemetry import TelemetryTap
from appliance.errors import EngineError
from appliance.quant.codec import quantise
from appliance.sync.precision import quantisation_at
from appliance.terms.schemes import AS_PLANNED, Precision, Scheme
from appliance.terms.settings import Quantisation

EXPERTS = "model.layers.{}.mlp.experts"
QKV = tuple(f"model.layers.1.self_attn.{part}_proj" for part in "qkv")
INT8 = Quantisation(scheme=Scheme.INT8)
KEEPS = Quantisation(scheme=Scheme.INT8, ignore=(EXPERTS.format(1),))


class Quantised(Quantising):
    """Quantises nothing: the tests call its hook."""

    scheme = Scheme.INT8
    kernel_name = "none"

    def held_scale(self, layer: Module) -> None:
        return None


METHODS = {RoutedExperts: UnquantizedFusedMoEMethod, QKVParallelLinear: UnquantizedLinearMethod}
KEPT = {RoutedExperts: KeptExpertsMethod, QKVParallelLinear: KeptLinearMethod, ReplicatedLinear: KeptLinearMethod}


def built(told: Quantisation) -> Module:
    """Two layers, as an engine that is told these settings holds them; vLLM asks by the names `….mlp.experts`."""
    config, model = ApplianceConfig(told), Module()
    for number in (0, 1):
        put(model, f"model.layers.{number}.self_attn.qkv_proj", QKVParallelLinear, config=config)
        put(model, f"model.layers.{number}.mlp.gate", ReplicatedLinear, config=config)
        put(model, f"{EXPERTS.format(number)}.routed_experts", RoutedExperts, config=config)
    return model


def put(model: Module, path: str, kind: type[Module], *, config: ApplianceConfig) -> None:
    layer = empty(kind)
    *folders, leaf = path.split(".")
    for folder in folders:
        model = model._modules.setdefault(folder, Module())
    model.add_module(leaf, layer)
    prefix = path.removesuffix(".routed_experts")
    if kind is RoutedExperts:
        layer.layer_name = prefix
    if not config.quantisation.scheme.quantised:
        method = METHODS.get(kind, UnquantizedLinearMethod)
    elif kind is ReplicatedLinear or config._is_ignored(prefix):
        method = KEPT[kind]
    else:
        method = Quantised
    layer.quant_method = empty(method)


def empty(kind: type) -> object:
    """Without what its __init__ asks for: sizes, ranks, a kernel."""
    instance = object.__new__(kind)
    if isinstance(instance, Module):
        Module.__init__(instance)
    return instance


@pytest.mark.parametrize(
    ("planned", "precision", "raised"),
    [
        (INT8, AS_PLANNED, 0),
        (KEEPS, AS_PLANNED, 0),
        (INT8, Precision(Scheme.BF16), 4),
        (KEEPS, Precision(Scheme.BF16), 3),
        (INT8, Precision(bf16_layers=(EXPERTS.format(0), *QKV)), 2),
        (KEEPS, Precision(bf16_layers=(EXPERTS.format(0),)), 1),
        (Quantisation(scheme=Scheme.INT8, ignore=("re:.*experts.*",)), Precision(Scheme.BF16), 2),
        (Quantisation(scheme=Scheme.BF16), AS_PLANNED, 0),
    ],
)
def test_layers_in_bf16_for_now_are_those_that_the_plan_would_quantise(
    planned: Quantisation, precision: Precision, raised: int
) -> None:
    model = built(quantisation_at(planned, precision))
    assert raised_layers(model, planned=planned) == raised


def test_experts_are_named_in_ignore_as_vllm_asks_for_them() -> None:
    told = quantisation_at(INT8, Precision(bf16_layers=(EXPERTS.format(0), *QKV)))
    require_ignored_layers(built(told), ApplianceConfig(told))
    deeper = Quantisation(scheme=Scheme.INT8, ignore=(f"{EXPERTS.format(0)}.routed_experts",))  # would keep nothing
    with pytest.raises(EngineError, match="is no layer of this model"):
        require_ignored_layers(built(deeper), ApplianceConfig(deeper))


def test_the_worst_layers_are_told_by_the_names_that_ignore_takes() -> None:
    model = built(INT8)
    tap = TelemetryTap(model)
    for layer in model.modules():
        if isinstance(getattr(layer, "quant_method", None), Quantised):
            weight_NK = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
            layer.quant_method.on_quantised(layer, sample_rows(weight_NK), quantise(weight_NK, scheme=Scheme.INT8))
    tap.read()
    layer_names = tuple(tap.layer_errors)
    assert sorted(layer_names) == sorted(
        [*(EXPERTS.format(number) for number in (0, 1)), *(f"model.layers.{n}.self_attn.qkv_proj" for n in (0, 1))]
    )
    told = quantisation_at(INT8, Precision(bf16_layers=layer_names))
    require_ignored_layers(built(told), ApplianceConfig(told))
    assert raised_layers(built(told), planned=INT8) == 4
