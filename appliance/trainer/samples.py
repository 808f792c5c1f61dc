"""Which responses of a step are kept to be looked at: chosen where they arrive, written when the step is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from appliance.record.samples import Sample, StepSamples, append_samples, shortened

PROBLEMS = 4  # of each validation: the first ones
_LINES = 20  # with samples of training, in a whole run: at its start each step, then a step in so many

Group = tuple[str, list[dict[str, Any]]]  # the prompt's uid, and the fields of each sample


class SampleLog:
    """decode: token ids to text, for prompts and responses."""

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

    def write(self, step: int, *, scheme: str) -> None:
        """The line of a step that is written down now; what earlier steps left is forgotten. Raises OSError."""
        validation, training = self._validation.get(step, []), self._training.get(step, [])
        self._validation, self._training = {}, {}
        if validation or training:
            append_samples(self._run_dir, StepSamples(step, scheme, tuple(validation), tuple(training)))

    def _sample(self, fields: dict[str, Any], *, validate: bool) -> Sample:
        turns = tuple((who, shortened(text)) for who, text in fields.get("turns", ()))
        return Sample(
            prompt=shortened(self._decode(fields["prompts"])),
            response=turns[-1][1] if turns else shortened(self._decode(fields["responses"])),
            truth=shortened(str(fields["reward_model"]["ground_truth"])),
            accuracy=float(fields["extra_fields"]["reward_extra_info"]["acc"]),
            reward=None if validate else float(fields["rm_scores"][-1]),
            tokens=int(sum(fields["response_mask"])),
            finished=bool(fields["extra_fields"]["finished"]),
            turns=turns,
        )
