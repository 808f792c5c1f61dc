"""What the model answered, over time: `samples.jsonl`, a line per step that has some.

Every validation has its first problems, which are the same ones each time; training has one prompt now and then, with
its best and its worst sample. They are chosen where they arrive (`SampleLog`) and written when the step is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic.dataclasses import dataclass

from appliance.record.events import Tail, append_line
from appliance.record.lines import STRICT, Count, Measured, parse_line
from appliance.terms.counts import counted

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
    """Right answer as the task has it."""
    accuracy: Measured
    """Accuracy in 0..1; any number in a task of the user's own."""
    reward: Measured
    """Reward that trained, which shaping may have moved; None in a validation."""
    tokens: Count
    """Tokens that the model generated."""
    finished: bool
    """Whether the model ended the response, rather than the limit of tokens."""
    turns: tuple[tuple[str, str], ...] = ()
    """Turns after the prompt with tools: (speaker, text); `response` is then the model's last one."""


@dataclass(frozen=True, config=STRICT)
class StepSamples:
    step: Count
    scheme: str
    """Scheme of the rollouts that `training` comes from."""
    validation: tuple[Sample, ...] = ()
    training: tuple[Sample, ...] = ()
    val_scheme: str = ""
    """Scheme of `validation`, which may differ from `scheme` where the rollouts changed theirs; empty in lines of older
    code, where it is `scheme`."""


def shortened(text: str) -> str:
    """Shorten a long text to its head and tail, with how much is left out."""
    if len(text) <= _HEAD + _TAIL:
        return text
    return f"{text[:_HEAD]} […{counted(len(text) - _HEAD - _TAIL, 'character')}…] {text[-_TAIL:]}"


def append_samples(run_dir: Path, samples: StepSamples) -> None:
    """Append the samples of a step. Raises OSError."""
    append_line(run_dir / SAMPLES_FILE, asdict(samples))


class SampleReader:
    """The samples of a run as they come, each line read once. Of very many validations some are kept, evenly, the first
    and the newest among them."""

    def __init__(self, run_dir: Path) -> None:
        self._tail = Tail(run_dir / SAMPLES_FILE)
        self._samples_by_step: dict[int, StepSamples] = {}
        self._places: dict[int, int] = {}  # of each step without training: its number among them
        self._count = 0
        self._every = 1

    def read(self) -> list[StepSamples]:
        """Read the samples by step, each step once; lines that cannot be read are left out. Of two lines of a step the
        later, with what only the earlier has: a final validation that is made again has its own. Raises OSError."""
        while lines := self._tail.read(most=_MOST_VALIDATIONS):
            for later in filter(None, (parse_line(line, StepSamples) for line in lines)):
                if later.step not in self._samples_by_step and not later.training:
                    self._places[later.step], self._count = self._count, self._count + 1
                before = self._samples_by_step.get(later.step, later)
                trained = before if before.training and not later.training else later
                validated = before if before.validation and not later.validation else later
                self._samples_by_step[later.step] = StepSamples(
                    later.step,
                    trained.scheme,
                    validation=validated.validation,
                    training=trained.training,
                    val_scheme=validated.val_scheme or validated.scheme,
                )
            self._thin()
        return [self._samples_by_step[step] for step in sorted(self._samples_by_step)]

    def _thin(self) -> None:
        """Drop validations of the middle. Samples of training are few, whatever the length of a run."""
        while len(steps := self._steps_without_training()) > _MOST_VALIDATIONS:
            left_out = [step for step in steps[:-1] if self._places[step] % self._every]
            self._every *= 1 if left_out else 2
            for step in left_out:
                del self._samples_by_step[step], self._places[step]

    def _steps_without_training(self) -> list[int]:
        return sorted(step for step, samples in self._samples_by_step.items() if not samples.training)


class SampleLog:
    """Collects samples of rollouts as they arrive, and writes the line of a step. The text of a response is the one
    that rewards read."""

    def __init__(self, run_dir: Path, *, steps: int, decode: Callable[[Any], str]) -> None:
        """steps: of the whole run.  decode: function that turns token ids of a prompt into text."""
        self._run_dir = run_dir
        self._every = max(1, -(-steps // _LINES))
        self._decode = decode
        self._validation: dict[int, list[Sample]] = {}
        self._training: dict[int, list[Sample]] = {}

    def note(self, groups: Sequence[Group], *, validate: bool) -> None:
        """Note results of a rollout as they come. A second validation of the same step, in BF16, adds nothing."""
        for _, fields in groups:
            step = int(fields[0]["global_steps"])
            samples = (self._validation if validate else self._training).setdefault(step, [])
            if validate and len(samples) < PROBLEMS:
                sample = self._sample(fields[0], validate=True)
                samples += [] if sample.prompt in {earlier.prompt for earlier in samples} else [sample]
            elif not validate and not samples and (step % self._every == 0 or step == 1):
                by_reward = sorted(fields, key=lambda response: float(response["rm_scores"][-1]))
                best_and_worst = (by_reward[-1], by_reward[0])[: len(by_reward)]
                samples += [self._sample(response, validate=False) for response in best_and_worst]

    def write(self, step: int, *, scheme: str, val_scheme: str) -> None:
        """Write the line of a step and forget what earlier steps left. Raises OSError.
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
