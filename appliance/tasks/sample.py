"""A few problems through their rewards before a run: `python -m appliance.tasks.sample`, a TaskPlan as JSON on stdin.

A built-in task must give the right answer, in the form that it asks for, 1 and an empty response 0. Of a task of the
user's own the truth as the response must earn more than an empty response, wherever there is a truth.

A process of its own: math-verify stops itself by signals, sympy is a second to load, and the user's code runs, which
may print, end the process or never end. So each line of what was stdout at the start is a word of ours, as JSON: what
is being done, and at the end a Verdict. What anybody else prints goes to stderr.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from appliance.record.plan import TaskPlan
from appliance.tasks.grading import Graded, grade, in_words, weighed
from appliance.tasks.library import is_from_hub, task_of
from appliance.tasks.rows import Problem
from appliance.tasks.task import Response, Reward, Task
from appliance.tasks.user_code import UserCodeError

SAMPLES, SAMPLES_OF_OWN = 8, 3
_SHOWN = 60  # characters of a truth

Tell = Callable[[str], None]  # what is being done


@dataclass(frozen=True)
class Verdict:
    """wrong: how many of the sampled problems have wrong rewards.  first: what is wrong with the first of them.

    failure: why there are no rewards at all, in words that name the file; empty where there are.
    """

    sampled: int
    wrong: int = 0
    first: str = ""
    failure: str = ""


def judge_sample(plan: TaskPlan, *, tell: Tell = lambda _: None) -> Verdict:
    """Of the first problems of the file, or of the task's own. Runs the user's rewards."""
    task, count = task_of(plan), SAMPLES if plan.own is None else SAMPLES_OF_OWN
    problems: list[Problem] = []  # of the hub's none are here yet
    if not is_from_hub(plan):
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
        return Verdict(len(problems), failure=str(error))
    except (Exception, SystemExit) as error:  # the boundary of the user's code
        return Verdict(len(problems), failure=f"the import of {files} failed: {in_words(error)}")
    return _judge_own(problems, task=task, rewards=rewards, tell=tell)


def _judge_own(problems: Sequence[Problem], *, task: Task, rewards: Sequence[Reward], tell: Tell) -> Verdict:
    wrong = []
    for number, problem in enumerate(problems, start=1):
        earned = []
        for what, text in ((f"the truth of row {number}", problem.truth), ("an empty response", "")):
            graded = _graded_by_each(text, what, problem, rewards=rewards, tell=tell)
            if isinstance(graded, str):
                return Verdict(len(problems), failure=graded)
            earned.append(graded.accuracy)
        judges = [each for each in rewards if each.may_read_truth]
        if not problem.truth or not judges or earned[0] > earned[1]:
            continue
        tell(f"the rewards on the truth of row {number}, marked as an answer")
        right = max(_earned(text, problem, rewards=judges) for text in task.answers(problem.truth))
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


def _graded_by_each(text: str, what: str, problem: Problem, *, rewards: Sequence[Reward], tell: Tell) -> Graded | str:
    """The grade of all, or what is wrong with the first reward that gives none."""
    response = Response(text, problem.truth, problem.row, token_ids=tuple(text.encode()))
    values = []
    for reward in rewards:
        place = reward.place or f"the reward `{reward.name}`"
        tell(f"{place} on {what}")
        try:
            values += grade((reward,), response)
        except (Exception, SystemExit) as error:  # the boundary of the user's code
            return f"{place} failed on {what}: {in_words(error)}"
        graded = weighed(values[-1:])
        if graded.fault is not None and values[-1][2] is not None:
            return f"{place} on {what}: {graded.why}"
    graded = weighed(values)
    return f"{graded.why} to {what}" if graded.fault is not None else graded


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
    plan, own = TaskPlan.model_validate_json(sys.stdin.read()), os.getpid()
    ours = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.path.extend(plan.own.import_path if plan.own is not None else ())

    def say(kind: str, value: object) -> None:
        if os.getpid() != own:
            os._exit(0)  # a fork that the user's code left behind
        ours.write(f"{json.dumps({kind: value})}\n")
        ours.flush()

    say("verdict", asdict(judge_sample(plan, tell=lambda what: say("doing", what))))
    os._exit(0)  # threads and exit handlers of the user's are none of ours


if __name__ == "__main__":
    sys.exit(main())
