"""docs/troubleshooting.md says what the program says: exit codes, errors, symptoms, signals, guards, messages.

The page is written by hand and compared, not printed from the code as docs/metrics.md is: what the code has is one or
two columns of some tables (exit codes, facts, hints, signals). What each of them means, in which order to look, and the
sections without a table are in no message. To print the page they would have to become texts in the code that no
program shows.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from appliance import errors
from appliance.console import READER_GONE
from appliance.guard.governor import Decision, Level, Move, Rung
from appliance.guard.policy import Action, Collapse, MismatchBounds
from appliance.guard.signals import BoundSide, Cause, CollapseGuard, Signals, Watches, watch_guards
from appliance.launch import outcome
from appliance.terms.schemes import Scheme

Row = tuple[str, ...]

PLACES = {"docker stop", "train", "cluster.port", "--resume", "--name"}  # of a message, and commands


@pytest.fixture(scope="module")
def sections(root: Path) -> dict[str, str]:
    """The text below each heading."""
    text = (root / "docs/troubleshooting.md").read_text()
    _, *parts = re.split(r"^##+ (.+)\n", text, flags=re.M)
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.fixture(scope="module")
def source(modules: dict[str, ast.Module]) -> str:
    """Every text of the code, those of f-strings without what is computed."""
    return "\n".join(
        node.value
        for tree in modules.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def rows(section: str) -> list[Row]:
    """The cells of a table's rows, without its head."""
    lines = [line for line in section.splitlines() if line.startswith("|")]
    cells = [tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]) for line in lines[2:]]
    return [tuple(cell.replace("\\|", "|") for cell in row) for row in cells]


def error_classes(kind: type[errors.ApplianceError] = errors.ApplianceError) -> Iterator[type[errors.ApplianceError]]:
    yield kind
    for narrower in kind.__subclasses__():
        if narrower.__module__ == errors.__name__:
            yield from error_classes(narrower)


def test_every_exit_code_is_there_with_its_errors(sections: dict[str, str]) -> None:
    by_code: dict[int, set[str]] = {0: set(), READER_GONE: set()}
    for kind in error_classes():
        by_code.setdefault(kind.exit_code, set()).add(kind.__name__)
    shown = {int(row[0]): set(re.findall(r"`(\w+)`", row[1])) for row in rows(sections["Exit codes"])}
    assert shown == by_code


def test_every_error_of_the_engine_is_explained(sections: dict[str, str]) -> None:
    narrower = {kind.__name__ for kind in error_classes(errors.EngineError)} - {errors.EngineError.__name__}
    assert {row[0].strip("`") for row in rows(sections["The engine failed"])} == narrower


def test_every_symptom_is_there_with_its_hint(sections: dict[str, str]) -> None:
    symptoms = [(fact, hint) for _, fact, hint in outcome.SYMPTOMS]
    assert [(row[0], row[2]) for row in rows(sections["The training failed"])] == symptoms


def test_every_signal_is_there_with_its_hint(sections: dict[str, str]) -> None:
    known = [(number.name, why, hint) for number, (why, hint) in outcome._SIGNALS.items()]
    assert rows(sections["A process was killed"]) == known


def test_every_signal_of_the_mismatch_is_there(sections: dict[str, str]) -> None:
    shown = {row[1].strip("`") for row in rows(sections["mismatch bad"])}
    assert shown == {field.name for field in fields(MismatchBounds)} | {"nonfinite_fraction"}


def alarms() -> dict[str, str]:
    """What each guard's event says that it is, and the signal that it names: all of them at once in trouble."""
    limits = Collapse()
    memory = Watches(rewards=(1.0,) * 9, first_rewards=(1.0,) * 10, best_reward=0.8, first_entropies=(1.0,) * 5)
    signals = Signals(
        step=9,
        grad_norm=float("nan"),
        nonfinite_fraction=0.5,
        reward_mean=-9.0,
        entropy=0.0,
        equal_group_fraction=1.0,
        unfinished_fraction=1.0,
    )
    level, signal_by_symptom = Level(Rung.OBSERVE, Scheme.INT8), {}
    for _ in range(max(limits.entropy.warn_after, limits.equal_samples.warn_after)):
        memory, reports = watch_guards(memory, signals, limits=limits, calm_after=1)
        for report in reports:
            decision = Decision(
                9, Move.ALARM, Action.WARN, level, level, (report.cause,), 1, judged_steps=1, guard=report.guard
            )
            signal_by_symptom[decision.text.split(": ")[1]] = report.cause.signal
    return signal_by_symptom


def test_every_guard_is_there_with_what_it_looks_at(sections: dict[str, str]) -> None:
    ladder, *guards = rows(sections["The guard warned or stopped"])
    assert ladder[1] == "the mismatch"
    shown = {row[0].strip("`"): row[1].strip("`") for row in guards}
    assert len(shown) == len(CollapseGuard)
    assert shown == alarms()


def test_the_example_of_an_alarm_reads_as_one(sections: dict[str, str]) -> None:
    level, cause = Level(Rung.OBSERVE, Scheme.INT8), Cause("entropy", 0.031, BoundSide.BELOW, 0.036)
    alarm = Decision(
        41, Move.ALARM, Action.WARN, level, level, (cause,), 5, judged_steps=5, guard=CollapseGuard.ENTROPY
    )
    assert f"`{alarm.text}`" in sections["The guard warned or stopped"].replace("\n", " ")


@pytest.mark.parametrize("name", ["It does not start", "Docker", "Ray, ports and several hosts"])
def test_every_message_that_it_quotes_is_one_of_the_programs(name: str, sections: dict[str, str], source: str) -> None:
    """In the first column, in backticks; what is computed in them is `...`."""
    messages = [text for row in rows(sections[name]) for text in re.findall(r"`([^`]+)`", row[0])]
    pieces = [piece for text in messages for piece in re.split(r" ?\.\.\. ?|: ", text) if piece and piece not in PLACES]
    assert pieces
    assert [piece for piece in pieces if piece not in source] == []


def test_a_run_that_is_cut_says_so_in_the_words_quoted(sections: dict[str, str], source: str) -> None:
    [message] = re.findall(r"`(no progress [^`]*)`", sections["The run is stuck"])
    assert [piece for piece in message.split("...") if piece not in source] == []
