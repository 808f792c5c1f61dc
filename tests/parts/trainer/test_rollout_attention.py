"""The trainer's attention on a CPU against an engine's, token by token: the same bits, whatever else is in a batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from appliance.quant.cpu_gemm import load_kernels
from appliance.terms.environment import EXACT_ON_CPU
from appliance.trainer.rollout_ops import PackedRow

HEADS, KV_HEADS, SIZE, BLOCK, THREADS = 14, 2, 64, 32, 8
SCALE = SIZE**-0.5
LENGTHS = [99 + 5 * place for place in range(16)]
DECODED = 96  # last tokens of each sequence, one of each at a time
IS_SPLIT = EXACT_ON_CPU["VLLM_CPU_ATTN_SPLIT_KV"] != "0"


@pytest.fixture
def threads() -> Iterator[None]:
    """As many share a batch, where they may."""
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


def decoded(q: list[Tensor], k: list[Tensor], v: list[Tensor], *, left: int, is_split: bool) -> Tensor:
    """[sequences, HEADS, SIZE] of the tokens that have `left` after them, as vLLM's backend asks for a step."""
    lengths = torch.tensor([length - left for length in LENGTHS], dtype=torch.int32)
    blocks = -(-max(LENGTHS) // BLOCK)
    table = torch.arange(len(LENGTHS) * blocks, dtype=torch.int32).view(len(LENGTHS), blocks)
    cache = torch.zeros(table.numel(), KV_HEADS, 2 * BLOCK, SIZE, dtype=torch.bfloat16)
    keys, values = cache.chunk(2, dim=2)
    slots = [place * blocks * BLOCK + torch.arange(length) for place, length in enumerate(LENGTHS)]
    slots_T, starts = torch.cat(slots), torch.arange(len(LENGTHS) + 1, dtype=torch.int32)
    torch.ops._C.cpu_attn_reshape_and_cache(torch.cat(k), torch.cat(v), keys, values, slots_T, "vec", 1.0, 1.0, "auto")
    shape = (len(LENGTHS), HEADS, KV_HEADS, SIZE, lengths, torch.bfloat16, starts)
    plan = torch.ops._C.get_scheduler_metadata(*shape, True, -1, "vec", is_split, None, "auto")
    queries = torch.stack([each[int(length) - 1] for each, length in zip(q, lengths, strict=True)])
    out, usual = torch.empty_like(queries), (plan, None, None, 1.0, 1.0, "auto")
    torch.ops._C.cpu_attention_with_kv_cache(
        queries, keys, values, out, starts, lengths, SCALE, True, None, -1, table, 0.0, *usual
    )
    return out


def differing(*, is_split: bool) -> int:
    """Of the values of all tokens that are decoded."""
    load_kernels()
    torch.manual_seed(5)
    q, k, v = (
        [torch.randn(length, heads, SIZE).bfloat16() for length in LENGTHS] for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    positions_T = torch.cat([torch.arange(length) for length in LENGTHS])
    sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": SIZE}
    batch = PackedRow(positions_T, cos_sin=torch.empty(0), scale=SCALE, **sizes)
    whole = batch.attend(*map(torch.cat, (q, k, v))).split(LENGTHS)
    count = 0
    for left in range(DECODED):
        found = decoded(q, k, v, left=left, is_split=is_split)
        wanted = torch.stack([each[length - left - 1] for each, length in zip(whole, LENGTHS, strict=True)])
        count += int((found != wanted).sum())
    return count


@pytest.mark.usefixtures("threads")
def test_a_decoded_token_is_the_trainers() -> None:
    assert differing(is_split=IS_SPLIT) == 0


@pytest.mark.usefixtures("threads")
def test_it_is_not_where_threads_share_a_sequence() -> None:
    """So a plan says that they do not."""
    assert differing(is_split=True) > 0
