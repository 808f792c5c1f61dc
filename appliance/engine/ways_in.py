"""Weight updates of a vLLM worker that somebody else drives: each becomes one `WeightUpdate`, whoever calls what.

Trainers update an engine in several ways: vLLM's layerwise reload (its native weight transfer, `reload_weights`, SkyRL
and prime-rl), which says where an update begins and ends; plain `model.load_weights`, tensor by tensor or in buckets,
which says neither (TRL, OpenRLHF, NeMo-RL); and a checkpoint folder. The second ends when every layer is complete.
What is not complete when somebody asks for tokens, or resets the cache, is an error that names the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Module
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from appliance.engine.kernel_proof import ROTATION
from appliance.engine.update import WeightState, WeightUpdate, loadable_elements
from appliance.errors import SyncError
from appliance.quant.profile import Smoothing
from appliance.sync.manifest import DIRECTIVE_NAME, MANIFEST_NAME, digest
from appliance.sync.records import Acknowledgement
from appliance.terms.counts import counted

_ATTRIBUTE = "_appliance_ways_in"  # of a model whose updates are ours
FINAL = "restart the engine: its weights are neither the old ones nor the new ones"
OPEN = "ask again when the update has ended"
WANTED = "send them, or call reload_weights"
SLEEP = "a sleep of level 2, which dropped them"
RESET = "a reset by /weight_checker"


@dataclass(frozen=True)
class WeightReport:
    """State of one worker's weights, as reported to the engine's core."""

    version: int
    """Number of updates that have been proven."""
    state: WeightState
    reason: str
    """Caller that began the update that is OPEN, with the layers that wait; fault of weights that are BROKEN; SLEEP or
    RESET, which DROPPED them; else empty."""


class WaysIn:
    """The updates of one worker's model."""

    def __init__(
        self,
        model: Module,
        *,
        vllm_config: Any,
        rank: int,
        smoothing: Smoothing,
        tell: Callable[[str], None],
        drain: Callable[[], None] = lambda: None,
    ) -> None:
        """Take over the model's updates. vllm_config: the engine's.  rank: within the engine.  tell: takes a line about
        each update that was proven.  drain: waits until the model has every tensor that a transfer has received."""
        self._model, self._vllm_config, self._rank, self._tell = model, vllm_config, rank, tell
        self._drain = drain
        self._device = torch.device(vllm_config.device_config.device)
        # a torch that asks for the device at every call is slow, and on a CPU it is asked for what it has
        self._where = nullcontext() if self._device.type == "cpu" else self._device
        model_config = vllm_config.model_config
        self._dtype, self._pools = model_config.dtype, model_config.runner_type == "pooling"
        self.update = WeightUpdate(
            model, model_config=model_config, rank=rank, smoothing=smoothing, prove_parts=ROTATION
        )
        self._version = 0
        self._open = ""
        self._dropped_by = ""  # SLEEP or RESET, with no update since
        self.last_proven: Acknowledgement | None = None
        self._uncounted_before: list[Tensor] = []  # copies from before the sleep, as vLLM keeps buffers
        self._ends_itself = False
        self._manifest_seen = False
        self._head = ""  # digest of a tied one that came
        self._waiting: list[Module] | None = None
        model.__dict__[_ATTRIBUTE] = self
        model.__dict__["load_weights"] = self._load_weights

    @property
    def report(self) -> WeightReport:
        """Version and state of the weights, with the reason why they may not generate."""
        if self._open:
            return WeightReport(self._version, WeightState.OPEN, self._open + self._missing())
        if self.update.state is WeightState.WHOLE and self._dropped_by:
            return WeightReport(self._version, WeightState.DROPPED, self._dropped_by)
        return WeightReport(self._version, self.update.state, self.update.fault)

    def drop(self, cause: str = SLEEP) -> None:
        """Declare the weights dropped until the next update, and with them what an open update has brought. cause:
        SLEEP or RESET. Raises SyncError for models that take no updates."""
        if self._pools:
            raise SyncError("weight update: a pooling model takes none after a sleep of level 2", hint="use level 1")
        if self._open:
            self.update.fail(f"an update by {self._open} was cut off by {cause}")
            self._open = ""
        if not self._dropped_by:
            self._uncounted_before = [parameter.to("cpu", copy=True) for parameter in self.update.uncounted()]
        self._dropped_by = cause

    def begin(self, sender: str = "verl") -> None:
        """Begin an update. sender: who sends it. Raises SyncError where an update is open, which is then broken for
        good, where one was broken before, and for models that pool."""
        self._require_sound()
        if self._pools:  # vLLM has no answer to such a request but a result, so none could be refused meanwhile
            raise SyncError("weight update: a pooling model takes none", hint="restart its engine")
        if self._open:
            self._break(f"was begun by {self._open}, and then by {sender} as well")
        self.update.begin()
        self._open, self._ends_itself, self._manifest_seen, self._head = sender, False, False, ""
        if self._dropped_by:
            for parameter, value in zip(self.update.uncounted(), self._uncounted_before, strict=True):
                parameter.copy_(value)
        self._waiting = None  # the layers that may not be complete, looked at from the last: each once

    def load(self, weights: Iterable[tuple[str, Tensor]], *, sender: str = "load_weights") -> set[str]:
        """Load tensors and return the names of those that were taken. Outside of an update it begins one that ends
        itself."""
        taken = set()
        with self._broken_by_an_error():
            for name, tensor in weights:
                is_head = self.update.is_tied_head(name)
                if not self._open and self.update.is_left_out(name):
                    continue
                if self._version and not (self._open or self._dropped_by) and self._comes_late(name, tensor):
                    continue
                if not self._open:
                    self.begin(sender)
                    self._ends_itself = True
                if is_head:  # vLLM drops it unread
                    self._head = self._head_digest(tensor)
                if name == DIRECTIVE_NAME:
                    self.update.expect_manifest()
                self._take(name, tensor)
                self._manifest_seen |= name == MANIFEST_NAME
                taken.add(name)
                if self._ends_itself and self._has_all():
                    self.finish()
        return taken

    def finish(self) -> Acknowledgement:
        """End an update and prove it. Raises SyncError for what is missing and for what cannot be proven."""
        if not self._open:
            self._require_sound()
            raise SyncError("weight update: it was ended, and none had begun")
        with self._broken_by_an_error():
            self._drain()
            taken = self.update.finish()
            if self._head and self._head != self._head_digest(None):
                self._break("brought a head that is tied to the embedding and is not equal to it")
        sender, self._open, self._dropped_by, self.last_proven = self._open, "", "", taken
        self._version += 1
        more = ", every digest as sent" if taken.manifest else ""
        if unproven := taken.unproven - bool(self._head):  # a tied head has been compared with the embedding
            more += f", of {counted(unproven, 'tensor')} nothing else is known"
        self._tell(
            f"rank {self._rank} took weight update {self._version} by {sender}: {counted(taken.tensors, 'tensor')} in "
            f"{taken.seconds:.2f} s, {taken.layers_proven} of {taken.layers} layers proven{more}"
        )
        return taken

    def settle(self) -> WeightReport:
        """End an update that nobody ends, before a cache is reset or a token is requested. Raises SyncError
        where weights are missing."""
        if self._open and self._ends_itself:
            self.finish()
        return self.report

    def require_whole(self) -> None:
        """Check the weights before a forward. Raises SyncError for what `settle` raises, and where an update is open or
        failed."""
        self.settle()
        self._require_sound()
        if self._open:
            raise SyncError(f"weight update: {self._open} has not ended it, so nothing is generated{self._missing()}")
        if self._dropped_by:
            raise SyncError(f"weight update: no weights have come since {self._dropped_by}", hint=WANTED)

    def _require_sound(self) -> None:
        if self.update.state is WeightState.BROKEN:
            raise SyncError(f"weight update: the engine's weights are half-updated: {self.update.fault}", hint=FINAL)

    def _break(self, how: str) -> NoReturn:
        self._open = ""
        self.update.fail(f"an update {how}")
        raise SyncError(f"weight update: it {how}", hint=FINAL)

    @contextmanager
    def _broken_by_an_error(self) -> Iterator[None]:
        """Set what vLLM sets around a load; and declare the weights broken after any error, an interrupt too. An update
        that brought no tensor has changed nothing, and is as if it had not begun."""
        whole = False
        try:
            with set_current_vllm_config(self._vllm_config), self._where, torch.no_grad():
                yield
            whole = True
        except SyncError as error:
            if self._open:
                self.update.fail(error.message.removeprefix("weight update: "))
            raise
        finally:
            sender, self._open = self._open, self._open if whole else ""
            if sender and not whole and not self.update.is_open:
                self.update.undo_begin()
            elif (
                sender and not whole and self.update.state is not WeightState.BROKEN
            ):  # a sender's error, or an interrupt
                self.update.fail(f"an update by {sender} did not finish{self._missing()}")

    def _take(self, name: str, tensor: Tensor) -> None:
        """Load one tensor, whose memory its sender uses again. Where no digests are kept it is rounded to the model's
        dtype where vLLM would round it."""
        rounds = tensor.is_floating_point() and not self.update.keeps_digests and self.update.rounds(name)
        taken = tensor.detach().to(device=self._device, dtype=self._dtype if rounds else None)
        is_shared = taken.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        self.update.load([(name, taken)], is_lent=is_shared)

    def _has_all(self) -> bool:
        if self.update.keeps_digests:
            return self._manifest_seen
        if not self.update.is_open:
            return False
        if self._waiting is None:
            self._waiting = [layer for layer in self.update.layers.values() if _may_wait(layer)]
        while self._waiting and not _waits(self._waiting[-1]):
            self._waiting.pop()
        return not self._waiting and not self.update.incomplete()

    def _missing(self) -> str:
        """Describe the layers that an open update lacks."""
        if not self.update.is_open:
            return ": no weights have come yet"
        if missing := self.update.incomplete():
            others = f" and {counted(len(missing) - 1, 'more layer')} wait" if len(missing) > 1 else " waits"
            return f": {missing[0]}{others} for weights"
        is_listed = self.update.keeps_digests and not self._manifest_seen
        return ": the list of what was sent has not come" if is_listed else ""

    def _comes_late(self, name: str, tensor: Tensor) -> bool:
        """Tell whether a tensor comes after the last layer, as a tied head or buffers of some senders do, and is what
        the model has already. In half-written weights none does."""
        if self.update.state is WeightState.BROKEN:
            return False
        if self.update.is_tied_head(name):
            return self._head_digest(tensor) == self._head_digest(None)
        return self.update.holds(name, tensor)

    def _head_digest(self, head: Tensor | None) -> str:
        """Hash, of a checkpoint's head, the rows that this rank has, or of the embedding's. head: [vocabulary,
        hidden]."""
        embeddings = (layer for layer in self.update.layers.values() if isinstance(layer, VocabParallelEmbedding))
        embedding = next(embeddings)
        first, last = embedding.shard_indices.org_vocab_start_index, embedding.shard_indices.org_vocab_end_index
        rows = embedding.weight.data[: last - first] if head is None else head[first:last]
        return digest(rows.to(self._dtype))

    def _load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load weights; it replaces the model's own `load_weights`."""
        return self.load(weights)


def ways_into(model: Module) -> WaysIn | None:
    """Return the ways into a model whose updates are ours. model: or what vLLM puts around it for CUDA graphs, which is
    no module."""
    return getattr(model, _ATTRIBUTE, None)


def _may_wait(layer: Module) -> bool:
    comes_last = isinstance(layer, ParallelLMHead) or is_deferred_attention_layer(layer)
    return not comes_last and loadable_elements(layer) > 0


def _waits(layer: Module) -> bool:
    info = get_layerwise_info(layer)
    return info.can_load() and (not info.load_numel or info.load_numel < loadable_elements(layer))
