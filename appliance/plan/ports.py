"""The ports of a node: fixed, so that a firewall can be told. Several nodes on one host take different bases.

    base        the head's control store (GCS), what `appliance join --head HOST:PORT` names
    base + 1    node manager            base + 4    agent, gRPC
    base + 2    object manager          base + 5    agent, HTTP
    base + 3    runtime environments    base + 6    metrics
    base + 7    the head's client server, which nothing of ours uses
    base + 100 to base + 999            worker processes

The processes that train find free ports of their own for what they say to each other (torch, TransferQueue): nodes of
one training must reach each other on the ephemeral ports (`net.ipv4.ip_local_port_range`) too.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_BASE = 6379  # Ray's own
LARGEST_BASE = 65535 - 999


@dataclass(frozen=True)
class Ports:
    base: int = DEFAULT_BASE

    @property
    def control(self) -> int:
        """The head's control store; on a worker node nothing listens there."""
        return self.base

    @property
    def client(self) -> int:
        """Of the head: Ray starts a server there for programs outside the cluster."""
        return self.base + 7

    @property
    def of_the_head(self) -> tuple[int, ...]:
        """What listens on the host of a head, its workers apart."""
        return tuple(range(self.base, self.client + 1))

    @property
    def of_a_node(self) -> tuple[int, ...]:
        """What listens on the host of any other node, its workers apart."""
        return tuple(range(self.base + 1, self.client))

    @property
    def arguments(self) -> tuple[str, ...]:
        """Of `ray start`, for any node."""
        return (
            f"--node-manager-port={self.base + 1}",
            f"--object-manager-port={self.base + 2}",
            f"--runtime-env-agent-port={self.base + 3}",
            f"--dashboard-agent-grpc-port={self.base + 4}",
            f"--dashboard-agent-listen-port={self.base + 5}",
            f"--metrics-export-port={self.base + 6}",
            f"--min-worker-port={self.base + 100}",
            f"--max-worker-port={self.base + 999}",
        )
