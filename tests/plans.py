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
from appliance.record.correction import CorrectionPlan
from appliance.record.plan import (
    AlgorithmPlan,
    EnginePlan,
    ModelPlan,
    OwnPlan,
    RewardPlan,
    RolloutPlan,
    RunPlan,
    TaskPlan,
    TrainerPlan,
)
from appliance.settings.sections import Checkpoint, Guard, Logging, Optimizer, SchemeChange
from appliance.terms.schemes import Scheme
from appliance.terms.settings import Quantisation

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
    data_problems=(),
    has_data=False,
    disks=Disks(DISK, checkpoints=DISK),
)
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


def make_task(**changes: object) -> TaskPlan:
    """All of what there is to train on; changes: fields of TaskPlan in place of those of `make_plan`."""
    return make_plan(Path("/runs/a-1")).task.replace(**{"train_size": 0, **changes})


def make_plan(run_dir: Path, **changes: object) -> RunPlan:
    """changes: fields of RunPlan in place of the ones below."""
    data = run_dir.parent / "data"
    plan = RunPlan(
        schema_version=1,
        name=run_dir.name,
        run_dir=str(run_dir),
        cache_dir=str(run_dir.parent / "cache"),
        seed=0,
        device="cpu",
        nodes=1,
        gpus_per_node=1,
        model=ModelPlan(path="/nowhere", source="/nowhere", builtin="", revision="", trust_remote_code=False),
        task=TaskPlan(
            kind="arithmetic",
            difficulty=2,
            seed=0,
            train_file="",
            val_file="",
            train_size=64,
            val_size=512,
            train_parquet=str(data / "train.parquet"),
            val_parquet=str(data / "val.parquet"),
            max_prompt_tokens=16,
            max_response_tokens=8,
            truncate_prompts=False,
            reward_timeout_s=30.0,
            reward_workers=None,
            val_sets=(),
            own=None,
        ),
        rollout=make_rollout(Scheme.INT8),
        engine=EnginePlan(
            max_model_tokens=24,
            max_concurrent_sequences=256,
            max_batched_tokens=4096,
            chunked_prefill=False,
            bucket_mib=64,
        ),
        profile=None,
        correction=CorrectionPlan(method=CorrectionMethod("tis"), cap=2.0),
        steps=1,
        validate_every=1,
        prompts_per_step=32,
        logging=Logging(),
        argv=(),
        env=(),
        pins=(),
        choices=(),
        attestations=(),
        guard=make_guard(),
        uaq=None,
        optimizer=Optimizer(),
        cluster=None,
        checkpoint=make_checkpoint(),
        resume_from="",
        validate_before=True,
        validate_bf16_every=0,
        algorithm=make_algorithm(),
        trainer=TrainerPlan(
            attention="appliance_packed",
            one_flow=False,
            fp8_backward=False,
            sequence_parallel=1,
            offload_parameters=False,
            offload_optimizer=False,
            gradient_checkpointing=False,
            mini_batch_prompts=32,
            micro_batch_sequences=1,
            max_tokens_per_gpu=None,
            gpu_memory_utilization=0.5,
        ),
    )
    return plan.replace(**changes)


def make_rollout(*schemes: Scheme, **changes: object) -> RolloutPlan:
    """One engine per scheme. changes: fields of RolloutPlan in place of the ones below."""
    plan = RolloutPlan(
        scheme=schemes[0],
        replicas=tuple(Quantisation(scheme=scheme) for scheme in schemes),
        tensor_parallel=1,
        samples_per_prompt=8,
        temperature=1.0,
        top_p=1.0,
        prove_every=1,
        eager=True,
    )
    return plan.replace(**changes)


def make_guard(**changes: object) -> Guard:
    """A recipe's defaults, but no action. changes: fields of Guard in place of these."""
    return Guard(**{"actions": (), "scheme_change": SchemeChange.LIVE, **changes})


def make_checkpoint(**changes: object) -> Checkpoint:
    """A recipe's defaults. changes: fields of Checkpoint in place of these."""
    return Checkpoint(**{**Checkpoint().model_dump(), **changes})


def make_algorithm(**changes: object) -> AlgorithmPlan:
    """GRPO. changes: fields of AlgorithmPlan in place of the ones below."""
    plan = AlgorithmPlan(
        kind="grpo",
        dual_clip=3.0,
        wrong_reward=0.0,
        overlong_tokens=0,
        overlong_penalty=0.0,
        generation_batches=1,
        max_generated_prompts=0,
    )
    return plan.replace(**changes)


def own_plan(*rewards: RewardPlan, **changes: object) -> OwnPlan:
    """A task of the user's own, of the field `prompt` and nothing else."""
    empty = dict.fromkeys(("data", "config", "template", "system", "truth", "tools"), "")
    plan = OwnPlan(**empty, split="train", prompt="prompt", rewards=rewards, max_turns=1, code=())
    return plan.replace(**changes)


def reward_plan(function: str = "exact", *, file: object = "", name: str = "", **options: object) -> RewardPlan:
    return RewardPlan(name=name or function, weight=1.0, function=function, file=str(file), options=options)
