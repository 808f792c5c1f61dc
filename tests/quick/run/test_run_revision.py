"""`model.revision`: a model of the hub at one commit, in plan, preflight, preparation and resume.

The hub's cache is small and real, huggingface_hub is the real one, and there is no network.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hub_variables import set_hub
from plans import HOST
from stopped_runs import save, stopped, without_pace

from appliance import console, hub
from appliance.cluster.node_report import describe_node
from appliance.compare.arms import Existing, PlannedRun, look_at_run, plan_runs, resumed_run
from appliance.compare.command import _todo
from appliance.compare.file import load_comparison
from appliance.errors import PreflightError, RecipeError
from appliance.finding import Severity
from appliance.launch.resume import find_misfits, find_start, find_target, refuse_changes
from appliance.plan.build import OriginalPlan, build_plan
from appliance.preflight.checks import judge
from appliance.preflight.inputs import read_inputs
from appliance.preflight.report import examine
from appliance.recipe.load import load_recipe, to_yaml
from appliance.recipe.schema import Recipe
from appliance.record.liveness import HEARTBEAT_FILE, Heartbeat
from appliance.record.plan import RunPlan, read_plan
from appliance.record.session import RunRecord, RunStatus, versions, write_record
from appliance.tasks.prepare import _check_weights, is_prepared
from appliance.terms.environment import LOG_DIR_VARIABLE

pytestmark = pytest.mark.usefixtures("no_sample")

NAME, OLD, NEW, GONE = "owner/model", "a1" * 20, "b2" * 20, "c3" * 20
TENSORS = {"model.embed_tokens.weight": ([8, 32], [0, 512]), "model.norm.weight": ([32], [512, 576])}
HEADER = json.dumps(
    {name: {"dtype": "BF16", "shape": shape, "data_offsets": places} for name, (shape, places) in TENSORS.items()}
).encode()
CONFIG = {  # of a whole model, without layers
    **{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True, "vocab_size": 8},
    **{"hidden_size": 32, "intermediate_size": 4, "num_hidden_layers": 0},
    **{"num_attention_heads": 1, "num_key_value_heads": 1},
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model in the hub's cache: `main` is the new commit, the tag `v1` the old one."""
    set_hub(monkeypatch, HF_HUB_CACHE=str(tmp_path / "hub"), HF_HUB_OFFLINE="1")
    folder = tmp_path / "hub" / "models--owner--model"
    (folder / "refs").mkdir(parents=True)
    for ref, commit in (("main", NEW), ("v1", OLD)):
        (folder / "refs" / ref).write_text(commit)
        snapshot = folder / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(json.dumps({**CONFIG, "of": commit}))
        (snapshot / "tokenizer.json").write_text("{}")
        (snapshot / "chat_template.jinja").write_text("{}")
        (snapshot / "model.safetensors").write_bytes(len(HEADER).to_bytes(8, "little") + HEADER + bytes(576))
    return folder


def recipe(*sets: str) -> Recipe:
    model = ("model.builtin=null", f"model.path={NAME}", "task.long_prompts=truncate", "trainer.steps=9")
    return load_recipe("arithmetic-tiny-int8", sets=(*model, *sets))


def planned(tmp_path: Path, *sets: str, **more: str) -> RunPlan:
    return build_plan(recipe(*sets), run_dir=tmp_path / "small-1", host=HOST, **more)


@pytest.mark.parametrize(("revision", "commit"), [("v1", OLD), ("main", NEW), (OLD, OLD)])
def test_a_revision_is_the_folder_of_its_commit_for_all_who_load(
    tmp_path: Path, cache: Path, revision: str, commit: str
) -> None:
    plan = planned(tmp_path, f"model.revision={revision}")
    folder = str(cache / "snapshots" / commit)
    assert (plan.weights.name_or_path, plan.weights.commit, plan.weights.hub_name) == (folder, commit, NAME)
    assert plan.trained_model == folder
    assert f"actor_rollout_ref.model.path={folder}" in plan.argv
    plan.write(tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan
    assert versions(plan)["model"] == f"{NAME}@{commit}"


def test_without_a_revision_the_name_is_loaded(tmp_path: Path, cache: Path) -> None:
    plan = planned(tmp_path)
    assert (plan.weights.name_or_path, plan.weights.commit, plan.weights.is_pinned) == (NAME, "", False)
    assert examine(recipe(), run_dir=tmp_path / "a-1", ask_hub=True)[0].weights.commit == NEW
    assert versions(plan)["model"] == f"{NAME}@unknown"


def test_problems_are_told_apart_by_the_commit_and_not_by_the_place_of_the_cache(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (planned(tmp_path, f"model.revision={each}").task_files.train_parquet for each in ("v1", "main"))
    set_hub(monkeypatch, HF_HUB_CACHE=str(tmp_path / "elsewhere"))
    moved = planned(tmp_path, f"model.revision={OLD}").task_files.train_parquet
    assert first == moved != second


@pytest.mark.parametrize("revision", ["../main", "/etc", "a//b", "a/../b", ".x", "a b", "é", "x" * 201])
def test_a_revision_that_leads_out_of_the_cache_is_refused(revision: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe(f"model.revision={revision}")
    assert "model.revision" in caught.value.problems[0][0]


def test_only_a_model_of_the_hub_has_a_revision(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="a built-in model has none"):
        load_recipe("arithmetic-tiny-int8", sets=("model.revision=v1",))
    with pytest.raises(RecipeError, match=rf"model\.revision: {tmp_path} is not a model on the hub"):
        planned(tmp_path, f"model.path={tmp_path}", "model.revision=v1")


# preflight


def errors(plan: RunPlan) -> dict[str, str]:
    found = judge(plan, host=HOST, inputs=read_inputs(plan, ask_hub=True))
    return {each.code: each.message for each in found if each.severity is Severity.ERROR}


def test_preflight_looks_at_the_commit_that_is_meant(tmp_path: Path, cache: Path) -> None:
    assert errors(planned(tmp_path, "model.revision=v1")) == {}
    (cache / "snapshots" / OLD / "model.safetensors").unlink()
    assert errors(planned(tmp_path)) == {}
    assert errors(planned(tmp_path, "model.revision=v1")) == {
        "model-unreachable": f"`{NAME}` at `v1` is not a folder and not in the hub's cache, and HF_HUB_OFFLINE is set"
    }


@pytest.mark.parametrize(("sets", "commit"), [((), NEW), (("model.revision=v1",), OLD)])
def test_a_snapshot_that_transformers_and_vllm_would_read_differently_is_refused(
    tmp_path: Path, cache: Path, sets: tuple[str, ...], commit: str
) -> None:
    """One without a file of its index is downloaded; of these files a download would change nothing."""
    snapshot, plan = cache / "snapshots" / commit, planned(tmp_path, *sets)
    (snapshot / "more.safetensors").write_bytes((snapshot / "model.safetensors").read_bytes())
    problem = "more.safetensors lies beside model.safetensors and no model.safetensors.index.json names it"
    assert errors(plan) == {
        "model-damaged": f"`{NAME}` in the hub's cache: {problem}: transformers leaves it out, vLLM reads it"
    }
    index = {"weight_map": {"a": "model.safetensors", "b": "not-here-yet.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    assert set(errors(plan)) == {"model-unreachable"}


def test_what_was_fetched_is_looked_at_as_preflight_does(tmp_path: Path, cache: Path) -> None:
    folder = cache / "snapshots" / OLD
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(PreflightError, match=r"^model\.path: owner/model@(a1)+: adapter_config\.json: ") as raised:
        _check_weights(folder, plan=planned(tmp_path, "model.revision=v1"))
    assert "merge the adapter into the model" in raised.value.hint


def test_a_revision_that_nobody_knows_is_named(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appliance.hub.is_offline", lambda: False)
    monkeypatch.setattr("appliance.hub.problem", lambda: "")
    monkeypatch.setattr("appliance.hub.model_refusal", lambda name, revision: "refused" if revision else "")
    monkeypatch.setattr("appliance.hub._commit_on_hub", lambda name, requested: ("", "the hub answers 404"))
    assert errors(planned(tmp_path, "model.revision=v9")) == {
        "model-revision": "it is not known which commit of `owner/model` `v9` is: the hub answers 404"
    }


def test_data_that_is_made_is_not_missed_because_the_model_is_to_be_fetched(tmp_path: Path, cache: Path) -> None:
    plan = planned(tmp_path, "model.revision=v1", "task.kind=gsm8k")
    assert set(errors(plan)) == {"data-unreachable"}
    Path(plan.task_files.train_parquet).parent.mkdir(parents=True)
    for file in (plan.task_files.train_parquet, plan.task_files.val_parquet):
        Path(file).touch()
    assert not is_prepared(plan) and errors(plan) == {}


def test_a_commit_that_the_hub_does_not_have_is_named(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("appliance.hub.is_offline", lambda: False)
    monkeypatch.setattr("appliance.hub.problem", lambda: "")
    monkeypatch.setattr("appliance.hub._status", lambda ask: (404, ""))
    plan = planned(tmp_path, f"model.revision={GONE}")
    (finding,) = [
        each for each in judge(plan, host=HOST, inputs=read_inputs(plan, ask_hub=True)) if each.place == "model.path"
    ]
    message = f"the hub has no model `{NAME}`, or no revision `{GONE}` of it, or none with a config.json"
    remedy = "correct the name or model.revision; or accept the model's terms on the hub and set HF_TOKEN"
    assert (finding.code, finding.message, finding.remedy) == ("model-refused", message, remedy)


@pytest.mark.parametrize("name", ["my model", "owner/a--b", "owner/model.git"])
def test_what_cannot_be_a_name_on_the_hub_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """huggingface_hub refuses it by an error of its own."""
    set_hub(monkeypatch, HF_HUB_CACHE=str(tmp_path / "hub"), HF_HUB_OFFLINE=None)
    monkeypatch.setattr("appliance.hub._status", lambda ask: (404, ""))
    for revision in ("null", "v1"):
        sets = (f"model.path={name}", f"model.revision={revision}")
        found = examine(recipe(*sets), run_dir=tmp_path / "a-1", ask_hub=True)[2]
        assert [each.place for each in found if each.severity is Severity.ERROR] == ["model.path"]


def test_the_hub_is_asked_for_the_revision_of_the_recipe(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tag that moved counts as the hub has it, but for a run that began with another commit."""
    requests: list[tuple[str, str]] = []
    monkeypatch.setattr("appliance.hub.is_offline", lambda: False)
    monkeypatch.setattr(
        "appliance.hub._commit_on_hub", lambda name, requested: requests.append((name, requested)) or (NEW, "")
    )
    pinned = recipe("model.revision=v1")
    plan = examine(pinned, run_dir=tmp_path / "a-1", ask_hub=True)[0]
    assert (plan.weights.commit, requests) == (NEW, [(NAME, "v1")])
    original = OriginalPlan("cpu", None, model=NAME, revision="v1", commit=OLD)
    assert examine(pinned, run_dir=tmp_path / "a-1", ask_hub=True, original=original)[0].weights.commit == OLD
    other = replace(original, revision="v0")
    assert examine(pinned, run_dir=tmp_path / "a-1", ask_hub=True, original=other)[0].weights.commit == NEW


def test_nodes_are_compared_by_the_folder_of_the_commit(tmp_path: Path, cache: Path) -> None:
    plan = planned(tmp_path, "model.revision=v1")
    report = describe_node(plan)
    assert report.model and report.model_problem == ""
    assert report.model != describe_node(planned(tmp_path, "model.revision=main")).model
    (cache / "snapshots" / OLD / "config.json").unlink()
    assert describe_node(plan).model_problem == "no such folder, or without config.json"


# preparation


@pytest.mark.slow
def test_a_snapshot_fetched_without_its_code_is_fetched_again_for_who_runs_it(tmp_path: Path, cache: Path) -> None:
    assert prepare(planned(tmp_path, "model.revision=v1")) == 0
    with_code = planned(tmp_path, "model.revision=v1", "model.trust_remote_code=true")
    assert not is_prepared(with_code)
    assert prepare(with_code) == 0
    assert is_prepared(with_code)


def prepare(plan: RunPlan) -> int:
    run_dir = Path(plan.run_dir)
    run_dir.mkdir(exist_ok=True)
    plan.write(run_dir / "plan.json")
    argv = [sys.executable, "-m", "appliance.tasks.prepare", str(run_dir / "plan.json")]
    return subprocess.run(argv, env=dict(os.environ), timeout=120, check=False, capture_output=True).returncode


@pytest.mark.slow
def test_the_snapshot_is_fetched_before_anything_loads_it(tmp_path: Path, cache: Path) -> None:
    """By huggingface_hub itself, which finds it in its cache; what is not there ends the preparation with a word."""
    plan = planned(tmp_path, "model.revision=v1")
    assert not is_prepared(plan)
    assert prepare(plan) == 0
    assert is_prepared(plan)
    (mark,) = (tmp_path / ".cache" / "models").glob("*.fetched")
    mark.unlink()
    assert not is_prepared(plan)  # the folder alone may be half a download
    assert not is_prepared(planned(tmp_path, "model.revision=main"))
    config = cache / "snapshots" / OLD / "config.json"
    config.write_text(json.dumps({**CONFIG, "num_hidden_layers": 1}))  # what came is another model
    assert prepare(plan) == 3 and not is_prepared(plan)
    gone = planned(tmp_path, f"model.revision={GONE}")
    assert prepare(gone) == 4 and not is_prepared(gone)
    events = [json.loads(line) for line in (tmp_path / "small-1" / "events.jsonl").read_text().splitlines()]
    other = f"model.path: {NAME}@{OLD}: the weights are not those of the model in config.json: 12 are missing ("
    assert sum(each["what"].startswith(other) for each in events) == 1
    assert events[-1]["what"].startswith(f"{NAME}@{GONE} cannot be had from the hub: ")


def test_a_download_shows_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As huggingface_hub moves its bar; what is fetched holds no pickle, and no code unless it is asked for."""
    import huggingface_hub

    downloads: list[dict[str, object]] = []

    def moved(name: str, **more: object) -> str:
        downloads.append(more)
        huggingface_hub.utils.tqdm(total=2, disable=True).update(1)
        return str(tmp_path)

    monkeypatch.setenv(LOG_DIR_VARIABLE, str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", moved)
    huggingface_hub.utils.tqdm(total=2, disable=True).update(1)
    assert not (tmp_path / HEARTBEAT_FILE).exists()
    assert hub.download_model(NAME, revision=OLD, beat=Heartbeat().beat) == tmp_path
    hub.download_model(NAME, revision="", beat=Heartbeat().beat, with_code=True)
    assert [each["revision"] for each in downloads] == [OLD, None]
    assert ["*.py" in each["allow_patterns"] for each in downloads] == [False, True]
    assert {each["ignore_patterns"] for each in downloads} == {"consolidated*"}
    assert (tmp_path / HEARTBEAT_FILE).exists()


# resume


def begun_run(tmp_path: Path, *sets: str, commit: str) -> Path:
    plan = planned(tmp_path, *sets, commit=commit)
    run_dir = stopped(plan)
    (run_dir / "recipe.yaml").write_text(to_yaml(recipe(*sets)))
    save(run_dir, 3)
    return run_dir


def test_a_hub_that_moved_on_is_refused_and_what_the_run_began_with_is_taken(tmp_path: Path, cache: Path) -> None:
    run_dir = begun_run(tmp_path, commit=OLD)
    target = find_target(str(run_dir), root=tmp_path, recipe_name="", name=None)
    assert target is not None and without_pace(target) == OriginalPlan("cpu", None, model=NAME, commit=OLD)
    start = find_start(target)
    assert find_misfits(start, plan=planned(tmp_path, commit=OLD)) == []
    assert find_misfits(start, plan=planned(tmp_path)) == []  # nobody knows: the hub was not there
    (misfit,) = find_misfits(start, plan=planned(tmp_path, commit=NEW))
    assert misfit.fact == f"model.revision: {NAME}: main is {NEW} on the hub now, the run began with {OLD}"
    assert misfit.remedy == f"continue with the run's own commit: --set model.revision={OLD}"
    assert misfit.is_error and not misfit.is_fault  # of the hub, not of the recipe
    named = f"model.revision={OLD}"
    refuse_changes(recipe(named), target=target, force=False)
    assert find_misfits(start, plan=planned(tmp_path, named)) == []
    with pytest.raises(RecipeError, match=r"model\.revision: the run has null, the recipe \"v1\""):
        refuse_changes(recipe("model.revision=v1"), target=target, force=False)


def test_a_run_of_a_comparison_refuses_a_hub_that_moved_on_as_well(
    tmp_path: Path, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    begun_run(tmp_path, commit=OLD)
    now = PlannedRun("a", 0, recipe=recipe(), plan=planned(tmp_path, commit=OLD), findings=())
    resumed = resumed_run(now)
    assert resumed is not None and resumed.plan.weights.commit == OLD
    console.err_console.cache_clear()
    with pytest.raises(PreflightError, match="this plan cannot run here: 1 finding above"):
        resumed_run(replace(now, plan=planned(tmp_path, commit=NEW)))
    assert f"model.revision: a, seed 0: {NAME}: main is {NEW} on the hub now" in capfd.readouterr().err


@pytest.mark.parametrize("revision", [None, "v1"])
def test_all_arms_of_a_comparison_get_one_answer_of_the_hub(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, revision: str | None
) -> None:
    """`main`, or the tag, moves while they are planned."""
    answers, file = iter([OLD, NEW, NEW]), tmp_path / "c.yaml"
    monkeypatch.setattr("appliance.hub.is_offline", lambda: False)
    monkeypatch.setattr("appliance.hub._commit_on_hub", lambda name, requested: (next(answers), ""))
    monkeypatch.chdir(tmp_path)
    model = {"model.builtin": None, "model.path": NAME, "model.revision": revision}
    shared = {**model, "task.long_prompts": "truncate", "trainer.steps": 9}
    arms = {"a": None, "b": ["correction.cap=3"], "c": ["correction.method=none", "correction.cap="]}
    said = {"recipe": "arithmetic-tiny-int8", "set": shared, "arms": arms, "seeds": [0, 1], "baseline": "a"}
    file.write_text(json.dumps(said | {"validation": 16}))
    assert [run.plan.weights.commit for run in plan_runs(load_comparison(str(file)))] == [OLD] * 6


def test_a_comparison_whose_hub_moved_on_says_how_it_goes_on(tmp_path: Path, cache: Path) -> None:
    """Its file has no `--set`. What is done counts when it names the commit, and trains nothing else beside it."""
    run_dir = begun_run(tmp_path, commit=OLD)
    file = tmp_path / "c.yaml"

    def at(*sets: str, commit: str = "", arm: str = "a", name: str = "small-1") -> PlannedRun:
        plan = planned(tmp_path, *sets, commit=commit).replace(run_dir=str(tmp_path / name))
        return PlannedRun(arm, 0, recipe=recipe(*sets), plan=plan, findings=())

    def refused(*runs: PlannedRun) -> bool:
        with pytest.raises(PreflightError) as caught:
            _todo(list(runs), folder=tmp_path, file=file)
        assert caught.value.message == f"a, seed 0: {NAME}: main is {NEW} on the hub now, the run began with {OLD}"
        hint = f"to continue with those runs: model.revision: {OLD} in {file}, under `set` or in the arm"
        return caught.value.hint == hint

    revision = f"model.revision={OLD}"
    assert refused(at(commit=NEW))
    for run in (at(revision), at()):  # nobody knows the second one's: the hub was not there
        (ready,) = _todo([run], folder=tmp_path, file=file)
        assert ready.resume is not None and ready.resume.step == 3
    assert look_at_run(at("model.revision=v1")) is look_at_run(at(f"model.revision={NEW}")) is Existing.OTHER
    write_record(run_dir, RunRecord(RunStatus.DONE, exit_code=0))
    assert refused(at(commit=NEW), at(commit=NEW, arm="b", name="small-2"))
    assert _todo([at(commit=NEW)], folder=tmp_path, file=file) == []  # nothing is trained
    (rest,) = _todo([at(revision), at(revision, arm="b", name="small-2")], folder=tmp_path, file=file)
    assert (rest.arm, rest.plan.weights.commit) == ("b", OLD)


def test_a_tag_that_moved_is_refused_by_a_comparison_and_what_is_done_counts(tmp_path: Path, cache: Path) -> None:
    """Its problems are named by its commit. They are no reason to do it anew."""
    run_dir, tag, file = begun_run(tmp_path, "model.revision=v1", commit=OLD), "model.revision=v1", tmp_path / "c.yaml"
    write_record(run_dir, RunRecord(RunStatus.DONE, exit_code=0))

    def at(setting: str, *, commit: str = "", arm: str = "a", name: str = "small-1") -> PlannedRun:
        plan = planned(tmp_path, setting, commit=commit).replace(run_dir=str(tmp_path / name))
        return PlannedRun(arm, 0, recipe=recipe(setting), plan=plan, findings=())

    with pytest.raises(PreflightError) as caught:
        _todo([at(tag, commit=NEW), at(tag, commit=NEW, arm="b", name="small-2")], folder=tmp_path, file=file)
    assert caught.value.message == f"a, seed 0: {NAME}: v1 is {NEW} on the hub now, the run began with {OLD}"
    assert look_at_run(at(tag, commit=NEW)) is look_at_run(at(f"model.revision={OLD}")) is Existing.DONE


def test_a_run_with_a_revision_refuses_another_even_when_forced(tmp_path: Path, cache: Path) -> None:
    run_dir = begun_run(tmp_path, "model.revision=v1", commit=OLD)
    target = find_target(str(run_dir), root=tmp_path, recipe_name="", name=None)
    assert target is not None
    assert without_pace(target) == OriginalPlan("cpu", None, model=NAME, revision="v1", commit=OLD)
    assert find_misfits(find_start(target), plan=planned(tmp_path, "model.revision=v1")) == []
    misfit, of_its_problems = find_misfits(find_start(target), plan=planned(tmp_path, "model.revision=main"))
    assert of_its_problems.place == "task" and misfit.message.startswith(f"{NAME}: main is {NEW} on the hub now")
