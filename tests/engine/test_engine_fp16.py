"""An engine in FP16: what its layers answer against float64, and that its updates are proven as in BF16."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engines import free_engine, start_engine
from faults import (
    EMBEDDING,
    NORM,
    WEIGHT,
    Bench,
    Tally,
    before_proof,
    given_to_vllm,
    overwrite,
    read_checkpoint,
    recover,
    sent,
    take,
)
from test_engine_int8 import attest, linear_layers, write_plan
from torch import Tensor

from appliance.errors import EngineError
from appliance.quant.codec_int8 import quantise_int8

pytestmark = pytest.mark.engine


def in_fp16(folder: Path) -> list[tuple[str, Tensor]]:
    """Values that BF16 does not have."""
    generator = torch.Generator().manual_seed(7)
    return [
        (name, (each.float() * (1 + 0.01 * torch.rand(each.shape, generator=generator))).half())
        for name, each in read_checkpoint(folder)
    ]


@pytest.fixture(scope="module", params=["int8", "bf16"])
def bench(request: pytest.FixtureRequest, checkpoints: tuple[Path, Path]) -> Iterator[Bench]:
    engine = start_engine(checkpoints[0], scheme=request.param, dtype="float16")
    yield Bench(engine, old=in_fp16(checkpoints[0]), new=in_fp16(checkpoints[1]))
    free_engine(engine)


def weights(layer: str, tensors: dict[str, Tensor]) -> Tensor:
    """[N, K]: a fused layer's parts after each other."""
    parent, _, leaf = layer.rpartition(".")
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}.get(leaf, (leaf,))
    return torch.cat([tensors[f"{parent}.{part}.weight"] for part in parts])


def test_every_update_is_proven_and_every_layer_answers_as_in_float64(bench: Bench) -> None:
    """INT8: the codec's product of token and weight, whose scales and sums are off by 4 u = 2^-22 of all terms at most;
    else the sum of K products in float32, K u. Then one rounding to FP16: 2^-11, or 2^-24 of what is denormal."""
    report = take(bench.engine, sent(bench.new))
    assert report.layers_proven == report.layers > 0
    tensors = dict(bench.new)
    for name, layer in linear_layers(bench.engine).items():
        weight_NK = weights(name, tensors)
        x_MK = torch.randn(5, weight_NK.shape[1], generator=torch.Generator().manual_seed(1)).half()
        output = layer.quant_method.apply(layer, x_MK, None)
        assert output.dtype is torch.float16
        left, right = x_MK.double(), weight_NK.double()
        relative = weight_NK.shape[1] * 2.0**-24
        if bench.engine.scheme == "int8":
            both = (quantise_int8(x_MK), quantise_int8(weight_NK))
            left, right = (each.codes_NK.double() * each.scale.double() for each in both)
            relative = 2.0**-22
        exact, terms = left @ right.t(), left.abs() @ right.abs().t()
        assert bool(((output.double() - exact).abs() <= relative * terms + 2.0**-11 * exact.abs() + 2.0**-24).all()), (
            name
        )
    recover(bench.engine, bench.old)


def test_what_is_wrong_in_an_update_is_caught(bench: Bench) -> None:
    """Between digest and engine, and in what the kernels hold."""
    tally, new = Tally("in FP16"), dict(bench.new)
    parameters, layers = dict(bench.engine.model.named_parameters()), linear_layers(bench.engine)
    streams = {
        "a bit": new | {WEIGHT: (new[WEIGHT].view(torch.int16) ^ 1).view(torch.float16)},
        "rounded to BF16": new | {WEIGHT: new[WEIGHT].bfloat16().half()},
        "another type": new | {WEIGHT: new[WEIGHT].bfloat16()},
    }
    for case, tensors in streams.items():
        listed = sent(bench.new)[-1]
        bench.attempt(tally, case, [*sorted(tensors.items()), listed], says=f"{WEIGHT} (arrived|was sent as)")
    for name in (NORM, EMBEDDING):
        wrong = parameters[name].data + parameters[name].data.abs().amax() * 2.0**-10

        def write(name: str = name, wrong: Tensor = wrong) -> bool:
            return overwrite(parameters[name].data, wrong)

        bench.attempt(tally, name, around=before_proof(write), layer=name.removesuffix(".weight"))
    layer_name, other = (f"model.layers.{number}.mlp.down_proj" for number in (1, 2))

    def swap() -> bool:
        if bench.engine.scheme == "int8":
            layers[layer_name].quant_method.gemm = layers[other].quant_method.gemm
        else:
            kernel, weight = layers[other].cpu_linear, layers[other].weight  # a packed one, or the weight itself
            layers[layer_name].cpu_linear = lambda x, _, bias: kernel(x, weight, bias)
        return True

    bench.attempt(tally, "another layer's kernel", around=before_proof(swap), layer=layer_name)
    assert (tally.injected, tally.caught) == (6, 6), tally.missed


@pytest.mark.parametrize("row", [0, 100, 351])
def test_the_smallest_step_of_one_weight_is_seen(bench: Bench, row: int) -> None:
    """One code, or one unit of FP16 of the largest weight in the columns that are asked at the first update."""
    is_int8 = bench.engine.scheme == "int8"

    def change(weight_NK: Tensor) -> Tensor:
        changed = weight_NK.clone()
        if is_int8:
            scale = float(quantise_int8(weight_NK[row : row + 1]).scale)
            changed[row, 5] += scale if changed[row, 5] < 0 else -scale
        else:
            changed.view(torch.int16)[row, 64 + weight_NK[row, 64:].abs().argmax()] ^= 1
        return changed

    tally = Tally("the smallest step")
    bench.attempt(tally, WEIGHT, around=given_to_vllm(WEIGHT, change), layer="model.layers.1.mlp.gate_up_proj")
    assert (tally.injected, tally.caught) == (1, 1), tally.missed


def test_a_worker_in_another_type_than_planned_ends(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = write_plan(tmp_path, scheme=bench.engine.scheme)
    with pytest.raises(EngineError, match=r"replica 0 computes in torch\.float16, the plan says bf16"):
        attest(bench.engine, plan=plan, replica="0", monkeypatch=monkeypatch)
