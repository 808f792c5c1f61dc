"""What a task is: problems to learn from, and a score for a response. One file per task, built_in/<name>.py: `TASK`.
Problems come out of rows, of files or of the hub, or are made by the task: disjoint, each once, counted."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Protocol

from appliance.errors import RecipeError, first_line
from appliance.finding import Finding, fault
from appliance.hub import download_data
from appliance.record.liveness import Heartbeat
from appliance.settings import sections
from appliance.tasks.rows import Message, Problem, ProblemSet, Source, read_file, without_faults
from appliance.terms.counts import counted


class Score(Protocol):
    def __call__(self, *, response: str, truth: str) -> float:
        """Return the reward in [0, 1]."""


@dataclass(frozen=True)
class Response:
    """A response, as rewards judge it."""

    text: str
    """Text that the prompt had begun and the model continued in its last turn."""
    truth: str
    """Truth of its Problem."""
    row: str = ""
    """Row of its Problem."""
    token_ids: tuple[int, ...] = ()
    """Tokens of the text, where a model wrote it."""
    messages: tuple[Message, ...] = ()
    """Messages of a task with tools, (role, content): the prompt's, the model's turns, the tools'."""
    begun: str = ""
    """Part of `text` that the prompt ends with, such as `<think>` and a line end."""

    @property
    def written(self) -> str:
        """Part of `text` that is the model's own: what TRL and verl call a completion."""
        return self.text.removeprefix(self.begun)


@dataclass(frozen=True)
class RewardFunction:
    """A reward: what a response is worth, or one part of that."""

    name: str
    weight: float
    """Weight of the value in the sum."""
    value: Callable[[Response], object]
    """Function that gives the value: a number, or None where the reward does not apply; any other value is a fault."""
    place: str = ""
    """Place, for people: the user's file and function; empty where it is built in."""
    may_read_truth: bool = True
    """Whether the truth as the response is to earn more than an empty one."""
    remedy: str = ""
    """Remedy where it fails, if it has its own; else what a function of the user's needs."""


@dataclass(frozen=True)
class DataFile:
    """A file of a data set on the hub, JSON lines or parquet."""

    name: str
    """Name of the file that `appliance data` makes of it."""
    split: str
    """Split that the file is for: `train` or `val`."""
    hub: str
    """Name of the data set on the hub."""
    file: str
    """Path of the file in the data set."""

    def read(self, source: Source, *, keys: tuple[str, ...]) -> ProblemSet:
        """Download the file and read its problems. A download that broke off resumes where it was. Raises RecipeError
        when the hub is away, and for bad rows. keys: place of the first of these faults, as of Finding."""
        try:
            path = download_data(self.hub, file=self.file, beat=Heartbeat().beat)
        except OSError as error:  # no network, no such file, or offline mode
            why = first_line(error)
            hint = "give a file: task.train_file in a recipe, --from with `appliance data`"
            message = f"no data file is given, and {self.hub} cannot be had from the hub: {why}"
            raise RecipeError([fault(keys, message, hint)]) from error
        return without_faults(read_file(path, source=source, name=self.hub))[0]


@dataclass
class PromptLimit:
    """Limit of the length of prompts. Problems with longer prompts are left out before any problem is held out, drawn
    or counted."""

    tokens: int
    count: Callable[[Problem], int]
    """Function that counts the tokens of a problem's prompt."""
    checked: int = 0
    """Number of problems that were looked at so far."""
    too_long: int = 0
    """Number of those problems whose prompt was too long."""

    def short_enough(self, problems: list[Problem]) -> list[Problem]:
        kept = [each for each in problems if self.count(each) <= self.tokens]
        self.checked, self.too_long = self.checked + len(problems), self.too_long + len(problems) - len(kept)
        return kept

    @property
    def words(self) -> str:
        """Words that follow the number of problems that are left."""
        return f" of at most {self.tokens} tokens" if self.too_long else ""

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on what was left out, for people."""
        of = f"{self.too_long} of {self.checked} problems have prompts of more than {self.tokens} tokens"
        return (f"{of} and are left out",) if self.too_long else ()

    def refuse_none(self, splits: Splits) -> None:
        """Refuse splits that have nothing left. Raises RecipeError where nothing is left to train on, or of a
        validation."""
        if splits.train and all(splits.validations.values()):
            return
        left = ", ".join(
            f"{len(problems)} validation{f' ({name})' if splits.val_sets else ''}"
            for name, problems in splits.validations.items()
        )
        message = f"{self.tokens} leaves {len(splits.train)} training and {left} problems"
        raise RecipeError([fault(("task.max_prompt_tokens",), message, "raise it")])


@dataclass(frozen=True)
class Splits:
    """Problems of a task by their use; `train` and `val` share none."""

    train: list[Problem]
    val: list[Problem]
    notes: tuple[str, ...] = ()
    """Notes with the counts made on the way, for people."""
    val_sets: Mapping[str, list[Problem]] = field(default_factory=dict)
    """Several validations in place of `val`, by name; they may share problems."""

    @property
    def validations(self) -> Mapping[str, list[Problem]]:
        return self.val_sets or {"val": self.val}


@dataclass(frozen=True)
class TaskDefinition:
    kind: str
    """Name in `task.kind`."""
    score: Score
    answers: Callable[[str], Iterable[str]]
    """Function that gives responses with this truth: in the form that the task asks for, then in others that its reward
    reads."""
    describe: str = ""
    """Question and grading, in a line."""
    source: Source | None = None
    """Source of rows in a file or on the hub; None: the task makes its problems itself."""
    data_sets: Mapping[str, tuple[DataFile, ...]] = field(default_factory=dict)
    """Data sets by the name that `appliance data` takes: together a file to train on and one to validate with, for
    users who have none."""
    checked_rows: int | None = None
    """Rows of a file that are checked before a run; None: all."""
    make: Callable[..., Splits] | None = None
    """Function of a task that makes its problems, with the arguments (*, difficulty, seed, train_size, val_size)."""
    check_sizes: Callable[..., list[Finding]] | None = None
    """Function with the same arguments as `make`, which returns the faults of sizes that the task cannot serve, before
    anything is made."""
    import_reward: Callable[[], object] = lambda: None
    """Function that imports now what `score` will need, where that takes long to load."""
    load_rewards: Callable[[], tuple[RewardFunction, ...]] | None = None
    """Loader of rewards that replaces `score`, for a task whose rewards may be the user's code: to be called in a child
    process only."""

    def rewards(self) -> tuple[RewardFunction, ...]:
        """Load the rewards. Raises what the user's code raises."""
        if self.load_rewards is not None:
            return self.load_rewards()
        self.import_reward()
        return (
            RewardFunction(self.kind, 1.0, lambda response: self.score(response=response.text, truth=response.truth)),
        )

    def splits(self, settings: sections.Task, *, limit: PromptLimit | None = None) -> Splits:
        """Make the problems, or read them: from files or, without a train_file, from the hub.

        A size of 0 takes all; training is in the seed's order. Without a val_file the seed holds out val_size problems
        of the train_file. val_sets: in place of val_file and val_size; the one without a file is what validates without
        a val_file. No problem of any of them is trained on, nor one that a data set of the hub has for validation,
        which is read for that where files validate. limit: what is longer counts for no size, and none of it is in a
        split; None: no tokenizer has counted. Raises RecipeError for bad rows of all files at once, for
        sizes that leave nothing or that the task cannot serve, and when the hub is away.
        """
        splits = self._splits(settings, limit=limit)
        if limit is not None and limit.too_long:
            limit.refuse_none(splits)
        return splits

    def _splits(self, settings: sections.Task, *, limit: PromptLimit | None) -> Splits:
        shortened = limit.short_enough if limit else list
        train_file, seed = settings.train_file or "", settings.seed
        usual = next((name for name, val_set in settings.val_sets.items() if not val_set.file), None)
        size = settings.val_sets[usual].size if usual else settings.val_size
        if self.make is not None:
            sizes = {"train_size": settings.train_size, "val_size": size}
            splits = self.make(difficulty=settings.difficulty, seed=seed, **sizes)
            splits = replace(splits, train=shortened(splits.train), val=shortened(splits.val))
            return replace(splits, val=[], val_sets={usual: splits.val}) if usual else splits
        with_file = {_key(name): val_set for name, val_set in settings.val_sets.items() if val_set.file}
        others = {key: val_set.file or "" for key, val_set in with_file.items()}
        sets = self._read(settings, others)
        notes = [note for name, problem_set in sets.items() for note in _counts(name, problem_set)]
        train = sets.pop("train").problems
        seen = {problem.messages for problem_set in sets.values() for problem in problem_set.problems}
        unseen = [problem for problem in train if problem.messages not in seen]
        if shared := len(train) - len(unseen):
            problems = counted(
                shared,
                "problem is in the validation data as well and is left out",
                plural="problems are in the validation data as well and are left out",
            )
            notes.append(f"train: {problems}")
        holds_out = usual is not None or not settings.val_sets
        left = shortened(unseen)
        used = {name: problem_set for name, problem_set in sets.items() if holds_out or name != "val"}
        sets = {name: replace(a_set, problems=shortened(a_set.problems)) for name, a_set in used.items()}
        words = limit.words if limit else ""
        faults = list(chain(*(_too_few(key, val_set, sets[key], words=words) for key, val_set in with_file.items())))
        validation: list[Problem] = []
        if train and not unseen:
            hint = "none is left to train on: validate on others, or leave that file out and give a size"
            message = f"{train_file or 'the data set'}: each of its problems is in the validation data as well"
            keys = ("task.train_file",) if train_file else ("task.data", "task.kind")
            faults.append(fault(keys, message, hint))
        key = f"task.{_key(usual)}.size" if usual else "task.val_size"
        if holds_out and "val" in sets:
            validation = sets["val"].problems[: size or None]
            if len(validation) < size:
                problems = counted(len(validation), f"problem{words} is", plural=f"problems{words} are")
                notes.append(f"val: its {problems} fewer than `{key}`, {size}; all are taken")
        elif holds_out and left:
            path = train_file or "the data set"
            faults += _cannot_hold_out(left, path=path, val_size=size, key=key, words=words)
            left, validation = _hold_out(left, seed=seed, val_size=size)
        if faults:
            raise RecipeError(faults)
        random.Random(f"{seed}-train").shuffle(left)
        splits = Splits(
            train=left[: settings.train_size or None],
            val=[] if settings.val_sets else validation,
            notes=tuple(notes),
        )
        by_set = {
            name: sets[_key(name)].problems[: val_set.size or None] if val_set.file else validation
            for name, val_set in settings.val_sets.items()
        }
        return replace(splits, val_sets=by_set)

    def _read(self, settings: sections.Task, others: Mapping[str, str]) -> dict[str, ProblemSet]:
        """Read `train`, `val` where there is one, and the others by their names."""
        assert self.source is not None, "a task makes its problems or reads them"
        files = {"train": settings.train_file, "val": settings.val_file, **others}
        files = {name: file for name, file in files.items() if file}
        keys = {"train": "task.train_file", "val": "task.val_file"}
        sets = (
            read_file(file, source=self.source, key=keys.get(name) or f"task.{name}.file")
            for name, file in files.items()
        )
        read = dict(zip(files, without_faults(*sets), strict=True))
        if settings.train_file:
            return read
        of_hub = [file for data_set in self.data_sets.values() for file in data_set]
        return {file.split: file.read(self.source, keys=("task.train_file", "task.kind")) for file in of_hub} | read

    def check_rows(self, path: str | Path, *, key: str = "") -> list[Finding]:
        """Check the rows of a data file, each at its `file:line`; after 19 of them the number of the rest. key: as of
        read_file."""
        return read_file(path, source=self.source, key=key, most_rows=self.checked_rows).faults if self.source else []

    def first_problems(self, count: int, *, file: str, difficulty: int, seed: int) -> list[Problem]:
        """Return the first problems of the file, or of those that the task makes."""
        if self.make is not None:
            return self.make(difficulty=difficulty, seed=seed, train_size=count, val_size=1).train
        assert self.source is not None, "a task makes its problems or reads them"
        return read_file(file, source=self.source, most_rows=count).problems


def _counts(name: str, problem_set: ProblemSet) -> list[str]:
    """Count what is left out; nothing where every row is a separate problem."""
    notes = []
    if problem_set.repeated:
        rows, problems = counted(problem_set.rows, "row"), counted(len(problem_set.problems), "distinct problem")
        notes.append(f"{name}: {rows}, {problems}: each counts once")
    if problem_set.conflicting:
        rows = counted(problem_set.conflicting, "row repeats", plural="rows repeat")
        notes.append(f"{name}: {rows} a problem with another answer: the first one counts")
    if problem_set.left_out:
        fields = ", ".join(f"`{each}`" for each in problem_set.left_out)
        notes.append(f"{name}: {fields}: not in the rows that rewards get, bytes are no JSON")
    return notes


def _key(name: str) -> str:
    """Return the key of a validation set, below `task`."""
    return f"val_sets.{name}"


def _too_few(key: str, val_set: sections.ValSet, problem_set: ProblemSet, *, words: str) -> list[Finding]:
    """Report where a set is to have more problems than its file. words: of PromptLimit, which refuses one that it
    leaves without any."""
    if val_set.size <= (most := len(problem_set.problems)) or (words and not most):
        return []
    message = f"{val_set.size} is more than the {counted(most, 'problem')}{words} in {val_set.file}"
    return [fault((f"task.{key}.size",), message, f"use 1 to {most}, or 0 for all of them")]


def _cannot_hold_out(problems: list[Problem], *, path: str, val_size: int, key: str, words: str) -> list[Finding]:
    if 0 < val_size < len(problems):
        return []
    of_all = f"{val_size} of the {counted(len(problems), 'problem')}{words} in {path}"
    message = f"{of_all} leave no problem for training or none for validation"
    most = len(problems) - 1
    use = f"use 1 to {most}" if most else "give more problems"
    return [fault((key,), message, f"{use}, or give {key.removesuffix('size')}file")]


def _hold_out(problems: list[Problem], *, seed: int, val_size: int) -> tuple[list[Problem], list[Problem]]:
    """Return (train, val): val_size problems drawn by the seed."""
    distinct = sorted(problems, key=lambda each: (each.prompt, each.before))
    random.Random(f"{seed}-hold-out").shuffle(distinct)
    return distinct[val_size:], distinct[:val_size]
