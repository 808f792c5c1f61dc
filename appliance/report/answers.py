"""Table of a few validation problems with the answers before the training and after it, side by side, as text."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from appliance import console
from appliance.record.samples import Sample, StepSamples

_MOST_OF_A_PROBLEM, _MOST_OF_AN_ANSWER = 120, 80  # characters that are shown
_HEAD = 0.6  # share of a longer text that is shown of its beginning; the rest is its end, where answers are
_WRONG, _RIGHT = "  (wrong)", "  (right)"


def answers_table(samples: Sequence[StepSamples], *, is_graded: bool) -> str:
    """Make a table of problems with the first and the last answer to each. Empty where there are not two validations
    with the same problems.

    samples: of a run, by step.  is_graded: whether 1 is right and 0 wrong, which is not known of rewards of the user's
    own.
    """
    validated = [line for line in samples if line.validation]
    if len(validated) < 2:
        return ""
    first, last = validated[0], validated[-1]
    answers_after = {sample.prompt: sample for sample in last.validation}
    pairs = [(sample, answers_after[sample.prompt]) for sample in first.validation if sample.prompt in answers_after]
    if not pairs:
        return ""
    problems = _without_shared_lines([before.prompt for before, _ in pairs])
    rows = [
        (_brief(problem, _MOST_OF_A_PROBLEM), _answer(before, is_graded), _answer(after, is_graded))
        for problem, (before, after) in zip(problems, pairs, strict=True)
    ]
    before_head = "before" if first.step == 0 else f"after step {first.step}"
    head = ("a validation problem", before_head, f"after step {last.step}")
    return console.table(rows, head=head, columns=console.columns())


def _answer(sample: Sample, is_graded: bool) -> str:
    """Return the response, whether the model ended it, and its grade or its reward where there is one."""
    cut, grade = "" if sample.finished else " …", ""
    if sample.accuracy is not None:
        grade = (
            {0.0: _WRONG, 1.0: _RIGHT}.get(sample.accuracy, "") if is_graded else f"  (reward {sample.accuracy:.3g})"
        )
    return f"{_brief(sample.response, _MOST_OF_AN_ANSWER)}{cut}{grade}"


def _without_shared_lines(prompts: Sequence[str]) -> list[str]:
    """Return the prompts without the first and the last lines that all of them have, which the chat template put
    there."""
    if len(set(prompts)) < 2:
        return list(prompts)
    lines_by_prompt = [prompt.splitlines() for prompt in prompts]
    first = _shared(lines_by_prompt)
    last = _shared([lines[first:][::-1] for lines in lines_by_prompt])
    return ["\n".join(lines[first : len(lines) - last]) for lines in lines_by_prompt]


def _shared(lines_by_prompt: Sequence[Sequence[str]]) -> int:
    """Return the number of lines with which all of them begin."""
    places = zip(*lines_by_prompt, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda lines: len(set(lines)) == 1, places))


def _brief(text: str, most: int) -> str:
    """Return the text on one line; of a longer one its beginning and its end."""
    line = " ".join(text.split())
    if len(line) <= most:
        return line
    head = int(_HEAD * most)
    return f"{line[:head]} … {line[head - most :]}"
