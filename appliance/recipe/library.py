"""The shipped recipes by name: where they lie, their list, their text, a copy to start from."""

from __future__ import annotations

import contextlib
import difflib
import os.path
import sysconfig
from pathlib import Path

from appliance.errors import RecipeError
from appliance.finding import fault

_SUFFIX = ".yaml"
_SUFFIXES = (_SUFFIX, ".yml")


def folder() -> Path:
    """Return `recipes/` beside the package in a source checkout, else where an installed wheel has put it."""
    checkout = Path(__file__).resolve().parents[2] / "recipes"
    if (checkout / "reference.yaml").is_file():
        return checkout
    return Path(sysconfig.get_path("data")) / "share" / "flashrl-appliance" / "recipes"


def names() -> list[str]:
    """List the names of the shipped recipes, sorted."""
    return sorted(path.stem for path in folder().glob(f"*{_SUFFIX}"))


def find(name_or_path: str, *, beside: Path | None = None) -> Path:
    """Find the file of a shipped recipe's name, or of a path. Raises RecipeError when there is none. beside: the folder
    that relative paths start from; the current one when None."""
    shipped = folder() / f"{name_or_path}{_SUFFIX}"
    if "/" not in name_or_path and os.path.isfile(shipped):  # unlike Path.is_file it takes any text
        return shipped
    path = (beside or Path()) / name_or_path
    if os.path.isfile(path):
        return path
    if name_or_path and os.path.exists(path):  # a folder, a pipe: `<(...)` is one
        hint = "a recipe is a plain file; `appliance recipes ls` lists the shipped ones"
        raise RecipeError([fault((str(path),), "not a file", hint)])
    near = _nearest(name_or_path, beside=beside or Path())
    hint = f"did you mean `{near}`?" if near else "`appliance recipes ls` lists the shipped recipes"
    if "/" in name_or_path or name_or_path.endswith(_SUFFIXES):
        raise RecipeError([fault((str(path),), "no such file", hint)])
    raise RecipeError([fault((name_or_path,), "no shipped recipe has this name, and no file", hint)])


def _nearest(name_or_path: str, *, beside: Path) -> str:
    """Find what somebody meant who named a file that is not there: a recipe of its folder or a shipped one, as it is to
    be typed; empty where none has a similar name."""
    parent, name = os.path.split(name_or_path)
    meant = {shipped: shipped for shipped in names()}
    with contextlib.suppress(OSError, ValueError):  # no such folder, or no path at all
        files = [file for file in os.listdir(beside / parent) if file.endswith(_SUFFIXES)]
        meant |= {os.path.splitext(file)[0]: os.path.join(parent, file) for file in files}
    stem = os.path.splitext(name)[0] if name.endswith(_SUFFIXES) else name
    return next((meant[near] for near in difflib.get_close_matches(stem, meant, n=1)), "")


def summary(name: str) -> str:
    """Return the first comment line of a shipped recipe."""
    with find(name).open() as file:
        return file.readline().strip().removeprefix("#").strip()


def text(name: str) -> str:
    """Read the text of a recipe. Raises RecipeError when there is none, or none that can be read."""
    path = find(name)
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeError([fault((str(path),), f"cannot be read: {error.strerror}")]) from error
    except UnicodeDecodeError as error:
        raise RecipeError([fault((str(path),), "not UTF-8 text", "save the file as UTF-8")]) from error


def copy(name: str, *, target: Path) -> Path:
    """Copy a recipe to a file or into a folder; returns the new file. Never overwrites: raises RecipeError."""
    content = text(name)  # first: what cannot be read leaves no empty file
    destination = target / find(name).name if os.path.isdir(target) else target
    is_made = False
    try:
        with destination.open("x", encoding="utf-8") as file:
            is_made = True
            file.write(content)
    except FileExistsError:
        raise RecipeError([fault((str(destination),), "the file exists", "give another name")]) from None
    except OSError as error:
        if is_made:
            destination.unlink()
        raise RecipeError([fault((str(destination),), f"cannot be written: {error.strerror}")]) from error
    return destination
