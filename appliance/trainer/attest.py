"""What the processes that train say of themselves: the driver, and every worker that holds a part of the model. And
whether all of a run, the engines too, said what the plan wants."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import torch
from ray.actor import ActorHandle
from torch.nn import Module

from appliance import patch
from appliance.errors import AttestationError
from appliance.record.attestations import (
    Attestation,
    check_attestations,
    fingerprint,
    read_attestations,
    write_attestation,
)
from appliance.record.code import attested_code
from appliance.record.plan import RunPlan
from appliance.sync.precision import Precision, attestations_at, read_generation
from appliance.terms.schemes import Scheme
from appliance.trainer.rollout_forward import follow_engines, quantised_layers


def check_attested(plan: RunPlan, *, precision: Precision) -> None:
    """Raises AttestationError when a process of the run has not said what the plan wants of it, or something else.

    precision: what the rollout engines were started in.
    """
    expected = attestations_at(plan, precision)
    found = check_attestations(Path(plan.run_dir), expected, pins=plan.pins, fingerprint=fingerprint())
    problems = found.problems or ([*_other_layers(Path(plan.run_dir))] if plan.trainer.one_flow else [])
    if problems:
        raise AttestationError("; ".join(problems), hint="see attest/ in the run folder")


def _other_layers(run_dir: Path) -> Iterator[str]:
    """Where trainer ranks and engines do not quantise the same."""
    said, _ = read_attestations(run_dir)
    (first, layers), *others = [(one.process, {*one.detail["quantised"]}) for one in said if one.role != "driver"]
    for process, found in others:
        if differ := sorted(layers ^ found):
            yield f"{first} and {process} do not quantise the same: {len(differ)} layers differ, first {differ[0]}"


def attest_driver(plan: RunPlan) -> None:
    """Write `attest/driver-0.json`: this process computes advantages and corrections, in float, and no model; its pool
    runs the user's code."""
    correction = plan.correction
    detail: dict[str, Any] = {"correction": str(correction.method), "cap": correction.cap, "bounds": correction.bounds}
    if code := attested_code(plan):
        detail["code"] = code
    _write(plan, role="driver", rank=0, detail=detail)


def attest_trainers(plan: RunPlan, *, workers: list[ActorHandle]) -> None:
    """Have every training worker write `attest/trainer-<rank>.json`, from the model that it holds."""
    ray.get([worker.__ray_call__.remote(_attest_worker, plan) for worker in workers])


def _attest_worker(worker: Any, plan: RunPlan) -> None:
    """Runs inside verl's worker. `worker_dict` holds the one role that has the actor."""
    actor = next(role.actor for role in worker.worker_dict.values() if role.actor is not None)
    module: Module = actor.engine.module
    compute = compute_dtype(module)
    if compute is not torch.bfloat16:
        raise AttestationError(f"trainer rank {worker.rank} computes in {compute}, the plan says bf16")
    rates = [group["initial_lr"] for group in actor.engine.optimizer.param_groups]
    if rates[1:] != ([] if plan.norm_fed_lr_scale == 1 else [rates[0] * plan.norm_fed_lr_scale]):
        asked = f"the plan asks for one of {plan.norm_fed_lr_scale:g} times the rate"
        raise AttestationError(f"trainer rank {worker.rank} has the learning rates {rates}, {asked}")
    detail: dict[str, Any] = {
        "parameters": str(next(module.parameters()).dtype),
        "compute": str(compute),
        "class": type(module).__name__,
        "learning_rates": rates,
        "threads": torch.get_num_threads(),
    }
    if plan.trainer.one_flow:
        follow_engines(read_generation(Path(plan.run_dir)).precision)
        detail |= {"forward": "rollout", "quantised": quantised_layers()}
    _write(plan, role="trainer", rank=worker.rank, detail=detail)


def compute_dtype(module: Module) -> torch.dtype:
    """What an FSDP2 module computes in: its mixed-precision policy's, else its parameters'."""
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
            patches=tuple(patch.applied()),
            versions={name: importlib.metadata.version(name) for name, _ in plan.pins},
            fingerprint=fingerprint(),
            detail=detail,
        ),
    )
