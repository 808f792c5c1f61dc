"""A whole training: verl's configuration from the overrides of the plan, the trainer, its rollouts and rewards."""

from __future__ import annotations

import contextvars
import functools
import logging
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import transfer_queue
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf
from transformers import AutoConfig
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config

from appliance.errors import ApplianceError
from appliance.patch import Patch, apply_patch
from appliance.record.code import with_copies
from appliance.record.events import append_event
from appliance.record.plan import RunPlan
from appliance.record.samples import SampleLog
from appliance.tasks.grading import Shaping
from appliance.tasks.response_text import ResponseReader
from appliance.tasks.tools import read_schemas
from appliance.terms.clock import clock_of
from appliance.trainer.engine_shares import Sampling
from appliance.trainer.governor import Vocabulary
from appliance.trainer.rewards import RewardPool, pool_for
from appliance.trainer.rollouts import Rollouts
from appliance.trainer.stopping import StopAsked, Stopping
from appliance.trainer.trainer import ApplianceTrainer
from appliance.trainer.turns import Turns, in_pool

FINISH_WITHIN_S = 30.0  # wandb uploads for as long as its server lets it wait

_logger = logging.getLogger(__name__)

NO_LOAD_BALANCER = Patch(
    name="no-load-balancer",
    target="verl.workers.rollout.llm_server:LLMServerManager._init_global_load_balancer",
    why=(
        "verl starts an actor that hands out servers, two calls to it per sample and a process that imports half of "
        "vLLM; our rollouts come from one place, which knows what each server has to do"
    ),
    upstream="https://github.com/verl-project/verl/blob/v0.9.1/verl/workers/rollout/llm_server.py",
    distribution="verl",
    sources={"0.9.1": "cc3dcac74089a597cad8dff877587f18108aa2ef880036a34bf4e84663018f4d"},
    remove_when="verl lets a trainer of ours leave the load balancer out",
)


def _without_balancer(original: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    async def _init_global_load_balancer(self: Any) -> None:
        self.global_load_balancer = None

    return _init_global_load_balancer


def compose_config(overrides: list[str]) -> DictConfig:
    """Compose verl's configuration with our overrides, validated by verl."""
    with initialize_config_module(config_module="verl.trainer.config", version_base=None):
        config = compose(config_name="ppo_trainer", overrides=overrides)
    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    config.transfer_queue.enable = True
    OmegaConf.resolve(config)
    return config


def fit(
    plan: RunPlan, *, overrides: list[str], stopping: Stopping, on_engine_death: Callable[[ApplianceError], None]
) -> None:
    """Train, in the order of verl's own task runner (verl/trainer/main_ppo.py, TaskRunnerV1.run).

    on_engine_death: called on another thread when a rollout engine died while the trainer may be waiting for it.
    Raises SavedAndStopped or Interrupted when the run was asked to stop.
    """
    config = compose_config(overrides)
    apply_patch(NO_LOAD_BALANCER, _without_balancer)
    transfer_queue.init(config.transfer_queue)
    try:
        trainer = ApplianceTrainer(config=config, plan=plan, stopping=stopping, on_engine_death=on_engine_death)
        pool = pool_for(plan)
        try:
            trainer.init()
            trainer.governor.vocabulary = _vocabulary(trainer, plan=plan)
            trainer.fit(_rollouts(trainer, plan=plan, pool=pool))
            trainer.export_model()
            stopping.over()
        except StopAsked:
            raise trainer.save_and_stop() from None
        finally:
            trainer.engines.stop_watching()
            pool.close()
            if (tracking := getattr(trainer, "logger", None)) is not None:  # verl's, there since the training began
                finish_tracking(tracking.finish, run_dir=trainer.run_dir)
    finally:
        transfer_queue.close()


def _rollouts(trainer: ApplianceTrainer, *, plan: RunPlan, pool: RewardPool) -> Rollouts:
    decode = functools.partial(trainer.tokenizer.decode, skip_special_tokens=True)
    return Rollouts(
        trainer.llm_server_manager.server_handles,
        tokenizer=trainer.tokenizer,
        reader=ResponseReader(trainer.tokenizer),
        pool=pool,
        samples=SampleLog(trainer.run_dir, steps=plan.trainer.steps, decode=decode),
        shaping=Shaping(
            wrong=plan.wrong_reward,
            max_tokens=plan.task.max_response_tokens,
            buffer_tokens=plan.algorithm.overlong_tokens,
            penalty=plan.algorithm.overlong_penalty,
            samples=plan.rollout.samples_per_prompt if plan.task.is_own else 0,
        ),
        training=Sampling(
            temperature=plan.rollout.temperature,
            top_p=plan.rollout.top_p,
            top_k=plan.rollout.top_k or -1,
            num_samples=plan.rollout.samples_per_prompt,
            top_log_probs=plan.rollout.top_log_probs,
        ),
        validation=Sampling(temperature=0.0, top_p=1.0, num_samples=1),
        max_prompt_tokens=plan.task.max_prompt_tokens,
        seed=plan.seed,
        in_order=not plan.algorithm.filters,
        val_sets={
            name: Sampling(val_set.temperature, plan.rollout.top_p, val_set.samples, plan.rollout.top_k or -1)
            if val_set.temperature
            else Sampling(0.0, 1.0, val_set.samples)
            for name, val_set in plan.task.val_sets.items()
        },
        rewards=list(plan.task.named_rewards),
        turns=_turns(trainer, plan=plan, pool=pool) if plan.task.tools else None,
        clock=clock_of(trainer.tokenizer, date=plan.task_files.date),
    )


def _vocabulary(trainer: ApplianceTrainer, *, plan: RunPlan) -> Vocabulary:
    config = AutoConfig.from_pretrained(plan.trained_model, trust_remote_code=plan.model.trust_remote_code)
    return Vocabulary(rows=config.get_text_config().vocab_size, words=len(trainer.tokenizer))


def _turns(trainer: ApplianceTrainer, *, plan: RunPlan, pool: RewardPool) -> Turns:
    task, files, model = plan.task, plan.task_files, plan.trained_model
    assert task.tools is not None and task.max_turns is not None, "only a task with tools has turns"
    return Turns(
        trainer.tokenizer,
        model_type=AutoConfig.from_pretrained(model, trust_remote_code=plan.model.trust_remote_code).model_type,
        schemas=read_schemas(files.schemas_file),
        max_turns=task.max_turns,
        max_tokens=task.max_response_tokens,
        call=in_pool(
            pool,
            file=with_copies(plan).tools,
            sha256=files.sha256_of(task.tools),
            timeout_s=task.reward_timeout_s,
            beside=files.folder_of(task.tools),
        ),
        clock=clock_of(trainer.tokenizer, date=files.date),
    )


def finish_tracking(finish: Callable[[], object], *, run_dir: Path, within_s: float = FINISH_WITHIN_S) -> None:
    """Have the backends of `logging.backends` write what they hold, which verl leaves to a destructor: `finish` is its
    Tracking's. Waits at most `within_s` seconds; what goes wrong becomes a `note`.

    Never raises: it would replace the error that the run may be ending with, and the numbers are in metrics.jsonl.
    """
    failed: list[str] = []

    def work() -> None:
        try:
            finish()
        except Exception as error:  # the boundary of other people's code
            failed.append(f"{type(error).__name__}: {error}")

    # trackio knows its run by a context variable; on a daemon thread nothing waits for it at the end
    thread = threading.Thread(target=contextvars.copy_context().run, args=(work,), name="end-tracking", daemon=True)
    thread.start()
    thread.join(within_s)
    why = f"not done within {within_s:g} s" if thread.is_alive() else "".join(failed)
    if not why:
        return
    fact = "a backend of logging.backends did not end well: it may lack the last numbers"
    try:
        append_event(run_dir, kind="note", what=fact, why=why)
    except OSError as error:
        _logger.warning("%s (%s); no event could be written: %s", fact, why, error)
