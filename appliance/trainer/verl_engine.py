"""verl's FSDP engine with what a recipe can ask of a trainer and verl does not have.

verl looks for an engine by device and vendor, and lets VERL_ENGINE_VENDOR name the vendor (terms/environment.py). Ours
is one.

The rollouts' own forward (`trainer.forward: rollout`): put in before FSDP wraps the model, and told by the sender of
weights what the engines compute in from an update on.

Another learning rate for the layers that UAQ scales: two groups of parameters. UAQ by s makes a step of Adam's s times
larger beside the weight, on the linear layers that a norm feeds. This does the same to the same layers without touching
the model: their learning rate is multiplied. The decoupled weight decay is learning rate times decay, so the decay is
divided: it stays as it is, as it does under UAQ. What remains different is the norm itself, whose own step UAQ makes
smaller, and the share of these layers in the gradient's norm.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch.nn import Module, Parameter
from torch.optim import Optimizer
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from appliance.record.plan import RunPlan, read_plan
from appliance.terms.environment import ENGINE_VENDOR, PLAN_VARIABLE
from appliance.terms.families import norm_fed
from appliance.trainer.rollout_forward import RolloutForward, put_in


@EngineRegistry.register(
    model_type="language_model", backend=["fsdp", "fsdp2"], device=["cuda", "npu"], vendor=ENGINE_VENDOR
)
class ApplianceEngine(FSDPEngineWithLMHead):
    """Raises EngineError for a model without the pattern of norms and layers."""

    def _build_module(self) -> Module:
        module = super()._build_module()
        self._flow: RolloutForward | None = None
        if _plan().trainer.one_flow:
            self._flow = put_in(
                module, quantisation=_plan().rollout.replicas[0], num_tokens=len(self.model_config.tokenizer)
            )
        return module

    def _build_optimizer(self, module: Module) -> Optimizer:
        optimizer = super()._build_optimizer(module)
        if (scale := _plan().norm_fed_lr_scale) != 1:
            split_rates(optimizer, named=module.named_parameters(), scale=scale)
        return optimizer

    def optimizer_step(self) -> float:
        norm = super().optimizer_step()
        if self._flow is not None:
            self._flow.forget()
        return norm

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super().load_checkpoint(*args, **kwargs)
        if self._flow is not None:
            self._flow.forget()


def _plan() -> RunPlan:
    return read_plan(Path(os.environ[PLAN_VARIABLE]))


def split_rates(optimizer: Optimizer, *, named: Iterable[tuple[str, Parameter]], scale: float) -> None:
    """A second group of parameters, with `scale` times the learning rate and the same decay per step.

    optimizer: with one group, whose rate stays what `learning_rate` in the metrics shows.  named: its parameters.
    """
    (group,) = optimizer.param_groups
    parameters = dict(named)
    fed_names = norm_fed(parameters).linears
    fed = {id(each) for name, each in parameters.items() if name in fed_names}
    settings: dict[str, Any] = {key: value for key, value in group.items() if key != "params"}
    settings |= {"lr": group["lr"] * scale, "weight_decay": group["weight_decay"] / scale}
    moved = [each for each in group["params"] if id(each) in fed]
    group["params"] = [each for each in group["params"] if id(each) not in fed]
    optimizer.add_param_group({**settings, "params": moved})
