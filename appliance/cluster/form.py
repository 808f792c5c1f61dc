"""The driver's side of a cluster: start its head here (or find one), wait for the nodes, compare them, watch them.

Runs in the training child. What goes wrong is a PreflightError before training (exit 3, with the node's name) and a
ProcessDied after (exit 5). Waiting is for resources and not for a number of nodes. Who leaves while the others are
waited for is reported at once. A node that somebody stopped may come back whenever they like. One that died has a
moment to come back (a restarted container does), and then the waiting ends with its name.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from appliance.cluster.node_report import NodeReport, describe_node, list_differences, list_warnings, plant_canary
from appliance.errors import ApplianceError, PreflightError, ProcessDied, last_line
from appliance.plan.host import Ports
from appliance.plan.model_shape import model_shape
from appliance.plan.verl_args import STORAGE_UNITS
from appliance.preflight.access import check_token, make_token
from appliance.processes import module_argv
from appliance.record.attestations import fingerprint
from appliance.record.events import append_event
from appliance.record.liveness import WORKER_HOOK
from appliance.record.plan import RunPlan
from appliance.terms.counts import counted
from appliance.terms.devices import Topology
from appliance.terms.environment import (
    PLAN_VARIABLE,
    RAY_DIR_VARIABLE,
    RAY_OWN,
    RUN_VARIABLE,
    ray_node_env,
    with_ray_token,
)

CPU_OBJECT_STORE_BYTES = 256 << 20  # batches travel through the TransferQueue, Ray carries only references and settings
RETURNS_WITHIN_S = 45.0  # with the seconds that Ray takes to see a killed node, less than a minute
_LOOK_EVERY_S = 1.0
_WATCH_EVERY_S = 1.0
_ANSWER_WITHIN_S = 120.0
_HEAD_STARTS_WITHIN_S = 120.0
_ENDS_WITHIN_S = 10.0
_STOPPED = (1, 3, 4)  # of Ray's NodeDeathInfo.Reason: expected termination, drained for preemption, drained when idle
_KEPT_FOR_S = 30.0  # how long a death may take to arrive in the control store after its effects: a whole host, long
FINGERPRINT_LABEL = "appliance.fingerprint"
_CPUS_OF_A_RANK = 4  # verl reserves 3, and an engine's server needs one while it starts
_CPUS_OF_SERVICES = 3  # the TransferQueue's controller, and two for what is started in passing


@dataclass(frozen=True)
class ClusterNode:
    """A node of the cluster as Ray's control store has it."""

    id: str
    name: str
    address: str
    gpus: int
    """Amount of Ray's resource `GPU`."""
    program: str = ""
    """Label with the fingerprint of the program that started the node; empty for a node that another program
    started."""

    @property
    def text(self) -> str:
        return f"{self.name} ({self.address})"


def useful_nodes(nodes: Sequence[ClusterNode], needed: Topology) -> list[ClusterNode]:
    """Return the nodes with the GPUs that one node of the training needs."""
    return [node for node in nodes if node.gpus >= needed.gpus_per_node]


def describe_missing_nodes(nodes: Sequence[ClusterNode], needed: Topology) -> str:
    """Describe in one line which nodes are there and which are not."""
    have = len(useful_nodes(nodes, needed))
    gpus = "a GPU" if needed.gpus_per_node == 1 else f"{needed.gpus_per_node} GPUs"
    there = f"{have} of {needed.nodes} nodes with {gpus}"
    small = [f"{node.name} has {node.gpus}" for node in nodes if node.gpus < needed.gpus_per_node]
    return there + (f" ({', '.join(small)})" if small else "")


def nodes_not_among(nodes: Sequence[ClusterNode], others: Sequence[ClusterNode]) -> list[ClusterNode]:
    known = {node.id for node in others}
    return [node for node in nodes if node.id not in known]


@dataclass(frozen=True)
class Roll:
    present: tuple[ClusterNode, ...] = ()
    """Nodes that were there at the last look, in the order in which they came."""
    absent: tuple[tuple[ClusterNode, float], ...] = ()
    """Nodes that died since the first look and are not back, each with the time when it was missed."""

    def overdue(self, *, at: float) -> list[ClusterNode]:
        return [node for node, since in self.absent if at - since >= RETURNS_WITHIN_S]


def call_roll(
    roll: Roll, now: Sequence[ClusterNode], *, deaths: Mapping[str, str], needed: Topology, at: float
) -> tuple[Roll, list[str]]:
    """Return the roll after one more look, and a line about each node that came or went.

    deaths: by id, Ray's words for the end of nodes that nobody stopped.  at: s, of a clock that only goes forward.
    A host that starts again is another node, with the same `text`. Of several nodes on one host any will do.
    """
    absent, lines = list(roll.absent), []
    there, gone = describe_missing_nodes(now, needed), nodes_not_among(roll.present, now)
    places = {node.id: place for place, node in enumerate(roll.present)}
    lost = {node.id for node in gone}
    present = [node for node in roll.present if node.id not in lost]
    for node in nodes_not_among(now, roll.present):
        known = next((each for each in absent if node.text == each[0].text), None)
        if known is not None:
            absent.remove(known)
        lines.append(f"{node.text} {'is back' if known else 'joined'}: {there}")
        present.append(node)
    latest = {node.text: places.get(node.id, len(places)) for node in present}
    for node in gone:
        # A host that starts again may be there before Ray tells of its death.
        is_later_there = latest.get(node.text, -1) > places[node.id]
        if node.id not in deaths:
            lines.append(f"{node.text} left: {there}")
        elif is_later_there:
            lines.append(f"{node.text} had died ({deaths[node.id]}) and is back: {there}")
        else:
            absent.append((node, at))
            lines.append(f"{node.text} died ({deaths[node.id]}): {there}; it has {RETURNS_WITHIN_S:g} s to come back")
    return Roll(tuple(present), tuple(absent)), lines


class RayCluster:
    """A Ray cluster that this process is connected to."""

    def __init__(self, plan: RunPlan, *, head: subprocess.Popen[bytes] | None) -> None:
        self._plan = plan
        self._head = head
        self._run_dir = Path(plan.run_dir)
        self._members: list[ClusterNode] = []
        self._stopped = threading.Event()

    def wait(self, *, wait_s: float) -> None:
        """Wait until the nodes are there that the plan needs, and report each as it comes and goes. Raises
        PreflightError."""
        needed = self._plan.topology
        deadline, roll = time.monotonic() + wait_s, Roll()
        while True:
            now, deaths = find_nodes()
            roll, lines = call_roll(roll, now, deaths=deaths, needed=needed, at=time.monotonic())
            for line in lines:
                self._say(line)
            if len(members := useful_nodes(now, needed)) >= needed.nodes:
                self._members = members
                return
            if overdue := roll.overdue(at=time.monotonic()):
                names, there = " and ".join(node.text for node in overdue), describe_missing_nodes(now, needed)
                raise PreflightError(
                    f"{names} died and did not come back within {RETURNS_WITHIN_S:g} s: {there}",
                    hint="the log on that host says why; start `train` again here, and `join` there",
                )
            if time.monotonic() > deadline:
                raise PreflightError(
                    f"after {wait_s:g} s: {describe_missing_nodes(now, needed)}",
                    hint=f"on each other host: appliance join --head {self._address()}",
                )
            time.sleep(_LOOK_EVERY_S)

    def compare(self) -> None:
        """Check that every node runs the same program on the same files. Raises PreflightError with all differences."""
        head = describe_node(self._plan)
        # Ray gives the driver's paths to its workers: what joined speaks for itself, in a label.
        problems = [
            f"{node.text}: joined with other sources or locks than the head"
            for node in self._members
            if node.program not in ("", label_of(head.fingerprint))
        ]
        word = plant_canary(self._run_dir)
        reports, shape = self._ask_each(), model_shape(self._plan.model, weights=self._plan.weights)
        problems += list_differences(reports, head=head, plan=self._plan, canary=word, shape=shape)
        for warning in list_warnings(reports, head=head, plan=self._plan, shape=shape):
            self._say(f"warning: {warning}")
        if problems:
            raise PreflightError("; ".join(problems), hint="start every node from the same image, with the same mounts")
        nodes = counted(len(reports), "node runs", plural="nodes run")
        self._say(f"{nodes} the same program on the same files")

    def _ask_each(self) -> list[NodeReport]:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        plan = ray.put(self._plan)  # once: of 1,024 nodes it has 1.6 MB

        def ask(node: ClusterNode) -> ray.ObjectRef:
            here = NodeAffinitySchedulingStrategy(node_id=node.id, soft=False)
            return describe.options(num_cpus=0, scheduling_strategy=here).remote(plan)

        describe, reports = ray.remote(describe_node), []
        for node, report in [(node, ask(node)) for node in self._members]:  # all at once
            try:
                reports.append(ray.get(report, timeout=_ANSWER_WITHIN_S))
            except ray.exceptions.RayError as error:
                last = last_line(error)
                raise PreflightError(
                    f"{node.text}: did not report what it runs: {last}",
                    hint="start that node from the same image as the head",
                ) from error
        return reports

    def watch_head(self, on_loss: Callable[[ApplianceError], None]) -> None:
        """Call `on_loss` when the head ends, from its start on: connecting to a head that died ends this process
        without a word."""
        if (head := self._head) is None:
            return

        def look() -> ProcessDied | None:
            what, hint = "the Ray head on this host ended with code", "the log has Ray's words; is cluster.port in use?"
            return None if head.poll() is None else ProcessDied(f"{what} {head.returncode}", hint=hint)

        self._watch(look, on_loss=on_loss)

    def watch(self, on_loss: Callable[[ApplianceError], None]) -> None:
        """Call `on_loss`, once and on another thread, when a node is gone while the training runs."""
        self._watch(self._loss, on_loss=on_loss)

    def _watch(self, look: Callable[[], ProcessDied | None], *, on_loss: Callable[[ApplianceError], None]) -> None:
        def watch() -> None:
            while not self._stopped.wait(_WATCH_EVERY_S):
                if (error := look()) is not None:
                    on_loss(error)
                    return

        threading.Thread(target=watch, name="cluster-watch", daemon=True).start()

    def lost(self) -> ProcessDied | None:
        """Return the error that names the lost node because of which something may have failed just now; None where no
        node is lost."""
        deadline = time.monotonic() + _KEPT_FOR_S
        while time.monotonic() < deadline:
            if (error := self._loss()) is not None:
                return error
            time.sleep(0.5)
        return None

    def _loss(self) -> ProcessDied | None:
        gone = nodes_not_among(self._members, find_nodes()[0])
        what = " and ".join(f"node {node.text} left the cluster" for node in gone)
        return (
            ProcessDied(what, hint="bring the node back, and resume the run: it continues from the newest checkpoint")
            if gone
            else None
        )

    def stop(self) -> None:
        """Disconnect, and end the head if it is ours: the nodes that joined it see that and end too."""
        import ray

        self._stopped.set()
        ray.shutdown()
        if self._head is not None and self._head.poll() is None:
            self._head.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):  # the subreaper ends what does not end by itself
                self._head.wait(_ENDS_WITHIN_S)

    def _address(self) -> str:
        import ray

        return ray.get_runtime_context().gcs_address

    def _say(self, what: str) -> None:
        append_event(self._run_dir, kind="cluster", what=what)


def find_nodes() -> tuple[list[ClusterNode], dict[str, str]]:
    """Return the nodes that live, and, by id, Ray's words about the nodes that died without having been stopped."""
    import ray

    table = ray.nodes()
    living = [
        ClusterNode(
            id=entry["NodeID"],
            name=entry["NodeManagerHostname"],
            address=entry["NodeManagerAddress"],
            gpus=int(entry["Resources"].get("GPU", 0)),
            program=entry.get("Labels", {}).get(FINGERPRINT_LABEL, ""),
        )
        for entry in table
        if entry["Alive"]
    ]
    died = [each for each in table if not each["Alive"] and each["DeathReason"] not in _STOPPED]
    return living, {each["NodeID"]: each["DeathReasonMessage"] for each in died}


@contextlib.contextmanager
def cluster_of(plan: RunPlan, *, on_loss: Callable[[ApplianceError], None]) -> Iterator[RayCluster]:
    """Connect to the cluster, wait until it is complete, and compare its nodes; stop it at the end. Raises
    PreflightError. on_loss: called once, on another thread, when the head or a node of the training is gone."""
    settings = plan.cluster
    token_file = Path(settings.token_file)
    if settings.address:
        check_token(token_file)
    else:
        make_token(token_file)
    os.environ |= ray_node_env()  # of Ray's client in this process too; the token is known to it from its start
    head = None if settings.address else _start_head(plan)
    cluster = RayCluster(plan, head=head)
    cluster.watch_head(on_loss)
    try:
        _connect(plan, address=settings.address or f"127.0.0.1:{settings.port}")
        cluster.wait(wait_s=settings.wait_s)
        cluster.compare()
        cluster.watch(on_loss)
        yield cluster
    finally:
        cluster.stop()


def _start_head(plan: RunPlan) -> subprocess.Popen[bytes]:
    offer = NodeOffer(
        gpus=plan.cluster.gpus_per_node if plan.is_cpu else None,
        cpus=cpus_for_ray(os.cpu_count() or 1, ranks=plan.cluster.gpus_per_node, is_cpu=plan.is_cpu),
        object_store_bytes=CPU_OBJECT_STORE_BYTES if plan.is_cpu else None,
        address=plan.cluster.node_address or "",
    )
    ray_dir = Path(os.environ[RAY_DIR_VARIABLE], RAY_OWN)
    argv = head_argv(offer, ports=Ports(plan.cluster.port), ray_dir=ray_dir)
    environment = node_environment(dict(os.environ), token_file=Path(plan.cluster.token_file))
    append_event(Path(plan.run_dir), kind="cluster", what=f"starting the Ray head on port {plan.cluster.port}")
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, env=environment)


def _connect(plan: RunPlan, *, address: str) -> None:
    """Join the cluster as its driver, with the run's environment for every process that it starts anywhere."""
    import ray

    deadline = time.monotonic() + _HEAD_STARTS_WITHIN_S
    while True:
        try:
            with contextlib.chdir(plan.run_dir):  # its workers import from the folder where it is called
                every_worker = {"env_vars": _of_workers(plan), "worker_process_setup_hook": WORKER_HOOK}
                ray.init(address=address, log_to_driver=True, runtime_env=every_worker)
            return
        except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
            if time.monotonic() > deadline:
                last = last_line(error)
                raise PreflightError(
                    f"cluster {address}: {last}",
                    hint="see that Ray runs there, and that cluster.token_file has its token",
                ) from error
            time.sleep(_LOOK_EVERY_S)


def _of_workers(plan: RunPlan) -> dict[str, str]:
    """Return the variables that a worker on another host needs. On this host they would inherit it; there nobody has
    it. Not where logs go: a file of stacks is named by a process id, which the launcher signals on its own host."""
    return {**dict(plan.env), PLAN_VARIABLE: str(Path(plan.run_dir) / "plan.json"), RUN_VARIABLE: plan.run_dir}


# What starts a node: argv and environment of `ray start`, as values.


@dataclass(frozen=True)
class NodeOffer:
    """Resources that a node offers."""

    gpus: int | None
    """Number of GPUs; None lets Ray count them, and on a CPU one "GPU" is one rank."""
    cpus: int
    """CPUs that Ray may count on (cpus_for_ray)."""
    object_store_bytes: int | None
    address: str = ""  # the one that other nodes reach this host by; empty: Ray's choice


def cpus_for_ray(cores: int, *, ranks: int, is_cpu: bool) -> int:
    """Compute the CPUs that a node offers: processes that Ray may start, which share the cores of a small host. cores:
    of the host.  ranks: of the trainer, here.  With fewer than the ranks need, verl waits for ever and says nothing."""
    return max(cores, _CPUS_OF_SERVICES + STORAGE_UNITS[is_cpu] + _CPUS_OF_A_RANK * ranks)


def head_argv(offer: NodeOffer, *, ports: Ports, ray_dir: Path) -> tuple[str, ...]:
    """Make the command that starts the head, which runs until its processes end. Its own processes are the control
    store and Ray's client server, which `ray start` cannot leave out: it gets a port of ours, and the token guards it.
    The dashboard is off."""
    return (
        *_ray_start(offer, ports=ports, ray_dir=ray_dir),
        "--head",
        f"--port={ports.base}",
        f"--ray-client-server-port={ports.client}",
        "--include-dashboard=false",
        "--dashboard-host=127.0.0.1",
    )


def worker_argv(offer: NodeOffer, *, ports: Ports, head: str, ray_dir: Path) -> tuple[str, ...]:
    """Make the command that starts a worker node. head: `host:port`."""
    return (*_ray_start(offer, ports=ports, ray_dir=ray_dir), f"--address={head}")


def _ray_start(offer: NodeOffer, *, ports: Ports, ray_dir: Path) -> tuple[str, ...]:
    """Make the options of `ray start`. ray_dir: absolute. Ray makes it and opens it to everybody; a node without one
    takes the head's path."""
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
    """Shorten a fingerprint to a label's value, which has 63 characters at most."""
    return fingerprint[:32]


def node_environment(environment: dict[str, str], *, token_file: Path) -> dict[str, str]:
    """Make the environment of `ray start` and of what speaks to the cluster. environment: of this process."""
    return with_ray_token({**environment, **ray_node_env()}, token_file)
