"""Rotary positions of a model, by its config.json: how many tokens vLLM serves, and where vLLM and transformers rotate
by different angles. Imports no torch.

vLLM 0.31's rule (`_get_and_verify_max_len` in vllm/config/model.py): the smallest of the keys that name a length, times
the rope's factor. `llama3`, `longrope` (once `su`) and `yarn` have a `max_position_embeddings` that is scaled already;
before 0.31 vLLM multiplied `original_max_position_embeddings` for `yarn`. A test compares this file with vLLM itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DEFAULT_ROPE = "default"
DYNAMIC, LINEAR, LLAMA3, LONGROPE, YARN = "dynamic", "linear", "llama3", "longrope", "yarn"
_KNOWN = frozenset({DEFAULT_ROPE, LINEAR, LLAMA3, LONGROPE, YARN})
_OLD_NAMES = {"su": LONGROPE, "mrope": DEFAULT_ROPE}
_SCALED_ALREADY = frozenset({LLAMA3, LONGROPE, YARN})
_FAMILIES_SCALED_ALREADY = "gemma3"  # in a model_type
_LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
_ORIGINAL = "original_max_position_embeddings"
_LENGTH_THAT_WINS = "model_max_length"  # Command-R's


@dataclass(frozen=True)
class Rope:
    """One way of rotating: a model has one, or one for each type of layer."""

    kind: str
    factor: float
    """Factor of the length; 1 where the configuration has none."""
    original: int
    """Tokens of the longest sequence before the length was extended; 0 where the configuration does not say."""


def ropes_of(config: Mapping[str, Any]) -> tuple[Rope, ...]:
    """Read all ropes of a model, as transformers 5 reads the old and the new spelling: `rope_scaling` comes before
    `rope_parameters`, `type` stands for `rope_type`. Empty where the configuration says nothing that can be read."""
    parameters, longest = config.get("rope_scaling") or config.get("rope_parameters"), config.get(_LENGTHS[0])
    if not isinstance(parameters, dict) or not parameters:
        return ()
    by_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    if len(by_layer_type) == len(parameters):
        return tuple(_read_rope(each, beside=None, otherwise=longest) for each in by_layer_type)
    return (_read_rope(parameters, beside=config.get(_ORIGINAL), otherwise=longest),)  # Phi-3 has it beside


def most_positions(config: Mapping[str, Any]) -> int:
    """Return the tokens of the longest sequence that vLLM serves; 0 where the configuration does not say."""
    given = [number for key in _LENGTHS if (number := _whole_number(config.get(key)))]
    wins = _whole_number(config.get(_LENGTH_THAT_WINS))
    longest = wins or min(given, default=0)
    factor = 1.0
    for rope in () if _FAMILIES_SCALED_ALREADY in str(config.get("model_type")) else ropes_of(config):
        if rope.kind not in _SCALED_ALREADY:
            factor = rope.factor
    return max(int(longest * factor), wins)


def rope_conflict(ropes: tuple[Rope, ...], *, longest: int) -> str:
    """Return why engine and trainer would rotate by different angles, or an empty text. longest: tokens of prompt and
    response.

    transformers computes the frequencies of `dynamic` again for a batch that is longer than any before, and takes those
    of `longrope` by the length of each batch. vLLM fixes both when it starts, for all sequences.
    """
    if any(DYNAMIC in rope.kind for rope in ropes):
        return "its rope_type is `dynamic`: the trainer's frequencies change with a batch's length, the engine's do not"
    originals = [rope.original for rope in ropes if rope.kind == LONGROPE and 0 < rope.original < longest]
    if originals:
        return (
            f"its rope_type is `longrope`, and sequences of up to {longest} tokens pass its {min(originals)}: the "
            "engine then rotates all sequences by the long factors, the trainer only those of long batches"
        )
    return ""


def unknown_rope(ropes: tuple[Rope, ...]) -> str:
    """Return which way of rotating vLLM or transformers does not have, or an empty text."""
    unknown = [rope.kind for rope in ropes if rope.kind not in _KNOWN]
    return f"its rope_type is `{unknown[0][:60]}`; the known ones are {', '.join(sorted(_KNOWN))}" if unknown else ""


def _read_rope(parameters: Mapping[str, Any], *, beside: object, otherwise: object) -> Rope:
    """beside, otherwise: the lengths before and instead of the rope's own `original_max_position_embeddings`."""
    kind = str(parameters.get("rope_type", parameters.get("type", DEFAULT_ROPE)))
    factor = parameters.get("factor")
    is_factor = isinstance(factor, (int, float)) and not isinstance(factor, bool) and 0 < factor < 2**31
    originals = map(_whole_number, (beside, parameters.get(_ORIGINAL), otherwise))
    return Rope(
        kind=_OLD_NAMES.get(kind, kind),
        factor=float(factor) if is_factor else 1.0,
        original=next(filter(None, originals), 0),
    )


def _whole_number(value: object) -> int:
    return value if type(value) is int and 0 < value <= 2**31 else 0
