"""The Docker engine and the image that the container tests use, or the reason why they are skipped."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from docker.models.containers import Container
from images import (
    IMAGE,
    USER,
    fingerprint_of,
    give_to,
    open_to_all,
    remove_our_volumes,
    removed_at_the_end,
    unavailable,
)

from appliance.record.attestations import fingerprint

FIRST_RUN_S = 1200
os.environ["TESTCONTAINERS_RYUK_DISABLED"] = "true"  # its reaper is an image of a registry; the fixtures clean up


@pytest.fixture(scope="session")
def engine():
    """A docker client whose engine answers. At the end no volume is left that the tests made."""
    import docker

    try:
        client = docker.from_env(timeout=600)
        client.ping()
    except docker.errors.DockerException:
        unavailable("no Docker engine answers")
    known = {volume.id for volume in client.volumes.list()}
    yield client
    remove_our_volumes(client, known=known)
    client.close()


@pytest.fixture(scope="session")
def image(engine) -> str:
    """The image of this checkout: one made from other sources is no subject of a test."""
    if fingerprint_of(engine, IMAGE) is None:
        unavailable(f"there is no image {IMAGE}")
    if fingerprint_of(engine, IMAGE) != fingerprint():
        unavailable(f"{IMAGE} has other sources than this checkout: make image")
    return IMAGE


@pytest.fixture
def started(image: str) -> Iterator[Callable]:
    """Starts containers of the image with the options of a careful user, and removes them at the end."""
    from testcontainers.core.container import DockerContainer

    containers = []

    def start(*arguments: str, runs: Path | None = None, env: dict[str, str] | None = None, **options: object):
        container = DockerContainer(image).with_command(list(arguments))
        if runs is not None:
            container = container.with_volume_mapping(str(runs), "/appliance/runs", "rw")
        for name, value in (env or {}).items():
            container = container.with_env(name, value)
        container.tmpfs.update(options.pop("tmpfs", {"/tmp": "exec,mode=1777"}))
        safe = {"read_only": True, "shm_size": "1g", "cap_drop": ["ALL"], "security_opt": ["no-new-privileges:true"]}
        containers.append(container.with_kwargs(**{**safe, **options}))
        container.start()
        return container.get_wrapped_container()

    yield start
    for container in containers:
        container.stop(force=True)


@pytest.fixture(scope="session")
def first_run(engine, image: str) -> Iterator[Container]:
    """What a new user types, to its end: nothing mounted, no option; it makes the tiny model, the data, the profile."""
    sets = ("trainer.steps=3", "trainer.validate_every=3", "task.val_size=64")
    line = ["train", "arithmetic-tiny-int8", *(part for each in sets for part in ("--set", each))]
    with removed_at_the_end(engine.containers.run(image, line, detach=True)) as container:
        container.wait(timeout=FIRST_RUN_S)
        yield container


@pytest.fixture(scope="session")
def cache(first_run: Container, runs: Path) -> Path:
    """`.cache` of the run with nothing mounted, copied into the folder of the runs: no other test makes it again."""
    stream, _ = first_run.get_archive("/appliance/runs/.cache")
    with tarfile.open(fileobj=io.BytesIO(b"".join(stream))) as archive:
        archive.extractall(runs)  # of our own container; `filter` came with Python 3.11.4
    give_to(USER, runs)
    return runs / ".cache"


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the host that the image's user owns."""
    folder = tmp_path_factory.mktemp("runs")
    open_to_all(folder)
    os.chown(folder, USER, 0)
    return folder
