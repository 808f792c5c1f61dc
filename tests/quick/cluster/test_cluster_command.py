"""What starts a node: argv as values, and the command `join` up to Ray."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import pytest
from plans import make_plan
from typer.testing import CliRunner

from appliance.cli import app
from appliance.cluster.form import NodeOffer, _of_workers, cpus_for_ray, head_argv, node_environment, worker_argv
from appliance.cluster.join import join_head
from appliance.errors import PreflightError, RecipeError
from appliance.plan.host import Ports
from appliance.record.attestations import fingerprint
from appliance.terms.environment import LOG_DIR_VARIABLE

OFFER = NodeOffer(gpus=1, cpus=8, object_store_bytes=1 << 28)


def token_of(folder: Path) -> Path:
    file = folder / "token"
    file.write_text("0123456789abcdef")
    file.chmod(0o600)
    return file


def test_the_head_has_fixed_ports_and_no_dashboard(tmp_path: Path) -> None:
    argv = head_argv(OFFER, ports=Ports(7000), ray_dir=tmp_path)
    assert argv[1:] == (
        *("-P", "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", "--log-color=false"),
        f"--labels=appliance.fingerprint={fingerprint()[:32]}",
        *("--num-cpus=8", "--num-gpus=1", "--object-store-memory=268435456"),
        *("--node-manager-port=7001", "--object-manager-port=7002", "--runtime-env-agent-port=7003"),
        *("--dashboard-agent-grpc-port=7004", "--dashboard-agent-listen-port=7005", "--metrics-export-port=7006"),
        *("--min-worker-port=7100", "--max-worker-port=7999", f"--temp-dir={tmp_path}"),
        *("--head", "--port=7000", "--ray-client-server-port=7007"),
        *("--include-dashboard=false", "--dashboard-host=127.0.0.1"),
    )


def test_a_worker_names_its_head_and_lets_ray_count_its_gpus(tmp_path: Path) -> None:
    offer = NodeOffer(gpus=None, cpus=64, object_store_bytes=None, address="10.0.0.2")
    argv = worker_argv(offer, ports=Ports(), head="10.0.0.1:6379", ray_dir=tmp_path)
    assert "--address=10.0.0.1:6379" in argv and "--node-ip-address=10.0.0.2" in argv and "--num-cpus=64" in argv
    assert not [each for each in argv if each.startswith(("--num-gpus", "--object-store", "--head"))]


def test_a_node_offers_its_cores_and_no_fewer_than_its_ranks_ask_for() -> None:
    assert cpus_for_ray(64, ranks=1, is_cpu=False) == 64
    assert [cpus_for_ray(12, ranks=ranks, is_cpu=False) for ranks in (1, 8)] == [15, 43]
    assert cpus_for_ray(2, ranks=1, is_cpu=True) == 8


def test_no_secret_is_on_a_command_line_or_in_the_environment(tmp_path: Path) -> None:
    file = token_of(tmp_path)
    environment = node_environment({"A": "1", "RAY_AUTH_TOKEN": "of another cluster"}, token_file=file)
    assert environment["A"] == "1" and "RAY_AUTH_TOKEN" not in environment  # Ray would take it before the file's
    visible = str(environment) + " ".join(
        worker_argv(OFFER, ports=Ports(), head="h:1", ray_dir=tmp_path)
        + head_argv(OFFER, ports=Ports(), ray_dir=tmp_path)
    )
    assert str(file) in visible and file.read_text() not in visible


def test_no_worker_of_another_host_has_a_file_for_its_stacks(tmp_path: Path) -> None:
    """Its name is a process id: the launcher would signal that process of its own host, which may die of it."""
    plan = make_plan(tmp_path / "run", env=(("OMP_NUM_THREADS", "1"),))
    given = _of_workers(plan) | node_environment({}, token_file=token_of(tmp_path))
    assert given["OMP_NUM_THREADS"] == "1" and LOG_DIR_VARIABLE not in given


def test_join_gives_up_when_no_head_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appliance.cluster.join._LOOK_EVERY_S", 0.05)
    with pytest.raises(PreflightError) as caught:
        join_head("127.0.0.1:1", token_file=token_of(tmp_path), gpus=None, port=7000, node_address=None, wait_s=0.1)
    assert caught.value.message == "no answer from 127.0.0.1:1 after 0.1 s"


def test_join_names_the_ports_that_somebody_has(tmp_path: Path) -> None:
    """Those of the head are none of its business: a node listens on six others."""
    base = 7400
    with contextlib.ExitStack() as somebody:
        for port in (base, base + 2, base + 6, base + 7):
            somebody.enter_context(socket.create_server(("", port)))
        with pytest.raises(PreflightError) as caught:
            join_head("127.0.0.1:1", token_file=token_of(tmp_path), gpus=1, port=base, node_address=None, wait_s=0.1)
    assert caught.value.message == f"in use on this host: ports {base + 2}, {base + 6}"


@pytest.mark.parametrize(
    "address",
    [
        *("host:", ":80", "host:port", "host:65536", "host:\u0663", "host:" + "9" * 5000),
        *("http://host:80", "ray://host:80", "::1", "[::1]", "a host:80"),
    ],
)
def test_join_refuses_what_is_no_address(tmp_path: Path, address: str) -> None:
    with pytest.raises(RecipeError) as caught:
        join_head(address, token_file=token_of(tmp_path), gpus=None, port=7000, node_address=None, wait_s=1.0)
    assert caught.value.problems == [
        (f"--head: `{address}` is not host:port", "give it as host:port, with a port up to 65535")
    ]


def test_join_refuses_a_token_file_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        join_head("127.0.0.1:1", token_file=Path("a" * 300), gpus=1, port=7000, node_address=None, wait_s=0.1)
    assert caught.value.message == (
        f"--token-file {'a' * 300}: a path has at most 1024 bytes, and 255 in each of its names"
    )


class Locked(type(Path())):
    """A path in a folder that may not be entered; root may enter any."""

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        raise PermissionError(13, "Permission denied")

    def read_text(self, *_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")


def test_join_names_a_token_file_that_it_may_not_look_for(tmp_path: Path) -> None:
    """At once, not when the head has come."""
    file = Locked(tmp_path / "token")
    with pytest.raises(PreflightError) as caught:
        join_head("127.0.0.1:1", token_file=file, gpus=1, port=7000, node_address=None, wait_s=0.1)
    assert caught.value.message == f"{file}: Permission denied"


def test_join_asks_for_the_head() -> None:
    result = CliRunner().invoke(app, ["join"])
    assert result.exit_code == 2 and "--head" in result.stderr
