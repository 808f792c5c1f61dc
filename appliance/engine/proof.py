"""The proof of one weight update on one rank: the model now computes with every tensor that was received.

It does not trust vLLM's loaders, reload or kernels: what a layer must hold and answer comes from the tensors received,
by a mapping (tensor_slots.py) and by quantising them again. That is done by the engine's own quantiser (vLLM's rows for
INT8, Numba's code for emulated FP8), and the reference codec quantises sampled rows (kernel_proof.py); for vLLM's
own FP8 methods by the codec (fp8_proof.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor
from torch.nn import Module
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.platforms import current_platform

from appliance.engine.kernel_proof import (
    Bf16Proof,
    Int8Proof,
    KernelProof,
    ProofFault,
    ProofRequest,
    check_quantiser,
    choose_request,
)
from appliance.engine.plain_experts import ExpertSlot, expert_slots
from appliance.engine.quantised import Quantising
from appliance.engine.tensor_slots import Slot, expert_gemms, expert_shape, is_wide, local_shape, slots
from appliance.errors import SyncError
from appliance.sync.manifest import digest
from appliance.terms.schemes import Scheme

_COPIED = 1 << 14  # bytes
Expecting = Callable[..., KernelProof]  # of `request=`
Place = tuple[str, str, int]  # a layer's name, its parameter, number of the part


@dataclass(frozen=True)
class Proven:
    """Numbers of what an update has proven; fields as of an Acknowledgement."""

    layers: int
    layers_proven: int
    parameters_proven: int
    unproven: int
    """Number of tensors that could not be proven: weights that a kernel of vLLM's own FP8 methods packs its own way or
    rescales by powers of two, experts in BF16 whose order in memory is not known here, and tensors that no layer of
    ours has."""


class SyncProof:
    """Proof of a weight update: call `begin`, `take` with every tensor, and `check` when vLLM has finished."""

    def __init__(
        self,
        model: Module,
        *,
        tied_head: bool,
        rank: int,
        every: int,
        parts: int = 1,
        dtype: torch.dtype,
        keeps: bool = False,
    ) -> None:
        """rank: within the engine.  every, parts: see kernel_proof.py.  dtype: the engine's.  keeps: whether
        `ask_again` will be called after an update that proved all."""
        self._keeps = keeps
        self._asked_again: dict[str, tuple[KernelProof | None, list[tuple[Slot, Tensor | str]]]] = {}
        self._model, self._dtype = model, dtype
        self._rank = rank
        self._every, self._parts = every, parts
        experts = {name: (slot,) for name, slot in expert_slots(model, dtype=dtype)}
        self._slots: dict[str, tuple[Slot, ...]] = slots(model, tied_head=tied_head) | experts
        self._places = {name: frozenset(map(_place, places)) for name, places in self._slots.items()}
        self._layers: dict[str, Module] = dict(model.named_modules())
        self._wide = {
            name
            for name, places in self._slots.items()
            if any(is_wide(self._layers.get(slot.layer), slot.parameter, dtype=dtype) for slot in places)
        }
        self._provable = _provable(model, dtype=dtype)
        quantised = {name for name, layer in self._layers.items() if isinstance(_method(layer), Quantising)}
        self._unasked = quantised - self._provable.keys()
        self._layers |= {name: gemm for name, (_, gemm) in expert_gemms(model).items()}
        self._layers_of = {
            name: [self._layers[layer] for layer in dict.fromkeys(slot.layer for slot in places)]
            for name, places in self._slots.items()
            if name not in experts  # vLLM collects what they wait for
        }
        self._sync = 0
        self._unproven = 0
        self._due: dict[str, ProofRequest] = {}
        self._kernels: dict[str, KernelProof] = {}  # until they are checked: one may keep 128 bytes of each row
        self._missing: set[tuple[str, int]] = set()
        # A digest of each parameter, or the tensor itself where it is so small that a digest takes longer.
        self._expected: list[tuple[Slot, Tensor | str]] = []
        self._taken: set[Place] = set()
        self._sources: dict[str, dict[int, str]] = {}  # of a layer's rows: where a tensor begins, and its name

    def begin(self, sync: int, *, changed: bool = False) -> None:
        """Begin the proof of an update. sync: number of the update, from 1.  changed: whether layers have another
        precision than at the update before; then all layers are checked, as at the first update."""
        self._sync = sync
        if changed:
            self._provable = _provable(self._model, dtype=self._dtype)
        self._expected.clear()
        self._taken.clear()
        self._sources.clear()
        self._unproven = 0
        requests = {
            name: choose_request(turn, sync=sync, every=self._every, parts=self._parts, everyone=changed)
            for turn, name in enumerate(self._layers)
        }
        self._due = {name: how for name, how in requests.items() if how is not None}
        self._kernels = {
            name: make(request=self._due[name]) for name, make in self._provable.items() if name in self._due
        }
        weights = (slot for places in self._slots.values() for slot in places if slot.parameter == "weight")
        self._missing = {(slot.layer, slot.part) for slot in weights if slot.layer in self._kernels}

    def layers_of(self, name: str) -> list[Module]:
        """Return the layers that a checkpoint's tensor has a part in, each of them once."""
        return self._layers_of.get(name, [])

    def rounds(self, name: str) -> bool:
        """Return whether all parameters that this tensor is loaded into have the engine's dtype."""
        return name in self._slots and name not in self._wide

    def has_some_of(self, name: str) -> bool:
        """Return whether the place of this tensor has been filled, by it or by another one that is fused with it."""
        return not self._taken.isdisjoint(self._places.get(name, ()))

    def notices(self, name: str) -> bool:
        """Return whether `check` will notice, and name, a value of this tensor that is not finite, so that no other
        check is needed. Only on a CPU: no kernel of a GPU was tried for whether it skips what is multiplied by zero."""
        places = self._slots.get(name, ())
        return bool(places) and current_platform.is_cpu() and all(self._sees_all(slot) for slot in places)

    def _sees_all(self, slot: Slot) -> bool:
        proof = self._kernels.get(slot.layer)
        return slot.parameter == "weight" and isinstance(proof, Bf16Proof) and not proof.shape.is_cut

    def source_of(self, layer: str) -> str:
        """Return the checkpoint's name of the tensor that a layer's weight comes from, or an empty text."""
        return next((name for name, places in self._slots.items() if any(slot.layer == layer for slot in places)), "")

    def take(self, name: str, tensor: Tensor, *, known: str = "") -> bool:
        """Expect this tensor. known: its digest, or empty. Returns False, and expects nothing, where its size is not
        what its layers have. Raises NumericsError where it cannot be quantised."""
        slots = self._slots.get(name, ())
        if not all(slot.fits(tensor) for slot in slots):
            return False
        self._unproven += not slots
        self._taken |= self._places.get(name, frozenset())
        for slot in slots:
            if slot.layer in self._kernels and slot.parameter == "weight":
                self._kernels[slot.layer].take(slot, tensor)
                self._missing.discard((slot.layer, slot.part))
                self._sources.setdefault(slot.layer, {})[slot.start] = name
                if _looks_up(self._layers[slot.layer]):  # in the weight itself; what multiplies may be a copy
                    self._expect_parameter(slot, tensor, known=known)
            elif slot.parameter == "weight" and slot.layer in self._unasked:  # codes that we cannot tell or find
                self._unproven += 1
            elif slot.layer in self._due and (slot.layer not in self._provable or slot.parameter != "weight"):
                if isinstance(slot, ExpertSlot) and not self._due[slot.layer].takes(slot.expert):
                    continue
                self._expect_parameter(slot, tensor, known=known)
        return True

    def _expect_parameter(self, slot: Slot, tensor: Tensor, *, known: str) -> None:
        parameter = getattr(self._layers[slot.layer], slot.parameter, None)
        if parameter is None:
            return
        part = slot.cut(tensor).to(parameter.dtype)
        if part.nbytes <= _COPIED:
            self._expected.append((slot, part.clone()))
        else:
            same = (part.data_ptr(), part.shape, part.dtype) == (tensor.data_ptr(), tensor.shape, tensor.dtype)
            self._expected.append((slot, known if known and same else digest(part)))

    def check(self) -> Proven:
        """Compare the model with what was received. Raises SyncError for the first layer that differs, with its name,
        the rank and both numbers."""
        for layer, part in sorted(self._missing):
            raise SyncError(f"weight update {self._sync}: {layer} cannot be proven: part {part} never arrived")
        self._compare(self._expected)
        check_quantiser(self._kernels)
        for name, proof in self._kernels.items():
            if mismatch := proof.check(self._layers[name]):
                self._fail_on(name, mismatch)
        proven = Proven(
            layers=len(self._provable),
            layers_proven=len(self._kernels),
            parameters_proven=len(self._expected),
            unproven=self._unproven,
        )
        if self._keeps:
            self._keep()
        self._kernels.clear()
        self._expected.clear()
        return proven

    def _keep(self) -> None:
        """Keep what the layers must hold and answer. Rows that the codec has quantised are let go."""
        by_layer: dict[str, list[tuple[Slot, Tensor | str]]] = {}
        for slot, received in self._expected:
            by_layer.setdefault(slot.layer, []).append((slot, received))
        for proof in self._kernels.values():
            if isinstance(proof, Int8Proof):
                proof.samples.clear()
        names = [name for name in self._layers if name in self._kernels or name in by_layer]
        self._asked_again = {name: (self._kernels.get(name), by_layer.get(name, [])) for name in names}

    def ask_again(self, sync: int) -> Proven:
        """Ask layers in turn, at an update without tensors of the model, for what they had to hold and answer at the
        last one with them. Raises SyncError as `check` does."""
        self._sync = sync
        due = [
            (name, kept)
            for turn, (name, kept) in enumerate(self._asked_again.items())
            if choose_request(turn, sync=sync, every=self._every, parts=self._parts) is not None
        ]
        for name, (proof, expected) in due:
            self._compare(expected)
            if proof is not None and (mismatch := proof.check(self._layers[name])):
                self._fail_on(name, mismatch)
        return Proven(
            layers=len(self._provable),
            layers_proven=sum(proof is not None for _, (proof, _) in due),
            parameters_proven=sum(len(expected) for _, (_, expected) in due),
            unproven=self._unproven,
        )

    def _compare(self, expected: list[tuple[Slot, Tensor | str]]) -> None:
        for slot, received in expected:
            stored = slot.within(getattr(self._layers[slot.layer], slot.parameter).data)
            if isinstance(received, Tensor) and _same_bits(stored, received):
                continue
            pair = digest(stored), digest(received) if isinstance(received, Tensor) else received
            if pair[0] != pair[1]:
                self._fail_on(slot.layer, ProofFault(f"digest of {slot.parameter}", *pair))

    def _fail_on(self, layer: str, mismatch: ProofFault) -> NoReturn:
        why = f"weight update {self._sync}: {layer} on rank {self._rank} is not as received: {mismatch}"
        hint = "no rollouts were made with these weights"
        if mismatch.channel is not None:
            start = max(start for start in self._sources[layer] if start <= mismatch.channel)
            if self.notices(name := self._sources[layer][start]):
                hint = f"or what {layer} on rank {self._rank} multiplies by has one ({mismatch}); {hint}"
                why = f"weight update: {name} has a value that is not finite"
        raise SyncError(why, hint=hint)


def _same_bits(left: Tensor, right: Tensor) -> bool:
    """Compare the bits of any values: NaN is itself, and -0 is not 0."""
    if (left.shape, left.dtype, left.device) != (right.shape, right.dtype, right.device):
        return False
    return torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (left, right)))


def _place(slot: Slot) -> Place:
    return (slot.layer, slot.parameter, slot.part)


def _provable(model: Module, *, dtype: torch.dtype) -> dict[str, Expecting]:
    """Return the layers whose kernels can be asked: the last projection, too, which is an embedding where a model has
    no other. Without one: experts (each GEMM is a separate layer)."""
    provable: dict[str, Expecting] = {}
    has_head = any(isinstance(layer, ParallelLMHead) for layer in model.modules())
    heads = ParallelLMHead if has_head else VocabParallelEmbedding
    for name, layer in model.named_modules():
        method = _method(layer)
        if isinstance(method, Quantising):
            if method.provable:
                provable[name] = functools.partial(method.proof, name, local_shape(layer), method.scheme, dtype=dtype)
        elif isinstance(layer, heads) or isinstance(method, UnquantizedLinearMethod):
            own = torch.float32 if is_wide(layer, "weight", dtype=dtype) else dtype
            provable[name] = functools.partial(Bf16Proof, name, local_shape(layer), Scheme.BF16, dtype=own)
    for name, (layer, gemm) in expert_gemms(model).items():
        method = gemm.quant_method
        provable[name] = functools.partial(method.proof, name, expert_shape(layer, gemm), method.scheme)
    return provable


def _looks_up(layer: Module) -> bool:
    """Tell whether it is an embedding, and not a last projection alone."""
    return isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead)


def _method(layer: Module) -> object:
    return getattr(layer, "quant_method", None)
