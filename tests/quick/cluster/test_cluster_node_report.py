"""Nodes that differ are refused by name."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import tempfile
from pathlib import Path

import pytest
from hub_variables import set_hub
from plans import HOST, make_plan, make_rollout, with_model

from appliance.cluster.node_report import (
    NodeReport,
    describe_node,
    list_differences,
    list_warnings,
    plant_canary,
)
from appliance.patch import recorded
from appliance.plan.build import build_plan
from appliance.plan.host import ContainerFacts, HostGpu, Limits
from appliance.recipe.load import load_recipe
from appliance.record.plan import RunPlan
from appliance.settings.sections import Logging
from appliance.terms.schemes import Scheme
from appliance.terms.shapes import KNOWN

HEAD = NodeReport(
    name="alpha",
    python="3.11.7",
    fingerprint="f" * 64,
    versions=(("ray", "2.60.0"), ("vllm", "0.28.0")),
    canary="word",
    plan="a" * 64,
    model="0" * 64,
    model_problem="",
    facts=HOST,
)


H100 = HostGpu("NVIDIA H100 80GB HBM3", 80 << 30)
HUB_NAME = "Qwen/Qwen2.5-32B"


def with_gpus(report: NodeReport, *gpus: HostGpu) -> NodeReport:
    return dataclasses.replace(report, facts=dataclasses.replace(report.facts, gpus=gpus))


def plan_of(run_dir: Path, scheme: Scheme = Scheme.INT8) -> RunPlan:
    return make_plan(run_dir, rollout=make_rollout(scheme))


def plan_on_gpus(run_dir: Path) -> RunPlan:
    plan = make_plan(run_dir, rollout=make_rollout(Scheme.INT8), device="h100", gpus_per_node=2)
    return with_model(plan, HUB_NAME)


def load_and_plan(run_dir: Path) -> RunPlan:
    recipe = load_recipe("arithmetic-tiny-int8", sets=[f"cluster.run_dir={run_dir}"])
    return build_plan(recipe, run_dir=run_dir / "run", host=HOST)


def test_equal_nodes_have_no_differences(tmp_path: Path) -> None:
    other = dataclasses.replace(HEAD, name="beta")
    assert list_differences([HEAD, other], head=HEAD, plan=plan_of(tmp_path), canary="word") == []


def test_each_difference_is_named_with_its_node(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    cases = {
        "runs other sources or locks than the head (eeeeeeeeeeee, ffffffffffff)": {"fingerprint": "e" * 64},
        "has Python 3.11.9, the head 3.11.7": {"python": "3.11.9"},
        "has vllm 0.27.0, the head 0.28.0": {"versions": (("ray", "2.60.0"), ("vllm", "0.27.0"))},
        "has vllm not installed, the head 0.28.0": {"versions": (("ray", "2.60.0"), ("vllm", ""))},
        f"does not see {plan.run_dir}: cluster.run_dir must be on a file system that all nodes share": {"canary": ""},
        f"sees another plan.json in {plan.run_dir}: does its file system keep old files?": {"plan": ""},
        f"sees another model in {plan.weights.name_or_path}": {"model": "1" * 64},
        f"does not see {plan.weights.name_or_path}: no such folder": {"model": "", "model_problem": "no such folder"},
        f"{plan.weights.name_or_path}: it has no weights": {"model_problem": "it has no weights"},
        "patch a: its target does not exist": {"patches": (("a", "its target does not exist"),)},
    }
    for sentence, change in cases.items():
        other = dataclasses.replace(HEAD, name="beta", **change)
        assert list_differences([HEAD, other], head=HEAD, plan=plan, canary="word") == [f"beta: {sentence}"]


def test_a_folder_of_the_same_name_on_another_file_system_is_told_by_its_canary(tmp_path: Path) -> None:
    other = dataclasses.replace(HEAD, name="beta", canary="a word of another run")
    [problem] = list_differences([other], head=HEAD, plan=plan_of(tmp_path), canary="word")
    assert problem.startswith("beta: does not see ")


def test_a_node_is_judged_as_the_heads_host_is(tmp_path: Path) -> None:
    """A limit that is too low, and memory for shared objects that is not there: both named, with the node."""
    small = dataclasses.replace(HOST, limits=Limits(open_files=256), shm_free_bytes=1 << 20)
    other = dataclasses.replace(HEAD, name="beta", facts=small)
    plan = plan_of(tmp_path)
    assert list_differences([HEAD, other], head=HEAD, plan=plan, canary="word") == [
        "beta: ulimit -n: a process may open 256 files, Ray and vLLM want 1024",
        "beta: /dev/shm: 1 MiB free, Ray and the weight updates need about 256",
    ]
    fine = dataclasses.replace(other, facts=dataclasses.replace(HOST, memory_free_bytes=1))
    assert list_differences([fine], head=HEAD, plan=plan, canary="word") == []  # a warning is the head's to say


def test_what_a_nodes_host_lacks_is_named(tmp_path: Path) -> None:
    """A library, a folder that can be written, memory (a warning), and a package that is asked for."""
    poor = dataclasses.replace(
        HOST, missing_libraries=("libnuma.so.1",), run_root_problem="/runs cannot be written", memory_free_bytes=1 << 30
    )
    other = dataclasses.replace(HEAD, name="beta", facts=poor)
    plan = load_and_plan(tmp_path)
    assert list_differences([HEAD, other], head=HEAD, plan=plan, canary="word") == [
        "beta: libnuma.so.1: the shared library is missing, vLLM needs it",
        "beta: cluster.run_dir: /runs cannot be written",
    ]
    [said] = list_warnings([HEAD, other], head=HEAD, plan=plan)
    assert re.match(r"beta: memory: \d+\.\d GiB are missing: 1\.0 GiB free, the run takes about ", said), said
    recipe = load_recipe("dapo-7b-int8", sets=[f"cluster.run_dir={tmp_path}", "trainer.attention=flash_attention_2"])
    on_gpus = build_plan(recipe, run_dir=tmp_path / "run", host=HOST)
    gpus = (H100,) * on_gpus.cluster.gpus_per_node
    head, bare = with_gpus(HEAD, *gpus), dataclasses.replace(HOST, gpus=gpus)
    [problem] = list_differences(
        [dataclasses.replace(head, name="beta", facts=bare)], head=head, plan=on_gpus, canary="word"
    )
    assert problem.startswith("beta: trainer.attention: `flash_attention_2` needs the package")


def test_a_node_with_another_version_is_not_told_of_its_patches_too(tmp_path: Path) -> None:
    versions = (("ray", "2.60.0"), ("vllm", "0.27.0"))
    other = dataclasses.replace(HEAD, name="beta", versions=versions, patches=(("a", "made for another"),))
    found = list_differences([other], head=HEAD, plan=plan_of(tmp_path), canary="word")
    assert found == ["beta: has vllm 0.27.0, the head 0.28.0"]


def test_what_a_nodes_container_lacks_is_named(tmp_path: Path) -> None:
    """Its own GPUs apart, which are counted already."""
    container = ContainerFacts("gpu", "/runs", run_root_lasts=True, uid=1, gid=0, tmp_runs_programs=False)
    host = dataclasses.replace(HOST, container=container, run_root_problem="/runs cannot be written")
    other = dataclasses.replace(HEAD, name="beta", facts=host)
    found = list_differences([other], head=HEAD, plan=plan_of(tmp_path), canary="word")
    assert found == [
        "beta: cluster.run_dir: /runs: the volume does not let user 1, group 0 write",
        f"beta: {tempfile.gettempdir()}: programs cannot be started from it, and compiled kernels lie there",
    ]


def test_a_node_with_too_little_memory_for_what_is_offloaded_is_named(tmp_path: Path) -> None:
    recipe = load_recipe("dapo-32b-bf16", sets=["trainer.offload_optimizer=true", f"cluster.run_dir={tmp_path}"])
    plan = build_plan(recipe, run_dir=tmp_path / "run", host=HOST)
    gpus = (H100,) * 8
    head = with_gpus(HEAD, *gpus)
    small = dataclasses.replace(HOST, gpus=gpus, memory_bytes=50 << 30)
    other = dataclasses.replace(head, name="beta", facts=small)
    shape = KNOWN["Qwen/Qwen2.5-32B"]
    [problem] = list_differences([other], head=head, plan=plan, canary="word", shape=shape)
    assert problem == ("beta: trainer.offload_optimizer: 92 GiB of the trainer's state are offloaded, this host has 50")
    large = dataclasses.replace(other, facts=dataclasses.replace(small, memory_bytes=2000 << 30))
    assert list_differences([large], head=head, plan=plan, canary="word", shape=shape) == []


def test_warnings_of_other_hosts_are_said_and_stop_nothing(tmp_path: Path) -> None:
    few = dataclasses.replace(HOST, limits=Limits(threads=100))
    plan, here = plan_of(tmp_path), dataclasses.replace(HEAD, facts=few)
    other = dataclasses.replace(here, name="beta")
    assert list_differences([here, other], head=HEAD, plan=plan, canary="word") == []
    assert list_warnings([here, other], head=HEAD, plan=plan) == [
        "beta: ulimit -u: 100 processes and threads are allowed, a run on 2 cores may start 2048"
    ]


def test_a_worker_with_fewer_cores_than_threads_is_told(tmp_path: Path) -> None:
    """HOST has 2 cores. The head's own number is the plan's."""
    beta, gamma = (dataclasses.replace(HEAD, name=name) for name in ("beta", "gamma"))
    with_one_core = dataclasses.replace(gamma, facts=dataclasses.replace(HOST, cores=1))
    plan = plan_of(tmp_path).replace(env=(("OMP_NUM_THREADS", "2"),))
    assert list_warnings([HEAD, beta, with_one_core], head=HEAD, plan=plan) == [
        "gamma: has 1 core: a process there takes as many threads, not the plan's 2"
    ]
    plan = plan.replace(env=(("OMP_NUM_THREADS", "8"),))
    assert list_warnings([HEAD, beta], head=HEAD, plan=plan) == [
        "beta: has 2 cores: a process there takes as many threads, not the plan's 8"
    ]
    assert list_warnings([HEAD, with_one_core], head=HEAD, plan=plan.replace(env=())) == []


def test_a_worker_needs_no_log_backend(tmp_path: Path) -> None:
    plan = plan_of(tmp_path).replace(logging=Logging(backends=("wandb", "trackio")))
    without = dataclasses.replace(HEAD, name="beta", facts=dataclasses.replace(HOST, packages=frozenset()))
    assert list_differences([HEAD, without], head=HEAD, plan=plan, canary="word") == []


def test_all_differences_of_all_nodes_come_at_once(tmp_path: Path) -> None:
    beta = dataclasses.replace(HEAD, name="beta", python="3.11.9", canary="")
    gamma = dataclasses.replace(HEAD, name="gamma", fingerprint="e" * 64)
    found = list_differences([HEAD, beta, gamma], head=HEAD, plan=plan_of(tmp_path), canary="word")
    assert [sentence.split(":")[0] for sentence in found] == ["beta", "beta", "gamma"]


def test_a_node_that_has_no_kernels_for_the_scheme_is_refused(tmp_path: Path) -> None:
    [problem] = list_differences([HEAD], head=HEAD, plan=plan_of(tmp_path, Scheme.FP8), canary="word")
    assert problem.startswith("alpha: cannot run `fp8`: vLLM's FP8 kernels on a CPU need AMX")


def test_gpus_of_another_kind_too_few_or_smaller_ones_are_refused(tmp_path: Path) -> None:
    plan, head = plan_on_gpus(tmp_path), with_gpus(HEAD, H100, H100)
    a100 = HostGpu("NVIDIA A100-SXM4-80GB", 80 << 30)
    cases = {
        "has NVIDIA H100 80GB HBM3, the plan wants 2 x `h100`": (H100,),
        "has NVIDIA H100 80GB HBM3, NVIDIA A100-SXM4-80GB, the plan wants 2 x `h100`": (H100, a100),
        "has none, the plan wants 2 x `h100`": (),
        "has GPUs of 65536 MiB, the head of 81920": (H100, HostGpu("NVIDIA H100", 64 << 30)),
    }
    for sentence, gpus in cases.items():
        other = dataclasses.replace(with_gpus(head, *gpus), name="beta")
        assert list_differences([head, other], head=head, plan=plan, canary="word") == [f"beta: {sentence}"]
    alike = HostGpu(H100.product, (80 << 30) * 99 // 100)
    assert list_differences([with_gpus(head, alike, alike)], head=head, plan=plan, canary="word") == []
    less = HostGpu(H100.product, (80 << 30) * 97 // 100)
    [problem] = list_differences([with_gpus(head, less, less)], head=head, plan=plan, canary="word")
    assert problem == "alpha: has GPUs of 79462 MiB, the head of 81920"
    more = with_gpus(dataclasses.replace(head, name="beta"), H100, H100, H100, HostGpu("NVIDIA H100 NVL", 94 << 30))
    assert list_differences([head, more], head=head, plan=plan, canary="word") == []


def test_a_model_of_the_hub_is_compared_by_its_commit(tmp_path: Path) -> None:
    plan, head = plan_on_gpus(tmp_path), dataclasses.replace(with_gpus(HEAD, H100, H100), model="1" * 40)
    cases = {
        f"would load {HUB_NAME} at 222222222222, the head at 111111111111": {"model": "2" * 40},
        f"does not see {HUB_NAME}: HF_HUB_OFFLINE is set": {"model": "", "model_problem": "HF_HUB_OFFLINE is set"},
    }
    for sentence, change in cases.items():
        other = dataclasses.replace(head, name="beta", **change)
        assert list_differences([head, other], head=head, plan=plan, canary="word") == [f"beta: {sentence}"]


def test_a_node_describes_what_it_sees(tmp_path: Path) -> None:
    word = plant_canary(tmp_path)
    (tmp_path / "plan.json").write_text("{}")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    plan = with_model(plan_of(tmp_path), model)
    here = describe_node(plan.replace(pins=(("ray", ""),)))
    assert here.canary == word and here.python.startswith("3.11")
    assert here.plan == here.model == hashlib.sha256(b"{}").hexdigest()
    assert dict(here.versions)["ray"] == "2.60.0"
    assert here.model_problem == "it has no weights and no tokenizer"
    elsewhere = plan.replace(run_dir=str(tmp_path / "elsewhere"), pins=(("none", ""),))
    blind = describe_node(with_model(elsewhere, "/nowhere"))
    assert (blind.canary, blind.plan, blind.model, blind.versions) == ("", "", "", (("none", ""),))
    assert blind.model_problem == "no such folder, or without config.json"


def test_a_node_tries_the_patches_that_the_plan_wants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = load_and_plan(tmp_path)
    name = min(name for each in plan.attestations for name in each.patches)
    assert describe_node(plan).patches == ()
    patch = recorded()[name]
    unfit = {**recorded(), name: dataclasses.replace(patch, sources=dict.fromkeys(patch.sources, "0" * 64))}
    monkeypatch.setattr("appliance.preflight.inputs.recorded", lambda: unfit)
    target = unfit[name].target
    assert describe_node(plan).patches == ((name, f"the source of {target} is not the one it was made for"),)


def test_a_node_reads_its_gpus_by_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 81559'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    set_hub(monkeypatch, HF_HUB_OFFLINE="1", HF_HUB_CACHE=str(tmp_path))
    report = describe_node(plan_on_gpus(tmp_path))
    assert report.facts.gpus == (HostGpu("NVIDIA H100 80GB HBM3", 81559 << 20),)
    assert (report.model, report.model_problem) == ("", "HF_HUB_OFFLINE is set")
