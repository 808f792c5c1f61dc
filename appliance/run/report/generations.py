"""What the model said over time: the same problems at each validation, and prompts of training. Pure."""

from __future__ import annotations

import html
from collections.abc import Sequence

from appliance.page.frame import block, fold, table
from appliance.run.report.folder import RunView
from appliance.run.samples import Sample

_SHORT = 60  # characters that go into a cell of a table
_MOST_TIMES = 12  # of one problem: the first, the last and some between


def generations(view: RunView) -> list[str]:
    """Markup; every text of a model or a task is escaped."""
    parts = [*_validation(view), *_training(view)]
    return parts or ['<p class="soft">No sample is written down yet.</p>']


def _validation(view: RunView) -> list[str]:
    """A problem at a time, by its prompt: problems keep their order from one validation to the next."""
    by_prompt: dict[str, list[tuple[int, Sample]]] = {}
    for samples in view.samples:
        for sample in samples.validation:
            by_prompt.setdefault(sample.prompt, []).append((samples.step, sample))
    if not by_prompt:
        return []
    if all(_is_short(sample) for told in by_prompt.values() for _, sample in told):
        return ["<h3>Validation, greedy: the same problems each time</h3>", _matrix(by_prompt)]
    shown = [
        _long(f"validation{number}", f"problem {number}", prompt=prompt, told=_some(told), is_open=number == 1)
        for number, (prompt, told) in enumerate(by_prompt.items(), start=1)
    ]
    return ["<h3>Validation, greedy: the same problems each time</h3>", *shown]


def _matrix(by_prompt: dict[str, list[tuple[int, Sample]]]) -> str:
    """Short texts: a column per problem, a row per validation."""
    steps = _some(sorted({step for told in by_prompt.values() for step, _ in told}))
    head = "".join(
        f"<th><code>{html.escape(prompt)}</code><br>right: <code>{html.escape(told[-1][1].truth)}</code></th>"
        for prompt, told in by_prompt.items()
    )
    rows = []
    for step in steps:
        cells = [next((sample for at, sample in told if at == step), None) for told in by_prompt.values()]
        rows.append(f"<tr><td>{step}</td>{''.join(f'<td>{_cell(sample)}</td>' for sample in cells)}</tr>")
    return f"<table><thead><tr><th>step</th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _cell(sample: Sample | None) -> str:
    if sample is None:
        return "-"
    return f'<code>{html.escape(sample.response)}</code> <span class="{_word(sample)}">{sample.accuracy:g}</span>'


def _training(view: RunView) -> list[str]:
    told = _some([samples for samples in view.samples if samples.training])
    if not told:
        return []
    every = [sample for samples in told for sample in samples.training]
    title = "<h3>Training: one prompt of a step, its best and its worst sample</h3>"
    if all(map(_is_short, every)):
        rows = [
            (str(samples.step), sample.prompt, sample.truth, sample.response, _reward(sample), str(sample.tokens))
            for samples in told
            for sample in samples.training
        ]
        return [title, table(("step", "prompt", "right", "response", "reward", "tokens"), rows, numbers=(4, 5))]
    return [
        title,
        *(
            _long(
                f"training{samples.step}",
                f"step {samples.step}",
                prompt=samples.training[0].prompt,
                told=[(samples.step, sample) for sample in samples.training],
            )
            for samples in told
        ),
    ]


def _long(name: str, title: str, *, prompt: str, told: Sequence[tuple[int, Sample]], is_open: bool = False) -> str:
    """A fold with the prompt and every response in full."""
    rewards = ", ".join(_reward(sample) for _, sample in told)
    parts = [f'<p class="soft">prompt; the right answer: {html.escape(told[-1][1].truth)}</p>', block(prompt)]
    for step, sample in told:
        end = "" if sample.finished else ", cut at the limit"
        parts.append(
            f'<p>step {step}: reward <span class="{_word(sample)}">{_reward(sample)}</span>, '
            f"{sample.tokens} tokens{end}</p>{block(sample.response)}"
        )
    return fold(name, f"{title}: rewards {rewards}", "".join(parts), is_open=is_open)


def _some(told: Sequence) -> list:
    """At most so many, evenly, the first and the last among them."""
    if len(told) <= _MOST_TIMES:
        return list(told)
    return [told[round(place * (len(told) - 1) / (_MOST_TIMES - 1))] for place in range(_MOST_TIMES)]


def _reward(sample: Sample) -> str:
    return f"{sample.accuracy if sample.reward is None else sample.reward:.3g}"


def _word(sample: Sample) -> str:
    return "fine" if sample.accuracy >= 1 else "bad" if sample.accuracy <= 0 else "warn"


def _is_short(sample: Sample) -> bool:
    return max(len(sample.prompt), len(sample.response)) <= _SHORT and "\n" not in sample.prompt + sample.response
