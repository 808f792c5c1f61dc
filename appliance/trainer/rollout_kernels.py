"""The kernels of the rollouts' forward: what depends on the device, and nowhere else (trainer/rollout_ops.py).

On a CPU: vLLM's library, and torch where vLLM has torch. On CUDA: the kernels of an engine that runs eagerly in vLLM's
batch-invariant mode, which a plan with one flow sets (terms/environment.py): a token's result is then meant not to
depend on the batch. This mode is an environment variable, which vLLM's compiled norms read as well; what it replaces
in torch is called here by name, so that the trainer's own torch stays as it is.

CUDA is read only: written from vLLM's and torch's sources, never run. `fp8-block` is multiplied by torch's kernel for
Hopper, which is not the engine's.

Legend: T tokens of all sequences in a row, S sequences, D channels of a head, N output and K input channels of a layer,
H width of the residual stream, V vocabulary; W what all segments of a row see, a prefix once for each of its segments
(Sequences.keys_W).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import ScalingType, pad

from appliance.errors import TrainingError
from appliance.quant.codec import QuantisedWeight, quantise_tokens
from appliance.quant.codec_fp8 import quantise_fp8_tokens
from appliance.quant.cpu_gemm import (
    exact_linear,
    fp8_product,
    load_kernels,
    multiply_fp8,
    packed,
    quantise_weight,
)
from appliance.quant.int4_gemm import packed_int4
from appliance.terms.schemes import BLOCK, Scales, Scheme
from appliance.trainer.attention import Sequences

Gemm = Callable[[Tensor, Tensor | None], Tensor]  # [T, N] of activations [T, K] and a bias [N]
_WHOLE_ROWS = 32  # channels that a head has to be a multiple of for the wide form of the CPU's attention


def plain_norm(summed: Tensor, weight_H: Tensor, *, eps: float) -> Tensor:
    """Compute the norm by the plain formula. summed: float32."""
    normed = summed * torch.rsqrt(summed.pow(2).mean(dim=-1, keepdim=True) + eps)
    return normed.to(weight_H.dtype) * weight_H


class Pages:
    """Cache of keys and values for sequences that are there whole.

    The blocks of a sequence follow one another: a token's slot is its position after its sequence's first. A segment
    with a prefix has a copy of that in separate blocks, as if it were a whole sequence.
    """

    def __init__(self, sequences: Sequences, *, size: int) -> None:
        """size: number of tokens of a block."""
        positions_T = sequences.positions_T
        self._size = size
        prefixes = torch.tensor([len(prefix) for prefix in sequences.prefixes], device=positions_T.device)
        lengths_S = sequences.starts_S1.diff().long() + prefixes
        self.lengths_S = lengths_S.int()
        blocks_S = (lengths_S + size - 1) // size
        first_S = blocks_S.cumsum(0) - blocks_S
        self.count = int(blocks_S.sum())
        self.table = (first_S[:, None] + torch.arange(int(blocks_S.max()), device=positions_T.device)).int()
        self.slots_W = first_S.repeat_interleave(lengths_S) * size + positions_T[sequences.keys_W]


class _CpuAttention:
    """[T, heads, D] of q, and of k and v [T, kv_heads, D]."""

    size = 32

    def __init__(
        self,
        sequences: Sequences,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        window: int | None,
    ) -> None:
        self._pages, self._starts_S1 = Pages(sequences, size=self.size), sequences.starts_S1
        self._keys_W = sequences.keys_W if sequences.has_prefixes else None
        self._scale, self._window = scale, -1 if window is None else window
        self._isa = "vec" if head_dim % _WHOLE_ROWS == 0 else "vec16"
        self._schedule = torch.ops._C.get_scheduler_metadata(
            len(sequences.lengths),
            heads,
            kv_heads,
            head_dim,
            self._pages.lengths_S,
            torch.bfloat16,
            self._starts_S1,
            True,
            self._window,
            self._isa,
            False,  # no thread gets a part of a sequence: sums would depend on the batch (terms/environment.py)
            None,
            "auto",
        )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pages, (kv_heads, head_dim) = self._pages, k.shape[1:]
        if self._keys_W is not None:
            k, v = k.index_select(0, self._keys_W), v.index_select(0, self._keys_W)
        cache = torch.zeros(pages.count, kv_heads, 2 * self.size, head_dim, dtype=q.dtype)
        keys, values = cache.chunk(2, dim=2)
        out = torch.empty_like(q)
        torch.ops._C.cpu_attn_reshape_and_cache(k, v, keys, values, pages.slots_W, self._isa, 1.0, 1.0, "auto")
        torch.ops._C.cpu_attention_with_kv_cache(
            q,
            keys,
            values,
            out,
            self._starts_S1,
            pages.lengths_S,
            self._scale,
            True,
            None,
            self._window,
            pages.table,
            0.0,
            self._schedule,
            None,
            None,
            1.0,
            1.0,
            "auto",
        )
        return out


class _CudaAttention:
    """As _CpuAttention: FlashAttention as vLLM has it, in the version that its engines take, in one split."""

    size = 16  # vLLM's blocks

    def __init__(
        self,
        sequences: Sequences,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        window: int | None,
    ) -> None:
        if sequences.has_prefixes:
            raise TrainingError("the rollouts' forward got sequences that share a prefix: on CUDA it knows none")
        self._pages, self._sequences = Pages(sequences, size=self.size), sequences
        self._scale, self._window = scale, [-1, -1] if window is None else [window - 1, 0]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from vllm.v1.attention.backends import fa_utils

        pages, longest = self._pages, max(self._sequences.lengths)
        keys, values = (self._in_pages(each) for each in (k, v))
        out: Tensor = fa_utils.flash_attn_varlen_func(
            q=q,
            k=keys,
            v=values,
            out=torch.empty_like(q),
            cu_seqlens_q=self._sequences.starts_S1,
            max_seqlen_q=longest,
            seqused_k=pages.lengths_S,
            max_seqlen_k=longest,
            softmax_scale=self._scale,
            causal=True,
            window_size=self._window,
            block_table=pages.table,
            softcap=0.0,
            fa_version=fa_utils.get_flash_attn_version(head_size=q.shape[-1]),
            num_splits=1,
        )
        return out

    def _in_pages(self, rows_T: Tensor) -> Tensor:
        cache = rows_T.new_zeros(self._pages.count * self.size, *rows_T.shape[1:])
        cache[self._pages.slots_W] = rows_T
        return cache.unflatten(0, (-1, self.size))


class CpuKernels:
    attention: Callable[..., Callable[[Tensor, Tensor, Tensor], Tensor]] = _CpuAttention
    silu_and_mul: Callable[[Tensor], Tensor] | None = None
    """Kernel of `silu_and_mul`; None: torch's own operations, which have a gradient by themselves."""

    def load(self) -> None:
        load_kernels()

    def add_norm(self, x: Tensor, residual: Tensor | None, weight_H: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
        summed = x.float() if residual is None else x.float() + residual.float()
        return plain_norm(summed, weight_H, eps=eps), summed.to(x.dtype)

    def linear(self, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        return exact_linear(x_TK, weight_NK, bias_N)

    def log_softmax(self, logits_TV: Tensor) -> Tensor:
        """Return the log-softmax, float32."""
        return logits_TV.log_softmax(dim=-1)

    def gemm(self, weight: QuantisedWeight, *, integers: bool) -> Gemm:
        """Return what multiplies with this weight as the rollouts do. integers: in INT8."""
        if integers:
            return packed(weight.codes_NK, scale_N1=weight.scale, dtype=torch.bfloat16)
        if weight.scheme.spec.scales is Scales.GROUP:
            return packed_int4(weight)
        return lambda x_TK, bias_N: multiply_fp8(x_TK, weight, bias_N)

    def codes(self, x_TK: Tensor, *, scheme: Scheme, integers: bool) -> QuantisedWeight:
        """Return the codec's codes of activations. integers: in INT8.  Raises NumericsError when a value is not
        finite."""
        return quantise_weight(x_TK, tensor_name="an activation") if integers else quantise_tokens(x_TK, scheme=scheme)

    def product(self, left: QuantisedWeight, right: QuantisedWeight) -> Tensor:
        return fp8_product(left, right)


class CudaKernels(CpuKernels):
    """vLLM is imported at the first use: by then its platform is known."""

    attention = _CudaAttention

    def load(self) -> None:
        import vllm._custom_ops  # noqa: F401  declares the operators

    def add_norm(self, x: Tensor, residual: Tensor | None, weight_H: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
        if residual is None:
            return batch_invariant_kernels().rms_norm_batch_invariant(x, weight_H, eps), x
        x, residual = x.clone(), residual.clone()  # both are overwritten: with what is normed, and with the sum
        torch.ops._C.fused_add_rms_norm(x, residual, weight_H, eps)
        return x, residual

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
        torch.ops._C.silu_and_mul(out, gate_up.contiguous())
        return out

    def linear(self, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        out: Tensor = batch_invariant_kernels().linear_batch_invariant(x_TK, weight_NK, bias_N)
        return out

    def log_softmax(self, logits_TV: Tensor) -> Tensor:
        found: Tensor = batch_invariant_kernels().log_softmax(logits_TV)
        return found

    def gemm(self, weight: QuantisedWeight, *, integers: bool) -> Gemm:
        if weight.scheme.spec.scales is Scales.BLOCK:
            return lambda x_TK, bias_N: _multiply_in_blocks(x_TK, weight, bias_N)
        codes_KN, scale = weight.codes_NK.t(), weight.scale

        def multiply(x_TK: Tensor, bias_N: Tensor | None) -> Tensor:
            codes_TK = torch.empty_like(x_TK, dtype=codes_KN.dtype, memory_format=torch.contiguous_format)
            scale_T1 = torch.empty(len(x_TK), 1, dtype=torch.float32, device=x_TK.device)
            quantise = "dynamic_scaled_int8_quant" if integers else "dynamic_per_token_scaled_fp8_quant"
            getattr(torch.ops._C, quantise)(codes_TK, x_TK.contiguous(), scale_T1, None)
            y_TN = x_TK.new_empty(len(x_TK), codes_KN.shape[1])
            torch.ops._C.cutlass_scaled_mm(y_TN, codes_TK, codes_KN, scale_T1, scale, bias_N)
            return y_TN

        return multiply

    def codes(self, x_TK: Tensor, *, scheme: Scheme, integers: bool) -> QuantisedWeight:
        return quantise_tokens(x_TK, scheme=scheme)

    def product(self, left: QuantisedWeight, right: QuantisedWeight) -> Tensor:
        return product_in_blocks(left, right)


def product_in_blocks(left: QuantisedWeight, right: QuantisedWeight) -> Tensor:
    """Multiply as fp8_product, by cuBLAS's kernel for Hopper: sums in float32. left: in blocks of 1 x 128.  right:
    too, or of 128 x 128. Both are filled up with zeros to whole blocks: they add nothing."""
    rows, columns = len(left.codes_NK), len(right.codes_NK)
    (a_MK, scale_a, recipe_a), (b_NK, scale_b, recipe_b) = _laid_out(left), _laid_out(right)
    out_MN: Tensor = functional.scaled_mm(
        a_MK, b_NK.t(), scale_a, recipe_a, scale_b, recipe_b, output_dtype=torch.float32
    )
    return out_MN[:rows, :columns]


def _laid_out(matrix: QuantisedWeight) -> tuple[Tensor, Tensor, ScalingType]:
    """Return (codes [rows, K] row by row, scales, their kind): scales of 1 x 128 as [rows, K / 128], those of 128 x
    128 as [K / 128 filled up to a multiple of 4, rows / 128], each column by column."""
    rows, columns = matrix.codes_NK.shape
    more_rows = -rows % BLOCK
    codes = pad(matrix.codes_NK.contiguous().view(torch.uint8), (0, -columns % BLOCK, 0, more_rows))
    if matrix.block[0] == 1:
        scale = pad(matrix.scale, (0, 0, 0, more_rows)).t().contiguous().t()
        return codes.view(matrix.codes_NK.dtype), scale, ScalingType.BlockWise1x128
    scale = pad(matrix.scale, (0, -matrix.scale.shape[1] % 4)).contiguous().t()
    return codes.view(matrix.codes_NK.dtype), scale, ScalingType.BlockWise128x128


def _multiply_in_blocks(x_TK: Tensor, weight: QuantisedWeight, bias_N: Tensor | None) -> Tensor:
    """Multiply as multiply_fp8."""
    y_TN = product_in_blocks(quantise_fp8_tokens(x_TK, scheme=weight.scheme, finite=False), weight)
    return (y_TN if bias_N is None else y_TN + bias_N.float()).to(x_TK.dtype)


def batch_invariant_kernels() -> Any:
    """Return the module of vLLM's batch-invariant kernels, in Triton. Its import puts nothing into torch."""
    from vllm.model_executor.determinism import batch_invariant

    return batch_invariant


KERNELS: dict[str, CpuKernels] = {"cpu": CpuKernels(), "cuda": CudaKernels()}


def kernels_of(x: Tensor) -> CpuKernels:
    """Return the kernels of the device that x is on."""
    return KERNELS[x.device.type]
