"""Samples of a model's own: what it answers to prompts, drawn as the rollouts of a run are.

A prediction of how far quantised rollouts are from exact ones has to be made on what rollouts consist of. Reference
answers are other text: the model is surer or less sure there than in its own words, and the prediction is off by as
much.

The model's weights stay in its files. One decoder layer is in memory at a time, and is read again for every token; the
keys and values of the tokens so far are kept.

Legend: B sequences of T tokens, H the width of the residual stream, V words.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from appliance.errors import NumericsError
from appliance.quant.checkpoint import StreamedModel

_PROMPT_TOKENS = 2048  # of prompts with their padding in one forward: bounds the activations inside a layer


@dataclass(frozen=True)
class ProfileSampling:
    """Settings by which responses are drawn."""

    temperature: float = 1.0
    """Temperature, greater than 0."""
    top_p: float = 1.0
    """Total probability of the likeliest words; the others are never drawn."""
    top_k: int = 0
    """Number of the likeliest words, of which one is drawn; 0: all."""
    max_tokens: int = 32
    """Most tokens of one response."""
    stop: frozenset[int] = frozenset()
    """Tokens that end a response, and belong to it."""
    seed: int = 0


@dataclass(frozen=True)
class ProfileSample:
    """A prompt and the response to it."""

    tokens: tuple[int, ...]
    prompt_tokens: int
    """Tokens of the prompt, which come first."""


def draw_samples(
    model: StreamedModel,
    *,
    prompts: Sequence[Sequence[int]],
    sampling: ProfileSampling,
    on_token: Callable[[int, int], None] = lambda done, total: None,
) -> list[ProfileSample]:
    """Draw one response to each prompt, in the order of the prompts; the same for the same seed.

    prompts: token ids, at least one of each.  on_token: called with the tokens done, of one response for each group of
    prompts that are answered together, and the most.
    Raises NumericsError when a logit is not finite.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    responses: dict[int, list[int]] = {}
    groups = _groups(prompts)
    for number, group in enumerate(groups):
        drawn = _draw_group(
            model,
            prompts=[prompts[index] for index in group],
            sampling=sampling,
            generator=generator,
            on_token=functools.partial(
                _report, on_token, number * sampling.max_tokens, len(groups) * sampling.max_tokens
            ),
        )
        responses |= zip(group, drawn, strict=True)
    return [
        ProfileSample((*prompt, *responses[index]), prompt_tokens=len(prompt)) for index, prompt in enumerate(prompts)
    ]


def _report(on_token: Callable[[int, int], None], before: int, total: int, done: int) -> None:
    on_token(before + done, total)


def _groups(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Group the places of prompts of like lengths, the longest first: they go through a layer together, padded to the
    longest of their group."""
    ordered = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    groups = []
    while ordered:
        size = max(1, _PROMPT_TOKENS // len(prompts[ordered[0]]))
        groups.append(ordered[:size])
        ordered = ordered[size:]
    return groups


def _draw_group(
    model: StreamedModel,
    *,
    prompts: Sequence[Sequence[int]],
    sampling: ProfileSampling,
    generator: torch.Generator,
    on_token: Callable[[int], None],
) -> list[list[int]]:
    """Draw one response to each prompt, all of them together."""
    longest = max(map(len, prompts))
    ids_BT = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask_BT = torch.zeros_like(ids_BT)
    for row, prompt in enumerate(prompts):  # padded at the front, so that all responses begin in one column
        ids_BT[row, longest - len(prompt) :] = torch.tensor(list(prompt))
        mask_BT[row, longest - len(prompt) :] = 1
    stop = torch.tensor(sorted(sampling.stop), dtype=torch.int64)
    responses: list[list[int]] = [[] for _ in prompts]
    is_open_B = torch.ones(len(prompts), dtype=torch.bool)
    position_B1 = mask_BT.sum(dim=1, keepdim=True)
    cache = model.new_cache()
    hidden_BTH = model.run(
        model.embed(ids_BT),
        mask_BT=mask_BT,
        position_BT=(mask_BT.cumsum(dim=1) - 1).clamp(min=0),
        cache=cache,
    )
    for number in range(sampling.max_tokens):
        token_B = _draw(_logits(model, hidden_BTH[:, -1]), sampling=sampling, generator=generator)
        for row in is_open_B.nonzero().flatten().tolist():
            responses[row].append(int(token_B[row]))
        is_open_B &= ~torch.isin(token_B, stop)
        on_token(number + 1)
        if number + 1 == sampling.max_tokens or not bool(is_open_B.any()):
            break
        mask_BT = torch.cat([mask_BT, torch.ones_like(position_B1)], dim=1)
        hidden_BTH = model.run(model.embed(token_B[:, None]), mask_BT=mask_BT, position_BT=position_B1, cache=cache)
        position_B1 = position_B1 + 1
    return responses


def _logits(model: StreamedModel, hidden_BH: Tensor) -> Tensor:
    """Return [B, V] float32. hidden_BH: after the last norm."""
    bands = [hidden_BH @ rows_RH.t() for _, rows_RH in model.checkpoint.rows(model.head_name)]
    return model.logits(torch.cat(bands, dim=1).float())


def _draw(logits_BV: Tensor, *, sampling: ProfileSampling, generator: torch.Generator) -> Tensor:
    """Return [B] int64. Raises NumericsError when a logit is not finite."""
    if not bool(torch.isfinite(logits_BV).all()):
        raise NumericsError("a logit of the model is not finite: no sample can be drawn")
    if 0 < sampling.top_k < logits_BV.shape[1]:
        least_B1 = logits_BV.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)
    probs_BV = (logits_BV / sampling.temperature).softmax(dim=-1)
    if sampling.top_p < 1:
        sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True)
        is_beyond_BV = sorted_BV.cumsum(dim=-1) - sorted_BV >= sampling.top_p  # the first word is never beyond
        probs_BV = torch.zeros_like(probs_BV).scatter_(1, order_BV, sorted_BV.masked_fill(is_beyond_BV, 0.0))
    mass_BV = probs_BV.double().cumsum(dim=-1)  # in float32 its last steps would be lost
    drawn_B1 = torch.rand(len(mass_BV), 1, dtype=torch.float64, generator=generator) * mass_BV[:, -1:]
    return torch.searchsorted(mass_BV, drawn_B1, right=True).flatten()  # the first word whose mass lies above
