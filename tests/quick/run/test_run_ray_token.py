"""The token that a training's Ray asks for: where the child finds it, and what is left of it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from trainings import holding

from appliance.errors import PreflightError
from appliance.launch.train import make_ray_dir, make_ray_token
from appliance.settings.sections import Cluster
from appliance.terms.environment import RAY_DIR_VARIABLE

# What Ray's processes would find, and who could read it.
CHILD = """
import json, os, stat, sys
from pathlib import Path
file, folder = Path(os.environ["RAY_AUTH_TOKEN_PATH"]), Path(os.environ["APPLIANCE_RAY_DIR"])
lines = [Path(f"/proc/{pid}/cmdline").read_text() for pid in ("self", os.getppid())]
told = {
    "environment": dict(os.environ),
    "token": file.read_text().strip() if file.exists() else "",
    "modes": [stat.S_IMODE(each.stat().st_mode) for each in (folder, file) if each.exists()],
    "lines": lines,
}
Path(sys.argv[1]).write_text(json.dumps(told))
raise RuntimeError("bad")
"""


@pytest.fixture
def train_and_report(tmp_path: Path, small_plan: Callable, python: Callable, launch: Callable) -> Callable[..., dict]:
    """Trains with such a child, and gives what that saw. Everything else is below `runs`."""

    def train(*, number: int = 1, cluster: Cluster | None = None) -> dict:
        (tmp_path / "runs").mkdir(exist_ok=True)
        file = tmp_path / f"told-{number}.json"
        argv = (*python(CHILD), str(file))
        plan = small_plan(tmp_path / "runs", argv=argv, name=f"small-{number}")
        folder = dict(plan.env)[RAY_DIR_VARIABLE]
        process = launch(plan.replace(cluster=cluster or plan.cluster))
        out, err = process.communicate(timeout=60)
        assert process.returncode == 5, err
        assert not os.path.exists(folder)
        return json.loads(file.read_text()) | {"said": out + err, "folder": folder}

    return train


@pytest.mark.slow
def test_each_training_has_a_token_of_its_own_and_leaves_no_word_of_it(
    tmp_path: Path, train_and_report: Callable
) -> None:
    tokens = set()
    for number in (1, 2):
        saw = train_and_report(number=number)
        environment, token = saw["environment"], saw["token"]
        assert len(token) == 64
        assert environment["RAY_AUTH_MODE"] == "token"
        assert environment["RAY_AUTH_TOKEN_PATH"] == f"{saw['folder']}/token"
        assert saw["modes"] == [0o700, 0o600]
        assert token not in str(environment) + str(saw["lines"]) + saw["said"]
        assert holding(tmp_path / "runs", token) == []
        tokens.add(token)
    assert len(tokens) == 2


@pytest.mark.slow
def test_what_a_shell_says_of_rays_token_counts_for_nothing(
    train_and_report: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray would take this token before the file's, be without any, or have Kubernetes judge it, which knows none."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/nowhere")
    monkeypatch.setenv("RAY_ENABLE_K8S_TOKEN_AUTH", "true")
    saw = train_and_report()
    assert "RAY_ENABLE_K8S_TOKEN_AUTH" not in saw["environment"]
    assert saw["environment"]["RAY_AUTH_MODE"] == "token" and "RAY_AUTH_TOKEN" not in saw["environment"]
    assert saw["environment"]["RAY_AUTH_TOKEN_PATH"] == f"{saw['folder']}/token"


@pytest.mark.slow
@pytest.mark.parametrize("address", ["", "other:6379"])
def test_the_token_of_a_cluster_is_the_one_that_its_nodes_have(
    tmp_path: Path, train_and_report: Callable, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("RAY_ENABLE_K8S_TOKEN_AUTH", "true")  # one that is there already may have its tokens judged so
    token_file = str(tmp_path / "of-the-cluster")
    cluster = Cluster(device="cpu", nodes=1 if address else 2, address=address or None, token_file=token_file)
    saw = train_and_report(cluster=cluster)
    assert saw["environment"]["RAY_AUTH_MODE"] == "token"
    assert saw["environment"]["RAY_AUTH_TOKEN_PATH"] == token_file
    assert ("RAY_ENABLE_K8S_TOKEN_AUTH" in saw["environment"]) == bool(address)
    assert saw["token"] == ""  # the training makes it


def test_a_token_that_lies_there_is_not_taken_over() -> None:
    """Who wrote it would know it."""
    folder = Path("/tmp") / f"ray-token-there-{os.getpid()}"
    try:
        first = make_ray_token(make_ray_dir(str(folder))).read_text()
        with pytest.raises(PreflightError) as caught:
            make_ray_token(folder)
        assert (caught.value.message, caught.value.hint) == (
            f"{folder}/token: File exists",
            "set TMPDIR to another folder",
        )
        assert make_ray_token(make_ray_dir(str(folder))).read_text() != first
    finally:
        shutil.rmtree(folder)
