"""What appears whole or not at all."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from appliance.files import partial_prefix, whole_file, whole_folder, write_whole


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_whole(path, "old\n")
    write_whole(path, b"new\n", durable=False)
    assert path.read_text() == "new\n" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError("full"), KeyboardInterrupt()])
def test_what_was_begun_goes_and_the_old_file_stays(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "run.json"
    path.write_text("old\n")
    with pytest.raises(type(error)), whole_file(path) as partial:
        partial.write_text("ne")
        raise error
    assert path.read_text() == "old\n" and list(tmp_path.iterdir()) == [path]


def test_a_durable_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, seen = tmp_path / "a", []
    monkeypatch.setattr(os, "fsync", lambda fd: seen.append((os.readlink(f"/proc/self/fd/{fd}"), path.exists())))
    write_whole(path, "x")
    write_whole(path, "y", durable=False)
    (partial, had_its_name), folder = seen
    assert Path(partial).parent == tmp_path and Path(partial).name.startswith(f".a.{os.getpid()}-")
    assert not had_its_name and folder == (str(tmp_path), True)


def test_a_folder_appears_full_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "model"
    with pytest.raises(RuntimeError), whole_folder(target) as folder:
        (folder / "half").touch()
        assert folder.name.startswith(partial_prefix(target)) and not target.exists()
        raise RuntimeError
    assert list(target.parent.iterdir()) == []
    with whole_folder(target) as folder:
        (folder / "all").touch(mode=0o600)  # as safetensors makes its files
    assert [each.name for each in target.iterdir()] == ["all"]
    assert [oct(each.stat().st_mode)[-3:] for each in (target, target / "all")] == ["755", "644"]


def test_a_folder_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, seen = tmp_path / "model", []
    with whole_folder(target) as folder:
        (folder / "profile").mkdir()
        (folder / "profile" / "scales").touch()
        monkeypatch.setattr(os, "fsync", lambda fd: seen.append((os.readlink(f"/proc/self/fd/{fd}"), target.exists())))
    *before, after = seen
    synced = (folder, folder / "profile", folder / "profile" / "scales")
    assert sorted(before) == [(str(each), False) for each in synced]
    assert after == (str(tmp_path), True)


def test_who_was_first_keeps_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "model"

    def make(name: str, **how: bool) -> None:
        with whole_folder(target, **how) as folder:
            (folder / name).touch()

    make("first")
    make("second", for_cache=True)
    with pytest.raises(OSError, match="not empty"):
        make("third")
    with monkeypatch.context() as patch:  # it looked before the first one was there
        patch.setattr(Path, "exists", lambda path: False)
        make("fourth", for_cache=True)
    assert [each.name for each in tmp_path.rglob("*")] == ["model", "first"]


def test_what_a_killed_process_left_in_the_cache_goes_and_what_another_makes_stays(tmp_path: Path) -> None:
    """Of a target in a folder of the user's own nothing is removed: a folder there may have any name. Nor is what
    another host makes, whose locks may not be seen here, or an earlier version, which took none."""
    target = tmp_path / "model"

    def half_made() -> subprocess.Popen[str]:
        code = """
import sys, time
from pathlib import Path
from appliance.files import whole_folder
with whole_folder(Path(sys.argv[1]), for_cache=True) as folder:
    (folder / "half").touch()
    print(folder.name, flush=True)
    time.sleep(60)
"""
        return subprocess.Popen([sys.executable, "-c", code, target], stdout=subprocess.PIPE, text=True)

    (tmp_path / ".model-file").touch()
    others = {".model-otherhost-82180t7h", ".model-82180t7h"}
    for name in others:
        (tmp_path / name).mkdir()
    with half_made() as living, half_made() as killed:
        names = [process.stdout.readline().strip() for process in (living, killed)]
        killed.kill()
        killed.wait()
        with whole_folder(target):
            assert {path.name for path in tmp_path.iterdir()} > {*names}
        with whole_folder(target, for_cache=True) as folder:
            assert {path.name for path in tmp_path.iterdir()} == {
                *("model", ".model-file", folder.name, names[0]),
                *others,
            }
        living.kill()
    with whole_folder(target, for_cache=True):
        assert not (tmp_path / names[0]).exists()
    assert {path.name for path in tmp_path.iterdir()} == {"model", ".model-file", *others}


@pytest.mark.parametrize("moment", ["before it is opened", "before it is locked"])
def test_a_folder_that_is_removed_while_it_is_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """By another process, which found nobody's lock on it."""
    owner, name = (tempfile, "mkdtemp") if moment == "before it is opened" else (fcntl, "flock")
    real, removed = getattr(owner, name), []

    def removing(*given: object, **named: object) -> object:
        result = real(*given, **named)
        if not removed:
            removed.extend(tmp_path.iterdir())
            removed[0].rmdir()
        return result

    monkeypatch.setattr(owner, name, removing)
    with whole_folder(tmp_path / "model", for_cache=True) as folder:
        (folder / "all").touch()
    assert removed and [path.name for path in (tmp_path / "model").iterdir()] == ["all"]
