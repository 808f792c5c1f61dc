"""The worker of an engine under FLASHRL_CONFIG: every weight update is proven, and no half-updated weights generate.

vLLM starts it by its name in `worker_cls`. FLASHRL_TEST_RELOAD: it takes other checkpoints when the engine has started,
each as one weight update, and speaks as the last one.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from vllm.config import set_current_vllm_config
from vllm.distributed import get_pcp_group, get_tensor_model_parallel_rank
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.platforms import current_platform

from appliance.engine.attest import live_scheme
from appliance.engine.config import ApplianceConfig, require_ignored_layers
from appliance.engine.structure import rehearse_updates
from appliance.engine.update import WeightState
from appliance.engine.ways_in import RESET, WaysIn
from appliance.errors import SyncError
from flashrl_compat.layerwise import patch_layerwise
from flashrl_compat.loader import smoothing_of
from flashrl_compat.variables import LOGGER
from flashrl_compat.weight_digests import weight_digests

WORKER_CLASS = f"{__name__}.ProvenWorker"
RELOAD_KEY = "flashrl_test_reload"  # in vLLM's `additional_config`, which reaches every worker

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker


class ProvenWorker(Worker):
    appliance_ways_in: WaysIn
    _weights_asleep = False

    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)
        patch_layerwise()  # also modules that were imported since the plugin was
        model = self.model_runner.get_model()
        require_ignored_layers(model, self.vllm_config.quant_config)
        LOGGER.info("rank %d has the %s", self.rank, _described(model))
        if isinstance(self.vllm_config.quant_config, ApplianceConfig):
            rehearse_updates(model, vllm_config=self.vllm_config, rank=self.rank)
        smoothing = smoothing_of(self.vllm_config.model_config)
        self.appliance_ways_in = WaysIn(
            model,
            vllm_config=self.vllm_config,
            rank=self.rank,
            smoothing=smoothing,
            tell=LOGGER.info,
            drain=self._drain_transfer,
        )
        self.model_runner.reload_weights = self.reload_weights  # worker extensions ask it, too

    def _drain_transfer(self) -> None:
        """From vLLM 0.29 on a transfer may return before the model has what it brought (`defers_processing`)."""
        if drain := getattr(self.weight_transfer_engine, "drain_pending", None):
            drain()

    def compile_or_warm_up_model(self) -> Any:
        """Take the last step of an engine's start: memory is measured, and CUDA graphs hold the addresses of the
        weights."""
        times = super().compile_or_warm_up_model()
        config = self.vllm_config.additional_config
        for checkpoint in config.get(RELOAD_KEY, ()) if isinstance(config, dict) else ():
            self.reload_weights(weights_path=checkpoint)
        return times

    def reload_weights(
        self,
        weights_iterator: Iterable[tuple[str, Tensor]] | None = None,
        weights_path: str | None = None,
        is_checkpoint_format: bool = True,
    ) -> None:
        """Reload the weights as vLLM does, as one proven update. The profile's smoothing is folded in once, by the
        update. Raises SyncError."""
        if not is_checkpoint_format:
            raise SyncError(
                "weight update: weights in a kernel's own format cannot be proven", hint="send checkpoints'"
            )
        runner, sender = self.model_runner, "reload_weights"
        config = copy.copy(runner.model_config)
        if weights_iterator is None:
            if weights_path is not None:
                config.model, config.revision = weights_path, None
            sender = f"reload_weights of {config.model}"
            weights_iterator = _weights(config, model=runner.get_model(), load_config=self.vllm_config.load_config)
        self.appliance_ways_in.begin(sender)
        self.appliance_ways_in.load(weights_iterator, sender=sender)
        self.appliance_ways_in.finish()
        # the next one without a path loads it again
        runner.model_config.model, runner.model_config.revision = config.model, config.revision
        runner.reset_lora_state()

    def execute_model(self, scheduler_output: Any) -> Any:
        """Generate as vLLM does. Raises SyncError while an update is open, and for good after one that failed."""
        if scheduler_output.total_num_scheduled_tokens:
            self.appliance_ways_in.require_whole()
        return super().execute_model(scheduler_output)

    def sleep(self, level: int = 1) -> None:
        if level == 2:  # weights wake as memory that nobody has written
            self.appliance_ways_in.drop()
        super().sleep(level)
        self._weights_asleep = True

    def wake_up(self, tags: list[str] | None = None) -> None:
        super().wake_up(tags)
        if tags is None or "weights" in tags:
            self._weights_asleep = False

    def are_weights_asleep(self) -> bool:
        """Return whether a sleep has taken the memory of the weights away; a pause takes nothing."""
        return self._weights_asleep

    def compute_weight_checksums(self) -> dict[str, str]:
        """Return digests of what this rank computes with, by vLLM 0.32's keys."""
        parallel = self.parallel_config
        tp, pcp = get_tensor_model_parallel_rank(), get_pcp_group().rank_in_group
        prefix = f"dp{parallel.data_parallel_index}:pp0:pcp{pcp}:tp{tp}:"
        with torch.device(self.device), torch.no_grad(), set_current_vllm_config(self.vllm_config):
            digests = weight_digests(self.model_runner.get_model(), dtype=self.model_config.dtype)
        return {prefix + name: digest for name, digest in digests.items()}

    def checked_weights(self) -> tuple[tuple[int, str, str], dict[str, str], dict[str, int | bool] | None]:
        """Return the fields of a WeightReport, the digests (none where the weights are not whole) and the proof that
        belongs to them: one call, so that no update comes between."""
        report = self.appliance_ways_in.report
        digests = self.compute_weight_checksums() if report.state is WeightState.WHOLE else {}
        return (report.version, str(report.state), report.reason), digests, self.last_proof()

    def reset_weights(self) -> None:
        """Declare the weights gone. Raises SyncError for models that take no update."""
        self.appliance_ways_in.drop(RESET)

    def last_proof(self) -> dict[str, int | bool] | None:
        """Return what the kernels answered after the last update, or None where there was none."""
        proven = self.appliance_ways_in.last_proven
        return proven and {
            "rank": self.rank,
            "update": self.appliance_ways_in.report.version,
            "layers": proven.layers,
            "layers_proven": proven.layers_proven,
            "parameters_proven": proven.parameters_proven,
            "digests_as_sent": bool(proven.manifest),
        }

    def appliance_weights(self, settles: bool) -> tuple[int, str, str]:
        """Return the fields of a WeightReport, for the engine's core. settles: whether to end an update whose sender
        announces no end; raises SyncError where it is not whole."""
        report = self.appliance_ways_in.settle() if settles else self.appliance_ways_in.report
        return report.version, str(report.state), report.reason


def _weights(config: Any, *, model: Any, load_config: Any) -> Iterator[tuple[str, Tensor]]:
    """Read weights as vLLM's own loader does, whatever loader the engine was started with."""
    load_config = dataclasses.replace(load_config, load_format="hf", use_tqdm_on_load=False)
    return DefaultModelLoader(load_config).get_all_weights(config, model)


def _described(model: Module) -> str:
    live = live_scheme(model)
    parts = [f"scheme {live.scheme}", *["emulated"] * live.emulated, *["lm_head in FP32"] * live.lm_head_fp32]
    kernels = ", ".join(f"{live.kernels[name]} {name}" for name in sorted(live.kernels))
    return f"{', '.join(parts)}; layers by kernel: {kernels}"
