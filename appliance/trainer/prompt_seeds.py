"""Seeds of rollouts, so that the same run draws the same samples again.

verl's own switch gives all samples one seed, so that the samples of a prompt would all be equal.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence


class PromptSeeds:
    """One seed per sample, the same in every attempt: a hash of the run's seed, the step, the prompt and how many
    prompts of the step were the same before it, plus the number of the sample, which vLLM adds."""

    def __init__(self, seed: int, *, val_set: str = "") -> None:
        """val_set: name of the validation set, where there are several: the seeds of each differ. Empty in training."""
        self._seed = seed
        self._val_set = val_set
        self._step = -1
        self._seen: Counter[tuple[int, ...]] = Counter()

    def next(self, token_ids: Sequence[int], *, step: int) -> int:
        """Return the seed of the next prompt. The prompts of a step must come in their order."""
        if step != self._step:
            self._step, self._seen = step, Counter()
        prompt = tuple(token_ids)
        seed = prompt_seed(prompt, run_seed=self._seed, step=step, occurrence=self._seen[prompt], val_set=self._val_set)
        self._seen[prompt] += 1
        return seed


def prompt_seed(token_ids: Sequence[int], *, run_seed: int, step: int, occurrence: int, val_set: str = "") -> int:
    """Return 0 <= seed < 2^62: vLLM keeps seeds as signed 64-bit numbers, and the seeds of a prompt's samples count
    up from this one."""
    before = f"{val_set} " if val_set else ""
    text = f"{before}{run_seed} {step} {occurrence}:{' '.join(map(str, token_ids))}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 2
