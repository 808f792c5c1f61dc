"""`make RECIPE` on a host with GPUs and on one without: preflight, then the image, then the training in it. And `make
accept`: in the image, or a rehearsal.

nvidia-smi and docker are scripts that answer; no engine answers the training itself, which ends at that.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
from pathlib import Path

import pytest

from appliance.tasks.tiny_model import save_tokenizer

ROOT = Path(__file__).parents[3]
H100 = "NVIDIA H100 80GB HBM3, 81559"
QWEN_1_LAYER = {  # so few weights that its checkpoints fit on any disk
    **{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864},
    **{"num_hidden_layers": 1, "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 259},
    **{"max_position_embeddings": 32768, "tie_word_embeddings": True},
}
# Every call is kept; an image is here when it was from the start, or after one was pulled or built.
DOCKER = """\
echo "$*" >>{log}
case "$*" in "image inspect"*) [ -n "{here}" ] || grep -qE "^(pull|build) " {log} ;; esac
"""


def called(
    folder: Path, *command: str | Path, gpus: str, here: str = ""
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """A script on a host with these GPUs, as nvidia-smi prints them, and what it asked docker.

    here: whether the image is there from the start, if not empty.
    """
    log = folder / "calls"
    log.touch()
    docker = DOCKER.format(log=log, here=here)
    programs = folder / "bin"
    programs.mkdir()
    for name, script in {"nvidia-smi": f'[ -n "{gpus}" ] && echo "{gpus}"', "docker": docker}.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    away = {"HF_HUB_OFFLINE": "1", "DOCKER_HOST": f"unix://{folder}/nobody.sock"}
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", **away}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=300)
    return done, log.read_text().splitlines()


def train(
    folder: Path, recipe: str, *options: str, gpus: str, here: str = ""
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    given = [f"--set=cluster.run_dir={folder / 'runs'}", "--set=cluster.device=h100", *options]
    return called(folder, ROOT / "container/train.sh", recipe, *given, gpus=gpus, here=here)


def inputs(folder: Path) -> list[str]:
    """Options for a model and data on this host: preflight has nothing to ask the hub for."""
    model, rows = folder / "model", folder / "rows.jsonl"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(QWEN_1_LAYER))
    (model / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    save_tokenizer(model, max_positions=2048)
    problems = ({"question": f"{number} loaves?", "answer": f"#### {number}"} for number in range(160))
    rows.write_text("".join(f"{json.dumps(each)}\n" for each in problems))
    return [f"--set=model.path={model}", f"--set=task.train_file={rows}", "--set=task.val_size=16"]


@pytest.mark.parametrize(
    ("recipe", "gpus", "missing"),
    [
        ("gsm8k-0.5b-int8", "", ": cluster.device: `h100` is wanted, this host has no GPU"),
        ("dapo-32b-int8", "Tesla T4, 15360", ": cluster.device: 8 x `h100` wanted, this host has Tesla T4"),
    ],
)
def test_the_target_of_a_recipe_stops_at_preflight_without_its_gpus(
    recipe: str, gpus: str, missing: str, tmp_path: Path
) -> None:
    """By a host that has no GPU, or another one: nothing is built and no container starts."""
    target = subprocess.run(["make", "-n", recipe], cwd=ROOT, capture_output=True, text=True, check=True)
    assert f"container/train.sh {recipe}" in target.stdout
    done, calls = train(tmp_path, recipe, gpus=gpus)
    assert (done.returncode, done.stdout, calls) == (3, "", []), done.stderr
    assert missing in done.stderr
    assert not (tmp_path / "runs").exists()


NAMED, BUILT = "registry.example/it:1", "flashrl-appliance:gpu"


@pytest.mark.parametrize(
    ("options", "here", "calls"),
    [
        (["--image", NAMED], "", [f"image inspect {NAMED}", f"pull {NAMED}"]),
        ([f"--image={NAMED}"], "yes", [f"image inspect {NAMED}"]),
        ([], "yes", [f"image inspect {BUILT}"]),
        ([], "", [f"image inspect {BUILT}", "build --target gpu", "image inspect --format"]),
    ],
    ids=["pulled", "named-and-here", "here", "built"],
)
def test_with_its_gpus_the_image_comes_before_the_training_in_it(
    options: list[str], here: str, calls: list[str], tmp_path: Path
) -> None:
    """Preflight passes; what the host lacks is pulled where it is named, else built; then the training asks for the
    engine, which is not there. Preflight has a model and data to look at where the image is built; elsewhere the recipe
    makes its own, which takes half the time."""
    recipe, files = ("arithmetic-tiny-int8", []) if options or here else ("gsm8k-0.5b-int8", inputs(tmp_path))
    done, asked = train(tmp_path, recipe, *files, *options, gpus=H100, here=here)
    assert [_short(call) for call in asked if call.split()[0] in ("image", "pull", "build", "run")] == calls, (
        done.stderr
    )
    assert done.returncode == 3
    assert done.stderr.splitlines()[-2].startswith("error: no Docker engine answers: "), done.stderr
    assert done.stderr.splitlines()[-1] == "hint: start Docker, or train without --in-container"


def _short(call: str) -> str:
    """A build has its target, and a question for a size no name, beside much else."""
    words = call.split()
    if words[0] == "build":
        return f"build --target {words[words.index('--target') + 1]}"
    return "image inspect --format" if "--format" in words else call


LISTED = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)\nGPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-2)"
ACCEPT = ROOT / "container/accept.sh"


@pytest.mark.parametrize(
    ("here", "before"),
    [("yes", []), ("", ["build --target gpu", "image inspect --format"])],
    ids=["here", "built"],
)
def test_accept_is_the_images_where_there_is_a_gpu(here: str, before: list[str], tmp_path: Path) -> None:
    target = subprocess.run(["make", "-n", "accept"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "container/accept.sh" in target.stdout
    done, docker_calls = called(tmp_path, ACCEPT, "--only", "digest", gpus=LISTED, here=here)
    assert done.returncode == 0, done.stderr
    docker_calls = [_short(call) for call in docker_calls if call.split()[0] in ("image", "build", "run")]
    user, results = os.getuid(), "docs/results"
    run = f"run --rm --gpus all --shm-size 8g --user {user} -v flashrl-cache-{user}:/cache "
    run += f"-v {ROOT}/runs:/appliance/runs -v {ROOT}/{results}:/appliance/{results} {BUILT} accept --only digest"
    assert docker_calls == [f"image inspect {BUILT}", *before, run]
    page = (ROOT / "docs/real-hardware.md").read_text().replace(" \\\n    ", " ")
    assert run.partition(" -v ")[0].replace(str(user), '"$(id -u)"') in page


@pytest.mark.parametrize(
    ("gpus", "options"),
    [
        ("", ["--only", "nothing"]),
        ("No devices were found", ["--only", "nothing"]),
        (LISTED, ["--cpu", "--only=nothing"]),
    ],
)
def test_without_a_gpu_or_where_it_is_asked_for_accept_rehearses(gpus: str, options: list[str], tmp_path: Path) -> None:
    """Here as far as to a row that there is not."""
    done, asked = called(tmp_path, ACCEPT, *options, gpus=gpus)
    assert (done.returncode, asked) == (2, []), done.stderr
    assert done.stderr.startswith("error: --only nothing: there is no such row\n")


def test_a_page_of_the_image_does_not_go_with_the_container(tmp_path: Path) -> None:
    done, asked = called(tmp_path, ACCEPT, "-o", "elsewhere", gpus=LISTED, here="yes")
    assert (done.returncode, asked) == (2, [])
    assert done.stderr == (
        "error: -o: what the image writes there goes with the container\nhint: leave it out: docs/results has it\n"
    )
