"""The tiny recipe in real containers: read-only, as another user, stopped in mid-run, and without what it needs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from docker.types import Mount
from images import open_to_all, runs_with

pytestmark = pytest.mark.docker
FEW = ("--set", "trainer.steps=2", "--set", "trainer.validate_every=2", "--set", "task.val_size=64")
START_S, END_S = 900, 900
NOT_ON_A_VOLUME = (
    "warning: cluster.run_dir: /appliance/runs is not on a volume: the results go with the container\n"
    "hint: to keep them: docker run -v flashrl-runs:/appliance/runs ...\n"
)


def ended(container, *, within_s: float = END_S) -> tuple[int, str]:
    """(exit code, stdout and stderr)."""
    code = container.wait(timeout=within_s)["StatusCode"]
    return code, container.logs().decode()


def wait_for(file: Path, container, *, within_s: float = START_S) -> None:
    deadline = time.monotonic() + within_s
    while not file.exists() and time.monotonic() < deadline:
        container.reload()
        assert container.status == "running", container.logs().decode()[-3000:]
        time.sleep(0.5)
    assert file.exists(), container.logs().decode()[-3000:]


def test_a_first_run_with_nothing_mounted_trains_and_says_that_its_results_go(first_run) -> None:
    code, log = ended(first_run)
    assert code == 0, log[-3000:]
    assert "step 3/3" in log
    assert log.count(NOT_ON_A_VOLUME) == 1


def test_the_model_of_a_read_only_container_is_read_from_outside(runs: Path, cache: Path, started) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    code, log = ended(started("train", "arithmetic-tiny-int8", "--name", "first", *FEW, runs=runs))
    assert code == 0, log[-3000:]
    assert "results go with" not in log
    run = runs / "first"
    record = json.loads((run / "run.json").read_text())
    assert (record["state"], record["exit_code"]) == ("done", 0)
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3
    assert type(AutoModelForCausalLM.from_pretrained(run / "model")).__name__ == "Qwen2ForCausalLM"
    assert AutoTokenizer.from_pretrained(run / "model").encode("1+2=")
    assert {path.stat().st_uid for path in run.rglob("*")} == {10001}


def test_docker_stop_ends_a_run_as_sigterm_does(runs: Path, cache: Path, started) -> None:
    """In mid-run: the promised exit code, a reason, the health check before, and no half-written file."""
    options = ("--set", "trainer.steps=200", "--set", "trainer.validate_before=false")
    container = started("train", "arithmetic-tiny-int8", "--name", "stopped", *options, runs=runs)
    run = runs / "stopped"
    wait_for(run / "metrics.jsonl", container)
    code, said = container.exec_run(["appliance", "health"])
    assert (code, said.decode().partition(": attempt 1, ")[0]) == (0, "healthy: stopped")
    container.stop(timeout=300)
    code, log = ended(container)
    assert code == 75, log[-3000:]
    record = json.loads((run / "run.json").read_text())
    assert (record["state"], record["exit_code"]) == ("stopped", 75)
    assert record["reason"].startswith("stopped by SIGTERM, the state after step ")
    assert len(list(run.glob("checkpoints/global_step_*/manifest.json"))) == 1
    assert half_written(run) == []


def half_written(run: Path) -> list[str]:
    """Files that no reader takes: JSON that does not parse, safetensors cut short, leftovers of a rename."""
    from safetensors import SafetensorError, safe_open

    wrong = []
    for path in (path for path in run.rglob("*") if path.is_file() and "logs" not in path.relative_to(run).parts):
        try:
            if path.suffix == ".json":
                json.loads(path.read_text())
            elif path.suffix == ".jsonl":
                [json.loads(line) for line in path.read_text().splitlines()]
            elif path.suffix == ".safetensors":
                safe_open(path, framework="np").keys()
            elif path.name.startswith(".") and path.name not in (".lock", ".stop"):
                wrong.append(str(path))
        except (ValueError, SafetensorError) as error:
            wrong.append(f"{path}: {error}")
    return wrong


def test_any_user_of_group_0_trains_without_a_volume_of_the_cache(cache: Path, started, tmp_path: Path) -> None:
    runs = runs_with(cache, tmp_path / "runs", user=54321)
    container = started("train", "arithmetic-tiny-int8", "--name", "other", *FEW, runs=runs, user="54321:0")
    code, log = ended(container)
    assert code == 0, log[-3000:]
    assert {path.stat().st_uid for path in (runs / "other").rglob("*")} == {54321}


def test_the_launcher_starts_a_container_follows_it_and_stops_it(cache: Path, tmp_path: Path) -> None:
    """`train --in-container` from outside: the run lies in the current folder, and SIGTERM ends it as it does there."""
    shutil.copytree(cache, tmp_path / "runs/.cache")
    open_to_all(tmp_path)
    options = ("--set", "trainer.steps=200", "--set", "trainer.validate_before=false")
    command = [sys.executable, "-m", "appliance", "train", "arithmetic-tiny-int8", "--name", "inside", *options]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([*command, "--in-container"], cwd=tmp_path, stdout=log, stderr=log)
        try:
            metrics = tmp_path / "runs/inside/metrics.jsonl"
            deadline = time.monotonic() + START_S
            while not metrics.exists() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.5)
            process.terminate()
            code = process.wait(300)
        finally:
            process.kill()
    log_text = (tmp_path / "log").read_text()
    assert metrics.exists(), log_text[-3000:]
    assert code == 75, log_text[-3000:]
    assert json.loads((tmp_path / "runs/inside/run.json").read_text())["exit_code"] == 75
    assert log_text.startswith("container ") and "of flashrl-appliance:cpu\n" in log_text


@pytest.mark.parametrize(
    ("options", "findings"),
    [
        (
            {"shm_size": "8m"},
            [
                "error: /dev/shm: 8 MiB free, Ray and the weight updates need about 48",
                "hint: in a container: --shm-size=2g",
            ],
        ),
        (
            {"tmpfs": {"/tmp": "mode=1777"}},
            [
                "error: /tmp: programs cannot be started from it, and compiled kernels lie there",
                "hint: docker run --tmpfs /tmp:exec ...",
            ],
        ),
        (
            {"user": "54321:54321"},
            [
                "error: cluster.run_dir: /appliance/runs: the volume does not let user 54321, group 54321 write",
                "hint: on the host, chown -R 54321:0 its folder; or docker run --user $(id -u):0 as its owner ...",
                "error: /cache: user 54321, group 54321 cannot write",
                "hint: docker run -v flashrl-cache:/cache --user 54321:0 ...",
            ],
        ),
    ],
)
def test_what_a_container_lacks_is_named_with_the_flag(
    runs: Path, started, options: dict[str, object], findings: list[str]
) -> None:
    code, log = ended(started("check", "arithmetic-tiny-int8", runs=runs, **options))
    assert code == 3
    errors = sum(line.startswith("error: ") for line in findings)
    above = f"error: this plan cannot run here: {errors} finding{'s' if errors > 1 else ''} above"
    assert sorted(errors_with_hints(log)) == sorted([*findings, above])  # findings are on stdout, the last on stderr


def errors_with_hints(log: str) -> list[str]:
    """Lines of errors, each with its hint; what else preflight says depends on the machine."""
    lines = log.splitlines()
    told = [line.startswith("error: ") for line in lines]
    hints = [line.startswith("hint: ") and before for line, before in zip(lines, [False, *told], strict=False)]
    return [line for line, *kept in zip(lines, told, hints, strict=True) if any(kept)]


def test_a_token_of_somebody_else_is_named_with_its_owner(runs: Path, started, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("hf_word")
    token.chmod(0o600)
    os.chown(token, 1000, 1000)
    inside = "/run/secrets/hf_token"
    mount = Mount(inside, str(token), type="bind", read_only=True)
    check = ("check", "arithmetic-tiny-int8")
    code, log = ended(started(*check, runs=runs, env={"HF_TOKEN_PATH": inside}, mounts=[mount]))
    assert (code, "hf_word" in log) == (3, False)
    assert (
        f"error: HF_TOKEN_PATH: {inside}: user 10001 cannot read the file of user 1000\n"
        "hint: docker run --user 1000:0 ..., or with compose RUN_AS=1000:0\n"
    ) in log


def test_a_gpu_recipe_in_the_cpu_image_names_the_other_image(runs: Path, started) -> None:
    code, log = ended(started("check", "gsm8k-0.5b-int8", runs=runs, env={"HF_HUB_OFFLINE": "1"}))
    assert code == 3
    assert (
        ": cluster.device: this is the CPU image\nhint: use the image with the tag gpu, and docker run --gpus all ...\n"
    ) in log
