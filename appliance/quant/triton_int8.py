"""The INT8 codec as one Triton kernel: a weight is read once, and its codes and scales are written once.

A program takes whole rows: absmax, scale, codes. The codes are written row by row, [N, K], which is the layout that
the INT8 GEMMs want (CUTLASS and Triton multiply by the transposed view). Bit for bit the codec of `quant.codec_int8`:

* both divisions are correctly rounded (`div_rn`; Triton's `/` on float32 is not),
* no multiplication is fused with an addition (`enable_fp_fusion=False`),
* rounding half to even is done by adding and subtracting 1.5 * 2^23, exact for |x| <= 2^22.

Legend: N output channels (rows), K input channels.  Needs CUDA, or Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from appliance.errors import NumericsError
from appliance.quant.codec import QuantisedWeight
from appliance.quant.codec_int8 import INT8_MAX, int8_rows

WIDEST_ROW = 1 << 15  # a row lives in the registers of one program: 32 values in each of 1024 threads
_VALUES_PER_THREAD = 32
_THREADS_PER_WARP = 32
_MOST_WARPS = 32
_TO_INTEGER = tl.constexpr(1.5 * 2**23)


@triton.jit
def _row_kernel(
    weight, codes, scale, absmax, K, stride_weight, stride_codes, HAS_ABSMAX: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    inside = k < K
    w = tl.load(weight + row * stride_weight + k, mask=inside, other=0.0).to(tl.float32)
    if HAS_ABSMAX:
        largest = tl.load(absmax + row)
    else:
        # A NaN would be lost in `max`: it becomes infinity, which the caller refuses.
        magnitude = tl.abs(w)
        largest = tl.max(tl.where(magnitude == magnitude, magnitude, float("inf")), axis=0)
    s = tl.div_rn(largest, 127.0)
    r = tl.where(s > 0, tl.div_rn(1.0, tl.where(s > 0, s, 1.0)), 0.0)
    x = w * r
    x = tl.where(x == x, x, 0.0)  # 0 * inf in a row of denormals
    x = tl.minimum(tl.maximum(x, -127.0), 127.0)
    x = (x + _TO_INTEGER) - _TO_INTEGER
    tl.store(codes + row * stride_codes + k, x.to(tl.int8), mask=inside)
    tl.store(scale + row, s)


def quantise_int8_triton(weight_NK: Tensor, *, absmax: Tensor | None = None) -> QuantisedWeight:
    """Quantise as `quantise_int8`, in one read and one write.

    weight_NK: [N, K] bfloat16, float16 or float32, rows contiguous, K <= WIDEST_ROW.  absmax: [N, 1] float32, of
    the full row where this is a slice of it.  Raises NumericsError when a value is not finite, ValueError for a row
    that is too wide.
    """
    N, K = weight_NK.shape
    if K > WIDEST_ROW or weight_NK.stride(1) != 1:
        raise ValueError(f"rows of at most {WIDEST_ROW} contiguous values are needed, got {K}")
    codes_NK = torch.empty((N, K), dtype=torch.int8, device=weight_NK.device)
    scale_N1 = torch.empty((N, 1), dtype=torch.float32, device=weight_NK.device)
    block = triton.next_power_of_2(K)
    warps = min(_MOST_WARPS, max(1, block // (_VALUES_PER_THREAD * _THREADS_PER_WARP)))
    _row_kernel[(N,)](
        weight_NK,
        codes_NK,
        scale_N1,
        scale_N1 if absmax is None else absmax.contiguous(),
        K,
        weight_NK.stride(0),
        codes_NK.stride(0),
        HAS_ABSMAX=absmax is not None,
        BLOCK=block,
        num_warps=warps,
        enable_fp_fusion=False,
    )
    if not bool(torch.isfinite(scale_N1).all()):
        raise NumericsError("a weight to quantise has a value that is not finite")
    return int8_rows(codes_NK, scale_N1=scale_N1)


assert INT8_MAX == 127  # written out in the kernel
