"""How many cases there were. This file is the last of its folder's `test_fuzz_*`."""

from __future__ import annotations

from fuzz_surface import LEAST_CASES, SHARES, cases, counted, is_long


def test_every_surface_had_its_cases() -> None:
    assert {name: counted[name] for name in SHARES if counted[name] < cases(name)} == {}


def test_a_long_fuzz_has_a_hundred_thousand_cases() -> None:
    assert sum(long for _, long in SHARES.values()) >= LEAST_CASES
    assert not is_long() or counted.total() >= LEAST_CASES
