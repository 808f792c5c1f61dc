"""Which layers a weight update proves, and how thoroughly.

With `every` = n a layer has its turn once in each round of n syncs. Where a proof looks at a part of a layer (rows,
columns) it moves on by one part in each round. At sync 1 and at the last sync of each ROTATION rounds all layers are
asked, and the proof is full: it looks at all that a layer holds. What is too dear even for that is asked of all layers
at sync 1 and then of each in turn, one in ROTATION at each full proof.
"""

from __future__ import annotations

from dataclasses import dataclass

ROTATION = 8


@dataclass(frozen=True)
class Ask:
    """Of one layer at one sync. round: how many times n syncs went by; which part is looked at follows from it.

    thorough: a full proof in which it is this layer's turn for what is dear.
    """

    sync: int
    round: int
    full: bool
    thorough: bool


def ask(turn: int, *, sync: int, every: int) -> Ask | None:
    """None when the layer is not asked. turn: number of the layer.  sync: from 1.  every: at least 1."""
    number, rest = divmod(sync, ROTATION * every)
    full = sync == 1 or rest == 0
    if not full and (turn - sync) % every != 0:
        return None
    is_turn = rest == 0 and (turn - number) % ROTATION == 0
    return Ask(sync=sync, round=sync // every, full=full, thorough=sync == 1 or is_turn)
