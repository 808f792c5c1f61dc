"""A weight update that goes wrong in a real training ends the run, before anything is generated with its weights."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest
from killable import SMALL
from trainings import train

pytestmark = pytest.mark.e2e

LAYER = "model.layers.1.mlp.down_proj"
BROKEN = 4  # the first update comes before training: this one is step 3's
ENDS_WITHIN_S = 60.0
# In every process of the run: when the engine's side of an update is imported, one of its tensors gets a bit flipped,
# the sign of its largest element, after its digest was checked and before vLLM has it.
FLIP = f'''
from after_import import after_import


def flip(module):
    give = module.WeightUpdate._give

    def flipped(self, name, tensor):
        if self._sync == {BROKEN} and name == "{LAYER}.weight":
            tensor = tensor.clone()
            largest = tensor.abs().argmax()
            tensor.view(-1)[largest] *= -1
        return give(self, name, tensor)

    module.WeightUpdate._give = flipped


after_import("appliance.engine.update", flip)
'''
TESTS = Path(__file__).parents[1]


def test_a_bit_that_flips_in_an_update_ends_the_run_before_any_rollout_with_it(
    run_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(FLIP)
    places = filter(None, (str(tmp_path), str(TESTS), os.environ.get("PYTHONPATH")))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(places))
    sets = {**SMALL, "trainer.steps": "4", "trainer.max_restarts": "0"}
    run = train(run_root, *(f"{key}={value}" for key, value in sets.items()), name="flipped", timeout_s=600)
    ended = time.time()
    assert run.code == 4, run.stderr[-3000:]
    events = run.json_lines("events.jsonl")
    failure = next(event for event in events if event["kind"] == "failure")
    assert (failure["error"], failure["exit_code"]) == ("SyncError", 4)
    said = rf"weight update {BROKEN}: {re.escape(LAYER)} on rank 0 is not as received: "
    assert re.match(rf"{said}.*there is \S+, the tensor received gives \S+", failure["what"]), failure["what"]
    assert ended - failure["time"] < ENDS_WITHIN_S
    assert [line["step"] for line in run.json_lines("metrics.jsonl")] == [1, 2]
    assert [line["sync"] for line in run.json_lines("sync/rollout-0-0.jsonl")] == list(range(1, BROKEN))
    later = [event["what"] for event in events if event["kind"] == "phase" and event["time"] > failure["time"]]
    assert "rollout" not in later
    record = json.loads((run.run_dir / "run.json").read_text())
    assert (record["state"], record["exit_code"]) == ("failed", 4)
    assert run.left == ()
