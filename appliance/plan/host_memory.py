"""What a run without a GPU holds in this host's memory, role by role, estimated from the model's sizes. Pure.

Each role is taken at its own largest moment, so the sum is somewhat above what is held at any one time. The bases are
measured on models so small that nothing else counts; docs/results/memory.md holds the whole against measured runs.

P weights, T tokens of one forward, h hidden, q attention's width, i intermediate, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from appliance.plan.memory import GIB, engine_weights, tokens_of_a_forward
from appliance.record.plan import RunPlan
from appliance.tasks.tiny_spec import TINY_MODELS
from appliance.terms.devices import CPU
from appliance.terms.environment import KV_CACHE_VARIABLE
from appliance.terms.shapes import ModelShape

MIB = 1 << 20
_MASTER, _GRADIENT, _ADAM = 4, 4, 8  # bytes per weight, FP32, shared by all ranks
_GATHERED = 4  # bytes per weight, of the rank that writes `huggingface/` at a save: the whole model in FP32
_LOGITS = 12  # bytes per token and word: in FP32 here, their gradient, what the entropy needs


class Role(StrEnum):
    """Processes of a run: one trainer per rank, one engine per replica, the driver, and those of Ray and verl."""

    TRAINER = "trainer"
    ENGINE = "engine"
    DRIVER = "driver"
    SERVICES = "services"


# Imports and the like, of each process of a role; `services` together. Measured: docs/results/memory.md.
_BASE = {Role.TRAINER: 760 * MIB, Role.ENGINE: 520 * MIB, Role.DRIVER: 580 * MIB, Role.SERVICES: 2150 * MIB}


@dataclass(frozen=True)
class Held:
    """Bytes of all processes of a role."""

    role: Role
    size: int


def held(plan: RunPlan, shape: ModelShape) -> tuple[Held, ...]:
    """Of every role, on all hosts together."""
    ranks, engines = plan.topology.gpus, len(plan.rollout.replicas)
    state = shape.weights * (_MASTER + _GRADIENT + _ADAM)
    trainer = ranks * _BASE[Role.TRAINER] + state + max(ranks * _forward(plan, shape), _GATHERED * shape.weights)
    engine = _BASE[Role.ENGINE] + kv_cache_gib(plan) * GIB + engine_weights(plan, shape)
    return (
        Held(Role.TRAINER, trainer),
        Held(Role.ENGINE, engines * engine),
        Held(Role.DRIVER, _BASE[Role.DRIVER]),
        Held(Role.SERVICES, _BASE[Role.SERVICES]),
    )


def peak(plan: RunPlan, shape: ModelShape) -> int:
    """Bytes, of all roles."""
    return sum(each.size for each in held(plan, shape))


def _forward(plan: RunPlan, shape: ModelShape) -> int:
    """Activations and logits of one forward, as in plan/memory.py."""
    tokens, queries = tokens_of_a_forward(plan), (shape.heads + 2 * shape.kv_heads) * shape.head_size
    layer = 2 * tokens * (6 * shape.hidden + 2 * queries + 4 * shape.intermediate)
    again = plan.trainer.gradient_checkpointing
    kept = 2 * tokens * shape.hidden * shape.layers + layer if again else layer * shape.layers
    return kept + tokens * shape.vocab * _LOGITS


def kv_cache_gib(plan: RunPlan) -> int:
    """Of one engine: vLLM fills it with zeros at its start, so all of it is held from then on."""
    return int(dict(plan.env).get(KV_CACHE_VARIABLE, 0))


def shape_of(plan: RunPlan, found: ModelShape | None) -> ModelShape | None:
    """found: by the model's config.json; None where the sizes are not known, or cannot be counted, or on a GPU."""
    shape = TINY_MODELS[plan.model.builtin].shape if plan.model.builtin else found
    return shape if plan.device == CPU and shape is not None and shape.is_dense else None


def ladder(plan: RunPlan, shape: ModelShape, *, limit: int) -> tuple[str, ...]:
    """`key: value` of the changes after which the estimate is within the limit, cheap ones first; empty: none do."""
    changes: list[str] = []
    for rung in (_smaller_cache, _shorter_forwards):
        best, said = plan, ""
        for changed, text in rung(plan):
            if peak(best, shape) > limit and peak(changed, shape) < peak(best, shape):
                best, said = changed, text
        plan, changes = best, [*changes, said] if said else changes
        if peak(plan, shape) <= limit:
            return tuple(changes)
    return ()


def _smaller_cache(plan: RunPlan) -> Iterator[tuple[RunPlan, str]]:
    for gib in range(kv_cache_gib(plan) - 1, 0, -1):
        yield (
            plan.replace(env=tuple({**dict(plan.env), KV_CACHE_VARIABLE: str(gib)}.items())),
            (f"rollout.kv_cache_gb: {gib}"),
        )


def _shorter_forwards(plan: RunPlan) -> Iterator[tuple[RunPlan, str]]:
    size = plan.trainer.micro_batch_sequences
    for smaller in (each for each in range(size - 1, 0, -1) if size % each == 0):
        trainer = plan.trainer.replace(micro_batch_sequences=smaller, max_tokens_per_gpu=None)
        yield plan.replace(trainer=trainer), f"batch.micro_batch_sequences: {smaller}"
