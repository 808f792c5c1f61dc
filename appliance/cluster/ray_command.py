"""What starts a node of the cluster: argv and environment of `ray start`, as values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from appliance.plan.host import Ports
from appliance.plan.verl_args import STORAGE_UNITS
from appliance.processes import module_argv
from appliance.record.attestations import fingerprint
from appliance.terms.environment import ray_node_env, with_ray_token

FINGERPRINT_LABEL = "appliance.fingerprint"
_CPUS_OF_A_RANK = 4  # verl reserves 3, and an engine's server needs one while it starts
_CPUS_OF_SERVICES = 3  # the TransferQueue's controller, and two for what is started in passing


@dataclass(frozen=True)
class NodeOffer:
    """What a node brings. gpus: None lets Ray count them; on a CPU one "GPU" is one rank.  cpus: see cpus_for_ray."""

    gpus: int | None
    cpus: int
    object_store_bytes: int | None
    address: str = ""  # the one that other nodes reach this host by; empty: Ray's choice


def cpus_for_ray(cores: int, *, ranks: int, is_cpu: bool) -> int:
    """What a node offers as CPUs: processes that Ray may start, which share the cores of a small host. cores: of the
    host.  ranks: of the trainer, here.  With fewer than they ask for, verl waits for ever, wordless."""
    return max(cores, _CPUS_OF_SERVICES + STORAGE_UNITS[is_cpu] + _CPUS_OF_A_RANK * ranks)


def head_argv(offer: NodeOffer, *, ports: Ports, ray_dir: Path) -> tuple[str, ...]:
    """The head runs until its processes end. Its own are the control store and Ray's client server, which `ray start`
    cannot leave out: it gets a port of ours, and the token guards it. The dashboard is off."""
    return (
        *_start(offer, ports=ports, ray_dir=ray_dir),
        "--head",
        f"--port={ports.base}",
        f"--ray-client-server-port={ports.client}",
        "--include-dashboard=false",
        "--dashboard-host=127.0.0.1",
    )


def worker_argv(offer: NodeOffer, *, ports: Ports, head: str, ray_dir: Path) -> tuple[str, ...]:
    """head: `host:port`."""
    return (*_start(offer, ports=ports, ray_dir=ray_dir), f"--address={head}")


def _start(offer: NodeOffer, *, ports: Ports, ray_dir: Path) -> tuple[str, ...]:
    """ray_dir: absolute. Ray makes it and opens it to everybody; a node without one takes the head's path."""
    optional = {
        "--num-gpus": offer.gpus,
        "--object-store-memory": offer.object_store_bytes,
        "--node-ip-address": offer.address or None,
    }
    return (
        *module_argv("ray.scripts.scripts", "start", "--block", "--disable-usage-stats"),
        "--log-color=false",
        f"--labels={FINGERPRINT_LABEL}={label_of(fingerprint())}",
        f"--num-cpus={offer.cpus}",
        *(f"{option}={value}" for option, value in optional.items() if value is not None),
        *ports.arguments,
        f"--temp-dir={ray_dir}",
    )


def label_of(fingerprint: str) -> str:
    """A label's value has 63 characters at most."""
    return fingerprint[:32]


def node_environment(environment: dict[str, str], *, token_file: Path) -> dict[str, str]:
    """Of `ray start` and of what speaks to the cluster. environment: of this process."""
    return with_ray_token({**environment, **ray_node_env()}, token_file)
