"""Our loss as verl calls it: verl's own to the last bit, of the weights, the tokens and the bounds of the batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric
from verl.workers.config import FSDPActorConfig
from verl.workers.utils.losses import ppo_loss

from appliance.corrections.objective import ClipRange
from appliance.corrections.weights import Acr
from appliance.errors import NumericsError, TrainingError
from appliance.trainer.correction import (
    CLIP_LOWER,
    CLIP_UPPER,
    CLIPPED_NEGATIVE,
    KEPT,
    NEGATIVE,
    REAL,
    USED,
    WEIGHTS,
    _as_offsets,
    check_used,
    corrected_loss,
    sums_of,
)

CAP, DUAL = 1.5, 3.0
# So that a float32 ratio can lie exactly on a bound: exp(-1/4) and exp(1/4) as float32 has them.
LOW, HIGH = 1 - float(torch.tensor(-0.25).exp()), float(torch.tensor(0.25).exp()) - 1
NOMINAL, WIDE = ClipRange(LOW, HIGH), ClipRange(0.5, 0.9)
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean")
ROLLOUT = "rollout_log_probs"


@dataclass(frozen=True)
class Batch:
    """[B, T] float32. raw: p_trainer / p_rollout, 0 at padding."""

    old: Tensor
    new: Tensor
    advantages: Tensor
    mask: Tensor
    raw: Tensor

    def part(self, rows: slice) -> Batch:
        return Batch(*(each[rows] for each in (self.old, self.new, self.advantages, self.mask, self.raw)))


@dataclass(frozen=True)
class Bounds:
    """[B, T] float32, as the driver writes them."""

    lower: Tensor
    upper: Tensor


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


def one_token(ratio: float, advantage: float, *, raw: float) -> Batch:
    one = torch.ones(1, 1)
    return Batch(-4 * one, -4 * one + float(np.log(ratio)), advantage * one, one.bool(), raw * one)


def bounds_of_acr(batch: Batch) -> Bounds:
    found = Acr(cap=CAP, clip=NOMINAL).apply(batch.raw.clamp(min=1e-9).double().log(), real_BT=batch.mask)
    return Bounds(found.lower_BT.float(), found.upper_BT.float())


def everywhere(clip: ClipRange, batch: Batch) -> Bounds:
    return Bounds(torch.full_like(batch.raw, 1 - clip.low), torch.full_like(batch.raw, 1 + clip.high))


def make_config(**changes: object) -> FSDPActorConfig:
    config = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=LOW,
        clip_ratio_high=HIGH,
        clip_ratio_c=DUAL,
    )
    return replace(config, **changes)


def jagged(rows_BT: Tensor, lengths: list[int]) -> Tensor:
    rows = [row[:length].clone() for row, length in zip(rows_BT, lengths, strict=True)]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def as_verl_has_it(
    batch: Batch, *, weights: Tensor | None, in_loss: Tensor | None = None, bounds: Bounds | None = None
) -> tuple[dict[str, Tensor], TensorDict, Tensor]:
    """(model output, micro-batch, the leaf for the gradient). A prompt of one token before each response; the rollout's
    log-probs are the trainer's less log of the weights."""
    lengths = batch.mask.sum(dim=-1).tolist()
    leaf = batch.new.clone().requires_grad_()
    # verl's model output covers prompt and response and is read one to the left
    whole = [torch.cat([row[:length], row.new_zeros(1)]) for row, length in zip(leaf, lengths, strict=True)]
    rollout = batch.old - torch.where(batch.mask, batch.raw, torch.ones_like(batch.raw)).log()
    columns = {
        "responses": batch.old,
        REAL: batch.mask.long(),
        KEPT: (batch.mask if in_loss is None else in_loss).long(),
        "old_log_probs": batch.old,
        ROLLOUT: rollout,
        "advantages": batch.advantages,
    }
    if weights is not None:
        columns[WEIGHTS] = weights
    if bounds is not None:
        columns |= {CLIP_LOWER: bounds.lower, CLIP_UPPER: bounds.upper}
    fields = {name: jagged(rows_BT, lengths) for name, rows_BT in columns.items()}
    fields["prompts"] = jagged(torch.zeros(len(lengths), 1), [1] * len(lengths))
    data = TensorDict(fields, batch_size=len(lengths))
    tu.assign_non_tensor(data, dp_size=1, global_batch_size=len(lengths), batch_num_tokens=sum(lengths))
    return {"log_probs": torch.nested.as_nested_tensor(whole, layout=torch.jagged)}, data, leaf


Result = tuple[Tensor, Tensor, dict[str, Metric]]


def by_us(
    batch: Batch,
    *,
    weights: Tensor,
    bounds: Bounds | None = None,
    ratio_to: str = "old_log_probs",
    mode: str = "token-mean",
    in_loss: Tensor | None = None,
) -> Result:
    """(loss, gradient, metrics)"""
    output, data, leaf = as_verl_has_it(batch, weights=weights, in_loss=in_loss, bounds=bounds)
    how = {"ratio_to": ratio_to, "clips": bounds is not None}
    loss, metrics = corrected_loss(make_config(loss_agg_mode=mode), output, data, **how)
    loss.backward()
    return loss.detach(), leaf.grad, metrics


def by_verl(batch: Batch, *, weights: Tensor | None, mode: str = "token-mean", in_loss: Tensor | None = None) -> Result:
    output, data, leaf = as_verl_has_it(batch, weights=weights, in_loss=in_loss)
    loss, metrics = ppo_loss(make_config(loss_agg_mode=mode), output, data)
    loss.backward()
    return loss.detach(), leaf.grad, metrics


def assert_same_bits(ours: Result, theirs: Result) -> None:
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    added = (USED, NEGATIVE, CLIPPED_NEGATIVE)
    values = {name: metric.values for name, metric in ours[2].items() if not name.startswith(added)}
    assert values == {name: metric.values for name, metric in theirs[2].items()}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(3))
def test_weights_of_one_are_verls_loss_without_any_to_the_last_bit(mode: str, seed: int) -> None:
    """What a method that does not weigh writes. With dropped sequences, too."""
    batch = make_batch(seed, highest=CAP)
    in_loss = batch.mask & (torch.arange(len(batch.mask)) % 3 > 0).unsqueeze(-1)
    for stay in (None, in_loss):
        ours = by_us(batch, weights=batch.mask.float(), mode=mode, in_loss=stay)
        assert_same_bits(ours, by_verl(batch, weights=None, mode=mode, in_loss=stay))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(5))
def test_acr_without_a_truncated_token_is_verls_loss_to_the_last_bit(mode: str, seed: int) -> None:
    batch = make_batch(seed, highest=CAP)
    ours = by_us(batch, weights=batch.raw, bounds=bounds_of_acr(batch), mode=mode)
    theirs = by_verl(batch, weights=batch.raw, mode=mode)
    assert_same_bits(ours, theirs)
    clipped, dual = (theirs[2][f"actor/pg_clipfrac{end}"].aggregate() for end in ("", "_lower"))
    assert 0 < clipped < 1 and dual > 0  # every clip was at work


def reference(batch: Batch, *, weights: Tensor, bounds: Bounds, to_rollout: bool) -> tuple[float, float]:
    """(token mean, mean of absolute terms) in float64, token by token, by the formula and verl's dual clip."""
    total, size = 0.0, 0.0
    for index in zip(*np.nonzero(batch.mask.numpy()), strict=True):
        ratio = np.exp(float(batch.new[index]) - float(batch.old[index]))
        ratio *= float(batch.raw[index]) if to_rollout else 1.0
        advantage = float(batch.advantages[index])
        clipped = min(max(ratio, float(bounds.lower[index])), float(bounds.upper[index]))
        objective = min(ratio * advantage, clipped * advantage)
        if advantage < 0:
            objective = max(objective, DUAL * advantage)
        total -= float(weights[index]) * objective
        size += abs(float(weights[index]) * objective)
    return total / int(batch.mask.sum()), size / int(batch.mask.sum())


@pytest.mark.parametrize("seed", range(5))
def test_with_truncated_tokens_it_is_the_formula(seed: int) -> None:
    batch = make_batch(seed, highest=20.0)
    bounds, weights = bounds_of_acr(batch), batch.raw.clamp(max=CAP)
    assert bool((bounds.upper > 1.5 * (1 + HIGH)).any())
    loss, _, _ = by_us(batch, weights=weights, bounds=bounds)
    expected, size = reference(batch, weights=weights, bounds=bounds, to_rollout=False)
    # per term: two differences of numbers below 8 (2^-21 absolute, and exp makes it relative), a few products; a sum
    # of at most 320 terms adds 2^-24 per level. A ratio at a tie may fall to either side, with the same value there.
    assert abs(float(loss) - expected) < 2.0**-18 * size


@pytest.mark.parametrize("seed", range(3))
def test_calibrated_clipping_is_the_clipped_ratio_to_the_rollout_policy(seed: int) -> None:
    batch = make_batch(seed, highest=9.0)
    bounds, ones = everywhere(WIDE, batch), batch.mask.float()
    loss, gradient, _ = by_us(batch, weights=ones, bounds=bounds, ratio_to=ROLLOUT)
    wanted, size = reference(batch, weights=ones, bounds=bounds, to_rollout=True)
    # as above, and log and exp of a weight besides: two more roundings of numbers below 8
    assert abs(float(loss) - wanted) < 2.0**-17 * size
    assert torch.isfinite(gradient).all() and not bool(gradient[~batch.mask].any())


@pytest.mark.parametrize("mode", MODES)
def test_calibrated_clipping_without_mismatch_and_fit_is_verls_loss_to_the_last_bit(mode: str) -> None:
    batch = make_batch(0, highest=9.0)
    batch = replace(batch, raw=batch.mask.float())
    ours = by_us(batch, weights=batch.raw, bounds=everywhere(NOMINAL, batch), ratio_to=ROLLOUT, mode=mode)
    assert_same_bits(ours, by_verl(batch, weights=None, mode=mode))


@pytest.mark.parametrize("bound", [0.01, 0.1, 0.3, 0.5, 0.7, 0.8, 0.999])
def test_a_lower_bound_reaches_verl_exactly_from_a_half_on(bound: float) -> None:
    """And an upper bound always: verl computes 1 - low and 1 + high."""
    lower, upper = torch.tensor(bound), torch.tensor(1 / bound)
    offsets = _as_offsets(lower, upper_BT=upper)
    verls = 1 - offsets["clip_ratio_low"]
    assert abs(float(verls) - float(lower)) <= 2.0**-25 and (bound < 0.5 or torch.equal(verls, lower))
    assert torch.equal(1 + offsets["clip_ratio_high"], upper)


def test_a_truncated_token_is_clipped_later_and_only_above() -> None:
    """One token, w = 3 at cap 1.5: the upper bound is 2.57, the lower stays 0.78."""
    for ratio, advantage, flows in ((2.0, 1.0, True), (2.8, 1.0, False), (0.7, -1.0, False), (2.0, -1.0, True)):
        batch = one_token(ratio, advantage, raw=3.0)
        weights = batch.raw.clamp(max=CAP)
        assert bool(by_us(batch, weights=weights, bounds=bounds_of_acr(batch))[1].item()) == flows
        # TIS clips the positive one at 1.28
        assert bool(by_verl(batch, weights=weights)[1].item()) == (flows and advantage < 0)


def test_the_bounds_of_the_batch_decide_and_not_the_configuration() -> None:
    """One token, B = 1.5 with a positive advantage: beyond 1.28, inside 1.9."""
    batch = one_token(1.0, 1.0, raw=1.5)
    for clip, flows in ((NOMINAL, False), (WIDE, True)):
        found = by_us(batch, weights=batch.mask.float(), bounds=everywhere(clip, batch), ratio_to=ROLLOUT)
        assert bool(found[1].any()) == flows


def test_the_batch_and_the_configuration_stay_as_they_were() -> None:
    batch = make_batch(2, highest=9.0)
    output, data, _ = as_verl_has_it(batch, weights=batch.mask.float(), bounds=everywhere(WIDE, batch))
    config, before = make_config(), data["old_log_probs"].values().clone()
    corrected_loss(config, output, data, ratio_to=ROLLOUT, clips=True)
    assert torch.equal(data["old_log_probs"].values(), before)
    assert (config.clip_ratio_low, config.clip_ratio_high) == (LOW, HIGH)


@pytest.mark.parametrize("ratio_to", ["old_log_probs", ROLLOUT])
def test_micro_batches_add_up_to_the_batch(ratio_to: str) -> None:
    batch = make_batch(4, highest=20.0)
    loss, gradient, whole = by_us(
        batch, weights=batch.raw.clamp(max=CAP), bounds=bounds_of_acr(batch), ratio_to=ratio_to
    )
    parts = []
    for rows in (slice(0, 5), slice(5, 6), slice(6, None)):
        part = batch.part(rows)
        output, data, leaf = as_verl_has_it(part, weights=part.raw.clamp(max=CAP), bounds=bounds_of_acr(part))
        tu.assign_non_tensor(data, global_batch_size=len(batch.mask), batch_num_tokens=int(batch.mask.sum()))
        part_loss, metrics = corrected_loss(make_config(), output, data, ratio_to=ratio_to, clips=True)
        part_loss.backward()
        parts.append((part_loss.detach(), leaf.grad, metrics))
    # sums of 320 float32 terms in another order: 2^-24 of the absolute sum per level of a tree
    assert abs(float(sum(part[0] for part in parts) - loss)) < 2.0**-18 * float(gradient.abs().sum())
    assert torch.allclose(torch.cat([part[1] for part in parts]), gradient, rtol=1e-6, atol=0)
    for name, metric in whole.items():
        if name.startswith(USED):
            assert sum(part[2][name].aggregate() for part in parts) == pytest.approx(metric.aggregate(), rel=1e-12)


@pytest.mark.parametrize("missing", [REAL, WEIGHTS, ROLLOUT, CLIP_LOWER, CLIP_UPPER])
def test_a_batch_that_lacks_something_raises(missing: str) -> None:
    batch = make_batch(0, highest=2.0)
    output, data, _ = as_verl_has_it(batch, weights=batch.raw, bounds=everywhere(WIDE, batch))
    del data[missing]
    with pytest.raises(TrainingError) as raised:
        corrected_loss(make_config(), output, data, ratio_to=ROLLOUT, clips=True)
    assert raised.value.message == f"the loss got a batch without {missing}"


@pytest.mark.parametrize("name", [WEIGHTS, ROLLOUT, CLIP_UPPER])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_raises(name: str, bad: float) -> None:
    batch = make_batch(0, highest=2.0)
    output, data, _ = as_verl_has_it(batch, weights=batch.raw, bounds=everywhere(WIDE, batch))
    data[name].values()[2] = bad
    with pytest.raises(NumericsError) as raised:
        corrected_loss(make_config(), output, data, ratio_to=ROLLOUT, clips=True)
    assert raised.value.message == f"a number in {name} of this step is not finite"


def reported(batch: Batch, *, in_loss: Tensor | None = None, scale: float = 1.0) -> dict[str, float]:
    """As verl hands an update's metrics to the driver: each sum divided by the same number."""
    _, _, metrics = by_us(batch, weights=batch.raw, bounds=everywhere(WIDE, batch), in_loss=in_loss)
    return {name: metric.aggregate() * scale for name, metric in metrics.items()}


def test_the_driver_holds_the_loss_to_what_was_meant() -> None:
    batch = make_batch(1, highest=3.0)
    in_loss = batch.mask & (torch.arange(len(batch.mask)) > 2).unsqueeze(-1)
    fields = {REAL: batch.mask.long(), KEPT: in_loss.long(), WEIGHTS: batch.raw}
    fields |= {CLIP_LOWER: everywhere(WIDE, batch).lower, CLIP_UPPER: everywhere(WIDE, batch).upper}
    meant = sums_of({name: value[batch.mask] for name, value in fields.items()})
    assert set(meant) == {"tokens", "kept", WEIGHTS, CLIP_LOWER, CLIP_UPPER}
    check_used(reported(batch, in_loss=in_loss, scale=0.125), meant=meant)  # eight mini-batches and ranks
    unmasked = reported(batch)
    for wrong in (
        {},
        unmasked,
        {name: value for name, value in reported(batch, in_loss=in_loss).items() if name != f"{USED}{CLIP_UPPER}"},
        reported(replace(batch, raw=batch.mask.float()), in_loss=in_loss),
        dict.fromkeys(unmasked, 0.0),
        dict.fromkeys(unmasked, float("nan")),
    ):
        with pytest.raises(TrainingError, match=r"the loss used .* was meant"):
            check_used(wrong, meant=meant)
