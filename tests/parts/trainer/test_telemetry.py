"""The telemetry of a step out of the queue, and what goes back into it when a log-prob is not finite."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transfer_queue.interface
from omegaconf import OmegaConf
from plans import make_plan
from tensordict import TensorDict
from trainers import make_trainer
from transfer_queue import KVBatchMeta
from transfer_queue.metadata import BatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from appliance.corrections.objective import Aggregate
from appliance.corrections.registry import CorrectionMethod
from appliance.errors import TrainingError
from appliance.plan.verl_args import AGGREGATES
from appliance.settings.sections import Correction
from appliance.terms.settings import OldLogProbs
from appliance.trainer import correction, metrics
from appliance.trainer.metrics import keeping_fetched, measure_step, metrics_left_out

BATCH = KVBatchMeta(keys=["a_0_0", "a_1_0"], tags=[{}, {}], partition_id="train", fields=[])


def rows(*values: list[float]) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(each) for each in values], layout=torch.jagged)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[TensorDict]:
    """Two samples of one prompt; the second one's rollout has the value that a test asks for."""
    columns = {
        "old_log_probs": rows([-1.0, -2.0, -3.0], [-0.5]),
        "rollout_log_probs": rows([-1.0, -2.0, -3.0], [request.param]),
        "response_mask": rows([1, 1, 1], [1]),
        "responses": rows([5, 6, 7], [5]),
    }
    back: list[TensorDict] = []

    def put(*, keys: list[str], partition_id: str, fields: TensorDict) -> KVBatchMeta:
        assert (keys, partition_id) == (BATCH.keys, "train")
        back.append(fields)
        return BATCH

    queue = SimpleNamespace(
        kv_batch_get=lambda *, keys, partition_id, select_fields: {name: columns[name] for name in select_fields},
        kv_batch_put=put,
    )
    for room in (metrics, correction):
        monkeypatch.setattr(room, "transfer_queue", queue)
    return back


@pytest.mark.parametrize("written", [-0.25], indirect=True)
def test_a_step_with_finite_numbers_is_measured_and_left_alone(written: list[TensorDict]) -> None:
    _, telemetry = measure_step(BATCH, cap=2.0)
    assert telemetry.nonfinite_fraction == 0.0 < telemetry.seconds
    assert telemetry.mismatch.kl == pytest.approx(0.25 / 4)
    assert written == []


@pytest.mark.parametrize("written", [math.nan, -math.inf], indirect=True)
def test_numbers_that_are_not_finite_leave_the_queue(written: list[TensorDict]) -> None:
    _, telemetry = measure_step(BATCH, cap=2.0)
    assert telemetry.nonfinite_fraction == 0.25
    assert math.isnan(telemetry.mismatch.k3_kl)
    (fields,) = written
    assert [row.tolist() for row in fields["old_log_probs"].unbind()] == [[-1.0, -2.0, -3.0], [0.0]]
    assert [row.tolist() for row in fields["rollout_log_probs"].unbind()] == [[-1.0, -2.0, -3.0], [0.0]]


class Client:
    """Of the queue, with columns of two samples as the engine and the workers leave them: prompts have 2 tokens."""

    def __init__(self) -> None:
        self.gets = 0
        self.columns = {
            "log_probs": rows([0.0, -1.0, -2.0, -3.0, 0.0], [0.0, -0.5, 0.0]),  # of prompt and response, one early
            "entropy": rows([0.0, 1.0, 1.0, 1.0, 0.0], [0.0, 1.0, 0.0]),
            "rollout_log_probs": rows([-1.0, -2.0, -3.0], [-0.25]),
            "response_mask": rows([1, 1, 1], [1]),
            "responses": rows([5, 6, 7], [5]),
        }

    async def async_kv_retrieve_meta(self, **_: object) -> BatchMeta:
        return BatchMeta([0, 1], ["train"] * 2, {name: {} for name in self.columns}, [1, 1])

    async def async_get_data(self, metadata: BatchMeta) -> TensorDict:
        self.gets += 1
        return TensorDict({name: self.columns[name] for name in metadata.field_names}, batch_size=2)

    async def async_put(self, fields: TensorDict, metadata: BatchMeta, **_: object) -> BatchMeta:
        self.columns |= dict(fields.items())
        return metadata

    def _run_coroutine(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run(coroutine)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    made = Client()
    monkeypatch.setattr(transfer_queue.interface, "_TQ_CLIENT", made)
    return made


@pytest.fixture
def verls() -> SimpleNamespace:
    """What verl's way to the log-probs reads of its trainer."""
    rollout = {"temperature": 1.0, "calculate_log_probs": True}
    actor = {"loss_agg_mode": "token-mean", "loss_scale_factor": None}
    config = OmegaConf.create({"algorithm": {}, "actor_rollout_ref": {"rollout": rollout, "actor": actor}})
    return SimpleNamespace(config=config, actor_rollout_wg=SimpleNamespace(compute_log_prob=lambda batch: batch))


def test_a_step_is_measured_by_one_fetch(client: Client, verls: SimpleNamespace, tmp_path: Path) -> None:
    plan = make_plan(tmp_path, correction=Correction(method=CorrectionMethod("tis"), cap=2.0))
    stopping = SimpleNamespace(check=lambda: None, is_requested=False)
    trainer = make_trainer(plan, stopping=stopping, **vars(verls))
    trainer._compute_old_log_prob(BATCH, metrics={})
    assert client.gets == 1
    assert trainer._step.telemetry.mismatch.kl == pytest.approx(0.25 / 4)


@pytest.mark.parametrize("aggregate", Aggregate)
def test_the_entropy_is_the_mean_over_tokens_whatever_the_loss_aggregates(
    client: Client, verls: SimpleNamespace, tmp_path: Path, aggregate: Aggregate
) -> None:
    """1, 2 and 4 nats and one token of 5 in another response: verl says 3.67 and 3 / 2 else."""
    client.columns["entropy"] = rows([0.0, 1.0, 2.0, 4.0, 0.0], [0.0, 5.0, 0.0])
    verls.config.actor_rollout_ref.actor = {"loss_agg_mode": AGGREGATES[aggregate], "loss_scale_factor": 4}
    plan = make_plan(tmp_path, correction=Correction(method=CorrectionMethod("tis"), cap=2.0))
    plan = plan.replace(algorithm=plan.algorithm.replace(aggregate=aggregate))
    trainer = make_trainer(plan, stopping=SimpleNamespace(check=lambda: None, is_requested=False), **vars(verls))
    said: dict[str, float] = {}
    trainer._compute_old_log_prob(BATCH, metrics=said)
    assert said["actor/entropy"] == 12 / 4


def test_without_a_pass_the_old_log_probs_are_the_rollouts(
    client: Client, verls: SimpleNamespace, tmp_path: Path
) -> None:
    """And what a step is measured in is kept for its first update."""
    verls.config.algorithm = {"rollout_correction": {"bypass_mode": True}}
    verls.actor_rollout_wg.compute_log_prob = None
    plan = make_plan(tmp_path)
    plan = plan.replace(trainer=plan.trainer.replace(old_log_probs=OldLogProbs.ROLLOUT))
    trainer = make_trainer(plan, stopping=SimpleNamespace(check=lambda: None, is_requested=False), **vars(verls))
    trainer._compute_old_log_prob(BATCH, metrics={})
    fetched_fields = trainer._step.fetched
    for fields in (client.columns, fetched_fields):
        old, rollout = (fields[name].values() for name in ("old_log_probs", "rollout_log_probs"))
        assert torch.equal(old, rollout)
    assert torch.equal(fetched_fields["response_mask"].values(), client.columns["response_mask"].values())
    assert trainer._step.telemetry.tokens_mean == 2


def test_what_verl_fetched_is_measured_and_nothing_fetched_again(client: Client, verls: SimpleNamespace) -> None:
    with keeping_fetched() as fetched:
        PPOTrainer._compute_old_log_prob(verls, BATCH, metrics={})
    assert client.gets == 1
    whole = fetched.data
    _, first_telemetry = measure_step(BATCH, cap=2.0, fetched=whole)
    assert client.gets == 1
    assert first_telemetry.mismatch.kl == pytest.approx(0.25 / 4)
    _, anew = measure_step(BATCH, cap=2.0, fetched=None)
    assert client.gets == 2
    assert replace(anew, seconds=0.0) == replace(first_telemetry, seconds=0.0)
    shorter = TensorDict({name: rows([1.0]) for name in set(whole.keys())}, batch_size=1)
    for other in (whole.exclude("responses"), shorter):
        assert replace(measure_step(BATCH, cap=2.0, fetched=other)[1], seconds=0.0) == replace(
            first_telemetry, seconds=0.0
        )
    assert client.gets == 4 and fetched.data is whole  # what came later was not kept


def test_rows_of_different_lengths_are_refused() -> None:
    data = {name: rows([1.0, 2.0], [3.0]) for name in ("old_log_probs", "rollout_log_probs", "response_mask")}
    fetched = TensorDict({**data, "responses": rows([1.0], [2.0, 3.0])}, batch_size=2)
    with pytest.raises(TrainingError, match="have not the same lengths"):
        measure_step(BATCH, cap=2.0, fetched=fetched)


@pytest.mark.parametrize("written", [math.nan], indirect=True)
def test_an_update_that_is_left_out_is_said(tmp_path: Path, written: list[TensorDict]) -> None:
    _, telemetry = measure_step(BATCH, cap=2.0)
    found = metrics_left_out(tmp_path, telemetry=telemetry, step=3)
    assert found.keys() == {"actor/pg_clipfrac", "actor/grad_norm", "actor/lr"} and all(
        math.isnan(value) for value in found.values()
    )
    (event,) = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert (event["kind"], event["what"]) == (
        "note",
        "step 3 is not learned from: log-probabilities of 25.00% of its tokens are not finite",
    )
