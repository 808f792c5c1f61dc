"""Which layers a weight update proves, and how thoroughly.

With `every` = n a layer has its turn once in n syncs; at sync 1 and at each n-th all layers are asked. A full proof
looks at all that a layer holds; it is made at sync 1 and at the first sync of each ROTATION or more that asks all
layers. Between two of them a proof that looks at a part (rows, columns) moves on by one part in each round of n syncs.
"""

from __future__ import annotations

from dataclasses import dataclass

ROTATION = 8


@dataclass(frozen=True)
class Ask:
    """Of one layer at one sync. round: how many times n syncs went by; which part is looked at follows from it."""

    sync: int
    round: int
    full: bool


def ask(turn: int, *, sync: int, every: int) -> Ask | None:
    """None when the layer is not asked. turn: number of the layer.  sync: from 1.  every: at least 1."""
    everyone = sync == 1 or sync % every == 0
    if not everyone and (turn - sync) % every != 0:
        return None
    full_every = -(-ROTATION // every) * every
    return Ask(sync=sync, round=sync // every, full=sync == 1 or sync % full_every == 0)
