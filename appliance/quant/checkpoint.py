"""A model's folder of safetensors, read by name, and its decoder layers, one at a time.

The model is built without memory (torch's meta device). What its layers are called with (masks, rotary embeddings) is
what the model's own forward calls them with; only the weights come and go. What a class does to embeddings and logits,
such as multiplying them, is computed by the class, too. A ledger counts the bytes of every tensor that was handed out
until it is really gone.

Legend: B sequences of T tokens each, H the width of the residual stream, M rows of logits, R words.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from appliance.errors import EngineError, first_line
from appliance.quant.files import NotSmoothed
from appliance.quant.layer_units import find_units
from appliance.terms.families import EXPERT_PARTS, EXPERTS, FAMILIES, Family, Unit, unlisted

_INDEX = "model.safetensors.index.json"
_ROWS = 4096  # of embedding and head at a time
_FAMILIES = {family.model_type: family for family in FAMILIES.values()}
_PARTS = ("embed_tokens", "layers", "norm", "rotary_emb")  # of a decoder
_TRIED_TOKENS = 12  # of the sequence by which units are found
_HINT = "set quantization.profile: none"
_HINT_CODE = f"{_HINT}, or, where the model needs its own code and you have read it, model.trust_remote_code: true"


@dataclass
class Ledger:
    """Counter of the bytes of tensors that are alive now, and of the most that were."""

    alive_bytes: int = 0
    peak_bytes: int = 0

    def enter(self, tensor: Tensor) -> Tensor:
        """Count a tensor until its Python object is gone. Returns it."""
        size = tensor.numel() * tensor.element_size()
        self.alive_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.alive_bytes)
        weakref.finalize(tensor, self._leave, size)
        return tensor

    def _leave(self, size: int) -> None:
        self.alive_bytes -= size


class ModelTensors:
    """The safetensors of a model's folder, read by name, a tensor or some of its rows at a time. Raises EngineError
    when the folder has no safetensors, or lacks a tensor that is asked for."""

    def __init__(self, folder: Path, *, ledger: Ledger | None = None) -> None:
        self.folder = folder
        self.ledger = ledger or Ledger()
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise EngineError(f"{folder}: no safetensors", hint="name a folder with config.json and *.safetensors")
        index = folder / _INDEX
        if index.is_file():
            files = [folder / name for name in _indexed(index)]
        try:
            opened = [safe_open(file, framework="pt") for file in files]
        except (SafetensorError, OSError) as error:
            raise EngineError(f"{folder}: safetensors that cannot be read: {error}") from error
        self._place = {name: each for each in opened for name in each.keys()}  # noqa: SIM118

    def __contains__(self, name: str) -> bool:
        return name in self._place

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._place))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file(name).get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        """Read a tensor as stored."""
        return self._file(name).get_tensor(name)

    def rows(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """Yield (first row, some rows in BF16) over the whole matrix, each part counted while it is alive."""
        stored = self._file(name).get_slice(name)
        for start in range(0, stored.get_shape()[0], _ROWS):
            yield start, self.ledger.enter(stored[start : start + _ROWS].to(torch.bfloat16))

    def _file(self, name: str) -> Any:
        if name not in self._place:
            raise EngineError(f"{self.folder}: the checkpoint has no {name}")
        return self._place[name]


def _indexed(index: Path) -> list[str]:
    """Return the files that an index names: beside it, nowhere else. Raises EngineError."""
    try:
        file_names = set(json.loads(index.read_text())["weight_map"].values())
        if outside := sorted(name for name in file_names if Path(name).name != name or name in ("", "..")):
            raise EngineError(f"{index}: names a file outside of its folder: {outside[0]}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise EngineError(f"{index}: cannot be read: {type(error).__name__}: {error}") from error
    return sorted(file_names)


class _Recorder(nn.Module):
    """Replaces a decoder layer and records how it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Tensor, dict[str, Any]]] = []

    def forward(self, hidden_BTH: Tensor, **kwargs: Any) -> Tensor:
        self.calls.append((hidden_BTH, kwargs))
        return hidden_BTH


class _PassThroughDecoder(nn.Module):
    """Replaces a decoder, and gives what it gets."""

    def forward(self, inputs_embeds: Tensor, **_: Any) -> Any:
        from transformers.modeling_outputs import MoeModelOutputWithPast  # which has the fields of all others

        return MoeModelOutputWithPast(last_hidden_state=inputs_embeds)


class _Streamed(nn.Module):
    """Replaces a decoder layer, and has its weights only while it is called."""

    def __init__(self, model: StreamedModel, index: int) -> None:
        super().__init__()
        self._model_and_index = (model, index)

    def forward(self, hidden_BTH: Tensor, **kwargs: Any) -> Tensor:
        model, index = self._model_and_index
        with model.layer(index) as layer:
            return layer(hidden_BTH, **kwargs)


@dataclass(frozen=True)
class _Built:
    """A model of transformers without memory, or the reason why its layers cannot be run one by one."""

    model: Any
    model_type: str
    family: Family | None
    architecture: str
    """Class of a model whose family has no row in the list; empty for a listed family."""
    problem: str


def _build(folder: Path, *, trust_remote_code: bool) -> _Built:
    """Build the model of a folder. trust_remote_code: as StreamedModel's.  Raises EngineError for a configuration that
    cannot be read, or needs code that must not run."""
    from transformers import AutoConfig, AutoModelForCausalLM  # seconds that reading a checkpoint does not need

    trust = {"trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, **trust)
    except Exception as error:  # the boundary of what a config.json may hold, and of code that may be the model's own
        reason = f"config.json cannot be read: {type(error).__name__}: {first_line(error)}"
        raise EngineError(f"{folder}: {reason}", hint=_HINT_CODE) from error
    architectures = config.architectures or [""]
    family = None if (architecture := unlisted(architectures)) else _FAMILIES.get(config.model_type)
    # Of attentions of other families only transformers' own, step by step, is known to compute all that they ask
    # for: its `sdpa` leaves out a soft cap.
    attention = "sdpa" if family else "eager"
    model: Any = None
    try:
        with torch.device("meta"):
            settings = {"dtype": torch.bfloat16, "attn_implementation": attention}
            model = AutoModelForCausalLM.from_config(config, **settings, **trust)
        problem = _other_structure(model)
    except Exception as error:  # the boundary of code that may be the model's own, as above
        problem = f"transformers cannot build it: {type(error).__name__}: {first_line(error)}"
    return _Built(model, config.model_type, family=family, architecture=architecture, problem=problem)


def why_unprofiled(folder: Path, *, is_measured: bool, trust_remote_code: bool = False) -> tuple[str, str]:
    """Return (class, reason) of a model without a row in the list of families whose layers cannot be run one by one,
    so that nothing is measured for its profile; empty texts of every other.

    is_measured: whether the profile has to be measured, so that such a model is refused.  trust_remote_code: as
    StreamedModel's.
    Raises EngineError for what is refused, for a configuration that cannot be read, and for a checkpoint that lacks a
    weight.
    """
    built = _build(folder, trust_remote_code=trust_remote_code)
    if built.family:
        return "", ""
    problem = built.problem
    if not problem:
        problem = _problem_of_layers(StreamedModel(ModelTensors(folder), trust_remote_code=trust_remote_code))
    if problem and is_measured:
        raise _no_profile(folder, built.model_type, problem)
    return (built.architecture, problem) if problem else ("", "")


def _no_profile(folder: Path, model_type: str, problem: str) -> EngineError:
    return EngineError(f"{folder}: a profile of `{model_type}` cannot be made: {problem}", hint=_HINT)


def _problem_of_layers(model: StreamedModel) -> str:
    """Find the units of the first layer and of the last one, which may be of another kind. Returns why they cannot be
    run as a calibration runs them, or an empty text."""
    try:
        for index in sorted({0, model.num_layers - 1}):
            with model.layer(index) as layer:
                model.units(index, layer)
    except EngineError:  # of the checkpoint
        raise
    except Exception as error:  # the boundary of what a class of transformers computes
        return f"its layers cannot be run one by one: {type(error).__name__}: {first_line(error)}"
    return ""


class StreamedModel:
    """A causal language model without its weights: a decoder of layers between embeddings and a head."""

    architecture: str
    """Class of a model whose family has no row in the list; empty for a listed family."""
    not_smoothed: tuple[NotSmoothed, ...]
    """Norms and linear layers that smoothing cannot divide, of the layers whose units were found so far."""

    def __init__(
        self, checkpoint: ModelTensors, *, trust_remote_code: bool = False, beat: Callable[[], None] = lambda: None
    ) -> None:
        """Read the model's configuration.

        trust_remote_code: whether code that comes with the model may run.
        beat: called whenever a layer's weights are in memory, as a sign of life.
        Raises EngineError for a model of another structure.
        """
        built = _build(checkpoint.folder, trust_remote_code=trust_remote_code)
        if built.problem:
            raise _no_profile(checkpoint.folder, built.model_type, built.problem)
        self.checkpoint = checkpoint
        self._beat = beat
        self._family, self.architecture, model = built.family, built.architecture, built.model
        self._model = model.model.eval()
        self._layers = list(self._model.layers)
        self._norm = self._model.norm
        self._embedding = self._model.embed_tokens
        self._model.rotary_emb = type(self._model.rotary_emb)(config=self._model.config)  # has buffers, no weights
        self._embedding.padding_idx = None  # `embed` gives it the rows of some words alone
        _fill_buffers(self._model, self._embedding)
        self._head = model  # now of logits alone
        self._head.model, self._head.lm_head = _PassThroughDecoder(), nn.Identity()
        self._units_by_layer: dict[int, tuple[Unit, ...]] = {}
        self.not_smoothed = ()
        self.head_name = "lm_head.weight" if "lm_head.weight" in checkpoint else "model.embed_tokens.weight"

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def active_experts(self) -> float:
        """The share of a layer's experts that multiply a token, 0..1; 1 in a dense model."""
        experts = getattr(self._model.config, "num_experts", 0)
        return self._model.config.num_experts_per_tok / experts if experts else 1.0

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """Return the embeddings, [B, T, H] BF16, read in bands of rows."""
        word_U, place_BT = tokens_BT.unique(return_inverse=True)
        row_UH = torch.empty(len(word_U), self._embedding.embedding_dim, dtype=torch.bfloat16)
        for start, rows in self.checkpoint.rows("model.embed_tokens.weight"):
            inside = (word_U >= start) & (word_U < start + rows.shape[0])
            row_UH[inside] = rows[word_U[inside] - start]
        place_parameter(self._embedding, "weight", nn.Parameter(row_UH, requires_grad=False))
        return self._embedding(place_BT)

    def layer_calls(self, embedded_BTH: Tensor) -> tuple[Tensor, list[dict[str, Any]]]:
        """Return what the model's own forward calls the decoder layers with: the input of the first, [B, T, H], and the
        keywords of each for a batch of this shape. embedded_BTH: as `embed` returns it."""
        recorders = [_Recorder() for _ in self._layers]
        self._model.layers = nn.ModuleList(recorders)
        self._model.norm = nn.Identity()
        with torch.no_grad():
            self._model(inputs_embeds=embedded_BTH, use_cache=False)
        return recorders[0].calls[0][0], [recorder.calls[0][1] for recorder in recorders]

    def logits(self, product_MR: Tensor) -> Tensor:
        """Return the logits [M, R] that the model's class makes of products of the last norm's output and rows of the
        head: the products themselves, a multiple, or values below a cap."""
        return self._head(inputs_embeds=product_MR[None]).logits[0]

    def units(self, index: int, layer: nn.Module) -> tuple[Unit, ...]:
        """Return the units of a decoder layer: by its family's row in the list, or found by trying. layer: with its
        weights. What cannot be smoothed is added to `not_smoothed`."""
        if self._family:
            return self._family.units(name for name, _ in layer.named_parameters())
        if index not in self._units_by_layer:
            generator = torch.Generator().manual_seed(index)
            noise_BTH = torch.randn(1, _TRIED_TOKENS, self._embedding.embedding_dim, generator=generator)
            hidden_BTH, calls = self.layer_calls(noise_BTH.bfloat16())
            layer_units = find_units(layer, hidden_BTH=hidden_BTH, call=calls[index])
            self._units_by_layer[index] = layer_units.units
            reasons = layer_units.not_smoothed.items()
            self.not_smoothed += tuple(NotSmoothed(f"model.layers.{index}.{name}", why) for name, why in reasons)
        return self._units_by_layer[index]

    def new_cache(self) -> Any:
        """Make an empty cache of keys and values, for `run`."""
        from transformers import DynamicCache

        return DynamicCache(config=self._model.config)

    def run(self, hidden_BTH: Tensor, *, mask_BT: Tensor, position_BT: Tensor, cache: Any) -> Tensor:
        """Run the whole model, with one layer in memory at a time. Returns [B, T, H] after the last norm.

        hidden_BTH: embeddings of tokens that follow those in the cache, which they join.  mask_BT: int64, of the
        tokens in the cache and of these, 0 on padding.  position_BT: int64, of these alone.
        """
        self._model.layers = nn.ModuleList(_Streamed(self, index) for index in range(self.num_layers))
        self._model.norm = nn.Identity()
        with torch.no_grad():
            output = self._model(
                inputs_embeds=hidden_BTH,
                attention_mask=mask_BT,
                position_ids=position_BT,
                past_key_values=cache,
                use_cache=True,
            )
        return self.final_norm(output.last_hidden_state)

    @contextmanager
    def layer(self, index: int) -> Iterator[nn.Module]:
        """Load a decoder layer's weights, in BF16, while the block lasts."""
        layer, prefix = self._layers[index], f"model.layers.{index}."
        for name, parameter in list(layer.named_parameters()):
            value = self._parameter(prefix + name, shape=tuple(parameter.shape))
            place_parameter(layer, name, self.checkpoint.ledger.enter(nn.Parameter(value, requires_grad=False)))
            del value
        self._beat()
        try:
            yield layer
        finally:
            for name, parameter in list(layer.named_parameters()):
                place_parameter(
                    layer, name, nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
                )

    @torch.no_grad()
    def final_norm(self, hidden_BTH: Tensor) -> Tensor:
        return self._with_norm()(hidden_BTH)

    def norm_gradient(self, hidden_MH: Tensor, gradient_DMH: Tensor) -> Tensor:
        """Return [D, M, H], the gradients at the last norm's input. gradient_DMH: D of them, at its output."""
        hidden_MH = hidden_MH.detach().requires_grad_()
        with torch.enable_grad():
            output_MH = self._with_norm()(hidden_MH)
        gradients_DMH = gradient_DMH.to(output_MH.dtype)
        backs = [torch.autograd.grad(output_MH, hidden_MH, each, retain_graph=True)[0] for each in gradients_DMH]
        return torch.stack(backs)

    def _with_norm(self) -> nn.Module:
        for name, parameter in list(self._norm.named_parameters()):
            value = self._parameter(f"model.norm.{name}", shape=tuple(parameter.shape))
            place_parameter(self._norm, name, self.checkpoint.ledger.enter(nn.Parameter(value, requires_grad=False)))
        return self._norm

    @property
    def largest_layer_bytes(self) -> int:
        return max(sum(2 * parameter.numel() for parameter in layer.parameters()) for layer in self._layers)

    def _parameter(self, name: str, *, shape: tuple[int, ...]) -> Tensor:
        """Return a parameter of the module tree in BF16, out of the checkpoint's own names: experts are stored one by
        one."""
        if name not in self.checkpoint and ".experts." in name:
            value = self._experts(name, shape=shape)
        else:
            value = self.checkpoint.read(name).to(torch.bfloat16)
        if tuple(value.shape) != shape:
            raise EngineError(f"{self.checkpoint.folder}: {name} is {list(value.shape)}, the config says {list(shape)}")
        return value.contiguous()

    def _experts(self, name: str, *, shape: tuple[int, ...]) -> Tensor:
        prefix, _, kind = name.rpartition(".")
        parts = EXPERT_PARTS[f"{EXPERTS}.{kind}"]
        fused = torch.empty(shape, dtype=torch.bfloat16)
        for expert in range(shape[0]):
            read = [self.checkpoint.read(f"{prefix}.{expert}.{part}.weight") for part in parts]
            fused[expert] = torch.cat(read) if len(read) > 1 else read[0]
        return fused


def _other_structure(model: nn.Module) -> str:
    """Say why a model of transformers is no decoder between embeddings and a head, by its modules; or an empty text."""
    decoder, name = getattr(model, "model", None), type(model).__name__
    if missing := [part for part in _PARTS if not hasattr(decoder, part)]:
        return f"transformers' {name} has no `model.{missing[0]}`"
    head = getattr(model, "lm_head", None)
    if not isinstance(head, nn.Linear) or head.bias is not None:
        return f"the `lm_head` of transformers' {name} is not a linear layer without a bias"
    return ""


@torch.no_grad()
def _fill_buffers(model: Any, module: nn.Module) -> None:
    """Give a module that was built without memory its buffers again, by the model's own way to initialise it. Its
    parameters stay without memory."""
    for name, buffer in list(module.named_buffers(recurse=False)):
        module.register_buffer(name, torch.empty_like(buffer, device="cpu"), persistent=False)
    model._init_weights(module)


def place_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Make a parameter the module's own under that name, which may be of a module below."""
    path, _, last = name.rpartition(".")
    module.get_submodule(path)._parameters[last] = parameter
