"""`convert-profile`: FlashRL's pickle is read where it can do no harm, and turned into a profile."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from profiles import read_profile
from safetensors.torch import load, save_file

from appliance.errors import RecipeError
from appliance.profile.command import reader_environment
from appliance.quant.profile import fold, load_smoothing
from flashrl_compat import unpickle
from flashrl_compat.profile_file import from_flashrl

ORDINARY = 1000  # a user that is not root
NORM, QUERY = "model.layers.0.input_layernorm.weight", "model.layers.0.self_attn.q_proj.weight"


class Payload:
    """Runs a command when it is unpickled by anyone who trusts it."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.marker}",)


def convert(file: Path, output: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "appliance", "convert-profile", str(file), "-o", str(output)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def profile_pt(ratio: torch.Tensor, output_scale: torch.Tensor) -> dict:
    """As `flashrl profile` saves it: products of parameters, numbers and types."""
    grown = torch.nn.Parameter(ratio) * 1.0
    return {
        NORM: {"input_scale": grown, "output_scale": 1.0, "type": torch.bfloat16},
        QUERY: {"input_scale": 1 / grown.view(1, -1), "output_scale": output_scale, "type": torch.int8},
        "model.layers.0.mlp.down_proj.weight": {
            "input_scale": torch.tensor([1.9, 0.6]),
            "output_scale": output_scale,
            "type": torch.int8,
        },
        "model.layers.0.self_attn.o_proj.weight": {
            "input_scale": 1.0,
            "output_scale": output_scale,
            "type": torch.int8,
        },
    }


@pytest.mark.slow
def test_flashrls_profile_becomes_one_of_ours(tmp_path: Path) -> None:
    ratio, output_scale = torch.tensor([0.25, 1.0, 1.9, 3.1]), torch.rand(6, 1) * 100
    made = profile_pt(ratio, output_scale)
    torch.save(made, tmp_path / "profile.pt")
    done = convert(tmp_path / "profile.pt", tmp_path / "ours")
    assert done.returncode == 0, done.stderr
    profile = read_profile(tmp_path / "ours")
    assert (profile.origin.kind, str(profile.scheme)) == ("flashrl", "int8")
    assert profile.input_scales[NORM].tolist() == ratio.tolist()
    assert profile.output_scales[QUERY].tolist() == output_scale.flatten().tolist()
    smoothing = load_smoothing(tmp_path / "ours")
    folded = fold(NORM, torch.ones(4), smoothing=smoothing)
    assert folded.tolist() == [0.25, 1.0, 2.0, 4.0]  # the nearest powers of two of the ratio
    up, down = (
        fold(f"model.layers.0.mlp.{name}_proj.weight", torch.ones(2, 2), smoothing=smoothing).tolist()
        for name in ("up", "down")
    )
    assert (up, down) == ([[0.5, 0.5], [2.0, 2.0]], [[2.0, 0.5], [2.0, 0.5]])  # of [1.9, 0.6]


def test_the_old_format_is_read_too(tmp_path: Path) -> None:
    made = profile_pt(torch.tensor([0.5, 2.0]), torch.rand(3, 1))
    torch.save(made, file := tmp_path / "profile.pt", _use_new_zipfile_serialization=False)
    with file.open("rb") as opened:
        assert load(unpickle.read(opened))[f"input_scale.{NORM}"].tolist() == [0.5, 2.0]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["zip", "legacy", "plain"])
def test_a_pickle_that_wants_to_run_is_refused_and_nothing_runs(tmp_path: Path, how: str) -> None:
    marker, file = tmp_path / "marker", tmp_path / "profile.pt"
    entry = {NORM: {"input_scale": Payload(marker), "output_scale": 1.0, "type": torch.bfloat16}}
    if how == "plain":
        file.write_bytes(pickle.dumps(entry))
    else:
        torch.save(entry, file, _use_new_zipfile_serialization=how == "zip")
    done = convert(file, tmp_path / "ours")
    assert done.returncode == 2
    assert f"error: {file}: refused: it asks for more than tensors and plain containers: " in done.stderr
    assert how == "plain" or "GLOBAL posix.system" in done.stderr
    assert "hint: nothing in the file was run" in done.stderr
    assert not marker.exists()
    assert not (tmp_path / "ours").exists()


def test_the_payload_of_these_tests_runs_where_a_pickle_is_trusted(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Payload(tmp_path / "marker")))
    assert (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (["model.layers.0.mlp.up_proj.weight"], "FP8 needs no profile"),
        (torch.ones(3), "a mapping of layers is expected, found Tensor"),
        ({"a": {"input_scale": 1.0}}, "'a': input_scale, output_scale, type are expected"),
        ({"a": {"input_scale": 2.0, "output_scale": 1.0, "type": torch.int8}}, "neither a tensor nor 1.0"),
        ({"a": {"input_scale": torch.tensor([torch.nan]), "output_scale": 1.0, "type": torch.int8}}, "not finite"),
    ],
)
def test_a_file_that_is_no_int8_profile_is_refused(tmp_path: Path, value: object, why: str) -> None:
    torch.save(value, file := tmp_path / "profile.pt")
    with file.open("rb") as opened, pytest.raises(unpickle.NotAProfile, match=why):
        unpickle.read(opened)


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04 half of an archive"])
def test_a_file_that_is_no_pickle_is_refused(tmp_path: Path, content: bytes) -> None:
    (file := tmp_path / "profile.pt").write_bytes(content)
    with file.open("rb") as opened, pytest.raises(unpickle.NotAProfile, match="torch cannot read it"):
        unpickle.read(opened)


def test_a_profile_without_a_norm_is_refused(tmp_path: Path) -> None:
    save_file({"input_scale.a": torch.ones(1)}, tmp_path / "scales.safetensors")
    with pytest.raises(RecipeError, match=r"profile\.pt: has no scale of a norm"):
        from_flashrl(tmp_path / "scales.safetensors", source="profile.pt")


TRIED = """
import os, socket, sys, torch
from pathlib import Path
from flashrl_compat import unpickle
room, own, user = sys.argv[1:]
unpickle._warm_up()
server = socket.create_server(("127.0.0.1", 0))
if os.geteuid() == 0 and int(user):
    os.setgroups([])
    os.setresgid(int(user), int(user), int(user))
    os.setresuid(int(user), int(user), int(user))
unpickle.give_up_rights(room=Path(room), file_bytes=1000)
def tried(action):
    try:
        action()
    except (OSError, MemoryError, RuntimeError):
        return "refused"
    return "done"
print(os.getcwd() == room, Path("/proc/self/status").read_text().count("NoNewPrivs:\\t1"))
print(tried(os.fork), tried(lambda: torch.empty(1 << 36, dtype=torch.int8).fill_(1)))
print(os.getuid() or "root", tried(lambda: Path(own).read_text()), tried(lambda: os.setuid(0)))
print(tried(lambda: socket.socket().connect(server.getsockname())))
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """One that every user can enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


def what_is_left(folder: Path, *, user: int) -> list[str]:
    """What the reader may still do once it has given up its rights, tried one after the other. user: who starts it."""
    room, secret = folder / "room", folder / "secret"
    room.mkdir()
    secret.write_text("mine")
    secret.chmod(0o600)
    if os.geteuid() == 0:
        os.chown(room, user, user)
    command = [sys.executable, "-c", TRIED, str(room), str(secret), str(user)]
    environment = {**reader_environment(room), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.splitlines()


def network_of(user: int, *namespaces: str) -> str:
    """Whether the kernel lets a user's process leave the network: most containers do not."""
    as_user = {"user": user, "group": user, "extra_groups": ()} if os.geteuid() == 0 else {}
    left = subprocess.run(["unshare", *namespaces, "true"], **as_user, capture_output=True, check=False)
    return "done" if left.returncode else "refused"


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_the_reader_that_root_starts_has_no_rights_left(open_folder: Path) -> None:
    lines = what_is_left(open_folder, user=0)
    assert lines == ["True 1", "refused refused", "65534 refused refused", network_of(0, "--net")]


@pytest.mark.slow
def test_the_reader_of_an_ordinary_user_starts_nothing_and_becomes_nobody_else(open_folder: Path) -> None:
    """It goes on as that user, without a network where user namespaces are allowed."""
    user = os.geteuid() or ORDINARY
    lines = what_is_left(open_folder, user=user)
    assert lines[:2] == ["True 1", "refused refused"]
    assert lines[2].endswith(" refused")  # to become root
    assert lines[3] == network_of(user, "--user", "--net")
