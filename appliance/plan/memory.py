"""What a run holds in memory, estimated from the model's sizes, and what to change where it is too much. Pure.

On a GPU four moments decide. While responses are generated the engine has its share of the memory and the trainer's
state lies beside it, unless that is offloaded. While weights are updated the engine sleeps, and the trainer's whole
state is there, for what was offloaded is back. While weights are sent the engine has its own, and verl streams those of
the trainer tensor by tensor, but with LoRA, which it merges as a whole. At a save the engine is awake, and offloaded
weights are back. Only the weights are certain; the rest is by rule of thumb, measured nowhere.

Without a GPU each role of processes is taken at its own largest moment, so the sum is somewhat above what is held at
any one time. The bases are measured on a model so small that nothing else counts; docs/results/memory.md compares the
whole with measured runs.

With LoRA the model is held in BF16, and gradients and Adam are the adapter's; while weights are sent, each host has a
copy of the model besides. An adapter that is sent alone needs no such copy: a model that goes with it is sent tensor by
tensor. Its engine keeps the model, and so a host holds the engine's weights while the engine sleeps. Where the trainer
has codes in place of weights (`RunPlan.trains_on_codes`) they stay from update to update. When the guard puts layers in
BF16 their weights, which are read from the model's files again, are there in place of the codes: twice as much, and
nothing that is offloaded. On a CPU codes and packed weights take as much.

P weights, N GPUs, T tokens of one forward on one GPU, h hidden, q attention's width, i intermediate, V vocabulary,
L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from appliance.plan.engines import CHANGES_ENGINES
from appliance.record.plan import RunPlan
from appliance.tasks.library import BUILT_IN_MODELS
from appliance.terms.devices import GPUS
from appliance.terms.schemes import Scheme
from appliance.terms.settings import CPU_KV_BLOCK, KvCache
from appliance.terms.shapes import ModelShape

MIB, GIB = 1 << 20, 1 << 30
_CONTEXT = 3 * GIB // 2  # CUDA and its libraries, of each of the two processes on a GPU
_GRAPHS = 2 * GIB  # the engine's captured graphs and work space
_GRAPHS_ASLEEP = GIB  # of them, what sleep mode does not free
_SPARE_BLOCKS = 2  # vLLM's block for padding, and one more
_COUNT = 4  # bytes per sequence and word: vLLM's V2 runner counts what was said, penalties or not
_MASTER, _GRADIENT, _ADAM = 4, 4, 8  # bytes per weight that is trained, FP32, shared by all ranks
_FROZEN = 2  # bytes per weight that is not, BF16, shared by all ranks
_COPY = 2  # bytes per weight, BF16, of those that compute during an update: `TrainerMemory.keeps_copies`
_GATHERED = 4  # bytes per weight, of the rank that writes `huggingface/` at a save: the whole model in FP32
_LOGITS = 8  # bytes per token and word: BF16 logits, their gradient, what the entropy needs
_LOGITS_ON_CPU = 12  # the same in FP32
_CODES = 1  # byte per weight that a rank of `trainer.forward: rollout` quantises itself, until the next update
_KEPT_CODES = "codes of the forward"
_READ_AGAIN = "BF16 in their place if the guard acts"
_BUCKET = GIB // 2  # of the weights that are sent at once, verl's
_REFERENCE = 4  # bytes per weight, FP32, shared by all ranks
_SHARINGS = (1, 2, 4, 8)
_MICRO_BATCH, _PACKED_TO = "batch.micro_batch_sequences", "batch.max_tokens_per_gpu"  # that exclude each other
_LARGEST_SHARE, _SMALLEST_SHARE, _STEP_OF_SHARE = 90, 30, 5  # percent of a GPU's memory that the engine takes


@dataclass(frozen=True)
class Part:
    name: str
    size: int
    certain: bool = False
    """Whether the part is weights or the like, which no setting of the trainer makes smaller."""


@dataclass(frozen=True)
class Moment:
    """Memory at one of the moments, or of an engine within its share."""

    name: str
    parts: tuple[Part, ...]
    limit: int
    """Bytes that are available."""

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
        parts = ", ".join(f"{part.name} {part.size / GIB:.1f}" for part in self.parts if part.size)
        return f"about {self.size / GIB:.0f} of {self.limit / GIB:.0f} GiB on each GPU: {parts}"


def is_estimated(plan: RunPlan, shape: ModelShape) -> bool:
    return plan.cluster.device in GPUS and shape.is_dense


def moments(plan: RunPlan, shape: ModelShape) -> tuple[Moment, ...]:
    """Estimate the moments `rollout`, `update`, `sync` and `save`. Returns none for a device without a known memory or
    a model whose weights cannot be counted."""
    if not is_estimated(plan, shape):
        return ()
    limit = GPUS[plan.cluster.device].memory_gib * GIB
    rollout = _engine_awake(plan, shape, limit=limit)
    beside, certain = "trainer's state", {"certain": True}
    offloads = plan.trainer.offload_parameters
    without_offloaded, whole = (_state(plan, shape, parameters=each) for each in (not offloads, True))
    largest = shape.vocab * shape.hidden  # weights of the embedding
    kept_codes = _kept_codes(plan, shape) if plan.trains_on_codes else ()
    return (
        Moment(
            "rollout",
            (
                *rollout,
                Part(beside, without_offloaded, **certain),
                *kept_codes,
                Part("CUDA", _CONTEXT),
            ),
            limit,
        ),
        _update(plan, shape, limit=limit),
        Moment(
            "sync",
            (
                Part("engine's weights", engine_weights(plan, shape), **certain),
                Part(beside, whole if _merges(plan) else without_offloaded, **certain),
                *kept_codes,
                Part("weights on their way", _BUCKET + (2 * _FROZEN + (0 if plan.model.lora else _MASTER)) * largest),
                Part("CUDA and the engine's graphs", 2 * _CONTEXT + _GRAPHS_ASLEEP),
            ),
            limit,
        ),
        Moment(
            "save",
            (
                *rollout,
                Part(beside, whole, **certain),
                *kept_codes,
                Part("the largest weight", 0 if plan.model.lora else _GATHERED * largest),
                Part("CUDA", _CONTEXT),
            ),
            limit,
        ),
    )


def _engine_awake(plan: RunPlan, shape: ModelShape, *, limit: int) -> tuple[Part, ...]:
    """It takes its share whatever it needs; what it needs may be more."""
    share = int(plan.rollout.gpu_memory_utilization * limit)
    weights, counts = engine_weights(plan, shape), _counts(plan, shape)
    return (
        Part("engine's weights", weights, certain=True),
        Part("its graphs", _GRAPHS),
        Part("its counts for penalties", counts),
        Part("its KV cache", max(one_sequence(plan, shape), share - weights - _GRAPHS - counts)),
    )


def _state(plan: RunPlan, shape: ModelShape, *, parameters: bool) -> int:
    """Bytes that the trainer holds on each GPU between two updates. parameters: whether its weights are there."""
    state = _parameters(plan, shape) if parameters else 0
    state += 0 if plan.trainer.offload_optimizer else _ADAM * trained_weights(plan, shape)
    return state // plan.topology.gpus


def _update(plan: RunPlan, shape: ModelShape, *, limit: int) -> Moment:
    gpus, others = plan.topology.gpus, shape.weights - shape.linear_weights
    trained = trained_weights(plan, shape)
    return Moment(
        "update",
        (
            Part("weights", _parameters(plan, shape) // gpus, certain=True),
            Part("gradients", trained * _GRADIENT // gpus, certain=True),
            Part("Adam", trained * _ADAM // gpus, certain=True),
            Part("gathered layers", 2 * (2 * shape.linear_weights // shape.layers + others)),
            Part("activations", _activations(plan, shape)),
            Part("logits", _tokens_of_a_forward(plan) * shape.vocab * _LOGITS),
            *(_kept_codes(plan, shape) if plan.trainer.quantises else ()),
            Part("CUDA and the sleeping engine", 2 * _CONTEXT + _GRAPHS_ASLEEP),
        ),
        limit,
    )


def _kept_codes(plan: RunPlan, shape: ModelShape) -> tuple[Part, ...]:
    """Codes that each rank's forward has on a GPU, and what takes more memory after an action of the guard: of a share
    of the layers, which may be the largest, all are counted."""
    codes = Part(_KEPT_CODES, _CODES * shape.linear_weights, certain=True)
    reads_again = plan.trains_on_codes and _guard_changes_precision(plan)
    return codes, Part(_READ_AGAIN, (_FROZEN - _CODES) * shape.linear_weights if reads_again else 0)


def _guard_changes_precision(plan: RunPlan) -> bool:
    return any(action in CHANGES_ENGINES for action in plan.guard.actions or ())


def trained_weights(plan: RunPlan, shape: ModelShape) -> int:
    """Count the weights that have a gradient: all of them, or the adapter's."""
    lora = plan.model.lora
    return shape.adapter_weights(lora.rank, targets=lora.targets) if lora else shape.weights


def _parameters(plan: RunPlan, shape: ModelShape) -> int:
    """Bytes of what the trainer holds weights in, all ranks together, without codes."""
    num_frozen = shape.weights if plan.model.lora else 0
    num_frozen -= shape.linear_weights if plan.trains_on_codes else 0
    return _MASTER * trained_weights(plan, shape) + _FROZEN * num_frozen


def _merges(plan: RunPlan) -> bool:
    """Whether a whole model with its adapter merged in is sent at each update."""
    return plan.model.lora is not None and not plan.sends_adapters


def engine_share(plan: RunPlan, shape: ModelShape) -> Moment | None:
    """Estimate what the engine needs of its own share, with one sequence. vLLM takes no more than the share. Returns
    None where the model's sizes are not known."""
    gpu = GPUS.get(plan.cluster.device)
    if gpu is None or not shape.is_dense:
        return None
    parts = (
        Part("weights", engine_weights(plan, shape), certain=True),
        Part("graphs", _GRAPHS),
        Part("counts for penalties", _counts(plan, shape)),
        Part("one sequence", one_sequence(plan, shape)),
    )
    return Moment("engine", parts, int(plan.rollout.gpu_memory_utilization * gpu.memory_gib * GIB))


def engine_weights(plan: RunPlan, shape: ModelShape) -> int:
    """Estimate the bytes of weights on one GPU, of the engine that has most; in BF16 where the guard has that
    reserved."""
    in_bf16 = plan.guard.reserve_bf16 or plan.emulates
    schemes = [Scheme.BF16] if in_bf16 else plan.rollout.replicas
    return max(_weights_in(scheme, plan, shape) for scheme in schemes)


def _weights_in(scheme: Scheme, plan: RunPlan, shape: ModelShape) -> int:
    linear = int(shape.linear_weights * scheme.spec.bytes_per_weight)
    return (linear + 2 * (shape.weights - shape.linear_weights)) // plan.rollout.tensor_parallel


def kv_cache_beside(plan: RunPlan, shape: ModelShape, *, schemes: Sequence[Scheme]) -> int:
    """Estimate the bytes of the KV cache of each of several engines that are on one GPU at once, without a trainer: as
    in the run where there is room, for one sequence at least. plan, shape: of `is_estimated`."""
    limit = GPUS[plan.cluster.device].memory_gib * GIB
    *_, of_the_run = _engine_awake(plan, shape, limit=limit)
    others = sum(_weights_in(each, plan, shape) + _GRAPHS + _counts(plan, shape) + _CONTEXT for each in schemes)
    room = limit * _LARGEST_SHARE // 100 - others
    return max(one_sequence(plan, shape), min(of_the_run.size, room // len(schemes)))


def _counts(plan: RunPlan, shape: ModelShape) -> int:
    return plan.engine.max_concurrent_sequences * shape.vocab * _COUNT


def one_sequence(plan: RunPlan, shape: ModelShape) -> int:
    """Return the bytes of the KV cache of one sequence of full length on one GPU."""
    return plan.task.longest * _kv_bytes_per_token(plan, shape) // min(plan.rollout.tensor_parallel, shape.kv_heads)


def _kv_bytes_per_token(plan: RunPlan, shape: ModelShape) -> int:
    """Bytes of the KV cache per token, of the whole model, in the format of `rollout.kv_cache`."""
    return shape.kv_bytes_per_token // (2 if plan.rollout.kv_cache is KvCache.FP8 else 1)


def _activations(plan: RunPlan, shape: ModelShape) -> int:
    """Bytes of one forward, in BF16: T (6h + 2q + 4i) of a layer, and of the others the same, or with checkpointing
    only what enters them."""
    tokens, queries = _tokens_of_a_forward(plan), (shape.heads + 2 * shape.kv_heads) * shape.head_size
    layer = 2 * tokens * (6 * shape.hidden + 2 * queries + 4 * shape.intermediate)
    if plan.trainer_memory.gradient_checkpointing:
        return 2 * tokens * shape.hidden * shape.layers + layer
    return layer * shape.layers


def forward_bytes(plan: RunPlan, shape: ModelShape) -> int:
    """Estimate the bytes that one forward of a rank keeps for its backward: activations, logits, and copies of
    weights."""
    per_logit = _LOGITS_ON_CPU if plan.is_cpu else _LOGITS
    copies = 0
    if plan.trainer_memory.keeps_copies:
        dequantises = plan.trainer.quantises and not plan.trainer.fp8_backward
        num_copied = shape.weights - (shape.linear_weights if plan.trains_on_codes else 0)
        num_copied += trained_weights(plan, shape) if plan.model.lora else 0
        copies = _COPY * (num_copied + (shape.linear_weights if dequantises else 0))
    return _activations(plan, shape) + _tokens_of_a_forward(plan) * shape.vocab * per_logit + copies


def room_for_forward(plan: RunPlan, shape: ModelShape, *, host_memory: int) -> int | None:
    """Estimate the bytes that everything else leaves to one forward of a rank, below 0 where they are too few; None
    where the model's sizes are not known. host_memory: of each host, in bytes; on a GPU its own memory counts
    instead."""
    if not shape.is_dense:
        return None
    if plan.is_cpu:
        rest = peak(plan, shape) - _largest_of_trainer(plan, shape)
        return (host_memory * plan.cluster.nodes - rest) // plan.topology.gpus
    if plan.cluster.device not in GPUS:
        return None
    update = _update(plan, shape, limit=GPUS[plan.cluster.device].memory_gib * GIB)
    return update.limit - update.size + forward_bytes(plan, shape)


def _tokens_of_a_forward(plan: RunPlan) -> int:
    """T: what one GPU has of a packed forward at most."""
    of_all = plan.batch.micro_batch_sequences * plan.task.longest // plan.trainer.sequence_parallel
    return plan.batch.max_tokens_per_gpu or of_all


def host_bytes(plan: RunPlan, shape: ModelShape) -> int:
    """Estimate the bytes of each host's memory: what is offloaded; a reference model, which verl keeps there (with LoRA
    it is the base); LoRA's copy while weights are sent; and what engines that keep their model leave there while they
    sleep."""
    state = _parameters(plan, shape) if plan.trainer.offload_parameters else 0
    state += _ADAM * trained_weights(plan, shape) if plan.trainer.offload_optimizer else 0
    if plan.sends_adapters:
        state += _MASTER * trained_weights(plan, shape) + plan.topology.engines * engine_weights(plan, shape)
    elif plan.model.lora:
        state += _FROZEN * shape.weights
    elif plan.algorithm.kl:
        state += _REFERENCE * shape.weights
    return state // plan.cluster.nodes


class Role(StrEnum):
    """Processes of a run: a trainer and an engine's worker per rank, the driver, and those of Ray and verl."""

    TRAINER = "trainer"
    ENGINE = "engine"
    DRIVER = "driver"
    SERVICES = "services"


# Of each process of a role, `services` together, at the moment when all together hold most, an update. All but a few
# of Ray's are forks of one process, whose 520 MiB of imports are in these numbers once, in equal parts. The rest is
# their own: of a trainer what FSDP and verl have (it gives back what an update has freed), of an engine vLLM's and its
# part of the libraries. Measured with the built-in model: docs/results/memory.md.
_BASE = {Role.TRAINER: 210 * MIB, Role.ENGINE: 280 * MIB, Role.DRIVER: 310 * MIB, Role.SERVICES: 1130 * MIB}
_BESIDE_WEIGHTS = 6  # bytes per weight that an engine without a GPU holds beside its weights, measured on four models


def shape_on_cpu(plan: RunPlan, shape: ModelShape | None) -> ModelShape | None:
    """Return the sizes by which a run on a CPU is estimated; None where they are not known, cannot be counted, or the
    run is on a GPU. shape: by the model's config.json."""
    if plan.model.builtin:
        shape = BUILT_IN_MODELS[plan.model.builtin].shape
    return shape if plan.is_cpu and shape is not None and shape.is_dense else None


def memory_by_role(plan: RunPlan, shape: ModelShape) -> dict[Role, int]:
    """Estimate the bytes of all processes of each role, on all hosts together, without a GPU."""
    ranks = plan.topology.gpus  # of the trainer, and as many of engines
    state = _state_on_cpu(plan, shape)
    state += _REFERENCE * shape.weights if plan.algorithm.kl and not plan.model.lora else 0
    beside = _BESIDE_WEIGHTS * shape.weights // plan.rollout.tensor_parallel
    engine = _BASE[Role.ENGINE] + kv_cache_bytes(plan, shape) + engine_weights(plan, shape) + beside
    return {
        Role.TRAINER: ranks * _BASE[Role.TRAINER] + state + _largest_of_trainer(plan, shape),
        Role.ENGINE: ranks * engine,
        Role.DRIVER: _BASE[Role.DRIVER],  # it merges `model/` when the engines are gone, which held more
        Role.SERVICES: _BASE[Role.SERVICES],
    }


def _state_on_cpu(plan: RunPlan, shape: ModelShape) -> int:
    return _parameters(plan, shape) + trained_weights(plan, shape) * (_GRADIENT + _ADAM)


def state_bytes(plan: RunPlan, shape: ModelShape) -> int:
    """Estimate the bytes of weights, gradients and optimizer of all ranks, without a GPU. With codes in place of
    weights these are among them, and what gradients are computed with, where that is kept."""
    codes = 0
    if plan.trains_on_codes:
        codes = _codes_on_cpu(plan, shape)
        codes += _COPY * shape.linear_weights if plan.trainer_memory.keeps_copies else 0
    return _state_on_cpu(plan, shape) + codes


def _codes_on_cpu(plan: RunPlan, shape: ModelShape) -> int:
    """Bytes of what a rank quantises itself: codes, and what multiplies by them, packed as the engine has it. Of a
    frozen model in BF16 the weights, which are not among the parameters here."""
    if not plan.rollout.scheme.quantised:
        return _FROZEN * shape.linear_weights if plan.trains_on_codes else 0
    return int((_CODES + plan.rollout.scheme.spec.bytes_per_weight) * shape.linear_weights)


def _largest_of_trainer(plan: RunPlan, shape: ModelShape) -> int:
    """Bytes of all ranks without a GPU, beside their state: of a forward, or of the whole model while weights are sent
    or saved."""
    forward = forward_bytes(plan, shape)
    if plan.trainer.quantises:  # gone when the weights change, and so at a save
        forward += _codes_on_cpu(plan, shape)
    if plan.sends_adapters:  # tensor by tensor; a checkpoint has the adapter alone
        return plan.topology.gpus * forward
    return max(plan.topology.gpus * forward, (_FROZEN if plan.model.lora else _GATHERED) * shape.weights)


def peak(plan: RunPlan, shape: ModelShape) -> int:
    """Estimate the bytes of all roles together, without a GPU."""
    return sum(memory_by_role(plan, shape).values())


def kv_cache_blocks(plan: RunPlan, shape: ModelShape) -> int | None:
    """Count the blocks that all sequences of an engine on a CPU need when none shares a prompt. Returns None where
    `rollout.kv_cache_gb` has no room for them, on a GPU, for models with two kinds of attention, whose layers take
    blocks for each kind, and with tools: between its turns a conversation is kept in blocks that nothing needs."""
    if not plan.is_cpu or shape.partial_window or plan.task.tools:
        return None
    blocks = plan.engine.max_concurrent_sequences * -(-plan.engine.max_model_tokens // CPU_KV_BLOCK) + _SPARE_BLOCKS
    return blocks if blocks * _block_bytes(plan, shape) < plan.rollout.kv_cache_gb * GIB else None


def kv_cache_bytes(plan: RunPlan, shape: ModelShape) -> int:
    """Return the bytes of the KV cache of an engine's worker on a CPU: vLLM fills it with zeros at its start, so all of
    it is in memory from then on."""
    blocks = kv_cache_blocks(plan, shape)
    return plan.rollout.kv_cache_gb * GIB if blocks is None else blocks * _block_bytes(plan, shape)


def _block_bytes(plan: RunPlan, shape: ModelShape) -> int:
    return CPU_KV_BLOCK * _kv_bytes_per_token(plan, shape) // max(1, min(plan.rollout.tensor_parallel, shape.kv_heads))


Shortage = Callable[[RunPlan], int]  # bytes that are missing
Changed = tuple[RunPlan, str]  # a plan, and `key: value` of what is new in it
Rung = tuple[Callable[[RunPlan], Iterator[Changed]], Shortage]  # changes of one kind, and what they are to mend


def gpu_ladder(plan: RunPlan, shape: ModelShape) -> tuple[str, ...]:
    """Return the changes after which everything fits, each as `key: value`, the cheap ones first; empty where even all
    of them are not enough."""

    def all_short(changed: RunPlan) -> int:
        return sum(moment.short for moment in moments(changed, shape))

    def less_for_the_engine(changed: RunPlan) -> Iterator[Changed]:
        return (each for each in _less_for_the_engine(changed) if not all_short(each[0]))

    rungs: tuple[Rung, ...] = (
        (lambda changed: _offload(changed, "offload_optimizer"), all_short),
        (lambda changed: _offload(changed, "offload_parameters"), all_short),
        (lambda changed: _on_more_ranks(changed, shape), lambda changed: moments(changed, shape)[1].short),
        (less_for_the_engine, all_short),
        (_guard_in_one_precision, all_short),
        (less_for_the_engine, all_short),
        (lambda changed: _more_gpus(changed, shape), all_short),
    )
    return _climb(plan, rungs, short=all_short)


def cpu_ladder(plan: RunPlan, shape: ModelShape, *, limit: int) -> tuple[str, ...]:
    """Return the changes as gpu_ladder does, for a run without a GPU. limit: bytes on all hosts together."""

    def short(changed: RunPlan) -> int:
        return max(0, peak(changed, shape) - limit)

    return _climb(plan, ((_smaller_cache, short), (_smaller_micro_batch, short)), short=short)


def _climb(plan: RunPlan, rungs: tuple[Rung, ...], *, short: Shortage) -> tuple[str, ...]:
    """On each rung the first change that mends what it is to mend, else the last; taken where less is missing then."""
    changes: list[str] = []
    for rung, mends in rungs:
        made = list(rung(plan)) or [(plan, "")]
        changed, text = next((each for each in made if not mends(each[0])), made[-1])
        if short(changed) < short(plan):
            plan = changed
            changes.append(text)
        if not short(plan):
            return tuple(changes)
    return ()


def _offload(plan: RunPlan, key: str) -> Iterator[Changed]:
    yield plan.replace(trainer=plan.trainer.replace(**{key: True})), f"trainer.{key}: true"


def _less_for_the_engine(plan: RunPlan) -> Iterator[Changed]:
    for percent in range(_LARGEST_SHARE, _SMALLEST_SHARE - 1, -_STEP_OF_SHARE):
        if (share := percent / 100) < plan.rollout.gpu_memory_utilization:
            rollout = plan.rollout.replace(gpu_memory_utilization=share)
            yield plan.replace(rollout=rollout), f"rollout.gpu_memory_utilization: {share:g}"


def _on_more_ranks(plan: RunPlan, shape: ModelShape) -> Iterator[Changed]:
    """One sequence of full length per forward, on one GPU or more."""
    for sharing in _SHARINGS:
        tokens = -(-plan.task.longest // sharing)
        divides = not (plan.cluster.gpus_per_node % sharing or shape.heads % sharing)
        if divides and sharing >= plan.trainer.sequence_parallel and tokens < _tokens_of_a_forward(plan):
            trainer = plan.trainer.replace(sequence_parallel=sharing)
            batch = plan.batch.replace(max_tokens_per_gpu=tokens)
            shared = "" if sharing == plan.trainer.sequence_parallel else f"trainer.sequence_parallel: {sharing}, "
            instead = "" if plan.batch.max_tokens_per_gpu else f"{_MICRO_BATCH}: null, "
            yield plan.replace(trainer=trainer, batch=batch), f"{shared}{instead}{_PACKED_TO}: {tokens}"


def _guard_in_one_precision(plan: RunPlan) -> Iterator[Changed]:
    """Leave out the guard's actions after which a trainer of codes has BF16 weights."""
    if plan.trains_on_codes and _guard_changes_precision(plan):
        actions = tuple(action for action in plan.guard.actions or () if action not in CHANGES_ENGINES)
        yield plan.replace(guard=plan.guard.replace(actions=actions)), f"guard.actions: [{', '.join(actions)}]"


def _more_gpus(plan: RunPlan, shape: ModelShape) -> Iterator[Changed]:
    """Up to eight in one host; an engine of its own takes as many as its weights need, or less memory of each. Not
    where the trainer has one rank alone (plan/rules.py)."""
    for gpus in () if plan.trains_on_codes else _SHARINGS:
        more, text = plan.replace(cluster=plan.cluster.replace(gpus_per_node=gpus)), f"cluster.gpus_per_node: {gpus}"
        if gpus > plan.cluster.gpus_per_node and not shape.heads % gpus and _shares_out(more):
            shared = more.replace(rollout=plan.rollout.replace(tensor_parallel=gpus))
            is_one = len(set(plan.rollout.replicas)) == 1  # of several schemes each needs an engine
            for changed, said in ((more, text), *([(shared, f"{text}, rollout.tensor_parallel: {gpus}")] * is_one)):
                yield changed, said
                yield from ((less, f"{said}, {share}") for less, share in _less_for_the_engine(changed))


def _shares_out(plan: RunPlan) -> bool:
    """Whether each GPU has the same number of a step's sequences, and each data-parallel rank of an update's."""
    samples, topology = plan.rollout.samples_per_prompt, plan.topology
    mini = plan.batch.mini_batch_prompts * samples
    return not (plan.batch.prompts_per_step * samples % topology.gpus or mini % topology.data_parallel)


def _smaller_cache(plan: RunPlan) -> Iterator[Changed]:
    for gib in range(plan.rollout.kv_cache_gb - 1, 0, -1):
        yield plan.replace(rollout=plan.rollout.replace(kv_cache_gb=gib)), f"rollout.kv_cache_gb: {gib}"


def _smaller_micro_batch(plan: RunPlan) -> Iterator[Changed]:
    size, is_packed = plan.batch.micro_batch_sequences, plan.batch.max_tokens_per_gpu is not None
    instead = f"{_PACKED_TO}: null, " if is_packed else ""
    for smaller in (each for each in range(size if is_packed else size - 1, 0, -1) if size % each == 0):
        batch = plan.batch.replace(micro_batch_sequences=smaller, max_tokens_per_gpu=None)
        yield plan.replace(batch=batch), f"{instead}{_MICRO_BATCH}: {smaller}"
