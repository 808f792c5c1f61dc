"""A run of any length is shown from flat memory, and what was read once is not read again."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from appliance.page.stacked import Band, merge_bands
from appliance.record.events import Tail, append_event, parse_metrics
from appliance.record.samples import SAMPLES_FILE, SampleReader
from appliance.record.state import BoundedSeries
from appliance.report import folder
from appliance.report.figures import bands
from appliance.report.folder import RunReader, UpdateHistory, read_view
from appliance.report.page import page
from appliance.sync.records import Acknowledgement, Sent, append_acknowledgement, append_sent

FEW, MANY = 20_000, 100_000
GROWTH_KIB = 4 << 10  # 80,000 lines of metrics alone, held as they are read, would be 100 MiB
SHOW = """
import re, sys
from pathlib import Path
from appliance.cli import main
from appliance.record.lines import cut_lines

run, steps, *commands = sys.argv[1:]
for command in commands:
    sys.argv = ["appliance", command, run]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, command
assert cut_lines(Path(run) / "metrics.jsonl", after=int(steps) - 10, attempt=1) is not None
print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])  # getrusage has the parent's in it
"""


def lengthen(run_dir: Path, *, steps: int, line: Callable[..., dict[str, object]]) -> None:
    """As a run of so many steps leaves its folder: a validation every tenth, checkpoints, updates, memory, a log."""
    of_step = json.dumps(line(7))
    last = {name: (run_dir / f"sync/{name}-0-0.jsonl").read_text().splitlines()[0] for name in ("trainer", "rollout")}
    last_samples = json.loads((run_dir / SAMPLES_FILE).read_text().splitlines()[-1])
    (run_dir / "logs/1").mkdir(parents=True)
    with contextlib.ExitStack() as opened:
        names = ("events.jsonl", "metrics.jsonl", "memory.jsonl", SAMPLES_FILE, "logs/1/train.log")
        events, metrics, memory, samples, log = (opened.enter_context((run_dir / name).open("w")) for name in names)
        sent, taken = (opened.enter_context((run_dir / f"sync/{name}-0-0.jsonl").open("w")) for name in last)
        for step in range(1, steps + 1):
            text = of_step.replace('"step": 7,', f'"step": {step},')
            text = text if step % 10 else text.replace("}", ', "val_reward_mean": 0.5, "val_samples": 512}')
            for file in (metrics, log):
                print(text, file=file)
            print(f'{{"time": {10 * step + 1}, "kind": "phase", "what": "rollout"}}', file=events)
            print(f'{{"time": {10 * step + 5}, "kind": "phase", "what": "update"}}', file=events)
            print(f'{{"time": {10 * step + 6}, "pss_bytes": {step}, "processes": 9}}', file=memory)
            if step % 10 == 0:
                what = f"step {step} is saved"
                event = {"time": 10 * step + 9, "kind": "checkpoint", "what": what, "step": step}
                print(json.dumps(event), file=events)
                print(json.dumps({**last_samples, "step": step, "training": []}), file=samples)
            for name, file in (("trainer", sent), ("rollout", taken)):
                print(last[name].replace('"sync": 1,', f'"sync": {step},'), file=file)


def peak_kib(
    folder: Path,
    *commands: str,
    steps: int,
    make_run: Callable[..., Path],
    line: Callable[..., dict[str, object]],
) -> int:
    """Of these commands and what a resume cuts, in one process, for a run of so many steps. It is removed."""
    run_dir = make_run(folder, name=f"of-{steps}", steps=steps, done=2)
    lengthen(run_dir, steps=steps, line=line)
    done = subprocess.run(
        [sys.executable, "-c", SHOW, str(run_dir), str(steps), *commands], capture_output=True, text=True, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    assert (run_dir / "report.html").stat().st_size < 600_000
    assert f"{steps} updates arrived" in (run_dir / "report.html").read_text()
    shutil.rmtree(run_dir)
    return int(done.stdout.splitlines()[-1])


def test_memory_does_not_grow_with_the_steps(tmp_path: Path, make_run: Callable[..., Path], metrics_line) -> None:
    shown = ("report", "status", "logs")
    few, many = (peak_kib(tmp_path, *shown, steps=steps, make_run=make_run, line=metrics_line) for steps in (FEW, MANY))
    assert many < few + GROWTH_KIB


@pytest.mark.long  # three minutes, and 1.8 GB of disk
def test_a_million_steps_are_shown_from_100_mib(
    tmp_path: Path, make_run: Callable[..., Path], metrics_line, record_property: Callable[[str, object], None]
) -> None:
    found = peak_kib(tmp_path, "report", steps=1_000_000, make_run=make_run, line=metrics_line)
    record_property("said", f"memory: 1,000,000 steps are shown from {found / 1024:.0f} MiB")
    assert found < 100 << 10


def test_a_page_that_was_read_in_pieces_is_the_page(
    tmp_path: Path, make_run: Callable[..., Path], metrics_line
) -> None:
    whole = make_run(tmp_path, done=40, steps=40)
    append_event(whole, kind="guard", what="step 3: warn", why="k3", step=3, time=97.0)
    expected = page(read_view(whole), now=1000.0)
    files = {file: file.read_text() for file in sorted(whole.rglob("*.jsonl"))}
    for file in files:
        file.write_text("")
    run = RunReader(whole)
    for part in range(1, 8):
        for file, text in files.items():
            file.write_text(text[: len(text) * part // 7])
        found = page(run.view(), now=1000.0)
    assert found == expected


def test_what_was_read_is_not_read_again(
    tmp_path: Path, make_run: Callable[..., Path], metrics_line, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    monkeypatch.setattr(folder, "parse_metrics", lambda line: read.append(line) or parse_metrics(line))
    run_dir = make_run(tmp_path, done=30, steps=40)
    run = RunReader(run_dir)
    assert run.view().steps.count == 30 and len(read) == 31  # a validation before them
    for step in (31, 32):
        with (run_dir / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metrics_line(step)) + "\n")
        assert run.view().steps.count == step and len(read) == step + 1


def test_of_many_things_some_are_kept_and_both_ends() -> None:
    things = few = BoundedSeries[int]()
    assert not things and things.with_last() == ()
    for value in range(5000):
        things = things.and_one(value)
        few = things if value == 999 else few
    assert few.some == few.with_last() == tuple(range(1000))
    assert (things.count, things.every, things.some) == (5000, 8, tuple(range(0, 5000, 8)))
    assert things.with_last() == (*range(0, 5000, 8), 4999)
    assert things.and_one(5000).with_last() == tuple(range(0, 5001, 8))
    assert (things.first, things.last) == ((0, 1, 2, 3, 4), (4995, 4996, 4997, 4998, 4999))


def test_of_many_validations_some_are_kept_evenly(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    run_dir = make_run(tmp_path)
    last_samples = {**json.loads((run_dir / SAMPLES_FILE).read_text().splitlines()[-1]), "training": []}
    for count in (200, 3000):
        lines = [json.dumps({**last_samples, "step": step}) for step in range(1, count + 1)]
        (run_dir / SAMPLES_FILE).write_text("\n".join(lines) + "\n")
        steps = [samples.step for samples in SampleReader(run_dir).read()]
        every = 1 if count == 200 else 16
        assert steps == sorted({*range(1, count + 1, every), count})
    trained = json.dumps({**last_samples, "step": 0, "validation": [], "training": last_samples["validation"]})
    (run_dir / SAMPLES_FILE).write_text("\n".join([trained, *lines[:-1]]) + "\n")
    assert [samples.step for samples in SampleReader(run_dir).read()] == [0, *steps[:-1], 2999]


@pytest.mark.parametrize("every", [50, 1])
def test_what_a_long_run_was_doing_is_what_took_its_time(
    tmp_path: Path, make_run: Callable[..., Path], every: int
) -> None:
    """Steps of 5 s in four phases, and a validation of 0.6 s for each. Drawn, a pixel is what most of it was."""
    lines, now, took = [], 0.0, Counter[str]()
    for step in range(20_000):
        phases = {"load-model": 60.0} if step == 0 else {"validate": 0.625 * every} if step % every == 0 else {}
        for phase, seconds in (phases | dict.fromkeys(("rollout", "log-probs", "update", "sync"), 1.25)).items():
            lines.append(f'{{"time": {now}, "kind": "phase", "what": "{phase}"}}')
            took[{"load-model": "loading", "validate": "validating"}.get(phase, "training")] += seconds
            now += seconds
    lines.append(f'{{"time": {now}, "kind": "stop", "what": "done"}}')
    run_dir = make_run(tmp_path, done=0)
    (run_dir / "events.jsonl").write_text("\n".join(lines) + "\n")
    drawn_bands = [*bands(read_view(run_dir))]
    drawn = merge_bands(drawn_bands, least=now / 1500)
    if every == 50:  # 800 bands
        assert seconds_of(drawn_bands) == took
    assert len(drawn_bands) < 5000
    assert drawn == [Band(0.0, now, "training", drawn[0].colour)]


def seconds_of(bands: Sequence[Band]) -> Counter[str]:
    seconds = Counter[str]()
    for band in bands:
        seconds[band.name] += band.end - band.start
    return seconds


@pytest.mark.parametrize("most", [1, 4, 20_000])
def test_updates_of_several_ranks_are_held_against_each_other(
    tmp_path: Path, taken: Callable[..., Acknowledgement], monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """However many lines are read at once; what is missing in the middle is told, and only the newest waits."""
    monkeypatch.setattr(folder, "_MOST_WAITING", most)
    monkeypatch.setattr(folder, "_LEAST_AT_ONCE", 1)
    places = [(0, 0), (0, 1), (1, 0)]
    history = UpdateHistory(tmp_path, places=places)
    for sync in range(1, 31):
        for replica, rank in places:
            if (sync, replica) != (5, 1):
                append_sent(tmp_path, Sent(sync=sync, replica=replica, rank=rank, manifest=f"of {sync}", digest_s=0.1))
            changes = {"manifest": "other"} if (sync, replica) in ((4, 1), (25, 1)) else {}
            changes |= {"switched": 1} if (sync, rank) == (20, 1) else {}
            if (sync, rank) not in ((12, 1), (30, 1)):
                append_acknowledgement(tmp_path, taken(sync, replica=replica, rank=rank, **changes))
        if sync in (3, 17):
            history.read()
    history.read()
    misses = ["rollout-1-0 took other weights than were sent with update 4"]
    misses += ["rollout-1-0 took other weights than were sent with update 5"]
    misses += ["rollout-0-1 did not acknowledge update 12", "rollout-0-1 proved 4 of 16 layers at update 20"]
    misses += ["rollout-1-0 took other weights than were sent with update 25"]
    assert history.misses(is_done=False) == (misses, 5)
    assert history.misses(is_done=True) == ([*misses, "rollout-0-1 did not acknowledge update 30"], 6)
    assert {*itertools.chain(*((*rank.sent, *rank.taken) for rank in history.ranks))} == {30}
    assert [rank.count for rank in history.ranks] == [30, 28, 30]
    assert [rank.newest.sync for rank in history.ranks if rank.newest] == [30, 29, 30]
    assert [rank.has_switched for rank in history.ranks] == [False, True, False]


def test_of_many_ranks_many_lines_are_read_at_once(
    tmp_path: Path, taken: Callable[..., Acknowledgement], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[int | None] = []
    read = Tail.read
    monkeypatch.setattr(Tail, "read", lambda tail, most: limits.append(most) or read(tail, most=most))
    monkeypatch.setattr(folder, "_MOST_WAITING", 4)
    history = UpdateHistory(tmp_path, places=[(0, 0), (0, 1)])
    for sync in range(1, 31):
        append_sent(tmp_path, Sent(sync=sync, replica=0, rank=0, manifest=f"of {sync}", digest_s=0.1))
        append_acknowledgement(tmp_path, taken(sync, replica=0, rank=0))
    history.read()
    assert limits == [100] * 8  # four files: all their lines, and once more for what came meanwhile
