"""Who has joined and what is missing."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from plans import make_plan

from appliance.cluster import form
from appliance.cluster.form import (
    RETURNS_WITHIN_S,
    ClusterNode,
    RayCluster,
    Roll,
    call_roll,
    describe_missing_nodes,
    nodes_not_among,
    useful_nodes,
)
from appliance.errors import PreflightError
from appliance.terms.devices import Topology

HEAD = ClusterNode("a", "alpha", "10.0.0.1", gpus=8)
OTHER = ClusterNode("b", "beta", "10.0.0.2", gpus=8)
SMALL = ClusterNode("c", "gamma", "10.0.0.3", gpus=2)
NEEDED = Topology(nodes=2, gpus_per_node=8, tensor_parallel=1, sequence_parallel=1)


def test_gpus_count_and_not_nodes() -> None:
    assert useful_nodes([HEAD, SMALL], NEEDED) == [HEAD]
    assert useful_nodes([HEAD, SMALL, OTHER], NEEDED) == [HEAD, OTHER]


def test_what_is_missing_names_nodes_that_are_too_small() -> None:
    assert describe_missing_nodes([HEAD], NEEDED) == "1 of 2 nodes with 8 GPUs"
    assert describe_missing_nodes([HEAD, SMALL], NEEDED) == "1 of 2 nodes with 8 GPUs (gamma has 2)"
    assert describe_missing_nodes([], dataclasses.replace(NEEDED, gpus_per_node=1)) == "0 of 2 nodes with a GPU"


def test_joined_and_left_are_told_by_id() -> None:
    assert nodes_not_among([HEAD, OTHER], [HEAD]) == [OTHER]
    again = ClusterNode("d", "beta", "10.0.0.2", gpus=8)  # the same host, started again: another node
    assert nodes_not_among([HEAD, OTHER], [HEAD, again]) == [OTHER]


def call_with(
    roll: Roll, *now: ClusterNode, deaths: dict[str, str] | None = None, at: float = 0.0
) -> tuple[Roll, list[str]]:
    return call_roll(roll, now, deaths=deaths or {}, needed=NEEDED, at=at)


def test_who_comes_and_goes_is_told_with_what_is_missing() -> None:
    roll, lines = call_with(Roll(), HEAD, SMALL)
    assert lines == [
        "alpha (10.0.0.1) joined: 1 of 2 nodes with 8 GPUs (gamma has 2)",
        "gamma (10.0.0.3) joined: 1 of 2 nodes with 8 GPUs (gamma has 2)",
    ]
    roll, lines = call_with(roll, HEAD)
    assert lines == ["gamma (10.0.0.3) left: 1 of 2 nodes with 8 GPUs"]
    assert call_with(roll, HEAD) == (roll, [])


def test_a_node_that_somebody_stopped_may_come_back_whenever_they_like() -> None:
    roll, _ = call_with(Roll(), HEAD, SMALL)
    roll, _ = call_with(roll, HEAD, at=1.0)
    assert roll.overdue(at=1e6) == []


def test_a_node_that_died_is_told_at_once_and_has_a_moment_to_come_back() -> None:
    roll, _ = call_with(Roll(), HEAD, SMALL)
    roll, lines = call_with(roll, HEAD, deaths={SMALL.id: "its scheduler crashed"}, at=10.0)
    assert lines == [
        "gamma (10.0.0.3) died (its scheduler crashed): 1 of 2 nodes with 8 GPUs; it has 45 s to come back"
    ]
    assert roll.overdue(at=10.0 + RETURNS_WITHIN_S - 0.1) == []
    assert roll.overdue(at=10.0 + RETURNS_WITHIN_S) == [SMALL]


def test_the_wait_ends_with_the_name_of_who_is_not_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's answers are given, one a look; the clock and the events are real."""
    plan = make_plan(tmp_path, nodes=2, gpus_per_node=8)
    answers = iter([([HEAD, SMALL], {}), *[([HEAD], {SMALL.id: "killed"})] * 9])
    monkeypatch.setattr(form, "find_nodes", lambda: next(answers))
    monkeypatch.setattr(form, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(form, "RETURNS_WITHIN_S", 0.03)
    with pytest.raises(PreflightError) as caught:
        RayCluster(plan, head=None).wait(wait_s=60)
    assert caught.value.message == (
        "gamma (10.0.0.3) died and did not come back within 0.03 s: 1 of 2 nodes with 8 GPUs"
    )
    told = [json.loads(line)["what"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [words.partition(": ")[0] for words in told] == [
        *("alpha (10.0.0.1) joined", "gamma (10.0.0.3) joined", "gamma (10.0.0.3) died (killed)"),
    ]


def test_the_wait_ends_at_its_deadline_with_what_is_missing_and_the_line_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's answers, the head's address and the time are given: looks are as far apart as the wait sleeps."""
    plan, clock = make_plan(tmp_path, nodes=2, gpus_per_node=8), Clock()
    looks: list[float] = []
    monkeypatch.setattr(form, "time", clock)
    monkeypatch.setattr(form, "find_nodes", lambda: looks.append(clock.now) or ([HEAD, SMALL], {}))
    monkeypatch.setattr(form, "_LOOK_EVERY_S", 2.0)
    monkeypatch.setattr(RayCluster, "_address", lambda self: "10.0.0.1:6379")
    with pytest.raises(PreflightError) as caught:
        RayCluster(plan, head=None).wait(wait_s=5.0)
    assert caught.value.message == "after 5 s: 1 of 2 nodes with 8 GPUs (gamma has 2)"
    assert caught.value.hint == "on each other host: appliance join --head 10.0.0.1:6379"
    assert looks == [0.0, 2.0, 4.0, 6.0]


class Clock:
    """A clock that stands still but for sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_node_that_is_back_is_no_longer_missed() -> None:
    """It is another node to Ray, by another id; another host does not stand for it."""
    roll, _ = call_with(Roll(), HEAD, SMALL)
    roll, _ = call_with(roll, HEAD, deaths={SMALL.id: "killed"}, at=10.0)
    other, _ = call_with(roll, HEAD, dataclasses.replace(SMALL, id="x", name="delta", address="10.0.0.4"), at=11.0)
    assert other.overdue(at=100.0) == [SMALL]
    back, lines = call_with(roll, HEAD, dataclasses.replace(SMALL, id="d"), at=12.0)
    assert lines == ["gamma (10.0.0.3) is back: 1 of 2 nodes with 8 GPUs (gamma has 2)"]
    assert back.overdue(at=100.0) == []


@pytest.mark.parametrize("looks", [1, 2])
def test_a_node_that_was_back_before_its_death_was_told_is_not_missed(looks: int) -> None:
    """A container that is killed and starts at once can be quicker than Ray."""
    again = dataclasses.replace(SMALL, id="d")
    roll, _ = call_with(Roll(), HEAD, SMALL)
    if looks == 2:
        roll, _ = call_with(roll, HEAD, SMALL, again, at=9.0)
    roll, lines = call_with(roll, HEAD, again, deaths={SMALL.id: "killed"}, at=10.0)
    assert lines[-1] == "gamma (10.0.0.3) had died (killed) and is back: 1 of 2 nodes with 8 GPUs (gamma has 2)"
    assert roll.overdue(at=100.0) == []


def test_a_node_that_was_there_before_does_not_stand_for_one_that_died() -> None:
    twin = dataclasses.replace(SMALL, id="twin")
    roll, _ = call_with(Roll(), HEAD, SMALL, twin)
    roll, _ = call_with(roll, twin, SMALL, HEAD, at=5.0)
    roll, _ = call_with(roll, HEAD, SMALL, deaths={twin.id: "killed"}, at=10.0)
    assert roll.overdue(at=100.0) == [twin]


def test_of_two_nodes_that_died_on_one_host_one_is_still_missed() -> None:
    twin = dataclasses.replace(SMALL, id="twin")
    roll, _ = call_with(Roll(), HEAD, SMALL, twin)
    roll, _ = call_with(roll, HEAD, deaths={SMALL.id: "killed", twin.id: "killed"}, at=10.0)
    roll, _ = call_with(roll, HEAD, dataclasses.replace(SMALL, id="d"), at=12.0)
    assert roll.overdue(at=100.0) == [twin]
