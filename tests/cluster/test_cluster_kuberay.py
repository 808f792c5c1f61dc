"""docs/kuberay/rayjob.yaml: valid, and what it starts fits the recipe, the locks and the image."""

from __future__ import annotations

import copy
import itertools
import json
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from appliance.recipe.load import load_recipe

ROOT = Path(__file__).parents[2]
MANIFEST = ROOT / "docs/kuberay/rayjob.yaml"
Job = dict[str, Any]


def schemas() -> list[dict[str, Any]]:
    """Ours of the parts that are used, and KubeRay's own where somebody has it: KUBERAY_CRD=ray.io_rayjobs.yaml."""
    found = [json.loads(Path(__file__).with_name("rayjob.schema.json").read_text())]
    if file := os.environ.get("KUBERAY_CRD"):
        versions = yaml.safe_load(Path(file).read_text())["spec"]["versions"]
        whole = next(each for each in versions if each["name"] == "v1")["schema"]["openAPIV3Schema"]
        found.append(closed(whole))
    return found


def closed(node: Any) -> Any:
    """The schema with every object closed, as an API server with strict field validation reads it."""
    if isinstance(node, list):
        return [closed(each) for each in node]
    if not isinstance(node, dict):
        return node
    made = {key: closed(value) for key, value in node.items()}
    if isinstance(node.get("properties"), dict) and node.get("type") == "object":
        made.setdefault("additionalProperties", False)
    if node.get("x-kubernetes-int-or-string"):
        made = {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    return made


@pytest.fixture
def job() -> Job:
    return yaml.safe_load(MANIFEST.read_text())


def nodes_of(job: Job) -> list[Job]:
    cluster = job["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def test_the_manifest_is_valid(job: Job) -> None:
    for schema in schemas():
        jsonschema.validate(job, schema)


def _misspell(job: Job) -> None:
    job["spec"]["rayClusterSpec"]["headGroupSpecs"] = job["spec"]["rayClusterSpec"].pop("headGroupSpec")


def _misplace(job: Job) -> None:
    job["spec"]["authOptions"] = job["spec"]["rayClusterSpec"].pop("authOptions")


def _unquote(job: Job) -> None:
    job["spec"]["rayClusterSpec"]["rayVersion"] = 2.6


def _start_with_a_number(job: Job) -> None:
    nodes_of(job)[0]["rayStartParams"] = {"num-gpus": 8}


def _mount_nowhere(job: Job) -> None:
    del nodes_of(job)[1]["template"]["spec"]["containers"][0]["volumeMounts"][0]["mountPath"]


@pytest.mark.parametrize("breaking", [_misspell, _misplace, _unquote, _start_with_a_number, _mount_nowhere])
def test_a_broken_manifest_is_not(job: Job, breaking: Callable[[Job], None]) -> None:
    job = copy.deepcopy(job)
    breaking(job)
    for schema in schemas():
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(job, schema)


def test_its_nodes_are_those_of_the_recipe(job: Job) -> None:
    words = shlex.split(job["spec"]["entrypoint"])
    assert words[:2] == ["appliance", "train"]
    sets = [after for before, after in itertools.pairwise(words) if before == "--set"]
    cluster = load_recipe(words[2], sets=sets).cluster
    groups = nodes_of(job)
    assert 1 + sum(group["replicas"] for group in groups[1:]) == cluster.nodes
    for group in groups:
        container = group["template"]["spec"]["containers"][0]
        assert container["image"] == "flashrl-appliance:gpu"
        assert container["resources"]["limits"]["nvidia.com/gpu"] == cluster.gpus_per_node
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume.pop("name"): volume for volume in copy.deepcopy(group["template"]["spec"]["volumes"])}
        assert set(mounts.values()) == set(volumes)
        assert "persistentVolumeClaim" in volumes[mounts[cluster.run_dir]]
        token = Path(cluster.token_file)
        secret = job["spec"]["rayClusterSpec"]["authOptions"]["secretName"]
        assert volumes[mounts[str(token.parent)]] == {"secret": {"secretName": secret}} and token.name == "auth_token"


def test_it_names_the_locked_version_of_ray(job: Job) -> None:
    locked = re.search(r"^ray==(\S+)", (ROOT / "requirements/gpu.txt").read_text(), re.M)[1]
    assert job["spec"]["rayClusterSpec"]["rayVersion"] == locked
