"""Whether the correction reached the loss: the batch that goes there, held against what its log-probs ask for.

verl corrects on the driver and writes weights and masks into the batch. Its own metrics are computed before that, so
they show what was meant; here every weight and every dropped token of the batch itself is compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from appliance.errors import TrainingError
from appliance.plan.model import CorrectionPlan
from appliance.quant.correction import ClipRange, CorrectionMethod
from appliance.trainer.adaptive import Moments, mixing, moments
from appliance.trainer.corrections import Corrected, correct, log_ratio, mixed_weights, token_weights, upper_clip

SEQUENCES_AT_ONCE = 64  # float64 copies of a batch of long sequences would not fit beside it
WEIGHTS_AGREE_WITHIN = 1e-4  # exp makes a relative error of x's rounding: below 2^-18 (1 + sum |x|), and x reaches 20


@dataclass(frozen=True)
class LossBatch:
    """What goes to the loss, one row of tokens per sequence, all of the same length in every field.

    real: before anything was dropped, kept: after.  weights: None when the batch has none.
    """

    trainer: tuple[Tensor, ...]
    rollout: tuple[Tensor, ...]
    real: tuple[Tensor, ...]
    kept: tuple[Tensor, ...]
    advantages: tuple[Tensor, ...]
    weights: tuple[Tensor, ...] | None


@dataclass(frozen=True)
class CorrectionStep:
    """What the correction did in one step.

    acted_fraction: share of tokens that were cut, weighed 0 or dropped.  acr_widened_fraction: of tokens that got a
    wider upper clip bound.  acr_bound_mean: its mean over them, None where there are none.  adaptive_share: how much of
    the correction `adaptive` applied, 0..1.  The fields of a method are None with another one.
    """

    acted_fraction: float
    acr_widened_fraction: float | None = None
    acr_bound_mean: float | None = None
    adaptive_share: float | None = None

    def metrics(self) -> dict[str, float | None]:
        line: dict[str, float | None] = {"is_truncated_fraction": self.acted_fraction}
        if self.acr_widened_fraction is not None:
            line |= {"acr_widened_fraction": self.acr_widened_fraction, "acr_bound_mean": self.acr_bound_mean}
        if self.adaptive_share is not None:
            line["adaptive_share"] = self.adaptive_share
        return line


def adaptive_share(batch: LossBatch, *, plan: CorrectionPlan) -> float:
    """How much of the correction this batch gets, from all of its tokens; see trainer/adaptive.py."""
    found = Moments()
    for part in _parts(batch):
        x_BT, real_BT = _log_ratio(part)
        found += moments(x_BT, mask_BT=real_BT, advantages_BT=_padded(part.advantages), cap=_cap(plan))
    return mixing(found)


def adaptive_weights(batch: LossBatch, *, plan: CorrectionPlan, share: float) -> tuple[Tensor, ...]:
    """float32, one row per sequence."""
    rows: list[Tensor] = []
    for part in _parts(batch):
        x_BT, real_BT = _log_ratio(part)
        weights_BT = mixed_weights(x_BT, mask_BT=real_BT, cap=_cap(plan), share=share).float()
        rows += [row[: len(real)] for row, real in zip(weights_BT, part.real, strict=True)]
    return tuple(rows)


def corrected_rows(
    batch: LossBatch, *, plan: CorrectionPlan, share: float | None
) -> tuple[tuple[Tensor, ...] | None, tuple[Tensor, ...]]:
    """(weights float32 or None where the method has none, tokens that stay), a row per sequence."""
    weights: list[Tensor] = []
    kept: list[Tensor] = []
    for part in _parts(batch):
        x_BT, real_BT = _log_ratio(part)
        found = correct(x_BT, mask_BT=real_BT, plan=plan, share=share)
        kept += [row[: len(real)] for row, real in zip(found.kept_BT, part.real, strict=True)]
        if found.weights_BT is not None:
            weights += [row[: len(real)].float() for row, real in zip(found.weights_BT, part.real, strict=True)]
    return tuple(weights) or None, tuple(kept)


def check_correction(
    batch: LossBatch, *, plan: CorrectionPlan, share: float | None = None, clip: ClipRange | None = None
) -> CorrectionStep:
    """Raises TrainingError when the batch does not carry the plan's correction, NumericsError when a log-prob is not
    finite. A decision within float32's rounding of a limit may fall either way. share, clip: as `correct` has them."""
    tokens, acted, widened, bound_sum = 0, 0, 0, 0.0
    for part in _parts(batch):
        x_BT, real_BT = _log_ratio(part)
        expected = correct(x_BT, mask_BT=real_BT, plan=plan, share=share, clip=clip)
        found_BT = None if part.weights is None else _padded(part.weights)
        if not _is_corrected(expected, weights_BT=found_BT, kept_BT=_padded(part.kept)):
            raise TrainingError(
                f"the batch of this step does not carry what `{plan.method}` makes of its log-probs",
                hint="the correction did not reach the loss; report it with the log",
            )
        tokens, acted = tokens + int(real_BT.sum()), acted + int(expected.acted_BT.sum())
        if plan.method is CorrectionMethod.ACR:
            raw_BT = token_weights(x_BT, mask_BT=real_BT)
            widened_BT = (raw_BT > _cap(plan)) & expected.kept_BT  # what the governor has dropped is not
            widened += int(widened_BT.sum())
            bound_sum += float(upper_clip(raw_BT, cap=_cap(plan), clip_high=plan.clip_high)[widened_BT].sum())
    fraction = acted / tokens if tokens else 0.0
    if plan.method is not CorrectionMethod.ACR:
        return CorrectionStep(fraction, adaptive_share=share)
    wide = widened / tokens if tokens else 0.0
    return CorrectionStep(fraction, acr_widened_fraction=wide, acr_bound_mean=bound_sum / widened if widened else None)


def _parts(batch: LossBatch) -> Iterator[LossBatch]:
    for start in range(0, len(batch.real), SEQUENCES_AT_ONCE):
        rows = slice(start, start + SEQUENCES_AT_ONCE)
        weights = None if batch.weights is None else batch.weights[rows]
        fields = (batch.trainer, batch.rollout, batch.real, batch.kept, batch.advantages)
        yield LossBatch(*(field[rows] for field in fields), weights)


def _log_ratio(part: LossBatch) -> tuple[Tensor, Tensor]:
    """(x_BT, mask_BT of what was there before anything was dropped)."""
    real_BT = _padded(part.real).bool()
    return log_ratio(_padded(part.trainer), rollout_BT=_padded(part.rollout), mask_BT=real_BT), real_BT


def _cap(plan: CorrectionPlan) -> float:
    if plan.cap is None:
        raise ValueError(f"the plan's `{plan.method}` has no cap")
    return plan.cap


def _padded(rows: tuple[Tensor, ...]) -> Tensor:
    return pad_sequence(list(rows), batch_first=True)


def _is_corrected(expected: Corrected, *, weights_BT: Tensor | None, kept_BT: Tensor) -> bool:
    clear_BT = expected.margin_BT > 1
    if bool(((kept_BT.bool() != expected.kept_BT) & clear_BT).any()):
        return False
    if weights_BT is None or expected.weights_BT is None:
        return weights_BT is None and expected.weights_BT is None
    off_BT = (weights_BT.double() - expected.weights_BT).abs() > WEIGHTS_AGREE_WITHIN * expected.weights_BT
    return not bool((off_BT & clear_BT).any())
