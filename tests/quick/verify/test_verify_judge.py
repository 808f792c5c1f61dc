"""What speaks against an engine, judged on given sights."""

from __future__ import annotations

import json
import math

import pytest

from appliance.terms.schemes import Scheme
from appliance.terms.settings import Quantisation
from appliance.verify.command import as_json, table
from appliance.verify.job import CheckResult, EngineOutput, Worker, judge_engine

INT8 = Quantisation(scheme=Scheme.INT8)
SAID = EngineOutput(tokens=((3, 4),), log_probs=((-1.0, -2.0),), prompt_log_probs=((-0.5, -1.5),))
BF16_SAID = SAID.replace(prompt_log_probs=((-0.75, -1.25),))
WORKER = Worker(
    rank=0,
    scheme=Scheme.INT8,
    emulated=False,
    lm_head_fp32=False,
    kernels=(("Kernel", 8),),
    layers=12,
    unmoved=(),
    unreturned=(),
)
SEEN = CheckResult(failed="", first=SAID, same_as_loaded=True, moved=0.5, returned=True, workers=(WORKER,))


def problems(
    seen: CheckResult, *, asked: Quantisation = INT8, reference: EngineOutput | None = BF16_SAID
) -> tuple[str, ...]:
    return tuple(problem for row in judge_engine(asked, seen=seen, reference=reference) for problem in row.problems)


def test_a_live_engine_has_no_problem() -> None:
    (row,) = judge_engine(INT8, seen=SEEN, reference=BF16_SAID)
    assert (row.problems, row.moved, row.returned, row.from_bf16) == ((), 0.5, True, 0.25)


@pytest.mark.parametrize(
    ("seen", "problem"),
    [
        (SEEN.replace(moved=0.0), "the logits did not move with other weights"),
        (SEEN.replace(moved=float("nan")), "its log-probs are not finite"),
        (SEEN.replace(moved=float("inf")), "its log-probs are not finite"),
        (SEEN.replace(returned=False), "tokens or log-probs did not return with the old weights"),
        (
            SEEN.replace(same_as_loaded=False),
            "the checkpoint's own weights, sent as an update, changed its output",
        ),
        (SEEN.replace(first=BF16_SAID), "its output is bf16's to the last bit: nothing is quantised"),
        (SEEN.replace(failed="weight update: a came twice"), "weight update: a came twice"),
    ],
)
def test_what_an_engine_does_wrong_is_said(seen: CheckResult, problem: str) -> None:
    assert problems(seen) == (problem,)


@pytest.mark.parametrize(
    ("worker", "problem"),
    [
        (WORKER.replace(scheme=Scheme.BF16), "it runs bf16, asked for int8"),
        (WORKER.replace(scheme=Scheme.FP8, emulated=True), "it runs fp8 (emulated), asked for int8"),
        (WORKER.replace(lm_head_fp32=True), "lm_head is in FP32, asked for BF16"),
        (WORKER.replace(unmoved=("a",)), "a gives the same with other weights"),
        (
            WORKER.replace(unreturned=("a", "b", "c")),
            "a and 2 other layers give another output once the old weights are back",
        ),
    ],
)
def test_what_a_worker_does_wrong_is_said(worker: Worker, problem: str) -> None:
    assert problems(SEEN.replace(workers=(WORKER, worker.replace(rank=1)))) == (problem,)


def test_a_folded_profile_may_change_what_it_says() -> None:
    assert problems(SEEN.replace(same_as_loaded=False), asked=INT8.replace(profile="/profile")) == ()


def test_bf16_is_its_own_reference() -> None:
    seen = SEEN.replace(workers=(WORKER.replace(scheme=Scheme.BF16),))
    (row,) = judge_engine(Quantisation(scheme=Scheme.BF16), seen=seen, reference=None)
    assert (row.problems, row.from_bf16) == ((), None)


def test_what_was_seen_reads_back_the_same() -> None:
    assert CheckResult.model_validate_json(SEEN.model_dump_json()) == SEEN


def test_numbers_that_are_none_come_through_to_be_judged() -> None:
    """Layers broken to NaN are a verdict, not a check that failed on the way."""
    nan = SAID.replace(log_probs=((float("nan"), -1.0),))
    read = CheckResult.model_validate_json(SEEN.replace(first=nan, moved=float("nan")).model_dump_json())
    assert math.isnan(read.moved) and math.isnan(read.first.log_probs[0][0])
    assert problems(read) == ("its log-probs are not finite",)


def test_the_table_has_a_line_per_worker_and_per_problem() -> None:
    bad = SEEN.replace(workers=(WORKER, WORKER.replace(rank=1, unmoved=("a",))))
    assert table(judge_engine(INT8, seen=bad, reference=BF16_SAID)).splitlines() == [
        "scheme  worker  moved by  layers moved  returned     from bf16  verdict  kernels",
        "int8    0       0.5 nats  12 of 12      bit for bit  0.25 nats  live     8 x Kernel",
        "int8    1       0.5 nats  11 of 12      bit for bit  0.25 nats  FAILED   8 x Kernel",
        "int8 worker 1: a gives the same with other weights",
    ]


def test_an_engine_that_says_no_number_is_told_in_json() -> None:
    """JSON has none for it."""
    broken = SAID.replace(prompt_log_probs=((math.nan, math.inf),))
    (row,) = judge_engine(INT8, seen=SEEN.replace(first=broken, moved=math.nan), reference=BF16_SAID)
    (worker,) = json.loads(as_json([row]), parse_constant=pytest.fail)["workers"]
    assert (worker["moved"], worker["from_bf16"]) == (None, None)
    assert worker["problems"] == ["its log-probs are not finite"]
