"""The parts of the update benchmark that can be held against known numbers."""

from __future__ import annotations

import pytest
import torch

from appliance.terms.schemes import Scheme
from benchmarks.sync import SCHEMES, Measured, Update, peak_of_tensors, rows

MIB = 1 << 20


def test_the_peak_counts_what_lives_at_once_and_no_memory_of_before() -> None:
    """A call replaces a tensor of 4 MiB by a new one while 2 MiB of scratch live: 6 MiB above, at each call."""
    tensors = {"weights": torch.zeros(4 * MIB, dtype=torch.uint8)}

    def work() -> None:
        scratch = [torch.zeros(2 * MIB, dtype=torch.uint8)]
        tensors["weights"] = tensors["weights"].clone()
        scratch.clear()
        torch.zeros(MIB, dtype=torch.uint8)

    assert peak_of_tensors(work, times=1) == pytest.approx(6 * MIB, rel=1e-3)
    assert peak_of_tensors(work, times=3) == pytest.approx(6 * MIB, rel=1e-3)


def test_the_peak_is_that_of_the_hungriest_call() -> None:
    sizes = iter([9, 1, 5, 2])  # the first is not measured

    def work() -> None:
        torch.zeros(next(sizes) * MIB, dtype=torch.uint8)

    assert peak_of_tensors(work, times=3) == pytest.approx(5 * MIB, rel=1e-3)


def update(scheme: Scheme, pair: int, seconds: float, *, proof_s: float) -> Update:
    return Update(pair, scheme, seconds, 0.1, proof_s, 0.01, layers_proven=1, waiting_bytes=pair * MIB)


def test_ratios_are_taken_pair_by_pair_and_the_proof_s_share_without_digests() -> None:
    """Ratios 2, 1 and 1.5; 0.104 s of proof in 5.2 s without digests."""
    seconds = {Scheme.BF16: (1.0, 2.0, 1.0), Scheme.INT8: (2.0, 2.0, 1.5)}
    proofs = {Scheme.BF16: (0.0, 0.0, 0.0), Scheme.INT8: (0.02, 0.02, 0.064)}
    updates = [
        update(scheme, pair, seconds[scheme][pair], proof_s=proofs[scheme][pair])
        for pair in range(3)
        for scheme in seconds
    ]
    bf16, int8 = rows(Measured(updates, {Scheme.BF16: 3 * MIB, Scheme.INT8: 5 * MIB}))
    assert (bf16.ratio, int8.ratio) == (1.0, 1.5)
    assert int8.proof_share == pytest.approx(0.104 / 5.2)
    assert (int8.extra_mib, int8.waiting_mib) == (5, 2)
    assert SCHEMES[0] is Scheme.BF16
