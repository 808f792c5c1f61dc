"""Who has joined and what is missing."""

from __future__ import annotations

from appliance.cluster.waiting import Needed, Node, is_enough, joined, left, missing, useful

HEAD = Node("a", "alpha", "10.0.0.1", gpus=8)
OTHER = Node("b", "beta", "10.0.0.2", gpus=8)
SMALL = Node("c", "gamma", "10.0.0.3", gpus=2)
NEEDED = Needed(nodes=2, gpus_per_node=8)


def test_gpus_count_and_not_nodes() -> None:
    assert not is_enough([HEAD, SMALL], NEEDED)
    assert is_enough([HEAD, SMALL, OTHER], NEEDED)
    assert useful([HEAD, SMALL, OTHER], NEEDED) == [HEAD, OTHER]


def test_what_is_missing_names_nodes_that_are_too_small() -> None:
    assert missing([HEAD], NEEDED) == "1 of 2 nodes with 8 GPUs"
    assert missing([HEAD, SMALL], NEEDED) == "1 of 2 nodes with 8 GPUs (gamma has 2)"
    assert missing([], Needed(nodes=2, gpus_per_node=1)) == "0 of 2 nodes with a GPU"


def test_joined_and_left_are_told_by_id() -> None:
    assert joined([HEAD], [HEAD, OTHER]) == [OTHER]
    assert left([HEAD, OTHER], [HEAD]) == [OTHER]
    again = Node("d", "beta", "10.0.0.2", gpus=8)  # the same host, started again: another node
    assert left([HEAD, OTHER], [HEAD, again]) == [OTHER]
