"""What the pages for people name is there: files, headings, commands, targets, recipes, tests."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_command

from appliance.cli import app
from appliance.tasks.rewards import BUILT_IN
from appliance.terms.families import FAMILIES
from appliance.terms.schemes import Scheme

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
ANY = {"RECIPE", "help"}  # besides the targets that `make help` lists
OF_OTHERS = {"CHANGELOG.md", "gpu.md", "toolkits.md"}  # pages that name files of other versions, of verl and of TRL


def pages(root: Path) -> list[Path]:
    return [*root.glob("*.md"), *(root / "docs").rglob("*.md")]


def code(page: Path) -> str:
    """What stands in backticks and in fenced blocks, one piece a line."""
    fenced = r"^```.*?\n(.*?)^```"
    text = page.read_text()
    blocks = re.findall(fenced, text, re.M | re.S)
    inline = re.findall(r"`([^`]+)`", re.sub(fenced, "", text, flags=re.M | re.S))
    return "\n".join([*blocks, *(" ".join(piece.split()) for piece in inline)])


def anchors(page: Path) -> set[str]:
    """GitHub's names of the headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> Iterator[str]:
    for link in LINK.findall(page.read_text()):
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        if not link.startswith("https://") and (not target.exists() or (anchor and anchor not in anchors(target))):
            yield f"{page.name}: {link}"


def test_every_link_between_pages_leads_somewhere(root: Path) -> None:
    assert [link for page in pages(root) for link in broken_links(page)] == []


def test_every_page_is_linked_from_another_one(root: Path) -> None:
    linked = {(page.parent / link).resolve() for page in pages(root) for link in LINK.findall(page.read_text())}
    assert [page.name for page in pages(root) if page not in linked and page.name != "README.md"] == []


def test_the_index_has_every_page(root: Path) -> None:
    linked = {link.partition("#")[0] for link in LINK.findall((root / "docs/README.md").read_text())}
    assert sorted({page.name for page in (root / "docs").glob("*.md")} - linked - {"README.md"}) == []


def test_every_file_of_the_code_that_a_page_names_is_there(root: Path) -> None:
    """Pages for those who change it name files below `appliance/` from there, or from the root."""
    places = {
        (page.name, name)
        for page in pages(root)
        if page.name not in OF_OTHERS
        for name in re.findall(r"`([\w-]+(?:/[\w-]+)+\.py)`", page.read_text())
    }
    assert len(places) > 40
    bases = (root, root / "appliance", root / "tests")
    assert sorted((page, name) for page, name in places if not any((base / name).is_file() for base in bases)) == []


def test_the_tour_knows_how_long_its_files_are(root: Path) -> None:
    """Nearly: who plans an evening by it is not misled."""
    tour = (root / "docs/tour.md").read_text()
    stops = re.findall(r"^\d+\. \*\*`([\w/]+\.py)`\*\* \((\d+)", tour, re.M)
    assert len(stops) == 13
    lengths = {name: len((root / "appliance" / name).read_text().splitlines()) for name, _ in stops}
    assert {name: lengths[name] for name, told in stops if abs(lengths[name] - int(told)) > 0.2 * int(told)} == {}
    total = int(re.search(r"about ([\d,]+) lines", tour)[1].replace(",", ""))
    assert abs(sum(lengths.values()) - total) <= 0.05 * total


def test_every_built_in_reward_has_its_row(root: Path) -> None:
    page = (root / "docs/own-task.md").read_text()
    built_in = page.partition("### Built in")[2].partition("\n\n**")[0]
    assert re.findall(r"^\| `([\w-]+)` \|", built_in, re.M) == list(BUILT_IN)


def test_every_scheme_has_its_row(root: Path) -> None:
    page = (root / "docs/quantization.md").read_text().partition("\n## ")[0]
    first_cells = re.findall(r"^\| (`[^|]+) \|", page, re.M)
    assert [name for cell in first_cells for name in re.findall(r"`([^`]+)`", cell)] == [*Scheme, "auto"]


def test_every_listed_family_is_named(root: Path) -> None:
    """`Qwen3-MoE` for `Qwen3MoeForCausalLM`."""
    [named] = re.findall(r"^The \*listed\* families \(([^)]+)\)", (root / "docs/quantization.md").read_text(), re.M)
    families = [name.removesuffix("ForCausalLM").replace("Moe", "-MoE") for name in FAMILIES]
    assert [name for name in families if not re.search(rf"\b{name}\b(?!-)", named)] == []


def test_every_command_that_a_page_names_is_there(root: Path) -> None:
    known = get_command(app).commands.keys()
    places = {
        (page.name, name) for page in pages(root) for name in re.findall(r"\bappliance ([a-z][a-z-]*)\b", code(page))
    }
    assert len(places) > 40
    assert {(page, name) for page, name in places if name not in known} == set()


def test_every_target_that_a_page_names_is_there(root: Path) -> None:
    shown = subprocess.run(["make", "help"], cwd=root, capture_output=True, text=True, check=True).stdout
    targets = set(re.findall(r"^  make (\S+)", shown, re.M)) | ANY
    places = {
        (page.name, name)
        for page in pages(root)
        for name in re.findall(r"^(?:\S+=\S+ )*make ([\w.-]+)", code(page), re.M)
    }
    assert len(places) > 20
    assert {(page, name) for page, name in places if name not in targets} == set()


def test_every_recipe_is_in_the_readme_and_in_make_help(root: Path) -> None:
    recipes = sorted(path.stem for path in (root / "recipes").glob("*.yaml") if path.stem != "reference")
    shown = subprocess.run(["make", "help"], cwd=root, capture_output=True, text=True, check=True).stdout
    readme = (root / "README.md").read_text()
    assert recipes
    assert [name for name in recipes if f"make {name} " not in shown or f"`{name}`" not in readme] == []


@pytest.mark.parametrize(("target", "recipe"), [("demo", "arithmetic-tiny-int8"), ("smollm2", "smollm2-int8")])
def test_a_training_by_a_short_name_is_that_of_its_recipe(root: Path, target: str, recipe: str) -> None:
    command = ["make", "--dry-run", target, "ARGS=--set seed=1"]
    shown = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    assert re.search(rf"appliance train {recipe} .*--set seed=1;", shown)


@pytest.mark.parametrize("page", ["SECURITY.md", "docs/weights.md"])
def test_every_test_that_a_page_names_is_there(root: Path, page: str) -> None:
    names = set(re.findall(r"`(test_\w+)(?:\*?\.py)?`", (root / page).read_text().replace("*.py`", "`")))
    there = [path.stem for path in (root / "tests").rglob("test_*.py")]
    assert names
    assert {name for name in names if not any(each.startswith(name) for each in there)} == set()
