"""Seeds of samples: the same in every attempt, and never the same for two samples."""

from __future__ import annotations

from appliance.trainer.prompt_seeds import PromptSeeds, prompt_seed

SAMPLES = 16


def test_a_seed_is_of_the_run_the_step_the_prompt_and_its_occurrence() -> None:
    """As written here: a changed hash would let a resumed run sample other tokens than the one before it."""
    assert prompt_seed([1, 2, 3], run_seed=0, step=1, occurrence=0) == 3094744293109721878


def test_another_attempt_draws_the_same() -> None:
    prompts = [[1, 2], [3], [1, 2], [1, 2, 3]]
    first, second = PromptSeeds(7), PromptSeeds(7)
    whole = [[first.next(prompt, step=step) for prompt in prompts] for step in (1, 2, 3)]
    assert [second.next(prompt, step=3) for prompt in prompts] == whole[2]


def test_no_two_samples_share_a_seed() -> None:
    """Seeds, steps, prompts, repeated prompts, and the samples that count up from each."""
    seen: set[int] = set()
    count = 0
    for run_seed in range(4):
        seeds = PromptSeeds(run_seed)
        for step in range(1, 50):
            for prompt in ([1], [1], [2], [1, 2], [12], [1, 1]):
                start = seeds.next(prompt, step=step)
                assert 0 <= start < 2**62
                seen |= set(range(start, start + SAMPLES))
                count += SAMPLES
    assert len(seen) == count


def test_a_prompt_that_comes_twice_in_a_step_counts_anew_in_the_next() -> None:
    seeds = PromptSeeds(0)
    first = [seeds.next([5], step=1), seeds.next([5], step=1)]
    assert first[0] != first[1]
    assert seeds.next([5], step=2) == prompt_seed([5], run_seed=0, step=2, occurrence=0)
