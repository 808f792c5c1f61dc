"""Reads FlashRL's `profile.pt`, a pickle, where it can do no harm: `flashrl_compat.unpickle FILE OUT ROOM`.

Everything is imported and every file is open before the pickle is looked at. Then this process gives up what it has:
its network where the host allows it, its user (nobody, when it was root), its groups, new privileges for ever, memory,
time, and the making of processes; its folder is a new, empty one. Only then torch's restricted unpickler runs,
which makes tensors and plain containers and calls nothing, and the result is checked again. What comes out is
safetensors: data, not code.
"""

from __future__ import annotations

import ctypes
import io
import os
import pickle
import re
import resource
import struct
import sys
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from appliance.errors import RecipeError, first_line

_NOBODY = 65534
_PR_SET_NO_NEW_PRIVS = 38
_CLONE_NEWNET = 0x40000000
_CLONE_NEWUSER = 0x10000000
_CPU_S = 120
_SPARE_BYTES = 2 << 30
_TORCH_SAYS = (  # of a file that is none
    *(AssertionError, AttributeError, EOFError, LookupError, OSError, OverflowError, RuntimeError, TypeError),
    *(ValueError, struct.error),
)
_FIELDS = {"input_scale", "output_scale", "type"}


class NotAProfile(ValueError):
    """The file has something else than FlashRL's int8 profile."""


def read(file: io.BufferedReader) -> bytes:
    """Read the profile as safetensors. Raises pickle.UnpicklingError for a forbidden pickle, NotAProfile for another
    file."""
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except _TORCH_SAYS as error:
        raise NotAProfile(f"torch cannot read it: {first_line(error)}") from error
    return save(_checked(loaded))


def _checked(loaded: object) -> dict[str, Tensor]:
    """Flat tensors by `<field>.<parameter>`; the number 1.0 means no scale. Raises NotAProfile."""
    if isinstance(loaded, list) and all(isinstance(name, str) for name in loaded):
        raise NotAProfile("it is a list of names, FlashRL's profile for FP8, which has no scales: FP8 needs no profile")
    if type(loaded) is not dict or not loaded:
        raise NotAProfile(f"a mapping of layers is expected, found {type(loaded).__name__}")
    tensors: dict[str, Tensor] = {}
    for name, entry in loaded.items():
        if not isinstance(name, str) or type(entry) is not dict or set(entry) != _FIELDS:
            raise NotAProfile(f"{name!r}: {', '.join(sorted(_FIELDS))} are expected")
        if not isinstance(entry["type"], torch.dtype):
            raise NotAProfile(f"{name}: type is {type(entry['type']).__name__}, not a torch type")
        for key in ("input_scale", "output_scale"):
            value = entry[key]
            if isinstance(value, Tensor):
                tensors[f"{key}.{name}"] = _plain(value, name=f"{name}: {key}")
            elif value != 1.0:
                raise NotAProfile(f"{name}: {key} is neither a tensor nor 1.0")
    return tensors


def _plain(value: Tensor, *, name: str) -> Tensor:
    if value.layout is not torch.strided or not value.is_floating_point() or value.is_meta:
        raise NotAProfile(f"{name} is not a plain tensor of floats")
    flat = value.detach().float().flatten().clone()
    if not bool(torch.isfinite(flat).all()):
        raise NotAProfile(f"{name} has a value that is not finite")
    return flat


def give_up_rights(*, room: Path, file_bytes: int) -> None:
    """Give up every right that reading a file does not need. room: an empty folder, the only place to write."""
    libc = ctypes.CDLL(None, use_errno=True)
    os.chdir(room)
    is_root = os.geteuid() == 0
    if libc.unshare(_CLONE_NEWNET if is_root else _CLONE_NEWUSER | _CLONE_NEWNET):
        ctypes.set_errno(0)  # a container may forbid it: the other walls remain
    if is_root:
        os.chown(room, _NOBODY, _NOBODY)
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = {
        resource.RLIMIT_AS: used + 4 * file_bytes + _SPARE_BYTES,
        resource.RLIMIT_CPU: _CPU_S,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 4 * file_bytes + (1 << 20),
    }
    for kind, limit in limits.items():
        hard = resource.getrlimit(kind)[1]
        value = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (value, value))


def _warm_up() -> None:
    """Everything that torch and safetensors import at first use, while the files can still be read."""
    profile = {"x": {"input_scale": torch.nn.Parameter(torch.ones(1)) * 2, "type": torch.int8}}
    for value, zipped in ((profile, True), ([1], False)):
        torch.save(value, made := io.BytesIO(), _use_new_zipfile_serialization=zipped)
        made.seek(0)
        torch.load(made, weights_only=True)
    save({"x": torch.ones(1)})


def main(arguments: list[str]) -> int:
    source, result, room = (Path(each).absolute() for each in arguments)
    torch.set_num_threads(1)
    _warm_up()
    with source.open("rb") as file, result.open("wb") as out:
        give_up_rights(room=room, file_bytes=os.fstat(file.fileno()).st_size)
        try:
            out.write(read(file))
        except pickle.UnpicklingError as error:
            out.write(f"it asks for more than tensors and plain containers: {_requested_name(error)}".encode())
            return RecipeError.exit_code
        except (NotAProfile, MemoryError) as error:
            out.write(first_line(error).encode())
            return RecipeError.exit_code
    return 0


def _requested_name(error: pickle.UnpicklingError) -> str:
    """What the pickle wanted, out of torch's long message: a name, or an instruction."""
    found = re.search(r"GLOBAL [\w.]+|Unsupported (?:class|operand) [\w.]+", str(error))
    return found.group(0) if found else first_line(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
