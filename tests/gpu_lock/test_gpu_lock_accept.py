"""Rows of `appliance accept` as a GPU runs them, past what stands in for kernels in a rehearsal: they call vLLM's
operators by name, at real sizes, with torch in the operators' place (hopper.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from appliance.quant.codec_int8 import quantise_int8
from benchmarks.accept import fp8, kernels
from benchmarks.accept.ground import Ground, RowFailed

pytestmark = pytest.mark.usefixtures("hopper")


@pytest.fixture
def ground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ground:
    """No rehearsal, and its device is the CPU."""
    monkeypatch.setattr(Ground, "device", torch.device("cpu"))
    return Ground(row="a-row", folder=tmp_path, rehearsal=False)


@pytest.mark.parametrize("row", [kernels.int8_gemm, fp8.quantisers, fp8.gemm], ids=lambda row: row.__name__)
def test_a_row_passes(row: Callable[[Ground], None], ground: Ground) -> None:
    row(ground)
    assert ground.checks > 0 and not ground.stand_ins


def test_a_product_without_its_bias_fails(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked is the operator, not what stands in for it in a rehearsal."""
    from vllm import _custom_ops

    right = _custom_ops.cutlass_scaled_mm
    monkeypatch.setattr(_custom_ops, "cutlass_scaled_mm", lambda *each, bias, **given: right(*each, **given))
    with pytest.raises(RowFailed, match="with a bias: an answer is "):
        kernels._int8_gemm(ground, 16, 128, 96)


def test_each_kernel_that_is_timed_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within what INT8 and FP8 round: E4M3's largest step is a sixteenth of a value, and sums average it out."""
    from benchmarks import gemm  # it loads vLLM, which then must find the driver's stand-in

    monkeypatch.setattr("appliance.quant.triton_int8.quantise_int8_triton", quantise_int8)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    weight_NK, x_MK = torch.randn(256, 352).to(torch.bfloat16), torch.randn(16, 352).to(torch.bfloat16)
    wanted_MN = x_MK.double() @ weight_NK.double().t()
    packers = gemm._on_gpu(weight_NK)
    assert list(packers) == ["bf16", "int8", "fp8"]
    for pack in packers.values():
        found_MN = pack()(x_MK).double()
        assert float((found_MN - wanted_MN).norm() / wanted_MN.norm()) < 1 / 16
