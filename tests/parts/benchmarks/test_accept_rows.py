"""Each row of kernels fails where its kernel is wrong: on a CPU, with what stands in for the kernel spoilt."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from appliance.quant.codec import QuantisedWeight
from appliance.trainer.rollout_kernels import CpuKernels
from benchmarks.accept import attention, fp8, kernels, updates
from benchmarks.accept.ground import Ground, RowFailed
from benchmarks.accept.rows import ROWS, Row

pytestmark = pytest.mark.engine


@pytest.fixture
def ground(tmp_path: Path) -> Ground:
    return Ground(row="a-row", folder=tmp_path, rehearsal=True)


def refusal(row: Callable[[Ground], None], ground: Ground) -> str:
    with pytest.raises(RowFailed) as raised:
        row(ground)
    return str(raised.value)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_a_row_calls_what_there_is_as_it_wants_to_be_called(row: Row, ground: Ground) -> None:
    """Also one that CI does not rehearse, since it runs the code of another one."""
    module, _, function = row.code.partition(":")
    inspect.signature(getattr(importlib.import_module(module), function)).bind(ground, **dict(row.arguments))


def test_vllms_senders_take_what_a_row_gives_them() -> None:
    """CUDA IPC and NCCL, for which shared memory stands in a rehearsal."""
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

    held = updates.Held()
    held.tensors = [("a", torch.ones(2, 3)), ("b", torch.zeros(4, dtype=torch.bfloat16))]
    sent = NCCLTrainerWeightTransferEngine._checked_iter(held, held.metadata())
    assert [name for name, _ in sent] == ["a", "b"]
    for transport in ("shm", "ipc", "nccl"):
        for info in updates.ways_to_send(transport):
            engine = WeightTransferTrainerFactory._registry[info.backend]()
            assert isinstance(info, engine.init_info_cls) and info.is_sender and info.backend == transport


def test_a_digest_that_misses_a_bit(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "digest", lambda tensor: str(tensor.shape))
    said = refusal(kernels.digests, ground).split("; ")
    assert said[0] == "torch.bfloat16: one bit of [7] is another one, its digest is not"
    assert {each.partition(": ")[0] for each in said} >= {"torch.bfloat16", "torch.float32", "torch.uint8"}


def spoilt_quantiser(change: Callable[[Any], None]) -> Callable[..., Any]:
    from appliance.engine.int8 import quantise_for_kernel

    def quantise(weight_NK: torch.Tensor, *, absmax: torch.Tensor | None = None) -> Any:
        found = quantise_for_kernel(weight_NK.nan_to_num(nan=0.0, posinf=1.0, neginf=-1.0), absmax=absmax)
        change(found)
        return found

    return quantise


def one_code(found: Any) -> None:
    found.codes_NK.view(-1)[-1] ^= 1


def one_scale(found: Any) -> None:
    found.scale[0] *= 1 + 2.0**-23


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (one_code, "1 x 1 torch.bfloat16: 1 codes are not the codec's"),
        (one_scale, "1 x 1 torch.bfloat16: scales are not the codec's"),
        (lambda found: None, "not finite: a weight with nan was quantised"),
    ],
)
def test_an_int8_quantiser_that_is_off(
    change: Callable[[Any], None], reason: str, ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantise = spoilt_quantiser(change)
    monkeypatch.setattr("appliance.engine.int8.quantise_for_kernel", quantise)
    assert refusal(kernels.int8_quantiser, ground).split("; ")[0] == reason


def test_an_int8_product_that_is_rounded_before_its_bias(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM's Triton kernel does for shapes that CUTLASS does not take."""
    from appliance.quant import cpu_gemm

    kind = type("Kind", (cpu_gemm.WideGemm,), {})
    monkeypatch.setattr(cpu_gemm, "kernel_of", lambda *shape: kind)
    whole = kind.__call__
    monkeypatch.setattr(
        kind,
        "__call__",
        lambda self, x_MK, bias_N: whole(self, x_MK, None) + (0 if bias_N is None else bias_N),
    )
    said = refusal(kernels.int8_gemm, ground)
    assert "with a bias: an answer is " in said and said.endswith(" further from the exact one than rounding goes")


def test_an_int8_product_with_another_rows_scale(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    from appliance.quant import cpu_gemm

    class Rolled(cpu_gemm.WideGemm):
        def __init__(self, codes_NK: torch.Tensor, *, scale_N1: torch.Tensor) -> None:
            super().__init__(codes_NK, scale_N1=scale_N1.roll(1, 0))

    monkeypatch.setattr(cpu_gemm, "kernel_of", lambda *shape: Rolled)
    assert refusal(kernels.int8_gemm, ground).startswith("1 tokens, 128 x 64: without a bias: an answer is ")


def test_an_fp8_quantiser_that_multiplies_where_it_should_divide(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = fp8._quantised

    def wrong(ground: Ground, value_MK: torch.Tensor, *, scale: torch.Tensor | None, scheme: Any) -> Any:
        _, own = right(ground, value_MK, scale=scale, scheme=scheme)
        x_MK = value_MK.float() / own if scale is not None else value_MK.float() * own.reciprocal()
        return x_MK.clamp(-448, 448).to(torch.float8_e4m3fn), own

    monkeypatch.setattr(fp8, "_quantised", wrong)
    assert refusal(fp8.quantisers, ground).endswith(" codes are not the codec's")


def test_an_fp8_product_that_is_a_little_too_large(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    right = fp8._products

    def larger(ground: Ground, x: QuantisedWeight, weight: QuantisedWeight) -> dict[str, torch.Tensor]:
        is_dense = int((x.codes_NK.float() != 0).sum(dim=1).max()) > 1
        return {name: found * (1.035 if is_dense else 1.0) for name, found in right(ground, x, weight).items()}

    monkeypatch.setattr(fp8, "_products", larger)
    assert refusal(fp8.gemm, ground).endswith(" from the exact product in norm, 0.0312 is allowed")


@pytest.mark.parametrize("kernel", ["torch", "CUTLASS"])
def test_an_fp8_product_with_a_neighbours_scale(kernel: str, ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    right = fp8._products

    def wrong(ground: Ground, x: Any, weight: Any) -> dict[str, torch.Tensor]:
        found = right(ground, x, weight)
        rolled = x.scale.double().roll(1, 0) / x.scale.double()
        return {name: each * rolled if name == kernel else each for name, each in found.items()}

    monkeypatch.setattr(fp8, "_products", wrong)
    said = refusal(fp8.gemm, ground)
    assert said.startswith(f"fp8, 16 tokens, 64 x 128: {kernel}, dense: ") and said.endswith(" beyond its bound")


@pytest.mark.parametrize(
    ("operand", "gradient"), [("right", "of the input"), ("left", "of the input"), ("left", "of the weight")]
)
def test_a_gradient_in_blocks_with_a_neighbours_scale(
    operand: str, gradient: str, ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As scales would lie that torch reads in another order."""
    right = CpuKernels.product

    def wrong(self: CpuKernels, *given: QuantisedWeight) -> torch.Tensor:
        codes = dict(zip(("left", "right"), given, strict=True))
        if (codes["right"].block[0] == 1) == (gradient == "of the weight"):
            spoilt = codes[operand]
            codes[operand] = dataclasses.replace(spoilt, scale=spoilt.scale.roll(1, 1))
        return right(self, codes["left"], codes["right"])

    monkeypatch.setattr(CpuKernels, "product", wrong)
    said = refusal(fp8.backward, ground)
    assert said.startswith(f"150 tokens, 200 x 300: gradient {gradient}: ")


def test_log_probs_in_bf16(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    from appliance.trainer.worker import LogProbs

    right = LogProbs.apply
    monkeypatch.setattr(LogProbs, "apply", lambda x_TV, label_T: right(x_TV, label_T).bfloat16().float())
    assert refusal(attention.log_probs, ground).startswith("a log-prob is ")


def test_a_gradient_of_log_probs_without_the_label(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    from appliance.trainer.worker import LogProbs

    def backward(ctx: Any, grad_T: torch.Tensor) -> tuple[torch.Tensor, None]:
        x_TV, _ = ctx.saved_tensors
        return (-grad_T[:, None] * x_TV.softmax(dim=-1, dtype=torch.float32)).to(x_TV.dtype), None

    monkeypatch.setattr(LogProbs, "backward", staticmethod(backward))
    assert refusal(attention.log_probs, ground).startswith("a gradient is ")


def test_attention_of_another_scale(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    right = functional.scaled_dot_product_attention
    monkeypatch.setattr(
        functional, "scaled_dot_product_attention", lambda *each, **given: right(*each, **(given | {"scale": 1.0}))
    )
    assert refusal(attention.packed, ground).startswith("4 heads of 16, 2 of keys: answers: ")


def test_packed_attention_that_sees_the_sequence_before(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    from appliance.trainer.attention import Sequences

    right = Sequences.from_positions
    monkeypatch.setattr(Sequences, "from_positions", lambda positions_T: right(torch.arange(len(positions_T))))
    assert refusal(attention.packed, ground).startswith("4 heads of 16, 2 of keys: answers: ")
