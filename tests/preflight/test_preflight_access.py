"""Folders of others, unreadable files, ports in use, secrets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from plans import make_plan

from appliance.plan.model import ClusterPlan, ModelPlan, RunPlan
from appliance.plan.ports import Ports
from appliance.preflight.access import AccessFacts, judge_access, ports_in_use, read_access


def cluster(**changes: object) -> ClusterPlan:
    fields = {"address": "", "port": 6379, "node_address": "", "token_file": "/nowhere/token", "wait_s": 1.0}
    return ClusterPlan(**{**fields, **changes})  # type: ignore[arg-type]


def facts(plan: RunPlan, **arguments: bool) -> AccessFacts:
    return read_access(plan, **{"ask_network": True, **arguments})


def test_nothing_is_wrong_with_a_plan_of_ones_own(tmp_path: Path) -> None:
    found = facts(make_plan(tmp_path / "runs" / "a-1"))
    assert found == AccessFacts(uid=os.getuid())
    assert list(judge_access(found)) == []


AS_NOBODY = """
import os, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from plans import make_plan
from appliance.plan.model import ModelPlan
from appliance.preflight.access import judge_access, read_access
os.setgid(65534); os.setuid(65534)
model = ModelPlan(path={model!r}, source={model!r}, builtin="", revision="", trust_remote_code=False)
plan = make_plan(Path({run!r}), model=model, cache_dir={cache!r})
for each in judge_access(read_access(plan, ask_network=False)):
    sys.stdout.write(each.text + "\\n")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_files_and_folders_of_somebody_else() -> None:
    """In a child that gives up its rights: root may read and write everything, and pytest's folders are root's."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        model, cache = folder / "model", folder / "cache"
        model.mkdir()
        cache.mkdir(mode=0o755)
        for file, mode in (("config.json", 0o644), ("model.safetensors", 0o600), ("tokenizer.json", 0o600)):
            (model / file).write_text("{}")
            (model / file).chmod(mode)
        tests, run = str(Path(__file__).parents[1]), str(folder / "runs" / "a-1")
        program = AS_NOBODY.format(tests=tests, model=str(model), cache=str(cache), run=run)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert done.stdout.splitlines() == [
            f"error: cluster.run_dir: {cache} belongs to user 0 and cannot be written",
            f"error: model.path: user 65534 cannot read {model / 'model.safetensors'} and 1 more",
        ], done.stderr


def test_a_port_of_the_head_that_is_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        base = port - 3
        found = facts(make_plan(tmp_path / "runs" / "a-1", cluster=cluster(port=base)))
        assert port in found.ports_in_use
    assert port not in ports_in_use(Ports(base))


def test_ports_of_a_cluster_that_is_there_already_are_not_ours(tmp_path: Path) -> None:
    with socket.socket() as there:
        there.bind(("127.0.0.1", 0))
        there.listen()
        port = there.getsockname()[1]
        token = tmp_path / "token"
        token.write_text("x" * 64)
        joined = cluster(port=port, address=f"127.0.0.1:{port}", token_file=str(token))
        plan = make_plan(tmp_path / "runs" / "a-1", cluster=joined)
        assert facts(plan) == AccessFacts(uid=os.getuid())
    assert facts(plan).head_problem == f"127.0.0.1:{port} does not answer ([Errno 111] Connection refused)"
    assert facts(plan, ask_network=False).head_problem == ""


def test_a_token_must_be_there_for_a_cluster_that_is(tmp_path: Path) -> None:
    of_ours, of_others = cluster(port=23456), cluster(address="127.0.0.1:1")
    assert facts(make_plan(tmp_path / "a-1", cluster=of_ours)).token_problem == ""
    assert facts(make_plan(tmp_path / "a-1", cluster=of_others)).token_problem == "/nowhere/token: no such file"


@pytest.mark.parametrize(
    ("environment", "netrc", "has"),
    [
        ({}, "", False),
        ({"WANDB_API_KEY": "k"}, "", True),
        ({"WANDB_MODE": "offline"}, "", True),
        ({"WANDB_MODE": "online"}, "", False),
        ({}, "machine api.wandb.ai login user password k", True),
        ({}, "machine example.org login user password k", False),
    ],
)
def test_wandb_needs_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], netrc: str, has: bool
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", str(tmp_path))
    if netrc:
        (tmp_path / ".netrc").write_text(netrc)
        (tmp_path / ".netrc").chmod(0o600)
    assert facts(make_plan(tmp_path / "runs" / "a-1", logging_backends=("wandb",))).wandb_key is has
    assert facts(make_plan(tmp_path / "runs" / "a-1")).wandb_key is True


def test_findings_name_place_and_remedy() -> None:
    found = AccessFacts(
        ports_in_use=(6379, 6381),
        head_problem="h:1 does not answer (refused)",
        token_problem="/t: no such file",
        wandb_key=False,
    )
    assert [(each.text, each.remedy) for each in judge_access(found)] == [
        (
            "error: cluster.port: in use on this host: 6379, 6381",
            "end what listens there, or set cluster.port to another range",
        ),
        ("error: cluster.address: h:1 does not answer (refused)", "start Ray there, or leave cluster.address out"),
        (
            "error: cluster.token_file: /t: no such file",
            "copy the token of that cluster there, readable by you alone",
        ),
        (
            "error: logging.backends: `wandb` has no key here, and would ask for one in the middle of the start",
            "set WANDB_API_KEY, or run `wandb login`, or set WANDB_MODE=offline",
        ),
    ]


def test_the_model_of_the_plan_is_what_is_looked_at(tmp_path: Path) -> None:
    builtin = ModelPlan(path=str(tmp_path), source="", builtin="tiny", revision="", trust_remote_code=False)
    assert facts(make_plan(tmp_path / "runs" / "a-1", model=builtin)).unreadable == ()
