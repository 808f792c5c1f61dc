"""Scales of an engine's FP8 KV cache: measured on what the attention layers write, written into the layers, and proven.

vLLM reads `_k_scale` and `_v_scale` of an attention layer (tensors, and floats of the same value) at each call, sets
them to 1 with every weight update and, on a GPU, when the engine wakes, and measures nothing. So they are written after
the whole update, when the engine could generate, for the weights as they are by then: quantised, with all folds.

Measured is what a layer hands over to its cache, `do_kv_cache_update`, so keys after their norm and rotary embedding.

Rounding. vLLM's kernel of a CPU cuts off the bits that FP8 does not have, so that every key and value becomes smaller,
by up to 1/9 and by 4 % in the mean: 1,860 of 4,096 random numbers are not the nearest FP8 number (0.28 and 0.31 alike).
Scales are powers of two, so the bits of x / s are those of x; half a unit of FP8's last bit, added to the bits of x
before, makes the nearest number of what is then cut off (`FP8_ROUNDING`). Below FP8's normal numbers, 2^-14 of the
largest, bits are still cut off.

The proof. What the layers hold is read back and must be, bit for bit, what was sent. On a CPU the kernels are asked
besides, in a block of their own. Two tokens are written: in each dimension keys of s_k (a + 0.4 u) and
-s_k (a - 0.4 u), values likewise with b, where a and b are FP8 numbers and u is the distance to the next one. The
second token then attends to both, with a query that gives it the logit L and the first one -L:

    written: the cache has exactly the codes +-a and +-b, as long as the kernel rounds and has the scale within 1 %;
    read: the answer is -b s_v tanh(L) within 2 %. A scale of values that differs by 2 % would change it by as much, a
    scale of keys that differs by 3 % by 2 %.

Layers with sinks, alibi or a soft cap of their logits are asked for the codes only.

Legend: T tokens, H KV heads, D width of a head.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from vllm import _custom_ops as ops
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform
from vllm.utils.torch_utils import is_quantized_kv_cache

from appliance.errors import EngineError, SyncError
from appliance.patch import Patch
from appliance.quant.kv_scales import Pairs, digest_of, usual_largest
from appliance.terms.counts import counted
from appliance.terms.settings import KvCache

FP8_ROUNDING = Patch(
    name="cpu-fp8-rounding",
    target="vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.do_kv_cache_update",
    why="the kernel that writes a KV cache in FP8 cuts off bits: keys and values become 4 % smaller in the mean",
    upstream="https://github.com/vllm-project/vllm/blob/v0.28.0/vllm/v1/attention/backends/cpu_attn.py",
    distribution="vllm",
    sources={
        "0.28.0": "2789246a92e8cb7d0b870d5334d85823025e002082491b0242694583a84de438",
        "0.29.0": "9cccd68715a2b983c1f3244e953235854492ff00c310e8dfc42e623aa3f7950e",
        "0.30.0": "9cccd68715a2b983c1f3244e953235854492ff00c310e8dfc42e623aa3f7950e",
        "0.31.0": "9cccd68715a2b983c1f3244e953235854492ff00c310e8dfc42e623aa3f7950e",
    },
    remove_when="cpu_attn_reshape_and_cache writes the FP8 number that is the nearest",
)
_HALF_UNIT = 1 << 3  # half of FP8's last bit, in the bits of a BF16 number
KEYS, VALUES = "keys", "values"
_KEY_CODE, _VALUE_CODE = 1.25, 208.0  # FP8 numbers in the middle of their binades
_KEY_UNIT, _VALUE_UNIT = 0.125, 16.0  # to the next numbers
_OFF = 0.4  # units beside a number: to the nearest number that is rounded to it
_LOGIT = 0.75  # of the token itself; its attention to it is 1 / (1 + exp(-2 * _LOGIT))
_TOLERANCE = 0.02


def rounding(original: Callable[..., None]) -> Callable[..., None]:
    """Return what replaces the method of vLLM: a write to the cache that rounds to the nearest FP8 number. For keys and
    values in BF16, and scales that are powers of two."""

    @functools.wraps(original)
    def do_kv_cache_update(
        self: Any, layer: Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        if self.is_fp8_kv_cache:
            key, value = (x.view(torch.int16).add(_HALF_UNIT).view(torch.bfloat16) for x in (key, value))
        original(self, layer, key, value, kv_cache, slot_mapping)

    return do_kv_cache_update


def kv_cache_format(model: Module) -> KvCache:
    """Read the format of the KV cache off the layers. Raises EngineError where only a part of them has FP8, or where a
    layer other than plain attention, such as MLA's, has it: there scales are not known."""
    layers = [layer for layer in model.modules() if isinstance(layer, AttentionLayerBase)]
    formats = {layer: str(getattr(layer, "kv_cache_dtype", KvCache.AUTO)) for layer in layers}
    in_fp8 = [layer for layer, name in formats.items() if is_quantized_kv_cache(name)]
    if not in_fp8:
        return KvCache.AUTO
    if other := next((layer for layer in layers if type(layer) is not Attention), None):
        raise EngineError(
            f"a KV cache in FP8 needs plain attention in every layer, this model has {type(other).__name__}"
        )
    if len(in_fp8) < len(layers):
        raise EngineError(f"{len(in_fp8)} of {counted(len(layers), 'attention layer')} have a KV cache in FP8")
    return KvCache.FP8


class KvCacheScales:
    """The scales of one worker's model. `begin`, a forward of some prompts, `end`; `write`; `check` at any time."""

    def __init__(self, model: Module) -> None:
        """Raises EngineError for a model without a KV cache in FP8."""
        layers = [layer for layer in model.modules() if isinstance(layer, Attention)]
        self._layers = {layer.layer_name: layer for layer in layers if is_quantized_kv_cache(layer.kv_cache_dtype)}
        if not self._layers:
            raise EngineError("no attention layer of this engine has a KV cache in FP8")
        self._largest: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
        self._written: tuple[Pairs, int] | None = None

    @property
    def _writers(self) -> Iterator[tuple[str, Attention]]:
        """Layers that write a cache, with their names; the others read that of another layer."""
        for name, layer in self._layers.items():
            if layer.kv_sharing_target_layer_name is None:
                yield name, layer

    def begin(self, scales: Pairs) -> None:
        """Note from now on what is written. scales: in place meanwhile; empty: 1 everywhere."""
        self._largest.clear()
        self._written = None
        ones = {name: (1.0, 1.0) for name, _ in self._writers}
        self._put(scales or ones)
        for name, layer in self._writers:
            layer.impl.do_kv_cache_update = functools.partial(self._note, name, layer.impl.do_kv_cache_update)

    def _note(
        self, name: str, update: Any, layer: Module, key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor
    ) -> None:
        """Write as the layer's own method does. key, value: [T, H, D], padded at the end.  slots: [T], below 0 where
        nothing is written."""
        is_real_T = slots >= 0
        for kind, tensor in ((KEYS, key), (VALUES, value)):
            largest_T = tensor[: len(slots)][is_real_T].flatten(1).abs().amax(1)
            self._largest[name, kind].append(largest_T.float())
        update(layer, key, value, kv_cache, slots)

    def end(self) -> Pairs:
        """Return the range of each layer's keys and values since `begin`. Raises SyncError where one is not finite,
        EngineError where nothing was written."""
        for _, layer in self._writers:
            del layer.impl.do_kv_cache_update  # the instance's; the class has its own
        ranges = {name: (self._range(name, KEYS), self._range(name, VALUES)) for name, _ in self._writers}
        self._largest.clear()
        return ranges

    def _range(self, name: str, kind: str) -> float:
        if not self._largest[name, kind]:
            raise EngineError(f"KV scales: {name} wrote no {kind}")
        largest_T = torch.cat(self._largest[name, kind]).cpu()
        if not bool(largest_T.isfinite().all()):
            raise SyncError(f"KV scales: {name} wrote {kind} that are not finite")
        return usual_largest(largest_T)

    def write(self, scales: Pairs, *, sync: int) -> str:
        """Write the scales of a weight update, prove them, and return the digest of what the layers have then. Raises
        SyncError for scales of other layers, and as `check`."""
        names = {name for name, _ in self._writers}
        if names != set(scales):
            raise SyncError(
                f"KV scales: sent for {counted(len(scales), 'layer')}, this engine has {len(names)}, of which "
                f"{len(names & set(scales))} were sent"
            )
        self._put(scales)
        self._written = scales, sync
        digest = self.check(sync=sync)
        if current_platform.is_cpu():
            for name, layer in self._writers:
                _ask_kernel(layer, name=name, scales=scales[name])
        return digest

    def check(self, *, sync: int) -> str:
        """Read back what the layers have, and return its digest. sync: number of the newest weight update. Raises
        SyncError where a layer has another scale than was written, and where none was written for this update."""
        if self._written is None:
            raise SyncError(f"KV scales: none were written for weight update {sync}")
        scales, written_sync = self._written
        if written_sync != sync:
            raise SyncError(f"KV scales: those of weight update {written_sync} are in place, {sync} is the newest")
        for name, layer in self._layers.items():
            sent = scales[_source_of(layer)]
            for kind, scale, present in zip((KEYS, VALUES), sent, _scales_of_layer(layer), strict=True):
                other = next((value for value in present if value != scale), None)
                if other is not None:
                    raise SyncError(f"KV scales: {name} has {other:.9g} for its {kind}, {scale:.9g} was written")
        read_back = {name: (layer._k_scale_float, layer._v_scale_float) for name, layer in self._writers}
        return digest_of(read_back, sync=sync)

    def _put(self, scales: Pairs) -> None:
        for layer in self._layers.values():
            keys, values = scales[_source_of(layer)]
            layer._k_scale.fill_(keys)
            layer._v_scale.fill_(values)
            layer._k_scale_cpu.fill_(keys)
            layer._v_scale_cpu.fill_(values)
            layer._k_scale_float, layer._v_scale_float = keys, values


def _source_of(layer: Attention) -> str:
    """Name of the layer whose cache a layer reads: as a rule its own."""
    return layer.kv_sharing_target_layer_name or layer.layer_name


def _scales_of_layer(layer: Attention) -> tuple[list[float], list[float]]:
    """All places in which a layer has its scale of keys, and of values."""
    return (
        [float(layer._k_scale), float(layer._k_scale_cpu), layer._k_scale_float],
        [float(layer._v_scale), float(layer._v_scale_cpu), layer._v_scale_float],
    )


def _ask_kernel(layer: Attention, *, name: str, scales: tuple[float, float]) -> None:
    """Ask the kernels of a CPU whether they write and read with these scales. Raises SyncError."""
    impl, cache = layer.impl, torch.zeros_like(layer.kv_cache[:1])
    codes, units = (_KEY_CODE, _VALUE_CODE), (_KEY_UNIT, _VALUE_UNIT)
    ones_THD = torch.ones(2, layer.num_kv_heads, layer.head_size)
    key_THD, value_THD = (
        (scale * torch.tensor([code + _OFF * unit, _OFF * unit - code]).view(2, 1, 1) * ones_THD).to(layer.dtype)
        for code, unit, scale in zip(codes, units, scales, strict=True)
    )
    keys, values = (code * scale for code, scale in zip(codes, scales, strict=True))
    slots_T = torch.arange(2)
    impl.do_kv_cache_update(layer, key_THD, value_THD, cache, slots_T)
    codes_in_cache = sorted(set(cache.view(torch.float8_e4m3fn).float().flatten().tolist()) - {0.0})
    expected = sorted(sign * code for code in codes for sign in (1, -1))
    if codes_in_cache != expected:
        raise SyncError(f"KV scales: the cache of {name} has the codes {codes_in_cache[:6]}, by its scales {expected}")
    if impl.logits_soft_cap or impl.alibi_slopes is not None or impl.sinks is not None:
        return
    query = -_LOGIT / (impl.scale * keys * layer.head_size)
    query_THD = torch.full((1, layer.num_heads, layer.head_size), query, dtype=layer.dtype)
    logit = -impl.scale * keys * layer.head_size * float(query_THD[0, 0, 0])
    answer = torch.empty_like(query_THD)
    impl.forward(layer, query_THD, key_THD[1:], value_THD[1:], cache, _metadata(layer), answer)
    expected_answer = -values * math.tanh(logit)
    if not torch.allclose(answer.float(), torch.tensor(expected_answer), rtol=_TOLERANCE, atol=0.0):
        worst = answer.float().flatten()[(answer.float() - expected_answer).abs().argmax()]
        raise SyncError(f"KV scales: attention of {name} answers {worst:.4g}, by its scales {expected_answer:.4g}")


def _metadata(layer: Attention) -> Any:
    """Describe to vLLM's attention on a CPU one sequence of two tokens, of which the second is new."""
    impl, starts, lengths = layer.impl, torch.tensor([0, 1], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    schedule = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=1,
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_size,
        seq_lens=lengths,
        dtype=layer.dtype,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=impl.sliding_window,
        isa=getattr(layer, "isa", None) or impl.isa,  # vLLM 0.28 has it on the implementation
        enable_kv_split=False,
        dynamic_causal=None,
        kv_cache_dtype=impl.kv_cache_dtype,
    )
    return SimpleNamespace(
        num_actual_tokens=1,
        query_start_loc=starts,
        seq_lens=lengths,
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        scheduler_metadata=schedule,
        causal=True,
        dynamic_causal=None,
    )
