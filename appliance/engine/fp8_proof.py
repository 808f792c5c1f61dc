"""Whether an FP8 layer has and multiplies what was received: codes and scales bit for bit, and one probe.

All scales, as the codec computes them, and the codes of a rotating eighth of the rows (in blocks of 128, at least one;
all of them in a full proof) are compared bit for bit.

Legend: N output channels, K input channels of this rank's part of the layer; R rows; T tokens of a probe; u = 2^-24.

Emulated. The codes are expected as the compiled quantiser makes them. The engine makes codes by that same code: an
error of it is seen only by the reference codec, which quantises a few rows in each proof (`_check_quantiser`). Where
it is the layer's turn its method also answers a probe of signs x_k = +-1, within float32's bound for a sum of K terms,
twice K u sum_k |w'_nk|, and BF16's rounding: what can go wrong beyond codes and scales is code, which all layers share.

By vLLM's own methods. For `fp8` and `fp8-channel` the codec itself says what the codes are, and each proof asks the
kernel. The probe has T = 16 tokens; each is x = +-1, 2, 4 or 8 at one input channel and 0 elsewhere, the channels drawn
from T equal parts of K, others at each sync. So every answer is one weight times x, exact but for its rounding:

* The activation. s_x is |x| / 448, or 8 / 448 where one scale is for all tokens, to a few u (a division, or a product
  with a reciprocal); the code is 448, 224, 112 or 56, whose neighbours in E4M3 are 1/16 away; s_x times it is |x| to a
  few u. Zeros are zeros.
* The sum. Tensor cores do not add in float32. On Hopper they align the products of a step of 32 to the largest one,
  keep 14 bits of each and truncate the rest (DeepSeek-V3 report, arXiv 2412.19437, 3.5.2); the register has 13 bits of
  mantissa on Ada too (SageAttention2, quoted in github.com/thu-ml/SageAttention/issues/287). 33 terms a step: a dense
  probe of K = 4096 might err by 128 * 33 * 2^-13, half of sum_k |w'_nk|, and prove nothing. One product of two codes
  has 8 bits and zeros move nothing: the sum is exact wherever 8 bits are kept.
* The scales. s_x, s_n and the sum meet in two float32 products: 2 u, and a few from s_x. Then one rounding to BF16,
  which has 8 bits: 2^-8. Twice that is allowed: 2^-7 of the answer.
* Batch-invariant (`VLLM_BATCH_INVARIANT`, all kernels but CUTLASS's): the code is widened, the scale and their product
  are rounded to BF16 each, the activation is not quantised. Twice 2 * 2^-8 is allowed: 2^-6.
* Below 448^2 * 2^-126 = 2^-108 a product of scales may be a denormal, and flushed: allowed in addition, times 8.

Neighbouring codes differ by 1/16 of their value or more, so in these T columns of all rows a wrong code is caught; so
is a scale that is off by more than the bound, and a token that got another token's. The activation's quantiser is asked
as it is, not as torch.compile fused it into the model's graph. Where the scale is 0 (`fp8`, all of a layer's weights 0)
vLLM's quantiser makes codes of 0 * inf: they are not compared, the probe is. A kernel that packs codes its own way is
not asked: `NativeFp8Method.provable`.

`fp8-block`: the same, but a compiler decides the last bits of its quantiser
(`utils/deep_gemm.py:per_block_cast_to_fp8`), so some codes count as one.

* Scales. a / 448 is compiled to a product with the constant's reciprocal, 2 u, or to `div.full.f32`, whose error is two
  units in the last place: 4 u. The codec's has u. Allowed is 8 u.
* Codes. The engine's x = w * (1 / s) differs from the codec's by 5 u of s, 5 u of 1 / s and a rounding of each, 12 u.
  For Ada (compute capability 8.9) Triton then rounds x to FP16 before it rounds to E4M3, 2^-11; from Hopper on it
  converts at once. (Read off the PTX that Triton 3.7.1 writes: `cvt.rn.satfinite.e4m3x2` from `.f16x2`, from `.f32`.)
  Rounding is monotone: as the difference is less than 2^-10, the code lies between the codec's for s * (1 + 2^-10) and
  for s * (1 - 2^-10). These are one code or neighbours, as midpoints of codes are further apart. Both pass: the weight
  is within 2^-10 of their midpoint. One weight in 40 or so is; every other code is expected exactly.
* Zeros. Which sign one has is not checked: it makes no difference to a sum.
* The answer. s_x is that of 128 channels of which one is not 0, so |x| / 448 as above; other groups have a finite scale
  and codes 0. The tensor core sums 128 products at a time, exact as above; they are multiplied by s_x and s_n in
  float32, and added to zeros. So the bound is the same, 2^-7; where two codes pass, of the answer of one of them.

On Hopper FlashInfer's kernel serves fewer than 32 tokens and DeepGEMM's the rest: probes have 32 and 16 by turns. Where
DeepGEMM makes the scales powers of two nothing is checked (`NativeBlockMethod.provable`).
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import Module

from appliance.engine.kernel_proof import (
    BF16_U,
    ROTATION,
    KernelProof,
    ProofFault,
    U,
    compute_answer,
    find_wrong_answer,
    find_wrong_channel,
    find_wrong_scale,
)
from appliance.engine.tensor_slots import Slot, round_to_engine
from appliance.errors import SyncError
from appliance.quant.codec import QuantisedWeight, dequantise, weight_absmax
from appliance.quant.codec_fp8 import fp8_scale, quantise_fp8_by, row_blocks, widened_fp8
from appliance.sync.manifest import digest
from appliance.terms.schemes import BLOCK, Scales, Scheme

TOKENS = 16  # of a probe for vLLM's own methods
SLACK = 2.0**-10  # of x, relative: `fp8-block`
_MAGNITUDES = 4  # 1, 2, 4, 8
_FLUSHED = 2.0**-105
_SAMPLED_ROWS = 4  # of an emulated layer; a divisor of BLOCK
_NEGATIVE_ZERO = 0x80


class Fp8Proof(KernelProof):
    """Keeps the parts of a fused layer until they are complete: scales may span them."""

    _scale_within = 0.0  # what a scale may differ by, relative

    def __post_init__(self) -> None:
        super().__post_init__()
        self._scales = self.scheme.spec.scales
        self._parts: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._due = self._due_rows()
        self._codes = ""
        self._scale = torch.empty(0, device="cpu")

    @abstractmethod
    def _quantised(self, weight_RK: Tensor, *, scale: Tensor) -> QuantisedWeight:
        """Return the rows that are due, as the layer must hold them."""

    @abstractmethod
    def _expect_answer(self, parts: list[Tensor], due: QuantisedWeight) -> None:
        """Keep what the kernel must answer. parts: of the whole weight, in order.  due: the rows that are due."""

    @abstractmethod
    def _find_wrong_answer(self, layer: Module) -> ProofFault | None:
        """Return what the kernel answers otherwise than it must, or None."""

    def _told_apart(self, codes_RK: Tensor) -> Tensor:
        """Return the codes of the rows that are due, uint8, those as one that this proof does not tell apart."""
        return codes_RK

    def _due_rows(self) -> list[slice]:
        """Return the rows that are due, in blocks of 128: scales of blocks are never cut."""
        channels = self.shape.channels
        if self.request.full:
            return [slice(0, channels)]
        starts = range(0, channels, BLOCK)
        parts = min(ROTATION, len(starts))
        return [slice(start, min(start + BLOCK, channels)) for start in starts[self.request.round % parts :: parts]]

    def take(self, slot: Slot, tensor: Tensor) -> None:
        whole_NK = round_to_engine(tensor)
        self._parts[slot.start] = (slot.cut(whole_NK), self._absmax(slot, whole_NK))
        if sum(len(part) for part, _ in self._parts.values()) == self.shape.channels:
            self._expect([self._parts[start] for start in sorted(self._parts)])
            self._parts.clear()

    def _absmax(self, slot: Slot, whole_NK: Tensor) -> Tensor | None:
        """Return the absmax of the whole tensor, where a scale covers more of it than this rank has."""
        if not self.shape.is_cut or self._scales is Scales.BLOCK:
            return None
        absmax = weight_absmax(whole_NK, scheme=self.scheme)
        return absmax if self._scales is Scales.TENSOR else absmax[slot.rows]

    def _expect(self, received: list[tuple[Tensor, Tensor | None]]) -> None:
        self._scale = fp8_scale(self._absmax_of(received), scheme=self.scheme)
        scale = self._scale
        if self._scales is not Scales.TENSOR:
            height = BLOCK if self._scales is Scales.BLOCK else 1
            scale = torch.cat([scale[rows.start // height : -(-rows.stop // height)] for rows in self._due])
        parts = [part for part, _ in received]
        due = self._quantised(_gathered(parts, self._due), scale=scale)
        self._codes = digest(self._told_apart(due.codes_NK.view(torch.uint8)))
        self._expect_answer(parts, due)

    def _absmax_of(self, parts: list[tuple[Tensor, Tensor | None]]) -> Tensor:
        """Return the absmax in the shape of the whole layer's scale."""
        if self._scales is Scales.BLOCK and any(len(part) % BLOCK for part, _ in parts[:-1]):
            return weight_absmax(torch.cat([part for part, _ in parts]), scheme=self.scheme)
        absmax = torch.cat(
            [weight_absmax(part, scheme=self.scheme) if given is None else given for part, given in parts]
        )
        return absmax.amax(dim=0, keepdim=True) if self._scales is Scales.TENSOR else absmax

    def check(self, layer: Module) -> ProofFault | None:
        held = layer.quant_method.held_scale(layer).reshape(-1).cpu()
        different = find_wrong_scale(held, self._scale.reshape(-1).cpu(), within=self._scale_within)
        return different or self._find_wrong_code(layer) or self._find_wrong_answer(layer)

    def _find_wrong_code(self, layer: Module) -> ProofFault | None:
        held_NK = layer.quant_method.held_weight(layer).codes_NK.view(torch.uint8)
        codes = digest(self._told_apart(_gathered([held_NK], self._due)))
        if codes == self._codes:
            return None
        asked = f"{len(self._due)} blocks of rows from {self._due[0].start} to {self._due[-1].stop - 1}"
        return ProofFault(f"digest of the codes of {asked}", codes, self._codes)


class EmulatedProof(Fp8Proof):
    def __post_init__(self) -> None:
        super().__post_init__()
        self._signs_K = self._signs(self.shape.length)

    def _quantised(self, weight_RK: Tensor, *, scale: Tensor) -> QuantisedWeight:
        from appliance.quant.numba_fp8 import quantise_fp8_numba_by  # a compiler that other schemes do not need

        due = quantise_fp8_numba_by(weight_RK, scale=scale, scheme=self.scheme)
        self._check_quantiser(weight_RK, due)
        return due

    def _check_quantiser(self, weight_RK: Tensor, expected: QuantisedWeight) -> None:
        """Check some rows by the reference codec: engine and proof quantise by the same compiled code, and an error of
        it would be in both answers. Raises SyncError."""
        first = int(self._integers(0, -(-len(weight_RK) // _SAMPLED_ROWS), count=1)) * _SAMPLED_ROWS
        rows = slice(first, min(first + _SAMPLED_ROWS, len(weight_RK)))
        block_rows = expected.block[0]
        scale = expected.scale[first // block_rows][None] if block_rows > 1 else expected.scale[rows]
        codec = quantise_fp8_by(weight_RK[rows], scale=scale, scheme=self.scheme)
        if not torch.equal(expected.codes_NK[rows].view(torch.uint8), codec.codes_NK.view(torch.uint8)):
            raise SyncError(
                f"weight update: {self.name}: the compiled quantiser differs from the codec in rows "
                f"{rows.start} to {rows.stop - 1} of those that were looked at"
            )

    def _expect_answer(self, parts: list[Tensor], due: QuantisedWeight) -> None:
        """Compute sum_k x_k w'_nk, [N] float64, and its bound, [N] float64, for any order of summation in float32."""
        if not self.request.thorough:  # in a full proof all rows are due
            return
        sums, bounds = [], []
        for part in row_blocks(due):
            held_RK = dequantise(part)
            sums.append(torch.mv(held_RK, self._signs_K.to(held_RK)).double().cpu())
            bounds.append(2 * len(self._signs_K) * U * held_RK.abs_().sum(dim=1).double().cpu())
        self._answer_N, self._bound_N = torch.cat(sums), torch.cat(bounds)

    def _find_wrong_answer(self, layer: Module) -> ProofFault | None:
        if not self.request.thorough:
            return None
        return find_wrong_answer(layer, self._signs_K, exact_N=self._answer_N, bound_N=self._bound_N, dtype=self.dtype)


class NativeFp8Proof(Fp8Proof):
    def __post_init__(self) -> None:
        super().__post_init__()
        tokens = min(self._most_tokens(), self.shape.length)
        edges = [part * self.shape.length // tokens for part in range(tokens + 1)]
        drawn = [int(self._integers(low, high, count=1)) for low, high in itertools.pairwise(edges)]
        self.columns_T = torch.tensor(drawn, device="cpu")
        self._values_T = self._signs(tokens) * 2.0 ** (torch.arange(tokens, device="cpu") % _MAGNITUDES)
        self._codes_NT = torch.empty(0, device="cpu")

    def _most_tokens(self) -> int:
        return TOKENS

    def probe_TK(self) -> Tensor:
        """Return the probe, [T, K] float32 on the CPU."""
        probe_TK = torch.zeros((len(self.columns_T), self.shape.length), dtype=torch.float32, device="cpu")
        probe_TK[torch.arange(len(probe_TK), device="cpu"), self.columns_T] = self._values_T.float()
        return probe_TK

    def _quantised(self, weight_RK: Tensor, *, scale: Tensor) -> QuantisedWeight:
        return quantise_fp8_by(weight_RK, scale=scale, scheme=self.scheme)

    def _expect_answer(self, parts: list[Tensor], due: QuantisedWeight) -> None:
        self._expect_columns(torch.cat([part[:, self.columns_T.to(part.device)] for part in parts]))

    def _expect_columns(self, weight_NT: Tensor) -> None:
        self._codes_NT = self._quantised(weight_NT, scale=self._scale).codes_NK.cpu()

    def _exact_answers(self, out_TN: Tensor) -> Tensor:
        """Return [T, N] float64: the exact answers. out_TN: the kernel's, which says whether one of two is meant."""
        return (widened_fp8(self._codes_NT).double() * self._scale.double().cpu()).t() * self._values_T[:, None]

    def _find_wrong_code(self, layer: Module) -> ProofFault | None:
        return super()._find_wrong_code(layer) if bool(self._scale.any()) else None

    def _find_wrong_answer(self, layer: Module) -> ProofFault | None:
        with torch.compiler.set_stance("force_eager"):  # on a GPU vLLM has the activation's quantiser compiled
            out_TN = compute_answer(layer, self.probe_TK(), bias_N=None)
        wanted_TN = self._exact_answers(out_TN)
        roundings = 2 if layer.quant_method.multiplies_in_bf16 else 1
        bound_TN = 2 * roundings * BF16_U * wanted_TN.abs() + _FLUSHED
        for token, column in enumerate(self.columns_T.tolist()):
            fault = find_wrong_channel(out_TN[token], wanted_TN[token], bound_N=bound_TN[token])
            if fault is not None:
                return replace(fault, subject=f"{fault.subject}, input channel {column}")
        return None


class NativeBlockProof(NativeFp8Proof):
    _scale_within = 2.0**-21  # 8 u

    def __post_init__(self) -> None:
        super().__post_init__()
        self._forget()
        self._outer_NT = torch.empty(0, device="cpu")

    def _most_tokens(self) -> int:
        return TOKENS * (1 + self.request.round % 2)

    def _quantised(self, weight_RK: Tensor, *, scale: Tensor) -> QuantisedWeight:
        """Return the codes nearer to 0; those of which the next one passes too are remembered, with the next one."""
        inner, outer = _around(weight_RK, scale=scale, scheme=self.scheme)
        differ_R = (inner.codes_NK.view(torch.uint8) != outer.codes_NK.view(torch.uint8)).view(-1)
        places = differ_R.nonzero().view(-1)
        self._outer = outer.codes_NK.view(torch.uint8).view(-1)[places].cpu()
        self._places = places.to(torch.int32 if differ_R.numel() < 2**31 else torch.int64).cpu()
        return inner

    def _told_apart(self, codes_RK: Tensor) -> Tensor:
        codes = codes_RK.reshape(-1).clone()
        places, outer = self._places.to(codes.device, torch.int64), self._outer.to(codes.device)
        held = codes[places]
        codes[places] = torch.where(held == outer, outer - 1, held)
        codes[codes == _NEGATIVE_ZERO] = 0
        return codes.view(codes_RK.shape)

    def _forget(self) -> None:
        self._places = torch.empty(0, dtype=torch.int32, device="cpu")
        self._outer = torch.empty(0, dtype=torch.uint8, device="cpu")

    def check(self, layer: Module) -> ProofFault | None:
        found = super().check(layer)
        self._forget()  # 5 bytes for each of them, and the proof is kept until the next update
        return found

    def _expect_columns(self, weight_NT: Tensor) -> None:
        """Expect each element as its own row: the codec's scales of blocks are for columns that are neighbours."""
        scale_NT = self._scale_of_columns(len(weight_NT))
        rows, scales = weight_NT.reshape(-1, 1), scale_NT.reshape(-1, 1)
        inner, outer = _around(rows, scale=scales, scheme=Scheme.FP8_CHANNEL)
        self._codes_NT = inner.codes_NK.view(weight_NT.shape).cpu()
        self._outer_NT = outer.codes_NK.view(weight_NT.shape).cpu()

    def _scale_of_columns(self, rows: int) -> Tensor:
        """Return [N, T] float32: spread only while it is needed, for it is as large as the codes four times."""
        blocks_T = self.columns_T.to(self._scale.device) // BLOCK
        return self._scale[:, blocks_T].repeat_interleave(BLOCK, dim=0)[:rows]

    def _exact_answers(self, out_TN: Tensor) -> Tensor:
        """Return the nearer one of the two answers."""
        scale_NT = self._scale_of_columns(len(self._codes_NT)).cpu().double()
        inner_TN, outer_TN = (
            (widened_fp8(codes_NT).double() * scale_NT).t() * self._values_T[:, None]
            for codes_NT in (self._codes_NT, self._outer_NT)
        )
        return torch.where((out_TN - inner_TN).abs() <= (out_TN - outer_TN).abs(), inner_TN, outer_TN)


def _around(weight_RK: Tensor, *, scale: Tensor, scheme: Scheme) -> tuple[QuantisedWeight, QuantisedWeight]:
    """Quantise by scales that are larger and smaller: equal codes, or neighbours of which the second one is further
    from 0."""
    inner, outer = (quantise_fp8_by(weight_RK, scale=scale * by, scheme=scheme) for by in (1 + SLACK, 1 - SLACK))
    return inner, outer


def _gathered(parts: list[Tensor], slices: list[slice]) -> Tensor:
    """Gather some rows of a weight that lies in parts, one after the other. A view where one piece is all."""
    pieces: list[Tensor] = []
    starts = itertools.accumulate((len(part) for part in parts[:-1]), initial=0)
    for rows, (part, start) in itertools.product(slices, zip(parts, starts, strict=True)):
        first, end = max(rows.start - start, 0), min(rows.stop - start, len(part))
        pieces += [part[first:end]] if first < end else []
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
