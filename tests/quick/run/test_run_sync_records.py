"""The trainer's last look at a weight update: every rank's own word, about this very update."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest

from appliance.errors import SyncError
from appliance.sync.records import (
    Acknowledgement,
    Sent,
    Telemetry,
    add_layer_errors,
    append_acknowledgement,
    append_sent,
    check_sync,
    layer_errors_file,
)

SENT = Sent(sync=1, replica=0, rank=0, manifest="abc", digest_s=0.1)
TAKEN = Acknowledgement(
    sync=1,
    replica=0,
    rank=0,
    manifest="abc",
    tensors=3,
    bytes=12,
    layers=2,
    layers_proven=2,
    parameters_proven=1,
    unproven=0,
    waiting_bytes=4,
    digest_s=0.2,
    proof_s=0.3,
    seconds=1.0,
    telemetry=Telemetry(codes_changed_fraction=0.5, saturated_fraction=0.01, scale_drift=0.1, layer_error_max=0.02),
)
PLACES = [(replica, rank) for replica in range(2) for rank in range(2)]


def write(run_dir: Path, *, sent: dict | None = None, taken: dict | None = None, sync: int = 1) -> None:
    """Update number `sync` of two replicas with two ranks each. sent, taken: {place: changes, or None for no line}."""
    for place in PLACES:
        for append, line, changes in (
            (append_sent, SENT, (sent or {}).get(place, {})),
            (append_acknowledgement, TAKEN, (taken or {}).get(place, {})),
        ):
            if changes is not None:
                append(run_dir, replace(line, sync=sync, replica=place[0], rank=place[1], **changes))


def check(run_dir: Path, *, sync: int = 1, first: int = 1):
    return check_sync(run_dir, sync=sync, replicas=2, ranks=2, first=first)


def test_all_ranks_that_took_this_update_pass(tmp_path: Path) -> None:
    write(tmp_path, taken={(1, 1): {"proof_s": 0.5}})
    metrics = check(tmp_path).metrics()
    assert metrics == {
        "proof_s": 0.5,
        "telemetry_s": 0.0,
        "digest_s": 0.3,
        "codes_changed_fraction": 0.5,
        "saturated_fraction": pytest.approx(0.01),
        "scale_drift": pytest.approx(0.1),
        "layer_error_max": 0.02,
    }


@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_said_nothing_is_named(tmp_path: Path, place: tuple[int, int]) -> None:
    write(tmp_path, taken={place: None})
    with pytest.raises(SyncError) as raised:
        check(tmp_path)
    assert raised.value.message == (
        f"weight update 1: rollout rank {place[1]} of replica {place[0]} has proven nothing yet"
    )


def test_a_rank_that_stayed_at_the_update_before_is_named(tmp_path: Path) -> None:
    """Stale weights on one rank of two."""
    write(tmp_path)
    write(tmp_path, sync=2, taken={(0, 1): None})
    with pytest.raises(SyncError) as raised:
        check(tmp_path, sync=2)
    assert raised.value.message == "weight update 2: rollout rank 1 of replica 0 has proven number 1 as the last one"


def test_a_trainer_rank_that_did_not_send_is_named(tmp_path: Path) -> None:
    write(tmp_path, sent={(1, 0): None})
    with pytest.raises(SyncError) as raised:
        check(tmp_path)
    assert raised.value.message == "weight update 1: the trainer sent rollout rank 0 of replica 1 nothing yet"


@pytest.mark.parametrize("who", ["sent", "taken"])
def test_other_weights_on_one_rank_are_named(tmp_path: Path, who: str) -> None:
    write(tmp_path, **{who: {(1, 1): {"manifest": "xyz"}}})
    with pytest.raises(SyncError, match="rollout rank 1 of replica 1 took the weights"):
        check(tmp_path)


def test_replicas_that_were_sent_different_weights_are_found(tmp_path: Path) -> None:
    other = {(1, 0): {"manifest": "xyz"}, (1, 1): {"manifest": "xyz"}}
    write(tmp_path, sent=other, taken=other)
    with pytest.raises(SyncError) as raised:
        check(tmp_path)
    assert raised.value.message.count("took the weights xyz, was sent xyz, and the first rank was sent abc") == 2


@pytest.mark.parametrize(
    ("changes", "unproven"),
    [({"layers_proven": 1}, "1 of 2 layers"), ({"layers": 0, "layers_proven": 0}, "none of its layers")],
)
def test_an_acknowledgement_that_leaves_quantised_layers_unproven_is_refused(
    tmp_path: Path, changes: dict, unproven: str
) -> None:
    """The first update proves all of them; layers that vLLM's own methods quantise have no telemetry."""
    write(tmp_path, taken={(0, 1): changes})
    with pytest.raises(SyncError) as raised:
        check(tmp_path)
    assert raised.value.message == f"weight update 1: rollout rank 1 of replica 0 has proven {unproven}"


def test_a_later_update_may_prove_a_part_of_the_layers(tmp_path: Path) -> None:
    write(tmp_path, sync=2, taken={place: {"layers_proven": 0} for place in PLACES})
    check(tmp_path, sync=2)


def test_the_first_update_of_new_engines_proves_all_of_their_layers(tmp_path: Path) -> None:
    """In BF16, too, where nothing is quantised."""
    unproven = {"layers_proven": 1, "telemetry": None}
    write(tmp_path, sync=5, taken={(0, 1): unproven})
    check(tmp_path, sync=5)
    check(tmp_path, sync=5, first=4)
    with pytest.raises(SyncError) as raised:
        check(tmp_path, sync=5, first=5)
    assert raised.value.message == "weight update 5: rollout rank 1 of replica 0 has proven 1 of 2 layers"


def test_the_error_of_a_layer_outlives_the_engine_that_measured_it(tmp_path: Path) -> None:
    """An engine that holds a layer in BF16 measures nothing of it; the worst layers are chosen of all."""
    file = layer_errors_file(tmp_path, replica=0, rank=0)
    add_layer_errors(file, {"a": 0.3, "b": 0.1})
    add_layer_errors(file, {"b": 0.2})
    add_layer_errors(file, {})
    assert json.loads(file.read_text()) == {"a": 0.3, "b": 0.2}


def test_bf16_engines_have_no_telemetry(tmp_path: Path) -> None:
    write(tmp_path, taken={place: {"telemetry": None} for place in PLACES})
    metrics = check(tmp_path).metrics()
    assert metrics["codes_changed_fraction"] is None and metrics["layer_error_max"] is None


def test_what_the_driver_reads_of_an_update_depends_on_the_ranks_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two files for each rank, and of each its end: docs/cluster.md counts on it."""
    opened: list[Path] = []
    read_bytes: list[int] = []
    path_open = Path.open

    def read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    def count(path: Path, *arguments: object, **options: object) -> IO:
        if path.is_relative_to(tmp_path):  # a thread that another test left may open files of its own
            opened.append(path)
        return path_open(path, *arguments, **options)

    for sync in (1, 300):
        while sync == 300 and len((tmp_path / "sync/trainer-0-0.jsonl").read_bytes().splitlines()) < 300:
            write(tmp_path, sync=300)
        write(tmp_path, sync=sync)
        with monkeypatch.context() as counted:
            before = read()
            counted.setattr(Path, "open", count)
            check(tmp_path, sync=sync)
            counted.undo()
            read_bytes.append(read() - before)
    assert len(opened) == 2 * 2 * len(PLACES) and len(set(opened)) == 2 * len(PLACES)
    grown = 2 * len(PLACES) * 4096
    assert read_bytes[1] < read_bytes[0] + grown < sum(each.stat().st_size for each in set(opened))
