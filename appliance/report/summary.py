"""Where a run is (`appliance status`), and what it has to say when it is done: reward before and after, speed, where
everything lies, what to try next."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from appliance import console
from appliance.guard.policy import Collapse
from appliance.guard.signals import MismatchHealth
from appliance.record.checkpoints import in_order, step_of
from appliance.record.events import RunTail
from appliance.record.plan import RunPlan
from appliance.record.session import RunRecord, RunStatus
from appliance.record.state import RunState, fold, median_tokens_per_s, remaining_s, rewards_of, step_seconds
from appliance.report import display, draw
from appliance.report.folder import UNFINISHED, find_run, read_run, reading
from appliance.terms.counts import counted
from appliance.terms.devices import why_outgrown
from appliance.terms.environment import EXACT_VARIABLE
from appliance.terms.schemes import Scheme
from appliance.terms.settings import Dtype, Schedule

REPORT_FILE = "report.html"
_CLIMB = 0.02  # a difference of greedy validation that is more than noise at 500 problems


@dataclass(frozen=True)
class Result:
    """Mean rewards before and after the training."""

    before: float | None
    after: float | None
    validated: bool
    """Whether the means are from validation, else from sampled rollouts."""

    def climbed(self, plan: RunPlan) -> bool:
        """Tell whether the reward rose by more than noise. The range of rewards of the user's own is not known: there
        noise is the same share of the larger mean."""
        if self.before is None or self.after is None:
            return False
        scale = max(abs(self.before), abs(self.after)) if plan.task.is_own else 1.0
        return self.after > self.before + _CLIMB * scale

    def stayed_at_top(self, plan: RunPlan) -> bool:
        """Tell whether nothing was left to learn. False for rewards of the user's own, whose range is not known."""
        ends = (self.before, self.after)
        return not plan.task.is_own and all(each is not None and each > 1 - _CLIMB for each in ends)


def result(state: RunState) -> Result:
    """Compute the result by validation where there is one before and one after, else by the sampled rewards at both
    ends."""
    if state.val_first is not None and state.val_last_step > 0:
        return Result(state.val_first, state.val_last, validated=True)
    if not state.rewards:
        return Result(state.val_first, None, validated=True)
    half = state.rewards.count // 2  # of a short run: a step counts at one end
    if not half:
        return Result(None, state.rewards.last[-1], validated=False)
    first, last = state.rewards.first[:half], state.rewards.last[-half:]
    return Result(sum(first) / len(first), sum(last) / len(last), validated=False)


def summary_rows(plan: RunPlan, state: RunState, *, seconds: float, folder: str) -> tuple[tuple[str, str], ...]:
    """Return the summary of a run as (label, text) pairs. seconds: of this attempt.  folder: the run's folder as a
    person would type it."""
    rewards, per_step = result(state), draw.number(step_seconds(state), digits=1)
    how = f"{state.val_how}, {counted(state.val_samples, 'problem')} of the validation set"
    how = how if rewards.validated else "sampled, while training"
    beside = f" (bf16 {draw.number(state.val_bf16)})" if rewards.validated and state.val_bf16 is not None else ""
    only_after = (
        [] if rewards.validated or not state.val_last_step else [("validation", display.validation_text(state))]
    )
    emulated = ", emulated" if plan.emulates else ""
    reward = f"{draw.number(rewards.before)} before, {draw.number(rewards.after)}{beside} after ({how})"
    before = step_of(Path(plan.resume_from))
    of_them = f", {state.step - before or 'none'} of them" if before else ""
    return (
        ("done", f"{counted(state.step, 'step')}{of_them} in {draw.duration(seconds)}"),
        ("reward", reward),
        *only_after,
        *display.set_rows(state),
        ("speed", f"{draw.tokens_per_s(median_tokens_per_s(state))} of rollout, {per_step} s a step (medians)"),
        ("mismatch", _mismatch(state)),
        *((("gradients", f"of quantised layers in fp8-block{emulated}"),) if plan.trainer.fp8_backward else ()),
        ("model", f"{folder}/model"),
        *_serving(plan, folder=folder),
        ("report", f"{folder}/{REPORT_FILE}"),
        ("run folder", f"{folder}  (metrics.jsonl, events.jsonl, logs/)"),
        *(("try next", line) for line in try_next(plan, state, folder=folder)),
    )


def _serving(plan: RunPlan, *, folder: str) -> Iterator[tuple[str, str]]:
    """Say how to serve: with one precision flow the policy that was trained is the one that sampled: the folder names
    it. A base in FP16 would be served in FP16 by its config.json, whatever it was trained in."""
    run, dtype = shlex.quote(folder), f"--dtype {plan.trainer.dtype.in_torch}"
    if plan.trainer.one_flow and not plan.model.lora:
        exact = f"{EXACT_VARIABLE}=1 " if plan.is_cpu else ""
        command = f"{exact}FLASHRL_CONFIG={run}/model/profile/quantization.yaml vllm serve {run}/model {dtype}"
        yield "serve it", f"as it was trained: {command}"
    elif plan.trainer.dtype is not Dtype.BF16:
        yield "serve it", f"as it was trained: vllm serve {run}/model {dtype}"


def _mismatch(state: RunState) -> str:
    if not state.judged_steps:
        return MismatchHealth.UNKNOWN.word
    return f"fine in {state.judged_steps - state.bad_steps} of {counted(state.judged_steps, 'step')}"


def try_next(plan: RunPlan, state: RunState, *, folder: str) -> tuple[str, ...]:
    """Suggest one or two things to try next, by this run's outcome."""
    longer, lines = _longer(plan, folder=folder), []
    other = Scheme.BF16 if plan.rollout.scheme.quantised else Scheme.INT8
    one_scheme = (  # that may be another: what the recipe has goes with each
        len(set(plan.rollout.replicas)) == 1
        and not (plan.trainer.quantises or plan.guard.ranks_layers or plan.emulates)
        and plan.trainer.dtype is Dtype.BF16
        and not why_outgrown(other, device=plan.cluster.device)
    )
    is_exact = plan.trainer.one_flow and plan.is_cpu
    # A few bad steps are no reason to change what the rest was fine with; where all tokens are to be equal, one is.
    if state.bad_steps > (0 if is_exact else state.judged_steps / 4):
        compare = one_scheme and other is Scheme.BF16
        how = f"compare with --set rollout.scheme={other}" if compare else "report.html shows when"
        of_them = f"{state.bad_steps} of {counted(state.judged_steps, 'step')}"
        lines.append(f"the mismatch was bad in {of_them}: {how}")
    rewards = result(state)
    cut_fraction = state.last.unfinished_fraction if state.last else None
    if cut_fraction is not None and cut_fraction > Collapse().unfinished_above:
        limit = counted(plan.task.max_response_tokens, "token")
        lines.append(
            f"nearly all answers were cut at {limit}: --set task.max_response_tokens=..., or ask for shorter ones"
        )
    if rewards.stayed_at_top(plan):
        lines.append("the reward was at its top from the start: harder problems leave something to learn")
    elif rewards.before is not None and not rewards.climbed(plan):
        lines.append(f"the reward did not climb: more steps ({longer}) or a higher learning rate")
    if not lines:
        lines.append(f"train longer: {longer}")
        lines += [f"compare: --set rollout.scheme={other}"] if one_scheme else []
    return (*lines, f"appliance status {shlex.quote(folder)}")


def _longer(plan: RunPlan, *, folder: str) -> str:
    """Say how to train longer. A learning rate that sinks has come down by the last step: such a run has to begin
    again."""
    resume = f"--resume {shlex.quote(folder)} " if plan.optimizer.schedule is Schedule.CONSTANT else ""
    without_epochs = "--set trainer.epochs=null " if plan.trainer.epochs else ""
    return f"{resume}{without_epochs}--set trainer.steps={2 * plan.trainer.steps}"


def summary_object(
    plan: RunPlan, state: RunState, *, state_name: str, exit_code: int, reason: str, seconds: float
) -> dict[str, Any]:
    """Return the summary as JSON values, also for a run that failed or was stopped."""
    rewards = result(state)
    return {
        "state": state_name,
        "exit_code": exit_code,
        "reason": reason,
        "run_dir": plan.run_dir,
        "steps": state.step,
        "seconds": round(seconds, 1),
        "reward_before": rewards.before,
        "reward_after": rewards.after,
        "greedy": rewards.validated and not any(val_set.temperature for val_set in [*plan.task.val_sets.values()][:1]),
        "reward_after_bf16": state.val_bf16 if rewards.validated else None,
        "val_reward_mean": state.val_last,
        "val_reward_bf16_mean": state.val_bf16,
        "val_sets": state.sets_last,
        "rollout_tokens_per_s": median_tokens_per_s(state),
        "step_s": step_seconds(state),
    }


def print_status(run: str, *, run_root: Path, json_mode: bool = False) -> None:
    """Print the status of a run, from its folder alone. Raises RecipeError when there is no such run or its files
    cannot be read."""
    run_dir = find_run(run, run_root=run_root)
    plan, record = read_run(run_dir)
    state = RunState(plan.trainer.steps, plan.mismatch_bounds)
    with reading(run_dir):
        saved = in_order(run_dir)
        for news in RunTail(run_dir).stream():
            state = fold(state, news)
    if not json_mode:
        rows = status_rows(plan, record, state, folder=typed_path(run_dir))
        console.out(console.table((*rows, *_saved_rows(run_dir, record, saved=saved))))
        return
    numbers = {
        "step": state.step,
        "steps": state.steps,
        "reward_mean": state.rewards.last[-1] if state.rewards else None,
        "val_reward_before": state.val_first,
        "rewards": rewards_of(state.last) if state.last else {},
        "val_reward_mean": state.val_last,
        "val_sets": state.sets_last,
        "rollout_tokens_per_s": median_tokens_per_s(state),
        "checkpoint_steps": [step_of(folder) for folder in saved],
    }
    console.out(json.dumps({**asdict(record), "run_dir": str(run_dir), **numbers}))


def status_rows(plan: RunPlan, record: RunRecord, state: RunState, *, folder: str) -> tuple[tuple[str, str], ...]:
    """Return the status of a run as (label, text) pairs; what is not known yet is left out."""
    is_live, code = record.state in UNFINISHED, "" if record.exit_code is None else f" (exit code {record.exit_code})"
    rows = [("run", display.title(plan))]
    rows.append(("state", f"{record.state}{code}" + (f": {record.reason}" if record.reason else "")))
    if is_live:
        rows.append(("phase", display.phase_text(record.phase)))
    left = remaining_s(state, now=0.0) if state.work is None and is_live else None
    rows.append(("step", f"{state.step} of {state.steps}" + (f", about {draw.duration(left)} left" if left else "")))
    if state.rewards:
        first, last = state.rewards.first[0], state.rewards.last[-1]
        rows.append(("reward", f"{last:.3f} in step {state.step}, {first:.3f} in the first"))
    if state.last is not None:
        rows.append(("rewards", display.rewards_text(state.last)))
    if state.val_last is not None:
        rows += [("validation", display.validation_text(state)), *display.set_rows(state)]
    if state.last is not None:
        rows.append(("speed", f"{draw.tokens_per_s(median_tokens_per_s(state))} of rollout (median)"))
        rows.append(("mismatch", _mismatch(state)))
    if state.failure is not None and record.state is RunStatus.FAILED:
        rows.append(("hint", state.failure.hint))
    rows.append(("folder", folder))
    return tuple((label, text) for label, text in rows if text)


def _saved_rows(run_dir: Path, record: RunRecord, *, saved: list[Path]) -> list[tuple[str, str]]:
    rows = [("attempts", str(record.attempt))] if record.attempt > 1 else []
    if (page := run_dir / REPORT_FILE).is_file():
        rows.append(("report", typed_path(page)))
    if saved:
        rows.append(("checkpoint", f"{saved[-1].name}, the newest of {len(saved)}"))
    if record.state in (RunStatus.FAILED, RunStatus.STOPPED) and (command := go_on_command(run_dir)):
        rows.append(("to resume", command))
    return rows


def go_on_command(run_dir: Path) -> str:
    """Return the command that resumes a run that did not end well; empty when it has no checkpoint."""
    if not in_order(run_dir):
        return ""
    return f"appliance train {quoted_path(run_dir / 'recipe.yaml')} --resume {quoted_path(run_dir)}"


def typed_path(path: Path) -> str:
    """Return a path as one would type it from here: relative when it lies below the working folder."""
    relative = os.path.relpath(path)
    if relative.startswith(".."):
        return str(path)
    return f"./{relative}" if relative.startswith("-") else relative  # else it would be taken for an option


def quoted_path(path: Path) -> str:
    """Return `typed_path` quoted for a shell: a folder may have any name."""
    return shlex.quote(typed_path(path))
