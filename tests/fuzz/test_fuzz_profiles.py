"""Profiles: safetensors with a header of ours, and FlashRL's pickles, which are read and never run."""

from __future__ import annotations

import io
import json
import pickle
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz_surface import attempt, fuzzed
from fuzz_text import VARIANTS, as_json, deep, raw, seeds, values, variants
from hypothesis import strategies as st
from plans import make_plan
from profiles import read_profile
from safetensors.torch import save

from appliance.errors import RecipeError
from appliance.finding import fault
from appliance.preflight.inputs import profile_problem
from appliance.profile.command import table
from appliance.quant.files import HEADER_KEY, PROFILE_FILE, read_file_header
from appliance.quant.profile import (
    LayerError,
    Memory,
    Origin,
    Predicted,
    Profile,
    Settings,
    Smoothing,
    SmoothingGroup,
    fold,
)
from appliance.record.plan import ProfilePlan
from appliance.terms.schemes import Scheme
from flashrl_compat import unpickle

NORM = "model.layers.0.input_layernorm.weight"
GOOD = Profile(
    origin=Origin(kind="calibrated", model="m", versions={"torch": "2"}),
    scheme=Scheme.INT8,
    settings=Settings(),
    smoothing=Smoothing((SmoothingGroup(NORM, ("model.layers.0.self_attn.q_proj.weight",), torch.ones(4)),)),
    layers=(LayerError(("a",), ("a.q_proj",), 0.1, 0.1, 0.2, True),),
    predicted=Predicted(8, 1e-3, 1e-3, 1e-3, 1e-3, 1.1),
    memory=Memory(1, 1, 1),
).header()
TENSORS = {f"smoothing.{NORM}": torch.ones(4), "activation.x": torch.ones(4)}


@pytest.fixture(scope="module", autouse=True)
def torch_is_warm() -> None:
    """What torch imports at its first use is no import that a file asked for."""
    unpickle._warm_up()
    fold(NORM, torch.ones(4), smoothing=Smoothing((SmoothingGroup(NORM, (), torch.ones(4)),)))


def safetensors(header: str, tensors: dict[str, torch.Tensor] | None = None) -> bytes:
    return save(TENSORS if tensors is None else tensors, metadata={HEADER_KEY: header})


@st.composite
def headers(draw: st.DrawFn) -> bytes:
    """A file whose header is like a good one, with wild values at any depth."""
    header: Any = json.loads(as_json(GOOD))
    for _ in range(draw(st.integers(1, 3))):
        level = header
        while draw(st.booleans()) and (
            inner := [each for each in _inside(level) if isinstance(each, dict | list) and each]
        ):
            level = draw(st.sampled_from(inner))
        key = draw(st.sampled_from(list(level) if isinstance(level, dict) else range(len(level))))
        level[key] = draw(values)
    return safetensors(as_json(header))


def _inside(level: Any) -> list[Any]:
    return list(level.values()) if isinstance(level, dict) else level


@st.composite
def tables(draw: st.DrawFn) -> bytes:
    """A good header over a wild table of tensors: types, shapes and offsets that lie."""
    entry = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    entry |= draw(st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "x"]), values, max_size=2))
    if draw(st.booleans()):
        entry["dtype"] = draw(st.sampled_from(["F64", "I8", "BOOL", "F8_E4M3", "BF16", "U64", "I64", "F4", "C64"]))
    metadata = draw(st.one_of(st.just({HEADER_KEY: as_json(GOOD)}), values, st.just({HEADER_KEY: 1})))
    text = as_json({"__metadata__": metadata, f"smoothing.{NORM}": entry}).encode()
    length = draw(st.one_of(st.just(len(text)), st.integers(0, 2**64 - 1)))
    return length.to_bytes(8, "little") + text + draw(st.binary(min_size=0, max_size=16)).ljust(16, b"\0")


def numbers() -> st.SearchStrategy[bytes]:
    """A good file with wild scales."""
    scales = st.lists(st.one_of(st.floats(width=32), st.sampled_from([0.0, 1.0, 0.5, 4096.0, 8192.0])), max_size=4)
    return scales.map(lambda found: safetensors(as_json(GOOD), {f"smoothing.{NORM}": torch.tensor(found)}))


def read(folder: Path) -> Profile:
    plan = make_plan(
        folder / "r-1",
        profile=ProfilePlan(folder=str(folder), source=str(folder), scheme=Scheme.INT8),
    )
    problem = profile_problem(plan)  # never raises: preflight says it
    header = read_file_header(folder)
    assert table(header, folder=str(folder))
    profile = read_profile(folder)
    assert not problem or "for `" in problem, "a profile that a run would read was refused by preflight"
    for group in profile.smoothing.groups:
        fold(group.source, torch.ones(group.scale_K.shape), smoothing=profile.smoothing)
    return profile


nested = st.sampled_from(deep(2000)).map(safetensors)


@fuzzed(
    "profile headers", variants=VARIANTS, seed=seeds, content=st.one_of(headers(), tables(), numbers(), nested, raw)
)
def test_fuzz_profiles(room: Path, content: bytes, seed: int) -> None:
    for each in variants(content, seed):
        (room / "profile.safetensors").write_bytes(each)
        attempt("profile headers", lambda: read(room), folder=room)


def saved(value: object, *, is_zip: bool) -> bytes:
    made = io.BytesIO()
    torch.save(value, made, _use_new_zipfile_serialization=is_zip)
    return made.getvalue()


ENTRY = {"input_scale": torch.ones(2), "output_scale": 1.0, "type": torch.int8}
FILES = [saved({NORM: ENTRY}, is_zip=is_zip) for is_zip in (True, False)] + [pickle.dumps({NORM: 1.0})]
GLOBALS = (
    "posix\nsystem",
    "os\nsystem",
    "builtins\neval",
    "builtins\nexec",
    "subprocess\nPopen",
    "torch\nload",
    "builtins\ngetattr",
)
GLOBALS += (
    "torch.hub\nload",
    "runpy\n_run_code",
    "importlib\nimport_module",
    "shutil\nrmtree",
    "torch._utils\n_rebuild_tensor_v2",
)
PIECES = (
    *(f"c{name}\n".encode() for name in GLOBALS),
    *(
        b"(X\x04\x00\x00\x00echotR",
        b"\x85R",
        b"(tR",
        b"}",
        b"]",
        b")",
        b"0",
        b"2",
        b"b",
        b"a",
        b"s",
        b"u",
        b".",
        b"Nq\x00",
    ),
    *(
        b"\x80\x05",
        b"\x95\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"\x8a\x08" + b"\xff" * 8,
        b"X\xff\xff\xff\x7f",
        b"h\xff",
        b"Q",
        b"P1\n",
    ),
    *(
        b"I" + b"9" * 5000 + b"\n",
        b"cos\nsystem\n(Vtouch x\ntR.",
        b"\x93",
        b"\x8c\x05posix\x8c\x06system\x93",
        b"i__main__\nx\n",
    ),
)


@st.composite
def pickles(draw: st.DrawFn) -> bytes:
    """A good file with bytes changed, cut and put in, or instructions of a pickle in any order."""
    if draw(st.booleans()):
        return b"".join(draw(st.lists(st.one_of(st.sampled_from(PIECES), st.binary(max_size=3)), max_size=8)))
    content = bytearray(draw(st.sampled_from(FILES)))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(content)))
        content[start : start + draw(st.integers(0, 4))] = draw(
            st.one_of(st.binary(max_size=4), st.sampled_from(PIECES))
        )
    return bytes(content)


@pytest.fixture
def little_memory() -> Iterator[None]:
    """As the reader limits itself, so that a size that lies costs nothing."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def unpickled(file: Path) -> bytes:
    """As the reader's process answers: what it refuses, the launcher turns into a RecipeError."""
    with file.open("rb") as opened:
        try:
            return unpickle.read(opened)
        except (unpickle.NotAProfile, pickle.UnpicklingError, MemoryError) as error:
            raise RecipeError([fault((str(file),), str(error))]) from error


@fuzzed("profile.pt", variants=VARIANTS, seed=seeds, content=st.one_of(pickles(), pickles(), raw))
def test_fuzz_flashrl_profiles(room: Path, little_memory: None, content: bytes, seed: int) -> None:
    for each in variants(content, seed):
        (room / "profile.pt").write_bytes(each)
        attempt("profile.pt", lambda: unpickled(room / "profile.pt"), folder=room)


def test_the_pieces_of_a_pickle_run_where_one_is_trusted(room: Path) -> None:
    """What the surface feeds would harm: plain pickle does what it says."""
    marker = room / "marker"
    pickle.loads(b"cposix\nsystem\n(Vtouch " + str(marker).encode() + b"\ntR.")
    assert marker.exists()


def test_settings_that_a_header_leaves_out_have_their_defaults(room: Path) -> None:
    good = json.loads(as_json(GOOD))
    (room / PROFILE_FILE).write_bytes(safetensors(json.dumps(good | {"settings": {}})))
    header = read_file_header(room)
    assert header["settings"]["strength"] == Settings().strength and table(header, folder=str(room))
