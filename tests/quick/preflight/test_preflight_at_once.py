"""Everything that is wrong with a recipe is told at once, each fault with its place: whether the recipe alone shows it,
its model, its device, or this host."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from called import called
from hub_variables import set_hub
from plans import HOST

from appliance import console
from appliance.errors import RecipeError
from appliance.plan.host import HostGpu
from appliance.preflight.report import examine, load_judged
from appliance.recipe.load import load_recipe

pytestmark = pytest.mark.usefixtures("no_sample", "small_host")

WRONG = {  # of the example in the design: on the model, on the device, on this host
    "model.revision=main": "model.revision: {folder} is not a model on the hub",
    "cluster.device=h100": "cluster.device: `h100` is wanted, this host has no GPU",
    "trainer.forward=linears": "trainer.forward: `linears` runs on a CPU only",
    "logging.backends=[trackio]": "logging.backends: the package `trackio` is not installed",
}


@pytest.fixture
def small_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without a GPU, and without the packages of any log backend."""
    monkeypatch.setattr("appliance.preflight.report.read_host", lambda _: HOST)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The folder of a small model, without its weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
    config = {"architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 2, "vocab_size": 256, **shape}
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def problems_of(tmp_path: Path, model: Path, *sets: str) -> list[str]:
    """What `load_judged` refuses with, `--set` of this model's path first."""
    rows = [json.dumps({"question": f"{number}+1?", "answer": f"#### {number + 1}"}) for number in range(64)]
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    usual = (f"model.path={model}", f"task.train_file={tmp_path}/data.jsonl", "task.val_size=1")
    with pytest.raises(RecipeError) as raised:
        load_judged("gsm8k-0.5b-int8", sets=(*usual, f"cluster.run_dir={tmp_path}/runs", *sets))
    return [message for message, _ in raised.value.problems]


@pytest.mark.parametrize("command", [("check",), ("check", "--json"), ("train",), ("train", "--dry-run")])
def test_faults_of_model_device_and_host_are_told_together_each_with_its_place(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], command: tuple[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    set_hub(monkeypatch, HF_HUB_OFFLINE="1")
    monkeypatch.setattr("appliance.preflight.report.read_inputs", lambda *_, **__: pytest.fail("a child may start"))
    console.err_console.cache_clear()
    options = [part for each in (f"model.path={model}", *WRONG) for part in ("--set", each)]
    done = called(*command, "gsm8k-0.5b-int8", *options, monkeypatch=monkeypatch, capfd=capfd)
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    for option, fact in WRONG.items():
        assert f"error: --set {option}: {fact.format(folder=model)}" in errors
    assert "possible name on the hub" not in done.stderr  # the folder is judged as a folder
    if "--json" in command:
        findings = json.loads(done.stdout)["findings"]
        where = {each["place"]: (each["where"], each["code"]) for each in findings}
        assert where["trainer.forward"] == ("--set trainer.forward=linears", "recipe")
        assert where["logging.backends"] == ("--set logging.backends=[trackio]", "log-backend")
    else:
        assert done.stdout == ""


def test_what_the_recipe_alone_shows_does_not_hide_the_rest(model: Path, tmp_path: Path) -> None:
    """A misspelt key, a value of another type, keys that exclude each other: with all that is wrong elsewhere."""
    alone = ("trainer.stpes=3", "optimizer.epsilon=small", "trainer.epochs=2", "trainer.steps=4")
    messages = problems_of(tmp_path, model, *alone, *WRONG)
    for option, fact in WRONG.items():
        assert f"--set {option}: {fact.format(folder=model)}" in messages
    assert {each.partition(": ")[0] for each in messages[:3]} == {f"--set {each}" for each in (*alone[:2], alone[3])}


def test_a_broken_rule_hides_no_other_fault_of_its_keys(model: Path, tmp_path: Path) -> None:
    """`trainer.forward` has a value, so that the device and the scheme are judged by it."""
    options = ("cluster.device=h100", "trainer.forward=linears", "rollout.lm_head_fp32=true", "rollout.scheme=fp8")
    messages = problems_of(tmp_path, model, *options)
    of_options = [message.partition(": ")[2] for message in messages if message.startswith("--set ")]
    assert of_options[:4] == [
        "rollout.lm_head_fp32: the last projection of `linears` is in BF16",
        "trainer.forward: `linears` does not know `fp8`",
        "trainer.forward: `linears` runs on a CPU only",
        "cluster.device: `h100` is wanted, this host has no GPU",
    ]


def test_what_no_device_decides_is_judged_where_the_device_is_not_known(model: Path, tmp_path: Path) -> None:
    messages = problems_of(tmp_path, model, "cluster.device=h1000", "trainer.forward=linears", "rollout.scheme=fp8")
    of_options = [message.partition(": ")[2] for message in messages if message.startswith("--set ")]
    assert "trainer.forward: `linears` does not know `fp8`" in of_options
    assert not any("fp8" in message and message.startswith("rollout.scheme") for message in of_options)


@pytest.mark.parametrize(
    ("option", "place", "message"),
    [
        ("trainer.stpes=3", "trainer.stpes", "unknown key"),
        ("trainer.steps=x", "trainer.steps", "expected a whole number, got the text `x`"),
        ("trainer.epochs=2", "trainer.steps", "`steps` and `epochs` exclude each other"),
        ("nonsense", "", "expected KEY=VALUE"),
    ],
)
def test_check_prints_json_for_a_recipe_that_cannot_be_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    option: str,
    place: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    console.err_console.cache_clear()
    command = ("check", "--json", "arithmetic-tiny-int8", "--set", option)
    done = called(*command, monkeypatch=monkeypatch, capfd=capfd)
    assert done.returncode == 2 and message in done.stderr
    findings = json.loads(done.stdout)["findings"]
    (about,) = [finding for finding in findings if finding["message"].startswith(message)]
    assert (about["severity"], about["code"], about["place"]) == ("error", "recipe", place)
    assert about["where"] and about["keys"][:1] == [place][: bool(place)]


def test_check_prints_json_where_there_is_no_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    done = called("check", "--json", "none.yaml", monkeypatch=monkeypatch, capfd=capfd)
    ((place, message),) = [(about["place"], about["message"]) for about in json.loads(done.stdout)["findings"]]
    assert (done.returncode, place, message) == (2, "none.yaml", "no such file")


def test_a_key_that_is_wrong_is_not_judged_by_its_default(model: Path, tmp_path: Path) -> None:
    """`cluster.device` and the log backends have defaults on which other things would be wrong, or right."""
    messages = problems_of(
        tmp_path, model, "cluster.device=h1000", "logging.backends=[tackio]", "trainer.forward=linears"
    )
    keys = [each.partition(": ")[2].partition(": ")[0] for each in messages]
    assert keys.count("cluster.device") == 1
    assert [key for key in keys if key.startswith("logging")] == ["logging.backends.0"]
    assert "trainer.forward" not in keys  # on which device, is not known


def test_data_that_is_named_wrongly_is_not_said_to_be_missing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `task.train_file` the data would come from the hub, which is not asked."""
    set_hub(monkeypatch, HF_HUB_OFFLINE="1")
    with pytest.raises(RecipeError) as raised:
        load_judged("gsm8k-0.5b-int8", sets=(f"model.path={model}", f"cluster.run_dir={tmp_path}", "task.train_file=5"))
    (about_the_task,) = [message for message, _ in raised.value.problems if "task." in message]
    assert about_the_task.startswith("--set task.train_file=5: task.train_file: ")


def test_rules_that_single_keys_do_not_mend_leave_the_other_sections_to_be_judged(model: Path, tmp_path: Path) -> None:
    """A task of the user's own without rewards breaks a rule with its defaults, too."""
    messages = problems_of(tmp_path, model, "task.kind=own", "logging.backends=[trackio]")
    keys = [each.partition(": ")[2].partition(": ")[0] for each in messages]
    assert "logging.backends" in keys and any("needs rewards" in each for each in messages)
    assert not any(key.startswith("task.") for key in keys if key != "task.rewards")


def test_a_gpu_that_is_not_known_is_one_fault(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another GPU stands in its place in the plan, and what that one lacks is not reported."""
    gpu = HostGpu("Tesla K80", 11 << 30)
    monkeypatch.setattr("appliance.preflight.report.read_host", lambda _: replace(HOST, gpus=(gpu,)))
    sets = (f"model.path={model}", "cluster.device=auto", "trainer.forward=linears", "cluster.gpus_per_node=2")
    plan, _, findings = examine(
        load_recipe("gsm8k-0.5b-int8", sets=sets), run_dir=tmp_path / "runs" / "a", ask_hub=False, run_code=False
    )
    errors = [finding.place for finding in findings if finding.is_error]
    assert plan.cluster.device == "a10" and errors.count("cluster.device") == 1 and "trainer.forward" not in errors


def test_a_plan_tells_no_faults_of_this_host(model: Path, tmp_path: Path) -> None:
    sets = (f"model.path={model}", *WRONG, "trainer.stpes=3", f"cluster.run_dir={tmp_path}")
    with pytest.raises(RecipeError) as raised:
        load_judged("gsm8k-0.5b-int8", sets=sets, for_this_host=False)
    keys = [message.partition(": ")[2].partition(": ")[0] for message, _ in raised.value.problems]
    assert keys == ["trainer.stpes", "model.revision", "trainer.forward"]
