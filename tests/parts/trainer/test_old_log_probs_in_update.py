"""Old log-probs from the update's own forward: the gradient, the metrics and the checks of a step with a pass.

The two ways compute the same numbers from the same log-probs, by the same code, so most comparisons are of bits. What a
sequence is padded to may differ between them: sums over it, in float64, then differ by 2^-52 of their size, which no
weight of these seeds rounds to another float32.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from corrections_reference import CORRECTIONS, Case, make_case, reference
from tensordict import NonTensorStack, TensorDict
from test_batch_correction import SEQUENCES, Queue, plan_of
from test_corrected_loss import jagged, make_config
from test_verl_engine import tiny
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric
from verl.utils.torch_functional import entropy_from_logits_with_chunking
from verl.workers.config import PolicyLossConfig
from verl.workers.utils.padding import response_from_nested

from appliance.corrections.base import LossCorrection
from appliance.corrections.objective import Loss
from appliance.errors import TrainingError
from appliance.plan.verl_args import AGGREGATES, LOSS_MODES
from appliance.trainer import correction as module
from appliance.trainer.correction import (
    CENTERED,
    CENTERING,
    CLIP_LOWER,
    CLIP_UPPER,
    CORRECTION,
    KEPT,
    REAL,
    USED,
    WEIGHTS,
    BatchCorrection,
    CorrectionInputs,
    corrected_loss,
    fields_of,
)
from appliance.trainer.metrics import mean_entropy, measure_step, write_old_log_probs
from appliance.trainer.update_log_probs import ForwardLogProbs, take_update_log_probs
from appliance.trainer.verl_engine import ApplianceEngine

# Those that need no other sequence of the step (`reads_step`) and no old log-probs later (`has_shadow_pass`).
ONE_BY_ONE = {name: method for name, method in CORRECTIONS.items() if not (method.reads_step or method.has_shadow_pass)}
PAIRS = [
    (name, tight, loss)
    for name, method in ONE_BY_ONE.items()
    for loss in Loss
    for tight in (False, True)
    if not method.conflict(loss)
]
PROMPT = 2  # tokens before each response


def correction_named(name: str, *, tight: bool) -> LossCorrection:
    """With a limit of its k3 that this batch has sequences on both sides of."""
    if not tight:
        return ONE_BY_ONE[name]
    tightened = ONE_BY_ONE[name].tightened()
    return tightened if name == "k3-reject" else replace(tightened, reject_k3_above=0.03)


class Step:
    """One step's sequences, and what loss and correction make of them by either way."""

    def __init__(self, case: Case, *, correction: LossCorrection, loss: Loss = Loss.PPO) -> None:
        self.case, self.correction, self.loss = case, correction, loss
        self.length_S = case.mask_BT.sum(dim=-1).tolist()
        rng = np.random.default_rng(7)
        self.advantages_BT = (
            torch.from_numpy(rng.normal(0, 1, (len(self.length_S), 1))).float().expand(case.mask_BT.shape)
        )
        self.real_BT = case.mask_BT.clone()  # a tool's tokens in the longer ones: nothing is learned from them
        for row, length in enumerate(self.length_S):
            if length > 6:
                self.real_BT[row, 3:5] = False
        self.leaf_BT = case.trainer_BT.clone().requires_grad_()

    def fields(self, rows: list[int]) -> dict[str, Tensor]:
        columns = {
            REAL: self.real_BT.long(),
            KEPT: self.real_BT.long(),
            "rollout_log_probs": self.case.rollout_BT,
            "advantages": self.advantages_BT,
            "responses": self.case.mask_BT.long(),
        }
        return {name: self._jagged(rows_BT, rows) for name, rows_BT in columns.items()}

    def _jagged(self, rows_BT: Tensor, rows: list[int]) -> Tensor:
        return jagged(rows_BT[rows], [self.length_S[row] for row in rows])

    def by_driver(self) -> dict[str, list[Tensor]]:
        """What it writes after a pass, of the whole step at once."""
        whole = self.fields([*range(len(self.length_S))])
        names = ("rollout_log_probs", REAL, "advantages")
        trainer = self.case.rows(self.case.trainer_BT)
        fields, _ = fields_of(
            CorrectionInputs(trainer, *(whole[name].unbind() for name in names)), correction=self.correction
        )
        return fields | {"old_log_probs": [*trainer]}

    def train(
        self, micro_batches: list[list[int]], *, with_pass: bool
    ) -> tuple[float, Tensor, list[dict[str, Metric]]]:
        """(loss, gradient of each log-prob, metrics of each micro-batch)"""
        spec = self.loss.spec
        config = make_config(
            policy_loss=PolicyLossConfig(loss_mode=LOSS_MODES[self.loss]),
            clip_ratio_low=spec.clip.low,
            clip_ratio_high=spec.clip.high,
            clip_ratio_c=spec.dual_clip,
            loss_agg_mode=AGGREGATES[spec.aggregate],
        )
        written, total, metrics = self.by_driver() if with_pass else {}, 0.0, []
        self.leaf_BT.grad = None
        for rows in micro_batches:
            fields = self.fields(rows)
            fields |= {
                name: torch.nested.as_nested_tensor([values[row] for row in rows], layout=torch.jagged)
                for name, values in written.items()
            }
            fields["prompts"] = jagged(torch.zeros(len(rows), PROMPT), [PROMPT] * len(rows))
            data = TensorDict(fields, batch_size=len(rows))
            tu.assign_non_tensor(
                data, dp_size=1, global_batch_size=len(self.length_S), batch_num_tokens=int(self.real_BT.sum())
            )
            if not with_pass:
                tu.assign_non_tensor(data, **{CORRECTION: self.correction})
            whole = [
                torch.cat([row.new_zeros(PROMPT - 1), row[: self.length_S[place]], row.new_zeros(1)])
                for place, row in zip(rows, self.leaf_BT[rows], strict=True)
            ]
            output = {"log_probs": torch.nested.as_nested_tensor(whole, layout=torch.jagged)}
            loss, of_micro_batch = corrected_loss(
                config, output, data, ratio_to=self.correction.ratio_to, clips=self.correction.clips, kind=self.loss
            )
            loss.backward()
            total += loss.item()
            metrics.append(of_micro_batch)
        return total, self.leaf_BT.grad.clone(), metrics


def in_parts(sequences: int, *, size: int) -> list[list[int]]:
    """Micro-batches of other rows than the step's first so many, as when they are packed by tokens."""
    order = np.random.default_rng(3).permutation(sequences).tolist()
    return [order[start : start + size] for start in range(0, sequences, size)]


@pytest.mark.parametrize(("name", "tight", "loss"), PAIRS)
def test_loss_gradient_and_metrics_are_those_after_a_pass(name: str, tight: bool, loss: Loss) -> None:
    correction = correction_named(name, tight=tight)
    step = Step(make_case(1), correction=replace(correction, loss=loss), loss=loss)
    parts = in_parts(64, size=9)
    wanted, gradient_BT, wanted_metrics = step.train(parts, with_pass=True)
    found, found_BT, metrics = step.train(parts, with_pass=False)
    assert found == wanted and torch.equal(found_BT, gradient_BT) and bool(found_BT.abs().sum() > 0)
    for one, other in zip(metrics, wanted_metrics, strict=True):
        assert {key: value.values for key, value in one.items()} == {key: value.values for key, value in other.items()}


@pytest.mark.parametrize("name", [name for name in ONE_BY_ONE if not ONE_BY_ONE[name].clips])
def test_the_gradient_is_the_policy_gradient_with_the_corrections_weights(name: str) -> None:
    """With a ratio of 1: -w A / tokens for a token that stays, in float64. float32 rounds w, w A and the division."""
    case = make_case(2)
    step = Step(case, correction=ONE_BY_ONE[name])
    step.real_BT = case.mask_BT  # as the reference has it
    _, found_BT, _ = step.train(in_parts(64, size=16), with_pass=False)
    weights, stay = reference(case, correction=ONE_BY_ONE[name])
    wanted_BT = np.zeros(case.mask_BT.shape)
    for row, (weight, stays) in enumerate(zip(weights, stay, strict=True)):
        advantage = float(step.advantages_BT[row, 0])
        wanted_BT[row, : len(weight)] = [-one * advantage * keeps for one, keeps in zip(weight, stays, strict=True)]
    wanted_BT /= float(case.mask_BT.sum())
    assert np.abs(found_BT.double().numpy() - wanted_BT).max() <= 8 * 2.0**-24 * np.abs(wanted_BT).max()


def test_the_guards_tightening_is_that_of_the_batch() -> None:
    """No state of the worker: a batch that comes with another correction is corrected by that one."""
    one, other = (Step(make_case(1), correction=correction_named("tis", tight=tight)) for tight in (True, False))
    parts = [[*range(64)]]
    gradients = [step.train(parts, with_pass=False)[1] for step in (one, other, one)]
    assert torch.equal(gradients[0], gradients[2]) and not torch.equal(gradients[0], gradients[1])


@pytest.mark.parametrize("loss", Loss)
@pytest.mark.parametrize("bad", [float("nan"), -float("inf"), -301.0])
@pytest.mark.parametrize("side", ["trainer", "rollout"])
def test_a_log_prob_that_is_not_finite_makes_every_gradient_nan(loss: Loss, bad: float, side: str) -> None:
    """Whatever the loss clips, drops or averages."""
    correction = ONE_BY_ONE["tis-geometric" if loss.spec.weighs_responses else "tis"]
    step = Step(make_case(1), correction=replace(correction, loss=loss), loss=loss)
    values_BT = step.leaf_BT.data if side == "trainer" else step.case.rollout_BT
    row = next(place for place, length in enumerate(step.length_S) if length > 6)
    values_BT[row, 2] = bad
    total, gradient_BT, _ = step.train([[*range(64)]], with_pass=False)
    assert np.isnan(total) and bool(gradient_BT[step.case.mask_BT].isnan().all())


def test_a_token_that_does_not_count_may_be_as_far_as_it_likes() -> None:
    """Another policy's, such as a tool's."""
    step = Step(make_case(1), correction=ONE_BY_ONE["tis"])
    row = next(place for place, length in enumerate(step.length_S) if length > 6)
    step.case.rollout_BT[row, 3] = -1000.0
    total, gradient_BT, _ = step.train([[*range(64)]], with_pass=False)
    assert np.isfinite(total) and bool(gradient_BT.isfinite().all()) and gradient_BT[row, 3] == 0


def test_no_weight_moves_by_such_a_gradient() -> None:
    """verl's own step of the optimizer, without a scaler; with one: test_grad_scaler.py."""
    model = tiny()
    engine: Any = ApplianceEngine.__new__(ApplianceEngine)
    engine.module, engine.optimizer = model, torch.optim.AdamW(model.parameters(), lr=0.01)
    engine.optimizer_config, engine.scaler = SimpleNamespace(clip_grad=1.0), None
    engine._flow, engine._qat_enabled = None, False
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ids = torch.arange(12)[None]
    log_probs = model(input_ids=ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])
    (log_probs.sum() * float("nan")).backward()
    assert not np.isfinite(float(engine.optimizer_step()))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not engine.optimizer.state


# the driver, after the update


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    """As it is without a pass: no old log-probs. verl's name of a response's tokens is there, too."""
    queue_of_case = Queue(make_case(1, sequences=SEQUENCES))
    del queue_of_case.columns["old_log_probs"]
    queue_of_case.columns["responses"] = queue_of_case.columns[REAL]
    queue_of_case.first = dict(queue_of_case.columns)
    from appliance.trainer import metrics

    for room in (module, metrics):
        monkeypatch.setattr(room, "transfer_queue", queue_of_case)
    return queue_of_case


def held_by(queue: Queue, parts: list[list[int]], *, spoil: dict[int, float] | None = None) -> list[ForwardLogProbs]:
    """By several forwards, their rows in another order than the step's."""
    log_probs = queue.case.rows(queue.case.trainer_BT)
    for row, value in (spoil or {}).items():
        log_probs[row][0] = value
    return [
        ForwardLogProbs(
            [f"a_{row}_0" for row in rows],
            torch.tensor([len(log_probs[row]) for row in rows]),
            torch.cat([log_probs[row] for row in rows]),
            torch.cat([torch.full_like(log_probs[row], float(row)) for row in rows]),
            torch.cat([torch.full_like(log_probs[row], 0.5 * row) for row in rows]),
        )
        for rows in parts
    ]


def reported_by_loss(queue: Queue, parts: list[list[int]], *, correction: LossCorrection) -> dict[str, float]:
    """The sums that the losses of two ranks had in hand, as verl takes their mean."""
    step = Step(queue.case, correction=correction)
    step.real_BT = queue.case.mask_BT
    metrics = step.train(parts, with_pass=False)[2]
    names = [name for name in metrics[0] if name.startswith(USED)]
    return {name: sum(one[name].aggregate() for one in metrics) / 2 for name in names}


@pytest.mark.parametrize("name", ONE_BY_ONE)
@pytest.mark.parametrize("tight", [False, True])
def test_the_driver_has_what_a_pass_would_have_left_and_checks_what_the_loss_used(
    queue: Queue, tmp_path: Path, name: str, tight: bool
) -> None:
    correction, parts = correction_named(name, tight=tight), in_parts(SEQUENCES, size=9)
    run = BatchCorrection(plan_of(CORRECTIONS[name], tmp_path))
    sent = run.send(queue.batch(), correction=correction)
    assert sent.extra_info[CORRECTION] == correction and not queue.written
    reported = reported_by_loss(queue, parts, correction=correction)
    if correction.centers:  # test_top_words.py has the loss with its term
        assert sent.extra_info[CENTERING] == correction
        reported[USED + CENTERED] = reported[f"{USED}kept"]
    batch, fetched = write_old_log_probs(queue.batch(), forwards=held_by(queue, parts))
    assert all(
        torch.equal(*pair)
        for pair in zip(queue.columns["old_log_probs"], queue.case.rows(queue.case.trainer_BT), strict=True)
    )
    lengths = queue.case.mask_BT.sum(dim=-1).double()
    assert mean_entropy(batch, fetched=fetched) == pytest.approx(
        float((lengths * torch.arange(SEQUENCES)).sum() / lengths.sum())
    )
    batch, telemetry = measure_step(batch, cap=2.0, fetched=fetched)
    assert telemetry.mismatch.k3_kl > 0.01 and not telemetry.nonfinite_fraction
    apart = telemetry.metrics()
    assert apart["mismatch_top_kl"] == pytest.approx(mean_entropy(batch, fetched=fetched) / 2)
    assert apart["mismatch_top_equal_fraction"] == pytest.approx(float(lengths[0] / lengths.sum()))
    run.prepare(batch, step=1, correction=correction)
    bounds = {CLIP_LOWER, CLIP_UPPER} if correction.clips else set()
    assert queue.written == {"old_log_probs", "entropy", "divergence", KEPT, WEIGHTS, *bounds}
    run.after_update(batch, step=1, reported=reported, log_probs=lambda _: pytest.fail("no shadow pass"))
    other = correction_named(name, tight=not tight) if name != "none" else ONE_BY_ONE["tis"]
    reported = reported_by_loss(queue, parts, correction=other)
    with pytest.raises(TrainingError, match="the loss used"):
        run.after_update(batch, step=1, reported=reported, log_probs=lambda _: None)


def test_log_probs_that_are_not_finite_are_counted_and_leave_the_queue(queue: Queue) -> None:
    parts = in_parts(SEQUENCES, size=9)
    batch, fetched = write_old_log_probs(queue.batch(), forwards=held_by(queue, parts, spoil={5: float("nan")}))
    _, telemetry = measure_step(batch, cap=2.0, fetched=fetched)
    assert telemetry.nonfinite_fraction == 1 / int(queue.case.mask_BT.sum())
    assert queue.columns["old_log_probs"][5][0] == queue.columns["rollout_log_probs"][5][0] == 0


def test_a_step_of_which_a_sequence_is_not_held_ends_the_run(queue: Queue) -> None:
    parts = in_parts(SEQUENCES, size=9)
    with pytest.raises(TrainingError) as raised:
        write_old_log_probs(queue.batch(), forwards=held_by(queue, parts[:-1]))
    number = SEQUENCES - len(parts[-1])
    assert raised.value.message == (
        f"{number} sequences of this step's first update were collected for its metrics, of {SEQUENCES}"
    )


# a worker's forward


class Engine(ApplianceEngine):
    """Ours around a model of transformers, with what a forward needs of verl's."""

    def __init__(self, model: Qwen2ForCausalLM) -> None:
        self.module, self.use_ulysses_sp, self.pad_to_length, self._flow = model, False, 0, None
        self._gives_old_log_probs, self.scaler = True, None
        self._qat_enabled, self.ulysses_device_mesh = False, None
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        self.optimizer_config = SimpleNamespace(clip_grad=1e9)
        self.engine_config = SimpleNamespace(
            entropy_from_logits_with_chunking=True, entropy_from_logits_chunk_size=4, entropy_checkpointing=False
        )
        self.compute_entropy_from_logits = entropy_from_logits_with_chunking

    def forward(self, data: TensorDict) -> dict[str, Tensor]:
        inputs, arguments = self.prepare_model_inputs(data)
        return self.prepare_model_outputs(self.module(**inputs, use_cache=False), arguments, data, None)

    def forward_backward_batch(self, data: TensorDict, loss_function: Any, forward_only: bool = False) -> Any:
        loss_function(self.forward(data))
        return {"metrics": {}}


def micro_batch(temperature: float, *, entropy: bool = False) -> TensorDict:
    rows = [("a", 0, [1, 2, 3], [4, 5, 6]), ("a", 1, [1, 2, 3], [7]), ("b", 0, [8], [9, 10])]
    uids, sessions, prompts, responses = zip(*rows, strict=True)
    whole = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    columns = {"input_ids": whole, "position_ids": [[*range(len(ids))] for ids in whole], "responses": responses}
    columns["response_mask"] = [[1] * len(response) for response in responses]
    nested = {
        name: torch.nested.as_nested_tensor([torch.tensor(ids) for ids in values], layout=torch.jagged)
        for name, values in columns.items()
    }
    keys = {"uid": NonTensorStack(*uids), "session_id": NonTensorStack(*sessions)}
    data = TensorDict({**nested, **keys}, batch_size=3)
    tu.assign_non_tensor(
        data, use_fused_kernels=False, use_remove_padding=True, temperature=temperature, calculate_entropy=entropy
    )
    return data


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("bonus", [False, True])
def test_an_update_holds_the_log_probs_and_entropies_of_a_pass_and_trains_the_same(
    temperature: float, bonus: bool
) -> None:
    """bonus: the loss asks for an entropy, which then has a gradient there, and none where it is held."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        attn_implementation="appliance_packed",
    )
    engine = Engine(Qwen2ForCausalLM(config))
    data, mask = micro_batch(temperature, entropy=bonus), micro_batch(temperature)["response_mask"]
    with torch.no_grad():
        passed = engine.forward(micro_batch(temperature, entropy=True))
    assert take_update_log_probs() == []  # a pass, and no update

    def gradient(train: Any) -> Tensor:
        engine.module.zero_grad()
        train()
        return engine.module.lm_head.weight.grad.clone()

    def backward(found: dict[str, Tensor]) -> None:
        (found["log_probs"].values().sum() + (found["entropy"].values().sum() if bonus else 0)).backward()

    alone = gradient(lambda: backward(engine.forward(data)))
    assert take_update_log_probs() == []  # not between an update's begin and end
    assert torch.equal(gradient(lambda: engine.train_batch(data, backward)), alone)
    (held,) = take_update_log_probs()
    assert (held.keys, held.length_S.tolist()) == (["a_0_0", "a_1_0", "b_0_0"], [3, 1, 2])
    for values_N, name in ((held.log_probs_N, "log_probs"), (held.entropy_N, "entropy")):
        assert torch.equal(values_N, response_from_nested(passed[name], mask).values())
        assert not values_N.requires_grad
    engine.forward(data)
    assert take_update_log_probs() == []  # after the optimizer's step
