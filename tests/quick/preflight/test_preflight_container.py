"""What a container lacks, with the flag to add: whole texts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from appliance.plan.host import ContainerFacts
from appliance.preflight.container import is_mounted_secret, judge_container, mount_of, read_container
from appliance.terms.environment import HUB_TOKEN_VARIABLE, IMAGE_VARIABLE

GOOD = ContainerFacts(image="cpu", run_root="/appliance/runs", run_root_lasts=True, uid=10001, gid=0)
MOUNTS = """\
21 1 0:20 / / rw,relatime - overlay overlay rw,lowerdir=/a
22 21 0:21 / /dev/shm rw,nosuid - tmpfs shm rw,size=65536k
23 21 8:1 /v/_data /appliance/runs rw - ext4 /dev/vda rw
24 21 8:1 /b /with\\040space rw - ext4 /dev/vda rw
"""


def findings(
    facts: ContainerFacts | None = GOOD, *, needs_gpu: bool = False, num_gpus: int = 0, writable: bool = True
) -> list[tuple[str, str]]:
    found = judge_container(facts, needs_gpu=needs_gpu, num_gpus=num_gpus, writable=writable)
    return [(each.text, each.remedy) for each in found]


@pytest.mark.parametrize("facts", [GOOD, None])
def test_nothing_to_say(facts: ContainerFacts | None) -> None:
    assert findings(facts) == []


@pytest.mark.parametrize(("link", "target", "lasts"), [("out", "volume/runs", True), ("volume/runs", "in", False)])
def test_runs_behind_a_link_are_on_the_volume_that_it_leads_to(
    link: str, target: str, lasts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "volume").mkdir()
    (tmp_path / link).symlink_to(tmp_path / target)
    mounts = MOUNTS + f"25 21 8:1 /c {tmp_path}/volume rw - ext4 /dev/vda rw\n"
    monkeypatch.setenv(IMAGE_VARIABLE, "cpu")
    read_text = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path: mounts if path.name == "mountinfo" else read_text(path))
    found = read_container(tmp_path / link)
    assert found is not None and found.run_root_lasts is lasts


@pytest.mark.parametrize(
    ("facts", "judged", "finding"),
    [
        (
            replace(GOOD, run_root_lasts=False),
            {},
            (
                "warning: cluster.run_dir: /appliance/runs is not on a volume: the results go with the container",
                "to keep them: docker run -v flashrl-runs:/appliance/runs ...",
            ),
        ),
        (
            replace(GOOD, run_root_lasts=False),
            {"writable": False},
            (
                "error: cluster.run_dir: /appliance/runs cannot be written in this container",
                "docker run -v flashrl-runs:/appliance/runs ...",
            ),
        ),
        (
            GOOD,
            {"writable": False},
            (
                "error: cluster.run_dir: /appliance/runs: the volume does not let user 10001, group 0 write",
                "on the host, chown -R 10001:0 its folder; or docker run --user $(id -u):0 as its owner ...",
            ),
        ),
        (
            GOOD,
            {"needs_gpu": True},
            (
                "error: cluster.device: this is the CPU image",
                "use the image with the tag gpu, and docker run --gpus all ...",
            ),
        ),
        (
            replace(GOOD, image="gpu"),
            {"needs_gpu": True},
            ("error: cluster.device: this container sees no GPU", "docker run --gpus all ..."),
        ),
        (
            replace(GOOD, unwritable_cache="/cache"),
            {},
            (
                "error: /cache: user 10001, group 0 cannot write",
                "docker run -v flashrl-cache:/cache --user 10001:0 ...",
            ),
        ),
        (
            replace(GOOD, unreadable_token="/run/secrets/hf_token", token_owner=1000),
            {},
            (
                "error: HF_TOKEN_PATH: /run/secrets/hf_token: user 10001 cannot read the file of user 1000",
                "docker run --user 1000:0 ..., or with compose RUN_AS=1000:0",
            ),
        ),
        (
            replace(GOOD, unreadable_token="/run/secrets/hf_token"),
            {},
            (
                "error: HF_TOKEN_PATH: /run/secrets/hf_token: user 10001 cannot read the file of user 0",
                "on the host, a copy for it: install -m 0400 -o 10001 FILE COPY",
            ),
        ),
        (
            replace(GOOD, open_token="/data/token: others may read it (mode 0644)"),
            {},
            (
                "error: HF_TOKEN_PATH: /data/token: others may read it (mode 0644)",
                "mount it below /run/secrets, or give it the mode 0600",
            ),
        ),
        (
            replace(GOOD, tmp_runs_programs=False),
            {},
            (
                "error: /tmp: programs cannot be started from it, and compiled kernels lie there",
                "docker run --tmpfs /tmp:exec ...",
            ),
        ),
    ],
)
def test_a_finding_names_the_flag_to_add(
    facts: ContainerFacts, judged: dict[str, bool], finding: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/tmp")
    assert findings(facts, **judged) == [finding]


def test_the_gpus_of_a_container_are_enough_for_it() -> None:
    assert findings(replace(GOOD, image="gpu"), needs_gpu=True, num_gpus=8) == []


@pytest.mark.parametrize(
    ("path", "mount"),
    [
        ("/appliance/runs/a-1", ("/appliance/runs", "ext4")),
        ("/appliance", ("/", "overlay")),
        ("/appliance/runs2", ("/", "overlay")),
        ("/dev/shm/x", ("/dev/shm", "tmpfs")),
        ("/with space/x", ("/with space", "ext4")),
    ],
)
def test_a_path_is_on_its_deepest_mount(path: str, mount: tuple[str, str]) -> None:
    assert mount_of(Path(path), mounts=MOUNTS) == mount


def test_outside_of_our_image_there_is_no_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(IMAGE_VARIABLE, raising=False)
    assert read_container(Path("/runs")) is None
    monkeypatch.setenv(IMAGE_VARIABLE, "gpu")
    assert read_container(Path("/runs")).image == "gpu"


def test_the_hubs_token_is_a_secret_of_its_user_or_one_that_is_mounted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    token.write_text("hf_word")
    monkeypatch.setenv(IMAGE_VARIABLE, "cpu")
    monkeypatch.setenv(HUB_TOKEN_VARIABLE, str(token))

    def problem_with(mode: int) -> str:
        token.chmod(mode)
        return read_container(Path("/runs")).open_token

    assert problem_with(0o600) == problem_with(0o400) == ""
    assert problem_with(0o640) == f"{token}: others may read it (mode 0640)"
    assert problem_with(0o604) == f"{token}: others may read it (mode 0604)"
    monkeypatch.setattr("appliance.preflight.container._SECRETS", str(tmp_path))
    assert problem_with(0o644) == ""


def test_a_secret_is_mounted_in_our_image_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a host everybody there reads the folder."""
    monkeypatch.setenv(IMAGE_VARIABLE, "cpu")
    paths = [Path("/run/secrets/cluster/token"), Path("/run/secrets/../token"), Path("/run/secrets-of-mine/token")]
    assert [is_mounted_secret(path) for path in paths] == [True, False, False]
    monkeypatch.delenv(IMAGE_VARIABLE)
    assert not any(map(is_mounted_secret, paths))
