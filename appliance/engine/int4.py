"""Online W4A16 for vLLM's linear layers: BF16 weights come in, INT4 codes and scales of groups stay; activations are
BF16. vLLM 0.31 has INT4 for checkpoints that are quantised (GPTQ, AWQ, compressed-tensors) and no online method.

On a CPU vLLM's kernel for those multiplies (quant/int4_gemm.py), in its layout. Marlin and Machete, which a GPU has,
take other layouts and are not used yet.

Over several ranks the groups are those of a rank's part of the input channels.

BF16 weights are quantised by compiled code (quant/numba_int4.py), in the engine and in the proof; the proof has the
codec itself quantise some rows of each tensor, other ones at each update.

The proof. The kernel is handed its memory at every call, in a layout that is known: so codes and scales are read back
from there and compared bit for bit, which sees every code. Whether the kernel computes with them is checked as for
INT8: one token of signs x_k = +-1 goes in with the bias -bf16(exact), and the small rest comes out. Products with signs
are exact. With u = 2^-24 and A_n = sum_k |w'_nk|: K sums and the bias are rounded in float32, in the kernel, and as
many here; the result is rounded to BF16 once.

    |rest - exact rest| <= 2 (K + 2) u A_n + 2^-8 |exact rest|

Legend: M tokens, N output channels, K input channels of this rank's part of the layer, G groups of these.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Module
from vllm.platforms import current_platform

from appliance.engine.kernel_proof import KernelProof, ProofFault, U, find_wrong_answer, find_wrong_scale
from appliance.engine.quantised import OnlineLinearMethod
from appliance.engine.tensor_slots import Slot, round_to_engine
from appliance.errors import EngineError, SyncError
from appliance.quant.codec import QuantisedWeight, chunk_rows
from appliance.quant.codec_int4 import dequantise_int4, int4_groups, quantise_int4
from appliance.quant.int4_gemm import Int4Gemm, WideInt4Gemm, packed_int4
from appliance.sync.manifest import digest
from appliance.terms.schemes import Scheme, group_size, why_no_groups

_SAMPLED_ROWS = 4  # of a tensor, that the codec quantises


class Int4Proof(KernelProof):
    """The proof of an INT4 layer: scales, a digest of the codes, and the answer of the rows whose turn it is, one in
    `request.parts`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        channels, length = self.shape.channels, self.shape.length
        groups = length // group_size(length)
        self._signs_K = self._signs(length).float()
        self._looks_at_N = torch.zeros(channels, dtype=torch.bool, device="cpu")
        self._scale_NG = torch.zeros((channels, groups), dtype=torch.float32, device="cpu")
        self._answer_N = torch.zeros(channels, dtype=torch.float32, device="cpu")
        self._magnitude_N = torch.zeros(channels, dtype=torch.float32, device="cpu")
        self._digests: list[tuple[slice, str]] = []  # rows of the layer, and the digest of their codes

    def take(self, slot: Slot, tensor: Tensor) -> None:
        parts = self.request.parts
        first = (self.request.round - slot.start) % parts
        weight_RK = round_to_engine(tensor[slot.rows][first::parts, slot.columns], dtype=self.dtype)
        if not len(weight_RK):  # a tensor of so few rows that it is the turn of none
            return
        quantised = quantise(weight_RK)
        self._check_quantiser(weight_RK, quantised)
        beginning = slot.start + first
        rows = slice(beginning, beginning + len(weight_RK) * parts, parts)
        self._looks_at_N[rows] = True
        self._scale_NG[rows] = quantised.scale
        self._digests.append((rows, digest(quantised.codes_NK)))
        self._answer_N[rows], self._magnitude_N[rows] = self._answers(quantised)

    def _check_quantiser(self, weight_RK: Tensor, quantised: QuantisedWeight) -> None:
        """Raise SyncError where the compiled quantiser's numbers are not the codec's."""
        first = int(self._integers(0, -(-len(weight_RK) // _SAMPLED_ROWS), count=1)) * _SAMPLED_ROWS
        rows = slice(first, first + _SAMPLED_ROWS)
        codec = quantise_int4(weight_RK[rows])
        same_codes = torch.equal(quantised.codes_NK[rows], codec.codes_NK)
        if not (same_codes and torch.equal(quantised.scale[rows], codec.scale)):
            last = first + len(codec.codes_NK) - 1
            raise SyncError(
                f"weight update: {self.name}: the compiled quantiser differs from the codec in rows {first} to {last} "
                "of those that were looked at"
            )

    def _answers(self, quantised: QuantisedWeight) -> tuple[Tensor, Tensor]:
        """Compute sum_k x_k w'_k and sum_k |w'_k|, [R] each, a cache's worth of rows at a time."""
        rows = chunk_rows(quantised.codes_NK)
        answers, magnitudes = [], []
        for codes_RK, scale_RG in zip(quantised.codes_NK.split(rows), quantised.scale.split(rows), strict=True):
            values_RK = dequantise_int4(int4_groups(codes_RK, scale_NG=scale_RG))
            answers.append(torch.mv(values_RK, self._signs_K))
            magnitudes.append(values_RK.abs_().sum(dim=1))
        return torch.cat(answers), torch.cat(magnitudes)

    def check(self, layer: Module) -> ProofFault | None:
        stored = layer.quant_method.held_weight()
        looks_at_N1 = self._looks_at_N[:, None]
        if stored.scale.shape != self._scale_NG.shape:
            return find_wrong_scale(stored.scale, self._scale_NG)
        scale_NG = torch.where(looks_at_N1, self._scale_NG, stored.scale)
        if mismatch := find_wrong_scale(stored.scale.view(-1), scale_NG.view(-1)):
            return mismatch
        for rows, received in self._digests:
            if (codes := digest(stored.codes_NK[rows])) != received:
                asked = f"rows {rows.start} to {rows.stop - rows.step}"
                return ProofFault(f"digest of the codes of {asked}", codes, received)
        bound_N = 2 * (self.shape.length + 2) * U * self._magnitude_N.double()
        bound_N[~self._looks_at_N] = torch.inf
        return find_wrong_answer(
            layer, self._signs_K, exact_N=self._answer_N.double(), bound_N=bound_N, dtype=self.dtype
        )


def quantise(weight_NK: Tensor) -> QuantisedWeight:
    """Quantise to the codec's result, bit for bit. Raises NumericsError."""
    from appliance.quant.numba_int4 import quantise_int4_numba  # a compiler that other schemes do not need

    return quantise_int4_numba(weight_NK)


class Int4LinearMethod(OnlineLinearMethod):
    """Method of one layer."""

    gemm: Int4Gemm | WideInt4Gemm | None
    """Kernel that multiplies; None before the first load. It is this object's and not the layer's, as INT8's."""

    proof = Int4Proof

    def __init__(self, scheme: Scheme) -> None:
        super().__init__(scheme)
        if not current_platform.is_cpu():
            raise EngineError(scheme.spec.not_on_gpu.format(scheme=scheme), hint="use int8 or bf16")
        self.gemm = None

    def require_shape(self, name: str, *, rows: int, length: int) -> None:
        if why := why_no_groups(rows, length):
            raise EngineError(f"`{self.scheme}`: {name} is {why}", hint="name the layer in quantization.ignore")

    def quantise(self, weight_NK: Tensor, *, absmax: Tensor | None) -> QuantisedWeight:
        return quantise(weight_NK)

    def install(self, layer: Module, quantised: QuantisedWeight) -> None:
        layer.weight = self.gemm = None  # the old packed weight goes before there is a new one
        self.gemm = packed_int4(quantised)

    def release(self) -> None:
        self.gemm = None

    def apply(self, layer: Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        assert self.gemm is not None, "a layer that was never loaded"
        return self.gemm(x.reshape(-1, x.shape[-1]), bias).reshape(*x.shape[:-1], -1)

    def held_weight(self) -> QuantisedWeight:
        """Read codes and scales where the kernel reads them."""
        assert self.gemm is not None, "a layer that was never loaded"
        return self.gemm.unpacked()

    def held_scale(self, layer: Module) -> Tensor | None:
        return None if self.gemm is None else self.gemm.scale_GN.t()

    @property
    def kernel_name(self) -> str:
        return "" if self.gemm is None else self.gemm.name
