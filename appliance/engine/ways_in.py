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
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from appliance.engine.kernel_proof import ROTATION
from appliance.engine.update import WeightUpdate, loadable_elements
from appliance.errors import SyncError
from appliance.quant.profile import Smoothing
from appliance.sync.manifest import DIRECTIVE_NAME, MANIFEST_NAME, digest
from appliance.sync.records import Acknowledgement

_ATTRIBUTE = "_appliance_ways_in"  # of a model whose updates are ours
FINAL = "start the engine anew: its weights are neither the old ones nor the new ones"
OPEN = "ask again when the update has ended"
WANTED = "send them, or call reload_weights"
SLEEP = "a sleep of level 2, which dropped them"


@dataclass(frozen=True)
class WeightState:
    version: int
    """How many updates have been proven."""
    open: str
    """What begun an update and has not ended it, with the layers that wait, or SLEEP, or nothing."""
    broken: str
    """What is wrong with the weights, for good, or nothing."""


class WaysIn:
    """The updates of one worker's model."""

    def __init__(
        self, model: Module, *, vllm_config: Any, rank: int, smoothing: Smoothing, tell: Callable[[str], None]
    ) -> None:
        """vllm_config: the engine's.  rank: within the engine.  tell: takes a line about each update that was proven.
        From here on the model's updates are ours."""
        self._model, self._vllm_config, self._rank, self._tell = model, vllm_config, rank, tell
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
        self._slept = False  # deeply, with no update since
        self._kept: list[Tensor] = []  # over the sleep, as vLLM keeps buffers
        self._said = ""  # what broke an update, with the names of its layers
        self._ends_itself = False
        self._manifest_seen = False
        self._head = ""  # digest of a tied one that came
        self._waiting: list[Module] | None = None
        model.__dict__[_ATTRIBUTE] = self
        model.__dict__["load_weights"] = self._load_weights

    @property
    def state(self) -> WeightState:
        opened = self._open + self._missing() if self._open else SLEEP if self._slept else ""
        return WeightState(version=self._version, open=opened, broken=self._why_broken())

    def drop(self) -> None:
        """The weights are gone until the next update, and with them what one that is open has brought. Raises SyncError
        for models that take none."""
        if self._pools:
            raise SyncError("weight update: a pooling model takes none after a sleep of level 2", hint="use level 1")
        if self._open:
            self._said = f"an update by {self._open} was cut off by {SLEEP}"
            self._open, self.update.broken = "", "was cut off"
        if not self._slept:
            self._kept = [each.to("cpu", copy=True) for each in self.update.uncounted()]
        self._slept = True

    def _why_broken(self) -> str:
        if self._open or not self.update.broken:
            return ""
        return self._said or f"an update {self.update.broken}"

    def begin(self, by: str = "verl") -> None:
        """Raises SyncError where an update is open, which is then broken for good, where one was broken before, and for
        models that pool."""
        self._require_sound()
        if self._pools:  # vLLM has no answer to such a request but a result, so none could be refused meanwhile
            raise SyncError("weight update: a pooling model takes none", hint="start its engine anew")
        if self._open:
            self._break(f"was begun by {self._open}, and then by {by} as well")
        self.update.begin()
        if self._slept:
            for held, kept in zip(self.update.uncounted(), self._kept, strict=True):
                held.copy_(kept)
        self._open, self._ends_itself, self._manifest_seen, self._head = by, False, False, ""
        self._waiting = None  # the layers that may not be complete, looked at from the last: each once

    def load(self, weights: Iterable[tuple[str, Tensor]], *, by: str = "load_weights") -> set[str]:
        """The names of the tensors that were taken. Outside of an update it begins one that ends itself."""
        taken = set()
        with self._broken_by_an_error():
            for name, tensor in weights:
                is_head = self.update.is_tied_head(name)
                if not self._open and self.update.is_left_out(name):
                    continue
                if self._version and not (self._open or self._slept) and self._comes_late(name, tensor):
                    continue
                if not self._open:
                    self.begin(by)
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
        """Raises SyncError for what is missing and for what cannot be proven."""
        if not self._open:
            self._require_sound()
            raise SyncError("weight update: it was ended, and none had begun")
        with self._broken_by_an_error():
            taken = self.update.finish()
            if self._head and self._head != self._head_digest(None):
                self._break("brought a head that is tied to the embedding and is not equal to it")
        by, self._open, self._slept = self._open, "", False
        self._version += 1
        more = ", every digest as sent" if taken.manifest else ""
        if unproven := taken.unproven - bool(self._head):  # a tied head has been held against the embedding
            more += f", of {unproven} tensors nothing else is known"
        self._tell(
            f"rank {self._rank} took weight update {self._version} by {by}: {taken.tensors} tensors in "
            f"{taken.seconds:.2f} s, {taken.layers_proven} of {taken.layers} layers proven{more}"
        )
        return taken

    def settle(self) -> WeightState:
        """Before a cache is reset or a token is asked for: an update that nobody ends is then ended. Raises SyncError
        where weights are missing."""
        if self._open and self._ends_itself:
            self.finish()
        return self.state

    def require_whole(self) -> None:
        """Before a forward. Raises SyncError for what `settle` raises, and where an update is open or was broken."""
        self.settle()
        self._require_sound()
        if self._open:
            raise SyncError(f"weight update: {self._open} has not ended it, so nothing is generated{self._missing()}")
        if self._slept:
            raise SyncError(f"weight update: no weights have come since {SLEEP}", hint=WANTED)

    def _require_sound(self) -> None:
        if why := self._why_broken():
            raise SyncError(f"weight update: the engine's weights are half-updated: {why}", hint=FINAL)

    def _break(self, how: str) -> None:
        self._open, self.update.broken, self._said = "", how, f"an update {how}"
        raise SyncError(f"weight update: it {how}", hint=FINAL)

    @contextmanager
    def _broken_by_an_error(self) -> Iterator[None]:
        """What vLLM sets around a load; and after any error, an interrupt too, the update stays broken. One that had no
        tensor has changed nothing, and is as if it had not begun."""
        whole = False
        try:
            with set_current_vllm_config(self._vllm_config), self._where, torch.no_grad():
                yield
            whole = True
        except SyncError as error:
            if self._open:
                self._said = error.message.removeprefix("weight update: ")
            raise
        finally:
            by, self._open = self._open, self._open if whole else ""
            if by and not whole and not self.update.is_open:
                self.update.undo_begin()
                self._said = ""
            elif by and not whole and not self._said:  # a sender's own error, or an interrupt
                self._said = f"an update by {by} {self.update.broken}{self._missing()}"

    def _take(self, name: str, tensor: Tensor) -> None:
        """Senders use a tensor's memory again. What no list of digests is kept of is rounded to the model's dtype where
        vLLM would round it."""
        rounds = tensor.is_floating_point() and not self.update.keeps_digests and self.update.rounds(name)
        own = tensor.detach().to(device=self._device, dtype=self._dtype if rounds else None)
        is_shared = own.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        self.update.load([(name, own)], is_lent=is_shared)

    def _has_all(self) -> bool:
        if self.update.keeps_digests:
            return self._manifest_seen
        if not self.update.is_open:
            return False
        if self._waiting is None:
            self._waiting = [each for each in self.update.layers.values() if _may_wait(each)]
        while self._waiting and not _waits(self._waiting[-1]):
            self._waiting.pop()
        return not self._waiting and not self.update.incomplete()

    def _missing(self) -> str:
        """By an update that is open."""
        if not self.update.is_open:
            return ": no weights have come yet"
        if missing := self.update.incomplete():
            return f": {missing[0]} and {len(missing) - 1} more layers wait for weights"
        is_listed = self.update.keeps_digests and not self._manifest_seen
        return ": the list of what was sent has not come" if is_listed else ""

    def _comes_late(self, name: str, tensor: Tensor) -> bool:
        """After the last layer, as some senders' state has a tied head or buffers, and is what the model holds.
        Half-written weights are none."""
        if self.update.broken:
            return False
        if self.update.is_tied_head(name):
            return self._head_digest(tensor) == self._head_digest(None)
        return self.update.holds(name, tensor)

    def _head_digest(self, head: Tensor | None) -> str:
        """Of a checkpoint's head, the rows that this rank has, or of the embedding's. head: [vocabulary, hidden]."""
        layer = next(each for each in self.update.layers.values() if isinstance(each, VocabParallelEmbedding))
        first, last = layer.shard_indices.org_vocab_start_index, layer.shard_indices.org_vocab_end_index
        held = layer.weight.data[: last - first] if head is None else head[first:last]
        return digest(held.to(self._dtype))

    def _load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """In the place of the model's own."""
        return self.load(weights)


def ways_into(model: Module) -> WaysIn | None:
    """Of a model whose updates are ours. model: or what vLLM puts around it for CUDA graphs, which is no module."""
    return getattr(model, _ATTRIBUTE, None)


def _may_wait(layer: Module) -> bool:
    no = isinstance(layer, ParallelLMHead) or is_deferred_attention_layer(layer)
    return not no and loadable_elements(layer) > 0


def _waits(layer: Module) -> bool:
    info = get_layerwise_info(layer)
    return info.can_load() and (not info.load_numel or info.load_numel < loadable_elements(layer))
