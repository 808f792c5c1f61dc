"""The fused kernel against the codec, bit for bit. Without CUDA it runs in Triton's interpreter."""

import importlib.util
import os

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed: the CPU lock leaves it out", allow_module_level=True)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from appliance.errors import NumericsError
from appliance.quant.codec_int8 import quantise_int8
from appliance.quant.triton_int8 import WIDEST_ROW, quantise_int8_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def assert_same(weight_NK: torch.Tensor, *, absmax: torch.Tensor | None = None) -> None:
    """The reference runs on the CPU: its float operations are IEEE's, whatever the device."""
    quantised = quantise_int8_triton(weight_NK.to(DEVICE), absmax=None if absmax is None else absmax.to(DEVICE))
    wanted = quantise_int8(weight_NK, absmax=absmax)
    assert torch.equal(quantised.scale.cpu().view(torch.int32), wanted.scale.view(torch.int32))
    assert torch.equal(quantised.codes_NK.cpu(), wanted.codes_NK)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(64, 1000), (33, 4096), (5, 129), (2, 18944), (3, 1)])
def test_kernel_equals_codec(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight_NK = (torch.randn(shape) * torch.logspace(-6, 2, shape[0])[:, None]).to(dtype)
    weight_NK[0] = 0
    assert_same(weight_NK)


def test_kernel_equals_codec_on_every_bfloat16() -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for absmax in (1.0, 127.0, 3.3, 1e-3):
        values = every[every.abs() <= absmax]
        rows = values[: len(values) // 16 * 16].reshape(16, -1)
        rows = torch.cat([rows, torch.full((16, 1), absmax, dtype=torch.bfloat16)], dim=1)
        assert_same(rows)


def test_kernel_takes_the_scale_of_the_whole_row() -> None:
    torch.manual_seed(0)
    whole_NK = torch.randn(16, 512).to(torch.bfloat16)
    assert_same(whole_NK[:, :256].contiguous(), absmax=whole_NK.abs().amax(dim=1, keepdim=True).float())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_kernel_refuses_what_is_not_finite(value: float) -> None:
    weight_NK = torch.randn(4, 64, device=DEVICE)
    weight_NK[2, 3] = value
    with pytest.raises(NumericsError):
        quantise_int8_triton(weight_NK)


def test_kernel_refuses_rows_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="at most"):
        quantise_int8_triton(torch.zeros(1, WIDEST_ROW + 1, device=DEVICE))
