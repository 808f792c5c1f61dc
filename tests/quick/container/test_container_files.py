"""The files of the image, read without a Docker engine: linted, parsed, and held against the locks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[3]


def test_hadolint_has_nothing_to_say() -> None:
    program = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([program, "--no-color", ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_every_base_has_a_tag_and_a_digest_and_is_a_build_argument() -> None:
    text = (ROOT / "Dockerfile").read_text()
    bases = dict(re.findall(r"^ARG (\w+_BASE)=(\S+)$", text, re.M))
    assert bases.keys() == {"PYTHON_BASE"}
    assert [base for base in bases.values() if not re.fullmatch(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}", base)] == []
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", text, re.M))
    sources = set(re.findall(r"^FROM (\S+)", text, re.M)) - stages
    assert sources == {"${PYTHON_BASE}", "${FLAVOUR}-packages"}
    assert {"cpu", "gpu", "cpu-packages", "gpu-packages"} <= stages


def test_every_lock_is_installed_by_hash_and_before_the_sources() -> None:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    installs = [line for line in text.splitlines() if "/opt/pip.sh" in line and line.startswith("RUN")]
    for lock in ("torch-cpu", "cpu", "gpu"):
        assert any(re.search(rf"--require-hashes[^&;]* -r /opt/{lock}\.txt", line) for line in installs), lock
    assert max(map(text.index, installs)) < text.index("COPY appliance ")


def test_what_the_official_python_brings_of_pip_is_taken_out() -> None:
    """What every later stage stands on. The stage `pip`, which is mounted, is another one."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    (body,) = re.findall(r"^FROM \S+ AS system$(.*?)(?=^FROM )", text, re.M | re.S)
    (run,) = re.findall(r"^RUN (.*)", body, re.M)
    removed = {path for words in re.findall(r"&& rm -rf ([^&]*)", run) for path in words.split()}
    assert removed >= {
        "/usr/local/bin/pip*",
        "/usr/local/bin/wheel",
        "/usr/local/lib/python3.11/site-packages/*",
    }


@pytest.mark.parametrize("flavour", ["cpu", "gpu"])
def test_the_bill_of_materials_names_every_pin_with_its_hashes(flavour: str) -> None:
    def bill() -> str:
        script = [sys.executable, ROOT / "container/sbom.py", "--flavour", flavour]
        return subprocess.run(script, capture_output=True, text=True, check=True).stdout

    document = json.loads(bill())
    locks = {"cpu": ("torch-cpu", "cpu", "smollm2"), "gpu": ("gpu", "smollm2")}[flavour]
    text = "".join((ROOT / f"requirements/{lock}.txt").read_text() for lock in locks)
    pins = dict(re.findall(r"^([a-z0-9][\w.-]*)==(\S+)", text, re.M))
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.5")
    assert {one["name"]: one["version"] for one in document["components"]} == pins
    hashes = [each["content"] for one in document["components"] for each in one["externalReferences"][0]["hashes"]]
    assert sorted(hashes) == sorted(re.findall(r"sha256:(\w{64})", text))
    assert bill() == json.dumps(document, indent=1)


def test_compose_reserves_gpus_and_publishes_nothing_but_on_loopback() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    ports = [port for service in services.values() for port in service.get("ports", ())]
    assert ports == ["127.0.0.1:6006:6006"]
    train = services["train"]
    assert train["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]
    assert train["ulimits"] == {"memlock": "${MEMLOCK:--1}", "stack": 67108864, "nofile": "${NOFILE:-65535}"}
    for service in services.values():
        assert service["read_only"] and service["init"] and service["cap_drop"] == ["ALL"]
        assert service["stop_grace_period"] == "15m"
        assert not any("TOKEN" in name and "PATH" not in name for name in service["environment"])


@pytest.mark.slow
def test_the_gpu_lock_resolves_for_its_platform(tmp_path: Path) -> None:
    """What `make lock` asks, with the committed lock as a preference: the same pins come out, so they fit together."""
    requirements, tool = ROOT / "requirements", tmp_path / "uv"
    version = re.search(r"uv_version=(\S+)", (requirements / "lock.sh").read_text())[1]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--target", tool, f"uv=={version}"], check=True)
    lock = tmp_path / "gpu.txt"
    lock.write_text((requirements / "gpu.txt").read_text())
    asked = ["--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28", "--generate-hashes"]
    command = [tool / "bin/uv", "pip", "compile", "gpu.in", "-o", lock, *asked, "--no-header", "--quiet"]
    subprocess.run(command, cwd=requirements, check=True, timeout=300)
    pin = re.compile(r"^([a-z0-9][\w.-]*)==(\S+)", re.M)
    assert dict(pin.findall(lock.read_text())) == dict(pin.findall((requirements / "gpu.txt").read_text()))


@pytest.mark.slow
def test_compose_is_valid_by_the_specification_of_its_second_version(tmp_path: Path) -> None:
    """`docker compose` reads files by the Compose Specification; check-jsonschema brings its schema in a package."""
    tool = tmp_path / "tool"
    wanted = ["--quiet", "--no-deps", "--target", tool, "check-jsonschema==0.39.0"]
    subprocess.run([sys.executable, "-m", "pip", "install", *wanted], check=True, capture_output=True)
    schema = json.loads((tool / "check_jsonschema/builtin_schemas/vendor/compose-spec.json").read_text())
    content = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    jsonschema.validate(content, schema)
    content["services"]["train"]["shm_sizes"] = "1gb"
    with pytest.raises(jsonschema.ValidationError, match="shm_sizes"):
        jsonschema.validate(content, schema)
