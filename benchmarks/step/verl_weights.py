"""verl's extension of vLLM's worker with weight updates that vLLM's CPU kernels take, for `benchmarks.step`.

verl's own writes into the parameters of layers, as vLLM has them when a model is loaded. On a CPU vLLM has packed them
for its kernels by then, and the first update ends with `'Parameter' object has no attribute 'weight_loader'`. vLLM's
layerwise reload gives the parameters back, loads, and packs again: vLLM's own code, by its documented calls. It leaves
out a head that is tied to the embedding, whose packed copy would stay that of the first load.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


class LayerwiseExtension(vLLMColocateWorkerExtension):
    """Named in `engine_kwargs.vllm.worker_extension_cls`."""

    @torch.no_grad()
    def update_weights_from_ipc(
        self, peft_config: dict[str, Any] | None = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        model, model_config = self.model_runner.model, self.model_runner.vllm_config.model_config
        receiver = BucketedWeightReceiver(self._get_zmq_handle(), device=torch.device("cpu"), use_shm=use_shm)

        def load(weights: list[tuple[str, Tensor]], is_last: bool) -> None:
            """Load a bucket as copies in the model's type: verl uses its memory again, and a layer may wait for the
            next one."""
            model.load_weights((name, weight.to(model_config.dtype, copy=True)) for name, weight in weights)

        with set_current_vllm_config(self.model_runner.vllm_config):
            initialize_layerwise_reload(model)
            receiver.receive_weights(load)
            finalize_layerwise_reload(model, model_config)
            if model_config.hf_text_config.tie_word_embeddings:
                model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
