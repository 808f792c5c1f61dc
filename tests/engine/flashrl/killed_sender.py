"""A trainer in a process of its own, for a test to kill: it sends a checkpoint to a server, as vLLM's weight transfer.

python killed_sender.py URL CHECKPOINT: before each call it says which on stdout (`start`, a segment's name, `finish`),
and goes on when it is sent a line.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

from engines import read_checkpoint


def wait(call: str) -> None:
    sys.stdout.write(f"{call}\n")
    sys.stdout.flush()
    sys.stdin.readline()


def main(url: str, checkpoint: str) -> None:
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

    from flashrl_compat.shared_memory import ShmTrainer

    server = HTTPVLLMWeightSyncClient(url)

    def start() -> None:
        wait("start")
        server.start_weight_update()

    def update(info: dict[str, object]) -> None:
        wait(str(info["segment"]))
        server.update_weights(info)

    def finish() -> None:
        wait("finish")
        server.finish_weight_update()

    client = SimpleNamespace(start_weight_update=start, update_weights=update, finish_weight_update=finish)
    ShmTrainer(client=client, source=read_checkpoint(Path(checkpoint)), chunk_bytes=40_000).send_weights()


if __name__ == "__main__":
    main(*sys.argv[1:])
