"""The server of forks and the program that asks it, as real processes with small imports."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from appliance.terms.environment import SPARE_VARIABLE
from appliance.trainer import forks

DRIVER = """
import os, sys, time
from pathlib import Path
from appliance.trainer import forks
with forks.as_ray_worker():
    import numpy.random
    import ray
    ray.remote(type("Actor", (), {}))
    assert os.environ["RAY_RAYLET_PID"] == str(os.getpid())
    os.environ["LD_LIBRARY_PATH"] = "/of/a/library:"
assert "RAY_RAYLET_PID" not in os.environ and os.environ["LD_LIBRARY_PATH"] == "/as/it/was"
os.environ["OF_DRIVER"] = "1"
try:
    forks.start_server(Path(sys.argv[1]))
except Exception:
    print("the driver failed", file=sys.stderr)
print("ready", flush=True)
time.sleep(1000)
"""
TELLS = """
import json, os, random, resource, sys
is_fork = "appliance.trainer.forks" in sys.modules  # its module, of another program
import numpy
import ray
print(json.dumps({
    "pid": os.getpid(), "parent": os.getppid(), "argv": sys.argv, "name": __name__, "folder": os.getcwd(),
    "given": os.environ.get("GIVEN"), "of_driver": os.environ.get("OF_DRIVER"), "is_fork": is_fork,
    "random": [random.random(), numpy.random.random()], "read": sys.stdin.read(),
    "open": len(os.listdir("/proc/self/fd")), "group": os.getpgrp(), "nice": os.getpriority(os.PRIO_PROCESS, 0),
    "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0], "oom_score": int(open("/proc/self/oom_score_adj").read()),
    "id": ray._raylet.UniqueID.from_random().hex(),
}))
sys.exit("said at its end")
"""
SPAWNS = """
import json, multiprocessing, os, sys
import psutil
def main():
    if "KILL" in os.environ:
        (spare,) = psutil.Process().children()
        spare.kill()
        spare.wait()
    sys.path.insert(0, os.getcwd())
    import spawned
    context = multiprocessing.get_context("spawn")
    said, streams = [], os.dup(1)
    os.dup2(os.open("written", os.O_CREAT | os.O_WRONLY), 1)
    for number in "12":
        ours, its = context.Pipe()
        os.environ["NUMBER"] = number
        child = context.Process(target=spawned.answer, args=(its,))
        child.start()
        its.close()
        said.append(ours.recv() | {"is_child": ours.recv() == [os.getpid(), child.pid]})
        child.join()
        said[-1]["code"] = child.exitcode
    os.dup2(streams, 1)
    print(json.dumps(said))
if __name__ == "__main__":
    main()
"""
SPAWNED = """
import os, sys
from pathlib import Path
import setproctitle
is_fork = "appliance.trainer.forks" in sys.modules
def answer(connection):
    setproctitle.setproctitle("a title")
    title = Path("/proc/self/comm").read_text()
    connection.send({"title": title, "number": os.environ["NUMBER"], "is_fork": is_fork})
    connection.send([os.getppid(), os.getpid()])
    os.write(1, os.environ["NUMBER"].encode())
    sys.exit(5)
"""


@pytest.fixture
def address(tmp_path: Path) -> Path:
    return tmp_path / "forks"


@pytest.fixture
def driver(address: Path) -> Iterator[psutil.Popen]:
    """Which has started a server, where an attempt before it left a socket."""
    address.touch()
    with _running(sys.executable, "-c", DRIVER, str(address), LD_LIBRARY_PATH="/as/it/was") as driver:
        yield driver


@contextlib.contextmanager
def _running(*argv: str, **variables: str) -> Iterator[psutil.Popen]:
    process = psutil.Popen(argv, env={**os.environ, **variables}, stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"ready\n"
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def ask(address: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a program by the command that Ray gets, and waits until nobody writes any more."""

    def run(text: str, *arguments: str, before: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
        program = tmp_path / "program.py"
        program.write_text(text)
        (tmp_path / "spawned.py").write_text(SPAWNED)
        command = f"{before} exec {forks.worker_command(address)} {shlex.join([str(program), *arguments])}"
        return subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env={**os.environ, **variables},
            input="",
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )

    return run


def test_a_fork_is_what_the_program_would_have_been(driver: psutil.Popen, ask: Callable, tmp_path: Path) -> None:
    limits = "ulimit -Sn 512; renice -n 19 $$ >/dev/null; echo 500 >/proc/self/oom_score_adj;"
    done = ask(TELLS, "1", "a b", before=limits, GIVEN="ü'\n")
    report = json.loads(done.stdout)
    assert done.stderr == "said at its end\n"
    assert report["argv"] == [str(tmp_path / "program.py"), "1", "a b"]
    assert (report["name"], report["folder"], report["given"], report["read"]) == (
        "__main__",
        str(tmp_path),
        "ü'\n",
        "",
    )
    assert (report["is_fork"], report["of_driver"]) == (True, None)
    (server,) = driver.children()
    assert report["parent"] == server.pid
    assert report["group"] == report["pid"]
    assert [report[limit] for limit in ("files", "nice", "oom_score")] == [512, 19, 500]
    assert report["open"] == 4, "its streams, and the folder that it lists"


def test_forks_draw_other_numbers_and_leave_nothing(driver: psutil.Popen, ask: Callable) -> None:
    first, second = (json.loads(ask(TELLS).stdout) for _ in range(2))
    assert first["pid"] != second["pid"] and first["id"] != second["id"]
    assert all(one != other for one, other in zip(first["random"], second["random"], strict=True))
    (server,) = driver.children()
    assert psutil.wait_procs(server.children(), timeout=10)[1] == []


@pytest.mark.parametrize("left", ["nothing", "a socket", "one that nobody answers"])
def test_without_an_answer_it_is_python(left: str, address: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        if left != "nothing":
            server.bind(str(address))
        if left == "one that nobody answers":
            server.listen()
            threading.Thread(target=lambda: server.accept()[0].close(), daemon=True).start()
        done = subprocess.run(
            [*shlex.split(forks.worker_command(address)), "-c", "import sys; print(sys.argv); sys.exit(7)", "1"],
            capture_output=True,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stdout, done.stderr) == (7, "['-c', '1']\n", "")


def test_who_has_not_waited_is_started_once(driver: psutil.Popen, ask: Callable, address: Path, tmp_path: Path) -> None:
    (server,) = driver.children()
    server.suspend()
    impatient = "import sys\nfrom appliance.trainer import forks\nforks._ANSWERS_WITHIN_S = 0.1\nforks.main()"
    started = f"open({str(tmp_path / 'started')!r}, 'a').write('once ')"
    subprocess.run([sys.executable, "-c", impatient, str(address), "-c", started], check=True)
    server.resume()
    assert json.loads(ask(TELLS).stdout)["is_fork"]  # it serves in turn
    assert psutil.wait_procs(server.children(), timeout=10)[1] == []
    assert (tmp_path / "started").read_text() == "once "


def test_what_a_fork_raises_is_not_the_drivers_failure(driver: psutil.Popen, ask: Callable) -> None:
    done = ask("raise RuntimeError('of a worker')")
    assert done.stderr.endswith("RuntimeError: of a worker\n") and "the driver failed" not in done.stderr
    assert done.stdout == ""


def test_a_process_with_threads_is_not_forked(address: Path) -> None:
    thread = threading.Thread(target=threading.Event().wait, args=(10.0,), daemon=True)
    thread.start()
    with pytest.raises(RuntimeError, match="threads would be missing in forks"):
        forks.start_server(address)


def test_the_server_has_a_name_and_ends_with_the_driver(
    driver: psutil.Popen, ask: Callable, wait_until: Callable, is_alive: Callable
) -> None:
    ask(TELLS)  # it serves by now
    (server,) = driver.children()
    assert Path(f"/proc/{server.pid}/comm").read_text() == f"{forks.NAME}\n"
    driver.kill()
    wait_until(lambda: not is_alive(server.pid))


def test_who_asks_and_dies_harms_nobody(driver: psutil.Popen, ask: Callable, address: Path) -> None:
    for sent in (b"", b"{", b'{"argv": []}', b"\xff"):
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(str(address))
            asking.sendall(sent)
    assert json.loads(ask(TELLS).stdout)["is_fork"]


def test_what_a_servers_process_spawns_first_is_its_spare(driver: psutil.Popen, ask: Callable, tmp_path: Path) -> None:
    """And a child of it, with its code and its streams, other ones than those that it began with."""
    first, second = json.loads(ask(SPAWNS, **{SPARE_VARIABLE: "1"}).stdout)
    assert first == {"title": "a title\n", "number": "1", "is_fork": True, "is_child": True, "code": 5}
    assert second == {"title": "a title\n", "number": "2", "is_fork": False, "is_child": True, "code": 5}
    assert (tmp_path / "written").read_text() == "12"


@pytest.mark.parametrize("variables", [{}, {SPARE_VARIABLE: "1", "KILL": "1"}], ids=["none", "killed"])
def test_without_a_spare_python_spawns(driver: psutil.Popen, ask: Callable, variables: dict[str, str]) -> None:
    said = json.loads(ask(SPAWNS, **variables).stdout)
    assert [one["is_fork"] for one in said] == [False, False]
    assert [one["code"] for one in said] == [5, 5]


def test_a_spare_ends_with_its_process(
    driver: psutil.Popen, ask: Callable, wait_until: Callable, is_alive: Callable
) -> None:
    spare = int(ask("import psutil; print(psutil.Process().children()[0].pid)", **{SPARE_VARIABLE: "1"}).stdout)
    wait_until(lambda: not is_alive(spare))
