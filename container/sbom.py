"""The bill of materials of an image: what its locks name, as CycloneDX 1.5 JSON on stdout. Standard library only.

Made from the locks alone, so equal locks give an equal document: no time, and a serial number from the content.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

LOCKS = {"cpu": ("torch-cpu.txt", "cpu.txt", "smollm2.txt"), "gpu": ("gpu.txt", "smollm2.txt")}
ROOT = Path(__file__).resolve().parents[1]
PYTORCH = "https://download.pytorch.org/whl/cpu"
INSTALLED = Path("/opt/appliance")
ENTRY = re.compile(r"^(?P<name>[a-z0-9][a-z0-9._-]*)==(?P<version>[^ ]+) \\\n(?P<hashes>(?:    --hash=.*\n)+)", re.M)


def components(lock: str) -> Iterator[dict[str, object]]:
    """One per pinned package. lock: the text of a lock. A hash is that of one of the files that pip may take."""
    for entry in ENTRY.finditer(lock):
        name, version = entry["name"], entry["version"]
        purl = f"pkg:pypi/{name}@{version.replace('+', '%2B')}"
        hosted = f"https://pypi.org/project/{name}/{version}/"
        hashes = re.findall(r"sha256:(\w{64})", entry["hashes"])
        yield {
            "type": "library",
            "bom-ref": purl,
            "name": name,
            "version": version,
            "purl": purl,
            "externalReferences": [
                {
                    "type": "distribution",
                    "url": PYTORCH if version.endswith("+cpu") else hosted,
                    "hashes": [{"alg": "SHA-256", "content": each} for each in hashes],
                }
            ],
        }


def document(folder: Path, *, flavour: str) -> dict[str, object]:
    """The whole bill. folder: with pyproject.toml and requirements/."""
    version = re.search(r'^version = "(.*)"', (folder / "pyproject.toml").read_text(), re.M)[1]
    found_components = [
        each for lock in LOCKS[flavour] for each in components((folder / "requirements" / lock).read_text())
    ]
    content = json.dumps([version, found_components], sort_keys=True)
    subject = {"type": "container", "bom-ref": f"flashrl-appliance-{flavour}", "name": "flashrl-appliance"}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, content)}",
        "version": 1,
        "metadata": {"component": {**subject, "version": f"{version}-{flavour}"}},
        "components": sorted(found_components, key=lambda each: str(each["bom-ref"])),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--flavour", choices=sorted(LOCKS), required=True)
    chosen = parser.parse_args().flavour
    json.dump(document(INSTALLED if INSTALLED.is_dir() else ROOT, flavour=chosen), sys.stdout, indent=1)
