"""The training as a job of a Ray cluster that is there already: what docs/kuberay/rayjob.yaml asks of the image."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path

import pytest
import yaml
from docker.types import Mount
from images import open_to_all

pytestmark = pytest.mark.docker
MANIFEST = Path(__file__).parents[2] / "docs/kuberay/rayjob.yaml"
TOKEN = "0123456789abcdef0123456789abcdef"
STARTS_WITHIN_S = 300
# As KubeRay 1.7 starts a head, with one rank in the place of GPUs, and a smaller object store.
HEAD = (
    "ulimit -n 65536; ray start --head --block --dashboard-host=0.0.0.0 --dashboard-agent-listen-port=52365 "
    "--metrics-export-port=8080 --num-cpus=8 --num-gpus=1 --object-store-memory=268435456"
)
PROBE = "import urllib.request as u; print(u.urlopen('http://localhost:52365/api/healthz', timeout=5).status)"
FEW = "--set trainer.steps=2 --set trainer.validate_every=2 --set task.val_size=64"


def entrypoint() -> list[str]:
    """The manifest's, with the tiny recipe and one node."""
    words = shlex.split(yaml.safe_load(MANIFEST.read_text())["spec"]["entrypoint"])
    return [word.replace("dapo-32b-int8", "arithmetic-tiny-int8") for word in words] + shlex.split(FEW)


def test_the_manifests_entrypoint_trains_on_a_cluster_that_kuberay_started(
    runs: Path, cache: Path, started, tmp_path: Path
) -> None:
    token = tmp_path / "auth_token"
    token.write_text(TOKEN)
    open_to_all(tmp_path)
    head = started(
        HEAD,
        runs=runs,
        env={"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "RAY_USAGE_STATS_ENABLED": "0"},
        entrypoint=["/bin/bash", "-c", "--"],
        mounts=[Mount("/run/secrets/cluster/auth_token", str(token), type="bind", read_only=True)],
    )
    wait_for_probe(head)
    submit = ["ray", "job", "submit", "--no-wait", "--submission-id", "tiny", "--address", "http://127.0.0.1:8265"]
    code, said = head.exec_run([*submit, "--", *entrypoint()])
    assert code == 0, said.decode()
    status = wait_for_end(head)
    log = head.exec_run(["ray", "job", "logs", "--address", "http://127.0.0.1:8265", "tiny"])[1].decode()
    assert "SUCCEEDED" in status, log[-3000:]
    run = runs / "arithmetic-tiny-int8"
    record = json.loads((run / "run.json").read_text())
    assert (record["state"], record["exit_code"]) == ("done", 0)
    assert sorted(file.stem for file in (run / "attest").glob("*.json")) == ["driver-0", "rollout-0-0", "trainer-0"]
    assert "all 1 nodes run the same program on the same files" in (run / "events.jsonl").read_text()
    assert {path.stat().st_uid for path in run.rglob("*")} == {10001}


def wait_for_probe(head) -> None:
    deadline = time.monotonic() + STARTS_WITHIN_S
    while head.exec_run(["python", "-c", PROBE])[:2] != (0, b"200\n"):
        head.reload()
        assert head.status == "running" and time.monotonic() < deadline, head.logs().decode()[-3000:]
        time.sleep(1)


def wait_for_end(head) -> str:
    deadline = time.monotonic() + 900
    while True:
        said = head.exec_run(["ray", "job", "status", "--address", "http://127.0.0.1:8265", "tiny"])[1].decode()
        if any(word in said for word in ("SUCCEEDED", "FAILED", "STOPPED")):
            return said
        assert time.monotonic() < deadline, said
        time.sleep(3)
