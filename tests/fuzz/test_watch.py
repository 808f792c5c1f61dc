"""The watch over a case sees what it is there to see: whatever input must not do is done here, and fails."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import pickle
import shutil
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fuzz_surface
import fuzz_watch
import pytest
from fuzz_surface import attempt
from fuzz_watch import Forbidden, Hang, watching

from appliance.errors import RecipeError
from appliance.finding import fault

# By what the message must say. Each gets a folder beside the case's own.
DEEDS: dict[str, Callable[[Path], object]] = {
    "import": lambda _: __import__("this_module_is_not_there"),
    "marshal.loads|compile": lambda _: importlib.import_module("nturl2path"),  # of this way the hook is told no more
    "compile": lambda _: eval("1 + 1"),
    "exec": lambda _: exec((lambda: None).__code__),
    "pickle.find_class": lambda _: pickle.loads(b"cposix\ngetpid\n)R."),
    "ctypes.dlopen": lambda _: ctypes.CDLL(None),
    "subprocess.Popen": lambda _: subprocess.run(["true"], check=False),
    "os.system": lambda _: os.system("true"),
    "socket.connect": lambda _: socket.socket().connect(("127.0.0.1", 1)),
    "os.putenv": lambda _: os.environ.update(FUZZ_WATCH="1"),
    "open for writing": lambda beside: (beside / "new").write_text("x"),
    "os.mkdir": lambda beside: (beside / "new").mkdir(),
    "os.remove": lambda beside: (beside / "old").unlink(),
    "os.rename": lambda beside: (beside.parent / "room/own").rename(beside / "new"),
    "os.symlink": lambda beside: (beside / "new").symlink_to("/etc"),
    "os.chmod": lambda beside: (beside / "old").chmod(0o600),
    "shutil.rmtree": lambda beside: shutil.rmtree(beside),
}


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    (tmp_path / "room").mkdir()
    (tmp_path / "room/own").write_text("x")
    folder = tmp_path / "beside"
    folder.mkdir()
    (folder / "old").write_text("x")
    return folder


@pytest.fixture(autouse=True)
def counts_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """These are no cases of the fuzz."""
    for name in ("counted", "refused"):
        monkeypatch.setattr(fuzz_surface, name, Counter())


@pytest.mark.parametrize("deed", DEEDS)
def test_what_input_must_not_do_fails_its_case(beside: Path, deed: str) -> None:
    room = beside.parent / "room"
    with pytest.raises(Forbidden, match=deed), watching(room):
        DEEDS[deed](beside)
    assert [each.name for each in beside.iterdir()] == ["old"]


def test_it_fails_where_somebody_caught_it_too(beside: Path) -> None:
    def hide() -> None:
        with contextlib.suppress(BaseException):
            (beside / "new").write_text("x")

    with pytest.raises(Forbidden, match="open for writing"):
        attempt("run folders", hide, folder=beside.parent / "room")


def test_threads_of_a_case_are_watched_as_well(beside: Path) -> None:
    def write() -> None:
        with ThreadPoolExecutor(1) as threads:
            threads.submit((beside / "new").write_text, "x")

    with pytest.raises(Forbidden, match="open for writing"), watching(beside.parent / "room"):
        write()
    assert not (beside / "new").exists()


def test_a_link_in_the_folder_leads_out_of_it(beside: Path) -> None:
    (beside.parent / "room/link").symlink_to(beside)
    with pytest.raises(Forbidden, match="open for writing"), watching(beside.parent / "room"):
        (beside.parent / "room/link/new").write_text("x")


@pytest.mark.parametrize(("limit", "work"), [("CPU_S", lambda: None), ("WALL_S", lambda: time.sleep(0.01))])
def test_a_case_that_does_not_end_is_a_hang(
    beside: Path, monkeypatch: pytest.MonkeyPatch, limit: str, work: Callable[[], None]
) -> None:
    monkeypatch.setattr(fuzz_watch, limit, 0.2)
    with pytest.raises(Hang), watching(beside.parent / "room"):
        while True:
            work()


def test_any_error_but_a_refusal_fails_its_case(beside: Path) -> None:
    def refuse() -> None:
        raise RecipeError([fault((), "no", where="r.yaml:1")])

    def fail() -> None:
        raise KeyError("x")

    room = beside.parent / "room"
    assert attempt("run folders", refuse, folder=room) is None
    with pytest.raises(KeyError):
        attempt("run folders", fail, folder=room)


def test_in_its_own_folder_a_case_may_do_what_it_likes(beside: Path) -> None:
    room = beside.parent / "room"
    with watching(room):
        (room / "new").mkdir()
        (room / "own").rename(room / "new/own")
        (room / "new/own").unlink()
    (beside / "new").write_text("and beside it nothing is watched any more")
