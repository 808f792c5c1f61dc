"""Where sequences lie in a row of tokens, which their positions alone say.

Legend: T tokens of a row, S segments.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from appliance.errors import TrainingError


@dataclass(frozen=True, eq=False)
class Sequences:
    """Segments of a row, one behind the other: where a token's position is not the one after the position before it, a
    segment starts. One that starts at position 0 is a sequence from its first token on. One that starts at p > 0
    continues the first p tokens of the last segment that started at 0: they are its prefix, which several segments may
    share (trainer/shared_prompts.py)."""

    lengths: list[int]
    """Tokens of each segment."""
    starts_S1: Tensor
    """[S + 1] int32, on the row's device, the last one is T."""
    prefixes: list[range]
    """Places in the row of each segment's prefix, empty where it starts at position 0."""
    positions_T: Tensor
    """[T] int64."""

    @staticmethod
    def of(positions_T: Tensor) -> Sequences:
        """positions_T: int64, as above. Raises TrainingError where the first is not 0 or a prefix is too short."""
        is_start_T = positions_T.diff(prepend=positions_T.new_full((1,), -2)) != 1
        starts_S = torch.nonzero(is_start_T).flatten()
        starts_S1 = functional.pad(starts_S, (0, 1), value=len(positions_T))
        lengths, prefixes, root, root_tokens = starts_S1.diff().tolist(), [], 0, 0
        first_positions = positions_T[starts_S].tolist()
        for start, length, position in zip(starts_S.tolist(), lengths, first_positions, strict=True):
            root, root_tokens = (start, length) if position == 0 else (root, root_tokens)
            if position > root_tokens:
                message = f"a segment at position {position} continues a sequence of {root_tokens} tokens"
                raise TrainingError(f"attention: {message}")
            prefixes.append(range(root, root + position))
        return Sequences(lengths, starts_S1.int(), prefixes, positions_T)

    @property
    def has_prefixes(self) -> bool:
        return any(self.prefixes)

    @functools.cached_property
    def whole(self) -> WholeSequences:
        """The same with each prefix before its segment, once for each of them."""
        places, own, start = [], [], 0
        for length, prefix in zip(self.lengths, self.prefixes, strict=True):
            own += range(len(places) + len(prefix), len(places) + len(prefix) + length)
            places += [*prefix, *range(start, start + length)]
            start += length
        device = self.positions_T.device
        places_W = torch.tensor(places, device=device)
        return WholeSequences(places_W, torch.tensor(own, device=device), Sequences.of(self.positions_T[places_W]))


@dataclass(frozen=True, eq=False)
class WholeSequences:
    """Sequences without prefixes, made of segments with them. W: tokens, those of a prefix once for each segment."""

    places_W: Tensor
    """Places in the segments' row, int64."""
    own_T: Tensor
    """Places in W of the segments' own tokens, int64."""
    sequences: Sequences
    """How they lie in W."""
