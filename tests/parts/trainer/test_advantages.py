"""Each advantage, by verl's function as our overrides ask for it, against its formula in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from plans import HOST, verl_config
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.protocol import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import get_kl_controller
from verl.trainer.ppo.ray_trainer import apply_kl_penalty, compute_advantage

from appliance.corrections.objective import Advantage, Estimator
from appliance.plan.build import build_plan
from appliance.plan.verl_args import ESTIMATORS
from appliance.recipe.load import load_recipe
from appliance.tasks.grading import Fault, Graded
from appliance.trainer import correction as module
from appliance.trainer.correction import gdpo, with_gdpo, without_advantage
from appliance.trainer.grade_book import GradeBook

GROUPS, SAMPLES, TOKENS = 6, 4, 9
ATOL = 2e-5  # float32 sums of some hundred terms of size 1, divided by deviations of 0.1 and more


def make_batch(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(rewards [B] in halves, of one group all equal; mask [B, T]; group of each)."""
    rng = np.random.default_rng(seed)
    rewards = rng.integers(0, 3, GROUPS * SAMPLES) / 2
    rewards[:SAMPLES] = 1
    lengths = rng.integers(1, TOKENS + 1, len(rewards))
    return rewards, np.arange(TOKENS) < lengths[:, None], np.repeat(np.arange(GROUPS), SAMPLES)


def whitened(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    found = values[mask]
    return (values - found.mean()) / np.sqrt(found.var(ddof=1) + 1e-8)


def grpo(r: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """(r - mean) / (s + 1e-6), s with n - 1. arXiv 2402.03300."""
    return (r - r.mean()) / (r.std(ddof=1) + 1e-6)


def dr_grpo(r: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """r - mean. arXiv 2503.20783."""
    return r - r.mean()


def rloo(r: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """r less the mean of the others. arXiv 2402.14740."""
    return r - (r.sum() - r) / (len(r) - 1)


def opo(r: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """r less the mean weighed by length. arXiv 2505.23585."""
    lengths = mask.sum(axis=1)
    return r - (lengths * r).sum() / lengths.sum()


OF_GROUPS: dict[Advantage, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    Advantage.GRPO: grpo,
    Advantage.DR_GRPO: dr_grpo,
    Advantage.RLOO: rloo,
    Advantage.OPO: opo,
}


def reinforce_plus_plus(r: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The rewards from the token on, whitened over the step's tokens. The reward is the last token's, so that all of
    these sums are it. arXiv 2501.03262."""
    return whitened(np.repeat(r[:, None], TOKENS, axis=1), mask) * mask


def reference(advantage: Advantage, rewards: np.ndarray, mask: np.ndarray, group: np.ndarray) -> np.ndarray:
    if advantage is Advantage.REINFORCE_PLUS_PLUS:
        return reinforce_plus_plus(rewards, mask)
    by_group = np.concatenate(
        [OF_GROUPS[advantage](rewards[group == each], mask[group == each]) for each in np.unique(group)]
    )
    return by_group[:, None] * mask


@pytest.mark.parametrize("advantage", [each for each in Advantage if each is not Advantage.GDPO])
def test_it_is_its_formula(advantage: Advantage) -> None:
    for seed in range(5):
        rewards, mask, group = make_batch(seed)
        token_rewards = np.zeros(mask.shape)
        token_rewards[np.arange(len(rewards)), mask.sum(axis=1) - 1] = rewards
        fields = {
            "token_level_rewards": torch.from_numpy(token_rewards).float(),
            "response_mask": torch.from_numpy(mask),
        }
        fields["response_mask"] = fields["response_mask"].long()
        data = DataProto.from_single_dict({**fields, "uid": group.astype(object)})
        data = compute_advantage(
            data,
            adv_estimator=ESTIMATORS[advantage],
            num_repeat=SAMPLES,
            norm_adv_by_std_in_grpo=advantage is not Advantage.DR_GRPO,
            config=AlgoConfig(),
        )
        wanted = reference(advantage, rewards, mask, group)
        np.testing.assert_allclose(data.batch["advantages"].numpy(), wanted, atol=ATOL)


@pytest.mark.parametrize("estimator", Estimator)
def test_a_divergence_in_the_reward_is_taken_off_each_token(estimator: Estimator) -> None:
    """score - weight * estimator of x = log p_start - log p, by verl's function and of its configuration for our plan:
    k1 is -x, k2 x^2 / 2, k3 exp(x) - 1 - x, by verl 10 at most. Schulman 2020, Approximating KL Divergence."""
    weight, rng = 0.25, np.random.default_rng(0)
    sets = (f"algorithm.kl={weight}", f"algorithm.kl_estimator={estimator}", "algorithm.kl_in=reward")
    plan = build_plan(load_recipe("arithmetic-tiny-int8", sets=sets), run_dir=Path("/runs/a-1"), host=HOST)
    config = verl_config(plan.argv[4:]).algorithm
    assert config.use_kl_in_reward
    rewards, mask, _ = make_batch(0)
    score = rewards[:, None] * (np.arange(TOKENS) == mask.sum(axis=1)[:, None] - 1)
    old, start = (-rng.exponential(1.0, mask.shape).astype(np.float32) for _ in range(2))
    old[0, 0], start[0, 0] = -4, -1
    fields = {"token_level_scores": score, "response_mask": mask, "old_log_probs": old, "ref_log_prob": start}
    data = DataProto.from_single_dict({name: torch.from_numpy(each) for name, each in fields.items()})
    data, _ = apply_kl_penalty(data, get_kl_controller(config.kl_ctrl), config.kl_penalty)
    x = start.astype(np.float64) - old
    assert x[0, 0] == 3
    of_token = {Estimator.K1: -x, Estimator.K2: x**2 / 2, Estimator.K3: np.minimum(np.exp(x) - 1 - x, 10)}[estimator]
    # float32 differences of numbers below 10, and what is made of them: some 2^-23 each
    np.testing.assert_allclose(data.batch["token_level_rewards"], score - weight * of_token * mask, atol=2e-6)


def test_gdpo_normalises_each_reward_by_itself() -> None:
    """sum of weight * grpo of each reward, whitened over the step's tokens. arXiv 2601.05242."""
    for seed in range(5):
        rewards, mask, group = make_batch(seed)
        parts = {"right": rewards, "short": np.random.default_rng(seed).integers(0, 5, len(rewards)) * 100.0}
        weights = {"right": 1.0, "short": 0.3}
        normalised = [weights[name] * reference(Advantage.GRPO, parts[name], mask, group) for name in parts]
        advantages = gdpo(
            {name: list(values) for name, values in parts.items()},
            weights=weights,
            uids=[str(uid) for uid in group],
            mask_BT=torch.from_numpy(mask),
        )
        np.testing.assert_allclose(advantages.numpy(), whitened(sum(normalised), mask) * mask, atol=1e-4)


@pytest.mark.parametrize("samples", [3, 6, 8, 16])
def test_gdpo_teaches_nothing_where_no_group_differs(samples: int) -> None:
    """Whitened over the step, what float32 rounds of a mean would be an advantage of 1."""
    uids = [str(prompt) for prompt in range(16) for _ in range(samples)]
    parts = {"right": [1.0] * len(uids), "short": [0.1 * (int(uid) + 1) for uid in uids]}
    mask = torch.ones(len(uids), 3)
    assert not gdpo(parts, weights={"right": 1.0, "short": 0.5}, uids=uids, mask_BT=mask).any()


def test_gdpo_leaves_out_what_has_lost_its_grade() -> None:
    """As if the response were not there, and where it leaves one alone in its group, not that one either."""
    rewards, mask, group = make_batch(3)
    short = np.random.default_rng(3).integers(0, 5, len(rewards)) * 100.0
    lost = np.zeros(len(rewards), dtype=bool)
    lost[[4, 9, 13, 14, 15]] = True  # one of two groups each, all but one of a third
    counted = ~lost & (np.arange(len(rewards)) != 12)
    parts = {"right": np.where(lost, np.nan, rewards), "short": np.where(lost, np.nan, short)}
    weights = {"right": 1.0, "short": 0.3}
    advantages = gdpo(
        {name: list(values) for name, values in parts.items()},
        weights=weights,
        uids=[str(uid) for uid in group],
        mask_BT=torch.from_numpy(mask),
    )
    _, numbered = np.unique(group[counted], return_inverse=True)
    normalised = [
        weights[name] * reference(Advantage.GRPO, parts[name][counted], mask[counted], numbered) for name in parts
    ]
    wanted = np.zeros(mask.shape)
    wanted[counted] = whitened(sum(normalised), mask[counted]) * mask[counted]
    np.testing.assert_allclose(advantages.numpy(), wanted, atol=1e-4)
    none = {name: [np.nan] * len(rewards) for name in parts}
    uids = [str(uid) for uid in group]
    assert not gdpo(none, weights=weights, uids=uids, mask_BT=torch.from_numpy(mask)).any()


class Queue:
    """A partition of the TransferQueue with two prompts' samples, of lengths 2, 1, 3, 2."""

    def __init__(self) -> None:
        self.columns = {"response_mask": [torch.ones(length, dtype=torch.int64) for length in (2, 1, 3, 2)]}

    def batch(self) -> KVBatchMeta:
        keys = ["a_0_0", "a_1_0", "b_0_0", "b_1_0"]
        return KVBatchMeta(keys=keys, tags=[{}] * 4, partition_id="train", fields=list(self.columns))

    def kv_batch_get(self, *, keys: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        rows = {name: torch.nested.as_nested_tensor(self.columns[name], layout=torch.jagged) for name in select_fields}
        return TensorDict(rows, batch_size=4)

    def kv_batch_put(self, *, keys: list[str], partition_id: str, fields: TensorDict) -> KVBatchMeta:
        self.columns |= {name: list(rows.unbind()) for name, rows in fields.items()}
        return self.batch()


def test_gdpo_is_written_over_what_verl_made_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what the driver graded; a reward that does not apply counts 0, and a fault nothing."""
    queue = Queue()
    monkeypatch.setattr(module, "transfer_queue", queue)
    grades = GradeBook(rewards=("right", "short"))
    whole = Graded(1.0, parts=(("right", 1.0), ("short", 0.5)))
    grades.add("a", [whole, Graded(0.0, parts=(("right", 0.0),))], step=1, validate=False)
    best = Graded(1.0, parts=(("right", 1.0), ("short", 2.0)))
    grades.add("b", [best, Graded(0.0, Fault.RAISED)], step=1, validate=False)
    parts = grades.reward_parts(queue.batch().keys)
    np.testing.assert_equal(parts, {"right": [1.0, 0.0, 1.0, np.nan], "short": [0.5, 0.0, 2.0, np.nan]})
    batch = with_gdpo(queue.batch(), parts=parts, weights={"right": 1.0, "short": 0.1})
    assert {"advantages", "returns"} <= set(batch.fields)
    lengths = [len(row) for row in queue.columns["advantages"]]
    assert lengths == [2, 1, 3, 2]
    first, second, *others = (row.tolist() for row in queue.columns["advantages"])
    assert min(first) > 0 > max(second) and {value for row in others for value in row} == {0.0}


def test_a_sample_without_a_grade_has_no_advantage(monkeypatch: pytest.MonkeyPatch) -> None:
    """OPO's and REINFORCE++'s of the others' mean reward is not 0."""
    queue = Queue()
    monkeypatch.setattr(module, "transfer_queue", queue)
    queue.columns["advantages"] = [row * 0.5 for row in queue.columns["response_mask"]]
    without_advantage(queue.batch(), places={1, 2})
    assert [row.tolist() for row in queue.columns["advantages"]] == [[0.5, 0.5], [0.0], [0.0] * 3, [0.5, 0.5]]
