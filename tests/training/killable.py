"""Real tiny trainings as processes of their own, with a hand on every process of theirs."""

from __future__ import annotations

import functools
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from left_behind import Bystanders, bystanders, left_of
from trainings import FEW, json_lines

from appliance.processes import Process, find_processes
from appliance.record.checkpoints import DAMAGED, FOLDER, damage, in_order
from appliance.terms.environment import RAY_DIR_VARIABLE, RUN_VARIABLE
from appliance.trainer import forks

RECIPE = "arithmetic-tiny-int8"
# As small as a step can be: what is tried is how a run ends, and each attempt starts vLLM, verl and Ray again.
SMALL = {
    "trainer.validate_before": "false",
    "trainer.validate_every": "0",
    **dict([FEW.split("=")]),
    "batch.prompts_per_step": "8",
    "checkpoint.every_steps": "1",
}
# What a step is made of and how it went: all of it is the same in a run that was never killed.
OF_A_STEP = (
    "step",
    "reward_mean",
    "response_tokens_mean",
    "unfinished_fraction",
    "grad_norm",
    "entropy",
    "mismatch_k3_kl",
    "scheme",
)
NAMED_WITHIN_S = 60.0
WAIT_S = 1200.0  # generous: the host may be busy


class Terminal:
    """A terminal of its own, read as a window does until it is closed."""

    def __init__(self) -> None:
        self._screen, self.line = os.openpty()
        self._is_closed = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def close(self) -> None:
        """The kernel sends SIGHUP to whose terminal it was."""
        self._is_closed.set()
        self._reader.join()
        os.close(self.line)

    def _read(self) -> None:
        while not self._is_closed.is_set():
            if select.select([self._screen], [], [], 0.1)[0]:
                os.read(self._screen, 65536)
        os.close(self._screen)


@dataclass
class Run:
    """A run below `root`, with the launcher of its newest attempt. sets: recipe keys and their values.

    env: what its launchers get on top of the test's own environment.
    since: who was there when this was made; no other program is started while a run of this kind is looked at.
    """

    root: Path
    name: str
    sets: dict[str, str]
    launcher: subprocess.Popen[str] | None = None
    env: dict[str, str] = field(default_factory=dict)
    since: Bystanders = field(default_factory=bystanders)

    @property
    def run_dir(self) -> Path:
        return self.root / self.name

    def command(self) -> list[str]:
        """Of a new run, or of the next attempt of it."""
        pairs = {"cluster.run_dir": str(self.root), **self.sets}
        options = [part for key, value in pairs.items() for part in ("--set", f"{key}={value}")]
        command = [sys.executable, "-m", "appliance", "train", RECIPE, "--name", self.name, "--resume", "auto"]
        return [*command, *options]

    def start(self) -> None:
        with (self.root / f"{self.name}.out").open("a") as log:
            self.launcher = subprocess.Popen(
                self.command(),
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                process_group=0,
                env={**os.environ, **self.env},
            )

    def start_on(self, terminal: Terminal) -> None:
        """As `start`, with nothing in the log: it goes to the terminal."""
        (self.root / f"{self.name}.out").touch()
        self.launcher = subprocess.Popen(
            self.command(),
            stdin=terminal.line,
            stdout=terminal.line,
            stderr=terminal.line,
            text=True,
            preexec_fn=functools.partial(os.login_tty, 0),
            env={**os.environ, **self.env},
        )

    def stop(self, name: signal.Signals) -> None:
        """As a person does: SIGTERM to the launcher, but Ctrl-C (SIGINT) goes to all that share its terminal."""
        assert self.launcher is not None
        if name is signal.SIGINT:
            os.killpg(self.launcher.pid, name)
        else:
            self.launcher.send_signal(name)

    @property
    def log_text(self) -> str:
        return (self.root / f"{self.name}.out").read_text()

    def lines(self, name: str) -> list[dict[str, Any]]:
        """All lines of a JSON-lines file; one that is torn raises ValueError."""
        path = self.run_dir / name
        return json_lines(path) if path.exists() else []

    def record(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "run.json").read_text())

    @property
    def steps(self) -> list[int]:
        return [line["step"] for line in self.lines("metrics.jsonl")]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.lines("events.jsonl") if event["kind"] == kind]

    @property
    def is_over(self) -> bool:
        return self.launcher is None or self.launcher.poll() is not None

    def wait_for(self, condition: Callable[[], object], *, seconds: float = WAIT_S) -> bool:
        """Whether the condition came true before the launcher ended. Fails when neither happens in time."""
        deadline = time.monotonic() + seconds
        while not condition():
            if self.is_over:
                return bool(condition())
            assert time.monotonic() < deadline, f"waited {seconds:.0f} s for nothing:\n{self.log_text[-3000:]}"
            time.sleep(0.1)
        return True

    def end(self, *, seconds: float = WAIT_S) -> int:
        """The launcher's exit code, once it has ended."""
        assert self.launcher is not None
        return self.launcher.wait(timeout=seconds)

    def processes(self) -> list[Process]:
        """All of the run but its launcher; once that is gone, whatever any of its attempts left behind."""
        if self.is_over:
            return left_of(self.run_dir, since=self.since)
        return find_processes(f"{RUN_VARIABLE}={self.run_dir}", below=self.launcher.pid)

    def by_command(self, argument: str) -> list[Process]:
        """Those with it as one of the words of their command line, the oldest first: what that forked has it too."""
        found = [each for each in self.processes() if each.name != forks.NAME and argument in command_of(each)]
        return sorted(found, key=lambda each: each.start)

    def kill(self, name: str) -> Process:
        """SIGKILL to the one process whose name begins so, or to the oldest whose command has it as a word."""
        matching = [each for each in self.processes() if each.name.startswith(name)] or self.by_command(name)[:1]
        assert len(matching) == 1, f"{name}: {[str(each) for each in self.processes()]}"
        os.kill(matching[0].pid, signal.SIGKILL)
        return matching[0]

    def damaged_files(self) -> list[str]:
        """What is wrong with checkpoints that have a checkpoint's name, or had it until a resume set them aside."""
        here = [f"{folder.name}: {what}" for folder in in_order(self.run_dir) for what in damage(folder)]
        aside = (self.run_dir / FOLDER / DAMAGED).glob("global_step_*")
        told = [event for event in self.events("checkpoint") if "is damaged and set aside" in event["what"]]
        return [*here, *(f"{folder.name} is set aside" for folder in aside), *(event["what"] for event in told)]

    def clean_up(self) -> None:
        """After a test, however it went."""
        if self.launcher is not None and self.launcher.poll() is None:
            self.launcher.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            self.launcher.send_signal(signal.SIGTERM)
            try:
                self.launcher.wait(timeout=60)
            except subprocess.TimeoutExpired:
                self.launcher.kill()
                self.launcher.wait()


def with_layer(name: str) -> str:
    """A PYTHONPATH with which every process of a run loads the `sitecustomize.py` in the folder of that name here."""
    here = Path(__file__).parent
    return os.pathsep.join(filter(None, (str(here / name), str(here.parent), os.environ.get("PYTHONPATH"))))


def command_of(process: Process) -> list[str]:
    """Its command line, empty when it is gone."""
    try:
        return Path(f"/proc/{process.pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def named_after(failures: Sequence[dict[str, Any]], *, killed_at: Sequence[float]) -> list[float]:
    """Seconds from the kill before it to each failure. One that no kill came before is an error of its own."""
    assert all(killed_at and failure["time"] >= killed_at[0] for failure in failures), failures
    return [failure["time"] - max(at for at in killed_at if at <= failure["time"]) for failure in failures]


def check_undisturbed(run: Run, calm: Run, *, steps: int) -> None:
    """The run is as if nothing had happened, and nothing is left of its attempts. calm: one that nobody killed."""
    record = run.record()
    assert (record["state"], record["exit_code"]) == ("done", 0)
    assert run.steps == list(range(1, steps + 1))
    assert run.damaged_files() == []
    assert run.events("stall") == []
    assert run.processes() == []
    env = dict(json.loads((run.run_dir / "plan.json").read_text())["env"])
    assert not os.path.exists(env[RAY_DIR_VARIABLE])
    assert (run.run_dir / "model" / "config.json").is_file()
    of_a_step = [[line[key] for key in OF_A_STEP] for line in run.lines("metrics.jsonl")]
    assert of_a_step == [[line[key] for key in OF_A_STEP] for line in calm.lines("metrics.jsonl")]
