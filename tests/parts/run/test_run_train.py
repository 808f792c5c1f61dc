"""Whole runs by a launcher in a process of its own. The training child is a few lines that keep a trainer's promises:
events, metrics, `model/`, exit codes; everything around it is the real thing."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from plans import make_guard

from appliance.launch import train
from appliance.record.events import first_failure
from appliance.record.plan import RunPlan
from appliance.record.session import RunRecord, RunStatus, has_launcher, read_record
from appliance.report.summary import print_status
from appliance.terms.environment import RAY_DIR_VARIABLE

TRAINER = """
import json, os, sys, time
from pathlib import Path
from appliance.record.events import append_event
run_dir = Path(os.environ["APPLIANCE_PLAN"]).parent
def metrics(**values):
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(values) + "\\n")
append_event(run_dir, kind="phase", what="start")
print("noise of libraries")
metrics(step=0, time_s=1.0, val_reward_mean=0.2, val_samples=512, scheme="int8")
for step in (1, 2, 3):
    append_event(run_dir, kind="phase", what="rollout")
    metrics(step=step, time_s=1.0 + step, reward_mean=0.2 + step / 10, rollout_tokens_per_s=400.0, rollout_s=0.5,
            step_s=1.0, scheme="int8", mismatch_k3_kl=1e-4, is_ess=0.99, is_weight_mean=1.0,
            **({"val_reward_mean": 0.5, "val_samples": 512} if step == 3 else {}))
"""
EXPORT = """
(run_dir / "model").mkdir()
(run_dir / "model" / "config.json").write_text("{}")
append_event(run_dir, kind="phase", what="done")
"""
# The child says that it is ready once a daemon of its own runs, too.
WAITING = """
import subprocess
daemon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True)
append_event(run_dir, kind="phase", what="update")
(run_dir / "ready").write_text(f"{os.getpid()} {daemon.pid}")
time.sleep(100)
"""
# Hears the launcher's request by the trainer's own means. It has finished three steps, of which none is saved.
HEARING = """
from appliance.trainer.stopping import StopAsked, Stopping
stopping = Stopping(run_dir)
stopping.begin_change()
stopping.end_step(3, saved=0)
(run_dir / "ready").write_text(str(os.getpid()))
try:
    while True:
        time.sleep(0.05)
        stopping.check()
except StopAsked:
    append_event(run_dir, kind="phase", what="save")
    (run_dir / "checkpoints" / "global_step_3").mkdir(parents=True)
    stopping.note_saved(3)
    sys.exit(stopping.leave().exit_code)
"""
LOADING = """
from appliance.trainer.stopping import Stopping
append_event(run_dir, kind="phase", what="load-model")
stopping = Stopping(run_dir)
(run_dir / "ready").write_text(str(os.getpid()))
time.sleep(100)
"""
IGNORING = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


def started(process: subprocess.Popen[str], run_dir: Path, *, wait_until: Callable) -> list[int]:
    wait_until(lambda: process.poll() is not None or ((run_dir / "ready").exists() and (run_dir / "ready").read_text()))
    assert process.poll() is None, process.communicate()
    return [int(word) for word in (run_dir / "ready").read_text().split()]


def with_budget(plan: RunPlan, seconds: float) -> RunPlan:
    return plan.replace(guard=make_guard(save_budget_s=seconds))


def test_run_that_ends_well(tmp_path: Path, small_plan: Callable, python: Callable, launch: Callable) -> None:
    plan = small_plan(tmp_path, argv=python(TRAINER + EXPORT))
    process = launch(plan)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out == ""
    lines = err.splitlines()
    assert lines[0] == "phase start: starting Ray"
    assert "validation before training 0.200 (512 problems, greedy)" in lines
    assert [line.split("  ")[:2] for line in lines if line.startswith("step ")] == [
        ["step 1/3", "reward 0.300"],
        ["step 2/3", "reward 0.400"],
        ["step 3/3", "reward 0.500"],
    ]
    assert "noise" not in err
    assert lines[-10].startswith("done        3 steps in ")
    assert lines[-9:] == [
        "reward      0.200 before, 0.500 after (greedy, 512 problems of the validation set)",
        "speed       400 tokens/s of rollout, 1.0 s a step (medians)",
        "mismatch    fine in 3 of 3 steps",
        "model       small-1/model",
        "report      small-1/report.html",
        "run folder  small-1  (metrics.jsonl, events.jsonl, logs/)",
        "try next    train longer: --resume small-1 --set trainer.steps=6",
        "try next    compare: --set rollout.scheme=bf16",
        "try next    appliance status small-1",
    ]
    run_dir = Path(plan.run_dir)
    assert read_record(run_dir) == RunRecord(RunStatus.DONE, phase="done", exit_code=0)
    assert (run_dir / "logs" / "1" / "train.log").read_text() == "noise of libraries\n"
    assert "<title>small-1: done</title>" in (run_dir / "report.html").read_text()
    assert (run_dir / "memory.jsonl").stat().st_size > 0


def test_json_mode_gives_lines_for_machines(
    tmp_path: Path, small_plan: Callable, python: Callable, launch: Callable
) -> None:
    process = launch(small_plan(tmp_path, argv=python(TRAINER + EXPORT)), "--json")
    out, err = process.communicate(timeout=60)
    lines = [json.loads(line) for line in out.splitlines()]
    assert err == ""
    assert [line["type"] for line in lines].count("metrics") == 4
    assert [line["type"] for line in lines].count("event") == 5
    summary = lines[-1]
    assert summary.pop("seconds") > 0
    assert summary == {
        "type": "summary",
        "state": "done",
        "exit_code": 0,
        "reason": "",
        "run_dir": str(tmp_path / "small-1"),
        "steps": 3,
        "reward_before": 0.2,
        "reward_after": 0.5,
        "greedy": True,
        "reward_after_bf16": None,
        "val_reward_mean": 0.5,
        "val_reward_bf16_mean": None,
        "rollout_tokens_per_s": 400.0,
        "step_s": 1.0,
        "val_sets": {},
    }


def test_failed_training_says_what_and_where(
    tmp_path: Path, small_plan: Callable, python: Callable, launch: Callable
) -> None:
    code = TRAINER + (
        "append_event(run_dir, kind='failure', what='rollout-0-0 runs bf16, the plan says int8',"
        " error='AttestationError', hint='see attest/ in the run folder', exit_code=4)\n"
        "print('Traceback\\n' * 300); sys.exit(4)"
    )
    plan = small_plan(tmp_path, argv=python(code))
    process = launch(plan)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 4
    assert err.splitlines()[-4:] == [
        "error: training failed in phase rollout: rollout-0-0 runs bf16, the plan says int8",
        "hint: see attest/ in the run folder",
        "log: small-1/logs/1/train.log",
        "next: appliance logs small-1",
    ]
    assert read_record(Path(plan.run_dir)) == RunRecord(
        RunStatus.FAILED, phase="rollout", exit_code=4, reason="rollout-0-0 runs bf16, the plan says int8"
    )
    assert "rollout-0-0 runs bf16, the plan says int8; see attest/" in (Path(plan.run_dir) / "report.html").read_text()


def test_training_without_a_result_failed(
    tmp_path: Path, small_plan: Callable, python: Callable, launch: Callable
) -> None:
    plan = small_plan(tmp_path, argv=python(TRAINER))
    process = launch(plan, "--may-restart")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 5
    fault = "TrainingError: the process ended without writing its result (exit code 0)"
    assert f"error: training failed in phase rollout: {fault}" in err.splitlines()
    said = first_failure(Path(plan.run_dir))
    assert (said.what, said.exit_code) == (fault, 5)
    page = (Path(plan.run_dir) / "report.html").read_text()
    assert 'data-reload-s="10"' in page and "Another attempt may follow by itself" in page


def test_failed_preparation_keeps_its_code_and_starts_no_training(
    tmp_path: Path, small_plan: Callable, python: Callable, launch: Callable
) -> None:
    plan = small_plan(tmp_path, argv=python("raise SystemExit('never')"))
    task = plan.task.replace(kind="gsm8k", train_file=str(tmp_path / "none.jsonl"))
    files = plan.task_files.replace(train_parquet=str(tmp_path / "no"))
    process = launch(plan.replace(task=task, task_files=files))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2, err
    fact = f"task.train_file: {tmp_path}/none.jsonl"
    assert err.splitlines()[1].startswith(f"error: preparation failed in phase prepare: {fact}")
    logs = Path(plan.run_dir) / "logs" / "1"
    assert sorted(path.name for path in logs.iterdir()) == ["prepare.log", "stacks"]


def test_name_in_use_is_refused(tmp_path: Path, small_plan: Callable, python: Callable, launch: Callable) -> None:
    plan = small_plan(tmp_path, argv=python(TRAINER + EXPORT))
    Path(plan.run_dir).mkdir()
    process = launch(plan)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (
        2,
        f"--name: `small-1` is in use: {plan.run_dir}\nchoose another one, or leave it out\n",
    )
    assert list(Path(plan.run_dir).iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_stops_the_run_and_leaves_no_process(
    number: signal.Signals,
    tmp_path: Path,
    small_plan: Callable,
    python: Callable,
    launch: Callable,
    wait_until: Callable,
    is_alive: Callable,
    processes_of: Callable,
) -> None:
    plan = with_budget(small_plan(tmp_path, argv=python(TRAINER + WAITING)), 0.5)
    run_dir = Path(plan.run_dir)
    process = launch(plan)
    children = started(process, run_dir, wait_until=wait_until)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    reason = f"stopped by {number.name}, and the state was not saved in time; what was not saved before is lost"
    assert err.splitlines()[-1] == reason
    assert read_record(run_dir) == RunRecord(RunStatus.STOPPED, phase="update", exit_code=130, reason=reason)
    assert not any(map(is_alive, children))
    assert processes_of(run_dir) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGHUP, 75)])
def test_signal_saves_and_stops(
    number: signal.Signals,
    code: int,
    tmp_path: Path,
    small_plan: Callable,
    python: Callable,
    launch: Callable,
    wait_until: Callable,
    processes_of: Callable,
) -> None:
    plan = small_plan(tmp_path, argv=python(TRAINER + HEARING))
    run_dir = Path(plan.run_dir)
    process = launch(plan)
    started(process, run_dir, wait_until=wait_until)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    reason = f"stopped by {number.name}, the state after step 3 is saved"
    note = "note: saving, then stopping (press Ctrl-C again to stop at once)"
    lines = err.splitlines()
    assert lines[-2:] == [reason, "to resume: appliance train small-1/recipe.yaml --resume small-1"]
    assert lines.index(note) < lines.index("phase save: saving a checkpoint")
    assert read_record(run_dir) == RunRecord(RunStatus.STOPPED, phase="save", exit_code=code, reason=reason)
    assert processes_of(run_dir) == []


def test_the_note_is_there_before_the_trainer_hears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it stands above what the trainer says of its save, however slow this process is."""
    seen, events = [], tmp_path / "events.jsonl"
    monkeypatch.setattr(train, "ask_to_stop", lambda *_, **__: seen.append(events.read_text()))
    train._Training._ask_to_stop(SimpleNamespace(_session=SimpleNamespace(run_dir=tmp_path)), "SIGTERM")
    assert [train.SAVING in text for text in seen] == [True]


def test_a_trainer_is_asked_to_stop_where_no_note_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = []
    monkeypatch.setattr(train, "ask_to_stop", lambda _, *, why: reasons.append(why))
    with pytest.raises(FileNotFoundError):
        train._Training._ask_to_stop(SimpleNamespace(_session=SimpleNamespace(run_dir=tmp_path / "gone")), "SIGTERM")
    assert reasons == ["SIGTERM"]


def test_signal_while_the_model_loads_has_nothing_to_save(
    tmp_path: Path, small_plan: Callable, python: Callable, launch: Callable, wait_until: Callable
) -> None:
    """The main thread is in a call that nothing interrupts: another one hears the request and ends the process."""
    plan = small_plan(tmp_path, argv=python(TRAINER + LOADING))
    process = launch(plan)
    started(process, Path(plan.run_dir), wait_until=wait_until)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "stopped by SIGTERM, there was nothing to save"


def test_second_signal_does_not_wait(
    tmp_path: Path, small_plan: Callable, python: Callable, launch: Callable, wait_until: Callable, is_alive: Callable
) -> None:
    plan = small_plan(tmp_path, argv=python(IGNORING + TRAINER + WAITING))
    process = launch(plan)
    children = started(process, Path(plan.run_dir), wait_until=wait_until)
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None  # the child hears nothing, and has 300 s
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    said = "stopped at once by SIGINT, the second signal; what was not saved before is lost"
    assert err.splitlines()[-1] == said
    assert time.monotonic() - start < 60
    assert not any(map(is_alive, children))


def test_signal_while_preparing_starts_no_training(
    tmp_path: Path, small_plan: Callable, python: Callable, launch: Callable, wait_until: Callable
) -> None:
    plan = small_plan(tmp_path, argv=python(TRAINER + EXPORT))
    missing = {f"{split}_parquet": str(tmp_path / "data" / f"{split}.parquet") for split in ("train", "val")}
    process = launch(plan.replace(task_files=plan.task_files.replace(**missing)))
    run_dir = Path(plan.run_dir)
    wait_until(lambda: (run_dir / "events.jsonl").exists())
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 130
    record = read_record(run_dir)
    assert (record.state, record.phase, record.exit_code) == (RunStatus.STOPPED, "prepare", 130)
    assert not (run_dir / "logs" / "1" / "train.log").exists()


def test_killed_launcher_takes_everything_with_it(
    tmp_path: Path,
    small_plan: Callable,
    python: Callable,
    launch: Callable,
    wait_until: Callable,
    is_alive: Callable,
    processes_of: Callable,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = small_plan(tmp_path, argv=python(IGNORING + TRAINER + WAITING))
    ray_dir = Path(dict(plan.env)[RAY_DIR_VARIABLE])
    run_dir = Path(plan.run_dir)
    process = launch(plan)
    children = started(process, run_dir, wait_until=wait_until)
    assert ray_dir.is_dir()
    assert has_launcher(run_dir)
    process.kill()
    process.wait()
    wait_until(lambda: not any(map(is_alive, children)) and processes_of(run_dir) == [])
    wait_until(lambda: not ray_dir.exists())
    assert read_record(run_dir).state is RunStatus.RUNNING
    print_status(str(run_dir), run_root=tmp_path)
    assert "state       stopped: its launcher is gone" in capsys.readouterr().out.splitlines()


def test_ray_logs_are_kept_when_training_failed(
    tmp_path: Path, small_plan: Callable, python: Callable, launch: Callable
) -> None:
    code = (
        "import os; from pathlib import Path\n"
        "logs = Path(os.environ['APPLIANCE_RAY_DIR']) / 'ray' / 'session_1' / 'logs'; logs.mkdir(parents=True)\n"
        "(logs / 'raylet.err').write_text('why'); raise RuntimeError('bad')"
    )
    plan = small_plan(tmp_path, argv=python(code))
    process = launch(plan)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 5
    assert err.splitlines()[-3] == "error: training failed in phase starting: RuntimeError: bad (exit code 1)"
    assert (Path(plan.run_dir) / "logs" / "1" / "ray" / "raylet.err").read_text() == "why"
    assert not Path(dict(plan.env)[RAY_DIR_VARIABLE]).exists()


def test_reader_that_goes_away_ends_the_run(
    tmp_path: Path, small_plan: Callable, python: Callable, launch: Callable, processes_of: Callable
) -> None:
    plan = small_plan(tmp_path, argv=python("import time; time.sleep(0.5)\n" + TRAINER + WAITING))
    process = launch(plan, "--json")
    process.stdout.close()
    assert process.wait(timeout=60) == 1  # `appliance` makes it 141
    record = read_record(Path(plan.run_dir))
    assert (record.state, record.exit_code) == (RunStatus.FAILED, 141)
    assert record.reason == "ReaderGone: [Errno 32] Broken pipe"
    assert processes_of(Path(plan.run_dir)) == []
