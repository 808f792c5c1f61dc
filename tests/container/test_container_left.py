"""What the container tests leave and what they must not touch. No engine: these are calls of its client."""

from __future__ import annotations

import os
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from images import remove_our_volumes, removed_at_the_end, said_by, unavailable

CACHE = f"flashrl-cache-{os.getuid()}"


def left(*, known: set[str], **labels: dict[str, str] | None) -> list[str]:
    """The volumes that stay of those with these names (`_` for `-`) and labels."""
    volumes = [MagicMock(id=name.replace("_", "-"), attrs={"Labels": each}) for name, each in labels.items()]
    remove_our_volumes(SimpleNamespace(volumes=SimpleNamespace(list=lambda: volumes)), known=known)
    return [volume.id for volume in volumes if not volume.remove.called]


def test_volumes_of_others_stay_also_those_made_meanwhile() -> None:
    others = {"their_database": None, "flashrl_runs": {}, "theirs": {"com.docker.compose.project": "flashrl"}}
    assert left(known=set(), **others) == ["their-database", "flashrl-runs", "theirs"]


def test_the_volumes_of_the_tests_own_compose_project_and_the_new_cache_go() -> None:
    ours = {"runs": {"com.docker.compose.project": "flashrl-test"}, CACHE.replace("-", "_"): None}
    assert left(known=set(), **ours) == []


def test_a_cache_that_was_there_before_stays() -> None:
    assert left(known={CACHE}, **{CACHE.replace("-", "_"): None}) == [CACHE]


def test_a_container_goes_with_its_volumes_also_where_waiting_for_it_fails() -> None:
    container = MagicMock()
    container.wait.side_effect = TimeoutError
    with pytest.raises(TimeoutError), removed_at_the_end(container) as same:
        same.wait(timeout=1)
    container.remove.assert_called_once_with(force=True, v=True)


def test_what_a_container_said_counts_only_where_it_ended_well() -> None:
    engine = MagicMock()
    container = engine.containers.run.return_value
    container.wait.return_value = {"StatusCode": 1}
    with pytest.raises(AssertionError):
        said_by(engine, "image", ["version"])
    container.remove.assert_called_once_with(force=True, v=True)
    container.wait.return_value = {"StatusCode": 0}
    container.logs.return_value = b"said"
    assert said_by(engine, "image", ["version"]) == b"said"


def test_without_an_engine_a_test_is_skipped_and_fails_where_one_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("APPLIANCE_REQUIRE_DOCKER", raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"^no Docker engine answers$"):
        unavailable("no Docker engine answers")
    monkeypatch.setenv("APPLIANCE_REQUIRE_DOCKER", "1")
    with pytest.raises(pytest.fail.Exception, match=r"^APPLIANCE_REQUIRE_DOCKER=1, and no Docker engine answers$"):
        unavailable("no Docker engine answers")
