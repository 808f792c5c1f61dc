"""What rewards cost of a step: `python -m benchmarks.rewards RUN`, the folder of a run that ended well.

Grades 10,000 trivial responses at once in a pool as the run had it, and holds the time against that of as many of the
run's own steps as make 10,000 samples: medians, without the first step. As if nothing overlapped: in a run rewards are
graded beside the rollouts that still run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from statistics import median

from appliance import console
from appliance.errors import TrainingError
from appliance.record.plan import read_plan
from appliance.tasks.task import Response, Reward
from appliance.trainer.rewards import RewardPool

SAMPLES = 10_000
ROUNDS = 3
AIM = 0.05  # of a step


def trivial() -> tuple[Reward, ...]:
    return (Reward("exact", 1.0, lambda response: float(response.text == response.truth)),)


async def grading_s(pool: RewardPool, *, samples: int) -> float:
    """Seconds until as many responses are graded, asked for all at once."""
    row = json.dumps({"question": "47+85", "answer": "132"})
    responses = [Response(str(number), "132", row, token_ids=(49, 51, 50)) for number in range(samples)]
    since = time.perf_counter()
    graded = await asyncio.gather(*map(pool.grade, responses))
    if any(each.fault is not None for each in graded):
        raise TrainingError("a trivial reward failed", hint="look for a machine without memory")
    return time.perf_counter() - since


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    run = parser.parse_args().run
    plan = read_plan(run / "plan.json")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step_s"] for line in lines if line["step"] > 1]
    if not steps:
        raise TrainingError(f"{run} has no step after the first")
    in_a_step = plan.prompts_per_step * plan.rollout.samples_per_prompt
    pool = RewardPool(load=trivial, workers=plan.task.reward_workers)
    try:
        asyncio.run(grading_s(pool, samples=100))  # its processes are there
        rounds = [asyncio.run(grading_s(pool, samples=SAMPLES)) for _ in range(ROUNDS)]
    finally:
        pool.close()
    made_s = median(steps) * SAMPLES / in_a_step
    share = median(rounds) / made_s
    console.out(
        f"{SAMPLES:,} trivial rewards {median(rounds):.2f} s ({min(rounds):.2f} to {max(rounds):.2f}); "
        f"{SAMPLES / in_a_step:.1f} steps of {in_a_step} samples, {median(steps):.2f} s each, make as many in "
        f"{made_s:.0f} s: {share:.1%}, {'below' if share < AIM else 'not below'} {AIM:.0%}"
    )
    return 0 if share < AIM else 1


if __name__ == "__main__":
    raise SystemExit(main())
