"""Formats of data that are not read: each by its name, with what makes JSON lines or parquet of it.

A file is known by its first bytes, whatever its name says. What a command makes is a new file in the current folder:
the folder of the data may be read-only.
"""

from __future__ import annotations

import codecs
import glob
import itertools
import json
import os
import re
import shlex
from collections import Counter
from pathlib import Path

Format = tuple[str, str]  # (what it is, to follow its name; what to do)

PARQUET_MAGIC = b"PAR1"
_HEAD = 1 << 20  # bytes: a first object in several lines is looked for in so many
_MOST_FILES = 10_000  # that are counted in a folder
_FEW_LINES = 20
_PACKED = (".gz", ".zst", ".bz2", ".xz")
_UNPACK = "unpack it and give the file in it"
_EXCEL = (
    'python -c "import pandas, sys; '
    "pandas.read_excel(sys.argv[1]).to_json(sys.argv[2], orient='records', lines=True)\" {name} {lines}"
)
_FEATHER = (
    'python -c "import sys, pyarrow.feather as f, pyarrow.parquet as p; '
    'p.write_table(f.read_table(sys.argv[1]), sys.argv[2])" {name} {rows}'
)
_SAVED = (
    'python -c "import sys; from datasets import load_from_disk; '
    'load_from_disk(sys.argv[1]).to_parquet(sys.argv[2])" {name} {rows}'
)
_JOIN = (
    'python -c "import sys, pyarrow.dataset as d, pyarrow.parquet as p; '
    "p.write_table(d.dataset(sorted(sys.argv[2:]), format='parquet').to_table(), sys.argv[1])\""
)
_STREAM = (
    'python -c "import sys; from datasets import Dataset; Dataset.from_file(sys.argv[1]).to_parquet(sys.argv[2])" '
    "{name} {rows}"
)
_MAGICS: tuple[tuple[bytes, str, str], ...] = (  # the longer ones first
    (b"\x1f\x8b", "gzip", "unpack it: gunzip -c < {name} > {unpacked}"),
    (b"\x28\xb5\x2f\xfd", "Zstandard", "unpack it: unzstd -c < {name} > {unpacked}"),
    (b"BZh", "bzip2", "unpack it: bunzip2 -c < {name} > {unpacked}"),
    (b"\xfd7zXZ\x00", "xz", "unpack it: unxz -c < {name} > {unpacked}"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
    (b"Rar!\x1a\x07", "a RAR archive", _UNPACK),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an Excel workbook", _EXCEL),
    (b"ARROW1", "an Arrow file", _FEATHER),
    (b"FEA1", "a feather file", _FEATHER),
    (b"\xff\xff\xff\xff", "an Arrow stream", _STREAM),
    (b"SQLite format 3\x00", "an SQLite database", "write the rows that you want as JSON lines"),
    (b"\x89HDF\r\n\x1a\n", "HDF5", "write the rows that you want as JSON lines"),
    (b"\x93NUMPY", "a NumPy array", "write its rows as JSON lines"),
    (b"Obj\x01", "Avro", "write its rows as JSON lines"),
    (b"ORC", "ORC", "write its rows as parquet"),
    *((bytes((0x80, protocol)), "a pickle", "write its rows as JSON lines") for protocol in range(2, 6)),
    (b"%PDF-", "a PDF", "give the data as JSON lines"),
    (b"version https://git-lfs.github.com/spec/", "a pointer of Git LFS, not the file", "fetch the file: git lfs pull"),
)
_ENCODINGS = (  # the longer marks first
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
_DICT_OF_PYTHON = re.compile(rb"\{\s*'[^']*'\s*:.*\}")
_PAGE = re.compile(rb"(?is)\s*(?:<!--.*?-->\s*)*<(?:!doctype html|html|head|body)\b")
_ADDRESS = re.compile(r"\b(?:https?|s3|gs|hf|az|hdfs):/")
_OPENED = "open(sys.argv[1], encoding='utf-8-sig')"
_TO_LINES = " {name} > {lines}"
_ARRAY = f'python -c "import json, sys; [print(json.dumps(row)) for row in json.load({_OPENED})]"{_TO_LINES}'
_TABLE = (
    'python -c "import csv, json, sys; '
    f'[print(json.dumps(row)) for row in csv.DictReader({_OPENED}{{more}})]"{_TO_LINES}'
)
_SEPARATORS = (("\t", "TSV", ", delimiter='\\t'"), (",", "CSV", ""), (";", "CSV", ", delimiter=';'"))
_PYTHON = (
    'python -c "import ast, json, sys; '
    f'[print(json.dumps(ast.literal_eval(line))) for line in {_OPENED} if line.strip()]"{_TO_LINES}'
)


def is_parquet(path: Path) -> bool:
    """Tell whether a file is parquet, by its first bytes. Raises OSError."""
    with path.open("rb") as file:
        return file.read(len(PARQUET_MAGIC)) == PARQUET_MAGIC


def foreign_format(path: Path) -> Format | None:
    """Say what a file is that is neither JSON lines nor parquet, or what a folder is; None where it may be one of them.
    Raises OSError."""
    if path.is_dir():
        return _folder(path)
    with path.open("rb") as file:
        head = file.read(_HEAD)
        is_whole = not file.read(1)
    if head.startswith(PARQUET_MAGIC):
        return None
    return _binary(path, head) or _text(path, head, is_whole=is_whole)


def no_such_file(path: str) -> Format | None:
    """Say what a name is that no file has: a pattern or an address; None where it is only a name."""
    if _ADDRESS.search(path):
        return "an address, and data is not downloaded", "download it; a data set of the hub is task.data"
    if not glob.has_magic(path):
        return None
    names = sorted(itertools.islice(glob.iglob(path, recursive=True), _MOST_FILES))
    if not names and not re.search("[*?]", path):
        return None  # a bracket is part of many a name
    if len(names) == 1:
        return "a pattern, but only one file is read", f"name it: {names[0]}"
    return f"a pattern, which {len(names)} files match, but only one file is read", _joined(
        [Path(name) for name in names], pattern=path
    )


def _folder(folder: Path) -> Format:
    names = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    files = sorted(itertools.islice(names, _MOST_FILES))
    if (folder / "dataset_info.json").is_file() and any(path.suffix == ".arrow" for path in files):
        return "a folder in which `datasets` saved a data set, but only one file is read", _filled(_SAVED, folder)
    by_suffix = Counter(path.suffix for path in files).most_common()
    counted = ", ".join(f"{number} {suffix or 'without an ending'}" for suffix, number in by_suffix[:3])
    return f"a folder ({counted or 'empty'}), but only one file is read", _joined(files)


def _joined(files: list[Path], *, pattern: str = "") -> str:
    """Say how one file is made of several. pattern: that they match, else all that are in their folders."""
    suffixes = {path.suffix.lower() for path in files}
    patterns = [pattern] if pattern else sorted({f"{path.parent}/*{path.suffix}" for path in files})
    is_deep = "**" in pattern  # which a shell may read as one star
    if suffixes == {".parquet"} and len(patterns) == 1 and not is_deep:
        return f"name one, or join them: {_JOIN} {_new_file('all', '.parquet')} {_of_shell(patterns[0])}"
    if suffixes and suffixes <= {".jsonl", ".json", ".ndjson"} and not is_deep:
        # awk ends each file with a line end, which the last line of one may lack.
        return f"name one, or join them: awk 1 {' '.join(map(_of_shell, patterns))} > {_new_file('all', '.jsonl')}"
    return "name one file: JSON lines or parquet"


def _of_shell(pattern: str) -> str:
    """Quote a pattern, so that a shell takes its other characters as they are."""
    return re.sub(r"[^\w./*?\[\]@%+=:,-]", lambda character: f"\\{character[0]}", pattern)


def _binary(path: Path, head: bytes) -> Format | None:
    if head.startswith(b"PK\x03\x04") or head.startswith(b"PK\x05\x06"):
        is_excel = path.suffix.lower() in (".xlsx", ".xlsm") or b"xl/workbook.xml" in head or b"xl/worksheets" in head
        if is_excel:
            return "an Excel workbook", _filled(_EXCEL, path)
        return "a zip archive", _filled(f"{_UNPACK}: unzip {{name}}", path)
    for mark, encoding in _ENCODINGS:
        if head.startswith(mark):
            return _encoded(path, encoding)
    for magic, format_name, remedy in _MAGICS:
        if head.startswith(magic):
            return format_name, _filled(remedy, path)
    if head[257:262] == b"ustar":
        return "a tar archive", _filled(f"{_UNPACK}: tar -xkf {{name}}", path)  # k: no file is overwritten
    if _PAGE.match(head):
        return "a web page", "download the file itself: on the hub its address has /resolve/ in it, not /blob/"
    if head.lstrip().startswith(b"<?xml"):
        return "XML", "write its rows as JSON lines"
    few = head[: 1 << 10]
    zeros = few[::2].count(0), few[1::2].count(0)
    if max(zeros) > len(few) // 4 and min(zeros) < len(few) // 20:  # every other byte of plain letters
        return _encoded(path, "UTF-16BE" if zeros[0] > zeros[1] else "UTF-16LE")
    if b"\x00" in few and not _has_rows(head):
        return "binary, in no known format", "give JSON lines or parquet"
    return None


def _has_rows(head: bytes) -> bool:
    """Tell whether some of the first lines are JSON objects."""
    return any(isinstance(_json(line), dict) for line in _first_lines(head))


def _first_lines(head: bytes) -> list[bytes]:
    return [line.strip() for line in itertools.islice(filter(bytes.strip, head.splitlines()), _FEW_LINES)]


def _encoded(path: Path, encoding: str) -> Format:
    return f"text in {encoding}", _filled(f"iconv -f {encoding} -t UTF-8 {{name}} > {{utf8}}", path)


def _filled(remedy: str, path: Path, *, member: str = "") -> str:
    """Return a command with the file's name and that of a new one, both as a shell reads them. member: follows the
    file's name."""
    stem = re.sub(r"(?<=.)(\.[A-Za-z]\w{0,7})+$", "", path.absolute().name)
    new_files = {
        "{lines}": ("-lines", ".jsonl"),
        "{rows}": ("-rows", ".parquet"),
        "{unpacked}": ("-unpacked", Path(path.stem).suffix if path.suffix in _PACKED else path.suffix),
        "{utf8}": ("-utf8", path.suffix),
    }
    for place, (addition, suffix) in new_files.items():
        remedy = remedy.replace(place, shlex.quote(_new_file(f"{stem}{addition}", suffix)))
    return remedy.replace("{name}", shlex.quote(str(path)) + member)


def _new_file(stem: str, suffix: str) -> str:
    """Find a name in the current folder that no file has: a command that is copied must not empty one."""
    numbered = (f"{stem}{number}{suffix}" for number in itertools.chain([""], (f"-{n}" for n in itertools.count(2))))
    return next(name for name in numbered if not os.path.lexists(name))


def _text(path: Path, head: bytes, *, is_whole: bool) -> Format | None:
    """Explain a text whose lines are no rows. One bad line among good ones is none of this."""
    head = head.removeprefix(codecs.BOM_UTF8)
    if not (lines := _first_lines(head)):
        return None
    broken = [line for line in head.splitlines() if not line.isascii() and not _is_utf8(line)]
    if len(broken) > 1 and not any(_is_utf8(line) for line in head.splitlines() if not line.isascii()):
        remedy = "iconv -f WINDOWS-1252 -t UTF-8 {name} > {utf8}, with its real encoding instead of WINDOWS-1252"
        return "text in another encoding than UTF-8", _filled(remedy, path)
    if _has_rows(head):
        is_misnamed = path.suffix.lower() == ".parquet"
        return (
            ("JSON lines, though its name says parquet", f"name it {path.with_suffix('.jsonl')}")
            if is_misnamed
            else None
        )
    text = head.decode("utf-8", errors="replace").lstrip()
    if text.startswith("["):
        is_one_line = _json(lines[0]) is not None
        if not is_one_line or (len(lines) == 1 and is_whole and _is_list_of_objects(lines[0])):
            return "one JSON array, not JSON lines", _filled(_ARRAY, path)
        return None
    if text.startswith("{"):
        return _objects(path, text, lines)
    if len(lines) == 1:
        return None
    return _table(path, lines) or _no_rows(lines)


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _json(line: bytes) -> object:
    """Parse JSON; None for what is none."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _is_list_of_objects(line: bytes) -> bool:
    value = _json(line)
    return isinstance(value, list) and bool(value) and all(isinstance(member, dict) for member in value)


def _objects(path: Path, text: str, lines: list[bytes]) -> Format | None:
    """Explain a text that begins with a brace, and has no line that is a JSON object."""
    if lines[0].endswith(b",") and isinstance(_json(lines[0][:-1]), dict):
        return "JSON objects with commas behind them, not JSON lines", _filled(
            "sed 's/,[[:space:]]*$//' {name} > {lines}", path
        )
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except RecursionError:
        return None
    except ValueError:
        return _of_python(path, lines)
    if "\n" not in text[:end]:
        return None
    lists = [name for name, member in value.items() if isinstance(member, list) and member]
    if not text[end:].strip() and len(lists) == 1 and all(isinstance(row, dict) for row in value[lists[0]]):
        remedy = _ARRAY.replace(f"{_OPENED})", f"{_OPENED})[sys.argv[2]]")
        remedy = _filled(remedy, path, member=f" {shlex.quote(lists[0])}")
        return f"one JSON object with its rows in `{lists[0]}`, not JSON lines", remedy
    return "JSON over several lines, not a row a line", _filled("jq -c . {name} > {lines}", path)


def _of_python(path: Path, lines: list[bytes]) -> Format | None:
    """Known by the quotes alone: data is never given to Python's own parser."""
    is_python = len(lines) > 1 and all(_DICT_OF_PYTHON.fullmatch(line) for line in lines[:2])
    return ("dicts as Python prints them, not JSON", _filled(_PYTHON, path)) if is_python else None


def _table(path: Path, lines: list[bytes]) -> Format | None:
    """Recognise values with a character between them, as many in the first lines as in the names at their top."""
    for separator, format_name, more in _SEPARATORS:
        count = lines[0].count(separator.encode())
        named = path.suffix.lower() in (".csv", ".tsv")
        if count and (named or all(line.count(separator.encode()) >= count for line in lines[1:4])):
            return f"{format_name}, not JSON lines", _filled(_TABLE.replace("{more}", more), path)
    return None


def _no_rows(lines: list[bytes]) -> Format | None:
    """Explain lines of which none of the first so much as begins as a row."""
    if any(line.startswith(b"{") for line in lines):
        return None
    first = lines[0].decode("utf-8", errors="replace")[:60]
    return f"no JSON lines: its first line is `{first}`", "each line is a JSON object; or give parquet"
