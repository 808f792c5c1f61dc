"""Faults after transport: in what vLLM is given, and in what its kernels hold. None slips through.

The numbers that are asserted here are those of the table in docs/weights.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from engines import int8_kernel
from families import make_family
from faults import (
    BIAS,
    EMBEDDING,
    NORM,
    PLACES,
    WEIGHT,
    Bench,
    Tally,
    before_proof,
    both_int8_kernels,
    flip_bit,
    free_scale,
    given_to_vllm,
    overwrite,
    rebuild_kernel,
    recover,
    same_bytes,
    sent,
    settle,
    spread,
    start_bench,
    swap_in,
    take,
)
from test_engine_int8 import checkpoint_layer, linear_layers
from torch.nn import Module

from appliance.engine.tensor_slots import expert_gemms
from appliance.quant.codec_int8 import quantise_int8
from appliance.quant.cpu_gemm import widened_types

pytestmark = pytest.mark.engine

LAYERS = ("model.layers.0.self_attn.qkv_proj", "model.layers.1.mlp.gate_up_proj", "model.layers.2.mlp.down_proj")
HOLDS = {  # the layer that must not be as received when this tensor is not
    "model.layers.0.self_attn.q_proj.weight": "model.layers.0.self_attn.qkv_proj",
    BIAS: "model.layers.1.self_attn.qkv_proj",
    WEIGHT: "model.layers.1.mlp.gate_up_proj",
    "model.layers.2.mlp.down_proj.weight": "model.layers.2.mlp.down_proj",
    "model.layers.2.input_layernorm.weight": "model.layers.2.input_layernorm",
    NORM: "model.norm",
    EMBEDDING: "model.embed_tokens",
}


@pytest.fixture(scope="module")
def int8(checkpoints: tuple[Path, Path]) -> Iterator[Bench]:
    with both_int8_kernels():
        yield from start_bench(checkpoints, scheme="int8")


@pytest.fixture(scope="module")
def bf16(checkpoints: tuple[Path, Path]) -> Iterator[Bench]:
    yield from start_bench(checkpoints, scheme="bf16")


def test_the_layers_at_fault_run_on_both_kernels(int8: Bench) -> None:
    names = {layer.quant_method.kernel_name for layer in linear_layers(int8.engine).values()}
    assert names == {int8_kernel(), int8_kernel(columns=100)}


def test_a_bit_flipped_in_what_vllm_is_given(int8: Bench) -> None:
    """Bits that change a code or a scale (sign, exponent) in quantised weights, any bit elsewhere."""
    tally = Tally("bit of a tensor given to vLLM (int8)")
    for name in spread([name for name, _ in int8.new]):
        bits = (13, 15) if name.endswith("proj.weight") else (0, 6, 13, 15)
        for place in PLACES:
            for bit in bits:
                if name.endswith("proj.weight"):
                    weight = dict(int8.new)[name]
                    flipped = flip_bit(weight, at=place, bit=bit)
                    assert not torch.equal(quantise_int8(weight).codes_NK, quantise_int8(flipped).codes_NK)
                around = given_to_vllm(name, lambda tensor, place=place, bit=bit: flip_bit(tensor, at=place, bit=bit))
                int8.attempt(tally, f"{name} {place} {bit}", around=around, layer=HOLDS[name])
    settle(tally, cases=7 * 3 * 4 - 3 * 3 * 2)


def test_a_bit_flipped_in_codes(int8: Bench, checkpoints: tuple[Path, Path]) -> None:
    """The kernel's handle rebuilt from codes of which one has one bit flipped: each bit, at several places."""
    tally = Tally("bit of a code in the kernel (int8)")
    layers = linear_layers(int8.engine)
    for name in LAYERS:
        weight = quantise_int8(checkpoint_layer(checkpoints[1], name)[0])
        for place in (0.0, 0.31, 0.5, 0.77, 1.0):
            for bit in range(8):
                codes = flip_bit(weight.codes_NK, at=place, bit=bit)
                assert not same_bytes(codes, weight.codes_NK)
                held = layers[name].quant_method.held_scale(layers[name])
                around = before_proof(lambda c=codes, h=held, n=name: rebuild_kernel(layers[n], c, h))
                int8.attempt(tally, f"{name} {place} {bit}", around=around, layer=name)
    settle(tally, cases=3 * 5 * 8)


def test_a_handle_rebuilt_from_the_right_codes_is_proven(int8: Bench, checkpoints: tuple[Path, Path]) -> None:
    """What the test above does, without its fault."""
    layers = linear_layers(int8.engine)
    for name in LAYERS:
        codes = quantise_int8(checkpoint_layer(checkpoints[1], name)[0]).codes_NK
        with before_proof(
            lambda c=codes, n=name: rebuild_kernel(layers[n], c, layers[n].quant_method.held_scale(layers[n]))
        ):
            take(int8.engine, sent(int8.new))
    recover(int8.engine, int8.old)


def test_a_bit_flipped_in_a_scale(int8: Bench) -> None:
    """In the memory that the kernel reads."""
    tally = Tally("bit of a scale in the kernel's memory (int8)")
    layers = linear_layers(int8.engine)
    for name in LAYERS:
        for place in PLACES:
            for bit in (0, 7, 15, 22, 23, 30, 31):

                def inject(name: str = name, place: float = place, bit: int = bit) -> bool:
                    held = layers[name].quant_method.held_scale(layers[name])
                    return overwrite(held, flip_bit(held, at=place, bit=bit))

                int8.attempt(tally, f"{name} {place} {bit}", around=before_proof(inject), layer=name)
    settle(tally, cases=3 * 3 * 7)


def test_a_freed_scale(int8: Bench, checkpoints: tuple[Path, Path]) -> None:
    """The handle keeps only the address; somebody else's values lie there now."""
    tally = Tally("scale freed while the kernel reads it (int8)")
    layers = linear_layers(int8.engine)
    for name in layers:
        codes = quantise_int8(checkpoint_layer(checkpoints[1], name)[0]).codes_NK
        int8.attempt(tally, name, around=before_proof(lambda n=name, c=codes: free_scale(layers[n], c)), layer=name)
        layers[name].junk = None
    settle(tally, cases=12)


def test_a_layer_that_kept_its_old_weights(int8: Bench) -> None:
    tally = Tally("stale weights in one layer's kernel (int8)")
    for name, layer in linear_layers(int8.engine).items():
        int8.attempt(tally, name, around=before_proof(swap_in(layer.quant_method)), layer=name)
    settle(tally, cases=12)


def test_kernels_of_two_layers_swapped(int8: Bench) -> None:
    tally = Tally("kernels of two layers swapped (int8)")
    layers = linear_layers(int8.engine)
    for part in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
        for layer, other in ((0, 1), (0, 2), (1, 2)):
            first, second = (layers[f"model.layers.{n}.{part}"].quant_method for n in (layer, other))
            name = f"model.layers.{layer}.{part}"
            int8.attempt(tally, name, around=before_proof(swapping(first, second)), layer=name)
    settle(tally, cases=12)


@pytest.mark.parametrize("scheme", ["int8", "bf16"])
def test_a_parameter_that_changed_after_the_update(scheme: str, request: pytest.FixtureRequest) -> None:
    """What is used as it came: norms, biases, the embedding."""
    bench: Bench = request.getfixturevalue(scheme)
    tally = Tally(f"bit of a norm, bias or embedding in the model ({scheme})")
    parameters = dict(bench.engine.model.named_parameters())
    for name in (NORM, "model.layers.0.input_layernorm.weight", "model.layers.2.self_attn.qkv_proj.bias", EMBEDDING):
        for place in PLACES:
            for bit in (0, 7, 15):

                def inject(name: str = name, place: float = place, bit: int = bit) -> bool:
                    parameter = parameters[name].data
                    return overwrite(parameter, flip_bit(parameter, at=place, bit=bit))

                layer = name.rpartition(".")[0]
                bench.attempt(tally, f"{name} {place} {bit}", around=before_proof(inject), layer=layer)
    settle(tally, cases=4 * 3 * 3)


def test_a_packed_copy_that_stayed_behind(bf16: Bench) -> None:
    """BF16 kernels on a CPU multiply by a packed copy: all linear layers and the tied head. Where oneDNN has no BF16
    there is none: each layer has its weight."""
    if torch.bfloat16 in widened_types():
        assert all(layer.weight.numel() for layer in linear_layers(bf16.engine).values())
        return
    tally = Tally("packed BF16 copy that stayed behind (bf16)")
    layers = linear_layers(bf16.engine) | {"lm_head": bf16.engine.model.lm_head}
    for name, layer in layers.items():

        def inject(layer: Module = layer, before: object = layer.cpu_linear) -> bool:
            changed = layer.cpu_linear is not before
            layer.cpu_linear = before
            return changed

        bf16.attempt(tally, name, around=before_proof(inject), layer=name)
    settle(tally, cases=13)


def test_faults_in_experts(tmp_path: Path) -> None:
    """Each GEMM of each expert is a kernel of its own: a bit of a code, the kernel of before, another expert's."""
    tally = Tally("bit of a code, stale or swapped kernel of an expert (int8)")
    old, new = (make_family(tmp_path / str(seed), name="qwen3-moe", seed=seed) for seed in (1, 2))
    for bench in start_bench((old, new), scheme="int8"):
        gemms = {name: gemm for name, (_, gemm) in expert_gemms(bench.engine.model).items()}
        tensors = dict(bench.new)
        for name in ("model.layers.1.mlp.experts.0.w13", "model.layers.1.mlp.experts.4.w13"):
            gemm, source = gemms[name], name.removesuffix(".w13")
            weight = torch.cat([tensors[f"{source}.{part}_proj.weight"] for part in ("gate", "up")])
            for bit in range(8):
                codes = flip_bit(quantise_int8(weight).codes_NK, at=0.4, bit=bit)
                around = before_proof(lambda g=gemm, c=codes: rebuild_kernel(g, c, g.quant_method.held_scale(g)))
                bench.attempt(tally, f"{name} {bit}", around=around, layer=name)
        for name in ("model.layers.1.mlp.experts.2.w2", "model.layers.2.mlp.experts.4.w13"):
            bench.attempt(tally, name, around=before_proof(swap_in(gemms[name].quant_method)), layer=name)
        for name, other in (
            ("1.mlp.experts.0.w2", "1.mlp.experts.3.w2"),
            ("2.mlp.experts.0.w13", "2.mlp.experts.1.w13"),
        ):
            first, second = (gemms[f"model.layers.{one}"].quant_method for one in (name, other))
            bench.attempt(tally, name, around=before_proof(swapping(first, second)), layer=f"model.layers.{name}")
    settle(tally, cases=2 * 8 + 2 + 2)


def swapping(first: object, second: object) -> Callable[[], bool]:
    """A function that gives each of two INT8 methods the other one's kernel."""

    def inject() -> bool:
        first.gemm, second.gemm = second.gemm, first.gemm
        return first.gemm is not second.gemm

    return inject


def flipping(find_tensor: Callable[[], torch.Tensor], *, place: float, bit: int) -> Callable[[], bool]:
    """A function that flips a bit in the tensor that `held` gives by then."""

    def inject() -> bool:
        tensor = find_tensor()
        return overwrite(tensor, flip_bit(tensor, at=place, bit=bit))

    return inject


def test_faults_in_int4_layers(checkpoints: tuple[Path, Path]) -> None:
    """In the memory that the kernel reads, and kernels that multiply by something else than lies there."""
    tally = Tally("bit of a code or a scale, stale, swapped or wrong kernel (int4)")
    for bench in start_bench(checkpoints, scheme="int4"):
        assert take(bench.engine, sent(bench.new)).layers_proven == 13
        recover(bench.engine, bench.old)
        layers = linear_layers(bench.engine)
        for name in LAYERS:
            method = layers[name].quant_method
            for place in PLACES:
                for attribute, bits in (("packed", (0, 3, 18, 31)), ("scale_GN", (0, 7, 14, 15))):
                    for bit in bits:
                        inject = flipping(
                            lambda method=method, attribute=attribute: getattr(method.gemm, attribute),
                            place=place,
                            bit=bit,
                        )
                        around = before_proof(inject)
                        bench.attempt(tally, f"{name} {attribute} {place} {bit}", around=around, layer=name)
            bench.attempt(tally, f"{name} computes with another", around=before_proof(deceiving(method)), layer=name)
        for name, layer in layers.items():
            bench.attempt(tally, f"{name} stale", around=before_proof(swap_in(layer.quant_method)), layer=name)
        for part in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
            first, second = (layers[f"model.layers.{n}.{part}"].quant_method for n in (0, 2))
            name = f"model.layers.0.{part}"
            bench.attempt(tally, f"{name} swapped", around=before_proof(swapping(first, second)), layer=name)
    settle(tally, cases=3 * 3 * 8 + 3 + 12 + 4)


def deceiving(method: object) -> Callable[[], bool]:
    """A function that has an INT4 layer show its memory and multiply by what it has now, one code of which changes."""
    before = method.gemm

    def inject() -> bool:
        right = method.gemm
        before.packed, before.scale_GN = flip_bit(right.packed, at=0.5, bit=6), right.scale_GN
        before.unpacked, method.gemm = right.unpacked, before
        return True

    return inject


@pytest.mark.parametrize("scheme", ["fp8", "fp8-channel", "fp8-block"])
def test_faults_in_emulated_layers(scheme: str, checkpoints: tuple[Path, Path]) -> None:
    tally = Tally(f"bit of a code or a scale ({scheme}, emulated)")
    for bench in start_bench(checkpoints, scheme=scheme, emulated=True):
        assert take(bench.engine, sent(bench.new)).layers_proven == 13
        recover(bench.engine, bench.old)
        for name in LAYERS:
            layer = linear_layers(bench.engine)[name]
            for place in PLACES:
                for attribute, bits in (("weight", (0, 3, 7)), ("weight_scale", (0, 22, 30))):
                    for bit in bits:
                        inject = flipping(
                            lambda layer=layer, attribute=attribute: getattr(layer, attribute).data,
                            place=place,
                            bit=bit,
                        )
                        around = before_proof(inject)
                        bench.attempt(tally, f"{name} {attribute} {place} {bit}", around=around, layer=name)
    settle(tally, cases=3 * 3 * 6)
