"""Which part of an update an operation of torch's profiler belongs to."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.update_parts import REST, seconds_by_part, table


@dataclass(eq=False)
class Event:
    """Of torch's profiler: what `seconds_by_part` reads."""

    name: str
    self_cpu_time_total: float = 0.0
    cpu_parent: Event | None = None
    sequence_nr: int = -1


def test_the_forwards_parts_are_those_of_its_callers_and_the_backwards_those_of_its_nodes() -> None:
    norm, attention = Event("part: norms", 1e6), Event("part: attention")
    head = Event("part: head: log-probs")
    norms_node = Event("autograd::engine::evaluate_function: MulBackward0", 2e6, sequence_nr=7)
    heads_node = Event("autograd::engine::evaluate_function: MmBackward0", sequence_nr=9)
    events = [
        norm,
        Event("aten::mul", 3e6, norm, sequence_nr=7),
        Event("aten::mul", 4e6, norms_node),
        norms_node,
        Event("aten::bmm", 5e6, Event("aten::matmul", cpu_parent=attention)),
        Event("aten::mm", 6e6, head, sequence_nr=9),
        Event("aten::mm", 7e6, Event("MmBackward0", cpu_parent=heads_node)),
        Event("aten::mm", 8e6, Event("autograd::engine::evaluate_function: MmBackward0", sequence_nr=3)),
        Event("aten::copy_", 9e6, Event("autograd::engine::evaluate_function: LogProbsBackward", sequence_nr=1)),
        Event("aten::add", 10e6),
    ]
    seconds = seconds_by_part(events)
    assert seconds == {
        "norms": 10.0,
        "attention": 5.0,
        "head: matrix products": 13.0,
        "layers: matrix products": 8.0,
        "head: log-probs": 9.0,
        REST: 10.0,
    }
    assert table(seconds)[2:4] == ["| head: matrix products | 13.00 | 24 % |", "| norms | 10.00 | 18 % |"]
    assert table(seconds)[-1] == "| all | 55.00 | |"
