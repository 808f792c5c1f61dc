"""Loops over rows on several threads."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from appliance.quant import row_threads
from appliance.quant.row_threads import for_parts_of_rows


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine of vLLM's in this process forbids `torch.set_num_threads`."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


@pytest.mark.parametrize(("rows", "parts"), [(1, [(0, 1)]), (8, [(0, 4), (4, 8)]), (9, [(0, 8), (8, 9)])])
@pytest.mark.usefixtures("two_threads")
def test_each_row_is_in_one_part_of_whole_multiples(rows: int, parts: list[tuple[int, int]]) -> None:
    met: list[tuple[int, int]] = []
    for_parts_of_rows(lambda part: met.append((part.start, part.stop)), rows=rows, multiple=4)
    assert sorted(met) == parts


@pytest.mark.usefixtures("two_threads")
def test_an_error_of_another_thread_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        for_parts_of_rows(lambda part: 1 // (part.start == 0), rows=2, multiple=1)


def test_a_fork_has_threads_of_its_own() -> None:
    row_threads._pool(2).submit(threading.get_ident).result()
    child = os.fork()
    if not child:
        row_threads._pool(2).submit(threading.get_ident).result(timeout=20)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
