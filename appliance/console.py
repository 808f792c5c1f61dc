"""The one place that prints: data on stdout, everything else on stderr."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import IO, Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from appliance.errors import PreflightError

_COMMANDS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters, besides tab and line feed
    "\ud800-\udfff"  # halves of a character, which UTF-8 cannot have
    "\u202a-\u202e\u2066-\u2069]"  # changes of direction: they show text other than it is
)

_WIDEST = 100_000  # columns that no table has
_FOLDED = 16  # columns that a text keeps at least


READER_GONE = 141  # 128 + SIGPIPE


class ReaderGone(BrokenPipeError):
    """Nobody reads stdout any more."""

    exit_code = READER_GONE


class StdoutError(OSError):
    """Stdout cannot be written, as on a full disk or a closed terminal."""

    exit_code = PreflightError.exit_code


class _Lossy:
    """A file whose reader may be gone: a terminal that was closed, a `| tee` that the same Ctrl-C has ended."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._file.flush()


class _People(Console):
    """The console on stderr. Text that cannot be written there is lost, and nothing else: no run ends because of it,
    and no exit code changes."""

    @property
    def file(self) -> IO[str]:
        return _Lossy(super().file)


@functools.cache
def err_console() -> Console:
    """Return the console for people, on stderr. NO_COLOR is honoured by rich."""
    return _People(stderr=True, highlight=False, emoji=False)  # else `r.yaml:100:` has one


def is_live(console: Console) -> bool:
    """Tell whether a display that redraws itself makes sense: a real terminal that can move its cursor."""
    return console.file.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


def columns() -> int | None:
    """Return the columns of the terminal that stdout is; None where it is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def say(text: str) -> None:
    """Print text for people on stderr: without markup or line breaks of ours, and without anything that a terminal
    takes for a command."""
    err_console().print(printable(text), markup=False, highlight=False, soft_wrap=True)


def printable(text: str) -> str:
    """Return the text with control characters, halves of a character and changes of writing direction as `\\x1b`."""
    return _COMMANDS.sub(lambda found: ascii(found[0])[1:-1], text)


def plain_text(renderable: RenderableType, *, columns: int) -> str:
    """Render what rich draws as text without colours, for a file or for stdout. columns: width of the text."""
    text = io.StringIO()
    Console(file=text, width=columns, no_color=True, highlight=False, emoji=False).print(renderable)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def table(
    rows: Iterable[Sequence[str]], *, head: Sequence[str] = (), numbers: Sequence[int] = (), columns: int | None = None
) -> str:
    """Render cells in columns, as text without colours or borders that can be printed as it is.

    head: names of the columns.  numbers: places of those that are aligned to the right.  columns: of a terminal, into
    which texts are folded, where that is enough; None: nothing is folded.
    """
    texts = [[Text(printable(cell)) for cell in row] for row in rows]
    names = [Text(name) for name in head] or [Text()] * max(map(len, texts), default=0)
    least = []
    for place, name in enumerate(names):
        whole = max((row[place].cell_len for row in texts), default=0)
        words = [len(word) for word in name.plain.split()]
        least.append(max([whole if place in numbers else min(whole, _FOLDED), *words]))
    is_folded = columns is not None and sum(least) + 2 * len(least) <= columns
    drawn = Table(box=None, show_header=bool(head), header_style="", padding=(0, 2, 0, 0), pad_edge=False)
    for place, name in enumerate(names):
        is_number = place in numbers
        width = least[place] if is_number and is_folded else None
        drawn.add_column(name, justify="right" if is_number else "left", overflow="fold", width=width)
    for row in texts:
        drawn.add_row(*row)
    return plain_text(drawn, columns=columns if is_folded else _WIDEST)


def out(text: str) -> None:
    """Write one piece of data to stdout at once; a character that its encoding lacks becomes `\\xe9`.

    Raises ReaderGone when nobody reads any more, StdoutError when it cannot be written.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        sys.stdout.flush()
    except BrokenPipeError as error:
        raise ReaderGone(error.errno, error.strerror) from error
    except OSError as error:
        raise StdoutError(error.errno, error.strerror) from error


def open_closed() -> None:
    """Open streams for a process that was started without them (`>&-`): writing to stdout fails, stderr is lost."""
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


def drop_unwritten() -> None:
    """Drop what stdout and stderr could not take. Otherwise Python tries to write it again as it ends, and ends with
    120."""
    for file in (sys.stdout, sys.stderr):
        try:
            file.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


def show(text: str) -> None:
    """Print text for people on stdout, as `say` does on stderr. Raises as `out` does."""
    out(printable(text))
