"""What the commands refuse before any work, what they leave alone, and how a child's own word reaches the user."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from appliance.cli import app
from appliance.errors import EngineError, NumericsError, PreflightError, RecipeError
from appliance.launch import side_job
from appliance.launch.side_job import run_child
from appliance.plan.build import build_plan
from appliance.preflight.probes import read_host
from appliance.profile import command
from appliance.profile.child import make_profile
from appliance.profile.command import table
from appliance.profile.job import job_of_plan
from appliance.quant.files import PROFILE_FILE, read_file_header
from appliance.recipe.load import load_recipe
from appliance.recipe.schema import Recipe
from appliance.record.events import EVENTS_FILE, parse_event
from appliance.record.plan import RunPlan
from appliance.tasks.prepare import prepare


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "run_child", lambda *args, **kwargs: pytest.fail("a child was started"))
    monkeypatch.setattr(command, "make_inputs", lambda *args, **kwargs: pytest.fail("inputs were made"))


def loaded(file: str, *sets: str) -> Recipe:
    return load_recipe(file, sets=sets)


def planned(file: str, *, run: str = "one") -> RunPlan:
    recipe = loaded(file)
    run_dir = Path(recipe.cluster.run_dir) / run
    run_dir.mkdir(parents=True)
    plan = build_plan(recipe, run_dir=run_dir, host=read_host(run_dir))
    prepare(plan)
    return plan


def error_of(*arguments: str) -> BaseException:
    error = CliRunner().invoke(app, list(arguments)).exception
    assert error is not None
    return error


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("command_", "output", "message"),
    [
        ("profile", "/proc/x", "/proc/x: No such file or directory"),
        ("profile", "FILE", "FILE: File exists"),
        ("setup", "/proc/x/q.yaml", "/proc/x: No such file or directory"),
        ("setup", "FILE/q.yaml", "FILE: File exists"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_any_work(
    file: str, command_: str, output: str, message: str, tmp_path: Path
) -> None:
    (taken := tmp_path / "taken").touch()
    error = error_of(command_, file, "-o", output.replace("FILE", str(taken)))
    assert isinstance(error, PreflightError), error
    assert (error.message, error.hint) == (message.replace("FILE", str(taken)), "set -o to another folder")


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("name", ["profile", "setup", "verify", "bench"])
def test_a_run_folder_that_cannot_be_made_is_refused(file: str, name: str, tmp_path: Path) -> None:
    output = ("-o", str(tmp_path / "out")) if name in ("profile", "setup") else ()
    error = error_of(name, file, "--set", "cluster.run_dir=/proc/x", *output)
    assert isinstance(error, PreflightError), error
    assert error.message == "/proc/x: No such file or directory"
    assert error.hint == "set cluster.run_dir to another folder"


@pytest.mark.usefixtures("no_work")
def test_setup_overwrites_nothing(file: str, tmp_path: Path) -> None:
    (output := tmp_path / "q.yaml").write_text("mine")
    (tmp_path / "q-profile").mkdir()
    with pytest.raises(RecipeError) as raised:
        command.run_setup(loaded(file), output=output)
    hint = "name a new file, or remove what is there"
    assert raised.value.problems == [
        (f"-o: {path} is there already and is not overwritten", hint) for path in (output, tmp_path / "q-profile")
    ]
    with pytest.raises(RecipeError) as raised:
        command.run_setup(loaded(file), output=tmp_path)
    assert raised.value.problems == [(f"-o: {tmp_path} is there already and is not overwritten", hint)]
    assert output.read_text() == "mine"


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(("typed", "shown"), [(".", "."), ("", "."), ("/", "/")])
def test_setup_refuses_a_folder_without_a_name(file: str, typed: str, shown: str) -> None:
    error = error_of("setup", file, "-o", typed)
    assert isinstance(error, RecipeError), error
    assert error.message == f"-o: {shown} is there already and is not overwritten"


def test_a_donor_whose_name_no_file_can_have_is_refused(tmp_path: Path) -> None:
    long = "a" * 300
    error = error_of("profile", "--model", long, "--quantized", str(tmp_path), "-o", str(tmp_path / "out"))
    assert isinstance(error, RecipeError), error
    assert error.problems[0] == (f"--model {long}: not a folder with config.json", "give a checkpoint's folder")


@pytest.mark.usefixtures("no_work")
@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(("length", "beside_only"), [(300, False), (250, True)])
def test_setup_refuses_a_name_that_no_file_can_have(file: str, length: int, beside_only: bool) -> None:
    """Before any work: the profile would be made, and then lost."""
    output, why = Path("a" * length), "a path has at most 1024 bytes, and 255 in each of its names"
    with pytest.raises(RecipeError) as raised:
        command.run_setup(loaded(file), output=output)
    paths = [f"{output}-profile"] if beside_only else [str(output), f"{output}-profile"]
    assert raised.value.problems == [(f"-o: {path}: {why}", "give another name") for path in paths]


@pytest.mark.parametrize("name", ["profile", "setup"])
def test_preflight_stops_these_commands_too(
    file: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = {"profile": command.run_profile, "setup": command.run_setup}[name]
    with pytest.raises(PreflightError) as raised:
        run(loaded(file, "model.path=/nonexistent"), output=tmp_path / "new" / "out")
    assert raised.value.message == "this plan cannot run here: 1 finding above"
    assert capsys.readouterr().err.splitlines() == [
        "error: --set model.path=/nonexistent: model.path: /nonexistent: no such folder",
        "hint: correct the path",
    ]
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["profile", "setup"])
def test_a_disk_that_fills_is_named_and_nothing_is_left(
    file: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(plan: object, *, output: Path) -> Path:
        output.mkdir(exist_ok=True)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(command, "_make", fill)
    run = {"profile": command.run_profile, "setup": command.run_setup}[name]
    with pytest.raises(PreflightError) as raised:
        run(loaded(file), output=tmp_path / "new" / "out")
    full = tmp_path / "new" / {"profile": "out", "setup": "out-profile"}[name]
    assert raised.value.message == f"{full}: no space left"
    assert raised.value.hint == "free some space, or set -o to a roomier place"
    assert not (tmp_path / "new").exists(), "what is there already would be refused the next time"


def test_a_childs_own_word_and_code_reach_the_user(file: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as raised:
        command.run_profile(loaded(file, "task.max_prompt_tokens=1"), output=tmp_path / "new" / "out")
    message = "task.max_prompt_tokens: 1 leaves 0 training and 0 validation problems"
    assert raised.value.problems == [(message, "raise it")]
    assert not (tmp_path / "new").exists(), "an empty folder is taken back"
    assert list((tmp_path / "runs").glob("*.log")) == [], "the error says it all"


CHILD = """
from pathlib import Path
from appliance.errors import {kind}
from appliance.finding import fault
from appliance.record.events import append_failure
append_failure(Path({folder!r}), {kind}({arguments}))
raise SystemExit({kind}.exit_code)
"""


@pytest.mark.parametrize(
    ("kind", "arguments", "expected", "text"),
    [
        ("RecipeError", "[fault((), 'a', 'x'), fault((), 'b', 'x')]", RecipeError, "a\nb"),
        ("NumericsError", "'not finite', hint='x'", NumericsError, "not finite"),
        ("ApplianceError", "'OSError: disk', hint='x'", EngineError, "OSError: disk"),
    ],
)
def test_a_child_fails_as_the_kind_that_it_told(
    kind: str, arguments: str, expected: type[Exception], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "work").mkdir()
    (tmp_path / "failing_child.py").write_text(CHILD.format(kind=kind, folder=str(folder), arguments=arguments))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(expected) as raised:
        run_child(["failing_child"], command="some", folder=folder, env={})
    assert (type(raised.value), raised.value.message) == (expected, text)
    if kind == "RecipeError":
        assert raised.value.problems == [("a", ""), ("b", "x")]
    log = tmp_path / "some-failed.log"
    assert raised.value.hint in ("", "x") if kind != "ApplianceError" else raised.value.hint == f"its log: {log}"
    assert log.exists() == (kind == "ApplianceError")


def test_a_log_whose_place_is_taken_stays_under_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by another user's, in a run root of many."""
    (folder := tmp_path / "work").mkdir()
    (tmp_path / "some-failed.log").mkdir()
    (tmp_path / "dead_child.py").write_text("print('error: it broke'); raise SystemExit(1)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(EngineError, match="some: dead_child ended with code 1") as raised:
        run_child(["dead_child"], command="some", folder=folder, env={})
    (log,) = tmp_path.glob("some-failed-*.log")
    assert raised.value.hint == f"its log: {log}"
    assert log.read_text() == "error: it broke\n"


def test_what_a_child_leaves_in_its_temporary_folder_goes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM leaves sockets and its file store."""
    (tmp_path / "leaving_child.py").write_text("import tempfile; print(tempfile.mkstemp()[1])")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    before = set(os.listdir(tempfile.gettempdir()))
    run_child(["leaving_child"], command="some", folder=tmp_path, env={})
    left = Path((tmp_path / "child.log").read_text().strip())
    assert left.parent.name not in before and not left.parent.exists()


def test_a_long_temporary_folder_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is made in /tmp, which may be closed: no child would be told of it."""
    (long := tmp_path / ("t" * 40)).mkdir()
    (tmp_path / "telling_child.py").write_text(
        "import os; print(os.environ['TMPDIR'], os.listdir(os.environ['TMPDIR']))"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.setattr(side_job, "short_root", lambda *_, **__: Path("/proc/closed"))
    run_child(["telling_child"], command="some", folder=tmp_path, env={})
    assert (tmp_path / "child.log").read_text().strip() == f"{long} []"


def test_a_folder_that_the_recipe_names_is_only_read(file: str, tmp_path: Path) -> None:
    profile_folder = tmp_path / "given"
    make_profile(job_of_plan(planned(file)).replace(target=str(profile_folder)))
    (profile_folder / "quantization.yaml").write_text("mine")
    assert command.run_profile(loaded(file, f"quantization.profile={profile_folder}"), output=None) == 0
    assert (profile_folder / "quantization.yaml").read_text() == "mine"
    assert sorted(os.listdir(profile_folder)) == [PROFILE_FILE, "quantization.yaml"]


def test_the_scheme_of_a_recipe_is_not_given_beside_it(file: str) -> None:
    error = error_of("profile", file, "--scheme", "fp8-channel")
    assert isinstance(error, RecipeError), error
    assert error.problems == [
        ("--scheme fp8-channel: a recipe's scheme is its rollout.scheme", "use --set rollout.scheme=fp8-channel")
    ]


def test_the_donors_form_has_no_recipe_to_set_keys_in(tmp_path: Path) -> None:
    error = error_of("profile", "--model", "m", "--quantized", "q", "-o", str(tmp_path / "o"), "--set", "seed=1")
    assert isinstance(error, RecipeError), error
    assert error.problems == [("--set seed=1: there is no recipe to set it in", "leave it out")]


def test_a_refused_donor_leaves_nothing_behind(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    model, output = tmp_path / "model", tmp_path / "new" / "out"
    with pytest.raises(RecipeError) as raised:
        command.run_donor(model=str(model), quantized=model, scheme=command.Scheme.INT8, output=output)
    hint = f"{model} must be a W8A8 checkpoint (compressed-tensors, int8, per channel, symmetric) of {model}"
    problems = raised.value.problems
    assert problems[0] == (
        "--quantized: model.layers.0.self_attn.q_proj.weight_scale is missing in the donor",
        "",
    )
    assert problems[-1] == ("--quantized: and 4 more", hint)
    assert len(problems) == 11
    assert not (tmp_path / "new").exists()
    assert list(temporary.iterdir()) == []


def test_the_same_model_elsewhere_is_no_other_model(file: str, tmp_path: Path) -> None:
    """A profile in the cache was made under the model's name of then; its hash says that it is the same."""
    plan = planned(file)
    make_profile(job_of_plan(plan).replace(target=str(tmp_path / "given")))
    (tmp_path / "model").rename(tmp_path / "moved")
    assert plan.profile is not None
    with_profile = plan.replace(
        profile=plan.profile.replace(source=str(tmp_path / "given")),
        weights=plan.weights.replace(name_or_path=str(tmp_path / "moved")),
    )
    command.profile_child(with_profile)
    events = [parse_event(line) for line in (Path(plan.run_dir) / EVENTS_FILE).read_text().splitlines()]
    assert [each.what for each in events if each and each.kind == "note"] == []


def test_the_table_calls_the_model_as_the_recipe_does_and_counts_one_norm(file: str) -> None:
    header = read_file_header(make_profile(job_of_plan(planned(file))))
    with_one_norm = {**header, "smoothing": header["smoothing"][:1]}
    lines = table(with_one_norm, folder="f", model="here/model")
    assert lines[0] == "profile of here/model for int8 (calibrated)"
    text = (
        "smoothing     strength 0.5: 1 norm, each with every layer that reads it; smoothing others would gain nothing"
    )
    assert text in lines
    linears = [{"source": f"l.{place}.{name}_proj.weight"} for place in range(2) for name in ("up", "v")]
    text = "smoothing     strength 0.5: 1 norm, 2 up_proj, 2 v_proj, each with every layer that reads it; "
    assert text + "smoothing others would gain nothing" in table(
        {**with_one_norm, "smoothing": [*with_one_norm["smoothing"], *linears]}, folder="f"
    )
