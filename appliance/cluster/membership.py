"""Who has joined, who is gone and what is missing, as values. Waiting is for resources and not for a number of nodes.

Who leaves while the others are waited for is told at once. A node that somebody stopped may come back whenever they
like. One that died has a moment to come back (a restarted container does), and then the waiting ends with its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

RETURNS_WITHIN_S = 45.0  # with the seconds that Ray takes to see a killed node, less than a minute


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


@dataclass(frozen=True)
class Roll:
    """present: who was there at the last look, as they came.  absent: who died since the first look and is not back,
    with the time when it was missed."""

    present: tuple[Node, ...] = ()
    absent: tuple[tuple[Node, float], ...] = ()

    def overdue(self, *, at: float) -> list[Node]:
        return [node for node, since in self.absent if at - since >= RETURNS_WITHIN_S]


def call(
    roll: Roll, now: Sequence[Node], *, deaths: Mapping[str, str], needed: Needed, at: float
) -> tuple[Roll, list[str]]:
    """The roll after one more look, and a line about each who came or went.

    deaths: by id, Ray's words for the end of nodes that nobody stopped.  at: s, of a clock that only goes forward.
    """
    absent, lines, there, gone = list(roll.absent), [], missing(now, needed), left(roll.present, now)
    present = [node for node in roll.present if node not in gone]
    for node in joined(roll.present, now):
        known = next((each for each in absent if _is_host_of(node, each[0])), None)
        if known is not None:
            absent.remove(known)
        lines.append(f"{node.text} {'is back' if known else 'joined'}: {there}")
        present.append(node)
    for node in gone:
        if node.id not in deaths:
            lines.append(f"{node.text} left: {there}")
        elif any(_is_host_of(later, node) for later in present if later not in _until(node, roll.present)):
            lines.append(f"{node.text} had died ({deaths[node.id]}) and is back: {there}")
        else:
            absent.append((node, at))
            lines.append(f"{node.text} died ({deaths[node.id]}): {there}; it has {RETURNS_WITHIN_S:g} s to come back")
    return Roll(tuple(present), tuple(absent)), lines


def _until(node: Node, present: Sequence[Node]) -> Sequence[Node]:
    """Those who came before `node`, and itself. A host that starts again may be there before Ray tells of its death."""
    return present[: present.index(node) + 1]


def _is_host_of(node: Node, other: Node) -> bool:
    """A host that starts again is another node. Of several nodes on one host any will do."""
    return (node.name, node.address) == (other.name, other.address)
