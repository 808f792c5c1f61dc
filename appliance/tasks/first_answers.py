"""What a model answers before any training, and what each answer earns: for `appliance data preview --answers`.

`python -m appliance.tasks.first_answers`, a RunPlan and answers as JSON on stdin, is the child that gives the rewards:
it runs the user's code, which may print, end the process or never end.
"""

from __future__ import annotations

import math
import os
import sys
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
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_TOGETHER = 16  # prompts that are answered at a time: bounds what their keys and values take
_FEWEST = 8  # answers, of which that all earn the same says something
_MANY_CUT = 0.5  # share of the answers
_STARTS_WITHIN_S = 60.0  # the child that gives the rewards, and what a grading may take longer than in a run


class FirstAnswer(Frozen):
    """An answer of the model before any training."""

    text: str
    """Text as a reward reads it."""
    token_ids: tuple[int, ...]
    is_cut: bool
    """Whether it was cut at `task.max_response_tokens`."""
    begun: str = ""
    """Part of `text` that the prompt ends with."""
    truth: str = ""
    """Truth of the problem that it answers."""
    row: str = ""
    """Row of that problem."""
    reward: float | None = None
    """Weighted sum of the rewards; None where it has none."""
    rewards: dict[str, float] = Field(default_factory=dict)
    """Value of each reward that applies, without its weight."""
    why: str = ""
    """Reason why it has no reward, else empty."""


class _Answers(Frozen):
    """What the child that gives the rewards reads."""

    plan: RunPlan
    answers: tuple[FirstAnswer, ...]


def draw_answers(
    plan: RunPlan, *, prompts: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase
) -> list[FirstAnswer]:
    """Draw one answer to each prompt with the recipe's temperature, `top_p` and `top_k`, by the plan's model in BF16,
    which must be here whole. The same seed gives the same answers.

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
    answers: list[FirstAnswer] = []
    for begin in range(0, len(prompts), _TOGETHER):
        for ids in _draw(model, prompts=prompts[begin : begin + _TOGETHER], ends=ends, plan=plan):
            is_cut = ids[-1] not in ends
            text = reader.text(ids, finished=not is_cut)
            answers.append(FirstAnswer(text=text, token_ids=tuple(ids), is_cut=is_cut, begun=reader.begun))
    return answers


def _ends(model: PreTrainedModel, *, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Find the tokens at which an engine ends a response."""
    named = model.generation_config.eos_token_id if model.generation_config else None
    tokens = {tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])}
    return {token for token in tokens if isinstance(token, int)}


def _draw(
    model: PreTrainedModel, *, prompts: Sequence[Sequence[int]], ends: set[int], plan: RunPlan
) -> list[list[int]]:
    """Draw the tokens of an answer to each prompt, up to the first that ends it. Prompts are padded on the left."""
    import torch

    rollout, longest = plan.rollout, max(map(len, prompts))
    padding = min(ends, default=0)
    ids_BT = torch.tensor([[padding] * (longest - len(ids)) + list(ids) for ids in prompts])
    mask_BT = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
    drawn_BT = model.generate(
        ids_BT,
        attention_mask=mask_BT,
        do_sample=True,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_new_tokens=plan.task.max_response_tokens,
        eos_token_id=sorted(ends) or None,
        pad_token_id=padding,
    )[:, longest:]
    return [_up_to_its_end(ids, ends=ends) for ids in drawn_BT.tolist()]


def _up_to_its_end(ids: list[int], *, ends: set[int]) -> list[int]:
    last = next((place for place, token in enumerate(ids) if token in ends), len(ids) - 1)
    return ids[: last + 1]


def give_rewards(plan: RunPlan, answers: Sequence[FirstAnswer]) -> list[FirstAnswer]:
    """Give each answer its reward, in a child. Where that is late or ends, no answer has one, and each says why."""
    request = _Answers(plan=plan, answers=tuple(answers))
    within_s = _STARTS_WITHIN_S + plan.task.reward_timeout_s
    output = run_child("appliance.tasks.first_answers", stdin=request.model_dump_json(), within_s=within_s)
    doing = output.words.get("doing", "the rewards")
    if output.is_late:
        why = f"{doing}: no end after {within_s:g} s"
    elif "rewards" not in output.words:
        why = f"{doing}: the process ended with {output.code}: {output.printed}"
    else:
        outcomes = zip(answers, output.words["rewards"], strict=True)
        return [answer.replace(**outcome) for answer, outcome in outcomes]
    return [answer.replace(why=why) for answer in answers]


def _outcome(answer: FirstAnswer, *, rewards: Sequence[RewardFunction]) -> dict[str, Any]:
    """Return the fields of the answer that the rewards decide."""
    response = Response(answer.text, answer.truth, answer.row, token_ids=answer.token_ids, begun=answer.begun)
    try:
        graded = weigh_rewards(grade(rewards, response))
    except (Exception, SystemExit) as error:  # the boundary of the user's code
        return {"why": in_words(error)}
    if graded.fault is not None:
        return {"why": graded.why}
    return {"reward": graded.accuracy, "rewards": dict(graded.parts)}


def sum_up(answers: Sequence[FirstAnswer], *, plan: RunPlan) -> tuple[str, list[str]]:
    """Return a sentence about all answers, and notes on what stands against learning from such answers."""
    earned = [answer.reward for answer in answers if answer.reward is not None]
    by_reward: dict[str, list[float]] = {}
    for answer in answers:
        for name, value in answer.rewards.items():
            by_reward.setdefault(name, []).append(value)
    cut, limit = sum(answer.is_cut for answer in answers), f"task.max_response_tokens, {plan.task.max_response_tokens}"
    facts = [f"{counted(len(answers), 'answer')} before any training, drawn as rollouts are"]
    if earned:
        means = {name: _mean(values) for name, values in by_reward.items()}
        facts.append(f"reward {_mean(earned):.3g} on average{in_parts(means)}")
    if failed := len(answers) - len(earned):
        facts.append(f"{failed} without a reward")
    facts.append(f"{cut} cut at {limit}" if cut else "none cut")
    notes = []
    if cut > _MANY_CUT * len(answers):
        notes.append(
            "most answers were cut, and rewards judge what there is of them: raise task.max_response_tokens, or ask "
            "for shorter answers in task.system"
        )
    notes += [_never_differs(name, values) for name, values in by_reward.items() if _are_alike(values)]
    return "; ".join(facts), notes


def _are_alike(values: Sequence[float]) -> bool:
    return len(values) >= _FEWEST and len(set(values)) == 1


def _never_differs(name: str, values: Sequence[float]) -> str:
    """Say that a reward gives the same to all answers, which are enough to say something."""
    more, other = f"--answers {4 * len(values)}", "easier" if values[0] <= 0 else "harder"
    return (
        f"`{name}` gives {values[0]:g} to all {len(values)} answers: if it does with more ({more}), nothing is learned "
        f"from it; take {other} problems, or a reward that tells such answers apart"
    )


def in_parts(rewards: Mapping[str, float]) -> str:
    """Name the value of each reward, where there are several; else an empty text."""
    parts = ", ".join(f"{name} {value:.3g}" for name, value in rewards.items())
    return f" ({parts})" if len(rewards) > 1 else ""


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def main() -> int:
    request = _Answers.model_validate_json(sys.stdin.buffer.read())
    plan, say = request.plan, open_voice()
    sys.path.extend(plan.task_files.import_path)
    say("doing", "the import of the rewards")
    rewards = task_of(plan.task, files=plan.task_files).rewards()
    outcomes = []
    for number, answer in enumerate(request.answers, start=1):
        say("doing", f"the rewards of answer {number}")
        outcomes.append(_outcome(answer, rewards=rewards))
    say("rewards", outcomes)
    os._exit(0)  # threads and exit handlers of the user's are none of ours


if __name__ == "__main__":
    sys.exit(main())
