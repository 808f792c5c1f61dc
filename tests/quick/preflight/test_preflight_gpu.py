"""What a GPU run needs: flash attention, heads that divide, and memory, with what to change."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from plans import HOST

from appliance.finding import Finding, Severity
from appliance.plan.build import build_plan
from appliance.plan.host import HostGpu
from appliance.plan.memory import GIB, engine_share, engine_weights, gpu_ladder, host_bytes, moments, one_sequence
from appliance.preflight import device
from appliance.recipe.load import load_recipe
from appliance.record.plan import RunPlan
from appliance.terms.shapes import KNOWN, ModelShape, read_shape

SHAPE_32B, SHAPE_7B = KNOWN["Qwen/Qwen2.5-32B"], KNOWN["Qwen/Qwen2.5-7B-Instruct"]
SHAPE_HALF = KNOWN["Qwen/Qwen2.5-0.5B-Instruct"]


def planned(recipe: str, *sets: str) -> RunPlan:
    return build_plan(load_recipe(recipe, sets=sets), run_dir=Path("/runs/a-1"), host=HOST)


def test_the_package_is_missed_only_by_who_asks_for_it() -> None:
    message = "`flash_attention_2` needs the package flash-attn, which is not installed"
    remedy = "remove it: `auto` needs no package"
    asks = planned("dapo-7b-int8", "trainer.attention=flash_attention_2")
    assert list(device.judge_attention(asks, HOST)) == [
        Finding(Severity.ERROR, "flash-attention", ("trainer.attention",), message, remedy)
    ]
    assert list(device.judge_attention(asks, dataclasses.replace(HOST, packages=frozenset({"flash_attn"})))) == []
    for recipe in (*SHIPPED, "arithmetic-tiny-int8"):
        assert list(device.judge_attention(planned(recipe), HOST)) == []


@pytest.mark.parametrize(
    ("sets", "shape", "expected"),
    [
        ((), SHAPE_32B, []),
        (("rollout.tensor_parallel=8",), SHAPE_32B, []),
        (("rollout.tensor_parallel=8",), dataclasses.replace(SHAPE_32B, heads=28), [("rollout", "28 attention heads")]),
        (("trainer.sequence_parallel=8",), dataclasses.replace(SHAPE_32B, heads=28, kv_heads=4), [("trainer", "28")]),
        (("trainer.sequence_parallel=8",), dataclasses.replace(SHAPE_32B, kv_heads=4), []),  # verl repeats them
        (("rollout.tensor_parallel=8",), dataclasses.replace(SHAPE_32B, kv_heads=4), []),  # so does vLLM
        (("trainer.sequence_parallel=4",), dataclasses.replace(SHAPE_32B, kv_heads=6), [("trainer", "6 KV heads")]),
        (("rollout.tensor_parallel=4",), dataclasses.replace(SHAPE_32B, kv_heads=6), [("rollout", "6 KV heads")]),
        (("rollout.tensor_parallel=8",), dataclasses.replace(SHAPE_32B, intermediate=1002), [("rollout", "1002")]),
        (("rollout.tensor_parallel=8",), ModelShape(), []),
        (("rollout.tensor_parallel=8",), None, []),
    ],
)
def test_heads_and_widths_divide(
    sets: tuple[str, ...], shape: ModelShape | None, expected: list[tuple[str, str]]
) -> None:
    sets = ("trainer.sequence_parallel=1", "rollout.tensor_parallel=1", *sets)
    got = list(device.judge_parallel(planned("dapo-32b-int8", *sets), shape))
    assert [each.place.split(".")[0] for each in got] == [place for place, _ in expected]
    assert [what in each.message for each, (_, what) in zip(got, expected, strict=True)] == [True] * len(expected)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen/Qwen2.5-32B", 32.76),
        ("Qwen/Qwen2.5-7B-Instruct", 7.62),
        ("Qwen/Qwen2.5-1.5B-Instruct", 1.543),
        ("Qwen/Qwen2.5-0.5B-Instruct", 0.494),
        ("Qwen/Qwen3-8B", 8.19),
        ("Qwen/Qwen3-32B", 32.76),
    ],
)
def test_known_models_have_the_weights_their_cards_tell(name: str, billions: float) -> None:
    """The published counts, in billions; ours leaves out norms and biases."""
    assert KNOWN[name].weights / 1e9 == pytest.approx(billions, rel=2e-3)


def test_the_sizes_that_are_certain() -> None:
    """Of 32B on 32 GPUs, by hand: 31.2e9 weights in INT8 and the embeddings in BF16, on two GPUs."""
    plan = planned("dapo-32b-int8")
    embeddings = 2 * 152064 * 5120
    assert engine_weights(plan, SHAPE_32B) == (SHAPE_32B.weights - embeddings + 2 * embeddings) // 2
    assert one_sequence(plan, SHAPE_32B) == 22528 * 64 * 2 * 8 * 128 * 2 // 2
    assert host_bytes(plan, SHAPE_32B) == SHAPE_32B.weights * 12 // 4
    update = {part.name: part.size for part in moments(plan, SHAPE_32B)[1].parts}
    assert update["Adam"] == SHAPE_32B.weights * 8 // 32
    assert update["logits"] == 22528 * 152064 * 8


def test_an_engine_holds_a_count_for_each_sequence_and_word_and_its_graphs_while_it_sleeps() -> None:
    """By hand, of 1024 sequences at once: 4 bytes for each of 151936 words, out of what the KV cache would have."""
    plan, shape = planned("gsm8k-0.5b-fp8"), KNOWN["Qwen/Qwen2.5-0.5B-Instruct"]
    rollout, update, *_ = ({part.name: part.size for part in moment.parts} for moment in moments(plan, shape))
    assert rollout["its counts for penalties"] == 1024 * 151936 * 4
    share = sum(size for what, size in rollout.items() if what.startswith(("engine's", "its")))
    assert share == int(plan.rollout.gpu_memory_utilization * 80 * GIB)
    assert update["CUDA and the sleeping engine"] == 2 * rollout["CUDA"] + GIB
    kept = {part.name: part.size for part in engine_share(plan, shape).parts}
    assert kept["counts for penalties"] == rollout["its counts for penalties"]


def test_weights_that_are_sent_or_saved_lie_beside_the_engines() -> None:
    """By hand, of 7B in INT8 (engine: 6.5e9 weights at 1 byte and embeddings at 2), offloaded. verl streams weights,
    the embedding in FP32 and BF16 at once, the engine has a copy; with LoRA it merges all. At a save the engine has its
    cache as well."""
    shape, offload = SHAPE_7B, ("trainer.offload_parameters=true", "trainer.offload_optimizer=true")
    embedding, adapter = 152064 * 3584, 80_740_352
    full, lora = planned("dapo-7b-int8", *offload), planned("gsm8k-7b-lora-int8", *offload)
    for plan, sent, way, held_bytes, gathered in (
        (full, 0, 8 * embedding, 4 * shape.weights // full.topology.gpus, 4 * embedding),
        (lora, 2 * shape.weights + 4 * adapter, 4 * embedding, 2 * shape.weights + 4 * adapter, 0),
    ):
        rollout, _, sync, save = ({part.name: part.size for part in each.parts} for each in moments(plan, shape))
        assert sync["engine's weights"] == rollout["engine's weights"] == shape.linear_weights + 4 * embedding
        assert (sync["trainer's state"], sync["weights on their way"]) == (sent, (512 << 20) + way)
        assert (save["trainer's state"], save["the largest weight"]) == (held_bytes, gathered)
        assert save["its KV cache"] == rollout["its KV cache"] and rollout["trainer's state"] == 0


def test_a_forward_in_the_rollouts_precision_has_their_codes_on_each_gpu() -> None:
    """One byte a weight, however many share the rest."""
    for gpus in (1, 8):
        sets = ("trainer.forward=rollout", f"cluster.gpus_per_node={gpus}", "trainer.old_log_probs=recompute")
        parts = {part.name: part.size for part in moments(planned("gsm8k-0.5b-int8", *sets), SHAPE_HALF)[1].parts}
        assert parts["codes of the forward"] == SHAPE_HALF.linear_weights


def test_a_forward_has_the_tokens_of_its_sequences_at_most() -> None:
    """By hand: 16384 as given, and 8 sequences of 1024, in halves where two GPUs share them."""
    shape = KNOWN["Qwen/Qwen2.5-0.5B-Instruct"]
    sets = ("task.max_prompt_tokens=512", "task.max_response_tokens=512", "cluster.gpus_per_node=2")

    def logits(*more: str) -> int:
        parts = moments(planned("gsm8k-0.5b-int8", *sets, *more), shape)[1].parts
        return next(part.size for part in parts if part.name == "logits")

    assert logits("batch.max_tokens_per_gpu=16384") == 16384 * 151936 * 8
    eight = ("batch.max_tokens_per_gpu=null", "batch.micro_batch_sequences=8")
    assert logits(*eight) == 8 * 1024 * 151936 * 8
    assert logits(*eight, "trainer.sequence_parallel=2") == 4 * 1024 * 151936 * 8


def test_every_shipped_gpu_recipe_fits_by_the_estimate() -> None:
    names = [name for name in SHIPPED if moments(planned(name), KNOWN[SHIPPED[name]])]
    assert len(names) == 12
    assert [name for name in names if any(each.short for each in moments(planned(name), KNOWN[SHIPPED[name]]))] == []
    assert [name for name in names if list(device.judge_gpu_memory(planned(name), HOST, KNOWN[SHIPPED[name]]))] == []


SHIPPED = {
    "dapo-32b-int8": "Qwen/Qwen2.5-32B",
    "dapo-32b-fp8": "Qwen/Qwen2.5-32B",
    "dapo-32b-bf16": "Qwen/Qwen2.5-32B",
    "dapo-7b-int8": "Qwen/Qwen2.5-7B-Instruct",
    "qwen3-8b-int8": "Qwen/Qwen3-8B",
    "qwen3-8b-fp8": "Qwen/Qwen3-8B",
    "qwen3-32b-fp8": "Qwen/Qwen3-32B",
    "qwen2.5-1.5b-int8": "Qwen/Qwen2.5-1.5B-Instruct",
    "gsm8k-7b-lora-int8": "Qwen/Qwen2.5-7B-Instruct",
    "gsm8k-0.5b-int8": "Qwen/Qwen2.5-0.5B-Instruct",
    "gsm8k-0.5b-fp8": "Qwen/Qwen2.5-0.5B-Instruct",
    "gsm8k-0.5b-bf16": "Qwen/Qwen2.5-0.5B-Instruct",
}


ONE_GPU = (
    *("cluster.gpus_per_node=1", "trainer.sequence_parallel=1", "rollout.tensor_parallel=1"),
    "batch.max_tokens_per_gpu=18432",
)


@pytest.mark.parametrize(
    ("recipe", "sets", "changes"),
    [
        ("gsm8k-0.5b-int8", ("rollout.gpu_memory_utilization=0.95",), ("trainer.offload_optimizer: true",)),
        (
            "gsm8k-0.5b-int8",
            ("rollout.gpu_memory_utilization=0.99",),
            (
                "trainer.offload_optimizer: true",
                "trainer.offload_parameters: true",
                "rollout.gpu_memory_utilization: 0.9",
            ),
        ),
        ("gsm8k-0.5b-int8", ("batch.max_tokens_per_gpu=65536",), ("batch.max_tokens_per_gpu: 1024",)),
        (
            "dapo-7b-int8",
            ("trainer.sequence_parallel=1", "batch.max_tokens_per_gpu=45056"),
            ("batch.max_tokens_per_gpu: 22528",),
        ),
        ("qwen3-32b-fp8", ONE_GPU, ("cluster.gpus_per_node: 8",)),
    ],
)
def test_the_ladder_says_what_makes_it_fit(recipe: str, sets: tuple[str, ...], changes: tuple[str, ...]) -> None:
    plan, shape = planned(recipe, *sets), KNOWN[SHIPPED[recipe]]
    assert any(moment.short for moment in moments(plan, shape))
    assert gpu_ladder(plan, shape) == changes


BY_SEQUENCES = ("batch.max_tokens_per_gpu=null", "batch.micro_batch_sequences=8")
THREE = ("batch.prompts_per_step=3", "batch.mini_batch_prompts=null", "rollout.samples_per_prompt=8")


@pytest.mark.parametrize(
    ("recipe", "sets", "changes"),
    [
        ("dapo-7b-int8", BY_SEQUENCES, ("batch.micro_batch_sequences: null, batch.max_tokens_per_gpu: 11264",)),
        ("qwen3-8b-int8", (*ONE_GPU, "cluster.device=h200", *THREE), ("cluster.gpus_per_node: 2",)),
        ("qwen3-8b-int8", (*ONE_GPU, "cluster.device=h200", *THREE, "rollout.samples_per_prompt=5"), ()),
    ],
)
def test_a_recipe_takes_what_makes_it_fit(recipe: str, sets: tuple[str, ...], changes: tuple[str, ...]) -> None:
    """No key beside one that excludes it, and no number of GPUs that the sequences do not divide over."""
    plan, shape = planned(recipe, *sets), KNOWN[SHIPPED[recipe]]
    assert gpu_ladder(plan, shape) == changes
    typed = [each.replace(": ", "=") for change in changes for each in change.split(", ")]
    assert any(moment.short for moment in moments(planned(recipe, *sets, *typed), shape)) == (not changes)


def test_a_shortage_is_an_error_only_where_it_is_certain() -> None:
    findings = list(device.judge_gpu_memory(planned("qwen3-32b-fp8", *ONE_GPU), HOST, KNOWN["Qwen/Qwen3-32B"]))
    assert [(each.severity, each.place) for each in findings] == [(Severity.ERROR, "cluster.device")]
    assert findings[0].message == (
        "394.3 GiB are missing on each GPU while weights are updated: about 534 of 140 GiB on each GPU: weights 122.0, "
        "gradients 122.0, Adam 244.1, gathered layers 4.7, activations 16.5, logits 20.9, CUDA and the sleeping engine "
        "4.0"
    )
    assert findings[0].remedy == "by the same estimate it fits with cluster.gpus_per_node: 8"
    sets = ("batch.max_tokens_per_gpu=65536",)
    (only,) = device.judge_gpu_memory(planned("gsm8k-0.5b-int8", *sets), HOST, KNOWN["Qwen/Qwen2.5-0.5B-Instruct"])
    assert only.severity is Severity.WARNING
    assert only.remedy == "by the same estimate it fits with batch.max_tokens_per_gpu: 1024"


RESERVED = "guard.reserve_bf16=true"
UNUSED = ("guard.actions=[warn]", "trainer.validate_bf16_every=0")


def engine_findings(*sets: str) -> list[tuple[Severity, str, str]]:
    found = device.judge_gpu_memory(planned("dapo-32b-int8", *sets), HOST, SHAPE_32B)
    return [(each.severity, each.place, each.message) for each in found if each.code == "engine-memory"]


def test_rollouts_in_bf16_are_counted_where_they_are_reserved() -> None:
    """2 bytes instead of 1 for each of the 31.2e9 weights of linear layers, on two GPUs."""
    plan, reserved = planned("dapo-32b-int8"), planned("dapo-32b-int8", RESERVED)
    more = engine_weights(reserved, SHAPE_32B) - engine_weights(plan, SHAPE_32B)
    assert more == SHAPE_32B.linear_weights // 2
    assert engine_share(reserved, SHAPE_32B).size - engine_share(plan, SHAPE_32B).size == more
    assert engine_weights(reserved, SHAPE_32B) == engine_weights(planned("dapo-32b-bf16"), SHAPE_32B)


def test_a_share_too_small_for_rollouts_in_bf16_is_said_before_the_run_comes_to_them() -> None:
    share = "rollout.gpu_memory_utilization=0.4"
    needs = "about 36 of 32 GiB on each GPU: weights 30.5, graphs 2.0, counts for penalties 0.3, one sequence 2.8"
    later = f"rollouts in BF16, which this run may come to, need more than the engine's share: {needs}"
    assert engine_findings(share) == [(Severity.WARNING, "guard.reserve_bf16", later)]
    assert engine_findings(share, *UNUSED) == []
    now = (Severity.WARNING, "rollout.gpu_memory_utilization", f"an engine needs more than its share: {needs}")
    assert engine_findings(share, RESERVED) == [now]
    assert engine_findings(share, "rollout.scheme=bf16") == [now]
    assert [severity for severity, _, _ in engine_findings("rollout.gpu_memory_utilization=0.3", RESERVED)] == [
        Severity.ERROR
    ]


@pytest.mark.parametrize(
    ("sets", "severity", "otherwise"),
    [
        ((), Severity.ERROR, "leave `bf16` out of guard.actions"),
        (("guard.actions=[raise-precision]",), Severity.WARNING, "leave `raise-precision` out of guard.actions"),
        (
            ("guard.actions=[raise-precision, bf16]",),
            Severity.ERROR,
            "leave `raise-precision` and `bf16` out of guard.actions",
        ),
        (
            ("guard.actions=[warn]", "trainer.validate_bf16_every=10"),
            Severity.ERROR,
            "set trainer.validate_bf16_every to 0",
        ),
        (
            ("trainer.validate_bf16_every=10",),
            Severity.ERROR,
            "leave `bf16` out of guard.actions and set trainer.validate_bf16_every to 0",
        ),
    ],
)
def test_weights_in_bf16_that_are_more_than_the_share_are_refused(
    sets: tuple[str, ...], severity: Severity, otherwise: str
) -> None:
    """30.5 GiB of 28; INT8 fits. A half of the layers may fit as well."""
    findings = device.judge_gpu_memory(
        planned("dapo-32b-int8", "rollout.gpu_memory_utilization=0.35", *sets), HOST, SHAPE_32B
    )
    (only,) = [each for each in findings if each.code == "engine-memory"]
    assert (only.severity, only.place) == (severity, "guard.reserve_bf16")
    assert only.remedy == f"raise rollout.gpu_memory_utilization or rollout.tensor_parallel, or {otherwise}"


def test_offloading_needs_the_hosts_memory() -> None:
    small = dataclasses.replace(HOST, gpus=(HostGpu("NVIDIA H200", 140 * GIB),) * 8, memory_bytes=200 * GIB)
    (only,) = device.judge_gpu_memory(planned("qwen3-32b-fp8"), small, KNOWN["Qwen/Qwen3-32B"])
    assert only.text == (
        "error: trainer.offload_optimizer: 366 GiB of the trainer's state are offloaded, this host has 200"
    )


def test_what_cannot_be_counted_is_not_judged() -> None:
    experts = dataclasses.replace(SHAPE_32B, architectures=("Qwen3MoeForCausalLM",))
    for shape in (None, ModelShape(), experts):
        assert list(device.judge_gpu_memory(planned("dapo-32b-int8"), HOST, shape)) == []
    assert moments(planned("arithmetic-tiny-int8"), SHAPE_32B) == ()


def test_a_shape_is_read_from_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"architectures": ["Qwen3ForCausalLM"], "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,'
        '"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "vocab_size": 151936,'
        '"max_position_embeddings": 40960, "tie_word_embeddings": false}'
    )
    assert read_shape(tmp_path / "config.json") == KNOWN["Qwen/Qwen3-32B"]


def test_the_reference_of_a_divergence_is_on_the_host() -> None:
    """In FP32, in verl's FSDP2 always: on the GPUs only the layer that computes."""
    with_reference = planned("gsm8k-0.5b-int8", "algorithm.kl=0.01")
    without = with_reference.replace(algorithm=with_reference.algorithm.replace(kl=0.0))
    shape = KNOWN[SHIPPED["gsm8k-0.5b-int8"]]
    assert moments(with_reference, shape) == moments(without, shape)
    assert host_bytes(with_reference, shape) - host_bytes(without, shape) == 4 * shape.weights
