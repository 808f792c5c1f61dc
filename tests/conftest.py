"""Counts what ran, and turns a skip that nobody listed into a failure.

A skip is allowed by a line of `tests/skips.txt` with its whole reason. A test adds a line of its own to the summary
with `record_property("said", LINE)`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest
from two_workers import TOLD, FromBothEnds, folder_of_all, is_worker, once, tell, trainings_first

from appliance.files import whole_folder

if TYPE_CHECKING:
    from trainings import Finished
    from xdist.workermanage import WorkerController

# A container or CI sets them, people do not. Without buffers a program's last flush is another one; and where no
# bytecode is written each process compiles all of ours anew, which is a third of what a command's start takes.
for variable in ("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"):
    os.environ.pop(variable, None)
sys.dont_write_bytecode = False

# verl finds its platform when it is first imported, whichever test does that.
os.environ["VERL_PLATFORM"] = "cpu"
os.environ["VERL_USE_EXTERNAL_MODULES"] = "appliance.trainer.worker"

pytest_plugins = ["report_fixtures", "run_fixtures", "verify_fixtures"]  # fixtures of rooms in two folders
collect_ignore = ["gpu_lock"]  # for the environment of the other flavour: make test-gpu-lock
SKIPS = Path(__file__).parent / "skips.txt"
QUICK_FOLDER = Path(__file__).parent / "quick"
UNTIL_VARIABLE = "APPLIANCE_LONG_UNTIL"  # epoch seconds, CI's: what of the longest has not begun by then is left out
NO_TIME = "there was no time left for it"
QUICK_RAN_VARIABLE = "APPLIANCE_QUICK_RAN"  # CI's: `make quick` has passed on this very checkout, and is not run again
USUAL_PORTS = (6379, 8265, 10001, 29500, 8000)  # of Ray (3), torch and vLLM, where nothing chooses another one
OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


def refuse_unlisted(report: Report) -> Report:
    """The report as it is, or a failed one when it is a skip for a reason that no line has."""
    if not report.skipped or hasattr(report, "wasxfail"):
        return report
    reason = str(report.longrepr[2]).removeprefix("Skipped: ")
    if reason not in SKIPS.read_text().splitlines():
        report.outcome = "failed"
        report.longrepr = f"this skip is not listed in tests/{SKIPS.name}:\n{report.nodeid}: {reason}"
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The tests of `make torture` and `make test-long` run only when they are asked for by their marker: `-m long`. A
    test that has both markers runs in both."""
    if is_worker(config):
        items[:] = trainings_first(items)
    asked = config.option.markexpr
    left_out = [item for item in items if (own := _markers_to_ask(item)) and not any(marker in asked for marker in own)]
    if os.environ.get(QUICK_RAN_VARIABLE):
        left_out += [item for item in items if _is_quick(item) and item not in left_out]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


def _markers_to_ask(item: pytest.Item) -> list[str]:
    return [marker for marker in ("torture", "long") if item.get_closest_marker(marker)]


def _is_quick(item: pytest.Item) -> bool:
    """Whether `make quick` runs it."""
    is_in_folder = QUICK_FOLDER in item.path.parents
    return is_in_folder and not any(item.get_closest_marker(marker) for marker in ("slow", "engine"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> FromBothEnds | None:
    return FromBothEnds(config, log) if config.option.dist == "loadfile" else None


def pytest_deselected(items: list[pytest.Item]) -> None:
    """A worker counts them for the one that reports; without workers pytest itself does."""
    if items and is_worker(items[0].config):
        config = items[0].config
        tell(config, deselected=config.workeroutput.get("deselected", 0) + len(items))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: WorkerController) -> None:
    """What a worker tells at its end. Both leave out the same tests; one that died tells nothing."""
    tell(node.config, **getattr(node, "workeroutput", {}))


def pytest_configure() -> None:
    """Signals as on a terminal: a shell's background, or nohup, leaves some ignored, and programs inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("long") and time.time() > float(os.environ.get(UNTIL_VARIABLE, "inf")):
        pytest.skip(NO_TIME)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return refuse_unlisted((yield))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return refuse_unlisted((yield))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Counts before pytest's own last line: a run that quietly left tests out does not look like a whole one."""
    stats, stored = terminalreporter.stats, terminalreporter.config.stash.get(TOLD, {})
    reports = [report for outcome in ("passed", "failed") for report in stats.get(outcome, [])]
    said = [value for report in reports for name, value in report.user_properties if name == "said"]
    late = [each.nodeid for each in stats.get("skipped", []) if NO_TIME in str(each.longrepr)]
    for line in [*stored.get("fuzz", []), *said, *matrix_counts(reports), *(f"no time left: {each}" for each in late)]:
        terminalreporter.write_line(line)
    counts = {name: len(stats.get(name, [])) for name in ("deselected", *OUTCOMES)}
    counts["deselected"] += stored.get("deselected", 0)
    shown = ", ".join(f"{count} {name}" for name, count in counts.items() if count or name in ("deselected", "skipped"))
    terminalreporter.write_line(f"counts: {terminalreporter._session.testscollected} to run, {shown}")


def matrix_counts(reports: list[pytest.TestReport]) -> list[str]:
    """How many cells of the matrix ran: a table of schemes and families is only as good as what stood behind it."""
    cells = Counter(report.outcome for report in reports if "test_engine_matrix.py::test_cell[" in report.nodeid)
    return [f"matrix: {cells['passed']} cells passed, {cells['failed']} failed"] if cells else []


@pytest.fixture(scope="session")
def root() -> Path:
    """Of the repository."""
    return Path(__file__).parents[1]


@pytest.fixture(scope="session")
def folder_of_workers(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    return folder_of_all(tmp_path_factory, pytestconfig)


@pytest.fixture(scope="session")
def kept_models(root: Path, pytestconfig: pytest.Config) -> Path:
    """The tiny model of a run `short`, for later calls of pytest in this checkout, as long as what makes it stays."""
    parts = ("tasks/tiny_model.py", "tasks/library.py", "tasks/built_in/arithmetic.py", "quant/cpu_gemm.py")
    code = b"".join((root / "appliance" / part).read_bytes() for part in parts)
    code += (root / "requirements" / "cpu.txt").read_bytes()
    return pytestconfig.cache.mkdir(f"models-{hashlib.sha256(code).hexdigest()[:12]}")


@pytest.fixture(scope="session")
def tiny_cache(folder_of_workers: Path, short_root: Path, kept_models: Path) -> Path:
    """A `.cache` with the built-in model, its profile and data with `trainings.FEW` problems to validate on, made once
    for all trainings that do not test the making.

    The model takes a minute and a half, or six: it is that of a run `short`, where there was one.
    """
    from trainings import FEW

    def make() -> Path:
        root = folder_of_workers / "tiny"
        for models in (short_root / ".cache" / "models", kept_models):
            for made in models.glob("tiny-*"):  # each by a rename: it is whole
                shutil.copytree(made, root / ".cache" / "models" / made.name, dirs_exist_ok=True)
        sets = ("--set", f"cluster.run_dir={root}", "--set", FEW)
        command = [sys.executable, "-m", "appliance", "profile", "arithmetic-tiny-int8", *sets]
        subprocess.run(command, check=True, capture_output=True, text=True)
        return root / ".cache"

    return once(folder_of_workers / "tiny-cache", make)


@pytest.fixture(scope="session")
def with_tiny_cache(tiny_cache: Path) -> Callable[[Path], Path]:
    """Gives a folder of runs that cache, and returns the folder."""

    def give(root: Path) -> Path:
        shutil.copytree(tiny_cache, root / tiny_cache.name)
        return root

    return give


@contextlib.contextmanager
def busy_ports() -> Iterator[None]:
    """Somebody else has the ports that the parts of a run take by default: a run of ours needs none of them."""
    with contextlib.ExitStack() as open_ones:
        for port in USUAL_PORTS:
            listener = open_ones.enter_context(socket.socket())
            with contextlib.suppress(OSError):  # in use by somebody else already
                listener.bind(("0.0.0.0", port))
                listener.listen()
        yield


@pytest.fixture(scope="session")
def short_root(folder_of_workers: Path) -> Path:
    """Where `short` lies. Its cache is made by that run itself, as a user's first run makes it."""
    root = folder_of_workers / "short-runs"
    root.mkdir(exist_ok=True)
    return root


@pytest.fixture(scope="session")
def short(short_root: Path, kept_models: Path) -> Finished:
    """A training of a few steps that nothing disturbs, for every test that looks at one or compares with it. Whoever
    starts it has secrets, and a temporary folder of their own."""
    from trainings import SHORT, train, with_secrets

    def make() -> Finished:
        with busy_ports(), tempfile.TemporaryDirectory(prefix="s", dir="/tmp") as temporary:  # short enough for sockets
            environment = {**with_secrets(short_root.parent), "TMPDIR": temporary}
            done = train(short_root, *SHORT, name="short", env=environment)
            (short_root / "left").write_text("\n".join(os.listdir(temporary)))
            return done

    finished = once(short_root / "finished", make)
    assert finished.code == 0, finished.stderr[-4000:]
    for made in (short_root / ".cache" / "models").glob("tiny-*"):
        with whole_folder(kept_models / made.name, for_cache=True) as folder:
            shutil.copytree(made, folder, dirs_exist_ok=True)
    return finished


@pytest.fixture
def disk_of(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Gives a file system of its own of a size such as `24m`, in memory; asked again, it has the new size."""
    folder = tmp_path / "small"

    def mount(size: str) -> Path:
        is_there = folder.is_dir()
        folder.mkdir(exist_ok=True)
        how = ["-o", f"remount,size={size}"] if is_there else ["-t", "tmpfs", "-o", f"size={size}", "none"]
        if subprocess.run(["mount", *how, str(folder)], capture_output=True, check=False).returncode:
            folder.rmdir()
            pytest.skip("a small tmpfs cannot be mounted here")
        return folder

    yield mount
    if folder.is_dir():
        subprocess.run(["umount", str(folder)], check=True)
