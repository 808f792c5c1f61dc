"""Scales of the engines' FP8 KV caches, as the driver measures, sends and checks them. The engines are fakes that hold
what they are sent; real ones are in tests/engine/test_engine_kv_cache.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.errors import SyncError
from appliance.quant.kv_scales import Pairs, digest_of, scales_of
from appliance.trainer import kv_scales
from appliance.trainer.kv_scales import KvScaleUpdates

RANGES = [{"a": (10.0, 0.5), "b": (2.0, 4.0)}, {"a": (12.0, 0.25), "b": (1.0, 5.0)}]  # of two ranks
WIDEST = {"a": (12.0, 0.5), "b": (2.0, 5.0)}


class Server:
    """One engine of two ranks."""

    def __init__(self, *, ranges: list[Pairs] = RANGES) -> None:
        self.ranges, self.sync, self.log = ranges, 0, list[Any]()
        self.scales_by_rank: list[Pairs] = []

    def _answer(self, method: Callable[..., Any]) -> SimpleNamespace:
        return SimpleNamespace(remote=method)

    @property
    def kv_ranges(self) -> SimpleNamespace:
        def measure(prompts: list[list[int]], *, scales: Pairs) -> list[Pairs]:
            self.log.append(("measure", len(prompts), dict(scales)))
            return self.ranges

        return self._answer(measure)

    @property
    def take_kv_scales(self) -> SimpleNamespace:
        def take(scales: Pairs) -> list[str]:
            self.log.append(("take", dict(scales)))
            self.scales_by_rank = [dict(scales), dict(scales)]
            return self._digests()

        return self._answer(take)

    @property
    def check_kv_scales(self) -> SimpleNamespace:
        return self._answer(self._digests)

    def _digests(self) -> list[str]:
        return [digest_of(scales, sync=self.sync) for scales in self.scales_by_rank]


class Source:
    def __init__(self) -> None:
        self.step_prompts, self.finished = [[1, 2, 3], [4, 5]], 0

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kv_scales.ray, "get", lambda answers: answers)
    (tmp_path / "sync").mkdir()
    return tmp_path


def begun(run_dir: Path, *servers: Server, saved: Pairs | None = None, sync: int = 1) -> KvScaleUpdates:
    for server in servers:
        server.sync = sync
    scales = KvScaleUpdates(run_dir, servers=lambda: list(servers))
    scales.begin(Source(), sync=sync, saved=saved)
    return scales


def test_all_ranks_of_all_engines_get_the_scales_of_the_widest_range(run_dir: Path) -> None:
    servers = Server(), Server(ranges=[{"a": (1.0, 0.125), "b": (3.0, 1.0)}] * 2)
    scales = begun(run_dir, *servers)
    assert scales.ranges == {"a": (12.0, 0.5), "b": (3.0, 5.0)}
    sent = {"a": (2.0**-5, 2.0**-9), "b": (2.0**-7, 2.0**-6)}
    for server in servers:
        assert server.log == [("measure", 2, {}), ("take", sent)]
    (line,) = [json.loads(text) for text in (run_dir / "sync/kv-scales.jsonl").read_text().splitlines()]
    assert line == {
        "sync": 1,
        "digest": digest_of(sent, sync=1),
        "layers": 2,
        "tokens": 5,
        "seconds": line["seconds"],
    }
    scales.check(1)


def test_nothing_is_measured_before_there_are_prompts(run_dir: Path) -> None:
    """verl's first update comes before the rollouts are made."""
    server = Server()
    KvScaleUpdates(run_dir, servers=lambda: [server]).after_update(1)
    assert server.log == []


def test_ranges_beyond_the_format_are_measured_twice(run_dir: Path) -> None:
    """With scales of 1 they were cut, and later layers saw what was cut."""
    server = Server(ranges=[{"a": (600.0, 1.0)}])
    scales = begun(run_dir, server)
    first = scales_of({"a": (600.0, 1.0)})
    assert server.log == [("measure", 2, {}), ("measure", 2, first), ("take", first)]
    assert scales.ranges == {"a": (600.0, 1.0)}


def test_each_update_measures_anew_when_nothing_is_generated(run_dir: Path) -> None:
    server, source = Server(), Source()
    server.sync = 1
    scales = KvScaleUpdates(run_dir, servers=lambda: [server])
    scales.begin(source, sync=1, saved=None)
    assert scales.metrics()["kv_range_drift"] == 0.0
    server.ranges, server.sync = [{"a": (24.0, 0.5), "b": (2.0, 5.0)}], 2
    scales.after_update(2)
    assert source.finished == 2
    assert scales.metrics()["kv_range_drift"] == pytest.approx(1.0, rel=1e-6)
    assert 0 <= scales.metrics()["kv_scales_s"] < 1
    scales.check(2)


def test_a_resumed_run_gives_what_was_saved_and_measures_nothing(run_dir: Path) -> None:
    server = Server()
    scales = begun(run_dir, server, saved=WIDEST, sync=7)
    assert server.log == [("take", scales_of(WIDEST))] and scales.ranges == WIDEST
    scales.check(7)


def test_an_engine_that_has_other_scales_than_it_was_sent_is_an_error(run_dir: Path) -> None:
    server = Server()
    scales = begun(run_dir, server)
    server.scales_by_rank[1] = server.scales_by_rank[1] | {"b": (2.0**-7, 2.0**-7)}
    with pytest.raises(
        SyncError, match=r"KV scales of weight update 1: rollout rank 1 of replica 0 has .*, it was sent"
    ):
        scales.check(1)


def test_an_engine_that_kept_the_scales_of_the_update_before_is_an_error(run_dir: Path) -> None:
    """It took them, and answers as for the update that it took last."""
    server, stale = Server(), Server()
    scales = begun(run_dir, server, stale)
    server.sync = 2
    with pytest.raises(SyncError, match="KV scales of weight update 2: rollout rank 0 of replica 1 has"):
        scales.after_update(2)
