"""Sections of a recipe that a plan has as they are: typed by a user, resolved, and read by every process of a run.
Imports no torch."""

from __future__ import annotations

import pkgutil
import re
from collections import Counter
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticKnownError

from appliance.corrections.objective import Advantage, Aggregate, ClipRange, Estimator, KlPlace, Loss
from appliance.corrections.registry import DEFAULT, CorrectionMethod
from appliance.files import Frozen
from appliance.guard.policy import ESS, K3_KL, TRUNCATED_FRACTION, WEIGHT_STD, Action
from appliance.terms.devices import AUTO
from appliance.terms.schemes import PROFILED, Scales, Scheme, listed
from appliance.terms.settings import ATTENTION_NAME, Dtype, KvCache, OldLogProbs, Schedule
from appliance.terms.shapes import Linear

ALL_LINEAR = "all-linear"
NO_PROFILE = "none"  # of `quantization.profile`

T = TypeVar("T")
Lax = Annotated[T, Field(strict=False)]  # the text of an enum's member, a list for a tuple


class Section(Frozen):
    """A mapping of the recipe.

    A plan has the same class with every choice made: plan/build.py gives each of `MADE_BY_PLAN` a value, RunPlan takes
    no section without, and what reads a plan reads those values, never a null or `auto`.
    """

    model_config = ConfigDict(use_attribute_docstrings=True)

    MADE_BY_PLAN: ClassVar[tuple[str, ...]] = ()
    """Keys that may be null or `auto` in a recipe, and are neither in a plan."""

    @property
    def open_keys(self) -> list[str]:
        """Keys of `MADE_BY_PLAN` that have no value yet; those of a section within this one are dotted."""
        left_open = [key for key in self.MADE_BY_PLAN if _is_open(getattr(self, key))]
        inside = [(key, section) for key, value in self for section in _sections_in(value)]
        return left_open + [f"{key}.{left}" for key, section in inside for left in section.open_keys]


def _sections_in(value: object) -> list[Section]:
    values = value.values() if isinstance(value, dict) else [value]
    return [section for section in values if isinstance(section, Section)]


def _is_open(value: object) -> bool:
    """Return whether a value is left to the plan: `auto`, a list with an `auto` in it, or null."""
    return value in (None, AUTO) or (isinstance(value, tuple) and AUTO in value)


_SCHEME_CHOICES = (AUTO, *map(str, Scheme))


def _scheme_or_auto(value: object) -> object:
    """Return the scheme of this name, and `auto` as it is. One error for both, where a union would report one for
    each."""
    if value not in _SCHEME_CHOICES:
        *others, last = (f"'{choice}'" for choice in _SCHEME_CHOICES)
        raise PydanticKnownError("enum", {"expected": f"{', '.join(others)} or {last}"})
    return value if value == AUTO else Scheme(str(value))


SchemeChoice = Annotated[Scheme | Literal["auto"], BeforeValidator(_scheme_or_auto)]


def _built_in_tasks() -> list[str]:
    """Return the task kinds that the modules of tasks/built_in implement, without importing any of them."""
    folder, first = Path(__file__).parents[1] / "tasks" / "built_in", ["arithmetic", "gsm8k"]  # as they are listed
    kinds = {module.name.replace("_", "-") for module in pkgutil.iter_modules([str(folder)])}
    return first + sorted(kinds.difference(first))


BUILT_IN_TASKS = tuple(_built_in_tasks())
TaskKind = StrEnum("TaskKind", {kind.upper().replace("-", "_"): kind for kind in (*BUILT_IN_TASKS, "own")})
TaskKind.__doc__ = "Built-in tasks by their names, and `own`."


class AlgorithmKind(StrEnum):
    GRPO = "grpo"
    DAPO = "dapo"
    DR_GRPO = "dr-grpo"
    GSPO = "gspo"


PRESETS: dict[AlgorithmKind, dict[str, str]] = {
    AlgorithmKind.DR_GRPO: {"advantage": Advantage.DR_GRPO.value, "aggregate": Aggregate.CONSTANT.value},
    AlgorithmKind.GSPO: {"loss": Loss.GSPO.value, "aggregate": Aggregate.SEQUENCE_MEAN.value},
}
"""Values that each kind stands for; a kind that is not here has rules and no values."""


class Attention(StrEnum):
    AUTO = "auto"
    FLASH_ATTENTION_2 = "flash_attention_2"

    @property
    def in_transformers(self) -> str:
        """transformers' name of the implementation."""
        return ATTENTION_NAME if self is Attention.AUTO else str(self)


class Forward(StrEnum):
    BF16 = "bf16"
    LINEARS = "linears"
    ROLLOUT = "rollout"

    def knows(self, scheme: Scheme) -> bool:
        """Return whether a trainer's layers can compute in the scheme as the engine's do. The engine fuses layers, so
        that a scale of a whole weight or block spans several of the trainer's."""
        return scheme.spec.trained_in and (self is not Forward.LINEARS or scheme.spec.scales is Scales.CHANNEL)


class Backward(StrEnum):
    BF16 = "bf16"
    FP8_BLOCK = "fp8-block"


NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")  # of a recipe, a run and a validation set
REVISION_PATTERN = r"^[0-9A-Za-z_][0-9A-Za-z_.-]*(/[0-9A-Za-z_][0-9A-Za-z_.-]*)*$"  # a path in the hub's cache


class LongPrompts(StrEnum):
    DROP = "drop"
    TRUNCATE = "truncate"


class SchemeChange(StrEnum):
    AUTO = "auto"
    LIVE = "live"
    RESTART = "restart"


class LogBackend(StrEnum):
    TENSORBOARD = "tensorboard"
    TRACKIO = "trackio"
    WANDB = "wandb"


def _name_all_linear(targets: object) -> object:
    """Return every linear layer by its name where peft's word for all of them is given, alone or as a list."""
    return list(Linear) if targets in (ALL_LINEAR, [ALL_LINEAR]) else targets


_ByPeftsName = BeforeValidator(
    _name_all_linear, json_schema_input_type=Literal["all-linear"] | tuple[Linear | Literal["all-linear"], ...]
)


class LoraSync(StrEnum):
    """What an update of weights sends of a model that trains an adapter."""

    MERGE = "merge"
    """All weights, with the adapter merged in."""
    ADAPTER = "adapter"
    """The adapter; the weights beside it at an engine's first update and when its precision changes."""


class Lora(Section):
    """An adapter: the product of two narrow matrices beside each linear layer is trained, the model itself is not."""

    MADE_BY_PLAN = ("alpha", "targets")

    rank: int = Field(32, ge=1, le=1024)
    """rank of the adapter: the inner dimension of its two matrices"""
    alpha: int | None = Field(None, ge=1)
    """scale of the adapter: the product of its matrices counts alpha / rank times; null: alpha is the rank"""
    targets: Annotated[Lax[tuple[Lax[Linear], ...]], _ByPeftsName] | None = Field(None, min_length=1)
    """linear layers that get an adapter; null, or `all-linear` as peft calls it: all those of the decoder layers"""
    dropout: float = Field(0.0, ge=0, lt=1)
    """share of the adapter's inputs that are dropped at random in an update"""
    sync: Lax[LoraSync] = LoraSync.MERGE
    """what an update of weights sends: `merge`: the model with the adapter merged in; `adapter`: the adapter alone, and
    engines keep the model as they have quantised it, which is what `trainer.forward: rollout` needs"""


class Model(Section):
    """The model to train. Give exactly one of `path` and `builtin`."""

    path: str | None = Field(None, min_length=1)
    """folder, GGUF file (`.gguf`) or hub name of the model"""
    builtin: str | None = Field(None, min_length=1)
    """built-in model: `tiny-arithmetic`, `tiny-calculator` (calls a tool), `smollm2-135m` (fetched from pip's index)"""
    revision: str | None = Field(None, max_length=200, pattern=REVISION_PATTERN)
    """commit, tag or branch of a hub model; null: `main`"""
    trust_remote_code: bool = False
    """whether Python code that comes with the model may run"""
    lora: Lora | None = None
    """adapter to train in place of all weights, {rank: 16}; keys: rank, alpha, targets, dropout, sync; null: none"""

    @property
    def given_name(self) -> str:
        """The name that the user gave: a path, a hub name, or that of a built-in model."""
        return self.path or self.builtin or ""


class Reward(Section):
    """A reward of a task of your own. Several are weighted and summed."""

    name: str = Field(min_length=1, max_length=8192)
    """name of a built-in reward, or `rewards.py:function`"""
    weight: float = 1.0
    """weight of the reward in the sum"""
    pattern: str | None = Field(None, min_length=1)
    """regular expression that `regex` looks for in a response; null: the row's truth is the expression"""
    target: int | None = Field(None, ge=1)
    """number of characters up to which `length` gives 1; from there it falls to 0 at twice as many"""
    url: str | None = Field(None, min_length=1)
    """address of the OpenAI-compatible API that `judge` asks, up to `/v1`"""
    model: str | None = Field(None, min_length=1)
    """model that `judge` asks, as the API names it"""
    prompt: str | None = Field(None, min_length=1)
    """text that `judge` sends, with {prompt}, {response} and {truth}; it has to ask for a number from 0 to 1"""

    @property
    def file(self) -> str:
        """The user's Python file; empty for a built-in reward."""
        return self.name.rpartition(":")[0]

    @property
    def function(self) -> str:
        """Name of a built-in reward, or of a function in `file`."""
        return self.name.rpartition(":")[2]

    @property
    def options(self) -> dict[str, str | int]:
        """Options of a built-in reward that the user gave, by their keys."""
        return self.model_dump(exclude={"name", "weight"}, exclude_none=True)


class ValSet(Section):
    """A validation set, one of several."""

    MADE_BY_PLAN = ("temperature",)

    file: str | None = Field(None, min_length=1)
    """file to validate on, JSON lines or parquet; null: held out of the training data"""
    size: int = Field(0, ge=0)
    """problems to validate on; 0: all of the file"""
    samples: int = Field(1, ge=1, le=1024)
    """responses to each problem"""
    temperature: float | None = Field(None, ge=0, le=10)
    """sampling temperature; null: greedy with one sample, rollout.temperature with several"""


class Task(Section):
    """The task to learn. Paths are relative to the folder in which the program is started."""

    kind: Lax[TaskKind] = Field(TaskKind.ARITHMETIC, description=listed(tuple(TaskKind)))
    difficulty: int = Field(2, ge=2, le=6)
    """digits of the operands of `arithmetic`"""
    train_file: str | None = Field(None, min_length=1)
    """file to train on, JSON lines or parquet; null: from the hub"""
    val_file: str | None = Field(None, min_length=1)
    """file to validate on, JSON lines or parquet; null: held out of the training data"""
    train_size: int = Field(0, ge=0)
    """problems to train on; 0: all there are"""
    val_size: int = Field(512, ge=1)
    """problems to validate on, which are never trained on"""
    seed: int = Field(0, ge=0, lt=2**31)
    """seed of the problems and of their split"""
    max_prompt_tokens: int = Field(512, ge=1)
    """most tokens that a prompt may have; longer ones: see long_prompts"""
    long_prompts: Lax[LongPrompts] = LongPrompts.DROP
    """handling of longer prompts: `drop` leaves them out, `truncate` cuts off their beginning"""
    max_response_tokens: int = Field(512, ge=1)
    """tokens at which a response is cut; with tools all that comes after the prompt counts, their answers included"""
    reward_timeout_s: float = Field(30, gt=0)
    """seconds that grading a response may take; after that its reward counts as failed"""
    reward_workers: int | None = Field(None, ge=1, le=256)
    """processes that compute rewards; null: half of the cores, at most 8"""
    data: str | None = Field(None, min_length=1)
    """data set on the hub, in place of train_file, for `own`"""
    config: str | None = Field(None, min_length=1)
    """configuration of `data`; null: its default"""
    split: str = Field("train", min_length=1)
    """split of `data`"""
    prompt: str = Field("prompt", min_length=1)
    """field of a row that holds the prompt, as text or as chat messages, for `own`"""
    template: str | None = Field(None, min_length=1)
    """text that becomes the prompt when its {fields} are filled in, in place of `prompt`, for `own`"""
    system: str | None = Field(None, min_length=1)
    """system message before each prompt, for `own`"""
    truth: str | None = Field(None, min_length=1)
    """field of a row that rewards get as its truth, with dots where it lies deeper, for `own`; null: verl's, or none"""
    rewards: Lax[tuple[Reward, ...]] = ()
    """rewards of `own`: docs/own-task.md"""
    val_sets: dict[Annotated[str, Field(pattern=f"^{NAME_PATTERN.pattern}$")], ValSet] = Field({})
    """validation sets by name, in place of val_file; metrics and keep_best go by the first; {}: val_file alone"""
    tools: str | None = Field(None, min_length=1)
    """Python file whose functions the model may call, for `own`"""
    max_turns: int | None = Field(None, ge=2, le=64)
    """most turns of the model in one response, with `tools`; null: 4"""

    @property
    def is_own(self) -> bool:
        """Whether the user wrote the task, so that none of the built-in ones is meant."""
        return self.kind is TaskKind.OWN

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and the longest response."""
        return self.max_prompt_tokens + self.max_response_tokens

    @property
    def truncates_prompts(self) -> bool:
        """Whether longer prompts lose their beginning; else they are left out."""
        return self.long_prompts is LongPrompts.TRUNCATE

    @property
    def data_files_by_key(self) -> dict[str, str]:
        """Files of problems that the user names, by the dotted keys that name them."""
        files = {"task.train_file": self.train_file, "task.val_file": self.val_file}
        files |= {f"task.val_sets.{name}.file": val_set.file for name, val_set in self.val_sets.items()}
        return {key: file for key, file in files.items() if file}

    @property
    def data_files(self) -> tuple[str, ...]:
        """Files of problems that the user names, each of them once."""
        return tuple(dict.fromkeys(self.data_files_by_key.values()))

    @property
    def code_files(self) -> tuple[str, ...]:
        """Python files that the user names, each of them once."""
        files = (*(reward.file for reward in self.rewards), self.tools)
        return tuple(dict.fromkeys(file for file in files if file))

    @property
    def named_rewards(self) -> dict[str, Reward]:
        """Rewards by the names of their metrics: the second of two functions of one name is `<name>-2`."""
        by_name, times_seen = {}, Counter[str]()
        for reward in self.rewards:
            times_seen[reward.function] += 1
            number = times_seen[reward.function]
            by_name[f"{reward.function}-{number}" if number > 1 else reward.function] = reward
        return by_name

    @property
    def judges(self) -> tuple[str, ...]:
        """Addresses to which the built-in reward `judge` sends its requests."""
        return tuple(sorted({reward.url for reward in self.rewards if reward.name == "judge" and reward.url}))

    @property
    def validated_samples(self) -> int:
        """Number of samples in one validation; a set that is all of a file counts as val_size problems."""
        return sum((each.size or self.val_size) * each.samples for each in self.val_sets.values()) or self.val_size


class Rollout(Section):
    """How responses are generated."""

    MADE_BY_PLAN = ("scheme", "replicas", "top_log_probs")

    scheme: SchemeChoice = Field(AUTO, description=listed(_SCHEME_CHOICES))
    replicas: Lax[tuple[SchemeChoice, ...]] | None = Field(None, min_length=1)
    """schemes of the engines in their order, repeated until every engine has one; null: `scheme` for all"""
    samples_per_prompt: int = Field(8, ge=2)
    """responses to each prompt: the group of GRPO"""
    temperature: float = Field(1.0, gt=0, le=10)
    """sampling temperature; validation is greedy unless task.val_sets has another one"""
    top_p: float = Field(1.0, gt=0, le=1)
    """total probability of the likeliest words, of which one is drawn; log-probs are over these words; 1: all words"""
    top_k: int = Field(0, ge=0, lt=1 << 30)
    """number of the likeliest words, of which one is drawn; 0: all words"""
    top_log_probs: int | None = Field(None, ge=0, le=128)
    """most likely words per token whose log-probs are compared; null: 20 if the correction needs them, else 0"""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs that share one engine"""
    gpu_memory_utilization: float = Field(0.5, gt=0, lt=1)
    """share of a GPU's memory that the engine takes"""
    kv_cache_gb: int = Field(1, ge=1, le=1024)
    """largest KV cache of an engine on a CPU, GiB; it takes no more than its sequences need"""
    kv_cache: Lax[KvCache] = KvCache.AUTO
    """format of an engine's keys and values: `auto`: 16 bits; `fp8`: half of the bytes, with measured scales"""
    chunked_prefill: bool = True
    """whether long prompts are read in parts, between steps of generation"""
    lm_head_fp32: bool = False
    """whether the engine's last projection is in FP32 instead of BF16"""

    @property
    def schemes(self) -> tuple[Scheme | Literal["auto"], ...]:
        """Schemes in the order of the engines: in a plan one per engine, in a recipe those that it names."""
        return self.replicas or (self.scheme,)

    @property
    def label(self) -> str:
        """Scheme for people and metrics; `bf16+int8` where the engines differ."""
        return "+".join(dict.fromkeys(map(str, self.schemes)))

    @property
    def leaves_words_out(self) -> bool:
        """Whether some words are never drawn, so that engines report which ones a token was drawn from."""
        return self.top_p < 1 or self.top_k > 0


class Quantization(Section):
    """How the linear layers of the rollout engine are quantised."""

    MADE_BY_PLAN = ("prove_every",)

    profile: str = Field(
        "auto", min_length=1, description=f"profile of the model: `auto`, made for {listed(PROFILED)}; `none`; a folder"
    )
    smoothing: float = Field(0.5, ge=0, le=1)
    """share of an activation's range that moves into the weights (SmoothQuant's alpha); 0: off"""
    mismatch_budget: float | None = Field(None, gt=0)
    """largest mismatch that may be predicted, nats per token; layers stay in BF16 until it is met; null: no limit"""
    ignore: Lax[tuple[Annotated[str, Field(min_length=1)], ...]] = ()
    """layers that stay in BF16: names, or `re:` and a pattern"""
    emulate: bool = False
    """whether FP8 is emulated by rounding in floating point, which needs no kernel: for its numbers, as it is slow"""
    prove_every: int | None = Field(None, ge=1)
    """number of syncs within which every layer is proven once; 1: all layers at each sync; null: the plan chooses"""

    def emulates(self, scheme: Scheme) -> bool:
        """Return whether engines of a scheme emulate it."""
        return self.emulate and scheme.spec.can_emulate

    def uses_profile(self, scheme: Scheme) -> bool:
        """Return whether engines of a scheme use the run's profile. A profile that the run makes is for the schemes
        that gain by it, a given one is for all that quantise."""
        wants_one = scheme.spec.takes_profile if self.profile == AUTO else self.profile != NO_PROFILE
        return scheme.quantised and wants_one


class Correction(Section):
    """Correction of the loss for the difference between the rollout policy and the trainer's."""

    method: Lax[CorrectionMethod] = DEFAULT
    """method of correction: `none`, or one of docs/corrections.md"""
    cap: float | None = Field(None, gt=0)
    """limit of the method, most often the largest importance weight: docs/corrections.md; null: the method's default"""
    bounds: Lax[tuple[Annotated[float, Field(gt=0)], ...]] | None = None
    """range [low, high] of the importance weights that `icepop` and the masks keep; null: the method's default"""
    shadow_every: int = Field(20, ge=1)
    """steps between two fits of the clip bounds by `calibrated-clipping`"""
    shadow_fraction: float = Field(0.25, ge=0, le=1)
    """share of a step's batch from which `calibrated-clipping` fits its bounds"""
    uaq_scale: float | None = Field(None, gt=0)
    """factor of UAQ, by which the weights that read a norm's output are divided; null: off"""


class Algorithm(Section):
    """The policy gradient."""

    MADE_BY_PLAN = ("aggregate", "clip_low", "clip_high", "dual_clip")

    kind: Lax[AlgorithmKind] = AlgorithmKind.GRPO
    """preset: `grpo`, `dapo` (replaces prompts whose responses are all right or all wrong), `dr-grpo`, `gspo`"""
    advantage: Lax[Advantage] = Field(Advantage.GRPO, description=listed(tuple(Advantage)))
    loss: Lax[Loss] = Field(Loss.PPO, description=f"{listed(tuple(Loss))}: docs/algorithms.md")
    aggregate: Lax[Aggregate] | None = Field(None, description=f"{listed(tuple(Aggregate))}; null: the loss's default")
    kl: float = Field(0.0, ge=0)
    """weight of the KL divergence from the model at the start; 0: none"""
    kl_estimator: Lax[Estimator] = Estimator.K3
    """estimator of a token's KL divergence: `k1`, `k2` or `k3`"""
    kl_in: Lax[KlPlace] = KlPlace.LOSS
    """place of the KL divergence: `loss` or `reward`"""
    entropy_bonus: float = Field(0.0, ge=0)
    """weight of each token's entropy in the loss; 0: none"""
    clip_low: float | None = Field(None, gt=0, le=1)
    """lower clip range: the probability ratio is clipped at 1 - clip_low; null: the loss's default, for `ppo` 0.2"""
    clip_high: float | None = Field(None, gt=0)
    """upper clip range: the ratio is clipped at 1 + clip_high; null: the loss's default, for `ppo` 0.2"""
    dual_clip: float | None = Field(None, gt=1)
    """ratio at which tokens with a negative advantage are clipped; null: the loss's default, for `ppo` 3"""
    max_generation_batches: int = Field(10, ge=0)
    """batches that `dapo` may generate to fill a step before the run ends; 0: any number"""
    overlong_tokens: int = Field(0, ge=0)
    """number of the last tokens before max_response_tokens over which `dapo` lowers the reward; 0: none"""
    overlong_penalty: float = Field(1.0, ge=0)
    """amount by which `dapo` lowers the reward of a response of full length"""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, raw: Any) -> Any:
        """Fill in what the preset stands for wherever the user gave nothing."""
        kind = raw.get("kind") if isinstance(raw, dict) else None
        return {**PRESETS.get(kind, {}), **raw} if isinstance(kind, str) else raw

    @property
    def preset(self) -> dict[str, str]:
        """Values that the kind stands for."""
        return PRESETS.get(self.kind, {})

    @property
    def filters(self) -> bool:
        """Whether prompts whose responses are all right or all wrong are replaced."""
        return self.kind is AlgorithmKind.DAPO

    @property
    def kl_place(self) -> KlPlace | None:
        """Place of the KL divergence from the model at the start; None where its weight is 0."""
        return self.kl_in if self.kl else None

    @property
    def aggregated(self) -> Aggregate:
        return self.aggregate or self.loss.spec.aggregate

    @property
    def bounds(self) -> dict[str, float]:
        """Values of clip_low, clip_high and dual_clip: the recipe's, else the loss's defaults."""
        usual = self.loss.spec
        return {
            "clip_low": usual.clip.low if self.clip_low is None else self.clip_low,
            "clip_high": usual.clip.high if self.clip_high is None else self.clip_high,
            "dual_clip": usual.dual_clip if self.dual_clip is None else self.dual_clip,
        }

    @property
    def clip(self) -> ClipRange:
        return ClipRange(self.bounds["clip_low"], self.bounds["clip_high"])


class Optimizer(Section):
    """AdamW."""

    learning_rate: float = Field(1e-6, ge=0, le=1)
    """learning rate after the warm-up"""
    schedule: Lax[Schedule] = Schedule.CONSTANT
    """course of the learning rate after the warm-up: `constant`, or `cosine` or `linear` down to the last step"""
    min_lr_ratio: float = Field(0.0, ge=0, lt=1)
    """share of the learning rate that is left at the last step"""
    betas: Lax[tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]]] = (0.9, 0.999)
    """decay rates of the averages of gradients and of their squares"""
    epsilon: float = Field(1e-8, gt=0, le=1)
    """number added to the square root of the average of squared gradients"""
    weight_decay: float = Field(0.01, ge=0, le=1)
    """weight decay, decoupled from the gradient"""
    warmup_steps: int = Field(0, ge=0)
    """steps in which the learning rate rises from 0, linearly"""
    max_grad_norm: float = Field(1.0, gt=0)
    """largest norm of a gradient: longer ones are scaled down to it"""
    norm_fed_lr_scale: float = Field(1.0, gt=0)
    """factor of the learning rate for the layers that UAQ would scale"""


class Batch(Section):
    """Sizes of a step and of its parts. A sequence is one prompt with one response."""

    MADE_BY_PLAN = ("generation_prompts", "mini_batch_prompts", "micro_batch_sequences")

    prompts_per_step: int = Field(32, ge=1)
    """prompts of one step"""
    generation_prompts: int | None = Field(None, ge=1)
    """prompts to which `dapo` generates responses at a time; null: prompts_per_step"""
    mini_batch_prompts: int | None = Field(None, ge=1)
    """prompts of one update; null: the whole step"""
    micro_batch_sequences: int | None = Field(None, ge=1, le=65536)
    """sequences that a rank forwards at once; null: the plan chooses"""
    max_tokens_per_gpu: int | None = Field(None, ge=1)
    """tokens that a rank forwards at once, in place of micro_batch_sequences; null: off"""


class Trainer(Section):
    """How long a training is, how often it validates, how it computes. Give exactly one of `steps` and `epochs`."""

    MADE_BY_PLAN = ("steps", "validate_bf16_every", "old_log_probs")

    steps: int | None = Field(None, ge=1)
    """training steps"""
    epochs: int | None = Field(None, ge=1)
    """times that every problem is seen; needs task.train_size"""
    validate_before: bool = True
    """whether the model is validated before the first step"""
    validate_every: int = Field(10, ge=0)
    """steps between validations; the last step is always validated; 0: only the last step"""
    validate_bf16_every: int | None = Field(None, ge=0)
    """steps between validations in BF16, too; 0: never; null: at the end, where no engine has to restart for it"""
    forward: Lax[Forward] = Forward.BF16
    """precision of the forward: `bf16`; `rollout`: the engines', so no mismatch; `linears`: theirs in linear layers"""
    dtype: Lax[Dtype] = Dtype.BF16
    """data type of forward, backward and engines; master weights are in FP32"""
    backward: Lax[Backward] = Backward.BF16
    """precision of the backward: `bf16`; `fp8-block`: gradients of the layers in that scheme in FP8, too"""
    old_log_probs: Lax[OldLogProbs] = OldLogProbs.AUTO
    """source of the old log-probs: `recompute` (a pass), `update` (its forward), `rollout` (engines); `auto`: chosen"""
    attention: Lax[Attention] = Attention.AUTO
    """implementation of attention: `auto`, ours, which needs no package; `flash_attention_2`, the package flash-attn"""
    offload_parameters: bool = False
    """whether the trainer's weights are kept in the host's memory while they are not used"""
    offload_optimizer: bool = False
    """whether the optimizer's state, two thirds of the trainer's, is kept in the host's memory while it is not used"""
    sequence_parallel: int = Field(1, ge=1)
    """GPUs that share one sequence (Ulysses)"""
    max_restarts: int = Field(3, ge=0)
    """most restarts after faults, each from the newest checkpoint"""

    @property
    def one_flow(self) -> bool:
        """Whether the trainer's whole forward computes as the rollouts' does."""
        return self.forward is Forward.ROLLOUT

    @property
    def quantises(self) -> bool:
        """Whether the forward has the rollouts' quantised layers: in one flow, or as linear layers alone."""
        return self.forward is not Forward.BF16

    @property
    def fp8_backward(self) -> bool:
        """Whether gradients of quantised layers are computed in FP8, too."""
        return self.backward is Backward.FP8_BLOCK


class Cluster(Section):
    """Hosts and GPUs of the run, its folder and its Ray cluster."""

    MADE_BY_PLAN = ("device", "token_file")

    device: str = Field("auto", min_length=1)
    """device of the run: `auto` (what this host has), `cpu`, or a GPU name such as `h100`"""
    nodes: int = Field(1, ge=1, le=1024)
    """number of hosts; on each but the first run `appliance join`"""
    gpus_per_node: int = Field(1, ge=1, le=64)
    """GPUs of each host; without a GPU one CPU rank counts as a GPU"""
    run_dir: str = Field("runs", min_length=1)
    """folder that holds the run folders and the cache; several nodes must share it"""
    address: str | None = Field(None, pattern=r"^.+:\d+$")
    """host:port of a Ray cluster that runs already; null: the run starts its own"""
    port: int = Field(6379, ge=1024, le=64536)
    """first port of the head: see docs/cluster.md"""
    node_address: str | None = Field(None, min_length=1)
    """address by which other nodes reach the head; null: Ray finds it"""
    token_file: str | None = Field(None, min_length=1)
    """file with the token of the cluster; null: made in run_dir"""
    wait_s: float = Field(900.0, gt=0)
    """seconds that the nodes may take to join"""

    @property
    def has_own_ray(self) -> bool:
        """Whether the run has one node and starts its own Ray there, which nothing else reaches."""
        return self.nodes == 1 and self.address is None


class Guard(Section):
    """Bounds that a run is watched by, and what the guard may do. After several bad steps it takes its next action."""

    MADE_BY_PLAN = ("actions", "scheme_change")

    actions: Lax[tuple[Lax[Action], ...]] | None = None
    """actions in order: `warn`, `tighten`, `raise-precision`, `bf16`, `stop`; null: all but the third; []: none"""
    k3_kl: float = Field(K3_KL, gt=0)
    """mean k3 mismatch above which a step is bad, nats per token"""
    weight_std: float = Field(WEIGHT_STD, gt=0)
    """standard deviation of the importance weights above which a step is bad"""
    ess: float = Field(ESS, ge=0, lt=1)
    """effective sample size below which a step is bad, as a share of the tokens"""
    truncated_fraction: float = Field(TRUNCATED_FRACTION, gt=0, le=1)
    """share of tokens with a truncated weight above which a step is bad"""
    bad_steps: int = Field(3, ge=1)
    """number of bad steps, within the last 2 * bad_steps - 1, after which the next action is taken"""
    fine_steps: int = Field(20, ge=1)
    """number of fine steps in a row after which the last action is taken back"""
    cooling_steps: int = Field(5, ge=0)
    """steps after an action that are not judged, as the change has yet to show; after taking one back it is one step"""
    gradient_steps: int = Field(3, ge=1)
    """steps in a row with a gradient that is not finite after which the run stops"""
    save_budget_s: float = Field(300, gt=0)
    """seconds that ending the step and saving may take after a signal; then the run is ended without a save"""
    stall_s: float = Field(1800, gt=0)
    """seconds without any progress after which the training is ended"""
    reward_failures: float = Field(0.1, ge=0, le=1)
    """share of failed rewards in a step above which the run stops"""
    scheme_change: Lax[SchemeChange] = SchemeChange.AUTO
    """way of changing the engines' scheme: `live` by a weight update, `restart` of engines, `auto`: live if possible"""
    reserve_bf16: bool = False
    """whether the engines' memory is estimated for BF16 rollouts, to which the guard may change"""

    @property
    def ranks_layers(self) -> bool:
        """Whether the guard may ask for the worst layers."""
        return Action.RAISE_PRECISION in (self.actions or ())

    @property
    def comes_to_bf16(self) -> bool:
        """Whether rollouts may lose all of their quantised layers."""
        return Action.BF16 in (self.actions or ())


class Checkpoint(Section):
    """When the state is saved, besides at the end and when `RUN/save` is touched, and how many checkpoints are kept."""

    every_steps: int = Field(0, ge=0)
    """steps between two saves; 0: not by steps"""
    every_minutes: float = Field(0.0, ge=0)
    """minutes after the last save at which the next one is due; 0: not by time"""
    keep: int | None = Field(2, ge=1)
    """number of the newest checkpoints that are kept; null: all"""
    keep_best: bool = False
    """whether the step with the best validation so far is saved and kept"""


class Logging(Section):
    """Where metrics go besides metrics.jsonl."""

    backends: Lax[tuple[Lax[LogBackend], ...]] = ()
    """further places: `tensorboard`, `trackio`, `wandb`"""
