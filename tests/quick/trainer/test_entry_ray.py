"""The Ray of a training on one host: a real one, without a training, asked from outside."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from plans import make_plan
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray_from_outside import REFUSED_BY_GRPC, REFUSED_BY_HTTP, look

from appliance.cluster.form import _start_head
from appliance.launch.train import make_ray_dir, make_ray_token
from appliance.terms.environment import RAY_DIR_VARIABLE, RAY_OWN, RUN_VARIABLE, with_ray_token
from appliance.trainer.entry import _start_ray, train
from appliance.trainer.process_watch import NAMED_AFTER_S
from appliance.trainer.stopping import LOOK_EVERY_S

# With a worker of Ray's, which has to be heard, too.
DRIVER = """
import os, sys
from pathlib import Path
from appliance.record.plan import read_plan
from appliance.trainer.entry import _start_ray
import ray
_start_ray(read_plan(Path(sys.argv[1])))
pid, path = ray.get(ray.remote(lambda: (os.getpid(), sys.path)).remote())
print("worker", pid != os.getpid(), os.getcwd(), os.getcwd() in path, flush=True)
sys.stdin.read()
ray.shutdown()
"""


def test_ray_has_cpus_for_all_that_verl_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a host of two cores, alone and as the head of a cluster: for each rank the 3 that verl reserves, one for each
    of 8 storage units and their controller, and one for what is being started."""
    options_by_name: dict[str, object] = {}
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr("ray.init", lambda **options: options_by_name.update(options))
    monkeypatch.setattr(subprocess, "Popen", lambda argv, **_: options_by_name.update(argv=argv))
    monkeypatch.setenv(RAY_DIR_VARIABLE, str(tmp_path))
    for ranks in (1, 2, 8):
        plan = make_plan(tmp_path, device="H100", gpus_per_node=ranks)
        _start_ray(plan)
        _start_head(plan)
        assert options_by_name["num_cpus"] >= 3 * ranks + 8 + 1 + 1
        assert f"--num-cpus={options_by_name['num_cpus']}" in options_by_name["argv"]


@pytest.mark.slow
def test_the_ray_of_a_training_answers_only_those_who_have_its_token(tmp_path: Path) -> None:
    """Its own folder is open to everybody, and lies in one that is not. What a shell says of tokens counts for nothing,
    and none is made below HOME, where Ray would keep one for all of its user's. Workers import nothing that lies in the
    folder where the program was started."""
    run_dir = tmp_path / "a-1"
    run_dir.mkdir()
    make_plan(run_dir, device="H100").write(run_dir / "plan.json")  # nothing is imported ahead, as it is on a CPU
    folder = make_ray_dir(f"/tmp/entry-ray-{os.getpid()}")
    shell = {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "0123456789abcdef", "HOME": str(tmp_path)}
    ours = {RAY_DIR_VARIABLE: str(folder), RUN_VARIABLE: str(run_dir), "RAY_prestart_worker_first_driver": "0"}
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", DRIVER, str(run_dir / "plan.json")],
        cwd=tmp_path,
        env=with_ray_token({**os.environ, **shell, **ours}, make_ray_token(folder)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert next(line for line in process.stdout if line.startswith("worker")) == f"worker True {tmp_path} False\n"
        seen = look(folder, run_dir=run_dir, launcher=process.pid)
        open_to_all = stat.S_IMODE((folder / RAY_OWN).stat().st_mode)
        process.communicate(timeout=60)
    finally:
        process.kill()
        shutil.rmtree(folder)
    assert (seen.modes, open_to_all) == ((0o700, 0o600), 0o777)
    assert seen.http["runtime_env_agent"] == REFUSED_BY_HTTP and set(seen.http.values()) == {REFUSED_BY_HTTP}
    assert seen.store == REFUSED_BY_GRPC
    assert seen.telling == ()
    assert not (tmp_path / ".ray").exists()


@pytest.mark.parametrize(
    ("error", "waited_s"),
    [(ActorDiedError, [NAMED_AFTER_S]), (lambda: ActorUnavailableError("gone", None), [NAMED_AFTER_S]), (OSError, [])],
)
def test_who_died_is_for_the_watch_to_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Callable[[], Exception], waited_s: list[float]
) -> None:
    """The call to an actor may hear of its death before the watch does, and does not know whose it is."""
    slept: list[float] = []
    raised, before = error(), threading.enumerate()
    monkeypatch.setitem(sys.modules, "appliance.trainer.fit", SimpleNamespace(fit=MagicMock(side_effect=raised)))
    monkeypatch.setattr("appliance.trainer.process_watch.ProcessWatch", MagicMock())
    monkeypatch.setattr("appliance.trainer.entry._ray_of", lambda plan: nullcontext())
    monkeypatch.setattr("appliance.trainer.entry.time.sleep", slept.append)
    with pytest.raises(type(raised)):
        train(make_plan(tmp_path), overrides=[])
    assert slept == waited_s
    ended = [thread for thread in threading.enumerate() if thread.name == "stop-watch" and thread not in before]
    for thread in ended:
        thread.join(10 * LOOK_EVERY_S)
    assert not any(thread.is_alive() for thread in ended)  # it would end this process at the next run's request
