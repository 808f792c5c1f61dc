"""Checkpoints of tiny models with one fault each: what downloads, conversions and hands do to them."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

TABLE = Path(__file__).resolve().parents[1] / "docs" / "weights.md"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# Of each kind one: a whole layer, the first, a middle and the last part of a fused one, experts, what is no matrix.
_KINDS = (
    "embed_tokens.weight",
    *("q_proj.weight", "k_proj.weight", "v_proj.bias", "o_proj.weight", "q_norm.weight"),
    *("gate_proj.weight", "up_proj.weight", "down_proj.weight", "mlp.gate.weight"),
    *("input_layernorm.weight", "model.norm.weight", HEAD),
)

Tensors = dict[str, Tensor]


@dataclass
class Count:
    """One row of the table in docs/weights.md."""

    fault: str
    injected: int = 0
    missed: list[str] = field(default_factory=list)

    def add(self, broken: BrokenCheckpoint, *, message: str) -> None:
        """told: what was said of it, empty where it was taken. It must name what is wrong."""
        self.injected += 1
        if not any(name in message for name in broken.names):
            self.missed.append(f"{broken.fault}: {message or 'taken'}")

    def settle(self, *, cases: int) -> str:
        """Everything was found, and the table says so. Returns the line for the summary."""
        assert not self.missed, self.missed
        assert self.injected == cases, self.injected
        rows = [line for line in TABLE.read_text().splitlines() if line.startswith(f"| {self.fault} |")]
        assert [row.split("|")[-2] for row in rows] == [f" {cases} "], self.fault
        line = f"{self.fault}: injected {self.injected}, found {self.injected}"
        sys.stdout.write(f"{line}\n")
        return line


@dataclass(frozen=True)
class BrokenCheckpoint:
    fault: str
    folder: Path
    names: tuple[str, ...]
    """Of which an error must have one: the tensor, or its layer in vLLM's name."""


def broken_checkpoints(whole: Path, *, folder: Path, with_other_bits: bool = True) -> Iterator[BrokenCheckpoint]:
    """One after the other in the same folder. with_other_bits: also BF16's bits in the name of F16, which only values
    show."""
    tensors = load_file(whole / "model.safetensors")
    config = json.loads((whole / "config.json").read_text())
    for kind in _KINDS:
        name = next((each for each in tensors if each.endswith(kind)), "")
        faults = _OF_A_TENSOR if with_other_bits else {key: each for key, each in _OF_A_TENSOR.items() if key != _BITS}
        for fault, change in faults.items() if name else ():
            yield write_broken(
                whole, tensors=change(dict(tensors), name), folder=folder, fault=f"{name} {fault}", at=name
            )
    for fault, (change, at) in _OF_A_MODEL.items():
        yield write_broken(whole, tensors=change(dict(tensors)), folder=folder, fault=fault, at=at)
    if HEAD not in tensors:
        untied = config | {"tie_word_embeddings": False}
        yield write_broken(
            whole, tensors=tensors, folder=folder, fault="a head that is not tied", at=HEAD, config=untied
        )
    deeper = config | {"num_hidden_layers": config["num_hidden_layers"] + 1}
    deeper |= {"layer_types": [*config["layer_types"], config["layer_types"][-1]]} if config.get("layer_types") else {}
    at = f"model.layers.{config['num_hidden_layers']}."
    yield write_broken(whole, tensors=tensors, folder=folder, fault="a layer more in config.json", at=at, config=deeper)


def write_broken(
    whole: Path, *, tensors: Tensors, folder: Path, fault: str, at: str, config: dict | None = None
) -> BrokenCheckpoint:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return BrokenCheckpoint(fault, folder, names=(at, *_layers_of(at)))


def _layers_of(name: str) -> Iterator[str]:
    """How vLLM calls the layer of a checkpoint's tensor."""
    layer = name.rpartition(".")[0]
    for part, fused in (("q_proj", "qkv_proj"), ("k_proj", "qkv_proj"), ("v_proj", "qkv_proj")):
        layer = layer.replace(part, fused)
    layer = layer.partition(".experts.")[0] + ".experts" if ".experts." in layer else layer
    yield layer.replace("gate_proj", "gate_up_proj").replace("mlp.up_proj", "mlp.gate_up_proj")


def _dropped(tensors: Tensors, name: str) -> Tensors:
    del tensors[name]
    return tensors


def _changed(change: Callable[[Tensor], Tensor]) -> Callable[[Tensors, str], Tensors]:
    return lambda tensors, name: tensors | {name: change(tensors[name])}


_BITS = "BF16's bits in the name of F16"
_OF_A_TENSOR: dict[str, Callable[[Tensors, str], Tensors]] = {
    "dropped": _dropped,
    "cropped": _changed(lambda tensor: tensor[:-1]),
    "too long": _changed(lambda tensor: torch.cat([tensor, tensor[:1]])),
    "of whole numbers": _changed(lambda tensor: tensor.to(torch.int8)),
    "of FP8 without scales": _changed(lambda tensor: tensor.to(torch.float8_e4m3fn)),
    _BITS: _changed(lambda tensor: tensor.view(torch.float16)),
    "prefixed": lambda tensors, name: _dropped(tensors | {f"module.{name}": tensors[name]}, name),
}


def _without_last_layer(tensors: Tensors) -> Tensors:
    last = f"model.layers.{_last_layer(tensors)}."
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(last)}


def _with_another_layer(tensors: Tensors) -> Tensors:
    last = _last_layer(tensors)
    begin = f"model.layers.{last}."
    more = {name: tensor for name, tensor in tensors.items() if name.startswith(begin)}
    return tensors | {name.replace(begin, f"model.layers.{last + 1}."): tensor.clone() for name, tensor in more.items()}


def _last_layer(tensors: Tensors) -> int:
    return max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))


_OF_A_MODEL: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "all prefixed": (
        lambda tensors: {f"base_model.model.{name}": each for name, each in tensors.items()},
        "base_model.",
    ),
    "a layer too few": (_without_last_layer, "model.layers."),
    "a layer too many": (_with_another_layer, "model.layers."),
    "a tensor of another model": (lambda tensors: tensors | {"score.weight": torch.ones(2, 2)}, "score.weight"),
}
