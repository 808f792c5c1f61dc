"""Which image the container tests use, and folders that its user reads and writes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from docker import DockerClient
from docker.errors import ImageNotFound
from docker.models.containers import Container

IMAGE = "flashrl-appliance:cpu"
USER = 10001
PROJECT = "flashrl-test"  # of compose


def unavailable(reason: str) -> None:
    """Skip, or fail where a Docker engine is required."""
    if os.environ.get("APPLIANCE_REQUIRE_DOCKER") == "1":
        pytest.fail(f"APPLIANCE_REQUIRE_DOCKER=1, and {reason}", pytrace=False)
    pytest.skip(reason)


@contextmanager
def removed_at_the_end(container: Container) -> Iterator[Container]:
    """The container, gone afterwards with its volumes without a name, however the tests with it end."""
    try:
        yield container
    finally:
        container.remove(force=True, v=True)


def said_by(engine: DockerClient, image: str, arguments: Sequence[str], **options: object) -> bytes:
    """stdout of a container that must end well. docker's own `remove=True` leaves its volumes."""
    with removed_at_the_end(engine.containers.run(image, list(arguments), detach=True, **options)) as container:
        code = container.wait()["StatusCode"]
        assert code == 0, container.logs()
        return container.logs(stdout=True, stderr=False)


def fingerprint_of(engine: DockerClient, image: str) -> str | None:
    """The sources that an image was made of, None where there is no such image.

    It is looked for first: `run` would ask a registry for one that is not there, and fail by its answer.
    """
    try:
        engine.images.get(image)
    except ImageNotFound:
        return None
    return json.loads(said_by(engine, image, ["version", "--json"]))["fingerprint"]


def remove_our_volumes(engine: DockerClient, *, known: Collection[str]) -> None:
    """Of the volumes that have a name: compose's, and the cache of `--in-container` where it was not there before.

    known: the volumes before the tests. All others belong to somebody else who works here.
    """
    cache = f"flashrl-cache-{os.getuid()}"
    for volume in engine.volumes.list():
        labels = volume.attrs.get("Labels") or {}
        if labels.get("com.docker.compose.project") == PROJECT or (volume.id == cache and cache not in known):
            volume.remove()


def open_to_all(folder: Path) -> None:
    """Let every user walk to a folder of pytest's, which makes them for its own user alone."""
    for each in (folder, *folder.parents[:2]):
        each.chmod(0o755)


def give_to(user: int, folder: Path) -> None:
    """Make `user`, in group 0, the owner of a folder and of all that is in it."""
    for path in (folder, *folder.rglob("*")):
        os.chown(path, user, 0)


def runs_with(cache: Path, folder: Path, *, user: int = USER) -> Path:
    """A new folder of runs of that user, with a copy of the cache."""
    shutil.copytree(cache, folder / ".cache")
    give_to(user, folder)
    open_to_all(folder.parent)
    return folder
