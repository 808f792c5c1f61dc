"""One decoder layer at a time: real transformers modules whose weights come from safetensors when they are needed.

The model is built without memory (torch's meta device). What its layers are called with (masks, rotary embeddings) is
what the model's own forward calls them with; only the weights come and go. A ledger counts the bytes of every tensor
that was handed out until it is really gone.

Legend: B sequences of T tokens each, H the width of the residual stream, V words.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from appliance.errors import EngineError
from appliance.quant.checkpoint import Checkpoint
from appliance.terms.families import EXPERT_PARTS, EXPERTS, FAMILIES

_FAMILIES = {family.model_type: family for family in FAMILIES.values()}


@dataclass(frozen=True)
class LayerCall:
    """How the model's own forward calls one decoder layer for a batch."""

    kwargs: dict[str, Any] = field(repr=False)


class _Recorder(nn.Module):
    """Stands where a decoder layer stood and notes how it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[LayerCall] = []

    def forward(self, hidden_BTH: Tensor, **kwargs: Any) -> Tensor:
        self.calls.append(LayerCall(kwargs))
        return hidden_BTH


class StreamedModel:
    """A causal language model of a known family, without its weights.

    Raises EngineError for a family that this program does not know.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.config = _config(checkpoint.folder)
        self.family = _FAMILIES[self.config.model_type]
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.config, dtype=torch.bfloat16, attn_implementation="sdpa")
        self._model = model.model.eval()
        self._layers = list(self._model.layers)
        self._norm = self._model.norm
        self._model.rotary_emb = type(self._model.rotary_emb)(config=self._model.config)  # has buffers, no weights
        self.head_name = "lm_head.weight" if "lm_head.weight" in checkpoint else "model.embed_tokens.weight"

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """[B, T, H] BF16: the embeddings, read in bands of rows."""
        flat = tokens_BT.flatten()
        hidden = torch.empty(flat.shape[0], self.config.hidden_size, dtype=torch.bfloat16)
        for start, rows in self.checkpoint.rows("model.embed_tokens.weight"):
            inside = (flat >= start) & (flat < start + rows.shape[0])
            hidden[inside] = rows[flat[inside] - start]
        return hidden.view(*tokens_BT.shape, -1)

    def layer_calls(self, hidden_BTH: Tensor) -> list[LayerCall]:
        """One per decoder layer: what the model's own forward gives it for a batch of this shape."""
        recorders = [_Recorder() for _ in self._layers]
        self._model.layers = nn.ModuleList(recorders)
        self._model.norm = nn.Identity()
        with torch.no_grad():
            self._model(inputs_embeds=hidden_BTH, use_cache=False)
        return [recorder.calls[0] for recorder in recorders]

    @contextmanager
    def layer(self, index: int) -> Iterator[nn.Module]:
        """A decoder layer with its weights, in BF16, while the block lasts."""
        layer, prefix = self._layers[index], f"model.layers.{index}."
        for name, parameter in list(layer.named_parameters()):
            value = self._parameter(prefix + name, shape=tuple(parameter.shape))
            _place(layer, name, self.checkpoint.ledger.enter(nn.Parameter(value, requires_grad=False)))
            del value
        try:
            yield layer
        finally:
            for name, parameter in list(layer.named_parameters()):
                _place(layer, name, nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False))

    def final_norm(self, hidden_BTH: Tensor) -> Tensor:
        weight = self._parameter("model.norm.weight", shape=tuple(self._norm.weight.shape))
        _place(self._norm, "weight", self.checkpoint.ledger.enter(nn.Parameter(weight, requires_grad=False)))
        with torch.no_grad():
            return self._norm(hidden_BTH)

    def layer_bytes(self, index: int) -> int:
        return sum(parameter.numel() * 2 for parameter in self._layers[index].parameters())

    def _parameter(self, name: str, *, shape: tuple[int, ...]) -> Tensor:
        """A parameter of the module tree in BF16, out of the checkpoint's own names: experts are stored one by one."""
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


def _config(folder: Path) -> PreTrainedConfig:
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise EngineError(f"{folder}: config.json cannot be read: {error}") from error
    if config.model_type not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        raise EngineError(f"{folder}: a profile of `{config.model_type}` cannot be made", hint=f"known are {known}")
    return config


def _place(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, last = name.rpartition(".")
    module.get_submodule(path)._parameters[last] = parameter
