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

from appliance.plan.host import Ports
from appliance.preflight.access import AccessFacts, judge_access, ports_in_use, read_access
from appliance.record.plan import RunPlan, WeightsPlan
from appliance.settings.sections import Cluster, Logging


def cluster(**changes: object) -> Cluster:
    nodes = 1 if changes.get("address") else 2  # a Ray that is there already may have one node, too
    return Cluster.model_validate({"device": "cpu", "nodes": nodes, "token_file": "/nowhere/token", **changes})


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
from plans import make_plan, with_model
from appliance.preflight.access import judge_access, read_access
os.setgid(65534); os.setuid(65534)
plan = with_model(make_plan(Path({run!r}), cache_dir={cache!r}), {model!r})
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
        tests, run = str(Path(__file__).parents[2]), str(folder / "runs" / "a-1")
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
    assert port not in ports_in_use(Ports(base).of_the_head)


def test_ports_of_a_cluster_that_is_there_already_are_not_ours(tmp_path: Path) -> None:
    with socket.socket() as there:
        there.bind(("127.0.0.1", 0))
        there.listen()
        port = there.getsockname()[1]
        token = tmp_path / "token"
        token.write_text("x" * 64)
        token.chmod(0o600)
        joined = cluster(port=port, address=f"127.0.0.1:{port}", token_file=str(token))
        plan = make_plan(tmp_path / "runs" / "a-1", cluster=joined)
        assert facts(plan) == AccessFacts(uid=os.getuid())
    assert facts(plan).head_problem == f"127.0.0.1:{port} does not answer ([Errno 111] Connection refused)"
    assert facts(plan, ask_network=False).head_problem == ""


def test_a_name_that_dns_cannot_have_does_not_answer(tmp_path: Path) -> None:
    joined = cluster(address=f"{'a' * 64}.org:6379")
    problem = facts(make_plan(tmp_path / "runs" / "a-1", cluster=joined)).head_problem
    assert problem.startswith(f"{'a' * 64}.org:6379 does not answer (") and "label" in problem


@pytest.mark.parametrize("address", ["", "127.0.0.1:1"])
@pytest.mark.parametrize(
    ("text", "mode", "problem"),
    [
        ("x" * 64, 0o600, ""),
        ("x" * 64, 0o644, ": others may read it (mode 0644)"),
        ("short", 0o600, ": a token is one word of 16 characters or more"),
    ],
)
def test_a_token_is_judged_as_train_judges_it(tmp_path: Path, text: str, mode: int, problem: str, address: str) -> None:
    token = tmp_path / "token"
    token.write_text(text)
    token.chmod(mode)
    plan = make_plan(tmp_path / "runs" / "a-1", cluster=cluster(token_file=str(token), address=address or None))
    assert facts(plan, ask_network=False).token_problem == (f"{token}{problem}" if problem else "")


def test_a_token_must_be_there_for_a_cluster_that_is(tmp_path: Path) -> None:
    of_ours, of_others = cluster(port=23456), cluster(address="127.0.0.1:1")
    assert facts(make_plan(tmp_path / "a-1", cluster=of_ours)).token_problem == ""
    assert (
        facts(make_plan(tmp_path / "a-1", cluster=of_others)).token_problem
        == "/nowhere/token: No such file or directory"
    )


@pytest.mark.parametrize(
    ("environment", "netrc", "has"),
    [
        ({}, "", False),
        ({"WANDB_IDENTITY_TOKEN_FILE": "/t"}, "", True),
        ({"WANDB_BASE_URL": "https://wandb.corp:8080/"}, "machine wandb.corp:8080 login user password k", True),
        ({"WANDB_BASE_URL": "https://wandb.corp"}, "machine api.wandb.ai login user password k", False),
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
    without_wandb(tmp_path, monkeypatch)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if netrc:
        (tmp_path / ".netrc").write_text(netrc)
        (tmp_path / ".netrc").chmod(0o600)
    assert facts(make_plan(tmp_path / "runs" / "a-1", logging=Logging(backends=("wandb",)))).wandb_key is has
    assert facts(make_plan(tmp_path / "runs" / "a-1")).wandb_key is True


def without_wandb(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in os.environ if each.startswith("WANDB_")] + ["NETRC"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))


@pytest.mark.parametrize(("name", "by_variable"), [("_netrc", False), ("elsewhere", True)])
def test_a_netrc_file_of_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, by_variable: bool
) -> None:
    without_wandb(tmp_path, monkeypatch)
    (tmp_path / name).write_text("machine api.wandb.ai login user password k")
    if by_variable:
        monkeypatch.setenv("NETRC", f"~/{name}")
    found = facts(make_plan(tmp_path / "runs" / "a-1", logging=Logging(backends=("wandb",))))
    assert (found.wandb_key, found.wandb_doubt) == (True, "")


@pytest.mark.parametrize(
    ("file", "text", "url", "why"),
    [
        (".netrc", "machine api.wandb.ai secret", "", "{home}/.netrc, line 1, cannot be read"),
        (".netrc/a", "", "", "{home}/.netrc: Is a directory"),
        (
            ".config/wandb/settings",
            "[default]",
            "",
            "{home}/.config/wandb/settings may name another server, or hold a key",
        ),
        ("a", "", "no address", "WANDB_BASE_URL is no address"),
        ("a", "", "http://[", "WANDB_BASE_URL or the netrc file cannot be read"),
    ],
)
def test_where_a_key_of_wandb_cannot_be_told_a_warning_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, text: str, url: str, why: str
) -> None:
    without_wandb(tmp_path, monkeypatch)
    monkeypatch.setenv("WANDB_BASE_URL", url)
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text)
    found = facts(make_plan(tmp_path / "runs" / "a-1", logging=Logging(backends=("wandb",))))
    [finding] = judge_access(found)
    wanted = f"cannot tell whether `wandb` has a key here: {why.format(home=tmp_path)}"
    assert finding.text == f"warning: logging.backends: {wanted}"


def test_findings_name_place_and_remedy() -> None:
    facts = AccessFacts(
        ports_in_use=(6379, 6381),
        head_problem="h:1 does not answer (refused)",
        token_problem="/t: no such file",
        wandb_key=False,
    )
    assert [(each.text, each.remedy) for each in judge_access(facts)] == [
        (
            "error: cluster.port: in use on this host: 6379, 6381",
            "end what listens there, or set cluster.port to another range",
        ),
        ("error: cluster.address: h:1 does not answer (refused)", "start Ray there, or leave cluster.address out"),
        (
            "error: cluster.token_file: /t: no such file",
            "copy that cluster's token file there, readable by you alone; a cluster of this host makes its own",
        ),
        (
            "error: logging.backends: `wandb` has no key here, and would ask for one in the middle of the start",
            "set WANDB_API_KEY, or run `wandb login`, or set WANDB_MODE=offline",
        ),
    ]


def test_the_model_of_the_plan_is_what_is_looked_at(tmp_path: Path) -> None:
    of_a_builtin = WeightsPlan(name_or_path=str(tmp_path), is_cached=True)
    assert facts(make_plan(tmp_path / "runs" / "a-1", weights=of_a_builtin)).unreadable == ()


LOOKS_AS_NOBODY = """
import os, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from plans import make_plan, with_model
from appliance.plan.model_source import is_folder
from appliance.record.plan import ProfilePlan, UaqPlan
from appliance.plan.bench_results import read_result, result_key
from huggingface_hub import constants, try_to_load_from_cache  # before nobody may read it
from appliance import hub
from appliance.preflight import checks
from appliance.preflight.access import judge_access
from appliance.preflight.inputs import read_inputs, uaq_problem
from appliance.preflight.probes import read_host
from appliance.preflight.inputs import read_inputs
from appliance.preflight.probes import read_host
from appliance.terms.schemes import Scheme
os.setgid(65534); os.setuid(65534)
plan = with_model(make_plan(Path({run!r}), cache_dir={cache!r}), {model!r})
closed = {cache!r} + "/data"
parquets = dict(train_parquet=closed + "/train.parquet", val_parquet=closed + "/val.parquet")
plan = plan.replace(task_files=plan.task_files.replace(**parquets))
plan = plan.replace(profile=ProfilePlan(folder="", source=closed, scheme=Scheme.INT8))
inputs = read_inputs(plan, ask_hub=False)
assert not inputs.has_data and inputs.profile_problem.endswith(": the folder has no profile.safetensors")
assert uaq_problem(plan.replace(uaq=UaqPlan(scale=1.5, folder=closed))) == ""
constants.HF_HUB_CACHE = closed
assert hub.cached_snapshot("owner/model") is None
model = {{"model": plan.model, "weights": plan.weights}}
key = result_key(device="cpu", host=read_host(Path({cache!r})), **model, pins=plan.pins, tensor_parallel=1)
assert read_result(key, cache_dir=Path({cache!r})) == (None, "")
for each in (*checks._model(plan, inputs), *judge_access(inputs.access)):
    sys.stdout.write(each.text + "\\n")
sys.stdout.write(str(is_folder({model!r})) + "\\n")
"""


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize(("model_mode", "above_mode"), [(0o700, 0o755), (0o744, 0o755), (0o755, 0o700)])
def test_a_model_folder_that_cannot_be_entered_is_a_finding(model_mode: int, above_mode: int) -> None:
    """Closed, open for a listing alone, and behind a closed folder; the cache's is closed as well."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        model, cache = folder / "above" / "model", folder / "closed" / "cache"
        model.mkdir(parents=True)
        cache.mkdir(parents=True)
        for file in ("config.json", "model.safetensors", "tokenizer.json"):
            (model / file).write_text("{}")
        model.chmod(model_mode)
        model.parent.chmod(above_mode)
        cache.parent.chmod(0o700)
        tests, run = str(Path(__file__).parents[2]), str(folder / "runs" / "a-1")
        program = LOOKS_AS_NOBODY.format(tests=tests, model=str(model), cache=str(cache), run=run)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert done.stdout.splitlines() == [
            f"error: cluster.run_dir: {cache.parent} belongs to user 0 and cannot be written",
            f"error: model.path: user 65534 cannot read {model}",
            "True",
        ], done.stderr
