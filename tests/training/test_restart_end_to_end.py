"""One real training whose rollout engines are replaced three times: to validate in BF16, back, and by the guard."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from trainings import FEW, Finished, train

pytestmark = [pytest.mark.e2e, pytest.mark.long]

LAYERS = 16  # 4 decoder layers of 4 quantised ones
# Every step is bad, and the only thing to do about it is BF16. Update 1 comes before training, 2, 5 and 6 end a step;
# 3 and 4 are for the validation after step 1.
SETS = (
    *("guard.k3_kl=1e-12", "guard.bad_steps=1", "guard.cooling_steps=0", "guard.actions=[bf16]"),
    *("guard.scheme_change=restart", "trainer.validate_bf16_every=1", "trainer.validate_every=1"),
    *(FEW, "trainer.steps=3", "trainer.validate_before=false", "correction.method=adaptive"),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, with_tiny_cache: Callable[[Path], Path]) -> Finished:
    root = with_tiny_cache(tmp_path_factory.mktemp("runs"))
    finished = train(root, *SETS, name="restarts")
    assert finished.code == 0, finished.stderr[-4000:]
    return finished


def restarts(run: Finished) -> list[dict]:
    return [event for event in run.json_lines("events.jsonl") if "generation" in event]


def test_rollouts_become_what_was_decided_and_training_goes_on(run: Finished) -> None:
    lines = run.json_lines("metrics.jsonl")
    assert [(line["scheme"], line["bf16_layers"], line["guard_level"]) for line in lines] == [
        ("int8", 0, "observe"),
        ("int8", 0, "bf16"),
        ("bf16", LAYERS, "bf16"),
    ]
    assert all(0 <= line["mismatch_k3_kl"] < 0.015 and line["grad_norm"] > 0 for line in lines)
    assert abs(lines[0]["val_reward_bf16_mean"] - lines[0]["val_reward_mean"]) < 0.1
    assert all(line["val_reward_bf16_mean"] == line["val_reward_mean"] for line in lines[1:])


def test_each_step_is_weighed_by_a_share_of_its_own(run: Finished) -> None:
    """The driver writes these weights, and a batch that lacks them ends the run."""
    shares = [line["adaptive_share"] for line in run.json_lines("metrics.jsonl")]
    assert all(0 < share < 1 for share in shares) and len(set(shares)) == len(shares)


def test_new_engines_prove_all_of_their_first_update(run: Finished) -> None:
    taken = run.json_lines("sync/rollout-0-0.jsonl")
    assert [(line["sync"], line["scheme"], line["bf16_layers"]) for line in taken] == [
        (1, "int8", 0),
        (2, "int8", 0),
        (3, "bf16", LAYERS),
        (4, "int8", 0),
        (5, "bf16", LAYERS),
        (6, "bf16", LAYERS),
    ]
    assert all(line["layers_proven"] == line["layers"] == LAYERS + 1 for line in taken)
    assert all(line["switched"] == 0 for line in taken)
    sent = [line["manifest"] for line in run.json_lines("sync/trainer-0-0.jsonl")]
    assert [line["manifest"] for line in taken] == sent


def test_every_generation_says_what_it_runs(run: Finished) -> None:
    folders = [*(f"generation-{number}" for number in (1, 2, 3)), "."]
    attested = [json.loads((run.run_dir / "attest" / each / "rollout-0-0.json").read_text()) for each in folders]
    assert [each["scheme"] for each in attested] == ["int8", "bf16", "int8", "bf16"]
    assert [each["detail"]["generation"] for each in attested] == [1, 2, 3, 4]
    assert len({each["detail"]["pid"] for each in attested}) == 4
    ended = [set(event["ended"]) for event in restarts(run)]
    assert [each["detail"]["pid"] in ids for each, ids in zip(attested, ended, strict=False)] == [True] * 3


def test_the_old_engines_are_gone_and_the_seconds_are_told(run: Finished) -> None:
    restart_events = restarts(run)
    assert [(event["generation"], event["after_sync"], event["precision"]) for event in restart_events] == [
        (2, 2, "bf16"),
        (3, 3, "as planned"),
        (4, 4, "bf16"),
    ]
    assert [event["why"] for event in restart_events] == [
        f"rollouts are to be {event['precision']}" for event in restart_events
    ]
    assert [pid for event in restart_events for pid in event["ended"] if psutil.pid_exists(pid)] == []
    assert run.left == ()
    seconds = [event["end_s"] + event["start_s"] for event in restart_events]
    lines = run.json_lines("metrics.jsonl")
    assert lines[0]["engine_restart_s"] == pytest.approx(seconds[0] + seconds[1], abs=0.01)
    assert lines[1]["engine_restart_s"] == pytest.approx(seconds[2], abs=0.01)
    assert lines[1]["step_s"] > lines[1]["engine_restart_s"] > lines[1]["sync_s"] > 0
    assert "engine_restart_s" not in lines[2]


def test_the_step_before_new_engines_is_saved(run: Finished) -> None:
    """The guard decides after step 1; the engines are replaced when step 2 has changed the weights."""
    saved = [event for event in run.json_lines("events.jsonl") if event["kind"] == "checkpoint"]
    assert (saved[0]["step"], saved[0]["why"]) == (1, "new rollout engines are next")


def test_the_page_finds_nothing_wrong_with_it(run: Finished) -> None:
    """Engines in BF16 are held against what they were started in, their first update against all layers."""
    from appliance.report.folder import read_view
    from appliance.report.verdicts import Word, verdicts

    said = {each.question: each.word for each in verdicts(read_view(run.run_dir))}
    assert (said["Did the weights arrive?"], said["Does every process run what it should?"]) == (Word.FINE, Word.FINE)
