"""What the model said, over time: `samples.jsonl`, a line per step that has some.

Of every validation the first problems, which are the same ones each time; of training one prompt now and then, with its
best and its worst sample. Chosen where they arrive (`SampleLog`), written when the step is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic.dataclasses import dataclass

from appliance.record.events import Tail, append_line
from appliance.record.lines import STRICT, Count, Measured, parse_line

SAMPLES_FILE = "samples.jsonl"
_HEAD, _TAIL = 1200, 800  # characters of a longer text that are kept: the end has the answer
PROBLEMS = 4  # of each validation: the first ones
_MOST_VALIDATIONS = 200  # that are kept of a run when it is read
_LINES = 20  # with samples of training, in a whole run: at its start each step, then a step in so many

Group = tuple[str, list[dict[str, Any]]]  # the prompt's uid, and the fields of each sample


@dataclass(frozen=True, config=STRICT)
class Sample:
    """One response."""

    prompt: str
    response: str
    truth: str
    """The right answer as the task has it."""
    accuracy: Measured
    """0..1, of a task of the user's own any number."""
    reward: Measured
    """What trained, which shaping may have moved; None in a validation."""
    tokens: Count
    """Of the model's own."""
    finished: bool
    """The model ended it, not the limit of tokens."""
    turns: tuple[tuple[str, str], ...] = ()
    """With tools (who, what), as it was said after the prompt; `response` is then the model's last one."""


@dataclass(frozen=True, config=STRICT)
class StepSamples:
    step: Count
    scheme: str
    """Of the rollouts that `training` comes from."""
    validation: tuple[Sample, ...] = ()
    training: tuple[Sample, ...] = ()
    val_scheme: str = ""
    """Of `validation`, which a change of the rollouts may precede; empty in lines of older code: `scheme`."""


def shortened(text: str) -> str:
    """Head and tail of a long text, with how much is left out."""
    if len(text) <= _HEAD + _TAIL:
        return text
    return f"{text[:_HEAD]} […{len(text) - _HEAD - _TAIL} characters…] {text[-_TAIL:]}"


def append_samples(run_dir: Path, samples: StepSamples) -> None:
    """Raises OSError."""
    append_line(run_dir / SAMPLES_FILE, asdict(samples))


class SampleReader:
    """The samples of a run as they come, each line read once. Of very many validations some are kept, evenly, the first
    and the newest among them."""

    def __init__(self, run_dir: Path) -> None:
        self._tail = Tail(run_dir / SAMPLES_FILE)
        self._found: dict[int, StepSamples] = {}
        self._places: dict[int, int] = {}  # by step without training: the how manieth it was
        self._count = 0
        self._every = 1

    def read(self) -> list[StepSamples]:
        """By step, each step once; lines that cannot be read are left out. Of two lines of a step the later, with what
        only the earlier has: a final validation that is made again has its own. Raises OSError."""
        while lines := self._tail.read(most=_MOST_VALIDATIONS):
            for later in filter(None, (parse_line(line, StepSamples) for line in lines)):
                if later.step not in self._found and not later.training:
                    self._places[later.step], self._count = self._count, self._count + 1
                before = self._found.get(later.step, later)
                trained = before if before.training and not later.training else later
                validated = before if before.validation and not later.validation else later
                self._found[later.step] = StepSamples(
                    later.step,
                    trained.scheme,
                    validation=validated.validation,
                    training=trained.training,
                    val_scheme=validated.val_scheme or validated.scheme,
                )
            self._thin()
        return [self._found[step] for step in sorted(self._found)]

    def _thin(self) -> None:
        """Training is written down a few times in a run, whatever its length."""
        while len(steps := sorted(step for step in self._found if not self._found[step].training)) > _MOST_VALIDATIONS:
            left_out = [step for step in steps[:-1] if self._places[step] % self._every]
            self._every *= 1 if left_out else 2
            for step in left_out:
                del self._found[step], self._places[step]


class SampleLog:
    """decode: token ids of a prompt to text. A response has the text that rewards read."""

    def __init__(self, run_dir: Path, *, steps: int, decode: Callable[[Any], str]) -> None:
        """steps: of the whole run."""
        self._run_dir = run_dir
        self._every = max(1, -(-steps // _LINES))
        self._decode = decode
        self._validation: dict[int, list[Sample]] = {}
        self._training: dict[int, list[Sample]] = {}

    def note(self, groups: Sequence[Group], *, validate: bool) -> None:
        """Results of a rollout as they come. A second validation of the same step, in BF16, adds nothing."""
        for _, fields in groups:
            step = int(fields[0]["global_steps"])
            kept = (self._validation if validate else self._training).setdefault(step, [])
            if validate and len(kept) < PROBLEMS:
                sample = self._sample(fields[0], validate=True)
                kept += [] if sample.prompt in {each.prompt for each in kept} else [sample]
            elif not validate and not kept and (step % self._every == 0 or step == 1):
                ordered = sorted(fields, key=lambda each: float(each["rm_scores"][-1]))
                kept += [self._sample(each, validate=False) for each in (ordered[-1], ordered[0])[: len(ordered)]]

    def write(self, step: int, *, scheme: str, val_scheme: str) -> None:
        """The line of a step that is written down now; what earlier steps left is forgotten. Raises OSError.
        scheme, val_scheme: of its rollouts, and of its validation if it has one."""
        validation, training = self._validation.get(step, []), self._training.get(step, [])
        self._validation, self._training = {}, {}
        if validation or training:
            named = val_scheme if validation else ""
            append_samples(self._run_dir, StepSamples(step, scheme, tuple(validation), tuple(training), named))

    def _sample(self, fields: dict[str, Any], *, validate: bool) -> Sample:
        turns = tuple((who, shortened(text)) for who, text in fields.get("turns", ()))
        return Sample(
            prompt=shortened(self._decode(fields["prompts"])),
            response=turns[-1][1] if turns else shortened(fields["response_text"]),
            truth=shortened(str(fields["reward_model"]["ground_truth"])),
            accuracy=float(fields["extra_fields"]["reward_extra_info"]["acc"]),
            reward=None if validate else float(fields["rm_scores"][-1]),
            tokens=int(sum(fields["response_mask"])),
            finished=bool(fields["extra_fields"]["finished"]),
            turns=turns,
        )
