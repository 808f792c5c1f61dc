"""The page of a run, from runs that ended well, badly, or not yet."""

from __future__ import annotations

import errno
import html
import itertools
import json
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from page_parts import Parts
from plans import make_guard

from appliance.errors import PreflightError, RecipeError
from appliance.guard.policy import Action
from appliance.record.events import append_event
from appliance.record.lines import cut_lines
from appliance.record.plan import read_plan
from appliance.record.session import RunRecord, RunStatus, Session
from appliance.report import page as write
from appliance.report.figures import bands, curves
from appliance.report.folder import read_view
from appliance.report.page import LivePage, page, print_report
from appliance.report.verdicts import Word, verdicts

FIGURES = 19  # 7 of learning, 4 of mismatch, 4 of quantisation, 2 of time, 2 over time


def page_of(run_dir: Path) -> tuple[str, Parts]:
    text = page(read_view(run_dir), now=1000.0)
    return text, Parts(text)


def test_the_command_on_a_page_has_its_folder_as_one_word(make_run: Callable[..., Path], tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, name="r$(touch x) y", state=RunStatus.RUNNING)
    with Session(run_dir, record=RunRecord(RunStatus.RUNNING)):
        (said,) = (text for text in page_of(run_dir)[1].texts if "To rewrite it: " in text)
    assert shlex.split(said.partition("To rewrite it: ")[2]) == ["appliance", "report", str(run_dir)]


def test_files_that_are_hostile_are_left_out(make_run: Callable[..., Path], tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    expected = read_view(run_dir)
    deep, line = "[" * 100_000, '{"time": Infinity, "pss_bytes": 1, "processes": 1}\n'
    for name in ("memory.jsonl", "samples.jsonl"):
        with (run_dir / name).open("a") as file:
            file.write(f"{line}{deep}\n")
    (run_dir / "attest/deep.json").write_text(deep)
    (run_dir / "attest/wrong.json").write_text('{"patches": 5, "detail": {"kernels": 5}}')
    view = read_view(run_dir)
    assert (view.samples, view.attests) == (expected.samples, expected.attests)
    assert view.memory.curve.points() == expected.memory.curve.points() != []
    assert all(f"{name}.json is no attestation" in page(view, now=1000.0) for name in ("deep", "wrong"))


def test_kernels_of_another_kind_are_left_out(
    make_run: Callable[..., Path], attest: Callable[..., None], tmp_path: Path
) -> None:
    run_dir = make_run(tmp_path)
    attest(run_dir, detail={"kernels": 5})
    assert "rollout-0-0" in page(read_view(run_dir), now=1000.0)


def test_emulated_gradients_are_said_with_the_process(
    make_run: Callable[..., Path], attest: Callable[..., None], tmp_path: Path
) -> None:
    run_dir = make_run(tmp_path)
    assert "gradients in" not in page(read_view(run_dir), now=1000.0)
    attest(run_dir, detail={"backward": "fp8-block, emulated"})
    assert "gradients in fp8-block, emulated" in page(read_view(run_dir), now=1000.0)


def words(run_dir: Path) -> dict[str, Word]:
    return {each.question: each.word for each in verdicts(read_view(run_dir))}


def test_the_page_of_a_whole_run_has_everything_and_needs_nothing(
    tmp_path: Path, make_run: Callable[..., Path]
) -> None:
    text, parts = page_of(make_run(tmp_path))
    assert (parts.links, parts.seen.count("script"), "url(" in text) == ([], 1, False)
    assert parts.seen.count("figure") == FIGURES and "nothing to show yet" not in text
    seen_text = " ".join(parts.texts)
    for expected in (
        "0.100 before, 0.900 after",
        "bound 0.015",
        "3.0 GiB",
        "name: made  # <&>",
        "16 × Int8Kernel",
        "Scale drift",
    ):
        assert expected in seen_text, expected
    assert len(text) < 200_000


def test_what_a_model_wrote_is_text(tmp_path: Path, make_run: Callable[..., Path], hostile: str) -> None:
    text, parts = page_of(make_run(tmp_path))
    assert "img" not in parts.seen and hostile not in text
    assert parts.texts.count(hostile) == 2  # once as an answer of the validation, once of training


def test_verdicts_of_a_good_run_are_fine(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    assert words(make_run(tmp_path)) == {
        "Did it finish?": Word.FINE,
        "Did the reward climb?": Word.FINE,
        "Do rollouts and trainer agree?": Word.FINE,
        "What does the scheme cost?": Word.FINE,
        "Did the weights arrive?": Word.FINE,
        "Does every process run what it should?": Word.FINE,
        "Did the guard act?": Word.OPEN,  # the plan of the tests allows it nothing
    }


def test_a_run_that_failed_before_its_first_step_says_why(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    run_dir = make_run(tmp_path, done=0, state=RunStatus.FAILED, exit_code=4, reason="EngineError: <gone>")
    append_event(run_dir, kind="failure", what="<gone>", error="EngineError", hint="see the log", exit_code=4)
    _, parts = page_of(run_dir)
    said = " ".join(parts.texts)
    assert "EngineError: <gone>; see the log" in said and "failed, exit code 4" in said
    assert "nothing to show yet" in said and "No sample is written down yet." in said
    assert words(run_dir)["Did it finish?"] is Word.BAD


def test_a_run_without_any_event_has_a_page(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    run_dir = make_run(tmp_path, done=0)
    (run_dir / "events.jsonl").unlink()
    page_of(run_dir)


def test_values_that_are_not_finite_and_a_torn_line_cost_only_themselves(
    tmp_path: Path, make_run: Callable[..., Path], metrics_line: Callable
) -> None:
    run_dir = make_run(tmp_path, done=4)
    bad = {"mismatch_k3_kl": float("nan"), "is_ess": None, "reward_mean": float("inf"), "grad_norm": float("-inf")}
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics_line(5, **bad)) + "\nnot JSON\n" + json.dumps(metrics_line(6))[:40])
    view = read_view(run_dir)
    assert [x for x, *_ in view.steps.curves["entropy"].points()] == [1, 2, 3, 4, 5]
    text, _ = page_of(run_dir)
    assert "nan" not in text.lower() and "infinity" not in text.lower()


def test_a_step_that_was_done_again_is_there_once_and_attempts_are_marked(
    tmp_path: Path, make_run: Callable[..., Path], metrics_line: Callable
) -> None:
    run_dir = make_run(tmp_path, done=6, attempt=2)
    append_event(run_dir, kind="resume", what="attempt 2 resumes after step 4", step=4, attempt=2)
    assert cut_lines(run_dir / "metrics.jsonl", after=4, attempt=1) is not None
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(metrics_line(step, reward_mean=0.7)) + "\n" for step in (5, 6, 7))
    view = read_view(run_dir)
    rewards = [(x, mean) for x, mean, _, _ in view.steps.curves["reward_mean"].points()]
    assert [x for x, _ in rewards] == [1, 2, 3, 4, 5, 6, 7]
    assert [mean for _, mean in rewards[4:]] == [0.7, 0.7, 0.7]
    assert (view.state.rewards.count, view.steps.judged) == (7, 7)
    text, _ = page_of(run_dir)
    assert "attempt 2 resumes after step 4" in text and "2 attempts" in text


def test_a_mismatch_out_of_its_bounds_is_bad_until_it_returns(
    tmp_path: Path, make_run: Callable[..., Path], metrics_line: Callable
) -> None:
    run_dir = make_run(tmp_path, done=4)
    question = "Do rollouts and trainer agree?"
    one_differs = {"mismatch_k3_kl": 1e-9, "differing_tokens": 3, "mismatch_equal_fraction": 0.9}
    for step, mismatch in ((5, {"mismatch_k3_kl": 0.5}), (6, one_differs)):
        with (run_dir / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metrics_line(step, **mismatch)) + "\n")
        assert words(run_dir)[question] is Word.BAD
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics_line(7)) + "\n")
    assert words(run_dir)[question] is Word.WARN


def test_what_the_guard_decided_is_on_the_page_with_its_numbers(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    """As a verdict, in the list of events, on the axis of time, and in each chart of the mismatch at its step."""
    run_dir = make_run(tmp_path)
    plan = read_plan(run_dir / "plan.json")
    plan.replace(guard=make_guard(actions=(Action.WARN, Action.TIGHTEN))).write(run_dir / "plan.json")
    question = "Did the guard act?"
    assert words(run_dir)[question] is Word.FINE
    decisions = [f"step {step}: {move}: k3_kl 0.02 above 0.015" for step, move in ((3, "observe -> warn"), (5, "back"))]
    for step, decision in zip((3, 5), decisions, strict=True):
        append_event(run_dir, kind="guard", what=decision, why="k3_kl 0.02 above 0.015", step=step)
    (said,) = [each for each in verdicts(read_view(run_dir)) if each.question == question]
    assert (said.word, said.text) == (Word.WARN, f"2 times, the last: {decisions[-1]} (k3_kl 0.02 above 0.015)")
    text, parts = page_of(run_dir)
    assert "guard" in parts.texts
    for decision in decisions:
        assert parts.texts.count(decision) == 1 + 8  # of the events; 4 charts of mismatch, 4 of quantisation
        assert parts.texts.count(f"{decision} (k3_kl 0.02 above 0.015)") == 1  # on the axis of time
    assert text.count('class="mark warn"') == 2 * 8


def test_a_scheme_that_costs_more_than_noise_is_a_warning(
    tmp_path: Path, make_run: Callable[..., Path], metrics_line: Callable
) -> None:
    run_dir = make_run(tmp_path, done=4)
    validated = {"val_reward_mean": 0.7, "val_reward_bf16_mean": 0.9, "val_samples": 512}
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics_line(5, **validated)) + "\n")
    assert words(run_dir)["What does the scheme cost?"] is Word.WARN


def test_a_scheme_costs_nothing_that_the_validation_was_not_made_in(
    tmp_path: Path, make_run: Callable[..., Path], metrics_line: Callable
) -> None:
    """Where the guard's change came with the step's weight update, its validation is in the new scheme."""
    run_dir = make_run(tmp_path, done=5)
    validated = {"val_reward_mean": 0.75, "val_reward_bf16_mean": 0.75, "val_samples": 512}
    for step, scheme, validated_in in ((6, "int8", "bf16"), (7, "bf16", "int8")):
        line = metrics_line(step, scheme=scheme, val_scheme=validated_in, **validated)
        with (run_dir / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        told = {verdict.question: verdict.text for verdict in verdicts(read_view(run_dir))}
        text = told.get("What does the scheme cost?", "")
        assert text.startswith("0.750 in int8, 0.750 in bf16, after step 7") if step == 7 else text == ""


def test_each_validation_is_on_the_curve_of_its_own_scheme(
    tmp_path: Path, make_run: Callable[..., Path], metrics_line: Callable
) -> None:
    """Not of the plan's, nor of its step's rollouts."""
    run_dir, lines = make_run(tmp_path, done=0), []
    for step, scheme, own, bf16 in ((2, "int8", 0.2, 0.3), (4, "int8", 0.4, None), (6, "bf16", 0.6, 0.6)):
        means = {"val_reward_mean": own, "val_reward_bf16_mean": bf16}
        lines.append(json.dumps(metrics_line(step, scheme="int8", val_scheme=scheme, **means)) + "\n")
    (run_dir / "metrics.jsonl").write_text("".join(lines))
    (_, figures), *_ = curves(read_view(run_dir))
    (found,) = re.findall(r'aria-label="Validation".*data-hover="([^"]*)"', "\n".join(figures))
    drawn = {each["name"]: each["ys"] for each in json.loads(html.unescape(found))["columns"]}
    assert drawn == {"int8": [0.2, 0.4, None], "bf16": [0.3, None, 0.6]}


def test_what_it_was_doing_ends_with_its_attempt(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    run_dir = make_run(tmp_path, done=0)
    told = [(0, "phase", "rollout"), (9, "failure", "gone"), (50, "restart", "1"), (51, "resume", "2")]
    told += [(60, "phase", "update"), (65, "note", "the last sign"), (99, "resume", "3"), (100, "phase", "validate")]
    lines = [{"time": float(time), "kind": kind, "what": what} for time, kind, what in told]
    (run_dir / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = [(band.start, band.end, band.name) for band in bands(read_view(run_dir))]
    assert found == [(0, 9, "training"), (60, 65, "training"), (100, 100, "validating")]


def test_only_a_run_with_a_launcher_loads_itself_again(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    run_dir = make_run(tmp_path, done=4, state=RunStatus.RUNNING, exit_code=None)
    assert 'data-reload-s="0"' in page_of(run_dir)[0]  # nobody holds its lock: stopped
    with Session(run_dir, record=RunRecord(RunStatus.RUNNING)):
        live, _ = page_of(run_dir)
    assert 'data-reload-s="10"' in live and "appliance report" in live


@pytest.mark.slow
def test_a_long_run_has_a_page_of_bounded_size(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    assert len(page_of(make_run(tmp_path, steps=3000, done=3000))[0]) < 600_000


def test_report_writes_the_page_and_says_where(
    tmp_path: Path, make_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(tmp_path)
    print_report("made", run_root=tmp_path, output=None)
    assert capsys.readouterr().out == f"{run_dir / 'report.html'}\n"
    assert (run_dir / "report.html").read_text().startswith("<!doctype html>")
    print_report(str(run_dir), run_root=tmp_path, output=tmp_path / "other.html")
    assert (tmp_path / "other.html").is_file()
    with pytest.raises(PreflightError) as refused:
        print_report("made", run_root=tmp_path, output=tmp_path / "none" / "other.html")
    assert refused.value.hint == "set -o to another folder"
    with pytest.raises(RecipeError, match="no folder of that path or name"):
        print_report("nothing", run_root=tmp_path, output=None)


@pytest.mark.parametrize("output", ["", ".", "a-folder"])
def test_a_page_is_no_folder(tmp_path: Path, make_run: Callable[..., Path], monkeypatch, output: str) -> None:
    make_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-folder").mkdir()
    with pytest.raises(RecipeError) as refused:
        print_report("made", run_root=tmp_path, output=Path(output))
    assert refused.value.problems == [(f"-o: {output or '.'} is a folder", "name a file, or leave -o out")]


def test_a_run_that_cannot_be_read_is_not_told_as_a_page_that_cannot_be_written(
    tmp_path: Path, make_run: Callable[..., Path], monkeypatch
) -> None:
    run_dir = make_run(tmp_path)

    def refuse(run_dir: Path) -> None:
        raise PermissionError(13, "Permission denied", str(run_dir / "metrics.jsonl"))

    monkeypatch.setattr(write, "read_view", refuse)
    with pytest.raises(RecipeError) as refused:
        print_report("made", run_root=tmp_path, output=tmp_path / "other.html")
    what = f"[Errno 13] Permission denied: '{run_dir / 'metrics.jsonl'}'"
    assert refused.value.message == f"{run_dir}: cannot be read as a run: {what}"


def test_a_reward_of_fewer_than_five_steps_is_no_mean_of_five(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    view = read_view(make_run(tmp_path, done=2, state=RunStatus.STOPPED, exit_code=75))
    (said,) = [each.text for each in verdicts(view) if each.question == "Did the reward climb?"]
    assert said == "0.220 before, 0.240 after (sampled, means of at most five steps)"


def test_a_run_of_one_step_that_is_over_waits_for_no_other(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    view = read_view(make_run(tmp_path, steps=1, done=1))
    (said,) = [each.text for each in verdicts(view) if each.question == "Did the reward climb?"]
    assert said == "no other step to compare with"


def test_the_launcher_writes_it_when_there_is_news_and_not_more_often(
    tmp_path: Path, make_run: Callable[..., Path]
) -> None:
    run_dir = make_run(tmp_path)
    written, live = run_dir / "report.html", LivePage(run_dir)

    def is_written(*, news: bool, now: float) -> bool:
        written.unlink(missing_ok=True)
        live.tick(news=news, now=now)
        return written.exists()

    assert is_written(news=False, now=100.0)  # the first one needs no news
    assert not is_written(news=True, now=101.0)
    assert is_written(news=False, now=300.0)  # what was new then is written now
    assert not is_written(news=False, now=340.0)
    assert is_written(news=False, now=700.0)  # so that the page of a slow run does not look forsaken


def test_a_page_that_took_long_is_written_within_a_minute_all_the_same(
    tmp_path: Path, make_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one of a long run that is resumed reads all of it. After five minutes it would look forsaken."""
    run_dir = make_run(tmp_path)
    clock, live = itertools.count(step=40.0), LivePage(run_dir)
    with monkeypatch.context() as slow:
        slow.setattr("appliance.report.page.time.perf_counter", lambda: next(clock))
        live.tick(news=True, now=100.0)
    (run_dir / "report.html").unlink()
    live.tick(news=False, now=160.0)
    assert (run_dir / "report.html").exists()


def test_a_page_that_cannot_be_made_costs_no_run(
    tmp_path: Path, make_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(tmp_path)
    (run_dir / "plan.json").write_text("{}")
    live = LivePage(run_dir)
    live.tick(news=True, now=100.0)
    live.write()
    assert capsys.readouterr().err.count("warning: report.html cannot be written: RecipeError") == 1


def test_a_disk_that_is_full_for_a_while_costs_one_warning_and_no_later_page(
    tmp_path: Path, make_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(tmp_path)
    live, written, whole = LivePage(run_dir), run_dir / "report.html", Path.write_bytes

    def half(path: Path, content: bytes) -> int:
        whole(path, content[:100])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(Path, "write_bytes", half)
        live.tick(news=True, now=100.0)
        live.tick(news=False, now=200.0)
    assert list(run_dir.glob("*report.html*")) == []
    assert (
        capsys.readouterr().err
        == "warning: report.html cannot be written: OSError: [Errno 28] No space left on device\n"
    )
    live.tick(news=False, now=300.0)  # no news since: it is due because it was never written
    assert written.is_file() and capsys.readouterr().err == ""


def test_the_page_of_an_attempt_that_may_be_followed_by_another_loads_itself_again(
    tmp_path: Path, make_run: Callable[..., Path]
) -> None:
    def reload_s(run_dir: Path, *, may_restart: bool = False) -> str:
        live = LivePage(run_dir)
        live.may_restart = may_restart
        live.write()
        return (run_dir / "report.html").read_text().partition('data-reload-s="')[2].partition('"')[0]

    gone = make_run(tmp_path, done=4, state=RunStatus.FAILED, exit_code=4, reason="gone")
    assert (reload_s(gone), reload_s(gone, may_restart=True)) == ("0", "10")
    append_event(gone, kind="failure", what="a patch", error="PatchError", exit_code=4)  # no restart mends it
    assert reload_s(gone, may_restart=True) == "0"
    for number, record in enumerate(
        (
            {"state": RunStatus.DONE},
            {"state": RunStatus.STOPPED, "exit_code": 6},
            {"state": RunStatus.FAILED, "exit_code": 3},
        )
    ):
        assert reload_s(make_run(tmp_path, name=f"no-{number}", **record), may_restart=True) == "0"
