"""What rewards cost of a step: `python -m benchmarks.rewards RUN [-o FOLDER]`, the folder of a run that ended well.

Two things, in a pool of as many processes as the run had. 10,000 trivial responses are graded at once, and the time is
compared with that of as many of the run's own steps as make 10,000 samples: medians, without the first step, as if
nothing overlapped. And 100 responses come one after the other, as from an engine that is as fast as the pool, each to
be graded by a reward that takes 0.2 s: the time is compared with that of generating all of them and then grading all of
them. Into FOLDER goes `rewards.md`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from appliance import console
from appliance.errors import TrainingError
from appliance.record.plan import read_plan
from appliance.tasks.task import Response, RewardFunction
from appliance.terms.counts import counted
from appliance.trainer.rewards import RewardPool, num_workers
from benchmarks.telemetry import Where

SAMPLES, ROUNDS = 10_000, 3
AIM = 0.05  # of a step
SLOW, SLOW_S = 100, 0.2
SLOW_AIM = 0.6  # of one after the other; where all but the last is graded beside the engine it is half


@dataclass(frozen=True)
class Cost:
    rounds_s: tuple[float, ...]
    """Seconds of each round of grading SAMPLES."""
    step_s: tuple[float, ...]
    """Seconds of each step."""
    in_a_step: int
    """Its samples."""
    slow_s: float
    """Seconds until SLOW responses are made and graded."""
    workers: int

    @property
    def share(self) -> float:
        return median(self.rounds_s) / (median(self.step_s) * SAMPLES / self.in_a_step)

    @property
    def apart_s(self) -> float:
        return 2 * SLOW * SLOW_S / self.workers

    @property
    def is_kept(self) -> bool:
        return self.share <= AIM and self.slow_s <= SLOW_AIM * self.apart_s

    @property
    def lines(self) -> list[str]:
        num_steps, rounds = SAMPLES / self.in_a_step, self.rounds_s
        beside = self.slow_s / self.apart_s
        processes = counted(self.workers, "process", plural="processes")
        return [
            f"{SAMPLES:,} trivial rewards in {processes}: {median(rounds):.2f} s ({min(rounds):.2f} to "
            f"{max(rounds):.2f}); {num_steps:.1f} steps of {self.in_a_step} samples make as many, "
            f"{median(self.step_s):.2f} s each (median of {len(self.step_s)}), "
            f"in {num_steps * median(self.step_s):.0f} s: {self.share:.1%}, "
            f"{'not more' if self.share <= AIM else 'more'} than {AIM:.0%}",
            f"{SLOW} rewards of {SLOW_S:g} s beside an engine that makes a response every "
            f"{SLOW_S / self.workers * 1e3:.0f} ms: {self.slow_s:.1f} s; one after the other {self.apart_s:.1f} s: "
            f"{beside:.0%}, {'not more' if beside <= SLOW_AIM else 'more'} than {SLOW_AIM:.0%}",
        ]


def trivial() -> tuple[RewardFunction, ...]:
    return (RewardFunction("exact", 1.0, lambda response: float(response.text == response.truth)),)


def slow() -> tuple[RewardFunction, ...]:
    return (RewardFunction("slow", 1.0, lambda _: time.sleep(SLOW_S) or 1.0),)


async def grading_s(pool: RewardPool, *, samples: int, every_s: float = 0.0) -> float:
    """Seconds until as many responses are graded. every_s: between two of them; 0: asked for all at once."""
    row = json.dumps({"question": "47+85", "answer": "132"})
    since, tasks = time.perf_counter(), []
    for number in range(samples):
        if every_s:
            await asyncio.sleep(max(0.0, since + (number + 1) * every_s - time.perf_counter()))
        tasks.append(asyncio.create_task(pool.grade(Response(str(number), "132", row, token_ids=(49, 51, 50)))))
    if any(each.fault is not None for each in await asyncio.gather(*tasks)):
        raise TrainingError("a reward failed", hint="look for a machine without memory")
    return time.perf_counter() - since


def timed(
    load: Callable[[], tuple[RewardFunction, ...]], *, workers: int, rounds: int, **how: float
) -> tuple[float, ...]:
    pool = RewardPool(load=load, workers=workers)
    try:
        asyncio.run(grading_s(pool, samples=8 * workers))  # its processes are there
        return tuple(asyncio.run(grading_s(pool, **how)) for _ in range(rounds))  # type: ignore[arg-type]
    finally:
        pool.close()


def cost_of(run: Path) -> Cost:
    """Raises TrainingError for a run without a step after the first."""
    plan = read_plan(run / "plan.json")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = tuple(line["step_s"] for line in lines if line["step"] > 1)
    if not steps:
        raise TrainingError(f"{run} has no step after the first")
    workers = plan.task.reward_workers or num_workers(os.cpu_count() or 1)
    return Cost(
        rounds_s=timed(trivial, workers=workers, rounds=ROUNDS, samples=SAMPLES),
        step_s=steps,
        in_a_step=plan.batch.prompts_per_step * plan.rollout.samples_per_prompt,
        slow_s=timed(slow, workers=workers, rounds=1, samples=SLOW, every_s=SLOW_S / workers)[0],
        workers=workers,
    )


ABOUT = (
    "How much of a training's time do rewards take, and do slow ones overlap with the rollouts? Rewards are computed",
    "in a pool of as many processes as the run had. First, trivial rewards beside as many steps of the run as make as",
    "many samples. Then slow ones, beside an engine that is as fast as the pool.",
)


def markdown(cost: Cost, where: Where) -> str:
    first, second = cost.lines
    lines = [
        "# What rewards cost",
        "",
        *ABOUT,
        "",
        f"Made by `python -m benchmarks.rewards RUN -o docs/results`, RUN of `{where.recipe}`.",
        f"Taken on {where.text}.",
        "",
        f"* {first}. This counts the rewards as if nothing overlapped.",
        f"* {second}. That the rollouts of a training do overlap with its rewards is checked by",
        "  `test_a_slow_reward_overlaps_with_rollouts_that_still_run`.",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("-o", "--output", type=Path, help="folder for rewards.md")
    arguments = parser.parse_args()
    where = Where.now(read_plan(arguments.run / "plan.json").name)
    cost = cost_of(arguments.run)
    console.out("\n".join([*cost.lines, where.text]))
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "rewards.md").write_text(markdown(cost, where))
    return 0 if cost.is_kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
