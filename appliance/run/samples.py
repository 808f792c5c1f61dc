"""What the model said, over time: `samples.jsonl`, a line per step that has some.

Of every validation the first problems, which are the same ones each time; of training one prompt now and then, with its
best and its worst sample. Standard library only: the trainer writes what the launcher reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from appliance.run.events import append_line, finite, json_object

SAMPLES_FILE = "samples.jsonl"
_HEAD, _TAIL = 1200, 800  # characters of a longer text that are kept: the end has the answer


@dataclass(frozen=True)
class Sample:
    """One response. truth: the right answer as the task has it.  accuracy: 0..1.  reward: what trained, which shaping
    may have moved; None in a validation.  finished: the model ended it, not the limit of tokens."""

    prompt: str
    response: str
    truth: str
    accuracy: float
    reward: float | None
    tokens: int
    finished: bool


@dataclass(frozen=True)
class StepSamples:
    """scheme: of the rollouts they come from."""

    step: int
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
    path = run_dir / SAMPLES_FILE
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    found: dict[int, StepSamples] = {}
    for samples in map(_parse, lines):
        if samples is not None:
            found[samples.step] = _joined(found.get(samples.step), samples)
    return [found[step] for step in sorted(found)]


def _joined(before: StepSamples | None, later: StepSamples) -> StepSamples:
    if before is None:
        return later
    training, validation = later.training or before.training, later.validation or before.validation
    return replace(later, training=training, validation=validation)


def _parse(line: str) -> StepSamples | None:
    raw = json_object(line)
    step = finite(raw.get("step"))
    if step is None:
        return None
    try:
        return StepSamples(
            step=int(step),
            scheme=str(raw["scheme"]),
            validation=tuple(map(_sample, raw["validation"])),
            training=tuple(map(_sample, raw["training"])),
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _sample(raw: Mapping[str, Any]) -> Sample:
    return Sample(
        prompt=str(raw["prompt"]),
        response=str(raw["response"]),
        truth=str(raw["truth"]),
        accuracy=finite(raw["accuracy"]) or 0.0,
        reward=finite(raw["reward"]),
        tokens=int(finite(raw["tokens"]) or 0),
        finished=bool(raw["finished"]),
    )
