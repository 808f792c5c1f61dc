"""Our batch arithmetic against verl's own: what passes here, verl takes, packed by tokens too, where it is silent."""

from __future__ import annotations

import importlib.util
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from appliance.recipe.rules import RULES, judge
from appliance.recipe.schema import Recipe
from appliance.settings.sections import Batch, Cluster, Model, Rollout, Task, Trainer

VERL = Path(importlib.util.find_spec("verl").submodule_search_locations[0])
DRAWN = 400


def drawn(seed: int) -> Iterator[Recipe]:
    """Small numbers: about every tenth fits."""
    draw = random.Random(seed)
    for _ in range(DRAWN):
        packs, sharing = draw.random() < 0.5, draw.choice((1, 1, 2))
        yield Recipe(
            model=Model(path="/m"),
            task=Task(kind="gsm8k", max_prompt_tokens=16, max_response_tokens=16),
            rollout=Rollout(samples_per_prompt=draw.choice((2, 3, 4)), tensor_parallel=draw.choice((1, 2))),
            batch=Batch(
                prompts_per_step=draw.choice((2, 4, 6, 8)),
                mini_batch_prompts=draw.choice((None, 1, 2, 3, 4)),
                micro_batch_sequences=None if packs else draw.choice((None, 1, 2, 4)),
                max_tokens_per_gpu=draw.choice((8, 16, 24, 32, 64)) if packs else None,
            ),
            trainer=Trainer(steps=1, sequence_parallel=sharing),
            cluster=Cluster(device="h100", gpus_per_node=draw.choice((1, 2, 3, 4))),
        )


@pytest.fixture(scope="module")
def config() -> DictConfig:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(VERL / "trainer" / "config"), version_base=None):
        return compose(config_name="ppo_trainer")


def of_verl(config: DictConfig, recipe: Recipe) -> None:
    """Raises what verl raises before its workers start."""
    from verl.utils.config import validate_config

    actor, batch = "actor_rollout_ref.actor", recipe.batch
    values = {
        "trainer.n_gpus_per_node": recipe.cluster.gpus_per_node,
        "trainer.nnodes": 1,
        "data.train_batch_size": batch.prompts_per_step,
        "actor_rollout_ref.rollout.n": recipe.rollout.samples_per_prompt,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 1,
        "actor_rollout_ref.model.use_remove_padding": True,
        f"{actor}.strategy": "fsdp2",
        f"{actor}.use_dynamic_bsz": batch.max_tokens_per_gpu is not None,
        f"{actor}.ppo_mini_batch_size": batch.mini_batch_prompts or batch.prompts_per_step,
        f"{actor}.ppo_micro_batch_size_per_gpu": batch.micro_batch_sequences or 1,
        f"{actor}.ulysses_sequence_parallel_size": recipe.trainer.sequence_parallel,
    }
    for key, value in values.items():
        OmegaConf.update(config, key, value)
    validate_config(config=config, use_reference_policy=False, use_critic=False)


def at_run_time(recipe: Recipe) -> bool:
    """What its workers assert once they run, in words of verl 0.9.1's sources.

    engine_workers.py:267 (the mini-batch over the data-parallel ranks), :659 (engines over the GPUs), fsdp's
    world_size // ulysses size, seqlen_balancing.py:147 (equal parts), :384 (a forward holds the longest sequence), and
    the micro-batches of a rank, which tu.make_iterator and chunking want to be equal.
    """
    batch, gpus, sharing = recipe.batch, recipe.cluster.gpus_per_node, recipe.trainer.sequence_parallel
    samples, ranks = recipe.rollout.samples_per_prompt, max(1, gpus // sharing)
    mini = (batch.mini_batch_prompts or batch.prompts_per_step) * samples
    longest = recipe.task.max_prompt_tokens + recipe.task.max_response_tokens
    return (
        gpus % recipe.rollout.tensor_parallel == 0
        and gpus % sharing == 0
        and mini % ranks == 0
        and batch.prompts_per_step * samples % ranks == 0
        and (batch.max_tokens_per_gpu is None or batch.max_tokens_per_gpu * sharing >= longest)
        and (batch.micro_batch_sequences is None or mini // ranks % batch.micro_batch_sequences == 0)
    )


@pytest.mark.slow
def test_what_passes_here_passes_there(config: DictConfig) -> None:
    counts: Counter[tuple[str, bool]] = Counter()
    for recipe in drawn(seed=0):
        passes = not judge(RULES, recipe)
        try:
            of_verl(config, recipe)
            taken = True
        except (AssertionError, ValueError):
            taken = False
        runs = taken and at_run_time(recipe)
        assert runs or not passes, recipe.batch
        counts["packed" if recipe.batch.max_tokens_per_gpu else "padded", passes] += 1
        counts["taken by verl, fails later", taken and not at_run_time(recipe)] += 1
    assert counts["packed", True] >= 10 and counts["padded", True] >= 10
    assert counts["taken by verl, fails later", True] >= 50  # what its own check at the start does not see
