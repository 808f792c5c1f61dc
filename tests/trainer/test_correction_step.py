"""What the driver writes into the queue beside verl's correction, and that the loss is told to fetch it."""

from __future__ import annotations

import pytest
import torch
from corrections_reference import PLANS, SHARE, Case, make_case, reference
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta

from appliance.errors import TrainingError
from appliance.guard.ladder import Measures
from appliance.plan.model import CorrectionPlan
from appliance.quant.correction import CorrectionMethod as Method
from appliance.terms.schemes import Scheme
from appliance.trainer import correction_step
from appliance.trainer.adaptive import mixing, moments
from appliance.trainer.correction_step import WEIGHTS, correct_step
from appliance.trainer.corrections import log_ratio
from appliance.trainer.tightened import tightened

TIGHT = Measures(Scheme.INT8, bf16_layer_fraction=0.0, cap=1.25, reject_k3_above=0.03, stop=False)
ALL = {Method.NONE: CorrectionPlan(method=Method.NONE), **PLANS}
SEQUENCES = 130  # more than one part of a step
RTOL = 2.0**-23  # exp of a float64 difference of float32 numbers, rounded once to float32

Rows = tuple[Tensor, ...]


class Queue:
    """A partition of the TransferQueue with the fields of one batch, as verl's part of the correction leaves them."""

    def __init__(self, case: Case, *, plan: CorrectionPlan) -> None:
        self.case, self.plan = case, plan
        weights, stay = reference(case, plan=plan)
        real = case.rows(case.mask_BT.long())
        self.columns: dict[str, Rows] = {
            "old_log_probs": case.rows(case.trainer_BT),
            "rollout_log_probs": case.rows(case.rollout_BT),
            "loss_mask": real,
            "response_mask": tuple(torch.tensor(row).long() for row in stay),
            "advantages": tuple(torch.full(row.shape, index - 3.5) for index, row in enumerate(real)),
        }
        if weights is not None and plan.method is not Method.ADAPTIVE:  # of which verl knows nothing
            self.columns[WEIGHTS] = tuple(torch.tensor(row) for row in weights)
        self.first = dict(self.columns)

    def batch(self) -> KVBatchMeta:
        keys = [f"a_{number}_0" for number in range(SEQUENCES)]
        return KVBatchMeta(keys=keys, tags=[{}] * SEQUENCES, partition_id="train", fields=list(self.columns))

    def kv_batch_get(self, *, keys: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        assert (keys, partition_id) == (self.batch().keys, "train")
        rows = {name: list(self.columns[name]) for name in select_fields}
        nested = {name: torch.nested.as_nested_tensor(each, layout=torch.jagged) for name, each in rows.items()}
        return TensorDict(nested, batch_size=SEQUENCES)

    def kv_batch_put(self, *, keys: list[str], partition_id: str, fields: TensorDict) -> KVBatchMeta:
        """Answers with all fields that are there: by this list the workers fetch."""
        assert (keys, partition_id, len(fields)) == (self.batch().keys, "train", SEQUENCES)
        self.columns |= {name: rows.unbind() for name, rows in fields.items()}
        return self.batch()

    @property
    def written(self) -> set[str]:
        return {name for name, rows in self.columns.items() if rows is not self.first.get(name)}


@pytest.fixture
def queue(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Queue:
    """With the correction that verl was told, which a test asks for by its method."""
    made = Queue(make_case(1, sequences=SEQUENCES), plan=ALL[request.param])
    monkeypatch.setattr(correction_step, "transfer_queue", made)
    return made


def share_of(case: Case, *, advantages: Rows, cap: float) -> float:
    """Of the whole step at once."""
    x_BT = log_ratio(case.trainer_BT, rollout_BT=case.rollout_BT, mask_BT=case.mask_BT)
    advantages_BT = torch.nn.utils.rnn.pad_sequence(list(advantages), batch_first=True)
    return mixing(moments(x_BT, mask_BT=case.mask_BT, advantages_BT=advantages_BT, cap=cap))


def weights_near(found: Rows, wanted: list[list[float]], *, factor: float = 1.0) -> None:
    for row, other in zip(found, wanted, strict=True):
        assert row.dtype is torch.float32
        assert row.tolist() == pytest.approx([factor * each for each in other], rel=RTOL)


def mixed(weights: list[list[float]], *, share: float) -> list[list[float]]:
    """The reference mixes with SHARE."""
    return [[1 + share * (each - 1) / SHARE for each in row] for row in weights]


@pytest.mark.parametrize("queue", [Method.ADAPTIVE], indirect=True)
def test_adaptive_weighs_every_token_by_one_share_of_the_whole_step(queue: Queue) -> None:
    case, plan = queue.case, queue.plan
    batch, step = correct_step(queue.batch(), plan=plan, planned=plan)
    assert queue.written == {WEIGHTS} and WEIGHTS in batch.fields
    wanted = share_of(case, advantages=queue.columns["advantages"], cap=plan.cap)
    assert step.adaptive_share == pytest.approx(wanted, rel=1e-12) and 0.1 < wanted < 1
    weights, _ = reference(case, plan=plan)
    weights_near(queue.columns[WEIGHTS], mixed(weights, share=wanted))


@pytest.mark.parametrize("queue", [each for each in ALL if each is not Method.ADAPTIVE], indirect=True)
def test_what_verl_corrected_is_left_as_it_is(queue: Queue) -> None:
    plan, before = queue.plan, queue.batch()
    batch, step = correct_step(before, plan=plan, planned=plan)
    assert (batch, queue.written) == (before, set())
    assert (step.acted_fraction > 0) is (plan.method is not Method.NONE)
    queue.columns["response_mask"] = tuple(torch.zeros_like(row) for row in queue.columns["loss_mask"])
    with pytest.raises(TrainingError):
        correct_step(before, plan=plan, planned=plan)


@pytest.mark.parametrize("queue", list(ALL), indirect=True)
def test_a_tightened_correction_is_written_over_verls(queue: Queue) -> None:
    """Mask and weights of the tightened method; a smaller cap of `acr` travels in weights and advantages."""
    case, planned = queue.case, queue.plan
    plan = tightened(planned, measures=TIGHT)
    batch, step = correct_step(queue.batch(), plan=plan, planned=planned)
    weights, stay = reference(case, plan=plan)
    _, stay_too = reference(case, plan=plan.replace(method=Method.K3_REJECT, cap=plan.reject_k3_above or plan.cap))
    kept = [[one and other for one, other in zip(*rows, strict=True)] for rows in zip(stay, stay_too, strict=True)]
    assert [row.bool().tolist() for row in queue.columns["response_mask"]] == kept
    assert 0 < sum(map(sum, kept)) < sum(map(len, kept))
    is_acr = plan.method is Method.ACR
    weighs = {WEIGHTS} if weights is not None else set()
    assert queue.written == {"response_mask", *weighs, *({"advantages"} if is_acr else ())}
    assert set(batch.fields) == set(queue.columns) and (WEIGHTS in batch.fields) is bool(weighs)
    if weights is not None and step.adaptive_share is not None:
        weights = mixed(weights, share=step.adaptive_share)
    if weights is not None:
        weights_near(queue.columns[WEIGHTS], weights, factor=1.5 / 1.25 if is_acr else 1.0)
    scaled = 1.25 / 1.5 if is_acr else 1.0
    for row, first in zip(queue.columns["advantages"], queue.first["advantages"], strict=True):
        assert row.tolist() == pytest.approx((first * scaled).tolist(), rel=RTOL)


@pytest.mark.parametrize("queue", [Method.ACR], indirect=True)
def test_a_token_that_the_guard_has_dropped_is_not_widened(queue: Queue) -> None:
    plan = tightened(queue.plan, measures=TIGHT)
    _, step = correct_step(queue.batch(), plan=plan, planned=queue.plan)
    weights = torch.cat(queue.columns[WEIGHTS]).double() * (1.25 / 1.5)
    kept = torch.cat(queue.columns["response_mask"]).bool()
    wide = weights[kept & (weights > 1.25)]
    assert step.acr_widened_fraction == len(wide) / len(kept) < step.acted_fraction
    assert step.acr_bound_mean == pytest.approx(float(1.2 * wide.mean() / 1.25), rel=RTOL)
