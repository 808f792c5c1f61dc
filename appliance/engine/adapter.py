"""Weight updates that bring an adapter alone (`model.lora.sync: adapter`): the engine's base stays as it was quantised.

The first update of an engine, and each that changes its precision, brings the base too, which is quantised and proven
as a whole model is (update.py, proof.py). Every other one brings the adapter: two matrices, A [R, K] and B [N, R],
beside each linear layer that has one. vLLM keeps them in stacked tensors and adds s B A x to what the layer answers,
s = alpha / rank. What is proven of it:

* what came is what was sent: the manifest has a digest of each matrix.
* what vLLM holds is what came, bit for bit, in each layer: A, and s B rounded to the engine's dtype; zeros where a part
  of a layer has no adapter. Smoothing is folded in: where the base's weight is W diag(c), the adapter's is
  A diag(c), and where it is diag(r) W, the other is diag(r) B, by powers of two, so exactly.
* the path through a layer uses them. Layers are asked in turn, all at an update with a base. The layer's wrapper is
  called with a probe while the base answers zeros; so its answer is the adapter's alone, whatever the base's size.
* the base is still what was proven: its layers are asked again in turn with the probes of that proof, whose answers are
  kept: N numbers of each layer.

Bound of an adapter's answer, u = A x with integers x of at most 7 bits: sums of A x are in float32, u is rounded to
BF16 once (2^-9 of it), the sums over R and the answer are rounded once more each; allowed is 2^-7 sum_r |b_nr| |u_r|,
and 2 K 2^-23 sum_r |b_nr| sum_k |a_rk x_k| for the order of sums. So the probe finds another adapter, an old one or
none on the path; a single wrong bit is found by the comparison of what vLLM holds.
"""

from __future__ import annotations

import functools
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from verl.workers.rollout.vllm_rollout.utils import VLLM_LORA_INT_ID, VLLM_LORA_NAME, VLLM_LORA_PATH
from vllm.lora.layers import BaseLayerWithLoRA, LoRAMapping
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from appliance.engine.kernel_proof import ProofFault, choose_request, find_wrong_channel
from appliance.engine.precision import read_directive
from appliance.engine.update import WeightState, WeightUpdate
from appliance.errors import SyncError
from appliance.patch import Patch
from appliance.quant.codec import all_finite
from appliance.quant.cpu_gemm import exact_linear
from appliance.quant.profile import Smoothing, fold_columns, fold_rows
from appliance.sync.manifest import DIRECTIVE_NAME, digest, record_tensor
from appliance.sync.records import Acknowledgement
from appliance.terms.schemes import AS_PLANNED, Precision

A, B = "lora_A", "lora_B"
_PREFIX = "base_model.model."  # PEFT's
_LARGEST_PROBE = 63
_U = 2.0**-23


LORA_DEVICE = Patch(
    name="cpu-lora-device",
    target="vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA.__init__",
    why=(
        "vLLM asks a layer's weight where an adapter shall lie, and on a CPU an INT8 layer has none: its method holds "
        "the packed codes"
    ),
    upstream="https://github.com/vllm-project/vllm/blob/v0.28.0/vllm/lora/layers/utils.py",
    distribution="vllm",
    sources={
        "0.28.0": "3e2f05eefbdc68c6a09072b05f87077c28d65a2c3ed2fa7d5518b3fb3975e5fd",
        "0.29.0": "3e2f05eefbdc68c6a09072b05f87077c28d65a2c3ed2fa7d5518b3fb3975e5fd",
        "0.30.0": "3e2f05eefbdc68c6a09072b05f87077c28d65a2c3ed2fa7d5518b3fb3975e5fd",
        "0.31.0": "3e2f05eefbdc68c6a09072b05f87077c28d65a2c3ed2fa7d5518b3fb3975e5fd",
    },
    remove_when="a packed INT8 weight is an attribute of its layer",
)
ONE_ADAPTER = Patch(
    name="cpu-one-adapter",
    target="vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU.add_lora_linear",
    why=(
        "on a CPU vLLM copies the adapter's matrices once for each token, to serve many adapters at once; with one for "
        "all tokens two matrix products do the same, and no token depends on the others (trainer.forward: rollout)"
    ),
    upstream="https://github.com/vllm-project/vllm/blob/v0.28.0/vllm/lora/ops/torch_ops/lora_ops.py",
    distribution="vllm",
    sources={
        "0.28.0": "1a0667350ece6e573b6e64b13fa6bd67c17381189033d9d9be65226300a1643b",
        "0.29.0": "1a0667350ece6e573b6e64b13fa6bd67c17381189033d9d9be65226300a1643b",
        "0.30.0": "1a0667350ece6e573b6e64b13fa6bd67c17381189033d9d9be65226300a1643b",
        "0.31.0": "60ca3d560987e8bbd777ea8f172822b17825da48cc90343e42ea0548b33cf5b9",
    },
    remove_when="vLLM multiplies by an adapter without a copy for each token",
)


def lora_device(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, base_layer: Module) -> None:
        is_packed = getattr(base_layer, "weight", base_layer) is None
        if is_packed:
            base_layer.weight = Parameter(torch.empty(0, device="cpu"), requires_grad=False)
        original(self, base_layer)
        if is_packed:
            base_layer.weight = None

    return __init__


def one_adapter(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def add_lora_linear(
        self: Any,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **others: Any,
    ) -> None:
        is_one = len(lora_a_stacked[0]) == 1 and scale == 1.0 and not others
        if not is_one or self.no_lora or bool(self.token_lora_indices[: len(x)].any()):
            original(self, y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, **others)
            return
        start = 0
        for a_stacked, b_stacked, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            u_MR = exact_linear(x.reshape(-1, x.shape[-1]), a_stacked[0, 0], None)
            y.view(-1, y.shape[-1])[:, start : start + size] += exact_linear(u_MR, b_stacked[0, 0], None)
            start += size

    return add_lora_linear


@dataclass(frozen=True)
class Matrices:
    """An adapter of one linear layer, as the engine computes with it."""

    a_RK: Tensor
    b_NR: Tensor
    """Times alpha / rank."""


def is_adapters(name: str) -> bool:
    """Tell whether a tensor is one of an adapter's. name: as it was sent."""
    return f".{A}." in name or f".{B}." in name


def layer_of(name: str) -> tuple[str, str]:
    """Return (linear layer, A or B) of an adapter's tensor, by the checkpoint's names."""
    for part in (A, B):
        layer, found, leaf = name.removeprefix(_PREFIX).partition(f".{part}.")
        if found and leaf == "weight":
            return layer, part
    raise SyncError(f"weight update: {name} is not a matrix of an adapter")


class AdapterLayers:
    """Linear layers of an engine that vLLM has wrapped for an adapter."""

    def __init__(self, model: Module, *, loras: Any, dtype: torch.dtype) -> None:
        """loras: vLLM's, of the worker's runner (`lora_manager`).  dtype: the engine's."""
        self._model, self._loras, self._dtype = model, loras, dtype
        self._adapters = loras._adapter_manager
        self._wrappers: dict[str, BaseLayerWithLoRA] = {
            name: wrapper
            for name, wrapper in self._adapters.modules.items()
            if wrapper is model.get_submodule(name)  # not what vLLM puts around the logits, under the head's name
        }

    @contextmanager
    def taken_off(self) -> Iterator[None]:
        """Put the layers themselves in their wrappers' places: what looks at a model by its names sees the base."""
        self.take_off()
        try:
            yield
        finally:
            self.put_on()

    def take_off(self) -> None:
        for name, wrapper in self._wrappers.items():
            _replace(self._model, name, wrapper.base_layer)

    def put_on(self) -> None:
        for name, wrapper in self._wrappers.items():
            _replace(self._model, name, wrapper)

    def install(self, tensors: Mapping[str, Tensor], *, peft_config: dict[str, Any], smoothing: Smoothing) -> None:
        """Make this the adapter that the engine generates with, in place of an earlier one. tensors: by the names of
        PEFT, all of an adapter.  smoothing: of the base.  Raises SyncError."""
        scale = peft_config["lora_alpha"] / peft_config["r"]
        folded = {name: self._folded(name, tensor, smoothing=smoothing) for name, tensor in tensors.items()}
        self._expected = {
            layer: Matrices(folded[_name(layer, A)], (folded[_name(layer, B)] * scale).to(self._dtype))
            for layer in dict.fromkeys(layer_of(name)[0] for name in folded)
            if self._has_both(layer, folded)
        }
        # Requests bring no tensors: vLLM finds the adapter by its number, and loads nothing.
        self._request = LoRARequest(VLLM_LORA_NAME, VLLM_LORA_INT_ID, VLLM_LORA_PATH)
        self._loras.remove_adapter(VLLM_LORA_INT_ID)
        try:
            self._adapters.add_adapter(self._loaded(folded, peft_config=peft_config))
            self._adapters.activate_adapter(VLLM_LORA_INT_ID)
        except (ValueError, AssertionError, RuntimeError, LookupError, AttributeError) as error:  # so vLLM refuses
            raise SyncError(f"weight update: vLLM refused the adapter: {type(error).__name__}: {error}") from error

    def _loaded(self, tensors: dict[str, Tensor], *, peft_config: dict[str, Any]) -> LoRAModel:
        """Make vLLM's adapter of tensors, as its `_load_adapter` does of files. verl's version of that, for tensors,
        calls what vLLM 0.31 does not have any more."""
        config = PEFTHelper.from_dict(peft_config)
        config.validate_legal(self._loras.lora_config)
        mapper = getattr(self._adapters.model, "hf_to_vllm_mapper", None)
        return self._loras._lora_model_cls.from_lora_tensors(
            tensors=tensors,
            peft_helper=config,
            lora_model_id=VLLM_LORA_INT_ID,
            device="cpu",
            dtype=self._loras.lora_config.lora_dtype,
            model_vocab_size=self._loras.vocab_size,
            weights_mapper=mapper.get_rename_mapper() if mapper is not None else None,
        )

    def _has_both(self, layer: str, tensors: Mapping[str, Tensor]) -> bool:
        for part in (A, B):
            if _name(layer, part) not in tensors:
                raise SyncError(f"weight update: {layer} has no {part} in the adapter that came")
        return True

    def _folded(self, name: str, tensor: Tensor, *, smoothing: Smoothing) -> Tensor:
        layer, part = layer_of(name)
        rounded = tensor.to(self._dtype)
        fold = fold_columns if part == A else fold_rows
        return fold(name, rounded, weight=f"{layer}.weight", smoothing=smoothing)

    def check(self, sync: int, *, every: int, everyone: bool) -> int:
        """Compare what vLLM holds with what came, in every layer, and ask the paths of those whose turn it is. every:
        turns, see kernel_proof.py.  everyone: ask all.  Returns the number of layers that were asked. Raises SyncError
        for the first layer that differs."""
        place = self._place()
        self._activate()
        left, num_asked = set(self._expected), 0
        for turn, (name, wrapper) in enumerate(self._wrappers.items()):
            parts = self._parts(name)
            left -= {*parts}
            matrices = [self._expected.get(part) for part in parts]
            if not isinstance(wrapper, BaseLinearLayerWithLoRA):  # an embedding's, which adapters here have none for
                if any(bool(stacked[place].any()) for stacked in _stacked(wrapper)):
                    raise SyncError(f"weight update {sync}: {name} has an adapter, which none came for")
                continue
            if mismatch := self._not_held(wrapper, matrices, place=place):
                raise _differs(sync, name, mismatch)
            if choose_request(turn, sync=sync, every=every, everyone=everyone) is None:
                continue
            num_asked += 1
            if mismatch := self._wrong_answer(name, wrapper, matrices, sync=sync):
                raise _differs(sync, name, mismatch)
        for layer in sorted(left):
            raise SyncError(f"weight update {sync}: this engine has no place for an adapter of {layer}")
        return num_asked

    def _place(self) -> int:
        """Find the adapter's place in the stacked tensors."""
        if VLLM_LORA_INT_ID not in self._adapters.lora_index_to_id:
            raise SyncError("weight update: vLLM holds no adapter after it took one")
        return self._adapters.lora_index_to_id.index(VLLM_LORA_INT_ID)

    def _activate(self) -> None:
        """Have the next call's one token use the adapter."""
        one = (VLLM_LORA_INT_ID,)
        self._loras.set_active_adapters({self._request}, LoRAMapping(one, one, is_prefill=True))

    def _parts(self, name: str) -> list[str]:
        """List the checkpoint's layers that a layer of vLLM is made of."""
        parent, _, leaf = name.rpartition(".")
        parts = self._adapters.packed_modules_mapping.get(leaf) or [leaf]
        return [f"{parent}.{part}" for part in parts]

    def _not_held(self, wrapper: Any, matrices: list[Matrices | None], *, place: int) -> ProofFault | None:
        for number, (ours, size) in enumerate(zip(matrices, wrapper.output_slices, strict=True)):
            a_stacked, b_stacked = (each[number][place, 0] for each in (wrapper.lora_a_stacked, wrapper.lora_b_stacked))
            if ours is not None:
                shapes = tuple(ours.a_RK.shape), tuple(ours.b_NR.shape)
                rank = shapes[0][0]
                if shapes != (wanted := ((rank, a_stacked.shape[1]), (size, rank))):  # vLLM fills up with zeros
                    return ProofFault(f"shapes of part {number}", str(wanted), str(shapes))
            for matrix, stacked, part in (
                (A, a_stacked, ours and ours.a_RK),
                (B, b_stacked, ours and ours.b_NR),
            ):
                whole = torch.zeros_like(stacked)
                if part is not None:
                    whole[: part.shape[0], : part.shape[1]] = part
                if not torch.equal(stacked, whole):
                    return ProofFault(f"digest of {matrix}, part {number}", digest(stacked), digest(whole))
        return None

    def _wrong_answer(
        self, name: str, wrapper: Any, matrices: list[Matrices | None], *, sync: int
    ) -> ProofFault | None:
        base = wrapper.base_layer
        length = wrapper.lora_a_stacked[0].shape[-1]
        generator = torch.Generator("cpu").manual_seed(zlib.crc32(f"{name} {sync}".encode()))
        probe_K = torch.randint(-_LARGEST_PROBE, _LARGEST_PROBE + 1, (length,), generator=generator, device="cpu")
        sizes = list(wrapper.output_slices)
        exact_N, bound_N = (torch.zeros(sum(sizes), dtype=torch.float64, device="cpu") for _ in range(2))
        start = 0
        for ours, size in zip(matrices, sizes, strict=True):
            if ours is not None:
                a_RK, b_NR = ours.a_RK.double().cpu(), ours.b_NR.double().cpu()
                u_R = a_RK @ probe_K.double()
                order_R = length * _U * (a_RK.abs() @ probe_K.abs().double())
                part = slice(start, start + len(b_NR))
                exact_N[part] = b_NR @ u_R
                bound_N[part] = b_NR.abs() @ (2.0**-7 * u_R.abs() + 2 * order_R)
            start += size
        method, base.quant_method = base.quant_method, _Zeros(sum(sizes))
        try:
            answer_MN = wrapper.apply(probe_K[None].to(torch.get_default_device(), self._dtype))
        finally:
            base.quant_method = method
        return find_wrong_channel(answer_MN[0].double().cpu(), exact_N, bound_N=bound_N + 2.0**-100)


class AdapterUpdate(WeightUpdate):
    """Takes updates of an adapter, with or without the model's own weights, as WeightUpdate takes those of a model.

    While one is under way the layers are out of their wrappers.
    """

    def __init__(self, model: Module, *, loras: Any, model_config: Any, prove_every: int = 1, **others: Any) -> None:
        """loras: vLLM's, of the worker's runner (`lora_manager`).  model_config, prove_every, others: see
        WeightUpdate."""
        self._adapter_layers = AdapterLayers(model, loras=loras, dtype=model_config.dtype)
        with self._adapter_layers.taken_off():
            super().__init__(model, model_config=model_config, prove_every=prove_every, keeps_proof=True, **others)
        self._every = prove_every
        self._base: tuple[Precision, Smoothing] | None = None
        self.peft_config: dict[str, Any] = {}
        """PEFT's configuration of the adapter that comes next."""

    def begin(self) -> None:
        super().begin()
        self._matrices: dict[str, Tensor] = {}
        self._precision_sent = AS_PLANNED
        self._adapter_layers.take_off()

    def _take_directive(self, tensor: Tensor) -> None:
        if self._now.is_open or self._matrices:
            raise SyncError("weight update: the precision came after the first tensor")
        self._now.arrived[DIRECTIVE_NAME] = record_tensor(DIRECTIVE_NAME, tensor)
        self._precision_sent = read_directive(tensor)

    def _begin_reload(self, precision: Precision) -> None:
        super()._begin_reload(self._precision_sent)

    def _load_one(self, name: str, tensor: Tensor) -> None:
        if not is_adapters(name):
            return super()._load_one(name, tensor)
        if self._now.manifest is not None:
            raise SyncError(f"weight update: {name} came after the list of what was sent")
        if name in self._matrices:
            raise SyncError(f"weight update: {name} came twice")
        started = time.perf_counter()
        if self._needs_manifest:
            self._now.arrived[name] = record_tensor(name, tensor)
        self._now.digest_s += time.perf_counter() - started
        if not all_finite(tensor):
            raise SyncError(f"weight update: {name} has a value that is not finite")
        self._matrices[name] = tensor.clone()
        self._now.bytes += tensor.nbytes

    def finish(self) -> Acknowledgement:
        with self._breaking():
            brings_base = self._now.is_open
            taken = super().finish() if brings_base else self._finish_alone()
            self.state = WeightState.OPEN
            if brings_base:
                self._base = self._precision_sent, self._now.smoothing
            assert self._base is not None, "refused before"
            self._adapter_layers.put_on()
            started = time.perf_counter()
            with self._naming("the adapter"):
                self._adapter_layers.install(self._matrices, peft_config=self.peft_config, smoothing=self._base[1])
            self._adapter_layers.check(self._sync, every=self._every, everyone=brings_base)
            seconds = time.perf_counter() - started
            self.state, self.fault = WeightState.WHOLE, ""
        return replace(
            taken,
            tensors=taken.tensors + len(self._matrices),
            bytes=self._now.bytes,
            proof_s=taken.proof_s + seconds,
            seconds=taken.seconds + seconds,
        )

    def _finish_alone(self) -> Acknowledgement:
        """Check an update that brought an adapter and nothing else."""
        self._check_arrival()
        if self._base is None:
            raise SyncError(f"weight update {self._sync}: an adapter came before the weights that it is for")
        if self._precision_sent != self._base[0]:
            raise SyncError(f"weight update {self._sync}: another precision came without the model's weights")
        self.telemetry.begin()
        started = time.perf_counter()
        return self._acknowledgement(self._proof.ask_again(self._sync), started=started)


def _stacked(wrapper: Any) -> list[Tensor]:
    """List the tensors in which a wrapper that is no linear layer's has adapters, by place."""
    held = (getattr(wrapper, name, None) for name in ("lora_a_stacked", "lora_b_stacked"))
    return [tensor for each in held if each is not None for tensor in ([each] if isinstance(each, Tensor) else each)]


class _Zeros:
    """Linear method whose answer is 0."""

    def __init__(self, channels: int) -> None:
        self._channels = channels

    def apply(self, layer: Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return x.new_zeros((*x.shape[:-1], self._channels))


def _name(layer: str, part: str) -> str:
    return f"{_PREFIX}{layer}.{part}.weight"


def _replace(model: Module, name: str, module: Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def _differs(sync: int, name: str, mismatch: ProofFault) -> SyncError:
    why = f"weight update {sync}: the adapter of {name} is not as received: {mismatch}"
    return SyncError(why, hint="no rollouts were made with these weights")
