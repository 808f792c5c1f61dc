"""JSON lines: problems that a tokenizer and parquet can take, or refused with the line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fuzz_surface import attempt, fuzzed
from fuzz_text import VARIANTS, as_json, broken, deep, raw, seeds, values, variants, wild_text
from hypothesis import strategies as st
from plans import make_files, make_own_task

from appliance.errors import RecipeError
from appliance.finding import fault
from appliance.tasks import own_task
from appliance.tasks import rows as row_files
from appliance.tasks.built_in import dapo_math, gsm8k
from appliance.tasks.own_task import template_parts
from appliance.tasks.rows import ProblemSet, read_file, without_faults, write_parquet

GOOD = [
    {"question": "What is 1 + 2?", "answer": "It is 3.\n#### 3"},
    {"problem": "What is 1 + 2?", "answer": "3"},
    {"prompt": [{"role": "user", "content": "1 + 2?"}], "reward_model": {"style": "rule", "ground_truth": "3"}},
]
PARTS = ("question", "problem", "answer", "prompt", "reward_model", "role", "content", "ground_truth")
DIGITS = (
    "#### " + "9" * 5000,
    "#### 1" + ",1" * 3000 + "x",
    "#" * 6000,
    "#### " * 1500,
    "#### -$-.5",
    "#### 1." + "0" * 900,
)
odd = st.one_of(values, st.sampled_from(DIGITS), wild_text)


@st.composite
def rows(draw: st.DrawFn) -> bytes:
    """Rows of each kind with wild values in them, some lines of them no JSON at all."""
    lines: list[str] = []
    for _ in range(draw(st.integers(1, 3))):
        row: dict[str, Any] = dict(draw(st.sampled_from(GOOD)))
        for _ in range(draw(st.integers(0, 2))):
            row[draw(st.sampled_from(PARTS))] = draw(odd)
        if draw(st.integers(0, 3)) == 0:
            row["prompt"] = [{"role": draw(st.sampled_from(["user", "system"])), "content": draw(odd)}]
        lines.append(as_json(row))
    lines += draw(
        st.lists(
            st.sampled_from([*deep(900), '{"a": ' + "1" * 5000 + "}", "NaN", "[]", "\x00", '{"a": 1} x']), max_size=1
        )
    )
    return draw(st.sampled_from(["\n", "\r\n", "\n\n"])).join(lines).encode()


def read(file: Path, *, task: Any) -> ProblemSet:
    try:
        problem_set = without_faults(read_file(file, source=task.TASK.source))[0]
    except RecipeError as error:
        assert all(message.startswith(str(file)) for message, _ in error.problems)
        raise
    for problem in problem_set.problems:
        assert problem.prompt.encode() and problem.truth.encode()
        if task is gsm8k:
            assert gsm8k.score(response=f"#### {problem.truth}", truth=problem.truth) in (0.0, 1.0)
    return problem_set


@fuzzed(
    "JSON lines",
    variants=VARIANTS,
    seed=seeds,
    content=st.one_of(raw, rows(), broken([as_json(row) for row in GOOD])),
    is_gsm8k=st.booleans(),
)
def test_fuzz_json_lines(room: Path, content: bytes, is_gsm8k: bool, seed: int) -> None:
    task = gsm8k if is_gsm8k else dapo_math
    for each in variants(content, seed):
        (room / "data.jsonl").write_bytes(each)
        attempt("JSON lines", lambda: read(room / "data.jsonl", task=task), folder=room)


OWN = [
    {"prompt": "1 + 2?", "answer": 3},
    {"prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 2?"}], "answer": "3"},
    {"prompt": [{"role": "user", "content": "?"}], "reward_model": {"ground_truth": {"a": [3]}}, "data_source": "x"},
]
MOST = 100_000  # characters of a row here: of the 8 MiB that one may have, hundreds would take minutes
LARGE = ("prompt", "answer", "extra")
TEMPLATES = (
    "{prompt}",
    "{answer} {reward_model.ground_truth}",
    "{{{prompt}}}",
    "{prompt!r}",
    "{}",
    "{a.b.c}",
    "{",
    "}",
)


@st.composite
def own_rows(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Rows of each form with wild values in them, some too large; none: an empty file."""
    rows = []
    for _ in range(draw(st.integers(0, 3))):
        row: dict[str, Any] = dict(draw(st.sampled_from(OWN)))
        for _ in range(draw(st.integers(0, 2))):
            row[draw(st.sampled_from([*PARTS, "data_source", "extra"]))] = draw(odd)
        if draw(st.integers(0, 9)) == 0:
            row[draw(st.sampled_from(LARGE))] = "x" * 2 * MOST
        if draw(st.integers(0, 2)) == 0:
            roles = st.sampled_from(["user", "system", "assistant", "tool", "", 3])
            row["prompt"] = [{"role": draw(roles), "content": draw(odd)} for _ in range(draw(st.integers(0, 3)))]
        rows.append(row)
    return rows


@fuzzed(
    "own rows",
    rows=own_rows(),
    template=st.one_of(st.just(""), st.just(""), st.just("{prompt}"), st.sampled_from(TEMPLATES), wild_text),
    path=st.sampled_from(["", "answer", "reward_model.ground_truth", "a..b", "."]),
    is_parquet=st.booleans(),
)
def test_fuzz_own_rows(
    room: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows: list[dict[str, Any]],
    template: str,
    path: str,
    is_parquet: bool,
) -> None:
    monkeypatch.setattr(row_files, "MAX_ROW", MOST)
    file = room / ("own.parquet" if is_parquet else "own.jsonl")
    try:
        pq.write_table(pa.Table.from_pylist(rows), file) if is_parquet else file.write_text(
            "\n".join(map(as_json, rows))
        )
    except (pa.ArrowException, OverflowError, UnicodeEncodeError, TypeError):  # no parquet file can be this
        file = room / "own.jsonl"
        file.write_text("\n".join(map(as_json, rows)))
    attempt("own rows", lambda: read_own(file, template=template, truth=path), folder=room)


def read_own(file: Path, *, template: str, truth: str) -> None:
    """What is too large is refused by its field, and an empty file as one."""
    try:
        template_parts(template)
        settings = make_own_task(template=template or None, truth=truth or None)
    except ValueError as error:  # a rule of recipes says so, or their section: no text has half a character
        raise RecipeError([fault(("task.template",), str(error))]) from error
    source = own_task.task(settings, files=make_files()).source
    assert source is not None
    rows_read = read_file(file, source=source)
    assert all(finding.fact.startswith(str(file)) for finding in rows_read.faults)
    if not rows_read.rows:
        assert rows_read.problems == [] and len(rows_read.faults) == 1
    for problem in rows_read.problems:
        assert len(problem.row) <= MOST
    for problem in without_faults(rows_read)[0].problems:
        assert problem.prompt.strip()
        assert isinstance(json.loads(problem.row), dict)
        write_parquet({"train": [problem]}, path=file.parent / "made.parquet", kind="own")


@pytest.mark.parametrize("number", range(len(DIGITS)))
def test_an_odd_number_is_no_error_in_a_row_nor_in_a_response(room: Path, number: int) -> None:
    (room / "data.jsonl").write_text(as_json({"question": "1 + 2?", "answer": DIGITS[number]}))
    attempt("JSON lines", lambda: read(room / "data.jsonl", task=gsm8k), folder=room)
    assert attempt("JSON lines", lambda: gsm8k.score(response=DIGITS[number], truth="3"), folder=room) == 0.0
