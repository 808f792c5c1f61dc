"""What the trainer sends with its weights: a digest of each tensor and, at the end, the list of them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

os.environ["VERL_PLATFORM"] = "cpu"
os.environ["VERL_USE_EXTERNAL_MODULES"] = "appliance.trainer.worker"

import pytest
import torch
from torch import Tensor

from appliance.engine.precision import read_directive
from appliance.errors import SyncError
from appliance.sync.manifest import (
    DIRECTIVE_NAME,
    MANIFEST_NAME,
    Manifest,
    check_arrival,
    digest,
    read_manifest,
    record_tensor,
)
from appliance.terms.schemes import AS_PLANNED, Precision, Scheme

STATE = [("b.weight", torch.ones(3, 4, dtype=torch.bfloat16)), ("a.bias", torch.arange(5, dtype=torch.bfloat16))]


def sent(weights: object, *, sync: int = 7) -> list[tuple[str, Tensor]]:
    from appliance.trainer.sender import DigestedWeights

    async def collect() -> list[tuple[str, Tensor]]:
        return [pair async for pair in DigestedWeights(weights, sync=sync)]

    return asyncio.run(collect())


async def asynchronous() -> AsyncIterator[tuple[str, Tensor]]:
    for pair in STATE:
        yield pair


@pytest.mark.parametrize("kind", ["generator", "list", "async"])
def test_the_stream_ends_with_the_list_of_its_tensors(kind: str) -> None:
    weights = {"generator": iter(STATE), "list": STATE, "async": asynchronous()}[kind]
    *tensors, (name, tensor) = sent(weights)
    assert [one for one, _ in tensors] == ["b.weight", "a.bias"]
    assert all(mine is theirs for (_, mine), (_, theirs) in zip(tensors, STATE, strict=True))  # no copies
    assert (name, tensor.dtype, tensor.ndim) == (MANIFEST_NAME, torch.uint8, 1)
    manifest = read_manifest(tensor)
    assert manifest.sync == 7
    assert [(one.name, one.dtype, one.shape) for one in manifest.records] == [
        ("b.weight", "torch.bfloat16", (3, 4)),
        ("a.bias", "torch.bfloat16", (5,)),
    ]
    assert [one.digest for one in manifest.records] == [digest(tensor) for _, tensor in STATE]


def test_verl_takes_our_sender() -> None:
    from verl.workers.rollout.base import get_rollout_class

    import appliance.trainer.worker  # noqa: F401  a run's processes import it by its name in the environment
    from appliance.trainer.sender import DigestingAdapter

    assert get_rollout_class("vllm", "async") is DigestingAdapter


def test_a_format_that_no_digest_covers_is_refused() -> None:
    from appliance.trainer.sender import DigestingAdapter

    with pytest.raises(SyncError) as raised:
        asyncio.run(DigestingAdapter.update_weights(None, iter(STATE), wire_format="delta_flush"))
    assert raised.value.message == "weight update: the wire format delta_flush has no digests"


def test_the_lists_digest_covers_names_order_and_number() -> None:
    records = tuple(record_tensor(name, tensor) for name, tensor in STATE)
    lists = [Manifest(1, records), Manifest(2, records), Manifest(1, records[::-1]), Manifest(1, records[:1])]
    assert len({one.digest for one in lists}) == 4
    assert read_manifest(lists[0].to_tensor()) == lists[0]


def test_a_list_that_cannot_be_read_is_a_sync_error() -> None:
    for bad in (b"", b"{", b"{}", b'{"sync": 1, "tensors": [["a"]]}', b'{"sync": null, "tensors": []}'):
        with pytest.raises(SyncError) as raised:
            read_manifest(torch.tensor(list(bad), dtype=torch.uint8))
        assert raised.value.message.startswith("weight update: the list of what was sent cannot be read: ")


def test_an_arrival_that_differs_is_named_with_both_sides_and_the_rank() -> None:
    manifest = Manifest(3, tuple(record_tensor(name, tensor) for name, tensor in STATE))
    whole = {one.name: one for one in manifest.records}
    check_arrival(manifest, whole, rank=0)
    other, cut = STATE[0][1].clone(), STATE[0][1][:2]
    other[0, 0] = 2
    was, came = digest(STATE[0][1]), digest(other)
    cases = {
        f"b.weight arrived with digest {came}, it was sent with {was}": whole
        | {"b.weight": record_tensor("b.weight", other)},
        "b.weight was sent as torch.bfloat16 [3, 4] and arrived as torch.bfloat16 [2, 4]": whole
        | {"b.weight": record_tensor("b.weight", cut)},
        "a.bias was sent and did not arrive": {"b.weight": whole["b.weight"]},
        "c arrived and was not sent": whole | {"c": record_tensor("c", cut)},
    }
    for message, arrived in cases.items():
        with pytest.raises(SyncError) as raised:
            check_arrival(manifest, arrived, rank=1)
        assert raised.value.message == f"weight update 3: {message} (rank 1)"


def test_what_is_not_as_planned_goes_first_and_is_one_of_the_tensors() -> None:
    from appliance.trainer.sender import DigestedWeights

    async def collect(precision: Precision) -> list[tuple[str, Tensor]]:
        return [pair async for pair in DigestedWeights(STATE, sync=7, precision=precision)]

    wanted = Precision(Scheme.BF16, ("a", "b"))
    (first, tensor), *rest, (last, listed) = asyncio.run(collect(wanted))
    assert (first, read_directive(tensor), last) == (DIRECTIVE_NAME, wanted, MANIFEST_NAME)
    assert [name for name, _ in rest] == [name for name, _ in STATE]
    assert read_manifest(listed).records[0] == record_tensor(DIRECTIVE_NAME, tensor)
    assert [name for name, _ in asyncio.run(collect(AS_PLANNED))] == [*(name for name, _ in STATE), MANIFEST_NAME]
