"""Nodes that differ are refused by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from plans import make_plan, make_rollout

from appliance.cluster.identity import (
    NodeQuestion,
    NodeReport,
    describe_node,
    differences,
    host_of,
    plant_canary,
    question_of,
)
from appliance.plan.model import RunPlan
from appliance.quant.scheme import Scheme

HEAD = NodeReport(
    name="alpha",
    python="3.11.7",
    fingerprint="f" * 64,
    versions=(("ray", "2.60.0"), ("vllm", "0.28.0")),
    canary="word",
    model="0" * 64,
    cpu_flags=frozenset({"avx512_vnni"}),
)


def plan_of(run_dir: Path, scheme: Scheme = Scheme.INT8) -> RunPlan:
    return make_plan(run_dir, rollout=make_rollout(scheme))


def test_equal_nodes_have_no_differences(tmp_path: Path) -> None:
    other = dataclasses.replace(HEAD, name="beta")
    assert differences([HEAD, other], head=HEAD, plan=plan_of(tmp_path), canary="word") == []


def test_each_difference_is_named_with_its_node(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    cases = {
        "runs other sources or locks than the head (eeeeeeeeeeee, ffffffffffff)": {"fingerprint": "e" * 64},
        "has Python 3.11.9, the head 3.11.7": {"python": "3.11.9"},
        "has vllm 0.27.0, the head 0.28.0": {"versions": (("ray", "2.60.0"), ("vllm", "0.27.0"))},
        "has vllm not installed, the head 0.28.0": {"versions": (("ray", "2.60.0"), ("vllm", ""))},
        f"does not see {plan.run_dir}: cluster.run_dir must be on a file system that all nodes share": {"canary": ""},
        f"sees another model in {plan.model.path}": {"model": "1" * 64},
        f"does not see {plan.model.path}": {"model": ""},
    }
    for sentence, change in cases.items():
        other = dataclasses.replace(HEAD, name="beta", **change)
        assert differences([HEAD, other], head=HEAD, plan=plan, canary="word") == [f"beta: {sentence}"]


def test_a_folder_of_the_same_name_on_another_file_system_is_told_by_its_canary(tmp_path: Path) -> None:
    other = dataclasses.replace(HEAD, name="beta", canary="a word of another run")
    [problem] = differences([other], head=HEAD, plan=plan_of(tmp_path), canary="word")
    assert problem.startswith("beta: does not see ")


def test_all_differences_of_all_nodes_come_at_once(tmp_path: Path) -> None:
    beta = dataclasses.replace(HEAD, name="beta", python="3.11.9", canary="")
    gamma = dataclasses.replace(HEAD, name="gamma", fingerprint="e" * 64)
    found = differences([HEAD, beta, gamma], head=HEAD, plan=plan_of(tmp_path), canary="word")
    assert [sentence.split(":")[0] for sentence in found] == ["beta", "beta", "gamma"]


def test_a_node_that_has_no_kernels_for_the_scheme_is_refused(tmp_path: Path) -> None:
    [problem] = differences([HEAD], head=HEAD, plan=plan_of(tmp_path, Scheme.FP8), canary="word")
    assert problem.startswith("alpha: cannot run `fp8`: vLLM's FP8 kernels on a CPU need AMX")


def test_a_node_describes_what_it_sees(tmp_path: Path) -> None:
    word = plant_canary(tmp_path)
    question = dataclasses.replace(question_of(plan_of(tmp_path)), distributions=("ray",))
    here = describe_node(question)
    assert here.canary == word and here.python.startswith("3.11")
    assert dict(here.versions)["ray"] == "2.60.0"
    blind = describe_node(NodeQuestion(canary=str(tmp_path / "elsewhere"), model="/nowhere", distributions=("none",)))
    assert (blind.canary, blind.model, blind.versions) == ("", "", (("none", ""),))


@pytest.mark.parametrize("address", ["host", "host:", ":80", "host:port"])
def test_an_address_without_host_or_port_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="is not host:port"):
        host_of(address)


def test_an_address_of_ipv6_is_read() -> None:
    assert host_of("[::1]:6379") == "::1"
