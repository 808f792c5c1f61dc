from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock, call

import pytest

from appliance.errors import SyncError
from appliance.record.events import (
    Event,
    RunTail,
    Tail,
    append_event,
    append_failure,
    first_failure,
    parse_event,
    parse_metrics,
)


def test_append_event_writes_one_line_that_parses_back(tmp_path: Path) -> None:
    append_event(tmp_path, kind="progress", what="warm\nstart", why="", done=3, total=10, note="loss 1.2")
    text = (tmp_path / "events.jsonl").read_text()
    assert text.count("\n") == 1
    event = parse_event(text)
    assert event is not None
    assert event == Event(event.time, "progress", "warm\nstart", done=3.0, total=10.0, note="loss 1.2")


def test_lines_of_two_processes_do_not_mix(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from appliance.record.events import append_event\n"
        "for i in range(200): append_event(Path(sys.argv[1]), kind='note', what=sys.argv[2] * 500)"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), letter]) for letter in "ab"]
    assert [writer.wait() for writer in writers] == [0, 0]
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert sorted({json.loads(line)["what"] for line in lines}) == ["a" * 500, "b" * 500]
    assert len(lines) == 400


def test_a_line_after_one_that_a_full_disk_cut_is_a_line_of_its_own(tmp_path: Path) -> None:
    append_event(tmp_path, kind="note", what="before")
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'{"time": 1.5, "kind": "pha')
    append_failure(tmp_path, SyncError("the disk was full"))
    append_event(tmp_path, kind="note", what="after")
    found = first_failure(tmp_path)
    assert found is not None and found.what == "the disk was full"
    assert [item.what for item in RunTail(tmp_path).read() if isinstance(item, Event)] == [
        *("before", "the disk was full", "after")
    ]
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 4


def test_tail_of_a_missing_file_is_empty(tmp_path: Path) -> None:
    assert Tail(tmp_path / "none").read() == []


def test_tail_keeps_a_half_line_until_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    tail = Tail(path)
    path.write_bytes(b"one\ntw")
    assert tail.read() == ["one"]
    assert tail.read() == []
    with path.open("ab") as file:
        file.write(b"o\nthree")
    assert tail.read() == ["two"]


def test_tail_keeps_a_line_whose_end_comes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lines").write_bytes(b"one\ntwo\n")
    seen = [iter([b"one\n", b"tw", b"o\n"]), iter([b"two\n"])]  # at the end of the file, and again when there is more
    from_file = MagicMock()
    from_file.__enter__.return_value.__iter__.side_effect = lambda: seen.pop(0)
    monkeypatch.setattr(Path, "open", lambda *_: from_file)
    tail = Tail(tmp_path / "lines")
    assert (tail.read(), tail.read()) == (["one"], ["two"])
    assert from_file.__enter__.return_value.seek.call_args_list == [call(0), call(4)]


def test_tail_keeps_half_a_character(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    whole = "é\n".encode()
    tail = Tail(path)
    path.write_bytes(whole[:1])
    assert tail.read() == []
    path.write_bytes(whole)
    assert tail.read() == ["é"]


def test_run_tail_leaves_out_what_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"time": 1.5, "ki{"time": 2, "kind": "note", "what": "b"}\n[]\n\n')
    append_event(tmp_path, kind="note", what="good")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 1, "time_s": 2, "reward_mean": "high"}\n{"step": 2')
    event, metrics = RunTail(tmp_path).read()
    assert isinstance(event, Event)
    assert event.what == "good"
    assert metrics == parse_metrics('{"step": 1, "time_s": 2}')


def test_metrics_of_no_number_are_none() -> None:
    parsed = parse_metrics('{"step": 1, "time_s": 2, "reward_mean": NaN, "is_ess": null, "step_s": true}')
    assert parsed is not None
    assert (parsed.reward_mean, parsed.is_ess, parsed.step_s) == (None, None, None)
