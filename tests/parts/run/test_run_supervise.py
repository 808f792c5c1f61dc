"""Real children: what they print, how they end, and that nothing of them is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from appliance.errors import PreflightError
from appliance.launch.subreaper import SubreaperReport
from appliance.launch.supervise import GracefulStop, supervise, wait_for_sweep
from appliance.signals import SAME_SIGNAL_S, Interrupts

# A daemon without parent, session or mark that tie it to the run. It says its process id, and ignores SIGTERM.
DAEMON = """
import os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        code = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(100)"
        os.execve(sys.executable, [sys.executable, "-S", "-c", code, sys.argv[1] + ".daemon"], {})
    os._exit(0)
os.wait()
while not os.path.exists(sys.argv[1] + ".daemon") or not open(sys.argv[1] + ".daemon").read():
    time.sleep(0.01)
open(sys.argv[1], "w").write(str(os.getpid()))
"""
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
POLITE = "import signal, sys; signal.signal(signal.SIGTERM, lambda *a: sys.exit(7))\n"
READY = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid()))\n"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def child(
    run_dir: Path,
    code: str,
    *arguments: str,
    interrupts: Interrupts | None = None,
    on_tick: Callable[[], None] = lambda: None,
    grace_s: float = 5.0,
    ask: GracefulStop | None = None,
) -> SubreaperReport:
    return supervise(
        [sys.executable, "-c", code, *arguments],
        run_dir=run_dir,
        env={**os.environ, "HELLO": "from the launcher"},
        log=run_dir / "log",
        interrupts=interrupts or Interrupts(),
        on_tick=on_tick,
        ask=ask,
        grace_s=grace_s,
        patience_s=0.3,
    )


def when_written(path: Path, *actions: Callable[[], None]) -> Callable[[], None]:
    """A tick that does one action per tick once the file has content."""
    rest = list(actions)

    def tick() -> None:
        if rest and path.exists() and path.read_text():
            rest.pop(0)()

    return tick


def waiting_child(
    run_dir: Path, code: str, *actions: Callable[[], None], grace_s: float = 5.0, ask: GracefulStop | None = None
) -> tuple[SubreaperReport, list[str]]:
    """A child that would wait for 100 s, and what is done to it once it is up. With the signals that were heard."""
    with Interrupts() as interrupts:
        report = child(
            run_dir,
            code + READY + "time.sleep(100)",
            str(run_dir / "pid"),
            interrupts=interrupts,
            on_tick=when_written(run_dir / "pid", *actions),
            grace_s=grace_s,
            ask=ask,
        )
    return report, interrupts.names


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def pids(*paths: Path) -> Sequence[int]:
    return [int(path.read_text()) for path in paths]


def test_output_and_environment_of_the_child(run_dir: Path) -> None:
    said = "print(*map(os.getenv, ('HELLO', 'APPLIANCE_RUN')), flush=True); print('bad', file=sys.stderr)"
    assert child(run_dir, f"import os, sys; {said}") == SubreaperReport(0, ended=(), left=())
    assert (run_dir / "log").read_text().splitlines() == [f"from the launcher {run_dir}", "bad"]


def test_log_is_appended(run_dir: Path) -> None:
    (run_dir / "log").write_text("before\n")
    child(run_dir, "print('after')")
    assert (run_dir / "log").read_text() == "before\nafter\n"


@pytest.mark.parametrize(("code", "returncode"), [("raise SystemExit(4)", 4), ("import os; os.abort()", -6)])
def test_how_the_child_ended(run_dir: Path, code: str, returncode: int) -> None:
    assert child(run_dir, code).returncode == returncode


def test_program_that_does_not_exist(run_dir: Path) -> None:
    report = supervise(
        ["/nowhere/python"],
        run_dir=run_dir,
        env=os.environ,
        log=run_dir / "log",
        interrupts=Interrupts(),
        on_tick=lambda: None,
    )
    assert report == SubreaperReport(127, ended=(), left=())
    assert (run_dir / "log").read_text() == "/nowhere/python: No such file or directory\n"


def test_child_has_no_terminal_input_and_a_session_of_its_own(run_dir: Path) -> None:
    child(run_dir, "import os, sys; print(repr(sys.stdin.read()), os.getsid(0))")
    text, session = (run_dir / "log").read_text().split()
    assert text == "''"
    assert int(session) != os.getsid(0)


def test_daemon_of_a_child_that_ended_well_is_ended(run_dir: Path, is_alive: Callable) -> None:
    report = child(run_dir, DAEMON, str(run_dir / "pid"))
    (pid,) = pids(run_dir / "pid.daemon")
    assert report.returncode == 0
    assert len(report.ended) == 1
    assert report.ended[0].endswith(f"({pid})")
    assert not is_alive(pid)


def test_first_signal_asks_the_child_to_end(run_dir: Path) -> None:
    assert waiting_child(run_dir, POLITE, interrupt) == (SubreaperReport(7, ended=(), left=()), ["SIGINT"])


def test_child_that_ignores_the_signal_is_killed_after_the_grace(run_dir: Path) -> None:
    start = time.monotonic()
    ended = waiting_child(run_dir, STUBBORN, lambda: os.kill(os.getpid(), signal.SIGTERM), grace_s=0.5)
    assert ended == (SubreaperReport(-9, ended=(), left=()), ["SIGTERM"])
    assert 0.5 < time.monotonic() - start < 60  # it would sleep for 100 s


def test_second_signal_ends_everything_at_once(run_dir: Path, is_alive: Callable) -> None:
    code = STUBBORN + DAEMON + "time.sleep(100)"
    start = time.monotonic()
    with Interrupts() as interrupts:
        report = child(
            run_dir,
            code,
            str(run_dir / "pid"),
            interrupts=interrupts,
            on_tick=when_written(run_dir / "pid", interrupt, lambda: time.sleep(2 * SAME_SIGNAL_S), interrupt),
            grace_s=60.0,
        )
    assert report.returncode == -9
    assert time.monotonic() - start < 60
    assert not any(map(is_alive, pids(run_dir / "pid", run_dir / "pid.daemon")))


def test_signal_that_comes_twice_at_once_is_one() -> None:
    with Interrupts() as interrupts:
        interrupt()
        interrupt()
        assert interrupts.names == ["SIGINT"]
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.names == ["SIGINT", "SIGTERM"]
        time.sleep(2 * SAME_SIGNAL_S)
        os.kill(os.getpid(), signal.SIGTERM)
    assert interrupts.names == ["SIGINT", "SIGTERM", "SIGTERM"]


def test_child_that_is_asked_ends_in_its_own_way(run_dir: Path) -> None:
    code = READY + "while not os.path.exists(sys.argv[1] + '.ask'): time.sleep(0.05)\nraise SystemExit(75)"
    names: list[str] = []

    def tell(name: str) -> None:
        names.append(name)
        (run_dir / "pid.ask").touch()

    with Interrupts() as interrupts:
        report = child(
            run_dir,
            STUBBORN + code,
            str(run_dir / "pid"),
            interrupts=interrupts,
            on_tick=when_written(run_dir / "pid", interrupt),
            ask=GracefulStop(tell, budget_s=60.0),
        )
    assert (names, report.returncode) == (["SIGINT"], 75)


def test_child_that_does_not_answer_in_its_budget_gets_the_signal(run_dir: Path) -> None:
    start = time.monotonic()
    report, _ = waiting_child(run_dir, POLITE, interrupt, ask=GracefulStop(lambda name: None, budget_s=0.5))
    assert report.returncode == 7
    assert time.monotonic() - start > 0.5


def test_child_that_cannot_be_asked_gets_the_signal(run_dir: Path) -> None:
    def full(name: str) -> None:
        raise OSError(28, "No space left on device")

    report, _ = waiting_child(run_dir, POLITE, interrupt, ask=GracefulStop(full, budget_s=600.0))
    assert report.returncode == 7


def test_error_of_the_watcher_ends_the_child(run_dir: Path, is_alive: Callable) -> None:
    def broken() -> None:
        raise BrokenPipeError("nobody reads")

    tick = when_written(run_dir / "pid", broken)
    with pytest.raises(BrokenPipeError, match="nobody reads"):
        child(run_dir, STUBBORN + READY + "time.sleep(100)", str(run_dir / "pid"), on_tick=tick)
    assert not is_alive(*pids(run_dir / "pid"))


def test_killed_subreaper_takes_the_child_with_it(run_dir: Path, is_alive: Callable) -> None:
    def kill_keeper() -> None:
        (pid,) = pids(run_dir / "pid")
        os.kill(int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1]), signal.SIGKILL)

    report = child(
        run_dir,
        DAEMON + "time.sleep(100)",
        str(run_dir / "pid"),
        on_tick=when_written(run_dir / "pid", kill_keeper),
    )
    (daemon,) = pids(run_dir / "pid.daemon")
    assert report.returncode == -9
    assert [name for name in report.ended if name.endswith(f"({daemon})")]
    assert not any(map(is_alive, pids(run_dir / "pid", run_dir / "pid.daemon")))


LAUNCHER = """
import sys
from pathlib import Path
from appliance.launch.supervise import supervise
from appliance.signals import Interrupts

folder = Path(sys.argv[1])
code = "import os, sys, time; open(sys.argv[1], 'w').write(f'{os.getpid()} {os.getppid()}'); time.sleep(100)"
argv = [sys.executable, "-c", code, str(folder / "pids")]
supervise(argv, run_dir=folder, env={}, log=folder / "log", interrupts=Interrupts(), on_tick=lambda: None)
"""


def test_the_next_attempt_waits_until_a_killed_launchers_processes_are_ended(run_dir: Path, is_alive: Callable) -> None:
    """The sweep finds by the run's mark, which the next attempt's processes have, too: it would kill them."""
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(run_dir)])
    written = run_dir / "pids"
    while not (written.exists() and len(written.read_text().split()) == 2):
        time.sleep(0.02)
    old, subreaper = map(int, written.read_text().split())
    os.kill(subreaper, signal.SIGSTOP)  # as on a busy host: its turn comes late
    launcher.kill()
    launcher.wait()
    with pytest.raises(PreflightError, match=f"process {subreaper} is still ending the earlier attempt"):
        wait_for_sweep(run_dir, within_s=0.2)
    threading.Timer(0.5, os.kill, (subreaper, signal.SIGCONT)).start()
    wait_for_sweep(run_dir)
    assert not is_alive(old) and not is_alive(subreaper)
    assert child(run_dir, "import time; time.sleep(0.5)").returncode == 0


def test_processes_of_others_are_left_alone(run_dir: Path, is_alive: Callable) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    try:
        child(run_dir, DAEMON, str(run_dir / "pid"))
        assert is_alive(other.pid)
    finally:
        other.kill()
        other.wait()


def test_interrupts_restore_the_handlers_and_leave_nohup_alone() -> None:
    assert threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        handler = signal.getsignal(signal.SIGINT)
        with Interrupts():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGINT) != handler
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGHUP, before)
