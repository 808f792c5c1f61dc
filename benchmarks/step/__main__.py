"""Seconds of a training step of a real model: this checkout, another commit, and what people would use instead.

    python -m benchmarks.step -o docs/results                    # ours, one flow, TRL with and without vLLM, verl
    python -m benchmarks.step -o docs/results --old 4fd84013     # the same, and another commit
    python -m benchmarks.step -o FOLDER --systems ours,one-flow  # these alone
    python -m benchmarks.step -o FOLDER --systems ours,one-flow --avx2  # by the kernels of a CPU without AVX-512

Every system does the same work: SmolLM2-135M by `model.path`, word problems, 16 prompts with 8 samples of at most 24
tokens, one update a step, all in BF16 but for the rollouts of those that quantise. They take turns: in each of
`--rounds` rounds every system trains `--steps` steps in fresh processes. The first step of each training is left out
(kernels are packed, caches fill). What counts is the median of all others, and their spread is beside it.

A peer is measured at the fastest of the settings that are tried on this host, in short trainings before the rounds:
each of `--micro-batches` without gradient checkpointing (with it, where none of them trains without), and then at the
fastest size what else it can choose: checkpointing, and with verl no padding, or forwards of so many tokens in place of
so many sequences. A setting that fails, for want of memory or because its training has no end after an hour, is left
out and named.

Each training that has ended is a line of `trainings.jsonl` in `--folder`: after an interruption the same command
continues with what is missing. Another commit, host or number of steps is refused there and needs a folder of its own.

`verl` is its own entry point with its documented settings for a small model on one device, in BF16 with vLLM, and
old log-probs by a pass of their own, verl's default. `verl-bypass` takes the rollouts' log-probs for these
(`algorithm.rollout_correction.bypass_mode`), which is faster and another algorithm. On a CPU verl 0.9.1 does not run
without three additions, and has no others: a platform for a CPU, a process group that torch does not refuse
(`verl_peer.py`, both from this project) and vLLM's own layerwise reload where verl writes new weights into layers that
vLLM's kernels have packed, a head tied to the embedding with them (`verl_weights.py`).

`trl-vllm-uncorrected` is TRL without the importance sampling that is its default for what vLLM sampled: it leaves out a
forward for old log-probs, and is another algorithm, too.

TRL is fetched into its own folder, as `make test-trl` does. The other commit is checked out into a worktree, where its
own `make setup` builds its environment (3 GB). Writes `step.json` and `step.md`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median

from appliance import console
from appliance.compare.results import busy_share
from appliance.errors import TrainingError
from benchmarks.demo import here
from benchmarks.step.measured import Measured, Trainings, document, page, summary
from benchmarks.step.systems import (
    OLD,
    PEERS,
    ROOT,
    SEQUENCES,
    SYSTEMS,
    USUAL,
    Bench,
    Setting,
    find_model,
    run_command,
    variants,
    write_problems,
)

TRIED_STEPS = 2  # of a training that tries a setting; the first one is left out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder for step.json and step.md")
    parser.add_argument("--systems", help="systems to measure, with commas between them: " + ", ".join(SYSTEMS))
    parser.add_argument(
        "--old", metavar="COMMIT", help="another commit of this repository, to measure beside this checkout"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="steps of a training; the first one does not count")
    parser.add_argument(
        "--micro-batches", default="8,16,32,128", help="sequences of a peer's forward to try, with commas"
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/step"), help="folder for runs, problems and peers")
    parser.add_argument("--model", type=Path, help="another model's folder, to try the benchmark")
    parser.add_argument(
        "--avx2",
        action="store_true",
        help="compute as on a CPU with AVX2 and without AVX-512",
    )
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error("--steps: the first one is left out, so give at least 2")
    systems = chosen(arguments.systems, old=arguments.old)
    if unknown := [name for name in systems if name not in (*SYSTEMS, OLD)]:
        parser.error(f"--systems: there is no {unknown[0]!r}; give some of {', '.join(SYSTEMS)}")
    micro_batches = [int(number) for number in arguments.micro_batches.split(",")]
    if unfit := [number for number in micro_batches if number < 1 or SEQUENCES % number]:
        parser.error(f"--micro-batches: {unfit[0]} does not divide the {SEQUENCES} sequences of a step")
    folder = arguments.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    model = arguments.model.absolute() if arguments.model else find_model()
    bench = Bench(folder, model, write_problems(folder / "problems.jsonl"), arguments.old, arguments.avx2)
    about = {**here(), "commit": commit(), "old": arguments.old, "steps": arguments.steps, "model": model.name}
    about["avx2"] = arguments.avx2
    trainings = Trainings.open(folder / "trainings.jsonl", about=about)
    peers = [system for system in systems if system in PEERS]
    fastest = {peer: find_fastest(peer, bench, trainings, micro_batches) for peer in peers}
    for number in range(1, arguments.rounds + 1):
        for system in systems:
            measure(system, bench, trainings, round_number=number, steps=arguments.steps, setting=fastest.get(system))
    content = document(trainings, systems=systems, rounds=arguments.rounds)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "step.json").write_text(json.dumps(content, indent=1) + "\n")
    (arguments.output / "step.md").write_text(page(content))
    return 0


def chosen(systems: str | None, *, old: str | None) -> list[str]:
    """The systems to measure, in the order of their turns: the other commit first."""
    names = list(USUAL) if systems is None else [name.strip() for name in systems.split(",")]
    return [OLD, *names] if old else names


def commit() -> str:
    """This checkout's, with `+` where what is measured has changed since."""
    status = ["git", "status", "--porcelain", "--", "appliance", "benchmarks/step", "requirements"]
    changed = run_command(status, folder=ROOT, name="git")
    head = run_command(["git", "rev-parse", "--short=8", "HEAD"], folder=ROOT, name="git").strip()
    return f"{head}+" if changed else head


def find_fastest(peer: str, bench: Bench, trainings: Trainings, micro_batches: list[int]) -> Setting:
    """Try a peer's settings, the size of a forward first, and return the fastest one.

    micro_batches: divisors of a step's sequences.  Raises TrainingError where no setting works.
    """
    times: dict[Setting, float] = {}

    def try_all(settings: list[Setting]) -> Setting | None:
        for setting in settings:
            measured = measure(peer, bench, trainings, round_number=0, steps=TRIED_STEPS, setting=setting)
            if measured.step_s:
                times[setting] = median(measured.step_s)
        return min(times, key=lambda setting: times[setting], default=None)

    by_size = try_all([Setting(number, checkpointing=False) for number in micro_batches])
    if by_size is None:
        by_size = try_all([Setting(number, checkpointing=True) for number in micro_batches])
    if by_size is None:
        raise TrainingError(f"{peer} trained with none of its settings: {trainings.path} has what it printed")
    return try_all([setting for setting in variants(peer, by_size) if setting not in times]) or by_size


def measure(
    system: str, bench: Bench, trainings: Trainings, *, round_number: int, steps: int, setting: Setting | None
) -> Measured:
    """One training, or what an earlier attempt has measured of it. round_number: 0: it tries a setting, and may fail.
    Raises TrainingError."""
    if (known := trainings.find(system, round_number=round_number, setting=setting)) is not None:
        return known
    busy = busy_share()
    try:
        lines = bench.train(system, steps=steps, setting=setting)
    except TrainingError as error:
        if round_number:
            raise
        measured = summary(system, round_number=0, setting=setting, lines=[], busy=busy, failure=error.message)
    else:
        measured = summary(system, round_number=round_number, setting=setting, lines=lines[1:], busy=busy)
    trainings.add(measured)
    what = f"round {round_number}" if round_number else str(setting)
    console.say(f"{system}, {what}: {f'{median(measured.step_s):.1f} s a step' if measured.step_s else 'failed'}")
    return measured


if __name__ == "__main__":
    sys.exit(main())
