"""What a run will do: RunPlan, a value that is written to `plan.json` and read by every process of a run.

Nothing here imports torch, verl or vLLM. Paths are absolute strings. A plan never changes after it is written. No field
has a default that a recipe has too: plan/build.py says them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

from pydantic import ValidationError, model_validator

from appliance.corrections.base import LossCorrection
from appliance.corrections.objective import Loss
from appliance.corrections.registry import correction_of
from appliance.files import Frozen
from appliance.guard.policy import FLOW_ON_GPU, Bounds, MismatchBounds
from appliance.record.earlier_plans import with_keys_of_today
from appliance.settings.sections import (
    Algorithm,
    Attention,
    Batch,
    Checkpoint,
    Cluster,
    Correction,
    Guard,
    Logging,
    LoraSync,
    Model,
    Optimizer,
    Quantization,
    Rollout,
    Section,
    Task,
    Trainer,
)
from appliance.terms.devices import CPU, Topology
from appliance.terms.schemes import Scheme
from appliance.terms.settings import Quantisation

SCHEMA_VERSION = 1
CODE_FOLDER = "code"  # of the run's folder: copies of the user's Python files


class Choice(Frozen):
    """A number we derived, with its reason."""

    key: str
    """Key as in a recipe, or a name of ours where a recipe has no key for it."""
    value: str
    why: str


class WeightsPlan(Frozen):
    """Places of the weights and of the files beside them, which follow from the section `model`."""

    name_or_path: str
    """Model as the trainer and the engine load it: a folder, or a name on the hub. A builtin's folder is in the cache
    and is made on first use, and so is the folder that a GGUF file is converted to; with a revision it is the hub's
    snapshot of that revision, fetched on first use."""
    hub_name: str = ""
    """Name on the hub; empty for a folder, a GGUF file and a builtin."""
    commit: str = ""
    """Commit of a hub model, where it was known; with a revision it is what is loaded."""
    gguf: str = ""
    """GGUF file that the model is converted from, absolute, or empty."""
    is_cached: bool = False
    """Whether `name_or_path` is in the cache, and made on first use: of a builtin, or of a GGUF file."""
    provenance: str = ""
    """Where a fetched or converted model is from, under which licence, and what was done to its weights; else empty."""

    @property
    def folder(self) -> Path | None:
        """Folder of the model; None where it is loaded by its name on the hub."""
        return None if self.name_or_path == self.hub_name else Path(self.name_or_path)

    @property
    def is_pinned(self) -> bool:
        """Whether the folder is the hub's snapshot of one commit."""
        return bool(self.hub_name) and self.folder is not None

    @property
    def identity(self) -> str:
        """Text by which the problems of one model are distinguished from another's: the path; but of a snapshot its
        name and commit, and of a model in the cache its folder's name, because their paths differ from host to host."""
        if self.is_cached:
            return Path(self.name_or_path).name
        return f"{self.hub_name}@{self.commit}" if self.is_pinned else self.name_or_path


class UaqPlan(Frozen):
    """UAQ, where trainer and engine read a model that was scaled once."""

    scale: float
    """Scale by which weights that a norm feeds are divided and the norm is multiplied; `model/` is folded back."""
    folder: str
    """Folder of the scaled model, in the run's folder; filled before training."""


class CodeFile(Frozen):
    """A Python file of the user's that the run executes."""

    path: str
    """Path of the user's own file."""
    copy_name: str
    """Name of the copy that runs, in `code/` of the run's folder."""
    sha256: str
    """SHA-256 of the file when the plan was made; empty where it could not be read."""


class TaskFiles(Frozen):
    """Files of the section `task`: the files that are made of its problems, what else they depend on, and the Python
    files that the run executes."""

    train_parquet: str
    """Problems to train on as verl reads them, made by `tasks.prepare`."""
    val_parquet: str
    """Problems to validate on as verl reads them, made by `tasks.prepare`."""
    schemas_file: str = ""
    """Description of the task's tools, made with the data; empty without tools."""
    commit: str = ""
    """Commit at which `task.data` is read; empty where the hub was not asked or did not say: then its `main` is read,
    whatever that is."""
    date: str = ""
    """Date, YYYY-MM-DD, that a chat template that asks is given as today; empty where it was known from the start that
    none asks."""
    code: tuple[CodeFile, ...] = ()
    """The user's Python files, of rewards and tools, each once."""

    @property
    def import_path(self) -> tuple[str, ...]:
        """Folders of the user's whose modules the files may import."""
        return tuple(dict.fromkeys(str(Path(file.path).parent) for file in self.code))

    def sha256_of(self, file: str) -> str:
        """Return the SHA-256 of a file as planned. file: path of a file of the user's, or of the run's copy of it."""
        return self._code_file(file).sha256

    def folder_of(self, file: str) -> str:
        """Return the folder that a file of the user's lies in. file: its path, or that of the run's copy of it."""
        return str(Path(self._code_file(file).path).parent)

    def _code_file(self, file: str) -> CodeFile:
        by_name = {name: code_file for code_file in self.code for name in (code_file.path, code_file.copy_name)}
        return by_name[file if file in by_name else Path(file).name]

    def with_sums(self, sums: Mapping[str, str]) -> TaskFiles:
        """Return a copy with other SHA-256 of the Python files. sums: by the names of the copies, of all or some."""
        code = tuple(file.replace(sha256=sums.get(file.copy_name, file.sha256)) for file in self.code)
        return self.replace(code=code)


class EnginePlan(Frozen):
    """Settings and sizes that every engine runs with; RunPlan.engines has what each of them quantises."""

    eager: bool
    """Whether engines run without CUDA graphs and torch.compile."""
    max_model_tokens: int
    """Tokens of one sequence at most: the longest prompt and the longest response."""
    max_concurrent_sequences: int
    """Sequences that an engine generates at once, at most."""
    max_batched_tokens: int
    """Tokens of one engine step, at most."""
    bucket_mib: int
    """Size of the parts in which weights are sent; shared memory of this size is held."""
    kv_cache_blocks: int | None = None
    """Blocks of the KV cache of an engine on a CPU, of CPU_KV_BLOCK tokens each: what all its sequences need at most.
    None: as many as `rollout.kv_cache_gb` has room for."""


class ProfilePlan(Frozen):
    """The profile that the rollouts use."""

    folder: str
    """Folder of the profile in the run's folder, filled before training."""
    source: str
    """Profile to copy; empty: one is made, or taken from the cache."""
    scheme: Scheme
    error_budget: float | None = None
    """Error of a layer's outputs above which the layer was kept in BF16; only in runs of earlier versions."""


class ShadowPlan(Frozen):
    """The shadow batch of `calibrated-clipping`."""

    sequences: int
    """Sequences of a step's batch that the shadow pass takes, on all ranks together."""
    forward_sequences: int
    """Sequences that a rank forwards at once; divides its share."""


class TrainerMemory(Frozen):
    """Use of memory by an update of the trainer, which depends on the memory that there is (plan/room.py)."""

    gradient_checkpointing: bool
    """Whether a backward computes a layer's activations again, of which then only the inputs are kept."""
    keeps_copies: bool = False
    """Whether what an update computes with is kept in BF16 from its first forward to its last backward, rather than
    made again by each micro-batch: copies of all weights and, of weights that the trainer quantises, their values."""


class ExpectedAttestation(Frozen):
    """Attestation that a process must write before the first step: what it runs."""

    role: str
    """Role of the process: `rollout`, `trainer` or `driver`."""
    rank: int
    scheme: Scheme
    patches: tuple[str, ...] = ()
    """Names of the patches that must be live in it, sorted, and no others."""
    emulated: bool = False


class RunPlan(Frozen):
    """Everything a run needs to know."""

    name: str
    run_dir: str
    cache_dir: str
    seed: int
    model: Model
    """The recipe's, with alpha and layers of its adapter written out, where it has one: in FP32, trained beside the
    model, which stays as it is, in BF16."""
    weights: WeightsPlan
    task: Task
    """The recipe's, with absolute paths, the temperature of each validation set and, with tools, the turns."""
    task_files: TaskFiles
    rollout: Rollout
    """The recipe's, with the scheme of each engine in `replicas`, in rank order; in `scheme` the first quantised one of
    them, or BF16; and with the number of top log-probs that engines report in training and trainers compare."""
    engine: EnginePlan
    profile: ProfilePlan | None
    quantization: Quantization
    """The recipe's, with the number of weight updates until each quantised layer was proven."""
    correction: Correction
    """The recipe's, with the limits of its method written out, where that has any."""
    shadow: ShadowPlan | None
    """The shadow pass of a correction that has one."""
    batch: Batch
    """The recipe's, with all sizes but `max_tokens_per_gpu` written out, which is null where it is off."""
    logging: Logging
    argv: tuple[str, ...]
    """Command of the training process, which plan/verl_args.py makes of the rest of this plan."""
    env: tuple[tuple[str, str], ...]
    """Variables that the child gets on top of the launcher's own environment (names from terms/environment.py)."""
    pins: tuple[tuple[str, str], ...]
    """Versions that the patches were made for: (distribution, version)."""
    choices: tuple[Choice, ...]
    attestations: tuple[ExpectedAttestation, ...]
    guard: Guard
    """The recipe's, with the actions written out, and with how engines change their scheme."""
    uaq: UaqPlan | None
    optimizer: Optimizer
    cluster: Cluster
    """The recipe's, with the device and the token's file written out, and `run_dir` absolute."""
    checkpoint: Checkpoint
    resume_from: str
    """Checkpoint that this attempt resumes from, empty for a start from the model."""
    algorithm: Algorithm
    """The recipe's, with what its kind and its loss stand for written out."""
    trainer: Trainer
    """The recipe's, with the steps written out, those between two validations (the end is always one), and the source
    of the old log-probs: unless it is `recompute`, no pass over the batch precedes a step's update."""
    trainer_memory: TrainerMemory
    schema_version: Literal[1]

    @model_validator(mode="after")
    def _is_resolved(self) -> Self:
        """Nothing that a recipe may leave open is open here."""
        sections = [section for section in dict(self).values() if isinstance(section, Section)]
        left_open = [f"{type(section).__name__}.{key}" for section in sections for key in section.open_keys]
        if left_open:
            raise ValueError(f"a plan leaves nothing open: {', '.join(left_open)}")
        return self

    @property
    def is_cpu(self) -> bool:
        return self.cluster.device == CPU

    @property
    def engines(self) -> tuple[Quantisation, ...]:
        """Quantisation of each engine, in rank order."""
        return engines_of(self.rollout, quantization=self.quantization, profile=self.profile)

    @property
    def sends_adapters(self) -> bool:
        """Whether updates of weights bring an adapter alone, which engines hold beside their model."""
        return self.model.lora is not None and self.model.lora.sync is LoraSync.ADAPTER

    @property
    def trains_on_codes(self) -> bool:
        """Whether the trainer keeps the layers that are quantised as codes alone: a frozen model, under an adapter, in
        the rollouts' own forward."""
        return self.sends_adapters and self.trainer.one_flow

    @property
    def emulates(self) -> bool:
        """Whether any engine emulates its scheme."""
        return any(map(self.quantization.emulates, self.rollout.replicas))

    @property
    def shares_prompts(self) -> bool:
        """Whether the trainer computes a prompt once for all of its samples in a micro-batch, in models of the families
        that it knows. With dropout they differ; the rest is of GPUs."""
        has_dropout = self.model.lora is not None and self.model.lora.dropout > 0
        attends = self.trainer.attention is Attention.AUTO and self.trainer.sequence_parallel == 1
        return self.is_cpu and attends and not has_dropout

    @property
    def mismatch_bounds(self) -> MismatchBounds:
        """Bounds of a step's mismatch: the recipe's, and for signals that `guard` has no key for the usual ones. The
        guard and everything that shows a step judge by these."""
        guard = self.guard
        nearer = FLOW_ON_GPU if self.trainer.one_flow and not self.is_cpu else 1.0
        return MismatchBounds(
            k3_kl=Bounds.below(nearer * guard.k3_kl),
            weight_std=Bounds.below(guard.weight_std),
            ess=Bounds.above(guard.ess),
            truncated_fraction=Bounds.below(guard.truncated_fraction),
        )

    @property
    def loss_correction(self) -> LossCorrection:
        """Correction of the loss, by the sections `correction` and `algorithm`."""
        correction, algorithm = self.correction, self.algorithm
        limits = {"cap": correction.cap, "bounds": correction.bounds}
        return correction_of(correction.method, **limits, clip=algorithm.clip, loss=algorithm.loss)

    @property
    def correction_text(self) -> str:
        """The correction for people: `tis with cap 2`, `tbpo, tis-geometric with cap 2`."""
        loss, text = self.algorithm.loss, self.loss_correction.text
        return text if loss is Loss.PPO else f"{loss}, {text}"

    @property
    def wrong_reward(self) -> float:
        """Reward of a wrong answer, where a right one has 1. DAPO's is -1 (eq. 7 of its paper): half as far from 1 its
        penalty would weigh double. A task of the user's own has its own rewards."""
        return -1.0 if self.algorithm.filters and not self.task.is_own else 0.0

    @property
    def generation_batches(self) -> int:
        """Steps' worth of prompts that `dapo` generates at a time."""
        return self.batch.generation_prompts // self.batch.prompts_per_step

    @property
    def max_generated_prompts(self) -> int:
        """Prompts that a step of `dapo` may generate before it ends the run; 0: any number, and where nothing is
        filtered."""
        most = self.algorithm.max_generation_batches if self.algorithm.filters else 0
        return most * self.batch.generation_prompts

    @property
    def topology(self) -> Topology:
        return Topology(
            nodes=self.cluster.nodes,
            gpus_per_node=self.cluster.gpus_per_node,
            tensor_parallel=self.rollout.tensor_parallel,
            sequence_parallel=self.trainer.sequence_parallel,
        )

    @property
    def trained_model(self) -> str:
        """Model that trainer and engine start from: the recipe's, or with UAQ the scaled one in the run's folder."""
        return self.uaq.folder if self.uaq else self.weights.name_or_path

    def to_json(self) -> str:
        return self.model_dump_json(indent=2, ensure_ascii=True)

    def write(self, path: Path) -> None:
        path.write_text(self.to_json() + "\n")


def engines_of(
    rollout: Rollout, *, quantization: Quantization, profile: ProfilePlan | None
) -> tuple[Quantisation, ...]:
    """Derive what each engine quantises, in rank order. rollout: a plan's."""
    folder = profile.folder if profile else ""
    by_scheme = {
        scheme: Quantisation(
            scheme=scheme,
            emulated=quantization.emulates(scheme),
            ignore=quantization.ignore if scheme.quantised else (),
            profile=folder if quantization.uses_profile(scheme) else "",
            lm_head_fp32=rollout.lm_head_fp32,
        )
        for scheme in set(rollout.replicas)
    }
    return tuple(by_scheme[scheme] for scheme in rollout.replicas)


def read_plan(path: Path) -> RunPlan:
    """Read a plan. Raises ValueError with one sentence where it is no plan of this version, OSError when it cannot be
    read."""
    try:
        return RunPlan.model_validate_json(with_keys_of_today(path.read_bytes()))
    except ValidationError as error:
        raise ValueError(sentence(error)) from error


def sentence(error: ValidationError) -> str:
    """Describe what is wrong with the text of a plan, in one sentence."""
    problems = error.errors(include_url=False)
    for problem in problems:
        if problem["loc"] == ("schema_version",):
            version = None if problem["type"] == "missing" else problem["input"]
            return f"plan has schema_version {version!r}, this program reads {SCHEMA_VERSION}"
    first = problems[0]
    place = ".".join(map(str, first["loc"])) or "the file"
    more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
    return f"not a plan that this version reads: {place}: {first['msg']}{more}"
