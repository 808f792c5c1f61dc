"""The model of `accept`'s language-model row: the real one, its shapes where it cannot be had, and a rehearsal's."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from appliance.cli import app
from appliance.tasks.library import PACKAGED_MODELS
from appliance.tasks.packaged_model import PackageFacts
from benchmarks.accept import language_model
from benchmarks.accept.ground import Ground

FACTS = {"here": PackageFacts(), "not to be had": PackageFacts(problem="no index answers")}


@pytest.mark.parametrize(
    ("facts", "rehearsal", "is_real", "vocabulary"),
    [("here", False, True, None), ("not to be had", False, False, 49_152), ("here", True, False, 1_024)],
    ids=["real", "its shapes", "a rehearsal"],
)
def test_the_settings_of_the_row_name_a_model_that_its_recipe_takes(
    facts: str, rehearsal: bool, is_real: bool, vocabulary: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packaged = PACKAGED_MODELS[language_model.MODEL]
    one_layer = dataclasses.replace(packaged, shape=dataclasses.replace(packaged.shape, layers=1))
    monkeypatch.setitem(language_model.PACKAGED_MODELS, language_model.MODEL, one_layer)
    monkeypatch.setattr(language_model, "package_facts", lambda *_, **__: FACTS[facts])
    ground = Ground(row="train-smollm2", folder=tmp_path, rehearsal=rehearsal)
    settings, found_real = language_model._model(ground)
    assert found_real == is_real
    assert [text for text in ground.stand_ins if "no index answers" in text] == ground.stand_ins
    assert bool(ground.stand_ins) == (facts != "here")
    if vocabulary is not None:
        config = json.loads((tmp_path / "model/config.json").read_text())
        assert config["vocab_size"] == vocabulary
        assert rehearsal or config["num_hidden_layers"] == 1
    sets = (*language_model.SETS, *settings, "cluster.device=cpu", f"cluster.run_dir={tmp_path / 'runs'}")
    arguments = [part for value in sets for part in ("--set", value)]
    checked = CliRunner().invoke(app, ["check", language_model.RECIPE, *arguments])
    assert checked.exit_code == 0, checked.output
