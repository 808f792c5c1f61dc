"""Versions and patches, judged before anything starts; the sources of the targets are read, not run."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from plans import HOST, make_plan, on

from appliance import patch
from appliance.patch import recorded, source_of, why_unfit
from appliance.plan import build
from appliance.plan.host import HostGpu
from appliance.preflight.checks import judge_stack
from appliance.preflight.inputs import StackFacts, read_stack
from appliance.record.plan import ExpectedAttestation
from appliance.terms.schemes import Scheme

PLAN = make_plan(
    Path("/runs/a-1"),
    pins=(("pydantic", "0.0.1"), ("no-such-thing", "1.0")),
    attestations=(ExpectedAttestation(role="driver", rank=0, scheme=Scheme.BF16, patches=("no-load-balancer",)),),
)
REMEDY = "install the locked requirements: `make demo` does, or the image"


def test_every_record_fits_what_is_installed() -> None:
    """And plans ask for each of them."""
    of_rollouts = build.CPU_ROLLOUT_PATCHES + build.CPU_ADAPTER_PATCHES + build.CPU_FP8_CACHE_PATCHES
    of_trainers = build.CPU_TRAINER_PATCHES
    assert set(recorded()) == {*build.VERL_PATCHES, *build.DRIVER_PATCHES, *of_trainers, *of_rollouts}
    assert {name: why_unfit(record) for name, record in recorded().items()} == dict.fromkeys(recorded(), "")


def test_nothing_heavy_is_imported_for_it() -> None:
    program = (
        "import sys; from appliance.patch import recorded, why_unfit\n"
        "[why_unfit(each) for each in recorded().values()]\n"
        "assert not {'torch', 'vllm', 'verl', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"sources": {"9.8": "", "9.9": ""}}, "made for verl 9.8, 9.9; 0.9.1 is installed"),
        ({"distribution": "no-such-thing"}, "made for no-such-thing 0.9.1; nothing is installed"),
        ({"target": "verl.nowhere:thing"}, "verl.nowhere:thing does not exist"),
        (
            {"target": "verl.workers.rollout.llm_server:LLMServerManager.gone"},
            "verl.workers.rollout.llm_server:LLMServerManager.gone does not exist",
        ),
        (
            {"sources": {"0.9.1": "0" * 64}},
            "the source of verl.workers.rollout.llm_server:LLMServerManager._init_global_load_balancer is not the one "
            "it was made for",
        ),
    ],
)
def test_a_record_that_does_not_fit(changed: dict[str, object], why: str) -> None:
    assert why_unfit(dataclasses.replace(recorded()["no-load-balancer"], **changed)) == why


@pytest.mark.parametrize(
    ("version", "why"), [("0.9.1", ""), ("0.9.1+local", "made for verl 0.9.1+local; 0.9.1 is installed")]
)
def test_a_version_without_a_build_stands_for_every_build(
    monkeypatch: pytest.MonkeyPatch, version: str, why: str
) -> None:
    record = recorded()["no-load-balancer"]
    record = dataclasses.replace(record, sources={version: next(iter(record.sources.values()))})
    assert why_unfit(record) == why
    if not why:
        monkeypatch.setattr(patch, "installed_version", lambda distribution: f"{version}+cpu")
        assert why_unfit(record) == ""


@pytest.mark.parametrize("name", ["recorded", "source_of", "why_unfit"])
def test_the_source_is_that_of_inspect(name: str) -> None:
    """`recorded` has a decorator."""
    assert source_of(f"appliance.patch:{name}") == inspect.getsource(getattr(patch, name))


def test_what_differs_is_read() -> None:
    facts = read_stack(PLAN)
    assert [(name, pinned) for name, pinned, _ in facts.versions] == [("pydantic", "0.0.1"), ("no-such-thing", "1.0")]
    assert facts.versions[1][2] == ""
    assert facts.patches == ()


def test_versions_and_patches_are_judged() -> None:
    facts = StackFacts(versions=(("verl", "0.9.1", ""), ("ray", "2.60.0", "2.61.0")))
    assert [(each.text, each.remedy) for each in judge_stack(PLAN, HOST, facts)] == [
        ("error: verl: nothing is installed, the plan is for 0.9.1", REMEDY),
        ("error: ray: 2.61.0 is installed, the plan is for 2.60.0", REMEDY),
    ]
    patched = StackFacts(patches=(("no-load-balancer", "verl.x:y does not exist"),))
    (only,) = judge_stack(PLAN, HOST, patched)
    assert (only.code, only.text) == ("patch", "error: patch no-load-balancer: verl.x:y does not exist")


def test_another_version_has_other_sources_which_is_said_once() -> None:
    facts = StackFacts(versions=(("verl", "0.9.1", "0.9.2"),), patches=(("no-load-balancer", "differs"),))
    assert [each.code for each in judge_stack(PLAN, HOST, facts)] == ["version"]


def test_a_gpu_plan_is_judged_where_there_is_a_gpu() -> None:
    plan = on(PLAN, "a100")
    facts = StackFacts(versions=(("vllm", "0.28.0", "0.28.0+cpu"),))
    assert list(judge_stack(plan, HOST, facts)) == []
    (only,) = judge_stack(plan, dataclasses.replace(HOST, gpus=(HostGpu("NVIDIA A100", 80 << 30),)), facts)
    assert only.remedy == f"{REMEDY} of the gpu flavour"
