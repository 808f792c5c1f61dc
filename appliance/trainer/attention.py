"""Attention of sequences that lie behind one another in one row, without padding, on CUDA and on a CPU.

verl packs a micro-batch (`use_remove_padding`) and transformers gives each layer's attention the row and its positions:
where they are 0 a sequence starts, so no mask over the row is needed, which would be quadratic in its length. On a CPU
a segment may also continue tokens that lie before it in the row (`Sequences`).
transformers finds this one by its name, in every process that imports trainer/worker.py.

On CUDA it is torch's own `varlen_attn`, FlashAttention 2 inside torch; where the package of a newer one is installed,
that one. On a CPU it is torch's attention of some sequences at once (`Block`).

With several GPUs to a sequence (Ulysses) each has a part of the row and all heads; for the attention they exchange, so
that each has the whole row and a part of the heads. verl does that in transformers' flash attention only, so it is done
here again, with verl's own exchange. KV heads that are fewer than GPUs are repeated first.

Legend: T tokens of all sequences in a row, S sequences or segments, H heads, G KV heads, D channels of a head.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from inspect import signature
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import activate_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from verl.utils.ulysses import (
    all_gather_tensor,
    gather_heads_scatter_seq,
    gather_seq_scatter_heads,
    get_ulysses_sequence_parallel_world_size,
)

from appliance.errors import TrainingError
from appliance.terms.settings import ATTENTION_NAME

_logger = logging.getLogger(__name__)
_SCORES_AT_ONCE = 1 << 20  # of queries and keys in a block, padding among them: of more, a call costs little
_NEWER = {9: ("FA3", "flash_attn_interface"), 10: ("FA4", "flash_attn.cute.interface")}  # by compute capability


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
    def from_positions(positions_T: Tensor) -> Sequences:
        """Find the segments of a row. positions_T: int64, as above. Raises TrainingError where the first is not 0 or
        a prefix is too short."""
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
    def keys_W(self) -> Tensor:
        """Places in the row of what each segment sees, segment after segment: its prefix and itself. int64."""
        if not self.has_prefixes:
            return torch.arange(len(self.positions_T), device=self.positions_T.device)
        starts = self.starts_S1.tolist()
        segments = (range(start, end) for start, end in pairwise(starts))
        pairs = zip(self.prefixes, segments, strict=True)
        places = [place for prefix, segment in pairs for place in (*prefix, *segment)]
        return torch.tensor(places, device=self.positions_T.device)

    @functools.cached_property
    def blocks(self) -> Blocks:
        return Blocks.from_sequences(self)


@dataclass(frozen=True, eq=False)
class Block:
    """Segments that are attended to at once, on a CPU, padded to the longest. B segments, Q tokens of the longest one,
    K of the longest with its prefix."""

    queries_BQ: Tensor
    """Places in the row of the segments' tokens, 0 behind a shorter one's end. int64."""
    keys_BK: Tensor
    """Places in the row of the segments' prefixes and tokens, likewise."""
    prefix_B: Tensor
    """Tokens of each prefix, int64."""
    real_places: Tensor
    """Places of tokens in the flattened [B, Q], without padding, int64."""

    def mask_BQK(self, window: int | None) -> Tensor | None:
        """Return what a token may see; None where that is all tokens up to itself by their places in Q and K.
        Padding comes last and so is not seen, and what it sees itself is dropped. window: as in attend_each."""
        (_, queries), (_, keys) = self.queries_BQ.shape, self.keys_BK.shape
        sees_all = window is None or queries <= window
        if sees_all and not bool(self.prefix_B.any()):
            return None
        device = self.keys_BK.device
        query_BQ1 = (self.prefix_B[:, None] + torch.arange(queries, device=device)).unsqueeze(2)
        behind_BQK = query_BQ1 - torch.arange(keys, device=device)
        return (behind_BQK >= 0) if window is None else (behind_BQK >= 0) & (behind_BQK < window)


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks over which all segments of a row are shared out."""

    blocks: list[Block]
    of_row_T: Tensor
    """Place of each token of the row in what the blocks give one after the other, int64."""

    @staticmethod
    def from_sequences(sequences: Sequences) -> Blocks:
        device = sequences.positions_T.device
        starts = sequences.starts_S1.tolist()
        segments = [range(start, end) for start, end in pairwise(starts)]
        by_size = sorted(
            zip(sequences.prefixes, segments, strict=True),
            key=lambda pair: (bool(pair[0]), len(pair[1]), len(pair[0])),
        )
        groups: list[list[tuple[range, range]]] = []
        for pair in by_size:
            group = [*groups[-1], pair] if groups and bool(groups[-1][0][0]) == bool(pair[0]) else [pair]
            queries, keys = max(len(segment) for _, segment in group), max(len(one) + len(two) for one, two in group)
            fits = len(group) > 1 and len(group) * queries * keys <= _SCORES_AT_ONCE
            groups[-1:] = [group] if fits else [*groups[-1:], [pair]]
        blocks = [_block(group, device=device) for group in groups]
        places = [place for group in groups for _, segment in group for place in segment]
        of_row_T = torch.empty(len(places), dtype=torch.int64)
        of_row_T[torch.tensor(places)] = torch.arange(len(places))
        return Blocks(blocks, of_row_T.to(device))


def _block(group: list[tuple[range, range]], *, device: torch.device) -> Block:
    """Make a block of (prefix, segment) pairs."""

    def padded(rows: list[list[int]]) -> Tensor:
        longest = max(map(len, rows))
        return torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)

    queries_BQ = padded([[*segment] for _, segment in group])
    length_B1 = torch.tensor([[len(segment)] for _, segment in group], device=device)
    is_real_BQ = torch.arange(queries_BQ.shape[1], device=device) < length_B1
    return Block(
        queries_BQ,
        padded([[*prefix, *segment] for prefix, segment in group]),
        torch.tensor([len(prefix) for prefix, _ in group], device=device),
        is_real_BQ.flatten().nonzero().flatten(),
    )


def attend_row(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    position_ids: Tensor | None = None,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers calls it, and return [1, T, H, D].

    query: [1, H, T, D].  key, value: [1, G, T, D].  position_ids: [1, T]; of several GPUs each has its part of T.
    softcap: as in attend_each.  dropout: left out, whatever the model's config says: what was sampled had none.
    Raises TrainingError for more than one row, without positions, and for attention sinks (`s_aux`).
    """
    if position_ids is None:
        raise TrainingError(f"{type(module).__name__} attends without the positions that tell sequences of a row apart")
    if others.get("s_aux") is not None:
        raise TrainingError("attention got `s_aux`, which it does not know")
    if len(query) != 1:
        message = f"attention got {len(query)} rows of {query.shape[2]} tokens, and takes one with all sequences"
        raise TrainingError(message)
    q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
    sharing = get_ulysses_sequence_parallel_world_size()
    if sharing > 1:
        repeats = max(1, sharing // k.shape[1])
        k, v = (each.repeat_interleave(repeats, dim=1) for each in (k, v))
        q, k, v = (gather_seq_scatter_heads(each, seq_dim=0, head_dim=1) for each in (q, k, v))
    sequences = _sequences(position_ids)
    out = attend(q, k, v, sequences=sequences, scale=scaling, window=sliding_window, softcap=softcap)
    if sharing > 1:
        out = gather_heads_scatter_seq(out, head_dim=1, seq_dim=0)
    return out[None], None


@functools.lru_cache(maxsize=1)  # by identity: the layers of a forward, and their recomputation, get the same tensor
def _sequences(positions_1T: Tensor) -> Sequences:
    positions_T = positions_1T[0]
    if get_ulysses_sequence_parallel_world_size() > 1:
        positions_T = all_gather_tensor(positions_T)
    return Sequences.from_positions(positions_T)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sequences: Sequences,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attend as `attend_each` does; prefixes and soft caps on a CPU only."""
    if not q.is_cuda:
        return attend_each(q, k, v, sequences=sequences, scale=scale, window=window, softcap=softcap)
    if softcap is not None:
        raise TrainingError("attention on CUDA got scores with a soft cap, which it does not know")
    return _attend_on_cuda(q, k, v, sequences=sequences, scale=scale, window=window)


def attend_each(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sequences: Sequences,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return [T, H, D], causal: softmax(scale q k) v of each sequence by itself, in float32 at least: on a CPU the
    gradients take half the time then that they take in BF16. A segment with a prefix sees that, too; gradients of a
    prefix are summed over its segments before they are rounded, in a fixed order. Short segments are attended to
    together, for a call costs more than what it computes of one; how long the longest is then changes roundings in
    float32.

    q: the same.  k, v: [T, G, D].  window: tokens that a token sees at most, itself among them; None, all before it.
    softcap: c > 0, scores s become c tanh(s / c), as Gemma 2 has them; a block then has all of its scores at once.
    """
    wide, blocks, parts = torch.promote_types(q.dtype, torch.float32), sequences.blocks, []
    with torch.autocast(q.device.type, enabled=False):
        q_T, k_T, v_T = (tensor.to(wide) for tensor in (q, k, v))
        for block in blocks.blocks:
            mask_BQK = block.mask_BQK(window)
            qkv = (
                _heads_first(q_T, block.queries_BQ),
                _heads_first(k_T, block.keys_BK),
                _heads_first(v_T, block.keys_BK),
            )
            if softcap is not None:
                out_BHQD = _capped_attention(*qkv, mask_BQK=mask_BQK, scale=scale, softcap=softcap)
            else:
                out_BHQD = functional.scaled_dot_product_attention(
                    *qkv,
                    attn_mask=None if mask_BQK is None else mask_BQK[:, None],
                    is_causal=mask_BQK is None,
                    scale=scale,
                    enable_gqa=True,
                )
            parts.append(out_BHQD.transpose(1, 2).flatten(0, 1).index_select(0, block.real_places))
        return torch.cat(parts).index_select(0, blocks.of_row_T).to(q.dtype)


def _capped_attention(
    q_BHQD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, *, mask_BQK: Tensor | None, scale: float, softcap: float
) -> Tensor:
    """Return [B, H, Q, D]: softmax(c tanh(scale q k / c)) v. mask_BQK: true where a token is seen; None: causal."""
    repeats = q_BHQD.shape[1] // k_BGKD.shape[1]
    k_BHKD, v_BHKD = (tensor.repeat_interleave(repeats, dim=1) for tensor in (k_BGKD, v_BGKD))
    scores_BHQK = softcap * torch.tanh(scale * (q_BHQD @ k_BHKD.transpose(2, 3)) / softcap)
    if mask_BQK is None:
        mask_BQK = torch.ones(scores_BHQK.shape[2:], dtype=torch.bool, device=q_BHQD.device).tril()[None]
    least = torch.finfo(scores_BHQK.dtype).min  # finite: padding behind a window may see nothing
    return scores_BHQK.masked_fill(~mask_BQK[:, None], least).softmax(dim=-1) @ v_BHKD


def _heads_first(values_THD: Tensor, places_BP: Tensor) -> Tensor:
    """Return [B, H, P, D] of the tokens at these places."""
    return values_THD.index_select(0, places_BP.flatten()).unflatten(0, places_BP.shape).transpose(1, 2)


@functools.cache
def _shared_heads(attend: Callable[..., Tensor]) -> dict[str, bool]:
    """Return the arguments that have KV heads shared: none in torch 2.11, which a bundle may find on its host."""
    return {"enable_gqa": True} if "enable_gqa" in signature(attend).parameters else {}


def _attend_on_cuda(
    q: Tensor, k: Tensor, v: Tensor, *, sequences: Sequences, scale: float, window: int | None
) -> Tensor:
    """Attend as attend_each, in FP16 or BF16. Raises TrainingError for shared prefixes."""
    if sequences.has_prefixes:
        raise TrainingError("attention on CUDA got sequences that share a prefix, which it does not know")
    _take_newer(torch.cuda.get_device_capability(q.device)[0])
    shared = _shared_heads(varlen_attn)
    if not shared:
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in (k, v))
    starts_S1, longest = sequences.starts_S1, max(sequences.lengths)
    behind = -1 if window is None else window - 1
    out: Tensor = varlen_attn(
        *(q.to(v.dtype), k.to(v.dtype), v),
        *(starts_S1, starts_S1, longest, longest),
        scale=scale,
        window_size=(behind, 0),
        **shared,
    )
    return out


@functools.cache
def _take_newer(capability: int) -> None:
    """Take a newer FlashAttention where there is one, once in a process. capability: the major number."""
    name, module = _NEWER.get(capability, ("", ""))
    try:
        if name and all(map(find_spec, accumulate(module.split("."), "{}.{}".format))):  # None: a package without it
            activate_flash_attention_impl(name)
            _logger.warning("attention: %s of %s in place of PyTorch's FlashAttention 2", name, module)
    except (ImportError, AttributeError, RuntimeError) as error:  # installed, but another release, or not whole
        _logger.warning("attention: %s of %s is not taken: %s", name, module, error)


AttentionInterface.register(ATTENTION_NAME, attend_row)  # transformers makes no mask for a name that has none
