"""A trainer's forward that is the rollouts': the engine's layers, fused and quantised as it has them, its operations.

The policy that learns is then the policy that sampled, log-probs included. What transformers built keeps its modules,
parameters and their names; only what they do is another thing (`RolloutForward`), so checkpoints, weight updates,
digests and the exported model do not change. Parameters are FP32 masters; FSDP gives a forward what it rounds to BF16,
which is what a weight update sends.

With an adapter that is sent alone (`model.lora.sync: adapter`) the model itself is frozen: it is quantised once, and
each layer adds its adapter's product as the engine does (`add_adapters`). The BF16 weights of layers that the plan
quantises are then not kept (trainer/weights_on_disk.py).

The operations and their gradients stand in trainer/rollout_ops.py.

Legend: T tokens of all sequences in a row, D channels of a head, N output and K input channels of a layer, H width of
the residual stream, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from verl.models.transformers.dense_common import CausalLMOutputForPPO

from appliance.errors import NumericsError, SyncError, TrainingError
from appliance.quant.codec import all_finite
from appliance.quant.files import kept_layers
from appliance.quant.layer_view import is_ignored
from appliance.quant.profile import Smoothing, fold, fold_columns, fold_rows, load_smoothing
from appliance.quant.support import RowSupport
from appliance.sync.manifest import Manifest, digest
from appliance.sync.precision import quantisation_at
from appliance.terms.families import FAMILIES, Unit, beyond_one_flow
from appliance.terms.ropes import DEFAULT_ROPE
from appliance.terms.schemes import AS_PLANNED, Precision, Scheme
from appliance.terms.settings import Quantisation
from appliance.trainer.rollout_ops import (
    AdapterPart,
    EngineWeight,
    Note,
    PackedRow,
    adapter_product,
    add_norm,
    head_norm,
    linear,
    log_probs_of,
    silu_and_mul,
)
from appliance.trainer.update_log_probs import UPDATE_LOG_PROBS
from appliance.trainer.weights_on_disk import WeightsOnDisk

HEAD = "lm_head"
_HINT = "use trainer.forward: bf16"


class LayerAdapter(NamedTuple):
    """Adapter of one module."""

    a: nn.Linear
    b: nn.Linear
    scale: float
    """alpha / rank."""
    engine_rank: int
    """Rank to which the engine fills matrices up with zeros."""

    def as_engine(self, name: str, *, smoothing: Smoothing) -> AdapterPart:
        """Return it as vLLM holds it: with smoothing, times its scale, filled up with zeros. name: of the module.
        Raises NumericsError, which names the matrix."""
        (a_name, b_name), weight = adapter_names(name), f"{name}.weight"
        for matrix_name, matrix in ((a_name, self.a.weight), (b_name, self.b.weight)):
            if not all_finite(matrix.detach()):
                raise NumericsError(f"{matrix_name} in training: a value is not finite")
        a_RK = fold_columns(a_name, self.a.weight, weight=weight, smoothing=smoothing)
        b_NR = fold_rows(b_name, self.b.weight, weight=weight, smoothing=smoothing) * self.scale
        if more := self.engine_rank - len(a_RK):
            a_RK, b_NR = pad(a_RK, (0, 0, 0, more)), pad(b_NR, (0, more))
        return AdapterPart(a_RK, b_NR)


def adapter_names(module: str) -> tuple[str, str]:
    """Return the names with which an update has the two matrices of a module's adapter."""
    return f"base_model.model.{module}.lora_A.weight", f"base_model.model.{module}.lora_B.weight"


class WeightPlace(StrEnum):
    """State of the weights of a layer's modules."""

    TRAINED = "trained"  # in the modules; they change at each update
    FROZEN = "frozen"  # in the modules, as they were loaded
    IN_FILES = "in files"  # in the model's files alone, as they were loaded


class EngineLayer:
    """A linear layer as the engine has it: of one or several modules."""

    name: str
    """Name of the layer in the engine."""
    scheme: Scheme
    """Scheme that the layer computes in now."""
    fp8_backward: bool
    """Whether gradients are computed in `fp8-block`, too, where the layer is in that scheme."""
    keeps_dequantised: bool
    """Setting of EngineWeight of the same name."""
    sent: dict[str, str]
    """Digests, by the names of an update, of what the engines got of this layer, to be compared with what the next
    forward computes with; empty where that was done, or the weights have changed."""
    part_names: list[str]
    """Names of the modules, or, where a layer has one of them, of all that the engine fuses with it."""

    def __init__(
        self,
        name: str,
        parts: Sequence[tuple[str, nn.Linear]],
        *,
        smoothing: Smoothing,
        fp8_backward: bool,
        keeps_dequantised: bool,
    ) -> None:
        self.name, self.scheme = name, Scheme.BF16
        self.fp8_backward, self.keeps_dequantised = fp8_backward, keeps_dequantised
        self.sent = {}
        self.part_names = [name for name, _ in parts]
        self._smoothing = smoothing
        self._parts = parts
        self._place = WeightPlace.TRAINED
        self._adapters: dict[str, LayerAdapter] = {}
        self._factor_K = smoothing.column_factor_of(f"{parts[0][0]}.weight")
        self._factor_N = _row_factor_of(parts, smoothing=smoothing)
        self._operand: EngineWeight | Tensor | None = None
        """Operand of the layer's product in its scheme, kept where it lasts longer than a forward; else None."""

    def freeze(self, adapters: Mapping[str, LayerAdapter], *, files: WeightsOnDisk | None = None) -> None:
        """Compute from now on with adapters beside the layer's modules, whose own weights do not change any more.

        adapters: by the names of modules, of those of this layer that have one.  files: what the weights are read from
        where they are needed, so that the modules are left without them; None, they stay in the modules.
        """
        self._adapters, self._place = dict(adapters), WeightPlace.FROZEN
        if files is not None:
            self._place, self._files = WeightPlace.IN_FILES, files
            for name, part in self._parts:
                files.take_out(name, part)

    def compute_in(self, scheme: Scheme) -> None:
        """Compute in this scheme from the next forward on."""
        if scheme is not self.scheme or self._place is WeightPlace.TRAINED:
            self._operand = None
        self.scheme = scheme
        self.sent = {}

    def forget(self) -> None:
        """Forget what was made of the weights that are trained: they have changed."""
        self.compute_in(self.scheme)

    def note_sent(self, digests: Mapping[str, str]) -> None:
        """Note what the engines got. digests: of a whole update, by name."""
        matrices = [matrix for name in self._adapters for matrix in adapter_names(name)]
        weights = [f"{name}.weight" for name, _ in self._parts]
        if self._place is WeightPlace.FROZEN:  # not every update brings them
            weights = [name for name in weights if name in digests]
        elif self._place is WeightPlace.IN_FILES:  # where they are compared when they are read
            weights = []
        self.sent = {name: digests.get(name, "none") for name in (*weights, *matrices)}

    def _check_sent(self) -> None:
        ours = {f"{name}.weight": part.weight for name, part in self._parts}
        for name, adapter in self._adapters.items():
            ours |= dict(zip(adapter_names(name), (adapter.a.weight, adapter.b.weight), strict=True))
        for name, theirs in self.sent.items():
            if (computed := digest(ours[name])) != theirs:
                raise SyncError(f"{name}: the trainer computes with digest {computed}, the engines got {theirs}")
        self.sent = {}

    def _weights(self, x: Tensor) -> list[Tensor]:
        """Return the weight of each module, for x's device."""
        if self._place is WeightPlace.IN_FILES:
            return [self._files.read(f"{name}.weight").to(x.device) for name, _ in self._parts]
        return [part.weight for _, part in self._parts]

    def __call__(self, x: Tensor, *, gated: bool = False) -> Tensor:
        """Return [T, N] of [T, K]; gated: of [T, 2K]. Raises NumericsError for a weight that is not finite, and for
        an activation where gradients are needed; SyncError for a weight that the engines have otherwise."""
        if self.sent:
            self._check_sent()
        y_TN = self._of_base(x, gated=gated)
        return y_TN + self._of_adapters(x, gated=gated) if self._adapters else y_TN

    def _of_adapters(self, x: Tensor, *, gated: bool) -> Tensor:
        parts: list[AdapterPart | int] = []
        for name, part in self._parts:
            adapter = self._adapters.get(name)
            parts.append(part.out_features if adapter is None else adapter.as_engine(name, smoothing=self._smoothing))
        return adapter_product(x, parts, gated=gated)

    def _of_base(self, x: Tensor, *, gated: bool) -> Tensor:
        biases = [part.bias for _, part in self._parts if part.bias is not None]
        bias_N = torch.cat(biases) if biases else None
        if bias_N is not None and self._factor_N is not None:
            bias_N = bias_N * self._factor_N.to(bias_N)
        if not self.scheme.quantised:
            weight_NK = self._operand if isinstance(self._operand, Tensor) else self._folded(x)
            if self._place is WeightPlace.IN_FILES:
                self._operand = weight_NK
            return linear(silu_and_mul(x) if gated else x, weight_NK, bias_N)
        trained = self._weights(x) if self._place is WeightPlace.TRAINED else []
        if not isinstance(self._operand, EngineWeight):
            self._operand = self._quantised(trained or self._weights(x))
        return self._operand(x, trained, bias_N, gated=gated)

    def _folded(self, x: Tensor) -> Tensor:
        """Return [N, K] of all modules with smoothing, through which gradients pass, for x's device."""
        weights = self._weights(x)
        weight_NK = torch.cat(weights) if len(weights) > 1 else weights[0]  # a copy would be kept for backward
        if self._factor_K is not None:
            weight_NK = weight_NK * self._factor_K.to(weight_NK)
        return weight_NK if self._factor_N is None else weight_NK * self._factor_N.to(weight_NK)[:, None]

    def _quantised(self, weights: Sequence[Tensor]) -> EngineWeight:
        """Quantise the weights of all modules. Raises NumericsError."""
        folded = [
            fold(f"{name}.weight", weight.detach(), smoothing=self._smoothing)
            for (name, _), weight in zip(self._parts, weights, strict=True)
        ]
        return EngineWeight.from_linears(
            folded,
            name=self.name,
            scheme=self.scheme,
            factor_K=self._factor_K,
            factor_N=self._factor_N,
            fp8_backward=self.fp8_backward,
            keeps_dequantised=self.keeps_dequantised,
        )

    def alone(self, x: Tensor) -> Tensor:
        """Return [..., N] of what transformers gives, for transformers: smoothing, powers of two, is put into it and
        taken out again here."""
        if self._factor_K is not None:
            x = x / self._factor_K.to(x)
        y = self(x.flatten(0, -2)).unflatten(0, x.shape[:-1])
        return y if self._factor_N is None else y / self._factor_N.to(y)


def _row_factor_of(parts: Sequence[tuple[str, nn.Linear]], *, smoothing: Smoothing) -> Tensor | None:
    """Return [N] of all modules that the engine fuses; None where smoothing leaves their rows."""
    factors = [(smoothing.row_factor_of(f"{name}.weight"), linear.out_features) for name, linear in parts]
    if all(factor_N is None for factor_N, _ in factors):
        return None
    return torch.cat([torch.ones(rows) if factor_N is None else factor_N for factor_N, rows in factors])


def put_linears_in(
    model: nn.Module, *, units: Sequence[Unit], smoothing: Smoothing, keeps_dequantised: bool
) -> Iterator[EngineLayer]:
    """Put in the engine's linear layers, module by module: scales are of rows, so that each is as in the engine's
    fused layer."""
    for place, layer in enumerate(model.model.layers):
        prefix = f"model.layers.{place}."
        for member, unit in ((member, each) for each in units for member in each.members):
            linear = layer.get_submodule(member)
            name, parts = prefix + (unit.fused or member), [(prefix + member, linear)]
            engine_layer = EngineLayer(
                name, parts, smoothing=smoothing, fp8_backward=False, keeps_dequantised=keeps_dequantised
            )
            engine_layer.part_names = [prefix + each for each in unit.members]
            linear.forward = engine_layer.alone
            yield engine_layer


class DecoderLayer:
    """Forward of one decoder layer of Llama's kind, in place of its `forward`."""

    def __init__(
        self,
        layer: nn.Module,
        *,
        prefix: str,
        units: Sequence[Unit],
        smoothing: Smoothing,
        fp8_backward: bool,
        keeps_dequantised: bool,
    ) -> None:
        self.layers = [
            EngineLayer(
                prefix + (unit.fused or unit.members[0]),
                [(prefix + member, layer.get_submodule(member)) for member in unit.members],
                smoothing=smoothing,
                fp8_backward=fp8_backward,
                keeps_dequantised=keeps_dequantised,
            )
            for unit in units
        ]
        self._qkv, self._o, self._gate_up, self._down = self.layers
        self._attention = f"{prefix}self_attn.attn"
        self._norms = [
            (prefix + name, layer.get_submodule(name), smoothing.row_factor_of(f"{prefix}{name}.weight"))
            for name in ("input_layernorm", "post_attention_layernorm")
        ]
        self._head_norms = [getattr(layer.self_attn, name, None) for name in ("q_norm", "k_norm")]

    def __call__(self, x: Tensor, residual: Tensor | None, batch: PackedRow) -> tuple[Tensor, Tensor]:
        """Return ([T, H], residual [T, H]): their sum is what transformers' layer returns."""
        heads, kv_heads, size = batch.heads, batch.kv_heads, batch.head_dim
        x, residual = self._norm(0, x, residual, batch)
        qkv = batch.note(self._qkv.name, self._qkv(x)).view(len(x), -1, size)
        q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
        for place, norm in enumerate(self._head_norms):
            if norm is not None:
                normed = head_norm((q, k)[place], norm.weight, eps=norm.variance_epsilon)
                q, k = (normed, k) if place == 0 else (q, normed)
        q, k = batch.rotate(torch.cat([q, k], dim=1)).split([heads, kv_heads], dim=1)
        attended = batch.note(self._attention, batch.attend(q.contiguous(), k.contiguous(), v.contiguous()))
        x = batch.note(self._o.name, self._o(attended.reshape(len(x), -1)))
        x, residual = self._norm(1, x, residual, batch)
        gate_up = batch.note(self._gate_up.name, self._gate_up(x))
        return batch.note(self._down.name, self._down(gate_up, gated=True)), residual

    def _norm(self, place: int, x: Tensor, residual: Tensor | None, batch: PackedRow) -> tuple[Tensor, Tensor]:
        name, norm, factor_H = self._norms[place]
        weight_H = norm.weight if factor_H is None else norm.weight * factor_H.to(norm.weight)
        x, residual = add_norm(x, residual, weight_H, eps=norm.variance_epsilon)
        return batch.note(name, x), residual


class RolloutForward:
    """Forward of one model, computed as the rollouts' is. `forget` after each change of its weights. Where it `keeps`,
    log-probs of the forwards with gradients are collected from `note_sent` until the weights change
    (trainer/update_log_probs.py)."""

    def __init__(
        self,
        model: nn.Module,
        *,
        quantisation: Quantisation,
        num_tokens: int,
        fp8_backward: bool = False,
        keeps: bool = False,
        keeps_dequantised: bool = False,
        linears_alone: bool = False,
    ) -> None:
        """model: a causal language model of transformers, before FSDP. Raises TrainingError where it is not known.

        num_tokens: of the tokenizer; verl has engines never sample what a larger vocabulary has beyond it.
        fp8_backward, keeps_dequantised: as EngineLayer.
        keeps: whether updates are the proof that log-probs are the rollouts'.
        linears_alone: leave all but the quantised layers as transformers has it, for comparisons.
        """
        self._keeps = keeps
        profile = Path(quantisation.profile) if quantisation.profile else None
        smoothing = Smoothing() if profile is None else load_smoothing(profile)
        self._quantisation = quantisation
        self._num_tokens = num_tokens
        self._kept_layers = () if profile is None else kept_layers(profile)
        architecture = type(model).__name__
        family = FAMILIES.get(architecture)
        if family is None or not family.one_flow:
            raise TrainingError(f"trainer.forward: rollout does not know {architecture}", hint=_HINT)
        self._linears: list[EngineLayer] = []
        if linears_alone:
            how = {"smoothing": smoothing, "keeps_dequantised": keeps_dequantised}
            self._linears = [*put_linears_in(model, units=family.dense, **how)]
            self.follow(AS_PLANNED)
            return
        self._config = model.config
        if why := beyond_one_flow(model.config.to_dict()):
            raise TrainingError(f"trainer.forward: rollout does not know {why}", hint=_HINT)
        self._cos_sin = _cos_sin_of(model)
        layers = [
            DecoderLayer(
                layer,
                prefix=f"model.layers.{place}.",
                units=family.dense,
                smoothing=smoothing,
                fp8_backward=fp8_backward,
                keeps_dequantised=keeps_dequantised,
            )
            for place, layer in enumerate(model.model.layers)
        ]
        for mine, layer in zip(layers, model.model.layers, strict=True):
            layer.forward = mine.__call__
            self._linears += mine.layers
        head = model.lm_head
        head.forward = lambda x: linear(x, head.weight, head.bias)
        model.forward = functools.partial(self, model)
        self.follow(AS_PLANNED)

    def follow(self, precision: Precision) -> None:
        """Compute from now on as an engine with the plan's settings does after an update with this precision."""
        quantisation = quantisation_at(self._quantisation, precision)
        UPDATE_LOG_PROBS.end()
        ignore = (*quantisation.ignore, *self._kept_layers)
        for layer in self.linears():
            kept = layer.name in ignore or all(is_ignored(name, ignore) for name in layer.part_names)
            layer.compute_in(Scheme.BF16 if kept else quantisation.scheme)

    def note_sent(self, manifest: Manifest) -> None:
        """Note what was sent: the engines have it now, and so has this model until its weights change."""
        digests = {one.name: one.digest for one in manifest.records}
        for layer in self.linears():
            layer.note_sent(digests)
        UPDATE_LOG_PROBS.begin(is_open=self._keeps)

    def linears(self) -> list[EngineLayer]:
        return self._linears

    def add_adapters(self, model: nn.Module, *, engine_rank: int, files: WeightsOnDisk) -> None:
        """Compute with the adapters that were put into the model, beside frozen weights. Those of layers that the plan
        quantises are taken out of the model; they stay in its files.

        model: as PEFT returns it.  engine_rank: as LayerAdapter's.
        """
        modules = {name.removeprefix("base_model.model."): module for name, module in model.named_modules()}
        for layer in self.linears():
            adapters = {}
            for name in layer.part_names:
                module = modules[name]
                if isinstance(module, LoraLayer):
                    matrices = (each["default"] for each in (module.lora_A, module.lora_B))
                    adapters[name] = LayerAdapter(*matrices, module.scaling["default"], engine_rank)
            layer.freeze(adapters, files=files if layer.scheme.quantised else None)

    @property
    def is_emulated(self) -> bool:
        return self._quantisation.emulated

    def forget(self) -> None:
        UPDATE_LOG_PROBS.end()
        for layer in self.linears():
            layer.forget()

    def __call__(
        self,
        model: nn.Module,
        *,
        input_ids: Tensor,
        position_ids: Tensor,
        shift_labels: Tensor,
        temperature: float,
        logits_to_keep: Tensor | None = None,
        support: RowSupport | None = None,
        trace: Note | None = None,
        **_: Any,
    ) -> CausalLMOutputForPPO:
        """Return log-probs [1, R] of `shift_labels`, in nats, and, where no gradient is needed or they are
        collected, the entropy [1, R], which has none.

        input_ids: [1, T].  position_ids: [1, T], from 0 at each sequence's start; segments may share a prefix
        (trainer/attention.py).  logits_to_keep: [R] int64, places of the tokens that have logits, none of them twice;
        None, all T.  shift_labels: [1, R], or [1, R, L] as in log_probs_of.  support: of those R tokens.
        """
        config, positions_T = self._config, position_ids[0]
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        batch = PackedRow(
            positions_T,
            heads=heads,
            kv_heads=config.num_key_value_heads,
            head_dim=size,
            cos_sin=self._cos_sin(positions_T.device),
            scale=size**-0.5,
            window=_window_of(config),
            trace=trace,
        )
        x: Tensor = batch.note("model.embed_tokens", model.model.embed_tokens(input_ids)[0])
        residual = None
        for layer in model.model.layers:
            x, residual = layer(x, residual, batch)
        if logits_to_keep is not None:
            x, residual = x.index_select(0, logits_to_keep), residual.index_select(0, logits_to_keep)
        norm = model.model.norm
        x, _ = add_norm(x, residual, norm.weight, eps=norm.variance_epsilon)
        logits_TV = model.lm_head(batch.note("model.norm", x))
        batch.note(HEAD, logits_TV[-1:])
        log_probs, entropy_T = log_probs_of(
            logits_TV,
            shift_labels[0],
            num_tokens=self._num_tokens,
            temperature=temperature,
            with_entropy=UPDATE_LOG_PROBS.is_open or not torch.is_grad_enabled(),
            support=support,
        )
        return CausalLMOutputForPPO(log_probs=log_probs[None], entropy=None if entropy_T is None else entropy_T[None])


def _window_of(config: PreTrainedConfig) -> int | None:
    """Return how many tokens a token sees at most, in vLLM."""
    slides = all(each == "sliding_attention" for each in getattr(config, "layer_types", None) or ())
    return getattr(config, "sliding_window", None) or None if slides else None


_PRESENT: list[RolloutForward] = []  # of this process: verl builds the model, and another of its objects sends weights


def put_in(flow: RolloutForward) -> RolloutForward:
    """Register the forward that follows what is sent from this process."""
    _PRESENT[:] = [flow]
    return flow


def follow_engines(precision: Precision) -> None:
    """Follow the precision of the engines beside this process from this update on. Nothing where the forward is
    BF16."""
    for flow in _PRESENT:
        flow.follow(precision)


def note_sent(manifest: Manifest) -> None:
    """Note what was sent, as RolloutForward.note_sent does. Nothing where the forward is BF16."""
    for flow in _PRESENT:
        flow.note_sent(manifest)


def backward() -> str:
    """Return what this process computes gradients of quantised layers in, for the attestation."""
    schemes = {
        f"{Scheme.FP8_BLOCK}{', emulated' if flow.is_emulated else ''}" if layer.fp8_backward else str(Scheme.BF16)
        for flow in _PRESENT
        for layer in flow.linears()
    }
    return ", ".join(sorted(schemes))


def quantised_layers() -> list[str]:
    """Return what is quantised in this process now, by the engine's names."""
    names = (layer.name for flow in _PRESENT for layer in flow.linears() if layer.scheme.quantised)
    return [*dict.fromkeys(names)]


def _cos_sin_of(model: nn.Module) -> Callable[[torch.device], Tensor]:
    """Return a function that gives [positions, D] BF16, as vLLM has it: computed on the device that it is for."""
    rotary, config = model.model.rotary_emb, model.config
    kind = config.rope_parameters["rope_type"]
    make: Callable[..., Any] = rotary.compute_default_rope_parameters
    make = make if kind == DEFAULT_ROPE else ROPE_INIT_FUNCTIONS[kind]

    @functools.cache
    def cos_sin(device: torch.device) -> Tensor:
        inverse, scaling = make(config, device)
        positions = torch.arange(config.max_position_embeddings, dtype=torch.float32, device=device)
        angles = torch.outer(positions, inverse.float())
        return (torch.cat([angles.cos(), angles.sin()], dim=-1) * scaling).to(torch.bfloat16)

    return cos_sin
