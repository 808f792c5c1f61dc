"""TBPO as verl calls it, against the formula response by response in float64; and which tokens a loss clips."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from test_corrected_loss import (
    DUAL,
    LOW,
    ROLLOUT,
    WIDE,
    Batch,
    Bounds,
    as_verl_has_it,
    bounds_of_acr,
    by_us,
    everywhere,
    make_batch,
    make_config,
)
from torch import Tensor
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric
from verl.workers.config import FSDPActorConfig, PolicyLossConfig

from appliance.corrections.objective import Loss
from appliance.plan.verl_args import LOSS_MODES
from appliance.trainer.correction import CLIPPED_NEGATIVE, NEGATIVE, clipped_negative_fraction, corrected_loss

SPEC = Loss.TBPO.spec
# The loss is computed in float64 of float32 numbers: sums of at most 40 terms, 40 * 2^-53 of their absolute sum.
RTOL = 1e-12
ROUNDED = 2.0**-23  # and its gradient is rounded to float32 on its way


@dataclass(frozen=True)
class Case:
    """A batch, the tokens that stay, and a weight for each response, float32."""

    batch: Batch
    in_loss: Tensor
    weights: Tensor


def make_case(seed: int, *, sequences: int = 60, tokens: int = 40, spread: float = 1e-3) -> Case:
    """Mean ratios of responses on both sides of every bound, whatever their single tokens do; every tenth response is
    one token, every ninth is dropped, and of the others one token in five does not count (a tool's)."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, tokens + 1, sequences)
    lengths[::10] = 1
    mask = np.arange(tokens) < lengths[:, None]
    in_loss = mask & (rng.random(mask.shape) < 0.8)
    in_loss[:, 0] = mask[:, 0]
    in_loss[4::9] = False
    noise = rng.normal(0, 0.3, mask.shape) * in_loss
    noise -= noise.sum(axis=1, keepdims=True) / np.maximum(1, in_loss.sum(axis=1, keepdims=True)) * in_loss
    junk = rng.normal(0, 2, mask.shape) * ~in_loss
    old = -rng.exponential(1.0, mask.shape) - 0.1
    new = old + noise + junk + rng.normal(0, spread, (sequences, 1))
    advantages = np.repeat(rng.normal(0, 1, (sequences, 1)), tokens, axis=1)
    weights = np.repeat(rng.uniform(0.2, 2, (sequences, 1)), tokens, axis=1) * mask
    found = [torch.from_numpy(each.astype(np.float32)) for each in (old, new, advantages, weights)]
    batch = Batch(*found[:3], torch.from_numpy(mask), torch.from_numpy(mask.astype(np.float32)))
    return Case(batch, torch.from_numpy(in_loss), found[3])


def config_of(
    low: float = SPEC.clip.low, high: float = SPEC.clip.high, dual: float = SPEC.dual_clip, **changes: object
) -> FSDPActorConfig:
    mode = PolicyLossConfig(loss_mode=LOSS_MODES[Loss.TBPO])
    return make_config(policy_loss=mode, clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=dual, **changes)


def as_verl(case: Case) -> tuple[dict[str, Tensor], TensorDict, Tensor]:
    return as_verl_has_it(case.batch, weights=case.weights, in_loss=case.in_loss)


def of_tbpo(case: Case, *, config: FSDPActorConfig) -> tuple[float, Tensor, dict[str, Metric]]:
    output, data, leaf = as_verl(case)
    loss, metrics = corrected_loss(config, output, data, kind=Loss.TBPO)
    loss.backward()
    return loss.item(), leaf.grad, metrics


@dataclass(frozen=True)
class Wanted:
    """size: mean of absolute terms.  clipped, negative: tokens with a negative advantage.  cases: of a response."""

    loss: float
    size: float
    gradient: np.ndarray
    clipped: int
    negative: int
    cases: set[str]


def reference(case: Case, *, low: float, high: float, dual: float) -> Wanted:
    """In numpy's float64, response by response, and its gradient by hand: the mean over responses of w A min(r, 1 +
    high), for A < 0 of w A r where 1 - low <= r <= dual, else 0; r is the geometric mean of p / p_old. QaRL, arXiv
    2604.07853, read as in trainer/correction.py."""
    loss = size = 0.0
    clipped = negative = 0
    gradient, cases = np.zeros(case.in_loss.shape), set()
    number = len(case.in_loss)
    for row in range(number):
        tokens = np.flatnonzero(case.in_loss[row].numpy())
        if not len(tokens):
            cases.add("dropped by the correction")
            continue
        differences = [float(case.batch.new[row, token]) - float(case.batch.old[row, token]) for token in tokens]
        ratio = float(np.exp(np.mean(differences)))
        advantage, weight = float(case.batch.advantages[row, 0]), float(case.weights[row, 0])
        if advantage >= 0:
            inside = ratio <= 1 + high
            objective = weight * advantage * min(ratio, 1 + high)
            cases.add("positive" if inside else "positive above")
        else:
            inside = 1 - low <= ratio <= dual
            objective = weight * advantage * ratio if inside else 0.0
            negative += len(tokens)
            clipped += 0 if inside else len(tokens)
            cases.add("negative" if inside else "negative below" if ratio < 1 else "negative beyond")
        loss -= objective / number
        size += abs(objective) / number
        if inside:
            gradient[row, tokens] = -weight * advantage * ratio / len(tokens) / number
    return Wanted(loss, size, gradient, clipped, negative, cases)


EVERY_CASE = {
    "dropped by the correction",
    "positive",
    "positive above",
    "negative",
    "negative below",
    "negative beyond",
}


@pytest.mark.parametrize("bounds", [(3e-4, 4e-4, 1.0007), (9e-4, 2e-4, 1.0001)])
@pytest.mark.parametrize("seed", range(4))
def test_loss_and_gradient_are_the_formula(seed: int, bounds: tuple[float, float, float]) -> None:
    case, (low, high, dual) = make_case(seed), bounds
    expected = reference(case, low=low, high=high, dual=dual)
    assert expected.cases == EVERY_CASE
    loss, gradient, metrics = of_tbpo(case, config=config_of(low, high, dual))
    assert abs(loss - expected.loss) < RTOL * expected.size
    np.testing.assert_allclose(gradient.numpy(), expected.gradient, rtol=ROUNDED, atol=0)
    assert (metrics[NEGATIVE].aggregate(), metrics[CLIPPED_NEGATIVE].aggregate()) == (
        expected.negative,
        expected.clipped,
    )


def one_response(mean: float, *, advantage: float, tokens: int) -> Case:
    """Single tokens far from 1, their mean log-ratio as given."""
    old, swing = torch.full((1, tokens), -2.0), torch.tensor([[0.25, -0.25] * tokens])[:, :tokens]
    swing = swing - swing.mean()
    ones = torch.ones(1, tokens)
    batch = Batch(old, old + swing + mean, advantage * ones, ones.bool(), ones)
    return Case(batch, ones.bool(), ones)


@pytest.mark.parametrize("tokens", [1, 2, 8])
@pytest.mark.parametrize(
    ("mean", "advantage", "learns"),
    [
        (3e-4, 1.0, True),
        (5e-4, 1.0, False),
        (-0.5, 1.0, True),  # a good answer that became unlikely is always pulled back
        (-2e-4, -1.0, True),
        (-4e-4, -1.0, False),
        (6e-4, -1.0, True),
        (8e-4, -1.0, False),
        (0.5, -1.0, False),
    ],
)
def test_by_default_a_response_learns_inside_of_the_sources_bounds(
    mean: float, advantage: float, learns: bool, tokens: int
) -> None:
    case = one_response(mean, advantage=advantage, tokens=tokens)
    loss, gradient, metrics = of_tbpo(case, config=config_of())
    assert bool(gradient.all()) == bool(gradient.any()) == learns
    held = min(np.exp(mean), 1.0004) if advantage > 0 else np.exp(mean) if learns else 0.0
    assert loss == pytest.approx(-advantage * held, abs=1e-6)  # log-probs near 2 in float32: 2^-23
    share = clipped_negative_fraction({name: metric.aggregate() for name, metric in metrics.items()})
    assert share == (None if advantage > 0 else float(not learns))


def test_a_ratio_without_a_float_stays_finite_and_so_does_its_gradient() -> None:
    for mean, advantage in ((1000.0, -1.0), (-1000.0, -1.0), (1000.0, 1.0), (-1000.0, 1.0)):
        loss, gradient, _ = of_tbpo(one_response(mean, advantage=advantage, tokens=4), config=config_of())
        assert np.isfinite(loss) and not bool(gradient.any())


def test_verls_metrics_count_what_was_clipped() -> None:
    case = make_case(7)
    expected, (_, _, metrics) = (
        reference(case, low=9e-4, high=2e-4, dual=1.0012),
        of_tbpo(case, config=config_of(9e-4, 2e-4, 1.0012)),
    )
    in_loss, negative = case.in_loss, case.batch.advantages < 0
    log_ratio = ((case.batch.new.double() - case.batch.old.double()) * in_loss).sum(-1) / in_loss.sum(-1).clamp(min=1)
    ratio = log_ratio.exp()[:, None].expand(in_loss.shape)
    above, beyond = in_loss & ~negative & (ratio > 1.0002), in_loss & negative & (ratio > 1.0012)
    clipped = int(above.sum()) + expected.clipped - int(beyond.sum())
    # means of at most 2400 ones and zeros in float32
    assert metrics["actor/pg_clipfrac"].aggregate() == pytest.approx(clipped / int(in_loss.sum()), rel=1e-6)
    assert metrics["actor/pg_clipfrac_lower"].aggregate() == pytest.approx(
        int(beyond.sum()) / int(in_loss.sum()), rel=1e-6
    )
    wanted_kl = float((case.batch.old.double() - case.batch.new.double())[in_loss].mean())
    # a sum of 2000 differences of about 0.3, in float32: 2^-24 of the absolute sum per level of a tree
    assert metrics["actor/ppo_kl"].aggregate() == pytest.approx(wanted_kl, abs=0.3 * 2.0**-20)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum"])
def test_each_response_counts_once_whatever_verl_takes_the_mean_over(mode: str) -> None:
    case = make_case(3)
    assert of_tbpo(case, config=config_of(loss_agg_mode=mode))[0] == of_tbpo(case, config=config_of())[0]


def test_micro_batches_add_up_to_the_batch() -> None:
    case, number = make_case(5), 60
    loss, gradient, whole = of_tbpo(case, config=config_of())
    losses, gradients, parts = [], [], []
    for rows in (slice(0, 7), slice(7, 8), slice(8, None)):
        part = Case(case.batch.part(rows), case.in_loss[rows], case.weights[rows])
        output, data, leaf = as_verl(part)
        tu.assign_non_tensor(data, global_batch_size=number, batch_num_tokens=int(case.batch.mask.sum()))
        part_loss, metrics = corrected_loss(config_of(), output, data, kind=Loss.TBPO)
        part_loss.backward()
        losses, gradients, parts = [*losses, part_loss.item()], [*gradients, leaf.grad], [*parts, metrics]
    assert sum(losses) == pytest.approx(loss, rel=1e-9)  # terms of both signs, that cancel in part
    assert torch.allclose(torch.cat(gradients), gradient, rtol=ROUNDED, atol=0)
    for name in (NEGATIVE, CLIPPED_NEGATIVE):
        assert sum(part[name].aggregate() for part in parts) == whole[name].aggregate()


def test_every_loss_has_its_function_in_verl() -> None:
    assert list(LOSS_MODES) == list(Loss)
    assert all(callable(get_policy_loss_fn(mode)) for mode in LOSS_MODES.values())


# what every loss counts


def counted(
    batch: Batch, *, bounds: Bounds | None = None, ratio_to: str = "old_log_probs", in_loss: Tensor | None = None
) -> tuple[float, float]:
    _, _, metrics = by_us(batch, weights=batch.mask.float(), bounds=bounds, ratio_to=ratio_to, in_loss=in_loss)
    return metrics[NEGATIVE].aggregate(), metrics[CLIPPED_NEGATIVE].aggregate()


@pytest.mark.parametrize("seed", range(3))
def test_with_negative_advantages_alone_the_share_is_verls_own(seed: int) -> None:
    """verl counts what is clipped below, and by the dual clip, over all tokens. Some lie exactly on a bound."""
    batch = make_batch(seed, highest=9.0)
    batch = replace(batch, advantages=-batch.advantages.abs() - 0.1)
    _, _, metrics = by_us(batch, weights=batch.mask.float())
    verls = sum(metrics[f"actor/pg_clipfrac{end}"].aggregate() for end in ("", "_lower"))
    negative, clipped = (metrics[name].aggregate() for name in (NEGATIVE, CLIPPED_NEGATIVE))
    assert negative == int(batch.mask.sum()) and 0 < clipped < negative
    assert clipped / negative == pytest.approx(verls, rel=1e-6)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("to_rollout", [False, True])
@pytest.mark.parametrize("clips", ["", "acr", "wide"])
def test_clipped_are_the_tokens_that_learn_nothing(seed: int, to_rollout: bool, clips: str) -> None:
    """Of those that stay and have a negative advantage: verl's gradient is 0 there, and nowhere else."""
    batch = make_batch(seed, highest=9.0)
    in_loss = batch.mask & (torch.arange(len(batch.mask)) % 3 > 0).unsqueeze(-1)
    bounds = {"": None, "acr": bounds_of_acr(batch), "wide": everywhere(WIDE, batch)}[clips]
    how = {"bounds": bounds, "ratio_to": ROLLOUT if to_rollout else "old_log_probs", "in_loss": in_loss}
    _, gradient, _ = by_us(batch, weights=batch.mask.float(), **how)
    log_ratio = batch.new - batch.old + (batch.raw.clamp(min=1e-9).log() if to_rollout else 0)
    lower = 1 - LOW if bounds is None else bounds.lower
    on_a_bound = ((log_ratio.exp() - lower).abs() < 1e-6) | ((log_ratio.exp() - DUAL).abs() < 1e-6)  # half flows there
    negative = in_loss & (batch.advantages < 0)
    flat = negative & (gradient == 0) & ~on_a_bound
    assert 0 < int(flat.sum()) < int(negative.sum())
    assert counted(batch, **how) == (int(negative.sum()), int(flat.sum()))
