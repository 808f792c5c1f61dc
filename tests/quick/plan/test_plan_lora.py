"""LoRA in recipe and plan: what is refused, what verl is told, and what fits where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from plans import HOST

from appliance.errors import RecipeError
from appliance.plan.build import build_plan
from appliance.plan.memory import Role, gpu_ladder, host_bytes, memory_by_role, moments, trained_weights
from appliance.plan.verl_args import overrides
from appliance.preflight import device
from appliance.preflight.disk import needed_bytes
from appliance.recipe.load import load_recipe
from appliance.record.plan import RunPlan
from appliance.tasks.library import TINY_MODELS
from appliance.terms.environment import ENGINE_VENDOR, VENDOR_VARIABLE
from appliance.terms.shapes import KNOWN, Linear

SHAPE_7B, SHAPE_32B = KNOWN["Qwen/Qwen2.5-7B-Instruct"], KNOWN["Qwen/Qwen2.5-32B"]
ON_A_NODE = ("model.path=Qwen/Qwen2.5-32B", "cluster.gpus_per_node=8", "rollout.tensor_parallel=2")


def planned(recipe: str, *sets: str) -> RunPlan:
    return build_plan(load_recipe(recipe, sets=sets), run_dir=Path("/runs/a-1"), host=HOST)


def test_verl_merges_and_saves_the_adapter_alone() -> None:
    plan = planned("arithmetic-tiny-lora-int8", "model.lora.targets=[q_proj, down_proj]", "model.lora.alpha=64")
    with_lora, usual = dict(overrides(plan)), dict(overrides(planned("arithmetic-tiny-int8")))
    model, actor = "actor_rollout_ref.model", "actor_rollout_ref.actor"
    assert {key: value for key, value in with_lora.items() if key not in usual} == {
        f"{model}.lora_rank": 32,
        f"{model}.lora_alpha": 64,
        f"{model}.target_modules": ["q_proj", "down_proj"],
        f"{model}.lora.merge": True,
        f"{actor}.fsdp_config.model_dtype": "bf16",
        f"+{actor}.checkpoint.save_lora_only": True,
    }
    assert with_lora[f"{actor}.checkpoint.save_contents"] == ["model", "optimizer", "extra"]
    assert dict(plan.env)[VENDOR_VARIABLE] == ENGINE_VENDOR


@pytest.mark.parametrize("targets", ["all-linear", "[all-linear]", "null"])
def test_pefts_word_for_all_linear_layers_is_a_target(targets: str) -> None:
    plan = planned("arithmetic-tiny-lora-int8", f"model.lora.targets={targets}")
    assert dict(overrides(plan))["actor_rollout_ref.model.target_modules"] == [str(layer) for layer in Linear]


def test_without_it_nothing_says_lora() -> None:
    assert planned("arithmetic-tiny-int8").model.lora is None
    assert not any("lora" in key for key, _ in overrides(planned("arithmetic-tiny-int8")))


def test_an_adapter_that_goes_alone_is_held_beside_the_model(root: Path) -> None:
    """verl then tells its engines so, and the processes attest what is patched for it."""
    plan = planned("arithmetic-tiny-lora-int8", "model.lora.sync=adapter")
    assert plan.sends_adapters and not planned("arithmetic-tiny-lora-int8").sends_adapters
    assert dict(overrides(plan))["actor_rollout_ref.model.lora.merge"] is False
    (patches,) = {attested.patches for attested in plan.attestations if attested.role == "rollout"}
    assert {"cpu-lora-device", "cpu-one-adapter"} <= set(patches)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (
            ("correction.uaq_scale=2",),
            "correction.uaq_scale: UAQ scales weights so that an update moves them more, and LoRA moves none",
        ),
        (
            ("optimizer.norm_fed_lr_scale=2",),
            "optimizer.norm_fed_lr_scale: it is a rate of the weights that a norm feeds, and LoRA trains none",
        ),
        (
            ("trainer.forward=rollout",),
            "trainer.forward: `rollout` keeps the model as first quantised, and `merge` sends another at each update",
        ),
        (
            ("trainer.forward=linears", "model.lora.sync=adapter"),
            "trainer.forward: `linears` has the rollouts' layers without an adapter beside them",
        ),
        (
            ("trainer.forward=rollout", "model.lora.sync=adapter", "model.lora.dropout=0.1"),
            "model.lora.dropout: an update would drop a part of the adapter's input, and the rollouts do not",
        ),
        (("model.lora.targets=[q_proj, q_proj]",), "model.lora.targets: a layer is named twice"),
        (("model.lora.targets=[lm_head]",), "model.lora.targets.0: unknown value `lm_head`"),
        (("model.lora.targets=[q_proj, all-linear]",), "model.lora.targets.1: unknown value `all-linear`"),
        (("model.lora.rank=0",), "model.lora.rank: "),
        (
            ("model.lora.sync=adapter", "rollout.tensor_parallel=2"),
            "model.lora.sync: an adapter that is sent alone is proven in engines of one rank",
        ),
        (
            ("model.lora.sync=adapter", "model.lora.rank=513"),
            "model.lora.rank: vLLM takes adapters up to rank 512, and this one has 513",
        ),
    ],
)
def test_what_does_not_go_with_it_is_refused(sets: tuple[str, ...], message: str) -> None:
    with pytest.raises(RecipeError) as raised:
        load_recipe("arithmetic-tiny-lora-int8", sets=sets)
    assert message in raised.value.problems[0][0]


def test_a_model_with_experts_is_refused(tmp_path: Path) -> None:
    config = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RecipeError) as raised:
        planned("gsm8k-7b-lora-int8", f"model.path={tmp_path}")
    place, _, fact = raised.value.problems[0][0].partition(": ")
    assert place.endswith("recipes/gsm8k-7b-lora-int8.yaml:7")
    assert fact == "model.lora: this model has experts, whose weights are no linear layers"


def test_codes_under_an_adapter_are_refused_with_several_ranks_of_the_trainer() -> None:
    sets = ("model.lora.sync=adapter", "trainer.forward=rollout", "cluster.gpus_per_node=2")
    with pytest.raises(RecipeError) as raised:
        planned("gsm8k-7b-lora-int8", *sets)
    message = "with an adapter that is sent alone `rollout` has one rank of the trainer, and here are 2"
    assert [problem for problem in raised.value.problems if message in problem[0]] != []
    assert planned("gsm8k-7b-lora-int8", *sets[::2]).topology.gpus == 2


def test_a_child_can_turn_it_off(tmp_path: Path) -> None:
    recipe = tmp_path / "full.yaml"
    recipe.write_text("extends: arithmetic-tiny-lora-int8\nmodel:\n  lora: null\n")
    assert load_recipe(str(recipe)).model.lora is None
    assert load_recipe("arithmetic-tiny-lora-int8", sets=["model.lora=null"]).model.lora is None


def test_only_the_adapter_has_gradients_and_moments() -> None:
    """7B by hand: of each of 28 layers q and o (3584 + 3584), k and v (3584 + 512), three of an MLP (3584 + 18944)."""
    plan = planned("gsm8k-7b-lora-int8")
    adapter = 28 * 32 * (2 * 7168 + 2 * 4096 + 3 * 22528)
    assert trained_weights(plan, SHAPE_7B) == adapter
    update = {part.name: part.size for part in moments(plan, SHAPE_7B)[1].parts}
    assert update["weights"] == 2 * SHAPE_7B.weights + 4 * adapter
    assert (update["gradients"], update["Adam"]) == (4 * adapter, 8 * adapter)
    assert host_bytes(plan, SHAPE_7B) == 2 * SHAPE_7B.weights  # what verl puts back after a merge
    offloaded = planned("gsm8k-7b-lora-int8", "trainer.offload_parameters=true", "trainer.offload_optimizer=true")
    assert host_bytes(offloaded, SHAPE_7B) == 4 * SHAPE_7B.weights + 12 * adapter
    _, checkpoints = needed_bytes(plan, model_bytes=2 * SHAPE_7B.weights, shape=SHAPE_7B)
    assert checkpoints == 16 * adapter


def test_an_adapter_that_goes_alone_needs_no_merged_model() -> None:
    """The adapter goes in FP32 through the host's memory; there the engine's weights lie while it sleeps, too. What is
    sent of an offloaded model goes tensor by tensor."""
    adapter, engine = 80_740_352, SHAPE_7B.linear_weights + 4 * 152064 * 3584
    plan = planned("gsm8k-7b-lora-int8", "model.lora.sync=adapter", "trainer.offload_parameters=true")
    assert host_bytes(plan, SHAPE_7B) == 2 * SHAPE_7B.weights + 4 * adapter + 4 * adapter + engine
    (sync,) = (moment for moment in moments(plan, SHAPE_7B) if moment.name == "sync")
    assert {part.name: part.size for part in sync.parts}["trainer's state"] == 8 * adapter
    short = ("cluster.gpus_per_node=2", "batch.micro_batch_sequences=1")  # no copies of weights are kept for a forward
    merged, alone = (
        memory_by_role(planned("arithmetic-tiny-lora-int8", f"model.lora.sync={sync}", *short), SHAPE_7B)[Role.TRAINER]
        for sync in ("merge", "adapter")
    )
    assert alone < merged - SHAPE_7B.weights  # a forward of 14 tokens on each rank, in place of 2 bytes a weight


def test_a_trainer_of_codes_keeps_no_weights_of_the_layers_that_are_quantised() -> None:
    """By hand: codes of 1 byte a weight on a GPU, at all times; embedding and head in BF16, of the same size here. On a
    CPU codes, and packed weights beside them."""
    sets = ("model.lora.sync=adapter", "trainer.forward=rollout")
    plan = planned("gsm8k-7b-lora-int8", *sets)
    assert plan.trains_on_codes and not planned("gsm8k-7b-lora-int8", sets[0]).trains_on_codes
    adapter, left = 80_740_352, SHAPE_7B.weights - SHAPE_7B.linear_weights
    rollout, update, sync, save = ({part.name: part.size for part in each.parts} for each in moments(plan, SHAPE_7B))
    of_guard = "BF16 in their place if the guard acts"
    for moment in (rollout, update, sync, save):
        assert (moment["codes of the forward"], moment[of_guard]) == (SHAPE_7B.linear_weights, SHAPE_7B.linear_weights)
    assert update["weights"] == 2 * left + 4 * adapter
    assert rollout["trainer's state"] == sync["trainer's state"] == 2 * left + (4 + 8) * adapter
    tiny = TINY_MODELS["tiny-arithmetic"].shape
    on_cpu = [
        memory_by_role(planned("arithmetic-tiny-lora-int8", *each, "batch.micro_batch_sequences=8"), tiny)[Role.TRAINER]
        for each in (sets[:1], sets)
    ]
    # copies for the gradients: of dequantised weights in place of those of parameters
    assert on_cpu[1] - on_cpu[0] == (2 - 2) * tiny.linear_weights


FLOW = ("model.lora.sync=adapter", "trainer.forward=rollout")


@pytest.mark.parametrize(
    ("actions", "bytes_per_weight"),
    [("[]", 0), ("[warn, tighten, stop]", 0), ("[bf16]", 1), ("[raise-precision, stop]", 1), ("null", 1)],
)
def test_weights_that_the_guard_has_read_again_are_counted_where_it_may(actions: str, bytes_per_weight: int) -> None:
    """BF16 in place of codes of 1 byte; where the weights stay in the model nothing is read again."""
    plan = planned("gsm8k-7b-lora-int8", *FLOW, f"guard.actions={actions}")
    more = {
        sum(part.size for part in moment.parts if part.name == "BF16 in their place if the guard acts")
        for moment in moments(plan, SHAPE_7B)
    }
    assert more == {bytes_per_weight * SHAPE_7B.linear_weights}
    assert ("BF16 in their place if the guard acts 6.1" in moments(plan, SHAPE_7B)[1].text) is bool(bytes_per_weight)
    in_bf16 = planned("gsm8k-7b-lora-int8", FLOW[0], f"guard.actions={actions}")
    assert not any("guard" in moment.text for moment in moments(in_bf16, SHAPE_7B))


def test_7b_fits_on_one_gpu_of_24_gb_where_the_trainer_has_codes() -> None:
    """Without the guard's actions that take rollouts to BF16, and no other LoRA does."""
    on_one = "cluster.device=rtx4090"
    changes = gpu_ladder(planned("gsm8k-7b-lora-int8", on_one, *FLOW), SHAPE_7B)
    assert changes == (
        "trainer.offload_optimizer: true",
        "trainer.offload_parameters: true",
        "batch.max_tokens_per_gpu: 1024",
        "guard.actions: [warn, tighten, stop]",
        "rollout.gpu_memory_utilization: 0.55",
    )
    sets = [change.replace(": ", "=") for change in changes]
    fitted = planned("gsm8k-7b-lora-int8", on_one, *FLOW, *sets)
    assert [moment.short for moment in moments(fitted, SHAPE_7B)] == [0] * 4
    assert [finding.code for finding in device.judge_gpu_memory(fitted, HOST, SHAPE_7B)] == []
    as_usual = planned("gsm8k-7b-lora-int8", on_one, *FLOW, *(each for each in sets if not each.startswith("guard")))
    assert any(moment.short for moment in moments(as_usual, SHAPE_7B))
    for sync in ("merge", "adapter"):
        bf16 = planned("gsm8k-7b-lora-int8", on_one, f"model.lora.sync={sync}")
        assert "cluster.gpus_per_node: 2" in gpu_ladder(bf16, SHAPE_7B)


def test_its_reference_needs_no_memory() -> None:
    """In the host's of a GPU, and in all that a CPU holds: it is the model without the adapter."""
    divergence, tiny = "algorithm.kl=0.1", TINY_MODELS["tiny-arithmetic"].shape
    of_host = [host_bytes(planned("gsm8k-7b-lora-int8", *sets), SHAPE_7B) for sets in ((), (divergence,))]
    on_cpu = [memory_by_role(planned("arithmetic-tiny-lora-int8", *sets), tiny) for sets in ((), (divergence,))]
    assert of_host[0] == of_host[1] and on_cpu[0] == on_cpu[1]
    full = planned("gsm8k-7b-lora-int8", divergence, "model.lora=null")
    assert host_bytes(full, SHAPE_7B) == 4 * SHAPE_7B.weights


@pytest.mark.parametrize("device", ["rtx4090", "a100"])
def test_what_fits_on_one_gpu(device: str) -> None:
    """7B: as shipped in 80 GB, offloaded in two of 24, for verl merges the whole model beside the engine's weights; all
    its weights are trained in neither."""
    plan = planned("gsm8k-7b-lora-int8", f"cluster.device={device}")
    full = planned("gsm8k-7b-lora-int8", f"cluster.device={device}", "model.lora=null")
    changes = gpu_ladder(plan, SHAPE_7B)
    missing = [moment.short > 0 for moment in moments(plan, SHAPE_7B)]
    if device == "a100":
        assert missing == [False] * 4
    else:
        assert missing == [True] * 4
        assert changes == (
            "trainer.offload_optimizer: true",
            "trainer.offload_parameters: true",
            "batch.max_tokens_per_gpu: 1024",
            "cluster.gpus_per_node: 2",
        )
    assert all(moment.certainly_short for moment in moments(full, SHAPE_7B))


def test_32b_fits_on_one_host_of_eight() -> None:
    assert [each.short for each in moments(planned("gsm8k-7b-lora-int8", *ON_A_NODE), SHAPE_32B)] == [0] * 4
    full = planned("gsm8k-7b-lora-int8", *ON_A_NODE, "model.lora=null")
    assert [each.short > 0 for each in moments(full, SHAPE_32B)] == [True, True, False, True]
    assert gpu_ladder(full, SHAPE_32B) == ("trainer.offload_optimizer: true", "batch.max_tokens_per_gpu: 1024")
