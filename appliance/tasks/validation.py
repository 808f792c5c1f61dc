"""What several validations say: of each its mean reward, and how often a model that may try k times is right. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from appliance.tasks.grading import Graded

PASSES = 1.0  # what the first reward of a sample that passes is at least


def set_metrics(name: str, graded: Sequence[Sequence[Graded]], *, first_reward: str) -> dict[str, float]:
    """By the contract's names, the mean first: `val/<name>/avg@<n>`, then `val/<name>/pass@<k>` for k = 1, 2, 4 .. n.

    graded: of each problem its n samples, n >= 1 and the same for all; a fault counts what it has, and does not pass.
    first_reward: by which a sample passes; empty: there is one.
    """
    samples = len(graded[0])
    accuracies = [each.accuracy for problem in graded for each in problem]
    passed = [sum(passes(each, first_reward=first_reward) for each in problem) for problem in graded]
    return {f"val/{name}/avg@{samples}": math.fsum(accuracies) / len(accuracies)} | {
        f"val/{name}/pass@{k}": math.fsum(pass_at(k, samples=samples, passed=each) for each in passed) / len(passed)
        for k in tries(samples)
    }


def passes(graded: Graded, *, first_reward: str) -> bool:
    """Whether the reward of that name, empty: the only one, applies and is at least 1."""
    return any(value >= PASSES for name, value in graded.parts if not first_reward or name == first_reward)


def pass_at(k: int, *, samples: int, passed: int) -> float:
    """1 - C(n - c, k) / C(n, k): the chance that of k samples, drawn from these n without putting back, one passes.

    samples: n.  passed: c, 0..n.  k: 1..n.
    Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code", the unbiased estimator of pass@k.
    """
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def tries(samples: int) -> Iterator[int]:
    """Powers of two below the number of samples, and that number."""
    k = 1
    while k < samples:
        yield k
        k *= 2
    yield samples
