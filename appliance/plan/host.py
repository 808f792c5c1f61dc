"""Facts about a host, as values: `preflight.probes` reads them, planning and judging use them. And a node's ports."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.control_groups import UNLIMITED
from appliance.terms.devices import gpu_of_product


@dataclass(frozen=True)
class HostGpu:
    product: str
    """The name that nvidia-smi gives."""
    memory_bytes: int


@dataclass(frozen=True)
class ContainerFacts:
    """A container of our image, as seen from inside."""

    image: str
    """Flavour of the image, `cpu` or `gpu`."""
    run_root: str
    """Mount or folder to which runs are written."""
    run_root_lasts: bool
    """Whether the run root is on a volume or a folder of the host, not in the container's own layer or in memory."""
    uid: int
    gid: int
    tmp_runs_programs: bool = True
    """Whether a file in the temporary folder may be executed."""
    unwritable_cache: str = ""
    """Folder of the cache where this user may not write to it, or empty."""
    unreadable_token: str = ""
    """File with the hub's token where this user may not read it, or empty."""
    token_owner: int = 0
    """User id of that file's owner."""
    open_token: str = ""
    """Reason why the hub's token is no secret, or empty."""


@dataclass(frozen=True)
class Limits:
    open_files: int = UNLIMITED
    """Open files of one process: the hard limit, to which Ray raises the soft one."""
    threads: int = UNLIMITED
    """Threads of the user (the soft limit) or of the control groups, whichever is less."""
    memory_bytes: int = UNLIMITED
    """Least memory that a control group of the process allows, however much of it is free."""
    memory_free_bytes: int = UNLIMITED
    """Memory that the control groups leave, with the page cache that they can take back."""


@dataclass(frozen=True)
class HostFacts:
    cores: int
    """Cores that this process may use."""
    memory_bytes: int
    """Memory of the host, or what the control groups allow where that is less. It stays the same, and so do plans."""
    memory_free_bytes: int
    """Free memory of the host, or what the control groups leave where that is less."""
    cpu_flags: frozenset[str]
    """CPU features, named as in /proc/cpuinfo."""
    gpus: tuple[HostGpu, ...]
    python: tuple[int, int]
    missing_libraries: tuple[str, ...]
    """Shared libraries that vLLM needs and the loader does not find."""
    shm_free_bytes: int
    run_root_problem: str
    """Reason why nothing can be written where the run root is or will be, or empty."""
    packages: frozenset[str]
    """Distributions of the chosen log backends that are installed."""
    processor: str = ""
    """The processor's name and generation, empty when unknown."""
    container: ContainerFacts | None = None
    """Container of our image that this process is in; None outside of one."""
    limits: Limits = Limits()
    today: str = ""
    """The day on this host, YYYY-MM-DD; empty where nobody looked."""

    def gpus_of(self, device: str) -> list[HostGpu]:
        """Return the GPUs of that kind, and those that this version does not know, for which the user has named the
        most similar one. device: one of GPUS."""
        return [gpu for gpu in self.gpus if (known := gpu_of_product(gpu.product)) is None or known.name == device]


DEFAULT_BASE = 6379  # Ray's own
LARGEST_BASE = 65535 - 999


@dataclass(frozen=True)
class Ports:
    """Ports of a node. They are fixed, so that a firewall can be opened for them. Several nodes on one host take
    different bases.

    base        the head's control store (GCS), what `appliance join --head HOST:PORT` names
    base + 1    node manager            base + 4    agent, gRPC
    base + 2    object manager          base + 5    agent, HTTP
    base + 3    runtime environments    base + 6    metrics
    base + 7    the head's client server, which nothing of ours uses
    base + 100 to base + 999            worker processes

    The processes that train find free ports of their own for what they say to each other (torch, TransferQueue): nodes
    of one training must reach each other on the ephemeral ports (`net.ipv4.ip_local_port_range`) too.
    """

    base: int = DEFAULT_BASE

    @property
    def client(self) -> int:
        return self.base + 7

    @property
    def of_the_head(self) -> tuple[int, ...]:
        """Ports that processes of a head's host listen on, workers apart."""
        return tuple(range(self.base, self.client + 1))

    @property
    def of_a_node(self) -> tuple[int, ...]:
        """Ports that processes of any other node's host listen on, workers apart."""
        return tuple(range(self.base + 1, self.client))

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments of `ray start` that set a node's ports."""
        return (
            f"--node-manager-port={self.base + 1}",
            f"--object-manager-port={self.base + 2}",
            f"--runtime-env-agent-port={self.base + 3}",
            f"--dashboard-agent-grpc-port={self.base + 4}",
            f"--dashboard-agent-listen-port={self.base + 5}",
            f"--metrics-export-port={self.base + 6}",
            f"--min-worker-port={self.base + 100}",
            f"--max-worker-port={self.base + 999}",
        )
