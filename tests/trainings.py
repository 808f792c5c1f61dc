"""Trainings started as a user starts them, and what they leave."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from left_behind import bystanders, left_of

from appliance.record.events import METRICS_FILE
from appliance.record.metric_catalogue import is_known

# Of the short run that several files look at. A temperature that is not 1: log-probs before it would differ from the
# trainer's by far more than the bound.
STEPS = 4
VALIDATION_PROBLEMS = 512
SHORT = (
    f"trainer.steps={STEPS}",
    f"trainer.validate_every={STEPS}",
    "rollout.temperature=0.8",
    f"task.val_size={VALIDATION_PROBLEMS}",
    "logging.backends=[tensorboard, trackio]",
)
FEW = "task.val_size=64"  # of trainings that do not look at validation; those of `tiny_cache` have this data
# Of an example on two cores. Held by processor time, which other work on the host changes least: with all that is
# computed in less than this, one core would be in time, too. With AVX2 alone the model's making takes longer.
LEARNED_WITHIN_S = 240 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 480


HAS_FP8_CACHE = "avx512f" in Path("/proc/cpuinfo").read_text()
NO_FP8_CACHE = "an FP8 KV cache on a CPU needs AVX-512"

SECRETS = ("planted-key-of-wandb-9d41", "hf_plantedTokenOfTheHub7c02")  # words that are nowhere else


def with_secrets(folder: Path) -> dict[str, str]:
    """This environment with a user's secrets: wandb's key in a variable, the hub's token in a file in that folder."""
    token = folder / "hub-token"
    token.write_text(SECRETS[1])
    token.chmod(0o600)
    return {**os.environ, "WANDB_API_KEY": SECRETS[0], "HF_TOKEN_PATH": str(token)}


def holding(folder: Path, *words: str, but: Path | None = None) -> list[str]:
    """The files below a folder that have one of the words in them. but: one that is meant to."""
    files = [file for file in folder.rglob("*") if file.is_file() and file != but]
    assert files, f"{folder} has no files"
    return [str(file) for file in files if any(word.encode() in file.read_bytes() for word in words)]


@dataclass(frozen=True)
class Finished:
    """A run that ended: what the command printed, where it wrote, and the processes that outlived it.

    processor_s: of all its processes together, where it was asked for.
    """

    code: int
    stdout: str
    stderr: str
    run_dir: Path
    left: tuple[str, ...]
    processor_s: float = 0.0

    def json_lines(self, name: str) -> list[dict]:
        return json_lines(self.run_dir / name)


def json_lines(file: Path) -> list[dict]:
    """The lines of a file of a run. Each key of metrics.jsonl is one that docs/metrics.md has, whatever was trained."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    if file.name == METRICS_FILE:
        assert [key for line in lines for key in line if not is_known(key)] == []
    return lines


def processor_s() -> float:
    """Of all children so far, and theirs, that have ended: unlike a clock it knows nothing of what else runs here."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def ray_dir(run_dir: Path) -> Path:
    return Path(dict(json.loads((run_dir / "plan.json").read_text())["env"])["APPLIANCE_RAY_DIR"])


def command(root: Path, *sets: str, name: str, recipe: str = "arithmetic-tiny-int8") -> list[str]:
    pairs = [f"cluster.run_dir={root}", *sets]
    arguments = [part for pair in pairs for part in ("--set", pair)]
    return [sys.executable, "-m", "appliance", "train", recipe, "--name", name, *arguments]


def train(
    root: Path,
    *sets: str,
    name: str,
    recipe: str = "arithmetic-tiny-int8",
    timeout_s: float = 900,
    env: dict[str, str] | None = None,
) -> Finished:
    """A training to its end, whichever that is. env: its whole environment, None: this one."""
    since, before_s = bystanders(), processor_s()
    line = command(root, *sets, name=name, recipe=recipe)
    done = subprocess.run(line, capture_output=True, text=True, timeout=timeout_s, check=False, env=env)
    left = tuple(map(str, left_of(root / name, since=since)))
    said, used_s = (done.stdout, done.stderr), processor_s() - before_s
    return Finished(done.returncode, *said, run_dir=root / name, left=left, processor_s=used_s)
