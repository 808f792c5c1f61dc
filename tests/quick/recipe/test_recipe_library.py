import errno
import io
import os
import sysconfig
from pathlib import Path

import pytest

from appliance.errors import RecipeError
from appliance.recipe import library
from appliance.recipe.load import load_recipe

SHIPPED = [
    "arithmetic-tiny-bf16",
    "arithmetic-tiny-int8",
    "arithmetic-tiny-lora-int8",
    *("dapo-32b-bf16", "dapo-32b-fp8", "dapo-32b-int8", "dapo-7b-int8"),
    *("gsm8k-0.5b-bf16", "gsm8k-0.5b-fp8", "gsm8k-0.5b-int8", "gsm8k-7b-lora-int8", "gsm8k-tiny-int8"),
    *("qwen2.5-1.5b-int8", "qwen3-32b-fp8", "qwen3-8b-fp8", "qwen3-8b-int8"),
    "reference",
    "smollm2-int8",
]


def test_the_shipped_recipes():
    assert library.names() == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_recipe_loads_is_named_as_its_file_and_says_what_it_does(name):
    assert load_recipe(name).name == name
    assert len(library.summary(name)) > 20


def test_copy_into_a_folder_and_to_a_file(tmp_path):
    text = library.text("arithmetic-tiny-int8")
    assert library.copy("arithmetic-tiny-int8", target=tmp_path).read_text() == text
    assert library.copy("arithmetic-tiny-int8", target=tmp_path / "mine.yaml").name == "mine.yaml"


def test_copy_overwrites_nothing(tmp_path):
    target = tmp_path / "mine.yaml"
    target.write_text("precious")
    with pytest.raises(RecipeError) as raised:
        library.copy("arithmetic-tiny-int8", target=target)
    assert raised.value.problems == [(f"{target}: the file exists", "give another name")]
    assert target.read_text() == "precious"


def test_a_copy_that_has_no_room_leaves_nothing(tmp_path, monkeypatch):
    opened = Path.open
    monkeypatch.setattr(Path, "open", lambda path, mode="r", **how: Full(path) if mode == "x" else opened(path, mode))
    with pytest.raises(RecipeError) as raised:
        library.copy("arithmetic-tiny-int8", target=tmp_path / "mine.yaml")
    assert raised.value.problems[0][0].endswith("cannot be written: No space left on device")
    assert list(tmp_path.iterdir()) == []


class Full(io.StringIO):
    """A new file on a disk that is full."""

    def __init__(self, path):
        super().__init__()
        path.touch(exist_ok=False)

    def write(self, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_copy_to_nowhere(tmp_path):
    with pytest.raises(RecipeError) as raised:
        library.copy("arithmetic-tiny-int8", target=tmp_path / "no" / "mine.yaml")
    message = f"{tmp_path}/no/mine.yaml: cannot be written: No such file or directory"
    assert raised.value.problems == [(message, "")]


def test_a_file_wins_over_nothing_and_a_name_over_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").write_text("x")
    assert library.find("mine").read_text() == "x"
    (tmp_path / "arithmetic-tiny-int8").write_text("x")
    assert library.find("arithmetic-tiny-int8").parent == library.folder()
    assert library.find("./arithmetic-tiny-int8").read_text() == "x"


def test_an_installed_wheel_finds_its_recipes(tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "appliance" / "recipe"
    monkeypatch.setattr(library, "__file__", str(package / "library.py"))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / name))
    assert library.folder() == tmp_path / "data" / "share" / "flashrl-appliance" / "recipes"


def test_what_is_no_text_is_neither_shown_nor_copied(tmp_path):
    source, target = tmp_path / "latin.yaml", tmp_path / "mine.yaml"
    source.write_bytes(b"name: caf\xe9\n")
    for refused in (lambda: library.text(str(source)), lambda: library.copy(str(source), target=target)):
        with pytest.raises(RecipeError) as raised:
            refused()
        assert raised.value.problems == [(f"{source}: not UTF-8 text", "save the file as UTF-8")]
    assert not target.exists()


def test_what_cannot_be_read_is_neither_shown_nor_copied(tmp_path, monkeypatch):
    """As a file of another user: a folder in its place fails for root too."""
    target = tmp_path / "mine.yaml"
    monkeypatch.setattr(library, "find", lambda name: tmp_path)
    for refused in (lambda: library.text("r.yaml"), lambda: library.copy("r.yaml", target=target)):
        with pytest.raises(RecipeError) as raised:
            refused()
        assert raised.value.problems == [(f"{tmp_path}: cannot be read: Is a directory", "")]
    assert not target.exists()


@pytest.mark.parametrize("name", ["a-folder", "a-folder/"])
def test_a_folder_is_there_but_no_recipe(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-folder").mkdir()
    with pytest.raises(RecipeError) as raised:
        library.find(name)
    hint = "a recipe is a plain file; `appliance recipes ls` lists the shipped ones"
    assert raised.value.problems == [("a-folder: not a file", hint)]


def test_the_line_of_the_reference_is_a_sentence():
    assert library.summary("reference") == "Every key of a recipe with its default, and what it means."


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("mein.yaml", "mine.yaml"),
        ("mine", "mine.yaml"),
        ("mine.yaml", "mine.yml"),
        ("sub/min.yaml", "sub/mine.yml"),
        ("nowhere/smolm2-int8.yaml", "smollm2-int8"),
        ("smolm2-int8", "smollm2-int8"),
        ("\0.yaml", ""),
        ("notes", ""),
    ],
)
def test_a_file_that_is_not_there_is_answered_with_the_nearest(tmp_path, monkeypatch, typed, meant):
    """A recipe beside it as it is to be typed, or a shipped one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    for file in ("sub/mine.yml", "notes.txt", "mine.yml" if typed == "mine.yaml" else "mine.yaml"):
        (tmp_path / file).touch()
    with pytest.raises(RecipeError) as raised:
        library.find(typed)
    [(_, hint)] = raised.value.problems
    assert hint == (f"did you mean `{meant}`?" if meant else "`appliance recipes ls` lists the shipped recipes")
