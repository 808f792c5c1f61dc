"""A surface: one kind of input, so many generated cases of it, counted; and what the program may answer to a case.

The long profile is `make fuzz`; without it the same tests take a small share, and the same cases each time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fuzz_watch import watching
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

from appliance.errors import ApplianceError

LONG = "fuzz"  # the name of the profile, `--hypothesis-profile=fuzz`
LEAST_CASES = 100_000
CODES = frozenset({2, 3, 4, 5, 6})  # exit codes of docs/troubleshooting.md that bad input may have; 1 is our own fault

# Cases of a surface: (in `make test`, in `make fuzz`).
SHARES = {
    "recipe bytes": (300, 14_000),
    "recipe text": (300, 12_000),
    "recipe values": (150, 6_000),
    "--set": (150, 6_000),
    "plans": (100, 3_000),
    "typed recipes": (300, 6_000),
    "overrides": (100, 4_000),
    "comparisons": (200, 7_000),
    "FlashRL YAML": (300, 11_000),
    "JSON lines": (300, 14_000),
    "rewards": (300, 10_000),
    "rows of rewards": (150, 5_000),
    "own rows": (300, 8_000),
    "profile headers": (250, 10_000),
    "profile.pt": (250, 8_000),
    "manifests": (200, 7_000),
    "run folders": (100, 3_000),
    "config.json": (100, 4_000),
    "turns": (100, 4_000),
    "reward functions": (80, 2_000),
    "broken files": (40, 1_000),
    "tools": (80, 2_000),
    "chat templates": (150, 4_000),
}

counted: Counter[str] = Counter()
refused: Counter[str] = Counter()


def is_long() -> bool:
    return settings.get_current_profile_name() == LONG


def cases(surface: str) -> int:
    return SHARES[surface][is_long()]


def fuzzed(
    surface: str, *, variants: int = 1, **drawn: SearchStrategy[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a test: it is called with what is drawn until there were as many cases as SHARES says.

    each: cases of one call.  The test's fixtures are shared by all of them.
    """
    chosen = settings(
        max_examples=-(-cases(surface) // variants),
        derandomize=not is_long(),
        database=None,
        deadline=None,  # ours is one of computing, tests/fuzz/fuzz_watch.py
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    return lambda test: chosen(given(**drawn)(test))


def attempt(surface: str, work: Callable[[], Any], *, folder: Path, may: frozenset[str] = frozenset()) -> Any:
    """What the work returns, or None when it refuses the input by an error of ours. Counts one case.

    folder: the only one that may change.  may: as of `watching`.  Raises AssertionError for an error that nobody should
    see, Forbidden, Hang, and whatever else the work raises: all of them are findings.
    """
    counted[surface] += 1
    try:
        with watching(folder, may=may):
            return work()
    except ApplianceError as error:
        assert error.exit_code in CODES, f"{type(error).__name__} ends with {error.exit_code}: {error.message}"
        assert error.message.strip(), f"{type(error).__name__} without a word"
        refused[surface] += 1
    return None


def table() -> list[str]:
    """What was run, a line each, and the sum."""
    width = max(map(len, SHARES))
    lines = [f"{'surface':<{width}}   cases  refused"]
    lines += [f"{name:<{width}}  {counted[name]:>6}  {refused[name]:>7}" for name in SHARES if counted[name]]
    return [*lines, f"{'all':<{width}}  {counted.total():>6}  {refused.total():>7}"]
