"""Whether a layer's kernel computes with the tensors that were received: one probe input, two answers.

Each proof takes the checkpoint's tensors as they arrive and keeps only what the layer must answer (N numbers); after
the update the layer's own method is asked the same. What vLLM did in between (loaders, quantisation, packing, copies
into old memory, handles with addresses) has no part in the expected answer.

Legend: N output channels, K input channels of this rank's part of the layer; M probe tokens.

INT8, exact. The probe is one token of integers x_k, 64 <= |x_k| <= 127 with pseudo-random signs, one of them +-127:
its scale is 127/127 = 1, its codes are the x_k, and the kernel's answer is s_n * T_n with T_n = sum_k x_k q_nk, an
integer. The answer comes in BF16, so the bias -bf16(s_n T_n) goes in with it, which the kernels add in float32: what
comes out is the small rest. Bound of the rest, u = 2^-24: T_n to float32, the product with s_n and the sum are rounded
to u each, the result to BF16 (2^-8 of it). Allowed is a little more:

    |rest - exact rest| <= 4 u |s_n T_n| + 2^-8 |exact rest|,      |exact rest| <= 2^-8 |s_n T_n|

One code that is off by one moves the rest by at least 64 s_n: it is seen with certainty as long as |T_n| < 2^20 (a row
of 27648 codes of typical size has |T_n| near 5e5). Several wrong codes of one row cancel for one in about 128 probes at
most, and each sync has another probe. The scale is compared bit for bit where the kernel reads it.

BF16, on a CPU. Signs on 64 neighbouring columns that move on from round to round, zeros elsewhere, with the bias trick:
bound 2 * 64 u sum |w_nk| plus 2^-8 of the rest. It sees a weight of ordinary size in these columns that is off by one
unit of BF16, so a packed copy that stayed behind, is another layer's or another part of the tensor.

BF16, on a GPU. A bias may be added to what is rounded already: by vLLM's batch-invariant product always, by cuBLAS for
some shapes (so answered an H200 for a router of 4 experts), and what is split over K may be added up in BF16. So each
of the 64 columns is asked for alone: one weight and zeros have one sum in any order, in FP16 too, and it must be the
weight (a difference of 1e-35 passes: what is smaller may be flushed).

FP16. INT8, and BF16's probe of a CPU: the same with 2^-11 instead of 2^-8, and 2^-24 besides: what is below the
smallest number of FP16 is none. So the scale of a channel must be above 2^-30 for one code to be seen: weights above
2^-23.

A router that its model keeps in FP32, whatever the engine's type: BF16's probe with 2^-24 instead of 2^-8.

FP8: fp8_proof.py.

Which layers an update proves, and how thoroughly. With `every` = n a layer has its turn once in each round of n syncs.
Where a proof looks at a part of a layer (rows, columns) it moves on by one part in each round; INT8's looks at one row
in `parts`. At sync 1 and at the last sync of each ROTATION rounds all layers are asked, and the proof is full: it looks
at all that a layer holds. What is too dear even for that is asked of all layers at sync 1 and then of each in turn, one
in ROTATION at each full proof.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module
from vllm import _custom_ops  # noqa: F401  registers torch.ops._C
from vllm.platforms import current_platform

from appliance.engine.tensor_slots import LocalShape, Slot, round_to_engine
from appliance.errors import SyncError
from appliance.quant.codec import QuantisedWeight
from appliance.quant.codec_int8 import int8_rows, quantise_int8
from appliance.quant.cpu_gemm import quantise_rows
from appliance.terms.schemes import Scheme

U = 2.0**-24  # half a unit of float32, relative
BF16_U = 2.0**-8  # BF16 rounds by at most so much, relative
TINY = 1e-35  # products of denormals may be flushed
# What an answer may be off by, being rounded: relative, and absolute.
ROUNDS = {torch.bfloat16: (BF16_U, TINY), torch.float16: (2.0**-11, 2.0**-24), torch.float32: (U, TINY)}
COLUMNS = 64
ROTATION = 8
_CHUNK_ELEMENTS = 1 << 22  # 4 MiB of codes at once: what is quantised, multiplied and dropped
_SAMPLED_ELEMENTS = 1 << 19  # of so many the codec quantises one row


@dataclass(frozen=True)
class ProofRequest:
    """Request to prove one layer at one sync."""

    sync: int
    round: int
    """Number of rounds of n syncs that are over; it decides which part is checked."""
    full: bool
    thorough: bool
    """Whether this is a full proof in which it is the layer's turn for the checks that cost most."""
    parts: int = 1
    """Number of parts, of which one is looked at: of INT8's rows, and of the experts in BF16."""

    def takes(self, number: int) -> bool:
        """Return whether it is the turn of this row or expert."""
        return number % self.parts == self.round % self.parts


def choose_request(turn: int, *, sync: int, every: int, parts: int = 1, everyone: bool = False) -> ProofRequest | None:
    """Choose what is asked of a layer at an update; None when nothing is. turn: number of the layer.  sync: from 1.
    every, parts: at least 1.

    everyone: all layers fully, as at sync 1.
    """
    number, rest = divmod(sync, ROTATION * every)
    everyone |= sync == 1
    full = everyone or rest == 0
    if not full and (turn - sync) % every != 0:
        return None
    is_turn = rest == 0 and (turn - number) % ROTATION == 0
    return ProofRequest(
        sync=sync, round=sync // every, full=full, thorough=everyone or is_turn, parts=1 if full else parts
    )


@dataclass(frozen=True)
class ProofFault:
    """Difference between what a kernel has or answers and what the tensor received gives."""

    subject: str
    kernel: float | str
    expected: float | str
    bound: float = 0.0
    """Largest difference that is allowed."""
    channel: int | None = None
    """Channel of an answer that is not finite."""

    def __str__(self) -> str:
        allowed = f" (allowed difference {self.bound:.3g})" if self.bound else ""
        sides = (self.kernel, self.expected)
        held, wanted = (side if isinstance(side, str) else f"{side:.9g}" for side in sides)
        return f"{self.subject}: the engine has {held}, the tensor received gives {wanted}{allowed}"


@dataclass(eq=False)
class KernelProof(ABC):
    """Proof of one layer in one sync: `take` every tensor of its weight, then `check`.

    What it keeps is on the CPU, whatever torch's default device is.
    """

    name: str
    shape: LocalShape
    scheme: Scheme
    request: ProofRequest
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        self._generator = torch.Generator("cpu").manual_seed(zlib.crc32(f"{self.name} {self.request.sync}".encode()))

    @abstractmethod
    def take(self, slot: Slot, tensor: Tensor) -> None:
        """Take a tensor of the layer's weight. tensor: whole, as received.  Raises NumericsError."""

    @abstractmethod
    def check(self, layer: Module) -> ProofFault | None:
        """Return the first difference, or None."""

    def _signs(self, count: int) -> Tensor:
        return self._integers(0, 2, count=count) * 2 - 1

    def _integers(self, low: int, high: int, *, count: int) -> Tensor:
        return torch.randint(low, high, (count,), generator=self._generator, device="cpu")


class Int8Proof(KernelProof):
    """Proof of an INT8 layer.

    The engine uses the same quantiser as `quantise_rows`, and an error of it would be in both answers: so the codec
    itself quantises one row of every _SAMPLED_ELEMENTS, another one at each sync (`check_quantiser`).
    """

    samples: list[tuple[range, Tensor, QuantisedWeight]]
    """Samples for the codec: numbers of rows, the rows, their codes and scales."""

    def __post_init__(self) -> None:
        super().__post_init__()
        length = self.shape.length
        self.probe_K = self._integers(COLUMNS, 128, count=length) * self._signs(length)
        self.probe_K[self.request.sync % length] = 127
        self._looks_at_N = torch.zeros(self.shape.channels, dtype=torch.bool, device="cpu")
        self._looks_at_N[self._part :: self.request.parts] = True
        self._sums_N = torch.zeros(self.shape.channels, dtype=torch.float64, device="cpu")
        self._scale_N = torch.zeros(self.shape.channels, dtype=torch.float32, device="cpu")
        self.samples = []

    @property
    def _part(self) -> int:
        return self.request.round % self.request.parts

    def take(self, slot: Slot, tensor: Tensor) -> None:
        parts = self.request.parts
        first = (self._part - slot.start) % parts
        whole_NK = round_to_engine(tensor[slot.rows][first::parts], dtype=self.dtype)
        probe_K = self.probe_K.to(whole_NK.device, torch.int8)
        rows = max(1, _CHUNK_ELEMENTS // whole_NK.shape[1])
        codes_NK = whole_NK.new_empty((min(rows, len(whole_NK)), whole_NK.shape[1]), dtype=torch.int8)
        for start in range(0, len(whole_NK), rows):
            chunk_NK = whole_NK[start : start + rows]
            quantised = quantise_rows(chunk_NK, into_NK=codes_NK)
            beginning = slot.start + first + start * parts
            part = slice(beginning, beginning + len(chunk_NK) * parts, parts)
            if chunk_NK.device.type == "cpu":
                self._sample(chunk_NK, quantised, rows=range(part.start, part.stop, parts))
            self._sums_N[part] = exact_product(quantised.codes_NK[:, slot.columns], probe_K)
            self._scale_N[part] = quantised.scale.squeeze(1).cpu()

    def _sample(self, chunk_NK: Tensor, quantised: QuantisedWeight, *, rows: range) -> None:
        """rows: the chunk's in the layer."""
        height = min(len(chunk_NK), max(1, _SAMPLED_ELEMENTS // chunk_NK.shape[1]))
        first = int(self._integers(0, height, count=1))
        codes = int8_rows(quantised.codes_NK[first::height].clone(), scale_N1=quantised.scale[first::height])
        self.samples.append((rows[first::height], chunk_NK[first::height].clone(), codes))

    def check(self, layer: Module) -> ProofFault | None:
        held_N = layer.quant_method.held_scale(layer).reshape(-1).cpu()
        if held_N.shape != self._scale_N.shape:
            return find_wrong_scale(held_N, self._scale_N)
        scale_N = torch.where(self._looks_at_N, self._scale_N, held_N)
        exact_N = self._sums_N * self._scale_N.double()
        bound_N = torch.where(self._looks_at_N, 4 * U * exact_N.abs(), torch.inf)
        if mismatch := find_wrong_scale(held_N, scale_N):
            return mismatch
        return find_wrong_answer(layer, self.probe_K, exact_N=exact_N, bound_N=bound_N, dtype=self.dtype)


class Bf16Proof(KernelProof):
    """A layer that is not quantised: its kernel may multiply by a packed copy.

    A row with a value that is not finite, wherever, has such an answer: zero times it is NaN."""

    def __post_init__(self) -> None:
        super().__post_init__()
        length = self.shape.length
        blocks = -(-length // COLUMNS)  # the last one ends with the row, and may share columns with its neighbour
        first = min(self.request.round % blocks * COLUMNS, max(0, length - COLUMNS))
        self._block = slice(first, min(first + COLUMNS, length))
        self._probe_K = torch.zeros(length, dtype=torch.float32, device="cpu")
        self._signs_B = self._signs(self._block.stop - self._block.start).float()
        self._probe_K[self._block] = self._signs_B
        self._answer_N = torch.zeros(self.shape.channels, dtype=torch.float32, device="cpu")
        self._magnitude_N = torch.zeros(self.shape.channels, dtype=torch.float32, device="cpu")
        columns = 0 if rounds_once() else self._block.stop - self._block.start
        self._columns_NB = torch.zeros(self.shape.channels, columns, dtype=self.dtype, device="cpu")

    def take(self, slot: Slot, tensor: Tensor) -> None:
        few_NB = round_to_engine(slot.cut(tensor)[:, self._block], dtype=self.dtype)
        part = slice(slot.start, slot.start + len(few_NB))
        if self._columns_NB.shape[1]:
            self._columns_NB[part] = few_NB.cpu()
            return
        few_NB = few_NB.contiguous().float()  # what is strided is widened one by one, and sums of rows are slow
        self._answer_N[part] = torch.mv(few_NB, self._signs_B)
        self._magnitude_N[part] = torch.mv(few_NB.abs_(), self._signs_B.abs())

    def check(self, layer: Module) -> ProofFault | None:
        if self._columns_NB.shape[1]:
            return self._find_wrong_column(layer)
        exact_N, bound_N = self._answer_N.double(), 2 * COLUMNS * U * self._magnitude_N.double()
        return find_wrong_answer(layer, self._probe_K, exact_N=exact_N, bound_N=bound_N, dtype=self.dtype)

    def _find_wrong_column(self, layer: Module) -> ProofFault | None:
        probe_BK = torch.eye(self._columns_NB.shape[1], self.shape.length, device="cpu").roll(self._block.start, dims=1)
        held_BN = ask_kernel(layer, probe_BK, bias_N=None, dtype=self.dtype)
        wanted_BN = self._columns_NB.t().to(held_BN.device)
        if bool((held_BN == wanted_BN).all()):
            return None
        held_BN, wanted_BN = held_BN.double().cpu(), wanted_BN.double().cpu()
        worst_1N = torch.nan_to_num((held_BN - wanted_BN).abs(), nan=torch.inf).argmax(dim=0, keepdim=True)
        kernel_N, expected_N = (each.gather(0, worst_1N)[0] for each in (held_BN, wanted_BN))
        return find_wrong_channel(kernel_N, expected_N, bound_N=torch.full_like(expected_N, TINY))


def rounds_once() -> bool:
    """Return whether a product that is not quantised gets its bias before it is rounded, as oneDNN's does."""
    return current_platform.is_cpu()


def find_wrong_answer(
    layer: Module, probe_K: Tensor, *, exact_N: Tensor, bound_N: Tensor, dtype: torch.dtype
) -> ProofFault | None:
    """Return the first wrong answer of a layer, or None. bound_N: before the rest is rounded to `dtype`, the
    layer's."""
    bias_N = -exact_N.to(dtype)
    rest_N = compute_answer(layer, probe_K[None], bias_N=bias_N, dtype=dtype)[0]
    wanted_N = exact_N + bias_N.double()
    relative, least = ROUNDS[dtype]
    return find_wrong_channel(rest_N, wanted_N, bound_N=bound_N + relative * wanted_N.abs() + least)


def compute_answer(
    layer: Module, probe_MK: Tensor, *, bias_N: Tensor | None, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Compute the answer of `ask_kernel`, in float64 on the CPU."""
    return ask_kernel(layer, probe_MK, bias_N=bias_N, dtype=dtype).double().cpu()


def ask_kernel(layer: Module, probe_MK: Tensor, *, bias_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return [M, N] where the layer is: what its method makes of a probe, with our bias instead of the layer's."""
    device = torch.get_default_device()
    bias_N = None if bias_N is None else bias_N.to(device)
    out_MN: Tensor = layer.quant_method.apply(layer, probe_MK.to(device, dtype), bias_N)
    return out_MN


def check_quantiser(proofs: Mapping[str, KernelProof]) -> None:
    """Check all samples of an update together. Raises SyncError where the quantiser's numbers are not the codec's."""
    by_length = defaultdict(list)
    for name, proof in proofs.items():
        for rows, weight_NK, codes in proof.samples if isinstance(proof, Int8Proof) else ():
            by_length[weight_NK.shape[1]].append((name, rows, weight_NK, codes))
    for same_length in by_length.values():
        codec = quantise_int8(torch.cat([weight_NK for *_, weight_NK, _ in same_length]))
        codes_NK = torch.cat([codes.codes_NK for *_, codes in same_length])
        scale_N1 = torch.cat([codes.scale for *_, codes in same_length])
        if torch.equal(codes_NK, codec.codes_NK) and torch.equal(scale_N1, codec.scale):
            continue
        differs_N = ((codes_NK != codec.codes_NK) | (scale_N1 != codec.scale)).any(dim=1)
        places = [(name, row) for name, rows, *_ in same_length for row in rows]
        name, row = places[int(differs_N.nonzero()[0])]
        raise SyncError(f"weight update: {name}: this CPU's row quantiser differs from the codec in row {row}")


def exact_product(codes_NK: Tensor, probe_K: Tensor) -> Tensor:
    """Return [N] float64 on the CPU, exact: |sum| <= K * 127^2 < 2^31 for K < 133000. Without VNNI, torch's product of
    integers is one value at a time (70 MB/s, see sync/manifest.py) or oneDNN's, which may saturate."""
    if codes_NK.device.type == "cpu" and torch.cpu._is_vnni_supported():
        return torch._int_mm(codes_NK.contiguous(), probe_K[:, None].contiguous())[:, 0].double()
    return torch.mv(codes_NK.double(), probe_K.double()).cpu()  # vLLM's batch-invariant matmul wants two matrices


def find_wrong_channel(kernel_N: Tensor, expected_N: Tensor, *, bound_N: Tensor) -> ProofFault | None:
    """Find the channel that is furthest beyond its bound. What is not finite is beyond any."""
    excess_N = torch.nan_to_num((kernel_N - expected_N).abs() / bound_N, nan=torch.inf)
    worst = int(excess_N.argmax())
    if float(excess_N[worst]) <= 1:
        return None
    numbers = (float(each[worst]) for each in (kernel_N, expected_N, bound_N))
    is_finite = bool(torch.isfinite(kernel_N[worst]))
    return ProofFault(f"probe, output channel {worst}", *numbers, channel=None if is_finite else worst)


def find_wrong_scale(actual: Tensor, expected: Tensor, *, within: float = 0.0) -> ProofFault | None:
    """Find the first scale that is not the expected one, bit for bit or `within` such a part of it: freed memory may
    hold anything, NaN too."""
    if actual.shape != expected.shape:
        return ProofFault("number of scales", float(actual.numel()), float(expected.numel()))
    fits = actual.view(torch.int32) == expected.view(torch.int32)
    if within:
        fits |= (actual - expected).abs() <= within * expected
    if bool(fits.all()):
        return None
    index = int((~fits).nonzero()[0])
    return ProofFault(f"scale {index}", float(actual[index]), float(expected[index]), within * float(expected[index]))
