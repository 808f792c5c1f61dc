"""A few problems through their rewards before a run: `python -m appliance.tasks.sample`, a plan as JSON on stdin.

A built-in task must give the right answer, in the form that it asks for, 1, an empty response 0, and a wrong answer
less than 1. Of a task of the user's own a right answer must earn more than an empty response and more than a wrong
one, where the rewards compare with a truth that is an answer. Rewards of ours must read it in each usual mark.

It runs in its own process: math-verify stops itself by signals, sympy is a second to load, and the user's code runs,
which may print, end the process or never end. It says what is being done, and at the end a SampleVerdict.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from appliance.record.plan import RunPlan, TaskFiles
from appliance.settings import sections
from appliance.tasks.graders import is_single_number
from appliance.tasks.grading import Graded, grade, in_words, weigh_rewards
from appliance.tasks.library import is_from_hub, task_of
from appliance.tasks.rewards import BUILT_IN
from appliance.tasks.rows import Problem, Source, read_file
from appliance.tasks.task import Response, RewardFunction, TaskDefinition
from appliance.tasks.trial_answers import first_right, in_marks, is_bare, near_misses, wrong_answers
from appliance.tasks.user_code import UserCodeError, load_module, open_voice
from appliance.terms.counts import counted

SAMPLES, SAMPLES_OF_OWN = 8, 3
_READ_FOR_TRUTHS = 1000  # rows, whose truths are to be single numbers, or not empty
_READ_FOR_OTHERS = 200  # rows, for a right answer that is wrong for a sampled one
_READ_IN_EVERY_MARK = ("math", "number", "choice")
_OF_ITS_OWN = ("code", "judge")  # what is right they know without the truth as an answer
_OF_NO_TRUTH = {"response", "messages", "prompts", "completions", "completion_ids", "data_source", "solution_str"}
_SHOWN = 60  # characters of a truth
# Responses that differ in length, language and form: a reward that gives them all the same may tell no samples apart.
_UNLIKE = (
    "",
    "yes",
    "The answer is 42.",
    "<think>6 * 7</think>\n<answer>\n- one\n- two\n</answer>",
    "```python\nprint(42)\n```",
    '{"answer": 42}',
    "答案是四十二。",
    "so " * 2000,
)

_REMEDY_OF_A_CONSTANT = (
    "mend the function: where all samples of a prompt earn the same, nothing is learned; leave it if it judges what "
    "was not tried"
)

Tell = Callable[[str], None]  # what is being done


@dataclass(frozen=True)
class SampleVerdict:
    sampled: int
    wrong: int = 0
    """Number of sampled problems whose rewards are wrong."""
    first: str = ""
    """Fault of the first problem whose rewards are wrong."""
    failure: str = ""
    """Reason why there are no rewards at all, in words that name the file; empty where there are."""
    remedy: str = ""
    """Remedy for the failure or the doubt, where it has its own."""
    doubt: str = ""
    """Doubt about the rewards."""
    unread: int = 0
    """Number of sampled problems that have right answers that a reward of ours does not read in a usual mark."""
    first_unread: str = ""
    """First right answer that is not read."""
    easy: int = 0
    """Number of sampled problems that have wrong answers that earn as much as the right one."""
    first_easy: str = ""
    """First wrong answer that earns as much."""


def judge_sample(settings: sections.Task, *, files: TaskFiles, tell: Tell = lambda _: None) -> SampleVerdict:
    """Judge the rewards of the first problems of the file, of the hub's that a run has made, or of the task's own. Runs
    the user's rewards."""
    task, count = task_of(settings, files=files), SAMPLES_OF_OWN if settings.is_own else SAMPLES
    first_problems = functools.partial(_first_problems, settings, files=files, task=task)
    problems = first_problems(count=count)
    if not settings.is_own:
        rewards = task.rewards()
        truths = [problem.truth for problem in problems]
        found = (_wrong(problem, task=task, rewards=rewards, truths=truths) for problem in problems)
        wrong = list(filter(None, found))
        return SampleVerdict(len(problems), len(wrong), first=next(iter(wrong), ""))
    imported = ", ".join(dict.fromkeys(reward.file for reward in settings.rewards if reward.file)) or "the rewards"
    tell(f"the import of {imported}")
    try:
        rewards = task.rewards()
    except UserCodeError as error:
        return SampleVerdict(len(problems), failure=str(error), remedy=error.remedy)
    except (Exception, SystemExit) as error:  # the boundary of the user's code
        failure = f"the import of {imported} failed: {in_words(error)}"
        return SampleVerdict(len(problems), failure=failure, remedy="mend the file, or install what it imports")
    if settings.tools:
        rewards = [replace(each, value=_with_messages(each.value, task=task)) for each in rewards]
    others = [other.truth for other in first_problems(count=_READ_FOR_OTHERS)]
    verdict = _judge_own(problems, settings=settings, task=task, rewards=rewards, truths=others, tell=tell)
    takers = [name for name, reward in settings.named_rewards.items() if reward.file and _takes_truth(reward)]
    if verdict.failure or verdict.wrong:
        return verdict
    if problems and takers and not any(each.truth for each in problems):
        doubt = f"`{takers[0]}` takes a `truth`, and the rows have none: set task.truth to its field"
        return replace(verdict, doubt=doubt)
    if constant := _never_differs(problems, settings=settings, rewards=rewards, tell=tell):
        return replace(verdict, doubt=constant, remedy=_REMEDY_OF_A_CONSTANT)
    if silent := _never_judges(problems, settings=settings, rewards=rewards):
        return replace(verdict, doubt=silent, remedy="return a number; leave it if the function judges other rows")
    doubt = _empty_truths(settings, rewards=rewards, first_problems=first_problems)
    return replace(verdict, doubt=doubt or _no_numbers(settings, first_problems=first_problems))


def _never_judges(problems: Sequence[Problem], *, settings: sections.Task, rewards: Sequence[RewardFunction]) -> str:
    """Describe the first function of the user's that gives None to each truth and to an empty response; empty where
    there is none. None says that a reward does not apply to a row, and is also what a function without `return` gives.
    """
    for reward, planned in zip(rewards, settings.rewards, strict=True):
        texts = [(problem, text) for problem in problems for text in (problem.truth, "")] if planned.file else []
        if texts and all(_gives_none(reward, text, problem) for problem, text in texts):
            rows = "the sampled row" if len(problems) == 1 else f"each of the {len(problems)} sampled rows"
            meaning = "None means that a reward does not judge a row, and a function without `return` gives it"
            return f"`{reward.name}` returned None to {rows}: {meaning}"
    return ""


def _never_differs(
    problems: Sequence[Problem], *, settings: sections.Task, rewards: Sequence[RewardFunction], tell: Tell
) -> str:
    """Say that functions of the user's, which read no truth, give the same reward above 0 to all responses of
    `_UNLIKE` to the first problem; empty where they do not, or other rewards count. A reward of 0 may be waiting for a
    form, and one that looks at what tools said gets nothing of it here."""
    weighty = [(reward, planned) for reward, planned in zip(rewards, settings.rewards, strict=True) if planned.weight]
    if settings.tools or not (problems and weighty):
        return ""
    if any(not planned.file or _reads_truth(planned) for _, planned in weighty):
        return ""
    counting = [reward for reward, _ in weighty]
    earned = math.nan
    for number, text in enumerate(_UNLIKE, start=1):
        tell(f"the rewards on the unlike response {number} of {len(_UNLIKE)} to row 1")  # each may take its time
        value = _earned(text, problems[0], rewards=counting)
        if value <= 0 or (number > 1 and value != earned):
            return ""
        earned = value
    names = " and ".join(f"`{reward.name}`" for reward in counting)
    return f"each of {len(_UNLIKE)} very different responses to row 1, an empty one too, earns {earned:g} from {names}"


def _gives_none(reward: RewardFunction, text: str, problem: Problem) -> bool:
    try:
        ((_, _, value),) = grade((reward,), _response(text, problem))
    except (Exception, SystemExit):  # the boundary of the user's code
        return False
    return value is None


def _empty_truths(
    settings: sections.Task, *, rewards: Sequence[RewardFunction], first_problems: Callable[..., list[Problem]]
) -> str:
    """Say in which rows the truth is empty, which any response contains, and a function of the user's judges them;
    empty where there is none. Rewards of ours refuse such a row."""
    problems = first_problems(count=_READ_FOR_TRUTHS)
    empty = [(place, problem) for place, problem in enumerate(problems, start=1) if not problem.truth.strip()]
    pairs = zip(rewards, settings.rewards, strict=True)
    takers = [reward for reward, planned in pairs if planned.file and _takes_truth(planned)]
    for reward in takers if empty else ():
        place, problem = empty[0]
        if not _gives_none(reward, "", problem):
            share = f"{len(empty)} of {counted(len(problems), 'row')}"
            return f"in {share} the truth is empty, and `{reward.name}` judges them: row {place}"
    return ""


def _no_numbers(settings: sections.Task, *, first_problems: Callable[..., list[Problem]]) -> str:
    """Say what is odd about truths for the reward `number`, which compares their numbers alone; empty where nothing is,
    or another reward judges."""
    names = [name for name, reward in settings.named_rewards.items() if reward.name == "number"]
    if not names:
        return ""
    problems = first_problems(count=_READ_FOR_TRUTHS)
    places = [place for place, problem in enumerate(problems, start=1) if not is_single_number(problem.truth)]
    if not places:
        return ""
    shown = problems[places[0] - 1].truth[:_SHOWN]
    share = f"{len(places)} of {counted(len(problems), 'row')}"
    compares = f"`{names[0]}` compares its numbers and nothing else"
    return f"in {share} the truth is no single number, and {compares}: row {places[0]}: `{shown}`"


def _with_messages(value: Callable[[Response], object], *, task: TaskDefinition) -> Callable[[Response], object]:
    """Call a reward as a run with tools does: the response is the whole conversation."""
    assert task.source is not None, "a task of the user's own reads its problems"
    parse = task.source.parse

    def of_one_turn(response: Response) -> object:
        problem = parse(json.loads(response.row))
        assert isinstance(problem, Problem), "a row that became a problem"
        return value(replace(response, messages=(*problem.messages, ("assistant", response.text))))

    return of_one_turn


def _takes_truth(reward: sections.Reward) -> bool:
    """Tell whether it cannot be called without."""
    takes = inspect.signature(getattr(load_module(reward.file), reward.function)).parameters
    return "truth" in takes and takes["truth"].default is inspect.Parameter.empty


def _first_problems(settings: sections.Task, *, files: TaskFiles, task: TaskDefinition, count: int) -> list[Problem]:
    """Return the first problems of the file or of the task; of the hub's rows those that a run has made, so none before
    it has, and none of a built-in task."""
    if not is_from_hub(settings):
        file, seed = settings.train_file or "", settings.seed
        return task.first_problems(count, file=file, difficulty=settings.difficulty, seed=seed)
    if not settings.is_own or not os.path.isfile(files.train_parquet):
        return []
    assert task.source is not None, "a task of the user's own reads its problems"
    parse = task.source.parse
    made = Source(lambda row: parse(json.loads(row["extra_info"]["row"])), hint=task.source.hint, knows_verl=True)
    return read_file(files.train_parquet, source=made, most_rows=count).problems


def _judge_own(
    problems: Sequence[Problem],
    *,
    settings: sections.Task,
    task: TaskDefinition,
    rewards: Sequence[RewardFunction],
    truths: Sequence[str],
    tell: Tell,
) -> SampleVerdict:
    """Judge the rewards of a task of the user's own. truths: of these and other rows."""
    wrong, unread, easy = [], [], []
    judges = [reward for reward in rewards if reward.may_read_truth]
    ours = [
        reward
        for reward, planned in zip(rewards, settings.rewards, strict=True)
        if not planned.file and planned.function in _READ_IN_EVERY_MARK
    ]
    weighty = [planned for planned in settings.rewards if planned.weight]
    comparing = [planned for planned in weighty if _reads_truth(planned)]
    # What tests and a judge give to a right answer, which the other rewards may only trim, is not tried here.
    is_tried = bool(comparing) and not any(not planned.file and planned.function in _OF_ITS_OWN for planned in weighty)
    # A function of the user's may mean to take the nearest wrong answer, such as one within a tolerance.
    is_strict = not any(planned.file for planned in comparing)
    for number, problem in enumerate(problems, start=1):
        for title, text in ((f"the truth of row {number}", problem.truth), ("an empty response", "")):
            graded = _graded_by_each(text, title, problem, rewards=rewards, tell=tell)
            if isinstance(graded, SampleVerdict):
                return graded
        if not problem.truth.strip():
            continue
        if is_tried and _is_answer(problem.truth, is_strict=is_strict):
            marked = functools.partial(tell, f"the rewards on the truth of row {number}, marked as an answer")
            ask = functools.partial(_earned, problem=problem, rewards=judges)
            forms, nothing = list(task.answers(problem.truth)), ask("")
            place, right = first_right(forms, ask=ask, above=nothing, before_marked=marked)
            if right <= nothing:
                if nothing > -math.inf:  # else no reward applies to this row
                    tried = f"the truth `{problem.truth[:_SHOWN]}`, bare and in {counted(len(forms) - 1, 'mark')},"
                    earns = "nothing" if right == -math.inf else f"{right:g} at most"
                    wrong.append(f"row {number}: {tried} earns {earns}, an empty response {nothing:g}")
                continue
            tell(f"the rewards on wrong answers to row {number}")
            nearest = () if is_strict else near_misses(problem.truth)[:1]
            answers = [answer for answer in wrong_answers(problem.truth, truths) if answer not in nearest]
            earners = (answer for answer in answers if ask(list(task.answers(answer))[place]) >= right)
            if answer := next(earners, ""):
                shown_answer, shown_truth = _where_they_differ(answer, problem.truth)
                easy.append(f"row {number}: `{shown_answer}` earns as much as the truth `{shown_truth}`")
        if text := _unread_mark(problem, rewards=ours):
            unread.append(f"row {number}: `{text}` earns 0")
    return SampleVerdict(
        len(problems),
        len(wrong),
        first=next(iter(wrong), ""),
        unread=len(unread),
        first_unread=next(iter(unread), ""),
        easy=len(easy),
        first_easy=next(iter(easy), ""),
    )


def _is_answer(truth: str, *, is_strict: bool) -> bool:
    """Tell whether a response may be the truth itself. An object, such as Countdown's, is what an answer is checked
    with, and so may be a list: a function of the user's knows. is_strict: no such function compares."""
    if not truth.strip():
        return False
    try:
        value = json.loads(truth)
    except (ValueError, RecursionError):
        return True
    if isinstance(value, list):
        return all(isinstance(member, str) or (is_strict and not isinstance(member, list | dict)) for member in value)
    return not isinstance(value, dict)


def _where_they_differ(left: str, right: str) -> tuple[str, str]:
    """Return both, cut to what is shown: where that is not all, from a little before the first character that
    differs."""
    left, right = " ".join(left.split()), " ".join(right.split())
    if max(len(left), len(right)) <= _SHOWN:
        return left, right
    pairs = enumerate(zip(left, right, strict=False))
    first = next((place for place, (a, b) in pairs if a != b), min(len(left), len(right)))
    start = max(0, first - _SHOWN // 3)
    before = "..." if start else ""
    return f"{before}{left[start : start + _SHOWN]}", f"{before}{right[start : start + _SHOWN]}"


def _unread_mark(problem: Problem, *, rewards: Sequence[RewardFunction]) -> str:
    """Return a right answer in a usual mark that one of the rewards gives nothing; empty where there is none."""
    if is_bare(problem.truth):
        for text in in_marks(problem.truth):
            if any(_earned(text, problem, rewards=[replace(reward, weight=1.0)]) <= 0 for reward in rewards):
                return " ".join(text.split())
    return ""


def _reads_truth(reward: sections.Reward) -> bool:
    """Tell whether it may compare a response with the truth, by what it takes."""
    if not reward.file:
        built_in = BUILT_IN[reward.function]
        return built_in.reads is not None and built_in.may_read_truth
    takes = inspect.signature(getattr(load_module(reward.file), reward.function)).parameters.values()
    names = {each.name for each in takes if each.kind is not each.VAR_KEYWORD}
    return any(each.kind is each.VAR_KEYWORD for each in takes) or bool(names - _OF_NO_TRUTH)


def _earned(text: str, problem: Problem, *, rewards: Sequence[RewardFunction]) -> float:
    """Less than any number where a reward raises or none applies: the form is not the one that it wants."""
    try:
        graded = _graded(text, problem, rewards=rewards)
    except (Exception, SystemExit):  # the boundary of the user's code
        return -math.inf
    return graded.accuracy if graded.fault is None else -math.inf


def _graded_by_each(
    text: str, answer_kind: str, problem: Problem, *, rewards: Sequence[RewardFunction], tell: Tell
) -> Graded | SampleVerdict:
    """Return the grade of all, or what is wrong with the first reward that gives none."""
    response = _response(text, problem)
    values, places = [], [each.place or f"the reward `{each.name}`" for each in rewards]
    for reward, place in zip(rewards, places, strict=True):
        tell(f"{place} on {answer_kind}")
        try:
            values += grade((reward,), response)
            graded = weigh_rewards(values[-1:])
        except (Exception, SystemExit) as error:  # the boundary of the user's code
            return SampleVerdict(0, failure=f"{place} failed on {answer_kind}: {in_words(error)}", remedy=reward.remedy)
        if graded.fault is not None and values[-1][2] is not None:
            return SampleVerdict(0, failure=f"{place} on {answer_kind}: {graded.why}")
    graded = weigh_rewards(values)
    if graded.fault is None:
        return graded
    if any(value is not None for _, _, value in values):
        return SampleVerdict(0, failure=f"{', '.join(places)} on {answer_kind}: {graded.why}")
    failure = f"{', '.join(places)} returned None to {answer_kind}, so no reward applies to it"
    return SampleVerdict(0, failure=failure, remedy="return a number: a function without `return` gives None")


def _wrong(problem: Problem, *, task: TaskDefinition, rewards: Sequence[RewardFunction], truths: Sequence[str]) -> str:
    """Describe what is wrong with a built-in task, whose grades are 0..1; empty where nothing is. truths: of other
    rows."""
    right, empty = _best_grade(problem, task=task, rewards=rewards), _graded("", problem, rewards=rewards)
    if right.why or right.accuracy != 1.0:
        return f"the right answer `{problem.truth[:_SHOWN]}` has {right.why or f'{right.accuracy:g}'}, not 1"
    if empty.why or empty.accuracy:
        return f"an empty response has {empty.why or empty.accuracy}, not 0"
    ask = functools.partial(_earned, problem=problem, rewards=rewards)
    place, _ = first_right(task.answers(problem.truth), ask=ask, above=0.0)
    for answer in wrong_answers(problem.truth, truths):
        if ask(list(task.answers(answer))[place]) == 1.0:
            shown_answer, shown_truth = _where_they_differ(answer, problem.truth)
            return f"`{shown_answer}` has 1, where `{shown_truth}` is right"
    return ""


def _graded(text: str, problem: Problem, *, rewards: Sequence[RewardFunction]) -> Graded:
    return weigh_rewards(grade(rewards, _response(text, problem)))


def _response(text: str, problem: Problem) -> Response:
    return Response(text, problem.truth, problem.row, token_ids=tuple(text.encode()))


def _best_grade(problem: Problem, *, task: TaskDefinition, rewards: Sequence[RewardFunction]) -> Graded:
    """Return the best grade of the forms in which a right answer may come; the first one's where none has 1."""
    graded = (_graded(text, problem, rewards=rewards) for text in task.answers(problem.truth))
    first = next(graded)
    return first if first.accuracy == 1.0 else next((each for each in graded if each.accuracy == 1.0), first)


def main() -> int:
    plan = RunPlan.model_validate_json(sys.stdin.buffer.read())
    say = open_voice()
    sys.path.extend(plan.task_files.import_path)
    verdict = judge_sample(plan.task, files=plan.task_files, tell=lambda what: say("doing", what))
    say("verdict", asdict(verdict))
    os._exit(0)  # threads and exit handlers of the user's are none of ours


if __name__ == "__main__":
    sys.exit(main())
