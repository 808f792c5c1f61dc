"""The telemetry of a step out of the queue, and what goes back into it when a log-prob is not finite."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from plans import make_plan
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from appliance.plan.model import CorrectionPlan
from appliance.quant.correction import CorrectionMethod
from appliance.trainer import step_telemetry
from appliance.trainer.metrics import left_out
from appliance.trainer.step_telemetry import measure_step

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
        "uid": ["a", "a"],
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
    monkeypatch.setattr(step_telemetry, "transfer_queue", queue)
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


@pytest.mark.parametrize("written", [math.nan], indirect=True)
@pytest.mark.parametrize(
    ("method", "names"),
    [
        (CorrectionMethod.TIS, {"actor/pg_clipfrac", "actor/grad_norm", "actor/lr"}),
        (CorrectionMethod.ACR, {"actor/pg_clipfrac", "actor/grad_norm", "actor/lr", "actor/acr_widened_fraction"}),
    ],
)
def test_an_update_that_is_left_out_is_said(
    tmp_path: Path, written: list[TensorDict], method: CorrectionMethod, names: set[str]
) -> None:
    _, telemetry = measure_step(BATCH, cap=2.0)
    plan = make_plan(tmp_path, correction=CorrectionPlan(method, cap=2.0))
    found = left_out(tmp_path, telemetry=telemetry, step=3, plan=plan)
    assert found.keys() == names and all(math.isnan(value) for value in found.values())
    (event,) = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert (event["kind"], event["what"]) == (
        "note",
        "step 3 is not learned from: log-probabilities of 25.00% of its tokens are not finite",
    )
