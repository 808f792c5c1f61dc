"""What a run's Ray answers somebody on the network who has no token, or another one, and who may see the right one."""

from __future__ import annotations

import os
import re
import stat
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from appliance.processes import find_processes
from appliance.terms.environment import RAY_OWN, RAY_TOKEN, RUN_VARIABLE

JOBS = "/api/job_agent/jobs/"  # a POST there starts a program
# Parts of Ray that listen for HTTP, by the names under which they keep their ports, each with a path that takes a POST.
HTTP = {"dashboard_agent_listen": JOBS, "runtime_env_agent": "/get_runtime_envs_info"}
REFUSED_BY_HTTP = (401, 403, 405)  # without a token, with another one, and with the right one but no such method
REFUSED_BY_GRPC = ("UNAUTHENTICATED", "UNAUTHENTICATED", "OK")
_OTHER = "0123456789abcdef" * 4
_PORT_FILE = re.compile(r"(\w+)_port_[0-9a-f]{56}")


@dataclass(frozen=True)
class Seen:
    """token: the right one.  modes: of its folder and its file.  http: statuses by part of Ray, see REFUSED_BY_HTTP.
    store: codes of Ray's control store, see REFUSED_BY_GRPC.  telling: processes that have the token in their
    environment or on their command line.
    """

    token: str
    modes: tuple[int, int]
    http: dict[str, tuple[int, ...]]
    store: tuple[str, ...]
    telling: tuple[str, ...]


def look(folder: Path, *, run_dir: Path, launcher: int) -> Seen:
    """Of a Ray that runs on this host. folder: the run's, for Ray.  launcher: the process above all of the run's.

    The agent has no HTTP, and is left out, where another Ray of this host was first at its port.
    """
    import ray

    file, host, ports = folder / RAY_TOKEN, ray.util.get_node_ip_address(), _ports(folder)
    token = file.read_text().strip()
    return Seen(
        token=token,
        modes=(stat.S_IMODE(folder.stat().st_mode), stat.S_IMODE(file.stat().st_mode)),
        http={
            name: statuses(f"http://{host}:{ports[name]}{path}", token=token)
            for name, path in HTTP.items()
            if ports[name] > 0
        },
        store=tuple(_code_of_store(f"{host}:{ports['gcs_server']}", token=each) for each in ("", _OTHER, token)),
        telling=tuple(_telling(token, run_dir=run_dir, launcher=launcher)),
    )


def _ports(folder: Path) -> dict[str, int]:
    (session,) = [each for each in (folder / RAY_OWN).glob("session_*") if not each.is_symlink()]
    matches = [(file, _PORT_FILE.fullmatch(file.name)) for file in session.iterdir()]
    return {match[1]: int(file.read_text()) for file, match in matches if match}


def statuses(url: str, *, token: str) -> tuple[int, ...]:
    """Of a POST without a token, of one with another token, and of a PUT with the right one, which does nothing."""
    return _status(url, "POST", token=""), _status(url, "POST", token=_OTHER), _status(url, "PUT", token=token)


def _status(url: str, method: str, *, token: str) -> int:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url, data=b"", headers=headers, method=method)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def _code_of_store(address: str, *, token: str) -> str:
    import grpc
    from ray.core.generated.gcs_service_pb2 import GetAllNodeInfoRequest
    from ray.core.generated.gcs_service_pb2_grpc import NodeInfoGcsServiceStub

    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with grpc.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),)) as channel:
        try:
            NodeInfoGcsServiceStub(channel).GetAllNodeInfo(GetAllNodeInfoRequest(), timeout=60, metadata=metadata)
        except grpc.RpcError as error:
            return error.code().name
    return "OK"


def _telling(word: str, *, run_dir: Path, launcher: int) -> list[str]:
    here = find_processes(f"{RUN_VARIABLE}={run_dir}", below=launcher)
    assert here, f"nothing of {run_dir} is running"
    looked = {str(each): each.pid for each in here} | {"launcher": launcher}
    return [name for name, pid in looked.items() if os.fsencode(word) in _said_by(pid)]


def _said_by(pid: int) -> bytes:
    try:
        return b"".join(Path(f"/proc/{pid}/{name}").read_bytes() for name in ("environ", "cmdline"))
    except (FileNotFoundError, ProcessLookupError):
        return b""  # it has just ended
