"""How the GPUs of a training are shared out. Without a GPU, one CPU rank stands for one GPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    nodes: int
    gpus_per_node: int
    tensor_parallel: int
    """GPUs that share one engine."""
    sequence_parallel: int
    """GPUs that share one sequence of the trainer."""

    @property
    def gpus(self) -> int:
        """Of all nodes; each has one rank of the trainer."""
        return self.nodes * self.gpus_per_node

    @property
    def engines(self) -> int:
        """At least 1: what does not divide is refused, and has no engines to speak of."""
        return max(1, self.gpus // self.tensor_parallel)

    @property
    def data_parallel(self) -> int:
        """Shares of a mini-batch, at least 1: what does not divide is refused."""
        return max(1, self.gpus // self.sequence_parallel)
