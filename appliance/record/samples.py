"""What the model said, over time: `samples.jsonl`, a line per step that has some.

Of every validation the first problems, which are the same ones each time; of training one prompt now and then, with its
best and its worst sample.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from pydantic.dataclasses import dataclass

from appliance.record.events import append_line
from appliance.record.lines import STRICT, Count, Measured, read_lines

SAMPLES_FILE = "samples.jsonl"
_HEAD, _TAIL = 1200, 800  # characters of a longer text that are kept: the end has the answer


@dataclass(frozen=True, config=STRICT)
class Sample:
    """One response. truth: the right answer as the task has it.  accuracy: 0..1, of a task of the user's own any
    number.  reward: what trained, which shaping may have moved; None in a validation.  tokens: of the model's own.
    finished: the model ended it, not the limit of tokens.  turns: with tools (who, what), as it was said after the
    prompt; `response` is then the model's last one."""

    prompt: str
    response: str
    truth: str
    accuracy: Measured
    reward: Measured
    tokens: Count
    finished: bool
    turns: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, config=STRICT)
class StepSamples:
    """scheme: of the rollouts they come from."""

    step: Count
    scheme: str
    validation: tuple[Sample, ...] = ()
    training: tuple[Sample, ...] = ()


def shortened(text: str) -> str:
    """Head and tail of a long text, with how much is left out."""
    if len(text) <= _HEAD + _TAIL:
        return text
    return f"{text[:_HEAD]} […{len(text) - _HEAD - _TAIL} characters…] {text[-_TAIL:]}"


def append_samples(run_dir: Path, samples: StepSamples) -> None:
    """Raises OSError."""
    append_line(run_dir / SAMPLES_FILE, asdict(samples))


def read_samples(run_dir: Path) -> list[StepSamples]:
    """By step, each step once; lines that cannot be read are left out.

    Of two lines of a step the later, with what only the earlier has: a final validation that is made again has its own.
    """
    found: dict[int, StepSamples] = {}
    for later in read_lines(run_dir / SAMPLES_FILE, StepSamples):
        before = found.get(later.step, later)
        training, validation = later.training or before.training, later.validation or before.validation
        found[later.step] = replace(later, training=training, validation=validation)
    return [found[step] for step in sorted(found)]
