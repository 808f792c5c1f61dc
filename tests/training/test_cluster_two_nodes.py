"""Two nodes of one cluster on this host: real Ray, and a real training over both (FSDP, an INT8 engine on each)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from left_behind import bystanders, left_of
from ray_from_outside import JOBS, REFUSED_BY_HTTP, statuses
from trainings import FEW, holding

import appliance
from appliance.processes import find_processes
from appliance.terms.environment import NODE_VARIABLE, RAY_OWN, RECONNECT_S, RUN_VARIABLE

pytestmark = pytest.mark.e2e(minutes=4)

HEAD_PORT = 26379  # not Ray's own: another test may run a cluster, too
NODE_PORT = 28379
STEPS = 2
PATIENCE_S = 900  # of a busy machine
NAMED_WITHIN_S = 60
SEEN_WITHIN_S = 15  # of a process that was killed; a host that went silent takes longer


def train(root: Path, *, name: str, steps: int = STEPS, port: int = HEAD_PORT, nodes: int = 2) -> list[str]:
    sets = (
        *(f"cluster.nodes={nodes}", f"cluster.run_dir={root}", f"cluster.port={port}", f"cluster.wait_s={PATIENCE_S}"),
        *(f"trainer.steps={steps}", "trainer.validate_before=false", "trainer.validate_every=1000"),
        *(FEW, "quantization.profile=none", "checkpoint.every_steps=1"),
    )
    options = [part for each in sets for part in ("--set", each)]
    return [sys.executable, "-m", "appliance", "train", "arithmetic-tiny-int8", "--name", name, *options]


def join(token: Path, *, head_port: int = HEAD_PORT) -> list[str]:
    head = ("--head", f"127.0.0.1:{head_port}", "--token-file", str(token), "--port", str(NODE_PORT))
    return [sys.executable, "-m", "appliance", "join", *head, "--wait", str(PATIENCE_S)]


@contextmanager
def started(command: list[str], *, log: Path, folder: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """folder: where it runs, whose `appliance` is the one that `python -m` finds; None: here."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=folder)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(120)


def wait_until(condition, *, event: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert process.poll() is None, f"ended with {process.returncode} before {event}"
        assert time.monotonic() < deadline, event
        time.sleep(0.2)


def events(run_dir: Path) -> list[dict]:
    file = run_dir / "events.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def steps_of(run_dir: Path) -> list[int]:
    file = run_dir / "metrics.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


def folder_of(node: subprocess.Popen[bytes]) -> Path:
    """Of a `join` that has started its Ray: nobody else may enter it, and Ray's sockets are in there."""
    (subreaper,) = [each for each in find_processes(f"{RUN_VARIABLE}=", below=node.pid) if each.parent == node.pid]
    environment = dict(
        entry.partition("=")[::2] for entry in Path(f"/proc/{subreaper.pid}/environ").read_text().split("\0")
    )
    folder = Path(environment[NODE_VARIABLE])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert any((folder / RAY_OWN).glob("session_*/sockets/raylet*"))
    return folder


def is_free(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.long
def test_a_training_over_two_nodes_outlives_its_head_and_names_the_node_it_loses(
    tmp_path: Path, with_tiny_cache: Callable
) -> None:
    """After two steps the head is killed and started again at once, the node of the old one ends by itself and another
    one joins. After one more step that is killed: named within a minute, nothing left."""
    with_tiny_cache(tmp_path)
    since = bystanders()
    run_dir, token = tmp_path / "over-two", tmp_path / ".cluster-token"
    command = train(tmp_path, name="over-two", steps=500)
    with started(join(token), log=tmp_path / "join.log") as node:
        with started(command, log=tmp_path / "train.log") as head:
            wait_until(lambda: len(steps_of(run_dir)) >= STEPS, event=f"{STEPS} steps", process=head)
            agent = f"http://127.0.0.1:{HEAD_PORT + 5}{JOBS}"  # a POST with the token would start a program there
            assert statuses(agent, token=token.read_text().strip()) == REFUSED_BY_HTTP
            head.kill()
            killed = time.monotonic()
        wait_until(lambda: is_free(HEAD_PORT), event="the old head's end", process=node)
        with started([*command, "--resume", "auto"], log=tmp_path / "again.log") as head:
            assert node.wait(PATIENCE_S) == 5
            assert time.monotonic() - killed < NAMED_WITHIN_S
            log_text = (tmp_path / "join.log").read_text()
            assert re.search(r"^error: the head at \S+ (is gone, and so|was restarted)", log_text, re.M), log_text
            reached = max(steps_of(run_dir))
            with started(join(token), log=tmp_path / "rejoin.log") as node:
                wait_until(lambda: max(steps_of(run_dir)) > reached, event="a further step", process=head)
                node.kill()  # and with it, by its subreaper, Ray and every worker on that node
                killed = time.monotonic()
                assert head.wait(PATIENCE_S) == 5
                seconds = time.monotonic() - killed
    log_text = (tmp_path / "again.log").read_text()
    ended = r"^error: training failed in phase [\w-]+: node \S+ \(\S+\) left the cluster$"
    assert re.search(ended, log_text, re.M), log_text
    assert seconds < NAMED_WITHIN_S, seconds
    for attempt in (run_dir / "logs" / "1" / "attest", run_dir / "attest"):
        assert sorted(file.stem for file in attempt.glob("*.json")) == [
            *("driver-0", "rollout-0-0", "rollout-1-0", "trainer-0", "trainer-1"),
        ]
    workers = [json.loads((run_dir / "attest" / f"trainer-{rank}.json").read_text()) for rank in (0, 1)]
    assert {each["rank"] for each in workers} == {0, 1}
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert all(line["scheme"] == "int8" and line["mismatch_k3_kl"] < 0.015 for line in lines)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    told = [event["what"] for event in events(run_dir) if event["kind"] == "cluster"]
    assert sum("joined: 2 of 2 nodes with a GPU" in what for what in told) == 2
    assert told.count("2 nodes run the same program on the same files") == 2
    assert holding(tmp_path, token.read_text().strip(), but=token) == []  # logs of Ray's own included
    assert left_of(run_dir, since=since) == []


@pytest.mark.long
def test_a_wrong_token_and_another_program_are_refused(tmp_path: Path, with_tiny_cache: Callable) -> None:
    """The head waits on after the wrong token, and ends, with the node's name, at a node with other sources, which ends
    with the same words."""
    with_tiny_cache(tmp_path)
    since = bystanders()
    port = HEAD_PORT + 5000
    token, wrong = tmp_path / ".cluster-token", tmp_path / "wrong"
    wrong.write_text("0123456789abcdef0123456789abcdef\n")
    wrong.chmod(0o600)
    other = tmp_path / "other"
    shutil.copytree(Path(appliance.__file__).parent, other / "appliance")
    with (other / "appliance" / "errors.py").open("a") as source:
        source.write("\n# changed\n")
    with started(train(tmp_path, name="refused", port=port), log=tmp_path / "train.log") as head:
        refused = subprocess.run(
            join(wrong, head_port=port), capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert refused.returncode == 3, refused.stderr
        assert f"127.0.0.1:{port} refused this node's token" in refused.stderr
        assert head.poll() is None
        with started(join(token, head_port=port), log=tmp_path / "join.log", folder=other) as node:
            assert head.wait(PATIENCE_S) == 3
            ended = time.monotonic()
            assert node.wait(PATIENCE_S) == 5
            assert time.monotonic() - ended < RECONNECT_S  # it reads how the training ended, and waits for nothing
    words = "joined with other sources or locks than the head"
    assert words in (tmp_path / "train.log").read_text()
    assert re.search(rf"^error: the training refused failed: .*{words}", (tmp_path / "join.log").read_text(), re.M)
    assert left_of(tmp_path / "refused", since=since) == []


@pytest.mark.long
def test_who_dies_before_training_is_named(tmp_path: Path, with_tiny_cache: Callable) -> None:
    """While the head waits for four nodes, one that joined is killed and joins again. Then the head's store dies: the
    head and that node end, each with its cause."""
    with_tiny_cache(tmp_path)
    since = bystanders()
    run_dir, token, port = tmp_path / "headless", tmp_path / ".cluster-token", HEAD_PORT + 6000
    log, ray_says = tmp_path / "train.log", run_dir / "logs" / "1" / "train.log"

    def has_logged(words: str) -> bool:
        return any(words in event["what"] for event in events(run_dir))

    with started(train(tmp_path, name="headless", port=port, nodes=4), log=log) as head:
        wait_until(lambda: has_logged("joined: 1 of 4"), event="its node", process=head)
        wait_until(lambda: "Ray runtime started" in ray_says.read_text(), event="Ray's own start", process=head)
        with started(join(token, head_port=port), log=tmp_path / "join.log") as node:
            wait_until(lambda: has_logged("joined: 2 of 4"), event="another node", process=head)
            folder = folder_of(node)
            node.kill()
            killed = time.monotonic()
            wait_until(
                lambda: has_logged(": 1 of 4 nodes with a GPU; it has 45 s to come back"), event="death", process=head
            )
            assert time.monotonic() - killed < SEEN_WITHIN_S
            wait_until(lambda: not folder.exists(), event="the end of its folder", process=head)
        with started(join(token, head_port=port), log=tmp_path / "again.log") as node:
            wait_until(lambda: has_logged("is back: 2 of 4"), event="its return", process=head)
            folder = folder_of(node)
            (store,) = [each for each in find_processes(f"{RUN_VARIABLE}={run_dir}") if each.name == "gcs_server"]
            os.kill(store.pid, signal.SIGKILL)
            killed = time.monotonic()
            assert head.wait(PATIENCE_S) == 5
            seconds = time.monotonic() - killed
            assert node.wait(PATIENCE_S) == 5
            assert time.monotonic() - killed < NAMED_WITHIN_S
            assert not folder.exists()
    said = log.read_text()
    assert re.search(r"^cluster: \S+ \(\S+\) died \(.+\): 1 of 4", said, re.M), said
    assert re.search(r"^error: training failed in phase [\w-]+: the Ray head on this host ended", said, re.M), said
    assert seconds < NAMED_WITHIN_S, seconds
    assert f"error: the head at 127.0.0.1:{port} is gone" in (tmp_path / "again.log").read_text()
    assert left_of(run_dir, since=since) == []


@pytest.mark.torture
def test_a_host_that_goes_silent_in_training_is_named(tmp_path: Path, with_tiny_cache: Callable) -> None:
    """Every process of the other node stands still: its sockets stay open, and nobody answers."""
    with_tiny_cache(tmp_path)
    since = bystanders()
    run_dir, token = tmp_path / "silent", tmp_path / ".cluster-token"
    log, port = tmp_path / "train.log", HEAD_PORT + 7000
    with started(join(token, head_port=port), log=tmp_path / "join.log") as node:
        with started(train(tmp_path, name="silent", steps=500, port=port), log=log) as head:
            wait_until(lambda: steps_of(run_dir), event="a step", process=head)
            still = [
                node.pid,
                *(each.pid for each in find_processes(f"{RUN_VARIABLE}={tmp_path}/none", below=node.pid)),
            ]
            try:
                for pid in still:
                    os.kill(pid, signal.SIGSTOP)
                stopped = time.monotonic()
                assert head.wait(PATIENCE_S) == 5
                seconds = time.monotonic() - stopped
            finally:
                for pid in still:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)
        assert node.wait(PATIENCE_S) == 5
    said = log.read_text()
    assert re.search(r"^error: training failed in phase [\w-]+: node \S+ \(\S+\) left the cluster$", said, re.M), said
    assert seconds < NAMED_WITHIN_S, seconds
    assert left_of(run_dir, since=since) == []
