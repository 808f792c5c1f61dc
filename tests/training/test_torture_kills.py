"""SIGKILL to random processes of a real training at random moments, again and again: `make torture`.

It goes on until so many kills have really stopped a training: its failure was named, or the launcher was the victim.
(A dashboard, an idle worker or a run in its last second can be killed and nothing stops.)
APPLIANCE_TORTURE_STOPS: how many (30).  APPLIANCE_TORTURE_SEED: what draws victims and moments (printed).
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from killable import NAMED_WITHIN_S, Run, check_undisturbed, named_after

from appliance.record.checkpoints import in_order, read_manifest

pytestmark = pytest.mark.torture

STOPS = int(os.environ.get("APPLIANCE_TORTURE_STOPS", "30"))
MOST_KILLS = 3 * STOPS  # more would mean that hardly anything stops a training
SEED = int(os.environ.get("APPLIANCE_TORTURE_SEED", str(time.time_ns() % 100_000)))
STEPS = 12
MOST_ATTEMPTS = 5  # that a run may need when nobody kills it any more


@dataclass
class Toll:
    """victims: by name.  stopped: of those, how many stopped their training.  named_s: from kill to name, seconds.

    steps, files: that were checked at the ends of the runs.
    """

    victims: Counter[str] = field(default_factory=Counter)
    stopped: Counter[str] = field(default_factory=Counter)
    phases: Counter[str] = field(default_factory=Counter)
    attempts: int = 0
    steps: int = 0
    files: int = 0
    named_s: list[float] = field(default_factory=list)

    def text(self, *, seed: int, runs: int) -> str:
        rows = [
            f"  {name:<18} killed {count:>3}, stopped the training {self.stopped[name]:>3}"
            for name, count in sorted(self.victims.items())
        ]
        phases = ", ".join(f"{phase} {count}" for phase, count in self.phases.most_common())
        named_deaths = (
            f"{len(self.named_s)} named, after at most {max(self.named_s, default=0):.0f} s; the launcher's are not"
        )
        checked = (
            f"{self.steps} steps, each once and as without a kill; {self.files} files of checkpoints, none damaged"
        )
        kills = f"{self.victims.total()} kills, {self.stopped.total()} of them stopped a training"
        head = f"torture: seed {seed}, {kills}; {runs} runs, {self.attempts} attempts"
        return "\n".join(["", head, *rows, f"  phases: {phases}", f"  {named_deaths}", f"  {checked}"])


def moments(run: Run, dice: random.Random, *, start_up_s: float) -> Iterator[Callable[[], bool]]:
    """Conditions that come true at a random moment of the newest attempt: while it starts, in a step, in a save.

    start_up_s: about how long an attempt takes to its first step.
    """
    begun = time.monotonic()
    match dice.choice(("start", "step", "step", "save")):
        case "start":
            wait_s = dice.uniform(0, start_up_s)
            yield lambda: time.monotonic() > begun + wait_s
        case "step":
            steps = len(run.steps) + dice.randint(0, 2)
            yield lambda: len(run.steps) >= steps
        case "save":
            saves = [event["what"] for event in run.events("phase")].count("save")
            yield lambda: [event["what"] for event in run.events("phase")].count("save") > saves
    pause_s = dice.uniform(0, 0.3) if dice.random() < 0.5 else dice.uniform(0, 3)
    later = time.monotonic() + pause_s
    yield lambda: time.monotonic() > later


def kill_one(run: Run, dice: random.Random, toll: Toll, *, start_up_s: float, killed_at: list[float]) -> bool:
    """Wait for a moment and kill a process of a random kind, the launcher too. False when the run was over before.

    killed_at: gets the time of the kill, unix s.
    """
    for condition in moments(run, dice, start_up_s=start_up_s):
        if not run.wait_for(condition):
            return False
    kinds: dict[str, list[int]] = {"launcher": [run.launcher.pid]}
    for process in run.processes():
        kinds.setdefault(process.name, []).append(process.pid)
    if run.is_over:
        return False
    name = dice.choice(sorted(kinds))
    before = run.events("failure")
    phase = run.record()["phase"] if (run.run_dir / "run.json").exists() else "claim"
    now = time.time()
    try:
        os.kill(dice.choice(kinds[name]), signal.SIGKILL)
    except ProcessLookupError:
        return not run.is_over
    killed_at.append(now)
    toll.victims[name] += 1
    toll.phases[phase] += 1
    deadline = time.monotonic() + NAMED_WITHIN_S
    while time.monotonic() < deadline and not run.is_over and run.events("failure") == before:
        time.sleep(0.2)
    is_named = run.events("failure") != before
    toll.stopped[name] += is_named or run.launcher.poll() == -signal.SIGKILL
    return True


def test_a_training_that_is_killed_again_and_again(new_run: Callable[..., Run], capsys: pytest.CaptureFixture) -> None:
    """Each run ends with the steps it was asked for, each once, as in a run that nobody killed."""
    calm = new_run("calm", trainer__steps=str(STEPS))
    calm.start()
    assert calm.end() == 0, calm.log_text[-3000:]
    start_up_s = calm.lines("metrics.jsonl")[0]["time_s"]
    dice, toll, runs = random.Random(SEED), Toll(), 0
    while toll.stopped.total() < STOPS:
        runs += 1
        assert toll.victims.total() < MOST_KILLS, toll.text(seed=SEED, runs=runs)
        killed_at: list[float] = []
        run = new_run(f"torture-{runs}", trainer__steps=str(STEPS), trainer__max_restarts="1000", guard__stall_s="600")
        run.start()
        hunt = {"start_up_s": start_up_s, "killed_at": killed_at}
        while toll.stopped.total() < STOPS and kill_one(run, dice, toll, **hunt):
            if run.is_over and run.launcher.returncode != 0:
                run.start()
        for _ in range(MOST_ATTEMPTS):
            if run.end() == 0:
                break
            run.start()
        toll.attempts += run.record()["attempt"]
        check_undisturbed(run, calm, steps=STEPS)
        toll.named_s += named_after(run.events("failure"), killed_at=killed_at)
        toll.steps += len(run.steps)
        toll.files += sum(len(read_manifest(folder).files) for folder in in_order(run.run_dir))
    with capsys.disabled():
        os.write(1, toll.text(seed=SEED, runs=runs).encode() + b"\n")
    assert toll.stopped.total() >= STOPS
    assert max(toll.named_s) < NAMED_WITHIN_S
