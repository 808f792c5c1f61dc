"""What will happen: RunPlan, a value that is written to `plan.json` and read by every process of a run.

Nothing here imports torch, verl or vLLM. Paths are absolute strings. A plan never changes after it is written.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from appliance.corrections.base import ClipRange, Correction
from appliance.corrections.registry import CorrectionMethod, correction_of
from appliance.guard.policy import Action
from appliance.quant.scheme import Scheme
from appliance.quant.settings import Quantisation

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Choice:
    """A number we derived, with its reason."""

    key: str
    value: str
    why: str


@dataclass(frozen=True)
class ModelPlan:
    """Where the weights come from. Exactly one of `source` (folder or hub name) and `builtin` is not empty.

    path: what the trainer and the engine read: a folder (for a builtin, in the cache, made on first use; with a
    revision, the hub's snapshot of it, fetched on first use) or a name on the hub.
    revision: as the recipe has it, empty: `main`.
    commit: of a hub model, where it was known; with a revision it is what is loaded.
    """

    path: str
    source: str
    builtin: str
    revision: str
    trust_remote_code: bool
    commit: str = ""

    @property
    def hub_name(self) -> str:
        """Empty for a folder and a builtin. A revision is refused with either."""
        return self.source if self.revision or not self.path.startswith("/") else ""

    @property
    def is_pinned(self) -> bool:
        """Whether `path` is the hub's snapshot of one commit."""
        return bool(self.revision and self.commit)

    @property
    def identity(self) -> str:
        """What problems are told apart by: the path, but that of a snapshot, which differs from host to host."""
        return f"{self.source}@{self.commit}" if self.is_pinned else self.path


@dataclass(frozen=True)
class UaqPlan:
    """UAQ: trainer and engine read a model that was scaled once. folder: in the run's folder, filled before training.

    scale: weights that a norm feeds are divided by it, and the norm is multiplied; `model/` is folded back.
    """

    scale: float
    folder: str


@dataclass(frozen=True)
class TaskPlan:
    """What to learn. train_parquet / val_parquet are what verl reads, made by `tasks.prepare`.

    train_file / val_file: the user's own JSON-lines files, or empty.
    truncate_prompts: whether longer prompts lose their beginning; else they are left out.
    difficulty: digits of the operands for `arithmetic`; ignored elsewhere.  sizes are numbers of problems.
    """

    kind: str
    difficulty: int
    seed: int
    train_file: str
    val_file: str
    train_size: int
    val_size: int
    train_parquet: str
    val_parquet: str
    max_prompt_tokens: int
    max_response_tokens: int
    truncate_prompts: bool = False
    reward_timeout_s: float = 30.0


@dataclass(frozen=True)
class RolloutPlan:
    """scheme: of the replicas; where they differ, of the first quantised one.

    replicas: one per engine, in rank order.  prove_every: weight updates until each quantised layer was proven, >= 1.
    eager: whether engines run without CUDA graphs and torch.compile.
    """

    scheme: Scheme
    replicas: tuple[Quantisation, ...]
    tensor_parallel: int
    samples_per_prompt: int
    temperature: float
    top_p: float
    prove_every: int
    eager: bool = True

    @property
    def emulated(self) -> bool:
        """Whether any replica emulates its scheme."""
        return any(replica.emulated for replica in self.replicas)

    @property
    def label(self) -> str:
        """The scheme for people and metrics; `bf16+int8` where the replicas differ."""
        return "+".join(dict.fromkeys(str(replica.scheme) for replica in self.replicas))


@dataclass(frozen=True)
class ProfilePlan:
    """The profile that the rollouts use. folder: in the run's folder, filled before training.

    source: a profile to copy, or empty to make one (or find it in the cache).  smoothing: strength 0..1.
    error_budget: largest relative output error of a quantised layer, None: no layer is kept for its error.
    """

    folder: str
    source: str
    scheme: Scheme
    smoothing: float
    error_budget: float | None
    ignore: tuple[str, ...]


@dataclass(frozen=True)
class ShadowPlan:
    """Of `calibrated-clipping`: after the first update and then every so many, so many of the step's sequences.

    micro_batch_sequences: of one forward; divides a rank's share.
    """

    every: int
    sequences: int
    micro_batch_sequences: int


@dataclass(frozen=True)
class CorrectionPlan:
    """What corrects the loss. cap and bounds: None where the method has none.

    clip_low, clip_high: the recipe's clip range.
    """

    method: CorrectionMethod
    cap: float | None = None
    bounds: tuple[float, float] | None = None
    clip_high: float = 0.2
    clip_low: float = 0.2
    shadow: ShadowPlan | None = None

    @property
    def resolved(self) -> Correction:
        clip = ClipRange(self.clip_low, self.clip_high)
        return correction_of(self.method, cap=self.cap, bounds=self.bounds, clip=clip)

    @property
    def text(self) -> str:
        return self.resolved.text


class Switching(StrEnum):
    """How engines change their scheme while a run lasts. LIVE: with a weight update.  RESTART: new ones take over."""

    LIVE = "live"
    RESTART = "restart"

    @classmethod
    def _missing_(cls, value: object) -> Switching | None:
        """Plans of a model with experts, written before engines were restarted: nothing in them asks for a change."""
        return cls.RESTART if value == "not-with-experts" else None


@dataclass(frozen=True)
class AlgorithmPlan:
    """kind: `grpo` or `dapo`.  wrong_reward: of a wrong answer, where a right one has 1.

    overlong_tokens, overlong_penalty: of `tasks.grading.overlong_penalty`.
    max_generated_prompts: a step of `dapo` that needs more ends the run; 0: any number.
    """

    kind: str = "grpo"
    wrong_reward: float = 0.0
    overlong_tokens: int = 0
    overlong_penalty: float = 0.0
    max_generated_prompts: int = 0

    @property
    def filters(self) -> bool:
        """Whether prompts whose samples are all right or all wrong are replaced."""
        return self.kind == "dapo"


@dataclass(frozen=True)
class TrainerPlan:
    """How the trainer's forward and backward run. attention: transformers' name of the implementation.

    packed: sequences lie behind one another without padding, which needs flash attention.
    sequence_parallel: GPUs that share a sequence.  offload_*: to the host's memory between uses.
    max_tokens_per_gpu: of one forward, None: micro_batch_sequences of full length.
    """

    attention: str = "sdpa"
    packed: bool = False
    sequence_parallel: int = 1
    offload_parameters: bool = False
    offload_optimizer: bool = False
    gradient_checkpointing: bool = False
    micro_batch_sequences: int = 1
    max_tokens_per_gpu: int | None = None
    gpu_memory_utilization: float = 0.5


@dataclass(frozen=True)
class GuardPlan:
    """What the governor may do, and when a step counts as bad. Steps are counts, bounds in the units of the metrics.

    bad_steps: of the last 2 * bad_steps - 1, lead up.  fine_steps: in a row, lead down.  cooling_steps: after a climb.
    gradient_steps: gradients in a row, not finite, that stop the run.  switching: how engines change their scheme.
    save_budget_s: for saving at a signal.  stall_s: without progress, then it is cut.  reward_failures: a share, 0..1.
    reserve_bf16: memory is counted as if all rollouts were in BF16.
    """

    actions: tuple[Action, ...] = ()
    k3_kl: float = 0.015
    weight_std: float = 1.0
    ess: float = 0.3
    truncated_fraction: float = 0.05
    bad_steps: int = 3
    fine_steps: int = 20
    cooling_steps: int = 5
    gradient_steps: int = 3
    save_budget_s: float = 300.0
    stall_s: float = 1800.0
    reward_failures: float = 0.1
    reserve_bf16: bool = False
    switching: Switching = Switching.LIVE

    @property
    def ranks_layers(self) -> bool:
        """Whether somebody may ask for the worst layers."""
        return Action.RAISE_PRECISION in self.actions

    @property
    def comes_to_bf16(self) -> bool:
        """Whether rollouts may lose all of their quantised layers."""
        return Action.BF16 in self.actions


@dataclass(frozen=True)
class ClusterPlan:
    """Where the nodes of a training of several meet.

    address: `host:port` of a Ray cluster that is there already; empty: this host becomes the head.
    port: of the head's control store, the first of its ports (plan/ports.py).  node_address: by which other nodes
    reach this host; empty: Ray's choice.  wait_s: how long nodes may take to join.
    """

    address: str
    port: int
    node_address: str
    token_file: str
    wait_s: float


@dataclass(frozen=True)
class CheckpointPlan:
    """When a step is saved (the last one always is), and what stays.

    every_steps, every_minutes: 0: not for this reason.  keep: of the newest, None for all.  keep_best: the one with the
    best greedy validation is saved too, and stays.
    """

    every_steps: int = 0
    every_minutes: float = 0.0
    keep: int | None = 2
    keep_best: bool = False


@dataclass(frozen=True)
class ExpectedAttestation:
    """One process that must say what it runs before the first step. role: `rollout`, `trainer` or `driver`.

    patches: names of the patches that must be live in it, sorted, and no others.
    """

    role: str
    rank: int
    scheme: Scheme
    patches: tuple[str, ...] = ()
    emulated: bool = False


@dataclass(frozen=True)
class RunPlan:
    """Everything a run needs to know.

    validate_bf16_every: steps between validations in BF16 beside the run's scheme, 0 for none; the end is always one.
    argv: the exact child.  env: what the child gets on top of the launcher's own environment (names from plan.env).
    pins: distribution -> version that the patches were made for.
    norm_fed_lr_scale: times the learning rate, for the linear layers that a norm feeds.
    resume_from: the checkpoint whose step this attempt goes on after, empty for a start from the model.
    """

    name: str
    run_dir: str
    cache_dir: str
    seed: int
    device: str  # "cpu" or a GPU name as in the recipe
    nodes: int
    gpus_per_node: int
    model: ModelPlan
    task: TaskPlan
    rollout: RolloutPlan
    profile: ProfilePlan | None
    correction: CorrectionPlan
    steps: int
    validate_every: int
    prompts_per_step: int
    logging_backends: tuple[str, ...]
    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    pins: tuple[tuple[str, str], ...]
    choices: tuple[Choice, ...]
    attestations: tuple[ExpectedAttestation, ...]
    guard: GuardPlan = GuardPlan()
    uaq: UaqPlan | None = None
    norm_fed_lr_scale: float = 1.0
    cluster: ClusterPlan | None = None  # None: one node, with a Ray of the run's own
    checkpoint: CheckpointPlan = CheckpointPlan()
    resume_from: str = ""
    validate_bf16_every: int = 0
    algorithm: AlgorithmPlan = AlgorithmPlan()
    trainer: TrainerPlan = TrainerPlan()
    schema_version: int = SCHEMA_VERSION

    @property
    def trained_model(self) -> str:
        """What trainer and engine start from: the model, or with UAQ the scaled one in the run's folder."""
        return self.uaq.folder if self.uaq else self.model.path

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2)

    def write(self, path: Path) -> None:
        path.write_text(self.to_json() + "\n")
