"""How a weight update reaches a vLLM worker from verl's trainer, and never leaves the trainer waiting for ever. Inside
a run every update is acknowledged in the run's folder once it is proven; the trainer waits for that."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import Module
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import (
    BucketedWeightReceiver,
    rebuild_ipc,
    rebuild_shared_memory,
)
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.config import set_current_vllm_config
from vllm.platforms import current_platform
from vllm.utils.torch_utils import is_quantized_kv_cache

from appliance.engine.adapter import (
    LORA_DEVICE,
    ONE_ADAPTER,
    AdapterLayers,
    AdapterUpdate,
    lora_device,
    one_adapter,
)
from appliance.engine.attest import attest_rollout_worker, live_scheme, plan_of_process, replica_of_process
from appliance.engine.config import ApplianceConfig
from appliance.engine.kv_cache import FP8_ROUNDING, KvCacheScales, rounding
from appliance.engine.precision import raised_layers
from appliance.engine.structure import rehearse_updates
from appliance.engine.telemetry import read_first_scales, write_first_scales
from appliance.engine.update import Bucket, WeightUpdate
from appliance.engine.ways_in import WaysIn
from appliance.errors import SyncError
from appliance.patch import apply_patch
from appliance.quant.kv_scales import Pairs
from appliance.quant.mismatch import LayerTrace, Place
from appliance.quant.profile import Smoothing, load_smoothing
from appliance.record.events import report_failures
from appliance.sync.precision import read_generation
from appliance.sync.records import Acknowledgement, add_layer_errors, append_acknowledgement, layer_errors_file
from appliance.terms.environment import PLAN_VARIABLE, weight_socket


class DrainingReceiver(BucketedWeightReceiver):
    """verl's receiver, with two differences: what it delivers is the receiver's own memory, and it always answers.

    verl's sender waits for each answer without a time limit. When a bucket cannot be used, this receiver answers it
    and all that follow, and then lets the error propagate.
    """

    def receive_weights(self, on_bucket_received: Callable[[Bucket, bool], None]) -> None:
        self._last_seen = False
        self._owed = False
        self._init_socket()
        try:
            self._init_buffer()
            while not self._last_seen:
                metadata = self._receive()
                on_bucket_received(self._bucket(metadata), self._last_seen)
                if not self._last_seen:
                    self._answer()
        finally:
            self._drain()
            self._ack_pending = self._owed  # verl's _cleanup gives the last answer, after the buffer is released
            self._cleanup()

    def _init_buffer(self) -> None:
        metadata = self.socket.recv_pyobj()
        self._owed = True
        if self.use_shm:
            self.buffer, self.shm = rebuild_shared_memory(metadata["name"], metadata["size"], dtype=torch.uint8)
        else:
            self.buffer = rebuild_ipc(metadata, self.device.index)
        self._answer()

    def _receive(self) -> dict:
        metadata = self.socket.recv_pyobj()
        self._last_seen = metadata["is_last"]
        self._owed = True
        return metadata

    def _answer(self) -> None:
        self.socket.send(b"")
        self._owed = False

    def _drain(self) -> None:
        """Answer what is still to come: nothing after a complete update."""
        while not self._last_seen:
            if self._owed:
                self._answer()
            self._receive()

    def _bucket(self, metadata: dict) -> Bucket:
        return [(name, self._tensor(meta)) for name, meta in metadata["bucket_meta"].items()]

    def _tensor(self, meta: dict) -> Tensor:
        """Copy a tensor out of its bucket: the sender reuses it, and on a CPU a view would also keep the shared segment
        open."""
        if meta["handle"] is not None:  # a tensor larger than a bucket comes by its own handle (CUDA only)
            return rebuild_ipc(meta["handle"], self.device.index).clone()
        shape, dtype, offset = meta["shape"], meta["dtype"], meta["offset"]
        size = dtype.itemsize * shape.numel()
        return self.buffer[offset : offset + size].view(dtype=dtype).view(shape).to(self.device, copy=True)


class SyncWorkerExtension(vLLMColocateWorkerExtension):
    """Mixed into vLLM's worker by name (`worker_extension_cls`), in place of verl's own, whose methods it keeps."""

    def __new__(cls, **kwargs: Any) -> Self:
        """Make the worker that this class is mixed into: vLLM's first call, before the model is loaded."""
        config = kwargs.get("vllm_config")
        if config is not None and config.lora_config is not None and current_platform.is_cpu():
            apply_patch(LORA_DEVICE, lora_device)
            apply_patch(ONE_ADAPTER, one_adapter)
        if config is not None and is_quantized_kv_cache(config.cache_config.cache_dtype) and current_platform.is_cpu():
            apply_patch(FP8_ROUNDING, rounding)
        return super().__new__(cls, **kwargs)

    def monkey_patch_model(self, vocab_size: int, banned_token_ids: list[int] | None = None) -> None:
        """Attest what runs, and rehearse the updates of a model without a row in the list of families: this is verl's
        first call after the model is loaded, before any generation."""
        super().monkey_patch_model(vocab_size, banned_token_ids)
        model, config = self.model_runner.get_model(), self.model_runner.vllm_config
        with report_failures():
            with self._without_adapters():
                attest_rollout_worker(model, vllm_config=config, rank=self.rank)
            if self._ways_in() is None and config.lora_config is None:
                rehearse_updates(model, vllm_config=config, rank=self.rank)

    def update_weights_from_ipc(
        self, peft_config: dict | None = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        """Take one weight update, as verl calls it. Raises SyncError; the engine then refuses further updates."""
        device = self.device or torch.device("cpu")
        update: WeightUpdate | WaysIn | None = None

        def take(bucket: Bucket, is_last: bool) -> None:
            """Take one bucket. Everything that can fail happens in here: outside the receiver nobody would answer the
            sender."""
            nonlocal update
            if update is None:
                update = self._ways_in() or self._weight_update()
                if isinstance(update, AdapterUpdate):
                    update.peft_config = peft_config or {}
                elif peft_config:
                    raise SyncError("weight update: an adapter came to an engine that was not started for one")
                update.begin()
            update.load(bucket)
            if is_last:
                self._acknowledge(update.finish())

        receiver = DrainingReceiver(zmq_handle=self._get_zmq_handle(), device=device, use_shm=use_shm)
        with report_failures(), set_current_vllm_config(self.model_runner.vllm_config), device, torch.no_grad():
            receiver.receive_weights(take)

    def begin_trace(self, names: list[str], values_at: Place | None) -> None:
        """Trace the next forward, of one sequence alone. names: of layers, by vLLM's names, and `lm_head`."""
        self._trace = LayerTrace(values_at)
        self._hooks = [
            self.model_runner.get_model()
            .get_submodule(_CALLED.get(name, name))
            .register_forward_hook(functools.partial(_note, self._trace, name))
            for name in names
        ]

    def end_trace(self) -> tuple[dict[str, list[str]], list[float]]:
        """End the trace and return LayerTrace's digests and values."""
        for hook in self._hooks:
            hook.remove()
        return self._trace.digests, self._trace.values

    def begin_kv_ranges(self, scales: Pairs) -> None:
        """Note from now on what the layers write into their FP8 KV cache, by KvCacheScales.begin."""
        with report_failures(), torch.no_grad():
            self._kv_cache_scales().begin(scales)

    def end_kv_ranges(self) -> Pairs:
        """Return the ranges that this rank has noted."""
        with report_failures():
            return self._kv_cache_scales().end()

    def take_kv_scales(self, scales: Pairs) -> str:
        """Take the scales that belong to the newest weight update, prove them, and return the digest of what the layers
        have then."""
        with report_failures(), torch.no_grad():
            pairs = {name: (float(keys), float(values)) for name, (keys, values) in scales.items()}
            return self._kv_cache_scales().write(pairs, sync=self._weight_update().number)

    def check_kv_scales(self) -> str:
        """Return the digest of the scales that the layers have, which must be those of the newest weight update."""
        with report_failures():
            return self._kv_cache_scales().check(sync=self._weight_update().number)

    def _kv_cache_scales(self) -> KvCacheScales:
        if not hasattr(self, "_appliance_kv_scales"):
            self._appliance_kv_scales = KvCacheScales(self.model_runner.get_model())
        return self._appliance_kv_scales

    def _get_zmq_handle(self) -> str:
        """Return the address of verl's socket, which verl's own methods ask for too; the sender's (trainer/sender.py)
        is the same."""
        path = os.environ.get(PLAN_VARIABLE)
        return weight_socket(super()._get_zmq_handle(), run_dir=Path(path).parent if path else None)

    def _ways_in(self) -> WaysIn | None:
        """Return the ways into a worker under FLASHRL_CONFIG, whose updates are counted and whose core follows them."""
        return getattr(self, "appliance_ways_in", None) if plan_of_process() is None else None

    def _weight_update(self) -> WeightUpdate:
        if not hasattr(self, "_appliance_update"):
            config, plan, replica = self.model_runner.vllm_config, plan_of_process(), replica_of_process()
            of_run: dict[str, Any] = {}
            if plan is not None:
                run_dir = Path(plan.run_dir)
                first = read_first_scales(run_dir, replica=replica, rank=self.rank)
                of_run = {
                    "prove_every": plan.quantization.prove_every,
                    "needs_manifest": True,
                    "first_scales": {place: scale_RS.to(self.device or "cpu") for place, scale_RS in first.items()},
                    "taken_before": read_generation(run_dir).after_sync,
                }
            self._scales_written = 0
            of_adapters = {} if config.lora_config is None else {"loras": self.model_runner.lora_manager}
            self._appliance_update = (AdapterUpdate if of_adapters else WeightUpdate)(
                self.model_runner.get_model(),
                **of_adapters,
                model_config=config.model_config,
                replica=replica,
                rank=self.rank,
                smoothing=_smoothing(config.quant_config),
                **of_run,
            )
        return self._appliance_update

    @contextmanager
    def _without_adapters(self) -> Iterator[None]:
        """Show the model as one that no adapter was put into."""
        runner = self.model_runner
        if runner.vllm_config.lora_config is None:
            yield
            return
        dtype = runner.vllm_config.model_config.dtype
        with AdapterLayers(runner.get_model(), loras=runner.lora_manager, dtype=dtype).taken_off():
            yield

    def _acknowledge(self, taken: Acknowledgement) -> None:
        plan = plan_of_process()
        if plan is None:
            return
        runner, run_dir, telemetry = self.model_runner, Path(plan.run_dir), self._weight_update().telemetry
        place = {"replica": taken.replica, "rank": taken.rank}
        with self._without_adapters():
            if taken.switched:
                attest_rollout_worker(runner.get_model(), vllm_config=runner.vllm_config, rank=self.rank)
            live = live_scheme(runner.get_model())
            raised = raised_layers(runner.get_model(), planned=plan.engines[taken.replica])
        if len(telemetry.first) > self._scales_written:
            write_first_scales(run_dir, telemetry.first, **place)
            self._scales_written = len(telemetry.first)
        if plan.guard.ranks_layers:
            add_layer_errors(layer_errors_file(run_dir, **place), telemetry.layer_errors)
        now = dataclasses.replace(taken, scheme=str(live.scheme), emulated=live.emulated, bf16_layers=raised)
        append_acknowledgement(run_dir, now)


_CALLED = {"lm_head": "logits_processor"}  # what vLLM calls in a layer's place


def _note(trace: LayerTrace, name: str, module: Module, inputs: tuple[Any, ...], output: Any) -> None:
    """Note what a layer returns: a linear layer returns its bias too, a norm the residual."""
    trace.note(name, output[0] if isinstance(output, tuple) else output)


def _smoothing(quant_config: object) -> Smoothing | None:
    """Load the smoothing that the engine's own settings name: the same that its first load folded in."""
    profile = quant_config.quantisation.profile if isinstance(quant_config, ApplianceConfig) else ""
    return load_smoothing(Path(profile)) if profile else None
