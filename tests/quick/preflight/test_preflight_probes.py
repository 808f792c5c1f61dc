import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from hub_variables import set_hub

from appliance.plan.build import build_plan
from appliance.plan.host import HostGpu
from appliance.preflight import probes
from appliance.preflight.disk import read_disks
from appliance.preflight.inputs import read_inputs
from appliance.recipe.load import load_recipe
from appliance.record.checkpoints import FOLDER
from appliance.record.plan import RunPlan
from appliance.terms.shapes import ModelShape


def planned(tmp_path: Path, *sets: str, recipe: str = "gsm8k-tiny-int8") -> RunPlan:
    host = probes.read_host(tmp_path)
    return build_plan(load_recipe(recipe, sets=sets), run_dir=tmp_path / "runs" / "a-1", host=host)


def test_this_host(tmp_path):
    host = probes.read_host(tmp_path / "not" / "there" / "yet")
    assert 1 <= host.cores <= len(os.sched_getaffinity(0))
    assert host.memory_bytes >= host.memory_free_bytes > 0
    assert host.run_root_problem == ""
    assert ", family " in host.processor and ", model " in host.processor
    assert not (tmp_path / "not").exists()


def test_disks_are_those_that_files_really_go_to(tmp_path: Path, disk_of: Callable[[str], Path]) -> None:
    """No folder is needed; a link is followed, that of a whole run too, and one to nowhere is on the disk with it."""
    small, run_dir = disk_of("1m"), tmp_path / "runs" / "a-1"
    disks = read_disks(run_dir)
    assert disks.are_one and disks.run.folder == str(run_dir) and disks.run.free_bytes > 1 << 20
    assert disks.checkpoints.folder == str(run_dir / FOLDER)
    run_dir.mkdir(parents=True)
    (run_dir / FOLDER).symlink_to(small / "a-1")  # to what is not there yet
    disks = read_disks(run_dir)
    assert not disks.are_one and disks.run.free_bytes > 1 << 20
    assert disks.checkpoints.folder == str(small / "a-1") and disks.checkpoints.free_bytes <= 1 << 20
    plan = build_plan(load_recipe("arithmetic-tiny-int8"), run_dir=run_dir, host=probes.read_host(tmp_path))
    assert read_inputs(plan, ask_hub=False).disks.checkpoints.folder == str(small / "a-1")
    (tmp_path / "runs" / "a-2").symlink_to(small)
    disks = read_disks(tmp_path / "runs" / "a-2")
    assert disks.are_one and disks.run.folder == str(small) and disks.run.free_bytes <= 1 << 20


def test_a_file_where_the_run_root_should_be(tmp_path):
    file = tmp_path / "runs"
    file.write_text("")
    assert probes.read_host(file).run_root_problem == f"{file} is not a folder"


def test_a_read_only_file_system():
    assert probes.read_host(Path("/proc/sys")).run_root_problem.startswith("/proc/sys ")


def test_gpus_by_nvidia_smi(tmp_path, monkeypatch):
    """A program of that name stands in for one that only a GPU host has."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\necho 'NVIDIA A100-SXM4-80GB, 81920'\necho 'NVIDIA L4, 23034'\necho 'NVIDIA GB10, [N/A]'\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert probes.read_host(tmp_path).gpus == (
        HostGpu("NVIDIA A100-SXM4-80GB", 81920 << 20),
        HostGpu("NVIDIA L4", 23034 << 20),
        HostGpu("NVIDIA GB10", 0),
    )


def test_nvidia_smi_without_a_driver(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert probes.read_host(tmp_path).gpus == ()


def test_rows_are_read_and_told_with_their_line(tmp_path):
    data = tmp_path / "d.jsonl"
    data.write_text(json.dumps({"question": "1+1?", "answer": "#### 2"}) + "\n" + json.dumps({"question": "x"}) + "\n")
    inputs = read_inputs(planned(tmp_path, f"task.train_file={data}"), ask_hub=False)
    assert [finding.fact for finding in inputs.data_faults] == [f"{data}:2: the field `answer` is missing"]


def test_missing_and_empty_data_files(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    sets = (f"task.train_file={tmp_path}/no.jsonl", f"task.val_file={empty}")
    inputs = read_inputs(planned(tmp_path, *sets), ask_hub=False)
    assert [finding.fact for finding in inputs.data_faults] == [
        f"task.train_file: {tmp_path}/no.jsonl: no such file",
        f"task.val_file: {empty}: the file has no rows",
    ]


@pytest.mark.parametrize(
    ("files", "missing"),
    [
        ({}, ("config.json", "weights", "tokenizer")),
        ({"config.json": "{}", "tokenizer.json": "{}"}, ("weights",)),
        ({"config.json": "{}", "tokenizer.json": "{}", "model.safetensors": ""}, ("weights",)),
        ({"config.json": "{}", "model.safetensors": "x"}, ("tokenizer",)),
        ({"config.json": "{}", "model.safetensors": "x", "tokenizer.json": "{}"}, ()),
    ],
)
def test_parts_of_a_model_folder(tmp_path, files, missing):
    folder = tmp_path / "model"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    plan = planned(tmp_path, "model.builtin=null", f"model.path={folder}")
    assert read_inputs(plan, ask_hub=False).model_missing == missing


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ('{"num_attention_heads": 14, "max_position_embeddings": 64}', (14, 64, (), 14)),
        ('{"architectures": ["LlamaForCausalLM"]}', (0, 0, ("LlamaForCausalLM",))),
        ("{}", (0, 0)),
        ("not JSON", None),
        ("[]", None),
    ],
)
def test_shape_of_a_model(tmp_path, text, shape):
    (tmp_path / "config.json").write_text(text)
    plan = planned(tmp_path, "model.builtin=null", f"model.path={tmp_path}")
    found = read_inputs(plan, ask_hub=False).model_shape
    assert found == (ModelShape(*shape) if shape else None)


def test_a_snapshot_in_the_hub_cache_counts(tmp_path, monkeypatch):
    set_hub(monkeypatch, HF_HUB_CACHE=str(tmp_path / "hub"))
    plan = planned(tmp_path, "model.builtin=null", "model.path=owner/name")
    assert not read_inputs(plan, ask_hub=False).model_is_cached
    snapshot = tmp_path / "hub" / "models--owner--name" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    main = snapshot.parents[1] / "refs" / "main"
    main.parent.mkdir()
    main.write_text(snapshot.name)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (snapshot / name).write_text("x")
    inputs = read_inputs(plan, ask_hub=False)
    assert (inputs.model_is_cached, inputs.has_chat_template) == (True, False)
    (snapshot / "chat_template.jinja").write_text("x")
    assert read_inputs(plan, ask_hub=False).has_chat_template


@pytest.mark.parametrize(
    ("config", "has"),
    [(None, False), ("{}", False), ("[]", False), ("{", False), ('{"chat_template": "{{ messages }}"}', True)],
)
def test_where_a_chat_template_can_be(tmp_path, config, has):
    plan = planned(tmp_path, "model.builtin=null", f"model.path={tmp_path}")
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(config)
    assert read_inputs(plan, ask_hub=False).has_chat_template is has


def test_the_hub_is_asked_only_when_it_is_needed(tmp_path, monkeypatch):
    with socket.socket() as closed:  # bound and not listening: a connection is refused at once
        closed.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
        set_hub(monkeypatch, HF_ENDPOINT=endpoint, HF_HUB_CACHE=str(tmp_path / "hub"), HF_HUB_OFFLINE=None)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        needs, local = planned(tmp_path), planned(tmp_path, recipe="arithmetic-tiny-int8")
        refused = f"{endpoint} cannot be reached ([Errno 111] Connection refused)"
        assert read_inputs(needs, ask_hub=True).hub_problem == refused
        assert read_inputs(needs, ask_hub=False).hub_problem == ""
        assert read_inputs(local, ask_hub=True).hub_problem == ""
