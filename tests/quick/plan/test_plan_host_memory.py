"""What a run without a GPU holds, by estimate: its parts by hand, what makes it smaller, and against measured runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from plans import HOST, on

from appliance.plan.build import build_plan
from appliance.plan.memory import (
    GIB,
    MIB,
    Role,
    cpu_ladder,
    kv_cache_blocks,
    kv_cache_bytes,
    memory_by_role,
    one_sequence,
    peak,
    shape_on_cpu,
)
from appliance.recipe.load import load_recipe
from appliance.record.plan import RunPlan
from appliance.terms.shapes import KNOWN, ModelShape
from benchmarks.memory import read, read_states

SMALL = KNOWN["Qwen/Qwen2.5-0.5B-Instruct"]
MANY_TOKENS = ("task.max_response_tokens=32000",)  # of which the sequences of a step fill any cache
DEMO = Path(__file__).parents[3] / "docs" / "results" / "demo.json"


def planned(*sets: str, model: bool = True) -> RunPlan:
    given = ("model.builtin=null", "model.path=/m") if model else ()
    return build_plan(load_recipe("arithmetic-tiny-int8", sets=(*given, *sets)), run_dir=Path("/runs/a-1"), host=HOST)


def test_the_trainers_state_is_sixteen_bytes_a_weight_and_the_forward_is_on_top() -> None:
    """By hand, of 0.5B with 4 sequences of 64 tokens: 151936 words at 12 bytes are the largest part of the forward."""
    plan = planned("task.max_response_tokens=56", "batch.micro_batch_sequences=4")
    smaller = planned("task.max_response_tokens=56", "batch.micro_batch_sequences=2")
    without = dataclasses.replace(SMALL, layers=12)
    state = 16 * SMALL.weights
    assert memory_by_role(plan, SMALL)[Role.TRAINER] > state
    less = memory_by_role(plan, SMALL)[Role.TRAINER] - memory_by_role(plan, without)[Role.TRAINER]
    assert less >= 16 * (SMALL.weights - without.weights)
    assert (
        memory_by_role(plan, SMALL)[Role.TRAINER] == memory_by_role(smaller, SMALL)[Role.TRAINER]
    )  # at the save, the whole model counts more
    long = planned("task.max_response_tokens=2040", "batch.micro_batch_sequences=4")
    logits = 4 * 2048 * SMALL.vocab * 12
    assert memory_by_role(long, SMALL)[Role.TRAINER] > 210 * MIB + state + logits


def test_one_flow_holds_codes_and_packed_weights_on_each_rank_beside_its_forward() -> None:
    """And none at a save, where the whole model counts more as long as sequences are short."""
    long, short = (
        ("task.max_response_tokens=2040", "batch.micro_batch_sequences=4"),
        ("task.max_response_tokens=56", "batch.micro_batch_sequences=2"),
    )
    flow = "trainer.forward=rollout"
    for ranks in (1, 2):
        sets = (f"cluster.gpus_per_node={ranks}", *long)
        found, usual = memory_by_role(planned(flow, *sets), SMALL), memory_by_role(planned(*sets), SMALL)
        assert found[Role.TRAINER] - usual[Role.TRAINER] == ranks * 2 * SMALL.linear_weights
        assert found[Role.ENGINE] == usual[Role.ENGINE]
    assert memory_by_role(planned(flow, *short), SMALL) == memory_by_role(planned(*short), SMALL)


def test_the_engine_holds_its_cache_and_its_weights() -> None:
    of_one_gb, four = planned(*MANY_TOKENS), planned(*MANY_TOKENS, "rollout.kv_cache_gb=4")
    assert (kv_cache_bytes(of_one_gb, SMALL), kv_cache_bytes(four, SMALL)) == (GIB, 4 * GIB)
    assert memory_by_role(four, SMALL)[Role.ENGINE] - memory_by_role(of_one_gb, SMALL)[Role.ENGINE] == 3 * GIB
    bf16 = planned(*MANY_TOKENS, "rollout.scheme=bf16")
    assert (
        memory_by_role(bf16, SMALL)[Role.ENGINE] - memory_by_role(of_one_gb, SMALL)[Role.ENGINE] == SMALL.linear_weights
    )
    assert memory_by_role(planned(*MANY_TOKENS, "guard.reserve_bf16=true"), SMALL) == memory_by_role(bf16, SMALL)


def test_the_cache_is_no_larger_than_all_sequences_need() -> None:
    """By hand: 256 sequences of 130 tokens are 5 blocks of 32 each, 2 are spare; 24 layers, 2 KV heads of 64."""
    plan = planned("task.max_prompt_tokens=65", "task.max_response_tokens=65")
    assert (plan.engine.max_concurrent_sequences, plan.engine.max_model_tokens) == (256, 130)
    assert kv_cache_blocks(plan, SMALL) == 5 * 256 + 2
    assert kv_cache_bytes(plan, SMALL) == 1282 * 32 * 24 * 2 * (2 * 64) * 2
    shared = plan.replace(rollout=plan.rollout.replace(tensor_parallel=2))
    assert 2 * kv_cache_bytes(shared, SMALL) == kv_cache_bytes(plan, SMALL)
    assert kv_cache_blocks(planned(*MANY_TOKENS), SMALL) is None
    assert kv_cache_blocks(on(plan, "h100-80gb"), SMALL) is None
    assert kv_cache_blocks(plan, dataclasses.replace(SMALL, partial_window=64)) is None


def test_in_fp8_keys_and_values_take_half_of_the_bytes() -> None:
    in_fp8, few = "rollout.kv_cache=fp8", ("task.max_prompt_tokens=65", "task.max_response_tokens=65")
    plan, usual = planned(in_fp8, *few), planned(*few)
    assert kv_cache_blocks(plan, SMALL) == kv_cache_blocks(usual, SMALL)
    assert 2 * kv_cache_bytes(plan, SMALL) == kv_cache_bytes(usual, SMALL)
    assert 2 * one_sequence(plan, SMALL) == one_sequence(usual, SMALL)
    assert kv_cache_bytes(planned(in_fp8, *MANY_TOKENS), SMALL) == GIB  # with twice the sequences in it


def test_the_plan_gives_the_engine_as_many_blocks() -> None:
    demo, key = planned(model=False), "num_gpu_blocks_override"
    (argument,) = (each for each in demo.argv if key in each)
    assert argument.endswith(f"={demo.engine.kv_cache_blocks}")
    unknown = planned()  # its model is nowhere
    assert unknown.engine.kv_cache_blocks is None and not any(key in each for each in unknown.argv)


def test_two_ranks_are_two_trainers_and_two_engines_that_share_the_state() -> None:
    full = [memory_by_role(planned(*MANY_TOKENS, f"cluster.gpus_per_node={ranks}"), SMALL) for ranks in (1, 2)]
    assert full[1][Role.ENGINE] == 2 * full[0][Role.ENGINE]
    one, two = memory_by_role(planned(), SMALL), memory_by_role(planned("cluster.gpus_per_node=2"), SMALL)
    assert two[Role.TRAINER] - one[Role.TRAINER] < 16 * SMALL.weights
    assert two[Role.DRIVER] == one[Role.DRIVER]


def test_two_ranks_of_one_engine_have_a_cache_each_and_share_its_weights() -> None:
    """vLLM gives each worker all of VLLM_CPU_KVCACHE_SPACE."""
    one = memory_by_role(planned(*MANY_TOKENS), SMALL)
    shared = memory_by_role(planned(*MANY_TOKENS, "cluster.gpus_per_node=2", "rollout.tensor_parallel=2"), SMALL)
    assert shared[Role.ENGINE] - one[Role.ENGINE] == pytest.approx(280 * MIB + GIB, abs=2)


def test_the_ladder_takes_the_cache_first() -> None:
    plan = planned("rollout.kv_cache_gb=8", *MANY_TOKENS, "batch.micro_batch_sequences=16")
    whole = peak(plan, SMALL)
    assert cpu_ladder(plan, SMALL, limit=whole - 2 * GIB) == ("rollout.kv_cache_gb: 6",)
    both = cpu_ladder(plan, SMALL, limit=whole - 20 * GIB)
    assert both[0] == "rollout.kv_cache_gb: 1" and both[1].startswith("batch.micro_batch_sequences: ")
    assert cpu_ladder(plan, SMALL, limit=GIB) == ()


def test_the_ladder_of_a_recipe_that_packs_by_tokens_has_it_count_sequences_instead() -> None:
    """The two keys exclude each other."""
    sets = ("task.max_response_tokens=504", "batch.max_tokens_per_gpu=16384")
    plan = planned(*sets)
    (change,) = cpu_ladder(plan, SMALL, limit=peak(plan, SMALL) // 2)
    assert change.startswith("batch.max_tokens_per_gpu: null, batch.micro_batch_sequences: ")
    typed = [each.replace(": ", "=") for each in change.split(", ")]
    assert peak(planned(*sets, *typed), SMALL) <= peak(plan, SMALL) // 2


def test_what_cannot_be_counted_is_not_estimated() -> None:
    experts = dataclasses.replace(SMALL, architectures=("Qwen3MoeForCausalLM",))
    assert shape_on_cpu(planned(), None) is None
    assert shape_on_cpu(planned(), experts) is None
    assert shape_on_cpu(on(planned(), "a100"), SMALL) is None
    assert shape_on_cpu(planned(model=False), None) is not None


def unused(plan: RunPlan, shape: ModelShape, *, gib: int = 1) -> int:
    """Bytes of the KV cache that engines held when these runs were measured, and hold no more."""
    return gib * GIB - kv_cache_bytes(plan, shape)


@pytest.mark.parametrize("setting", ["int8", "bf16"])
def test_the_demo_holds_what_the_estimate_says(setting: str) -> None:
    """Peaks of the whole run, measured by benchmarks.demo. 15 %: the peaks of equal runs differ by 4 %."""
    plan = planned(f"rollout.scheme={setting}", model=False)
    shape = shape_on_cpu(plan, None)
    assert shape is not None
    runs = [run for run in json.loads(DEMO.read_text())["runs"] if run["setting"] == setting]
    assert len(runs) >= 3
    for run in runs:
        assert peak(plan, shape) + unused(plan, shape) == pytest.approx(run["peak_pss_bytes"], rel=0.15)


def test_measured_runs_hold_what_the_estimate_says() -> None:
    """Measured by benchmarks.memory, in a run's first steps; in a longer one a trainer holds more
    (docs/results/memory.md)."""
    runs = read(DEMO.parent, host=HOST)
    assert runs
    for case, run in runs.items():
        _, held_bytes = run.measured.fullest
        estimate = memory_by_role(run.plan, run.measured.shape)
        assert abs(sum(estimate.values()) / run.measured.total - 1) <= 0.1, case
        assert all(size >= 0.8 * held_bytes[role] for role, size in estimate.items()), (case, estimate, held_bytes)


def test_weights_gradients_and_optimizer_hold_what_the_estimate_says() -> None:
    """And those of an adapter beside an INT4 base take at most 0.3 of those of all weights."""
    full, codes = read_states(DEMO.parent)
    assert full.estimated == pytest.approx(full.measured, rel=0.01)
    assert codes.estimated == pytest.approx(codes.measured, rel=0.1)
    assert codes.measured / full.measured <= 0.3


def test_an_engine_of_a_real_model_holds_what_the_estimate_says() -> None:
    """SmolLM2-135M in `smollm2-int8`, read from the engine's process in its second step (docs/results/memory.md). Other
    trainings ran beside it: of the pages of the libraries, about 100 MB, they had their parts."""
    plan = build_plan(load_recipe("smollm2-int8"), run_dir=Path("/runs/a-1"), host=HOST)
    shape = shape_on_cpu(plan, None)
    assert shape is not None
    assert memory_by_role(plan, shape)[Role.ENGINE] + unused(plan, shape) == pytest.approx(2.19e9, rel=0.1)
