"""What the model said over time, of which a page shows a choice: the same problems at each validation, and prompts of
training. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from appliance.record.samples import Sample
from appliance.report.folder import RunView

_SHORT = 60  # characters that go into a cell of a table
_MOST_TIMES = 12  # of one problem: the first, the last and some between


@dataclass(frozen=True)
class Answer:
    """A response in a step. grade: a class of the pages' style.  accuracy: as the page says it."""

    step: int
    sample: Sample

    @property
    def grade(self) -> str:
        accuracy = self.sample.accuracy
        if accuracy is None:
            return ""
        return "fine" if accuracy >= 1 else "bad" if accuracy <= 0 else "warn"

    @property
    def accuracy(self) -> str:
        return _number(self.sample.accuracy)

    @property
    def reward(self) -> str:
        return self.accuracy if self.sample.reward is None else _number(self.sample.reward)

    @property
    def is_short(self) -> bool:
        prompt, response = self.sample.prompt, self.sample.response
        return max(len(prompt), len(response)) <= _SHORT and "\n" not in prompt + response


@dataclass(frozen=True)
class Story:
    """The answers to one prompt, one at least. name: of letters and digits."""

    name: str
    title: str
    answers: Sequence[Answer]

    @property
    def prompt(self) -> str:
        return self.answers[0].sample.prompt

    @property
    def truth(self) -> str:
        return self.answers[-1].sample.truth

    @property
    def shown(self) -> list[Answer]:
        return _some(self.answers)


@dataclass(frozen=True)
class Generations:
    stories: Sequence[Story]

    @property
    def is_short(self) -> bool:
        """Whether all texts fit into the cells of one table."""
        return all(answer.is_short for story in self.stories for answer in story.answers)

    @property
    def by_step(self) -> list[tuple[int, list[Answer | None]]]:
        """Some of the steps, each with the answer of every story."""
        steps = _some(sorted({answer.step for story in self.stories for answer in story.answers}))
        answers = [{answer.step: answer for answer in reversed(story.answers)} for story in self.stories]
        return [(step, [each.get(step) for each in answers]) for step in steps]


def of_validation(view: RunView) -> Generations:
    """A story per problem, by its prompt: problems keep their order from one validation to the next."""
    by_prompt: dict[str, list[Answer]] = {}
    for samples in view.samples:
        for sample in samples.validation:
            by_prompt.setdefault(sample.prompt, []).append(Answer(samples.step, sample))
    numbered = enumerate(by_prompt.values(), start=1)
    return Generations([Story(f"validation{number}", f"problem {number}", told) for number, told in numbered])


def of_training(view: RunView) -> Generations:
    """A story per step, some of them, of one prompt: its best and its worst sample."""
    told = _some([samples for samples in view.samples if samples.training])
    return Generations(
        [Story(f"training{s.step}", f"step {s.step}", [Answer(s.step, each) for each in s.training]) for s in told]
    )


def _some(told: Sequence) -> list:
    """At most so many, evenly, the first and the last among them."""
    if len(told) <= _MOST_TIMES:
        return list(told)
    return [told[round(place * (len(told) - 1) / (_MOST_TIMES - 1))] for place in range(_MOST_TIMES)]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
