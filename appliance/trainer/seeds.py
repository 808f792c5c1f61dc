"""One seed per sample, the same in every attempt: a hash of the run's seed, the step, the prompt and how many prompts
of the step were the same before it, plus the number of the sample. (vLLM gives sample i of a request the seed + i.)

verl's own switch gives all samples one seed, so that the samples of a prompt would all be equal. Standard library only.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

_BITS = 62  # vLLM keeps seeds as signed 64-bit numbers, and the samples of a prompt count up from this one


class PromptSeeds:
    """The seeds of one run, step by step."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._step = -1
        self._seen: Counter[tuple[int, ...]] = Counter()

    def next(self, token_ids: Sequence[int], *, step: int) -> int:
        """The seed of the next prompt of a step, 0 <= seed < 2^62. Prompts of one step come in their order."""
        if step != self._step:
            self._step, self._seen = step, Counter()
        prompt = tuple(token_ids)
        seed = prompt_seed(prompt, run_seed=self._seed, step=step, occurrence=self._seen[prompt])
        self._seen[prompt] += 1
        return seed


def prompt_seed(token_ids: Sequence[int], *, run_seed: int, step: int, occurrence: int) -> int:
    """0 <= seed < 2^62."""
    text = f"{run_seed} {step} {occurrence}:{' '.join(map(str, token_ids))}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> (64 - _BITS)
