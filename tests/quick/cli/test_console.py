"""What goes to stdout where its encoding lacks a character, and to a stderr that cannot be written."""

import errno
import io
import sys

import pytest
from rich.live import Live

from appliance import console


@pytest.mark.parametrize(
    ("encoding", "written"), [("ascii", "\\xe9 \\u2588\n"), ("latin-1", "é \\u2588\n"), ("utf-8", "é █\n")]
)
def test_a_character_that_stdout_lacks_is_escaped(monkeypatch, encoding, written):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    console.out("é █")
    assert raw.getvalue().decode(encoding) == written


class Gone(io.StringIO):
    """As of a terminal that was closed, or a pipe."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        raise OSError(self.number, "gone")

    def flush(self) -> None:
        raise OSError(self.number, "gone")


@pytest.mark.parametrize("number", [errno.EIO, errno.EPIPE, errno.ENOSPC])
def test_what_people_cannot_be_told_is_lost_and_nothing_else(monkeypatch, number):
    monkeypatch.setattr(sys, "stderr", Gone(number))
    monkeypatch.setenv("TERM", "xterm")
    console.say("a line")
    with Live(console=console.err_console(), auto_refresh=False, transient=True) as live:
        live.update("a panel", refresh=True)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    console.say("another")
    assert sys.stderr.getvalue() == "another\n"


def test_a_stdout_that_cannot_be_written_is_an_os_error_by_its_own_name(monkeypatch):
    """After a signal a run takes any OSError of it for a reader that is gone: a closed terminal says EIO."""

    class Closed(io.StringIO):
        def flush(self):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(sys, "stdout", Closed())
    with pytest.raises(OSError, match="Input/output error") as caught:
        console.out("a line")
    assert (type(caught.value), caught.value.errno, caught.value.exit_code) == (console.StdoutError, errno.EIO, 3)


def test_a_table_that_no_terminal_shows_cuts_and_folds_nothing() -> None:
    text = console.table([("a", "1", "x" * 300), ("[b]", "22", "\x1b[31m")], head=("name", "number", ""), numbers=[1])
    assert text.splitlines() == ["name  number", f"a          1  {'x' * 300}", "[b]       22  \\x1b[31m"]


def test_a_table_in_a_terminal_folds_texts_and_no_numbers() -> None:
    rows = [("a", "1.0000e-04", "x" * 50)]
    lines = console.table(rows, head=("", "the number", ""), numbers=[1], columns=40).splitlines()
    assert max(map(len, lines)) <= 40 and "".join(lines).count("x") == 50
    assert "1.0000e-04" in lines[1]
    whole = console.table(rows, columns=20)  # too narrow for it: the terminal breaks the lines
    assert whole == f"a  1.0000e-04  {'x' * 50}"
