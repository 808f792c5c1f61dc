"""The program from outside: a process, its exit code, its two streams."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

HELP_LIMIT_S = 0.4
PLAN_LIMIT_S = 1.0


@pytest.fixture
def appliance(tmp_path):
    """Runs the program in an empty folder, offline and without colours."""

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "COLUMNS": "200", **variables}
        command = [sys.executable, "-m", "appliance", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    return run


def fastest_s(run, *arguments: str) -> float:
    """The best of five: the machine may be busy, the program cannot be faster than it is."""
    best = float("inf")
    for _ in range(5):
        started = time.monotonic()
        assert run(*arguments).returncode == 0
        best = min(best, time.monotonic() - started)
    return best


def test_help_starts_in_a_blink(appliance):
    assert fastest_s(appliance, "--help") < HELP_LIMIT_S


def test_plan_is_quick(appliance):
    assert fastest_s(appliance, "plan", "arithmetic-tiny-int8") < PLAN_LIMIT_S


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
    launched = ["train", "plan", "check", "bench", "verify", "profile", "setup", "convert-profile", "compare"]
    assert names == [*launched, "join", "data", "status", "logs", "report", "export", "schema", "version", "recipes"]


@pytest.mark.parametrize("arguments", [("trian",), ("plan",), ("plan", "arithmetic-tiny-int8", "--sett", "x=1")])
def test_usage_errors_exit_2(appliance, arguments):
    done = appliance(*arguments)
    assert (done.returncode, done.stdout) == (2, "")


def test_plan_prints_recipe_choices_and_command(appliance, tmp_path):
    done = appliance("plan", "arithmetic-tiny-int8")
    assert (done.returncode, done.stderr) == (0, "")
    headings = [line for line in done.stdout.splitlines() if line.startswith("# ")]
    assert headings[:5] == ["# recipe, resolved", "# derived", "# needs, estimated", "# paths", "# child"]
    assert list(tmp_path.iterdir()) == []


def test_plan_as_json(appliance, tmp_path):
    document = json.loads(appliance("plan", "arithmetic-tiny-int8", "--json").stdout)
    assert list(document) == ["schema_version", "recipe", "plan", "findings"]
    assert document["plan"]["run_dir"] == str(tmp_path / "runs" / "arithmetic-tiny-int8-1")


def test_plan_of_fp8_prints_with_the_finding_attached(appliance):
    done = appliance("plan", "arithmetic-tiny-int8", "--set", "rollout.scheme=fp8")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\n# findings on this host\nerror: rollout.scheme: " in done.stdout


@pytest.mark.parametrize("arguments", [("check",), ("train",), ("train", "--dry-run")])
def test_fp8_is_refused_here_with_the_reason(appliance, arguments, tmp_path):
    done = appliance(*arguments, "arithmetic-tiny-int8", "--set", "rollout.scheme=fp8-channel")
    assert done.returncode == 3
    assert re.search(r"error: rollout\.scheme: .*`fp8-channel`", done.stdout + done.stderr)
    assert done.stderr.endswith("error: this host cannot run the plan: 1 finding above\n")
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


def test_problems_of_a_recipe_come_with_hints_on_stderr(appliance):
    done = appliance("plan", "arithmetic-tiny-int8", "--set", "rollout.shceme=int8", "--set", "correction.cap=abc")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: --set rollout.shceme=int8: rollout.shceme: unknown key\n"
        "hint: did you mean `rollout.scheme`?\n"
        "error: --set correction.cap=abc: correction.cap: expected a number, got the text `abc`\n"
    )


def test_a_data_file_with_a_bad_row(appliance, tmp_path):
    (tmp_path / "d.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    done = appliance("train", "gsm8k-tiny-int8", "--set", "task.train_file=d.jsonl")
    assert done.returncode == 3
    first = f"error: {tmp_path}/d.jsonl:1: the field `answer` has no number after `####`"
    assert done.stderr.splitlines()[0] == first
    assert not (tmp_path / "runs").exists()


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
    assert done.stdout.startswith("# recipe, resolved\n")
    assert list(tmp_path.iterdir()) == []


def test_a_run_folder_that_cannot_be_written(appliance, tmp_path):
    (tmp_path / "runs").write_text("a file")
    done = appliance("check", "arithmetic-tiny-int8")
    assert done.returncode == 3
    assert f"error: cluster.run_dir: {tmp_path}/runs is not a folder\n" in done.stdout


def test_recipes_ls_show_cp(appliance, tmp_path):
    names = [line.split()[0] for line in appliance("recipes", "ls").stdout.splitlines()]
    assert "arithmetic-tiny-int8" in names
    shown = appliance("recipes", "show", "arithmetic-tiny-int8").stdout
    assert appliance("recipes", "cp", "arithmetic-tiny-int8", "mine.yaml").stdout == "mine.yaml\n"
    assert (tmp_path / "mine.yaml").read_text() == shown
    again = appliance("recipes", "cp", "arithmetic-tiny-int8", "mine.yaml")
    assert (again.returncode, again.stderr) == (2, "error: mine.yaml: the file exists\nhint: give another name\n")


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


def test_our_own_fault_is_told_as_such(appliance, tmp_path):
    """Something that nobody foresaw, made to happen."""
    code = (
        "import sys; from appliance import cli\n"
        "from appliance.recipe import library\n"
        "def broken(): raise KeyError('x')\n"
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
        f"error: KeyError: 'x'\nhint: this is our own fault, please report it with {file}\n",
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


def test_status_of_no_run(appliance):
    done = appliance("status", "nothing")
    assert done.returncode == 2
    assert done.stderr.startswith("error: run `nothing`: ")
