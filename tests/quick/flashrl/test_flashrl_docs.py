"""docs/flashrl.md says what the code does: names, variables and keys are read off the code."""

from __future__ import annotations

import re
from pathlib import Path

from flashrl_compat.config_file import OUR_KEYS, THEIR_KEYS
from flashrl_compat.names import NAMES, OWN_NAMES
from flashrl_compat.variables import LEVELS, VARIABLES

DOCS = Path(__file__).parents[3] / "docs" / "flashrl.md"


def rows(section: str) -> list[list[str]]:
    """Cells of the section's first table, without its head."""
    text = DOCS.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_the_table_of_names_is_the_codes() -> None:
    wanted = [[f"`{n.theirs}`", f"`{n.scheme}`", n.meant, n.differs] for n in (*NAMES, *OWN_NAMES)]
    assert rows("Names") == wanted


def test_the_table_of_variables_is_the_codes() -> None:
    found = {name.strip("`"): values for name, values, _ in rows("Variables")}
    assert tuple(found) == VARIABLES
    assert re.findall(r"`(\w+)`", found["FLASHRL_LOGGING_LEVEL"]) == list(LEVELS)


def test_the_table_of_keys_is_the_codes() -> None:
    assert tuple(key.strip("`") for key, _ in rows("The file")) == (*THEIR_KEYS, *OUR_KEYS)


def test_names_are_listed_once() -> None:
    words = [name.theirs for name in (*NAMES, *OWN_NAMES)]
    assert len(words) == len(set(words)) == 13
