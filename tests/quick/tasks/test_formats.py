"""Data in another format than JSON lines and parquet: one line names it, with what to do."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import pickle
import re
import shlex
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from finding_texts import texts

from appliance.tasks.rows import Problem, ProblemSet, Source, read_file

ROWS = [{"question": f"{number}+1", "answer": number + 1} for number in range(30)]
LINES = "".join(f"{json.dumps(row)}\n" for row in ROWS)
SOURCE = Source(lambda row: Problem(row["question"], str(row["answer"])), hint="a row is an object")


def read(path: Path) -> ProblemSet:
    return read_file(path, source=SOURCE, name=path.name)


def table(delimiter: str) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, ["question", "answer"], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(ROWS)
    return text.getvalue().encode()


def archived(names: list[str]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in names:
            archive.writestr(name, LINES)
    return file.getvalue()


def tarred() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("rows.jsonl"), io.BytesIO(b""))
    return file.getvalue()


def arrow(write: Callable[[pa.Table, io.BytesIO], None]) -> bytes:
    file = io.BytesIO()
    write(pa.Table.from_pylist(ROWS), file)
    return file.getvalue()


def write_stream(rows: pa.Table, file: io.BytesIO) -> None:
    with pa.ipc.new_stream(file, rows.schema) as writer:
        writer.write_table(rows)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
FORMATS: dict[str, tuple[bytes, str, str]] = {
    "rows.json": (json.dumps(ROWS).encode(), "one JSON array, not JSON lines", "python -c"),
    "lines.json": ((",\n".join(json.dumps(ROWS).split("}, "))).encode(), "one JSON array, not JSON lines", "python -c"),
    "pretty.json": (json.dumps(ROWS, indent=2).encode(), "one JSON array, not JSON lines", "python -c"),
    "bom.json": (b"\xef\xbb\xbf" + json.dumps(ROWS).encode(), "one JSON array, not JSON lines", "python -c"),
    "data.json": (
        json.dumps({"version": 1, "data": ROWS}, indent=1).encode(),
        "one JSON object with its rows in `data`, not JSON lines",
        "json.load(open(",
    ),
    "objects.json": (
        "\n".join(json.dumps(row, indent=2) for row in ROWS).encode(),
        "JSON over several lines, not a row a line",
        "jq -c .",
    ),
    "commas.jsonl": (
        LINES.replace("}\n", "},\n").encode(),
        "JSON objects with commas behind them, not JSON lines",
        "sed 's/,[[:space:]]*$//'",
    ),
    "python.jsonl": ("".join(f"{row}\n" for row in ROWS).encode(), "dicts as Python prints them, not JSON", "ast"),
    "rows.csv": (table(","), "CSV, not JSON lines", "csv.DictReader"),
    "europe.csv": (table(";"), "CSV, not JSON lines", "delimiter=';'"),
    "rows.tsv": (table("\t"), "TSV, not JSON lines", "delimiter='\\t'"),
    "table.txt": (table("\t"), "TSV, not JSON lines", "delimiter='\\t'"),
    "rows.jsonl.gz": (gzip.compress(LINES.encode()), "gzip", "unpack it: gunzip -c < "),
    "rows.jsonl": (gzip.compress(LINES.encode()), "gzip", "unpack it: gunzip -c < "),
    "rows.bz2": (bz2.compress(LINES.encode()), "bzip2", "unpack it: bunzip2 -c < "),
    "rows.xz": (lzma.compress(LINES.encode()), "xz", "unpack it: unxz -c < "),
    "rows.zst": (b"\x28\xb5\x2f\xfd rows", "Zstandard", "unpack it: unzstd -c < "),
    "rows.zip": (archived(["rows.jsonl"]), "a zip archive", "unpack it and give the file in it: unzip "),
    "rows.xlsx": (archived(["xl/workbook.xml"]), "an Excel workbook", "pandas.read_excel"),
    "book.jsonl": (archived(["xl/workbook.xml"]), "an Excel workbook", "pandas.read_excel"),
    "rows.tar": (tarred(), "a tar archive", "unpack it and give the file in it: tar -xkf "),
    "rows.arrow": (arrow(lambda rows, file: feather.write_feather(rows, file)), "an Arrow file", "f.read_table"),
    "rows.feather": (b"FEA1 rows", "a feather file", "f.read_table"),
    "data-00000.arrow": (arrow(write_stream), "an Arrow stream", "Dataset.from_file"),
    "rows.pkl": (pickle.dumps(ROWS), "a pickle", "write its rows as JSON lines"),
    "utf16.jsonl": (LINES.encode("utf-16"), "text in UTF-16", "iconv -f UTF-16 -t UTF-8 "),
    "utf16le.jsonl": (LINES.encode("utf-16-le"), "text in UTF-16LE", "iconv -f UTF-16LE -t UTF-8 "),
    "utf16be.jsonl": (LINES.encode("utf-16-be"), "text in UTF-16BE", "iconv -f UTF-16BE -t UTF-8 "),
    "utf32.jsonl": (LINES.encode("utf-32"), "text in UTF-32", "iconv -f UTF-32 -t UTF-8 "),
    "latin.jsonl": (LINES.replace("+", "é").encode("latin-1"), "text in another encoding than UTF-8", "iconv -f "),
    "pointer.parquet": (POINTER.encode(), "a pointer of Git LFS, not the file", "fetch the file: git lfs pull"),
    "pointer.jsonl": (POINTER.encode(), "a pointer of Git LFS, not the file", "fetch the file: git lfs pull"),
    "page.parquet": (b"\n<!DOCTYPE html>\n<html><head>", "a web page", "download the file itself"),
    "rows.xml": (b'<?xml version="1.0"?><rows/>', "XML", "write its rows as JSON lines"),
    "rows.yaml": (
        b"- question: 1+1\n  answer: 2\n- question: 1+2\n",
        "no JSON lines: its first line is `- question: 1+1`",
        "each line is a JSON object",
    ),
    "zeros.bin": (b"\x00" * 4096, "binary, in no known format", "give JSON lines or parquet"),
    "lines.parquet": (LINES.encode(), "JSON lines, though its name says parquet", "name it "),
}


@pytest.mark.parametrize("name", FORMATS)
def test_one_line_names_the_format_and_what_to_do(tmp_path: Path, name: str) -> None:
    content, format_name, remedy = FORMATS[name]
    (tmp_path / name).write_bytes(content)
    ((message, hint),) = texts(read(tmp_path / name).faults)
    assert message == f"{name}: it is {format_name}"
    assert remedy in hint


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"lines.parquet"}))
def test_a_command_makes_a_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Whatever the data is called, and whatever else lies in the folder in which it is run."""
    monkeypatch.chdir(tmp_path)
    targets: list[str] = []
    for source in (name, name.rpartition(".")[0] + ".jsonl", name.rpartition(".")[0] + ".parquet"):
        Path(source).write_bytes(FORMATS[name][0])
        for _ in range(3):
            ((_, remedy),) = texts(read(Path(source)).faults)
            target = re.search(r"(?:> | )(\S+-(?:lines|rows|unpacked|utf8)(?:-\d)?\S*)(?:, with .*)?$", remedy)
            assert (target is None) == (not re.search(r"python -c|>|iconv|jq|sed|-c ", remedy)), remedy
            if target is not None:
                assert not Path(target[1]).exists(), remedy
                targets.append(target[1])
                Path(target[1]).touch()
    assert len(targets) == len(set(targets))


PROGRAMS = {  # by name of the data: the form it is in, though the name says otherwise
    **{name: name for name in ("rows.json", "bom.json", "data.json", "python.jsonl", "rows.csv", "europe.csv")},
    **{name: name for name in ("rows.tsv", "commas.jsonl", "rows.jsonl.gz", "rows.bz2", "rows.xz", "utf16le.jsonl")},
    **{name: name for name in ("rows.arrow", "rows.jsonl", "utf16.jsonl", "latin.jsonl")},
    **{
        "array.jsonl": "rows.json",
        "tabs.jsonl": "rows.tsv",
        "arrow.parquet": "rows.arrow",
        "my 'rows'$.csv": "rows.csv",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_command_that_is_named_makes_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    content = FORMATS[PROGRAMS[name]][0]
    (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    ((_, remedy),) = texts(read(Path(name)).faults)
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "python").symlink_to(sys.executable)

    command = remedy.removeprefix("unpack it: ").removesuffix(", with its real encoding instead of WINDOWS-1252")
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "PYTHONPATH": os.pathsep.join(sys.path), "LC_ALL": "C"}
    subprocess.run(command, shell=True, check=True, env=environment)
    assert (tmp_path / name).read_bytes() == content
    (made,) = {path.name for path in tmp_path.iterdir()} - {name, "bin"}
    found = read(tmp_path / made)
    prompts = [row["question"].replace("+", "é" if name == "latin.jsonl" else "+") for row in ROWS]
    assert ([problem.prompt for problem in found.problems], found.faults) == (prompts, [])


@pytest.mark.parametrize("name", ["rows.parquet", "rows.pq", "0000", "rows.jsonl"])
def test_parquet_is_read_whatever_its_name_is(tmp_path: Path, name: str) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / name)
    found = read(tmp_path / name)
    assert (len(found.problems), found.faults) == (len(ROWS), [])


@pytest.mark.parametrize(
    "bad", ["[1]", "[1, {", "nothing, at all", "{'question': '1+1'}", '{"question": ', "\x00", "<html>", "a\tb"]
)
def test_a_bad_line_among_good_ones_is_named_by_its_number(tmp_path: Path, bad: str) -> None:
    for place in (0, 1, 29):
        lines = LINES.splitlines()
        lines.insert(place, bad)
        (tmp_path / "rows.jsonl").write_text("\n".join(lines))
        ((message, _),) = texts(read(tmp_path / "rows.jsonl").faults)
        if bad != "<html>" or place:
            assert message.startswith(f"rows.jsonl:{place + 1}: not ")


def test_one_bad_character_is_named_by_its_line(tmp_path: Path) -> None:
    lines = LINES.replace("7+", "7é+").encode().splitlines()
    lines[3] = lines[3].replace(b"+", b"\xe9")
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(lines))
    assert [message for message, _ in texts(read(tmp_path / "rows.jsonl").faults)] == ["rows.jsonl:4: not UTF-8 text"]


def test_a_folder_of_shards_is_named_with_what_joins_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my data"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for number in range(3):
        pq.write_table(pa.Table.from_pylist(ROWS[number::3]), folder / f"train-{number}-of-3.parquet")
    ((message, hint),) = texts(read(folder).faults)
    assert message == "my data: it is a folder (3 .parquet), but only one file is read"
    assert hint.startswith("name one, or join them: python -c")
    *_, program, target, _pattern = shlex.split(hint)
    monkeypatch.setattr(sys, "argv", ["-c", target, *map(str, folder.iterdir())])
    exec(program)
    assert len(read(folder / "all.parquet").problems) == len(ROWS)
    for path in folder.iterdir():
        path.unlink()
    for number in range(3):
        (folder / f"{number}.jsonl").write_text(LINES.strip())
    ((message, hint),) = texts(read(folder).faults)
    assert message == "my data: it is a folder (3 .jsonl), but only one file is read"
    quoted = str(folder).replace(" ", "\\ ")
    assert hint == f"name one, or join them: awk 1 {quoted}/*.jsonl > all.jsonl"
    subprocess.run(hint.partition(": ")[2], shell=True, check=True)
    assert read(folder / "all.jsonl").rows == 3 * len(ROWS)
    ((_, hint),) = texts(read(folder).faults)
    assert hint == f"name one, or join them: awk 1 {quoted}/*.jsonl > all-2.jsonl"  # all.jsonl is one of them now
    (folder / "README.md").write_text("rows")
    assert texts(read(folder).faults) == [
        ("my data: it is a folder (4 .jsonl, 1 .md), but only one file is read", "name one file: JSON lines or parquet")
    ]


def test_a_data_set_that_was_saved_is_named(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "data-00000-of-00001.arrow").write_bytes(arrow(write_stream))
    ((message, hint),) = texts(read(tmp_path).faults)
    assert message == f"{tmp_path.name}: it is a folder in which `datasets` saved a data set, but only one file is read"
    assert hint.endswith(
        f'load_from_disk(sys.argv[1]).to_parquet(sys.argv[2])" {tmp_path} {tmp_path.name}-rows.parquet'
    )


def test_a_pattern_is_named_with_the_files_that_it_matches(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl", "c.txt"):
        (tmp_path / name).write_text(LINES)
    ((message, hint),) = texts(read(tmp_path / "*.jsonl").faults)
    assert message == "*.jsonl: no such file: it is a pattern, which 2 files match, but only one file is read"
    assert hint == f"name one, or join them: awk 1 {tmp_path}/*.jsonl > all.jsonl"
    ((_, hint),) = texts(read(tmp_path / "**" / "*.jsonl").faults)
    assert hint == "name one file: JSON lines or parquet"  # a shell may read ** as one star
    one = [("*.txt: no such file: it is a pattern, but only one file is read", f"name it: {tmp_path}/c.txt")]
    assert texts(read(tmp_path / "*.txt").faults) == one
    ((message, _),) = texts(read(tmp_path / "*.csv").faults)
    assert message == "*.csv: no such file: it is a pattern, which 0 files match, but only one file is read"
    ((message, _),) = texts(read(tmp_path / "a[1].jsonl").faults)
    assert message == "a[1].jsonl: no such file"


def test_an_address_is_not_downloaded() -> None:
    ((message, hint),) = texts(read(Path("https://example.com/rows.jsonl")).faults)
    assert message == "rows.jsonl: no such file: it is an address, and data is not downloaded"
    assert hint == "download it; a data set of the hub is task.data"
