"""The rows of `appliance accept`: what each holds, what it needs, how long it should take. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from appliance.errors import EngineError, RecipeError, TrainingError
from appliance.finding import fault
from appliance.terms.schemes import Scheme

LIMIT_S = 300  # then a row is ended: a first start reads gigabytes of libraries
ENGINE_LIMIT_S = 600  # with a first compilation of its graphs
TRAINING_LIMIT_S = 420  # so that the first one that hangs ends by it, and not with all rows
LANGUAGE_MODEL_LIMIT_S = 360  # what a small real model may take on one GPU, in both schemes
LONGEST_LIMIT_S = 900  # where nvcc compiles kernels
_INT8, _FP8 = "`int8`, linear layers", "`fp8`, `fp8-channel`, `fp8-block`, linear layers"
_QUANTISER = "INT8 quantiser of a sync"
_BACKWARD = "`trainer.backward: fp8-block`"
_NATIVE = "proof of the kernels, vLLM's own"
_ARRIVES = "weights from trainer to engine"
_FLOW = "`trainer.forward: rollout`"
# Experts first: vLLM makes the groups of a process once, those of experts only for a model that has some.
_FAMILIES = ("qwen3-moe", "qwen3", "llama", "mistral+head", "qwen2")
# What a process imports; an engine with few graphs, and two updates, as on an H200 with six at once and nothing that
# torch compiles kept from before; what nvcc compiles: FlashInfer's module 145 s of a core (a Xeon's, without a
# GPU), and a kernel of it or of DeepGEMM, one for each shape and size of blocks, 2 to 5 s.
_IMPORTS_S, _ENGINE_S, _NVCC_S = 6, 34, 170
# Of a training: three processes that import one after the other, and Ray; what an engine that is not eager compiles,
# and all sizes of graphs; two steps, a validation and the save; a second rank, and NCCL.
_TRAINING_S, _CAPTURED_S, _RANK_S = 30, 20, 15
_STEPS_S = {512: 25, 128: 12}  # by tokens of a response, 1536 and 384 steps of the engine in all
_SMOLLM2_STEPS_S = 60  # twenty steps, and a model that is fetched and converted
_EAGER_S = 3  # more for these, one kernel after the other


class Work(StrEnum):
    """What a row starts, by which its time is limited."""

    KERNELS = "kernels"
    ENGINES = "engines"
    TRAINING = "training"
    LANGUAGE_MODEL = "language-model"  # a training of a small real model, in two schemes


@dataclass(frozen=True, kw_only=True)
class Row:
    """One thing that is run and judged, in its own process."""

    id: str
    text: str
    """What the row shows, in words."""
    code: str
    """Function that is called with a Ground and the arguments, as `module:function`. The row's own process imports it:
    its module imports torch and vLLM, which this one does not, and an import that fails costs that row alone."""
    estimate_s: int
    """Seconds on one H100, estimated and not measured."""
    work: Work = Work.KERNELS
    covers: tuple[str, ...] = ()
    """Parts of docs/gpu.md, as the first column of its table names them."""
    arguments: tuple[tuple[str, object], ...] = ()
    gpus: int = 1
    """Number of GPUs that it needs."""
    scheme: Scheme | None = None
    """Scheme that the GPU must have kernels for."""
    needs_nvcc: bool = False
    """Whether kernels are compiled at first use."""
    needs_triton: bool = True
    """Whether Triton makes kernels, which needs a compiler."""
    needs_hopper: bool = False
    """Whether it needs a Hopper GPU, for what torch multiplies in blocks of 128."""
    shares: bool = False
    """Whether others may share its GPU, because it measures neither speed nor memory."""
    is_plain: bool = False
    """Whether PyTorch and compiled kernels are enough: no compiler, and on a CPU no vLLM."""

    @property
    def trains(self) -> bool:
        return self.work in (Work.TRAINING, Work.LANGUAGE_MODEL)

    @property
    def needs_compiler(self) -> bool:
        """Whether it needs a compiler for what Triton makes."""
        return self.needs_triton and not self.is_plain

    @property
    def limit_s(self) -> int:
        """Seconds after which the row is ended."""
        if self.needs_nvcc and not self.trains:
            return LONGEST_LIMIT_S
        return LIMITS_S[self.work]

    @property
    def exit_code(self) -> int:
        """Exit code of the command where this row fails."""
        return (TrainingError if self.trains else EngineError).exit_code


LIMITS_S = {
    Work.KERNELS: LIMIT_S,
    Work.ENGINES: ENGINE_LIMIT_S,
    Work.TRAINING: TRAINING_LIMIT_S,
    Work.LANGUAGE_MODEL: LANGUAGE_MODEL_LIMIT_S,
}


def _reload(scheme: Scheme, *covers: str) -> Row:
    """Make the row that reloads in every family, and once more in a fresh engine of the last one."""
    needs_nvcc = scheme is Scheme.FP8_BLOCK
    return Row(
        id=f"reload-{scheme}",
        text=f"{scheme}: other weights and back, proven, in {', '.join(_FAMILIES)}",
        code="benchmarks.accept.engines:reload",
        work=Work.ENGINES,
        estimate_s=_IMPORTS_S + _ENGINE_S * (len(_FAMILIES) + 1) + _NVCC_S * needs_nvcc,
        covers=covers,
        arguments=(("scheme_name", str(scheme)), ("families", _FAMILIES)),
        scheme=scheme,
        needs_nvcc=needs_nvcc,
        shares=True,
    )


def _sync(size: str, *, layers: int) -> Row:
    return Row(
        id=f"sync-{size}",
        text=f"{size.upper()}'s layers by CUDA IPC, in large buckets and in small ones with handles beside them",
        code="benchmarks.accept.engines:sync",
        work=Work.ENGINES,
        estimate_s=35,
        covers=(_ARRIVES,),
        arguments=(("shapes", f"qwen2.5-{size}"), ("layers", layers)),
        scheme=Scheme.INT8,
    )


def _training(
    scheme: Scheme,
    *covers: str,
    beside: Scheme | None = None,
    size: str = "0.5b",
    layers: int = 8,
    response_tokens: int = 128,
    more_s: int = 0,
    kind: str = "",
    addition: str = "",
    **settings: bool | int | str,
) -> Row:
    """kind: of the row's name.  addition: in words.  beside: of a replica on a second GPU.  settings: of
    `training.train`.

    Responses have the recipe's 512 tokens where memory is held at a size that no other row has, else a quarter of them.
    """
    schemes, is_eager = "+".join(map(str, filter(None, (scheme, beside)))), bool(settings.get("flow"))
    gpus = 2 if beside else int(settings.get("tensor_parallel", 1))
    steps_s = _STEPS_S[response_tokens] + (_EAGER_S if is_eager else _CAPTURED_S)
    arguments = {
        "scheme_names": schemes,
        "size": size,
        "layers": layers,
        "response_tokens": response_tokens,
        **settings,
    }
    return Row(
        id=f"train-{kind}{schemes.replace('+', '-')}{'' if size == '0.5b' else f'-{size}'}",
        text=f"two steps by {schemes}{addition} at the size of {size}, {layers} layers; memory of the estimate",
        code="benchmarks.accept.training:train",
        work=Work.TRAINING,
        estimate_s=_TRAINING_S + steps_s + _RANK_S * (gpus - 1) + more_s,
        covers=covers,
        arguments=tuple(arguments.items()),
        gpus=gpus,
        scheme=beside or scheme,
        needs_nvcc=scheme is Scheme.FP8_BLOCK,
        needs_hopper=scheme is Scheme.FP8_BLOCK and is_eager,
    )


ROWS: tuple[Row, ...] = (
    Row(
        id="digest",
        text="a tensor has one digest on both sides",
        code="benchmarks.accept.kernels:digests",
        estimate_s=10,
        covers=("digests of every tensor",),
        is_plain=True,
    ),
    Row(
        id="int8-quantiser",
        text="the INT8 quantiser is the codec, bit for bit",
        code="benchmarks.accept.kernels:int8_quantiser",
        estimate_s=15,
        covers=(_QUANTISER,),
        scheme=Scheme.INT8,
        shares=True,
    ),
    Row(
        id="quantiser-bandwidth",
        text="the INT8 quantiser's share of a copy's bandwidth",
        code="benchmarks.accept.speed:bandwidth",
        estimate_s=20,
        covers=(_QUANTISER,),
        scheme=Scheme.INT8,
    ),
    Row(
        id="int8-gemm",
        text="the INT8 product is the exact one, rounded",
        code="benchmarks.accept.kernels:int8_gemm",
        estimate_s=15,
        covers=(_INT8,),
        scheme=Scheme.INT8,
        shares=True,
        needs_triton=False,
    ),
    Row(
        id="fp8-quantiser",
        text="vLLM's FP8 quantisers are the codec, bit for bit",
        code="benchmarks.accept.fp8:quantisers",
        estimate_s=15,
        covers=(_FP8,),
        scheme=Scheme.FP8,
        shares=True,
        is_plain=True,
    ),
    Row(
        id="fp8-gemm",
        text="FP8 products are float64's within what tensor cores cut off",
        code="benchmarks.accept.fp8:gemm",
        estimate_s=15,
        covers=(_FP8,),
        scheme=Scheme.FP8,
        shares=True,
        is_plain=True,
    ),
    Row(
        id="fp8-backward",
        text="gradients of a layer in `fp8-block` are float64's of the same codes, within what tensor cores cut off",
        code="benchmarks.accept.fp8:backward",
        estimate_s=15,
        covers=(_BACKWARD,),
        scheme=Scheme.FP8_BLOCK,
        shares=True,
        needs_hopper=True,
        is_plain=True,
    ),
    Row(
        id="gemm-7b",
        text="INT8 and FP8 products against BF16's at 7B's shapes",
        code="benchmarks.accept.speed:gemm",
        estimate_s=20,
        arguments=(("shapes", "qwen2.5-7b"),),
    ),
    Row(
        id="gemm-32b",
        text="the same at 32B's shapes",
        code="benchmarks.accept.speed:gemm",
        estimate_s=20,
        arguments=(("shapes", "qwen2.5-32b"),),
    ),
    Row(
        id="log-probs",
        text="log-probs by chunks: values, gradient, memory",
        code="benchmarks.accept.attention:log_probs",
        estimate_s=15,
        covers=("log-probs of the trainer without flash-attn, by `chunked-log-probs`",),
        is_plain=True,
    ),
    Row(
        id="packed-attention",
        text="packed attention is each sequence's own, and its gradient",
        code="benchmarks.accept.attention:packed",
        estimate_s=15,
        covers=("attention of the trainer, `auto`: sequences in one row, without padding",),
        is_plain=True,
    ),
    Row(
        id="sequence-parallel",
        text="attention over two GPUs is that of one, and its gradient",
        code="benchmarks.accept.attention:sequence_parallel",
        estimate_s=45,
        covers=("sequence parallelism (Ulysses)",),
        arguments=(("ranks", 2),),
        gpus=2,
        is_plain=True,
    ),
    _reload(
        Scheme.BF16,
        "one weight update (layerwise reload)",
        "CUDA graphs, `torch.compile` of the engine",
        "proof of the kernels, `bf16`",
        "`lm_head` in FP32",
    ),
    _reload(Scheme.INT8, _INT8, "proof of the kernels, `int8`", "`int8`, experts (Qwen3-MoE)"),
    _reload(Scheme.FP8, _FP8, f"{_NATIVE} `fp8`", "telemetry of a sync, vLLM's own FP8 methods"),
    _reload(Scheme.FP8_CHANNEL, _FP8, f"{_NATIVE} `fp8-channel`"),
    _reload(Scheme.FP8_BLOCK, _FP8, f"{_NATIVE} `fp8-block`"),
    _sync("7b", layers=4),
    _sync("32b", layers=2),
    Row(
        id="sleep",
        text="an INT8 engine sleeps, wakes, is updated, and answers as before",
        code="benchmarks.accept.engines:sleep",
        estimate_s=30,
        covers=("sleep mode, freeing of the KV cache",),
        scheme=Scheme.INT8,
        work=Work.ENGINES,
    ),
    Row(
        id="restart",
        text="an engine ends, its memory is free, the next one starts",
        code="benchmarks.accept.engines:restart",
        estimate_s=40,
        covers=(
            "start of an engine, and again at each change of scheme",
            "change of scheme in a run, validation in both precisions",
        ),
        arguments=(("schemes", ("int8", "bf16")),),
        scheme=Scheme.INT8,
        work=Work.ENGINES,
    ),
    Row(
        id="other-trainers",
        text="updates by the calls of other trainers under FLASHRL_CONFIG, proven, and one that is cut short",
        code="benchmarks.accept.updates:in_process",
        estimate_s=40,
        covers=("weight updates from other trainers",),
        arguments=(("config", "int8"),),
        scheme=Scheme.INT8,
        shares=True,
        work=Work.ENGINES,
    ),
    Row(
        id="serve",
        text="`vllm serve` under FLASHRL_CONFIG, updated over HTTP by CUDA IPC, and by NCCL where there are two GPUs",
        code="benchmarks.accept.updates:served",
        estimate_s=40,
        covers=(
            "`FLASHRL_CONFIG` under `vllm serve`",
            "weight updates from other trainers",
        ),
        arguments=(("config", "int8"),),
        scheme=Scheme.INT8,
        shares=True,
        work=Work.ENGINES,
    ),
    Row(
        id="throughput-7b",
        text="rollouts at 7B's layer shapes by BF16, INT8 and FP8, in turns",
        code="benchmarks.accept.engines:throughput",
        estimate_s=47,
        arguments=(
            ("shapes", "qwen2.5-7b"),
            ("schemes", ("bf16", "int8", "fp8")),
            ("pairs", 3),
        ),
        work=Work.ENGINES,
    ),
    Row(
        id="train-smollm2",
        text="SmolLM2-135M learns by BF16 and by INT8 rollouts: reward, mismatch, speed of both, proof",
        code="benchmarks.accept.language_model:train",
        estimate_s=2 * (_TRAINING_S + _CAPTURED_S + _SMOLLM2_STEPS_S),
        covers=(
            "`smollm2-int8`: a real language model",
            "the trainer's forward by memory: activations kept where they fit, and its micro-batch",
        ),
        arguments=(("schemes", ("bf16", "int8")),),
        scheme=Scheme.INT8,
        work=Work.LANGUAGE_MODEL,
    ),
    _training(
        Scheme.BF16,
        "`trainer.dtype: fp16`",
        response_tokens=512,
        kind="fp16-",
        addition=", in FP16 on both sides,",
        dtype="fp16",
    ),
    _training(
        Scheme.INT8,
        "`gsm8k-0.5b-int8`",
        "FSDP2 training, one rank and two",
        "truncated importance sampling and the mismatch metrics",
        layers=24,
        response_tokens=512,
    ),
    _training(
        Scheme.INT8,
        "LoRA (`model.lora`)",
        "memory of a GPU in plan and preflight",
        size="1.5b",
        layers=28,
        response_tokens=512,
        more_s=15,
        kind="lora-",
        addition=", LoRA,",
        lora=True,
    ),
    _training(Scheme.FP8),
    _training(Scheme.FP8_CHANNEL, _FLOW, kind="flow-", addition=", one flow,", flow=True),
    _training(Scheme.FP8_BLOCK),
    _training(
        Scheme.FP8_BLOCK,
        _FLOW,
        _BACKWARD,
        kind="flow-",
        addition=", one flow, gradients too,",
        flow=True,
        backward=True,
    ),
    _training(Scheme.BF16),
    _training(
        Scheme.INT8,
        "tensor parallel 2 in one engine",
        "FSDP2 training, one rank and two",
        kind="tp2-",
        addition=", an engine on two GPUs,",
        tensor_parallel=2,
    ),
    _training(
        Scheme.BF16,
        "mixed replicas (`rollout.replicas`)",
        beside=Scheme.INT8,
        kind="replicas-",
        addition=", a replica each,",
    ),
)

_HOSTS = "needs two hosts"
_LARGE = "their models and GPUs; what they are made of has rows"
_HOST = "no line of it depends on the device"
_ITSELF = "is what this command runs in, or stands beside it"

# What docs/gpu.md calls read only, and no row runs.
BEYOND: dict[str, str] = {
    "lock, `requirements/cpu.txt` and `requirements/gpu.txt`": _ITSELF,
    "`rollout.kv_cache: fp8`": "no row yet: those that there are fill the time of a lent GPU",
    "FP8 experts": "refused; a model that has them in `quantization.ignore` is in no row",
    "INT8 on Blackwell": "refused",
    "two nodes of one cluster": _HOSTS,
    "recipes `dapo-*`, `qwen3-*`, `qwen2.5-1.5b-int8`, `gsm8k-0.5b-*`, `gsm8k-7b-lora-int8`": _LARGE,
    "the compiled code of an engine, kept by vLLM (`~/.cache/vllm/torch_compile_cache`)": "seen in a second start",
    "profile (calibration)": _HOST,
    "attention `flash_attention_2`": "needs flash-attn",
    "checkpoints, resume, signals, restarts": _HOST,
    "DAPO (dynamic sampling, overlong penalty)": f"{_HOST}, but the order in which prompts finish",
    "own tasks: rows, built-in rewards and functions, several validations": _HOST,
    "reward `code`": _HOST,
    "reward `judge`": _HOST,
    "tools over several turns": "the engine's calls are other rows'; a prefix cache that serves turns is in none",
    "image, target `gpu`": _ITSELF,
    "`make RECIPE` for GPUs": _ITSELF,
    "`train --in-container`": _ITSELF,
    "compose: `train`": _ITSELF,
    "compose: `head` and `worker`": _HOSTS,
}


def minutes(rows: tuple[Row, ...], *, gpus: int, at_once: int) -> float:
    """Estimate the minutes of the rows that run on a host with so many. at_once: of those that share, each when a place
    is free."""
    here = [row for row in rows if row.gpus <= gpus]
    places = [0] * at_once
    for row in longest_first(row for row in here if row.shares):
        places[places.index(min(places))] += row.estimate_s
    return (max(places) + sum(row.estimate_s for row in here if not row.shares)) / 60


def longest_first(rows: Iterable[Row]) -> list[Row]:
    """Order the rows that share so that none is left alone with a long one."""
    return sorted(rows, key=lambda row: -row.estimate_s)


def row_of(name: str) -> Row:
    """Return the row of an outcome that there is."""
    return next(row for row in ROWS if row.id == name)


def chosen(names: tuple[str, ...]) -> tuple[Row, ...]:
    """Choose rows, in the order of ROWS; all where none is named. Raises RecipeError with every name that there is
    not."""
    known = {row.id: row for row in ROWS}
    unknown = [
        fault((f"--only {name}",), "there is no such row", "`appliance accept --list` shows them")
        for name in names
        if name not in known
    ]
    if unknown:
        raise RecipeError(unknown)
    return tuple(row for row in ROWS if not names or row.id in names)
