"""verl's FSDP engine with what a recipe can ask of a trainer and verl does not have.

verl looks for an engine by device and vendor, and lets VERL_ENGINE_VENDOR name the vendor (terms/environment.py). Ours
is one.

The rollouts' own forward (`trainer.forward: rollout`): put in before FSDP wraps the model; the sender of weights
sets what it computes in, which is what the engines compute in from an update on.

Without a pass for log-probs before the update, those of its forward are collected for the driver
(trainer/update_log_probs.py), with the entropies that the pass would have brought.

Prompts that several sequences share are computed once on a CPU (trainer/shared_prompts.py). Where engines report the
most likely words at each token, the trainer compares its own log-probs of them (trainer/top_words.py).

On one rank nothing is gathered from others, but FSDP still makes the BF16 copy of each layer's FP32 masters again for
each forward and each backward of each micro-batch. Where memory allows (it is then that activations are kept, too), the
copies made by an update's first forward serve all of its micro-batches. So do the dequantised weights that the
rollouts' own forward multiplies gradients with.

LoRA (`model.lora`): see trainer/lora.py; with the rollouts' own forward the model keeps no BF16 weights of what that
quantises (trainer/weights_on_disk.py). A learning rate that sinks linearly, where verl's FSDP engine has a constant
and a cosine. A reference on a CPU.

FP16 (`trainer.dtype`): verl makes torch's gradient scaler, which doubles what losses are multiplied by after so many
updates, and where gradients overflow leaves the update out and halves it. For a CPU ours is made for a CPU: verl's is
for CUDA, and off where there is none. Its state goes into checkpoints, and what it does into the metrics.

Another learning rate for the layers that UAQ scales: two groups of parameters. UAQ by s makes a step of Adam's s times
larger beside the weight, on the linear layers that a norm feeds. This does the same to the same layers without touching
the model: their learning rate is multiplied. The decoupled weight decay is learning rate times decay, so the decay is
divided: it stays as it is, as it does under UAQ. What remains different is the norm itself, whose own step UAQ makes
smaller, and the share of these layers in the gradient's norm.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from verl.workers.engine.base import EngineRegistry
from verl.workers.rollout.vllm_rollout.utils import get_vllm_max_lora_rank

from appliance.processes import return_free_memory
from appliance.quant.mismatch import LayerTrace, Place
from appliance.record.checkpoints import ADAPTER_FOLDER, SCALER_FILE
from appliance.record.plan import RunPlan, read_plan
from appliance.sync.precision import read_generation, read_wanted
from appliance.terms.environment import ENGINE_VENDOR, PLAN_VARIABLE
from appliance.terms.families import FAMILIES, norm_fed
from appliance.terms.schemes import Precision
from appliance.terms.settings import OldLogProbs, Schedule
from appliance.trainer.lora import (
    FrozenWeights,
    adapter_config,
    adapter_weights,
    base_weights,
    check_merge,
    expected_merge,
    put_adapter_in,
    save_adapter,
)
from appliance.trainer.metrics import SCALER_METRICS
from appliance.trainer.rollout_forward import RolloutForward, put_in
from appliance.trainer.top_words import DIVERGENCE, TopWordsEngine
from appliance.trainer.update_log_probs import UPDATE_LOG_PROBS
from appliance.trainer.weights_on_disk import WeightsOnDisk

_LEAST_TEMPERATURE = 1e-8  # as verl divides logits
_GROWS_AFTER = 400  # updates without an overflow, as in verl's


@EngineRegistry.register(
    model_type="language_model", backend=["fsdp", "fsdp2"], device=["cuda", "npu"], vendor=ENGINE_VENDOR
)
class ApplianceEngine(TopWordsEngine):
    """Raises EngineError for a model without the pattern of norms and layers."""

    _gives_old_log_probs = False
    """Whether each update keeps the log-probs of its forward: `trainer.old_log_probs: update` in the plan."""
    _keeps_copies = False
    """Whether the BF16 copies of weights last from an update's first forward to its last backward."""

    def _build_module(self) -> Module:
        module = super()._build_module()
        self.shares_prompts = _plan().shares_prompts and type(module).__name__ in FAMILIES
        self._flow: RolloutForward | None = None
        self._gives_old_log_probs = _plan().trainer.old_log_probs is OldLogProbs.UPDATE
        if _plan().trainer.quantises:
            flow = RolloutForward(
                module,
                quantisation=_plan().engines[0],
                num_tokens=len(self.model_config.tokenizer),
                fp8_backward=_plan().trainer.fp8_backward,
                keeps=_plan().trainer.old_log_probs is OldLogProbs.ROLLOUT,
                keeps_dequantised=_plan().trainer_memory.keeps_copies,
                linears_alone=not _plan().trainer.one_flow,
            )
            self._flow = put_in(flow)
        return module

    def _build_lora_module(self, module: Module) -> Module:
        """Build the adapter in place of verl's, which has no dropout and rounds the adapter to the model's type."""
        lora = _plan().model.lora
        assert lora is not None, "verl asks where a rank is set"
        self._frozen, self._merges = FrozenWeights(), 0
        self._sent_to: tuple[int, Precision] | None = None
        adapted = put_adapter_in(module, lora=lora, seed=_plan().seed)
        self._on_disk: WeightsOnDisk | None = None
        if self._flow is not None:
            self._on_disk = WeightsOnDisk(Path(self.model_config.local_path))
            self._flow.add_adapters(adapted, engine_rank=get_vllm_max_lora_rank(lora.rank), files=self._on_disk)
        # Of what is dropped; checkpoints have the state from there on.
        torch.manual_seed(_plan().seed + torch.distributed.get_rank())
        return adapted

    def get_per_tensor_param(
        self, layered_summon: bool = False, base_sync_done: bool = False, **kwargs: Any
    ) -> tuple[Any, dict[str, Any] | None]:
        """Give what an update sends, and PEFT's configuration where an adapter goes as it is: then its weights, behind
        those of the model where the engines are new or change their precision."""
        if not _plan().sends_adapters:
            return super().get_per_tensor_param(layered_summon=layered_summon, base_sync_done=base_sync_done, **kwargs)
        self._frozen.check(self.module)
        run_dir = Path(_plan().run_dir)
        engines = read_generation(run_dir).number, read_wanted(run_dir)
        on_disk = iter(()) if self._on_disk is None else self._on_disk.weights()
        base = chain(base_weights(self.module), on_disk) if engines != self._sent_to else iter(())
        self._sent_to = engines
        config = adapter_config(self.module)
        return chain(base, adapter_weights(self.module).items()), config

    def _merged_lora_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        self._frozen.check(self.module)
        lora = _plan().model.lora
        assert lora is not None, "it is what is merged"
        expected, self._merges = expected_merge(self.module, lora=lora, turn=self._merges), self._merges + 1
        yield from check_merge(super()._merged_lora_per_tensor_param(), expected=expected)

    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        super().save_checkpoint(local_path, *args, **kwargs)
        if _plan().model.lora:
            model, weights = _plan().model, _plan().weights
            folder, base = Path(local_path) / ADAPTER_FOLDER, model.path or weights.name_or_path
            save_adapter(self.module, folder=folder, base=base, commit=weights.commit)
        if self.scaler is not None and torch.distributed.get_rank() == 0:  # overflows are shared: all ranks have it
            (Path(local_path) / SCALER_FILE).write_text(json.dumps(self.scaler.state_dict()) + "\n")

    def _build_fsdp_module(self, module: Module) -> Module:
        """Build verl's module. On a CPU the weights of a reference are not pinned in the host's memory, as verl does
        for a GPU."""
        config = self.engine_config
        if _plan().is_cpu and config.forward_only:
            self.engine_config = replace(config, forward_only=False)
        try:
            built = super()._build_fsdp_module(module)
        finally:
            self.engine_config = config
        if self.scaler is not None and _plan().is_cpu:
            self.scaler = ShardedGradScaler("cpu", growth_interval=_GROWS_AFTER)
        self._keeps_copies = _plan().trainer_memory.keeps_copies
        return built

    def forward_backward_batch(self, data: TensorDict, loss_function: Any, forward_only: bool = False) -> Any:
        if forward_only or not self._keeps_copies:
            return super().forward_backward_batch(data, loss_function, forward_only=forward_only)
        self.module.set_reshard_after_forward(False)
        try:
            return super().forward_backward_batch(data, loss_function)
        finally:
            self.module.set_reshard_after_forward(self.engine_config.reshard_after_forward)

    @contextmanager
    def _gradient_sync_context(self, *, is_last_micro_batch: bool) -> Iterator[None]:
        """Wrap a forward and its backward as verl does; the last backward drops the copies."""
        with super()._gradient_sync_context(is_last_micro_batch=is_last_micro_batch):
            if self._keeps_copies:
                self.module.set_reshard_after_backward(is_last_micro_batch)
            yield

    def train_batch(self, data: TensorDict, loss_function: Any) -> Any:
        if self._gives_old_log_probs:
            UPDATE_LOG_PROBS.begin()
        before = None if self.scaler is None else self.scaler.get_scale()
        outputs = super().train_batch(data, loss_function)
        return_free_memory()
        if before is not None and self.is_mp_src_rank_with_outputs():
            values = (scale := self.scaler.get_scale()), float(scale < before)
            outputs["metrics"] |= {name: [value] for name, value in zip(SCALER_METRICS, values, strict=True)}
        return outputs

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: TensorDict, logits_processor_func: Any
    ) -> dict[str, Tensor]:
        """Collect an update's log-probs, which verl gives to its loss and then drops. Their entropies have no gradient
        but where the loss asks for one (`algorithm.entropy_bonus`)."""
        outputs: dict[str, Tensor] = super().prepare_model_outputs(
            output, output_args, micro_batch, logits_processor_func
        )
        if UPDATE_LOG_PROBS.is_open:
            entropy = outputs.get("entropy")
            if entropy is None:
                entropy = self.in_sequences(self._entropy(output, output_args), output_args, micro_batch)
            UPDATE_LOG_PROBS.add(
                micro_batch, log_probs=outputs["log_probs"], entropy=entropy, divergence=outputs.get(DIVERGENCE)
            )
        return outputs

    def _entropy(self, output: Any, output_args: dict[str, Any]) -> Tensor:
        """Return [T] nats, without a gradient, of this rank's tokens that have logits, by verl's function of its
        passes."""
        given_1T = getattr(output, "entropy", None)
        if given_1T is not None:  # of the rollouts' forward
            return given_1T[0]
        logits_TV = output.logits.detach()[0]
        if not output_args.get("temperature_is_one", False):
            temperature_T1 = output_args["temperature_rmpad"].unsqueeze(-1)
            logits_TV = logits_TV / temperature_T1.clamp(min=_LEAST_TEMPERATURE).to(logits_TV.dtype)
        chunks = self.engine_config.entropy_from_logits_with_chunking
        how = {"chunk_size": self.engine_config.entropy_from_logits_chunk_size} if chunks else {}
        entropy_T: Tensor = self.compute_entropy_from_logits(logits_TV, **how)
        return entropy_T

    def _build_optimizer(self, module: Module) -> Optimizer:
        optimizer = super()._build_optimizer(module)
        if (scale := _plan().optimizer.norm_fed_lr_scale) != 1:
            split_rates(optimizer, parameters_by_name=module.named_parameters(), scale=scale)
        return optimizer

    def _build_lr_scheduler(self, optimizer: Optimizer) -> LRScheduler:
        planned = _plan().optimizer
        if planned.schedule is not Schedule.LINEAR:
            return super()._build_lr_scheduler(optimizer)
        rate = partial(
            planned.schedule.rate,
            steps=self.optimizer_config.total_training_steps,
            warmup_steps=planned.warmup_steps,
            least=planned.min_lr_ratio,
        )
        return LambdaLR(optimizer, rate)

    def optimizer_step(self) -> float:
        norm = super().optimizer_step()
        UPDATE_LOG_PROBS.end()
        if self._flow is not None:
            self._flow.forget()
        return norm

    def traced(self, ids: list[int], *, token: int, temperature: float, values_at: Place | None = None) -> LayerTrace:
        """Trace `token` after `ids` through the rollouts' forward. On all ranks at once."""
        ids_1T, labels_1T = torch.tensor([ids]), torch.tensor([[*ids[1:], token]])
        trace = LayerTrace(values_at)
        with self.eval_mode(), torch.no_grad(), torch.autocast(ids_1T.device.type, dtype=self._autocast_dtype):
            out = self.module(
                input_ids=ids_1T,
                position_ids=torch.arange(len(ids))[None],
                shift_labels=labels_1T,
                temperature=temperature,
                trace=trace.note,
            )
        trace.log_prob = float(out.log_probs[0, -1])
        return trace

    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        super().load_checkpoint(local_path, *args, **kwargs)
        if self.scaler is not None:
            self.scaler.load_state_dict(json.loads((Path(local_path) / SCALER_FILE).read_bytes()))
        if self._flow is not None:
            self._flow.forget()


def _plan() -> RunPlan:
    return read_plan(Path(os.environ[PLAN_VARIABLE]))


def split_rates(optimizer: Optimizer, *, parameters_by_name: Iterable[tuple[str, Parameter]], scale: float) -> None:
    """Split off a second group of parameters, with `scale` times the learning rate and the same decay per step.
    optimizer: with one group, whose rate stays what `learning_rate` in the metrics shows.  parameters_by_name: its
    parameters."""
    (group,) = optimizer.param_groups
    parameters = dict(parameters_by_name)
    fed_names = norm_fed(parameters).linears
    fed = {id(each) for name, each in parameters.items() if name in fed_names}
    settings: dict[str, Any] = {key: value for key, value in group.items() if key != "params"}
    settings |= {"lr": group["lr"] * scale, "weight_decay": group["weight_decay"] / scale}
    moved = [each for each in group["params"] if id(each) in fed]
    group["params"] = [each for each in group["params"] if id(each) not in fed]
    optimizer.add_param_group({**settings, "params": moved})
