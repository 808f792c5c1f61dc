"""A step's correction on the driver: written into the queue, read back, and held against what the loss used."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from corrections_reference import CORRECTIONS, Case, make_case, reference
from plans import HOST, make_algorithm, make_plan, verl_config
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transfer_queue import KVBatchMeta

from appliance.corrections.adaptive import mixing, moments
from appliance.corrections.base import LossCorrection, StepPart
from appliance.corrections.objective import Estimator, KlPlace, Loss
from appliance.corrections.registry import CorrectionMethod
from appliance.errors import TrainingError
from appliance.plan.build import build_plan
from appliance.recipe.load import load_recipe
from appliance.record.plan import RunPlan, ShadowPlan
from appliance.settings import sections
from appliance.trainer import correction as module
from appliance.trainer.attest import attest_driver, installed_loss
from appliance.trainer.correction import (
    CENTERED,
    CENTERING,
    CLIP_LOWER,
    CLIP_UPPER,
    KEPT,
    REAL,
    USED,
    WEIGHTS,
    BatchCorrection,
    corrected_loss,
    sums_of,
)

SEQUENCES = 130  # more than one part of a step
RTOL = 2.0**-23  # exp of a float64 difference of float32 numbers, rounded once to float32

Rows = tuple[Tensor, ...]


class Queue:
    """A partition of the TransferQueue with the fields of one batch, as verl leaves it when it corrects nothing."""

    def __init__(self, case: Case) -> None:
        real = case.rows(case.mask_BT.long())
        self.columns: dict[str, Rows] = {
            "old_log_probs": case.rows(case.trainer_BT),
            "rollout_log_probs": case.rows(case.rollout_BT),
            REAL: real,
            KEPT: real,
            "advantages": tuple(torch.full(row.shape, index - 3.5) for index, row in enumerate(real)),
        }
        self.case, self.first = case, dict(self.columns)
        self.loses: set[str] = set()
        self.spoils: dict[str, Any] = {}

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
        self.columns |= {name: rows.unbind() for name, rows in fields.items() if name not in self.loses}
        for name, spoil in self.spoils.items():
            self.columns[name] = tuple(spoil(row) for row in self.columns[name])
        return self.batch()

    @property
    def written(self) -> set[str]:
        return {name for name, rows in self.columns.items() if rows is not self.first.get(name)}

    def reported(self) -> dict[str, float]:
        """By a loss that had the batch in hand, over eight mini-batches."""
        fields = {name: torch.cat(rows) for name, rows in self.columns.items()}
        return {f"{USED}{name}": value / 8 for name, value in sums_of(fields).items()}


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    made = Queue(make_case(1, sequences=SEQUENCES))
    monkeypatch.setattr(module, "transfer_queue", made)
    return made


def plan_of(correction: LossCorrection, run_dir: Path) -> RunPlan:
    limits = {"cap": correction.cap, "bounds": correction.bounds}
    clip = {"clip_low": correction.clip.low, "clip_high": correction.clip.high}
    shadow = ShadowPlan(sequences=2, forward_sequences=1) if correction.has_shadow_pass else None
    section = sections.Correction(method=CorrectionMethod(correction.name), **limits)
    plan = make_plan(run_dir, correction=section, algorithm=make_algorithm(**clip), shadow=shadow)
    assert plan.loss_correction == correction
    return plan


def share_of(queue: Queue, *, cap: float) -> float:
    """Of the whole step at once."""
    advantages_BT = pad_sequence(list(queue.columns["advantages"]), batch_first=True)
    return mixing(moments(StepPart(queue.case.part.x_BT, queue.case.mask_BT, advantages_BT), cap=cap))


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("tight", [False, True])
def test_weights_and_mask_of_every_method_are_written(queue: Queue, tmp_path: Path, name: str, tight: bool) -> None:
    planned = CORRECTIONS[name]
    run, correction = BatchCorrection(plan_of(planned, tmp_path)), planned
    if tight:
        correction = planned.tightened()
        correction = correction if name == "k3-reject" else replace(correction, reject_k3_above=0.03)
    batch = run.prepare(queue.batch(), step=1, correction=correction)
    bounds = {CLIP_LOWER, CLIP_UPPER} if planned.clips else set()
    assert queue.written == {KEPT, WEIGHTS, *bounds} and set(batch.fields) == set(queue.columns)
    share = share_of(queue, cap=correction.cap) if name == "adaptive" else 0.0
    weights, stay = reference(queue.case, correction=correction, share=share)
    assert [row.bool().tolist() for row in queue.columns[KEPT]] == stay
    assert all(row.dtype is torch.int64 for row in queue.columns[KEPT])
    for row, wanted in zip(queue.columns[WEIGHTS], weights, strict=True):
        assert row.dtype is torch.float32
        assert row.tolist() == pytest.approx(wanted, rel=RTOL)
    metrics = run.metrics()
    assert metrics.get("adaptive_share", 0.0) == pytest.approx(share, rel=1e-12)
    assert (metrics["is_truncated_fraction"] > 0) is (name not in ("none", "score-centering") or tight)
    assert batch.extra_info.get(CENTERING) == (correction if planned.centers else None)
    reported = queue.reported()
    if planned.centers:
        with pytest.raises(TrainingError, match="the loss used centered nan of"):
            run.after_update(batch, step=2, reported=reported, log_probs=lambda _: None)
        reported[USED + CENTERED] = reported[f"{USED}kept"]
    run.after_update(batch, step=2, reported=reported, log_probs=lambda _: pytest.fail("no shadow pass"))


@pytest.mark.parametrize("estimator", Estimator)
def test_a_divergence_in_the_reward_is_said_as_a_mean_over_tokens(
    queue: Queue, tmp_path: Path, estimator: Estimator
) -> None:
    """Not verl's, in which a response counts once whatever its length. float32 log-probs, whose last bit is 2^-22."""
    old = queue.columns["old_log_probs"]
    queue.columns["ref_log_prob"] = tuple(row + torch.linspace(-1, 1, len(row)) for row in old)
    plan = plan_of(CORRECTIONS["tis"], tmp_path)
    asked = {"kl": 0.1, "kl_estimator": estimator, "kl_in": KlPlace.REWARD}
    run = BatchCorrection(plan.replace(algorithm=plan.algorithm.replace(**asked)))
    run.prepare(queue.batch(), step=1, correction=CORRECTIONS["tis"])
    pairs = zip(queue.columns["ref_log_prob"], old, queue.columns[REAL], strict=True)
    x = torch.cat([(ref.double() - own.double())[real.bool()] for ref, own, real in pairs])
    wanted = {"k1": -x, "k2": x**2 / 2, "k3": x.exp() - 1 - x}[estimator].mean()
    assert run.metrics()["reference_kl"] == pytest.approx(float(wanted), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", ["geometric-mask", "icepop"])
def test_a_step_that_a_correction_leaves_nothing_of_is_said(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Bounds narrower than the mismatch: such a run would end without a word, its mismatch fine."""
    monkeypatch.setattr(module, "append_event", lambda run_dir, **event: events.append((run_dir, event)))
    events: list[tuple[Path, dict[str, Any]]] = []
    queue.columns["rollout_log_probs"] = tuple(row - 0.01 for row in queue.columns["old_log_probs"])
    narrow, wide = (replace(CORRECTIONS[name], bounds=(1 - each, 1 + each)) for each in (0.001, 0.02))
    run = BatchCorrection(plan_of(narrow, tmp_path))
    for step, correction in ((3, narrow), (4, wide)):
        run.prepare(queue.batch(), step=step, correction=correction)
        queue.columns[KEPT] = queue.columns[REAL]
    what = f"nothing is left to learn from in step 3: {name} within 0.999..1.001 leaves none of its tokens"
    ((run_dir, event),) = events
    assert (run_dir, event["kind"], event["what"], event["step"]) == (tmp_path, "note", what, 3)


def test_bounds_of_the_clip_are_written_for_each_token(queue: Queue, tmp_path: Path) -> None:
    acr = replace(CORRECTIONS["acr"].tightened(), reject_k3_above=0.03)
    run = BatchCorrection(plan_of(CORRECTIONS["acr"], tmp_path))
    run.prepare(queue.batch(), step=1, correction=acr)
    w = (torch.cat(queue.columns["old_log_probs"]).double() - torch.cat(queue.columns["rollout_log_probs"])).exp()
    in_loss, upper = torch.cat(queue.columns[KEPT]).bool(), torch.cat(queue.columns[CLIP_UPPER])
    assert upper.tolist() == pytest.approx((1.2 * (w / 1.25).clamp(min=1)).tolist(), rel=RTOL)
    assert bool((torch.cat(queue.columns[CLIP_LOWER]) == torch.tensor(0.8)).all())
    wide = upper[in_loss & (w > 1.25)].double()
    metrics = run.metrics()  # a token that the guard has dropped is not widened
    assert metrics["acr_widened_fraction"] == len(wide) / len(in_loss) < metrics["is_truncated_fraction"]
    assert metrics["acr_bound_mean"] == pytest.approx(float(wide.mean()), rel=RTOL)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_field_that_did_not_get_into_the_batch_ends_the_step(queue: Queue, tmp_path: Path, name: str) -> None:
    queue.loses = {WEIGHTS}
    with pytest.raises(TrainingError) as raised:
        BatchCorrection(plan_of(CORRECTIONS[name], tmp_path)).prepare(
            queue.batch(), step=1, correction=CORRECTIONS[name]
        )
    assert raised.value.message == f"the batch of this step does not carry what `{name}` makes of its log-probs"


@pytest.mark.parametrize(
    ("name", "field", "spoil"),
    [
        ("tis", WEIGHTS, lambda row: row.nextafter(torch.tensor(2.0))),
        ("tis", KEPT, torch.zeros_like),
        ("geometric-mask", KEPT, torch.ones_like),
        ("acr", CLIP_UPPER, lambda row: row * 1.01),
        ("calibrated-clipping", CLIP_LOWER, lambda row: row.flip(0) + 1),
    ],
)
def test_a_batch_that_carries_something_else_ends_the_step(
    queue: Queue, tmp_path: Path, name: str, field: str, spoil: Any
) -> None:
    queue.spoils = {field: spoil}
    with pytest.raises(TrainingError, match=f"does not carry what `{name}` makes"):
        BatchCorrection(plan_of(CORRECTIONS[name], tmp_path)).prepare(
            queue.batch(), step=1, correction=CORRECTIONS[name]
        )


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_loss_that_used_something_else_ends_the_step(queue: Queue, tmp_path: Path, name: str) -> None:
    run = BatchCorrection(plan_of(CORRECTIONS[name], tmp_path))
    batch = run.prepare(queue.batch(), step=2, correction=CORRECTIONS[name])
    right = queue.reported()
    for wrong in ({}, right | {f"{USED}{WEIGHTS}": right[f"{USED}{WEIGHTS}"] * (1 + 1e-7)}):
        with pytest.raises(TrainingError, match=r"the loss used (tokens|rollout_is_weights)"):
            run.after_update(batch, step=2, reported=wrong, log_probs=lambda _: None)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_every_training_worker_gets_our_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(module, "omega_conf_to_dataclass", lambda actor: actor)
    losses: list[Any] = []
    workers = SimpleNamespace(set_loss_fn=losses.append)
    BatchCorrection(plan_of(CORRECTIONS[name], tmp_path)).install(workers, actor="actor")
    (loss,) = losses
    assert loss.func is corrected_loss
    to = "rollout_log_probs" if name == "calibrated-clipping" else "old_log_probs"
    clips = name in ("acr", "calibrated-clipping")
    assert loss.keywords == {"config": "actor", "ratio_to": to, "clips": clips, "kind": Loss.PPO}
    tight = CORRECTIONS[name].tightened()  # the loss stays when the guard tightens
    assert (tight.ratio_to, tight.clips) == (to, clips)


def test_loss_and_advantage_are_attested_as_they_are_and_not_as_planned(tmp_path: Path) -> None:
    """A plan of GRPO, and a verl that was told otherwise."""
    plan, actor = (
        build_plan(load_recipe("arithmetic-tiny-int8"), run_dir=tmp_path, host=HOST),
        "actor_rollout_ref.actor",
    )
    told = [f"{actor}.policy_loss.loss_mode=cispo", f"{actor}.loss_agg_mode=seq-mean-token-mean"]
    told += ["algorithm.adv_estimator=rloo", "algorithm.norm_adv_by_std_in_grpo=false"]
    config = verl_config([*plan.argv[4:], *told])
    attest_driver(plan, algorithm=config.algorithm)
    said = json.loads((tmp_path / "attest" / "driver-0.json").read_text())["detail"]
    assert (said["advantage"], said["by_deviation"]) == ("rloo", False)
    given: list[Any] = []
    BatchCorrection(plan).install(SimpleNamespace(set_loss_fn=given.append), actor=config.actor_rollout_ref.actor)
    assert installed_loss(given[0]) == {"loss": "cispo", "aggregate": "seq-mean-token-mean"}


def test_gdpo_is_attested_though_verl_is_told_grpo(tmp_path: Path) -> None:
    rewards = [{"name": "length", "target": target} for target in (10, 20)]
    own = ("task.kind=own", "task.data=me/sums", "task.prompt=q", f"task.rewards={json.dumps(rewards)}")
    recipe = load_recipe("arithmetic-tiny-int8", sets=(*own, "algorithm.advantage=gdpo"))
    plan = build_plan(recipe, run_dir=tmp_path, host=HOST)
    attest_driver(plan, algorithm=verl_config([*plan.argv[4:]]).algorithm)
    assert json.loads((tmp_path / "attest" / "driver-0.json").read_text())["detail"]["advantage"] == "gdpo"
