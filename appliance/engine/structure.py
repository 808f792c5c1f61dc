"""Which models without a row in the list of families may run quantised: those whose structure shows where each weight
belongs.

A family of the list was read and tried (terms/families.py). Of any other model nothing is believed that is not checked
when its engine starts:

* its layers: linears and embeddings of vLLM's own classes, which the proof can ask; plain attention; the rest has only
  vectors, such as norms (`require_fit`). What vLLM's class says that it packs together is what our mapping says.
* its weights: each tensor of the checkpoint, which has the trainer's parameters, has exactly one place, in its shape,
  and each layer gets all that it has (first_load.py).
* its updates: two real ones, of other weights and of the first ones again, prove every kernel and every vector. In
  between each layer with vectors must answer otherwise than before, and after them the model computes what it did, to
  the logits and bit for bit (`rehearse_updates`). What a layer keeps of its weights in another form shows here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import scaled_dot_product_attention
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from appliance.engine.config import HINT, require_known_layers
from appliance.engine.tensor_slots import slots
from appliance.engine.update import WeightUpdate
from appliance.errors import EngineError, SyncError
from appliance.terms.families import FUSED_LAYERS, NEEDS_A_ROW, unlisted

_TOKENS = 12  # of the sequence that is computed before and after


def is_unlisted(model_config: Any) -> bool:
    """Return whether a model has no row in the list of families. model_config: vLLM's."""
    return bool(unlisted([model_config.architecture]))


def require_fit(model: Module, *, vllm_config: Any) -> None:
    """Check the structure of a built model without a row. Raises EngineError, with the first layer that stands against
    it, where the structure does not show where each weight belongs."""
    config = vllm_config.model_config
    if not is_unlisted(config):
        return
    try:
        _require_layers(model, mixers=vllm_config.compilation_config.static_forward_context)
        require_known_layers(model)
        slots(model, tied_head=bool(config.hf_text_config.tie_word_embeddings))
    except EngineError as error:
        raise EngineError(f"{config.model}: {error.message}", hint=HINT) from error


def _require_layers(model: Module, *, mixers: Mapping[str, Module]) -> None:
    """Require layers that can be proven. mixers: vLLM's register of what has a KV cache or another state of a sequence,
    or experts. Some models hold their attention beside the module tree."""
    for name, layer in mixers.items():
        if isinstance(layer, AttentionLayerBase) and type(layer) is not Attention:
            fact = f"{name} is a {type(layer).__name__}"
            raise EngineError(f"{fact}: among layers that mix tokens only plain attention is known")
    for name, layer in model.named_modules():
        if isinstance(layer, RoutedExperts):
            raise EngineError(f"{name} has experts, and the model has no row in the list of families: {NEEDS_A_ROW}")
        parameters = [parameter for parameter, _ in layer.named_parameters(recurse=False)]
        if parameters and not hasattr(layer, "quant_method") and any(True for _ in layer.children()):
            raise EngineError(f"{name} has `{parameters[0]}` beside its layers: nothing shows what computes with it")
        if isinstance(layer, LinearBase) and (why := _otherwise_packed(model, name=name)):
            raise EngineError(why)


def _otherwise_packed(model: Module, *, name: str) -> str:
    """Say why vLLM's class packs other parts into a layer than our mapping says; or an empty text."""
    leaf = name.rpartition(".")[2]
    packed = (getattr(model, "packed_modules_mapping", None) or {}).get(leaf, [leaf])
    if list(packed) in ([leaf], FUSED_LAYERS.get(leaf, [leaf])):  # whole, as some checkpoints have it, or our parts
        return ""
    return f"{name} is packed from {', '.join(packed)}, in an order that no proof knows"


def rehearse_updates(model: Module, *, vllm_config: Any, rank: int) -> None:
    """Update a freshly loaded model to other weights and back, both proven, and compare what its layers compute.
    Nothing is done for a family of the list. rank: within the engine.

    Raises EngineError with the first layer that then answers otherwise, or with the fault of an update; and for an
    engine that loaded no checkpoint, or one that cannot be read again.
    """
    config, load_format = vllm_config.model_config, vllm_config.load_config.load_format
    if not is_unlisted(config):
        return
    loader = get_model_loader(vllm_config.load_config)
    if not isinstance(loader, DefaultModelLoader):
        fact = f"with `load_format: {load_format}` no checkpoint is there for a rehearsed weight update"
        hint = "use `load_format: auto`: the model has no row in the list of families"
        raise EngineError(f"{config.model}: {fact}", hint=hint)
    device = torch.device(vllm_config.device_config.device)

    def update(change: Callable[[Tensor], Tensor]) -> None:
        running = WeightUpdate(model, model_config=config, rank=rank)
        running.begin()
        for name, tensor in loader.get_all_weights(config, model):
            running.load([(name, change(tensor.to(device)))], is_lent=True)
        running.finish()

    try:
        with set_current_vllm_config(vllm_config), device, torch.no_grad():
            try:
                before = _trace(model, vllm_config=vllm_config)
            except (RuntimeError, TypeError, ValueError) as error:
                raise EngineError(f"the model cannot be computed by itself: {error}") from error
            update(_other_weights)
            if stale := next((name for name in before.inputs if before.repeats(name, model)), ""):
                raise EngineError(f"{stale} answers as it did before, with other weights")
            update(lambda tensor: tensor)
            after = _trace(model, vllm_config=vllm_config)
        if differs := next((name for name in before.outputs if not _equal(before.outputs, after.outputs, name)), ""):
            raise EngineError(f"{differs} does not compute what it did, with its first weights again")
    except (SyncError, EngineError) as error:
        raise EngineError(f"{config.model}: a rehearsed weight update: {error.message}", hint=HINT) from error


def _other_weights(tensor: Tensor) -> Tensor:
    """Return the same values, each in its neighbour's place; those of a vector, which may all be equal, are larger,
    too."""
    moved = tensor.reshape(-1).roll(1).reshape(tensor.shape)
    return moved * 1.25 + 0.25 if tensor.ndim < 2 else moved


def _equal(ones: Mapping[str, Tensor], others: Mapping[str, Tensor], name: str) -> bool:
    return name in others and torch.allclose(ones[name], others[name], rtol=0, atol=0, equal_nan=True)


@dataclass
class _Trace:
    """Inputs and outputs of the layers in one forward, by their names, in the order in which they computed."""

    inputs: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    """Arguments of layers with vectors alone, whose computation no proof asks about."""
    outputs: dict[str, Tensor] = field(default_factory=dict)
    """Outputs of all layers that have no layers in them, and the logits."""

    def note_inputs(self, name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.inputs[name] = _copies(arguments), dict(zip(named, _copies(tuple(named.values())), strict=True))

    def note_output(self, name: str, output: Any) -> None:
        if isinstance(first := _first(output), Tensor):
            self.outputs[name] = first.clone()

    def repeats(self, name: str, model: Module) -> bool:
        """Whether a layer of the model gives its output again when it gets its inputs again."""
        arguments, named = self.inputs[name]
        output = _first(model.get_submodule(name)(*_copies(arguments), **named))
        return name in self.outputs and torch.equal(output, self.outputs[name])


def _copies(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copy the tensors among the values: some norms write into what they get."""
    return tuple(value.clone() if isinstance(value, Tensor) else value for value in values)


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def _trace(model: Module, *, vllm_config: Any) -> _Trace:
    """Compute one short sequence. Nothing is read from or written into the KV cache."""
    device = torch.device(vllm_config.device_config.device)
    tokens_T = torch.arange(_TOKENS, device=device) * 37 % vllm_config.model_config.get_vocab_size()
    mixers, trace = vllm_config.compilation_config.static_forward_context, _Trace()
    with ExitStack() as stack:
        for name, layer in model.named_modules():
            if any(True for _ in layer.children()) or isinstance(layer, Attention):
                continue
            noting = functools.partial(_note_output, trace, name)
            stack.callback(layer.register_forward_hook(noting).remove)
            if any(True for _ in layer.parameters(recurse=False)) and not hasattr(layer, "quant_method"):
                noting = functools.partial(_note_inputs, trace, name)
                stack.callback(layer.register_forward_pre_hook(noting, with_kwargs=True).remove)
        stack.enter_context(_attention_without_a_cache(mixers))
        stack.enter_context(set_forward_context(None, vllm_config, num_tokens=_TOKENS, skip_compiled=True))
        hidden_TH = model(input_ids=tokens_T, positions=torch.arange(_TOKENS, device=device))
        trace.note_output("the last projection", model.compute_logits(hidden_TH))
    return trace


def _note_inputs(trace: _Trace, name: str, _: Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    trace.note_inputs(name, arguments, named)


def _note_output(trace: _Trace, name: str, _: Module, __: Any, output: Any) -> None:
    trace.note_output(name, output)


@contextmanager
def _attention_without_a_cache(mixers: Mapping[str, Module]) -> Iterator[None]:
    """Replace every attention by torch's, causal: vLLM's own writes into a KV cache that an engine may not have yet.
    It has no weights, so that any other function of its inputs shows the same."""
    layers = [layer for layer in mixers.values() if isinstance(layer, Attention)]
    for layer in layers:
        layer.__dict__["forward"] = _causal(layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.__dict__["forward"]


def _causal(layer: Attention) -> Callable[..., Tensor]:
    def forward(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        heads, size = layer.num_kv_heads, layer.head_size
        q_HTD, k_GTD, v_GTD = (
            tensor.reshape(-1, number, size).transpose(0, 1)
            for tensor, number in ((query, layer.num_heads), (key, heads), (value, heads))
        )
        out_HTD = scaled_dot_product_attention(q_HTD, k_GTD, v_GTD, is_causal=True, enable_gqa=True)
        return out_HTD.transpose(0, 1).reshape(len(query), -1)

    return forward
