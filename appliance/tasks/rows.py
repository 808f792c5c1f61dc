"""Data files as problems: JSON lines or parquet, row by row, every bad row named, repeated problems once; and back.

A row is what a task's own data set has (its `Source` knows), or verl's schema, in which files are written: `prompt`,
one chat message of the user, and `reward_model.ground_truth`. Imports pyarrow, for parquet only.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.errors import MOST_SHOWN, RecipeError, first_line
from appliance.finding import Finding, fault
from appliance.hub import beat_with_progress
from appliance.record.liveness import Heartbeat
from appliance.tasks.columns import Row, has_bytes, plain_rows
from appliance.tasks.formats import foreign_format, is_parquet, no_such_file
from appliance.tasks.truth import answer_text, is_nothing

if TYPE_CHECKING:
    import pyarrow as pa

PARQUET = ".parquet"
MAX_PROBLEMS = MOST_SHOWN - 1  # and a line for the rest of them
MAX_LINE = 16 << 20  # bytes: a line is held in memory, and what has no line ends would be held whole
MAX_ROW = 8 << 20  # characters: every sample carries its problem's row to the reward
_HALF_A_CHARACTER = re.compile("[\ud800-\udfff]")
ROWS_AT_A_TIME = 8192  # of a parquet file: DAPO-Math-17k has 1.8 million

Message = tuple[str, str]  # (role, content)
RowFault = str | tuple[str, str]  # a fact about a row, or (a fact, the remedy where `Source.hint` is none)


@dataclass(frozen=True)
class Problem:
    prompt: str
    """Last message of the user."""
    truth: str
    """Reference that the reward compares with; JSON where it is not text."""
    before: tuple[Message, ...] = ()
    """Messages before the prompt."""
    row: str = ""
    """JSON object that the problem was made of, for rewards that want it."""
    form: str = field(default="", compare=False)
    """Kind of the truth, in words: the same for all problems of a file."""

    @property
    def messages(self) -> tuple[Message, ...]:
        return (*self.before, ("user", self.prompt))


@dataclass(frozen=True)
class Source:
    """Form of the rows of a task's data."""

    parse: Callable[[Row], Problem | RowFault]
    """Function that makes the problem of a row, or returns what is wrong with it."""
    hint: str
    """Example of a row, for a user who gave another one."""
    knows_verl: bool = False
    """Whether `parse` takes rows in verl's schema, too."""


@dataclass(frozen=True)
class ProblemSet:
    """The problems of a data file, and what was counted on the way."""

    problems: list[Problem]
    """Problems, each prompt once, in the order of the file."""
    rows: int = 0
    """Number of rows that were read."""
    conflicting: int = 0
    """Number of rows whose prompt came before with another truth; the first truth counts."""
    faults: list[Finding] = field(default_factory=list)
    """Each bad row, at its `file:line`; after 19 of them the number of the rest, at the file. A single fault where all
    rows have the same."""
    left_out: tuple[str, ...] = ()
    """Fields that are not in a problem's row, because their values are no JSON."""

    @property
    def repeated(self) -> int:
        return self.rows - len(self.problems)


def read_file(
    path: str | Path, *, source: Source, name: str = "", key: str = "", most_rows: int | None = None
) -> ProblemSet:
    """Read the problems of a file; what is wrong with the file is a fault, not an error. name: the file's name in
    faults, empty: its path.  key: of the recipe, which names the file: faults of the whole file are about it; empty:
    about the file.  most_rows: rows to read at most."""
    name, hint = name or str(path), source.hint
    kind = "parquet" if Path(path).suffix.lower() == PARQUET else "JSON-lines or parquet"
    try:
        if Path(path).exists() and not (Path(path).is_file() or Path(path).is_dir()):
            raise OSError(errno.EINVAL, "not a regular file")  # a pipe or a device: its reading may never end
        if foreign := foreign_format(Path(path)):
            format_name, remedy = foreign
            return ProblemSet([], faults=[_fault_of_file(name, f"it is {format_name}", remedy, key=key)])
        left_out: set[str] = set()
        rows = itertools.islice(_rows(Path(path), left_out), most_rows)
        return _collected(rows, name=name, key=key, source=source, left_out=left_out)
    except FileNotFoundError:
        hint = f"give the path of a {kind} file; a relative one begins in the folder where the program is started"
        format_name, remedy = no_such_file(str(path)) or ("", hint)
        message = f"no such file: it is {format_name}" if format_name else "no such file"
    except OSError as error:
        message, remedy = f"cannot be read: {error.strerror or error}", f"give the path of a readable {kind} file"
    except ValueError as error:  # pyarrow's, for what is no parquet
        message, remedy = f"not a parquet file: {first_line(error)}", hint
    return ProblemSet([], faults=[_fault_of_file(name, message, remedy, key=key)])


def _fault_of_file(name: str, message: str, remedy: str, *, key: str) -> Finding:
    """Make a fault of a whole file. name, key: as of read_file."""
    return fault((key,), f"{name}: {message}", remedy) if key else fault((name,), message, remedy)


def read_data_set(name: str, *, config: str, split: str, commit: str, source: Source) -> ProblemSet:
    """Read the problems of a data set of the hub, or of the cache where the hub does not answer; runs no code of the
    data set. Raises RecipeError. commit: empty: `main`."""
    if os.path.exists(name):  # `datasets` would take it instead of the hub's
        raise RecipeError(
            [fault(("task.data",), f"{name}: a file or folder of this name is here", "use task.train_file")]
        )
    import datasets  # a second, and a network client
    import httpx

    try:
        builder = datasets.load_dataset_builder(name, config or None, revision=commit or None)
        if commit and builder.hash != commit:  # the hub does not give it: `datasets` takes what it loaded last
            fact = f"{name} cannot be had at {commit}: the hub does not give it, and this host has {builder.hash}"
            raise RecipeError([fault(("task.data",), fact, "start when the hub gives it, or give task.train_file")])
        with beat_with_progress(Heartbeat().beat):
            builder.download_and_prepare()
        data = builder.as_dataset(split=split).with_format("arrow")
    except (OSError, ValueError, RuntimeError, httpx.HTTPError, datasets.exceptions.DatasetsError) as error:
        why = first_line(error)
        hint = "look at its name, task.config and task.split; without a network give task.train_file"
        raise RecipeError([fault(("task.data",), f"{name} cannot be had: {why}", hint)]) from error
    left_out: set[str] = set()
    rows = enumerate(plain_rows(data.iter(ROWS_AT_A_TIME), left_out), start=1)
    return _collected(rows, name=name, key="task.data", source=source, left_out=left_out)


def _collected(
    rows: Iterable[tuple[int, Row | str]], *, name: str, key: str, source: Source, left_out: set[str]
) -> ProblemSet:
    problems: dict[tuple[Message, ...], Problem] = {}
    faults: list[Finding] = []
    kinds: set[str] = set()
    seen = bad = conflicting = 0
    form = ""
    for place, row in rows:
        seen += 1
        problem: Problem | RowFault = row if isinstance(row, str) else _problem(row, source=source)
        if isinstance(problem, Problem):
            form = form or problem.form
            if problem.form != form:
                problem = f"its truth is {problem.form}, but in the rows before it {form}"
        if not isinstance(problem, Problem):
            bad += 1
            message, hint = problem if isinstance(problem, tuple) else (problem, source.hint)
            kinds.add(message.partition(": ")[0])  # what follows may be of this row
            if bad <= MAX_PROBLEMS:
                faults.append(fault((f"{name}:{place}",), message, hint))
        elif problems.setdefault(problem.messages, problem).truth != problem.truth:
            conflicting += 1
    if not seen:
        faults = [_fault_of_file(name, "the file has no rows", source.hint, key=key)]
    if 1 < bad == seen and len(kinds) == 1:  # such as a field's name that is misspelt in the recipe
        faults = [replace(faults[0], message=f"{faults[0].message} (the same in all {seen} rows)")]
    elif bad > MAX_PROBLEMS:
        faults.append(_fault_of_file(name, f"and {bad - MAX_PROBLEMS} more", "", key=key))
    problem_set = ProblemSet([*problems.values()], rows=seen, conflicting=conflicting, faults=faults)
    return replace(problem_set, left_out=tuple(sorted(left_out)))


def without_faults(*read: ProblemSet) -> list[ProblemSet]:
    """Return the problem sets as they are. Raises RecipeError with the faults of all of them at once."""
    if faults := [finding for problem_set in read for finding in problem_set.faults]:
        raise RecipeError(faults)
    return list(read)


def _rows(path: Path, left_out: set[str]) -> Iterator[tuple[int, Row | str]]:
    """Yield (line or row number, the row or what is wrong with it). left_out: takes the fields that are not in them."""
    if path.suffix.lower() == PARQUET or is_parquet(path):
        yield from enumerate(plain_rows(_parquet_batches(path, left_out), left_out), start=1)
        return
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE + 1), b""), start=1):
            if len(line) > MAX_LINE:
                yield number, f"a line of more than {MAX_LINE >> 20} MiB: the rest of the file is not read"
                return
            row = line.removeprefix(BOM_UTF8).rstrip(b"\n")
            if row.strip():
                yield number, _json_row(row)


def _parquet_batches(path: Path, left_out: set[str]) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with path.open("rb") as file:
        try:
            data = pq.ParquetFile(file)
            left_out |= {field.name for field in data.schema_arrow if has_bytes(field.type)}
            names = [name for name in data.schema_arrow.names if name not in left_out]  # bytes are not even read
            yield from data.iter_batches(batch_size=ROWS_AT_A_TIME, columns=names)
        except pa.ArrowException as error:  # not all of them are a ValueError
            raise ValueError(str(error)) from error


def _json_row(line: bytes) -> Row | str:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return "not UTF-8 text"
    except json.JSONDecodeError as error:
        return f"not JSON: {error.msg} at column {error.colno}"
    except RecursionError:
        return "not JSON: nested too deeply"
    except ValueError:  # the interpreter's limit
        return "not JSON: a number of thousands of digits"
    return row if isinstance(row, dict) else "not a JSON object"


def _problem(row: Row, *, source: Source) -> Problem | RowFault:
    is_verls = not source.knows_verl and "prompt" in row and "reward_model" in row
    try:
        problem = _of_verl(row) if is_verls else source.parse(row)
    except RecursionError:
        return "nested too deeply"
    if not isinstance(problem, Problem):
        return problem
    if not _is_whole(problem):
        return "half a character, such as `\\ud800`, which no tokenizer can read"
    if (size := max(len(problem.row), *(len(text) for _, text in problem.messages))) > MAX_ROW:
        largest = max(row, key=lambda name: len(json.dumps(row[name])))
        return f"{size / 1e6:.1f} MB, most of them in the field `{largest[:40]}`: a row has at most {MAX_ROW >> 20} MiB"
    return problem


def _is_whole(made: Problem) -> bool:
    texts = (made.truth, *(text for message in made.messages for text in message))
    return not any(map(_HALF_A_CHARACTER.search, texts))


def _of_verl(row: Row) -> Problem | str:
    """Return a row in verl's schema."""
    messages, reward = row["prompt"], row["reward_model"]
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        return "the field `prompt` is not a list of messages"
    contents = [message.get("content") for message in messages if message.get("role") == "user"]
    if len(contents) != 1 or len(messages) != 1 or not isinstance(contents[0], str) or not contents[0].strip():
        return "the field `prompt` is not one message of the user"
    truth = reward.get("ground_truth") if isinstance(reward, dict) else None
    if is_nothing(truth) or (isinstance(truth, str) and not truth.strip()):
        return "the field `reward_model` has no `ground_truth`"
    try:
        return Problem(prompt=contents[0], truth=answer_text(truth).strip())
    except ValueError as error:
        return f"the field `reward_model.ground_truth` {error}"


def text_fields(row: Row, *names: str) -> tuple[str, ...] | str:
    """Return the values of the fields, or what is wrong with the first bad one."""
    for name in names:
        if name not in row:
            return f"the field `{name}` is missing"
        if not isinstance(row[name], str) or not row[name].strip():
            return f"the field `{name}` is not text, or empty"
    return tuple(row[name] for name in names)


def write_parquet(by_split: Mapping[str, Sequence[Problem]], *, path: Path, kind: str) -> None:
    """Write a Parquet file that verl's RLHFDataset reads, a row per problem, in order. kind: the task's name: its
    reward is found by it. by_split: `train`, `val`, or the names of several validations."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    columns = {
        "data_source": pa.string(),
        "prompt": pa.list_(message),
        "ability": pa.string(),
        "reward_model": pa.struct([("style", pa.string()), ("ground_truth", pa.string())]),
        "extra_info": pa.struct([("split", pa.string()), ("index", pa.int64()), ("row", pa.string())]),
    }
    rows = [
        {
            "data_source": kind,
            "prompt": [{"role": role, "content": content} for role, content in problem.messages],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": problem.truth},
            "extra_info": {"split": split, "index": index, "row": problem.row},
        }
        for split, problems in by_split.items()
        for index, problem in enumerate(problems)
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=pa.schema(columns)), path)
