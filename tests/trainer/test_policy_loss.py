"""ACR as verl calls it: verl's own loss to the last bit with no truncated token, the published formula with some."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from plans import make_plan
from torch import Tensor
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import FSDPActorConfig

from appliance.errors import NumericsError, TrainingError
from appliance.plan.env import PLAN_VARIABLE
from appliance.plan.model import CorrectionPlan
from appliance.plan.verl_args import LOSSES
from appliance.quant.correction import CorrectionMethod
from appliance.trainer import policy_loss
from appliance.trainer.policy_loss import acr_loss

CAP, DUAL = 1.5, 3.0
# So that a float32 ratio can lie exactly on a bound: exp(-1/4) and exp(1/4) as float32 has them.
LOW, HIGH = 1 - float(torch.tensor(-0.25).exp()), float(torch.tensor(0.25).exp()) - 1
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean")


@dataclass(frozen=True)
class Batch:
    """[B, T] float32. raw: weights before truncation, 0 at padding."""

    old: Tensor
    new: Tensor
    advantages: Tensor
    mask: Tensor
    raw: Tensor


def make_batch(seed: int, *, highest: float, sequences: int = 16, tokens: int = 20) -> Batch:
    """Ratios on both sides of every clip, some exactly on one; weights up to `highest`."""
    rng = np.random.default_rng(seed)
    mask = np.arange(tokens) < rng.integers(1, tokens + 1, sequences)[:, None]
    old = -np.round(rng.exponential(1.0, (sequences, tokens)) * 64) / 64 - 3  # coarse: new - old is exact
    log_ratios = rng.normal(0, 0.7, (sequences, tokens))
    log_ratios[:, ::5] = rng.choice([-0.25, 0.25, 0.0], (sequences, len(range(0, tokens, 5))))
    raw = np.minimum(np.exp(rng.normal(0, 0.8, (sequences, tokens))), highest) * mask
    advantages = np.repeat(rng.normal(0, 1, (sequences, 1)), tokens, axis=1)
    arrays = (old, old + log_ratios, advantages)
    tensors = [torch.from_numpy(each.astype(np.float32)) for each in arrays]
    return Batch(*tensors, torch.from_numpy(mask), torch.from_numpy(raw.astype(np.float32)))


def make_config(**info: object) -> FSDPActorConfig:
    config = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=LOW,
        clip_ratio_high=HIGH,
        clip_ratio_c=DUAL,
    )
    config.global_batch_info.update(info)
    return config


def by_verl(batch: Batch, *, mode: str, config: FSDPActorConfig, weights: Tensor) -> tuple[Tensor, Tensor, dict]:
    """(loss, gradient, metrics) of verl's own clipped loss."""
    new = batch.new.clone().requires_grad_()
    vanilla = get_policy_loss_fn("vanilla")
    loss, metrics = vanilla(batch.old, new, batch.advantages, batch.mask, mode, config, weights)
    loss.backward()
    return loss.detach(), new.grad, metrics


def by_us(batch: Batch, *, mode: str, config: FSDPActorConfig) -> tuple[Tensor, Tensor, dict]:
    new, raw = batch.new.clone().requires_grad_(), batch.raw.clone().requires_grad_()
    loss, metrics = acr_loss(
        batch.old,
        log_prob_BT=new,
        advantages_BT=batch.advantages,
        mask_BT=batch.mask,
        raw_BT=raw,
        cap=CAP,
        config=config,
        loss_agg_mode=mode,
    )
    loss.backward()
    assert raw.grad is None  # a weight changes the measure, not the objective
    return loss.detach(), new.grad, metrics


def reference(batch: Batch) -> tuple[float, float]:
    """(token mean, sum of absolute terms) in float64, token by token, by the published formula and verl's dual clip."""
    total, size = 0.0, 0.0
    for index in zip(*np.nonzero(batch.mask.numpy()), strict=True):
        ratio = np.exp(float(batch.new[index]) - float(batch.old[index]))
        advantage, weight = float(batch.advantages[index]), float(batch.raw[index])
        shrink = min(1.0, CAP / weight)  # r = p_rollout / max(p_rollout, p_trainer / C)
        clipped = min(max(ratio, 1 - LOW), (1 + HIGH) / shrink)
        objective = min(ratio * advantage, clipped * advantage)
        if advantage < 0:
            objective = max(objective, DUAL * advantage)
        total -= min(weight, CAP) * objective
        size += abs(min(weight, CAP) * objective)
    return total / int(batch.mask.sum()), size / int(batch.mask.sum())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(5))
def test_without_a_truncated_token_it_is_verls_loss_to_the_last_bit(mode: str, seed: int) -> None:
    batch, config = make_batch(seed, highest=CAP), make_config()
    loss, gradient, metrics = by_us(batch, mode=mode, config=config)
    their_loss, their_gradient, theirs = by_verl(batch, mode=mode, config=config, weights=batch.raw.clamp(max=CAP))
    assert torch.equal(loss, their_loss) and torch.equal(gradient, their_gradient)
    assert {**theirs, "actor/acr_widened_fraction": 0.0} == metrics
    assert 0 < theirs["actor/pg_clipfrac"] < 1 and theirs["actor/pg_clipfrac_lower"] > 0  # every clip was at work


@pytest.mark.parametrize("seed", range(5))
def test_with_truncated_tokens_it_is_the_formula(seed: int) -> None:
    batch = make_batch(seed, highest=20.0)
    loss, _, metrics = by_us(batch, mode="token-mean", config=make_config())
    wanted, size = reference(batch)
    # per term: two differences of numbers below 8 (2^-21 absolute, and exp makes it relative), a few products; a sum
    # of at most 320 terms adds 2^-24 per level. A ratio at a tie may fall to either side, with the same value there.
    assert abs(float(loss) - wanted) < 2.0**-18 * size
    assert metrics["actor/acr_widened_fraction"] == pytest.approx(
        float((batch.raw > CAP).sum() / batch.mask.sum()), rel=1e-6
    )


def test_a_truncated_token_is_clipped_later_and_only_above() -> None:
    """One token, w = 3 at cap 1.5: the upper bound is 2.57, the lower stays 0.78."""
    one = torch.ones(1, 1)
    for ratio, advantage, flows in ((2.0, 1.0, True), (2.8, 1.0, False), (0.7, -1.0, False), (2.0, -1.0, True)):
        batch = Batch(-4 * one, -4 * one + float(np.log(ratio)), advantage * one, one.bool(), 3 * one)
        _, gradient, _ = by_us(batch, mode="token-mean", config=make_config())
        assert bool(gradient.item()) == flows
        _, theirs, _ = by_verl(batch, mode="token-mean", config=make_config(), weights=CAP * one)
        assert bool(theirs.item()) == (flows and advantage < 0)  # TIS clips the positive one at 1.28


@pytest.mark.parametrize("mode", MODES[:3])
def test_micro_batches_add_up_to_the_batch(mode: str) -> None:
    batch = make_batch(9, highest=20.0)
    info = {"dp_size": 1, "batch_num_tokens": int(batch.mask.sum()), "global_batch_size": len(batch.mask)}
    config = make_config(**info)
    loss, gradient, _ = by_us(batch, mode=mode, config=config)
    parts = [
        by_us(Batch(*(value[rows] for value in vars(batch).values())), mode=mode, config=config)
        for rows in (slice(0, 5), slice(5, 6), slice(6, None))
    ]
    # sums of 320 float32 terms in another order: 2^-24 of the absolute sum per level of a tree
    tolerance = 2.0**-18 * float(gradient.abs().sum())
    assert abs(float(sum(part[0] for part in parts) - loss)) < tolerance
    assert torch.allclose(torch.cat([part[1] for part in parts]), gradient, rtol=1e-6, atol=0)


def test_padding_changes_nothing() -> None:
    batch = make_batch(3, highest=20.0)
    wide = Batch(*(torch.nn.functional.pad(value, (0, 7)) for value in vars(batch).values()))
    loss, gradient, _ = by_us(batch, mode="token-mean", config=make_config())
    wide_loss, wide_gradient, _ = by_us(wide, mode="token-mean", config=make_config())
    assert torch.equal(wide_gradient[:, :20], gradient) and not bool(wide_gradient[:, 20:].any())
    assert float(wide_loss) == pytest.approx(float(loss), rel=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_raises(bad: float) -> None:
    batch = make_batch(0, highest=2.0)
    raw = batch.raw.clone()
    raw[0, 0] = bad
    with pytest.raises(NumericsError) as raised:
        by_us(replace(batch, raw=raw), mode="token-mean", config=make_config())
    assert raised.value.message == "an importance weight of this step is not finite"


def test_verl_finds_it_by_the_name_that_the_plan_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_plan(tmp_path, correction=CorrectionPlan(method=CorrectionMethod.ACR, cap=CAP)).write(tmp_path / "plan.json")
    monkeypatch.setenv(PLAN_VARIABLE, str(tmp_path / "plan.json"))
    policy_loss._cap.cache_clear()
    registered, batch = get_policy_loss_fn(LOSSES[CorrectionMethod.ACR]), make_batch(1, highest=20.0)
    given = {"old_log_prob": batch.old, "log_prob": batch.new, "advantages": batch.advantages}
    given |= {"response_mask": batch.mask, "loss_agg_mode": "token-mean", "config": make_config()}
    loss, _ = registered(**given, rollout_is_weights=batch.raw)
    assert torch.equal(loss, by_us(batch, mode="token-mean", config=make_config())[0])
    with pytest.raises(TrainingError) as raised:
        registered(**given, rollout_is_weights=None)
    assert raised.value.message == "`acr` got a batch without importance weights"
    policy_loss._cap.cache_clear()
