"""What a finished run has to say: reward before and after, speed, where everything lies, what to try next. Pure."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.record.checkpoints import in_order
from appliance.record.plan import RunPlan
from appliance.record.state import RunState, median_tokens_per_s, step_seconds
from appliance.report import draw
from appliance.terms.schemes import Scheme

REPORT_FILE = "report.html"
_CLIMB = 0.02  # a difference of greedy validation that is more than noise at 500 problems
_FEW = 5


@dataclass(frozen=True)
class Result:
    """Means before and after, 0..1 for exact-answer rewards. greedy: from validation, else from sampled rollouts."""

    before: float | None
    after: float | None
    greedy: bool


def result(state: RunState) -> Result:
    """By validation where there is one before and one after, else by the sampled rewards at both ends."""
    if state.val_first is not None and state.val_last_step > 0:
        return Result(state.val_first, state.val_last, greedy=True)
    if not state.rewards:
        return Result(state.val_first, None, greedy=True)
    first, last = state.rewards[:_FEW], state.rewards[-_FEW:]
    return Result(sum(first) / len(first), sum(last) / len(last), greedy=False)


def climbed(found: Result) -> bool:
    """Whether the reward rose by more than noise."""
    return found.before is not None and found.after is not None and found.after > found.before + _CLIMB


def summary_rows(plan: RunPlan, state: RunState, *, seconds: float, folder: str) -> tuple[tuple[str, str], ...]:
    """(label, text) pairs. seconds: of the whole run.  folder: the run's folder as a person would type it."""
    per_step = step_seconds(state)
    speed = f"{draw.tokens_per_s(median_tokens_per_s(state))} of rollout, {draw.number(per_step, digits=1)} s a step"
    fine = len(state.rewards) - state.unhealthy_steps
    return (
        ("done", f"{state.step} steps in {draw.duration(seconds)}"),
        ("reward", _reward(state)),
        ("speed", f"{speed} (medians)"),
        ("mismatch", f"fine in {fine} of {len(state.rewards)} steps"),
        ("model", f"{folder}/model"),
        ("report", f"{folder}/{REPORT_FILE}"),
        ("run folder", f"{folder}  (metrics.jsonl, events.jsonl, logs/)"),
        *(("try next", line) for line in try_next(plan, state, folder=folder)),
    )


def _reward(state: RunState) -> str:
    found = result(state)
    how = f"greedy, {state.val_samples} problems of the validation set" if found.greedy else "sampled, while training"
    after = draw.number(found.after)
    if found.greedy and state.val_bf16 is not None:
        after += f" (bf16 {draw.number(state.val_bf16)})"
    return f"{draw.number(found.before)} before, {after} after ({how})"


def try_next(plan: RunPlan, state: RunState, *, folder: str) -> tuple[str, ...]:
    """One or two things that this run's outcome suggests."""
    found = result(state)
    lines = []
    if state.unhealthy_steps:
        lines.append("the mismatch left its bounds: compare with --set rollout.scheme=bf16")
    if not climbed(found):
        lines.append(
            f"the reward did not climb: more steps (--set trainer.steps={2 * plan.steps}) or a higher learning rate"
        )
    if not lines:
        lines.append(f"train longer: --set trainer.steps={2 * plan.steps}")
        other = Scheme.BF16 if plan.rollout.scheme.quantised else Scheme.INT8
        lines.append(f"compare: --set rollout.scheme={other}")
    return (*lines, f"appliance status {shlex.quote(folder)}")


def summary_object(
    plan: RunPlan, state: RunState, *, state_name: str, exit_code: int, reason: str, seconds: float
) -> dict[str, Any]:
    """The same for machines; also what a run that failed or was stopped says of itself."""
    found = result(state)
    return {
        "state": state_name,
        "exit_code": exit_code,
        "reason": reason,
        "run_dir": plan.run_dir,
        "steps": state.step,
        "seconds": round(seconds, 1),
        "reward_before": found.before,
        "reward_after": found.after,
        "greedy": found.greedy,
        "reward_after_bf16": state.val_bf16,
        "rollout_tokens_per_s": median_tokens_per_s(state),
        "step_s": step_seconds(state),
    }


def go_on_command(run_dir: Path) -> str:
    """What goes on with a run that did not end well; empty when it has no checkpoint."""
    if not in_order(run_dir):
        return ""
    recipe = quoted_path(run_dir / "recipe.yaml")
    return f"appliance train {recipe} --resume {quoted_path(run_dir)}"


def typed_path(path: Path) -> str:
    """The path as one would type it from here: relative when it lies below the working folder."""
    relative = os.path.relpath(path)
    if relative.startswith(".."):
        return str(path)
    return f"./{relative}" if relative.startswith("-") else relative  # else it would be taken for an option


def quoted_path(path: Path) -> str:
    """`typed_path` as a word of a command that is typed: a folder may be named as one likes."""
    return shlex.quote(typed_path(path))
