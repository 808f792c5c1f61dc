"""The program: its exit code and its two streams, of a process where that could differ from a call."""

import contextlib
import json
import os
import pty
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from called import called
from hub_variables import set_hub
from plans import HOST

from appliance import cli, console
from appliance.launch import command
from appliance.plan.build import build_plan

VARIABLES = {"HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "COLUMNS": "200"}


@pytest.fixture
def program(tmp_path):
    """Runs the program in an empty folder, offline and without colours."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "appliance", *arguments]
        environment = {**os.environ, **VARIABLES}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    return run


@pytest.fixture
def appliance(tmp_path, monkeypatch, capfd):
    """As `program`, in this process, which saves it half a second of imports."""
    monkeypatch.chdir(tmp_path)
    set_hub(monkeypatch, **VARIABLES)
    console.err_console.cache_clear()  # it has read the variables

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return called(*arguments, monkeypatch=monkeypatch, capfd=capfd)

    yield run
    console.err_console.cache_clear()


# Counts the calls of Python functions from the first import of ours on, by what the program itself calls at its exit.
# With `sys.setprofile` Debian's Python 3.11.2 crashes in it.
COUNTED = """
import atexit, sys
calls = 0
def count(frame, event, argument):
    global calls
    calls += event == "call"
atexit.register(lambda: print(calls, file=sys.stderr))
sys.settrace(count)
from appliance.cli import main
sys.argv = ["appliance", *sys.argv[1:]]
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "most"), [(("--help",), 200_000), (("plan", "arithmetic-tiny-int8"), 550_000)])
def test_a_command_starts_in_a_blink(arguments, most, tmp_path):
    """0.3 s and 0.9 s of an idle core for 124,000 and 364,000 calls: unlike seconds, the same on every host."""
    command = [sys.executable, "-c", COUNTED, *arguments]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **VARIABLES}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert most / 3 < int(done.stderr.splitlines()[-1]) < most


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [("--help",), ("plan", "arithmetic-tiny-int8"), ("check", "arithmetic-tiny-int8")]
)
def test_the_launcher_imports_no_torch(arguments, tmp_path):
    code = (
        "import sys; from appliance.cli import main\n"
        f"sys.argv = ['appliance', *{arguments!r}]\n"
        "try:\n    main()\nfinally:\n"
        "    print(sorted({'torch', 'verl', 'vllm', 'ray', 'transformers'} & sys.modules.keys()), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == "[]"


def test_the_commands(appliance):
    text = appliance("--help").stdout
    names = re.findall(r"^│ ([a-z][a-z-]+)  ", text, flags=re.MULTILINE)
    launched = ["train", "plan", "check", "bench", "accept", "verify", "profile", "setup", "convert-profile", "compare"]
    assert names == [*launched, "join", "status", "logs", "report", "export", "schema", "version", "data", "recipes"]


@pytest.mark.parametrize("arguments", [("trian",), ("plan",), ("plan", "arithmetic-tiny-int8", "--sett", "x=1")])
def test_usage_errors_exit_2(appliance, arguments):
    done = appliance(*arguments)
    assert (done.returncode, done.stdout) == (2, "")


def test_plan_prints_what_was_decided_and_needs(appliance, tmp_path):
    done = appliance("plan", "arithmetic-tiny-int8")
    assert (done.returncode, done.stderr) == (0, "")
    first, *parts = done.stdout.split("\n\n")
    assert first.splitlines() == [
        "arithmetic-tiny-int8-1: 30 steps of 32 prompts x 8 samples; rollouts in int8; tis with cap 2; 1 x cpu",
        "arithmetic: a sum of two numbers; 1 for exactly its digits, else 0",
    ]
    headings = [part.splitlines()[0] for part in parts]
    assert headings[:-2] == ["Rollouts", "Training", "Guard and checkpoints", "Needs, estimated", "Files"]
    assert headings[-2:] == ["Findings on this host", parts[-1].strip()] and "--full" in parts[-1]
    assert done.stdout.count("\n") < 50
    assert list(tmp_path.iterdir()) == []


def test_a_full_plan_has_the_recipe_and_the_command(appliance):
    done = appliance("plan", "arithmetic-tiny-int8", "--full")
    assert "\n\nRecipe, resolved\nname: arithmetic-tiny-int8\n" in done.stdout
    assert done.stdout.rpartition("\n\nChild\n")[2].startswith("APPLIANCE_PLAN=")


@pytest.mark.slow
def test_a_terminal_wraps_the_reasons_below_each_other(appliance):
    """The width that the terminal says; a pipe gets a line for each choice, however long."""
    done = appliance("plan", "arithmetic-tiny-int8")
    assert max(map(len, done.stdout.splitlines())) > 120
    terminal, other = pty.openpty()
    command = [sys.executable, "-m", "appliance", "plan", "arithmetic-tiny-int8"]
    child = subprocess.Popen(command, stdout=other, env={**os.environ, "COLUMNS": "110", "HF_HUB_OFFLINE": "1"})
    os.close(other)
    text = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while part := os.read(terminal, 4096):
            text += part
    os.close(terminal)
    assert child.wait() == 0
    lines = text.decode().splitlines()
    choices = lines[: lines.index("Files")]
    assert max(map(len, choices)) <= 110 and len(lines) > len(done.stdout.splitlines())


def test_plan_as_json(appliance, tmp_path):
    document = json.loads(appliance("plan", "arithmetic-tiny-int8", "--json").stdout)
    assert list(document) == ["schema_version", "recipe", "plan", "findings"]
    assert document["plan"]["run_dir"] == str(tmp_path / "runs" / "arithmetic-tiny-int8-1")


def test_plan_of_fp8_prints_with_the_finding_attached(appliance):
    done = appliance("plan", "arithmetic-tiny-int8", "--set", "rollout.scheme=fp8")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\n\nFindings on this host\nerror: --set rollout.scheme=fp8: rollout.scheme: " in done.stdout


@pytest.mark.parametrize("arguments", [("check",), ("train",), ("train", "--dry-run")])
def test_fp8_is_refused_here_with_the_reason(appliance, arguments, tmp_path):
    done = appliance(*arguments, "arithmetic-tiny-int8", "--set", "rollout.scheme=fp8-channel")
    assert done.returncode == 3
    assert re.search(r"error: --set \S+: rollout\.scheme: .*`fp8-channel`", done.stdout + done.stderr)
    assert done.stderr.endswith("error: this plan cannot run here: 1 finding above\n")
    assert list(tmp_path.iterdir()) == []


def test_check_says_that_it_can(appliance):
    done = appliance("check", "arithmetic-tiny-int8")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "arithmetic-tiny-int8: this host can run it" or "warning: " in done.stdout


def test_check_as_json(appliance):
    done = appliance("check", "gsm8k-tiny-int8", "--json")
    assert done.returncode == 3
    findings = json.loads(done.stdout)["findings"]
    assert [each["code"] for each in findings if each["severity"] == "error"] == ["data-unreachable"]


@pytest.mark.slow
def test_problems_of_a_recipe_come_with_hints_on_stderr(program):
    done = program("plan", "arithmetic-tiny-int8", "--set", "rollout.shceme=int8", "--set", "correction.cap=abc")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: --set rollout.shceme=int8: rollout.shceme: unknown key\n"
        "hint: did you mean `rollout.scheme`?\n"
        "error: --set correction.cap=abc: correction.cap: expected a number, got the text `abc`\n"
    )


def test_a_hundred_problems_are_the_first_twenty_and_a_count(appliance, tmp_path):
    """In the order of the file: what is wrong in `batch` was found first."""
    unknown = [f"  k{number}: 1" for number in range(60)]
    values = [f"  k{number}: *a" for number in range(40)]
    (tmp_path / "r.yaml").write_text("\n".join(["guard:", *unknown, "  ess: two", "batch:", *values]))
    done = appliance("plan", "r.yaml")
    assert (done.returncode, done.stdout) == (2, "")
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert [re.match(r"error: r.yaml:(\d+): guard\.k(\d+): unknown key$", line)[1] for line in errors[:20]] == [
        str(line) for line in range(2, 22)
    ]
    assert errors[20:] == ["error: and 83 more"]  # 103: two of them are what the file lacks


def test_a_bomb_of_aliases_has_a_short_answer(appliance, tmp_path):
    lines = ["a: &a [x, x]", *(f"k{number}: &k{number} [*a, *a]" for number in range(60))]
    (tmp_path / "r.yaml").write_text("\n".join(lines))
    done = appliance("plan", "r.yaml")
    assert (done.returncode, done.stdout) == (2, "")
    assert "r.yaml:1: a: anchors and aliases are not allowed" in done.stderr
    said = done.stderr.splitlines()
    assert len(said) <= 41 and re.fullmatch(r"error: and \d+ more", said[-1])


def test_a_data_file_with_a_bad_row(appliance, tmp_path):
    (tmp_path / "d.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    done = appliance("train", "gsm8k-tiny-int8", "--set", "task.train_file=d.jsonl")
    assert done.returncode == 3
    first = f"error: {tmp_path}/d.jsonl:1: the field `answer` has no number after `####`"
    assert done.stderr.splitlines()[0] == first
    assert not (tmp_path / "runs").exists()


OWN, NODES = "model.builtin=null", ("cluster.nodes=2", "cluster.run_dir=runs")
GSM8K, TINY = "gsm8k-tiny-int8", "arithmetic-tiny-int8"
BAD = {
    "an unknown key": (TINY, ["rollout.shceme=int8"], 2, "rollout.shceme: unknown key"),
    "an unknown value": (TINY, ["rollout.scheme=int9"], 2, "rollout.scheme: unknown value `int9`"),
    "a wrong type": (TINY, ["trainer.steps=many"], 2, "trainer.steps: expected a whole number, got the text `many`"),
    "batches": (TINY, ["batch.mini_batch_prompts=5"], 2, "mini_batch_prompts: 5 does not divide the 32 prompts"),
    "no data file": (GSM8K, ["task.train_file=no.jsonl"], 3, "no.jsonl: no such file"),
    "no rows": (GSM8K, ["task.train_file=empty.jsonl"], 3, "empty.jsonl: the file has no rows"),
    "no field": (GSM8K, ["task.train_file=lacking.jsonl"], 3, "lacking.jsonl:1: the field `answer` is missing"),
    "no weights": (TINY, [OWN, "model.path=unweighed"], 3, "unweighed: the folder has no weights"),
    "no tokenizer": (TINY, [OWN, "model.path=wordless"], 3, "wordless: the folder has no tokenizer"),
    "no hub": (TINY, [OWN, "model.path=a/b"], 3, "model.path: `a/b` is not a folder and not in the hub's cache"),
    "read-only": (TINY, ["cluster.run_dir=/proc/sys"], 3, "cluster.run_dir: /proc/sys cannot be written"),
    "a port": (TINY, [*NODES, "cluster.port={port}"], 3, "cluster.port: in use on this host: {port}"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_named_has_its_code_and_leaves_nothing_half_made(tmp_path, monkeypatch, capsys, what):
    recipe, sets, code, words = BAD[what]
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "lacking.jsonl").write_text('{"question": "1+1?"}\n')
    for name, part in (("unweighed", "tokenizer.json"), ("wordless", "model.safetensors")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / part).write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    set_hub(monkeypatch, HF_HUB_OFFLINE="1", HF_HUB_CACHE=str(tmp_path / "hub"))
    with socket.create_server(("", 0)) as taken, pytest.raises(SystemExit) as ended:
        port = taken.getsockname()[1]
        options = [part for each in sets for part in ("--set", each.format(port=port))]
        monkeypatch.setattr(sys, "argv", ["appliance", "train", recipe, *options])
        cli.main()
    errors = [line for line in "".join(capsys.readouterr()).splitlines() if line.startswith("error: ")]
    assert ended.value.code == code
    assert any(words.format(port=port) in line for line in errors), errors
    assert sorted(tmp_path.rglob("*")) == before


def test_a_name_in_use(appliance, tmp_path):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    done = appliance("train", "arithmetic-tiny-int8", "--name", "mine", "--dry-run")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"error: --name: `mine` is in use: {tmp_path}/runs/mine\nhint: choose another one, or leave it out\n"
    )


@pytest.mark.parametrize("name", ["../mine", "a/b", "", ".hidden", "a b"])
def test_a_name_is_one_component(appliance, name, tmp_path):
    done = appliance("train", "arithmetic-tiny-int8", "--name", name)
    assert done.returncode == 2
    assert done.stderr == (
        f"error: --name: the text `{name}` is not a name\n"
        "hint: use letters, digits, `.`, `_` and `-`, at most 80, no space or slash\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_the_next_free_number(appliance, tmp_path):
    (tmp_path / "runs" / "arithmetic-tiny-int8-7").mkdir(parents=True)
    document = json.loads(appliance("plan", "arithmetic-tiny-int8", "--json").stdout)
    assert document["plan"]["name"] == "arithmetic-tiny-int8-8"


def test_resume_of_what_is_no_run_is_refused(appliance, tmp_path):
    done = appliance("train", "arithmetic-tiny-int8", "--resume", "yes")
    assert (done.returncode, done.stderr) == (
        2,
        "error: --resume yes: not the folder of a run, nor of a checkpoint in one\n"
        "hint: use `auto`, `never`, the folder of a run, or one of its checkpoints/global_step_<n>\n",
    )
    assert list(tmp_path.iterdir()) == []


def test_dry_run_leaves_nothing(appliance, tmp_path):
    done = appliance("train", "arithmetic-tiny-int8", "--dry-run")
    assert done.returncode == 0
    assert done.stdout.startswith("arithmetic-tiny-int8-1: 30 steps ")
    assert list(tmp_path.iterdir()) == []


def test_dry_run_in_a_container_prints_the_plan(appliance, tmp_path):
    done = appliance("train", "arithmetic-tiny-int8", "--in-container", "--dry-run", "--json", "--name", "mine")
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert list(document) == ["schema_version", "recipe", "plan", "findings"]
    assert document["plan"]["run_dir"] == str(tmp_path / "runs" / "mine")
    resumed = appliance("train", "arithmetic-tiny-int8", "--in-container", "--dry-run", "--resume", "auto")
    note = "note: the plan of a run that is resumed is made in the container, and not shown by a dry run\n"
    assert (resumed.returncode, resumed.stdout, resumed.stderr) == (0, "", note)
    assert list(tmp_path.iterdir()) == []


def test_options_that_would_do_nothing_are_refused(appliance, tmp_path):
    done = appliance("train", "arithmetic-tiny-int8", "--dry-run", "--force", "--image", "b:1")
    assert (done.returncode, done.stdout, done.stderr) == (
        2,
        "",
        "error: --force: does nothing without --resume\nhint: add --resume, or leave it out\n"
        "error: --image: does nothing without --in-container\nhint: add --in-container, or leave it out\n",
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "planned"), [((), "arithmetic-tiny-int8-1"), (("--name", "mine"), "mine")])
def test_a_run_root_that_may_not_be_entered_is_a_warning_of_a_plan(tmp_path, monkeypatch, capsys, name, planned):
    """Root may enter any folder, so the question is what fails."""
    root = tmp_path / "locked" / "runs"
    exists, is_dir = Path.exists, Path.is_dir

    def locked(ask):
        def answer(path, *rest):
            if path.is_relative_to(root):
                raise PermissionError(13, "Permission denied", str(path))
            return ask(path, *rest)

        return answer

    monkeypatch.setattr(Path, "exists", locked(exists))
    monkeypatch.setattr(Path, "is_dir", locked(is_dir))
    for words, code in ((("plan",), 0), (("train", "--dry-run"), 3)):
        options = ["--set", f"cluster.run_dir={root}", *name]
        monkeypatch.setattr(sys, "argv", ["appliance", *words, "arithmetic-tiny-int8", *options])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        assert (ended.value.code or 0) == code
        if not code:
            assert f"  run folder       {root / planned}\n" in captured.out
            assert captured.err == f"warning: cluster.run_dir: {root}: cannot be written\n"


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("plan", "arithmetic-tiny-int8"), ("recipes", "ls"), ("--help",)])
def test_stdout_on_a_full_disk_is_no_fault_of_ours(tmp_path, arguments):
    command = [sys.executable, "-m", "appliance", *arguments]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        3,
        "error: stdout: cannot be written: No space left on device\nhint: free some space, or send it elsewhere\n",
    )


@pytest.mark.parametrize(
    ("closed", "code", "stderr"),
    [
        (1, 3, "error: stdout: cannot be written: Bad file descriptor\nhint: free some space, or send it elsewhere\n"),
        (2, 0, ""),
    ],
)
@pytest.mark.parametrize("arguments", ["recipes ls", "--help"])
def test_a_stream_that_was_closed_before(tmp_path, arguments, closed, code, stderr):
    shell = f'"{sys.executable}" -m appliance {arguments} {closed}>&-'
    done = subprocess.run(["sh", "-c", shell], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, stderr)


def test_a_run_folder_that_cannot_be_written(appliance, tmp_path):
    (tmp_path / "runs").write_text("a file")
    done = appliance("check", "arithmetic-tiny-int8")
    assert done.returncode == 3
    assert f"error: cluster.run_dir: {tmp_path}/runs is not a folder\n" in done.stdout


@pytest.mark.parametrize(("restarts", "may_restart"), [(0, False), (2, True)])
def test_the_first_attempt_is_told_whether_another_may_follow(tmp_path, monkeypatch, restarts, may_restart):
    """By it the page of a run that failed goes on loading itself, or not. Its code goes to what decides."""
    heard = []
    monkeypatch.setattr(
        command, "examine", lambda recipe, *, run_dir, **_: (build_plan(recipe, run_dir=run_dir, host=HOST), HOST, [])
    )
    monkeypatch.setattr(command, "run_training", lambda plan, *, may_restart, **_: heard.append(may_restart) or 5)
    monkeypatch.setattr(command.Attempts, "through_faults", lambda _, code, run_dir: heard.append(code) or 75)
    sets = [f"trainer.max_restarts={restarts}", f"cluster.run_dir={tmp_path}"]
    assert cli.train("arithmetic-tiny-int8", sets=sets) == 75
    assert heard == [may_restart, 5]


def test_recipes_ls_show_cp(appliance, tmp_path):
    names = [line.split()[0] for line in appliance("recipes", "ls").stdout.splitlines()]
    assert "arithmetic-tiny-int8" in names
    shown = appliance("recipes", "show", "arithmetic-tiny-int8").stdout
    assert appliance("recipes", "cp", "arithmetic-tiny-int8", "mine.yaml").stdout == "mine.yaml\n"
    assert (tmp_path / "mine.yaml").read_text() == shown
    again = appliance("recipes", "cp", "arithmetic-tiny-int8", "mine.yaml")
    assert (again.returncode, again.stderr) == (2, "error: mine.yaml: the file exists\nhint: give another name\n")
    missing = appliance("recipes", "cp", "arithmetic-tiny-int8", "sub/")
    assert missing.returncode == 2
    assert missing.stderr == "error: sub/: no such folder\nhint: name an existing folder, or a file\n"
    assert not (tmp_path / "sub").exists()


def test_schema_is_a_json_schema(appliance):
    schema = json.loads(appliance("schema").stdout)
    assert schema["additionalProperties"] is False
    assert "rollout" in schema["properties"]


def test_version(appliance):
    versions = json.loads(appliance("version", "--json").stdout)
    assert versions["flashrl-appliance"]
    assert versions["verl"] == "0.9.1"
    assert appliance("version").stdout.startswith(f"flashrl-appliance {versions['flashrl-appliance']}\n")


def test_unknown_scheme_for_the_benchmark(appliance):
    done = appliance("bench", "arithmetic-tiny-int8", "--schemes", "bf16,int9")
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == "error: --schemes: unknown value `int9`"


@pytest.mark.parametrize(
    ("error", "shown"), [("KeyError('x')", "KeyError: 'x'"), ("OSError(28, 'x')", "OSError: [Errno 28] x")]
)
def test_our_own_fault_is_told_as_such(error, shown, appliance, tmp_path):
    """Something that nobody foresaw, made to happen."""
    code = (
        "import sys; from appliance import cli\n"
        "from appliance.recipe import library\n"
        f"def broken(): raise {error}\n"
        "library.names = broken\n"
        "sys.argv = ['appliance', 'recipes', 'ls', *sys.argv[1:]]\n"
        "cli.main()\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path), "NO_COLOR": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    (file,) = tmp_path.glob("appliance-error-*.txt")
    assert (done.returncode, done.stderr) == (
        1,
        f"error: {shown}\nhint: this is our own fault, please report it with {file}\n",
    )
    assert "Traceback" in Path(file).read_text()


def test_debug_shows_the_traceback(appliance):
    done = appliance("--debug", "plan", "no-such-recipe")
    assert done.returncode == 2
    assert "Traceback" in done.stderr


def test_no_recipe_name_of_that_kind(appliance):
    done = appliance("plan", "arithmetic-tiny-int9")
    assert done.stderr == (
        "error: arithmetic-tiny-int9: no shipped recipe has this name, and no file\n"
        "hint: did you mean `arithmetic-tiny-int8`?\n"
    )


def test_no_hidden_command_is_suggested(appliance):
    done = appliance("help")
    assert done.returncode == 2
    assert "No such command 'help'." in done.stderr and "health" not in done.stderr
    assert "Did you mean 'status'" in appliance("statu").stderr


@pytest.mark.parametrize(("group", "typed", "meant"), [("data", "previw", "preview"), ("recipes", "shwo", "show")])
def test_a_mistyped_command_of_a_group_is_suggested(appliance, group, typed, meant):
    done = appliance(group, typed, "arithmetic-tiny-int8")
    assert done.returncode == 2
    assert f"No such command '{typed}'. Did you mean '{meant}'?" in " ".join(done.stderr.split())


@pytest.mark.slow
def test_a_reader_that_is_gone_is_no_fault_of_ours(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "appliance", "recipes", "ls"]
    done = subprocess.run(command, cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_status_of_no_run(appliance):
    done = appliance("status", "nothing")
    assert done.returncode == 2
    assert done.stderr.startswith("error: run `nothing`: ")


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("check", "nosuch")])
def test_the_code_stays_where_nobody_reads_stderr(tmp_path, arguments):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "appliance", *arguments]
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=writer, check=False)
    os.close(writer)
    assert done.returncode == 2
