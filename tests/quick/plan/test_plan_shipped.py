"""The shipped recipes' plans as kept; of those for real hardware verl's own classes, and variants that must fail."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import shipped
from plans import DISK, HOST, verl_config

from appliance.errors import RecipeError
from appliance.finding import Severity
from appliance.plan.build import build_plan
from appliance.plan.host import HostGpu
from appliance.preflight.checks import judge
from appliance.preflight.disk import Disks
from appliance.preflight.inputs import InputFacts
from appliance.recipe.load import load_recipe
from appliance.record.plan import RunPlan
from appliance.terms.devices import CPU, GPUS
from appliance.terms.shapes import KNOWN, read_shape

RENEW = "when the change is meant: make golden"


@pytest.mark.parametrize("name", shipped.KEPT)
def test_plan_is_as_kept(name: str) -> None:
    kept = (shipped.GOLDEN / f"{name}.json").read_text()
    assert json.loads(shipped.golden(name)) == json.loads(kept), RENEW


def test_every_recipe_is_kept() -> None:
    from appliance.recipe import library

    names = [name for name in library.names() if name != "reference"]
    assert names == sorted(shipped.KEPT)
    assert [name for name in names if load_recipe(name).cluster.device == CPU] == sorted(shipped.ON_CPU)
    assert sorted(path.stem for path in shipped.GOLDEN.iterdir()) == names


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder per model: its real sizes as transformers writes them, a small tokenizer, and no weights."""
    from transformers import Qwen2Config, Qwen3Config

    from appliance.tasks.tiny_model import save_tokenizer

    folders = {}
    for name, shape in KNOWN.items():
        folder = tmp_path_factory.mktemp("stub") / name.rpartition("/")[2]
        kind = Qwen3Config if "Qwen3" in shape.architectures[0] else Qwen2Config
        kind(
            architectures=list(shape.architectures),
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_size,
            vocab_size=shape.vocab,
            max_position_embeddings=shape.max_positions,
            tie_word_embeddings=shape.tied,
        ).save_pretrained(folder)
        save_tokenizer(folder, max_positions=shape.max_positions)
        folders[name] = folder
    return folders


def planned(name: str, *sets: str) -> RunPlan:
    return build_plan(load_recipe(name, sets=sets), run_dir=shipped.RUN_DIR, host=HOST)


@pytest.mark.slow
@pytest.mark.parametrize("name", shipped.NAMES)
def test_verls_own_classes_take_the_plan(name: str, stubs: dict[str, Path]) -> None:
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    stub = stubs[load_recipe(name).model.path or ""]
    plan = planned(name, f"model.path={stub}")
    assert read_shape(stub / "config.json") == KNOWN[load_recipe(name).model.path or ""]
    config = verl_config(plan.argv[4:])
    validate_config(config=config, use_reference_policy=False, use_critic=False)
    actor, model, rollout = (
        omega_conf_to_dataclass(config.actor_rollout_ref[part]) for part in ("actor", "model", "rollout")
    )
    assert (model.hf_config.num_attention_heads, model.use_remove_padding) == (KNOWN_HEADS[stub.name], True)
    assert model.hf_config._attn_implementation == plan.trainer.attention.in_transformers
    assert "attn_implementation" not in model.hf_config.to_dict()  # a model that is saved loads without us
    assert actor.ulysses_sequence_parallel_size == plan.trainer.sequence_parallel
    assert actor.engine.param_offload is plan.trainer.offload_parameters
    assert rollout.tensor_model_parallel_size == plan.rollout.tensor_parallel
    assert omega_conf_to_dataclass(config.algorithm).filter_groups.enable is plan.algorithm.filters

    trainer = SimpleNamespace(config=config, trainer_mode="sync", _add_prompts_to_generate=lambda num_prompts: None)
    trainer._resolve_filter_groups_metric = lambda: PPOTrainer._resolve_filter_groups_metric(trainer)
    buffer = PPOTrainer._build_replay_buffer(trainer)
    assert type(buffer) is ReplayBuffer
    assert (buffer.filter_groups_metric, buffer.max_inflight_gen_batches) == (
        ("acc", 3) if plan.algorithm.filters else (None, 1)
    )


KNOWN_HEADS = {name.rpartition("/")[2]: shape.heads for name, shape in KNOWN.items()}

# Each breaks one thing: what is set, and words of what is said of it.
Broken = tuple[tuple[str, ...], str]
FOR_ALL: tuple[Broken, ...] = (
    (("rollout.tensor_parallel=3",), "rollout.tensor_parallel: 3 does not divide the"),
    (("trainer.sequence_parallel=3",), "trainer.sequence_parallel: 3 does not divide the GPUs"),
    (("trainer.attention=sdpa",), "trainer.attention: unknown value"),
    (("batch.max_tokens_per_gpu=16",), "batch.max_tokens_per_gpu: 16 tokens do not hold one sequence"),
    (("batch.mini_batch_prompts=31",), "batch.mini_batch_prompts: 31 does not divide the"),
    (("batch.mini_batch_prompts=4096",), "batch.mini_batch_prompts: 4096 is more than the"),
    (("batch.micro_batch_sequences=1",), "`max_tokens_per_gpu` and `micro_batch_sequences` exclude each other"),
    (("task.max_response_tokens=400000", "batch.max_tokens_per_gpu=500000"), "prompt and response are up to 40"),
    (("cluster.gpus_per_node=7",), "do not divide over"),
    (("cluster.device=v100",), "cluster.device: unknown value `v100`"),
    (("trainer.steps=null",), "trainer.steps: the length of the training is not given"),
)
SHARED = {  # GPUs that cannot share a model's heads -> what else is set, so that the batch still fits them
    16: (),
    48: (
        *("batch.prompts_per_step=144", "batch.generation_prompts=432", "batch.mini_batch_prompts=36"),
        "batch.max_tokens_per_gpu=18432",
    ),
}
FOR_DAPO: tuple[Broken, ...] = (
    (("batch.generation_prompts=1000",), "batch.generation_prompts: 1000 is no multiple of the"),
    (("batch.generation_prompts=64",), "batch.generation_prompts: 64 is no multiple of the"),
    (("algorithm.overlong_tokens=30000",), "algorithm.overlong_tokens: 30000 is more than the"),
    (("algorithm.dual_clip=1",), "algorithm.dual_clip: must be greater than 1"),
    (("algorithm.max_generation_batches=-1",), "algorithm.max_generation_batches: must be at least 0"),
    (("algorithm.kind=grpo",), "batch.generation_prompts: `grpo` does not have this key"),
    (("algorithm.kind=ppo",), "algorithm.kind: unknown value `ppo`"),
    (("rollout.samples_per_prompt=1",), "rollout.samples_per_prompt: must be at least 2"),
)
FOR_SCHEME: dict[str, Broken] = {
    "int8": (("cluster.device=b200",), "vLLM has no INT8 kernels for b200"),
    "fp8": (("cluster.device=a100",), "FP8 needs compute capability 8.9"),
}


def for_heads(heads: int) -> Iterator[Broken]:
    """Each of tensor and sequence parallelism over GPUs that these heads do not go into, the other one off."""
    gpus = next(each for each in SHARED if heads % each)
    for shared, alone in (
        ("rollout.tensor_parallel", "trainer.sequence_parallel"),
        ("trainer.sequence_parallel", "rollout.tensor_parallel"),
    ):
        sets = (f"{shared}={gpus}", f"cluster.gpus_per_node={gpus}", f"{alone}=1", *SHARED[gpus])
        yield sets, f"{shared}: {gpus} does not divide the {heads} attention heads"


def variants() -> Iterator[tuple[str, Broken]]:
    for name in shipped.NAMES:
        recipe = load_recipe(name)
        yield from ((name, broken) for broken in FOR_ALL)
        yield from ((name, broken) for broken in for_heads(KNOWN[recipe.model.path or ""].heads))
        if recipe.algorithm.kind == "dapo":
            yield from ((name, broken) for broken in FOR_DAPO)
        if recipe.rollout.scheme in FOR_SCHEME:
            yield name, FOR_SCHEME[str(recipe.rollout.scheme)]


PLENTY = dataclasses.replace(DISK, free_bytes=1 << 50)


def problems(name: str, *sets: str) -> list[str]:
    """What is said against a recipe on the very hardware it names, with all it needs installed."""
    try:
        plan = planned(name, *sets)
    except RecipeError as error:
        return [message for message, _ in error.problems]
    gpu = GPUS[plan.cluster.device]
    host = dataclasses.replace(
        HOST,
        gpus=(HostGpu(gpu.product, gpu.memory_gib << 30),) * plan.cluster.gpus_per_node,
        memory_bytes=1 << 41,
    )
    inputs = InputFacts(
        model_folder_exists=False,
        model_missing=(),
        model_bytes=0,
        model_shape=KNOWN[plan.model.path],
        model_is_cached=True,
        is_offline=False,
        hub_problem="",
        data_faults=(),
        has_data=True,
        disks=Disks(PLENTY, checkpoints=PLENTY),
    )
    found = judge(plan, host=host, inputs=inputs)
    return [each.text for each in found if each.severity is Severity.ERROR]


@pytest.mark.parametrize("name", shipped.NAMES)
def test_nothing_is_said_against_a_shipped_recipe_on_its_hardware(name: str) -> None:
    assert problems(name) == []


def test_every_broken_variant_fails_for_what_was_broken(record_property: Callable[[str, object], None]) -> None:
    tried = list(variants())
    said = [(name, sets, words, problems(name, *sets)) for name, (sets, words) in tried]
    passed = [each for each in said if not any(each[2] in problem for problem in each[3])]
    refused = len(tried) - len(passed)
    record_property("said", f"broken variants of the shipped recipes: {len(tried)}, refused: {refused}")
    assert passed == []
    assert len(tried) == 222


@pytest.mark.parametrize(("name", "gpus"), [("dapo-7b-int8", 16), ("qwen3-8b-int8", 48), ("qwen3-32b-fp8", 48)])
def test_gpus_that_heads_do_not_go_into_fit_otherwise(name: str, gpus: int) -> None:
    """Where nothing is shared nothing is said against them: it is the heads that break such a variant."""
    sets = (f"cluster.gpus_per_node={gpus}", "rollout.tensor_parallel=1", "trainer.sequence_parallel=2", *SHARED[gpus])
    assert problems(name, *sets) == []
