"""The demo's measurement says which scheme it measured."""

from __future__ import annotations

import pytest

from appliance.errors import TrainingError
from benchmarks.demo import SETTINGS, require_scheme


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_is_called_by_the_scheme_of_its_rollouts(setting: str) -> None:
    scheme, other = ("int8", "bf16") if setting.startswith("int8") else ("bf16", "int8")
    require_scheme(setting, lines=[{"scheme": scheme}, {"scheme": scheme}])
    with pytest.raises(TrainingError) as raised:
        require_scheme(setting, lines=[{"scheme": scheme}, {"scheme": other}])
    assert raised.value.message == f"{setting}: the rollouts were in bf16, int8"


def test_the_first_setting_is_the_demo_s_own() -> None:
    assert SETTINGS["int8"] == ("rollout.scheme=auto",)
