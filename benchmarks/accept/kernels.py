"""Kernels against references: the codec, exact integers, float64.

Legend: M tokens, N output channels, K input channels.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
from torch import Tensor

from appliance.errors import NumericsError
from appliance.quant.codec import QuantisedWeight
from appliance.quant.codec_int8 import quantise_int8
from appliance.sync.manifest import digest
from benchmarks.accept.ground import Ground

U = 2.0**-24  # half a unit of float32, relative
BF16_U = 2.0**-8  # BF16 rounds by at most so much, relative


def seeded(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


def seconds_of(ground: Ground, call: Callable[[], object], *, times: int = 5) -> float:
    """The least of so many, after one that does not count."""

    def wait() -> None:
        if not ground.rehearsal:
            torch.cuda.synchronize()

    times_s = []
    for _ in range(times + 1):
        wait()
        started = time.perf_counter()
        call()
        wait()
        times_s.append(time.perf_counter() - started)
    return min(times_s[1:])


def digests(ground: Ground) -> None:
    """The same integers on both sides, also of tensors that fill no row of the product, and of every type."""
    dtypes = {str(dtype): dtype for dtype in (torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn)}
    ground.run_parts(dtypes, lambda name: _digests(ground, dtypes[name]))
    large = torch.zeros(ground.size(1 << 30, tiny=1 << 22), dtype=torch.uint8, device=ground.device)
    ground.figure("digests", large.nbytes / seconds_of(ground, lambda: digest(large)) / 1e9, "GB/s")


def _digests(ground: Ground, dtype: torch.dtype) -> None:
    for shape in ((7,), (129, 4099), (1024, 1024)):
        size = torch.Size(shape).numel() * dtype.itemsize
        here = torch.randint(0, 256, (size,), generator=seeded(size), dtype=torch.uint8).view(dtype).view(shape)
        there = here.to(ground.device, copy=True)
        expected = digest(here)
        ground.hold(digest(there) == expected, f"the digest of {list(shape)} is another one on the GPU")
        there.view(torch.uint8).view(-1)[size // 2] ^= 1
        ground.hold(digest(there) != expected, f"one bit of {list(shape)} is another one, its digest is not")


def int8_quantiser(ground: Ground) -> None:
    """What an engine quantises with: Triton's kernel, and for the widest rows the codec on the device."""
    from appliance.engine.int8 import quantise_for_kernel

    if ground.rehearsal:
        ground.stand_in("Triton's INT8 quantiser: vLLM's own for CPUs")
    shapes = ground.size(
        ((1, 1), (3, 7), (129, 896), (128, 4864), (33, 5120), (17, 18944), (9, 27648), (5, 32768), (3, 40000)),
        tiny=((1, 1), (3, 7), (129, 896), (3, 40000)),
    )
    cases: dict[str, Callable[[], None]] = {
        f"{rows} x {columns} {dtype}": functools.partial(_codes, ground, rows, columns, dtype)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for rows, columns in shapes
    }
    cases["every finite BF16 value"] = functools.partial(_every_value, ground, quantise_for_kernel)
    cases["a part of a row"] = functools.partial(_part_of_a_row, ground, quantise_for_kernel)
    cases["not finite"] = functools.partial(_not_finite, ground, quantise_for_kernel)
    ground.run_parts(cases, lambda name: cases[name]())


def _codes(ground: Ground, rows: int, columns: int, dtype: torch.dtype) -> None:
    from appliance.engine.int8 import quantise_for_kernel

    weight_NK = torch.randn(rows, columns, generator=seeded(columns)).to(dtype)
    weight_NK[rows // 2] *= 0 if rows > 2 else 1
    weight_NK[-1] *= 2.0**-20  # float16: denormals
    expected = quantise_int8(weight_NK)
    found = quantise_for_kernel(weight_NK.to(ground.device))
    ground.hold(torch.equal(found.scale.cpu(), expected.scale), "scales are not the codec's")
    differ = int((found.codes_NK.cpu() != expected.codes_NK).sum())
    ground.hold(not differ, f"{differ} codes are not the codec's")


def _every_value(ground: Ground, quantise: Callable[..., QuantisedWeight]) -> None:
    every_N = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    every_NK = torch.stack([each := every_N[torch.isfinite(every_N)], torch.ones_like(each)], dim=1)
    same = torch.equal(quantise(every_NK.to(ground.device)).codes_NK.cpu(), quantise_int8(every_NK).codes_NK)
    ground.hold(same, "some value beside 1 has another code than the codec's")


def _not_finite(ground: Ground, quantise: Callable[..., QuantisedWeight]) -> None:
    for bad in (float("nan"), float("inf"), float("-inf")):
        weight_NK = torch.ones(4, 64, dtype=torch.bfloat16)
        weight_NK[2, 63] = bad
        try:
            quantise(weight_NK.to(ground.device))
        except NumericsError:
            ground.hold(True, "")
        else:
            ground.hold(False, f"a weight with {bad} was quantised")


def _part_of_a_row(ground: Ground, quantise: Callable[..., QuantisedWeight]) -> None:
    """A rank of a row-parallel layer has some columns and the largest values of all: its codes are the whole's."""
    weight_NK = torch.randn(64, 512, generator=seeded(1)).to(torch.bfloat16)
    expected = quantise_int8(weight_NK)
    absmax_N1 = weight_NK.float().abs().amax(dim=1, keepdim=True)
    found = quantise(weight_NK[:, :256].to(ground.device), absmax=absmax_N1.to(ground.device))
    same = torch.equal(found.codes_NK.cpu(), expected.codes_NK[:, :256])
    ground.hold(same, "the codes of a half of each row are not the half of its codes")


def int8_gemm(ground: Ground) -> None:
    """Integers that quantise to themselves, so that the exact answer is known: as the proof of a sync asks.

    x_k in -127..127 with one +-127 in each token: its scale is 1. Allowed is what float32 rounds (the sum of products,
    the product with the scale, the bias: 4 u of the product and the bias), and BF16 after it.
    """
    sizes = ground.size(
        ((1, 896, 896), (16, 1152, 896), (64, 896, 4864), (333, 3584, 3584), (1, 896, 18944), (1024, 5120, 5120)),
        tiny=((1, 128, 64), (16, 96, 128), (33, 160, 352)),
    )
    cases = {f"{tokens} tokens, {rows} x {columns}": (tokens, rows, columns) for tokens, rows, columns in sizes}
    ground.run_parts(cases, lambda name: _int8_gemm(ground, *cases[name]))


def _int8_gemm(ground: Ground, tokens: int, rows: int, columns: int) -> None:
    generator = seeded(tokens + rows)
    codes_NK = torch.randint(-127, 128, (rows, columns), generator=generator, dtype=torch.int8)
    scale_N1 = (torch.rand(rows, 1, generator=generator) + 0.5) * 2.0**-10
    x_MK = torch.randint(-127, 128, (tokens, columns), generator=generator).to(torch.bfloat16)
    x_MK[torch.arange(tokens), torch.randint(0, columns, (tokens,), generator=generator)] = 127
    for bias_N in (None, torch.randn(rows, generator=generator).to(torch.bfloat16)):
        found_MN = _int8_product(ground, x_MK, codes_NK, scale_N1=scale_N1, bias_N=bias_N)
        exact_MN = (x_MK.double() @ codes_NK.double().t()) * scale_N1.double().t()
        added_N = torch.zeros(rows).double() if bias_N is None else bias_N.double()
        wanted_MN = exact_MN + added_N
        bound_MN = 4 * U * (exact_MN.abs() + added_N.abs()) + BF16_U * wanted_MN.abs()
        excess = float(((found_MN - wanted_MN).abs() - bound_MN).max())
        named = "without a bias" if bias_N is None else "with a bias"
        ground.hold(excess <= 0, f"{named}: an answer is {excess:.3g} further from the exact one than rounding goes")


def _int8_product(ground: Ground, x_MK: Tensor, codes_NK: Tensor, *, scale_N1: Tensor, bias_N: Tensor | None) -> Tensor:
    """[M, N] float64 on the CPU, by CUTLASS, on a CPU by the kernel of its engines."""
    from vllm import _custom_ops

    if ground.rehearsal:
        from appliance.quant.cpu_gemm import kernel_of, load_kernels

        load_kernels()
        kind = kernel_of(*codes_NK.shape)
        ground.stand_in(f"CUTLASS's INT8 product: {kind.name} on this CPU")
        return kind(codes_NK, scale_N1=scale_N1)(x_MK, bias_N).double()
    x_MK, codes_NK, scale_N1 = (each.to(ground.device) for each in (x_MK, codes_NK, scale_N1))
    held_MK, scale_M1, _ = _custom_ops.scaled_int8_quant(x_MK, symmetric=True)
    ground.hold(torch.equal(held_MK.to(x_MK.dtype), x_MK), "integers up to 127 do not quantise to themselves")
    bias_N = None if bias_N is None else bias_N.to(ground.device)
    found_MN = _custom_ops.cutlass_scaled_mm(
        held_MK, codes_NK.t(), scale_a=scale_M1, scale_b=scale_N1, out_dtype=torch.bfloat16, bias=bias_N
    )
    return found_MN.double().cpu()
