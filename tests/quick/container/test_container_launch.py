"""`train --in-container`: what Docker is told. Pure."""

from __future__ import annotations

import dataclasses
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from docker.errors import APIError, ImageNotFound
from hub_variables import set_hub
from plans import HOST, make_plan, with_model, with_own_task

from appliance.container import launch
from appliance.container.launch import (
    ContainerSpec,
    container_spec,
    examine_and_train,
    expand_home,
    inner_argv,
    require_host,
    run_in_container,
    train_in_container,
)
from appliance.errors import PreflightError, RecipeError
from appliance.finding import Finding, Severity, error, fault
from appliance.plan.build import build_plan
from appliance.recipe.load import load_recipe
from appliance.record.plan import CodeFile
from appliance.settings.sections import Cluster, ValSet

FOLDER = Path("/srv/mine")


def order(
    *, folder: Path = FOLDER, device: str = "cpu", source: str = "", run_dir: str = "/srv/mine/runs/a-1", **options
):
    plan = make_plan(Path(run_dir), device=device)
    plan = with_model(plan, source) if source else with_model(plan, "/cache/made", is_cached=True)
    return container_spec(
        plan, ("train", "a"), folder=folder, user="1000:0", **{"typed": "a", "image": None, **options}
    )


def test_the_current_folder_keeps_its_path() -> None:
    spec = order()
    assert spec.folders == (("/srv/mine", False),)
    assert (spec.folder, spec.user, spec.argv) == ("/srv/mine", "1000:0", ("train", "a"))
    assert [(mount["Source"], mount["Target"], mount["Type"]) for mount in spec.mounts()] == [
        ("/srv/mine", "/srv/mine", "bind"),
        ("flashrl-cache-1000", "/cache", "volume"),
    ]


def test_what_lies_elsewhere_is_mounted_too_inputs_read_only(tmp_path: Path) -> None:
    recipe = tmp_path / "a.yaml"
    recipe.touch()
    made = order(run_dir="/big/runs/a-1", source="/models/qwen", typed=str(recipe))
    assert made.folders == (
        ("/srv/mine", False),
        ("/big/runs", False),
        ("/models/qwen", True),
        (str(tmp_path), True),
    )


def test_code_of_the_users_is_mounted_with_what_lies_beside_it(tmp_path: Path) -> None:
    plan = make_plan(Path("/srv/mine/runs/a-1"))
    code = (CodeFile(path="/code/rewards.py", copy_name="rewards.py", sha256=""),)
    plan = with_own_task(plan, code=code, val_sets={"aime": ValSet(file="/data/aime.jsonl", temperature=0.0)})
    made = container_spec(plan, ("train", "a"), folder=Path("/srv/mine"), user="1000:0", typed="a", image=None)
    assert made.folders[-2:] == (("/data/aime.jsonl", True), ("/code", True))


def test_a_gguf_file_is_mounted_and_its_folder_is_not() -> None:
    plan = make_plan(Path("/srv/mine/runs/a-1"))
    plan = with_model(plan, "/srv/mine/runs/.cache/1", gguf="/big/x.gguf", is_cached=True)
    made = container_spec(plan, ("train", "a"), folder=Path("/srv/mine"), user="1000:0", typed="a", image=None)
    assert made.folders[-1:] == (("/big/x.gguf", True),)


def test_a_folder_is_mounted_once_and_to_write_where_the_run_writes(tmp_path: Path) -> None:
    """The recipe and the model lie where the runs go: Docker refuses two mounts of one path."""
    recipe = tmp_path / "a.yaml"
    recipe.touch()
    made = order(run_dir=str(tmp_path / "a-1"), source=str(tmp_path), typed=str(recipe))
    assert made.folders == (("/srv/mine", False), (str(tmp_path), False))


def test_where_links_lead_is_mounted_too(tmp_path: Path) -> None:
    """The runs lie on a larger disk, the recipe beside another checkout; the model is a snapshot of the hub's cache."""
    here, disk, cache = (tmp_path / name for name in ("here", "disk", "models--a--b"))
    for each in (here, disk, cache / "blobs", cache / "snapshots" / "1"):
        each.mkdir(parents=True)
    (here / "runs").symlink_to(disk)
    (disk / "real.yaml").write_text("extends: arithmetic-tiny-int8\n")
    (here / "a.yaml").symlink_to(disk / "real.yaml")
    model = str(cache / "snapshots" / "1")
    made = order(folder=here, run_dir=str(here / "runs" / "a-1"), source=model, typed=str(here / "a.yaml"))
    assert made.folders == ((str(here), False), (str(disk), False), (model, True), (str(cache / "blobs"), True))


def test_a_recipe_that_is_extended_is_mounted_wherever_it_lies(tmp_path: Path) -> None:
    """Alone: beside it may lie a whole home."""
    recipe = tmp_path / "mine" / "a.yaml"
    recipe.parent.mkdir()
    recipe.write_text("extends: ../base.yaml\n")
    (tmp_path / "base.yaml").write_text("extends: arithmetic-tiny-int8\n")
    made = order(typed=str(recipe))
    assert made.folders[1:] == ((str(recipe.parent), True), (str(tmp_path / "base.yaml"), True))


@pytest.mark.parametrize("below", ["", "checkpoints/global_step_2"])
def test_a_run_that_is_resumed_is_mounted_wherever_it_lies(below: str, tmp_path: Path) -> None:
    (tmp_path / "a-1").mkdir()
    (tmp_path / "a-1" / "run.json").touch()
    assert order(resume=str(tmp_path / "a-1" / below)).folders[1:] == ((str(tmp_path), False),)
    assert order(resume=str(tmp_path)).folders == order(resume="auto").folders == order().folders


def test_a_run_below_the_home_is_named_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell does that in `--resume=~/runs/a-1`; inside, `~` is another folder."""
    commands = []
    monkeypatch.setattr(launch, "run_in_container", lambda order: commands.append(order.argv))
    monkeypatch.setenv("HOME", "/srv/me")
    plan, line = make_plan(tmp_path / "runs" / "a-1"), ("train", "a", "--resume=~/runs/a-1")
    recipe = load_recipe("arithmetic-tiny-int8")
    train_in_container(plan, recipe, typed="a", arguments=line, image=None, resume="~/runs/a-1")
    assert commands == [(*line, "--resume", "/srv/me/runs/a-1")]


def test_the_folder_of_the_runs_is_there_before_docker_mounts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = []
    monkeypatch.setattr(launch, "run_in_container", lambda order: there.append((tmp_path / "new" / "runs").is_dir()))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    plan, recipe = make_plan(tmp_path / "new" / "runs" / "a-1"), load_recipe("arithmetic-tiny-int8")
    train_in_container(plan, recipe, typed="a", arguments=("train", "a"), image=None)
    assert there == [True]


def test_the_plans_device_chooses_the_image_and_its_resources() -> None:
    cpu, gpu = order(), order(device="a100")
    assert (cpu.image, cpu.gpus, cpu.shm_bytes) == ("flashrl-appliance:cpu", False, 2 << 30)
    assert (gpu.image, gpu.gpus, gpu.shm_bytes) == ("flashrl-appliance:gpu", True, 32 << 30)
    assert order(image="registry.example/it:1").image == "registry.example/it:1"


def test_a_training_over_hosts_is_on_the_hosts_own_network() -> None:
    plan = make_plan(
        Path("/srv/mine/runs/a-1"),
        cluster=Cluster(device="cpu", nodes=2, token_file="/srv/mine/token"),
    )
    given = {"folder": FOLDER, "user": "1000:0", "typed": "a", "image": None}
    assert container_spec(plan, ("train", "a"), **given).network == "host"
    assert order().network == ""


def test_the_token_of_a_cluster_is_mounted_wherever_it_lies(tmp_path: Path) -> None:
    """Alone and read-only where it is there: beside it may lie a whole home. Else the head writes it."""
    token = tmp_path / "token"
    plan = make_plan(
        Path("/srv/mine/runs/a-1"),
        cluster=Cluster(device="cpu", nodes=2, token_file=str(token)),
    )
    options = {"folder": FOLDER, "user": "1000:0", "typed": "a", "image": None}
    assert container_spec(plan, ("train", "a"), **options).folders[1:] == ((str(tmp_path), False), ("/nowhere", True))
    token.touch()
    assert container_spec(plan, ("train", "a"), **options).folders[1:] == (("/nowhere", True), (str(token), True))


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with the hub's token, named by the hub's own variable."""
    file = tmp_path / "hf-token"
    file.write_text("hf_word")
    set_hub(monkeypatch, HF_TOKEN_PATH=str(file), HF_TOKEN=None, HUGGING_FACE_HUB_TOKEN=None)
    return file


@pytest.fixture
def docker_was_told(monkeypatch: pytest.MonkeyPatch) -> Callable[[ContainerSpec], Any]:
    """What the engine gets for a container whose program ends well."""
    client = MagicMock()
    monkeypatch.setattr(launch, "_client", lambda: client)
    client.containers.create.return_value.wait.return_value = {"StatusCode": 0}
    client.containers.create.return_value.attach.return_value = []

    def start(spec: ContainerSpec) -> Any:
        assert run_in_container(spec) == 0
        return client.containers.create.call_args

    return start


@pytest.mark.parametrize(
    ("image", "pulls", "message"),
    [
        ("flashrl-appliance:cpu", 0, "there is no image flashrl-appliance:cpu"),
        ("registry.example/it:1", 1, "the container does not start: no such host"),
    ],
)
def test_an_image_that_is_not_there(image: str, pulls: int, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry is asked for one that the user has named."""
    client = MagicMock()
    monkeypatch.setattr(launch, "_client", lambda: client)
    client.containers.create.side_effect = ImageNotFound("none")
    client.images.pull.side_effect = APIError("no such host")
    with pytest.raises(PreflightError) as raised:
        run_in_container(dataclasses.replace(order(), image=image))
    assert (raised.value.message, client.images.pull.call_count) == (message, pulls)


def test_a_container_that_does_not_start_is_removed(docker_was_told: Callable[[ContainerSpec], Any]) -> None:
    container = launch._client().containers.create.return_value
    container.start.side_effect = APIError("no runtime")
    with pytest.raises(PreflightError) as raised:
        docker_was_told(order())
    assert raised.value.message == "the container does not start: no runtime"
    container.remove.assert_called_once_with(force=True, v=True)


def test_the_hubs_token_is_a_file_inside_too(token: Path, docker_was_told: Callable[[ContainerSpec], Any]) -> None:
    """Where the run asks the hub. The word itself is in no variable and no argument."""
    create_call = docker_was_told(order(source="Qwen/Qwen2.5-0.5B"))
    secret = {"Target": "/run/secrets/hf_token", "Source": str(token), "Type": "bind", "ReadOnly": True}
    assert secret in create_call.kwargs["mounts"]
    assert create_call.kwargs["environment"] == {"HF_TOKEN_PATH": "/run/secrets/hf_token"}
    assert "hf_word" not in str(create_call)


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_a_container_has_a_read_only_image_and_no_rights(
    device: str, docker_was_told: Callable[[ContainerSpec], Any]
) -> None:
    settings = docker_was_told(order(device=device)).kwargs
    rights = {name: settings.get(name) for name in ("read_only", "cap_drop", "cap_add", "privileged", "security_opt")}
    assert rights == {
        **{"read_only": True, "cap_drop": ["ALL"], "cap_add": None, "privileged": None},
        "security_opt": ["no-new-privileges:true"],
    }
    assert settings["user"] == "1000:0"


def test_what_a_network_and_a_way_out_need_is_handed_on_and_no_other_variable(
    docker_was_told: Callable[[ContainerSpec], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's variables name the host's interfaces, which a container on Docker's own network has not."""
    network, way_out = {"NCCL_SOCKET_IFNAME": "eth1"}, {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    others = {"WANDB_API_KEY": "w", "VLLM_API_KEY": "v", "MY_NCCL_X": "m"}
    for name, value in (network | way_out | others).items():
        monkeypatch.setenv(name, value)
    assert docker_was_told(order()).kwargs["environment"] == way_out
    plan = make_plan(
        Path("/srv/mine/runs/a-1"),
        cluster=Cluster(device="cpu", nodes=2, token_file="/srv/mine/token"),
    )
    spec = container_spec(plan, ("train", "a"), folder=FOLDER, user="1000:0", typed="a", image=None)
    assert docker_was_told(spec).kwargs["environment"] == network | way_out


def test_a_run_that_asks_no_hub_gets_no_token(token: Path) -> None:
    assert order().token == order(source="/models/qwen").token == ""


def test_a_token_that_hf_auth_login_wrote_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_hub(monkeypatch, HF_TOKEN_PATH=None, HF_HOME=str(tmp_path))
    assert order(source="Qwen/Qwen2.5-0.5B").token == ""
    (tmp_path / "token").write_text("hf_word")
    assert order(source="Qwen/Qwen2.5-0.5B").token == str(tmp_path / "token")


def test_a_token_in_a_variable_stays_outside_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_hub(monkeypatch, HF_TOKEN="hf_word", HF_TOKEN_PATH=str(tmp_path / "none"))
    monkeypatch.setattr(launch, "run_in_container", lambda order: 0)
    recipe = load_recipe("arithmetic-tiny-int8", sets=("model.path=Qwen/Qwen2.5-0.5B", "model.builtin=null"))
    for source, notes in (("Qwen/Qwen2.5-0.5B", [NO_VARIABLE]), ("/models/qwen", [])):
        plan = with_model(make_plan(tmp_path / "runs" / "a-1"), source)
        assert train_in_container(plan, recipe, typed="a", arguments=("train", "a"), image=None) == 0
        assert capsys.readouterr().err.splitlines() == notes
    (tmp_path / "none").write_text("hf_another")
    plan = with_model(plan, "Qwen/Qwen2.5-0.5B")
    assert train_in_container(plan, recipe, typed="a", arguments=("train", "a"), image=None) == 0
    note = f"note: the container gets no token from a variable: it uses the one in {tmp_path / 'none'}\n"
    assert capsys.readouterr().err.replace("\n", "") == note.replace("\n", "")


NO_VARIABLE = (
    "note: the container gets no token from a variable: write it to a file (mode 0600), and set HF_TOKEN_PATH=FILE"
)


def test_paths_below_the_home_reach_the_container_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside, `~` is another folder. The program there reads them as they are meant here."""
    monkeypatch.setenv("HOME", "/srv/me: it's")
    sets = ("model.path=~/models/qwen", "model.builtin=null", "cluster.run_dir=~/runs", "task.kind=gsm8k")
    typed = load_recipe("arithmetic-tiny-int8", sets=(*sets, "task.train_file=/data/a.jsonl"))
    line = tuple(expand_home(typed))
    assert line[::2] == ("--set", "--set")
    inside = load_recipe("arithmetic-tiny-int8", sets=(*sets, "task.train_file=/data/a.jsonl", *line[1::2]))
    assert inside.model.path == "/srv/me: it's/models/qwen"
    assert (inside.cluster.run_dir, inside.task.train_file) == ("/srv/me: it's/runs", "/data/a.jsonl")


OWN = ("task.kind=own", "task.truth=answer", "task.rewards=[{name: ~/c/r.py:f, weight: 2}, {name: exact}]")
MODEL = ("model.builtin=null", "model.path=/no/model")  # the built-in one has no tools
SEVERAL = "task.val_sets={x.y: {file: ~/b/v.jsonl, samples: 4}, z: {size: 9}}"
READ_BELOW_HOME = {
    "one validation": (("task.train_file=~/a/t.jsonl", "task.val_file=~/b/v.jsonl"), ("a/t.jsonl", "b/v.jsonl", "c")),
    "several": (("task.train_file=~/a/t.jsonl", SEVERAL), ("a/t.jsonl", "b/v.jsonl", "c")),
    "tools": (("task.train_file=t.jsonl", "task.tools=~/d/t.py", "model.builtin=tiny-calculator"), ("c", "d")),
}


@pytest.mark.parametrize("name", READ_BELOW_HOME)
def test_files_of_a_task_of_ones_own_below_the_home_are_mounted_and_read_inside(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path begins in the current folder, which is the container's own; `~` is that of who types it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/srv/me: it's")
    given, read = READ_BELOW_HOME[name]
    sets = (*OWN, *given)
    typed = load_recipe("arithmetic-tiny-int8", sets=sets)
    plan = build_plan(typed, run_dir=tmp_path / "runs" / "a-1", host=HOST)
    made = container_spec(plan, (), typed="a", image=None, folder=tmp_path, user="1000:0")
    below = [(f"/srv/me: it's/{each}", True) for each in read]
    assert made.folders == ((str(tmp_path), False), *below)
    line = tuple(expand_home(typed))
    monkeypatch.setenv("HOME", "/another")
    inside = load_recipe("arithmetic-tiny-int8", sets=(*sets, *line[1::2]))
    assert build_plan(inside, run_dir=tmp_path / "runs" / "a-1", host=HOST).task == plan.task


def test_a_folder_beside_the_images_own_is_taken() -> None:
    assert order(folder=Path("/opt/mine"), run_dir="/opt/mine/runs/a-1").folders == (("/opt/mine", False),)


@pytest.mark.parametrize("folder", ["/", "/opt", "/opt/appliance/recipes", "/etc", "/tmp"])
def test_a_folder_that_would_hide_the_images_own_is_refused(folder: str) -> None:
    with pytest.raises(RecipeError) as caught:
        order(folder=Path(folder))
    assert caught.value.problems == [
        (
            f"--in-container: the current folder {folder} would hide the image's own",
            "start it from another folder, such as the one with your recipe",
        )
    ]


@pytest.mark.parametrize(
    "typed", ["/etc/passwd", "//etc/passwd", "/srv/mine/../../etc/passwd", "/lib/a", "/usr/a", "/tmp"]
)
def test_an_input_inside_the_images_own_is_refused(typed: str) -> None:
    with pytest.raises(RecipeError) as caught:
        order(source=typed)
    path = "/etc/passwd" if typed.endswith("passwd") else typed
    shown = f"--in-container: {path} would hide the image's own files"
    assert caught.value.problems == [(shown, "use folders of their own for runs, models and data")]


def test_a_run_root_inside_the_images_own_is_refused() -> None:
    with pytest.raises(RecipeError, match="/usr/local/share/runs would hide the image's own files"):
        order(run_dir="/usr/local/share/runs/a-1")


def test_the_program_inside_gets_the_same_line_without_the_container() -> None:
    line = ("train", "a.yaml", "--in-container", "--image", "b:1", "--set", "seed=1", "--image=c", "--json")
    assert inner_argv(line) == ("train", "a.yaml", "--set", "seed=1", "--json")


def test_what_the_image_brings_does_not_stop_it_and_a_missing_gpu_does(capsys: pytest.CaptureFixture[str]) -> None:
    brought = [Finding(Severity.ERROR, code, ("a",), "is missing") for code in ("flash-attention", "patch")]
    require_host([*brought, Finding(Severity.WARNING, "memory", ("memory",), "is small")])
    assert capsys.readouterr().err == ""
    with pytest.raises(PreflightError, match="1 finding above"):
        require_host([*brought, Finding(Severity.ERROR, "no-gpu", ("cluster.device",), "no GPU")])
    assert capsys.readouterr().err == "error: cluster.device: no GPU\n"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_container_that_saves_is_not_removed_because_nobody_reads(
    stream: str, docker_was_told: Callable[[ContainerSpec], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C ends the `| tee` as well. Without a signal only a stdout that nobody reads ends a container."""
    after: list[str] = []

    def frames() -> Iterator[tuple[bytes | None, bytes | None]]:
        if stream == "stdout":
            signal.raise_signal(signal.SIGINT)
        yield (b"word", None) if stream == "stdout" else (None, b"word")
        after.append("saved")

    gone = MagicMock()
    gone.flush.side_effect = BrokenPipeError
    monkeypatch.setattr(sys, stream, gone)
    container = launch._client().containers.create.return_value
    container.attach.return_value = frames()
    docker_was_told(order())
    assert after == ["saved"]
    container.attach.return_value = iter([(b"word", None)])
    if stream == "stdout":
        with pytest.raises(BrokenPipeError):
            docker_was_told(order())


def test_what_the_image_brings_is_not_told_beside_a_fault_of_the_recipe(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, *_ = sorted(launch._OF_THE_IMAGE)
    findings = [fault(("rollout.scheme",), "it is wrong", "mend it"), error(code, "vllm", "it is not installed")]
    monkeypatch.setattr(launch, "examine", lambda *_, **__: (None, None, findings))
    recipe = load_recipe("arithmetic-tiny-int8", sets=[f"cluster.run_dir={tmp_path}"])
    with pytest.raises(RecipeError) as caught:
        examine_and_train(recipe, typed="a", name=None, resume="never", dry_run=True, json_mode=False, image=None)
    assert caught.value.problems == [("rollout.scheme: it is wrong", "mend it")]


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_code_of_the_users_runs_in_the_container_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], resume: str
) -> None:
    """Not on the host, which says what it sees without."""
    rows = (f'{{"question": "{number}+1?", "answer": "{number + 1}"}}\n' for number in range(40))
    (tmp_path / "d.jsonl").write_text("".join(rows))
    names = (tmp_path / "rewards.py", tmp_path / "tools.py")
    task = ("kind=own", f"train_file={tmp_path}/d.jsonl", "prompt=question", "truth=answer", f"tools={names[1]}")
    sets = [f"task.{each}" for each in (*task, f"rewards=[{{name: '{names[0]}:f'}}]")]
    recipe = load_recipe("arithmetic-tiny-int8", sets=[*sets, *MODEL, f"cluster.run_dir={tmp_path}"])

    def errors() -> str:
        given = {"name": None, "resume": resume, "dry_run": True, "json_mode": False, "image": None}
        with pytest.raises(PreflightError):
            examine_and_train(recipe, typed="a", **given)
        return capsys.readouterr().err

    keys = ("rewards", "tools")
    missing = [f": task.{key}: {name}: no such file" for key, name in zip(keys, names, strict=True)]
    messages = errors()
    assert all(each in messages for each in missing)
    for each in names:
        each.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    messages = errors()
    assert not any(each in messages for each in missing)
    assert not (tmp_path / "ran").exists()
