"""The training as a job of a Ray cluster that is there already: what docs/kuberay/rayjob.yaml asks of the image."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from docker.types import Mount
from images import open_to_all

pytestmark = pytest.mark.docker
MANIFEST = Path(__file__).parents[2] / "docs/kuberay/rayjob.yaml"
TOKEN = "0123456789abcdef0123456789abcdef"
ENDS_WITHIN_S = 900
# As KubeRay 1.7 starts a head, with one rank in the place of GPUs and a smaller object store; probes it, and submits.
HEAD = (
    "ulimit -n 65536; ray start --head --block --dashboard-host=0.0.0.0 --dashboard-agent-listen-port=52365 "
    "--metrics-export-port=8080 --num-cpus=8 --num-gpus=1 --object-store-memory=268435456"
)
PROBE = "import urllib.request as u; assert u.urlopen('http://localhost:52365/api/healthz', timeout=5).status == 200"
SUBMIT = "ray job submit --address http://127.0.0.1:8265 --"
FEW = "--set trainer.steps=2 --set trainer.validate_every=2 --set task.val_size=64"


def entrypoint() -> str:
    """The manifest's, with the tiny recipe and one node."""
    asked = yaml.safe_load(MANIFEST.read_text())["spec"]["entrypoint"]
    return f"{asked.strip().replace('dapo-32b-int8', 'arithmetic-tiny-int8')} {FEW}"


def test_the_manifests_entrypoint_trains_on_a_cluster_that_kuberay_started(
    runs: Path, cache: Path, started, tmp_path: Path
) -> None:
    token = tmp_path / "auth_token"
    token.write_text(TOKEN)
    open_to_all(tmp_path)
    probed = f'until python -c "{PROBE}" 2>/dev/null; do sleep 1; done'
    head = started(
        f"({HEAD}) & {probed}; {SUBMIT} {entrypoint()}",
        runs=runs,
        env={"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "RAY_USAGE_STATS_ENABLED": "0"},
        entrypoint=["/bin/bash", "-c", "--"],
        mounts=[Mount("/run/secrets/cluster/auth_token", str(token), type="bind", read_only=True)],
    )
    code, log = head.wait(timeout=ENDS_WITHIN_S)["StatusCode"], head.logs().decode()
    assert code == 0, log[-3000:]
    run = runs / "arithmetic-tiny-int8"
    record = json.loads((run / "run.json").read_text())
    assert (record["state"], record["exit_code"]) == ("done", 0)
    assert sorted(file.stem for file in (run / "attest").glob("*.json")) == ["driver-0", "rollout-0-0", "trainer-0"]
    assert "1 node runs the same program on the same files" in (run / "events.jsonl").read_text()
    assert {path.stat().st_uid for path in run.rglob("*")} == {10001}
