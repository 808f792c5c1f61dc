"""Input that wants to run: other overrides, interpolation, variables, tags of YAML, code and pickles of a model."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import pytest
from fuzz_surface import attempt
from plans import HOST, make_plan, with_model

from appliance import console
from appliance.errors import RecipeError
from appliance.finding import Finding, Severity
from appliance.guard.policy import MismatchBounds
from appliance.launch.command import run_check, run_plan
from appliance.plan.build import build_plan
from appliance.preflight.checks import judge
from appliance.preflight.inputs import read_inputs
from appliance.recipe.load import load_recipe
from appliance.record.events import append_event, parse_event, parse_metrics
from appliance.record.session import RunRecord, RunStatus, log_dir, write_record
from appliance.record.state import RunState, fold
from appliance.report.display import panel
from appliance.report.logs import print_logs
from appliance.report.summary import print_status
from appliance.terms.environment import child_env

INJECTIONS = [
    *("a,b", "${oc.env:HOME}", "\\${oc.env:HOME}", "+x=1", "++trainer.nnodes=9", "~trainer", "x=1", "[a,b]", "{a: 1}"),
    *("x' trainer.nnodes=9 'y", 'x" trainer.nnodes=9', "x\\' trainer.nnodes=9", "null", "true", "1e5", "choice(1,2)"),
    *("$(touch x)", "`touch x`", "; touch x", "--config-dir=/tmp", "-m", "a b", "@x", "hydra/launcher=x", "é\u202ex"),
]
MARKED = "from pathlib import Path\nPath({marker!r}).touch()\nclass Config: pass\nclass Tokenizer: pass\n"


def planned(room: Path, *, model: str, train_file: str, run_dir: str = "runs"):
    text = {
        "model": {"path": model},
        "task": {"kind": "gsm8k", "train_file": train_file},
        "trainer": {"steps": 1},
        "cluster": {"run_dir": run_dir},
    }
    (room / "r.yaml").write_text(json.dumps(text))
    return build_plan(load_recipe(str(room / "r.yaml")), run_dir=room / run_dir / "r-1", host=HOST)


@pytest.mark.parametrize("text", INJECTIONS)
def test_a_text_of_a_recipe_is_never_another_override(room: Path, text: str) -> None:
    """The keys of the child are the same for every text, and Hydra reads the text itself, without resolving it."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    plain = planned(room, model="./plain", train_file="plain", run_dir="plain")
    hostile = planned(room, model=f"./{text}", train_file=f"./{text}", run_dir=f"./{text}")
    keys, plain_keys = ([each.partition("=")[0] for each in plan.argv] for plan in (hostile, plain))
    assert keys == plain_keys
    parser = OverridesParser.create()
    wanted = {"actor_rollout_ref.model.path": str(Path(f"./{text}").absolute())}
    wanted["trainer.default_local_dir"] = str(room / text / "r-1/checkpoints")
    for key, value in wanted.items():
        found = parser.parse_override(next(each for each in hostile.argv if each.startswith(f"{key}=")))
        assert not found.is_sweep_override()
        held = OmegaConf.create({"value": found.value()})
        assert OmegaConf.to_container(held, resolve=True) == {"value": value}


@pytest.mark.parametrize("key", ["model.path", "task.train_file", "cluster.run_dir", "quantization.profile"])
@pytest.mark.parametrize("text", ["x\ntrainer.nnodes=9", "x\x00y", "x\ty", "\x1b[2J", "\ud800", "x\r", "\x85"])
def test_a_control_character_is_refused(room: Path, key: str, text: str) -> None:
    section, _, name = key.partition(".")
    (room / "r.yaml").write_text(json.dumps({"extends": "gsm8k-tiny-int8", section: {name: text}}))
    with pytest.raises(RecipeError, match="control character"):
        load_recipe(str(room / "r.yaml"))


def test_a_recipe_gives_the_child_no_variable_of_its_own(room: Path) -> None:
    """Names are ours; of a recipe's texts only the path of the run's folder is in a value."""
    known = {
        name
        for name, _ in child_env(
            room, is_cpu=True, threads=1, kv_cache_gb=1, offline=True, backends=(), own_engine=True
        )
    }
    plain = dict(planned(room, model="./a", train_file="b").env)
    for text in ("LD_PRELOAD=/tmp/x.so", "x PYTHONPATH=/tmp", "${PATH}"):
        made = dict(planned(room, model=f"./{text}", train_file=text).env)
        assert set(made) <= known
        assert made == plain


def test_tags_of_yaml_do_nothing_but_be_refused(room: Path) -> None:
    marker = room / "marker"
    for tag in ("object/apply:os.system", "object/new:os.system", "name:os.system", "module:os", "object:x.y"):
        (room / "r.yaml").write_text(f'name: !!python/{tag} ["touch {marker}"]\n')
        assert attempt("recipe text", lambda: load_recipe(str(room / "r.yaml")), folder=room) is None
    assert not marker.exists()


def test_what_is_said_on_a_terminal_is_text() -> None:
    said = console.printable("\x1b]0;title\x07\u202eabc\x9b2J\ud800\r\nnext\tcolumn é")
    assert said == "\\x1b]0;title\\x07\\u202eabc\\x9b2J\\ud800\\r\nnext\tcolumn é"


HOSTILE = "\x1b]0;owned\x07\u202e\ud800"
SHOWN = "\\x1b]0;owned\\x07\\u202e\\ud800"
READ = SHOWN.replace("\\ud800", "?")  # what a file has of half a character


@contextmanager
def strict_stdout() -> Iterator[Callable[[], str]]:
    """As a terminal's: unlike pytest's it takes no half of a character."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict")
    with redirect_stdout(stream):
        yield lambda: stream.buffer.getvalue().decode()  # type: ignore[attr-defined]


def hostile_run(room: Path) -> Path:
    run_dir = room / "runs/r-1"
    log_dir(run_dir, attempt=1).mkdir(parents=True)
    make_plan(run_dir).write(run_dir / "plan.json")
    write_record(run_dir, RunRecord(RunStatus.FAILED, exit_code=5, reason=HOSTILE))
    return run_dir


def test_status_of_a_hostile_run_is_text(room: Path) -> None:
    run_dir = hostile_run(room)
    append_event(run_dir, kind="failure", what="x", hint=HOSTILE, exit_code=5)
    with strict_stdout() as printed:
        print_status(str(run_dir), run_root=room)
        rows = dict(line.split(maxsplit=1) for line in printed().splitlines())
    assert (rows["state"], rows["hint"]) == (f"failed (exit code 5): {READ}", READ)


@pytest.mark.parametrize("follow", [False, True])
def test_logs_are_text_without_colours(room: Path, follow: bool) -> None:
    run_dir = hostile_run(room)
    said = HOSTILE[:-1] + "\x1b[36m(pid=1)\x1b[0m 10%\r20%\r\n"
    (log_dir(run_dir, attempt=1) / "train.log").write_bytes(said.encode())
    with strict_stdout() as printed:
        print_logs(str(run_dir), run_root=room, follow=follow)
        lines = printed().splitlines()
    assert [line for line in lines if line] == [SHOWN[:-6] + "(pid=1) 10%", "20%"]


def test_the_panel_of_a_hostile_run_is_text(room: Path) -> None:
    state = RunState(2, MismatchBounds())
    for kind in ("phase", "progress", "note"):
        said = {"time": 1.0, "kind": kind, "what": HOSTILE, "note": HOSTILE, "done": 1, "total": 2}
        state = fold(state, parse_event(json.dumps(said)))
    step = {"step": 1, "time_s": 1.0, "reward_mean": 0.5, "scheme": HOSTILE, "guard_level": HOSTILE}
    state = fold(state, parse_metrics(json.dumps(step)))
    drawn = console.plain_text(panel(make_plan(room / "runs/r-1"), state, now=2.0, columns=200), columns=200)
    assert drawn.count(READ) == 6
    assert not set(HOSTILE) & set(drawn) - set("]0;owned")


def test_findings_of_check_are_text(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = planned(room, model="./m", train_file="t")
    found = [Finding(Severity.WARNING, "x", (HOSTILE,), HOSTILE, HOSTILE)]
    monkeypatch.setattr("appliance.launch.command.examine", lambda *_, **__: (made, HOST, found))
    monkeypatch.chdir(room)
    with strict_stdout() as printed:
        run_check("arithmetic-tiny-int8", json_mode=False)
        run_plan(load_recipe("arithmetic-tiny-int8"), name=None, full=False, json_mode=False)
        text = printed()
    assert text.count(SHOWN) == 6
    assert not set(text) & set("\x1b\x07\u202e\ud800")


def model_folder(room: Path, *, weights: str) -> Path:
    folder = room / "model"
    folder.mkdir()
    auto = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Config"}
    (folder / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto}))
    tokenizer = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "evil.py").write_text(MARKED.format(marker=str(room / "marker")))
    (folder / weights).write_bytes(pickle.dumps({}))
    return folder


def findings(room: Path, folder: Path) -> dict[str, str]:
    plan = with_model(make_plan(room / "runs/r-1"), folder)
    found = judge(plan, host=HOST, inputs=read_inputs(plan, ask_hub=False))
    return {each.code: f"{each.message}; {each.remedy}" for each in found}


@pytest.mark.parametrize("weights", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_weights_that_are_pickles_are_refused(room: Path, weights: str) -> None:
    folder = model_folder(room, weights=weights)
    found = findings(room, folder)
    assert found["model-incomplete"].startswith(f"{folder}: the folder has no weights; ")
    assert "*.bin and *.pt are pickles" in found["model-incomplete"]
    (folder / "model.safetensors").write_bytes(b"x")
    assert "model-incomplete" not in findings(room, folder)


@pytest.mark.parametrize("name", ["$(touch x)", "a b", "+x=1", "${x}", "é/b", "http:x"])
def test_a_name_that_the_hub_cannot_have_is_refused(room: Path, name: str) -> None:
    plan = with_model(make_plan(room / "runs/r-1"), name)
    codes = [each.code for each in judge(plan, host=HOST, inputs=read_inputs(plan, ask_hub=False))]
    assert "model-missing" in codes


@pytest.mark.slow
def test_code_that_comes_with_a_model_runs_only_where_the_recipe_says_so(
    room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By transformers itself, as the children ask it; the other way round shows that the code would have run."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(room / "modules"))
    from transformers import AutoConfig, AutoTokenizer, dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(room / "modules"))
    folder = model_folder(room, weights="model.safetensors")
    plan = planned(room, model=str(folder), train_file="x")
    said = [each for each in plan.argv if "trust_remote_code" in each]
    assert said == ["data.trust_remote_code=false", "actor_rollout_ref.model.trust_remote_code=false"]
    for auto in (AutoConfig, AutoTokenizer):
        with pytest.raises((ValueError, OSError)):
            auto.from_pretrained(str(folder), trust_remote_code=plan.model.trust_remote_code)
    assert not (room / "marker").exists()
    with pytest.raises((AttributeError, TypeError, ValueError)):  # it is no real configuration
        AutoConfig.from_pretrained(str(folder), trust_remote_code=True)
    assert (room / "marker").exists()
