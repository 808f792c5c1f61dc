"""What rewards cost, out of what was timed."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.rewards import ABOUT, Cost, markdown
from benchmarks.telemetry import Where

COST = Cost(rounds_s=(4.0, 3.0, 5.0), step_s=(5.0, 6.0, 4.0), in_a_step=250, slow_s=20.5, workers=1)


def test_both_sides_and_their_ratio_are_said() -> None:
    """40 steps of 5 s are 200 s, of which 4 s are 2 %; 20.5 s of 40 s are 51 %."""
    assert COST.lines == [
        "10,000 trivial rewards in 1 process: 4.00 s (3.00 to 5.00); 40.0 steps of 250 samples make as many, 5.00 s "
        "each (median of 3), in 200 s: 2.0%, not more than 5%",
        "100 rewards of 0.2 s beside an engine that makes a response every 200 ms: 20.5 s; one after the other 40.0 s: "
        "51%, not more than 60%",
    ]
    assert COST.is_kept


def test_what_is_not_kept_is_said() -> None:
    dear, apart = replace(COST, rounds_s=(11.0,)), replace(COST, slow_s=24.5)
    assert dear.lines[0].endswith("5.5%, more than 5%") and not dear.is_kept
    assert apart.lines[1].endswith("61%, more than 60%") and not apart.is_kept


def test_more_processes_are_faster_engines() -> None:
    said = replace(COST, workers=4, slow_s=5.1).lines[1]
    assert said.startswith("100 rewards of 0.2 s beside an engine that makes a response every 50 ms: 5.1 s; ")
    assert said.endswith("one after the other 10.0 s: 51%, not more than 60%")


def test_the_page_says_where_and_of_what() -> None:
    where = Where(date="2026-11-23", processor="a processor", cores=2, recipe="own-task", busy=0.02)
    assert markdown(COST, where).splitlines() == [
        "# What rewards cost",
        "",
        *ABOUT,
        "",
        "Made by `python -m benchmarks.rewards RUN -o docs/results`, RUN of `own-task`.",
        "Taken on 2026-11-23: a processor, 2 cores, of which others used 2% before.",
        "",
        f"* {COST.lines[0]}. This counts the rewards as if nothing overlapped.",
        f"* {COST.lines[1]}. That the rollouts of a training do overlap with its rewards is checked by",
        "  `test_a_slow_reward_overlaps_with_rollouts_that_still_run`.",
    ]
