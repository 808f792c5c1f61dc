"""What a run holds on each GPU, estimated from the model's sizes, and what to change where it is too much. Pure.

Two moments decide. While responses are generated the engine has its share of the memory and the trainer's state lies
beside it, unless that is offloaded. While weights are updated the engine sleeps, and the trainer's whole state is
there, for what was offloaded is back. Only the weights are certain; the rest is by rule of thumb, measured nowhere.

P weights, N GPUs, T tokens of one forward on one GPU, h hidden, i intermediate, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from appliance.record.plan import RunPlan
from appliance.terms.devices import GPUS
from appliance.terms.schemes import Scheme
from appliance.terms.shapes import ModelShape

GIB = 1 << 30
_CONTEXT = 3 * GIB // 2  # CUDA and its libraries, of each of the two processes on a GPU
_GRAPHS = 2 * GIB  # the engine's captured graphs and work space
_MASTER, _GRADIENT, _ADAM = 4, 4, 8  # bytes per weight, FP32, shared by all GPUs
_LOGITS = 8  # bytes per token and word: BF16 logits, their gradient, what the entropy needs
_SHARINGS = (1, 2, 4, 8)
_LARGEST_SHARE, _SMALLEST_SHARE, _STEP_OF_SHARE = 90, 30, 5  # percent of a GPU's memory that the engine takes


@dataclass(frozen=True)
class Part:
    """certain: weights and their like, which no setting of the trainer makes smaller than this."""

    what: str
    size: int
    certain: bool = False


@dataclass(frozen=True)
class Moment:
    """One of the two moments. limit: bytes that a GPU has."""

    name: str
    parts: tuple[Part, ...]
    limit: int

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def short(self) -> int:
        """Bytes that are missing, 0 where it fits."""
        return max(0, self.size - self.limit)

    @property
    def certainly_short(self) -> bool:
        return sum(part.size for part in self.parts if part.certain) > self.limit

    @property
    def text(self) -> str:
        parts = ", ".join(f"{part.what} {part.size / GIB:.1f}" for part in self.parts if part.size)
        return f"about {self.size / GIB:.0f} of {self.limit / GIB:.0f} GiB on each GPU: {parts}"


def moments(plan: RunPlan, shape: ModelShape) -> tuple[Moment, ...]:
    """`rollout` and `update`; none for a device without a known memory or a model whose weights cannot be counted."""
    gpu = GPUS.get(plan.device)
    if gpu is None or not shape.is_dense:
        return ()
    limit = gpu.memory_gib * GIB
    return (_rollout(plan, shape, limit=limit), _update(plan, shape, limit=limit))


def _rollout(plan: RunPlan, shape: ModelShape, *, limit: int) -> Moment:
    """The engine takes its share whatever it needs; what it needs may be more."""
    trainer, gpus = plan.trainer, plan.topology.gpus
    share = int(trainer.gpu_memory_utilization * limit)
    weights, cache = engine_weights(plan, shape), one_sequence(plan, shape)
    state = (0 if trainer.offload_parameters else _MASTER) + (0 if trainer.offload_optimizer else _ADAM)
    room = max(cache, share - weights - _GRAPHS)
    return Moment(
        "rollout",
        (
            Part("engine's weights", weights, certain=True),
            Part("its graphs", _GRAPHS),
            Part("its KV cache", room),
            Part("trainer's state", shape.weights * state // gpus, certain=True),
            Part("CUDA", _CONTEXT),
        ),
        limit,
    )


def engine_share(plan: RunPlan, shape: ModelShape) -> Moment | None:
    """What the engine needs of its own share, with one sequence; None where nothing is known. vLLM takes no more."""
    gpu = GPUS.get(plan.device)
    if gpu is None or not shape.is_dense:
        return None
    parts = (
        Part("weights", engine_weights(plan, shape), certain=True),
        Part("graphs", _GRAPHS),
        Part("one sequence", one_sequence(plan, shape)),
    )
    return Moment("engine", parts, int(plan.trainer.gpu_memory_utilization * gpu.memory_gib * GIB))


def engine_weights(plan: RunPlan, shape: ModelShape) -> int:
    """Bytes on one GPU, of the engine that has most; where that is reserved, in BF16."""
    in_bf16 = plan.guard.reserve_bf16 or any(replica.emulated for replica in plan.rollout.replicas)
    schemes = [Scheme.BF16] if in_bf16 else [replica.scheme for replica in plan.rollout.replicas]
    linear = int(shape.linear_weights * max(scheme.spec.bytes_per_weight for scheme in schemes))
    return (linear + 2 * (shape.weights - shape.linear_weights)) // plan.rollout.tensor_parallel


def one_sequence(plan: RunPlan, shape: ModelShape) -> int:
    """Bytes of the KV cache of one sequence of full length on one GPU."""
    longest = plan.task.longest
    return longest * shape.kv_bytes_per_token // min(plan.rollout.tensor_parallel, shape.kv_heads)


def _update(plan: RunPlan, shape: ModelShape, *, limit: int) -> Moment:
    trainer, gpus = plan.trainer, plan.topology.gpus
    tokens = tokens_of_a_forward(plan)
    queries = (shape.heads + 2 * shape.kv_heads) * shape.head_size
    layer = 2 * tokens * (6 * shape.hidden + 2 * queries + 4 * shape.intermediate)  # T (6h + 2q + 4i) in BF16
    kept = 2 * tokens * shape.hidden * shape.layers + layer if trainer.gradient_checkpointing else layer * shape.layers
    gathered = 2 * (2 * shape.linear_weights // shape.layers + shape.weights - shape.linear_weights)
    return Moment(
        "update",
        (
            Part("weights", shape.weights * _MASTER // gpus, certain=True),
            Part("gradients", shape.weights * _GRADIENT // gpus, certain=True),
            Part("Adam", shape.weights * _ADAM // gpus, certain=True),
            Part("gathered layers", gathered),
            Part("activations", kept),
            Part("logits", tokens * shape.vocab * _LOGITS),
            Part("CUDA and the sleeping engine", 2 * _CONTEXT),
        ),
        limit,
    )


def tokens_of_a_forward(plan: RunPlan) -> int:
    """T: what one GPU has of a packed forward, or of a micro-batch of full length."""
    if plan.trainer.max_tokens_per_gpu:
        return plan.trainer.max_tokens_per_gpu
    longest = plan.task.longest
    return plan.trainer.micro_batch_sequences * longest // plan.trainer.sequence_parallel


def host_bytes(plan: RunPlan, shape: ModelShape) -> int:
    """Of each host, while responses are generated: what is offloaded."""
    trainer = plan.trainer
    state = (_MASTER if trainer.offload_parameters else 0) + (_ADAM if trainer.offload_optimizer else 0)
    return shape.weights * state // plan.nodes


def ladder(plan: RunPlan, shape: ModelShape) -> tuple[str, ...]:
    """`key: value` of the changes after which all fits, the cheap ones first; empty where even all of them do not."""
    changes: list[str] = []
    for rung in (_offload_optimizer, _offload_parameters, _less_for_the_engine, _shorter_forwards, _more_gpus):
        for changed, text in rung(plan, shape):
            if _shortage(changed, shape) < _shortage(plan, shape):
                plan = changed
                changes.append(text)
                break
        if not _shortage(plan, shape):
            return tuple(changes)
    return ()


def _shortage(plan: RunPlan, shape: ModelShape) -> int:
    return sum(moment.short for moment in moments(plan, shape))


Rung = Iterator[tuple[RunPlan, str]]  # candidates of one kind; the first that helps is taken


def _offload_optimizer(plan: RunPlan, shape: ModelShape) -> Rung:
    yield plan.replace(trainer=plan.trainer.replace(offload_optimizer=True)), "trainer.offload_optimizer: true"


def _offload_parameters(plan: RunPlan, shape: ModelShape) -> Rung:
    yield plan.replace(trainer=plan.trainer.replace(offload_parameters=True)), "trainer.offload_parameters: true"


def _less_for_the_engine(plan: RunPlan, shape: ModelShape) -> Rung:
    """The largest share with which a response fits beside the trainer's state; else the smallest there is."""
    shares = [percent / 100 for percent in range(_LARGEST_SHARE, _SMALLEST_SHARE - 1, -_STEP_OF_SHARE)]
    made = [
        (plan.replace(trainer=plan.trainer.replace(gpu_memory_utilization=share)), share)
        for share in shares
        if share < plan.trainer.gpu_memory_utilization
    ]
    fits = [each for each in made if not moments(each[0], shape)[0].short]
    for changed, share in (fits or made[-1:])[:1]:
        yield changed, f"rollout.gpu_memory_utilization: {share:g}"


def _shorter_forwards(plan: RunPlan, shape: ModelShape) -> Rung:
    """One sequence of full length per forward, on as few GPUs as make it fit."""
    longest = plan.task.longest
    made = []
    for sharing in _SHARINGS:
        tokens = -(-longest // sharing)
        divides = not (plan.gpus_per_node % sharing or shape.heads % sharing)
        if divides and sharing >= plan.trainer.sequence_parallel and tokens < tokens_of_a_forward(plan):
            trainer = plan.trainer.replace(sequence_parallel=sharing, max_tokens_per_gpu=tokens)
            text = f"batch.max_tokens_per_gpu: {tokens}"
            shared = "" if sharing == plan.trainer.sequence_parallel else f"trainer.sequence_parallel: {sharing}, "
            made.append((plan.replace(trainer=trainer), shared + text))
    fits = [each for each in made if not moments(each[0], shape)[1].short]
    yield from (fits or made[-1:])[:1]


def _more_gpus(plan: RunPlan, shape: ModelShape) -> Rung:
    """Up to eight in one host; an engine of its own takes as many as its weights need."""
    made = []
    for gpus in _SHARINGS:
        if gpus > plan.gpus_per_node and not shape.heads % gpus:
            made.append((plan.replace(gpus_per_node=gpus), f"cluster.gpus_per_node: {gpus}"))
            rollout = plan.rollout.replace(tensor_parallel=gpus)
            text = f"cluster.gpus_per_node: {gpus}, rollout.tensor_parallel: {gpus}"
            made.append((plan.replace(gpus_per_node=gpus, rollout=rollout), text))
    fits = [each for each in made if not _shortage(each[0], shape)]
    yield from (fits or made[-1:])[:1]
