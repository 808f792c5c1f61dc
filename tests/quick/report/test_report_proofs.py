"""The two verdicts that rest on what processes wrote: attestations against the plan, updates against what was sent."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from plans import make_rollout

from appliance.guard.policy import Action
from appliance.record.events import append_event
from appliance.record.plan import ExpectedAttestation, read_plan
from appliance.record.session import RunRecord, RunStatus, Session
from appliance.report.folder import read_view
from appliance.report.page import page
from appliance.report.verdicts import RunVerdict, Word, verdicts
from appliance.sync.precision import Generation, write_generation
from appliance.sync.records import Acknowledgement, Sent, append_acknowledgement, append_sent
from appliance.terms.schemes import Precision, Scheme

ARRIVED, ATTESTED = "Did the weights arrive?", "Does every process run what it should?"
Make = Callable[..., Path]


def judged(run_dir: Path, question: str) -> tuple[Word, str]:
    found: RunVerdict = next(each for each in verdicts(read_view(run_dir)) if each.question == question)
    return found.word, found.text


def sync_lines(run_dir: Path, name: str) -> list[str]:
    return (run_dir / "sync" / f"{name}.jsonl").read_text().splitlines(keepends=True)


def test_what_arrived_is_told_with_what_was_proven_of_it(tmp_path: Path, make_run: Make) -> None:
    text = (
        "11 updates arrived with the digests that were sent, at 1 of 1 engine process; "
        "kernels proved 16 of 16 layers at the first update; kernels proved 4 of 16 layers at the newest update; "
        "tensors of the newest known by their digest alone: 1"
    )
    assert judged(make_run(tmp_path), ARRIVED) == (Word.FINE, text)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"manifest": "of another"}, "rollout-0-0 took other weights than were sent with update 11"),
        ({"switched": 16, "layers_proven": 15}, "rollout-0-0 proved 15 of 16 layers at update 11"),
        ({"sync": 12}, "rollout-0-0 did not acknowledge update 11; rollout-0-0 took other weights than were sent with "
         "update 12"),
    ],
)  # fmt: skip
def test_an_update_that_was_not_taken_as_sent_is_bad(
    tmp_path: Path, make_run: Make, taken: Callable[..., Acknowledgement], changes: dict, text: str
) -> None:
    run_dir = make_run(tmp_path)
    (run_dir / "sync" / "rollout-0-0.jsonl").write_text("".join(sync_lines(run_dir, "rollout-0-0")[:-1]))
    append_acknowledgement(run_dir, taken(**{"sync": 11, **changes}))
    assert judged(run_dir, ARRIVED) == (Word.BAD, text)


def test_layers_that_the_first_update_did_not_prove_are_bad(tmp_path: Path, make_run: Make) -> None:
    run_dir = make_run(tmp_path)
    first, *rest = sync_lines(run_dir, "rollout-0-0")
    first = json.dumps({**json.loads(first), "layers_proven": 1}) + "\n"
    (run_dir / "sync" / "rollout-0-0.jsonl").write_text("".join([first, *rest]))
    assert judged(run_dir, ARRIVED) == (Word.BAD, "rollout-0-0 proved 1 of 16 layers at update 1")


def test_an_update_on_its_way_is_no_miss_until_the_run_is_done(tmp_path: Path, make_run: Make) -> None:
    sent = Sent(sync=12, replica=0, rank=0, manifest="of 12", digest_s=0.1)
    run_dir = make_run(tmp_path, state=RunStatus.RUNNING, exit_code=None)
    append_sent(run_dir, sent)
    with Session(run_dir, record=RunRecord(RunStatus.RUNNING)):
        assert judged(run_dir, ARRIVED)[0] is Word.FINE
    done = make_run(tmp_path, name="done")
    append_sent(done, sent)
    assert judged(done, ARRIVED) == (Word.BAD, "rollout-0-0 did not acknowledge update 12")


def test_steps_alone_prove_no_update(tmp_path: Path, make_run: Make) -> None:
    run_dir = make_run(tmp_path)
    for file in (run_dir / "sync").iterdir():
        file.unlink()
    assert judged(run_dir, ARRIVED) == (Word.WARN, "no engine has acknowledged an update in sync/")


def test_an_update_that_ended_the_run_is_bad(tmp_path: Path, make_run: Make) -> None:
    run_dir = make_run(tmp_path, state=RunStatus.FAILED, exit_code=4, reason="SyncError")
    append_event(run_dir, kind="failure", what="weight update 12: a bit", error="SyncError", exit_code=4)
    assert judged(run_dir, ARRIVED) == (Word.BAD, "weight update 12: a bit")


def test_processes_that_said_what_the_plan_says_are_fine(tmp_path: Path, make_run: Make) -> None:
    text = "2 of 2 processes report the scheme, patches and versions of the plan"
    assert judged(make_run(tmp_path), ATTESTED) == (Word.FINE, text)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"scheme": "bf16"}, "rollout-0-0 runs bf16, the plan says int8"),
        ({"emulated": True}, "rollout-0-0 reports emulated: True, the plan says False"),
        ({"patches": ()}, "rollout-0-0 has the patches none; the plan says a"),
        ({"versions": {"torch": "2"}}, "rollout-0-0 has torch 2, the plan says 2.13.0"),
        ({"fingerprint": "g"}, "rollout-0-0 runs other sources of this program than the process that checks it"),
        ({"process": "more", "rank": 7}, "more (rollout rank 7) is not in the plan"),
    ],
)
def test_a_process_that_runs_something_else_is_bad(
    tmp_path: Path, make_run: Make, attest: Callable[..., None], changes: dict, text: str
) -> None:
    run_dir = make_run(tmp_path)
    attest(run_dir, **changes)
    assert judged(run_dir, ATTESTED) == (Word.BAD, text)


def test_a_silent_process_is_named(tmp_path: Path, make_run: Make) -> None:
    run_dir = make_run(tmp_path)
    (run_dir / "attest" / "driver-0.json").unlink()
    text = "1 of 2 processes report the scheme, patches and versions of the plan"
    assert judged(run_dir, ATTESTED) == (Word.WARN, f"{text}; driver rank 0 did not report what it runs")


def test_an_engine_that_an_update_raised_to_bf16_is_as_it_should_be(
    tmp_path: Path, make_run: Make, attest: Callable[..., None], taken: Callable[..., Acknowledgement]
) -> None:
    run_dir = make_run(tmp_path)
    append_sent(run_dir, Sent(sync=12, replica=0, rank=0, manifest="of 12", digest_s=0.1))
    append_acknowledgement(run_dir, taken(12, scheme="bf16", bf16_layers=16, switched=16, layers_proven=16))
    attest(run_dir, scheme="bf16")
    assert judged(run_dir, ATTESTED)[0] is Word.FINE
    attest(run_dir, scheme="int8")
    assert judged(run_dir, ATTESTED) == (Word.BAD, "rollout-0-0 runs int8, the plan says bf16")


def test_an_engine_that_an_update_raised_to_a_finer_scheme_is_as_it_should_be(
    tmp_path: Path, make_run: Make, attest: Callable[..., None], taken: Callable[..., Acknowledgement]
) -> None:
    """One that the guard may ask for; its own word for another one counts for nothing."""
    run_dir = make_run(tmp_path)
    plan = read_plan(run_dir / "plan.json")
    engine = ExpectedAttestation(role="rollout", rank=0, scheme=Scheme.FP8, patches=("a",), emulated=True)
    raises = plan.replace(
        rollout=make_rollout(Scheme.FP8),
        quantization=plan.quantization.replace(emulate=True),
        guard=plan.guard.replace(actions=(Action.RAISE_PRECISION,)),
        attestations=(engine, *plan.attestations[1:]),
    )
    append_sent(run_dir, Sent(sync=12, replica=0, rank=0, manifest="of 12", digest_s=0.1))
    append_acknowledgement(run_dir, taken(12, scheme="fp8-block", emulated=True, switched=16, layers_proven=16))
    attest(run_dir, scheme="fp8-block", emulated=True)
    raises.write(run_dir / "plan.json")
    assert judged(run_dir, ATTESTED)[0] is Word.FINE
    raises.replace(guard=plan.guard).write(run_dir / "plan.json")
    assert judged(run_dir, ATTESTED) == (Word.BAD, "rollout-0-0 runs fp8-block, the plan says fp8")


def test_engines_that_took_over_are_held_against_what_they_were_started_in(
    tmp_path: Path, make_run: Make, attest: Callable[..., None], taken: Callable[..., Acknowledgement]
) -> None:
    """And their first update must have proven everything."""
    run_dir = make_run(tmp_path)
    write_generation(run_dir, Generation(Precision(Scheme.BF16), firsts=(1, 12)))
    append_sent(run_dir, Sent(sync=12, replica=0, rank=0, manifest="of 12", digest_s=0.1))
    append_acknowledgement(run_dir, taken(12, scheme="bf16", bf16_layers=16, layers_proven=15))
    assert judged(run_dir, ATTESTED) == (Word.BAD, "rollout-0-0 runs int8, the plan says bf16")
    attest(run_dir, scheme="bf16")
    assert judged(run_dir, ATTESTED)[0] is Word.FINE
    assert judged(run_dir, ARRIVED) == (Word.BAD, "rollout-0-0 proved 15 of 16 layers at update 12")
    (run_dir / "sync" / "engines.json").write_text("[")
    assert judged(run_dir, ATTESTED) == (Word.BAD, "rollout-0-0 runs bf16, the plan says int8")


def test_the_first_update_of_engines_that_were_replaced_has_proven_everything_too(
    tmp_path: Path, make_run: Make
) -> None:
    run_dir = make_run(tmp_path)
    lines = [json.loads(line) for line in sync_lines(run_dir, "rollout-0-0")]
    number = next(line["sync"] for line in lines[1:] if line["layers_proven"] < line["layers"])
    assert judged(run_dir, ARRIVED)[0] is Word.FINE
    write_generation(run_dir, Generation(firsts=(1, number, 13)))
    assert judged(run_dir, ARRIVED) == (Word.BAD, f"rollout-0-0 proved 4 of 16 layers at update {number}")


@pytest.mark.parametrize(
    "text",
    [
        '{"schema_version": 1, "role": [], "rank": {}, "patches": [[]], "versions": {}}',
        '{"schema_version": 1, "role": "rollout", "rank": 0, "patches": [1], "versions": []}',
        "null",
    ],
)
def test_lines_of_any_kind_leave_a_page(tmp_path: Path, make_run: Make, text: str) -> None:
    run_dir = make_run(tmp_path)
    (run_dir / "attest" / "rollout-0-0.json").write_text(text)
    for name in ("rollout-0-0", "trainer-0-0"):
        with (run_dir / "sync" / f"{name}.jsonl").open("a") as file:
            file.write(
                "[" * 100_000
                + "\n"
                + text
                + '\n{"sync": 13, "manifest": "m", "layers": "x"}\n{"sync": [], "manifest": 1}\n'
            )
    assert judged(run_dir, ATTESTED)[0] is Word.BAD
    assert page(read_view(run_dir), now=1000.0)
