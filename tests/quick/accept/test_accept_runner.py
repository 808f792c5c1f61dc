"""The runner of `appliance accept`: a row that faults, hangs or has a typo costs itself and leaves what says why."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import json
import os
import re
import signal
import tarfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from typer.testing import CliRunner

from appliance.cli import app
from appliance.errors import Interrupted, PreflightError
from appliance.plan.host import HostGpu
from appliance.processes import find_processes
from appliance.signals import Interrupts
from appliance.terms.schemes import Scheme
from benchmarks.accept import command, engines, probe, process, rows
from benchmarks.accept.command import lack, new_folder, run_accept, slug
from benchmarks.accept.ground import Ground, RowFailed
from benchmarks.accept.outcome import Outcome, State
from benchmarks.accept.probe import Device, Facts, ask, host_files, refuse
from benchmarks.accept.process import row_env, run_row
from benchmarks.accept.rows import BEYOND, ROWS, Row, Work, chosen, minutes

H100 = Device(product="NVIDIA H100 80GB HBM3", capability=(9, 0), memory_bytes=80 << 30, free_bytes=79 << 30)
FACTS = Facts(
    python="3.11.9",
    torch="2.13.0",
    cuda="13.0",
    problem="",
    devices=(H100,),
    compiler="gcc 12",
    no_compiler="",
    nvcc="/usr/bin/nvcc",
    driver="580.65",
)


def row(function: str, **arguments: object) -> Row:
    return Row(
        id=function.replace("_", "-"),
        text="it ends",
        code=f"broken_rows:{function}",
        estimate_s=1,
        covers=(),
        arguments=tuple(arguments.items()),
    )


@pytest.fixture(autouse=True)
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setattr(process, "PATIENCE_S", 1.0)


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "ROWS", (row("by_a_typo"), row("well", value=1), row("skipped")))
    monkeypatch.setattr(command, "ask", lambda *, hidden: FACTS.model_copy(update={"devices": (), "cuda": ""}))


def lives(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def ended(one: Row, *, folder: Path) -> Outcome:
    return run_row(one, folder=folder / one.id, capability=None, stop=Interrupts())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "state", "why"),
    [
        ("wrongly", State.FAILED, "the answer is 41"),
        ("by_a_typo", State.FAILED, "AttributeError: 'Ground' object has no attribute 'hould'"),
        ("unchecked", State.FAILED, "nothing was compared with anything"),
        ("skipped", State.SKIPPED, "needs what is not there"),
        ("by_a_fault", State.FAILED, "its process was ended by signal 11, after before the fault: 7"),
        ("silently", State.FAILED, "its process ended with 0 and said nothing"),
        ("not_there", State.FAILED, "AttributeError: module 'broken_rows' has no attribute 'not_there'"),
    ],
)
def test_how_a_row_ends(function: str, state: State, why: str, tmp_path: Path) -> None:
    outcome = ended(row(function), folder=tmp_path)
    assert (outcome.state, outcome.why) == (state, why)


@pytest.mark.parametrize(
    ("name", "state", "why"),
    [
        ("verl", State.SKIPPED, "needs verl, which is not installed"),
        ("vllm.of_a_part", State.FAILED, "ModuleNotFoundError: No module named 'vllm.of_a_part'"),
        ("benchmarks.typo", State.FAILED, "ModuleNotFoundError: No module named 'benchmarks.typo'"),
    ],
)
def test_a_package_that_a_bundle_left_out(name: str, state: State, why: str, tmp_path: Path) -> None:
    outcome = ended(row("without_a_package", name=name), folder=tmp_path)
    assert (outcome.state, outcome.why) == (state, why)


def test_a_row_that_holds_has_its_checks_and_figures(tmp_path: Path) -> None:
    outcome = ended(row("well", value=2.5), folder=tmp_path)
    assert (outcome.state, outcome.checks, outcome.why) == (State.PASSED, 1, "")
    assert [figure.text for figure in outcome.figures] == ["a figure: 2.5 GB/s"]


@pytest.mark.slow  # by the clock
def test_a_row_that_hangs_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rows.LIMITS_S, rows.Work.KERNELS, 5)
    outcome = ended(row("by_hanging"), folder=tmp_path)
    (child,) = outcome.figures
    assert outcome.state is State.FAILED
    assert outcome.why == f"ended by its time limit of 5 s, after child: {child.value:.4g}"
    assert not lives(int(child.value))
    assert find_processes(f"{process.MARK}={tmp_path / 'by-hanging'}") == []


@pytest.mark.slow  # by the clock
def test_what_hung_writes_the_stacks_of_its_threads_and_keeps_what_a_training_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(rows.LIMITS_S, rows.Work.KERNELS, 5)
    ended(row("as_a_training"), folder=tmp_path)
    folder = tmp_path / "as-a-training"
    kept_files = {
        str(file.relative_to(folder / "kept")): file for file in (folder / "kept").rglob("*") if file.is_file()
    }
    stacks = sorted(name for name in kept_files if name.startswith("stacks/"))
    assert [re.sub(r"\d+", "N", name) for name in stacks] == ["stacks/engine-N.txt", "stacks/row-N.txt"]
    assert (
        " in asleep\n" in kept_files[stacks[0]].read_text()
        and " in as_a_training\n" in kept_files[stacks[1]].read_text()
    )
    others = {name: file.stat().st_size for name, file in kept_files.items() if name not in stacks}
    assert others == {
        "runs/accept/plan.json": 2,
        "runs/accept/metrics.jsonl": process.KEPT_BYTES,
        "runs/accept/sync/rollout-0-0.jsonl": 7,
    }
    assert sorted(each.name for each in folder.iterdir()) == ["kept", "log.txt", "outcome.json"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("wrong", "the answer is 41"),
        ("lost", "RuntimeError: CUDA error: an illegal memory access was encountered"),
        ("faults", "its process was ended by signal 11, after faults, process: PID"),
    ],
)
def test_a_part_that_fails_costs_itself(bad: str, why: str, tmp_path: Path) -> None:
    outcome = ended(row("in_parts", names=["first", bad, "last"]), folder=tmp_path)
    first, own_pid, last = (int(figure.value) for figure in outcome.figures)
    why = why.replace("PID", f"{own_pid:.4g}")
    assert [(part.name, part.state, part.why) for part in outcome.parts] == [
        ("first", State.PASSED, ""),
        (bad, State.FAILED, why),
        ("last", State.PASSED, ""),
    ]
    assert (outcome.state, outcome.why) == (State.FAILED, f"{bad}: {why}") and outcome.checks >= 2
    assert first == own_pid and (last == own_pid) == (bad == "wrong"), "a process that lost its device goes on"


def test_a_lost_device_in_the_last_part_is_told_once(tmp_path: Path) -> None:
    outcome = ended(row("in_parts", names=["lost"]), folder=tmp_path)
    assert outcome.why == "lost: RuntimeError: CUDA error: an illegal memory access was encountered"
    assert (outcome.state, len(outcome.figures)) == (State.FAILED, 1)


@pytest.mark.parametrize(("names", "state"), [(["vllm"], State.SKIPPED), (["first", "vllm"], State.PASSED)])
def test_a_part_that_a_bundle_cannot_run_is_skipped(names: list[str], state: State, tmp_path: Path) -> None:
    outcome = ended(row("in_parts", names=names), folder=tmp_path)
    assert (outcome.parts[-1].state, outcome.parts[-1].why) == (State.SKIPPED, "needs vllm, which is not installed")
    assert (outcome.state, outcome.why) == (state, outcome.parts[-1].why if state is State.SKIPPED else "")


@pytest.mark.slow  # by the clock
def test_parts_after_one_that_hung_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rows.LIMITS_S, rows.Work.KERNELS, 4)
    outcome = ended(row("in_parts", names=["hangs", "last"]), folder=tmp_path)
    assert [part.state for part in outcome.parts] == [State.FAILED, State.WAITING]
    assert outcome.why.startswith("hangs: ended by its time limit of 4 s, after hangs, process: ")


@pytest.mark.parametrize(
    ("proven", "everyone", "refusal"),
    [
        ({"layers": 3, "layers_proven": 3, "unproven": 0}, True, ""),
        ({"layers": 3, "layers_proven": 1, "unproven": 0}, False, ""),
        ({"layers": 3, "layers_proven": 2, "unproven": 0}, True, "one: 2 of 3 layers were proven"),
        ({"layers": 0, "layers_proven": 0, "unproven": 0}, True, "one: 0 of 0 layers were proven"),
        ({"layers": 3, "layers_proven": 3, "unproven": 2}, True, "one: of 2 tensors nothing but their digest is known"),
    ],
)
def test_what_is_not_proven_fails(proven: dict[str, int], everyone: bool, refusal: str, tmp_path: Path) -> None:
    ground = Ground(row="reload", folder=tmp_path, rehearsal=True)
    with pytest.raises(RowFailed) if refusal else nullcontext() as raised:
        engines._hold_proof(ground, SimpleNamespace(**proven), update="one", everyone=everyone)
    assert not refusal or str(raised.value) == refusal


def test_a_rehearsal_hides_the_gpus_from_all_but_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    seen = [
        row_env(dataclasses.replace(row("well"), is_plain=is_plain), folder=tmp_path, capability=capability)
        for is_plain in (True, False)
        for capability in (None, (9, 0))
    ]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in seen] == ["", "3", "3", "3"]


def test_limits_leave_time_to_compile() -> None:
    limit_of = {one.id: one.limit_s for one in ROWS}
    assert {limit_of["digest"], limit_of["gemm-7b"]} == {300}
    assert {limit_of["reload-int8"], limit_of["sync-7b"], limit_of["restart"], limit_of["throughput-7b"]} == {600}
    assert (limit_of["train-int8"], limit_of["reload-fp8-block"]) == (420, 900)
    assert limit_of["train-smollm2"] == 360


@pytest.mark.parametrize(
    ("changes", "gpus", "problem", "hint"),
    [
        ({}, 1, "", ""),
        (
            {"cuda": "", "torch": "2.13.0+cpu", "devices": (), "problem": "Torch not compiled with CUDA enabled"},
            0,
            "",
            "",
        ),
        (
            {"cuda": "", "torch": "2.13.0+cpu", "devices": (), "problem": "Torch not compiled with CUDA enabled"},
            1,
            "there is a GPU, but torch 2.13.0+cpu is installed, which knows none",
            "use the image flashrl-appliance:gpu, or a bundle; --cpu rehearses",
        ),
        (
            {"devices": (), "driver": "", "problem": "Found no NVIDIA driver on your system."},
            0,
            "nvidia-smi shows no GPU, and torch 2.13.0 is installed, which needs one",
            "in a container: docker run --gpus all; --cpu rehearses what needs no vLLM for CPUs",
        ),
        (
            {"devices": (), "driver": "535.1", "problem": "The NVIDIA driver on your system is too old"},
            2,
            "nvidia-smi shows 2 x NVIDIA H100 80GB HBM3 (driver 535.1), and torch 2.13.0 cannot use it: "
            "The NVIDIA driver on your system is too old",
            "CUDA 13.0 needs a driver that is new enough (13: from 580), and /dev/nvidia* in a container",
        ),
    ],
)
def test_pytorch_must_fit_the_gpus(changes: dict[str, object], gpus: int, problem: str, hint: str) -> None:
    shown = (HostGpu(product=H100.product, memory_bytes=80 << 30),) * gpus
    with pytest.raises(PreflightError) if problem else nullcontext() as raised:
        refuse(FACTS.model_copy(update=changes), gpus=shown, environment={})
    assert not problem or (raised.value.message, raised.value.hint, raised.value.exit_code) == (problem, hint, 3)


def test_hidden_gpus_are_told() -> None:
    shown = (HostGpu(product=H100.product, memory_bytes=80 << 30),)
    with pytest.raises(PreflightError) as raised:
        refuse(FACTS.model_copy(update={"devices": ()}), gpus=shown, environment={"CUDA_VISIBLE_DEVICES": "7"})
    assert raised.value.message.endswith("and torch 2.13.0 cannot use it: it sees no GPU")
    assert raised.value.hint == "CUDA_VISIBLE_DEVICES is `7`: unset it, or name a GPU of this host"


@pytest.mark.slow
def test_a_host_is_asked_before_the_rows() -> None:
    facts = ask(hidden=True)
    assert (facts.torch, facts.cuda, facts.devices) == (probe.importlib.metadata.version("torch"), "", ())
    assert facts.problem == "Torch not compiled with CUDA enabled"
    assert bool(facts.compiler) and facts.no_compiler == ""
    assert Facts.model_validate_json(FACTS.model_dump_json()) == FACTS


def test_a_pytorch_that_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "module_argv", lambda *given: ("python3", "-c", "raise OSError('libcudart.so.13')"))
    with pytest.raises(PreflightError) as raised:
        ask(hidden=False)
    assert raised.value.message == "a process that asks PyTorch for GPUs ended with 1: OSError: libcudart.so.13"
    assert raised.value.hint.endswith(" -c 'import torch; print(torch.cuda.is_available())'")


def test_a_host_that_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe.sysconfig, "get_path", lambda name: "/nowhere")
    assert "Python.h: No such file" in probe._compiler()[1]
    monkeypatch.setenv("PATH", "/nowhere")
    assert probe._compiler() == ("", "Triton needs one")


def test_the_archive_has_the_host_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("WANDB_API_KEY", "a-secret")
    files = host_files(FACTS, command=["accept", "--only", "digest"])
    host = json.loads(files["host.json"])
    assert (host["command"], host["facts"]["driver"]) == (["accept", "--only", "digest"], "580.65")
    assert host["environment"]["CUDA_VISIBLE_DEVICES"] == "0" and "glibc" in host["libc"]
    assert not any(b"a-secret" in content for content in files.values())
    assert any(line.startswith("torch==") for line in files["packages.txt"].decode().splitlines())
    assert not any(re.search("TOKEN|KEY|SECRET|PASS", name) for name in probe.TOLD)


@pytest.mark.slow
@pytest.mark.usefixtures("few_rows")
def test_the_rows_after_a_failed_one_run_and_all_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run_accept(only=(), output=tmp_path / "out", run_root=tmp_path / "runs", rehearse=True)
    shown = capsys.readouterr()
    assert code == 4
    lines = [line.split(maxsplit=4) for line in shown.out.splitlines()[1:4]]
    assert [(name, state, checks, *why) for name, state, _, checks, *why in lines] == [
        ("by-a-typo", "failed", "0", "AttributeError: 'Ground' object has no attribute 'hould'"),
        ("well", "passed", "1"),
        ("skipped", "skipped", "0", "needs what is not there"),
    ]
    log = tmp_path / "runs/accept/cpu-rehearsal/by-a-typo/log.txt"
    assert f"by-a-typo: its log is {log}\n" in shown.err
    page = (tmp_path / "out/cpu-rehearsal.md").read_text()
    assert page.startswith("# CPU rehearsal: tiny sizes, kernels replaced, nothing about a GPU is shown\n")
    assert ": 1 passed, 1 failed, 1 skipped.\n" in page and "\nNot run: " not in page
    assert "\n* driver 580.65; nvcc: /usr/bin/nvcc; C compiler: gcc 12\n" in page
    content = content_of(tmp_path / "out/cpu-rehearsal.tar.gz")
    logs, host = ("by-a-typo.log", "skipped.log", "well.log"), {"host.json", "packages.txt"}
    assert content.keys() - {"nvidia-smi.txt"} == {"cpu-rehearsal.md", "rows.json", *logs, *host}
    assert "what a log says\n" in content["by-a-typo.log"]
    told = [Outcome.model_validate(each, strict=False) for each in json.loads(content["rows.json"])["rows"]]
    assert [one.state for one in told] == [State.FAILED, State.PASSED, State.SKIPPED]


def content_of(file: Path) -> dict[str, str]:
    with tarfile.open(file) as archive:
        found = {name: archive.extractfile(name).read().decode() for name in archive.getnames()}
    return {name.partition("/")[2]: text for name, text in found.items()}


@pytest.mark.slow
@pytest.mark.usefixtures("few_rows")
def test_a_second_call_leaves_the_results_of_the_first(tmp_path: Path) -> None:
    for only in ("well", "skipped"):
        run_accept(only=(only,), output=tmp_path / "out", run_root=tmp_path / "runs", rehearse=True)
    written = sorted(each.name for each in (tmp_path / "out").iterdir())
    assert written == [f"cpu-rehearsal{number}{end}" for number in ("-2", "") for end in (".md", ".tar.gz")]
    assert "| well |" in (tmp_path / "out/cpu-rehearsal.md").read_text()
    assert (tmp_path / "runs/accept/cpu-rehearsal/well/log.txt").is_file()
    for parent in ("runs/accept", "elsewhere"):
        (tmp_path / parent).mkdir(exist_ok=True)
        assert new_folder(tmp_path / parent, "cpu-rehearsal", tmp_path / "out").name == "cpu-rehearsal-3"


@pytest.mark.usefixtures("few_rows")
def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "ask", lambda *, hidden: pytest.fail("the host was asked"))
    (tmp_path / "out").write_text("a file")
    with pytest.raises(PreflightError) as raised:
        run_accept(only=(), output=tmp_path / "out", run_root=tmp_path / "runs", rehearse=True)
    assert raised.value.message == f"{tmp_path / 'out'} cannot be written: File exists"
    assert raised.value.hint == f"make it writable for user id {os.getuid()}, or name another one with -o"


@pytest.mark.usefixtures("few_rows")
def test_page_and_archive_are_there_after_each_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a power cut costs one row: what stands while each row begins."""
    seen = []
    page = tmp_path / "cpu-rehearsal.md"
    monkeypatch.setattr(
        command,
        "run_row",
        lambda one, **given: seen.append(page.read_text()) or Outcome(row=one.id, state=State.PASSED),
    )
    run_accept(only=(), output=tmp_path, run_root=tmp_path / "runs", rehearse=True)
    states = [re.findall(r"^\| (by-a-typo|well|skipped) \|.*\| (\w+) \| \d+ \| \d+ \|$", text, re.M) for text in seen]
    assert states == [
        [("by-a-typo", "running")],
        [("by-a-typo", "passed"), ("well", "running")],
        [("by-a-typo", "passed"), ("well", "passed"), ("skipped", "running")],
    ]
    assert "\nNot run: well, skipped.\n" in seen[0]


@pytest.mark.slow
def test_on_a_gpu_rows_that_share_run_at_once_and_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The longest begin first. The page has them in their order, whoever ends first."""
    pair = [
        dataclasses.replace(row("meets", others=[other]), id=name, shares=True, estimate_s=2)
        for name, other in (("one", "other"), ("other", "one"))
    ]
    short = dataclasses.replace(row("well", value=1), id="short", shares=True)
    monkeypatch.setattr(rows, "ROWS", (row("well", value=1), short, pair[0], row("wrongly"), pair[1]))
    monkeypatch.setattr(command, "ask", lambda *, hidden: FACTS)
    monkeypatch.setattr(command, "refuse", lambda *given, **named: None)
    monkeypatch.setattr(command, "at_once", lambda devices, *, cores: 2)
    code = run_accept(only=(), output=tmp_path / "out", run_root=tmp_path / "runs", rehearse=False)
    shown = capsys.readouterr()
    assert code == 4
    assert "5 rows, 0 min by estimate, ended after 24 min (--within), up to 2 at once\n" in shown.err
    assert [line.split()[:2] for line in shown.out.splitlines()[1:6]] == [
        ["well", "passed"],
        ["short", "passed"],
        ["one", "passed"],
        ["wrongly", "failed"],
        ["other", "passed"],
    ]
    begun = re.findall(r"^(\d/5)  (\w+): ", shown.err, re.M)
    assert {name for _, name in begun[:2]} == {"one", "other"}
    assert begun[2:] == [("3/5", "short"), ("4/5", "well"), ("5/5", "wrongly")]


@pytest.mark.slow
def test_it_ends_in_time_and_names_what_was_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row that hangs has not failed, nor those after it, but one of which a part had."""
    hanging = dataclasses.replace(row("in_parts", names=["first", "hangs", "last"]), shares=True)
    wrong = dataclasses.replace(row("in_parts", names=["wrong", "hangs"]), id="wrong-before", shares=True)
    monkeypatch.setattr(rows, "ROWS", (hanging, wrong, row("well", value=1)))
    monkeypatch.setattr(command, "ask", lambda *, hidden: FACTS)
    monkeypatch.setattr(command, "refuse", lambda *given, **named: None)
    monkeypatch.setattr(command, "at_once", lambda devices, *, cores: 2)
    monkeypatch.setattr(command, "PATIENCE_S", 23.0)  # so that its minute is 14 s
    code = run_accept(only=(), output=tmp_path / "out", run_root=tmp_path / "runs", rehearse=False, within=1)
    assert (code, "ended after 1 min (--within)" in capsys.readouterr().err) == (4, True)
    text = (tmp_path / "out/gpu-h100.md").read_text()
    assert ": 0 passed, 1 failed, 1 skipped, 1 interrupted.\n" in text and "| wrong-before | it ends | failed |" in text
    assert re.search(
        r"\* passed: first\n\* hangs: interrupted: the time of --within was over, after .*\n\* last: not", text
    )
    assert "skipped: the time of --within was over: give it more, or run this row alone by --only\n" in text
    assert find_processes(f"{process.MARK}={tmp_path / 'runs/accept/gpu-h100/in-parts'}") == []


@pytest.mark.parametrize(
    ("cores", "free_gib", "wanted"), [(16, 138, 6), (8, 79, 4), (64, 22, 2), (1, 138, 1), (64, 5, 1)]
)
def test_how_many_rows_run_at_once(cores: int, free_gib: int, wanted: int) -> None:
    device = H100.model_copy(update={"free_bytes": free_gib << 30})
    assert command.at_once((device,), cores=cores) == wanted


def test_what_measures_does_not_share() -> None:
    sharing = [each.id for each in ROWS if each.shares]
    kernels = ["int8-quantiser", "int8-gemm", "fp8-quantiser", "fp8-gemm", "fp8-backward"]
    on_gpus = [scheme for scheme in Scheme if not scheme.spec.not_on_gpu]
    assert sharing == [*kernels, *(f"reload-{scheme}" for scheme in on_gpus), "other-trainers", "serve"]


@pytest.mark.slow
def test_a_signal_names_the_row_that_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few_rows: None, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["first", "hangs", "last"]
    monkeypatch.setattr(rows, "ROWS", (row("in_parts", names=names), row("well", value=1)))
    page = tmp_path / "out/cpu-rehearsal.md"

    def press() -> None:
        with contextlib.suppress(OSError):
            while "* passed: first" not in (page.read_text() if page.is_file() else ""):
                time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    with pytest.raises(Interrupted) as raised:
        run_accept(only=(), output=tmp_path / "out", run_root=tmp_path / "runs", rehearse=True)
    assert (raised.value.message, raised.value.exit_code) == ("accept: stopped by SIGINT", 130)
    assert "\n     ending in-parts, in up to 2 s; a second signal ends it at once\n" in capsys.readouterr().err
    text = page.read_text()
    assert "\n| in-parts | it ends | interrupted |" in text and "\nNot run: well.\n" in text
    assert re.search(r"\* passed: first\n\* hangs: interrupted: by SIGINT, after .*\n\* last: not run\n", text)
    assert ", 1 interrupted.\n" in text
    assert find_processes(f"{process.MARK}={tmp_path / 'runs/accept/cpu-rehearsal/in-parts'}") == []
    told = json.loads(content_of(tmp_path / "out/cpu-rehearsal.tar.gz")["rows.json"])["rows"]
    assert [each["state"] for each in told] == ["interrupted"]


def on(*products: str, capability: tuple[int, int] = (9, 0), **changes: object) -> Facts:
    devices = tuple(H100.replace(product=each, capability=capability) for each in products)
    return FACTS.model_copy(update={"devices": devices, **changes})


def test_what_a_host_lacks_is_named() -> None:
    one_gpu, plain = on("NVIDIA A100-SXM4-80GB", capability=(8, 0)), row("well")
    fp8, int8, nvcc = (
        dataclasses.replace(plain, **each)
        for each in ({"scheme": Scheme.FP8}, {"scheme": Scheme.INT8}, {"needs_nvcc": True})
    )

    def why(asked: Row, facts: Facts) -> str:
        return lack(asked, facts=facts, rehearsal=False)

    assert why(plain, one_gpu) == ""
    assert why(dataclasses.replace(plain, gpus=2), one_gpu) == "needs 2 GPUs, this host has 1"
    assert why(fp8, one_gpu) == "FP8 needs compute capability 8.9, a100 has 8.0"
    assert why(int8, on("NVIDIA B200", capability=(10, 0))) == "vLLM has no INT8 kernels for b200 (Blackwell)"
    unknown = on("NVIDIA GB999", capability=(12, 1))
    assert why(int8, unknown) == "vLLM has no INT8 kernels for compute capability 12.1"
    assert why(fp8, on("NVIDIA A800", capability=(8, 0))) == "FP8 needs compute capability 8.9, this GPU has 8.0"
    assert why(nvcc, on(H100.product, nvcc="")) == "needs nvcc, which is not on PATH nor in CUDA_HOME"
    in_blocks = dataclasses.replace(plain, needs_hopper=True)
    assert why(in_blocks, on(H100.product)) == ""
    ada = "torch multiplies FP8 in blocks on Hopper only, this GPU has compute capability 8.9"
    assert why(in_blocks, on("NVIDIA L40S", capability=(8, 9))) == ada
    bare = on(H100.product, no_compiler="Triton needs one")
    assert why(plain, bare) == "needs a C compiler with Python's headers for Triton: Triton needs one"
    assert why(dataclasses.replace(plain, is_plain=True), bare) == ""


def test_rows_on_blackwell_that_need_int8_are_skipped() -> None:
    facts = on("NVIDIA B200", capability=(10, 0))
    named = {one.id for one in ROWS if "INT8 kernels" in lack(one, facts=facts, rehearsal=False)}
    assert {"sync-7b", "sync-32b", "restart", "reload-int8", "train-int8"} <= named
    assert not {"reload-bf16", "reload-fp8", "throughput-7b", "gemm-7b"} & named


def test_rows_for_two_gpus_are_skipped_by_name_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_refused_by_train", lambda facts, *, rehearsal: "")
    one, two = on(H100.product), on(H100.product, H100.product)
    skipped = {row.id: why for row in ROWS if (why := lack(row, facts=one, rehearsal=False))}
    names = ("sequence-parallel", "train-tp2-int8", "train-replicas-bf16-int8")
    assert skipped == dict.fromkeys(names, "needs 2 GPUs, this host has 1")
    assert [row.id for row in ROWS if lack(row, facts=two, rehearsal=False)] == []


def test_a_training_that_would_be_refused_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    training = dataclasses.replace(row("well"), work=Work.TRAINING)
    versions = {"torch": "2.11.0+cu130", "vllm": "0.31.0", "verl": "0.9.1", "ray": "2.60.0"}
    monkeypatch.setattr(command, "version_of", lambda name: versions.get(name, ""))
    monkeypatch.setattr(command.shutil, "which", lambda name: None)

    def why(facts: Facts) -> str:
        return lack(training, facts=facts, rehearsal=False)

    assert why(FACTS.model_copy(update={"python": "3.12.1"})) == "`appliance train` needs Python 3.11, this is 3.12.1"
    assert why(FACTS) == "`appliance train` needs torch 2.13.0, 2.11.0+cu130 is installed"
    versions["torch"] = "2.13.0"
    assert why(on("NVIDIA GH200 480GB")) == "`appliance train` does not know `NVIDIA GH200 480GB`"
    assert why(FACTS) == "`appliance train` finds GPUs by nvidia-smi, which is not here"
    versions.pop("verl")
    assert why(FACTS) == "`appliance train` needs verl 0.9.1, none is installed"
    assert lack(row("well"), facts=FACTS, rehearsal=True) == "a rehearsal needs vLLM for CPUs, which is not installed"


@pytest.mark.parametrize(
    ("products", "name"),
    [
        (("NVIDIA H100 80GB HBM3",), "h100"),
        (("NVIDIA H200",) * 8, "h200-x8"),
        (("NVIDIA GH200 480GB",), "nvidia-gh200-480gb"),
        (("NVIDIA GB999 (beta)",), "nvidia-gb999-beta"),
    ],
)
def test_the_name_of_a_page(products: tuple[str, ...], name: str) -> None:
    assert slug(on(*products).devices) == name


def test_a_gpu_that_others_use_is_told() -> None:
    busy = FACTS.model_copy(update={"devices": (H100.replace(free_bytes=20 << 30),)})
    told = command.warnings(busy, rehearsal=False)
    assert told == ["75% of GPU 0 is in use: rows may fail for want of memory"]
    assert command.warnings(FACTS, rehearsal=False) == command.warnings(busy, rehearsal=True) == []


def test_unknown_rows_are_refused() -> None:
    told = CliRunner().invoke(app, ["accept", "--only", "nothing", "--only", "digest", "--cpu"])
    assert told.exception.problems == [("--only nothing: there is no such row", "`appliance accept --list` shows them")]
    assert told.exception.exit_code == 2


def test_every_row_names_a_function_that_is_there(root: Path) -> None:
    """By its file: to import its module takes torch and vLLM."""
    missing = []
    for row in ROWS:
        module, _, function = row.code.partition(":")
        tree = ast.parse((root / module.replace(".", "/")).with_suffix(".py").read_text())
        if function not in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}:
            missing.append(row.code)
    assert missing == []


def test_rows_have_names_of_their_own_and_fit_into_the_time() -> None:
    assert chosen(()) == ROWS
    assert len({one.id for one in ROWS}) == len(ROWS)
    assert minutes(ROWS, gpus=1, at_once=command.MOST_AT_ONCE) < command.MINUTES == 24
    assert minutes(ROWS, gpus=1, at_once=6) < minutes(ROWS, gpus=2, at_once=6) < command.MINUTES_ON_TWO
    assert minutes(ROWS, gpus=2, at_once=1) == sum(one.estimate_s for one in ROWS) / 60
    assert all(re.fullmatch(r"[a-z0-9.-]+", one.id) for one in ROWS)


def test_what_a_gpu_has_never_run_is_a_row_or_is_said_to_be_beyond() -> None:
    page = (Path(__file__).parents[3] / "docs/gpu.md").read_text()
    page = page.partition("\n## Part by part\n")[2].partition("\n## ")[0]
    rows_of_page = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line[:1] == "|"]
    never_ran = {part for part, _, on_gpu in rows_of_page[2:] if re.search("read only|built and loaded", on_gpu)}
    covered = {part for one in ROWS for part in one.covers}
    assert len(never_ran) > 30
    assert covered & BEYOND.keys() == set()
    assert never_ran <= covered | BEYOND.keys() <= {part for part, *_ in rows_of_page}
