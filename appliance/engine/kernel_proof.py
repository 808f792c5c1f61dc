"""Whether a layer's kernel computes with the tensors that were received: one probe input, two answers.

Each proof takes the checkpoint's tensors as they arrive and keeps only what the layer must answer (N numbers); after
the update the layer's own method is asked the same. What vLLM did in between (loaders, quantisation, packing, copies
into old memory, handles with addresses) has no part in the expected answer.

Legend: N output channels, K input channels of this rank's part of the layer; M probe tokens.

INT8, exact. The probe is one token of integers x_k, 64 <= |x_k| <= 127 with pseudo-random signs, one of them +-127:
its scale is 127/127 = 1, its codes are the x_k, and the kernel's answer is s_n * T_n with T_n = sum_k x_k q_nk, an
integer. The answer comes in BF16, so the bias -bf16(s_n T_n) goes in with it, which the kernels add in float32: what
comes out is the small rest. Bound of the rest, u = 2^-24: T_n to float32, the product with s_n and the sum are rounded
to u each, the result to BF16 (2^-9 of it); twice that is allowed:

    |rest - exact rest| <= 4 u |s_n T_n| + 2^-8 |exact rest|,      |exact rest| <= 2^-9 |s_n T_n|

One code that is off by one moves the rest by at least 64 s_n: it is seen with certainty as long as |T_n| < 2^23 (a row
of 27648 codes of typical size has |T_n| near 5e5). Several wrong codes of one row cancel for one in about 128 probes at
most, and each sync has another probe. The scale is compared bit for bit where the kernel reads it.

FP8, emulated. Codes and scales lie in the layer. All scales and the codes of a rotating eighth of the rows (in blocks
of 128, at least one) are compared exactly. In a full proof (schedule.py) all rows are, and the method answers a probe
of signs x_k = +-1 within float32's bound for a sum of K terms, twice K u sum_k |w'_nk|, and BF16's rounding.

BF16. Signs on 64 neighbouring columns that move on from round to round, zeros elsewhere, with the bias trick: bound
2 * 64 u sum |w_nk| plus 2^-8 of the rest. It sees a weight of ordinary size in these columns that is off by one unit of
BF16, so a packed copy that stayed behind, is another layer's or another part of the tensor.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import linear
from vllm import _custom_ops as ops

from appliance.engine.expect import LocalShape, Slot, rounded
from appliance.engine.schedule import ROTATION, Ask
from appliance.errors import SyncError
from appliance.quant.codec import Int8Weight, dequantise, quantise_int8, weight_absmax
from appliance.quant.codec_fp8 import BLOCK, fp8_scale, quantise_fp8
from appliance.quant.digest import digest
from appliance.quant.scheme import Scheme

U = 2.0**-24  # half a unit of float32, relative
BF16_U = 2.0**-8  # a unit of BF16 (twice its rounding error), relative
TINY = 1e-35  # products of denormals may be flushed
COLUMNS = 64
_CHUNK_ELEMENTS = 1 << 20  # 2 MiB of BF16: codes are still in the core's cache when they are multiplied


@dataclass(frozen=True)
class Mismatch:
    """What a kernel has or gives, and what the tensor received gives. bound: on their difference."""

    what: str
    kernel: float | str
    expected: float | str
    bound: float = 0.0

    def __str__(self) -> str:
        allowed = f" (allowed difference {self.bound:.3g})" if self.bound else ""
        numbers = f"there is {_shown(self.kernel)}, the tensor received gives {_shown(self.expected)}"
        return f"{self.what}: {numbers}{allowed}"


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.9g}"


class KernelProof(ABC):
    """Of one layer in one sync: `take` every tensor of its weight, then `check`.

    What it keeps is on the CPU, whatever torch's default device is.
    """

    def __init__(self, name: str, *, shape: LocalShape, scheme: Scheme, ask: Ask) -> None:
        self.name = name
        self.num_channels, self.length = shape.channels, shape.length
        self._generator = torch.Generator("cpu").manual_seed(zlib.crc32(f"{name} {ask.sync}".encode()))

    @abstractmethod
    def take(self, slot: Slot, tensor: Tensor) -> None:
        """tensor: whole, as received.  Raises NumericsError."""

    @abstractmethod
    def check(self, layer: Module) -> Mismatch | None:
        """What differs first, or None."""

    def _signs(self, count: int) -> Tensor:
        return self._integers(0, 2, count=count) * 2 - 1

    def _integers(self, low: int, high: int, *, count: int) -> Tensor:
        return torch.randint(low, high, (count,), generator=self._generator, device="cpu")


class Int8Proof(KernelProof):
    def __init__(self, name: str, *, shape: LocalShape, scheme: Scheme, ask: Ask) -> None:
        super().__init__(name, shape=shape, scheme=scheme, ask=ask)
        self.probe_K = self._integers(COLUMNS, 128, count=self.length) * self._signs(self.length)
        self.probe_K[ask.sync % self.length] = 127
        self._sums_N = torch.zeros(self.num_channels, dtype=torch.float64, device="cpu")
        self._scale_N = torch.zeros(self.num_channels, dtype=torch.float32, device="cpu")

    def take(self, slot: Slot, tensor: Tensor) -> None:
        whole_NK = rounded(tensor[slot.rows])
        probe_K = self.probe_K.to(whole_NK.device, torch.int8)
        rows = max(1, _CHUNK_ELEMENTS // whole_NK.shape[1])
        sample = _Sample(whole_NK, rows=rows, generator=self._generator)
        for start in range(0, len(whole_NK), rows):
            quantised = quantise_rows(whole_NK[start : start + rows])
            sample.keep(quantised, start=start)
            part = slice(slot.start + start, slot.start + start + len(quantised.codes_NK))
            self._sums_N[part] = exact_product(quantised.codes_NK[:, slot.columns], probe_K)
            self._scale_N[part] = quantised.scale_N1.squeeze(1).cpu()
        sample.check(self.name)

    def check(self, layer: Module) -> Mismatch | None:
        held_N = layer.quant_method.held_scale(layer).reshape(-1).cpu()
        return _first_scale(held_N, self._scale_N) or self._first_answer(layer)

    def _first_answer(self, layer: Module) -> Mismatch | None:
        exact_N = self._sums_N * self._scale_N.double()
        bias_N = -exact_N.to(torch.bfloat16)
        rest_N = answer(layer, self.probe_K[None], bias_N=bias_N)[0]
        wanted_N = exact_N + bias_N.double()
        return _first(rest_N, wanted_N, bound_N=4 * U * exact_N.abs() + BF16_U * wanted_N.abs() + TINY)


class EmulatedProof(KernelProof):
    """Keeps the parts of a fused layer until they are complete: scales may span them."""

    def __init__(self, name: str, *, shape: LocalShape, scheme: Scheme, ask: Ask) -> None:
        super().__init__(name, shape=shape, scheme=scheme, ask=ask)
        self._scheme = scheme
        self._is_cut = shape.is_cut
        self._signs_K = self._signs(self.length)
        self._parts: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._ask = ask
        self._codes: list[tuple[slice, str]] = []
        self._scale = torch.empty(0, device="cpu")

    def take(self, slot: Slot, tensor: Tensor) -> None:
        whole_NK = rounded(tensor)
        self._parts[slot.start] = (slot.cut(whole_NK), self._absmax(slot, whole_NK))
        if sum(len(part) for part, _ in self._parts.values()) == self.num_channels:
            self._expect([self._parts[start] for start in sorted(self._parts)])
            self._parts.clear()

    def _absmax(self, slot: Slot, whole_NK: Tensor) -> Tensor | None:
        """Of the whole tensor, where a scale covers more of it than this rank has."""
        if not self._is_cut or self._scheme is Scheme.FP8_BLOCK:
            return None
        absmax = weight_absmax(whole_NK, scheme=self._scheme)
        return absmax if self._scheme is Scheme.FP8 else absmax[slot.rows]

    def _expect(self, parts: list[tuple[Tensor, Tensor | None]]) -> None:
        weight_NK = torch.cat([part for part, _ in parts]) if len(parts) > 1 else parts[0][0]
        given = [absmax for _, absmax in parts if absmax is not None]
        absmax = torch.cat(given) if given else weight_absmax(weight_NK, scheme=self._scheme)
        if self._scheme is Scheme.FP8:
            absmax = absmax.amax(dim=0, keepdim=True)
        self._scale = fp8_scale(absmax, scheme=self._scheme)
        for rows in self._due_rows():
            codes_NK = quantise_fp8(weight_NK[rows], scheme=self._scheme, absmax=self._of_rows(absmax, rows)).codes_NK
            self._codes.append((rows, digest(codes_NK)))
        if self._ask.full:
            held_NK = dequantise(quantise_fp8(weight_NK, scheme=self._scheme, absmax=absmax))
            self._answer_N = linear(self._signs_K.to(held_NK), held_NK).double().cpu()
            self._bound_N = 2 * self.length * U * held_NK.abs_().sum(dim=1).double().cpu()

    def _due_rows(self) -> list[slice]:
        """Blocks of 128: scales of blocks are never cut."""
        starts = range(0, self.num_channels, BLOCK)
        parts = min(ROTATION, len(starts))
        due = starts if self._ask.full else starts[self._ask.round % parts :: parts]
        return [slice(start, min(start + BLOCK, self.num_channels)) for start in due]

    def _of_rows(self, absmax: Tensor, rows: slice) -> Tensor:
        if self._scheme is Scheme.FP8:
            return absmax
        return absmax[rows.start // BLOCK][None] if self._scheme is Scheme.FP8_BLOCK else absmax[rows]

    def check(self, layer: Module) -> Mismatch | None:
        held = layer.quant_method.held_scale(layer)
        different = _first_scale(held.reshape(-1).cpu(), self._scale.reshape(-1).cpu())
        for rows, expected in self._codes:
            codes = digest(layer.weight.data[rows])
            if different is None and codes != expected:
                different = Mismatch(f"digest of the codes of rows {rows.start} to {rows.stop - 1}", codes, expected)
        return different or (self._first_answer(layer) if self._ask.full else None)

    def _first_answer(self, layer: Module) -> Mismatch | None:
        bias_N = -self._answer_N.to(torch.bfloat16)
        rest_N = answer(layer, self._signs_K[None], bias_N=bias_N)[0]
        wanted_N = self._answer_N + bias_N.double()
        return _first(rest_N, wanted_N, bound_N=self._bound_N + BF16_U * wanted_N.abs() + TINY)


class Bf16Proof(KernelProof):
    """A layer that is not quantised: its kernel may multiply by a packed copy."""

    def __init__(self, name: str, *, shape: LocalShape, scheme: Scheme, ask: Ask) -> None:
        super().__init__(name, shape=shape, scheme=scheme, ask=ask)
        blocks = -(-self.length // COLUMNS)  # the last one ends with the row, and may share columns with its neighbour
        first = min(ask.round % blocks * COLUMNS, max(0, self.length - COLUMNS))
        self._block = slice(first, min(first + COLUMNS, self.length))
        self._probe_K = torch.zeros(self.length, dtype=torch.float32, device="cpu")
        self._probe_K[self._block] = self._signs(len(self._probe_K[self._block])).float()
        self._answer_N = torch.zeros(self.num_channels, dtype=torch.float64, device="cpu")
        self._bound_N = torch.zeros(self.num_channels, dtype=torch.float64, device="cpu")

    def take(self, slot: Slot, tensor: Tensor) -> None:
        few_NB = rounded(slot.cut(tensor)[:, self._block]).float()
        part = slice(slot.start, slot.start + len(few_NB))
        self._answer_N[part] = linear(self._probe_K[self._block].to(few_NB.device), few_NB).double().cpu()
        self._bound_N[part] = 2 * COLUMNS * U * few_NB.abs_().sum(dim=1).double().cpu()

    def check(self, layer: Module) -> Mismatch | None:
        bias_N = -self._answer_N.to(torch.bfloat16)
        rest_N = answer(layer, self._probe_K[None], bias_N=bias_N)[0]
        wanted_N = self._answer_N + bias_N.double()
        return _first(rest_N, wanted_N, bound_N=self._bound_N + BF16_U * wanted_N.abs() + TINY)


def answer(layer: Module, probe_MK: Tensor, *, bias_N: Tensor) -> Tensor:
    """[M, N] float64 on the CPU: what the layer's method makes of a probe, with a bias of ours in place of its own."""
    device = torch.get_default_device()
    out_MN = layer.quant_method.apply(layer, probe_MK.to(device, torch.bfloat16), bias_N.to(device))
    return out_MN.double().cpu()


def quantise_rows(weight_NK: Tensor) -> Int8Weight:
    """What should be the codec's result, by vLLM's row quantiser on a CPU: see _Sample.

    weight_NK: [N, K] BF16, finite, rows whole.
    """
    if weight_NK.device.type != "cpu":
        return quantise_int8(weight_NK)
    codes_NK, scale_N1, _ = ops.onednn_scaled_int8_quant(weight_NK.contiguous(), None, None, True)
    no_reciprocal = scale_N1.reciprocal().isinf().squeeze(1)  # zero rows and rows of denormals
    if bool(no_reciprocal.any()):
        codes_NK[no_reciprocal] = quantise_int8(weight_NK[no_reciprocal]).codes_NK
    return Int8Weight(codes_NK=codes_NK, scale_N1=scale_N1)


class _Sample:
    """Rows of a weight that the codec itself quantises: the engine uses the same quantiser as `quantise_rows`, and an
    error of it would be in both answers. One of every chunk, another one at each sync."""

    def __init__(self, weight_NK: Tensor, *, rows: int, generator: torch.Generator) -> None:
        """rows: of a chunk, but for the last."""
        self._weight_NK = weight_NK
        chunks = -(-len(weight_NK) // rows)
        self._places = torch.rand(chunks, generator=generator, device="cpu").tolist()
        self._rows: list[int] = []
        self._codes: list[Tensor] = []
        self._scale: list[Tensor] = []

    def keep(self, quantised: Int8Weight, *, start: int) -> None:
        """quantised: the next chunk.  start: its first row in the weight."""
        if quantised.codes_NK.device.type == "cpu":
            row = int(self._places[len(self._rows)] * len(quantised.codes_NK))
            self._rows.append(start + row)
            self._codes.append(quantised.codes_NK[row].clone())  # a view would keep the chunk
            self._scale.append(quantised.scale_N1[row])

    def check(self, name: str) -> None:
        """Raises SyncError where the quantiser's numbers are not the codec's."""
        if not self._rows:
            return
        codec = quantise_int8(self._weight_NK[self._rows])
        codes_NK, scale_N1 = torch.stack(self._codes), torch.stack(self._scale)
        if torch.equal(codes_NK, codec.codes_NK) and torch.equal(scale_N1, codec.scale_N1):
            return
        differs_N = ((codes_NK != codec.codes_NK) | (scale_N1 != codec.scale_N1)).any(dim=1)
        row = self._rows[int(differs_N.nonzero()[0])]
        raise SyncError(f"weight update: {name}: this CPU's row quantiser differs from the codec in row {row}")


def exact_product(codes_NK: Tensor, probe_K: Tensor) -> Tensor:
    """[N] float64 on the CPU, exact: |sum| <= K * 127^2 < 2^31 for K < 133000."""
    if codes_NK.device.type == "cpu":
        return torch._int_mm(codes_NK.contiguous(), probe_K[:, None].contiguous())[:, 0].double()
    return (codes_NK.double() @ probe_K.double()).cpu()


def _first(kernel_N: Tensor, expected_N: Tensor, *, bound_N: Tensor) -> Mismatch | None:
    """The channel that is furthest beyond its bound. What is not finite is beyond any."""
    excess_N = torch.nan_to_num((kernel_N - expected_N).abs() / bound_N, nan=torch.inf)
    worst = int(excess_N.argmax())
    if float(excess_N[worst]) <= 1:
        return None
    return Mismatch(
        f"probe, output channel {worst}", float(kernel_N[worst]), float(expected_N[worst]), float(bound_N[worst])
    )


def _first_scale(held: Tensor, expected: Tensor) -> Mismatch | None:
    """Bit for bit: freed memory may hold anything, NaN too."""
    if held.shape != expected.shape:
        return Mismatch("number of scales", float(held.numel()), float(expected.numel()))
    differs = held.view(torch.int32) != expected.view(torch.int32)
    if not bool(differs.any()):
        return None
    index = int(differs.nonzero()[0])
    return Mismatch(f"scale {index}", float(held[index]), float(expected[index]))
