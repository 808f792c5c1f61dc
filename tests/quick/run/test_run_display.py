from __future__ import annotations

import functools
import io
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from plans import make_rollout, on, with_trainer
from rich.console import Console

from appliance.guard.policy import Action, MismatchBounds
from appliance.record.events import Event, StepMetrics, parse_metrics
from appliance.record.plan import RunPlan
from appliance.record.state import RunState, fold
from appliance.report import display, draw, summary
from appliance.report.display import JsonProgress, LiveProgress, PlainProgress
from appliance.settings.sections import Backward, Forward
from appliance.terms.schemes import Scheme, beside
from appliance.terms.settings import Dtype, Schedule

FIRST = parse_metrics('{"step": 0, "time_s": 50, "val_reward_mean": 0.2109, "val_samples": 512, "scheme": "int8"}')


def folded(*news: Event | StepMetrics, steps: int = 60) -> RunState:
    return functools.reduce(fold, news, RunState(steps, MismatchBounds()))


def drawn(plan: object, state: RunState, *, columns: int = 100, ascii_only: bool = False) -> str:
    console = Console(file=io.StringIO(), width=columns, record=True, force_terminal=True, color_system=None)
    console.print(display.panel(plan, state, now=130.0, columns=columns, ascii_only=ascii_only))
    return console.export_text()


def training(step_line: Callable) -> RunState:
    steps = [step_line(n, reward_mean=0.2 + 0.01 * n) for n in range(1, 13)]
    return folded(Event(100.0, "phase", "rollout"), FIRST, *steps, step_line(13, reward_mean=0.4, val_reward_mean=0.5))


def test_panel_shows_a_training_whole(tmp_path: Path, small_plan: Callable, step_line: Callable) -> None:
    assert drawn(small_plan(tmp_path, steps=60), training(step_line)) == (
        "╭─ small-1: int8 rollouts, tis with cap 2 ─────────────────────────────────────────────────────────╮\n"
        "│ phase       generating rollouts  30 s                                                            │\n"
        "│ step        [██████░░░░░░░░░░░░░░░░░░░░░░░░]  13 of 60  about 3 min 8 s left                     │\n"
        "│ reward      0.400  ▁▁▂▂▂▃▃▄▄▄▅▅█                                                                 │\n"
        "│ validation  0.211 before, 0.500 after step 13  (512 problems, greedy)                            │\n"
        "│ speed       413 tokens/s of rollout in int8                                                      │\n"
        "│ step time   4.0 s  ████████████████████▓▓▓▒▒▒▒▒▒░                                                │\n"
        "│             █ rollout 2.6  ▓ log-probs 0.4  ▒ update 0.8  ░ sync 0.1  · rest 0.1                 │\n"
        "│ mismatch    fine  k3 1.2e-04 (below 0.015)  ESS 1.000 (above 0.3)  mean weight 1.000 (0.5 to 2)  │\n"
        "╰──────────────────────────────────────────────────────────────────────────────────────────────────╯\n"
    )


def test_whole_distributions_have_a_line_where_they_were_compared(
    tmp_path: Path, small_plan: Callable, step_line: Callable
) -> None:
    compared = {"mismatch_top_kl": 0.0123, "mismatch_top_equal_fraction": 0.25}
    shown = drawn(small_plan(tmp_path), folded(step_line(1, **compared)))
    assert "│ distributions  1.2e-02 nats apart, equal at 25.00% of the tokens " in shown
    assert "distributions" not in drawn(small_plan(tmp_path), folded(step_line(1)))


def test_a_step_without_a_pass_for_log_probs_shows_none(tmp_path: Path, step_line: Callable) -> None:
    step = step_line(1, logprob_s=0.0)
    assert list(display.step_parts(step)) == ["rollout", "update", "sync", "rest"]
    assert "(rollout 2.6, update 0.8, sync 0.1, rest 0.5)" in display.plain_step(folded(step), step, now=1.0)


def test_panel_shows_the_warm_start(tmp_path: Path, small_plan: Callable) -> None:
    state = folded(
        Event(100.0, "phase", "prepare"),
        Event(100.0, "progress", "warm start", done=0.0, total=300.0),
        Event(120.0, "progress", "warm start", done=100.0, total=300.0, note="loss 1.210"),
    )
    assert drawn(small_plan(tmp_path, steps=60), state, columns=80) == (
        "╭─ small-1: int8 rollouts, tis with cap 2 ─────────────────────────────────────╮\n"
        "│ phase       preparing model and data  30 s                                   │\n"
        "│ warm start  [██████████░░░░░░░░░░░░░░░░░░░░]  100 of 300  loss 1.210  about  │\n"
        "│             30 s left                                                        │\n"
        "│ step        [░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░]  0 of 60                        │\n"
        "╰──────────────────────────────────────────────────────────────────────────────╯\n"
    )


def test_narrow_terminals_get_no_bars(tmp_path: Path, small_plan: Callable, step_line: Callable) -> None:
    text = drawn(small_plan(tmp_path, steps=60), training(step_line), columns=50)
    assert all(len(line) == 50 for line in text.splitlines())
    assert not set("█▓▒▁") & set(text)
    assert "13 of 60" in text


def test_ascii_terminals_get_ascii(tmp_path: Path, small_plan: Callable, step_line: Callable) -> None:
    console = Console(file=io.TextIOWrapper(io.BytesIO(), encoding="ascii"), width=100)
    assert console.options.ascii_only
    plan, state = small_plan(tmp_path), training(step_line)
    console.print(display.panel(plan, state, now=130.0, columns=100, ascii_only=True))  # another character would raise
    text = drawn(plan, state, ascii_only=True)
    assert "[######------------------------]" in text and "0.400  __...--===++#" in text
    assert "####################===++++++-" in text
    assert "# rollout 2.6  = log-probs 0.4  + update 0.8  - sync 0.1  . rest 0.1" in text


def test_bad_verdict_is_a_word_and_not_only_a_colour(tmp_path: Path, small_plan: Callable, step_line: Callable) -> None:
    text = drawn(small_plan(tmp_path, steps=60), folded(step_line(1, mismatch_k3_kl=0.02)))
    assert "mismatch   bad  k3 2.0e-02 (below 0.015)" in text


def test_plain_lines_of_a_run(capsys: pytest.CaptureFixture[str], step_line: Callable) -> None:
    news: list[Event | StepMetrics] = [
        Event(99.0, "note", "no VNNI", why="preflight"),  # a warning that was said before
        Event(100.0, "phase", "prepare"),
        *(Event(100.0 + n, "progress", "warm start", done=float(n), total=8.0, note="loss 1.2") for n in range(9)),
        Event(110.0, "phase", "start"),
        Event(120.0, "phase", "validate"),
        FIRST,
        Event(121.0, "phase", "rollout"),
        step_line(1),
        Event(122.0, "phase", "rollout"),
        Event(122.5, "note", "3 problems left out"),
        Event(122.6, "guard", "step 1: observe -> warn: k3_kl 0.02 above 0.015 (1 step in a row)", step=1),
        step_line(2, val_reward_mean=0.25, is_ess=0.2, emulated=True),
        Event(123.0, "phase", "export"),
    ]
    progress, state = PlainProgress(), RunState(2, MismatchBounds())
    with progress:
        for item in news:
            state = fold(state, item)
            progress.show(state, [item], now=item.time if isinstance(item, Event) else 121.0)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [
        "phase prepare: preparing model and data",
        "warm start 0/8  loss 1.2",
        "warm start 2/8  loss 1.2",
        "warm start 4/8  loss 1.2",
        "warm start 6/8  loss 1.2",
        "warm start 8/8  loss 1.2",
        "phase start: starting Ray",
        "phase validate: validating",
        "validation before training 0.211 (512 problems, greedy)",
        "phase rollout: generating rollouts",
        "step 1/2  reward 0.215  413 tokens/s  took 4.0 s (rollout 2.6, log-probs 0.4, update 0.8, sync 0.1, rest 0.1)"
        "  int8  mismatch fine (k3 1.2e-04, ESS 1.000)  about 4 s left",
        "note: 3 problems left out",
        "guard: step 1: observe -> warn: k3_kl 0.02 above 0.015 (1 step in a row)",
        "step 2/2  reward 0.215  validation 0.250  413 tokens/s  took 4.0 s (rollout 2.6, log-probs 0.4, update 0.8,"
        " sync 0.1, rest 0.1)  int8 (emulated)  mismatch bad: ESS 0.20 is below 0.3",
        "phase export: writing model/",
    ]


def test_json_lines_are_the_files_lines_with_a_type(capsys: pytest.CaptureFixture[str], step_line: Callable) -> None:
    event = Event(1.0, "note", "hello", line='{"time": 1.0, "kind": "note", "what": "hello", "more": [1]}')
    with JsonProgress() as progress:
        progress.show(RunState(1, MismatchBounds()), [event, step_line(1)], now=1.0)
    printed = capsys.readouterr()
    assert printed.err == ""
    first, second = map(json.loads, printed.out.splitlines())
    assert first == {"type": "event", "time": 1.0, "kind": "note", "what": "hello", "more": [1]}
    assert (second["type"], second["step"], second["grad_norm"]) == ("metrics", 1, 0.61)


def test_live_display_leaves_the_screen_clean(tmp_path: Path, small_plan: Callable, step_line: Callable) -> None:
    file = io.StringIO()
    terminal = Console(file=file, width=100, force_terminal=True, no_color=True)
    with LiveProgress(small_plan(tmp_path), terminal) as progress:
        progress.show(training(step_line), [step_line(1)], now=130.0)
        once = file.getvalue().count("generating rollouts")
        progress.show(training(step_line), [], now=130.0)  # nothing new, too soon to draw again
        again = file.getvalue().count("generating rollouts")
    last_frame, _, after = file.getvalue().rpartition("╯")
    assert (once, again) == (1, 1)
    assert after.count("\x1b[2K") == 10  # every line of the panel is erased
    assert "\x1b[?25h" in after  # the cursor is back
    assert "\x1b[32m" not in last_frame  # without colour the verdict is a word alone


def test_summary_of_a_run_that_climbed(tmp_path: Path, small_plan: Callable, step_line: Callable) -> None:
    plan = small_plan(tmp_path, steps=13)
    state = folded(FIRST, *(step_line(n) for n in range(1, 13)), step_line(13, val_reward_mean=0.8), steps=13)
    assert summary.summary_rows(plan, state, seconds=272, folder="runs/small-1") == (
        ("done", "13 steps in 4 min 32 s"),
        ("reward", "0.211 before, 0.800 after (greedy, 512 problems of the validation set)"),
        ("speed", "413 tokens/s of rollout, 4.0 s a step (medians)"),
        ("mismatch", "fine in 13 of 13 steps"),
        ("model", "runs/small-1/model"),
        ("report", "runs/small-1/report.html"),
        ("run folder", "runs/small-1  (metrics.jsonl, events.jsonl, logs/)"),
        ("try next", "train longer: --resume runs/small-1 --set trainer.steps=26"),
        ("try next", "compare: --set rollout.scheme=bf16"),
        ("try next", "appliance status runs/small-1"),
    )


def test_summary_of_a_run_that_was_validated_after_training_only(
    tmp_path: Path, small_plan: Callable, step_line: Callable
) -> None:
    plan, state = (
        small_plan(tmp_path),
        folded(step_line(1), step_line(2, val_reward_mean=0.8, val_reward_bf16_mean=0.9, val_samples=512), steps=2),
    )
    rows = dict(summary.summary_rows(plan, state, seconds=1, folder="a"))
    assert rows["reward"] == "0.215 before, 0.215 after (sampled, while training)"
    assert rows["validation"] == "0.800 after step 2 (bf16 0.900)  (512 problems, greedy)"
    told = summary.summary_object(plan, state, state_name="done", exit_code=0, reason="", seconds=9.0)
    assert (told["reward_after"], told["val_reward_mean"], told["greedy"]) == (0.2148, 0.8, False)
    assert (told["reward_after_bf16"], told["val_reward_bf16_mean"]) == (None, 0.9)  # no sampled reward is in BF16


def test_a_short_run_compares_its_first_half_with_its_last(step_line: Callable) -> None:
    state = folded(*(step_line(n, reward_mean=n / 10) for n in range(1, 6)), steps=5)
    found = summary.result(state)
    assert (found.before, found.after) == (pytest.approx(0.15), pytest.approx(0.45))


@pytest.mark.parametrize(("before", "done"), [(9, "13 steps, 4 of them in 9 s"), (13, "13 steps, none of them in 9 s")])
def test_the_time_of_a_resumed_run_is_of_its_own_steps(
    tmp_path: Path, small_plan: Callable, step_line: Callable, before: int, done: str
) -> None:
    plan = small_plan(tmp_path, steps=13).replace(resume_from=f"/runs/a-1/checkpoints/global_step_{before}")
    state = folded(FIRST, *(step_line(n) for n in range(1, 14)), steps=13)
    assert summary.summary_rows(plan, state, seconds=9, folder="a")[0] == ("done", done)


def test_one_step_is_not_compared_with_itself(tmp_path: Path, small_plan: Callable, step_line: Callable) -> None:
    plan, state = small_plan(tmp_path, steps=1), folded(step_line(1, reward_mean=0.3), steps=1)
    rows = summary.summary_rows(plan, state, seconds=1, folder="a")
    assert dict(rows)["reward"] == "- before, 0.300 after (sampled, while training)"
    assert ("try next", "train longer: --resume a --set trainer.steps=2") in rows


def test_summary_says_how_to_serve_what_was_trained_in_the_rollouts_scheme(
    tmp_path: Path, small_plan: Callable, step_line: Callable
) -> None:
    plan = small_plan(tmp_path)
    plan = with_trainer(on(plan, "h100"), forward=Forward.ROLLOUT, backward=Backward.FP8_BLOCK)
    rows = dict(summary.summary_rows(plan, folded(step_line(1)), seconds=1, folder="runs/a b"))
    assert rows["gradients"] == "of quantised layers in fp8-block"  # on a GPU: these rollouts are not emulated
    command = "FLASHRL_CONFIG='runs/a b'/model/profile/quantization.yaml vllm serve 'runs/a b'/model --dtype bfloat16"
    assert rows["serve it"] == f"as it was trained: {command}"
    rows = dict(summary.summary_rows(on(plan, "cpu"), folded(step_line(1)), seconds=1, folder="runs/a b"))
    assert rows["serve it"] == f"as it was trained: APPLIANCE_EXACT_GEMMS=1 {command}"


def test_summary_says_the_type_of_a_model_that_is_not_in_bf16(
    tmp_path: Path, small_plan: Callable, step_line: Callable
) -> None:
    plan = small_plan(tmp_path)
    assert "serve it" not in dict(summary.summary_rows(plan, folded(step_line(1)), seconds=1, folder="a"))
    plan = with_trainer(plan, dtype=Dtype.FP16)
    rows = dict(summary.summary_rows(plan, folded(step_line(1)), seconds=1, folder="a"))
    assert rows["serve it"] == "as it was trained: vllm serve a/model --dtype float16"


def test_summary_of_a_run_that_did_not(tmp_path: Path, small_plan: Callable, step_line: Callable) -> None:
    state = folded(step_line(1), step_line(2, is_weight_mean=3.0))
    assert summary.try_next(small_plan(tmp_path, steps=2), state, folder="runs/a") == (
        "the mismatch was bad in 1 of 2 steps: compare with --set rollout.scheme=bf16",
        "the reward did not climb: more steps (--resume runs/a --set trainer.steps=4) or a higher learning rate",
        "appliance status runs/a",
    )
    assert summary.result(state) == summary.Result(0.2148, 0.2148, validated=False)


def test_a_longer_training_goes_on_where_a_resume_takes_it(
    tmp_path: Path, small_plan: Callable, step_line: Callable
) -> None:
    """A learning rate that has sunk with the steps makes more of them a change that a resume refuses."""
    plan, state = small_plan(tmp_path, steps=2), folded(step_line(1), step_line(2))
    sinks = plan.replace(optimizer=plan.optimizer.replace(schedule=Schedule.COSINE))
    in_epochs = plan.replace(trainer=plan.trainer.replace(epochs=1))

    def hint(plan: RunPlan) -> str:
        return summary.try_next(plan, state, folder="runs/a b")[0]

    assert "(--resume 'runs/a b' --set trainer.steps=4)" in hint(plan)
    assert "(--set trainer.steps=4)" in hint(sinks)
    assert "(--resume 'runs/a b' --set trainer.epochs=null --set trainer.steps=4)" in hint(in_epochs)


def test_summary_advises_no_scheme_that_the_recipe_refuses(
    tmp_path: Path, small_plan: Callable, step_line: Callable
) -> None:
    """One flow does not know BF16, nor has it precision to raise, `scheme` excludes `replicas`, FP16 has no profile,
    only FP8 is emulated, Blackwell has no INT8; rollouts in BF16 are no remedy for themselves."""
    well, ill = folded(step_line(1)), folded(step_line(1, is_weight_mean=3.0))
    plan = small_plan(tmp_path)
    one_flow = with_trainer(plan, forward=Forward.ROLLOUT)
    several = plan.replace(rollout=make_rollout(Scheme.INT8, Scheme.BF16))
    alone = plan.replace(rollout=make_rollout(Scheme.BF16))
    raising = plan.replace(guard=plan.guard.replace(actions=(Action.RAISE_PRECISION,)))
    in_fp16 = with_trainer(plan, dtype=Dtype.FP16)
    emulating = plan.quantization.replace(emulate=True)
    emulated = plan.replace(rollout=make_rollout(Scheme.FP8), quantization=emulating)
    on_blackwell = on(alone, "b200")
    refusing = (one_flow, several, raising, in_fp16, emulated, on_blackwell)
    for each, state in itertools.product(refusing, (well, ill)):
        assert not any("rollout.scheme" in line for line in summary.try_next(each, state, folder="a"))
    assert not any("rollout.scheme=bf16" in line for line in summary.try_next(alone, ill, folder="a"))
    assert (
        summary.try_next(one_flow, ill, folder="a")[0] == "the mismatch was bad in 1 of 1 step: report.html shows when"
    )


@pytest.mark.parametrize(
    ("num_bad", "is_advised", "is_exact"),
    [(0, False, False), (1, False, False), (2, False, False), (3, True, False), (0, False, True), (1, True, True)],
)
def test_a_few_bad_steps_are_no_advice_unless_every_token_was_to_be_equal(
    tmp_path: Path, small_plan: Callable, step_line: Callable, num_bad: int, is_advised: bool, is_exact: bool
) -> None:
    plan = small_plan(tmp_path, steps=8)
    plan = with_trainer(plan, forward=Forward.ROLLOUT) if is_exact else plan
    bad = (step_line(number, is_weight_mean=3.0) for number in range(1, num_bad + 1))
    state = folded(*bad, *(step_line(number) for number in range(num_bad + 1, 9)), steps=8)
    advice = summary.try_next(plan, state, folder="a")
    assert any("the mismatch was bad in" in line for line in advice) == is_advised


def test_durations() -> None:
    assert [draw.duration(s) for s in (0.4, 59.4, 59.6, 125, 11520)] == [
        "0 s",
        "59 s",
        "1 min 0 s",
        "2 min 5 s",
        "3 h 12 min",
    ]


def test_sparkline_averages_what_does_not_fit() -> None:
    assert draw.sparkline([0, 1, 2, 3, 4, 5, 6, 7], width=8) == "▁▂▃▄▅▆▇█"
    assert draw.sparkline([0, 0, 7, 7], width=2) == "▁█"
    assert draw.sparkline([0.5, 0.5], width=8) == "▁▁"
    assert draw.sparkline([], width=8) == ""


def test_bar_is_full_only_at_the_end() -> None:
    assert draw.bar(99, total=100, width=4) == "[███░]"
    assert draw.bar(100, total=100, width=4) == "[████]"
    assert draw.bar(0, total=0, width=4) == "[░░░░]"


def test_split_bar_fills_its_width() -> None:
    assert draw.split_bar([1, 1, 1], width=10) == "███▓▓▓▓▒▒▒"
    assert draw.split_bar([0, 0], width=10) == ""


def test_panel_shows_the_proof_of_the_last_update(tmp_path: Path, small_plan: Callable, step_line: Callable) -> None:
    acknowledged = {
        "codes_changed_fraction": 0.1086,
        "saturated_fraction": 0.0028,
        "scale_drift": 0.0031,
        "layer_error_max": 0.01,
    }
    proven = step_line(1, proof_s=0.081, **acknowledged)
    line = "proven in 0.08 s  codes changed 10.86%  saturated 0.28%  scales moved 0.31%  layer error up to 1.00%"
    assert f"│ sync       {line}" in drawn(small_plan(tmp_path, steps=60), folded(proven), columns=120)


def test_panel_shows_the_proof_of_an_engine_without_codes(
    tmp_path: Path, small_plan: Callable, step_line: Callable
) -> None:
    assert "sync       proven in 0.08 s " in drawn(
        small_plan(tmp_path, steps=60), folded(step_line(1, proof_s=0.08, scheme="bf16"))
    )


def test_a_line_says_what_the_rollouts_were_and_what_the_guard_does(step_line: Callable) -> None:
    state = folded(FIRST)
    some = step_line(2, bf16_layers=4, guard_level="raise-precision (int8, 25% of layers in bf16)")
    line = display.plain_step(state, some, now=0.0)
    assert "int8, 4 layers in bf16" in line and "guard raise-precision (int8, 25% of layers in bf16)" in line
    all_of_them = display.plain_step(state, step_line(2, scheme="bf16", bf16_layers=16, guard_level="bf16"), now=0.0)
    assert "  bf16  " in all_of_them and "layers" not in all_of_them and "guard bf16" in all_of_them
    assert "guard" not in display.plain_step(state, step_line(2, guard_level="observe"), now=0.0)


def test_both_validations_are_shown(tmp_path: Path, small_plan: Callable, step_line: Callable) -> None:
    last = step_line(13, val_reward_mean=0.5, val_reward_bf16_mean=0.52)
    state = folded(FIRST, step_line(1), last)
    assert "validation 0.500 (bf16 0.520)" in display.plain_step(state, last, now=0.0)
    changed = step_line(13, val_reward_mean=0.5, val_reward_bf16_mean=0.5, val_scheme="bf16")
    assert "validation 0.500 in bf16  " in display.plain_step(state, changed, now=0.0)
    assert display.validation_text(state) == "0.211 before, 0.500 after step 13 (bf16 0.520)  (512 problems, greedy)"
    plan = small_plan(tmp_path)
    rows = dict(summary.summary_rows(plan, state, seconds=9.0, folder="a"))
    assert rows["reward"] == "0.211 before, 0.500 (bf16 0.520) after (greedy, 512 problems of the validation set)"
    told = summary.summary_object(plan, state, state_name="done", exit_code=0, reason="", seconds=9.0)
    assert told["reward_after_bf16"] == 0.52


def test_a_step_whose_log_probs_are_not_finite_is_bad(step_line: Callable) -> None:
    broken = step_line(2, nonfinite_fraction=0.25, mismatch_k3_kl=None, is_ess=None, is_weight_mean=None)
    line = display.plain_step(folded(FIRST), broken, now=0.0)
    assert "mismatch bad: log-probs of 25.00% of the tokens are not finite" in line


@pytest.mark.parametrize(
    ("k3", "ess", "text"),
    [
        (0.0149, 0.7, "mismatch fine (k3 1.49e-02, ESS 0.700)"),
        (0.01499999, 0.30001, "mismatch fine (k3 1.499999e-02, ESS 0.30001)"),
        (0.0150004, 0.29999, "mismatch bad: k3 0.0150004 is above 0.015, ESS 0.29999 is below 0.3"),
        (0.0012, 0.7004, "mismatch fine (k3 1.2e-03, ESS 0.700)"),
    ],
)
def test_a_value_is_shown_on_the_side_of_its_bound_that_it_is_on(
    step_line: Callable, k3: float, ess: float, text: str
) -> None:
    line = step_line(2, mismatch_k3_kl=k3, is_ess=ess)
    assert text in display.plain_step(folded(FIRST), line, now=0.0)


def test_the_panel_has_as_many_digits(step_line: Callable) -> None:
    line = step_line(2, mismatch_k3_kl=0.0149, is_ess=0.7, is_weight_mean=1.9999)
    shown = "fine  k3 1.49e-02 (below 0.015)  ESS 0.700 (above 0.3)  mean weight 1.9999 (0.5 to 2)"
    assert display._mismatch_text(line, bounds=MismatchBounds()).plain == shown


@pytest.mark.parametrize(
    "value", [0.015, 0.0150000001, 0.0149999999, 0.0, -1e-30, 1e300, math.inf, -math.inf, math.nan]
)
@pytest.mark.parametrize("form", [".1e", ".2g", ".3f"])
def test_digits_beside_a_bound(value: float, form: str) -> None:
    """The fewest that tell the two apart; no more than usual where these do."""
    shown = float(beside(value, 0.015, form=form))
    assert (shown < 0.015, shown > 0.015) == (value < 0.015, value > 0.015)
    assert beside(0.5, 0.015, form=form) == format(0.5, form)
