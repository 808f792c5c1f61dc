"""A compiled loop over rows, on as many threads as PyTorch has."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch


def for_parts_of_rows(work: Callable[[slice], None], *, rows: int, multiple: int) -> None:
    """Call `work` with parts of the rows, one for each thread that PyTorch has; the first on the caller's own.

    work: releases the GIL.  multiple: a part has a multiple of so many rows, or is the last.
    """
    threads = torch.get_num_threads()
    step = max(1, -(-rows // (threads * multiple))) * multiple
    if not rows:
        return
    first, *others = (slice(start, min(start + step, rows)) for start in range(0, rows, step))
    running = [_pool(threads).submit(work, part) for part in others]
    work(first)
    for future in running:
        future.result()


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="rows")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of its parent's threads
