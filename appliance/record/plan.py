"""What will happen: RunPlan, a value that is written to `plan.json` and read by every process of a run.

Nothing here imports torch, verl or vLLM. Paths are absolute strings. A plan never changes after it is written. No field
has a default that a recipe has too: plan/build.py says them all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ValidationError, model_validator

from appliance.corrections.objective import Advantage, Aggregate, Estimator, KlPlace
from appliance.files import Frozen
from appliance.record.correction import CorrectionPlan
from appliance.settings.sections import Checkpoint, Guard, Logging, Lora, Optimizer, SchemeChange
from appliance.terms.devices import CPU, Topology
from appliance.terms.schemes import Scheme
from appliance.terms.settings import ATTENTION_NAME, Dtype, OldLogProbs, Quantisation

SCHEMA_VERSION = 1
CODE_FOLDER = "code"  # of the run's folder: copies of the user's Python files


class Choice(Frozen):
    """A number we derived, with its reason."""

    key: str
    """As in a recipe, or a name of ours where a recipe has none."""
    value: str
    why: str


class ModelPlan(Frozen):
    """Where the weights come from. Exactly one of `source` and `builtin` is not empty."""

    path: str
    """What the trainer and the engine read: a folder, or a name on the hub. A builtin's is in the cache, made on first
    use, and so is what a GGUF file is converted to; with a revision it is the hub's snapshot of it, fetched on first
    use."""
    source: str
    """The folder, GGUF file or hub name, as the recipe has it."""
    builtin: str
    revision: str
    """As the recipe has it, empty: `main`."""
    trust_remote_code: bool
    commit: str = ""
    """Of a hub model, where it was known; with a revision it is what is loaded."""
    gguf: str = ""
    """The GGUF file that it is converted from, absolute, or empty."""
    provenance: str = ""
    """Where a fetched or converted model is from, under which licence, and what was done to its weights; else empty."""

    @property
    def is_cached(self) -> bool:
        """Whether `path` is in the cache, and made on first use."""
        return bool(self.builtin or self.gguf)

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
        """What problems are told apart by: the path; but of a snapshot its name and commit, of a model in the cache its
        folder's name, for their paths differ from host to host."""
        if self.is_cached:
            return Path(self.path).name
        return f"{self.source}@{self.commit}" if self.is_pinned else self.path


class UaqPlan(Frozen):
    """UAQ: trainer and engine read a model that was scaled once."""

    scale: float
    """Weights that a norm feeds are divided by it, and the norm is multiplied; `model/` is folded back."""
    folder: str
    """Of the scaled model, in the run's folder; filled before training."""


class RewardPlan(Frozen):
    """One reward of a task of the user's own."""

    name: str
    """Its metric is `reward/<name>`."""
    weight: float
    function: str
    """A built-in reward, or a function of `file`."""
    file: str
    """The user's Python file, empty for a built-in reward."""
    options: dict[str, str | int]
    """Of a built-in reward, by the recipe's keys."""


class ValSetPlan(Frozen):
    """One of several validations."""

    name: str
    file: str
    """The user's own, or empty: held out of the training data."""
    size: int
    """Problems; 0: all of the file."""
    samples: int
    """Of each problem."""
    temperature: float
    """0: greedy."""


class CodeFile(Frozen):
    """A Python file of the user's that the run executes."""

    path: str
    """The user's own."""
    copy_name: str
    """Of the copy that runs, in `code/` of the run's folder."""
    sha256: str
    """When the plan was made; empty where it could not be read."""


class OwnPlan(Frozen):
    """A task of the user's own."""

    data: str
    """A data set on the hub, or empty: the files of the TaskPlan."""
    config: str
    """Of `data`, or empty."""
    split: str
    """Of `data`."""
    prompt: str
    """The field with the text or the chat messages."""
    template: str
    """In place of `prompt`, or empty."""
    system: str
    """A message before each prompt, or empty."""
    truth: str
    """Dotted path of the field; empty: verl's, or none."""
    rewards: tuple[RewardPlan, ...]
    tools: str
    """The user's Python file, or empty."""
    max_turns: int
    """Times that the model speaks."""
    code: tuple[CodeFile, ...]
    """The files of `rewards` and `tools`, each once."""
    commit: str = ""
    """Of `data`, which is read at it; empty where the hub was not asked or did not say: its `main`, whatever it is."""

    @property
    def import_path(self) -> tuple[str, ...]:
        """The user's folders, whose modules the files may import."""
        return tuple(dict.fromkeys(str(Path(each.path).parent) for each in self.code))

    @property
    def judges(self) -> tuple[str, ...]:
        """The addresses that the built-in reward `judge` asks."""
        found = (each for each in self.rewards if not each.file and each.function == "judge")
        return tuple(sorted({str(each.options["url"]) for each in found}))

    def sha256_of(self, file: str) -> str:
        """As planned, of a file of the user's or of the run's copy of it."""
        planned = {name: each.sha256 for each in self.code for name in (each.path, each.copy_name)}
        return planned[file if file in planned else Path(file).name]

    def with_copies(self, run_dir: str) -> OwnPlan:
        """The same with the run's copies in place of the user's files: what a run executes."""
        copies = {each.path: str(Path(run_dir) / CODE_FOLDER / each.copy_name) for each in self.code}
        rewards = tuple(each.replace(file=copies.get(each.file, "")) for each in self.rewards)
        return self.replace(rewards=rewards, tools=copies.get(self.tools, ""))

    def with_sums(self, sums: Mapping[str, str]) -> OwnPlan:
        """The same with other SHA-256 of its files. sums: by the names of the copies, of all or some."""
        code = tuple(each.replace(sha256=sums.get(each.copy_name, each.sha256)) for each in self.code)
        return self.replace(code=code)


class TaskPlan(Frozen):
    """What to learn."""

    kind: str
    difficulty: int
    """Digits of the operands for `arithmetic`; ignored elsewhere."""
    seed: int
    train_file: str
    """The user's own file, or empty."""
    val_file: str
    """The user's own file, or empty."""
    train_size: int
    """Problems; 0: all there are."""
    val_size: int
    """Problems."""
    train_parquet: str
    """What verl reads, made by `tasks.prepare`."""
    val_parquet: str
    """What verl reads, made by `tasks.prepare`."""
    max_prompt_tokens: int
    max_response_tokens: int
    truncate_prompts: bool
    """Whether longer prompts lose their beginning; else they are left out."""
    reward_timeout_s: float
    """For one response, then its reward has failed."""
    reward_workers: int | None
    """Processes that grade; None: as many as the host can spare."""
    val_sets: tuple[ValSetPlan, ...]
    """The first one counts. Empty: one, of val_file and val_size."""
    own: OwnPlan | None
    """Of the kind `own`."""
    date: str = ""
    """YYYY-MM-DD, which a chat template that asks is given as today; empty where it was known at first not to ask."""

    @property
    def tools(self) -> str:
        """The user's Python file, or empty."""
        return self.own.tools if self.own is not None else ""

    @property
    def schemas_file(self) -> str:
        """What the tools are, made with the data; empty without tools."""
        return str(Path(self.train_parquet).with_name("tools.json")) if self.tools else ""

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and the longest response."""
        return self.max_prompt_tokens + self.max_response_tokens

    @property
    def files(self) -> tuple[str, ...]:
        """The user's own, each once."""
        files = (self.train_file, self.val_file, *(each.file for each in self.val_sets))
        return tuple(dict.fromkeys(file for file in files if file))

    @property
    def validated_samples(self) -> int:
        """Of one validation; a set that is all of a file counts as val_size problems."""
        return sum((each.size or self.val_size) * each.samples for each in self.val_sets) or self.val_size


class RolloutPlan(Frozen):
    """How responses are generated, and by which engines."""

    scheme: Scheme
    """Of the replicas; where they differ, of the first quantised one."""
    replicas: tuple[Quantisation, ...]
    """One per engine, in rank order."""
    tensor_parallel: int
    """GPUs that share one engine."""
    samples_per_prompt: int
    temperature: float
    top_p: float
    top_k: int = 0
    """Most likely words that are drawn from; 0: all."""
    prove_every: int
    """Weight updates until each quantised layer was proven, >= 1."""
    eager: bool
    """Whether engines run without CUDA graphs and torch.compile."""
    top_log_probs: int = 0
    """Most likely words at each token whose log-probs engines report in training, and trainers compare."""

    @property
    def leaves_words_out(self) -> bool:
        """Whether some words are never drawn, so that engines report which ones a token was drawn from."""
        return self.top_p < 1 or self.top_k > 0

    @property
    def emulated(self) -> bool:
        """Whether any replica emulates its scheme."""
        return any(replica.emulated for replica in self.replicas)

    @property
    def label(self) -> str:
        """The scheme for people and metrics; `bf16+int8` where the replicas differ."""
        return "+".join(dict.fromkeys(str(replica.scheme) for replica in self.replicas))


class EnginePlan(Frozen):
    """What an engine holds at a time."""

    max_model_tokens: int
    """Of one sequence: the longest prompt and the longest response."""
    max_concurrent_sequences: int
    max_batched_tokens: int
    """Of one engine step."""
    chunked_prefill: bool
    """Whether long prompts are read in parts, between steps of generation."""
    bucket_mib: int
    """Weights are sent in parts of this size; shared memory of this size is held."""
    kv_cache_blocks: int | None = None
    """Of the KV cache of an engine on a CPU, of CPU_KV_BLOCK tokens each: what all its sequences need at most. None:
    as many as `rollout.kv_cache_gb` has room for."""


class ProfilePlan(Frozen):
    """The profile that the rollouts use."""

    folder: str
    """In the run's folder, filled before training."""
    source: str
    """A profile to copy, or empty to make one (or find it in the cache)."""
    scheme: Scheme
    smoothing: float
    """Strength, 0..1."""
    ignore: tuple[str, ...]
    mismatch_budget: float | None = None
    """Nats per token that the predicted mismatch may have; None: no layer stays in BF16 for it."""
    error_budget: float | None = None
    """Of runs of earlier versions alone: the error of a layer's outputs above which it was kept in BF16."""


class KlPlan(Frozen):
    """The divergence from the model at the start, which a reference of it in each trainer rank computes."""

    coefficient: float
    estimator: Estimator
    place: KlPlace


class AlgorithmPlan(Frozen):
    """The policy gradient, but for its loss and its clip range, which are with the correction."""

    kind: str
    """The recipe's preset, whose keys are written out here."""
    dual_clip: float
    """Where the advantage is negative the ratio is clipped here."""
    wrong_reward: float
    """Of a wrong answer, where a right one has 1."""
    overlong_tokens: int
    """As in `tasks.grading.overlong_penalty`."""
    overlong_penalty: float
    """As in `tasks.grading.overlong_penalty`."""
    generation_batches: int
    """Steps' worth of prompts that `dapo` generates at a time."""
    max_generated_prompts: int
    """A step of `dapo` that needs more ends the run; 0: any number."""
    advantage: Advantage = Advantage.GRPO
    aggregate: Aggregate = Aggregate.TOKEN_MEAN
    kl: KlPlan | None = None
    """Of the divergence from the model at the start; None: nothing asks for it."""
    entropy_bonus: float = 0.0

    @property
    def filters(self) -> bool:
        """Whether prompts whose samples are all right or all wrong are replaced."""
        return self.kind == "dapo"


class TrainerPlan(Frozen):
    """How the trainer's forward and backward run."""

    attention: str
    """transformers' name of the implementation."""
    dtype: Dtype = Dtype.BF16
    one_flow: bool
    linears: bool = False
    """Whether the whole forward is the rollouts' own, or its quantised layers alone (rollout_forward.py)."""
    fp8_backward: bool = False
    """Whether gradients of quantised layers are computed in FP8, too."""
    old_log_probs: OldLogProbs = OldLogProbs.RECOMPUTE
    """Source of the old log-probs. Unless it is `recompute`, no pass over the batch precedes a step's update."""
    sequence_parallel: int
    """GPUs that share a sequence."""
    offload_parameters: bool
    offload_optimizer: bool
    """Both: to the host's memory between uses."""
    gradient_checkpointing: bool
    keeps_copies: bool = False
    """Whether what an update computes with is kept in BF16 from its first forward to its last backward, rather than
    made again by each micro-batch: copies of all weights and, of weights that the trainer quantises, their values."""
    mini_batch_prompts: int
    """Of one update."""
    micro_batch_sequences: int
    max_tokens_per_gpu: int | None
    """Both: of one forward; the second counts where it is given."""
    gpu_memory_utilization: float
    """Part of a GPU's memory that is its engine's."""
    quantises = property(lambda self: self.one_flow or self.linears)


class ClusterPlan(Frozen):
    """Where the nodes of a training of several meet."""

    address: str
    """`host:port` of a Ray cluster that is there already; empty: this host becomes the head."""
    port: int
    """Of the head's control store, the first of its ports (plan/host.py)."""
    node_address: str
    """By which other nodes reach this host; empty: Ray's choice."""
    token_file: str
    wait_s: float
    """How long nodes may take to join."""


class ExpectedAttestation(Frozen):
    """One process that must say what it runs before the first step."""

    role: str
    """`rollout`, `trainer` or `driver`."""
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
    device: str
    """`cpu` or a GPU name as in the recipe."""
    nodes: int
    gpus_per_node: int
    model: ModelPlan
    task: TaskPlan
    rollout: RolloutPlan
    engine: EnginePlan
    profile: ProfilePlan | None
    correction: CorrectionPlan
    steps: int
    validate_before: bool
    """Whether the model is validated before the first step of a run from its beginning."""
    validate_every: int
    """Steps between two validations; the end is always one."""
    prompts_per_step: int
    logging: Logging
    argv: tuple[str, ...]
    """The exact child: what plan/verl_args.py makes of the rest of this plan."""
    env: tuple[tuple[str, str], ...]
    """What the child gets on top of the launcher's own environment (names from terms/environment.py)."""
    pins: tuple[tuple[str, str], ...]
    """(distribution, version that the patches were made for)."""
    choices: tuple[Choice, ...]
    attestations: tuple[ExpectedAttestation, ...]
    guard: Guard
    """With the actions written out, and with how engines change their scheme."""
    uaq: UaqPlan | None
    optimizer: Optimizer
    cluster: ClusterPlan | None
    """None: one node, with a Ray of the run's own."""
    checkpoint: Checkpoint
    resume_from: str
    """The checkpoint whose step this attempt goes on after, empty for a start from the model."""
    validate_bf16_every: int
    """Steps between validations in BF16 beside the run's scheme, 0 for none; the end is always one."""
    algorithm: AlgorithmPlan
    trainer: TrainerPlan
    lora: Lora | None = None
    """An adapter in FP32 that is trained beside the model, which stays as it is, in BF16; with its alpha and its layers
    written out. None: all weights are trained."""
    schema_version: Literal[1]

    @model_validator(mode="after")
    def _is_resolved(self) -> Self:
        """Nothing that a recipe may leave open is open here."""
        lora, guard = self.lora, self.guard
        assert guard.actions is not None and guard.scheme_change is not SchemeChange.AUTO, "guard"
        assert lora is None or (lora.alpha is not None and lora.targets is not None), "lora"
        return self

    @property
    def is_cpu(self) -> bool:
        return self.device == CPU

    @property
    def shares_prompts(self) -> bool:
        """Whether the trainer computes a prompt once for all of its samples in a micro-batch, in models of the families
        that it knows. With dropout they differ; the rest is of GPUs."""
        has_dropout = self.lora is not None and self.lora.dropout > 0
        attends = self.trainer.attention == ATTENTION_NAME and self.trainer.sequence_parallel == 1
        return self.is_cpu and attends and not has_dropout

    @property
    def topology(self) -> Topology:
        return Topology(
            nodes=self.nodes,
            gpus_per_node=self.gpus_per_node,
            tensor_parallel=self.rollout.tensor_parallel,
            sequence_parallel=self.trainer.sequence_parallel,
        )

    @property
    def trained_model(self) -> str:
        """What trainer and engine start from: the model, or with UAQ the scaled one in the run's folder."""
        return self.uaq.folder if self.uaq else self.model.path

    def to_json(self) -> str:
        return self.model_dump_json(indent=2, ensure_ascii=True)

    def write(self, path: Path) -> None:
        path.write_text(self.to_json() + "\n")


def read_plan(path: Path) -> RunPlan:
    """Raises ValueError with one sentence where it is no plan of this version, OSError when it cannot be read."""
    try:
        return RunPlan.model_validate_json(_with_keys_of_today(path.read_bytes()))
    except ValidationError as error:
        raise ValueError(sentence(error)) from error


_MOVED = {
    "logging_backends": "logging.backends",
    "norm_fed_lr_scale": "optimizer.norm_fed_lr_scale",
    "guard.switching": "guard.scheme_change",
}
"""Dotted keys of the plans of runs that an earlier version made, and where they are now."""


def _with_keys_of_today(text: bytes) -> bytes:
    """The text of a plan, with what an earlier version wrote elsewhere where it is now."""
    try:
        plan: dict[str, Any] = json.loads(text)
        for old, new in _MOVED.items():
            *sections, key = old.split(".")
            holder = plan[sections[0]] if sections else plan
            if key in holder:
                section, name = new.split(".")
                plan.setdefault(section, {})[name] = holder.pop(key)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return text  # no plan at all, which is said of it as it is
    return json.dumps(plan).encode()


def sentence(error: ValidationError) -> str:
    """What is wrong with the text of a plan, in one."""
    problems = error.errors(include_url=False)
    for each in problems:
        if each["loc"] == ("schema_version",):
            said = None if each["type"] == "missing" else each["input"]
            return f"plan has schema_version {said!r}, this program reads {SCHEMA_VERSION}"
    first = problems[0]
    place = ".".join(map(str, first["loc"])) or "the file"
    more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
    return f"not a plan that this version reads: {place}: {first['msg']}{more}"
