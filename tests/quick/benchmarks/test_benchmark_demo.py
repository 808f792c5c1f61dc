"""The demo's measurement says which scheme it measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from appliance.errors import TrainingError
from benchmarks.demo import SETTINGS, equal, page, read, require_scheme


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_is_called_by_the_scheme_of_its_rollouts(setting: str) -> None:
    scheme, other = ("int8", "bf16") if setting.startswith("int8") else ("bf16", "int8")
    require_scheme(setting, lines=[{"scheme": scheme}, {"scheme": scheme}])
    with pytest.raises(TrainingError) as raised:
        require_scheme(setting, lines=[{"scheme": scheme}, {"scheme": other}])
    assert raised.value.message == f"{setting}: the rollouts were in bf16, int8"


def test_the_first_setting_is_the_demo_s_own() -> None:
    assert SETTINGS["int8"] == ("rollout.scheme=auto",)


def test_the_page_in_the_repository_is_that_of_its_numbers() -> None:
    """Also where they were taken before a column was there."""
    folder = Path(__file__).parents[3] / "docs" / "results"
    where = json.loads((folder / "demo.json").read_text())
    assert page(read(folder), where=where) == (folder / "demo.md").read_text()


def test_only_all_tokens_are_a_whole() -> None:
    assert [equal(each) for each in (1.0, 1 - 1e-9, 0.0, None)] == ["100 %", "99.9 %", "0.0 %", "-"]
