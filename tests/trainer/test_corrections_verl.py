"""What verl makes of the plan's own settings, against the definitions: each threshold's type, side and formula."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from corrections_reference import PLANS as ALL_PLANS
from corrections_reference import Case, make_case, reference
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig
from plans import HOST
from verl.protocol import DataProto
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

from appliance.errors import TrainingError
from appliance.plan.build import build_plan
from appliance.plan.model import CorrectionPlan
from appliance.plan.verl_args import overrides
from appliance.quant.correction import ClipRange
from appliance.quant.correction import CorrectionMethod as Method
from appliance.recipe.load import load_recipe
from appliance.trainer.corrected import LossBatch, adaptive_share, adaptive_weights, check_correction

VERL = Path(importlib.util.find_spec("verl").submodule_search_locations[0])
OURS = (Method.ADAPTIVE, Method.CALIBRATED_CLIPPING)  # of which verl knows nothing
PLANS = {method: plan for method, plan in ALL_PLANS.items() if method not in OURS}
# float32: x is a difference of numbers below 10 (2^-21), a sum of 24 of them 24 times that, and exp makes it relative.
RTOL = 24 * 2.0**-20


@functools.cache
def verl_setting(plan: CorrectionPlan) -> DictConfig:
    """`algorithm.rollout_correction` as verl reads it from the child's command line."""
    sets = [f"correction.method={plan.method}", f"correction.cap={plan.cap or 'null'}"]
    sets += [f"correction.bounds={list(plan.bounds)}"] if plan.bounds else []
    recipe = load_recipe("arithmetic-tiny-int8", sets=sets)
    planned = build_plan(recipe, run_dir=Path("/runs/run-1"), host=HOST)
    texts = [each.text for each in overrides(planned) if "rollout_correction" in each.key]
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(VERL / "trainer" / "config"), version_base=None):
        return compose(config_name="ppo_trainer", overrides=texts).algorithm.rollout_correction


def corrected_by_verl(case: Case, *, setting: DictConfig) -> tuple[LossBatch, dict[str, float]]:
    tensors = {"old_log_probs": case.trainer_BT, "rollout_log_probs": case.rollout_BT}
    batch = DataProto.from_single_dict({**tensors, "response_mask": case.mask_BT.long()})
    batch, metrics = compute_rollout_correction_and_add_to_batch(batch, setting)
    weights = case.rows(batch.batch["rollout_is_weights"]) if "rollout_is_weights" in batch.batch else None
    return loss_batch(case, kept=case.rows(batch.batch["response_mask"]), weights=weights), metrics


def loss_batch(case: Case, *, kept: tuple, weights: tuple | None) -> LossBatch:
    real = case.rows(case.mask_BT.long())
    advantages = tuple(row * 0.0 + index - 3.5 for index, row in enumerate(case.rows(case.mask_BT.float())))
    return LossBatch(case.rows(case.trainer_BT), case.rows(case.rollout_BT), real, kept, advantages, weights)


@pytest.mark.parametrize("method", PLANS)
def test_verl_corrects_as_defined(method: Method) -> None:
    case, plan = make_case(1), PLANS[method]
    wanted_weights, wanted_stay = reference(case, plan=plan)
    batch, _ = corrected_by_verl(case, setting=verl_setting(plan))
    assert [[bool(each) for each in row] for row in batch.kept] == wanted_stay
    assert (batch.weights is None) == (wanted_weights is None)
    for found, wanted in zip(batch.weights or (), wanted_weights or (), strict=True):
        assert found.tolist() == pytest.approx(wanted, rel=RTOL)


@pytest.mark.parametrize("method", PLANS)
def test_the_case_tells_the_bounds_apart(method: Method) -> None:
    """Every limit acts on some and not on all: a threshold that is ignored or turned over cannot pass above."""
    case, plan = make_case(1), PLANS[method]
    step = check_correction(corrected_by_verl(case, setting=verl_setting(plan))[0], plan=plan)
    assert 0.05 < step.acted_fraction < 0.95


@pytest.mark.parametrize("method", PLANS)
@pytest.mark.parametrize("seed", range(3))
def test_what_verl_corrected_passes_the_check(method: Method, seed: int) -> None:
    plan = PLANS[method]
    setting = verl_setting(plan)
    for spread in (1e-3, 0.1, 3.0):
        case = make_case(seed, sequences=200, spread=spread)  # more than one part of the check
        check_correction(corrected_by_verl(case, setting=setting)[0], plan=plan)


@pytest.mark.parametrize("method", PLANS)
def test_a_batch_that_was_not_corrected_does_not_pass(method: Method) -> None:
    case, plan = make_case(2), PLANS[method]
    for kept, weights in (
        (case.rows(case.mask_BT.long()), None),
        (case.rows(case.mask_BT.long()), case.rows(case.mask_BT.float())),
        (case.rows(torch.zeros_like(case.mask_BT)), None),
    ):
        with pytest.raises(TrainingError) as raised:
            check_correction(loss_batch(case, kept=kept, weights=weights), plan=plan)
        assert raised.value.message == (f"the batch of this step does not carry what `{method}` makes of its log-probs")


@pytest.mark.parametrize("method", PLANS)
def test_a_batch_that_was_corrected_otherwise_does_not_pass(method: Method) -> None:
    case = make_case(3)
    batch, _ = corrected_by_verl(case, setting=verl_setting(PLANS[method]))
    for other, plan in PLANS.items():
        if other is not method:
            with pytest.raises(TrainingError):
                check_correction(batch, plan=plan)


def test_no_correction_passes_only_an_untouched_batch() -> None:
    case, plan = make_case(4), CorrectionPlan(method=Method.NONE)
    kept = case.rows(case.mask_BT.long())
    assert check_correction(loss_batch(case, kept=kept, weights=None), plan=plan).acted_fraction == 0.0
    with pytest.raises(TrainingError):
        check_correction(loss_batch(case, kept=kept, weights=case.rows(case.mask_BT.float())), plan=plan)


@pytest.mark.parametrize(
    ("method", "sign"),
    [
        (Method.TIS, "rollout_corr/rollout_is_mean"),
        (Method.TIS_SEQUENCE, "rollout_corr/rollout_is_mean"),
        (Method.ICEPOP, "rollout_corr/rollout_is_mean"),
        (Method.ACR, "rollout_corr/rollout_is_mean"),
        (Method.SEQUENCE_MASK, "rollout_corr/rollout_rs_masked_fraction"),
        (Method.GEOMETRIC_MASK, "rollout_corr/rollout_rs_masked_fraction"),
        (Method.K3_REJECT, "rollout_corr/rollout_rs_masked_fraction"),
    ],
)
def test_verl_reports_a_correction_only_when_it_corrects(method: Method, sign: str) -> None:
    case = make_case(5)
    assert sign in corrected_by_verl(case, setting=verl_setting(PLANS[method]))[1]
    assert sign not in corrected_by_verl(case, setting=verl_setting(CorrectionPlan(method=Method.NONE)))[1]


def test_the_share_that_was_acted_on_is_the_share_of_tokens() -> None:
    case = make_case(6)
    x_T = (case.trainer_BT.double() - case.rollout_BT.double())[case.mask_BT]
    shares = {
        method: check_correction(corrected_by_verl(case, setting=verl_setting(plan))[0], plan=plan)
        for method, plan in PLANS.items()
    }
    assert shares[Method.TIS].acted_fraction == float((x_T.exp() > 1.5).double().mean())
    assert shares[Method.ICEPOP].acted_fraction == float(((x_T.exp() > 3) | (x_T.exp() < 0.75)).double().mean())
    acr = shares[Method.ACR]
    assert acr.acted_fraction == acr.acr_widened_fraction == shares[Method.TIS].acted_fraction
    wide_T = x_T.exp()[x_T.exp() > 1.5]
    assert acr.acr_bound_mean == pytest.approx(float((1.2 * wide_T / 1.5).mean()), rel=1e-12)


def test_adaptive_weights_pass_the_check_and_no_others_do() -> None:
    case, plan = make_case(8, sequences=130), ALL_PLANS[Method.ADAPTIVE]
    untouched = corrected_by_verl(case, setting=verl_setting(plan))[0]
    assert untouched.weights is None
    share = adaptive_share(untouched, plan=plan)
    assert 0 < share < 1
    weighed = replace(untouched, weights=adaptive_weights(untouched, plan=plan, share=share))
    step = check_correction(weighed, plan=plan, share=share)
    assert (step.adaptive_share, step.metrics()["adaptive_share"]) == (share, share)
    ones = tuple(row.float() for row in untouched.real)
    for wrong in (untouched, replace(untouched, weights=ones)):
        with pytest.raises(TrainingError):
            check_correction(wrong, plan=plan, share=share)
    with pytest.raises(TrainingError):
        check_correction(weighed, plan=plan, share=share / 2)


def test_calibrated_clipping_leaves_the_batch_and_counts_what_the_quantisation_alone_would_clip() -> None:
    case, plan = make_case(9), ALL_PLANS[Method.CALIBRATED_CLIPPING]
    batch = corrected_by_verl(case, setting=verl_setting(plan))[0]
    w_T = (case.trainer_BT.double() - case.rollout_BT.double())[case.mask_BT].exp()
    for clip, bounds in ((None, (0.75, 1.5)), (ClipRange(0.4, 0.9), (0.6, 1.9))):
        step = check_correction(batch, plan=plan, clip=clip)
        assert step.acted_fraction == float(((w_T < bounds[0]) | (w_T > bounds[1])).double().mean()) > 0
    with pytest.raises(TrainingError):
        check_correction(replace(batch, weights=tuple(row.float() for row in batch.real)), plan=plan)


def test_acr_that_widened_nothing_has_no_bound() -> None:
    case, plan = make_case(7, spread=1e-3), PLANS[Method.ACR]
    step = check_correction(corrected_by_verl(case, setting=verl_setting(plan))[0], plan=plan)
    assert (step.acr_widened_fraction, step.acr_bound_mean) == (0.0, None)
