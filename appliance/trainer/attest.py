"""What the processes that train attest of themselves: the driver, and every worker that has a part of the model. And
whether all processes of a run, the engines too, attested what the plan wants. Where log-probs that are to be equal are
not, in which layer both differ."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
import transfer_queue
from omegaconf import DictConfig
from ray.actor import ActorHandle
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transfer_queue import KVBatchMeta

from appliance import patch
from appliance.corrections.objective import Advantage
from appliance.errors import AttestationError
from appliance.quant.loading import tensors_loaded
from appliance.quant.mismatch import DifferingToken, LayerTrace, first_difference
from appliance.record.attestations import (
    Attestation,
    check_attestations,
    fingerprint,
    read_attestations,
    write_attestation,
)
from appliance.record.code import attested_code
from appliance.record.events import append_event
from appliance.record.plan import RunPlan
from appliance.sync.precision import attestations_at, read_generation
from appliance.terms.counts import counted
from appliance.terms.schemes import Precision, Scheme
from appliance.terms.settings import Dtype
from appliance.trainer.correction import gdpo_weights
from appliance.trainer.rollout_forward import HEAD, backward, follow_engines, quantised_layers
from appliance.trainer.update_log_probs import SequenceLogProbs

SEARCH_EVERY = 50  # steps: both sides compute a sequence twice, and digest all that its layers put out


def check_attested(plan: RunPlan, *, precision: Precision) -> None:
    """Raise AttestationError when a process of the run has not attested what the plan wants, or has attested something
    else. precision: what the rollout engines were started in."""
    expected = attestations_at(plan, precision)
    found = check_attestations(Path(plan.run_dir), expected, pins=plan.pins, fingerprint=fingerprint())
    _require_none(found.problems or ([*_other_layers(Path(plan.run_dir))] if plan.trainer.quantises else []))


def _require_none(problems: Sequence[str]) -> None:
    if problems:
        raise AttestationError("; ".join(problems), hint="see attest/ in the run folder")


def _other_layers(run_dir: Path) -> Iterator[str]:
    """Yield where trainer ranks and engines do not quantise the same."""
    reports, _ = read_attestations(run_dir)
    (first, layers), *others = [
        (report.process, {*report.detail["quantised"]}) for report in reports if report.role != "driver"
    ]
    for process, other_layers in others:
        if differ := sorted(layers ^ other_layers):
            differences = counted(len(differ), "layer differs", plural="layers differ")
            yield f"{first} and {process} do not quantise the same: {differences}, first {differ[0]}"


def attest_driver(plan: RunPlan, *, algorithm: DictConfig) -> None:
    """Write `attest/driver-0.json`: this process computes advantages and corrections, in float, and no model; its pool
    runs the user's code. algorithm: verl's, by which it computes advantages, but for `gdpo`."""
    correction = plan.correction
    advantage = str(Advantage.GDPO) if gdpo_weights(plan) else algorithm.adv_estimator
    detail: dict[str, Any] = {"advantage": advantage, "by_deviation": algorithm.norm_adv_by_std_in_grpo}
    detail |= {"correction": str(correction.method), "cap": correction.cap, "bounds": correction.bounds}
    if code := attested_code(plan):
        detail["code"] = code
    _write(plan, role="driver", rank=0, detail=detail)


def attest_trainers(plan: RunPlan, *, workers: list[ActorHandle], with_new_engines: bool = True) -> None:
    """Have every training worker write `attest/trainer-<rank>.json`, from the model that it has. with_new_engines: a
    forward that is the rollouts' computes as they do from here on; those that run it has followed with each update."""
    ray.get([worker.__ray_call__.remote(_attest_worker, plan, with_new_engines) for worker in workers])


def attest_switch(plan: RunPlan, *, workers: list[ActorHandle]) -> None:
    """Have the training workers attest again after a weight update with which engines changed layers: their forward
    has changed with it. Raises AttestationError where both do not quantise the same now."""
    if plan.trainer.quantises:
        attest_trainers(plan, workers=workers, with_new_engines=False)
        _require_none([*_other_layers(Path(plan.run_dir))])


def _attest_worker(worker: Any, plan: RunPlan, with_new_engines: bool) -> None:
    """Run inside verl's worker. `worker_dict` has the one role that has the actor."""
    actor = _actor(worker)
    engine = actor.engine
    module: Module = engine.module
    compute, asked_dtype = compute_dtype(module), plan.trainer.dtype
    if compute is not getattr(torch, asked_dtype.in_torch):
        raise AttestationError(f"trainer rank {worker.rank} computes in {compute}, the plan says {asked_dtype}")
    scales = engine.scaler is not None and engine.scaler.is_enabled()
    if scales is not (asked_dtype is Dtype.FP16):
        how = "scales losses" if scales else "does not scale losses"
        raise AttestationError(f"trainer rank {worker.rank} {how}, the plan says {asked_dtype}")
    rates = [group["initial_lr"] for group in engine.optimizer.param_groups]
    if rates[1:] != ([] if plan.optimizer.norm_fed_lr_scale == 1 else [rates[0] * plan.optimizer.norm_fed_lr_scale]):
        planned = f"the plan asks for one of {plan.optimizer.norm_fed_lr_scale:g} times the rate"
        raise AttestationError(f"trainer rank {worker.rank} has the learning rates {rates}, {planned}")
    if not (loaded := tensors_loaded(module)):
        raise AttestationError(
            f"trainer rank {worker.rank} does not know whether all of its model came from the checkpoint"
        )
    trained, all_of_it = trained_tensors(module), sum(1 for _ in module.parameters())
    if (trained < all_of_it) != bool(plan.model.lora):
        planned = "an adapter alone" if plan.model.lora else "all"
        raise AttestationError(f"trainer rank {worker.rank} trains {trained} of {all_of_it}, the plan says {planned}")
    detail: dict[str, Any] = {
        "trained": trained,
        "loaded": loaded,
        "parameters": str(next(module.parameters()).dtype),
        "compute": str(compute),
        "class": type(module).__name__,
        "learning_rates": rates,
        "threads": torch.get_num_threads(),
        **installed_loss(actor.loss_fn),
    }
    if plan.trainer.quantises:
        if with_new_engines:
            follow_engines(read_generation(Path(plan.run_dir)).precision)
        detail |= {
            "forward": str(plan.trainer.forward),
            "backward": backward(),
            "quantised": quantised_layers(),
        }
    _write(plan, role="trainer", rank=worker.rank, detail=detail)


def _actor(worker: Any) -> Any:
    """Return verl's actor, inside its worker."""
    return next(role.actor for role in worker.worker_dict.values() if role.actor is not None)


def take_settings(plan: RunPlan, *, workers: Sequence[ActorHandle]) -> float:
    """Give all ranks' optimizers the plan's settings, once a checkpoint is loaded: verl loads those of the attempt that
    saved it, also what a resume with `--force` has changed. Returns the rate of the next step's updates."""
    found: list[float] = ray.get([worker.__ray_call__.remote(_take, plan) for worker in workers])
    return found[0]


def _take(worker: Any, plan: RunPlan) -> float:
    """Run inside verl's worker."""
    engine = _actor(worker).engine
    return set_as_planned(engine.optimizer, schedule=engine.lr_scheduler, plan=plan)


def set_as_planned(optimizer: Optimizer, *, schedule: LambdaLR, plan: RunPlan) -> float:
    """Give an optimizer the plan's settings. Where nothing has changed no bit of it does. Returns the rate that
    holds now, of the first group."""
    planned = plan.optimizer
    scales = (1.0, planned.norm_fed_lr_scale)  # the second group: verl_engine.py, split_rates
    settings = {"betas": planned.betas, "eps": planned.epsilon}
    for group, scale in zip(optimizer.param_groups, scales, strict=False):
        rate, decay = planned.learning_rate * scale, planned.weight_decay / scale
        group.update(settings, initial_lr=rate, weight_decay=decay)
    schedule.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
    parts = [rate(schedule.last_epoch) for rate in schedule.lr_lambdas]
    for group, part in zip(optimizer.param_groups, parts, strict=True):
        group["lr"] = group["initial_lr"] * part
    schedule._last_lr = [group["lr"] for group in optimizer.param_groups]
    return float(schedule.get_last_lr()[0])


def installed_loss(loss_fn: partial) -> dict[str, str]:
    """Return verl's names of what a worker computes. loss_fn: as BatchCorrection.install made it."""
    config = loss_fn.keywords["config"]
    return {"loss": config.policy_loss.loss_mode, "aggregate": config.loss_agg_mode}


def find_differing(batch: KVBatchMeta, *, update_rows: Mapping[str, SequenceLogProbs] | None = None) -> DifferingToken:
    """Find the first token of the batch that differs; there is one.

    update_rows: what the update's forward gave of its sequences, by their keys; None: the batch has the log-probs
    of a pass.
    """
    keys = batch.keys if update_rows is None else [key for key in batch.keys if key in update_rows]
    fields = [
        "prompts",
        "responses",
        "rollout_log_probs",
        "loss_mask",
        *(["old_log_probs"] if update_rows is None else []),
    ]
    data = transfer_queue.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=fields)
    prompts, responses, rollout, real, *of_pass = (data[name].unbind() for name in fields)
    trainer = of_pass[0] if update_rows is None else [update_rows[key].log_probs for key in keys]
    return first_differing(zip(prompts, responses, trainer, rollout, real, strict=True))


def tell_layer(
    differing: DifferingToken,
    *,
    plan: RunPlan,
    step: int,
    workers: list[ActorHandle],
    servers: list[ActorHandle],
    has_moved: bool,
) -> None:
    """Report as an event which layer makes log-probs differ that are to be equal. While nothing is generated, and
    trainer and engines have the same weights. has_moved: whether these are other weights than the step's."""
    request = {"token": differing.token, "temperature": plan.rollout.temperature}

    def by_trainer(ids: list[int], **more: Any) -> LayerTrace:
        return ray.get([worker.__ray_call__.remote(_traced, ids, request | more) for worker in workers])[0]

    by_engines = [lambda ids, of=each, **more: ray.get(of.traced.remote(ids, **request, **more)) for each in servers]
    # What is traced has a log-prob among all words.
    then = None if has_moved or plan.rollout.leaves_words_out else (differing.trainer, differing.rollout)
    what, why = find_difference(differing.ids, by_trainer=by_trainer, by_engines=by_engines, then=then)
    why += "; searched with the weights after the step's update" if has_moved else ""
    append_event(Path(plan.run_dir), kind="note", what=f"step {step}: {what}", why=why, step=step)


def _traced(worker: Any, ids: list[int], request: dict[str, Any]) -> LayerTrace:
    """Run inside verl's worker."""
    return _actor(worker).engine.traced(ids, **request)


def first_differing(rows: Iterable[tuple[Tensor, ...]]) -> DifferingToken:
    """Find the first token that differs; there is one. rows: of each sequence prompt, response, the response's
    log-probs in the trainer and in the rollouts, and whether a token counts."""
    for prompt, response, trainer, rollout, real in rows:
        for place in (real.bool() & (trainer.float() != rollout.float())).nonzero().flatten().tolist():
            ids = [*prompt.tolist(), *response[:place].tolist()]
            return DifferingToken(ids, int(response[place]), float(trainer[place]), float(rollout[place]))
    raise AssertionError("no token differs")


def find_difference(
    ids: list[int],
    *,
    by_trainer: Callable[..., LayerTrace],
    by_engines: Sequence[Callable[..., LayerTrace]],
    then: tuple[float, float] | None,
) -> tuple[str, str]:
    """Find what differs, and what it means.

    by_trainer, by_engines: `traced` of each.  then: the trainer's and the rollouts' log-prob of the token after `ids`
    in the step, None where the weights are others by now, or it is over fewer words than the traced ones. Of several
    engines nobody knows which one sampled: it is the one that repeats its log-prob, or, without `then`, the first one
    that differs from the trainer.
    """
    ours = by_trainer(ids)
    names = list(ours.digests)
    assert names, "the trainer's forward has traced nothing"
    traces = [(ask, ask(ids, names=names)) for ask in by_engines]

    def sampled(trace: LayerTrace) -> bool:
        return ours.log_prob != trace.log_prob if then is None else trace.log_prob == then[1]

    ask, theirs = next((pair for pair in traces if sampled(pair[1])), traces[0])
    means = [
        f"{side} does not repeat its log-prob: {before:.9g} in the batch, {trace.log_prob:.9g} alone"
        for side, before, trace in zip(("the trainer", "the engine"), then or (), (ours, theirs), strict=False)
        if before != trace.log_prob
    ]
    place = first_difference(ours.digests, theirs=theirs.digests)
    if place is None:
        usual = "what follows the layers differs: the temperature, the tokens that are masked, the softmax"
        if then is None and ours.log_prob == theirs.log_prob:
            usual = (
                "and both give the next token the same log-prob: the weights before the update or the words drawn from "
                "differed, or how the token was decoded or trained beside others; trainer.old_log_probs: recompute "
                "compares before the weights change"
            )
        means = means or [usual]
        return f"no layer differs where both read the sequence of {len(ids)} tokens again", "; ".join(means)
    values = by_trainer(ids, values_at=place).values, ask(ids, names=names, values_at=place).values
    gaps = [abs(one - other) for one, other in zip(*values, strict=True)]
    name, token = place
    finding = (
        f"{name} is the first layer that differs from the engine's: token {len(ids) - 1 if name == HEAD else token} of "
        f"{len(ids)}, {sum(map(bool, gaps))} of {len(gaps)} values by up to {max(gaps):.4g}"
    )
    part = " (rotary embedding and norms of heads are part of it)" if name.endswith(".attn") else ""
    where = f"all before it is equal: its weights or their codes differ, or what it computes{part}"
    return finding, "; ".join([where, *means])


def trained_tensors(module: Module) -> int:
    """Count the parameters that have a gradient."""
    return sum(each.requires_grad for each in module.parameters())


def compute_dtype(module: Module) -> torch.dtype:
    """Return what an FSDP2 module computes in: its mixed-precision policy's, else its parameters'."""
    policy = module._get_fsdp_state()._mp_policy
    return policy.param_dtype or next(module.parameters()).dtype


def _write(plan: RunPlan, *, role: str, rank: int, detail: dict[str, Any]) -> None:
    write_attestation(
        Path(plan.run_dir),
        Attestation(
            process=f"{role}-{rank}",
            role=role,
            rank=rank,
            scheme=str(Scheme.BF16),
            emulated=False,
            patches=tuple(patch.applied_patches()),
            versions={name: importlib.metadata.version(name) for name, _ in plan.pins},
            fingerprint=fingerprint(),
            detail=detail,
        ),
    )
