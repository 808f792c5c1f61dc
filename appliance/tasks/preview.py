"""What the model will really read of a recipe's problems, and on request what it answers to them before any training.

`python -m appliance.tasks.preview PLAN RESULT ANSWERS`. A process of its own: it needs the model's tokenizer, and a
data set may have to be fetched."""

from __future__ import annotations

import functools
import os.path
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.errors import EngineError, RecipeError, first_line
from appliance.files import Frozen, write_whole
from appliance.finding import fault
from appliance.record.events import exit_code_of
from appliance.record.plan import RunPlan, read_plan
from appliance.tasks.first_answers import FirstAnswer, draw_answers
from appliance.tasks.library import splits_of
from appliance.tasks.prepare import prompt_ids, prompt_limit
from appliance.tasks.response_text import begun_by_prompt
from appliance.tasks.templates import conversations_of, examine, long_truths
from appliance.tasks.tokenizer import load_tokenizer
from appliance.tasks.tools import read_tools, tools_request
from appliance.terms.clock import clock_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBLEMS = 2


class PreviewedProblem(Frozen):
    prompt: str
    """Prompt as the chat template renders it, with special tokens."""
    tokens: int
    truth: str
    """Truth that a reward compares with; empty where there is none."""
    row: str
    """JSON object that a reward gets; empty where there is none."""
    answer: FirstAnswer | None = None
    """Answer of the model before any training, where it was asked for."""


class Preview(Frozen):
    """Preview of a recipe's problems, which the child writes and the launcher reads."""

    train: int
    """Problems that are left to train on."""
    val: int
    max_prompt_tokens: int
    notes: tuple[str, ...]
    """Notes on what was left out, and why."""
    problems: tuple[PreviewedProblem, ...]
    """First problems to train on."""

    @property
    def answers(self) -> list[FirstAnswer]:
        """Answers to these problems, in their order; none where none was asked for."""
        return [problem.answer for problem in self.problems if problem.answer is not None]


def preview(plan: RunPlan, *, answers: int = 0) -> Preview:
    """Make the preview of a recipe's problems. answers: number of problems that the model, which must be here then, is
    to answer; 0: none, and two are shown. Raises as `prepare` and `draw_answers` do."""
    model = plan.weights.name_or_path
    template = model if os.path.isdir(model) else ""  # a model of the hub is read when it is here
    tokenizer = functools.cache(lambda: _tokenizer(plan))
    tools = functools.cache(lambda: read_tools(tools_request(plan, model=template)))
    limit = prompt_limit(plan, tokenizer=tokenizer, tools=tools)
    splits, most = splits_of(plan.task, files=plan.task_files, limit=limit), plan.task.max_prompt_tokens
    problems = splits.train[: answers or _PROBLEMS]
    prompts = [
        prompt_ids(problem, tokenizer=tokenizer(), tools=tools(), date=plan.task_files.date)[-most:]
        for problem in problems
    ]
    drawn = draw_answers(plan, prompts=prompts, tokenizer=tokenizer()) if answers else [None] * len(prompts)
    shown = [
        PreviewedProblem(
            prompt=tokenizer().decode(ids),
            tokens=len(ids),
            truth=problem.truth,
            row=problem.row,
            answer=answer,
        )
        for problem, ids, answer in zip(problems, prompts, drawn, strict=True)
    ]
    return Preview(
        train=len(splits.train),
        val=sum(map(len, splits.validations.values())),
        max_prompt_tokens=most,
        notes=(*splits.notes, *(limit.notes if limit else ()), *_template_notes(plan, tokenizer=tokenizer())),
        problems=tuple(shown),
    )


def _template_notes(plan: RunPlan, *, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """List what is odd about the chat template, and right answers that no response can hold. Raises RecipeError where
    the template loses what one of the tried messages says."""
    date = plan.task_files.date
    facts = examine(tokenizer, conversations=conversations_of(plan), date=date)
    if facts.problem:
        raise RecipeError([fault(("model.path",), facts.problem, facts.remedy)])
    notes = [facts.no_generation_prompt] if facts.begin_of_answer else []
    if too_long := long_truths(plan, tokenizer=tokenizer):
        notes.append(too_long)
    if clock_of(tokenizer, date=date):
        notes.append(f"the chat template asks for the date: {date}; a run gives it the day on which it began")
    if begun := " ".join(begun_by_prompt(tokenizer).split()):
        notes.append(f"prompts end with `{begun}`: the text that rewards read begins with it")
    return notes


def _tokenizer(plan: RunPlan) -> PreTrainedTokenizerBase:
    try:
        return load_tokenizer(plan)
    except (OSError, ValueError) as error:
        why = first_line(error)
        hint = "look at model.path; without a network give a folder"
        raise EngineError(f"the tokenizer of {plan.weights.identity} cannot be had: {why}", hint=hint) from error


def main(arguments: list[str]) -> int:
    plan = read_plan(Path(arguments[0]))

    def work() -> None:
        write_whole(Path(arguments[1]), preview(plan, answers=int(arguments[2])).model_dump_json())

    return exit_code_of(work, run_dir=Path(plan.run_dir))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
