"""Facts about a host, as values: `preflight.probes` reads them, planning and judging use them."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.control_groups import UNLIMITED


@dataclass(frozen=True)
class HostGpu:
    """product: the name that nvidia-smi gives."""

    product: str
    memory_bytes: int


@dataclass(frozen=True)
class ContainerFacts:
    """What a container of our image looks like from inside.

    image: its flavour, `cpu` or `gpu`.  run_root_lasts: the run root is on a volume or a folder of the host, not in the
    container's own layer or in memory.  run_root: the mount or folder to write to.
    tmp_runs_programs: a file in the temporary folder may be executed.  unwritable_cache: the cache's folder, or empty.
    unreadable_token: the file with the hub's token, where it is there and this user may not read it, or empty;
    token_owner: of that file.  open_token: why it is no secret, or empty.
    """

    image: str
    run_root: str
    run_root_lasts: bool
    uid: int
    gid: int
    tmp_runs_programs: bool = True
    unwritable_cache: str = ""
    unreadable_token: str = ""
    token_owner: int = 0
    open_token: str = ""


@dataclass(frozen=True)
class Limits:
    """open_files: of one process, the hard limit, to which Ray raises the soft one.  threads: of the user (the
    soft limit) or the control groups, whichever is less.  memory_free_bytes: what the control groups leave, page cache
    that they can take back included."""

    open_files: int = UNLIMITED
    threads: int = UNLIMITED
    memory_free_bytes: int = UNLIMITED


@dataclass(frozen=True)
class HostFacts:
    """cores: that this process may use.  memory_free_bytes: of the host, or what the control group leaves.
    cpu_flags: as in /proc/cpuinfo.

    missing_libraries: shared libraries vLLM needs and the loader does not find.

    run_root_problem: why nothing can be written where the run root is or will be, or empty.
    packages: distributions of the chosen log backends that are installed.
    processor: the processor's name and generation, empty when unknown.  container: None outside of our image.
    """

    cores: int
    memory_bytes: int
    memory_free_bytes: int
    cpu_flags: frozenset[str]
    gpus: tuple[HostGpu, ...]
    python: tuple[int, int]
    missing_libraries: tuple[str, ...]
    shm_free_bytes: int
    run_root_problem: str
    packages: frozenset[str]
    processor: str = ""
    container: ContainerFacts | None = None
    limits: Limits = Limits()
