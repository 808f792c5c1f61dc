"""One weight update of a vLLM model: every tensor, as it was sent, or an error.

vLLM's layerwise reload is entered once per update and left once. In between, a layer's tensors are collected, by
`load_weights` or, once their way is known, in the layer itself (routes.py); when it is complete it is quantised and
copied into the tensors that the kernels hold.
Before the model is finalised the list of what was sent is held against what came; after it the proof asks the kernels.
"""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Module
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
from vllm.model_executor.models.utils import AutoWeightsLoader

from appliance.engine.experts import ExpertGemm, pack_experts_anew
from appliance.engine.precision import PrecisionSwitch, read_directive
from appliance.engine.proof import SyncProof
from appliance.engine.quantised import Quantising
from appliance.engine.routes import Routes
from appliance.engine.telemetry import FirstScales, TelemetryTap
from appliance.errors import EngineError, NumericsError, SyncError
from appliance.quant.codec import all_finite
from appliance.quant.profile import Smoothing, fold, require_all_folded
from appliance.sync.manifest import (
    DIRECTIVE_NAME,
    MANIFEST_NAME,
    Manifest,
    TensorRecord,
    check_arrival,
    read_manifest,
    record,
)
from appliance.sync.records import Acknowledgement
from appliance.terms.families import packed_parts, why_unknown
from appliance.terms.schemes import AS_PLANNED, Precision, Scheme

Bucket = list[tuple[str, Tensor]]


@dataclass
class _Running:
    """The update that is under way, from its first bucket."""

    smoothing: Smoothing
    started: float = field(default_factory=time.perf_counter)
    is_open: bool = False
    switched: tuple[str, ...] = ()
    names: set[str] = field(default_factory=set)
    arrived: dict[str, TensorRecord] = field(default_factory=dict)
    manifest: Manifest | None = None
    waiting: dict[Module, int] = field(default_factory=dict)
    waiting_most: int = 0
    """Bytes at once, for the rest of a layer."""
    bytes: int = 0
    digest_s: float = 0.0
    proof_s: float = 0.0


def is_derived(name: str) -> bool:
    """Whether it is a buffer that old checkpoints and some senders bring and vLLM computes itself."""
    return any(each in name for each in AutoWeightsLoader.ROTARY_EMBEDS_UNUSED_WEIGHTS)


def predicts_more(name: str, *, config: Any) -> bool:
    """Whether it is of a layer behind the model's own that predicts further tokens (MTP): checkpoints have them, and
    vLLM loads them into a draft alone. config: the model's, of transformers."""
    if re.search(r"(^|\.)mtp\w*\.", name):
        return True
    number = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    more = any(getattr(config, key, 0) for key in ("num_nextn_predict_layers", "num_mtp_modules"))
    return bool(more and number) and int(number[1]) >= config.num_hidden_layers


class WeightUpdate:
    """Takes the buckets of one update: `begin`, any number of `load`, `finish`; an error at any point is final.

    After an error the model is half-updated and must not generate: `broken` says why, and a later `begin` raises.
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
    ) -> None:
        """model_config: vLLM's.  rank: within the engine.  prove_every, prove_parts: see kernel_proof.py.

        needs_manifest: a stream that does not end with the list of its tensors is an error; without it none may come,
        and nothing is digested.  smoothing: folded into the tensors when their digests are known.
        first_scales: as in TelemetryTap.  taken_before: updates of the run before this engine, whose first proves all.
        CUDA graphs replay the parameters' addresses, which the proof's own call does not: with graphs none may move.
        """
        self.model = model
        self.layers = dict(model.named_modules())  # once: walks through a model add up
        self.model_config = model_config
        self.broken = ""
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
        )
        self._precision = PrecisionSwitch(model)
        self._routes = Routes(model, records=not why_unknown([model_config.architecture]))
        for layer in self.layers.values():
            if isinstance(method := getattr(layer, "quant_method", None), Quantising):
                method.known_finite = True  # from here on: `_load_one` looks at each of its tensors
        self._replica, self._rank = replica, rank
        self._sync = self._taken_before = taken_before
        self._now = _Running(self._smoothing)
        self._addresses = addresses(model) if replays_graphs(model, model_config=model_config) else {}

    @property
    def is_open(self) -> bool:
        """Whether vLLM's reload is entered: with the first tensor."""
        return self._now.is_open

    @property
    def keeps_digests(self) -> bool:
        """Whether this update must end with the list of what was sent."""
        return self._needs_manifest

    def begin(self) -> None:
        if self.broken:
            raise SyncError(f"weight update: the engine's weights are half-updated, an earlier update {self.broken}")
        self.broken = "did not finish"
        self._sync += 1
        self._needs_manifest = self._wants_manifest
        self._now = _Running(self._smoothing)

    def undo_begin(self) -> None:
        """Of an update that had no tensor: the weights are whole."""
        self.broken = ""
        self._sync -= 1

    def expect_manifest(self) -> None:
        """This update's sender has a list. Before its first tensor."""
        self._needs_manifest = True

    def uncounted(self) -> list[Tensor]:
        """What no update need bring, of what vLLM drops in a deep sleep: it keeps buffers."""
        own = (layer._parameters.get(name) for layer in self.layers.values() for name in sorted(SKIP_LOAD_TENSORS))
        return [parameter.data for parameter in own if parameter is not None]

    def holds(self, name: str, tensor: Tensor) -> bool:
        """Whether it is one that no update waits for, such as a router's correction, and the model has this value."""
        layer, _, leaf = name.rpartition(".")
        module = self.layers.get(layer, Module())
        uncounted = module._parameters if leaf in SKIP_LOAD_TENSORS else module._buffers
        held = uncounted.get(leaf)
        return held is not None and held.shape == tensor.shape and torch.equal(held, tensor.to(held))

    def rounds(self, name: str) -> bool:
        """Whether all of this tensor is loaded in the engine's dtype. Where nobody here knows, vLLM does."""
        return self._proof.rounds(name) or bool(packed_parts(name)[1])

    def load(self, bucket: Bucket, *, is_lent: bool = False) -> None:
        """bucket: (name, tensor) with the checkpoint's names; the first of an update may say in which precision. A
        tensor may be kept until its layer is complete: is_lent says that its sender uses the memory again, so that
        what is kept is copied. Raises SyncError for a tensor that the model does not have, has in another shape or
        has already got, for a value that is not finite (or `finish` does), for what comes after the list, and for a
        precision that this engine cannot have."""
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
        """And nowhere else: FP8's proofs keep a view, and vLLM keeps what is no layer's of ours where it likes."""
        layers = self._proof.layers_of(name)
        return bool(layers) and not any(isinstance(layer, ExpertGemm) or _is_fp8(layer) for layer in layers)

    def _copy_waiting(self, name: str, tensor: Tensor) -> None:
        """A layer that is not complete has kept a view of the tensor."""
        lent = tensor.untyped_storage().data_ptr()
        for layer in self._proof.layers_of(name):
            for _, call in get_layerwise_info(layer).loaded_weights:
                for key, value in call.arguments.items():
                    if isinstance(value, Tensor) and value.untyped_storage().data_ptr() == lent:
                        call.arguments[key] = value.clone()

    def _take_directive(self, tensor: Tensor) -> None:
        if self._now.is_open:
            self._fail("the precision came after the first tensor", "brought a precision after its first tensor")
        self._now.arrived[DIRECTIVE_NAME] = record(DIRECTIVE_NAME, tensor)
        self.broken = "asked for a precision that this engine cannot have"
        self._begin_reload(read_directive(tensor))
        self.broken = "did not finish"

    def _begin_reload(self, precision: Precision) -> None:
        """Smoothing is for quantised layers: rollouts in BF16 are those of an engine that knows no profile."""
        self._now.is_open = True
        if precision.scheme is Scheme.BF16:
            self._now.smoothing = Smoothing()
        pack_experts_anew(self.layers.values())
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
            self._fail(f"{name} came after the list of what was sent", f"brought {name} after its end")
        if self._needs_manifest:
            started = time.perf_counter()
            self._now.arrived[name] = record(name, tensor)
            self._now.digest_s += time.perf_counter() - started
        if not (self._proof.notices(name) or all_finite(tensor)):
            self._fail(f"{name} has a value that is not finite", f"brought values that are not finite in {name}")
        layer, parts = packed_parts(name) if tensor.ndim == 3 else ("", ())
        if not parts:
            return self._load_part(name, tensor)
        for expert, weight in enumerate(tensor):
            for part, own in zip(parts, weight.chunk(len(parts)), strict=True):
                self._load_part(f"{layer}.{expert}.{part}.weight", own)

    def _load_part(self, name: str, tensor: Tensor) -> None:
        """By a checkpoint's name: experts one by one, which is how they are proven."""
        # vLLM counts elements: twice the one half of a layer would pass for both halves
        if name in self._now.names or self._proof.has_some_of(name):
            self._fail(f"{name} came twice", f"brought {name} twice")
        with self._naming(name):
            folded = fold(name, tensor, smoothing=self._now.smoothing)
            known = self._now.arrived[name].digest if name in self._now.arrived and folded is tensor else ""
            started = time.perf_counter()
            fits = self._proof.take(name, folded, known=known)
            self._now.proof_s += time.perf_counter() - started
            given = self._give(name, folded)
        if not (given or self.is_tied_head(name) or self.is_left_out(name)):
            self._fail(f"{name} is not a weight of this model", f"brought {name}, which this model does not have")
        if not fits:  # vLLM's own words for it come first, but its loaders take some (a bias that is too long)
            shape = list(tensor.shape)
            self._fail(f"{name} of shape {shape} is not as large as the model's", f"brought {name} in another shape")
        self._now.names.add(name)
        self._now.bytes += tensor.nbytes
        self._count_waiting(name, folded)

    @contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        """What goes wrong with one tensor is a SyncError that names it: all failed syncs have one exit code."""
        self.broken = f"failed at {what}"
        try:
            yield
        except SyncError:
            raise
        except (NumericsError, EngineError) as error:
            said = error.message if what in error.message else f"{what}: {error.message}"
            raise SyncError(f"weight update: {said}", hint=error.hint) from error
        self.broken = "did not finish"

    def _take_manifest(self, tensor: Tensor) -> None:
        if self._now.manifest is not None:
            self._fail("the list of what was sent came twice", "brought two lists")
        self.broken = "brought a list of tensors that cannot be read"
        self._now.manifest = read_manifest(tensor)
        self.broken = "did not finish"

    def _count_waiting(self, name: str, tensor: Tensor) -> None:
        for layer in self._proof.layers_of(name):
            info = get_layerwise_info(layer)
            if info.can_load() and info.load_numel:  # a tied head has no tensor that could wait for it
                self._now.waiting[layer] = self._now.waiting.get(layer, 0) + tensor.nbytes
            else:
                self._now.waiting.pop(layer, None)
        self._now.waiting_most = max(self._now.waiting_most, sum(self._now.waiting.values()))

    def _give(self, name: str, tensor: Tensor) -> bool:
        """One at a time: only what `load_weights` returns shows that vLLM did not skip a name (any `*.bias`)."""
        try:
            return self._routes.give(name, tensor, layers=self._proof.layers_of(name))
        except (ValueError, AssertionError, RuntimeError, LookupError) as error:  # how vLLM's loaders refuse
            reason = textwrap.shorten(f"{type(error).__name__}: {error}", width=200, placeholder=" ...")
            self.broken = f"brought {name}, which vLLM refused"
            raise SyncError(f"weight update: vLLM refused {name} of shape {list(tensor.shape)}: {reason}") from error

    def is_left_out(self, name: str) -> bool:
        """Whether vLLM skips it, as the model does not want it."""
        return is_derived(name) or predicts_more(name, config=self.model_config.hf_text_config)

    def is_tied_head(self, name: str) -> bool:
        """The trainer's state has an lm_head even where it is the embedding; vLLM skips it."""
        return name == "lm_head.weight" and self.model_config.hf_text_config.tie_word_embeddings

    def _fail(self, message: str, broken: str) -> NoReturn:
        self.broken = broken
        raise SyncError(f"weight update: {message}")

    def finish(self) -> Acknowledgement:
        """Hold what came against what was sent, complete what waits for the end (attention, tied weights), and prove.

        What the layers then run is not in the result.  Raises SyncError; until then nothing of the update may generate.
        """
        if not self._now.is_open:
            self._begin_reload(AS_PLANNED)
        self._check_arrival()
        tied = tied_layers(self.layers.values())
        if missing := incomplete_layers(self.layers, tied=tied):
            shown = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
            self.broken = f"left {len(missing)} layers incomplete"
            raise SyncError(f"weight update: {len(missing)} layers did not receive all their weights: {shown}")
        self._check_smoothing()
        with self._naming("the layers that are completed last"):
            finalize_layerwise_reload(self.model, self.model_config)
            for layer in tied:
                _process_again(layer)
        return self._prove()

    def incomplete(self) -> list[str]:
        """Of an update that is open: the layers that wait for weights."""
        return incomplete_layers(self.layers, tied=tied_layers(self.layers.values()))

    def _check_arrival(self) -> None:
        if not self._needs_manifest:
            return
        self.broken = "brought something else than was sent"
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
        """vLLM drops the tensor of a tied head unread: it must be the embedding."""
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
        """A norm divided by its scales and a linear layer that was not multiplied by them is another function."""
        try:
            require_all_folded(self._now.names, smoothing=self._now.smoothing)
        except EngineError as error:
            self.broken = "was smoothed by a profile of another model"
            raise SyncError(f"weight update {self._sync}: {error.message}", hint=error.hint) from error

    def _prove(self) -> Acknowledgement:
        self.broken = "could not be proven"
        started = time.perf_counter()
        proven = self._proof.check()
        self._check_addresses()
        checked = time.perf_counter()
        telemetry = self.telemetry.read()
        now = time.perf_counter()
        self.broken = ""
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
        """vLLM writes an update into the old tensors. Raises SyncError where it did not: graphs would not see it."""
        now = addresses(self.model) if self._addresses else {}
        for name, address in self._addresses.items():
            if now.get(name) != address:
                self.broken = "moved a tensor that CUDA graphs read"
                raise SyncError(f"weight update {self._sync}: CUDA graphs read the old place of {name}")


def _is_fp8(layer: Module) -> bool:
    method = getattr(layer, "quant_method", None)
    return isinstance(method, Quantising) and method.scheme.spec.can_emulate


def replays_graphs(model: Module, *, model_config: Any) -> bool:
    """Whether vLLM has captured this model's forward in CUDA graphs. model_config: vLLM's."""
    return not model_config.enforce_eager and any(parameter.is_cuda for parameter in model.parameters())


def addresses(model: Module) -> dict[str, int]:
    """Where each parameter lies."""
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def tied_layers(layers: Iterable[Module]) -> list[Module]:
    """Layers of the running reload that wait for weights of their own and whose every parameter is one that a complete
    layer has: an `lm_head` tied to the embedding. No checkpoint brings tensors for them."""
    waiting: list[tuple[Module, set[int]]] = []
    complete: list[Iterable[Tensor]] = []
    for layer in layers:
        info = get_layerwise_info(layer)
        if not info.can_load():
            complete.append(layer.parameters(recurse=False))
        elif info.kernel_tensors is not None:
            held = info.kernel_tensors[0].values()
            if 0 < info.load_numel >= loadable_elements(layer):  # a padded vocabulary: vLLM processes it at the end
                complete.append(held)
            elif held and not info.load_numel:
                waiting.append((layer, {id(parameter) for parameter in held}))
    known = {id(parameter) for held in complete for parameter in held} if waiting else set()
    return [layer for layer, held in waiting if held <= known]


def _process_again(layer: Module) -> None:
    """vLLM's CPU backend multiplies by a packed copy of lm_head's weight, made once after loading. A reload writes the
    new values into the shared tensor and leaves that copy as it was: rollouts would go on with the head of the first
    sync. Remove when: layerwise reload processes layers with tied weights."""
    method = getattr(layer, "quant_method", None)
    if isinstance(method, QuantizeMethodBase):
        method.process_weights_after_loading(layer)


def incomplete_layers(layers: Mapping[str, Module], *, tied: list[Module]) -> list[str]:
    """Names of the layers that have parameters to load in the running reload and did not get all of them.

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
    """How many elements a checkpoint brings for a layer: vLLM pads a vocabulary to a multiple of 64 rows of zeros."""
    elements = sum(parameter.numel() for parameter in layer._parameters.values() if parameter is not None)
    if isinstance(layer, VocabParallelEmbedding):
        rows = layer.shard_indices
        padding = rows.num_elements_padded - rows.num_org_elements - rows.num_added_elements
        elements -= elements // rows.num_elements_padded * padding
    return elements
