"""The governor's part in a run: its policy from the plan, its signals from a step, its events, its memory."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from plans import make_algorithm, make_guard, make_plan, on

from appliance.corrections.registry import CorrectionMethod
from appliance.guard.governor import GovernorState, observe
from appliance.guard.policy import Action, Policy
from appliance.guard.signals import Signals, judge_mismatch
from appliance.plan.engines import USUAL_ACTIONS
from appliance.quant.mismatch import measure_mismatch
from appliance.record.events import parse_event, read_metrics
from appliance.record.lines import read
from appliance.record.plan import RunPlan
from appliance.record.state import judge_step
from appliance.settings.sections import Correction, Forward
from appliance.terms.schemes import Scheme
from appliance.trainer.governor import Governor, Vocabulary, guard_stop, policy_of, signals_of
from appliance.trainer.metrics import StepParts, append_metrics, equal_groups, measure_batch, with_finite_pairs
from appliance.trainer.precision import Live

BAD = Signals(1, k3_kl=0.02)
QUICK = make_guard(actions=(Action.WARN, Action.STOP), bad_steps=1, cooling_steps=0, fine_steps=2)


def test_the_defaults_of_recipe_and_policy_are_one(tmp_path: Path) -> None:
    guard = make_guard(actions=USUAL_ACTIONS)
    policy = policy_of(make_plan(tmp_path / "run", guard=guard))
    wanted = Policy(Scheme.INT8)
    assert policy == wanted


def test_thresholds_of_the_plan_reach_the_policy(tmp_path: Path) -> None:
    guard = make_guard(
        actions=(Action.WARN,),
        k3_kl=0.1,
        weight_std=3.0,
        ess=0.6,
        truncated_fraction=0.2,
        bad_steps=2,
        fine_steps=7,
        cooling_steps=1,
        gradient_steps=9,
    )
    policy = policy_of(make_plan(tmp_path / "run", guard=guard))
    assert (policy.climb_bad, policy.climb_window, policy.descend_fine, policy.cooling_steps) == (2, 3, 7, 1)
    bounds = policy.mismatch
    assert (bounds.k3_kl.bad[1], bounds.weight_std.bad[1], bounds.truncated_fraction.bad[1]) == (0.1, 3.0, 0.2)
    assert (bounds.ess.bad[0], bounds.ess.fine[0]) == (0.6, 0.8)
    assert policy.collapse.gradient.stop_after == 9


def test_with_one_flow_every_token_is_held_on_a_cpu_and_a_tenth_of_the_bound_on_a_gpu(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "run")
    flow, step = plan.trainer.replace(forward=Forward.ROLLOUT), StepParts(Live("int8", emulated=False))
    for planned, exact, k3_kl in (
        (plan, False, 0.015),
        (plan.replace(trainer=flow), True, 0.015),
        (on(plan.replace(trainer=flow), "h100"), False, 0.0015),
    ):
        assert step.is_exact(planned) is exact
        assert policy_of(planned).mismatch.k3_kl.bad[1] == pytest.approx(k3_kl)


def test_a_reward_that_collapses_is_seen_from_what_a_wrong_answer_gets(tmp_path: Path) -> None:
    """DAPO's rewards are 1 and -1: from a fifth of the answers right to none is a collapse, with every mean below 0."""
    algorithm = make_algorithm(kind="dapo")
    policy = policy_of(make_plan(tmp_path / "run", guard=make_guard(actions=(Action.WARN,)), algorithm=algorithm))
    state, texts = GovernorState(), []
    for step, reward in enumerate([-0.6] * 10 + [-1.0] * 10, 1):
        state, decisions = observe(state, Signals(step, reward_mean=reward, entropy=0.5), policy=policy)
        texts += [decision.text for decision in decisions]
    assert texts == [
        "step 16: reward: warn: reward_mean of 10 steps -0.84 below -0.8 (1 step in a row)"
        "; resume from an earlier checkpoint with a lower optimizer.learning_rate"
    ]


def test_a_plan_keeps_its_guard_through_json(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "run", guard=QUICK)
    assert RunPlan.model_validate_json(plan.to_json()) == plan


@pytest.mark.parametrize("method", CorrectionMethod)
def test_only_caps_of_single_tokens_are_weight_caps(method: CorrectionMethod) -> None:
    cap = 2.0 if method in ("tis", "acr", "adaptive", "score-centering-tis") else None
    plan = make_plan(Path("/runs/a-1"), correction=Correction(method=method, cap=2.0))
    assert plan.loss_correction.token_cap == cap


def test_signals_are_the_steps_own_numbers() -> None:
    mismatch = measure_mismatch(torch.tensor([-1.0, -2.0]), rollout_T=torch.tensor([-1.5, -1.0]), cap=1.2)
    line = {"step": 7, "grad_norm": math.nan, "reward_mean": 0.5, "entropy": 0.25, "unfinished_fraction": 0.75}
    telemetry = SimpleNamespace(mismatch=mismatch, equal_group_fraction=0.125, nonfinite_fraction=0.0)
    signals = signals_of(line, telemetry=telemetry, cap=1.2)
    assert (signals.step, signals.reward_mean, signals.entropy, signals.unfinished_fraction) == (7, 0.5, 0.25, 0.75)
    assert math.isnan(signals.grad_norm)
    assert (signals.k3_kl, signals.ess, signals.truncated_fraction) == (mismatch.k3_kl, mismatch.ess, 0.5)
    assert (signals.weight_mean, signals.weight_std) == (mismatch.weight_mean, mismatch.weight_std)
    assert signals.equal_group_fraction == 0.125
    del line["unfinished_fraction"]  # all samples of the step were generated before it began
    assert signals_of(line, telemetry=telemetry, cap=1.2).unfinished_fraction is None
    filtered = signals_of({**line, "generated_reward_mean": 0.9}, telemetry=telemetry, cap=1.2)
    assert filtered.reward_mean == 0.9  # of what a filter left nothing is all right


@pytest.mark.parametrize(
    ("rollout", "is_exact"),
    [
        ([-1.0, -2.0], True),  # equal
        ([-1.0, -2.001], True),  # one differs that must not
        ([-1.0, -2.001], False),
        ([-1.15, -2.0], False),  # between fine and bad
        ([-1.5, -2.5], False),  # bad, and cut
        ([-9.0, -2.5], False),
        ([-1.0, math.nan], False),
        ([-1.0, math.nan], True),
    ],
)
@pytest.mark.parametrize("cap", [None, 1.3])
@pytest.mark.parametrize("k3", [0.001, 0.015, 0.5])
def test_a_line_is_judged_as_its_step_was(
    tmp_path: Path, rollout: list[float], is_exact: bool, cap: float | None, k3: float
) -> None:
    """By everything that shows a step: what the line lost, such as numbers that are not finite, changes nothing."""
    ones = torch.ones(2, dtype=torch.long)
    telemetry = measure_batch(
        torch.tensor([-1.0, -2.0]),
        rollout_N=torch.tensor(rollout),
        real_N=ones,
        responses_N=ones,
        row_S=torch.tensor([2]),
        prompts=["a"],
        cap=cap,
    )
    mismatch = telemetry.mismatch
    line = {"step": 7, "time_s": 1.0, "grad_norm": 1.0, "reward_mean": 0.5, "entropy": 1.0, "unfinished_fraction": 0.75}
    line |= {"mismatch_k3_kl": mismatch.k3_kl, "is_weight_mean": mismatch.weight_mean, "is_ess": mismatch.ess}
    line |= {"is_weight_std": mismatch.weight_std, **telemetry.metrics(is_exact=is_exact, cap=cap)}
    append_metrics(tmp_path, line)
    [parsed] = read_metrics(tmp_path)
    bounds = make_plan(tmp_path, guard=make_guard(k3_kl=k3)).mismatch_bounds
    by_guard = judge_mismatch(signals_of(line, telemetry=telemetry, cap=cap, is_exact=is_exact), bounds=bounds)
    assert judge_step(parsed, bounds=bounds).health is by_guard.health


def test_what_a_mask_drops_is_no_truncated_share() -> None:
    """`geometric-mask` drops sequences and cuts no weight: nothing of it was measured."""
    mismatch = measure_mismatch(torch.tensor([-1.0]), rollout_T=torch.tensor([-4.0]), cap=None)
    line = {"step": 7, "grad_norm": 1.0, "reward_mean": 0.5, "entropy": 0.25, "unfinished_fraction": 0.75}
    line["is_truncated_fraction"] = 1.0  # the share on which the method acted
    telemetry = SimpleNamespace(mismatch=mismatch, equal_group_fraction=0.0, nonfinite_fraction=0.0)
    assert signals_of(line, telemetry=telemetry, cap=None).truncated_fraction is None


def events(run_dir: Path) -> list[dict]:
    path = run_dir / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_every_decision_is_an_event_with_its_numbers(tmp_path: Path) -> None:
    governor = Governor(make_plan(tmp_path, guard=QUICK))
    assert governor.after_step(BAD) is None
    (event,) = events(tmp_path)
    assert {key: value for key, value in event.items() if key != "time"} == {
        "kind": "guard",
        "what": "step 1: observe -> warn: k3_kl 0.02 above 0.015 (1 step in a row)",
        "why": "k3_kl 0.02 above 0.015",
        "step": 1,
        "move": "up",
        "action": "warn",
        "level": "warn",
        "numbers": [{"signal": "k3_kl", "value": 0.02, "relation": "above", "bound": 0.015}],
    }
    assert parse_event(json.dumps(event)) is not None


def test_rows_without_a_word_are_told_where_they_may_explain_a_mismatch(tmp_path: Path) -> None:
    """The log-probs of 259 words over themselves, as an engine has them, and over 1024 rows, as a trainer has them."""
    logits = torch.randn(1000, 1024, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    share = logits.softmax(-1)[:, 259:].sum(-1)
    even = logits - torch.cat((torch.zeros(1000, 259), torch.log(share / (1 - share) * 3)[:, None].expand(-1, 765)), -1)
    trainers, engines = even.log_softmax(-1)[:, 7], even[:, :259].log_softmax(-1)[:, 7]
    assert torch.allclose(even.softmax(-1)[:, 259:].sum(-1), torch.tensor(0.25, dtype=torch.float64))
    k3 = (torch.exp(trainers - engines) - 1 - (trainers - engines)).mean().item()
    governor = Governor(make_plan(tmp_path, guard=QUICK))
    governor.vocabulary = Vocabulary(rows=1024, words=259)
    governor.after_step(replace(BAD, k3_kl=k3))
    (event,) = events(tmp_path)
    assert event["why"] == (
        f"k3_kl {k3:.4g} above 0.015; the model has 1,024 rows and its tokenizer 259 words, and rollouts never sample "
        "the other 765: that alone would make this k3_kl if the trainer gave them 25% of the probability"
    )


@pytest.mark.parametrize("vocabulary", [None, Vocabulary(rows=259, words=259), Vocabulary(rows=259, words=260)])
def test_a_tokenizer_with_all_words_explains_no_mismatch(vocabulary: Vocabulary | None, tmp_path: Path) -> None:
    governor = Governor(make_plan(tmp_path, guard=QUICK))
    governor.vocabulary = vocabulary
    governor.after_step(BAD)
    assert events(tmp_path)[0]["why"] == "k3_kl 0.02 above 0.015"


def test_a_number_that_is_not_finite_is_still_json(tmp_path: Path) -> None:
    Governor(make_plan(tmp_path, guard=QUICK)).after_step(Signals(1, grad_norm=math.nan))
    text = (tmp_path / "events.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["numbers"][0]["value"] == "nan"


def test_the_stop_is_given_back_and_has_code_6(tmp_path: Path) -> None:
    governor = Governor(make_plan(tmp_path, guard=QUICK))
    governor.after_step(BAD)
    decision = governor.after_step(replace(BAD, step=2))
    assert decision is not None
    error = guard_stop(decision, saved=tmp_path / "checkpoints/global_step_2")
    assert error.exit_code == 6
    assert error.message == "stopped by the guard: step 2: warn -> stop: k3_kl 0.02 above 0.015 (1 step in a row)"
    assert [event["action"] for event in events(tmp_path)] == ["warn", "stop"]


def test_nothing_allowed_is_nothing_done(tmp_path: Path) -> None:
    governor = Governor(make_plan(tmp_path, guard=QUICK.replace(actions=())))
    for step in range(1, 50):
        assert governor.after_step(Signals(step, k3_kl=math.nan, grad_norm=math.nan)) is None
    assert events(tmp_path) == []


def test_another_attempt_goes_on_where_this_one_was(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, guard=QUICK)
    assert Governor(plan).after_step(BAD) is None
    assert Governor(plan).after_step(replace(BAD, step=2)) is not None
    assert read(tmp_path / "guard.json", GovernorState).stopped
    assert Governor(plan).after_step(replace(BAD, step=3)) is not None  # resumed after its stop, it still guards
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "guard.json"]


def test_equal_groups_counts_prompts_and_not_samples() -> None:
    def row(*ids: int) -> torch.Tensor:
        return torch.tensor(ids)

    responses = [row(1, 2), row(3), row(1, 2), row(3), row(3, 3), row(9)]
    prompts = ["a", "b", "a", "b", "b", "alone"]
    assert equal_groups(responses, prompts=prompts) == 0.5  # a, of a and b; one sample is no group
    assert equal_groups([], prompts=[]) == 0.0


def test_padding_of_a_batch_counts_nowhere() -> None:
    """A row without a token that counts, as verl adds to fill a batch, and tokens that are masked within a row."""

    telemetry = measure_batch(
        torch.tensor([-1.0, -2.0, -9.0, -5.0, -5.0, -3.0, -1.0, -1.0]),
        rollout_N=torch.tensor([-1.0, -1.0, -1.0, -0.1, -0.1, -1.0, -1.0, -1.5]),
        real_N=torch.tensor([1, 1, 0, 0, 0, 0, 1, 1]),
        responses_N=torch.tensor([4, 5, 6, 0, 0, 9, 4, 5]),
        row_S=torch.tensor([3, 2, 3]),
        prompts=["a", "a", "a"],
        cap=1.5,
    )
    expected = measure_mismatch(
        torch.tensor([-1.0, -2.0, -1.0, -1.0]), rollout_T=torch.tensor([-1.0, -1.0, -1.0, -1.5]), cap=1.5
    )
    assert telemetry.mismatch.k3_kl == expected.k3_kl and telemetry.mismatch.weight_max == expected.weight_max
    assert (telemetry.by_length.whole.num_sequences, telemetry.by_length.whole.num_tokens) == (2, 4)
    assert (telemetry.by_length.whole.largest.sequence, telemetry.by_length.whole.largest.position) == (0, 1)
    assert telemetry.equal_group_fraction == 1.0
    line = telemetry.metrics()
    json.dumps(line, allow_nan=False)
    assert line["mismatch_largest_nats"] == -1.0
    assert [bucket["num_tokens"] for bucket in line["mismatch_by_length"]] == [4]


def test_log_probs_that_are_not_finite_make_the_whole_mismatch_bad() -> None:
    """Of rollout or trainer, or so far apart that their weight is none; a masked one counts nowhere."""
    inf = math.inf
    for trainer, rollout, share in (
        ([-1.0, -2.0], [math.nan, -2.0], 0.5),
        ([-inf, -2.0], [-1.0, -2.0], 0.5),
        ([-1.0, -2.0], [-900.0, -inf], 1.0),
        ([-750.0, -2.0], [-1.0, -2.0], 0.5),
        ([-0.1, -2.0], [-400.0, -2.0], 0.5),
        ([-1.0, math.nan], [-1.0, -1.0], 0.0),
    ):
        real = torch.tensor([1, 0] if share == 0 else [1, 1])
        telemetry = measure_batch(
            torch.tensor(trainer),
            rollout_N=torch.tensor(rollout),
            real_N=real,
            responses_N=real,
            row_S=torch.tensor([2]),
            prompts=["a"],
            cap=2.0,
        )
        assert (telemetry.nonfinite_fraction, math.isnan(telemetry.mismatch.k3_kl)) == (share, share > 0)
        json.dumps(telemetry.metrics(), allow_nan=False)
        line = {"step": 3, "grad_norm": math.nan, "reward_mean": 0.5, "entropy": 0.25, "unfinished_fraction": 0.75}
        signals = signals_of(line, telemetry=telemetry, cap=2.0)
        assert (signals.grad_norm is None) == (share > 0)  # there was no update
        assert signals.nonfinite_fraction == share


def test_numbers_that_are_not_finite_are_replaced_on_both_sides() -> None:
    trainer, rollout = torch.tensor([-1.0, math.nan, -3.0]), torch.tensor([math.nan, -2.0, -3.5])
    found = with_finite_pairs(trainer, rollout)
    assert [row.tolist() for row in found] == [[0.0, 0.0, -3.0], [0.0, 0.0, -3.5]]


def test_the_level_says_what_corrects_the_next_step_and_what_rollouts_are(tmp_path: Path) -> None:
    """Up the whole ladder and down again."""
    guard = QUICK.replace(actions=(*USUAL_ACTIONS, Action.RAISE_PRECISION), fine_steps=1)
    governor = Governor(make_plan(tmp_path, guard=guard))
    seen = []
    for step, k3 in enumerate([0.02] * 5 + [0.0] * 20, 1):
        governor.after_step(Signals(step, k3_kl=k3))
        measures, metrics = governor.measures, governor.metrics()
        seen.append((metrics["guard_level"], metrics["correction_cap"], str(measures.scheme)))
        assert metrics["correction_reject_k3"] == (0.01 if measures.tight else None)
    half = "raise-precision (int8, 50% of layers in bf16)"
    assert seen[:5] == [
        ("warn", 2.0, "int8"),
        ("tighten", 1.5, "int8"),
        ("raise-precision (int8, 25% of layers in bf16)", 1.5, "int8"),
        (half, 1.5, "int8"),
        ("bf16", 1.5, "bf16"),
    ]
    assert seen[5] == (half, 1.5, "int8")
    assert seen[-1] == ("observe", 2.0, "int8")
