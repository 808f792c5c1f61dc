"""Who has joined and what is missing, as values. Waiting is for resources and not for a number of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Node:
    """A node of the cluster as Ray's control store has it. gpus: of Ray's resource `GPU`.

    program: label with the fingerprint of the program that made the node, empty for a node that somebody else made.
    """

    id: str
    name: str
    address: str
    gpus: int
    program: str = ""

    @property
    def text(self) -> str:
        return f"{self.name} ({self.address})"


@dataclass(frozen=True)
class Needed:
    """nodes with gpus_per_node GPUs each."""

    nodes: int
    gpus_per_node: int


def is_enough(nodes: Sequence[Node], needed: Needed) -> bool:
    return len(useful(nodes, needed)) >= needed.nodes


def useful(nodes: Sequence[Node], needed: Needed) -> list[Node]:
    """Those with the GPUs that one node of the training needs."""
    return [node for node in nodes if node.gpus >= needed.gpus_per_node]


def missing(nodes: Sequence[Node], needed: Needed) -> str:
    """What is there and what is not, as one line."""
    have = len(useful(nodes, needed))
    gpus = "a GPU" if needed.gpus_per_node == 1 else f"{needed.gpus_per_node} GPUs"
    there = f"{have} of {needed.nodes} nodes with {gpus}"
    small = [f"{node.name} has {node.gpus}" for node in nodes if node.gpus < needed.gpus_per_node]
    return there + (f" ({', '.join(small)})" if small else "")


def joined(before: Sequence[Node], now: Sequence[Node]) -> list[Node]:
    known = {node.id for node in before}
    return [node for node in now if node.id not in known]


def left(members: Sequence[Node], now: Sequence[Node]) -> list[Node]:
    alive = {node.id for node in now}
    return [node for node in members if node.id not in alive]
