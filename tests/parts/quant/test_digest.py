"""The digest sees every bit, every swap, type and shape, and nothing else."""

from __future__ import annotations

import hashlib

import pytest
import torch

from appliance.sync.manifest import COLUMNS, MIN_ROWS, ROW_BYTES, _factors, digest

LARGE = MIN_ROWS * ROW_BYTES  # bytes from which rows are multiplied


def bytes_of(count: int, *, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("count", [1, 2, 1000, LARGE - 1, LARGE, LARGE + 1, LARGE + ROW_BYTES + 5])
def test_every_flipped_bit_is_seen(count: int) -> None:
    tensor = bytes_of(count)
    whole = digest(tensor)
    seen = {whole}
    for index in sorted({0, count // 3, count // 2, max(0, count - ROW_BYTES), count - 1}):
        for bit in range(8):
            tensor[index] ^= 1 << bit
            seen.add(digest(tensor))
            tensor[index] ^= 1 << bit
    flips = 8 * len({0, count // 3, count // 2, max(0, count - ROW_BYTES), count - 1})
    assert len(seen) == flips + 1
    assert digest(tensor) == whole


@pytest.mark.parametrize("has_vnni", [True, False])
def test_it_is_the_sum_that_the_docstring_says(has_vnni: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Python's integers, which have no width: nothing overflows in int32. By each product that a CPU may take."""
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: has_vnni)
    tensor = bytes_of(LARGE + 3, seed=1)
    tensor[: 2 * ROW_BYTES] = 128  # -128 in int8: the largest magnitude in every product
    rows = tensor[:LARGE].view(torch.int8).view(MIN_ROWS, ROW_BYTES)
    factors = _factors(torch.device("cpu"))
    rows[2] = torch.where(factors[:, 0] > 0, 127, -127)  # more than float32 has bits for
    sums = rows[:3].long() @ factors.long()
    assert 2**25 < int(sums.abs().max()) < 2**31
    products = (rows.double() @ factors.double()).to(torch.int32)
    state = hashlib.blake2b(f"torch.uint8 [{LARGE + 3}] {MIN_ROWS}\n".encode(), digest_size=16)
    state.update(products.numpy().tobytes())
    state.update(tensor[LARGE:].numpy().tobytes())
    assert digest(tensor) == state.hexdigest()


def test_no_factor_is_zero_and_none_large() -> None:
    """A byte's difference times a factor is never 0, and pairs of products fit in 16 bits."""
    factors = _factors(torch.device("cpu"))
    assert factors.shape == (ROW_BYTES, COLUMNS)
    assert bool((factors != 0).all()) and int(factors.abs().max()) == 63
    assert 2 * 255 * 63 < 2**15
    assert len({tuple(row) for row in factors.tolist()}) == ROW_BYTES  # so no two bytes of a row can change places


def test_the_product_is_in_a_layout_that_cuda_has() -> None:
    """Rows times columns: cuBLAS 13 refuses two operands that are both row by row."""
    assert _factors(torch.device("cpu")).stride() == (1, ROW_BYTES)


@pytest.mark.parametrize("size", [2, 8, 1024, ROW_BYTES])
def test_what_changed_places_is_seen(size: int) -> None:
    """Neighbours, within a row and across rows; words that differ in their highest bit only, too."""
    tensor = bytes_of(LARGE)
    if size == 8:
        tensor[:8] = tensor[8:16]
        tensor[7] ^= 128
    swapped = tensor.clone()
    swapped[:size], swapped[size : 2 * size] = tensor[size : 2 * size], tensor[:size]
    assert not torch.equal(swapped, tensor)
    assert digest(swapped) != digest(tensor)


def test_type_and_shape_belong_to_it() -> None:
    tensor = torch.zeros(64, 1024, dtype=torch.bfloat16)
    others = [tensor.half(), tensor.view(1024, 64), tensor.view(-1), tensor[:-1], tensor.view(torch.int16)]
    assert len({digest(one) for one in [tensor, *others]}) == 6


def test_layout_in_memory_does_not_belong_to_it() -> None:
    tensor = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    assert digest(tensor.t().contiguous().t()) == digest(tensor)
    assert digest(torch.cat([tensor, tensor])[:256]) == digest(tensor)


def test_it_never_changes() -> None:
    """Trainer and worker may be other processes on other machines: the value itself is promised."""
    values = torch.arange(LARGE // 2, dtype=torch.int32).to(torch.int16)
    assert digest(values) == "61adaee3cbde18328c426869c493fc08"
    assert digest(torch.tensor(1.0)) == "cf37d1ffc271cbfffb363671fd0b91a7"
