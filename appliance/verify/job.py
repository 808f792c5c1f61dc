"""What one check of an engine is told and what it saw, as values that go through files. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from appliance.quant.scheme import Scheme
from appliance.quant.settings import Quantisation


@dataclass(frozen=True)
class Job:
    """model: folder or hub name.  prompt_tokens, new_tokens: of each of the few sequences.  seen: where to write."""

    model: str
    trust_remote_code: bool
    quantisation: Quantisation
    tensor_parallel: int
    enforce_eager: bool
    prompt_tokens: int
    new_tokens: int
    seed: int
    seen: str

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def read_job(text: str) -> Job:
    return TypeAdapter(Job).validate_json(text)


@dataclass(frozen=True)
class LayerProbe:
    """One worker at one moment: what is live, and what each of its layers gives for a fixed input.

    kernels: name and number of layers.  layers: name and digest of the output, for every layer that holds weights.
    """

    scheme: Scheme
    emulated: bool
    lm_head_fp32: bool
    kernels: tuple[tuple[str, int], ...]
    layers: tuple[tuple[str, str], ...]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def read_probe(text: str) -> LayerProbe:
    return TypeAdapter(LayerProbe).validate_json(text)


@dataclass(frozen=True)
class EngineOutput:
    """What an engine generated, greedily. tokens: per prompt.  log_probs: nats, of those tokens.

    prompt_log_probs: nats, of the prompts' own tokens but the first: the same tokens whatever the weights are.
    """

    tokens: tuple[tuple[int, ...], ...]
    log_probs: tuple[tuple[float, ...], ...]
    prompt_log_probs: tuple[tuple[float, ...], ...]

    def distance(self, other: EngineOutput) -> float:
        """Mean absolute difference of the prompts' log-probs, nats."""
        pairs = [
            (mine, theirs)
            for row, other_row in zip(self.prompt_log_probs, other.prompt_log_probs, strict=True)
            for mine, theirs in zip(row, other_row, strict=True)
        ]
        return sum(abs(mine - theirs) for mine, theirs in pairs) / len(pairs)


@dataclass(frozen=True)
class Worker:
    """One rank of an engine. unmoved: layers that gave the same with other weights.  unreturned: layers that did not
    give the same again with the old ones."""

    rank: int
    scheme: Scheme
    emulated: bool
    lm_head_fp32: bool
    kernels: tuple[tuple[str, int], ...]
    layers: int
    unmoved: tuple[str, ...]
    unreturned: tuple[str, ...]


@dataclass(frozen=True)
class EngineCheck:
    """One engine through three weight updates: the checkpoint's weights, perturbed ones, the checkpoint's again.

    failed: the error that ended the check, or empty.  first: what it said after the first update.
    same_as_loaded: whether that was what it said before any update.  moved: nats, from the first to the second update.
    returned: whether it said the same again after the third, to the last bit.
    """

    failed: str
    first: EngineOutput | None = None
    same_as_loaded: bool = False
    moved: float = 0.0
    returned: bool = False
    workers: tuple[Worker, ...] = ()

    def write(self, path: str) -> None:
        Path(path).write_text(json.dumps(dataclasses.asdict(self)))


def read_check(path: Path) -> EngineCheck:
    return TypeAdapter(EngineCheck).validate_json(path.read_bytes())
