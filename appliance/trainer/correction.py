"""A run's correction: what each batch gets before the update, the loss that reads it there, and that the loss used it.

Whatever the method, weights and mask, and bounds where it clips, are computed on the driver in float64 and written into
the batch, rounded to float32; verl's own correction stays off. What was written is read back from the batch that goes
to the loss, and after the update they are compared with the sums that the loss had in hand. The fields travel with
their batch: mini-batches, micro-batches and ranks share them, no worker has a state that a restart could lose.

Where the update's own forward gives the old log-probs (`trainer.old_log_probs: update` in the plan), the correction
itself travels with the batch instead, as tight as the governor has it. The loss takes the micro-batch's log-probs,
detached, for the old ones, so that the ratio is 1 and has a gradient, and computes the same fields from them by the
same code. After the update the driver does with the log-probs that the workers held what it otherwise does before it
(`BatchCorrection.prepare`), and the sums are compared as ever. Log-probs that are not finite make the loss NaN, and
every gradient: no optimizer step is made with those.

verl hands a policy loss a frozen configuration and a fixed list of tensors, but which function a worker calls as its
loss is set by a call of verl's (`set_loss_fn`), and that function gets the whole micro-batch. Ours takes out of it
which policy the ratio is to and, of a method that clips by itself, the two bounds of each token, puts them where verl's
loss looks for its own, and calls verl's. Weights and mask verl's loss finds by their names. Dual clip, aggregation and
metrics are verl's, and so is every operation of the losses that it has. A loss that it lacks is a function in its
registry: `tbpo`, and `geo-mean`, of which verl's own forgets the other micro-batches and ranks. Whatever the loss, ours
counts the tokens with a negative advantage that it clips.

One advantage of the step is computed here, too: `gdpo` reads each reward by itself, and verl's trainer hands its
estimators their sum. The formula is verl's; its inputs are what the driver graded.

Legend: B sequences of a micro-batch, T tokens of the longest response, padded.

The shadow pass of calibrated clipping asks the new policy for log-probs in full precision after some updates. Each fit
is a line of `clipping.jsonl`, from which another attempt takes the bounds that held at its step.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transfer_queue
from omegaconf import DictConfig
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.core_algos import (
    agg_loss,
    compute_gdpo_outcome_advantage,
    compute_policy_loss_geo_mean,
    kl_penalty,
    register_policy_loss,
)
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.metric import AggregationType, Metric
from verl.utils.tensordict_utils import get_non_tensor_data
from verl.utils.torch_functional import masked_mean
from verl.workers.config import ActorConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding, response_from_nested

from appliance.corrections.base import CLAMP, LossCorrection, StepPart, log_ratio
from appliance.corrections.calibrated import fit_bounds
from appliance.corrections.centering import coefficients, size_of
from appliance.corrections.objective import Advantage, ClipRange, Estimator, KlPlace, Loss
from appliance.errors import NumericsError, TrainingError
from appliance.quant.mismatch import finite_pairs, with_finite_pairs
from appliance.record.checkpoints import FITS_FILE
from appliance.record.events import append_event, append_line
from appliance.record.plan import RunPlan
from appliance.tasks.grading import exact_in_sums
from appliance.trainer.top_words import TOP_ROLLOUT, TOP_TRAINER, words_of

SEQUENCES_AT_ONCE = 64  # float64 copies of a batch of long sequences would not fit beside it
REAL, KEPT, WEIGHTS = "loss_mask", "response_mask", "rollout_is_weights"  # verl's names; the first is never changed
CLIP_LOWER, CLIP_UPPER = "clip_lower", "clip_upper"  # float32, the bounds themselves
CORRECTION = "appliance_correction"  # of a batch, no tensor: what the loss makes the fields by
CENTERING = "appliance_centering"  # likewise: the correction whose term of score centering the loss adds
USED = "actor/correction_"  # nothing with `max` or `min` in it: verl would not take the mean over mini-batches
NEGATIVE, CLIPPED_NEGATIVE = "actor/negative_tokens", "actor/negative_tokens_clipped"  # as USED
REFERENCE_KL = "actor/reference_kl"  # as USED
CENTERED = "centered"  # of USED: tokens whose loss got the term of score centering
CENTERING_SIZE = "actor/centering"  # as USED
_AGREE_WITHIN = 1e-9  # float64 sums in another order
_HINT = "the correction did not reach the loss; report it with the log"

Rows = tuple[Tensor, ...]  # a row of tokens per sequence, without padding
LogProbs = Callable[[KVBatchMeta], Any]  # writes `log_probs` of a batch into the queue


class CorrectionInputs(NamedTuple):
    """Inputs of a correction, a row per sequence."""

    trainer: Rows
    rollout: Rows
    real: Rows
    """Mask of the real tokens, before any was dropped."""
    advantages: Rows


class BatchCorrection:
    """Writes each step's correction into its batch, and follows it into the loss.

    Of a step: `prepare`, the update, `after_update`. Where the update gives the old log-probs: `send`, the update,
    `prepare` of what it gave, `after_update`.
    """

    def __init__(self, plan: RunPlan) -> None:
        self._planned = plan.loss_correction
        self._run_dir = Path(plan.run_dir)
        self._shadow = ShadowPass(plan) if self._planned.has_shadow_pass else None
        algorithm = plan.algorithm
        self._kl_in_reward = algorithm.kl_estimator if algorithm.kl_place is KlPlace.REWARD else None
        self._meant: dict[str, float] = {}
        self._metrics: dict[str, float | None] = {}

    @property
    def token_cap(self) -> float | None:
        """Cap of a token's weight in the plan, by which the step's telemetry counts."""
        return self._planned.token_cap

    def install(self, workers: Any, *, actor: DictConfig) -> None:
        """Give every training worker our loss. workers: verl's group of them.  actor: their configuration."""
        how = {"ratio_to": self._planned.ratio_to, "clips": self._planned.clips, "kind": self._planned.loss}
        workers.set_loss_fn(partial(corrected_loss, config=omega_conf_to_dataclass(actor), **how))

    def send(self, batch: KVBatchMeta, *, correction: LossCorrection) -> KVBatchMeta:
        """Return the batch for a loss that corrects by itself. correction: as for prepare."""
        batch.extra_info[CORRECTION] = correction
        return _with_centering(batch, correction=correction)

    def prepare(self, batch: KVBatchMeta, *, step: int, correction: LossCorrection) -> KVBatchMeta:
        """Return the batch for the loss, or as the loss has had it. correction: the plan's, as tight as it is now.
        Raises TrainingError when the batch does not carry what was written, NumericsError when a number that the
        correction needs is not finite."""
        fitted_at, fitted = self._shadow.last_fit(before=step) if self._shadow else (None, None)
        names = ["old_log_probs", "rollout_log_probs", REAL, "advantages"]
        reward_kl = (
            {} if self._kl_in_reward is None else {"reference_kl": _reference_kl(batch, estimator=self._kl_in_reward)}
        )
        data = _get(batch, names)
        sequences = CorrectionInputs(*(data[name].unbind() for name in names))
        correction = correction.for_step(_parts(sequences), fitted=fitted)
        fields, sums = fields_of(sequences, correction=correction)
        batch = with_fields(batch, fields)
        if not _carries(batch, fields):
            fact = f"the batch of this step does not carry what `{correction.name}` makes of its log-probs"
            raise TrainingError(fact, hint=_HINT)
        self._meant = sums_of({name: torch.cat(rows) for name, rows in ({REAL: sequences.real} | fields).items()})
        if correction.centers:
            self._meant[CENTERED] = self._meant["kept"]
        if not self._meant[WEIGHTS]:  # of the tokens that stay
            fact = f"nothing is left to learn from in step {step}: {correction.text} leaves none of its tokens"
            why = "wider bounds or another correction.method keep some"
            append_event(self._run_dir, kind="note", what=fact, why=why, step=step)
        batch = _with_centering(batch, correction=correction)
        self._metrics = correction.metrics(sums) | ({"clip_fitted_step": fitted_at} if self._shadow else {}) | reward_kl
        return batch

    def after_update(self, batch: KVBatchMeta, *, step: int, reported: dict[str, Any], log_probs: LogProbs) -> None:
        """Check that the loss used what was meant, and make the shadow pass, where this step has one. reported:
        verl's metrics of the update.  Raises TrainingError as check_used, NumericsError as ShadowPass.run."""
        check_used(reported, meant=self._meant)
        if self._shadow:
            self._shadow.run(batch, step=step, log_probs=log_probs)

    def metrics(self) -> dict[str, float | None]:
        """Return the keys for the line of the step that was prepared last."""
        return self._metrics


def _with_centering(batch: KVBatchMeta, *, correction: LossCorrection) -> KVBatchMeta:
    if correction.centers:
        batch.extra_info[CENTERING] = correction
    return batch


def _reference_kl(batch: KVBatchMeta, *, estimator: Estimator) -> float:
    """Return what the reward loses, of the policy before the update: its mean over all tokens of the step, nats."""
    data = _get(batch, ["old_log_probs", "ref_log_prob", REAL])
    real_T = data[REAL].values().bool()
    kl_T = kl_penalty(data["old_log_probs"].values(), data["ref_log_prob"].values(), str(estimator))
    return float(kl_T[real_T].double().mean())


def _parts(sequences: CorrectionInputs) -> Iterator[StepPart]:
    for start in range(0, len(sequences.real), SEQUENCES_AT_ONCE):
        trainer_BT, rollout_BT, real_BT, advantages_BT = (
            pad_sequence(list(rows[start : start + SEQUENCES_AT_ONCE]), batch_first=True) for rows in sequences
        )
        real_BT = real_BT.bool()
        yield StepPart(log_ratio(trainer_BT, rollout_BT=rollout_BT, real_BT=real_BT), real_BT, advantages_BT)


def fields_of(
    sequences: CorrectionInputs, *, correction: LossCorrection
) -> tuple[dict[str, list[Tensor]], Counter[str]]:
    """Compute what the correction makes of a step: rows by the batch's names, and the sums of LossCorrection.count."""
    names = (KEPT, WEIGHTS, CLIP_LOWER, CLIP_UPPER) if correction.clips else (KEPT, WEIGHTS)
    fields: dict[str, list[Tensor]] = {name: [] for name in names}
    sums: Counter[str] = Counter()
    for part in _parts(sequences):
        corrected = correction.apply(part.x_BT, real_BT=part.real_BT)
        sums.update(correction.count(corrected, real_BT=part.real_BT))
        values = (corrected.kept_BT, corrected.weights_BT, corrected.lower_BT, corrected.upper_BT)
        done = len(fields[KEPT])
        for name, value_BT in zip(names, values, strict=False):
            for row, real in zip(value_BT, sequences.real[done : done + len(value_BT)], strict=True):
                fields[name].append(row[: len(real)].to(real.dtype if name == KEPT else torch.float32))
    return fields, sums


def _carries(batch: KVBatchMeta, fields: Mapping[str, list[Tensor]]) -> bool:
    """Check bit for bit that the batch carries these fields."""
    if not set(fields) <= set(batch.fields or ()):  # by this list the workers fetch
        return False
    found = _get(batch, list(fields))
    pairs = (zip(found[name].unbind(), rows, strict=True) for name, rows in fields.items())
    return all(torch.equal(one, other) for each in pairs for one, other in each)


def _get(batch: KVBatchMeta, names: list[str]) -> TensorDict:
    return transfer_queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)


def with_fields(batch: KVBatchMeta, fields: Mapping[str, Sequence[Tensor]]) -> KVBatchMeta:
    """Write fields into the batch. fields: rows without padding."""
    nested = {name: torch.nested.as_nested_tensor(list(rows), layout=torch.jagged) for name, rows in fields.items()}
    values = TensorDict(nested, batch_size=len(batch))
    return transfer_queue.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=values)


# in the training workers


def corrected_loss(
    config: ActorConfig,
    model_output: dict[str, Tensor],
    data: TensorDict,
    dp_group: Any = None,
    *,
    ratio_to: str = "old_log_probs",
    clips: bool = False,
    kind: Loss = Loss.PPO,
) -> tuple[Tensor, dict[str, Metric]]:
    """Compute the loss, in verl's signature. ratio_to, clips, kind (the loss): as Correction has them. NaN where the
    batch brings its correction and a log-prob is not finite.  Raises TrainingError for a batch that lacks what this
    loss reads, NumericsError when a number there is not finite."""
    correction = get_non_tensor_data(data, CORRECTION, None)
    is_finite = True
    if correction is not None:
        data, is_finite = corrected_by_itself(data, log_probs=model_output["log_probs"], correction=correction)
    bounds = (CLIP_LOWER, CLIP_UPPER) if clips else ()
    reads = (WEIGHTS, ratio_to, *bounds)
    if missing := [name for name in (REAL, *reads) if name not in data.keys()]:  # noqa: SIM118
        raise TrainingError(f"the loss got a batch without {', '.join(missing)}", hint="report it with the log")
    for name in reads:
        if not bool(torch.isfinite(_flat(data[name])).all()):
            raise NumericsError(f"a number in {name} of this step is not finite")
    used = sums_of({name: _flat(data[name]) for name in (REAL, KEPT, WEIGHTS, *bounds)})
    data = data.clone(recurse=False)
    data["old_log_probs"] = data[ratio_to]
    if clips:  # verl's loss takes a tensor as it takes a number
        padded = data.select(*bounds).to_padded_tensor()
        config = replace(config, **_as_offsets(padded[CLIP_LOWER], upper_BT=padded[CLIP_UPPER]))
    loss, metrics = ppo_loss(config, model_output, data, dp_group)
    used = {f"{USED}{name}": value for name, value in used.items()}
    used |= clipped_negatives(config, model_output, data, kind=kind)
    if config.use_kl_loss:
        used[REFERENCE_KL] = _reference_kl_in_loss(config, model_output, data)
    centering = get_non_tensor_data(data, CENTERING, None)
    if centering is not None:
        term, sums = centering_term(config, model_output, data, cap=centering.cap)
        loss, used = loss + term, used | sums
    if not is_finite:  # whatever the loss makes of it: a clipped token would have no gradient
        loss = model_output["log_probs"].values().sum() * math.nan
    return loss, {**metrics, **Metric.from_dict(used, aggregation=AggregationType.SUM)}


def corrected_by_itself(data: TensorDict, *, log_probs: Tensor, correction: LossCorrection) -> tuple[TensorDict, bool]:
    """Return (a micro-batch with the fields that the driver would have made of these log-probs, whether all of them are
    finite). Where they are not, both sides of a pair are 0 nats, as in the driver's metrics.

    data: with the rollouts' log-probs.  log_probs: nested, of prompt and response, nats, of the policy before the
    update.
    """
    trainer = response_from_nested(log_probs.detach(), data[REAL]).unbind()
    rollout, real = data["rollout_log_probs"].unbind(), data[REAL].unbind()
    pairs = [*zip(trainer, rollout, strict=True)]
    is_finite = all(bool(finite_pairs(*pair)[mask.bool()].all()) for pair, mask in zip(pairs, real, strict=True))
    if not is_finite:
        trainer, rollout = zip(*(with_finite_pairs(*pair) for pair in pairs), strict=True)
    sequences = CorrectionInputs(trainer, rollout, real, advantages=data["advantages"].unbind())
    fields, _ = fields_of(sequences, correction=correction)
    fields |= {"old_log_probs": [*trainer], "rollout_log_probs": [*rollout]}
    data = data.clone(recurse=False)
    for name, rows in fields.items():
        data[name] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    return data, is_finite


def _as_offsets(lower_BT: Tensor, *, upper_BT: Tensor) -> dict[str, Tensor]:
    """Return low and high with which verl's `1 - low` and `1 + high` are the bounds again: exactly from 0.5 on,
    below it to 2^-25."""
    return {"clip_ratio_low": 1 - lower_BT, "clip_ratio_high": upper_BT - 1}


def centering_term(
    config: ActorConfig, model_output: dict[str, Tensor], data: TensorDict, *, cap: float | None
) -> tuple[Tensor, dict[str, float]]:
    """Return (what score centering adds to the loss, aggregated as the loss is, its sums for USED and the metrics).

    model_output: with the trainer's log-probs of the most likely words.  data: with the engine's.  cap: of the weights,
    None where tokens have none.
    """
    if TOP_TRAINER not in model_output:
        raise TrainingError("the forward gave no log-probs of the engine's most likely words", hint=_HINT)
    trainer_NK = response_from_nested(model_output[TOP_TRAINER], data[KEPT]).values()
    kept_N, offsets = data[KEPT].values().bool(), data[KEPT].offsets()
    coefficient_NK = coefficients(trainer_NK, rollout_TK=words_of(data, TOP_ROLLOUT), cap=cap)
    log_probs_NK = trainer_NK.masked_fill(trainer_NK == -torch.inf, 0.0)  # outside of a support coefficients are 0
    term_N = data["advantages"].values() * (coefficient_NK.to(trainer_NK.dtype) * log_probs_NK).sum(dim=-1)
    columns = (term_N.masked_fill(~kept_N, 0.0), kept_N.long())
    term_BT, kept_BT = (torch.nested.nested_tensor_from_jagged(each, offsets).to_padded_tensor(0) for each in columns)
    mode, whole = config.loss_agg_mode, config.global_batch_info
    term = agg_loss(loss_mat=term_BT, loss_mask=kept_BT, loss_agg_mode=mode, **whole)
    size = float(size_of(coefficient_NK, trainer_TK=trainer_NK)[kept_N].sum())
    return term, {f"{USED}{CENTERED}": float(kept_N.sum()), CENTERING_SIZE: size}


def centering_metrics(reported: Mapping[str, Any]) -> dict[str, float]:
    """Return the mean of `size_of` over the tokens that stay, for a step's line; empty where no loss had the term.
    reported: as for check_used."""
    tokens = float(reported.get(f"{USED}{CENTERED}", 0.0))
    return {"score_centering": float(reported[CENTERING_SIZE]) / tokens} if tokens else {}


def clipped_negatives(
    config: ActorConfig, model_output: dict[str, Tensor], data: TensorDict, *, kind: Loss
) -> dict[str, float]:
    """Count the tokens that stay and have a negative advantage, and those of them that learn nothing because the ratio
    lies outside of the loss's bounds: 1 - clip_low, and dual_clip where it has one. Where the ratio is one for a
    response, they are all of its tokens.

    config: with the bounds of each token, where a correction clips.
    """
    spec = kind.spec
    log_prob_BT = no_padding_2_padding(model_output["log_probs"], data).detach()
    padded = data.select("old_log_probs", "advantages", KEPT).to_padded_tensor()
    kept_BT, old_BT = padded[KEPT].bool(), padded["old_log_probs"]
    log_BT = log_prob_BT - old_BT
    if spec.of_sequences:
        log_BT = mean_log_ratio(log_prob_BT, old_BT=old_BT, kept_BT=kept_BT).expand_as(log_BT)
    ratio_BT = log_BT.clamp(-CLAMP, CLAMP).exp()
    outside_BT = log_BT < -config.clip_ratio_low if spec.in_nats else ratio_BT < 1 - config.clip_ratio_low
    if "dual_clip" in spec.bounds:
        outside_BT = outside_BT | (ratio_BT > config.clip_ratio_c)
    negative_BT = kept_BT & (padded["advantages"] < 0)
    clipped = 0.0 if spec.keeps_gradient else float((negative_BT & outside_BT).sum())
    return {NEGATIVE: float(negative_BT.sum()), CLIPPED_NEGATIVE: clipped}


def clipped_negative_fraction(reported: Mapping[str, Any]) -> float | None:
    """Return the clipped share of a step's tokens with a negative advantage; None where it has none, or made no
    update. reported: verl's metrics of the update, as for check_used."""
    negative = float(reported.get(NEGATIVE, 0.0))
    return float(reported[CLIPPED_NEGATIVE]) / negative if negative else None


def _reference_kl_in_loss(config: ActorConfig, model_output: dict[str, Tensor], data: TensorDict) -> float:
    """Return the estimator's sum over the tokens that stay, nats: verl reports it aggregated as the loss."""
    log_prob_BT = no_padding_2_padding(model_output["log_probs"], data).detach()
    padded = data.select("ref_log_prob", KEPT).to_padded_tensor()
    kl_BT = kl_penalty(log_prob_BT, padded["ref_log_prob"], config.kl_loss_type)
    return float(kl_BT[padded[KEPT].bool()].double().sum())


def mean_reference_kl(reported: Mapping[str, Any]) -> float:
    """Return the mean per token of an update, whatever the loss aggregates; NaN where there was none. reported: as
    for check_used."""
    kept = float(reported.get(f"{USED}kept", 0.0))
    return float(reported[REFERENCE_KL]) / kept if kept and REFERENCE_KL in reported else math.nan


def mean_log_ratio(log_prob_BT: Tensor, *, old_BT: Tensor, kept_BT: Tensor) -> Tensor:
    """Return [B, 1] float64, nats: the mean of log_prob - old over a sequence's tokens, 0 for one without any.
    TBPO's bounds of it are 3e-4 wide, and a sum of thousands of float32 is not that exact."""
    log_BT = (log_prob_BT.double() - old_BT.double()).masked_fill(~kept_BT, 0.0)
    return log_BT.sum(dim=-1, keepdim=True) / kept_BT.sum(dim=-1, keepdim=True).clamp(min=1)


@register_policy_loss(str(Loss.TBPO))
def tbpo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "",
    config: ActorConfig | None = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Compute TBPO (trust-band policy optimisation) in verl's signature of a policy loss: [B, T] each, nats; the loss,
    and verl's metrics of it. With r = exp(mean over the response of log p_theta / p_trainer) the objective of a
    response is

        w * A * min(r, 1 + clip_high)                                        A >= 0
        w * A * r     where 1 - clip_low <= r <= dual_clip, else 0           A < 0

    w is what the correction wrote: of `tis-geometric` min(exp(mean of log p_trainer / p_rollout), cap), detached.

    Source: QaRL, arXiv 2604.07853, of which notes were at hand: r, the three bounds, that a negative response outside
    is dropped, and w. Read into them: r is the geometric mean, as GSPO's; what is dropped adds 0 and still counts; the
    loss is the mean over responses, each of one weight whatever its length, so that loss_agg_mode is not used.
    """
    assert config is not None, "verl always hands it over"
    kept_BT = response_mask.bool()
    log_B1 = mean_log_ratio(log_prob, old_BT=old_log_prob, kept_BT=kept_BT).clamp(-CLAMP, CLAMP)
    ratio_BT = log_B1.exp().expand_as(advantages)
    negative_BT = advantages < 0
    above_BT = ~negative_BT & (ratio_BT > 1 + config.clip_ratio_high)
    below_BT, beyond_BT = (ratio_BT < 1 - config.clip_ratio_low), (ratio_BT > config.clip_ratio_c)
    held_BT = ratio_BT.clamp(max=1 + config.clip_ratio_high)
    banded_BT = ratio_BT.masked_fill(below_BT | beyond_BT, 0.0)
    loss_BT = -advantages * torch.where(negative_BT, banded_BT, held_BT)
    if rollout_is_weights is not None:
        loss_BT = loss_BT * rollout_is_weights
    loss = agg_loss(loss_BT, response_mask, "seq-mean-token-mean", **config.global_batch_info)
    clipped = {"pg_clipfrac": above_BT | (negative_BT & below_BT), "pg_clipfrac_lower": negative_BT & beyond_BT}
    kl = masked_mean(old_log_prob - log_prob, kept_BT)
    metrics = {"ppo_kl": kl, **{name: masked_mean(found.float(), kept_BT) for name, found in clipped.items()}}
    return loss, {f"actor/{name}": value.item() for name, value in metrics.items()}


@register_policy_loss(str(Loss.GEO_MEAN))
def geo_mean(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "",
    config: ActorConfig | None = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Compute GMPO in verl's signature of a policy loss, by verl's own function, whose mean is over a micro-batch: here
    it is over the responses of an update, however they are shared out. With x = log p_theta / p_trainer of a token the
    objective of a response is

        w * A * exp(mean of min(x, clip_high))                                   A >= 0
        w * A * exp(mean of max(x, -clip_low))                                   A < 0

    w is the geometric mean of the weights that the correction wrote, which are the same for all tokens of a response.

    Source: GMPO, arXiv 2507.20673; verl 0.9.1, `geo_mean`.
    """
    assert config is not None, "verl always hands it over"
    loss, metrics = compute_policy_loss_geo_mean(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights
    )
    whole = config.global_batch_info
    return loss * len(advantages) / whole["global_batch_size"] * whole["dp_size"], metrics


def _flat(values: Tensor) -> Tensor:
    return values.values() if values.is_nested else values


def sums_of(fields: Mapping[str, Tensor]) -> dict[str, float]:
    """Sum over the tokens that stay, by the names of the fields, [N] each; `tokens`: their number before any was
    dropped."""
    kept_N = fields[KEPT].bool()
    counts = {"tokens": float(fields[REAL].sum()), "kept": float(kept_N.sum())}
    others = {name: fields[name] for name in (WEIGHTS, CLIP_LOWER, CLIP_UPPER) if name in fields}
    return counts | {name: float(values_N[kept_N].double().sum()) for name, values_N in others.items()}


def check_used(reported: Mapping[str, Any], *, meant: Mapping[str, float]) -> None:
    """Raise TrainingError when the loss did not use what was meant, a sum of `sums_of` for a sum of `sums_of`.
    reported: verl's metrics of an update, where each is divided by the same number of mini-batches and ranks."""
    for name, value in meant.items():
        used, tokens = (float(reported.get(f"{USED}{each}", math.nan)) for each in (name, "tokens"))
        if not (tokens > 0 and math.isclose(used * meant["tokens"], value * tokens, rel_tol=_AGREE_WITHIN)):
            message = f"the loss used {name} {used:.10g} of {tokens:.10g} tokens, and {value:.10g} of"
            raise TrainingError(f"{message} {meant['tokens']:.10g} was meant", hint=_HINT)


# the shadow pass


class ShadowPass:
    """Shadow pass of a run, for a correction that has one."""

    def __init__(self, plan: RunPlan) -> None:
        assert plan.shadow is not None, "the plan of such a correction has a shadow pass"
        self._shadow, self._every = plan.shadow, plan.correction.shadow_every
        self._nominal = plan.loss_correction.clip
        self._temperature = plan.rollout.temperature
        self._run_dir = Path(plan.run_dir)

    def last_fit(self, *, before: int) -> tuple[int | None, ClipRange | None]:
        """Return (step after whose update it was made, range), both None before the first."""
        fits = [fit for fit in read_fits(self._run_dir / FITS_FILE) if fit[0] < before]
        return fits[-1] if fits else (None, None)

    def run(self, batch: KVBatchMeta, *, step: int, log_probs: LogProbs) -> None:
        """Make the shadow pass when it is due after this step's update. Raises NumericsError when a log-prob is not
        finite."""
        if (step - 1) % self._every:
            return
        part = shadow_batch(batch, sequences=self._shadow.sequences)
        part.extra_info = {
            "calculate_entropy": False,
            "compute_loss": False,
            "temperature": self._temperature,
            "micro_batch_size_per_gpu": self._shadow.forward_sequences,
        }
        log_probs(part)
        full_T, rollout_T = _ratios(part)
        if not len(full_T):
            return
        numbers = asdict(fit_bounds(full_T, rollout_T=rollout_T, nominal=self._nominal))
        bounds = numbers.pop("bounds")
        append_line(self._run_dir / FITS_FILE, {"step": step, **bounds, **numbers})
        what = f"clip bounds refitted to {1 - bounds['low']:.4g}..{1 + bounds['high']:.4g} after step {step}"
        append_event(self._run_dir, kind="clipping", what=what, why=f"a shadow pass over {numbers['tokens']} tokens")


def read_fits(path: Path) -> list[tuple[int, ClipRange]]:
    """Read (step after whose update, bounds) in the order in which they were written."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [(raw["step"], ClipRange(raw["low"], raw["high"])) for raw in map(json.loads, lines)]


def shadow_batch(batch: KVBatchMeta, *, sequences: int) -> KVBatchMeta:
    """Select so many of the batch's sequences, spread evenly over it; rows that only pad the batch are left out."""
    real = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
    return batch.select_keys([real[index * len(real) // sequences] for index in range(sequences)])


def _ratios(batch: KVBatchMeta) -> tuple[Tensor, Tensor]:
    """Return (log R, log B) of the batch's tokens, float64."""
    data = _get(batch, ["log_probs", "old_log_probs", "rollout_log_probs", "response_mask"])
    new = response_from_nested(data["log_probs"], data["response_mask"]).values()
    mask = data["response_mask"].values().bool()
    return tuple((new.double() - data[old].values().double())[mask] for old in ("old_log_probs", "rollout_log_probs"))


def gdpo(
    parts: Mapping[str, Sequence[float]], *, weights: Mapping[str, float], uids: Sequence[str], mask_BT: Tensor
) -> Tensor:
    """Return [B, T] float32: with r_k the k-th reward of a response, of its group's mean m_k and deviation s_k, the sum
    over k of weight_k * (r_k - m_k) / (s_k + 1e-6), then of all the step's tokens made mean 0 and variance 1; 0 where
    the mask is. parts: by reward, of each response, NaN where its grade was lost: it is left out of every mean,
    deviation and variance, and has 0, as has one that is alone with its grade.  uids: of its prompt.  mask_BT: tokens
    that count.

    Source: GDPO, arXiv 2601.05242; verl 0.9.1, `gdpo`.
    """
    names, uid_B, real_BT = list(parts), np.array(uids, dtype=object), mask_BT.float()
    graded = Counter(uid for uid, *values in zip(uids, *parts.values(), strict=True) if np.isfinite(values).all())
    kept_B = np.isfinite(list(parts.values())).all(axis=0) & np.array([graded[uid] > 1 for uid in uids])
    advantages_BT = torch.zeros_like(real_BT)
    if not kept_B.any():
        return advantages_BT
    most_graded = max(graded.values())
    exact = {
        name: [exact_in_sums(value, num_samples=most_graded) for value in np.array(parts[name])[kept_B].tolist()]
        for name in names
    }
    advantages_BT[kept_B], _ = compute_gdpo_outcome_advantage(
        real_BT[kept_B],  # of rewards that are given one by one it takes the device
        real_BT[kept_B],
        uid_B[kept_B],
        config={"gdpo_reward_keys": names, "gdpo_reward_weights": [weights[name] for name in names]},  # type: ignore[arg-type]
        non_tensor_batch={name: np.array(values) for name, values in exact.items()},
        batch={"prompts": real_BT.new_zeros(int(kept_B.sum()), 0), "attention_mask": mask_BT[kept_B].long()},
    )
    return advantages_BT


def gdpo_weights(plan: RunPlan) -> dict[str, float]:
    """Return the weight of each reward by its name, where `gdpo` replaces verl's advantages; else empty."""
    rewards = plan.task.named_rewards if plan.algorithm.advantage is Advantage.GDPO else {}
    return {name: reward.weight for name, reward in rewards.items()}


def with_gdpo(batch: KVBatchMeta, *, parts: Mapping[str, Sequence[float]], weights: Mapping[str, float]) -> KVBatchMeta:
    """Return the batch with these advantages. parts: in the order of its keys."""
    rows = _get(batch, ["response_mask"])["response_mask"].unbind()
    uids = [key.rsplit("_", 2)[0] for key in batch.keys]
    advantages_BT = gdpo(parts, weights=weights, uids=uids, mask_BT=pad_sequence(list(rows), batch_first=True))
    cut = [advantages[: len(row)] for advantages, row in zip(advantages_BT, rows, strict=True)]
    return with_fields(batch, {"advantages": cut, "returns": cut})


def without_advantage(batch: KVBatchMeta, *, places: Set[int]) -> KVBatchMeta:
    """Return the batch where the samples at these places teach nothing, whatever their advantage was made of."""
    rows = _get(batch, ["advantages"])["advantages"].unbind()
    advantages = [torch.zeros_like(row) if place in places else row for place, row in enumerate(rows)]
    return with_fields(batch, {"advantages": advantages})
