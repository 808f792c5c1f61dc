"""What a container lacks, with the flag to add: the facts, read once, and the judgement of them."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from appliance.finding import Finding, error, warning
from appliance.plan.host import ContainerFacts
from appliance.terms.environment import HUB_TOKEN_VARIABLE, IMAGE_VARIABLE

_IN_MEMORY = ("tmpfs", "ramfs")
_CACHE = "/cache"
_SECRETS = "/run/secrets"


def read_container(run_root: Path) -> ContainerFacts | None:
    """Read the facts about this container; None outside of our image. run_root: absolute; need not exist."""
    image = os.environ.get(IMAGE_VARIABLE, "")
    if not image:
        return None
    mount_point, kind = mount_of(Path(os.path.realpath(run_root)), mounts=Path("/proc/self/mountinfo").read_text())
    token = os.environ.get(HUB_TOKEN_VARIABLE, "")
    there = bool(token) and os.path.exists(token)
    unreadable = there and not os.access(token, os.R_OK)
    mode = stat.S_IMODE(os.stat(token).st_mode) if there and not is_mounted_secret(Path(token)) else 0
    return ContainerFacts(
        image=image,
        run_root=str(run_root),
        run_root_lasts=mount_point != "/" and kind not in _IN_MEMORY,
        uid=os.getuid(),
        gid=os.getgid(),
        tmp_runs_programs=not os.statvfs(tempfile.gettempdir()).f_flag & os.ST_NOEXEC,
        unwritable_cache="" if os.access(_CACHE, os.W_OK | os.X_OK) else _CACHE,
        unreadable_token=token if unreadable else "",
        token_owner=os.stat(token).st_uid if unreadable else 0,
        open_token=f"{token}: others may read it (mode {mode:04o})" if mode & 0o077 else "",
    )


def is_mounted_secret(file: Path) -> bool:
    """Tell whether a file is a mounted secret. Docker and Kubernetes mount secrets readable by everybody in the
    container, where there is nobody else."""
    return bool(os.environ.get(IMAGE_VARIABLE)) and Path(os.path.abspath(file)).is_relative_to(_SECRETS)


def mount_of(path: Path, *, mounts: str) -> tuple[str, str]:
    """Return the (mount point, file system) that a path is on. mounts: as /proc/self/mountinfo, the last of two mounts
    counts."""
    best = ("/", "")
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        point, kind = left.split()[4].replace("\\040", " "), right.split()[0]
        if path.is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, kind)
    return best


def judge_container(
    facts: ContainerFacts | None, *, needs_gpu: bool, num_gpus: int, writable: bool
) -> Iterator[Finding]:
    """Judge this container. needs_gpu: whether the plan is for a GPU.  num_gpus: number of GPUs that this container
    sees.  writable: whether the run root can be written."""
    if facts is None:
        return
    if needs_gpu and not num_gpus:
        message, remedy = "this container sees no GPU", "docker run --gpus all ..."
        if facts.image == "cpu":
            message, remedy = "this is the CPU image", f"use the image with the tag gpu, and {remedy}"
        yield error("no-gpu-in-container", "cluster.device", message, remedy)
    on_volume = f"docker run -v flashrl-runs:{facts.run_root} ..."
    if writable and not facts.run_root_lasts:
        message = f"{facts.run_root} is not on a volume: the results go with the container"
        yield warning("no-volume", "cluster.run_dir", message, f"to keep them: {on_volume}")
    elif not writable and not facts.run_root_lasts:
        message = f"{facts.run_root} cannot be written in this container"
        yield error("volume-owner", "cluster.run_dir", message, on_volume)
    elif not writable:
        message = f"{facts.run_root}: the volume does not let user {facts.uid}, group {facts.gid} write"
        remedy = f"on the host, chown -R {facts.uid}:0 its folder; or docker run --user $(id -u):0 as its owner ..."
        yield error("volume-owner", "cluster.run_dir", message, remedy)
    if facts.unwritable_cache:
        message = f"user {facts.uid}, group {facts.gid} cannot write"
        remedy = f"docker run -v flashrl-cache:{facts.unwritable_cache} --user {facts.uid}:0 ..."
        yield error("cache", facts.unwritable_cache, message, remedy)
    if facts.unreadable_token:
        # The hub's library would end in the middle of the preparation with a PermissionError.
        owner = facts.token_owner
        message = f"{facts.unreadable_token}: user {facts.uid} cannot read the file of user {owner}"
        remedy = f"docker run --user {owner}:0 ..., or with compose RUN_AS={owner}:0"
        if not owner:
            remedy = f"on the host, a copy for it: install -m 0400 -o {facts.uid} FILE COPY"
        yield error("hub-token", HUB_TOKEN_VARIABLE, message, remedy)
    if facts.open_token:
        remedy = f"mount it below {_SECRETS}, or give it the mode 0600"
        yield error("hub-token", HUB_TOKEN_VARIABLE, facts.open_token, remedy)
    if not facts.tmp_runs_programs:
        message = "programs cannot be started from it, and compiled kernels lie there"
        remedy = f"docker run --tmpfs {tempfile.gettempdir()}:exec ..."
        yield error("tmp-noexec", tempfile.gettempdir(), message, remedy)
