"""Sections of a recipe that a plan has as they are: typed by a user, resolved, and read by every process of a run.
Imports no torch."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field

from appliance.files import Frozen
from appliance.guard.policy import ESS, K3_KL, TRUNCATED_FRACTION, WEIGHT_STD, Action
from appliance.terms.settings import Schedule
from appliance.terms.shapes import Linear

ALL_LINEAR = "all-linear"

T = TypeVar("T")
Lax = Annotated[T, Field(strict=False)]  # the text of an enum's member, a list for a tuple


class Section(Frozen):
    """A mapping of the recipe."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class SchemeChange(StrEnum):
    AUTO = "auto"
    LIVE = "live"
    RESTART = "restart"


class LogBackend(StrEnum):
    TENSORBOARD = "tensorboard"
    TRACKIO = "trackio"
    WANDB = "wandb"


def _name_all_linear(targets: object) -> object:
    """Every linear layer by its name, where peft's word for all of them stands, alone or as a list."""
    return list(Linear) if targets in (ALL_LINEAR, [ALL_LINEAR]) else targets


_ByPeftsName = BeforeValidator(
    _name_all_linear, json_schema_input_type=Literal["all-linear"] | tuple[Linear | Literal["all-linear"], ...]
)


class Lora(Section):
    """An adapter: the product of two narrow matrices beside each linear layer is trained, the model itself is not."""

    rank: int = Field(32, ge=1, le=1024)
    """width of both matrices"""
    alpha: int | None = Field(None, ge=1)
    """their product counts alpha / rank times; null: as the rank"""
    targets: Annotated[Lax[tuple[Lax[Linear], ...]], _ByPeftsName] | None = Field(None, min_length=1)
    """linear layers that get one; null or `all-linear`, which is peft's name for it: all of a decoder layer"""
    dropout: float = Field(0.0, ge=0, lt=1)
    """of what enters the adapter, in updates"""


class Optimizer(Section):
    """AdamW."""

    learning_rate: float = Field(1e-6, ge=0, le=1)
    """after the warm-up"""
    schedule: Lax[Schedule] = Schedule.CONSTANT
    """from there: `constant`, or `cosine` or `linear` down to the last step"""
    min_lr_ratio: float = Field(0.0, ge=0, lt=1)
    """what is left of it at the end"""
    betas: Lax[tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]]] = (0.9, 0.999)
    """decay of the two averages"""
    epsilon: float = Field(1e-8, gt=0, le=1)
    """beside the root of the second average"""
    weight_decay: float = Field(0.01, ge=0, le=1)
    """decoupled from the gradient"""
    warmup_steps: int = Field(0, ge=0)
    """linear from 0, in steps"""
    max_grad_norm: float = Field(1.0, gt=0)
    """longer gradients are scaled down to this norm"""
    norm_fed_lr_scale: float = Field(1.0, gt=0)
    """times learning_rate, for the layers that UAQ scales"""


class Guard(Section):
    """What watches the run, and what it may do. Steps that stay bad lead from one action to the next."""

    actions: Lax[tuple[Lax[Action], ...]] | None = None
    """of `warn`, `tighten`, `raise-precision`, `bf16`, `stop`; null: all but the third; []: none"""
    k3_kl: float = Field(K3_KL, gt=0)
    """a step is bad with a mean k3 mismatch above, nats per token"""
    weight_std: float = Field(WEIGHT_STD, gt=0)
    """or a spread of the importance weights above"""
    ess: float = Field(ESS, ge=0, lt=1)
    """or an effective sample size below, as a share of the tokens"""
    truncated_fraction: float = Field(TRUNCATED_FRACTION, gt=0, le=1)
    """or a larger share of tokens whose weight is cut"""
    bad_steps: int = Field(3, ge=1)
    """so many bad steps of the last 2 * bad_steps - 1 lead on"""
    fine_steps: int = Field(20, ge=1)
    """so many fine steps in a row lead back"""
    cooling_steps: int = Field(5, ge=0)
    """steps after a climb that are not judged; one after a descent"""
    gradient_steps: int = Field(3, ge=1)
    """gradients in a row that are not finite, then it stops"""
    save_budget_s: float = Field(300, gt=0)
    """seconds to save in after a signal, then it is ended"""
    stall_s: float = Field(1800, gt=0)
    """seconds without any progress, then the training is cut"""
    reward_failures: float = Field(0.1, ge=0, le=1)
    """a step with a larger share of failed rewards stops it"""
    scheme_change: Lax[SchemeChange] = SchemeChange.AUTO
    """`live` with a weight update, `restart` of the rollout engines, or `auto`"""
    reserve_bf16: bool = False
    """count the engines' memory as for rollouts in BF16, the highest rung"""

    @property
    def ranks_layers(self) -> bool:
        """Whether somebody may ask for the worst layers."""
        return Action.RAISE_PRECISION in (self.actions or ())

    @property
    def comes_to_bf16(self) -> bool:
        """Whether rollouts may lose all of their quantised layers."""
        return Action.BF16 in (self.actions or ())


class Checkpoint(Section):
    """When the state is saved, besides at the end and when `RUN/save` is touched, and how much of it stays."""

    every_steps: int = Field(0, ge=0)
    """save after every so many steps; 0: not by steps"""
    every_minutes: float = Field(0.0, ge=0)
    """save when the last one is so old; 0: not by time"""
    keep: int | None = Field(2, ge=1)
    """so many of the newest stay; null: all"""
    keep_best: bool = False
    """save the best validation so far, and keep the best"""


class Logging(Section):
    """Where metrics go besides metrics.jsonl."""

    backends: Lax[tuple[Lax[LogBackend], ...]] = ()
    """of `tensorboard`, `trackio`, `wandb`"""
