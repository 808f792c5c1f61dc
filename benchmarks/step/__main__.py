"""Seconds of a training step of a real model: this checkout, another commit, and what people would use instead.

    python -m benchmarks.step -o docs/results                    # this checkout, and TRL with and without vLLM
    python -m benchmarks.step -o FOLDER --old 4fd84013           # this checkout, and another commit
    python -m benchmarks.step -o FOLDER --systems ours,one-flow  # these alone

Every system does the same work: SmolLM2-135M by `model.path`, word problems, 16 prompts with 8 samples of at most 24
tokens, one update a step, all in BF16 but for the rollouts of those that quantise. They take turns: `--rounds` times
each trains `--steps` steps in processes of its own. The first step of each is left out (kernels are packed, caches
fill); what counts is the median of the others. Each peer has the settings that were the fastest of those tried on the
host that its results page names: `--micro-batch` and `--checkpointing` try others.

TRL is fetched into a folder of its own, as `make test-trl` does. The other commit is checked out into a worktree, where
its own `make setup` builds its environment (3 GB). Writes `step.json` and `step.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from appliance import console
from appliance.compare.results import busy_share
from appliance.errors import TrainingError
from appliance.tasks.built_in import word_problems
from benchmarks.demo import MAX_BUSY, here

ROOT = Path(__file__).parents[2]
PROMPTS, SAMPLES, RESPONSE_TOKENS, LEARNING_RATE = 16, 8, 24, 2e-5
PHASES = ("rollout_s", "logprob_s", "update_s", "sync_s")
OURS = {
    "ours": (),
    "ours-bf16": ("rollout.scheme=bf16",),
    "one-flow": ("trainer.forward=rollout",),
    "one-flow-with-pass": ("trainer.forward=rollout", "trainer.old_log_probs=recompute"),
    "with-pass": ("trainer.old_log_probs=recompute",),
}
TRL = {"trl": (), "trl-vllm": ("--vllm",)}
OLD = "old"
SYSTEMS = (*OURS, *TRL)
VLLM_ON_A_CPU = {  # in TRL's own process: examples/trl/README.md says why
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_USE_AOT_COMPILE": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "FLASHRL_CONFIG": "bf16",
}


@dataclass(frozen=True)
class Measured:
    """One training of a system: what its steps took, without the first one."""

    system: str
    round: int
    step_s: tuple[float, ...]
    """Seconds of each step: generation, everything computed of it, the update, and the weights' way to the engine."""
    response_tokens: tuple[float, ...]
    """Mean tokens of a response, of each step."""
    phases_s: dict[str, float]
    """Median seconds of a step's phases; empty for systems that do not say them."""
    busy: float
    """Share of all cores that other processes used just before it started, 0..1."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder for step.json and step.md")
    parser.add_argument("--systems", help="of these, with commas: " + ", ".join(SYSTEMS))
    parser.add_argument("--old", metavar="COMMIT", help="another commit of this repository, beside this checkout")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="of a training, the first one left out")
    parser.add_argument("--micro-batch", type=int, default=32, help="sequences of a peer's forward")
    parser.add_argument("--checkpointing", action="store_true", help="let the peers recompute activations")
    parser.add_argument("--folder", type=Path, default=Path("runs/step"), help="for runs, problems and peers")
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error("--steps: the first one is left out, so give 2 at least")
    systems = chosen(arguments.systems, old=arguments.old)
    if unknown := [name for name in systems if name not in (*SYSTEMS, OLD)]:
        parser.error(f"--systems: there is no {unknown[0]!r}; give some of {', '.join(SYSTEMS)}")
    folder = arguments.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    problems, model = write_problems(folder / "problems.jsonl"), find_model()
    trainings = _trainings(arguments, systems=systems, folder=folder, problems=problems, model=model)
    measured: list[Measured] = []
    for number in range(arguments.rounds):
        for system in systems:
            busy = busy_share()
            lines = trainings[system](number)
            measured.append(summary(system, number=number, lines=lines[1:], busy=busy))
            console.say(f"{system}, round {number + 1}: {median(measured[-1].step_s):.1f} s a step")
    settings = {"micro_batch": arguments.micro_batch, "checkpointing": arguments.checkpointing, "old": arguments.old}
    document = {"schema_version": 1, **here(), **settings, "measured": [asdict(one) for one in measured]}
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "step.json").write_text(json.dumps(document, indent=1) + "\n")
    (arguments.output / "step.md").write_text(page(document))
    return 0


def chosen(systems: str | None, *, old: str | None) -> list[str]:
    """The systems to measure, in their order."""
    usual = ["ours"] if old else list(SYSTEMS)
    names = usual if systems is None else [name.strip() for name in systems.split(",")]
    return [*names, OLD] if old else names


def write_problems(path: Path) -> Path:
    """The training problems of `word-problems` as a file that every system reads, one JSON object a line."""
    problems = word_problems.splits(difficulty=2, seed=0, train_size=0, val_size=8).train
    rows = [{"system": word_problems.SYSTEM, "question": one.prompt, "answer": one.truth} for one in problems]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def find_model() -> Path:
    """SmolLM2-135M as a folder, which any commit and any peer loads by its path. Made where it is missing."""
    _run([sys.executable, "-m", "appliance", "profile", "smollm2-int8"], folder=ROOT, name="the model")
    plan = _run([sys.executable, "-m", "appliance", "plan", "smollm2-int8", "--json"], folder=ROOT, name="the model")
    return Path(json.loads(plan)["plan"]["model"]["path"]).absolute()


def _trainings(
    arguments: argparse.Namespace, *, systems: list[str], folder: Path, problems: Path, model: Path
) -> dict[str, Callable[[int], list[dict[str, Any]]]]:
    """By system, what trains it: of a round's number, the step's lines."""
    recipe = write_recipe(folder / "recipe.json", model=model, problems=problems, steps=arguments.steps)

    def train(root: Path, sets: tuple[str, ...], system: str) -> Callable[[int], list[dict[str, Any]]]:
        def run(number: int) -> list[dict[str, Any]]:
            name = f"{system}-{number}-{time.time_ns() // 1_000_000}"
            command = [str(root / ".venv/bin/appliance"), "train", str(recipe), "--name", name]
            command += [part for value in (f"cluster.run_dir={folder}", *sets) for part in ("--set", value)]
            _run(command, folder=root, name=system)
            return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]

        return run

    trainings = {name: train(ROOT, OURS[name], name) for name in systems if name in OURS}
    if OLD in systems:
        trainings[OLD] = train(check_out(arguments.old, folder=folder / f"commit-{arguments.old}"), (), OLD)
    peers = [name for name in systems if name in TRL]
    if peers:
        library = fetch_trl(folder / "trl")
        for name in peers:
            command = trl_command(model=model, problems=problems, arguments=arguments, more=TRL[name])
            trainings[name] = _peer(command, library=library, folder=folder, name=name)
    return trainings


def write_recipe(path: Path, *, model: Path, problems: Path, steps: int) -> Path:
    """With keys that older commits have, too: memory and speed are left to each commit's own defaults."""
    recipe = {
        "name": "step",
        "model": {"path": str(model)},
        "task": {
            "kind": "own",
            "train_file": str(problems),
            "val_size": 8,
            "prompt": "question",
            "truth": "answer",
            "system": word_problems.SYSTEM,
            "rewards": [{"name": "number"}],
            "max_prompt_tokens": 64,
            "max_response_tokens": RESPONSE_TOKENS,
        },
        "rollout": {"scheme": "int8", "samples_per_prompt": SAMPLES},
        "correction": {"method": "tis"},
        "optimizer": {"learning_rate": LEARNING_RATE},
        "batch": {"prompts_per_step": PROMPTS},
        "trainer": {"steps": steps, "validate_before": False, "validate_every": 0},
        "checkpoint": {"every_steps": 0},
        "cluster": {"device": "cpu"},
        "guard": {"actions": ["warn"]},
    }
    path.write_text(json.dumps(recipe, indent=1) + "\n")  # YAML 1.2 holds JSON
    return path


def check_out(commit: str, *, folder: Path) -> Path:
    """A worktree of that commit with its environment."""
    if not folder.exists():
        _run(["git", "worktree", "add", "--detach", str(folder), commit], folder=ROOT, name=commit)
    _run(["make", "setup"], folder=folder, name=commit)
    return folder


def fetch_trl(folder: Path) -> Path:
    """TRL alone; this environment has all that it needs."""
    if not (folder / "trl").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        lock = ["--require-hashes", "--requirement", str(ROOT / "requirements/trl.txt")]
        _run([*pip, *lock, "--target", str(folder)], folder=ROOT, name="TRL")
    return folder


def trl_command(*, model: Path, problems: Path, arguments: argparse.Namespace, more: tuple[str, ...]) -> list[str]:
    options = {
        "model": model,
        "problems": problems,
        "steps": arguments.steps,
        "prompts": PROMPTS,
        "samples": SAMPLES,
        "response-tokens": RESPONSE_TOKENS,
        "learning-rate": LEARNING_RATE,
        "micro-batch": arguments.micro_batch,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [
        *(sys.executable, "-m", "benchmarks.step.trl_peer", *words, *more),
        *(["--checkpointing"] if arguments.checkpointing else []),
    ]


def _peer(command: list[str], *, library: Path, folder: Path, name: str) -> Callable[[int], list[dict[str, Any]]]:
    def run(number: int) -> list[dict[str, Any]]:
        environment = {**os.environ, **VLLM_ON_A_CPU, "PYTHONPATH": os.pathsep.join([str(ROOT), str(library)])}
        text = _run(command, folder=folder, name=name, environment=environment)
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    return run


def _run(command: list[str], *, folder: Path, name: str, environment: dict[str, str] | None = None) -> str:
    """Its stdout. Raises TrainingError with the end of what it said."""
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        last_lines = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise TrainingError(f"{name} ended with code {done.returncode}: {' '.join(command)}\n{last_lines}")
    return done.stdout


def summary(system: str, *, number: int, lines: list[dict[str, Any]], busy: float) -> Measured:
    """Of a training's lines, ours or a peer's."""
    phases = {name: median(line[name] for line in lines) for name in PHASES if all(name in line for line in lines)}
    return Measured(
        system=system,
        round=number,
        step_s=tuple(line["step_s"] for line in lines),
        response_tokens=tuple(line["response_tokens_mean"] for line in lines),
        phases_s=phases,
        busy=busy,
    )


def page(document: dict[str, Any]) -> str:
    """The table: each system's median step, its ratio to ours, and its phases."""
    measured = [Measured(**one) for one in document["measured"]]
    seconds: dict[str, list[float]] = {}
    for one in measured:
        seconds.setdefault(one.system, []).extend(one.step_s)
    ours = median(seconds["ours"]) if "ours" in seconds else None
    rows = []
    for system, of_steps in seconds.items():
        trainings = [one for one in measured if one.system == system]
        mark = "~" if any(one.busy > MAX_BUSY for one in trainings) else ""
        tokens = median(value for one in trainings for value in one.response_tokens)
        phases = [_phase(trainings, name) for name in PHASES]
        ratio = "-" if ours is None else f"{median(of_steps) / ours:.2f}"
        spread = f"{min(of_steps):.1f} to {max(of_steps):.1f}"
        cells = (system, f"{mark}{median(of_steps):.1f}", spread, ratio, f"{tokens:.1f}", *phases)
        rows.append(f"| {' | '.join(cells)} |")
    old = f" *old* is commit {document['old']}." if document["old"] else ""
    checkpointing = "with" if document["checkpointing"] else "without"
    head = ("system", "a step, s", "range", "÷ ours", "tokens of a response", "rollout", "log-probs", "update", "sync")
    return "\n".join(
        [
            "# A step on a real model",
            "",
            "Made by `python -m benchmarks.step`; every number is in `step.json`.",
            f"Taken on {document['date']}: {document['processor']}, {document['cores']} cores, "
            f"CPython {document['python']}. Times with ~ were taken while the machine had other work.",
            "",
            f"SmolLM2-135M, {PROMPTS} prompts with {SAMPLES} samples of at most {RESPONSE_TOKENS} tokens, one update a "
            f"step. Peers: {document['micro_batch']} sequences a forward, {checkpointing} gradient checkpointing.{old}",
            "",
            f"| {' | '.join(head)} |",
            f"|{' --- |' * len(head)}",
            *rows,
            "",
        ]
    )


def _phase(trainings: list[Measured], name: str) -> str:
    values = [one.phases_s[name] for one in trainings if name in one.phases_s]
    return f"{median(values):.1f}" if values else "-"


if __name__ == "__main__":
    sys.exit(main())
