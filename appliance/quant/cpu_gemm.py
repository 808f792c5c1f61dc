"""What multiplies on a CPU: rollouts and training do it with the same code, chosen in the same way. INT8: by vLLM's CPU
library, which loads in a process without vLLM. FP8 is emulated.

`sgl`: its packed kernel of AVX-512 VNNI. On a host without AMX it packs a weight several times faster than oneDNN
(whose reorder with compensation has no fast version there) and multiplies as fast, as long as 32 tokens and 32 rows of
codes fit the core's cache together; beyond that it reads everything again and again (docs/results/gemm.md). vLLM itself
takes it on hosts with AMX only. `onednn`: everything else, every host with AMX (one flow takes it from oneDNN), and
FP16, which the packed kernel does not know (it ends the process). `float32`: where oneDNN's answers are wrong, on hosts
without VNNI; seen with AVX2 alone, where each proof found it.

All quantise activations inside and make s = a / 127; the other paths multiply by 1 / s and give the codec's codes;
sgl's multiplies by a 127 / a of its own rounding, so that a code may differ by one where x / s lies within 127 * 2^-23
of a half (x = a / 2 does), and takes a below 1e-7 as 1e-7. Either is within the codec's bound. For a probe
of integers with a = 127 both factors are exactly 1.

FP8: operands of codes p, q and float32 scales s, t; blocks B of the input channels share a scale in either

    y_mn = sum_B s_mB t_nB (sum_{k in B} p_mk q_nk)

with float64 sums. Codes are multiples of 2^-9 of magnitude 448 at most: of up to 2^17 products every partial sum is a
multiple of 2^-18 below 2^35, which float64 has. So the inner sums are exact in any order, and what a kernel does for
another number of tokens or threads changes nothing; scales and blocks follow element by element, in one order. Then
float32, the bias, and one more rounding. In float32 the sums would depend on the batch, and they would be faster.

Legend: M tokens, N output channels, K input channels of this rank's part of the layer.
"""

from __future__ import annotations

import functools
import importlib.util
import platform
import warnings
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from appliance.errors import NumericsError
from appliance.quant.codec import QuantisedWeight, all_finite
from appliance.quant.codec_fp8 import quantise_fp8_tokens, row_blocks, spread_scale, widened_fp8
from appliance.quant.codec_int8 import int8_rows, quantise_int8

LONGEST_PACKED_ROW = 8960
_TILE = 32  # rows and columns: what sgl's kernel takes without a rest
_ONEDNN_CACHED_PRIMITIVES = 32  # as vLLM's kernel has it
_EXACT_PRODUCTS = 1024  # of two codes, of which float32 has every partial sum: 1024 * 127^2 < 2^24
_AT_ONCE = 256  # tokens whose sums in float64 fit a core's cache
_WIDENED_AT_ONCE = 1 << 20  # elements of a weight: 4 MiB in float32 stay in a cache, and take no fresh memory
_FEW_TOKENS = 256  # of more, the product takes so long that a weight may be widened whole
_TINY_SCALE = 2.0**-120  # with those above, 1 / s is finite, whether denormals count or not
_ROWS_OF_A_GROUP = 4  # of a thread: oneDNN sums one row otherwise, with AVX-512 and without its BF16 up to three
_WIDENED_ROWS = 512  # of so many output channels 1024 codes in float32 stay in a cache, and take no fresh memory


@functools.cache
def widened_types() -> frozenset[torch.dtype]:
    """Return the types in which torch's GEMMs on this CPU are slow, since oneDNN has none. With AVX2 alone both are,
    and take 4 to 80 times as long as through float32 (docs/results/widened.md); FP16 is, where a CPU has no
    instructions for it. Without oneDNN nothing is known, and none is."""
    if not torch.backends.mkldnn.is_available():
        return frozenset()
    fast = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    }
    return frozenset(dtype for dtype, is_fast in fast.items() if not is_fast)


def widen_gemms(*, exactly: bool = False) -> None:
    """Have torch's GEMMs of such a type, in this process, widen their operands, sum in float32 as before, and round
    once.

    exactly: so that no row depends on the others: in float64, half as fast; where BF16 needs no widening, vLLM's own
    product gets whole groups of rows. A process that was set so once stays so.
    """
    if widened_types():
        widening = _widening()
        widening.to = torch.float64 if exactly else widening.to
    if exactly and torch.bfloat16 not in widened_types():
        _group_rows()


class _Widening:
    """torch's kernels with wider ones in their place, by torch.library."""

    to = torch.float32

    def __init__(self) -> None:
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning only once for all operators")  # a kernel is replaced
            for name in ("mm", "addmm", "bmm", "baddbmm"):
                call = functools.partial(self._call, torch.library.get_kernel(f"aten::{name}", "CPU"))
                self._library.impl(name, call, "CPU", with_keyset=True, allow_override=True)

    def _call(self, kernel: Any, keys: Any, *operands: Tensor, **factors: float) -> Tensor:
        dtype, left, right = operands[0].dtype, *operands[-2:]
        is_large = right.ndim == 2 and right.numel() > _WIDENED_AT_ONCE and len(left) <= _FEW_TOKENS
        if is_large and dtype in widened_types():
            return self._by_columns(kernel, keys, *operands, **factors)
        wide = [each.to(self.to) for each in operands] if dtype in widened_types() else operands
        result: Tensor = kernel.call_boxed(keys, *wide, **factors)
        return result.to(dtype)

    def _by_columns(self, kernel: Any, keys: Any, *operands: Tensor, **factors: float) -> Tensor:
        """Multiply by columns; of what an `addmm` adds, too, where it has columns."""
        *added, left, right = operands
        wide, count = left.to(self.to), right.shape[1]
        width = max(1, _WIDENED_AT_ONCE // right.shape[0])
        parts = []
        for start in range(0, count, width):
            columns = slice(start, start + width)
            more = [(each[..., columns] if each.shape[-1:] == (count,) else each).to(self.to) for each in added]
            parts.append(
                kernel.call_boxed(keys, *more, wide, right[:, columns].to(self.to), **factors).to(operands[0].dtype)
            )
        return torch.cat(parts, dim=1)


@functools.cache
def _widening() -> _Widening:
    return _Widening()


@functools.cache
def _group_rows() -> torch.library.Library:
    """Patch vLLM's `onednn_mm`, which multiplies in layers and heads in BF16, so that it gets whole groups of rows. The
    result has to be kept: what it replaces comes back with its end."""
    load_kernels()
    library = torch.library.Library("_C", "IMPL")
    kernel = torch.library.get_kernel("_C::onednn_mm", "CPU")

    def call(keys: Any, out_MN: Tensor, x_MK: Tensor, *more: Tensor | None) -> None:
        whole = in_groups(x_MK)
        if whole is x_MK:
            kernel.call_boxed(keys, out_MN, x_MK, *more)
            return
        out = out_MN.new_empty(len(whole), out_MN.shape[-1])
        kernel.call_boxed(keys, out, whole, *more)
        out_MN.copy_(out[: len(x_MK)].view_as(out_MN))

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")  # a kernel is replaced
        library.impl("onednn_mm", call, "CPU", with_keyset=True, allow_override=True)
    return library


def in_groups(x_MK: Tensor) -> Tensor:
    """Append rows of zeros, so that each thread has whole groups; returns x_MK itself where none is missing."""
    missing = -len(x_MK) % (_ROWS_OF_A_GROUP * torch.get_num_threads())
    return pad(x_MK, (0, 0, 0, missing)) if missing else x_MK


def exact_linear(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """Multiply exactly. Returns [T, N] in the type of `x_TK`: what an engine computes under
    `widen_gemms(exactly=True)`, whatever other rows there are. oneDNN must leave out AMX (terms/environment.py)."""
    if x_TK.dtype not in widened_types():
        whole = in_groups(x_TK)
        y_TN = linear(whole, weight_NK, bias_N)
        return y_TN if whole is x_TK else y_TN[: len(x_TK)]
    x, weight = x_TK.double(), weight_NK.double()
    return linear(x, weight, None if bias_N is None else bias_N.double()).to(x_TK.dtype)


@functools.cache
def load_kernels() -> None:
    """Load vLLM's library for this CPU, the one that vLLM itself would load: two of them in one process abort it."""
    if hasattr(torch.ops._C, "rotary_embedding"):
        return
    name = "_C"
    if platform.machine() == "x86_64" and not torch.cpu._is_avx512_bf16_supported():
        name = "_C_AVX512" if torch.cpu._is_avx512_supported() else "_C_AVX2"
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("vllm is not installed")
    torch.ops.load_library(Path(spec.submodule_search_locations[0]) / f"{name}.abi3.so")


def quantise_rows(weight_NK: Tensor, *, into_NK: Tensor) -> QuantisedWeight:
    """Quantise by vLLM's row quantiser on a CPU, whose result should be the codec's: see Int8Proof.

    weight_NK: [N, K] finite, rows whole.  into_NK: [N or more, K] int8, memory for the codes.
    """
    if weight_NK.device.type != "cpu":
        return quantise_int8(weight_NK)
    codes_NK, scale_N1 = into_NK[: len(weight_NK)], torch.empty((len(weight_NK), 1), dtype=torch.float32, device="cpu")
    torch.ops._C.dynamic_scaled_int8_quant(codes_NK, weight_NK.contiguous(), scale_N1, None)
    if not bool((scale_N1 > _TINY_SCALE).all()):
        no_reciprocal = scale_N1.reciprocal().isinf().squeeze(1)  # zero rows and rows of denormals
        codes_NK[no_reciprocal] = quantise_int8(weight_NK[no_reciprocal]).codes_NK
    return int8_rows(codes_NK, scale_N1=scale_N1)


def quantise_weight(
    weight_NK: Tensor, *, known_finite: bool = False, into_NK: Tensor | None = None, tensor_name: str = "a weight"
) -> QuantisedWeight:
    """Quantise as `quantise_rows`, and of activations too. Raises NumericsError when a value is not finite: vLLM's
    quantiser would not notice. tensor_name: it is, for the error."""
    if not (known_finite or all_finite(weight_NK)):
        raise NumericsError(f"{tensor_name} to quantise has a value that is not finite")
    if into_NK is None:
        into_NK = weight_NK.new_empty(weight_NK.shape, dtype=torch.int8)
    return quantise_rows(weight_NK, into_NK=into_NK)


class OneDnnGemm:
    """A packed weight that oneDNN multiplies with.

    The handle keeps the address of the scale tensor, and nothing else does: held here for as long as it lives.
    """

    scale_N1: Tensor
    """Scales, in the very memory that is multiplied with."""

    name = "onednn"

    def __init__(self, codes_NK: Tensor, *, scale_N1: Tensor, dtype: torch.dtype = torch.bfloat16) -> None:
        """Prepare the weights as `process_weights_for_onednn` of vLLM's kernel, without the sum of each row of codes.
        Only asymmetric activations need that; it makes a float32 copy of the codes and takes as long as all the rest of
        a sync's work on a large layer. Remove when: vLLM computes `azp_adj` for asymmetric activations only.

        dtype: of what is multiplied.
        """
        self.scale_N1 = scale_N1
        self._rows = len(codes_NK)
        handle = torch.ops._C.create_onednn_scaled_mm_handler(
            codes_NK.t(), scale_N1, dtype, True, False, _ONEDNN_CACHED_PRIMITIVES
        )
        self._handle = torch.tensor(handle, dtype=torch.int64)
        release = weakref.finalize(self, torch.ops._C.release_dnnl_matmul_handler, handle)
        release.atexit = False  # another thread may still multiply

    def __call__(self, x_MK: Tensor, bias_N: Tensor | None) -> Tensor:
        """Return [M, N] in the type of `x_MK`: quantised per token, multiplied, plus the bias in float32, rounded
        once."""
        codes_MK, scale_M1 = _quantised_tokens(x_MK)
        y_MN = torch.empty((len(x_MK), self._rows), dtype=x_MK.dtype)
        torch.ops._C.onednn_scaled_mm(y_MN, codes_MK, scale_M1, None, None, bias_N, self._handle)
        return y_MN


class WideGemm:
    """A weight as in OneDnnGemm, multiplied in float32: of 1024 products of codes, each below 2^14, every partial sum
    is exact. Codes are widened at every call: no float32 copy of a model is kept."""

    name = "float32"

    def __init__(self, codes_NK: Tensor, *, scale_N1: Tensor) -> None:
        self.scale_N1, self._codes_NK = scale_N1, codes_NK

    def __call__(self, x_MK: Tensor, bias_N: Tensor | None) -> Tensor:
        codes_MK, scale_M1 = _quantised_tokens(x_MK)
        sum_MN = torch.zeros((len(x_MK), len(self._codes_NK)), dtype=torch.float64)
        parts = (each.split(_EXACT_PRODUCTS, dim=1) for each in (codes_MK, self._codes_NK))
        with torch.autocast("cpu", enabled=False):  # a trainer's would round the sums to BF16
            for left_MK, right_NK in zip(*parts, strict=True):
                wide_MK, sums = left_MK.float(), sum_MN.split(_WIDENED_ROWS, dim=1)
                for sum_MR, right_RK in zip(sums, right_NK.split(_WIDENED_ROWS), strict=True):
                    sum_MR += linear(wide_MK, right_RK.float())
        y_MN = sum_MN.mul_(scale_M1.double()).mul_(self.scale_N1.double().t())
        return (y_MN if bias_N is None else y_MN.add_(bias_N.double())).to(x_MK.dtype)


def _quantised_tokens(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [M, K] and scales [M, 1], by vLLM."""
    codes_MK = torch.empty_like(x_MK, dtype=torch.int8)
    scale_M1 = torch.empty((len(x_MK), 1), dtype=torch.float32)
    torch.ops._C.dynamic_scaled_int8_quant(codes_MK, x_MK.contiguous(), scale_M1, None)
    return codes_MK, scale_M1


@functools.cache
def saturates() -> bool:
    """Return whether oneDNN adds pairs of products in 16 bits here, as it does without VNNI: the largest do not fit."""
    load_kernels()
    codes_NK = torch.full((32, 64), 127, dtype=torch.int8)
    gemm = OneDnnGemm(codes_NK, scale_N1=torch.ones(32, 1, dtype=torch.float32))
    answer_MN, exact = gemm(torch.full((1, 64), 127.0, dtype=torch.bfloat16), None).float(), 64 * 127.0**2
    return bool(((answer_MN - exact).abs() > 2.0**-8 * exact).any())


class SglGemm:
    """A weight as in OneDnnGemm, packed for sgl's kernel. Codes and scales are handed over at every call: no address
    outlives its memory."""

    name = "sgl"

    def __init__(self, codes_NK: Tensor, *, scale_N1: Tensor) -> None:
        self.scale_N1 = scale_N1
        self._packed = torch.ops._C.convert_weight_packed(codes_NK)

    def __call__(self, x_MK: Tensor, bias_N: Tensor | None) -> Tensor:
        bias_N = None if bias_N is None else bias_N.float()
        return torch.ops._C.int8_scaled_mm_with_quant(x_MK, self._packed, self.scale_N1, bias_N, x_MK.dtype, True)


def fp8_product(left: QuantisedWeight, right: QuantisedWeight) -> Tensor:
    """Return [M, N] float32: left [M, K] times right [N, K] transposed, each element by itself.

    Both have blocks of as many input channels, or of all, and `left` of one row. Inside: T of the rows of the left one,
    R of the right one's, B blocks.
    """
    columns = left.codes_NK.shape[1]
    width = min(left.block[1], columns)
    left_MK, product_MN = widened_fp8(left.codes_NK).double(), []
    for part in row_blocks(right):
        right_RK = widened_fp8(part.codes_NK).double()
        scale_BR = spread_scale(part.scale, block=(part.block[0], 1), shape=(len(right_RK), -1)).double().t()
        sums = []
        for own_TK, scale_TB in zip(left_MK.split(_AT_ONCE), left.scale.double().split(_AT_ONCE), strict=True):
            sum_TR: Tensor | None = None
            for place, start in enumerate(range(0, columns, width)):
                block = slice(start, start + width)
                one_TR = linear(own_TK[:, block], right_RK[:, block])
                one_TR.mul_(scale_TB[:, place : place + 1]).mul_(scale_BR[place])
                sum_TR = one_TR if sum_TR is None else sum_TR.add_(one_TR)
            sums.append(sum_TR.float())
        product_MN.append(torch.cat(sums))
    return torch.cat(product_MN, dim=1)


def multiply_fp8(x_MK: Tensor, weight: QuantisedWeight, bias_N: Tensor | None) -> Tensor:
    """Multiply by an FP8 weight. Returns [M, N] in the type of `x_MK`: quantised per token, multiplied, plus the bias
    in float32, rounded once more.

    A token that is not finite stays so, as in a kernel.
    """
    y_MN = fp8_product(quantise_fp8_tokens(x_MK, scheme=weight.scheme, finite=False), weight)
    return (y_MN if bias_N is None else y_MN + bias_N.float()).to(x_MK.dtype)


def packed(codes_NK: Tensor, *, scale_N1: Tensor, dtype: torch.dtype) -> OneDnnGemm | SglGemm | WideGemm:
    """Pack a weight for the kernel that multiplies it on this host. dtype: of what is multiplied."""
    kind = kernel_of(*codes_NK.shape, dtype=dtype)
    if kind is OneDnnGemm:
        return OneDnnGemm(codes_NK, scale_N1=scale_N1, dtype=dtype)
    return kind(codes_NK, scale_N1=scale_N1)


def kernel_of(rows: int, columns: int, *, dtype: torch.dtype = torch.bfloat16) -> type[OneDnnGemm | SglGemm | WideGemm]:
    """Return the kernel that multiplies a weight of this shape on this host."""
    if dtype is torch.bfloat16 and packs_quickly(rows, columns):
        return SglGemm
    return WideGemm if saturates() else OneDnnGemm


def packs_quickly(rows: int, columns: int) -> bool:
    """Return whether a weight of this shape gets sgl's kernel on this host, in BF16."""
    return rows % _TILE == 0 and columns % _TILE == 0 and columns <= LONGEST_PACKED_ROW and has_packed_kernel()


@functools.cache
def has_packed_kernel() -> bool:
    """Return whether sgl's kernel runs here: it is compiled for AVX-512 with VNNI and BF16 and checks nothing. AMX is
    read from the processor itself, as `_is_amx_tile_supported` is patched in engines."""
    load_kernels()
    return (
        platform.machine() == "x86_64"
        and hasattr(torch.ops._C, "convert_weight_packed")
        and torch.cpu._is_vnni_supported()
        and torch.cpu._is_avx512_bf16_supported()
        and not torch.cpu.get_capabilities().get("amx_tile", False)
    )
