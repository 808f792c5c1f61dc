"""One weight update of a vLLM model: every tensor, as it was sent, or an error.

vLLM's layerwise reload is entered once per update and left once. In between, a layer's tensors are collected, by
`load_weights` or, once their route is known, in the layer itself (routes.py); when the layer is complete it is
quantised and copied into the tensors that the kernels read. Before the model is finalised the list of what was sent is
compared with what came; after it the proof asks the kernels.
"""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS

from appliance.engine.experts import ExpertGemm, pack_experts_again
from appliance.engine.precision import PrecisionSwitch, read_directive
from appliance.engine.proof import Proven, SyncProof
from appliance.engine.quantised import Quantising
from appliance.engine.routes import Routes
from appliance.engine.telemetry import FirstScales, TelemetryTap
from appliance.errors import ApplianceError, EngineError, NumericsError, SyncError
from appliance.quant.codec import all_finite
from appliance.quant.profile import Smoothing, fold, require_all_folded
from appliance.sync.manifest import (
    DIRECTIVE_NAME,
    MANIFEST_NAME,
    Manifest,
    TensorRecord,
    check_arrival,
    read_manifest,
    record_tensor,
)
from appliance.sync.records import Acknowledgement
from appliance.terms.counts import counted
from appliance.terms.families import packed_parts, why_unknown
from appliance.terms.schemes import AS_PLANNED, Precision, Scheme

Bucket = list[tuple[str, Tensor]]
DERIVED_BUFFERS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", "rotary_pos_emb.inv_freq")


class WeightState(StrEnum):
    """State of the weights that an engine generates with. Only whole weights may generate."""

    WHOLE = "whole"
    """Every tensor is one of the last update, which was proven, or of the first load."""
    OPEN = "open"
    """An update has begun and has not ended."""
    DROPPED = "dropped"
    """The engine dropped its weights in a deep sleep, and no update has come since."""
    BROKEN = "broken"
    """An update failed: some tensors are old and some are new, and no later call mends them."""


@dataclass
class _Running:
    """State of the update that is under way, from its first bucket."""

    smoothing: Smoothing
    started: float = field(default_factory=time.perf_counter)
    is_open: bool = False
    switched: tuple[str, ...] = ()
    names: set[str] = field(default_factory=set)
    arrived: dict[str, TensorRecord] = field(default_factory=dict)
    manifest: Manifest | None = None
    waiting: dict[Module, int] = field(default_factory=dict)
    waiting_most: int = 0
    """Most bytes that waited at once for the rest of a layer."""
    bytes: int = 0
    digest_s: float = 0.0
    proof_s: float = 0.0


def is_derived(name: str) -> bool:
    """Tell whether a tensor is a buffer that old checkpoints and some senders bring and vLLM computes itself."""
    return any(derived in name for derived in DERIVED_BUFFERS)


def predicts_more(name: str, *, config: Any) -> bool:
    """Tell whether a tensor belongs to a layer behind the model's own that predicts further tokens (MTP): checkpoints
    have them, and vLLM loads them into a draft model alone. config: the model's, of transformers."""
    if re.search(r"(^|\.)mtp\w*\.", name):
        return True
    number = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    more = any(getattr(config, key, 0) for key in ("num_nextn_predict_layers", "num_mtp_modules"))
    return bool(more and number) and int(number[1]) >= config.num_hidden_layers


class WeightUpdate:
    """Takes the buckets of one update: `begin`, any number of `load`, `finish`; an error at any point is final.

    After an error the model is half-updated and must not generate: its state is BROKEN, `fault` says why, and a later
    `begin` raises.
    """

    def __init__(
        self,
        model: Module,
        *,
        model_config: Any,
        replica: int = 0,
        rank: int = 0,
        prove_every: int = 1,
        prove_parts: int = 1,
        needs_manifest: bool = False,
        smoothing: Smoothing | None = None,
        first_scales: FirstScales | None = None,
        taken_before: int = 0,
        keeps_proof: bool = False,
    ) -> None:
        """Prepare for the updates of one model. model_config: vLLM's.  rank: within the engine.  prove_every,
        prove_parts: see kernel_proof.py.

        needs_manifest: whether an update that does not end with the list of its tensors is an error; otherwise no such
        list may come, and no digests are computed.  smoothing: folded into the tensors when their digests are known.
        first_scales: as in TelemetryTap.  taken_before: updates of the run before this engine, whose first proves all.
        keeps_proof: see SyncProof.
        CUDA graphs replay the parameters' addresses, which the proof's own call does not: with graphs none may move.
        """
        self.model = model
        self.layers = dict(model.named_modules())  # once: walks through a model add up
        self.model_config = model_config
        self.state = WeightState.WHOLE
        self.fault = ""
        self.telemetry = TelemetryTap(model, first=first_scales)
        self._wants_manifest = self._needs_manifest = needs_manifest
        self._smoothing = smoothing or Smoothing()
        self._proof = SyncProof(
            model,
            tied_head=model_config.hf_text_config.tie_word_embeddings,
            rank=rank,
            every=prove_every,
            parts=prove_parts,
            dtype=model_config.dtype,
            keeps=keeps_proof,
        )
        self._precision = PrecisionSwitch(model)
        self._routes = Routes(model, records=not why_unknown([model_config.architecture]))
        for layer in self.layers.values():
            if isinstance(method := getattr(layer, "quant_method", None), Quantising):
                method.known_finite = True  # from here on: `_load_one` looks at each of its tensors
        self._replica, self._rank = replica, rank
        self._sync = self._taken_before = taken_before
        self._now = _Running(self._smoothing)
        self._addresses = parameter_addresses(model) if replays_graphs(model, model_config=model_config) else {}

    @property
    def number(self) -> int:
        """Number of the newest update, from 1, by the trainer's count."""
        return self._sync

    @property
    def is_open(self) -> bool:
        """Whether vLLM's reload is entered: with the first tensor."""
        return self._now.is_open

    @property
    def keeps_digests(self) -> bool:
        """Whether this update must end with the list of what was sent."""
        return self._needs_manifest

    def begin(self) -> None:
        """Begin an update. Raises SyncError where an earlier one failed or has not finished."""
        if self.state is not WeightState.WHOLE:
            fault = self.fault or "an earlier update did not finish"
            raise SyncError(f"weight update: the engine's weights are half-updated: {fault}")
        self.state = WeightState.OPEN
        self._sync += 1
        self._needs_manifest = self._wants_manifest
        self._now = _Running(self._smoothing)

    def undo_begin(self) -> None:
        """Forget an update that brought no tensor: the weights are whole."""
        self.state, self.fault = WeightState.WHOLE, ""
        self._sync -= 1

    def fail(self, fault: str) -> None:
        """Declare the weights broken for good. fault: what went wrong, which each later refusal repeats."""
        self.state, self.fault = WeightState.BROKEN, fault

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        """Declare the weights broken by one of our errors. After any other one the update stays open: nobody can
        continue it, and a later `begin` is refused all the same."""
        try:
            yield
        except ApplianceError as error:
            self.fail(error.message.removeprefix("weight update: "))
            raise

    def expect_manifest(self) -> None:
        """Require this update to end with a list of what was sent. To be called before its first tensor."""
        self._needs_manifest = True

    def uncounted(self) -> list[Tensor]:
        """List the parameters that no update need bring and that vLLM drops in a deep sleep (it keeps buffers)."""
        names = sorted(SKIP_LOAD_TENSORS)
        parameters = (layer._parameters.get(name) for layer in self.layers.values() for name in names)
        return [parameter.data for parameter in parameters if parameter is not None]

    def holds(self, name: str, tensor: Tensor) -> bool:
        """Tell whether a tensor is one that no update waits for, such as a router's correction, and the model has this
        value already."""
        layer, _, leaf = name.rpartition(".")
        module = self.layers.get(layer, Module())
        uncounted = module._parameters if leaf in SKIP_LOAD_TENSORS else module._buffers
        current = uncounted.get(leaf)
        return current is not None and current.shape == tensor.shape and torch.equal(current, tensor.to(current))

    def rounds(self, name: str) -> bool:
        """Tell whether all of this tensor is loaded in the engine's dtype. Where nobody here knows, vLLM does."""
        return self._proof.rounds(name) or bool(packed_parts(name)[1])

    def load(self, bucket: Bucket, *, is_lent: bool = False) -> None:
        """Load a part of the update. bucket: (name, tensor) with the checkpoint's names; the first of an update may
        name the precision. A tensor may be kept until its layer is complete: is_lent means that its sender uses the
        memory again, so that what is kept is copied. Raises SyncError for a tensor that the model does not have, has in
        another shape or has already got, for a value that is not finite (or `finish` does), for what comes after the
        list, and for a precision that this engine cannot have."""
        with self._breaking():
            for name, tensor in bucket:
                if name == DIRECTIVE_NAME and self._needs_manifest:
                    self._take_directive(tensor)
                elif name == MANIFEST_NAME and self._needs_manifest:
                    self._take_manifest(tensor)
                elif is_lent and not self._waits_in_a_layer(name):
                    self._load_one(name, tensor.clone())
                else:
                    self._load_one(name, tensor)
                    if is_lent:
                        self._copy_waiting(name, tensor)

    def _waits_in_a_layer(self, name: str) -> bool:
        """Tell whether a tensor is kept in a layer and nowhere else: FP8's proofs keep a view of it, and vLLM keeps
        what belongs to no layer of ours where it likes."""
        layers = self._proof.layers_of(name)
        return bool(layers) and not any(isinstance(layer, ExpertGemm) or _is_fp8(layer) for layer in layers)

    def _copy_waiting(self, name: str, tensor: Tensor) -> None:
        """Copy the views of the sender's memory that incomplete layers keep."""
        lent = tensor.untyped_storage().data_ptr()
        for layer in self._proof.layers_of(name):
            for _, call in get_layerwise_info(layer).loaded_weights:
                for key, value in call.arguments.items():
                    if isinstance(value, Tensor) and value.untyped_storage().data_ptr() == lent:
                        call.arguments[key] = value.clone()

    def _take_directive(self, tensor: Tensor) -> None:
        if self._now.is_open:
            raise SyncError("weight update: the precision came after the first tensor")
        self._now.arrived[DIRECTIVE_NAME] = record_tensor(DIRECTIVE_NAME, tensor)
        self._begin_reload(read_directive(tensor))

    def _begin_reload(self, precision: Precision) -> None:
        """Enter vLLM's reload. Smoothing is for quantised layers: rollouts in BF16 are those of an engine that knows no
        profile."""
        self._now.is_open = True
        if precision.scheme is Scheme.BF16:
            self._now.smoothing = Smoothing()
        pack_experts_again(self.layers.values())
        self._now.switched = self._precision.change(precision)
        initialize_layerwise_reload(self.model)
        self._precision.release()
        started = time.perf_counter()
        is_first = self._sync == self._taken_before + 1
        self._proof.begin(self._sync, changed=is_first or bool(self._now.switched))
        self._now.proof_s += time.perf_counter() - started
        self.telemetry.begin(self._now.switched)

    def _load_one(self, name: str, tensor: Tensor) -> None:
        if not self._now.is_open:
            self._begin_reload(AS_PLANNED)
        if self._now.manifest is not None:
            raise SyncError(f"weight update: {name} came after the list of what was sent")
        if self._needs_manifest:
            started = time.perf_counter()
            self._now.arrived[name] = record_tensor(name, tensor)
            self._now.digest_s += time.perf_counter() - started
        if not (self._proof.notices(name) or all_finite(tensor)):
            raise SyncError(f"weight update: {name} has a value that is not finite")
        layer, parts = packed_parts(name) if tensor.ndim == 3 else ("", ())
        if not parts:
            return self._load_part(name, tensor)
        for expert, weight in enumerate(tensor):
            for part, part_weight in zip(parts, weight.chunk(len(parts)), strict=True):
                self._load_part(f"{layer}.{expert}.{part}.weight", part_weight)

    def _load_part(self, name: str, tensor: Tensor) -> None:
        """Load one tensor by a checkpoint's name: experts one by one, which is how they are proven."""
        # vLLM counts elements: twice the one half of a layer would pass for both halves
        if name in self._now.names or self._proof.has_some_of(name):
            raise SyncError(f"weight update: {name} came twice")
        with self._naming(name):
            folded = fold(name, tensor, smoothing=self._now.smoothing)
            known = self._now.arrived[name].digest if name in self._now.arrived and folded is tensor else ""
            started = time.perf_counter()
            fits = self._proof.take(name, folded, known=known)
            self._now.proof_s += time.perf_counter() - started
            # A tied head is not given to vLLM, which has the embedding in its place: where a class has no such module
            # (Gemma 2), 0.31 refuses the name.
            given = self.is_tied_head(name) or self._give(name, folded)
        if not (given or self.is_left_out(name)):
            raise SyncError(f"weight update: {name} is not a weight of this model")
        if not fits:  # vLLM's own words for it come first, but its loaders take some (a bias that is too long)
            shape = list(tensor.shape)
            raise SyncError(f"weight update: {name} of shape {shape} is not as large as the model's")
        self._now.names.add(name)
        self._now.bytes += tensor.nbytes
        self._count_waiting(name, folded)

    @contextmanager
    def _naming(self, tensor_name: str) -> Iterator[None]:
        """Turn an error about one tensor into a SyncError that names it: all failed syncs have one exit code."""
        try:
            yield
        except SyncError:
            raise
        except (NumericsError, EngineError) as error:
            fact = error.message if tensor_name in error.message else f"{tensor_name}: {error.message}"
            raise SyncError(f"weight update: {fact}", hint=error.hint) from error

    def _take_manifest(self, tensor: Tensor) -> None:
        if self._now.manifest is not None:
            raise SyncError("weight update: the list of what was sent came twice")
        self._now.manifest = read_manifest(tensor)

    def _count_waiting(self, name: str, tensor: Tensor) -> None:
        for layer in self._proof.layers_of(name):
            info = get_layerwise_info(layer)
            if info.can_load() and info.load_numel:  # a tied head has no tensor that could wait for it
                self._now.waiting[layer] = self._now.waiting.get(layer, 0) + tensor.nbytes
            else:
                self._now.waiting.pop(layer, None)
        self._now.waiting_most = max(self._now.waiting_most, sum(self._now.waiting.values()))

    def _give(self, name: str, tensor: Tensor) -> bool:
        """Give vLLM one tensor at a time: only what `load_weights` returns shows that vLLM did not skip a name (any
        `*.bias`)."""
        try:
            return self._routes.give(name, tensor, layers=self._proof.layers_of(name))
        except (ValueError, AssertionError, RuntimeError, LookupError, AttributeError) as error:  # so vLLM refuses
            reason = textwrap.shorten(f"{type(error).__name__}: {error}", width=200, placeholder=" ...")
            raise SyncError(f"weight update: vLLM refused {name} of shape {list(tensor.shape)}: {reason}") from error

    def is_left_out(self, name: str) -> bool:
        """Tell whether vLLM skips a tensor, as the model does not want it."""
        return is_derived(name) or predicts_more(name, config=self.model_config.hf_text_config)

    def is_tied_head(self, name: str) -> bool:
        """Tell whether a tensor is a head that is the embedding: a trainer's state has one, and vLLM needs none."""
        return name == "lm_head.weight" and self.model_config.hf_text_config.tie_word_embeddings

    def finish(self) -> Acknowledgement:
        """Check what came against what was sent, complete what waits for the end (attention, tied weights), and prove.

        What the layers then run is not in the result.  Raises SyncError; until then nothing of the update may generate.
        """
        with self._breaking():
            if not self._now.is_open:
                self._begin_reload(AS_PLANNED)
            self._check_arrival()
            tied = tied_layers(self.layers.values())
            if missing := incomplete_layers(self.layers, tied=tied):
                shown = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
                layers = counted(
                    len(missing),
                    "layer did not receive all its weights",
                    plural="layers did not receive all their weights",
                )
                raise SyncError(f"weight update: {layers}: {shown}")
            self._check_smoothing()
            with self._naming("the layers that are completed last"):
                finalize_layerwise_reload(self.model, self.model_config)
                for layer in tied:
                    _process_again(layer)
            return self._prove()

    def incomplete(self) -> list[str]:
        """List the layers that an open update has not completed."""
        return incomplete_layers(self.layers, tied=tied_layers(self.layers.values()))

    def _check_arrival(self) -> None:
        if not self._needs_manifest:
            return
        if self._now.manifest is None:
            raise SyncError(f"weight update {self._sync}: the list of what was sent is missing")
        if self._now.manifest.sync != self._sync:
            raise SyncError(
                f"weight update {self._sync}: the trainer sent number {self._now.manifest.sync}, "
                f"this worker has taken {self._sync - 1} before"
            )
        check_arrival(self._now.manifest, self._now.arrived, rank=self._rank)
        self._check_tied_head()

    def _check_tied_head(self) -> None:
        """Require a tied head to be the embedding: vLLM drops its tensor unread."""
        head = next((name for name in self._now.arrived if self.is_tied_head(name)), None)
        source = self._proof.source_of("lm_head")
        if head is None or source not in self._now.arrived:
            return
        ours, embedding = self._now.arrived[head].digest, self._now.arrived[source].digest
        if ours != embedding:
            raise SyncError(
                f"weight update {self._sync}: this model's head is tied, and {head} is not {source}: "
                f"digests {ours} and {embedding} (rank {self._rank})"
            )

    def _check_smoothing(self) -> None:
        """Require all layers of a smoothing group: a norm that was divided by its scales and a linear layer that was
        not multiplied by them are another function."""
        try:
            require_all_folded(self._now.names, smoothing=self._now.smoothing)
        except EngineError as error:
            raise SyncError(f"weight update {self._sync}: {error.message}", hint=error.hint) from error

    def _prove(self) -> Acknowledgement:
        started = time.perf_counter()
        proven = self._proof.check()
        self._check_addresses()
        return self._acknowledgement(proven, started=started)

    def _acknowledgement(self, proven: Proven, *, started: float) -> Acknowledgement:
        """Declare the weights whole. started: when the proof began."""
        checked = time.perf_counter()
        telemetry = self.telemetry.read()
        now = time.perf_counter()
        self.state, self.fault = WeightState.WHOLE, ""
        return Acknowledgement(
            sync=self._sync,
            replica=self._replica,
            rank=self._rank,
            manifest="" if self._now.manifest is None else self._now.manifest.digest,
            tensors=len(self._now.names),
            bytes=self._now.bytes,
            **asdict(proven),
            waiting_bytes=self._now.waiting_most,
            digest_s=self._now.digest_s,
            proof_s=self._now.proof_s + checked - started + self.telemetry.seconds,
            seconds=now - self._now.started,
            telemetry=telemetry,
            telemetry_s=self.telemetry.seconds,
            switched=len(self._now.switched),
        )

    def _check_addresses(self) -> None:
        """Require that vLLM wrote the update into the old tensors. Raises SyncError where it did not: CUDA graphs would
        not see it."""
        now = parameter_addresses(self.model) if self._addresses else {}
        for name, address in self._addresses.items():
            if now.get(name) != address:
                raise SyncError(f"weight update {self._sync}: CUDA graphs read the old place of {name}")


def _is_fp8(layer: Module) -> bool:
    method = getattr(layer, "quant_method", None)
    return isinstance(method, Quantising) and method.scheme.spec.can_emulate


def replays_graphs(model: Module, *, model_config: Any) -> bool:
    """Tell whether vLLM has captured this model's forward in CUDA graphs. model_config: vLLM's."""
    return not model_config.enforce_eager and any(parameter.is_cuda for parameter in model.parameters())


def parameter_addresses(model: Module) -> dict[str, int]:
    """Return the address of each parameter's memory."""
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def tied_layers(layers: Iterable[Module]) -> list[Module]:
    """List the layers of the running reload that wait for weights and whose every parameter is one that a complete
    layer has: an `lm_head` tied to the embedding. No checkpoint brings tensors for them."""
    waiting: list[tuple[Module, set[int]]] = []
    complete: list[Iterable[Tensor]] = []
    for layer in layers:
        info = get_layerwise_info(layer)
        if not info.can_load():
            complete.append(layer.parameters(recurse=False))
        elif info.kernel_tensors is not None:
            parameters = info.kernel_tensors[0].values()
            if 0 < info.load_numel >= loadable_elements(layer):  # a padded vocabulary: vLLM processes it at the end
                complete.append(parameters)
            elif parameters and not info.load_numel:
                waiting.append((layer, {id(parameter) for parameter in parameters}))
    loaded = {id(parameter) for parameters in complete for parameter in parameters} if waiting else set()
    return [layer for layer, identities in waiting if identities <= loaded]


def _process_again(layer: Module) -> None:
    """Pack a tied head again. vLLM's CPU backend multiplies by a packed copy of lm_head's weight, made once after
    loading. A reload writes the new values into the shared tensor and leaves that copy as it was: rollouts would
    continue with the head of the first sync. Remove when: layerwise reload processes layers with tied weights."""
    method = getattr(layer, "quant_method", None)
    if isinstance(method, QuantizeMethodBase):
        method.process_weights_after_loading(layer)


def incomplete_layers(layers: Mapping[str, Module], *, tied: list[Module]) -> list[str]:
    """Name the layers that have parameters to load in the running reload and did not get all of them.

    vLLM itself fills such a layer from uninitialised memory (DEBUG line) or keeps its old weights (warning).
    """
    missing = []
    for name, layer in layers.items():
        info = get_layerwise_info(layer)
        if not info.can_load() or is_deferred_attention_layer(layer) or any(layer is known for known in tied):
            continue
        wanted = loadable_elements(layer)
        if wanted and info.load_numel < wanted:
            missing.append(f"{name} ({info.load_numel} of {wanted} elements)")
    return missing


def loadable_elements(layer: Module) -> int:
    """Count the elements that a checkpoint brings for a layer: vLLM pads a vocabulary to a multiple of 64 rows of
    zeros."""
    elements = sum(parameter.numel() for parameter in layer._parameters.values() if parameter is not None)
    if isinstance(layer, VocabParallelEmbedding):
        rows = layer.shard_indices
        padding = rows.num_elements_padded - rows.num_org_elements - rows.num_added_elements
        elements -= elements // rows.num_elements_padded * padding
    return elements
