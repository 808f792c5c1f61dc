"""A model's files beside each other, and the child that holds them against config.json: started once, ended always."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from plans import HOST, INPUTS, make_plan, with_model

from appliance.finding import Severity
from appliance.launch import side_job
from appliance.launch.side_job import OF_AN_ENGINE, OF_THE_MODEL, examine_for
from appliance.preflight import child as children
from appliance.preflight import inputs, template, weights
from appliance.preflight.checks import judge
from appliance.preflight.child import EarlyChild
from appliance.preflight.template import TemplateChild
from appliance.preflight.weights import WeightsChild, WeightsFacts, judge_weights
from appliance.quant.headers import INDEX, WHOLE, damage, weight_files
from appliance.recipe.schema import Recipe
from appliance.record.plan import RunPlan
from appliance.tasks.templates import TemplateFacts


def write(file: Path, *names: str) -> None:
    """A file with these tensors, of 8 bytes each."""
    entries = {
        name: {"dtype": "BF16", "shape": [4], "data_offsets": [8 * place, 8 * place + 8]}
        for place, name in enumerate(names)
    }
    header = json.dumps(entries).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8 * len(names)))


def index(folder: Path, **files: str) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))


def test_one_file_and_shards_are_taken(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    write(tmp_path / "one" / WHOLE, "a", "b")
    write(tmp_path / "one" / "consolidated.safetensors", "c")  # Mistral's, which nobody here reads
    (tmp_path / "shards").mkdir()
    write(tmp_path / "shards" / "x.safetensors", "a")
    write(tmp_path / "shards" / "y.safetensors", "b")
    write(tmp_path / "shards" / "left-over.safetensors", "z")  # read by none of the loaders
    index(tmp_path / "shards", a="x.safetensors", b="y.safetensors")
    assert (damage(tmp_path / "one").problems, damage(tmp_path / "shards").problems) == ((), ())
    assert [file.name for file in weight_files(tmp_path / "one")] == [WHOLE]
    assert [file.name for file in weight_files(tmp_path / "shards")] == ["x.safetensors", "y.safetensors"]


def test_an_index_that_names_what_no_file_has(tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors", "a")
    index(tmp_path, a="x.safetensors", b="x.safetensors")
    assert damage(tmp_path).problems == (f"x.safetensors has no b, {INDEX} says it has",)
    write(tmp_path / "y.safetensors", "b")  # in another file than it says: both loaders read all of them
    index(tmp_path, a="x.safetensors", b="x.safetensors", c="y.safetensors")
    write(tmp_path / "y.safetensors", "b", "c")
    assert damage(tmp_path).problems == ()


def test_a_tensor_that_two_files_have(tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors", "a", "b")
    write(tmp_path / "y.safetensors", "b")
    index(tmp_path, a="x.safetensors", b="y.safetensors")
    assert damage(tmp_path).problems == ("b is in x.safetensors and in y.safetensors",)


def test_files_of_which_transformers_and_vllm_would_read_different_ones(tmp_path: Path) -> None:
    write(tmp_path / WHOLE, "a")
    write(tmp_path / "more.safetensors", "b")
    assert damage(tmp_path).problems == (
        f"more.safetensors lies beside {WHOLE} and no {INDEX} names it: transformers leaves it out, vLLM reads it",
    )
    index(tmp_path, b="more.safetensors")
    assert damage(tmp_path).problems == (f"{INDEX} does not name {WHOLE}: transformers reads the one, vLLM the others",)
    (tmp_path / INDEX).unlink()
    (tmp_path / WHOLE).unlink()
    assert damage(tmp_path).problems == (f"there is no {WHOLE}, and no {INDEX} that names more.safetensors",)


def test_an_adapter_beside_the_model(tmp_path: Path) -> None:
    write(tmp_path / WHOLE, "a")
    (tmp_path / "adapter_config.json").write_text("{}")
    assert damage(tmp_path).problems == (
        "adapter_config.json: an adapter that transformers would load with the model, and vLLM would not",
    )


def test_each_damage_brings_what_changes_something(tmp_path: Path) -> None:
    write(tmp_path / "odd.safetensors", "a")
    assert damage(tmp_path).remedy == f"rename it to {WHOLE}"
    write(tmp_path / WHOLE, "a")
    assert damage(tmp_path).remedy == (
        f"take odd.safetensors out of the folder; or copy or download {INDEX}, if it is of the model"
    )
    (tmp_path / "adapter_config.json").write_text("{}")
    assert damage(tmp_path).remedy.endswith(
        "merge the adapter into the model and save that, or take adapter_config.json out of the folder"
    )
    (tmp_path / "adapter_config.json").unlink()
    index(tmp_path, a="odd.safetensors")
    assert damage(tmp_path).remedy == f"take {WHOLE} out of the folder, or {INDEX} and the files that it names"
    (tmp_path / WHOLE).unlink()
    assert not damage(tmp_path) and damage(tmp_path).remedy == ""
    (tmp_path / "odd.safetensors").unlink()
    assert damage(tmp_path).remedy == "copy or download the model again"


@pytest.mark.parametrize("text", ['{"weight_map": []}', '{"weight_map": {"a": 1}}', "{}", "no JSON", "[" * 2000])
def test_an_index_that_is_none(tmp_path: Path, text: str) -> None:
    write(tmp_path / WHOLE, "a")
    (tmp_path / INDEX).write_text(text)
    assert damage(tmp_path).problems == (f"{INDEX} cannot be read",)


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in place of the child, which loads no torch: it notes that it ran."""
    program = tmp_path / "program.py"
    monkeypatch.setattr(weights, "module_argv", lambda module, *given: (os.sys.executable, str(program), *given))
    monkeypatch.setattr(weights, "_KNOWN", {})
    (tmp_path / "model").mkdir()
    write(tmp_path / "model" / WHOLE, "a")
    return program


def write_child(program: Path, text: str) -> None:
    program.write_text(
        f"import pathlib, sys, os, time\nwith open({str(program) + '.ran'!r}, 'a') as f: f.write('x')\n{text}\n"
    )


def times(program: Path) -> int:
    return len(Path(f"{program}.ran").read_text())


ANSWER = '{"loading": {"problem": "1 is missing (a)", "remedy": "copy it", "doubt": ""}}'


def test_it_is_asked_once_until_a_file_changes(child: Path, tmp_path: Path) -> None:
    write_child(child, f"print('of a library'); print({ANSWER!r})")

    def ask(*, trust_remote_code: bool = False) -> WeightsFacts:
        with WeightsChild() as one:
            one.start(tmp_path / "model", trust_remote_code=trust_remote_code)
            return one.hear()

    assert ask() == ask() == WeightsFacts("1 is missing (a)", "copy it") and times(child) == 1
    ask(trust_remote_code=True)
    assert times(child) == 2
    write(tmp_path / "model" / WHOLE, "a", "b")
    ask()
    assert times(child) == 3


def test_who_does_not_start_it_hears_nothing() -> None:
    with WeightsChild() as one:
        assert one.hear() == WeightsFacts()


def test_a_child_that_dies_is_an_error_and_is_asked_again(child: Path, tmp_path: Path) -> None:
    write_child(child, "sys.exit('no torch here')")
    for _ in range(2):
        with WeightsChild() as one:
            one.start(tmp_path / "model", trust_remote_code=False)
            assert one.hear().problem == (
                "its weights could not be checked against its config.json: exit code 1: no torch here"
            )
    assert times(child) == 2


def test_a_child_that_takes_too_long_is_ended(
    child: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is a host's fault more often than the model's: the run itself says the same later."""
    monkeypatch.setattr(weights, "WITHIN_S", 0.2)
    monkeypatch.setattr(children, "WITHIN_S", 0.2)
    write_child(child, "time.sleep(60)")
    with WeightsChild() as weights_child:
        weights_child.start(tmp_path / "model", trust_remote_code=False)
        facts = weights_child.hear()
        assert facts == WeightsFacts(unproven="its weights could not be checked against its config.json within 0.2 s")
        pid = weights_child._child._process.pid
    (late,) = judge_weights(facts, model="/models/a")
    assert (late.severity, late.code) == (Severity.WARNING, "model-unproven")
    assert capsys.readouterr().err == (
        "note: still checking the model's weights against its config.json, for at most 0.2 s\n"
    )
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_it_is_ended_with_what_waits_for_it(child: Path, tmp_path: Path) -> None:
    """By Ctrl-C, or an error of what is read meanwhile."""
    write_child(child, "time.sleep(60)")
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt), WeightsChild() as one:
        one.start(tmp_path / "model", trust_remote_code=False)
        pid = one._child._process.pid
        raise KeyboardInterrupt
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert time.monotonic() - started < 10


def test_what_a_models_code_left_behind_is_ended_with_the_child(child: Path, tmp_path: Path) -> None:
    left = "import subprocess; print(subprocess.Popen(['sleep', '60']).pid, file=open(sys.argv[1] + '/left', 'w'))"
    write_child(child, f"{left}; print({ANSWER!r})")
    with WeightsChild() as one:
        one.start(tmp_path / "model", trust_remote_code=True)
        assert one.hear().problem
        left_pid = int((tmp_path / "model" / "left").read_text())
        assert is_alive(left_pid)
    until_s = time.monotonic() + 10
    while is_alive(left_pid):
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_a_template_that_is_tried_too_long_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(template, "WITHIN_S", 0.2)
    monkeypatch.setattr(children, "WITHIN_S", 0.2)
    monkeypatch.setattr(template, "module_argv", lambda _: ("sleep", "60"))
    with TemplateChild() as one:
        one.start(make_plan(tmp_path / "a"))
        facts = one.hear()
    assert facts == TemplateFacts(unproven="the model's chat template, tried: no end after 0.2 s")
    assert capsys.readouterr().err == "note: still trying the model's chat template, for at most 0.2 s\n"
    plan = with_model(make_plan(tmp_path / "a"), tmp_path)
    late = [each for each in judge(plan, host=HOST, inputs=replace(INPUTS, template=facts)) if "template" in each.code]
    assert [(each.severity, each.code, each.message) for each in late] == [
        (Severity.WARNING, "template-unproven", facts.unproven)
    ]


def plan_of_a_folder(folder: Path) -> RunPlan:
    """Whose model has the files that both children are started for."""
    write(folder / WHOLE, "a")
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return with_model(make_plan(folder / "runs" / "a"), folder)


def test_ctrl_c_waits_for_neither_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the rewards are tried: by then both others have begun."""
    started: list[EarlyChild] = []
    start = EarlyChild.start

    def note(child: EarlyChild, argv: object, *, stdin: str = "") -> None:
        start(child, ("sleep", "60"), stdin=stdin)
        started.append(child)

    def interrupt(_: object) -> None:
        assert len(started) == 2
        raise KeyboardInterrupt

    monkeypatch.setattr(EarlyChild, "start", note)
    monkeypatch.setattr(inputs, "reward_problem", interrupt)
    monkeypatch.setattr(inputs, "model_shape", lambda *_, **__: None)
    began_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        inputs.read_inputs(plan_of_a_folder(tmp_path), ask_hub=True)
    assert time.monotonic() - began_s < 10
    for child in started:
        assert child._process is not None and child._process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("about", "modules"), [(OF_THE_MODEL, ["appliance.preflight.weights"]), (OF_AN_ENGINE, [])], ids=["model", "engine"]
)
def test_a_command_that_is_no_training_starts_no_child_whose_findings_it_does_not_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, about: frozenset[str], modules: list[str]
) -> None:
    """`bench`, `verify` and `profile` hear of no chat template, and `bench --shapes` of no weights."""
    started: list[str] = []

    def note(child: EarlyChild, argv: Sequence[str], *, stdin: str = "") -> None:
        started.append(argv[argv.index("-m") + 1])
        start(child, ("true",), stdin=stdin)

    start = EarlyChild.start
    monkeypatch.setattr(EarlyChild, "start", note)
    monkeypatch.setattr(weights, "_KNOWN", {})
    monkeypatch.setattr(inputs, "model_shape", lambda *_, **__: None)
    monkeypatch.setattr(side_job, "judge", lambda *_, **__: [])
    examine_for((plan_of_a_folder(tmp_path),), recipe=Recipe(), host=HOST, about=about)
    assert started == modules


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_a_child_ends_with_who_started_it(sent: signal.Signals) -> None:
    """However that ends: no `finally` runs then."""
    program = (
        "import os\nfrom appliance.preflight.child import EarlyChild\n"
        "with EarlyChild(doing='') as child:\n"
        f"    child.start(('sleep', '60')); print(child._process.pid, flush=True); os.kill(os.getpid(), {sent:d})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == -sent, done.stderr
    pid, deadline = int(done.stdout), time.monotonic() + 10
    while is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    """A zombie, which whoever adopted it has not reaped, is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_what_it_said_is_an_error_or_a_warning() -> None:
    model = "/models/a"
    assert [*judge_weights(WeightsFacts(), model=model)] == []
    (found,) = judge_weights(WeightsFacts("1 is missing (a)", "copy it"), model=model)
    assert (found.severity, found.code, found.place) == (Severity.ERROR, "model-weights", "model.path")
    assert (found.message, found.remedy) == ("/models/a: 1 is missing (a)", "copy it")
    facts = WeightsFacts(own_attention="FalconForCausalLM")
    (refusal,) = judge_weights(facts, model=model)
    why = "FalconForCausalLM computes attention by code of its own: the trainer packs several sequences into one row"
    assert (refusal.severity, refusal.code, refusal.message) == (
        Severity.ERROR,
        "attention",
        f"/models/a: {why}, and they would see each other",
    )
    (doubt,) = judge_weights(WeightsFacts(doubt="two types"), model=model)
    assert (doubt.severity, doubt.code) == (Severity.WARNING, "model-types")
