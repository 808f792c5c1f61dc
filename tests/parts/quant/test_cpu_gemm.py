"""What multiplies INT8 codes on this CPU, against integers."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from appliance.quant.codec_int8 import quantise_int8
from appliance.quant.cpu_gemm import OneDnnGemm, WideGemm, load_kernels, packed, saturates


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns"), [(64, 128), (96, 352), (40, 3000), (1040, 96)])
@pytest.mark.parametrize("wide", [True, False])
def test_it_answers_as_integers_do(dtype: torch.dtype, rows: int, columns: int, wide: bool) -> None:
    """The largest codes too, of which oneDNN without VNNI adds two in 16 bits. Of integers of which one is 127 the
    codes are they. Exact but for four roundings to float32 and one to `dtype`."""
    load_kernels()
    generator = torch.Generator().manual_seed(columns)
    weight_NK = (0.02 * torch.randn(rows, columns, generator=generator)).to(dtype)
    weight_NK[0] = weight_NK[1].abs().amax()
    quantised = quantise_int8(weight_NK)
    probe_MK = torch.randint(-127, 128, (5, columns), generator=generator)
    probe_MK[0], probe_MK[:, 0] = 127, 127
    make = WideGemm if wide else packed
    gemm = make(quantised.codes_NK, scale_N1=quantised.scale, **({} if wide else {"dtype": dtype}))
    exact_MN = (probe_MK @ quantised.codes_NK.long().t()).double() * quantised.scale.double().t()
    bias_N = -exact_MN[1].to(dtype)
    for bias, autocast in ((None, False), (bias_N, False), (bias_N, True)):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            answer_MN = gemm(probe_MK.to(dtype), bias).double()
        wanted_MN = exact_MN if bias is None else exact_MN + bias.double()
        half = 2.0**-8 if dtype is torch.bfloat16 else 2.0**-11
        assert bool(
            ((answer_MN - wanted_MN).abs() <= 4 * 2.0**-24 * exact_MN.abs() + half * wanted_MN.abs() + 2.0**-24).all()
        )


def test_whether_it_saturates_is_asked_in_an_engine_too() -> None:
    """Whose default type, while it loads, is that of its model."""
    saturates.cache_clear()
    torch.set_default_dtype(torch.bfloat16)
    try:
        saturates()
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_kernel_that_saturates_is_not_taken() -> None:
    codes_NK = torch.full((32, 64), 127, dtype=torch.int8)
    gemm = packed(codes_NK, scale_N1=torch.ones(32, 1), dtype=torch.float16)
    assert isinstance(gemm, WideGemm if saturates() else OneDnnGemm)


def test_a_kernel_is_asked_for_while_a_model_is_loaded() -> None:
    """vLLM makes the model's type the usual one meanwhile."""
    answer = saturates()
    saturates.cache_clear()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert saturates() == answer
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_packed_weight_is_given_back_with_its_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    load_kernels()
    released: list[int] = []
    monkeypatch.setattr(torch.ops._C, "release_dnnl_matmul_handler", released.append)
    gemm = OneDnnGemm(torch.ones(32, 64, dtype=torch.int8), scale_N1=torch.ones(32, 1))
    handle = gemm._handle.item()
    assert released == []
    del gemm
    assert released == [handle]


def test_a_program_that_ends_with_one_says_nothing() -> None:
    program = """
import torch
from appliance.quant.cpu_gemm import OneDnnGemm, load_kernels
load_kernels()
gemm = OneDnnGemm(torch.ones(32, 64, dtype=torch.int8), scale_N1=torch.ones(32, 1))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
