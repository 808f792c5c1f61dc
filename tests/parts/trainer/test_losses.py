"""Each loss as verl calls it, with weights, dropped tokens and several micro-batches, against its formula in float64.

The formulas are those of docs/algorithms.md; gradients are by hand. Bounds of the error: float32 log-probs of size 10
have a spacing of 1e-6, a ratio of at most e^3 that error 20 times, and a mean over 300 tokens is far better: 2e-5 of
the largest gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from test_corrected_loss import Batch, as_verl_has_it, jagged, make_config
from verl.utils import tensordict_utils as tu
from verl.workers.config import PolicyLossConfig

from appliance.corrections.objective import Aggregate, Loss
from appliance.plan.verl_args import AGGREGATES, LOSS_MODES
from appliance.trainer.correction import CLIPPED_NEGATIVE, NEGATIVE, WEIGHTS, corrected_loss, mean_reference_kl

ATOL = 2e-5  # of the largest gradient
RESPONSE = 30  # tokens, of the constant
TAU = {True: 1.0, False: 1.05}  # of sapo, by "is above 0"; verl's defaults
COMPARED = tuple(loss for loss in Loss if loss is not Loss.TBPO)  # which test_tbpo.py holds


@dataclass(frozen=True)
class Case:
    """in_loss: tokens that stay.  weights: of a token, or where `shared` of a response; float32."""

    batch: Batch
    in_loss: torch.Tensor
    weights: torch.Tensor


def make_case(seed: int, *, shared: bool, spread: float, sequences: int = 24, tokens: int = 20) -> Case:
    """Ratios on both sides of every bound; every ninth response is dropped, of the others one token in five."""
    rng = np.random.default_rng(seed)
    mask = np.arange(tokens) < rng.integers(2, tokens + 1, sequences)[:, None]
    in_loss = mask & (rng.random(mask.shape) < 0.8)
    in_loss[:, 0], in_loss[4::9] = mask[:, 0], False
    old = -rng.exponential(1.0, mask.shape) - 0.1
    new = old + rng.normal(0, spread, mask.shape) + rng.normal(0, spread, (sequences, 1))
    advantages = np.repeat(rng.normal(0, 1, (sequences, 1)), tokens, axis=1)
    weights = rng.uniform(0.2, 2, (sequences, 1) if shared else mask.shape) * mask
    found = [torch.from_numpy(each.astype(np.float32)) for each in (old, new, advantages, weights)]
    batch = Batch(*found[:3], torch.from_numpy(mask), torch.from_numpy(mask.astype(np.float32)))
    return Case(batch, torch.from_numpy(in_loss), found[3])


@dataclass(frozen=True)
class Token:
    """The variables of a formula. x: log-ratio.  a: advantage.  low, high, dual: bounds.  mean: of x over the tokens of
    the response that stay."""

    x: float
    log_prob: float
    a: float
    low: float
    high: float
    dual: float
    mean: float


Formula = Callable[[Token], tuple[float, float, bool]]  # objective, its slope in the token's log-prob, clipped below


def ppo(t: Token) -> tuple[float, float, bool]:
    """min(R A, clip(R) A), not below dual A where A < 0. Schulman et al. 2017; Ye et al. 2020 (dual clip)."""
    ratio = np.exp(t.x)
    held = np.clip(ratio, 1 - t.low, 1 + t.high)
    value = min(ratio * t.a, held * t.a)
    slope = ratio * t.a if ratio * t.a <= held * t.a else 0.0
    below = t.a < 0 and (ratio < 1 - t.low or ratio > t.dual)
    return (t.dual * t.a, 0.0, below) if t.a < 0 and value < t.dual * t.a else (value, slope, below)


def gspo(t: Token) -> tuple[float, float, bool]:
    """min(m A, clip(m) A), and of a token's log-prob the slope of its share of m. arXiv 2507.18071, eq. 14."""
    ratio = np.exp(t.mean)
    held = np.clip(ratio, 1 - t.low, 1 + t.high)
    slope = ratio * t.a if ratio * t.a <= held * t.a else 0.0
    return min(ratio * t.a, held * t.a), slope, t.a < 0 and ratio < 1 - t.low


def cispo(t: Token) -> tuple[float, float, bool]:
    """sg(min(R, 1 + high)) A log p. arXiv 2506.13585, eq. 4, without a lower bound as in its experiments."""
    held = min(np.exp(t.x), 1 + t.high)
    return held * t.a * t.log_prob, held * t.a, False


def sapo(t: Token) -> tuple[float, float, bool]:
    """A 4/tau sigmoid(tau (R - 1)). arXiv 2511.20347, eq. 5."""
    tau, ratio = TAU[t.a > 0], np.exp(t.x)
    gate = 1 / (1 + np.exp(-tau * (ratio - 1)))
    return t.a * 4 / tau * gate, 4 * t.a * gate * (1 - gate) * ratio, False


def geo_mean(x: np.ndarray, a: float, *, low: float, high: float) -> tuple[float, np.ndarray]:
    """(A exp(mean of min(x, high)), for A < 0 of max(x, -low); which tokens are inside). x: of a response's tokens.
    arXiv 2507.20673, eq. 3: a product of a response's tokens, one side clipped each."""
    held = np.minimum(x, high) if a > 0 else np.maximum(x, -low)
    return a * np.exp(held.mean()), held == x


TOKENWISE: dict[Loss, Formula] = {Loss.PPO: ppo, Loss.GSPO: gspo, Loss.CISPO: cispo, Loss.SAPO: sapo}


@dataclass(frozen=True)
class Wanted:
    loss: float
    gradient: np.ndarray
    negative: int
    clipped: int


def shares(case: Case, aggregate: Aggregate) -> np.ndarray:
    """[B, T] float64: what a token that stays counts. docs/algorithms.md."""
    in_loss, rows = case.in_loss.numpy(), len(case.in_loss)
    of_token = {
        Aggregate.TOKEN_MEAN: 1 / int(case.batch.mask.sum()),
        Aggregate.SEQUENCE_MEAN: 1 / rows / np.maximum(1, in_loss.sum(axis=1, keepdims=True)),
        Aggregate.CONSTANT: 1 / rows / RESPONSE,
    }
    return in_loss * of_token[aggregate]


def reference(case: Case, loss: Loss, *, aggregate: Aggregate, dual: float) -> Wanted:
    low, high, (rows, columns) = loss.spec.clip.low, loss.spec.clip.high, case.in_loss.shape
    gradient, total, negative, clipped = np.zeros((rows, columns)), 0.0, 0, 0
    old, new, weights = (each.double().numpy() for each in (case.batch.old, case.batch.new, case.weights))
    share = shares(case, aggregate)
    for row in range(rows):
        places = np.flatnonzero(case.in_loss[row].numpy())
        if not len(places):
            continue
        a, x = float(case.batch.advantages[row, 0]), (new - old)[row, places]
        negative += len(places) * (a < 0)
        if loss is Loss.GEO_MEAN:
            value, inside = geo_mean(x, a, low=low, high=high)
            total -= weights[row, 0] * value / rows
            gradient[row, places] = -weights[row, 0] * value / rows / len(places) * inside
            clipped += int((~inside & (a < 0)).sum())
            continue
        for place, log_ratio in zip(places, x, strict=True):
            token = Token(log_ratio, new[row, place], a, low, high, dual, x.mean())
            value, slope, below = TOKENWISE[loss](token)
            total -= share[row, place] * weights[row, place] * value
            gradient[row, place] = -share[row, place] * weights[row, place] * slope
            clipped += below
    return Wanted(total, gradient, negative, clipped)


def by_us(
    case: Case, loss: Loss, *, aggregate: Aggregate, micro_batches: int
) -> tuple[float, np.ndarray, float, float]:
    spec = loss.spec
    config = make_config(
        policy_loss=PolicyLossConfig(loss_mode=LOSS_MODES[loss]),
        clip_ratio_low=spec.clip.low,
        clip_ratio_high=spec.clip.high,
        clip_ratio_c=spec.dual_clip,
        loss_agg_mode=AGGREGATES[aggregate],
        loss_scale_factor=RESPONSE,
    )
    total, gradients, negative, clipped = 0.0, [], 0.0, 0.0
    size = len(case.in_loss) // micro_batches
    for start in range(0, len(case.in_loss), size):
        rows = slice(start, start + size)
        output, data, leaf = as_verl_has_it(
            case.batch.part(rows), weights=case.weights[rows], in_loss=case.in_loss[rows]
        )
        tu.assign_non_tensor(data, global_batch_size=len(case.in_loss), batch_num_tokens=int(case.batch.mask.sum()))
        found, metrics = corrected_loss(config, output, data, kind=loss)
        found.backward()
        total += found.item()
        gradients.append(leaf.grad.double().numpy())
        negative += metrics[NEGATIVE].aggregate()
        clipped += metrics[CLIPPED_NEGATIVE].aggregate()
    return total, np.concatenate(gradients), negative, clipped


def spread_of(loss: Loss) -> float:
    """Of the log-ratios, so that its bounds cut some."""
    return 5e-4 if loss.spec.of_sequences else 0.5


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(
    ("loss", "aggregate"),
    [
        (loss, aggregate)
        for loss in COMPARED
        for aggregate in Aggregate
        if not loss.spec.own_aggregate or aggregate is loss.spec.aggregate
    ],
)
def test_it_is_its_formula_with_the_corrections_weights_and_mask(
    loss: Loss, aggregate: Aggregate, micro_batches: int
) -> None:
    for seed in range(4):
        case = make_case(seed, shared=loss.spec.weighs_responses, spread=spread_of(loss))
        expected = reference(case, loss, aggregate=aggregate, dual=loss.spec.dual_clip)
        total, gradient, negative, clipped = by_us(case, loss, aggregate=aggregate, micro_batches=micro_batches)
        largest = np.abs(expected.gradient).max()
        assert np.abs(gradient - expected.gradient).max() <= ATOL * largest
        assert total == pytest.approx(expected.loss, abs=ATOL * np.abs(expected.gradient).sum() + 1e-6)
        assert (negative, clipped) == (expected.negative, expected.clipped)
        assert expected.negative > 0 and (loss.spec.keeps_gradient or expected.clipped > 0)


@pytest.mark.parametrize("loss", Loss)
def test_no_loss_ignores_the_weights(loss: Loss) -> None:
    """Twice the weights are twice the gradient: a loss that did not read them would have it as it was."""
    case = make_case(0, shared=True, spread=spread_of(loss))
    aggregate = loss.spec.aggregate
    once, twice = (
        by_us(Case(case.batch, case.in_loss, factor * case.weights), loss, aggregate=aggregate, micro_batches=1)[1]
        for factor in (1, 2)
    )
    assert np.abs(once).max() > 0
    np.testing.assert_allclose(twice, 2 * once, rtol=1e-5, atol=1e-9)


def divergence_gradient(case: Case, start: torch.Tensor, *, estimator: str) -> np.ndarray:
    """[B, T]: what a weight of 1 adds to the gradient. start: log-probs of the model at the start."""

    def gradient(coefficient: float) -> np.ndarray:
        output, data, leaf = as_verl_has_it(case.batch, weights=case.weights, in_loss=case.in_loss)
        data["ref_log_prob"] = jagged(start, case.batch.mask.sum(dim=-1).tolist())
        config = make_config(use_kl_loss=True, kl_loss_coef=coefficient, kl_loss_type=estimator)
        assert WEIGHTS in data.keys()  # noqa: SIM118
        corrected_loss(config, output, data)[0].backward()
        return leaf.grad.double().numpy()

    return (gradient(2.0) - gradient(0.0)) / 2


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_divergence_is_over_what_the_correction_keeps_and_unweighed(estimator: str) -> None:
    """In the loss, of x = log p_start - log p, the mean of the tokens: k2 is x^2 / 2, slope -x in log p; k3 is
    exp(x) - 1 - x, slope 1 - exp(x). Schulman 2020, Approximating KL Divergence."""
    case = make_case(0, shared=False, spread=0.5)
    start = case.batch.new - torch.linspace(-1, 1, case.in_loss.shape[1])
    x = (start - case.batch.new).double().numpy()
    slope = {"k2": -x, "k3": 1 - np.exp(x)}[estimator]
    found = divergence_gradient(case, start, estimator=estimator)
    np.testing.assert_allclose(found, shares(case, Aggregate.TOKEN_MEAN) * slope, atol=1e-7)


def test_k3_pulls_no_more_where_it_is_above_10() -> None:
    """verl's clamp: exp(x) - 1 - x is 8.7 at 2.5, 11.2 at 2.7, 9.0 at -10 and 11.0 at -12."""
    case = make_case(0, shared=False, spread=0.5)
    x = torch.tensor([2.5, 2.7, -10, -12]).repeat(5)
    pulled = divergence_gradient(case, case.batch.new + x, estimator="k3") != 0
    np.testing.assert_array_equal(pulled, (case.in_loss & (x.exp() - 1 - x < 10)).numpy())


@pytest.mark.parametrize("aggregate", Aggregate)
def test_the_entropy_is_over_what_the_correction_keeps_and_unweighed(aggregate: Aggregate) -> None:
    """Less bonus * entropy, aggregated as the loss: the slope in a token's entropy is -bonus times what it counts."""
    bonus, case = 0.5, make_case(0, shared=False, spread=0.5)
    entropy = torch.linspace(0, 5, case.in_loss.numel()).reshape(case.in_loss.shape).requires_grad_()
    lengths = case.batch.mask.sum(dim=-1).tolist()
    settings = {"loss_agg_mode": AGGREGATES[aggregate], "loss_scale_factor": RESPONSE}
    config = make_config(entropy_coeff=bonus, **settings)
    output, data, leaf = as_verl_has_it(case.batch, weights=case.weights, in_loss=case.in_loss)
    without = corrected_loss(config, output, data)[0]
    (alone,) = torch.autograd.grad(without, leaf)
    output, data, leaf = as_verl_has_it(case.batch, weights=case.weights, in_loss=case.in_loss)
    output["entropy"] = jagged(torch.nn.functional.pad(entropy, (0, 1)), [length + 1 for length in lengths])
    loss = corrected_loss(config, output, data)[0]
    loss.backward()
    share = shares(case, aggregate)
    mean = (share * entropy.detach().double().numpy()).sum()
    assert (loss - without).item() == pytest.approx(-bonus * mean, abs=1e-6)  # of float32 sums of size 5
    np.testing.assert_allclose(entropy.grad.numpy(), -bonus * share, rtol=1e-6)
    assert torch.equal(leaf.grad, alone)


@pytest.mark.parametrize("aggregate", Aggregate)
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_divergence_is_said_per_token_whatever_the_loss_aggregates(aggregate: Aggregate, estimator: str) -> None:
    """Over what stays, in float64: float32 log-probs of size 5 differ by some 2^-21, and the estimators by as much."""
    case = make_case(0, shared=False, spread=0.5)
    start = case.batch.new - torch.linspace(-1, 1, case.in_loss.shape[1])
    output, data, _ = as_verl_has_it(case.batch, weights=case.weights, in_loss=case.in_loss)
    data["ref_log_prob"] = jagged(start, case.batch.mask.sum(dim=-1).tolist())
    settings = {"loss_agg_mode": AGGREGATES[aggregate], "loss_scale_factor": RESPONSE}
    config = make_config(use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type=estimator, **settings)
    _, metrics = corrected_loss(config, output, data)
    divergence = mean_reference_kl(
        {
            f"actor/{name.removeprefix('actor/')}": each.aggregate()
            for name, each in metrics.items()
            if hasattr(each, "aggregate")
        }
    )
    x = (start.double() - case.batch.new.double())[case.in_loss.bool()]
    wanted = {"k2": x**2 / 2, "k3": x.exp() - 1 - x}[estimator].mean()
    assert divergence == pytest.approx(float(wanted), rel=1e-5)


def test_cispo_pushes_the_less_the_less_probable_a_token_has_become() -> None:
    """With a lower bound what a step made improbable is pushed on at full strength, and answers are lost for good."""
    case = make_case(0, shared=False, spread=0.5)
    new = case.batch.old - torch.linspace(0, 6, case.in_loss.shape[1])
    batch = replace(case.batch, new=new, advantages=-torch.ones_like(new))
    once = Case(batch, case.in_loss, torch.ones_like(case.weights))
    _, gradient, _, _ = by_us(once, Loss.CISPO, aggregate=Aggregate.TOKEN_MEAN, micro_batches=1)
    ratio = (new - case.batch.old).double().exp().numpy()
    wanted = np.where(case.in_loss.numpy(), ratio, 0.0) / int(case.batch.mask.sum())
    np.testing.assert_allclose(gradient, wanted, rtol=1e-4, atol=1e-12)
