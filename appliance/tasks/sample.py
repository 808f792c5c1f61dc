"""A few problems through their rewards before a run: `python -m appliance.tasks.sample`, a TaskPlan as JSON on stdin.

A built-in task must give the right answer, in the form that it asks for, 1 and an empty response 0. Of a task of the
user's own the truth as the response must earn more than an empty response, wherever there is a truth.

A process of its own: math-verify stops itself by signals, sympy is a second to load, and the user's code runs, which
may print, end the process or never end. It says what is being done, and at the end a Verdict.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from appliance.record.plan import RewardPlan, TaskPlan
from appliance.tasks.grading import Graded, grade, in_words, weighed
from appliance.tasks.library import is_from_hub, task_of
from appliance.tasks.rows import Problem, Source, read_file
from appliance.tasks.task import Response, Reward, Task
from appliance.tasks.user_code import UserCodeError, load_module, voice

SAMPLES, SAMPLES_OF_OWN = 8, 3
_SHOWN = 60  # characters of a truth

Tell = Callable[[str], None]  # what is being done


@dataclass(frozen=True)
class Verdict:
    sampled: int
    wrong: int = 0
    """How many of the sampled problems have wrong rewards."""
    first: str = ""
    """What is wrong with the first of them."""
    failure: str = ""
    """Why there are no rewards at all, in words that name the file; empty where there are."""
    remedy: str = ""
    """Against it, where a reward has one of its own."""
    doubt: str = ""
    """What is odd about them."""


def judge_sample(plan: TaskPlan, *, tell: Tell = lambda _: None) -> Verdict:
    """Of the first problems of the file, of the hub's that a run has made, or of the task's own. Runs the user's
    rewards."""
    task, count = task_of(plan), SAMPLES if plan.own is None else SAMPLES_OF_OWN
    if is_from_hub(plan):
        problems = _prepared(plan, task=task, count=count)
    else:
        problems = task.first_problems(count, file=plan.train_file, difficulty=plan.difficulty, seed=plan.seed)
    if plan.own is None:
        rewards = task.rewards()
        wrong = [each for problem in problems if (each := _wrong(problem, task=task, rewards=rewards))]
        return Verdict(len(problems), len(wrong), first=next(iter(wrong), ""))
    files = ", ".join(dict.fromkeys(each.file for each in plan.own.rewards if each.file)) or "the rewards"
    tell(f"the import of {files}")
    try:
        rewards = task.rewards()
    except UserCodeError as error:
        return Verdict(len(problems), failure=str(error), remedy=error.remedy)
    except (Exception, SystemExit) as error:  # the boundary of the user's code
        failure = f"the import of {files} failed: {in_words(error)}"
        return Verdict(len(problems), failure=failure, remedy="mend the file, or install what it imports")
    if plan.tools:
        rewards = [replace(each, value=_with_messages(each.value, task=task)) for each in rewards]
    verdict = _judge_own(problems, task=task, rewards=rewards, tell=tell)
    takers = [each.name for each in plan.own.rewards if each.file and _takes_truth(each)]
    if problems and takers and not (verdict.failure or verdict.wrong or any(each.truth for each in problems)):
        doubt = f"`{takers[0]}` takes a `truth`, and the rows have none: task.truth names its field"
        return Verdict(len(problems), doubt=doubt)
    return verdict


def _with_messages(value: Callable[[Response], object], *, task: Task) -> Callable[[Response], object]:
    """As a run with tools asks: here the response is all that was said."""
    assert task.source is not None, "a task of the user's own reads its problems"
    parse = task.source.parse

    def of_one_turn(response: Response) -> object:
        problem = parse(json.loads(response.row))
        assert isinstance(problem, Problem), "a row that became a problem"
        return value(replace(response, messages=(*problem.messages, ("assistant", response.text))))

    return of_one_turn


def _takes_truth(reward: RewardPlan) -> bool:
    """Whether it cannot be called without."""
    takes = inspect.signature(getattr(load_module(reward.file), reward.function)).parameters
    return "truth" in takes and takes["truth"].default is inspect.Parameter.empty


def _prepared(plan: TaskPlan, *, task: Task, count: int) -> list[Problem]:
    """The first ones that a run has made of the hub's rows; none where there are none yet, or of a built-in task."""
    if plan.own is None or not os.path.isfile(plan.train_parquet):
        return []
    assert task.source is not None, "a task of the user's own reads its problems"
    parse = task.source.parse
    made = Source(lambda row: parse(json.loads(row["extra_info"]["row"])), hint=task.source.hint, knows_verl=True)
    return read_file(plan.train_parquet, source=made, most_rows=count).problems


def _judge_own(problems: Sequence[Problem], *, task: Task, rewards: Sequence[Reward], tell: Tell) -> Verdict:
    wrong = []
    for number, problem in enumerate(problems, start=1):
        earned = []
        for what, text in ((f"the truth of row {number}", problem.truth), ("an empty response", "")):
            graded = _graded_by_each(text, what, problem, rewards=rewards, tell=tell)
            if isinstance(graded, Verdict):
                return graded
            earned.append(graded.accuracy)
        judges = [each for each in rewards if each.may_read_truth]
        if not problem.truth or not judges or earned[0] > earned[1]:
            continue
        right = -math.inf
        for text in task.answers(problem.truth):
            tell(f"the rewards on the truth of row {number}, marked as an answer")
            right = max(right, _earned(text, problem, rewards=judges))
        nothing = _graded("", problem, rewards=judges).accuracy
        if right <= nothing:
            earns = f"earns {right:g}, an empty response {nothing:g}"
            wrong.append(f"the truth `{problem.truth[:_SHOWN]}` as the response {earns}")
    return Verdict(len(problems), len(wrong), first=next(iter(wrong), ""))


def _earned(text: str, problem: Problem, *, rewards: Sequence[Reward]) -> float:
    """Nothing where a reward raises: the form is not the one that it wants."""
    try:
        return _graded(text, problem, rewards=rewards).accuracy
    except (Exception, SystemExit):  # the boundary of the user's code
        return -math.inf


def _graded_by_each(
    text: str, what: str, problem: Problem, *, rewards: Sequence[Reward], tell: Tell
) -> Graded | Verdict:
    """The grade of all, or what is wrong with the first reward that gives none."""
    response = Response(text, problem.truth, problem.row, token_ids=tuple(text.encode()))
    values, places = [], [each.place or f"the reward `{each.name}`" for each in rewards]
    for reward, place in zip(rewards, places, strict=True):
        tell(f"{place} on {what}")
        try:
            values += grade((reward,), response)
            graded = weighed(values[-1:])
        except (Exception, SystemExit) as error:  # the boundary of the user's code
            return Verdict(0, failure=f"{place} failed on {what}: {in_words(error)}", remedy=reward.remedy)
        if graded.fault is not None and values[-1][2] is not None:
            return Verdict(0, failure=f"{place} on {what}: {graded.why}")
    graded = weighed(values)
    return Verdict(0, failure=f"{', '.join(places)}: {graded.why} to {what}") if graded.fault is not None else graded


def _wrong(problem: Problem, *, task: Task, rewards: Sequence[Reward]) -> str:
    """Of a built-in task, whose grades are 0..1; empty where nothing is."""
    right, empty = _best_grade(problem, task=task, rewards=rewards), _graded("", problem, rewards=rewards)
    if right.why or right.accuracy != 1.0:
        return f"the right answer `{problem.truth[:_SHOWN]}` has {right.why or f'{right.accuracy:g}'}, not 1"
    return f"an empty response has {empty.why or empty.accuracy}, not 0" if empty.why or empty.accuracy else ""


def _graded(text: str, problem: Problem, *, rewards: Sequence[Reward]) -> Graded:
    return weighed(grade(rewards, Response(text, problem.truth, problem.row, token_ids=tuple(text.encode()))))


def _best_grade(problem: Problem, *, task: Task, rewards: Sequence[Reward]) -> Graded:
    """Of the forms in which a right answer may come; the first one's where none has 1."""
    graded = (_graded(text, problem, rewards=rewards) for text in task.answers(problem.truth))
    first = next(graded)
    return first if first.accuracy == 1.0 else next((each for each in graded if each.accuracy == 1.0), first)


def main() -> int:
    plan = TaskPlan.model_validate_json(sys.stdin.buffer.read())
    say = voice()
    sys.path.extend(plan.own.import_path if plan.own is not None else ())
    say("verdict", asdict(judge_sample(plan, tell=lambda what: say("doing", what))))
    os._exit(0)  # threads and exit handlers of the user's are none of ours


if __name__ == "__main__":
    sys.exit(main())
