"""What a process has freed goes back to the kernel."""

from __future__ import annotations

import psutil

from appliance.processes import return_free_memory

BLOCK, COUNT = 64 << 10, 3000  # smaller than what glibc maps by itself; 190 MB


def test_memory_between_what_lives_on_is_returned() -> None:
    process = psutil.Process()
    blocks = [bytes([index % 255 + 1]) * BLOCK for index in range(COUNT)]
    survivors = blocks[::10]
    del blocks
    before = process.memory_info().rss
    return_free_memory()
    returned = before - process.memory_info().rss
    assert returned > 0.7 * BLOCK * (COUNT - len(survivors))
    assert all(block == bytes([index * 10 % 255 + 1]) * BLOCK for index, block in enumerate(survivors))
