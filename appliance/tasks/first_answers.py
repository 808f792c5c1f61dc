"""What a model answers before any training, and what each answer earns: for `appliance data preview --answers`.

`python -m appliance.tasks.first_answers`, a RunPlan and answers as JSON on stdin, is the child that gives the rewards:
it runs the user's code, which may print, end the process or never end.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from appliance.files import Frozen
from appliance.record.plan import RunPlan
from appliance.tasks.grading import grade, in_words, weigh_rewards
from appliance.tasks.library import task_of
from appliance.tasks.response_text import ResponseReader
from appliance.tasks.task import Response, RewardFunction
from appliance.tasks.user_code import open_voice, run_child
from appliance.terms.counts import counted

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

_PROMPTS_AT_A_TIME = 16  # bounds the memory of their keys and values
_ANSWERS_TO_JUDGE = 8  # with fewer it says little that a reward is the same for all
_CUT_FRACTION_TO_NOTE = 0.5
_IMPORT_WITHIN_S = 60.0  # what is added to task.reward_timeout_s for the import of the rewards, which may be slow


class FirstAnswer(Frozen):
    """An answer of the model before any training."""

    text: str
    """Text as a reward reads it."""
    token_ids: tuple[int, ...]
    """Tokens that the model generated, the one that ends the answer included."""
    is_cut: bool
    """Whether it was cut at `task.max_response_tokens`."""
    begun: str = ""
    """Part of `text` that the prompt ends with."""
    reward: float | None = None
    """Weighted sum of the rewards, before anything that `algorithm` adds; None where it has none."""
    rewards: dict[str, float] = Field(default_factory=dict)
    """Value of each reward that applies, without its weight."""
    why: str = ""
    """Reason why it has no reward, else empty."""


class _AnsweredProblem(Frozen):
    """Answer with the parts of its problem that rewards read."""

    answer: FirstAnswer
    truth: str
    row: str


class _Request(Frozen):
    """Request to the child that gives the rewards; without problems it imports them only."""

    plan: RunPlan
    problems: tuple[_AnsweredProblem, ...] = ()


def draw_answers(
    plan: RunPlan, *, prompts: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase
) -> list[FirstAnswer]:
    """Draw one answer to each prompt with the recipe's temperature, `top_p` and `top_k`, by the plan's model in BF16 on
    the CPU. The model must be here whole. The same seed gives the same answers.

    prompts: token ids, at least one of each. Raises WeightsError where the model's files are not whole, or not those of
    its class.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from appliance.quant.loading import load_whole  # loads torch

    trust = plan.model.trust_remote_code
    model = load_whole(
        AutoModelForCausalLM, plan.weights.name_or_path, dtype=torch.bfloat16, trust_remote_code=trust
    ).eval()
    torch.manual_seed(plan.seed)
    reader, ends = ResponseReader(tokenizer), _ends(model, tokenizer=tokenizer)
    model.generation_config = _generation(plan, ends=ends)  # in place of the model's own, which rollouts do not follow
    answers: list[FirstAnswer] = []
    for begin in range(0, len(prompts), _PROMPTS_AT_A_TIME):
        for ids in _draw(model, prompts=prompts[begin : begin + _PROMPTS_AT_A_TIME], ends=ends):
            is_cut = ids[-1] not in ends
            text = reader.text(ids, finished=not is_cut)
            answers.append(FirstAnswer(text=text, token_ids=tuple(ids), is_cut=is_cut, begun=reader.begun))
    return answers


def _ends(model: PreTrainedModel, *, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Find the tokens at which an engine ends a response."""
    named = model.generation_config.eos_token_id if model.generation_config else None
    tokens = {tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])}
    return {token for token in tokens if isinstance(token, int)}


def _generation(plan: RunPlan, *, ends: set[int]) -> GenerationConfig:
    from transformers import GenerationConfig

    return GenerationConfig(
        do_sample=True,
        temperature=plan.rollout.temperature,
        top_p=plan.rollout.top_p,
        top_k=plan.rollout.top_k,
        max_new_tokens=plan.task.max_response_tokens,
        eos_token_id=sorted(ends) or None,
        pad_token_id=min(ends, default=0),
    )


def _draw(model: PreTrainedModel, *, prompts: Sequence[Sequence[int]], ends: set[int]) -> list[list[int]]:
    """Draw the tokens of an answer to each prompt, up to the first that ends it. Prompts are padded on the left."""
    import torch

    longest, padding = max(map(len, prompts)), model.generation_config.pad_token_id
    ids_BT = torch.tensor([[padding] * (longest - len(ids)) + list(ids) for ids in prompts])
    mask_BT = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
    drawn_BT = model.generate(ids_BT, attention_mask=mask_BT)[:, longest:]
    return [_up_to_its_end(ids, ends=ends) for ids in drawn_BT.tolist()]


def _up_to_its_end(ids: list[int], *, ends: set[int]) -> list[int]:
    last = next((place for place, token in enumerate(ids) if token in ends), len(ids) - 1)
    return ids[: last + 1]


def why_not_imported(plan: RunPlan) -> str:
    """Import the rewards in a child and describe what fails; empty where nothing does."""
    return _ask_child(_Request(plan=plan))[1]


def give_rewards(
    plan: RunPlan, answers: Sequence[FirstAnswer], *, truths: Sequence[str], rows: Sequence[str]
) -> list[FirstAnswer]:
    """Give each answer its rewards, in a child. An answer that has none, because a reward failed, did not end or ended
    the child, says why.

    truths, rows: of the problem that each answers.
    """
    parts = zip(answers, truths, rows, strict=True)
    problems = tuple(_AnsweredProblem(answer=answer, truth=truth, row=row) for answer, truth, row in parts)
    outcomes, why = _ask_child(_Request(plan=plan, problems=problems))
    return [answer.replace(**outcomes.get(str(number), {"why": why})) for number, answer in enumerate(answers, start=1)]


def _ask_child(request: _Request) -> tuple[dict[str, Any], str]:
    """Return (the outcome of each answer by its number, as far as the child came; why it came no further)."""
    within_s = _IMPORT_WITHIN_S + request.plan.task.reward_timeout_s
    output = run_child("appliance.tasks.first_answers", stdin=request.model_dump_json(), within_s=within_s)
    words, doing = dict(output.words), output.words.get("doing", "the rewards")
    if "done" in words:
        return words, ""
    if output.is_late:
        return words, f"{doing}: no end after {within_s:g} s"
    return words, f"{doing}: the process ended with {output.code}: {output.printed}"


def _outcome(problem: _AnsweredProblem, *, rewards: Sequence[RewardFunction], limit_s: float) -> dict[str, Any]:
    """Return the fields of the answer that the rewards decide. limit_s: for all of them together, as in a run."""
    answer, begin_s = problem.answer, time.monotonic()
    response = Response(answer.text, problem.truth, problem.row, token_ids=answer.token_ids, begun=answer.begun)
    try:
        graded = weigh_rewards(grade(rewards, response))
    except (Exception, SystemExit) as error:  # the boundary of the user's code
        return {"why": in_words(error)}
    if graded.fault is not None:
        return {"why": graded.why}
    if (took_s := time.monotonic() - begin_s) > limit_s:
        return {"why": f"the rewards took {took_s:.0f} s, and task.reward_timeout_s is {limit_s:g}"}
    return {"reward": graded.accuracy, "rewards": dict(graded.parts)}


def sum_up(answers: Sequence[FirstAnswer], *, plan: RunPlan) -> tuple[str, list[str]]:
    """Return a sentence about all answers, and notes on what stands against learning from such answers. Rewards of
    weight 0 get no note: nothing is learned from them anyway."""
    earned = [answer.reward for answer in answers if answer.reward is not None]
    by_reward: dict[str, list[float]] = {}
    for answer in answers:
        for name, value in answer.rewards.items():
            by_reward.setdefault(name, []).append(value)
    cut, limit = sum(answer.is_cut for answer in answers), f"task.max_response_tokens, {plan.task.max_response_tokens}"
    facts = [f"{counted(len(answers), 'answer')} before any training, in BF16, otherwise drawn as rollouts are"]
    if earned:
        means = {name: _mean(values) for name, values in by_reward.items()}
        facts.append(f"reward {_mean(earned):.3g} on average{in_parts(means)}")
    if failed := len(answers) - len(earned):
        facts.append(f"{failed} without a reward")
    facts.append(f"{cut} cut at {limit}" if cut else "none cut")
    notes = []
    if cut > _CUT_FRACTION_TO_NOTE * len(answers):
        notes.append(
            "most answers were cut, and rewards judge what there is of them: raise task.max_response_tokens, or ask "
            "for shorter answers in task.system"
        )
    unweighted = {name for name, reward in plan.task.named_rewards.items() if not reward.weight}
    notes += [
        f"`{name}` gives {values[0]:g} to all {len(values)} answers: where all samples of a prompt earn the same, "
        "nothing is learned from it. Look at more answers; if it stays so, and is no penalty that is rightly 0, take "
        "other problems, or a reward that tells such answers apart"
        for name, values in by_reward.items()
        if name not in unweighted and len(values) >= _ANSWERS_TO_JUDGE and len(set(values)) == 1
    ]
    return "; ".join(facts), notes


def in_parts(rewards: Mapping[str, float]) -> str:
    """Name the value of each reward, where there are several; else an empty text."""
    parts = ", ".join(f"{name} {value:.3g}" for name, value in rewards.items())
    return f" ({parts})" if len(rewards) > 1 else ""


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def main() -> int:
    request = _Request.model_validate_json(sys.stdin.buffer.read())
    plan, say = request.plan, open_voice()
    sys.path.extend(plan.task_files.import_path)
    say("doing", "the import of the rewards")
    rewards = task_of(plan.task, files=plan.task_files).rewards()
    for number, problem in enumerate(request.problems, start=1):
        say("doing", f"the rewards of answer {number}")
        say(str(number), _outcome(problem, rewards=rewards, limit_s=plan.task.reward_timeout_s))
    say("done", True)
    os._exit(0)  # threads and exit handlers of the user's are none of ours


if __name__ == "__main__":
    sys.exit(main())
