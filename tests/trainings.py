"""Trainings started as a user starts them, and what they leave."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from left_behind import bystanders, left_of

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


@dataclass(frozen=True)
class Finished:
    """A run that ended: what the command printed, where it wrote, and the processes that outlived it."""

    code: int
    stdout: str
    stderr: str
    run_dir: Path
    left: tuple[str, ...]

    def json_lines(self, name: str) -> list[dict]:
        return [json.loads(line) for line in (self.run_dir / name).read_text().splitlines()]


def command(root: Path, *sets: str, name: str, recipe: str = "arithmetic-tiny-int8") -> list[str]:
    pairs = [f"cluster.run_dir={root}", *sets]
    arguments = [part for pair in pairs for part in ("--set", pair)]
    return [sys.executable, "-m", "appliance", "train", recipe, "--name", name, *arguments]


def train(root: Path, *sets: str, name: str, recipe: str = "arithmetic-tiny-int8", timeout_s: float = 900) -> Finished:
    """A training to its end, whichever that is."""
    since = bystanders()
    done = subprocess.run(
        command(root, *sets, name=name, recipe=recipe), capture_output=True, text=True, timeout=timeout_s, check=False
    )
    left = tuple(map(str, left_of(root / name, since=since)))
    return Finished(code=done.returncode, stdout=done.stdout, stderr=done.stderr, run_dir=root / name, left=left)
