"""A profile under the name that its content makes."""

from __future__ import annotations

from pathlib import Path

from appliance.quant.files import PROFILE_FILE, by_content


def write(folder: Path, content: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / PROFILE_FILE).write_bytes(content)
    return folder


def test_equal_profiles_have_one_folder_and_others_have_others(tmp_path: Path) -> None:
    folders = [write(tmp_path / name, content) for name, content in (("a", b"1"), ("b", b"1"), ("c", b"2"))]
    one, same, other = (by_content(folder, cache_dir=tmp_path / "cache") for folder in folders)
    assert one == same != other and one.parent == tmp_path / "cache" / "profiles"
    assert [(folder / PROFILE_FILE).read_bytes() for folder in (one, other)] == [b"1", b"2"]


def test_a_copy_that_somebody_changed_is_made_anew(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", b"1")
    write(by_content(folder, cache_dir=tmp_path), b"other")
    assert (by_content(folder, cache_dir=tmp_path) / PROFILE_FILE).read_bytes() == b"1"


def test_a_folder_without_a_profile_stays_what_it_is(tmp_path: Path) -> None:
    """The engine says what is wrong with it."""
    assert by_content(tmp_path, cache_dir=tmp_path / "cache") == tmp_path
    assert not (tmp_path / "cache").exists()
