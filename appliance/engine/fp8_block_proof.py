"""Whether a layer of vLLM's own `fp8-block` holds and multiplies what was received.

As for its other FP8 methods (fp8_proof.py): all scales, the codes of the rows that are due, and a probe. But a compiler
decides the last bits of its quantiser (`utils/deep_gemm.py:per_block_cast_to_fp8`), so some codes count as one.

Legend: N output channels, K input channels of this rank's part of the layer; R rows; T tokens of a probe; u = 2^-24.

* Scales. a / 448 is compiled to a product with the constant's reciprocal, 2 u, or to `div.full.f32`, whose error is two
  units in the last place: 4 u. The codec's has u. Allowed is 8 u.
* Codes. The engine's x = w * (1 / s) differs from the codec's by 5 u of s, 5 u of 1 / s and a rounding of each, 12 u.
  For Ada (compute capability 8.9) Triton then rounds x to FP16 before it rounds to E4M3, 2^-11; from Hopper on it
  converts at once. (Read off the PTX that Triton 3.7.1 writes: `cvt.rn.satfinite.e4m3x2` from `.f16x2`, from `.f32`.)
  Rounding is monotone: as the difference is less than 2^-10, the code lies between the codec's for s * (1 + 2^-10) and
  for s * (1 - 2^-10). These are one code or neighbours, as midpoints of codes are further apart. Both pass: the weight
  is within 2^-10 of their midpoint, so the one is as good as the other to 2^-10 of the weight. One weight in 40 or
  so lies that near; every other code is expected exactly.
* Zeros. Which sign one has is not asked: it makes no difference to a sum.

The probe is fp8_proof.py's; each answer is one weight. The activation: s_x is that of 128 channels of which one is not
0, so |x| / 448 as there; other groups have a finite scale and codes 0. The sum: 128 products at a time are summed in
the tensor core, exact as there, multiplied by s_x and s_n in float32, and added to zeros. So the bound is the same,
2^-7 of the answer. Where two codes pass, the answer must be that of one of them.

On Hopper FlashInfer's kernel serves fewer than 32 tokens and DeepGEMM's the rest: probes have 32 and 16 by turns. Where
DeepGEMM makes the scales powers of two nothing is asked (`NativeBlockMethod.provable`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Module

from appliance.engine.fp8_proof import TOKENS, NativeFp8Proof
from appliance.engine.kernel_proof import Mismatch
from appliance.engine.proof_schedule import Ask
from appliance.engine.tensor_slots import LocalShape
from appliance.quant.codec_fp8 import BLOCK, Fp8Weight, quantise_fp8_by, widened_fp8
from appliance.terms.schemes import Scheme

SLACK = 2.0**-10  # of x, relative
_NEGATIVE_ZERO = 0x80


class NativeBlockProof(NativeFp8Proof):
    _scale_within = 2.0**-21  # 8 u

    def __init__(self, name: str, *, shape: LocalShape, scheme: Scheme, ask: Ask) -> None:
        super().__init__(name, shape=shape, scheme=scheme, ask=ask)
        self._forget()
        self._outer_NT = torch.empty(0, device="cpu")

    def _most_tokens(self) -> int:
        return TOKENS * (1 + self._ask.round % 2)

    def _quantised(self, weight_RK: Tensor, *, scale: Tensor) -> Fp8Weight:
        """The codes nearer to 0; those of which the next one passes too are remembered, with the next one."""
        inner, outer = _around(weight_RK, scale=scale, scheme=self._scheme)
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

    def check(self, layer: Module) -> Mismatch | None:
        found = super().check(layer)
        self._forget()  # 5 bytes for each of them, and the proof is kept until the next update
        return found

    def _expect_columns(self, weight_NT: Tensor) -> None:
        """Each element as a row of its own: the codec's scales of blocks are for columns that are neighbours."""
        scale_NT = self._scale_of_columns(len(weight_NT))
        rows, scales = weight_NT.reshape(-1, 1), scale_NT.reshape(-1, 1)
        inner, outer = _around(rows, scale=scales, scheme=Scheme.FP8_CHANNEL)
        self._codes_NT = inner.codes_NK.view(weight_NT.shape).cpu()
        self._outer_NT = outer.codes_NK.view(weight_NT.shape).cpu()

    def _scale_of_columns(self, rows: int) -> Tensor:
        """[N, T] float32: spread only while it is needed, for it is as large as the codes four times."""
        blocks_T = self.columns_T.to(self._scale.device) // BLOCK
        return self._scale[:, blocks_T].repeat_interleave(BLOCK, dim=0)[:rows]

    def _wanted(self, out_TN: Tensor) -> Tensor:
        """Of the two answers the nearer one."""
        scale_NT = self._scale_of_columns(len(self._codes_NT)).cpu().double()
        inner_TN, outer_TN = (
            (widened_fp8(codes_NT).double() * scale_NT).t() * self._values_T[:, None]
            for codes_NT in (self._codes_NT, self._outer_NT)
        )
        return torch.where((out_TN - inner_TN).abs() <= (out_TN - outer_TN).abs(), inner_TN, outer_TN)


def _around(weight_RK: Tensor, *, scale: Tensor, scheme: Scheme) -> tuple[Fp8Weight, Fp8Weight]:
    """By scales that are larger and smaller: equal codes, or neighbours of which the second one is further from 0."""
    inner, outer = (quantise_fp8_by(weight_RK, scale=scale * by, scheme=scheme) for by in (1 + SLACK, 1 - SLACK))
    return inner, outer
