"""A RunPlan for tests, without a recipe: every part has a plain value, and what a test is about is given by name."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.corrections.registry import CorrectionMethod
from appliance.plan.host import HostFacts
from appliance.preflight.disk import Disk, Disks
from appliance.preflight.inputs import InputFacts
from appliance.record.plan import (
    CodeFile,
    EnginePlan,
    RunPlan,
    TaskFiles,
    TrainerMemory,
    WeightsPlan,
)
from appliance.settings.sections import (
    Algorithm,
    Batch,
    Checkpoint,
    Cluster,
    Correction,
    Guard,
    Logging,
    Model,
    Optimizer,
    Quantization,
    Reward,
    Rollout,
    SchemeChange,
    Task,
    Trainer,
)
from appliance.terms.schemes import Scheme
from appliance.terms.settings import OldLogProbs

if TYPE_CHECKING:
    from omegaconf import DictConfig

HOST = HostFacts(  # two cores with VNNI, no GPU, nothing missing
    cores=2,
    memory_bytes=24 << 30,
    memory_free_bytes=20 << 30,
    cpu_flags=frozenset({"avx512_vnni"}),
    gpus=(),
    python=(3, 11),
    missing_libraries=(),
    shm_free_bytes=8 << 30,
    run_root_problem="",
    packages=frozenset(),
)
DISK = Disk("/runs/a-1", free_bytes=1 << 40, number=1)
INPUTS = InputFacts(  # everything is there, nothing was asked of a hub
    model_folder_exists=True,
    model_missing=(),
    model_bytes=0,
    model_shape=None,
    model_is_cached=False,
    is_offline=False,
    hub_problem="",
    data_faults=(),
    has_data=False,
    disks=Disks(DISK, checkpoints=DISK),
)
_LENGTHS = ("steps", "validate_before", "validate_every", "validate_bf16_every")
FILES_OF_BUILTIN = frozenset(  # of the folder of a model that is made on the spot
    {
        *("config.json", "generation_config.json", "model.safetensors"),
        *("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"),
    }
)


def verl_config(overrides: Iterable[str]) -> DictConfig:
    """verl's own, composed by Hydra; verl itself is not imported. overrides: such as a plan's `argv[4:]`."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    (folder,) = find_spec("verl").submodule_search_locations
    GlobalHydra.instance().clear()
    with initialize_config_dir(f"{folder}/trainer/config", version_base=None):
        return compose(config_name="ppo_trainer", overrides=list(overrides))


def with_model(plan: RunPlan, path: object, **changes: object) -> RunPlan:
    """The plan with another model. path: of a folder, absolute, or a name on the hub.  changes: fields of WeightsPlan
    in place of what follows from that."""
    text = str(path)
    weights = WeightsPlan(name_or_path=text, hub_name="" if text.startswith("/") else text).replace(**changes)
    return plan.replace(model=plan.model.replace(path=text, builtin=None), weights=weights)


def make_task(**changes: object) -> Task:
    """All of what there is to train on; changes: fields of Task in place of those of `make_plan`."""
    return make_plan(Path("/runs/a-1")).task.replace(**{"train_size": 0, **changes})


def make_plan(run_dir: Path, **changes: object) -> RunPlan:
    """changes: fields of RunPlan in place of the ones below, and of its cluster (device, nodes, gpus_per_node) and its
    trainer (steps, validate_before, validate_every, validate_bf16_every)."""
    data = run_dir.parent / "data"
    nodes = {key: changes.pop(key) for key in ("device", "nodes", "gpus_per_node") if key in changes}
    lengths = {key: changes.pop(key) for key in _LENGTHS if key in changes}
    plan = RunPlan(
        schema_version=1,
        name=run_dir.name,
        run_dir=str(run_dir),
        cache_dir=str(run_dir.parent / "cache"),
        seed=0,
        model=Model(path="/nowhere"),
        weights=WeightsPlan(name_or_path="/nowhere"),
        task=Task(train_size=64, val_size=512, max_prompt_tokens=16, max_response_tokens=8),
        task_files=TaskFiles(train_parquet=str(data / "train.parquet"), val_parquet=str(data / "val.parquet")),
        rollout=make_rollout(Scheme.INT8),
        engine=EnginePlan(
            eager=True,
            max_model_tokens=24,
            max_concurrent_sequences=256,
            max_batched_tokens=4096,
            bucket_mib=64,
        ),
        profile=None,
        quantization=Quantization(prove_every=1),
        correction=Correction(method=CorrectionMethod("tis"), cap=2.0),
        shadow=None,
        batch=make_batch(),
        logging=Logging(),
        argv=(),
        env=(),
        pins=(),
        choices=(),
        attestations=(),
        guard=make_guard(),
        uaq=None,
        optimizer=Optimizer(),
        cluster=Cluster(**{"device": "cpu", "token_file": str(run_dir.parent / ".cluster-token"), **nodes}),
        checkpoint=make_checkpoint(),
        resume_from="",
        algorithm=make_algorithm(),
        trainer=make_settings_of_trainer(**lengths),
        trainer_memory=TrainerMemory(gradient_checkpointing=False),
    )
    return plan.replace(**changes)


def on(plan: RunPlan, device: str) -> RunPlan:
    """The same plan for another device."""
    return plan.replace(cluster=plan.cluster.replace(device=device))


def with_trainer(plan: RunPlan, **changes: object) -> RunPlan:
    """The same plan with another trainer. changes: fields of Trainer."""
    return plan.replace(trainer=plan.trainer.replace(**changes))


def make_rollout(*schemes: Scheme, **changes: object) -> Rollout:
    """A recipe's defaults, with one engine per scheme. changes: fields of Rollout in place of these."""
    scheme = next((scheme for scheme in schemes if scheme.quantised), schemes[0])
    return Rollout(**{"scheme": scheme, "replicas": schemes, "top_log_probs": 0, **changes})


def make_settings_of_trainer(**changes: object) -> Trainer:
    """A recipe's defaults, but one step, and a pass for the old log-probs. changes: fields of Trainer in place of
    these."""
    lengths = {"steps": 1, "validate_every": 1, "validate_bf16_every": 0}
    return Trainer(**{**lengths, "old_log_probs": OldLogProbs.RECOMPUTE, **changes})


def make_guard(**changes: object) -> Guard:
    """A recipe's defaults, but no action. changes: fields of Guard in place of these."""
    return Guard(**{"actions": (), "scheme_change": SchemeChange.LIVE, **changes})


def make_checkpoint(**changes: object) -> Checkpoint:
    """A recipe's defaults. changes: fields of Checkpoint in place of these."""
    return Checkpoint(**{**Checkpoint().model_dump(), **changes})


def make_algorithm(**changes: object) -> Algorithm:
    """A recipe's defaults, GRPO. changes: fields of Algorithm in place of these."""
    usual = Algorithm()
    return Algorithm(**{"aggregate": usual.aggregated, **usual.bounds, **changes})


def make_batch(**changes: int) -> Batch:
    """32 prompts in one update, a sequence at a time. changes: fields of Batch in place of these."""
    prompts = changes.get("prompts_per_step", 32)
    sizes = {"prompts_per_step": prompts, "generation_prompts": prompts, "mini_batch_prompts": prompts}
    return Batch(**{**sizes, "micro_batch_sequences": 1, **changes})


def make_own_task(*rewards: Reward, **changes: object) -> Task:
    """A task of the user's own, of the field `prompt` and nothing else."""
    return make_task(kind="own", rewards=rewards, **changes)


def with_own_task(plan: RunPlan, *rewards: Reward, code: tuple[CodeFile, ...] = (), **changes: object) -> RunPlan:
    """The plan with a task of the user's own. code: the user's Python files.  changes: fields of Task."""
    task = plan.task.replace(kind="own", rewards=rewards, **changes)
    return plan.replace(task=task, task_files=plan.task_files.replace(code=code))


def make_files(*code: CodeFile, **changes: object) -> TaskFiles:
    """code: the user's Python files.  changes: fields of TaskFiles in place of those of `make_plan`."""
    return make_plan(Path("/runs/a-1")).task_files.replace(code=code, **changes)


def make_reward(function: str = "exact", *, file: object = "", **options: object) -> Reward:
    """A built-in reward, or a function of a file."""
    return Reward(name=f"{file}:{function}" if file else function, **options)
